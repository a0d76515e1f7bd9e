"""Prepares a run: checks everything before anything is compiled."""

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial
from ml_collections import ConfigDict

import acco_jax
from acco_jax import data
from acco_jax.gradients import with_arrays
from acco_jax.models.base import Model
from acco_jax.runner import config as configs
from acco_jax.runner import models, optimizers
from acco_jax.runner.checkpoints import Checkpoints
from acco_jax.runner.counts import check_log, kept
from acco_jax.runner.files import is_number, read_object, write_whole
from acco_jax.runner.validation import validate
from acco_jax.runner.workdir import check_held, check_whole

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Everything a run needs, checked; nothing has been trained yet."""

    config: ConfigDict
    workdir: Path
    mesh: Mesh
    corpus: data.Corpus
    model: Model
    tx: acco_jax.Method
    step: acco_jax.TrainStep
    schedule: optax.Schedule
    microbatches: int  # of each worker in a half-round, or in an inner step of one
    capacity: int  # microbatches that a batch has room for; more where counts adapt
    identity: dict[str, Any]  # what makes it another run if it differs
    repairs: bool  # whether what killed processes left in the workdir is tidied up
    loss_fn: Callable[..., Any]  # a function, or a Partial that carries a frozen model
    init: Callable[[], PyTree]  # makes what is trained; jit-compatible
    began: float  # when its process or its preparation began, in seconds since 1970

    @functools.cached_property
    def checkpoints(self) -> Checkpoints:
        """Opened when first asked for: a refused run leaves no folder behind."""
        folder, keep = self.checkpoint_folder, self.config.keep_checkpoints
        fence = functools.partial(check_held, self.workdir)
        return Checkpoints(folder, keep, repair=self.repairs, fence=fence)

    @property
    def checkpoint_folder(self) -> epath.Path:
        """Where the checkpoints are: in the workdir, or where the config says."""
        if folder := self.config.checkpoints:
            return epath.Path(folder).expanduser()
        return epath.Path(self.workdir) / "checkpoints"

    @property
    def workers(self) -> int:
        return self.mesh.size

    @property
    def half_rounds(self) -> int:
        """Calls of the train step in the whole run."""
        return self.tx.calls(self.config.steps)

    @property
    def rows(self) -> int:
        """Rows of a half-round's global batch."""
        microbatches = self.workers * self.capacity * self.tx.steps_per_call
        return microbatches * self.config.microbatch_size

    @property
    def tokens(self) -> int:
        """Targets of a half-round where counts do not adapt, of full rows."""
        computed = self.config.counts or [self.microbatches] * self.workers
        rows = sum(computed) * self.tx.steps_per_call * self.config.microbatch_size
        return rows * self.config.length


def data_mesh(devices: Sequence[jax.Device], domains: int | None) -> Mesh:
    """Returns the devices along a data axis, or two where they form several domains.

    Args:
      devices: domain after domain.
      domains: how many of equal size share a fast network (hosts of GPUs, slices of
        TPUs); None: the slices that TPUs are in, else one.

    Raises:
      ValueError: the devices do not divide into so many, or a domain spans slices.
    """
    slices = [getattr(d, "slice_index", 0) for d in devices]
    domains = len(set(slices)) if domains is None else domains
    if domains < 1 or len(devices) % domains:
        raise ValueError(
            f"domains is {domains}, but there are {len(devices)} devices: give a "
            "number that divides them."
        )
    size = len(devices) // domains
    starts = range(0, len(devices), size)
    if domains > 1 and any(len(set(slices[i : i + size])) > 1 for i in starts):
        raise ValueError(
            f"domains is {domains}, but the devices are in {len(set(slices))} slices: "
            "give that number, or a multiple."
        )
    auto = (AxisType.Auto,)
    rows = [
        jax.make_mesh((size,), ("data",), auto, devices=devices[i : i + size]).devices
        for i in starts
    ]
    if domains == 1:
        return Mesh(rows[0], ("data",), auto)
    return Mesh(np.stack(rows), ("domain", "data"), 2 * auto)


