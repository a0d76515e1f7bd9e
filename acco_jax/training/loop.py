"""One loop for every method: prepare, then half-round after half-round."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

import acco_jax
from acco_jax import data
from acco_jax.models import gpt_neo
from acco_jax.training import config as configs
from acco_jax.training import metrics, reports
from acco_jax.training.checkpoints import Checkpoints
from acco_jax.transforms import METHODS

PyTree = Any
DATA = "data"


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Everything a run needs, checked; nothing has been computed yet."""

    config: ConfigDict
    workdir: Path
    mesh: Mesh
    corpus: data.Corpus
    model: gpt_neo.GPTNeoConfig
    tx: acco_jax.Method
    step: acco_jax.TrainStep
    schedule: optax.Schedule
    microbatches: int  # of each worker in a half-round

    @property
    def workers(self) -> int:
        return self.mesh.size

    @property
    def half_rounds(self) -> int:
        """Of the whole run; a delayed method's first one only primes."""
        return int(self.tx.delayed) + self.config.steps * self.tx.half_rounds

    @property
    def rows(self) -> int:
        """Of a half-round's global batch."""
        return self.workers * self.microbatches * self.config.microbatch_size

    @property
    def tokens(self) -> int:
        """Targets that a half-round counts."""
        computed = self.config.counts or [self.microbatches] * self.workers
        return sum(computed) * self.config.microbatch_size * self.config.length

    def steps_done(self, half_rounds: int) -> int | None:
        """Optimizer steps after so many half-rounds; None in the middle of one."""
        done = half_rounds - int(self.tx.delayed)
        return None if done % self.tx.half_rounds else done // self.tx.half_rounds


def prepare(config: ConfigDict, workdir: Path) -> Experiment:
    """Build an experiment.

    Args:
      config: of `acco_jax.training.config.default_config`'s form.
      workdir: for checkpoints, metrics and tokenizer; a run in it is continued.

    Raises:
      ValueError: in one line, what cannot work.
    """
    configs.validate(config)
    _check_workdir(config, workdir)
    mesh = jax.make_mesh((jax.device_count(),), (DATA,), axis_types=(AxisType.Auto,))
    n, counts = mesh.size, tuple(config.counts)
    half_rounds = {name: _half_rounds(make, mesh) for name, make in METHODS.items()}
    per_step, share = config.microbatches_per_step, half_rounds[config.method]
    if per_step % share:
        raise ValueError(
            f"microbatches_per_step is {per_step}, which does not divide into the "
            f"{share} half-rounds of a step of {config.method}: use a multiple."
        )
    microbatches = per_step // share
    if counts and (
        len(counts) != n or not 0 <= min(counts) <= max(counts) <= microbatches
    ):
        raise ValueError(
            f"counts is {counts}: give one number from 0 to {microbatches} for each of "
            f"the {n} workers."
        )
    corpus = data.load_corpus(config.data, workdir=workdir)
    model = configs.model(config, corpus.tokenizer.vocab_size)
    comm, accumulate = (
        configs.dtype(f, config[f]) if config[f] else None
        for f in ("comm_dtype", "accumulate_dtype")
    )
    tx = METHODS[config.method](
        configs.optimizer(config),
        mesh=mesh,
        axis_name=DATA,
        comm_dtype=comm,
        accumulate_dtype=accumulate,
        layout=config.layout,
        **config.method_options,
    )
    step = acco_jax.make_train_step(
        gpt_neo.loss_fn(model),
        tx,
        mesh=mesh,
        axis_name=DATA,
        microbatches=microbatches,
        form=config.form,
    )
    schedule = configs.learning_rate(config)
    experiment = Experiment(
        config, workdir, mesh, corpus, model, tx, step, schedule, microbatches
    )
    _batches(experiment)  # says now if the corpus is too small
    return experiment


