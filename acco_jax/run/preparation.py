"""Preparation of a run: all checks, before anything is compiled."""

import collections
import dataclasses
import functools
import json
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from etils import epath
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial
from ml_collections import ConfigDict

import acco_jax
from acco_jax import data
from acco_jax.command import heartbeat, stages
from acco_jax.command.files import is_number, read_object, write_whole
from acco_jax.core.gradients import with_arrays
from acco_jax.core.groups import data_axes, members
from acco_jax.methods.method import Method
from acco_jax.methods.reshard import moved
from acco_jax.models.model import Model
from acco_jax.run.build import meshes, models, optimizers
from acco_jax.run.build.validation import validate
from acco_jax.run.config import fields as configs
from acco_jax.run.config.identity import differing_field
from acco_jax.run.observe import goodput, hooks, metrics
from acco_jax.run.state import counts, lengths, processes, worlds
from acco_jax.run.state.checkpoints import Checkpoints
from acco_jax.run.state.workdir import check_held, own
from acco_jax.run.trained import trained_runs  # fmt: skip
from acco_jax.run.trained.trained_runs import checkpoint_folder
from acco_jax.run.weights import adapters, pretrained
from acco_jax.step.adaptive import AdaptiveStep
from acco_jax.step.balanced import BalancedStep

PyTree = Any


class Amounts(NamedTuple):
    """The amounts that the calls of a run compute."""

    microbatches: int  # of each worker in a half-round, or in an inner step of one
    varying: counts.Varying | None  # how microbatches are counted, where they differ
    halves: list[acco_jax.Halves]  # that acco's step may have; [] for other steps
    rows_per_step: int  # of all workers together
    method: Method  # for no model yet

    @property
    def capacity(self) -> int:
        """Microbatches that a batch has room for."""
        return self.varying.most if self.varying else self.microbatches


class Trainable(NamedTuple):
    """A model, and the parameters that are trained: its own or adapters."""

    model: Model
    loss_fn: Callable[..., Any]  # a function, or a Partial that carries a frozen model
    init: Callable[[], PyTree]  # makes the trained parameters; jit-compatible
    start: Callable[[], PyTree]  # makes the first parameters, on their devices
    specs: PyTree  # how a group of devices splits the parameters


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """Checked parts of a run, before any training."""

    config: ConfigDict
    workdir: Path
    mesh: Mesh
    corpus: data.Corpus
    model: Model
    tx: acco_jax.Method
    step: acco_jax.TrainStep
    schedule: optax.Schedule
    microbatches: int  # as of `Amounts`
    varying: counts.Varying | None
    halves: list[acco_jax.Halves]
    capacity: int
    identity: dict[str, Any]  # fields that distinguish it from other runs
    loss_fn: Callable[..., Any]  # as of `Trainable`
    init: Callable[[], PyTree]
    start: Callable[[], PyTree]
    specs: PyTree
    began: float  # when its process or its preparation began, in seconds since 1970

    @functools.cached_property
    def checkpoints(self) -> Checkpoints:
        """Checkpoints, opened on first access: a rejected run leaves no folder."""
        folder, keep = self.checkpoint_folder, self.config.keep_checkpoints
        fence = functools.partial(check_held, *own(self.workdir, folder))
        return Checkpoints(folder, keep, fence=fence)

    @property
    def checkpoint_folder(self) -> epath.Path:
        """Folder of the checkpoints: in the workdir, or the config's."""
        return checkpoint_folder(self.config, self.workdir)

    @property
    def workers(self) -> int:
        return len(members(self.mesh))

    @property
    def own_workers(self) -> tuple[int, ...]:
        """Workers of which this process has devices, in the order of the mesh.

        Processes that share a worker, a group of their devices, have the same ones.
        """
        return own_workers(self.mesh)[jax.process_index()]

    @property
    def world(self) -> worlds.World:
        """The devices that compute here, as the run's record has them."""
        counts, varying = self.config.counts, self.varying
        counts = counts or [self.microbatches] * self.workers
        if isinstance(varying, acco_jax.Halves) and varying.first == varying.second:
            counts = varying.first  # divided among other workers than at first
        elif varying:
            counts = ()
        first = self.config.first_half if self.halves else 0
        return worlds.World.of(self.mesh, counts, self.step.form, first)

    @property
    def logged(self) -> bool:
        """Whether counts.jsonl has the microbatches of each call."""
        return self.varying is not None or self.tx.calls_per_step == 2

    @property
    def total_calls(self) -> int:
        """Calls of the train step in the whole run."""
        return self.tx.calls(self.config.steps)

    @property
    def rows(self) -> int:
        """Rows of a half-round's global batch."""
        microbatches = self.workers * self.capacity * self.tx.steps_per_call
        return microbatches * self.config.microbatch_size

    @property
    def tokens(self) -> int:
        """Targets of a half-round of full rows, where their number is constant."""
        same = isinstance(self.varying, acco_jax.Balanced | acco_jax.Halves)
        kept = same and self.config.batch == "kept"
        workers = self.identity["workers"] if kept else self.workers
        computed = self.config.counts or [self.microbatches] * workers
        rows = sum(computed) * self.tx.steps_per_call * self.config.microbatch_size
        return rows * self.config.length


