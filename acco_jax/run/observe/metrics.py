"""Metrics of a run: metrics.jsonl, hooks, and its progress as people see it."""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import tqdm
from absl import logging

from acco_jax.command.files import is_number, read_rows, write_rows
from acco_jax.run.observe import goodput, timing
from acco_jax.run.observe.hooks import Hooks
from acco_jax.run.observe.progress import Progress
from acco_jax.run.observe.spikes import Spikes
from acco_jax.run.state.drops import Drops

FILE = "metrics.jsonl"
COMPILED = 0.05  # largest compiling share of an interval with a known rate


class Recorder:
    """Writer of metrics, one logging interval late, so that fetching never waits.

    Every process reads its losses; only process 0 writes them. Times are those at
    which the devices finished an interval, whenever it is fetched. Where the step
    itself waits for the device they are written at once.
    """

    def __init__(
        self,
        workdir: Path,
        *,
        done: int,
        tokens: int,
        seconds: float,
        late: bool = True,
        hooks: Hooks | None = None,
        flops: tuple[float, float] | None = None,
        drops: Drops | None = None,
        spikes: Spikes | None = None,
        record: goodput.Record | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Open the records of a run, without rows later than its half-rounds done.

        It has done `done` half-rounds, with `tokens` targets, in `seconds` seconds.
        Steps that wait for the device are not written `late`. Process 0 calls the hooks
        with each row. With `flops`, the model's per token and the devices' peak per
        second, rows of training have the model FLOPs utilization; with `drops` how
        often workers were dropped since the row before. A half-round that nobody
        counted in has no row. `spikes` judge the fetched half-rounds, and a `record`
        gets them. Process 0 has a `progress` that shows the rows.
        """
        self._late, self._hooks, self._flops = late, hooks or Hooks(), flops
        self._record, self._spikes, self._progress = record, spikes, progress
        self._drops = drops if drops is not None and drops.dropping else None
        self._pending: tuple[dict[str, Any], dict[str, Any], Any] | None = None
        self._between: tuple[dict[str, Any], dict[str, Any], Any] | None = None
        self._start = time.perf_counter() - seconds
        self._mark = (time.perf_counter(), tokens)
        self._writes = jax.process_index() == 0
        if not self._writes:
            return
        path, rows = workdir / FILE, read(workdir)
        # evaluations come before a checkpoint, except the final one
        rows = [r for r in rows if r["kind"] != "final" and r["half_round"] <= done]
        workdir.mkdir(parents=True, exist_ok=True)
        write_rows(path, rows)
        self._file = path.open("a")
        self._hooks.open_board(workdir, done)
        self._ends, self._compilations = timing.Ends(), timing.Compilations()

    @property
    def seconds(self) -> float:
        """Seconds of the run so far, earlier parts of it included."""
        return time.perf_counter() - self._start

    def train(self, host: dict[str, Any], device: dict[str, jax.Array]) -> None:
        """Take this interval's metrics and write the last one's.

        Args:
          host: values on the host: half_round, tokens, ...
          device: scalars on the device, possibly not computed yet; a weight of 0 says
            that nobody counted.

        Raises:
          FloatingPointError: if the last interval's loss is not finite, or a worker was
            dropped for too long.
          LossSpike: if a window of losses is far above the lowest one.
        """
        end = self._ends.of(device) if self._writes else None
        self.flush()
        self._pending = (host, device, end)
        if not self._late:
            self.flush()

    def between(self, host: dict[str, Any], device: dict[str, jax.Array]) -> None:
        """Show a call between two rows if that is due, as soon as it is computed.

        Arguments are as for `train`.
        """
        if self._progress is None or not self._progress.due():
            return
        if self._between is None:
            self._between = host, device, self._ends.of(device)
        host, device, ended = self._between
        if ended.done():
            self._between = None
            values = {k: v.item() for k, v in jax.device_get(device).items()}
            values.pop("weight", None)
            times = self._times(ended.result(), host["tokens"])
            self._progress.show(host | values | times, between=True)

    def flush(self) -> None:
        """Write the pending metrics; raise as `train` does."""
        self._between = None
        if self._pending is None:
            return
        (host, device, ended), self._pending = self._pending, None
        record = self._record
        with record.fetching() if record else contextlib.nullcontext():
            values = {k: v.item() for k, v in jax.device_get(device).items()}
        if record:
            record.trained(host["half_round"])
        dropped = {}
        if self._drops is not None:
            self._drops.read(host["half_round"])
        if not values.pop("weight", 1):
            return
        if self._drops is not None:
            dropped["dropped"] = self._drops.since_last()
        check(values["loss"], "the loss", host["half_round"])
        if self._spikes is not None:
            self._spikes.read(host["half_round"])
        if not self._writes:
            return
        end = ended.result()
        row = host | values | dropped | self._times(end, host["tokens"])
        self._mark = (end, host["tokens"])
        self._write(row)
        if self._progress is not None:
            self._progress.show(row)

    def _times(self, end: float, tokens: int) -> dict[str, float | None]:
        """Return the run's time, and its speed since the last interval.

        The speed is None where it is unknown or impossible.
        """
        begin, before = self._mark
        times, seconds = {"seconds": end - self._start}, end - begin
        compiling = self._compilations.seconds(begin, end)
        known = seconds > 0 and compiling <= COMPILED * seconds
        rate = (tokens - before) / seconds if known else None
        if self._flops is None:
            return times | {"tokens_per_second": rate}
        per_token, peak = self._flops
        used = None if rate is None else rate * per_token / peak
        if used is not None and used > 1:
            rate = used = None
        return times | {"tokens_per_second": rate, "model_flops_utilization": used}

    @contextlib.contextmanager
    def pause(
        self, tokens: int, what: str = "waiting", step: int | None = None
    ) -> Iterator[None]:
        """Flush, and leave the time inside out of tokens_per_second.

        The progress shows `what` the run does meanwhile, after a step if it ended one.
        """
        self.flush()
        shown = self._progress and self._progress.doing(what, step)
        with shown or contextlib.nullcontext():
            yield
        self._mark = (time.perf_counter(), tokens)

    def evaluation(self, row: dict[str, Any]) -> None:
        """Write and log an evaluation.

        Raises:
          FloatingPointError: if its loss is not finite.
        """
        check(row["loss"], "the held-out loss", row["half_round"])
        if not self._writes:
            return
        self._write(row)
        which = "of all documents " if row["kind"] == "final" else ""
        with tqdm.tqdm.external_write_mode(file=sys.stderr):
            logging.info(
                "step %d: held-out loss %s%.4f, %.4f bits per byte",
                row["step"], which, row["loss"], row["bits_per_byte"],
            )  # fmt: skip
            for text in row.get("samples", ()):
                logging.info("sample: %r", text)

    def sync(self) -> None:
        """Have the rows so far outlive this host."""
        if self._writes:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the files; pending metrics are lost."""
        if self._progress is not None:
            self._progress.close()
        if self._writes:
            self._hooks.close_board()
            self._ends.close()
            self._compilations.close()
            self._file.close()

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(dict(map(_known, row.items()))) + "\n")
        self._file.flush()
        self._hooks.row(row)


