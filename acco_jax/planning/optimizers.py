"""Tells the optimizer's own collectives from those that a step asks for.

The exchange's are in the program as written. An optimizer that looks across shards
(muon's Newton-Schulz, adafactor's and lamb's norms, clipping) is written as if nothing
were sharded, and the compiler adds its collectives, as it does those of a few sums of
the step's own, 4 or 8 bytes each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from acco_jax import footprint
from acco_jax.planning import hlo
from acco_jax.planning.schedules import Collective

# What a compiler may make of a collective that it was asked for, beside the same and a
# transfer between slices.
_INSTEAD = {
    "reduce-scatter": ("all-reduce",),
    "all-gather": ("all-reduce",),
    "all-reduce": ("reduce-scatter", "all-gather"),
}
_LETTERS = {"i": "s", "ui": "u"}  # of integers: StableHLO's name, HLO's
PADDING = 0.02  # share of a collective's bytes that may go beyond what was asked for


@dataclasses.dataclass
class _Asked:
    """Collectives of one kind, data type and group.

    Attributes:
      sizes: bytes of each that was not yet found.
      left: bytes not yet found.
    """

    kind: str
    dtype: str
    group: int
    sizes: list[int] = dataclasses.field(default_factory=list)
    left: int = 0

    def whole(self, c: Collective) -> int:
        """Bytes of a found one, for as many numbers of the type that was asked for."""
        here, there = hlo.bits(self.dtype) or 1, hlo.bits(c.dtype) or 1
        return c.bytes * c.times * here // there

    def suits(self, c: Collective, likeness: int) -> bool:
        """Whether c may be one of these, or several of them combined.

        Args:
          c: a collective of the schedule.
          likeness: 0: of as many numbers and a kind that compilers make of this one; 1:
            and of the same type and group; 2: and of the same kind; 3: and of the size
            of one of these, or 4: of all.
        """
        if not 0 < self.whole(c) <= 2 * self.left:
            return False
        if likeness >= 1:
            group = c.group_size or self.group  # of a transfer it is unknown
            if (c.dtype, group) != (self.dtype, self.group):
                return False
        if likeness == 4 and self.whole(c) != self.left:
            return False
        if likeness == 3 and c.bytes not in self.sizes:
            return False
        if c.kind == "send-recv":
            return likeness >= 3
        instead = () if likeness >= 2 else _INSTEAD.get(self.kind, ())
        return c.kind == self.kind or c.kind in instead

    def take(self, c: Collective) -> int:
        """Counts c as found; returns the bytes of one execution that go beyond."""
        if c.bytes in self.sizes:
            self.sizes.remove(c.bytes)
        whole = self.whole(c)
        beyond = max(0, whole - self.left)
        self.left -= whole - beyond
        return c.bytes * beyond // whole if beyond > PADDING * whole else 0


def own(
    found: Sequence[Collective], asked: Iterable[footprint.Collective]
) -> list[tuple[Collective, int]]:
    """The collectives that the step did not ask for, and their bytes.

    Compilers combine collectives, and turn one kind into another: those most alike are
    matched first, and of them the largest. A collective that combines what was asked
    for with no more than as much again counts with what is beyond. Transfers between
    slices of a type that was asked for do not count.

    Args:
      found: of the compiled schedule.
      asked: of the StableHLO of the same program.

    Returns:
      In the order of `found`, with the bytes of one execution of the collective.
    """
    wanted: dict[tuple[str, str, int], _Asked] = {}
    for a in asked:
        if a.group > 1:
            key = (a.kind.replace("_", "-"), _dtype(a.dtype), a.group)
            w = wanted.setdefault(key, _Asked(*key))
            w.sizes += [a.whole] * a.times
            w.left += a.whole * a.times
    extra = {i: c.bytes for i, c in enumerate(found)}
    largest = sorted(extra, key=lambda i: -found[i].bytes)
    for likeness in (4, 3, 2, 1, 0):
        for i in largest[:]:
            suitable = [w for w in wanted.values() if w.suits(found[i], likeness)]
            if suitable:
                extra[i] = suitable[0].take(found[i])
                largest.remove(i)
    types = {w.dtype for w in wanted.values()}
    for i in largest:  # a small transfer is padded: no size tells what it is of
        if found[i].kind == "send-recv" and found[i].dtype in types:
            extra[i] = 0
    return [(found[i], size) for i, size in extra.items() if size]


def _dtype(name: str) -> str:
    """HLO's name of a StableHLO type."""
    if name == "i1":
        return "pred"
    letters = name.rstrip("0123456789")
    return (_LETTERS.get(letters, letters) + name[len(letters) :]).lower()