def prepare(
    config: ConfigDict,
    workdir: Path,
    devices: Sequence[jax.Device] | None = None,
    *,
    extend: bool | None = None,
) -> Experiment:
    """Check a config, build its experiment, and record it in the workdir.

    Args:
      config: of `acco_jax.run.config.fields.default_config`'s form.
      workdir: for checkpoints, metrics and tokenizer; a run in it is continued.
      devices: to train on; None: all.
      extend: whether a run in the workdir may become longer. None: no; False: if its
        learning rate so far would be the same; True: yes.

    Raises:
      ValueError: if something cannot work.
    """
    check(config)
    experiment = build(config, workdir, devices, extend=extend)
    record(experiment)
    return experiment


def check(config: ConfigDict) -> None:
    """Raise a ValueError for a config that cannot be trained.

    Raises:
      ValueError: with the field, its value and the remedy.
    """
    validate(config)
    hooks.check(config)


def build(
    config: ConfigDict,
    workdir: Path,
    devices: Sequence[jax.Device] | None = None,
    *,
    began: float | None = None,
    extend: bool | None = None,
    replay: Path | None = None,
    again: bool = False,
) -> Experiment:
    """Build the experiment of a config that `check` accepts.

    Args:
      config: of the experiment.
      workdir: as for `prepare`; of config.json only `workers` is written.
      devices: to train on; None: all.
      began: when the process started, in seconds since 1970; None: now.
      extend: as for `prepare`.
      replay: workdir of a run that this one repeats.
      again: whether an earlier attempt of the same command has checked the optimizer.

    Raises:
      ValueError: if the machine, the workdir or the data do not fit the config.
    """
    began = time.time() if began is None else began
    config, old = lengths.recorded(config, workdir)
    grows: Sequence[str] = () if extend is None else lengths.FIELDS
    devices = jax.devices() if devices is None else list(devices)
    mesh = meshes.data_mesh(devices, config.domains, config.mesh)
    workers = len(members(mesh))
    first = _first_workers(config, workdir, workers, again, replay)
    identity = _identity_of(config, first)
    _check_workdir(workdir, identity, grows)
    stale = not again and old.get("workers", first) != first
    if stale and heartbeat.supervised() and jax.process_index() == 0:
        # what a later attempt continues, not the start before this command
        _write_identity(workdir, old | {"workers": first})
    config = adapters.applied(config, identity.get("adapters", {}))
    own_workers(mesh)  # or a ValueError
    config = _with_recorded_half(config, replay or workdir, workdir, mesh)
    config, amounts = _amounts(config, mesh, first)
    corpus = _corpus(config, workdir, identity, grows)
    stages.ended("data")
    config = _with_steps(config, workers, amounts, corpus)
    if extend is not None:
        done = max(_saved_calls(checkpoint_folder(config, workdir)), default=0)
        config = lengths.lengthened(
            config, identity, old, amounts.method, done, extend=extend
        )
        identity["extended"] = [list(pair) for pair in config.extended]
    trainable = _trainable(config, mesh, corpus, begun=bool(old))
    tx, step = _step(config, mesh, trainable, amounts)
    experiment = Experiment(
        config=config, workdir=workdir, mesh=mesh, corpus=corpus, tx=tx, step=step,
        schedule=optimizers.checked_rate(config), microbatches=amounts.microbatches,
        varying=amounts.varying, halves=amounts.halves, capacity=amounts.capacity,
        identity=identity, began=began, **trainable._asdict(),
    )  # fmt: skip
    if not again:
        _check_optimizer(experiment)
    _check_experiment(experiment, lengths.FIELDS if old else ())
    return experiment


