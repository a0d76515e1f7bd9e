"""Trace of some half-rounds of a run, and its summary: config.profile=START:STOP.

While they are traced, half-rounds are awaited one by one, so that the devices' work
lies within the half-round it belongs to; the host's work between two is not counted.
For each half-round and device, in times of the trace:

  communication  at least one collective was under way.
  hidden         of this, overlapped: the device also computed; the rest is exposed.
  waited for     time in which the device did not compute: for a collective, of the kind
                 that was under way (the first of the alphabet, of several), or neither:
                 for the host, for data, or in copies.

Figures are means over the devices of a process, each of which traces its own.
"""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import jax
from absl import logging
from jax.profiler import ProfileData

from acco_jax.command.files import is_number, read_object, write_whole
from acco_jax.run.observe import intervals, traces

FOLDER = "profile"  # of a workdir: process-0.json, and its trace in process-0/
Row = dict[str, Any]


class TracedRun(Protocol):
    """A run that is traced."""

    def wait(self) -> None:
        """Wait until the devices have done everything so far."""

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """Keep the time inside out of the run's figures."""


class Profile:
    """Tracer of a run's half-rounds, and writer of their summary after the last one."""

    def __init__(
        self,
        asked: range,
        workdir: Path,
        workers: int,
        run: TracedRun,
    ) -> None:
        """Take the half-rounds to trace.

        Args:
          asked: the half-rounds.
          workdir: of the run.
          workers: of the run.
          run: that trains.
        """
        self._asked, self._workers = asked, workers
        self._folder = workdir / FOLDER
        self._run = run
        self._tracing = False

    @contextlib.contextmanager
    def half_round(self, number: int) -> Iterator[None]:
        """Trace the half-round inside, if it is one of those asked for."""
        if number not in self._asked:
            yield
            return
        if not self._tracing:
            self._start()
        with jax.profiler.StepTraceAnnotation(traces.ANNOTATION, step_num=number):
            yield
            self._run.wait()
        if number == self._asked[-1]:
            self.close()

    def _start(self) -> None:
        with self._run.aside():
            self._run.wait()
            shutil.rmtree(self._trace, ignore_errors=True)  # of an earlier start
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # slow, and of no use here
            jax.profiler.start_trace(self._trace, profiler_options=options)
            self._tracing = True

    @property
    def _trace(self) -> Path:
        return self._folder / f"process-{jax.process_index()}"

    def close(self) -> None:
        """End the trace, if there is one; write and log its summary."""
        if not self._tracing:
            return
        self._tracing = False
        with self._run.aside():
            jax.profiler.stop_trace()
            path = traces.found(self._trace)
            if path is None:  # a run must not fail for it
                logging.warning("jax.profiler has left no trace in %s", self._trace)
                return
            trace = traces.read(ProfileData.from_file(str(path)), self._workers)
            summary = summarized(trace)
            text = json.dumps(summary, indent=2) + "\n"
            write_whole(self._trace.with_suffix(".json"), text)
        for line in lines(summary):
            logging.info("%s", line)
        logging.info("the trace is %s", path)


def summarized(trace: traces.Trace) -> dict[str, Any]:
    """Return the content of process-N.json: seconds of each half-round.

    Without known devices, half-rounds have only their seconds.
    """
    rows = []
    for number in sorted(trace.calls):
        begin, end = trace.calls[number]
        row: Row = {"half_round": number, "seconds": (end - begin) / 1e9}
        if not trace.unknown:
            spans = [d.steps.get(number, (begin, end)) for d in trace.devices]
            each = [_spent(d, s) for d, s in zip(trace.devices, spans, strict=True)]
            row |= _mean(each)
        rows.append(row)
    unknown = trace.unknown or ("" if rows else "it has no half-round")
    devices = [device.device for device in trace.devices]
    return {"devices": devices, "unknown": unknown, "calls": rows}


