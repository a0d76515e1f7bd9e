"""The optimizer's own collectives, told from those of the train step.

The exchange's are in the program as written. An optimizer that looks across shards
(muon's Newton-Schulz, adafactor's and lamb's norms, clipping) is written as if nothing
were sharded, and the compiler adds its collectives, as it does those of a few sums of
the step's own, 4 or 8 bytes each.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from acco_jax.schedule import footprint, hlo
from acco_jax.schedule.schedules import Collective

# A compiler may turn a step's collective into these, or one of its own kind,
# or a transfer between slices.
_INSTEAD = {
    "reduce-scatter": ("all-reduce",),
    "all-gather": ("all-reduce",),
    "all-reduce": ("reduce-scatter", "all-gather"),
}
_LETTERS = {"i": "s", "ui": "u"}  # of integers: StableHLO's name, HLO's
PADDING = 0.02  # share of a collective's bytes that may go beyond the step's own


@dataclasses.dataclass
class _Pool:
    """The step's unmatched collectives of one kind, data type and group."""

    kind: str
    dtype: str
    group: int
    sizes: list[int] = dataclasses.field(default_factory=list)  # bytes of each
    left: int = 0  # bytes of all

    def bytes_of(self, c: Collective) -> int:
        """Return the bytes that c's numbers take in the pool's data type."""
        bits, compiled_bits = hlo.bits(self.dtype) or 1, hlo.bits(c.dtype) or 1
        return c.bytes * c.times * bits // compiled_bits

    def suits(self, c: Collective, likeness: int) -> bool:
        """Return whether c may be one of these, or several of them combined.

        Likeness 0: at most twice as many numbers, and a kind that compilers make of
        this one. 1: also the type and group. 2: also the kind. 3: also the size of one
        of these, or 4: of all.
        """
        if not 0 < self.bytes_of(c) <= 2 * self.left:
            return False
        group = c.group_size or self.group  # of a transfer it is unknown
        if likeness >= 1 and (c.dtype, group) != (self.dtype, self.group):
            return False
        if likeness == 4 and self.bytes_of(c) != self.left:
            return False
        if likeness == 3 and c.bytes not in self.sizes:
            return False
        if c.kind == "send-recv":
            return likeness >= 3
        instead = () if likeness >= 2 else _INSTEAD.get(self.kind, ())
        return c.kind == self.kind or c.kind in instead

    def take(self, c: Collective) -> int:
        """Match c; return the bytes of one execution that go beyond the pool."""
        if c.bytes in self.sizes:
            self.sizes.remove(c.bytes)
        total = self.bytes_of(c)
        beyond = max(0, total - self.left)
        self.left -= total - beyond
        return c.bytes * beyond // total if beyond > PADDING * total else 0


def own(
    collectives: Sequence[Collective], source: Iterable[footprint.Transfer]
) -> list[tuple[Collective, int]]:
    """Return the collectives that the step did not write, and their bytes.

    Compilers combine collectives, and turn one kind into another: the most alike are
    matched first, and of these the largest. A collective that combines the step's own
    with no more than as much again counts only with the excess. Transfers between
    slices of a type that the step sends do not count.

    Args:
      collectives: of the compiled schedule.
      source: of the StableHLO of the same program.

    Returns:
      In the order of `collectives`, with the bytes of one execution.
    """
    pools: dict[tuple[str, str, int], _Pool] = {}
    for c in source:
        if c.group > 1:
            key = (c.kind.replace("_", "-"), _dtype(c.dtype), c.group)
            pool = pools.setdefault(key, _Pool(*key))
            pool.sizes += [c.whole] * c.times
            pool.left += c.whole * c.times
    extra = {i: c.bytes for i, c in enumerate(collectives)}
    largest = sorted(extra, key=lambda i: -collectives[i].bytes)
    for likeness in (4, 3, 2, 1, 0):
        for i in largest[:]:
            suitable = (p for p in pools.values() if p.suits(collectives[i], likeness))
            if match := next(suitable, None):
                extra[i] = match.take(collectives[i])
                largest.remove(i)
    dtypes = {pool.dtype for pool in pools.values()}
    for i in largest:  # a small transfer is padded: its size does not tell its content
        if collectives[i].kind == "send-recv" and collectives[i].dtype in dtypes:
            extra[i] = 0
    return [(collectives[i], size) for i, size in extra.items() if size]


def _dtype(name: str) -> str:
    """Return HLO's name of a StableHLO type."""
    if name == "i1":
        return "pred"
    letters = name.rstrip("0123456789")
    return (_LETTERS.get(letters, letters) + name[len(letters) :]).lower()