def _step(
    config: ConfigDict, mesh: Mesh, trainable: Trainable, amounts: Amounts
) -> tuple[Method, acco_jax.TrainStep]:
    """Return the method for a model, and its train step."""
    tx = optimizers.method(
        config, config.method, mesh, data_axes(mesh), trainable.model.stacked,
        trainable.specs,
    )  # fmt: skip
    return tx, acco_jax.make_train_step(
        trainable.loss_fn, tx, microbatches=amounts.varying or amounts.microbatches,
        form=config.form, drop_nonfinite=optimizers.drops_nonfinite(config, tx),
    )  # fmt: skip


def with_first_half(experiment: Experiment, number: int) -> Experiment:
    """Return the experiment with one of its `halves`, the first one or another."""
    e, chosen = experiment, experiment.halves[number]
    per_step = e.config.microbatches_per_step
    first = configs.first_halves(e.config, e.tx.calls_per_step)[number]
    config = configs.with_first_half(e.config, first)
    if number == 0:  # as it was built
        return _replaced(e, config=config, halves=[chosen])
    kept = e.workers == e.identity["workers"] or config.batch == "per_worker"
    fixed = kept and 2 * first == per_step
    amounts = Amounts(e.microbatches, None if fixed else chosen, [chosen], 0, e.tx)
    trainable = Trainable(e.model, e.loss_fn, e.init, e.start, e.specs)
    tx, step = _step(config, e.mesh, trainable, amounts)
    return _replaced(
        e, config=config, tx=tx, step=step, varying=amounts.varying, halves=[chosen],
        capacity=amounts.capacity,
    )  # fmt: skip


def _replaced(experiment: Experiment, **fields: Any) -> Experiment:
    """Return the experiment with other fields, and the same open checkpoints."""
    new = dataclasses.replace(experiment, **fields)
    new.__dict__["checkpoints"] = experiment.checkpoints
    return new


def _with_recorded_half(
    config: ConfigDict, record: Path, workdir: Path, mesh: Mesh
) -> ConfigDict:
    """Return the config with the first half that a record has for these devices."""
    if config.first_half != "auto":
        return config
    done = max(_saved_calls(checkpoint_folder(config, workdir)), default=0)
    same = [
        world.first_half
        for call, world in worlds.recorded(record)
        if (call <= done or record == workdir) and world.axes == dict(mesh.shape)
    ]
    found = next((x for x in reversed(same) if x), 0)
    return configs.with_first_half(config, found) if found else config


def record(experiment: Experiment) -> None:
    """Write config.json, by which the workdir is this run's."""
    if jax.process_index() > 0:
        return
    path, steps = experiment.workdir / "config.json", experiment.config.steps
    former = read_object(path).get("total_steps", steps) if path.exists() else steps
    if former != steps:
        (experiment.workdir / "summary.json").unlink(missing_ok=True)  # of that end
    known = {"parameters": experiment.model.parameters(), "total_steps": steps}
    _write_identity(experiment.workdir, experiment.identity | known)


def _write_identity(workdir: Path, identity: dict[str, Any]) -> None:
    write_whole(workdir / "config.json", json.dumps(identity, indent=2) + "\n")


def _identity_of(config: ConfigDict, first: int) -> dict[str, Any]:
    """Return what distinguishes a run that began with `first` workers."""
    identity = json.loads(config.to_json_best_effort()) | {"workers": first}
    if config.init_from is not None:
        identity["pretrained"] = pretrained.identity(
            config.init_from, config.ignore_weights
        )
    if config.base and (config.lora.rank or config.lora.ranks):
        identity["frozen"] = trained_runs.base_identity(config)
    if config.lora.init_from is not None:
        identity["adapters"] = adapters.identity(config)
    return identity | {"generation": pretrained.kept_generation(config)}


