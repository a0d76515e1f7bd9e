"""The microbatches that every worker computed in every half-round: counts.jsonl.

One JSON list of n integers a line, written where counts are found while a run goes on;
`--config.microbatches=replay:WORKDIR/counts.jsonl` repeats such a run to the bit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import jax

from acco_jax.adaptive import check_counts, read_counts

FILE = "counts.jsonl"


class CountsLog:
    """Counts of a run so far; process 0 writes them.

    Attributes:
      total: microbatches of all workers so far.
      last: counts of the last half-round, empty before the first.
    """

    def __init__(self, workdir: Path, done: int) -> None:
        """Opens the log of a run, without half-rounds later than where it stands.

        Args:
          workdir: of the run.
          done: half-rounds so far.

        Raises:
          ValueError: the log is damaged, or of fewer half-rounds.
        """
        path = workdir / FILE
        rows = read_counts(path, done)
        if len(rows) < done:
            raise ValueError(
                f"{path} has {len(rows)} half-rounds, but the checkpoint is of {done}: "
                "put a sound copy back, or use another workdir."
            )
        self.total = sum(map(sum, rows))
        self.last = rows[-1] if rows else []
        self._file = None
        if jax.process_index() == 0:
            partial = path.with_suffix(".partial")
            partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
            os.replace(partial, path)
            self._file = path.open("a")

    def add(self, counts: Sequence[int]) -> None:
        """Takes the next half-round's counts, one for each worker."""
        self.last = [int(c) for c in counts]
        self.total += sum(self.last)
        if self._file:
            self._file.write(json.dumps(self.last) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file:
            self._file.close()


def check_log(log: Path, half_rounds: int, workers: int, most: int) -> None:
    """Raises a ValueError unless a log can be repeated by such a run, whole."""
    rows = read_counts(log)
    if len(rows) < half_rounds:
        raise ValueError(
            f"{log} has {len(rows)} half-rounds, but the run takes {half_rounds}: "
            "lower steps."
        )
    check_counts(rows, log, workers, most)