def prepare(
    config: ConfigDict,
    workdir: Path,
    devices: Sequence[jax.Device] | None = None,
    *,
    repair: bool = True,
    began: float | None = None,
) -> Experiment:
    """Builds an experiment.

    Args:
      config: of `acco_jax.runner.config.default_config`'s form.
      workdir: for checkpoints, metrics and tokenizer; a run in it is continued.
      devices: to train on; None: all.
      repair: False to leave the workdir as it is, for it may be another run's.
      began: when the process started, in seconds since 1970; None: now.

    Raises:
      ValueError: in one line, what cannot work.
    """
    began = time.time() if began is None else began
    validate(config)
    devices = jax.devices() if devices is None else list(devices)
    identity = json.loads(config.to_json_best_effort()) | {"workers": len(devices)}
    _check_workdir(workdir, identity)
    mesh = data_mesh(devices, config.domains)
    # Says what is wrong before there is a corpus; which gives the length and the model.
    tx = optimizers.method(config, config.method, mesh, mesh.axis_names)
    half_rounds = tx.calls(config.steps)
    microbatches = configs.half_round_microbatches(config, tx.half_rounds, mesh.size)
    counted = _adaptive(config, microbatches, half_rounds, mesh.size)
    capacity = counted.most if counted else microbatches
    corpus = data.load_corpus(config.data, workdir=workdir)
    if jax.process_count() > 1:
        _check_same_text(corpus.checksum)
    sizes = ("train_bytes", "train_documents", "validation_bytes", "checksum")
    identity["corpus"] = {name: getattr(corpus, name) for name in sizes}
    _check_workdir(workdir, identity)
    rows_per_step = sum(config.counts or [microbatches] * mesh.size)
    rows_per_step *= tx.half_rounds * config.microbatch_size
    lengths = tuple(config.data.lengths)
    rows_per_epoch = data.rows_per_epoch(corpus, config.length, lengths)
    config = configs.with_steps(
        config, rows_per_step, rows_per_epoch, tx.steps_per_call
    )
    model = models.model(config, corpus.tokenizer.vocab_size)
    models.warn_of_another_size(config, model, corpus.tokenizer.vocab_size)
    tx = optimizers.method(config, config.method, mesh, mesh.axis_names, model.stacked)
    loss_fn, init = models.trained(
        config, model, lambda make: _start(config, make, mesh)
    )
    if config.base and not (config.lora.rank or config.lora.ranks):
        init = Partial(_identity, _start(config, init, mesh))
    step = acco_jax.make_train_step(
        loss_fn, tx, microbatches=counted or microbatches, form=config.form,
        drop_nonfinite=optimizers.drops_nonfinite(config, tx),
    )  # fmt: skip
    schedule = optimizers.learning_rate(config)
    experiment = Experiment(
        config, workdir, mesh, corpus, model, tx, step, schedule, microbatches,
        capacity, identity, repair, loss_fn, init, began,
    )  # fmt: skip
    first = batches(experiment)  # says now if the corpus is too small
    held_out_batches(experiment, None)
    try:
        tx.check(_replicated(jax.eval_shape(init), mesh))
    except Exception as error:
        raise ValueError(
            f"optimizer {config.optimizer.name} with the options given does not work "
            f"here: {error}"
        ) from error
    check_whole(workdir, experiment.checkpoint_folder)
    _check_checkpoint(experiment, first)
    if repair and jax.process_index() == 0:
        write_whole(workdir / "config.json", json.dumps(identity, indent=2) + "\n")
    return experiment


def _check_checkpoint(experiment: Experiment, first: data.Batches) -> None:
    """Refuses a checkpoint of another run, and one whose host data are not a run's."""
    checkpoints, identity = experiment.checkpoints, experiment.identity
    if (latest := checkpoints.latest()) is None:
        return
    path = experiment.checkpoint_folder / str(latest)
    old = checkpoints.host(latest).get("identity")
    if not isinstance(old, dict):
        raise ValueError(
            f"{path} does not say which run it is of: use another workdir."
        )
    if field := configs.differing_field(old, old | identity):
        raise ValueError(
            f"{path} is of a run with {field}: use another workdir, or the same config."
        )
    if experiment.config.microbatches != "fixed":
        kept(experiment.workdir, latest)
    if not _continues(checkpoints.host(latest), first, experiment.workers):
        raise ValueError(
            f"{path / 'host'} is damaged, or of another version: restore it, or use "
            "another workdir."
        )


def _continues(host: dict[str, Any], first: data.Batches, workers: int) -> bool:
    """Whether a run of these batches can go on from the host data of a checkpoint."""
    loss = host.get("held_out_loss", "")
    dropped = host.get("dropped") or {
        "in_a_row": [0] * workers,
        "nobody": 0,
        "since": 0,
    }
    try:
        first.set_state(host["batches"])
        numbers = [dropped["nobody"], dropped["since"], *dropped["in_a_row"]]
    except (KeyError, TypeError, ValueError):
        return False
    numbers += [host.get("seconds"), 0 if loss is None else loss]
    return all(map(is_number, numbers)) and len(numbers) == workers + 4


def _adaptive(
    config: ConfigDict, microbatches: int, half_rounds: int, workers: int
) -> acco_jax.Adaptive | acco_jax.Replay | None:
    """Returns how a half-round's microbatches are counted, None where they are fixed.

    Raises:
      ValueError: the bounds do not fit, or a log cannot be repeated by this run.
    """
    if config.microbatches == "fixed":
        return None
    capacity = config.most_microbatches
    if capacity < microbatches:
        raise ValueError(
            f"most_microbatches is {capacity}, less than the {microbatches} that "
            "microbatches_per_step gives a half-round: raise it."
        )
    if log := configs.replayed(config):
        check_log(Path(log), half_rounds, workers, capacity)
        return acco_jax.Replay(log, capacity)
    return acco_jax.Adaptive(microbatches, capacity)