def _known(item: tuple[str, Any]) -> tuple[str, Any]:
    """Return a row's name and value, None in place of a number that JSON lacks."""
    name, value = item
    lacks = isinstance(value, float) and not math.isfinite(value)
    return name, None if lacks else value


def check(loss: float, what: str, half_round: int) -> None:
    """Raise a FloatingPointError if a loss is not finite."""
    if not math.isfinite(loss):
        raise FloatingPointError(
            f"{what} is {loss} at half-round {half_round}: lower "
            "optimizer.learning_rate and use a new workdir; the checkpoints in this "
            "one were written before that half-round."
        )


def read(workdir: Path) -> list[dict[str, Any]]:
    """Read the rows of a run so far, without a line that a killed process left cut.

    Raises:
      ValueError: if the file holds something other than rows.
    """
    path, numbers = workdir / FILE, ("half_round", "loss", "tokens", "seconds")
    rows = read_rows(path, {"kind", *numbers})
    for number, row in enumerate(rows, 1):
        rate = row.get("tokens_per_second", "none" if row["kind"] == "train" else 0)
        values = (*(row[name] for name in numbers), 0 if rate is None else rate)
        if not all(map(is_number, values)) or row["half_round"] < 1:
            raise ValueError(f"{path} is damaged in line {number}: restore it.")
    return rows
