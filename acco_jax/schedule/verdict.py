"""Verdict on overlap: how much of the given collectives, by bytes and by time.

There are two figures. The share of bytes with matmuls between launch and end is READ
from the schedule and does not depend on the network. The share of communication's
seconds that computation covers is PREDICTED from the middle of the figures' ranges. The
verdict is the lesser of both. The least exposed collectives are negligible while
together they expose at most 0.1 % of the program's time.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Sequence

from acco_jax.schedule import causes, costs
from acco_jax.schedule.causes import Cause
from acco_jax.schedule.costs import Prediction, Spent
from acco_jax.schedule.machines import Machine
from acco_jax.schedule.schedules import Collective, Schedule

NEGLIGIBLE = 0.001  # exposed share of the program's predicted time
REQUIRED = 0.99  # share that a gate without a fraction requires
OVERLAPPED, EXPOSED, UNKNOWN = "overlapped", "EXPOSED", "unknown"


@dataclasses.dataclass(frozen=True)
class Beside:
    """An operation between a collective's launch and its end, of one execution."""

    name: str
    kind: str
    seconds: float  # predicted
    flops: int


@dataclasses.dataclass(frozen=True)
class Reading:
    """One collective: its schedule, predicted cost and likely cause of exposure."""

    collective: Collective
    spent: Spent  # in all its executions
    beside: tuple[Beside, ...]  # longest first
    cause: Cause

    @property
    def status(self) -> str:
        c = self.collective
        if c.asynchronous and c.done is None:
            return UNKNOWN
        return OVERLAPPED if c.hidden else EXPOSED

    @property
    def bytes(self) -> int:
        """Bytes of all executions."""
        return self.collective.bytes * self.collective.times


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Overlap of some of a program's collectives."""

    readings: tuple[Reading, ...]
    total: float  # predicted seconds of the whole program
    unknown: tuple[str, ...] = ()  # of the program: communication of unknown form
    network: str = ""  # that the seconds are predicted for

    @property
    def bytes(self) -> int:
        return sum(r.bytes for r in self.readings)

    @property
    def hidden_bytes(self) -> int:
        return sum(r.bytes for r in self.readings if r.status == OVERLAPPED)

    @property
    def hidden_share(self) -> float | None:
        """Share of the bytes that is overlapped, None if nothing is sent."""
        return self.hidden_bytes / self.bytes if self.bytes else None

    @property
    def seconds(self) -> float:
        return sum(r.spent.seconds for r in self.readings)

    @property
    def exposed(self) -> float:
        """Predicted exposed seconds, those of overlapped collectives included."""
        return sum(r.spent.exposed for r in self.readings)

    @property
    def slowing(self) -> float:
        """Predicted seconds by which they delay the operations beside them."""
        return sum(r.spent.slowing for r in self.readings)

    @property
    def covered_share(self) -> float | None:
        """Predicted share of the seconds that is covered, None without any."""
        return 1 - self.exposed / self.seconds if self.seconds else None

    @functools.cached_property
    def objections(self) -> list[Reading]:
        """Collectives that are unknown or not negligible, the most exposed first."""
        found: list[Reading] = []
        left = NEGLIGIBLE * self.total
        for r in sorted(self.readings, key=lambda r: r.spent.exposed):
            left -= r.spent.exposed
            if r.status == UNKNOWN or left < 0:
                found.append(r)
        return found[::-1]

    @property
    def share(self) -> float | None:
        """Lesser of both shares; negligible exposure counts as overlapped.

        None if nothing is communicated.
        """
        if not self.bytes:
            return None
        of_bytes = sum(r.bytes for r in self.objections if r.status != OVERLAPPED)
        of_time = sum(r.spent.exposed for r in self.objections)
        return 1 - max(of_bytes / self.bytes, of_time / (self.seconds or 1.0))

    def shares(self) -> str:
        """Describe both shares side by side, and the network of the second."""
        read, covered = map(percent, (self.hidden_share, self.covered_share))
        predicted = f"PREDICTED, {self.network}" if self.network else "PREDICTED"
        return f"{read} of the bytes (READ), {covered} of the seconds ({predicted})"

    def objection(self, fraction: float = REQUIRED) -> str:
        """Return why less than `fraction` is known to be overlapped, else ""."""
        if self.unknown:
            return f"communication of an unknown form: {', '.join(self.unknown)}"
        for r in self.readings:
            c = r.collective
            if c.uncounted and (r.status != OVERLAPPED or r.spent.exposed):
                return (
                    f"{c.kind} {c.name} is exposed each time that {c.uncounted} runs, "
                    "and how often that is is not in the text: give its trip count"
                )
        share = self.share
        if share is None:
            return "no collective: nothing was overlapped"
        if share >= fraction - 1e-9:
            return ""
        worst = self.objections[0]
        c, more = worst.collective, len(self.objections) - 1
        line = (
            f"overlapped: {self.shares()}; {milliseconds(self.exposed)} exposed, most "
            f"by {c.kind} {c.name}, {worst.status} ({worst.cause.text})"
        )
        return line + (f" and {more} more" if more else "")


