"""What a run needs, checked before anything is compiled."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial
from ml_collections import ConfigDict

import acco_jax
from acco_jax import data
from acco_jax.gradients import with_arrays
from acco_jax.models import gpt_neo
from acco_jax.training import config as configs
from acco_jax.training.checkpoints import Checkpoints
from acco_jax.training.counts import check_log
from acco_jax.training.reports import write_whole

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Everything a run needs, checked; nothing has been trained yet.

    Attributes:
      loss_fn: of what is trained: a function, or a Partial that carries a frozen model.
      init: what is trained, as it starts: jit-compatible.
      microbatches: of each worker in a half-round.
    """

    config: ConfigDict
    workdir: Path
    mesh: Mesh
    corpus: data.Corpus
    model: gpt_neo.GPTNeoConfig
    tx: acco_jax.Method | acco_jax.LocalMethod
    step: acco_jax.TrainStep
    schedule: optax.Schedule
    microbatches: int  # of each worker in a half-round, or in an inner step of one
    held: int  # microbatches that its batch holds; more where counts adapt
    checkpoints: Checkpoints
    loss_fn: Callable[..., Any]
    init: Callable[[], PyTree]

    @property
    def workers(self) -> int:
        return self.mesh.size

    @property
    def half_rounds(self) -> int:
        """Of the whole run: calls of the train step."""
        return self.tx.calls(self.config.steps)

    @property
    def rows(self) -> int:
        """Of a half-round's global batch."""
        microbatches = self.held * self.tx.steps_per_call
        return self.workers * microbatches * self.config.microbatch_size

    @property
    def tokens(self) -> int:
        """Targets that a half-round counts, but where counts adapt."""
        computed = self.config.counts or [self.microbatches] * self.workers
        rows = sum(computed) * self.tx.steps_per_call * self.config.microbatch_size
        return rows * self.config.length

    def steps_done(self, half_rounds: int) -> int | None:
        """Optimizer steps after so many half-rounds; None in the middle of one."""
        return self.tx.steps_done(half_rounds)


