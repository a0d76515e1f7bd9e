"""Search for microbatches that fit into memory, and for the fastest of them.

A few candidates are compiled, no more: the largest microbatch is one that fills the
memory, or is bracketed by one that fits and one that does not, and each that fits is
timed at equal tokens. Larger ones are not always better: near the limit a compiler
moves collectives out of the computation that overlapped them, and recomputes what it
has no room to keep.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

CLOSE = 1.15  # rows that do not fit, over rows that do: near enough
FULL = 0.85  # share of the memory that, once needed, ends the search for larger ones
LARGER = 1.25  # rows of a step, over the rows asked for: still an equal step
MOST = 16.0  # rows of the next candidate, over rows known to fit


class Shape(NamedTuple):
    """Rows of a worker's optimizer step, cut into microbatches."""

    rows: int  # of a microbatch
    microbatches: int  # of an optimizer step

    @property
    def total(self) -> int:
        return self.rows * self.microbatches


@dataclasses.dataclass(frozen=True)
class Tried:
    """A candidate that was compiled, or known not to fit before."""

    shape: Shape
    memory: int | None  # bytes on a device; None: does not fit
    tokens_per_second: float = 0.0
    interval: tuple[float, float] = (0.0, 0.0)  # of it
    hidden: float | None = None  # overlapped share of the bytes
    compiled: bool = True  # False: too large already by what half-rounds keep


@dataclasses.dataclass(frozen=True)
class Fit:
    """Result of the search."""

    tried: tuple[Tried, ...]  # by rows
    total: int  # rows of a worker's optimizer step that are asked for

    @property
    def largest(self) -> int | None:
        """Rows of the largest microbatch that fits, None if none does."""
        return max((t.shape.rows for t in self.tried if t.memory), default=None)

    @property
    def filled(self) -> int | None:
        """Bytes on a device that the largest microbatch needs."""
        return next(
            (t.memory for t in self.tried if t.shape.rows == self.largest), None
        )

    @property
    def misfit(self) -> int | None:
        """Rows of the smallest microbatch that does not fit, None if none was found."""
        return min((t.shape.rows for t in self.tried if not t.memory), default=None)

    @property
    def compiled(self) -> int:
        return sum(t.compiled for t in self.tried)

    @property
    def best(self) -> Tried | None:
        """Fastest of those within LARGER times the rows asked for, else of all."""
        fits = [t for t in self.tried if t.memory]
        same = [t for t in fits if t.shape.total <= LARGER * self.total]
        return max(same or fits, key=lambda t: t.tokens_per_second, default=None)


def cut(rows: int, total: int, unit: int) -> Shape:
    """Return microbatches of `rows` rows whose step is nearest to `total` rows.

    Their number is a multiple of `unit`.
    """
    each = max(1, round(total / rows / unit))
    return Shape(rows, each * unit)


def search(
    first: Tried,
    attempt: Callable[[Shape], Tried],
    *,
    usable_memory: float,
    held: int,
    unit: int,
    divisor: int,
    most: int,
) -> Fit:
    """Compile few candidates around a first one.

    Args:
      first: the experiment's own, tried already.
      attempt: compiles a candidate.
      usable_memory: bytes on a device.
      held: bytes of them that no microbatch changes.
      unit: microbatches of an optimizer step are a multiple of it: of its half-rounds,
        or, so that unequal ones keep their ratio, of those asked for.
      divisor: of a microbatch's rows, the first one's included: mesh.fsdp splits them.
      most: candidates to compile beside the first.
    """
    found, total = {first.shape.rows // divisor: first}, first.shape.total
    for _ in range(most):
        times = _next(found, usable_memory, held) or _between(found, total)
        if times is None:
            break
        found[times] = attempt(cut(times * divisor, total, unit))
    return Fit(tuple(found[times] for times in sorted(found)), total)


def _next(found: dict[int, Tried], usable_memory: float, held: int) -> int | None:
    """Return the rows to try next, None if those found will do."""
    fits = {r: t.memory for r, t in found.items() if t.memory}
    misfits = [r for r in found if r not in fits]
    above = min(misfits, default=None)
    if not fits:
        return above // 2 if above is not None and above > 1 else None
    low = max(fits)
    if fits[low] >= FULL * usable_memory:
        return None
    if above is not None and (above <= CLOSE * low or above - low <= 1):
        return None
    guess = _extrapolated(fits, usable_memory, held)
    most = math.floor(MOST * low)
    if above is None:  # a candidate near the limit: it fits or ends the bracket
        return max(low + 1, min(most, guess))
    if not low < guess < above:
        guess = round(math.sqrt(low * above))
    return min(max(guess, low + 1), above - 1)


def _between(found: dict[int, Tried], total: int) -> int | None:
    """Return rows between the first and the largest, None if they need no third.

    Fewer rows than the largest can overlap more, in as large a step.
    """
    same = [r for r, t in found.items() if t.memory and t.shape.total <= LARGER * total]
    if len(same) != 2 or max(same) < 4 * min(same):
        return None
    return round(math.sqrt(min(same) * max(same)))


def _extrapolated(fits: dict[int, int], usable_memory: float, held: int) -> int:
    """Return the rows at which memory is full, extrapolated from those that fit."""
    large = max(fits)
    smaller = [r for r in fits if r < large]
    base, at = (fits[max(smaller)], max(smaller)) if smaller else (held, 0)
    per_row = (fits[large] - base) / (large - at)
    if per_row <= 0:
        return round(MOST * large)
    return large + math.floor((usable_memory - fits[large]) / per_row)
