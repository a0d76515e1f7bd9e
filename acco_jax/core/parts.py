"""The dimensions of a parameter that the workers split, and the number of parts.

A rule takes (leaf, n) and returns the number of parts of each dimension, their product
n; or None where every worker keeps the leaf whole.
"""

import itertools
import math

from acco_jax.core.leaves import Leaf

Parts = tuple[int, ...] | None
SMALL = 1 << 16  # elements: up to here a leaf that does not split evenly stays whole
MAX_PADDING = 1 / 256  # of a leaf, before two of its dimensions are split
MAX_LAYERS = 256  # a longer leading dimension does not count as one over layers


def evenly(leaf: Leaf, n: int) -> Parts:
    """Split the first dimension that n divides, else with the least padding.

    A leaf of at most 65,536 elements that no dimension splits evenly stays whole.
    """
    rank = len(leaf.local)
    if not leaf.size:
        return None
    if n == 1:
        return (1,) * rank

    def padding(parts: tuple[int, ...]) -> int:
        """Return the elements that the parts hold beyond the leaf's."""
        each = zip(leaf.local, parts, strict=True)
        return math.prod(s + -s % k for s, k in each) - leaf.size

    along_one = [_parts(rank, {d: n}) for d in range(rank)]
    best = min(along_one, key=padding, default=None)
    if best is None or (padding(best) and leaf.size <= SMALL):
        return None
    if padding(best) <= MAX_PADDING * leaf.size:
        return best
    pairs = itertools.combinations(range(rank), 2)
    divisors = [k for k in range(2, n) if n % k == 0]
    along_two = (
        _parts(rank, {d: k, e: n // k})
        for (d, e), k in itertools.product(pairs, divisors)
    )
    return min([best, *along_two], key=padding)


def beyond_layers(leaf: Leaf, n: int) -> Parts:
    """Split one dimension, but not the leading one where it may be over layers.

    It is the first other dimension that n divides, else the largest, padded.
    """
    sizes = leaf.local
    free = [d for d, s in enumerate(sizes) if s == leaf.shape[d]]
    if len(free) > 1 and free[0] == 0 and sizes[0] <= MAX_LAYERS:
        free = free[1:]
    if not free or not leaf.size:
        return None
    largest = max(free, key=lambda d: sizes[d])
    return _parts(
        len(sizes), {next((d for d in free if sizes[d] % n == 0), largest): n}
    )


def _parts(rank: int, numbers: dict[int, int]) -> tuple[int, ...]:
    """Return one part along each dimension except those of `numbers`."""
    return tuple(numbers.get(d, 1) for d in range(rank))