def _amounts(config: ConfigDict, mesh: Mesh, first: int) -> tuple[ConfigDict, Amounts]:
    """Return what calls compute, and the config with the counts of today's workers.

    Raises:
      ValueError: if the method rejects its options, or the numbers do not fit.
    """
    # a method without a model: what is wrong with it raises before there is a corpus
    tx = optimizers.method(config, config.method, mesh, data_axes(mesh))
    workers = len(members(mesh))
    total_calls = tx.calls(config.steps)
    microbatches = configs.call_microbatches(config, tx.calls_per_step, first)
    rows_per_step = sum(config.counts or [microbatches] * first)
    rows_per_step *= tx.calls_per_step * config.microbatch_size
    halves = counts.halves(config, tx.calls_per_step, first, workers)
    deals = workers != first and config.batch == "kept"
    divided = halves[0] if halves and (optimizers.uneven(config) or deals) else None
    if workers != first:
        varies = config.microbatches != "fixed" or divided is not None
        config, microbatches = _dealt(config, microbatches, first, workers, varies)
    varying = divided or counts.counted(
        config, microbatches, total_calls, first, workers
    )
    return config, Amounts(microbatches, varying, halves, rows_per_step, tx)


def _corpus(
    config: ConfigDict, workdir: Path, identity: dict[str, Any], grows: Sequence[str]
) -> data.Corpus:
    """Return the corpus, which joins the identity.

    Raises:
      ValueError: if it is not that of the run in the workdir, or of other processes.
    """
    fields = pretrained.data_fields(config)
    corpus = data.load_corpus(fields, workdir=workdir, base=config.base)
    pretrained.check_tokens(config, corpus.tokenizer.end_of_text)
    if jax.process_count() > 1:
        _check_same_text(corpus.checksum)
        _check_same_weights(identity)
    identity["corpus"] = {
        "documents": corpus.documents,
        "tokenizer": corpus.tokenizer.fingerprint,
        "tokens": corpus.checksum,
    }
    _check_workdir(workdir, identity, grows)
    return corpus


def _with_steps(
    config: ConfigDict, workers: int, amounts: Amounts, corpus: data.Corpus
) -> ConfigDict:
    """Return the config with the run's number of steps.

    Raises:
      ValueError: if the corpus has less than a batch, or there are too many steps.
    """
    row_lengths = tuple(config.data.lengths)
    rows_per_epoch = data.rows_per_epoch(corpus, config.length, row_lengths)
    most = (
        workers
        * amounts.capacity
        * amounts.method.steps_per_call
        * config.microbatch_size
    )
    data.check_rows(corpus, rows_per_epoch, config.length, most, row_lengths)
    return configs.with_steps(
        config, amounts.rows_per_step, rows_per_epoch, amounts.method.steps_per_call
    )


def _trainable(
    config: ConfigDict, mesh: Mesh, corpus: data.Corpus, *, begun: bool
) -> Trainable:
    """Return the model for a corpus, and how its parameters begin, or have begun.

    Raises:
      ValueError: if the model does not fit the tokenizer, or its weights are missing.
    """
    trained_runs.check_tokens(config, corpus)
    model = models.model(config, corpus.tokenizer.vocab_size)
    models.warn_of_another_size(config, model, corpus.tokenizer.vocab_size)
    known = None if begun else corpus.tokenizer
    loss_fn, init = models.trained(
        config, model, lambda make: trained_runs.start(config, make, model, mesh, known)
    )
    specs = models.specs(model, jax.eval_shape(init), mesh)
    adapts = config.lora.rank or config.lora.ranks
    if config.base and not adapts:
        base = trained_runs.start(config, init, model, mesh, known)
        init = Partial(_identity, base)
    start = functools.partial(
        _made, with_arrays(init), trained_runs.shardings(specs, mesh)
    )
    if config.init_from and not adapts:  # read when needed, and not held
        start = functools.partial(trained_runs.start, config, init, model, mesh)
    if config.lora.init_from:
        architecture = models.transformer_config(config, corpus.tokenizer.vocab_size)
        homes = trained_runs.shardings(specs, mesh)
        start = functools.partial(adapters.load, config, architecture, homes)
    return Trainable(model, loss_fn, init, start, specs)