def _half_rounds(make: Callable[..., acco_jax.Method], mesh: Mesh) -> int:
    return make(optax.identity(), mesh=mesh, axis_name=DATA).half_rounds


def _check_workdir(config: ConfigDict, workdir: Path) -> None:
    """Refuses the workdir of another run; remembers this one's config."""
    path, new = workdir / "config.json", json.loads(config.to_json_best_effort())
    if path.exists():
        old = json.loads(path.read_text())
        if field := configs.differing_field(old, new):
            raise ValueError(
                f"workdir {workdir} belongs to a run with {field}: use another "
                "workdir, or the same config."
            )
    elif jax.process_index() == 0:
        workdir.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(new, indent=2, sort_keys=True) + "\n")


def _batches(experiment: Experiment) -> Any:
    return data.train_iterator(
        experiment.corpus,
        length=experiment.config.length,
        batch_size=experiment.rows,
        seed=experiment.config.seed,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )


class Evaluator:
    """Loss of the committed parameters on held-out documents."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = e = experiment
        loss_fn, rows = gpt_neo.loss_fn(e.model), P(DATA)
        no_rng: Any = None

        def add(params: PyTree, batch: PyTree, sums: jax.Array) -> jax.Array:
            # sums: (1, 2) nats and targets of this worker's rows so far
            return sums + jnp.stack(loss_fn(params, batch, no_rng)[:2])

        self._rows = NamedSharding(e.mesh, rows)
        in_specs = (P(), rows, rows)
        self._add = jax.jit(
            jax.shard_map(
                add, mesh=e.mesh, in_specs=in_specs, out_specs=rows, check_vma=False
            ),
            donate_argnums=2,
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
        sums = jax.make_array_from_process_local_data(self._rows, mine)
        for batch in batches:
            sums = self._add(params, to_devices(batch, e.mesh), sums)
        nats, targets = jax.device_get(self._total(sums)).astype(np.float64)
        bits = data.bits_per_byte(nats, e.corpus, targets=targets)
        return float(nats / targets), float(bits)


def to_devices(batch: PyTree, mesh: Mesh) -> PyTree:
    """This process's rows -> global arrays split over the data axis."""
    sharding = NamedSharding(mesh, P(DATA))
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(sharding, x), batch
    )


def initial(experiment: Experiment) -> tuple[PyTree, Any]:
    """Parameters, replicated, and the sharded optimizer state."""
    replicated = NamedSharding(experiment.mesh, P())
    make = jax.jit(
        lambda: gpt_neo.init_params(
            experiment.model, jax.random.key(experiment.config.seed)
        ),
        out_shardings=replicated,
    )
    params = make()
    return params, experiment.tx.init(params)


