"""The result of an audit: verdicts by axis, as objects, text and JSON."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from acco_jax.audit import axes
from acco_jax.core.names import suggestion
from acco_jax.schedule import costs, schedules
from acco_jax.schedule.causes import explained
from acco_jax.schedule.machines import Machine
from acco_jax.schedule.tables import aligned, in_bytes, many, paragraph, seconds
from acco_jax.schedule.topologies import Topology
from acco_jax.schedule.verdict import (
    OVERLAPPED,
    Reading,
    Verdict,
    milliseconds,
    network_of,
)

BESIDE = 3  # operations that JSON lists beside a collective
_FIELDS: tuple[str, ...] = (
    *("name", "kind", "bytes", "dtype", "times", "asynchronous", "start", "done"),
    *("where", "flops_between", "flops_carried", "op_name", "source"),
)
PROOF = (
    "READ from the schedule: what stands between a collective's launch and its end, "
    "and whether matrix products do (overlapped). PREDICTED from the middle of the "
    "chip's figures: seconds, and which of them are exposed. That the network keeps up "
    "while the chip computes is not shown by either."
)


@dataclasses.dataclass(frozen=True)
class Audit:
    """A program's schedule, its verdict for each axis and its predicted cost."""

    schedule: schedules.Schedule
    machine: Machine
    prediction: costs.Prediction
    mesh: Mapping[str, int]  # its axes and their sizes, outermost first; {}: unknown
    axes: Mapping[str, Verdict]  # by the collectives' axes, most bytes first

    @property
    def topology(self) -> Topology:
        return self.machine.topology

    def verdict(self, axis: str | None = None) -> Verdict:
        """Judge the collectives over an axis, only or with others; None: all.

        A collective whose devices the text does not give counts for every axis.

        Raises:
          ValueError: if there is no such axis.
        """
        if axis is None:
            chosen = list(self.axes.values())
        else:
            names = list(self.mesh) or list(self.axes)
            if axis not in (*names, *self.axes):
                known = ", ".join(names) or "none; give the mesh"
                raise ValueError(
                    f"there is no axis {axis!r}:{suggestion(axis, names)} Known: "
                    f"{known}."
                )
            chosen = [
                found
                for name, found in self.axes.items()
                if axis in (name, *name.split("+")) or name == axes.UNKNOWN
            ]
        readings = tuple(r for found in chosen for r in found.readings)
        return Verdict(
            readings,
            self.prediction.total,
            self.schedule.unknown,
            network_of(readings, self.machine),
        )

    def headline(self, axis: str | None = None) -> str:
        """Return what is exposed and overlapped over an axis (None: all), as a line.

        Raises:
          ValueError: if there is no such axis.
        """
        return _headline(axis, self.verdict(axis))

    def to_json(self) -> str:
        """Return everything as JSON, in SI units."""
        return json.dumps(as_dict(self), indent=2)

    def picture(self, path: str | Path) -> None:
        """Draw the program's predicted timeline as a PNG; needs matplotlib."""
        from acco_jax.schedule import pictures

        title = f"{self.topology}: prediction from the schedule"
        rows = [
            pictures.TimelineRow(
                "the program", self.prediction, hidden=self.verdict().shares()
            )
        ]
        pictures.timeline(rows, Path(path), title, "one execution")

    def __str__(self) -> str:
        return text(self)


def text(audit: Audit) -> str:
    """Return the whole table as text."""
    p, mesh = audit.prediction, " x ".join(f"{a} {n}" for a, n in audit.mesh.items())
    lines = [
        f"{audit.topology}: {audit.topology.devices} x {audit.topology.chip.title}"
        f"{f', mesh {mesh}' if mesh else ''}",
        f"one execution {seconds(p.total)} = computation {seconds(p.computation)} + "
        f"exposed communication {seconds(p.exposed)}"
        + (f" + slowed by communication {seconds(p.slowing)}" if p.slowing else "")
        + (f" + the call itself {seconds(p.call)}" if p.call else "")
        + f", PREDICTED, {audit.machine.network}",
        f"overlapped: {audit.verdict().shares()}",
        paragraph(PROOF, 0),
    ]
    for name, verdict in audit.axes.items():
        lines += ["", *_axis(name, verdict)]
    if not audit.axes:
        lines += ["", "no collective: nothing is communicated"]
    for form in audit.schedule.unknown:
        lines.append(f"unknown: {form} seems to communicate, in a form not known here")
    for loop in audit.schedule.loops:
        if loop.iterations is None:
            lines.append(
                f"note: how often {loop.name} in {loop.where} runs is not in the text: "
                "counted once, unless trip_counts says"
            )
    return "\n".join(lines)