def _check_optimizer(experiment: Experiment) -> None:
    """Raise a ValueError for an optimizer that the method cannot run."""
    try:
        experiment.tx.check(abstract_params(experiment))
    except Exception as error:
        raise ValueError(
            f"optimizer {experiment.config.optimizer.name} with the options given does "
            f"not work here: {error}"
        ) from error


def _check_experiment(experiment: Experiment, but: Sequence[str]) -> None:
    """Raise a ValueError for documents or checkpoints that do not fit."""
    first = batches(experiment)  # raises if a worker's documents are too few
    held_out_batches(experiment, None)
    check_whole(experiment.workdir, experiment.checkpoint_folder)
    _check_checkpoint(experiment, first, but)


def _first_workers(
    config: ConfigDict, workdir: Path, workers: int, again: bool, replay: Path | None
) -> int:
    """Return how many workers a run began with; `workers` if none has begun.

    Their microbatches are the batch, whichever workers compute them later. A run has
    begun once it has saved, or if it is started `again` by the same command. Another
    one begins as the one that it repeats.
    """
    folder, path = checkpoint_folder(config, workdir), workdir / "config.json"
    begun = path.exists() and (again or bool(_saved_calls(folder)))
    if replay and not begun:
        path = replay / "config.json"
    first = read_object(path).get("workers") if begun or replay else workers
    return first if type(first) is int and 0 < first <= worlds.MOST else workers


def _saved_calls(checkpoints: epath.Path) -> list[int]:
    """Return the calls at which checkpoints were saved in a folder, sound or not."""
    return [int(path.name) for path in checkpoints.glob("*") if path.name.isdigit()]


def _dealt(
    config: ConfigDict, microbatches: int, first: int, workers: int, varies: bool
) -> tuple[ConfigDict, int]:
    """Return config and capacity (microbatches) for another number of workers.

    Where counts vary from call to call, each call divides its own.

    Raises:
      ValueError: if they cannot go on with these data, or these counts.
    """
    if config.data.skew:
        raise ValueError(
            f"data.skew is {config.data.skew}, so each of the {first} workers has rows "
            f"of its own, but now there are {workers}: start as many."
        )
    if varies:
        return config, microbatches
    counts = list(config.counts) or [microbatches] * first
    if config.batch == "per_worker":
        if len(set(counts)) > 1:
            raise ValueError(
                f"batch is 'per_worker', but counts is {tuple(counts)}, of {first} "
                f"workers, and now there are {workers}: set batch='kept'."
            )
        return config, microbatches
    counts = worlds.dealt(sum(counts), workers)
    config = config.copy_and_resolve_references()
    config.counts = tuple(counts) if len(set(counts)) > 1 else ()
    return config, max(counts)


def own_workers(mesh: Mesh) -> dict[int, tuple[int, ...]]:
    """Return the workers of which each process has devices, by the process's index.

    Some meshes follow the wires of a TPU slice: a process's workers are not neighbours.

    Raises:
      ValueError: processes share some of their workers, and not all.
    """
    own = collections.defaultdict[int, list[int]](list)
    for worker, group in enumerate(members(mesh)):
        for process in {device.process_index for device in group}:
            own[process].append(worker)
    parts = {tuple(workers) for workers in own.values()}
    sizes = {len(part) for part in parts}
    if len(sizes) > 1 or sum(map(len, parts)) > len(members(mesh)):
        raise ValueError(
            f"there are {len(members(mesh))} workers for {len(own)} processes: use "
            "sizes of mesh with which either number divides the other, and as many "
            "devices in each process."
        )
    return {process: tuple(workers) for process, workers in own.items()}


def _check_checkpoint(
    experiment: Experiment, first: data.Batches, but: Sequence[str]
) -> None:
    """Raise a ValueError for a checkpoint of another run or with invalid host data.

    The fields `but` may differ.
    """
    checkpoints, identity = experiment.checkpoints, experiment.identity
    if (latest := checkpoints.latest()) is None:
        return
    path = experiment.checkpoint_folder / str(latest)
    old = checkpoints.host(latest).get("identity")
    if not isinstance(old, dict):
        raise ValueError(
            f"{path} does not say which run it is of: use another workdir."
        )
    old |= {name: identity[name] for name in but}
    if field := differing_field(old, old | identity):
        raise ValueError(
            f"{path} is of a run with {field}: use another workdir, or the same config."
        )
    if experiment.logged:
        counts.kept(experiment.workdir, latest)
    if not _continues(checkpoints.host(latest), first):
        raise ValueError(
            f"{path / 'host'} is damaged, or of another version: restore it, or use "
            "another workdir."
        )


