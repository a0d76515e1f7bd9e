"""Training loop of every method: half-round after half-round."""

import collections
import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import tqdm
from absl import logging
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import acco_jax
from acco_jax import data
from acco_jax.command import exits, heartbeat, paths, signals, stages
from acco_jax.core.gradients import with_arrays
from acco_jax.run import continuing, measures, samples, trials
from acco_jax.run.build import optimizers
from acco_jax.run.config.fields import profiled
from acco_jax.run.evaluation import Evaluator
from acco_jax.run.observe import (
    goodput,
    hooks,
    metrics,
    profiling,
    run_summary,
    spikes,
    stalls,
)
from acco_jax.run.observe.progress import Progress
from acco_jax.run.prepared import (
    Experiment,
    as_saved,
    as_stored,
    batches,
    counts_of,
    here,
    initial,
    to_devices,
)
from acco_jax.run.state import processes, replicas, worlds
from acco_jax.run.state.counts import CountsLog, Watch
from acco_jax.run.state.drops import Drops
from acco_jax.run.state.memory import MemoryCopies
from acco_jax.schedule import chips

PyTree = Any
ROLLBACKS = 3  # of one run, after spikes of the loss


class _Run:
    """Run under way: the state that half-rounds change, and the work between them."""

    def __init__(
        self,
        experiment: Experiment,
        memory: MemoryCopies,
        stopped: Callable[[], bool] = lambda: False,
        strict_hooks: bool = False,
        stuck_after: float = math.inf,
    ) -> None:
        e = self._experiment = experiment
        self._memory, self._stopped = memory, stopped
        self._watchdog = stalls.Watchdog(stuck_after)
        self._calls = collections.Counter[Any]()  # of each shape of a batch
        self.over = e.checkpoints.latest() == e.total_calls  # nothing is to be trained
        self._goodput = goodput.Record(e.workdir, e.began, over=self.over)
        self._batches = batches(e)
        self._evaluate = Evaluator(e, self.stopped)
        self._rate = jax.jit(functools.partial(_last_rate, e.schedule))
        self._key = jax.jit(
            lambda call: jax.random.fold_in(jax.random.key(e.config.seed), call),
            out_shardings=NamedSharding(e.mesh, P()),
        )
        self._finite = jax.jit(_finite)
        self._counts = counts_of(e)
        self._metrics: dict[str, Any] = {}
        # the half-round that was evaluated last, and its held-out loss
        self._held_out: tuple[int, float | None] = 0, None
        self.saved: int | None = None  # the half-round saved last, by this start
        self.lost_tokens = 0  # of `tokens`: trained on, and lost to a rollback
        self.rollbacks = 0  # so far
        self._dropped: dict[str, Any] | None = None  # drops up to a checkpoint
        self._lowest: dict[str, Any] | None = None  # lowest loss of a window up to it
        self._log: CountsLog | None = None
        self._watch = Watch(e.step)
        self.done, seconds = 0, 0.0  # half-rounds so far, and their time
        if (host := self._restore()) is None:
            self.params, self.state = initial(e)
        else:
            self._batches.set_state(host["batches"])
            seconds = host["seconds"]
            where = f"half-round {self.done} of {e.total_calls}"
            logging.info("continuing after %s", where)
        if jax.process_index() == 0 and not self.over:
            worlds.record(e.workdir, self.done, e.world)
        memory.begin(self.done)
        heartbeat.reached(self.done)
        self._hooks = hooks.of(e.config, e.workdir, strict=strict_hooks)
        self._open_records(seconds)
        self._goodput.mark("start_up", self.done)
        stages.ended("state")
        if jax.process_count() > 1 or memory.enabled:
            shapes = self._batches.shapes()
            with self._recorder.pause(self.tokens, "compiling"):
                trials.compile_together(e, self.params, self.state, shapes, memory)
            self._goodput.mark("compiling", self.done)
            stages.ended("programs")
        enabled, late = e.config.compare_replicas_every > 0, e.step.form != "split"
        self._replicas = replicas.Comparison(e.mesh, enabled=enabled, late=late)
        self._goodput.mark("waiting", self.done)
        stages.ended("waiting")
        if started := stages.text():
            with tqdm.tqdm.external_write_mode(file=sys.stderr):
                logging.info("started: %s", started)
        asked = profiled(e.config.profile)
        traced = (e.workdir / profiling.FOLDER).exists()
        if asked and self.done >= asked[-1] and not traced:
            logging.warning(
                "profile=%s is over: the run is at half-round %d", e.config.profile,
                self.done,
            )  # fmt: skip
        self.profile = profiling.Profile(asked, e.workdir, e.workers, self)

    def _restore(self) -> dict[str, Any] | None:
        """Take the newest state, from memory or a checkpoint; return its host data.

        Returns None if there is none.
        """
        e = self._experiment
        saved = e.checkpoints.latest() or 0
        if found := self._memory.restore_newest(functools.partial(as_stored, e), saved):
            logging.info("the state of half-round %d was in memory", found[0])
        else:
            found = e.checkpoints.restore_newest(functools.partial(as_saved, e))
        if not found:
            return None
        self.done, arrays, host = found
        self.params, self.state = here(e, arrays)
        self._held_out = self.done, host["held_out_loss"]
        self.lost_tokens = host.get("lost_tokens", 0)
        self.rollbacks = host.get("rollbacks", 0)
        self._dropped, self._lowest = host.get("dropped"), host.get("spikes")
        return host

    def _open_records(self, seconds: float) -> None:
        """Open logs and metrics, after `seconds` so far, cut at `done`."""
        e = self._experiment
        if e.logged:
            self._log = CountsLog(e.workdir, self.done)
        if e.varying:
            e.step.call = self.done  # type: ignore[attr-defined]
        c = e.config.spike
        threshold = math.inf if c.policy == "off" else c.threshold
        self._spikes = spikes.Spikes(threshold, c.calls, c.tokens, self._lowest)
        self._drops = Drops(
            optimizers.drops_nonfinite(e.config, e.tx),
            e.mesh,
            e.config.most_dropped_in_a_row,
            self._batches.first_row,
            self._dropped,
        )
        self._recorder = metrics.Recorder(
            e.workdir,
            done=self.done,
            tokens=self.tokens,
            seconds=seconds,
            late=e.step.form != "split",  # split form waits for its communication
            hooks=self._hooks,
            flops=_flops_rate(e),
            drops=self._drops,
            spikes=self._spikes,
            record=self._goodput,
            progress=self._progress() if jax.process_index() == 0 else None,
        )

    def _progress(self) -> Progress:
        steps = self._experiment.config.steps
        return Progress(
            steps,
            step=self.done * steps // self._experiment.total_calls,
            log_every=self._experiment.config.log_every,
            goodput=lambda: self.spent().get("goodput"),
        )

    def roll_back(self) -> None:
        """Continue from the newest checkpoint, with rows that were not read before."""
        self._replicas.judge()
        seconds, rollbacks = self._recorder.seconds, self.rollbacks
        self._close_records()
        self.params = self.state = None  # devices may have no room for two
        self._metrics = {}
        with self._watchdog.aside():
            host = self._restore()
        self.rollbacks = rollbacks + 1
        if host is not None:
            self.lost_tokens += self.tokens - host["batches"]["targets"]
        self._open_records(seconds)
        self._goodput.mark("start_up", self.done)

    @property
    def tokens(self) -> int:
        return self._batches.targets

    @property
    def microbatches(self) -> int:
        """Microbatches that all workers together have computed so far."""
        at = self._batches.position
        rows = sum(at.rows) - sum(map(len, at.left))
        return rows // self._experiment.config.microbatch_size

    def half_round(self) -> None:
        """Dispatch a half-round; block only on a previous logging interval."""
        e = self._experiment
        start, before = self._batches.position, self.tokens
        with self._goodput.waiting():
            rows = next(self._batches)
        batch = to_devices(rows, e.mesh)
        with self._call_patience(batch):
            self.params, self.state, self._metrics = e.step(
                self.params, self.state, batch, self._counts, self._rng()
            )
        self.done += 1
        self._watchdog.called(self.done, self._metrics["loss"])
        self._drops.add(self.done, start, self._metrics)
        heartbeat.reached(self.done)
        slow = self._watch.row(self.done)
        microbatches = list(e.config.counts) or [e.microbatches] * e.workers
        if e.varying:
            microbatches = self._watch.counts(self._metrics)
            self._batches.computed(microbatches)
        if self._log is not None:
            self._log.add(microbatches)
        self._spikes.add(self.done, self.tokens - before, self._metrics)
        host = {"kind": "train", "half_round": self.done, "tokens": self.tokens,
                "microbatches": [n * e.tx.steps_per_call for n in microbatches],
                } | slow  # fmt: skip
        device = {k: self._metrics[k] for k in ("loss", "weight", "grad_norm", "step")}
        if not _crossed(e, self.done, e.config.log_every):
            self._recorder.between(host, device)
        else:
            rate = self._rate(device["step"])
            self._recorder.train(host, device | {"learning_rate": rate})

    def _call_patience(self, batch: PyTree) -> contextlib.AbstractContextManager[None]:
        """Return the context of a call, which may compile where the shape is new."""
        shapes = tuple(x.shape for x in jax.tree.leaves(batch))
        self._calls[shapes] += 1
        known = self._calls[shapes] > 1 + self._experiment.tx.period
        return contextlib.nullcontext() if known else self._watchdog.aside()

    def stopped(self) -> bool:
        """Return whether the run has been told to stop."""
        self._watchdog.alive()
        return self._stopped()

    def compare_replicas(self) -> None:
        """Dispatch a comparison of the workers' copies."""
        self._replicas.send(self.done, self._arrays())

    def _arrays(self) -> dict[str, PyTree]:
        """Return all arrays that half-rounds use, by kind."""
        model = with_arrays(self._experiment.loss_fn)
        return {"params": self.params, "state": self.state, "model": model}

    def _rng(self) -> jax.Array | None:
        """Return the key of the next half-round; None for a loss that samples nothing.

        It follows only from the seed and the half-round, so that a run resumes bitwise
        identical.
        """
        return (
            self._key(self.state.calls_done) if self._experiment.model.draws else None
        )

    def owes_evaluation(self) -> bool:
        """Return whether the run was stopped in its last half-round's evaluation."""
        e = self._experiment
        due = _crossed(e, self.done, e.config.eval_every) or self.done == e.total_calls
        if not self.done or not due:
            return False
        rows = metrics.read(e.workdir)
        return not any(
            r["half_round"] == self.done and r["kind"] == "validation" for r in rows
        )

    def validate(self, limit: int | None) -> dict[str, Any]:
        """Evaluate on `limit` batches of held-out documents, or all; return a row.

        Raises:
          exits.Stopped: if the run is told to stop meanwhile.
        """
        try:
            return self._validated(limit)
        except exits.Stopped:
            self._goodput.mark("evaluation", self.done)
            raise

    def _validated(self, limit: int | None) -> dict[str, Any]:
        e = self._experiment
        with self._settled("evaluating" if limit else "final evaluation"):
            self._replicas.judge()
            point = optimizers.evaluated(self.state)
            params = acco_jax.committed_params(point, self.params)
            loss, bits = self._evaluate(params, limit)
            row: dict[str, Any] = {
                "kind": "validation" if limit else "final",
                "half_round": self.done,
                "step": e.tx.steps_done(self.done),
                "tokens": self.tokens,
                "seconds": self._recorder.seconds,
                "loss": loss,
                "bits_per_byte": bits,
            }
            if e.config.samples:
                at = f"the {row['kind']} row of half-round {self.done}"
                call, written = self._hooks.call, None
                # together: a process whose texts have failed takes part
                whole = call("gathering the model", at, samples.gathered, e, params)
                if whole is not None:
                    written = call("samples", at, samples.written, e, whole)
                row |= {} if written is None else {"samples": written}
            if decay := e.config.optimizer.ema:
                average = optimizers.averaged(self.state, decay)
                params = acco_jax.committed_params(average, self.params)
                loss, bits = self._evaluate(params, limit)
                row |= {"ema_loss": loss, "ema_bits_per_byte": bits}
            self._goodput.mark("evaluation", self.done, over=limit is None)
            row |= {"goodput": self.spent().get("goodput")}
            self._recorder.evaluation(row)
        self._held_out = self.done, row["loss"]
        return row

    def save(self, *, last: bool = False) -> None:
        """Start to write a checkpoint, once and only if finite.

        It writes none if the newest half-round, or at the `last` chance the newest
        two, counted for nobody: these parameters may be the cause.
        """
        e = self._experiment
        with self._settled("saving"):
            e.checkpoints.wait()
            if e.checkpoints.latest() == self.done:
                self.saved = self.done
                return
            self._spikes.read(self.done)
            self._drops.read(self.done)
            if self._drops.nobody > int(last):
                logging.warning("no checkpoint of half-round %d: nothing of it was "
                                "finite", self.done)  # fmt: skip
                return
            now = (self.params, self._metrics)
            if not jax.device_get(self._finite(now)):
                metrics.check(math.nan, "the loss or a parameter", self.done)
            self._replicas.check(self.done, self._arrays())
            self._sync()  # the records outlive the host with the checkpoint
            e.checkpoints.save(self.done, (self.params, self.state), self._host())
            self.saved = self.done
            self._goodput.mark("checkpoints", self.done)

    def patience(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of what may take as long as a save, after the last row."""
        return self._watchdog.aside()

    def wait_for_save(self) -> None:
        """Wait until the last checkpoint is written."""
        with self._settled("saving"):
            self._experiment.checkpoints.wait()
            self._goodput.mark("checkpoints", self.done)

    def _host(self) -> dict[str, Any]:
        """Return what the host knows of the run so far, to continue from."""
        e = self._experiment
        seconds, position = self._recorder.seconds, self._batches.get_state()
        evaluated, held_out = self._held_out
        return {"batches": position, "seconds": seconds, "identity": e.identity,
                "axes": dict(e.mesh.shape),
                "held_out_loss": held_out if evaluated == self.done else None,
                "lost_tokens": self.lost_tokens,
                "rollbacks": self.rollbacks,
                "dropped": self._drops.state(),
                "spikes": self._spikes.state()}  # fmt: skip

    def copy(self) -> None:
        """Keep a copy of the state in memory if one is due and the state finite."""
        if not self._memory.due(self.done):
            return
        self._recorder.flush()
        self._spikes.read(self.done)
        self._drops.read(self.done)
        state = (self.params, self.state)
        finite = jax.device_get(self._finite((self.params, self._metrics)))
        if self._drops.nobody:
            return
        if not finite:
            metrics.check(math.nan, "the loss or a parameter", self.done)
        self.wait()

        def host() -> dict[str, Any]:
            self._sync()
            return self._host()

        self._memory.keep(self.done, state, host)

    def _sync(self) -> None:
        """Write the records of the half-rounds so far to the disk."""
        self._recorder.sync()
        if self._log is not None:
            self._log.sync()

    def wait(self) -> None:
        """Wait until the devices have done all half-rounds so far."""
        with self._goodput.fetching():
            jax.block_until_ready((self.params, self.state, self._metrics))

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Exclude the time inside from the half-rounds' time."""
        with self._settled("profiling"):
            yield
            self._goodput.mark("profiling", self.done)

    @contextlib.contextmanager
    def _settled(self, what: str) -> Iterator[None]:
        """Wait for half-rounds under way; the time inside is not theirs."""
        step = self._experiment.tx.steps_done(self.done)
        with self._recorder.pause(self.tokens, what, step):
            self.wait()
            self._goodput.trained(self.done)
            with self._watchdog.aside():
                yield

    def spent(self) -> dict[str, Any]:
        """Return the goodput so far, on process 0."""
        return self._goodput.summary()

    def mark_stopped(self) -> None:
        """Record that the run has stopped before its end, and whether all is saved."""
        self._goodput.mark("checkpoints", self.done, stopped=self.saved == self.done)

    def close(self) -> None:
        self._watchdog.close()
        self._close_records()
        self._hooks.close()
        self._goodput.close()

    def _close_records(self) -> None:
        self._recorder.close()
        if self._log is not None:
            self._log.close()


def run(
    experiment: Experiment,
    *,
    stop_after: int | None = None,
    time_gradients: bool = False,
    replay: worlds.WorldsReplay | None = None,
    strict_hooks: bool = False,
    stuck_after: float = math.inf,
) -> dict[str, Any] | None:
    """Train, or continue a run, to its end.

    Args:
      experiment: from `prepare`.
      stop_after: stop after this many half-rounds in all, with a checkpoint, as an
        interrupted run does.
      time_gradients: at the end also time the gradients by themselves; None is
        recorded for padded examples, whose time per target differs by batch.
      replay: record of the run that this run repeats: it stops, with a checkpoint,
        where the recorded run went on with other devices.
      strict_hooks: a hook that raises ends the run.
      stuck_after: seconds without a half-round that end the process: see `stalls`.

    Returns:
      The summary, None if the run was stopped before its end.

    Raises:
      FloatingPointError: if the loss is not finite, or a `LossSpike`; the last
        checkpoint remains.
      exits.Failed: if a hook raised, and hooks are strict.
      ReplicasDiffer: if a worker's parameters differ from the others'; likewise.
    """
    stages.ended("model")
    experiment = trials.settled(experiment)
    stages.ended("trials")
    config, total = experiment.config, experiment.total_calls
    last = min(total, stop_after or total)
    if replay is not None:
        done = experiment.checkpoints.latest() or 0
        end = continuing.repeats_to(experiment, replay, done)
        last = last if end is None else min(last, end)
    _announce(experiment)
    row, memory = None, _memory(experiment, repeats=replay is not None)
    with (
        memory,
        signals.stopping() as stopped,
        experiment.checkpoints as checkpoints,
        contextlib.closing(
            _Run(experiment, memory, stopped, strict_hooks, stuck_after)
        ) as runner,
        jax.transfer_guard("disallow"),
    ):
        most = ROLLBACKS if config.spike.policy == "rollback" else 0
        ends = False
        while True:
            try:
                if ends:
                    runner.profile.close()
                    runner.save(last=True)
                else:
                    row = _train(runner, experiment, last)
                break
            except exits.Stopped:  # in an evaluation, which the continued run owes
                ends = True
            except spikes.LossSpike as spike:
                runner.wait_for_save()
                if runner.rollbacks >= most or checkpoints.latest() is None:
                    raise
                with jax.transfer_guard("allow"):
                    runner.roll_back()
                logging.warning("%s", spike)
                logging.warning("rolled back to half-round %d", runner.done)
        if row is None and runner.saved != runner.done:
            memory.remain()
        with runner.patience():
            checkpoints.wait()  # also for its checksums, before copies are removed
            processes.meet("the last checkpoint is whole")
    if row is not None:
        measured = runner.spent() | {"microbatches": runner.microbatches}
        measured |= {"lost_tokens": runner.lost_tokens}
        measured |= measures.footprint(experiment, runner.params, runner.state)
        if time_gradients:
            seconds = None
            if not measures.padded(experiment):
                params = acco_jax.committed_params(runner.state, runner.params)
                seconds = measures.gradient_seconds(experiment, params)
            measured["gradient_seconds_per_token"] = seconds
        before = run_summary.trained(experiment.workdir) if runner.over else {}
        return _finish(experiment, row, measured, before)
    runner.mark_stopped()
    stopped_at = f"stopped after half-round {runner.done} of {total}"
    if runner.saved == runner.done:
        logging.info("%s: the same command continues", stopped_at)
    else:
        logging.warning(
            "%s, of which nothing was finite and saved: the same command continues "
            "from before it", stopped_at,
        )  # fmt: skip
    return None


def _train(runner: _Run, experiment: Experiment, last: int) -> dict[str, Any] | None:
    """Train up to a half-round; return the row of the final evaluation at the end."""
    config, total = experiment.config, experiment.total_calls
    if runner.owes_evaluation():
        runner.validate(config.eval_batches)
    while runner.done < last and not runner.stopped():
        with runner.profile.half_round(runner.done + 1):
            runner.half_round()
        crossed = functools.partial(_crossed, experiment, runner.done)
        if (every := config.compare_replicas_every) and crossed(every):
            runner.compare_replicas()
        if crossed(config.eval_every) or runner.done == total:
            runner.validate(config.eval_batches)
        if crossed(config.checkpoint_every) and runner.done < total:
            runner.save()
        runner.copy()
    runner.profile.close()
    runner.save(last=True)
    if runner.done < total:
        return None
    if runner.saved != total:
        raise FloatingPointError(
            f"nothing of the last half-rounds before {total} was finite, so the end "
            "is not saved and the newest checkpoint remains: "
            "--config.drop_nonfinite=False ends at the first of them."
        )
    return runner.validate(None)


def _memory(experiment: Experiment, *, repeats: bool) -> MemoryCopies:
    """Return the copies in memory of a run that a supervisor may begin again.

    A run that repeats another stops where that run did. A roll back depends on when a
    loss is read, which a copy does.
    """
    e, folder = experiment, experiment.config.memory_copies
    takes = heartbeat.supervised() and not repeats
    takes = takes and e.config.spike.policy != "rollback" and bool(folder)
    place = paths.expanded(folder) if takes else None
    return MemoryCopies(place, e.workdir, e.identity, e.world)


def _crossed(experiment: Experiment, calls_done: int, every: int) -> bool:
    """Return whether this half-round ended a step that passes a multiple of `every`.

    A call of several steps may pass it; a step may end with a later half-round.
    """
    steps_done, length = experiment.tx.steps_done, experiment.tx.calls_per_step
    now, before = steps_done(calls_done), steps_done(calls_done - length)
    return now is not None and now // every > max(before or 0, 0) // every


def _flops_rate(experiment: Experiment) -> tuple[float, float] | None:
    """Return model FLOPs per token and the devices' peak FLOP/s, None if unknown.

    The model's FLOPs per target hold if all weights are trained and each token is a
    target. They are unknown for adapters: frozen weights have no gradient. They are
    unknown for padded examples: prompts are computed, but only answers are counted.
    """
    e = experiment
    if e.config.lora.rank or e.config.lora.ranks or measures.padded(e):
        return None
    chip = chips.of_kind(e.mesh.devices.flat[0].device_kind)
    if chip is None or e.model.flops_per_token is None:
        return None
    return e.model.flops_per_token(e.config.length), e.mesh.size * chip.flops


def _devices(experiment: Experiment) -> str:
    """Return the number of devices, and of groups of them, as text."""
    devices, workers = experiment.mesh.devices, experiment.workers
    plural = "s" if devices.size > 1 else ""
    text = f"{devices.size} {devices.flat[0].platform} device{plural}"
    return text if devices.size == workers else f"{text} in {workers} groups"


def _announce(experiment: Experiment) -> None:
    e, documents = experiment, experiment.corpus.train_documents
    per_step = e.tokens * e.tx.calls_per_step // e.tx.steps_per_call
    logging.info(
        "%s on %s: %s parameters, %s tokens a step; %s: %s documents, %s "
        "bytes to train on",
        e.config.method, _devices(e),
        f"{e.model.parameters():,}", f"{per_step:,}",
        e.config.data.name, f"{documents:,}", f"{e.corpus.train_bytes:,}",
    )  # fmt: skip
    for line in data.cuts(e.corpus, max(e.config.data.lengths or [e.config.length])):
        logging.info("%s", line)


def _last_rate(schedule: Callable[[jax.Array], Any], steps: jax.Array) -> jax.Array:
    """Return the learning rate of the last of `steps`; the first one has that of 0."""
    return jnp.asarray(schedule(jnp.maximum(steps - 1, 0)), jnp.float32)


def _finite(now: tuple[PyTree, dict[str, Any]]) -> jax.Array:
    """Return whether parameters and metrics are; nobody's loss is left out."""
    params, last = now
    if last:  # none before a start's first half-round
        last = last | {"loss": jnp.where(last["weight"] != 0, last["loss"], 0)}
    each = [jnp.isfinite(x).all() for x in jax.tree.leaves((params, last))]
    return functools.reduce(jnp.logical_and, each)


def _finish(
    experiment: Experiment,
    row: dict[str, Any],
    measured: dict[str, Any],
    before: dict[str, Any],
) -> dict[str, Any]:
    """Return a run's summary; process 0 also writes, draws and logs it.

    `before` is what an earlier end said of the training: this start had none.
    """
    config, workdir = experiment.config, experiment.workdir
    left_out = "kind", "half_round", "step", "samples"
    summary = {
        "method": config.method,
        "devices": experiment.mesh.size,
        "workers": experiment.workers,
        "parameters": experiment.model.parameters(),
        "steps": config.steps,
        **{k: v for k, v in row.items() if k not in left_out},
        **measured,
        **before,
    }
    if jax.process_index() == 0:
        bigram = data.bigram_bits_per_byte(experiment.corpus)
        summary["bigram_bits_per_byte"] = bigram
        title = f"{config.method}, {config.data.name}, {_devices(experiment)}"
        run_summary.draw(metrics.read(workdir), bigram, workdir / "loss.png", title)
        logging.info("finished\n%s", run_summary.summarize(summary, workdir))
    return summary
