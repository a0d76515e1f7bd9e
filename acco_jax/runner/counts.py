"""The microbatches that every worker computed in every half-round: counts.jsonl.

One JSON list of n integers a line, written where counts adapt during a run;
`--config.microbatches=replay:WORKDIR/counts.jsonl` repeats such a run to the bit.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import jax

from acco_jax.runner.files import write_rows
from acco_jax.step.adaptive import check_counts, read_counts

FILE = "counts.jsonl"


class CountsLog:
    """The counts of a run so far, which process 0 writes."""

    def __init__(self, workdir: Path, done: int) -> None:
        """Opens the log of a run, cut after the half-rounds done so far.

        Raises:
          ValueError: the log is damaged, or of fewer half-rounds.
        """
        path, rows = workdir / FILE, kept(workdir, done)
        self.total = sum(map(sum, rows))  # microbatches of all workers
        self.last = rows[-1] if rows else []  # counts of the last half-round
        self._file = None
        if jax.process_index() == 0:
            write_rows(path, rows)
            self._file = path.open("a")

    def add(self, counts: Sequence[int]) -> None:
        """Appends the next half-round's counts, one for each worker."""
        self.last = [int(c) for c in counts]
        self.total += sum(self.last)
        if self._file:
            self._file.write(json.dumps(self.last) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file:
            self._file.close()


def kept(workdir: Path, done: int) -> list[list[int]]:
    """Returns the counts of the half-rounds done so far.

    Raises:
      ValueError: the log is damaged, or of fewer half-rounds.
    """
    path = workdir / FILE
    rows = read_counts(path, done)
    if len(rows) < done:
        raise ValueError(
            f"{path} has {len(rows)} half-rounds, but the checkpoint is of "
            f"half-round {done}: restore a complete copy, or use another workdir."
        )
    return rows


def check_log(log: Path, half_rounds: int, workers: int, most: int) -> None:
    """Raises a ValueError unless a log can be repeated by such a run, whole."""
    rows = read_counts(log)
    if len(rows) < half_rounds:
        raise ValueError(
            f"{log} has {len(rows)} half-rounds, but the run takes {half_rounds}: "
            "lower steps."
        )
    check_counts(rows, log, workers, most)
