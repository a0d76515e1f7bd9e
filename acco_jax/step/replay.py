"""Counts of microbatches that a run has logged, to be repeated bitwise."""

import dataclasses
import json
from pathlib import Path

from acco_jax.core import small_files

LARGEST = 2**32  # bytes of a log


@dataclasses.dataclass(frozen=True)
class Replay:
    """Counts of each half-round, as a run whose counts varied logged them.

    Attributes:
      log: a file with one JSON list of n counts a line.
      most: of each worker; batches hold this many, as the run's batches did.
      first, last: the lines to repeat, counted from 0, without the last. Other lines
        may be of other numbers of workers. None: to the end.
    """

    log: str | Path
    most: int = 16
    first: int = 0
    last: int | None = None

    def __post_init__(self) -> None:
        if self.first < 0 or (self.last is not None and self.last < self.first):
            raise ValueError(
                f"{self}: give first from 0 on, and last not before it, or None."
            )


class Lines:
    """The lines of a log, checked for a number of workers."""

    def __init__(self, replay: Replay, workers: int, most: int) -> None:
        """Read the log.

        Raises:
          ValueError: the file is not a log, or other workers logged it.
        """
        log = Path(replay.log)
        self._rows = read_counts(log, replay.last)
        self.lines = self._rows[replay.first :]  # those to repeat
        check_counts(self.lines, log, workers, most, first=replay.first)

    def line(self, call: int) -> list[int]:
        """Return a half-round's counts; raise a ValueError at the end of the log."""
        if call >= len(self._rows):
            raise ValueError(
                f"the log of counts has {len(self._rows)} half-rounds: it cannot be "
                "repeated further."
            )
        return self._rows[call]


def check_counts(
    rows: list[list[int]], log: Path, workers: int, most: int, first: int = 0
) -> None:
    """Raise a ValueError unless every row has a count from 0 to `most` per worker.

    The rows are those of the log's line `first`, counted from 0, and after it.
    """
    for number, row in enumerate(rows, first + 1):
        if len(row) != workers or not 0 <= min(row) <= max(row) <= most:
            raise ValueError(
                f"line {number} of {log} is {row}: this run needs one count from 0 to "
                f"{most}, the most that a batch holds, for each of its {workers} "
                "workers."
            )


def read_counts(log: Path, first: int | None = None) -> list[list[int]]:
    """Return the counts of a logged run: one JSON list of n integers per half-round.

    Args:
      log: the file.
      first: how many lines to read; a killed run may have cut the last one off.

    Raises:
      ValueError: there is no such file, or a line is something else.
    """
    if first == 0:
        return []
    try:
        lines = small_files.text(log, LARGEST).splitlines()[:first]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"no log of counts at {log} ({small_files.reason(error)}): give the file "
            "that the run wrote."
        ) from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, list) or not all(type(x) is int for x in row):
            raise ValueError(f"line {number} of {log} is not a JSON list of counts.")
        rows.append(row)
    return rows