def _continues(host: dict[str, Any], first: data.Batches) -> bool:
    """Return whether a run of these batches can continue from such host data."""
    loss = host.get("held_out_loss", "")
    if not worlds.is_axes(axes := host.get("axes")):
        return False
    workers = worlds.workers_of(axes)
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


def repeating(experiment: Experiment, folder: Path) -> worlds.WorldsReplay:
    """Return the record that an experiment repeats; give its step the counts.

    Args:
      experiment: from `prepare`.
      folder: the workdir of the run to repeat.

    Raises:
      ValueError: if this experiment cannot go on with that record.
    """
    replay, done = worlds.WorldsReplay(folder), experiment.checkpoints.latest() or 0
    replay.check(experiment.identity, done, experiment.world)
    if isinstance(experiment.step, AdaptiveStep | BalancedStep):
        log, last = folder / counts.FILE, replay.end(done)
        experiment.step.repeat(acco_jax.Replay(log, experiment.capacity, done, last))
    return replay


def _made(init: Partial, shardings: PyTree) -> PyTree:
    return jax.jit(lambda init: init(), out_shardings=shardings)(init)


def _identity(params: PyTree) -> PyTree:
    return params


def _check_workdir(
    workdir: Path, identity: dict[str, Any], but: Sequence[str] = ()
) -> None:
    """Raise a ValueError if the workdir's run has another config, workers or corpus.

    The fields `but` may differ.
    """
    path = workdir / "config.json"
    if not path.exists():
        return
    old = read_object(path) | {name: identity[name] for name in but}
    field = differing_field(old, old | identity)
    if field.startswith("corpus.documents"):
        fields = identity["data"]
        raise ValueError(
            f"the documents of data.name={fields['name']!r}, data.path="
            f"{fields['path']!r} are not those of the run in workdir {workdir} "
            f"({field}): restore them, or use another workdir."
        )
    if field:
        raise ValueError(
            f"workdir {workdir} belongs to a run with {field}: use another workdir, "
            "or the same config."
        )


def _check_same_text(checksum: int) -> None:
    """Raise a ValueError, on every process, if processes read different text."""
    checksums = processes.gathered(np.uint32(checksum)).tolist()
    other = next((i for i, c in enumerate(checksums) if c != checksums[0]), None)
    if other is not None:
        raise ValueError(
            f"process {other} has other text than process 0 (data set and tokenizer "
            "make other tokens): give all of them the same files and versions."
        )


def _check_same_weights(identity: dict[str, Any]) -> None:
    """Raise a ValueError, on every process, if init_from's models differ."""
    said = json.dumps(identity.get("pretrained"), sort_keys=True)
    if len(set(processes.gathered(np.uint32(zlib.crc32(said.encode()))).tolist())) > 1:
        raise ValueError(
            f"init_from={identity['init_from']!r} is not the same model for all "
            "processes: give all of them the same files."
        )


def batches(experiment: Experiment) -> data.Batches:
    """Return this process's part of the training batches, from the first one on."""
    e, c = experiment, experiment.config.data
    return data.train_iterator(
        e.corpus,
        length=e.config.length,
        batch_size=e.rows,
        seed=e.config.seed,
        workers=e.workers,
        own=e.own_workers,
        steps=e.tx.steps_per_call,
        microbatches=e.capacity,
        counts=() if e.varying else tuple(e.config.counts) or None,
        skew=c.skew,
        lengths=c.lengths,
        document_mask=c.document_mask,
    )


def held_out_batches(
    experiment: Experiment, limit: int | None
) -> Iterator[dict[str, np.ndarray]]:
    """Return this process's part of `limit` validation batches, or of all."""
    e, c = experiment, experiment.config.data
    return data.validation_batches(
        e.corpus,
        length=e.config.length,
        batch_size=e.workers * e.config.microbatch_size,
        workers=e.workers,
        own=e.own_workers,
        limit=limit,  # of the batches when the run began
        block=e.identity["workers"] * e.config.microbatch_size,
        lengths=c.lengths,
        document_mask=c.document_mask,
    )


