"""Log of every worker's microbatches in every half-round: counts.jsonl.

One JSON list of n integers a line, written where counts vary during a run;
`--replay=WORKDIR` repeats such a run bitwise, and
`--config.microbatches=replay:WORKDIR/counts.jsonl` its counts alone.
"""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import logging
from ml_collections import ConfigDict

import acco_jax
from acco_jax.command.files import write_rows
from acco_jax.command.paths import expanded
from acco_jax.core import small_files
from acco_jax.run.config import fields as configs
from acco_jax.run.state import worlds
from acco_jax.step.balanced import BalancedStep
from acco_jax.step.replay import LARGEST, check_counts, read_counts

FILE = "counts.jsonl"
Varying = acco_jax.Adaptive | acco_jax.Balanced | acco_jax.Halves | acco_jax.Replay


class CountsLog:
    """Counts of a run so far, which process 0 writes."""

    def __init__(self, workdir: Path, done: int) -> None:
        """Open the log of a run, cut after the half-rounds done so far.

        Raises:
          ValueError: if the log is damaged, or has fewer half-rounds.
        """
        path, rows = workdir / FILE, kept(workdir, done)
        self.total = sum(map(sum, rows))  # microbatches of all workers
        self.last = rows[-1] if rows else []  # counts of the last half-round
        self._file = None
        if jax.process_index() == 0:
            write_rows(path, rows)
            self._file = path.open("a")

    def add(self, counts: Sequence[int]) -> None:
        """Append the next half-round's counts, one for each worker."""
        self.last = [int(c) for c in counts]
        self.total += sum(self.last)
        if self._file:
            self._file.write(json.dumps(self.last) + "\n")
            self._file.flush()

    def sync(self) -> None:
        """Have the rows so far outlive this host."""
        if self._file:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file:
            self._file.close()


def logged(workdir: Path) -> int:
    """Return the half-rounds that a run has logged whole; 0 without a log."""
    path = workdir / FILE
    return small_files.text(path, LARGEST).count("\n") if path.exists() else 0


def kept(workdir: Path, done: int) -> list[list[int]]:
    """Return the counts of the half-rounds done so far.

    Raises:
      ValueError: if the log is damaged, or has fewer half-rounds.
    """
    path = workdir / FILE
    rows = read_counts(path, done)
    if len(rows) < done:
        raise ValueError(
            f"{path} has {len(rows)} half-rounds, but the checkpoint is of "
            f"half-round {done}: restore a complete copy, or use another workdir."
        )
    return rows


def check_log(log: Path, total_calls: int, workers: int, most: int) -> None:
    """Raise a ValueError unless a run of this size can repeat a log."""
    rows = read_counts(log, total_calls)
    if len(rows) < total_calls:
        raise ValueError(
            f"{log} has {len(rows)} half-rounds, but the run takes {total_calls}: "
            "lower steps."
        )
    check_counts(rows, log, workers, most)


def counted(
    config: ConfigDict, microbatches: int, total_calls: int, first: int, workers: int
) -> Varying | None:
    """Return how a half-round's microbatches are counted, None where they are fixed.

    Args:
      config: of the experiment.
      microbatches: of each of the first workers in a half-round.
      total_calls: of the whole run.
      first: number of workers that the run began with.
      workers: number of workers now.

    Raises:
      ValueError: if the bounds do not fit, or this run cannot repeat a log.
    """
    if config.microbatches == "fixed":
        return None
    capacity, balance = config.most_microbatches, config.balance
    if capacity < microbatches:
        raise ValueError(
            f"most_microbatches is {capacity}, less than the {microbatches} that "
            "microbatches_per_step gives a half-round: raise it."
        )
    if log := configs.replayed(config):
        path = expanded(log)
        check_log(path, total_calls, workers, capacity)
        return acco_jax.Replay(path, capacity, last=total_calls)
    if config.microbatches == "adaptive":
        return acco_jax.Adaptive(microbatches, capacity)
    total = microbatches * (first if config.batch == "kept" else workers)
    if workers * balance.floor > total:
        raise ValueError(
            f"balance.floor is {balance.floor}, but the {workers} workers compute "
            f"{total} microbatches in a half-round: "
            + ("lower it." if workers == first else f"start {first} workers.")
        )
    capacity = max(capacity, math.ceil(total / workers))  # of fewer than at first
    return acco_jax.Balanced(total, capacity, balance.floor, balance.grows)


def halves(
    config: ConfigDict, calls_per_step: int, first: int, workers: int
) -> list[acco_jax.Halves]:
    """Return the halves that a step of the config may have, smallest first half first.

    Args:
      config: of the experiment.
      calls_per_step: of the method.
      first: number of workers that the run began with, whose batch is kept.
      workers: number of workers now.

    Raises:
      ValueError: if the config gives a first half that its steps cannot have.
    """
    per_step = config.microbatches_per_step
    parts = ((x, per_step - x) for x in configs.first_halves(config, calls_per_step))
    if first == workers or config.batch == "per_worker":
        return [acco_jax.Halves(*pair) for pair in parts]
    return [
        acco_jax.Halves(*(worlds.dealt(part * first, workers) for part in pair))
        for pair in parts
    ]


class Watch:
    """Monitor of slow workers, where the train step measures them."""

    def __init__(self, step: acco_jax.TrainStep) -> None:
        self._step, self._said = step, set[int]()

    def counts(self, metrics: dict[str, Any]) -> list[int]:
        """Return every worker's microbatches of the call with these metrics.

        It waits for the devices only where the host does not have them.
        """
        if isinstance(self._step, BalancedStep):
            return list(self._step.counts)
        return [int(c) for c in jax.device_get(metrics["counts"])]

    def row(self, half_round: int) -> dict[str, Any]:
        """Return the slow workers for a row of metrics; process 0 logs changes."""
        if not isinstance(self._step, BalancedStep) or not self._step.seconds:
            return {}
        slow, counts = self._step.stragglers, self._step.counts
        spent, elapsed = self._step.probing
        found = {"stragglers": sorted(slow), "probes": spent / elapsed}
        if jax.process_index():
            return found
        for worker in sorted(slow.keys() - self._said):
            logging.warning(
                "worker %d is slow: a microbatch takes it %.1f times as long as the "
                "median; from half-round %d on the workers compute %s",
                worker, slow[worker], half_round, counts,
            )  # fmt: skip
        for worker in sorted(self._said - slow.keys()):
            logging.info(
                "worker %d is no longer slow: from half-round %d on the workers "
                "compute %s", worker, half_round, counts,
            )  # fmt: skip
        self._said = set(slow)
        return found
