"""Goodput: the share of a run's wall time in half-rounds that counted (goodput.jsonl).

Wall time begins with the first start of the run in its workdir and ends with its final
evaluation, whatever stopped or killed it in between. The time between a run's end and
the start that makes it longer does not count. Process 0 appends a line when something
ends: its time, the cause of the time since the line before, and the half-rounds done so
far. A killed process has written its lines. The time after its last line counts for the
line with which the next process starts, `down`.

Every second has one cause:

  training     work that is in the parameters: half-rounds that counted.
  repeated     training that a kill or a rollback lost and that was done again.
  start_up     from the start of a process, or from a spike that is rolled back, until
               half-rounds can begin: imports, data, parameters or a checkpoint.
  compiling    JAX traces, lowers or compiles, or loads what it has compiled before.
  evaluation   of held-out documents.
  checkpoints  checks that what is saved is sound, and writes it.
  profiling    starts traces of config.profile, ends them and sums them up.
  waiting      for other processes at the start; then for batches to train on, less what
               the host then waited for the devices, which still had work to do.
  down         no process ran, or the one that ran was killed before its next line.

The times are those of the host: nothing here waits for a device. The loop waits for
its half-rounds before it marks what follows them.
"""

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from acco_jax.command.files import append_row, is_number, read_rows, write_rows
from acco_jax.run.observe import timing

FILE = "goodput.jsonl"
CAUSES = (
    "training", "repeated", "start_up", "compiling", "evaluation", "checkpoints",
    "profiling", "waiting", "down",
)  # fmt: skip

# time (s since 1970), cause; half_round, compiling, waiting, over, stopped
Row = dict[str, Any]


class Record:
    """Record of a run, which process 0 writes; for the others it does nothing."""

    def __init__(self, workdir: Path, began: float, *, over: bool) -> None:
        """Continue the record of a workdir, or begin one.

        Args:
          workdir: of the run.
          began: when this process started, in seconds since 1970.
          over: whether no half-round is left. If the run was evaluated then, it has
            ended, and nothing is added to its wall time.

        Raises:
          ValueError: if the file is damaged.
        """
        self._path, self._waited = workdir / FILE, 0.0
        self._compiled: list[tuple[float, float]] = []  # begin and end
        speaks = jax.process_index() == 0
        self._rows = read(workdir) if speaks else []
        ended = over and bool(self._rows) and bool(self._rows[-1].get("over"))
        self._writes = speaks and not ended
        if self._writes:
            write_rows(self._path, self._rows)  # without a line that a kill has cut
            self._add({"time": began, "cause": "down"})
            jax.monitoring.register_event_time_span_listener(self._notice)

    def mark(
        self,
        cause: str,
        half_round: int,
        *,
        waiting: float = 0.0,
        over: bool = False,
        stopped: bool = False,
    ) -> None:
        """Record the cause of the time since the last mark.

        Args:
          cause: one of `CAUSES`.
          half_round: half-rounds done now; fewer than before if some were lost.
          waiting: seconds of that time that the host waited.
          over: whether the run has ended.
          stopped: whether it has stopped before its end, and saved.
        """
        if not self._writes:
            return
        row = {"time": time.time(), "cause": cause, "half_round": half_round}
        seconds = timing.covered(self._compiled, self._rows[-1]["time"])
        self._compiled.clear()
        more = {"compiling": seconds, "waiting": waiting, "over": over,
                "stopped": stopped}  # fmt: skip
        self._add(row | {name: value for name, value in more.items() if value})

    def trained(self, half_round: int) -> None:
        """Record the half-rounds done so far, `half_round` the last, as training."""
        waiting, self._waited = self._waited, 0.0
        if self._rows and self._rows[-1].get("half_round") != half_round:
            self.mark("training", half_round, waiting=waiting)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure how long the host waits for a batch."""
        begin = time.perf_counter()
        yield
        self._waited += time.perf_counter() - begin

    @contextlib.contextmanager
    def fetching(self) -> Iterator[None]:
        """Measure how long the host waits for the devices, which is not for a batch."""
        begin = time.perf_counter()
        yield
        self._waited = max(0.0, self._waited - (time.perf_counter() - begin))

    def summary(self) -> dict[str, Any]:
        """Return goodput, wall time and the seconds of each cause, as in summary.json.

        Only process 0 has them; for the others it is empty.
        """
        if not self._rows:
            return {}
        seconds = spent(self._rows)
        return {
            "goodput": share(seconds),
            "wall_seconds": sum(seconds.values()),
            "seconds_by_cause": seconds,
        }

    def close(self) -> None:
        """Stop listening for compilations."""
        if self._writes:
            jax.monitoring.unregister_event_time_span_listener(self._notice)

    def _notice(
        self, event: str, start_time: float, end_time: float, **_: str | int
    ) -> None:
        if event.startswith(timing.COMPILER):
            self._compiled.append((start_time, end_time))

    def _add(self, row: Row) -> None:
        self._rows.append(row)
        append_row(self._path, row)


def spent(rows: Sequence[Row]) -> dict[str, float]:
    """Return the seconds of each cause, which add up to the wall time.

    A clock that was set back stands still until it is past the latest time it showed.
    If half-rounds a to b were trained and those after c were lost, (b - c) / (b -
    a) of the time are repeated.
    """
    seconds = dict.fromkeys(CAUSES, 0.0)
    kept: list[tuple[int, int, float]] = []  # training: from, to, seconds
    times = itertools.accumulate((row["time"] for row in rows), max)
    reached = 0
    pairs = itertools.pairwise(times)
    for last, (before, now), row in zip(rows, pairs, rows[1:], strict=False):
        left = 0.0 if last.get("over") else now - before
        for cause in ("compiling", "waiting"):
            part = min(row.get(cause, 0.0), left)
            seconds[cause] += part
            left -= part
        reach = row.get("half_round", reached)
        if reach < reached:
            seconds["repeated"] += _lose(kept, reach)
            reached = reach
        if row["cause"] == "training":
            kept.append((reached, reach, left))
        else:
            seconds[row["cause"]] += left
        reached = reach
    seconds["training"] = sum(part for _, _, part in kept)
    return seconds


def share(seconds: dict[str, float]) -> float:
    """Return the goodput: the part of the wall time that training took."""
    return seconds["training"] / max(sum(seconds.values()), 1e-9)


def read(workdir: Path) -> list[Row]:
    """Read the record of a run so far; [] if there is none.

    Raises:
      ValueError: if the file holds something else.
    """
    path = workdir / FILE
    rows = read_rows(path, {"time", "cause"})
    numbers = ("time", "half_round", "compiling", "waiting")
    for number, row in enumerate(rows, 1):
        sound = all(is_number(row.get(name, 0)) for name in numbers)
        if not sound or row["cause"] not in CAUSES:
            raise ValueError(f"{path} is damaged in line {number}: remove it.")
    return rows


def rolled_back(rows: Sequence[Row]) -> bool:
    """Return whether a process of the run went back after a spike of the loss."""
    return any(
        row["cause"] == "start_up" and before["cause"] != "down"
        for before, row in itertools.pairwise(rows)
    )


def _lose(kept: list[tuple[int, int, float]], reach: int) -> float:
    """Take training beyond a half-round off the end of `kept`; return its seconds."""
    lost = 0.0
    while kept and kept[-1][1] > reach:
        first, last, seconds = kept.pop()
        if first < reach:
            stays = seconds * (reach - first) / (last - first)
            kept.append((first, reach, stays))
            seconds -= stays
        lost += seconds
    return lost