def _start(config: ConfigDict, make: Callable[[], PyTree], mesh: Mesh) -> PyTree:
    """Returns the parameters of the finished run `base`, or without one `make`'s.

    Raises:
      ValueError: `base` holds no finished run of this model.
    """
    if config.base is None:
        return jax.jit(make, out_shardings=NamedSharding(mesh, P()))()
    folder = Path(config.base).expanduser()
    try:
        old = read_object(folder / "config.json")
        fields = ConfigDict({k: old[k] for k in configs.default_config()})
        base = prepare(fields, folder, list(mesh.devices.flat), repair=False)
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"base is {folder}, which holds no run: {error}") from error
    if (latest := base.checkpoints.latest()) is None:
        raise ValueError(f"base is {folder}, which has no checkpoint: train it.")
    if problem := base.checkpoints.problem(latest):
        raise ValueError(
            f"base is {folder}, whose checkpoint {latest} is damaged ({problem})."
        )
    if jax.eval_shape(base.init) != jax.eval_shape(make):
        raise ValueError(
            f"base is {folder}, which holds another model: set the same model.*, "
            "length and tokenizer."
        )
    (params, state), _ = base.checkpoints.restore(latest, abstract(base))
    return acco_jax.committed_params(state, params)


def _identity(params: PyTree) -> PyTree:
    return params


def _check_workdir(workdir: Path, identity: dict[str, Any]) -> None:
    """Refuses the workdir of a run with another config, workers or corpus."""
    path = workdir / "config.json"
    if not path.exists():
        return
    old = read_object(path)
    if field := configs.differing_field(old, old | identity):
        raise ValueError(
            f"workdir {workdir} belongs to a run with {field}: use another workdir, "
            "or the same config."
        )


def _check_same_text(checksum: int) -> None:
    """Refuses processes that read different text, each in the same line."""
    checksums = multihost_utils.process_allgather(np.uint32(checksum)).tolist()
    other = next((i for i, c in enumerate(checksums) if c != checksums[0]), None)
    if other is not None:
        raise ValueError(
            f"process {other} has other text than process 0 (data set and tokenizer "
            "make other tokens): give all of them the same files and versions."
        )


def batches(experiment: Experiment) -> data.Batches:
    """Returns this process's part of the training batches, from the first one on."""
    e, c = experiment, experiment.config.data
    adaptive = e.config.microbatches != "fixed"
    return data.train_iterator(
        e.corpus,
        length=e.config.length,
        batch_size=e.rows,
        seed=e.config.seed,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        workers=e.workers,
        steps=e.tx.steps_per_call,
        microbatches=e.capacity,
        counts=() if adaptive else tuple(e.config.counts) or None,
        skew=c.skew,
        lengths=c.lengths,
        document_mask=c.document_mask,
    )


def held_out_batches(
    experiment: Experiment, limit: int | None
) -> Iterator[dict[str, np.ndarray]]:
    """Returns this process's part of `limit` validation batches, or of all."""
    e, c = experiment, experiment.config.data
    return data.validation_batches(
        e.corpus,
        length=e.config.length,
        batch_size=e.workers * e.config.microbatch_size,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        limit=limit,
        lengths=c.lengths,
        document_mask=c.document_mask,
    )


def counts_of(experiment: Experiment) -> jax.Array | None:
    """Returns how many microbatches each worker computes; None: all."""
    if not experiment.config.counts:
        return None
    counts = np.asarray(experiment.config.counts, np.int32)
    local = np.split(counts, jax.process_count())[jax.process_index()]
    return to_devices(local, experiment.mesh)


def to_devices(batch: PyTree, mesh: Mesh) -> PyTree:
    """Makes global arrays, split over the data axes, of this process's rows."""
    sharding = NamedSharding(mesh, P(mesh.axis_names))
    with jax.transfer_guard_host_to_device("allow"):  # here it is meant
        return jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(sharding, x), batch
        )


def initial(experiment: Experiment) -> tuple[PyTree, Any]:
    """Makes parameters as the train step takes them, and sharded optimizer state."""
    replicated = NamedSharding(experiment.mesh, P())
    make = jax.jit(lambda init: init(), out_shardings=replicated)
    return acco_jax.start(experiment.tx, make(with_arrays(experiment.init)))


def abstract_params(experiment: Experiment) -> PyTree:
    """Returns shapes, dtypes and shardings of the parameters that are trained."""
    return _replicated(jax.eval_shape(experiment.init), experiment.mesh)


def _replicated(shapes: PyTree, mesh: Mesh) -> PyTree:
    sharding = NamedSharding(mesh, P())
    return jax.tree.map(lambda x: x.update(sharding=sharding), shapes)


def abstract(experiment: Experiment) -> tuple[PyTree, Any]:
    """Returns shapes, dtypes and shardings of what `initial` returns."""
    params, tx = abstract_params(experiment), experiment.tx
    return jax.tree.map(
        lambda x, sharding: x.update(sharding=sharding),
        jax.eval_shape(functools.partial(acco_jax.start, tx), params),
        acco_jax.start_shardings(tx, params),
    )