def run(
    experiment: Experiment, *, stop_after: int | None = None
) -> dict[str, Any] | None:
    """Train, or continue a run, to its end.

    Args:
      experiment: from `prepare`.
      stop_after: stop after so many half-rounds in all, with a checkpoint, as an
        interrupted run does.

    Returns:
      The summary, None if the run was stopped before its end.

    Raises:
      FloatingPointError: the loss is not finite; the last checkpoint stays.
    """
    config, workdir = experiment.config, experiment.workdir
    params, state = initial(experiment)
    batches = _batches(experiment)
    checkpoints = Checkpoints(workdir / "checkpoints", config.keep_checkpoints)
    done, seconds_before = 0, 0.0
    if (latest := checkpoints.latest()) is not None:
        (params, state), host = checkpoints.restore(latest, (params, state))
        batches.set_state(host["batches"])
        done, seconds_before = latest, host["seconds"]
        logging.info(
            "continuing after half-round %d of %d", done, experiment.half_rounds
        )
    counts = None
    if config.counts:
        mine = np.split(np.asarray(config.counts, np.int32), jax.process_count())
        counts = to_devices(mine[jax.process_index()], experiment.mesh)
    evaluate = Evaluator(experiment)
    recorder = metrics.Recorder(workdir, experiment.half_rounds, done)
    start = time.perf_counter() - seconds_before
    last = min(experiment.half_rounds, stop_after or experiment.half_rounds)

    def save() -> None:
        host = {
            "batches": batches.get_state(),
            "seconds": time.perf_counter() - start,
        }
        checkpoints.save(done, (params, state), host)

    def validate(limit: int | None) -> dict[str, Any]:
        loss, bits = evaluate(acco_jax.committed_params(state, params), limit)
        return {
            "kind": "validation",
            "half_round": done,
            "step": experiment.steps_done(done),
            "tokens": done * experiment.tokens,
            "seconds": time.perf_counter() - start,
            "loss": loss,
            "bits_per_byte": bits,
        }

    with jax.transfer_guard("disallow"), _stop_signals() as stopped:
        while done < last:
            batch = to_devices(next(batches), experiment.mesh)
            params, state, device = experiment.step(params, state, batch, counts)
            done += 1
            if done % config.log_every == 0:
                recorder.train(
                    {
                        "kind": "train",
                        "half_round": done,
                        "tokens": done * experiment.tokens,
                        "seconds": time.perf_counter() - start,
                        "microbatches": list(config.counts)
                        or [experiment.microbatches] * experiment.workers,
                    },
                    {k: device[k] for k in ("loss", "grad_norm", "step")}
                    | {"learning_rate": _rate(experiment, device["step"])},
                )
            step = experiment.steps_done(done)
            if step and step % config.eval_every == 0 and done < last:
                row = validate(config.eval_batches)
                recorder.evaluation(row)
                logging.info(
                    "step %d: held-out loss %.4f, %.4f bits per byte",
                    step, row["loss"], row["bits_per_byte"],
                )  # fmt: skip
                if not np.isfinite(row["loss"]):
                    raise FloatingPointError(
                        f"the held-out loss is {row['loss']} after step {step}: lower "
                        "the learning rate; checkpoints before it are kept."
                    )
            if step and step % config.checkpoint_every == 0 and done < last:
                save()
            if stopped(done):
                last = done
        recorder.flush()
        if checkpoints.latest() != done:
            save()
        checkpoints.close()
        if done < experiment.half_rounds:
            recorder.close()
            logging.info(
                "stopped after half-round %d of %d: the same command continues",
                done, experiment.half_rounds,
            )  # fmt: skip
            return None
        seconds = time.perf_counter() - start
        row = validate(None)
        recorder.evaluation(row)
        recorder.close()
    return _finish(experiment, params, row, seconds)


def _rate(experiment: Experiment, step: jax.Array) -> jax.Array:
    """The learning rate of the step under way, without waiting for the device."""
    return _rates(experiment.schedule)(step)


def _rates(schedule: optax.Schedule) -> Callable[[jax.Array], jax.Array]:
    if schedule not in _JITTED:
        _JITTED[schedule] = jax.jit(lambda step: jnp.asarray(schedule(step)))
    return _JITTED[schedule]


_JITTED: dict[optax.Schedule, Callable[[jax.Array], jax.Array]] = {}


def _finish(
    experiment: Experiment, params: PyTree, row: dict[str, Any], seconds: float
) -> dict[str, Any]:
    config, workdir = experiment.config, experiment.workdir
    summary = {
        "method": config.method,
        "devices": experiment.workers,
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "steps": config.steps,
        "tokens": row["tokens"],
        "seconds": seconds,
        "loss": row["loss"],
        "bits_per_byte": row["bits_per_byte"],
        "bigram_bits_per_byte": data.bigram_bits_per_byte(experiment.corpus),
    }
    if jax.process_index() == 0:
        title = f"{config.method}, {config.data.name}, {experiment.workers} devices"
        rows, bigram = metrics.read(workdir), summary["bigram_bits_per_byte"]
        reports.draw(rows, bigram, workdir / "loss.png", title)
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