def as_dict(audit: Audit) -> dict[str, Any]:
    """Return the audit as JSON-ready values, in SI units."""
    p = audit.prediction
    return {
        "topology": str(audit.topology),
        "devices": audit.topology.devices,
        "mesh": dict(audit.mesh),
        "proof": PROOF,
        "figures": {k: dataclasses.asdict(v) for k, v in audit.machine.figures.items()},
        "seconds": p.total,
        "computation_seconds": p.computation,
        "communication_seconds": p.communication,
        "exposed_seconds": p.exposed,
        "slowing_seconds": p.slowing,
        "call_seconds": p.call,
        "unknown": list(audit.schedule.unknown),
        "uncounted_loops": [
            loop.name for loop in audit.schedule.loops if loop.iterations is None
        ],
        "axes": {name: _axis_dict(v) for name, v in audit.axes.items()},
    }


def _headline(axis: str | None, verdict: Verdict) -> str:
    times = sum(r.collective.times for r in verdict.readings)
    return (
        f"{'all axes' if axis is None else f'axis {axis}'}: "
        f"{milliseconds(verdict.exposed)} exposed of "
        f"{milliseconds(verdict.seconds)}, {in_bytes(verdict.bytes)} in "
        f"{many(times, 'collective')}; overlapped: {verdict.shares()}"
    )


def _axis(name: str, verdict: Verdict) -> list[str]:
    lines = [_headline(name, verdict)]
    lines.append(aligned([_row(r) for r in verdict.readings], "llrllrlll"))
    against = {id(r) for r in verdict.objections}
    for r in verdict.readings:
        if r.cause.text and (id(r) in against or r.status == OVERLAPPED):
            lines.append(paragraph(f"{r.collective.name}: {explained(r.cause)}", 2))
    return lines


def _row(r: Reading) -> tuple[str, ...]:
    c = r.collective
    times = f" x {c.times}" if c.times > 1 else ""
    place = "" if c.where == "ENTRY" else f" of {c.where}"
    beside = "-"
    if r.beside:
        longest = r.beside[0]
        beside = f"{longest.name} {seconds(longest.seconds)}"
        beside += f" +{len(r.beside) - 1}" if len(r.beside) > 1 else ""
    return (
        c.kind,
        c.name,
        in_bytes(c.bytes) + times,
        f"lines {c.start}-{'?' if c.done is None else c.done}{place}",
        r.status if c.asynchronous else f"{r.status}, synchronous",
        seconds(r.spent.exposed),
        beside,
        c.source or "?",
        c.op_name.rsplit("/", 1)[-1],
    )


def _axis_dict(verdict: Verdict) -> dict[str, Any]:
    return {
        "bytes": verdict.bytes,
        "hidden_bytes": verdict.hidden_bytes,
        "hidden_bytes_fraction": verdict.hidden_share,
        "hidden_seconds_fraction": verdict.covered_share,
        "hidden_or_negligible": verdict.share,
        "seconds": verdict.seconds,
        "exposed_seconds": verdict.exposed,
        "objection": verdict.objection(),
        "collectives": [_collective_dict(r) for r in verdict.readings],
    }


def _collective_dict(r: Reading) -> dict[str, Any]:
    c = r.collective
    return {
        **{name: getattr(c, name) for name in _FIELDS},
        "loops_between": list(c.whiles_between),
        "status": r.status,
        "seconds": r.spent.seconds,
        "exposed_seconds": r.spent.exposed,
        "beside": [dataclasses.asdict(b) for b in r.beside[:BESIDE]],
        "beside_seconds": sum(b.seconds for b in r.beside),
        "cause": r.cause.text,
        "advice": r.cause.advice,
    }
