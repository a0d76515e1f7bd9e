"""One loop for every method: half-round after half-round."""

from __future__ import annotations

import contextlib
import functools
import math
import signal
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial
from orbax.checkpoint import multihost

import acco_jax
from acco_jax import data, footprint
from acco_jax.gradients import with_arrays
from acco_jax.models import gpt_neo
from acco_jax.training import config as configs
from acco_jax.training import metrics, reports, timing
from acco_jax.training.counts import CountsLog
from acco_jax.training.preparation import (
    Experiment,
    abstract,
    batches,
    counts_of,
    initial,
    to_devices,
)

PyTree = Any
LATEST = 1800  # seconds that processes may compile longer than another


class Evaluator:
    """Loss of the committed parameters on held-out documents."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = e = experiment
        self._loss_fn, rows = with_arrays(e.loss_fn), P(e.mesh.axis_names)
        no_rng: Any = None

        def add(
            loss_fn: Partial, params: PyTree, batch: PyTree, sums: jax.Array
        ) -> jax.Array:
            # sums: (1, 2) nats and targets of this worker's rows so far
            return sums + jnp.stack(loss_fn(params, batch, no_rng)[:2])

        in_specs = (P(), P(), rows, rows)
        self._add = jax.jit(
            jax.shard_map(
                add, mesh=e.mesh, in_specs=in_specs, out_specs=rows, check_vma=False
            ),
            donate_argnums=3,
        )
        replicated = NamedSharding(e.mesh, P())
        self._total = jax.jit(lambda x: x.sum(0), out_shardings=replicated)

    def __call__(self, params: PyTree, limit: int | None) -> tuple[float, float]:
        """(nats per token, bits per byte) over `limit` batches, or all."""
        e = self._experiment
        batches = data.validation_batches(
            e.corpus,
            length=e.config.length,
            batch_size=e.workers * e.config.microbatch_size,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
            limit=limit,
        )
        mine = np.zeros((e.workers // jax.process_count(), 2), np.float32)
        sums = to_devices(mine, e.mesh)
        for batch in batches:
            rows = to_devices(batch, e.mesh)
            sums = self._add(self._loss_fn, params, rows, sums)
        nats, targets = jax.device_get(self._total(sums)).astype(np.float64)
        bits = data.bits_per_byte(nats, e.corpus, targets=targets)
        return float(nats / targets), float(bits)


class _Run:
    """A run under way: what half-rounds change, and what is done between them.

    Attributes:
      done: half-rounds so far.
    """

    def __init__(self, experiment: Experiment) -> None:
        e = self._experiment = experiment
        self._batches = batches(e)
        self._evaluate = Evaluator(e)
        self._rate = jax.jit(lambda step: jnp.asarray(e.schedule(step), jnp.float32))
        self._finite = jax.jit(
            lambda tree: jnp.all(
                jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)])
            )
        )
        self._counts = counts_of(e)
        self._metrics: dict[str, Any] = {}
        self.done, seconds = 0, 0.0
        if (latest := e.checkpoints.latest()) is None:
            self.params, self.state = initial(e)
        else:
            arrays, host = e.checkpoints.restore(latest, abstract(e))
            self.params, self.state = arrays
            self._batches.set_state(host["batches"])
            self.done, seconds = latest, host["seconds"]
            logging.info("continuing after half-round %d of %d", latest, e.half_rounds)
        self._log = None
        if e.config.microbatches != "fixed":
            self._log = CountsLog(e.workdir, self.done)
            e.step.half_round = self.done  # type: ignore[attr-defined]
        self._recorder = metrics.Recorder(
            e.workdir,
            total=e.half_rounds,
            done=self.done,
            tokens=self.tokens,
            seconds=seconds,
            late=e.step.form != "split",  # which waits for what it has sent
        )
        if jax.process_count() > 1:  # a collective waits 30 s for a late one, over gloo
            batch = to_devices(next(batches(e)), e.mesh)
            e.step.compile(self.params, self.state, batch, self._counts)
            everyone = set(range(jax.process_count()))
            multihost.sync_global_processes(
                "ready to train", timeout=LATEST, processes=everyone
            )

    @property
    def tokens(self) -> int:
        e = self._experiment
        if self._log is None:
            return self.done * e.tokens
        return self._log.total * e.config.microbatch_size * e.config.length

    def half_round(self) -> None:
        """Dispatches a half-round and waits for none but an interval long past."""
        e = self._experiment
        batch = to_devices(next(self._batches), e.mesh)
        self.params, self.state, self._metrics = e.step(
            self.params, self.state, batch, self._counts
        )
        self.done += 1
        microbatches = list(e.config.counts) or [e.microbatches] * e.workers
        if self._log is not None:
            self._log.add(jax.device_get(self._metrics["counts"]))
            microbatches = self._log.last
        if self.done % e.config.log_every == 0:
            known = {
                "kind": "train",
                "half_round": self.done,
                "tokens": self.tokens,
                "microbatches": microbatches,
            }
            device = {k: self._metrics[k] for k in ("loss", "grad_norm", "step")}
            rate = self._rate(device["step"])
            self._recorder.train(known, device | {"learning_rate": rate})

    def validate(self, limit: int | None) -> dict[str, Any]:
        """Evaluates on `limit` batches of held-out documents, or all; returns a row."""
        e = self._experiment
        with self._recorder.pause(self.tokens):
            params = acco_jax.committed_params(self.state, self.params)
            loss, bits = self._evaluate(params, limit)
            row = {
                "kind": "validation" if limit else "final",
                "half_round": self.done,
                "step": e.steps_done(self.done),
                "tokens": self.tokens,
                "seconds": self._recorder.seconds,
                "loss": loss,
                "bits_per_byte": bits,
            }
            self._recorder.evaluation(row)
        return row

    def save(self) -> None:
        """Writes a checkpoint, but never one that is not finite, nor one twice."""
        checkpoints = self._experiment.checkpoints
        if checkpoints.latest() == self.done:
            return
        with self._recorder.pause(self.tokens):
            now = (self.params, self._metrics)
            if not jax.device_get(self._finite(now)):
                metrics.check(math.nan, "the loss or a parameter", self.done)
            host = {
                "batches": self._batches.get_state(),
                "seconds": self._recorder.seconds,
            }
            checkpoints.save(self.done, (self.params, self.state), host)

    def close(self) -> None:
        self._recorder.close()
        if self._log is not None:
            self._log.close()


def run(
    experiment: Experiment,
    *,
    stop_after: int | None = None,
    time_gradients: bool = False,
) -> dict[str, Any] | None:
    """Train, or continue a run, to its end.

    Args:
      experiment: from `prepare`.
      stop_after: stop after so many half-rounds in all, with a checkpoint, as an
        interrupted run does.
      time_gradients: at the end also measure what the gradients take by themselves.

    Returns:
      The summary, None if the run was stopped before its end.

    Raises:
      FloatingPointError: the loss is not finite; the last checkpoint stays.
    """
    config, total = experiment.config, experiment.half_rounds
    last = min(total, stop_after or total)
    _announce(experiment)
    with (
        _stop_signals() as stopped,
        contextlib.closing(_Run(experiment)) as going,
        jax.transfer_guard("disallow"),
    ):
        while going.done < last and not stopped(going.done):
            going.half_round()
            crossed = functools.partial(_crossed, experiment, going.done)
            if crossed(config.eval_every) or going.done == total:
                going.validate(config.eval_batches)
            if crossed(config.checkpoint_every) and going.done < total:
                going.save()
        going.save()
        row = going.validate(None) if going.done == total else None
    if row is not None:
        measured = _footprint(experiment, going.params, going.state)
        if time_gradients:
            theta = acco_jax.committed_params(going.state, going.params)
            measured["gradient_seconds_per_token"] = _gradient_seconds(
                experiment, theta
            )
        return _finish(experiment, row, measured)
    logging.info(
        "stopped after half-round %d of %d: the same command continues",
        going.done, total,
    )  # fmt: skip
    return None


def _crossed(experiment: Experiment, half_rounds: int, every: int) -> bool:
    """Whether this half-round ended the step that a multiple of `every` counts to.

    A call of several steps may pass it; a step may end with a later half-round.
    """
    now = experiment.steps_done(half_rounds)
    before = experiment.steps_done(half_rounds - experiment.tx.half_rounds)
    return now is not None and now // every > max(before or 0, 0) // every


def _announce(experiment: Experiment) -> None:
    e, documents = experiment, experiment.corpus.train_documents
    per_step = e.tokens * e.tx.half_rounds // e.tx.steps_per_call
    logging.info(
        "%s on %d %s devices: %s parameters, %s tokens a step; %s: %s documents, %s "
        "bytes to train on",
        e.config.method, e.workers, e.mesh.devices.flat[0].platform,
        f"{gpt_neo.count_params(e.model):,}", f"{per_step:,}",
        e.config.data.name, f"{documents:,}", f"{e.corpus.train_bytes:,}",
    )  # fmt: skip


def _footprint(experiment: Experiment, params: PyTree, state: Any) -> dict[str, Any]:
    """What a worker has sent in the whole run, and what a device holds."""
    e = experiment
    arrays = (params, state, to_devices(next(batches(e)), e.mesh), counts_of(e))
    turns = e.step.turns()
    sent: int | None
    try:
        once = {k: e.step.lowered(*arrays, half_round=k) for k in turns}
        period = sum(
            times * footprint.bytes_sent(*once[k]) for k, times in turns.items()
        )
        sent = round(e.half_rounds * period / sum(turns.values()))
    except ValueError as error:  # a finished run is not lost for it
        logging.warning("bytes_sent_per_worker is not known: %s", error)
        sent = None
    return {
        "bytes_sent_per_worker": sent,
        "state_bytes_per_device": footprint.bytes_held((params, state)),
    }


def _gradient_seconds(experiment: Experiment, params: PyTree) -> float:
    """Seconds of all workers per token, for local gradients at `params` alone."""
    e = experiment
    batch, counts = to_devices(next(batches(e)), e.mesh), counts_of(e)
    steps, dtype = e.tx.steps_per_call, e.config.accumulate_dtype
    seconds = timing.gradient_seconds(
        e.loss_fn,
        e.mesh,
        params,
        batch,
        None if counts is None else counts * steps,
        microbatches=e.held * steps,
        accumulate_dtype=dtype and configs.dtype("accumulate_dtype", dtype),
    )
    return seconds / (e.tokens * e.held // e.microbatches)


def _finish(
    experiment: Experiment, row: dict[str, Any], measured: dict[str, Any]
) -> dict[str, Any]:
    config, workdir = experiment.config, experiment.workdir
    summary = {
        "method": config.method,
        "devices": experiment.workers,
        "parameters": gpt_neo.count_params(experiment.model),
        "steps": config.steps,
        "tokens": row["tokens"],
        "seconds": row["seconds"],
        "loss": row["loss"],
        "bits_per_byte": row["bits_per_byte"],
        **measured,
    }
    if jax.process_index():
        return summary  # process 0 reports
    bigram = data.bigram_bits_per_byte(experiment.corpus)
    summary["bigram_bits_per_byte"] = bigram
    title = f"{config.method}, {config.data.name}, {experiment.workers} devices"
    reports.draw(metrics.read(workdir), bigram, workdir / "loss.png", title)
    logging.info("finished\n%s", reports.summarize(summary, workdir))
    return summary


@contextlib.contextmanager
def _stop_signals() -> Iterator[Callable[[int], bool]]:
    """Yields stopped(half_round): whether this run has been told to stop.

    SIGTERM (a scheduler's) and SIGINT (a person's) stop it after the half-round under
    way, with a checkpoint; a second SIGINT at once. Several processes agree on the
    half-round through JAX's preemption service.
    """
    told: list[int] = []

    def tell(number: int, frame: Any) -> None:
        if told and number == signal.SIGINT:
            raise KeyboardInterrupt
        told.append(number)

    def stopped(half_round: int) -> bool:
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(half_round)
        return bool(told)

    if jax.process_count() > 1:
        yield stopped
        return
    before = {}
    with contextlib.suppress(ValueError):  # not in the main thread: no signals
        for number in (signal.SIGTERM, signal.SIGINT):
            before[number] = signal.signal(number, tell)
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