def percent(share: float | None) -> str:
    """Format a share, rounded down, so that 100.0% leaves nothing out; "-": none."""
    return "-" if share is None else f"{math.floor(1000 * share + 1e-6) / 10:.1f}%"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f} ms"


def check_fraction(fraction: float) -> None:
    """Raise a ValueError if a gate's fraction is not from 0 to 1.

    Raises:
      ValueError: if `fraction` is not from 0 to 1.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"the fraction {fraction:g} must be from 0 to 1.")


def judge(
    schedule: Schedule,
    prediction: Prediction,
    machine: Machine,
    chosen: Collection[int] | None = None,
    devices: int | None = None,
) -> Verdict:
    """Judge some of a schedule's collectives.

    Args:
      schedule: as read.
      prediction: of that schedule.
      machine: the one that the schedule was compiled for.
      chosen: positions in `schedule.collectives`; None for all.
      devices: that the prediction is for; None: the machine's.
    """
    readings = tuple(
        Reading(c, spent, _beside(c, schedule, machine),
                causes.likely(c, spent, schedule, machine))
        for i, (c, spent) in enumerate(
            zip(schedule.collectives, prediction.each, strict=True)
        )
        if chosen is None or i in chosen
    )  # fmt: skip
    network = network_of(readings, machine, devices)
    return Verdict(readings, prediction.total, schedule.unknown, network)


def network_of(
    readings: Sequence[Reading], machine: Machine, devices: int | None = None
) -> str:
    """Return the network that collectives' seconds are of: a host's link, if in one."""
    here = machine.topology.devices
    inside = all(machine.domains(r.collective) == 1 for r in readings)
    if readings and inside and devices in (None, here):
        return machine.topology.chip.link
    return machine.network_of(devices or here)


def merged(verdicts: Sequence[Verdict]) -> Verdict:
    """Judge several programs as one, in which each runs once."""
    return Verdict(
        tuple(r for v in verdicts for r in v.readings),
        sum(v.total for v in verdicts),
        tuple(dict.fromkeys(name for v in verdicts for name in v.unknown)),
        verdicts[0].network,
    )


def _beside(c: Collective, schedule: Schedule, machine: Machine) -> tuple[Beside, ...]:
    if not c.asynchronous or c.done is None:
        return ()
    operations: Sequence[costs.Operation] = (
        schedule.operations if c.where == "ENTRY" else schedule.bodies[c.where]
    )
    part = {c.done: c.within}  # of a loop inside of which it ends
    found: Iterable[Beside] = (
        Beside(
            o.name,
            o.kind,
            costs.operation_seconds(o, machine) * part.get(o.position, 1.0),
            o.flops,
        )
        for o in operations
        # a collective woven into a loop ends inside of it
        if c.start < o.position < c.done or (o.position == c.done and o.kind == "while")
        if not o.kind.endswith(("-start", "-update", "-done"))
    )
    return tuple(sorted(found, key=lambda b: -b.seconds))