def _spent(device: traces.Activity, span: traces.Span) -> Row:
    """Return a device's nanoseconds in a half-round, by activity."""
    window = intervals.union([span])
    computing = intervals.both(window, device.computation)
    waiting = intervals.without(window, computing)
    waited, under_way = {}, []
    for kind, times in device.communication.items():
        exposed = intervals.both(waiting, times)
        waited[kind] = intervals.length(exposed)
        waiting = intervals.without(waiting, exposed)
        under_way += times.tolist()
    communicating = intervals.both(window, intervals.union(under_way))
    hidden = intervals.both(communicating, computing)
    return {
        "computation": intervals.length(computing),
        "communication": intervals.length(communicating),
        "hidden": intervals.length(hidden),
        "waited_for": waited | {"neither": intervals.length(waiting)},
    }


def _mean(rows: list[Row]) -> Row:
    """Return means, in seconds; kinds that a device does not have are 0 there."""

    def mean(values: list[int]) -> float:
        return sum(values) / len(values) / 1e9

    names = ("computation", "communication", "hidden")
    kinds = dict.fromkeys(kind for row in rows for kind in row["waited_for"])
    kinds["neither"] = kinds.pop("neither")  # last
    return {
        **{name: mean([row[name] for row in rows]) for name in names},
        "waited_for": {
            k: mean([r["waited_for"].get(k, 0) for r in rows]) for k in kinds
        },
    }


def lines(summary: dict[str, Any]) -> Iterator[str]:
    """Yield the lines that are printed of a summary: a table of milliseconds."""
    devices, rows = summary["devices"], summary["calls"]
    if summary["unknown"]:
        yield f"what was overlapped is unknown: {summary['unknown']}"
        return
    yield f"milliseconds of half-rounds, means over {len(devices)} devices:"
    yield "half-round     time  computing  communicating   overlapped  exposed to"
    for row in rows:
        share = hidden_share(row)
        yield (
            f"{row['half_round']:10d} {1000 * row['seconds']:8.1f}"
            f" {1000 * row['computation']:10.1f}"
            f" {1000 * row['communication']:14.1f}"
            f" {'none sent' if share is None else f'{share:.0%}':>13}"
            f"  {waited(row)}"
        )


def waited(row: Row, unit: str = "") -> str:
    """Return what devices waited for, in milliseconds, as text."""
    parts = [
        f"{kind} {1000 * seconds:.1f}{unit}"
        for kind, seconds in row["waited_for"].items()
        if seconds >= 5e-5
    ]
    return ", ".join(parts) or "nothing"


def hidden_share(row: Row) -> float | None:
    """Return the overlapped share of the communication; None: there was none."""
    return row["hidden"] / row["communication"] if row["communication"] else None


def _is_summary(summary: dict[str, Any]) -> bool:
    """Return whether an object has the form of `summarized`'s result."""
    rows, unknown = summary.get("calls"), summary.get("unknown")
    if not isinstance(rows, list) or not isinstance(unknown, str):
        return False
    names = ("computation", "communication", "hidden") if not unknown else ()
    for row in rows:
        if not isinstance(row, dict):
            return False
        waited = row.get("waited_for", {} if unknown else None)
        if not isinstance(waited, dict):
            return False
        numbers = [row.get(name) for name in ("half_round", "seconds", *names)]
        if not all(map(is_number, [*numbers, *waited.values()])):
            return False
    return isinstance(summary.get("devices"), list)


def summaries(workdir: Path) -> list[tuple[str, dict[str, Any]]]:
    """Read the summaries of a run's traces, each with its process's name.

    Raises:
      ValueError: with the damaged file.
    """
    found = []
    paths = (workdir / FOLDER).glob("process-*.json")
    for path in sorted(paths, key=lambda p: (len(p.name), p.name)):
        summary = read_object(path)
        if not _is_summary(summary):
            raise ValueError(f"{path} is damaged: remove it, or trace again.")
        found.append((path.stem.replace("-", " "), summary))
    return found
