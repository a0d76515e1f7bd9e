"""Preparation of a run: all checks, before anything is compiled."""

import dataclasses
import functools
import json
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

import acco_jax
from acco_jax import data
from acco_jax.command import exits, heartbeat, stages
from acco_jax.command.files import read_object, write_whole
from acco_jax.core.gradients import with_arrays
from acco_jax.core.groups import data_axes, members
from acco_jax.methods.method import Method
from acco_jax.models.model import Model
from acco_jax.run import continuing, prepared, samples
from acco_jax.run.build import meshes, models, optimizers
from acco_jax.run.build.validation import validate
from acco_jax.run.config import fields as configs
from acco_jax.run.config.identity import differing_field
from acco_jax.run.observe import hooks, run_summary
from acco_jax.run.prepared import Experiment
from acco_jax.run.state import counts, lengths, processes, worlds
from acco_jax.run.trained import trained_runs
from acco_jax.run.trained.trained_runs import checkpoint_folder
from acco_jax.run.weights import adapters, pretrained

PyTree = Any

_BEGINNING = "base_checkpoint"  # of config.json
# Fields beside a run's identity that say when processes communicate, and what.
STEERING = (
    "log_every", "eval_every", "eval_batches", "samples", "checkpoint_every",
    "compare_replicas_every", "form", "drop_nonfinite", "most_dropped_in_a_row",
    "domains", "profile", "tolerance",
)  # fmt: skip


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


def check_same(config: ConfigDict, flags: Mapping[str, Any]) -> None:
    """Raise a ValueError, on every process, if processes have another config or flags.

    The first that they communicate once they share a workdir: all else that they say
    to each other depends on the config.

    Args:
      config: as it was given.
      flags: of the command, which processes must have in common.

    Raises:
      ValueError: with the first process that differs, and in what.
    """
    if jax.process_count() > 1:
        given = json.loads(config.to_json_best_effort())
        _check_same_config(given, steering_of(config) | dict(flags))


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
    first = continuing.first_workers(config, workdir, workers, again, replay)
    identity = _identity_of(config, first) | _beginning(config, old)
    continuing.check_workdir(workdir, identity, grows)
    stale = not again and old.get("workers", first) != first
    if stale and heartbeat.supervised() and jax.process_index() == 0:
        # what a later attempt continues, not the start before this command
        _write_identity(workdir, old | {"workers": first})
    config = adapters.applied(config, identity.get("adapters", {}))
    prepared.own_workers(mesh)  # or a ValueError
    config = continuing.with_recorded_half(config, replay or workdir, workdir, mesh)
    config, amounts = _amounts(config, mesh, first)
    corpus = _corpus(config, workdir, identity, grows)
    stages.ended("data")
    config = _with_steps(config, workers, amounts, corpus)
    if extend is not None:
        done = max(
            continuing.saved_calls(checkpoint_folder(config, workdir)), default=0
        )
        config = lengths.lengthened(
            config, identity, old, amounts.method, done, extend=extend
        )
        identity["extended"] = [list(pair) for pair in config.extended]
    samples.check(config, corpus.tokenizer)
    trainable = _trainable(config, mesh, corpus, old, identity.get(_BEGINNING))
    checked = again and bool(old)  # by the attempt that recorded this run
    tx, step = _step(config, mesh, trainable, amounts, checked=checked)
    experiment = Experiment(
        config=config, workdir=workdir, mesh=mesh, corpus=corpus, tx=tx, step=step,
        schedule=optimizers.checked_rate(config), microbatches=amounts.microbatches,
        varying=amounts.varying, halves=amounts.halves, capacity=amounts.capacity,
        identity=identity, began=began, **trainable._asdict(),
    )  # fmt: skip
    if not checked:
        optimizers.check_patterns(config, prepared.abstract_params(experiment))
        _check_optimizer(experiment)
    _check_experiment(experiment, lengths.FIELDS if old else ())
    return experiment


def _step(
    config: ConfigDict,
    mesh: Mesh,
    trainable: Trainable,
    amounts: Amounts,
    *,
    checked: bool = False,
) -> tuple[Method, acco_jax.TrainStep]:
    """Return the method for a model, and its train step."""
    tx = optimizers.method(
        config, config.method, mesh, data_axes(mesh), trainable.model.stacked,
        trainable.specs, checked,
    )  # fmt: skip
    return tx, acco_jax.make_train_step(
        trainable.loss_fn, tx, microbatches=amounts.varying or amounts.microbatches,
        form=config.form, drop_nonfinite=optimizers.drops_nonfinite(config, tx),
    )  # fmt: skip


