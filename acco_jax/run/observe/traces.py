"""Reader of jax.profiler's traces: when devices communicated and computed.

A trace has planes of lines of events. The place of a device's work depends on its kind:

  GPU  "/device:GPU:0", lines "Stream #13...": kernels, of which NCCL's communicate, and
       copies, which are neither.
  TPU  "/device:TPU:0", line "XLA Ops": an operation at a time, loops around those in
       them; "Async XLA Ops": transfers from their start to their end; "Steps":
       half-rounds by the device's own clock.
  CPU  "/host:CPU", lines of threads: events with the statistics `hlo_op` and
       `device_ordinal`.

Half-rounds are the host's annotations `ANNOTATION`, unless the device has its own.
A trace in no such form is unknown, with a reason; it never counts as overlapped.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData, ProfileEvent, ProfilePlane

from acco_jax.run.observe import intervals

ANNOTATION = "half_round"
Span = tuple[int, int]  # nanoseconds
# Names of HLO, of JAX's primitives, and of NCCL's kernels, by kind of collective.
_KINDS = {
    "reduce-scatter": r"(all-)?reduce[-_]scatter|psum_scatter|nccl\w*ReduceScatter",
    "all-gather": r"all[-_]gather|nccl\w*AllGather",
    "all-reduce": r"all[-_]reduce|psum|pmean|nccl\w*AllReduce",
    "all-to-all": r"(ragged[-_])?all[-_]to[-_]all|nccl\w*AllToAll",
    "collective-permute": r"collective[-_]permute|ppermute|nccl\w*SendRecv",
    "other": r"collective[-_]broadcast|async-collective(?!-fusion)|send|recv|nccl",
}
_COLLECTIVES = {k: re.compile(rf"%?({p})(?![a-z])", re.A) for k, p in _KINDS.items()}
# Their bodies have events of their own, on this line or on another.
_CONTAINERS = re.compile(r"%?(while|call|conditional)([._]\d+)*$")
_COPIES = re.compile(r"mem(cpy|set)", re.I)


@dataclasses.dataclass(frozen=True)
class Activity:
    """Activity of a device."""

    device: str
    communication: Mapping[str, intervals.Set]  # kind of collective -> when
    computation: intervals.Set
    steps: Mapping[int, Span]  # half-rounds by its own clock; {} without one


@dataclasses.dataclass(frozen=True)
class Trace:
    """Content of a trace."""

    calls: Mapping[int, Span]  # by the host's clock
    devices: tuple[Activity, ...]
    unknown: str  # why the devices are unknown; '' if they are known


def kind_of(name: str) -> str | None:
    """Return the kind of collective of an operation or kernel; None if it is none."""
    return next((kind for kind, p in _COLLECTIVES.items() if p.match(name)), None)


def found(folder: Path) -> Path | None:
    """Return the newest trace that jax.profiler has written into a folder, if any."""
    return max(folder.glob("plugins/profile/*/*.xplane.pb"), default=None)


def read(data: ProfileData, workers: int) -> Trace:
    """Read a trace.

    Args:
      data: of jax.profiler.
      workers: of the run; several communicate.
    """
    planes = list(data.planes)
    calls = {
        number: span
        for plane in planes
        if plane.name.startswith("/host:")
        for line in plane.lines
        for event in line.events
        if event.name == ANNOTATION
        for number, span in [(_statistics(event).get("step_num"), _span(event))]
        if number is not None
    }
    devices = [_device(p) for p in planes if p.name.startswith("/device:")]
    devices = [d for d in devices if d.communication or len(d.computation)]
    if not devices:
        devices = [d for p in planes if p.name == "/host:CPU" for d in _threads(p)]
    return Trace(
        {int(number): span for number, span in calls.items()},
        tuple(devices),
        _unknown([p.name for p in planes], devices, workers),
    )


def _unknown(planes: list[str], devices: list[Activity], workers: int) -> str:
    if not devices:
        return "no events of devices in a form that is known here; the trace has " + (
            ", ".join(planes) or "nothing"
        )
    silent = [d.device for d in devices if not d.communication]
    if workers > 1 and silent:
        return f"no collective by a known name on {', '.join(silent)}"
    idle = [d.device for d in devices if not len(d.computation)]
    if idle:
        return f"no computation on {', '.join(idle)}"
    return ""


def _device(plane: ProfilePlane) -> Activity:
    """Read the plane of a GPU or a TPU."""
    work: list[tuple[str, Span]] = []
    transfers: list[tuple[str, Span]] = []
    steps: dict[int, Span] = {}
    for line in plane.lines:
        if line.name == "XLA Ops" or line.name.startswith("Stream #"):
            work += _leaves(line)
        elif line.name == "Async XLA Ops":
            transfers += [(_operation(e), _span(e)) for e in line.events]
        elif line.name == "Steps":
            steps = {int(e.name): _span(e) for e in line.events if e.name.isdecimal()}
    return _activity(plane.name, work, transfers, steps)


def _threads(plane: ProfilePlane) -> Iterator[Activity]:
    """Read the CPU devices whose operations ran in the host's threads."""
    work: dict[int, list[tuple[str, Span]]] = {}
    for line in plane.lines:
        for name, span, device in _leaves_of_devices(line):
            work.setdefault(device, []).append((name, span))
    for device, events in sorted(work.items()):
        yield _activity(f"CPU {device}", events, [], {})


def _activity(
    device: str,
    work: list[tuple[str, Span]],
    transfers: list[tuple[str, Span]],
    steps: dict[int, Span],
) -> Activity:
    spans: dict[str, list[Span]] = {}
    for name, span in (*work, *transfers):
        if kind := kind_of(name):
            spans.setdefault(kind, []).append(span)
    computation = [s for n, s in work if not (kind_of(n) or _COPIES.match(n))]
    communication = {k: intervals.union(s) for k, s in sorted(spans.items())}
    return Activity(device, communication, intervals.union(computation), steps)


def _leaves(line: Any) -> list[tuple[str, Span]]:
    """Return the operations of a line, without those around others."""
    return [(_operation(e), _span(e)) for e in _innermost(list(line.events))]


def _leaves_of_devices(line: Any) -> Iterator[tuple[str, Span, int]]:
    """Yield a thread's operations with devices, without those around others."""
    needed = {"hlo_op", "device_ordinal"}
    events = [e for e in line.events if needed <= _statistics(e).keys()]
    for event in _innermost(events):
        statistics = _statistics(event)
        yield str(statistics["hlo_op"]), _span(event), int(statistics["device_ordinal"])


def _innermost(events: list[Any]) -> Iterator[Any]:
    """Yield the events of a line that contain no other one."""
    events = sorted(events, key=lambda e: (e.start_ns, -e.duration_ns))
    for event, after in itertools.zip_longest(events, events[1:]):
        around = (
            after is not None and after.start_ns < event.start_ns + event.duration_ns
        )
        if not around and not _CONTAINERS.match(event.name):
            yield event


def _operation(event: ProfileEvent) -> str:
    """Return an event's HLO operation if it communicates, else the event's name."""
    operation = str(_statistics(event).get("hlo_op", ""))
    return operation if kind_of(operation) else event.name


def _statistics(event: ProfileEvent) -> dict[str, Any]:
    return {name: value for name, value in event.stats if name is not None}


def _span(event: ProfileEvent) -> Span:
    return round(event.start_ns), round(event.start_ns + event.duration_ns)