def data_mesh(devices: Sequence[jax.Device], domains: int | None) -> Mesh:
    """The devices along a data axis, or two where they form several domains.

    Args:
      devices: domain after domain.
      domains: how many of equal size share a fast network (hosts of GPUs, slices of
        TPUs); None: the slices that TPUs are in, else one.

    Returns:
      A mesh ("data",), or ("domain", "data").

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
    config: ConfigDict, workdir: Path, devices: Sequence[jax.Device] | None = None
) -> Experiment:
    """Build an experiment.

    Args:
      config: of `acco_jax.training.config.default_config`'s form.
      workdir: for checkpoints, metrics and tokenizer; a run in it is continued.
      devices: to train on; None: all.

    Raises:
      ValueError: in one line, what cannot work.
    """
    configs.validate(config)
    devices = jax.devices() if devices is None else list(devices)
    identity = json.loads(config.to_json_best_effort()) | {"workers": len(devices)}
    _check_workdir(workdir, identity)
    mesh = data_mesh(devices, config.domains)
    tx = configs.method(config, config.method, mesh, mesh.axis_names)
    tx.calls(config.steps)  # says now if they are not whole rounds
    per_step, share = config.microbatches_per_step, tx.half_rounds
    if per_step % share:
        raise ValueError(
            f"microbatches_per_step is {per_step}, which does not divide into the "
            f"{share} half-rounds of a step of {config.method}: use a multiple."
        )
    microbatches = per_step // share
    _check_counts(tuple(config.counts), mesh.size, microbatches)
    held = microbatches
    if config.microbatches != "fixed":
        held = config.most_microbatches
        if held < microbatches:
            raise ValueError(
                f"most_microbatches is {held}, less than the {microbatches} that "
                "microbatches_per_step gives a half-round: raise it."
            )
        if log := configs.replayed(config):
            check_log(Path(log), tx.calls(config.steps), mesh.size, held)
    corpus = data.load_corpus(config.data, workdir=workdir)
    if jax.process_count() > 1:
        _check_same_text(corpus.checksum)
    sizes = ("train_bytes", "train_documents", "validation_bytes", "checksum")
    identity["corpus"] = {name: getattr(corpus, name) for name in sizes}
    _check_workdir(workdir, identity)
    model = configs.model(config, corpus.tokenizer.vocab_size)
    loss_fn, init = configs.trained(
        config, model, lambda make: _start(config, make, mesh)
    )
    if config.base and not (config.lora.rank or config.lora.ranks):
        init = Partial(_as_it_is, _start(config, init, mesh))
    step = acco_jax.make_train_step(
        loss_fn,
        tx,
        mesh=mesh,
        axis_name=mesh.axis_names,
        microbatches=microbatches
        if config.microbatches == "fixed"
        else config.microbatches,
        bounds=(microbatches, held),
        form=config.form,
    )
    schedule = configs.learning_rate(config)
    checkpoints = Checkpoints(workdir / "checkpoints", config.keep_checkpoints)
    experiment = Experiment(
        config, workdir, mesh, corpus, model, tx, step, schedule, microbatches, held,
        checkpoints, loss_fn, init,
    )  # fmt: skip
    batches(experiment)  # says now if the corpus is too small
    try:
        experiment.tx.check(abstract_params(experiment))
    except Exception as error:
        raise ValueError(
            f"optimizer {config.optimizer.name} with the options given does not work "
            f"here: {error}"
        ) from error
    if jax.process_index() == 0:
        write_whole(workdir / "config.json", json.dumps(identity, indent=2))
    return experiment


def _start(config: ConfigDict, make: Callable[[], PyTree], mesh: Mesh) -> PyTree:
    """The parameters that a run starts from: those of `base`, or what `make` returns.

    Raises:
      ValueError: `base` holds no finished run of this model.
    """
    if config.base is None:
        return jax.jit(make, out_shardings=NamedSharding(mesh, P()))()
    folder = Path(config.base).expanduser()
    try:
        old = json.loads((folder / "config.json").read_text())
        fields = ConfigDict({k: old[k] for k in configs.default_config()})
        base = prepare(fields, folder, list(mesh.devices.flat))
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"base is {folder}, no run to go on from: {error}") from (
            error
        )
    if (latest := base.checkpoints.latest()) is None:
        raise ValueError(f"base is {folder}, which has no checkpoint: train it.")
    if jax.eval_shape(base.init) != jax.eval_shape(make):
        raise ValueError(
            f"base is {folder}, which holds another model: give the same model.*, "
            "length and tokenizer."
        )
    (params, state), _ = base.checkpoints.restore(latest, abstract(base))
    return acco_jax.committed_params(state, params)


def _as_it_is(params: PyTree) -> PyTree:
    return params


def _check_counts(counts: tuple[int, ...], workers: int, microbatches: int) -> None:
    fits = len(counts) == workers and set(counts) <= set(range(microbatches + 1))
    if counts and not fits:
        raise ValueError(
            f"counts is {counts}: give one number from 0 to {microbatches} for each of "
            f"the {workers} workers."
        )


def _check_workdir(workdir: Path, identity: dict[str, Any]) -> None:
    """Refuses the workdir of a run with another config, workers or corpus."""
    path = workdir / "config.json"
    if not path.exists():
        return
    try:
        old = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: use another workdir.") from error
    if field := configs.differing_field(old, old | identity):
        raise ValueError(
            f"workdir {workdir} belongs to a run with {field}: use another workdir, "
            "or the same config."
        )


def _check_same_text(checksum: int) -> None:
    """Refuses processes that read different text, each in the same line."""
    found = multihost_utils.process_allgather(np.uint32(checksum))
    if other := sorted(set(found.tolist()) - {int(found[0])}):
        process = found.tolist().index(other[0])
        raise ValueError(
            f"process {process} has other text than process 0 (data set and tokenizer "
            "make other tokens): give all of them the same files and versions."
        )


def batches(experiment: Experiment) -> Any:
    return data.train_iterator(
        experiment.corpus,
        length=experiment.config.length,
        batch_size=experiment.rows,
        seed=experiment.config.seed,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        workers=experiment.workers,
        skew=experiment.config.data.skew,
    )


def counts_of(experiment: Experiment) -> jax.Array | None:
    """How many microbatches each worker computes; None: all."""
    if not experiment.config.counts:
        return None
    counts = np.asarray(experiment.config.counts, np.int32)
    mine = np.split(counts, jax.process_count())[jax.process_index()]
    return to_devices(mine, experiment.mesh)


def to_devices(batch: PyTree, mesh: Mesh) -> PyTree:
    """This process's rows -> global arrays split over the data axes."""
    sharding = NamedSharding(mesh, P(mesh.axis_names))
    with jax.transfer_guard_host_to_device("allow"):  # here it is meant
        return jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(sharding, x), batch
        )


def initial(experiment: Experiment) -> tuple[PyTree, Any]:
    """Parameters as the train step takes them, and the sharded optimizer state."""
    replicated = NamedSharding(experiment.mesh, P())
    make = jax.jit(lambda init: init(), out_shardings=replicated)
    return acco_jax.start(experiment.tx, make(with_arrays(experiment.init)))


def abstract_params(experiment: Experiment) -> PyTree:
    """Shapes, dtypes and shardings of the parameters that are trained."""
    replicated = NamedSharding(experiment.mesh, P())
    return _placed(jax.eval_shape(experiment.init), replicated)


def abstract(experiment: Experiment) -> tuple[PyTree, Any]:
    """Shapes, dtypes and shardings of what `initial` returns."""
    params, tx = abstract_params(experiment), experiment.tx
    shapes = jax.eval_shape(functools.partial(acco_jax.start, tx), params)
    return _placed(shapes, acco_jax.start_shardings(tx, params))


def _placed(shapes: PyTree, shardings: PyTree) -> PyTree:
    if isinstance(shardings, NamedSharding):
        shardings = jax.tree.map(lambda _: shardings, shapes)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        shapes,
        shardings,
    )