def _check_optimizer(experiment: Experiment) -> None:
    """Raise a ValueError for an optimizer that the method cannot run."""
    try:
        experiment.tx.check(prepared.abstract_params(experiment))
    except Exception as error:
        raise ValueError(
            f"optimizer {experiment.config.optimizer.name} with the options given does "
            f"not work here: {error}"
        ) from error


def _check_experiment(experiment: Experiment, but: Sequence[str]) -> None:
    """Raise a ValueError for documents or checkpoints that do not fit."""
    first = prepared.batches(experiment)  # raises if a worker's documents are too few
    prepared.held_out_batches(experiment, None)
    continuing.check_whole(experiment.workdir, experiment.checkpoint_folder)
    continuing.check_checkpoint(experiment, first, but)


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


def record(experiment: Experiment) -> None:
    """Write config.json, by which the workdir is this run's."""
    if jax.process_index() > 0:
        return
    path, steps = experiment.workdir / "config.json", experiment.config.steps
    former = read_object(path).get("total_steps", steps) if path.exists() else steps
    if former != steps:
        (experiment.workdir / run_summary.FILE).unlink(missing_ok=True)  # of that end
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
    if config.base and _adapts(config):
        identity["frozen"] = trained_runs.base_identity(config)
    if config.lora.init_from is not None:
        identity["adapters"] = adapters.identity(config)
    return identity | {"generation": pretrained.kept_generation(config)}


def _adapts(config: ConfigDict) -> bool:
    return bool(config.lora.rank or config.lora.ranks)


def _beginning(config: ConfigDict, old: dict[str, Any]) -> dict[str, Any]:
    """Return which checkpoint of `base` a run begins at, or has begun at.

    A run that has begun needs `base` no more once it has a checkpoint.
    """
    if not config.base or _adapts(config):
        return {}
    if not old:
        return {_BEGINNING: trained_runs.base_identity(config)}
    return {_BEGINNING: old[_BEGINNING]} if _BEGINNING in old else {}


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
                f"workers, and now there are {workers}: start as many."
            )
        return config, microbatches
    counts = worlds.dealt(sum(counts), workers)
    config = config.copy_and_resolve_references()
    config.counts = tuple(counts) if len(set(counts)) > 1 else ()
    return config, max(counts)


def _corpus(
    config: ConfigDict,
    workdir: Path,
    identity: dict[str, Any],
    grows: Sequence[str],
) -> data.Corpus:
    """Return the corpus, which joins the identity.

    Raises:
      ValueError: if it is not that of the run in the workdir, or of other processes.
    """
    fields = pretrained.data_fields(config)
    corpus = data.load_corpus(fields, workdir=workdir, base=config.base)
    pretrained.check_tokens(config, corpus.tokenizer.end_of_text)
    if jax.process_count() > 1:
        weights = {"pretrained", "frozen", _BEGINNING, "adapters"}  # checked below
        fields = {k: x for k, x in identity.items() if k not in weights}
        _check_same_config(fields, steering_of(config))
        _check_same_text(corpus.checksum)
        _check_same_weights(identity)
    identity["corpus"] = {
        "documents": corpus.documents,
        "tokenizer": corpus.tokenizer.fingerprint,
        "tokens": corpus.checksum,
    }
    continuing.check_workdir(workdir, identity, grows)
    return corpus


def steering_of(config: ConfigDict) -> dict[str, Any]:
    """Return what processes must have in common beside the run's identity."""
    # of copies in memory and checkpoints each may name its own folder
    places = {name: bool(config[name]) for name in ("memory_copies", "checkpoints")}
    sections = {
        f"{section}.{name}": value
        for section in ("mesh", "spike")
        for name, value in config[section].items()
    }
    return {name: config[name] for name in STEERING} | places | sections


