"""What of some collectives is hidden, all of their bytes and all of their time.

Whether one is hidden is READ from the schedule: matrix products run between its
launch and its end. What it takes and what is waited for is PREDICTED. How small a
collective is does not excuse it: negligible are those that are exposed for a hundredth
of the program's time, all of them together.
"""

import dataclasses
import functools
from collections.abc import Collection, Iterable, Sequence

from acco_jax.plan import causes, costs
from acco_jax.plan.causes import Cause
from acco_jax.plan.costs import Prediction, Spent
from acco_jax.plan.machines import Machine
from acco_jax.plan.schedules import Collective, Schedule

NEGLIGIBLE = 0.01  # of the program's predicted time
HIDDEN, EXPOSED, UNKNOWN = "hidden", "EXPOSED", "unknown"


@dataclasses.dataclass(frozen=True)
class Beside:
    """An operation between a collective's launch and its end, of one execution."""

    name: str
    kind: str
    seconds: float  # predicted
    flops: int


@dataclasses.dataclass(frozen=True)
class Reading:
    """One collective: what the schedule says of it, and what it may cost."""

    collective: Collective
    spent: Spent  # in all its executions
    beside: tuple[Beside, ...]  # longest first
    cause: Cause

    @property
    def status(self) -> str:
        c = self.collective
        if c.asynchronous and c.done is None:
            return UNKNOWN
        return HIDDEN if c.hidden else EXPOSED

    @property
    def bytes(self) -> int:
        """Bytes of all executions."""
        return self.collective.bytes * self.collective.times


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What is hidden of some of a program's collectives."""

    readings: tuple[Reading, ...]
    total: float  # predicted seconds of the whole program
    unknown: tuple[str, ...] = ()  # of the program: what communicates in unknown forms

    @property
    def bytes(self) -> int:
        return sum(r.bytes for r in self.readings)

    @property
    def hidden_bytes(self) -> int:
        return sum(r.bytes for r in self.readings if r.status == HIDDEN)

    @property
    def hidden_share(self) -> float | None:
        """The share of the bytes that is hidden, None if nothing is sent."""
        return self.hidden_bytes / self.bytes if self.bytes else None

    @property
    def seconds(self) -> float:
        return sum(r.spent.seconds for r in self.readings)

    @property
    def exposed(self) -> float:
        """Seconds that are waited for, those of hidden collectives included."""
        return sum(r.spent.exposed for r in self.readings)

    @functools.cached_property
    def negligible(self) -> tuple[Reading, ...]:
        """Those not hidden that together take too little time to matter."""
        found: list[Reading] = []
        left = NEGLIGIBLE * self.total
        not_hidden = (r for r in self.readings if r.status == EXPOSED)
        for r in sorted(not_hidden, key=lambda r: r.spent.exposed):
            left -= r.spent.exposed
            if left < 0:
                break
            found.append(r)
        return tuple(found)

    @property
    def objections(self) -> list[Reading]:
        """Those neither hidden nor negligible, the dearest first."""
        left = (
            r
            for r in self.readings
            if r.status != HIDDEN and not any(r is other for other in self.negligible)
        )
        return sorted(left, key=lambda r: -r.spent.exposed)

    @property
    def share(self) -> float | None:
        """Returns the hidden or negligible share, None if nothing is communicated.

        It is the lesser of their shares of the bytes and of the time that all would
        take: a thousand small collectives are as little excused as a large one.
        """
        if not self.readings or not self.bytes:
            return None
        against = self.objections
        of_bytes = sum(r.bytes for r in against) / self.bytes
        of_time = sum(r.spent.seconds for r in against) / (self.seconds or 1.0)
        return 1 - max(of_bytes, of_time)

    def objection(self, fraction: float = 1.0) -> str:
        """Returns why less than `fraction` is known to be hidden, else ""."""
        if self.unknown:
            return f"communication of an unknown form: {', '.join(self.unknown)}"
        share = self.share
        if share is None:
            return "there is no collective: nothing was hidden"
        if share >= fraction - 1e-9:
            return ""
        worst = self.objections[0]
        c, more = worst.collective, len(self.objections) - 1
        line = f"{worst.status.lower()}: {c.kind} {c.name} ({worst.cause.text})"
        return line + (f" and {more} more" if more else "")


def judge(
    schedule: Schedule,
    prediction: Prediction,
    machine: Machine,
    chosen: Collection[int] | None = None,
) -> Verdict:
    """Judges some of a schedule's collectives.

    Args:
      schedule: as read.
      prediction: of that schedule.
      machine: which it was compiled and predicted for.
      chosen: positions in `schedule.collectives`; None for all.
    """
    readings = tuple(
        Reading(c, spent, _beside(c, schedule, machine),
                causes.likely(c, spent, schedule, machine))
        for i, (c, spent) in enumerate(
            zip(schedule.collectives, prediction.each, strict=True)
        )
        if chosen is None or i in chosen
    )  # fmt: skip
    return Verdict(readings, prediction.total, schedule.unknown)


def merged(verdicts: Sequence[Verdict]) -> Verdict:
    """Judges several programs as one, in which each runs once."""
    return Verdict(
        tuple(r for v in verdicts for r in v.readings),
        sum(v.total for v in verdicts),
        tuple(dict.fromkeys(name for v in verdicts for name in v.unknown)),
    )


def _beside(c: Collective, schedule: Schedule, machine: Machine) -> tuple[Beside, ...]:
    if not c.asynchronous or c.done is None:
        return ()
    operations: Sequence[costs.Operation] = (
        schedule.operations if c.where == "ENTRY" else schedule.bodies[c.where]
    )
    found: Iterable[Beside] = (
        Beside(o.name, o.kind, costs.operation_seconds(o, machine), o.flops)
        for o in operations
        # a collective woven into a loop ends inside of it
        if c.start < o.position < c.done or (o.position == c.done and o.kind == "while")
        if not o.kind.endswith(("-start", "-update", "-done"))
    )
    return tuple(sorted(found, key=lambda b: -b.seconds))