def counts_of(experiment: Experiment) -> jax.Array | None:
    """Return how many microbatches each worker computes; None: all."""
    if not experiment.config.counts:
        return None
    counts = np.asarray(experiment.config.counts, np.int32)
    return to_devices(counts[list(experiment.own_workers)], experiment.mesh)


def to_devices(batch: PyTree, mesh: Mesh) -> PyTree:
    """Return global arrays, split over the data axes, from this process's rows."""
    sharding = NamedSharding(mesh, P(data_axes(mesh)))
    with jax.transfer_guard_host_to_device("allow"):  # intended here
        return jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(sharding, x), batch
        )


def initial(experiment: Experiment) -> tuple[PyTree, Any]:
    """Return parameters as the train step takes them, and sharded optimizer state."""
    return acco_jax.start(experiment.tx, experiment.start())


def abstract_params(experiment: Experiment) -> PyTree:
    """Return shapes, dtypes and shardings of the trained parameters."""
    shardings = trained_runs.shardings(experiment.specs, experiment.mesh)
    return jax.tree.map(
        lambda x, sharding: x.update(sharding=sharding),
        jax.eval_shape(experiment.init),
        shardings,
    )


def abstract(experiment: Experiment) -> tuple[PyTree, Any]:
    """Return shapes, dtypes and shardings of the result of `initial`."""
    params, tx = abstract_params(experiment), experiment.tx
    return jax.tree.map(
        lambda x, sharding: x.update(sharding=sharding),
        jax.eval_shape(functools.partial(acco_jax.start, tx), params),
        acco_jax.start_shardings(tx, params),
    )


def as_saved(experiment: Experiment, half_round: int) -> tuple[PyTree, Any]:
    """Return `as_stored` for a checkpoint."""
    return as_stored(experiment, experiment.checkpoints.host(half_round)["axes"])


def as_stored(experiment: Experiment, axes: dict[str, int]) -> tuple[PyTree, Any]:
    """Return the result of `abstract`, for a state of a mesh of these axes.

    For another mesh than today's, arrays have the shapes that they had then, and lie on
    the devices that there are now.
    """
    e = experiment
    if axes == dict(e.mesh.shape):
        return abstract(e)
    was = meshes.described(axes)
    return trained_runs.as_stored(
        e.config, e.model, jax.eval_shape(e.init), was, e.mesh
    )


def here(experiment: Experiment, arrays: tuple[PyTree, Any]) -> tuple[PyTree, Any]:
    """Return what was restored `as_stored` as today's workers hold it."""
    like = abstract(experiment)
    same: bool = jax.tree.structure(arrays) == jax.tree.structure(like)  # type: ignore[operator]
    if same:
        return arrays
    shardings = jax.tree.map(lambda x: x.sharding, like)
    tx = experiment.tx
    weighted = getattr(tx.round(tx.phase(0)), "weighted", True)
    move = functools.partial(moved, new=like, weighted=weighted)
    return jax.jit(move, out_shardings=shardings)(arrays)


def check_whole(workdir: Path, checkpoints: Path | epath.Path) -> None:
    """Raise a ValueError if the checkpoints are missing, or rows are damaged."""
    goodput.read(workdir)
    metrics.read(workdir)
    worlds.recorded(workdir)
    check_present(workdir, checkpoints)


def check_present(workdir: Path, checkpoints: Path | epath.Path) -> None:
    """Raise a ValueError for a workdir with metrics but without its checkpoints."""
    if not (workdir / metrics.FILE).exists():
        return
    if not checkpoints.exists():
        raise ValueError(
            f"{workdir} has {metrics.FILE}, but its folder {checkpoints} is gone: "
            "restore it, or use another workdir."
        )
    if not (workdir / "config.json").exists():
        return
    said = read_object(workdir / "config.json").get("checkpoints")
    said = said if isinstance(said, str) else None
    before = checkpoint_folder(ConfigDict({"checkpoints": said}), workdir)
    if before == checkpoints or _saved_calls(checkpoints):
        return
    if _saved_calls(before) or not before.exists():
        raise ValueError(
            f"{checkpoints} has no checkpoint, but the run in {workdir} saves to "
            f"{before}: move that folder's content there, or use another workdir."
        )