def _check_same_config(identity: dict[str, Any], steering: dict[str, Any]) -> None:
    """Raise a ValueError, on every process, if processes have different configs.

    Shards that each process updates in its own way would be sent to all: no replica
    would differ.
    """
    mine = json.dumps([identity, steering])
    known, steering = json.loads(processes.bytes_from(0, mine.encode()))
    own, others = json.loads(mine)
    field = differing_field(known, own) or next(
        (
            f"{k}={x!r}, not {others.get(k)!r}"
            for k, x in steering.items()
            if x != others.get(k)
        ),
        "",
    )
    fields = [x.decode() for x in processes.all_bytes(field.encode())]
    other = next((i for i, field in enumerate(fields) if field), None)
    if other is not None:
        raise ValueError(
            f"process {other} has another config than process 0 ({fields[other]}): "
            "give all of them the same file and flags."
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
    """Raise a ValueError, on every process, if they start from other weights."""
    named = {
        "pretrained": ("init_from", identity["init_from"], "model"),
        "frozen": ("base", identity["base"], "model"),
        _BEGINNING: ("base", identity["base"], "model"),
        "adapters": ("lora.init_from", identity["lora"]["init_from"], "adapters"),
    }
    said = [json.dumps(identity.get(key), sort_keys=True) for key in named]
    sums = np.array([zlib.crc32(text.encode()) for text in said], np.uint32)
    each = processes.gathered(sums).T
    for own, (field, value, kind) in zip(each, named.values(), strict=True):
        if len(set(own.tolist())) > 1:
            raise ValueError(
                f"{field}={value!r} is not the same {kind} for all processes: give all "
                "of them the same files."
            )


def _with_steps(
    config: ConfigDict, workers: int, amounts: Amounts, corpus: data.Corpus
) -> ConfigDict:
    """Return the config with the run's number of steps.

    Raises:
      ValueError: if the corpus has less than a batch, or there are too many steps.
    """
    row_lengths = tuple(config.data.lengths)
    rows_per_epoch = data.rows_per_epoch(corpus, config.length, row_lengths)
    microbatches = workers * amounts.capacity * amounts.method.steps_per_call
    most = microbatches * config.microbatch_size
    data.check_rows(corpus, rows_per_epoch, config.length, most, row_lengths)
    return configs.with_steps(
        config, amounts.rows_per_step, rows_per_epoch, amounts.method.steps_per_call
    )


def _trainable(
    config: ConfigDict,
    mesh: Mesh,
    corpus: data.Corpus,
    old: dict[str, Any],
    base: dict[str, Any] | None,
) -> Trainable:
    """Return the model for a corpus, and how its parameters begin, or have begun.

    `old` is what a begun run has recorded, `base` the checkpoint of `base` that the
    run begins at.

    Raises:
      ValueError: if the model does not fit the tokenizer, or its weights are missing.
    """
    trained_runs.check_tokens(config, corpus)
    model = models.model(config, corpus.tokenizer.vocab_size)
    models.warn_of_another_size(config, model, corpus.tokenizer.vocab_size)
    known = None if old else corpus.tokenizer
    loss_fn, init = models.trained(
        config, model, lambda make: trained_runs.start(config, make, model, mesh, known)
    )
    specs = models.specs(model, jax.eval_shape(init), mesh)
    homes = trained_runs.shardings(specs, mesh)
    made = jax.jit(lambda init: init(), out_shardings=homes)  # once for all starts
    start = functools.partial(made, with_arrays(init))
    if (config.init_from or config.base) and not _adapts(config):
        # read when needed, and not held
        start = functools.partial(trained_runs.start, config, init, model, mesh)
    if config.base and not _adapts(config):
        if known is not None:
            trained_runs.base_of(config, jax.eval_shape(init), known)
        start = functools.partial(_from_base, config, base, start)
    if config.lora.init_from:
        architecture = models.transformer_config(config, corpus.tokenizer.vocab_size)
        start = functools.partial(adapters.load, config, architecture, homes)
    return Trainable(model, loss_fn, init, start, specs)


def _from_base(
    config: ConfigDict, begun_at: dict[str, Any] | None, start: Callable[[], PyTree]
) -> PyTree:
    """Return the parameters of `base` at the checkpoint that the run begins at.

    Raises:
      exits.Damaged: it is gone, or another one is the newest: no process is at fault.
    """
    if begun_at is None:
        return start()
    try:
        here = trained_runs.base_identity(config)
    except ValueError as error:
        raise exits.Damaged(str(error)) from error
    if here != begun_at:
        raise exits.Damaged(
            f"base is {config.base}, whose newest checkpoint is not the one that this "
            "run began at, and the run has none of its own: use another workdir."
        )
    return start()
