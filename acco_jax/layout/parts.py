"""Which dimensions of a parameter the workers split, and into how many parts.

A rule takes (leaf, n) and returns the number of parts of each dimension, their product
n; or None where every worker keeps the leaf whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from acco_jax.layout.leaves import Leaf, part_of

Parts = tuple[int, ...] | None
SMALL = 1 << 16  # elements: what no dimension splits evenly stays whole up to here
FEW = 1 / 256  # of a leaf may be padding before two of its dimensions are split
LAYERS = 256  # a longer leading dimension is not taken for one over layers


def along_one(rank: int, d: int, n: int) -> tuple[int, ...]:
    return tuple(n if i == d else 1 for i in range(rank))


def _along_two(rank: int, n: int) -> Iterator[tuple[int, ...]]:
    divisors = [k for k in range(2, n) if n % k == 0]
    for (d, e), k in itertools.product(
        itertools.combinations(range(rank), 2), divisors
    ):
        yield tuple(k if i == d else n // k if i == e else 1 for i in range(rank))


def padding(shape: Sequence[int], parts: Sequence[int]) -> int:
    """Elements that the parts hold beyond those of the shape."""
    each = zip(part_of(shape, parts), parts, strict=True)
    return math.prod(p * k for p, k in each) - math.prod(shape)


def evenly(leaf: Leaf, n: int) -> Parts:
    """The first dimension that n divides; else what needs the least padding.

    A leaf of at most 65,536 elements that no dimension splits evenly stays whole.
    """
    rank, shape = len(leaf.local), leaf.local
    if not leaf.size:
        return None
    if n == 1:
        return (1,) * rank
    ones = [along_one(rank, d, n) for d in range(rank)]
    for parts in ones:
        if not padding(shape, parts):
            return parts
    if leaf.size <= SMALL:
        return None
    best = min(ones, key=lambda parts: padding(shape, parts))
    if padding(shape, best) <= FEW * leaf.size:
        return best
    return min([best, *_along_two(rank, n)], key=lambda parts: padding(shape, parts))


def beyond_layers(leaf: Leaf, n: int) -> Parts:
    """One dimension, the leading one left whole where it may be over layers.

    The first other one that n divides, else the largest, padded.
    """
    rank, sizes = len(leaf.local), leaf.local
    if not leaf.size:
        return None
    free = [d for d, s in enumerate(sizes) if s == leaf.shape[d]]
    if len(free) > 1 and free[0] == 0 and sizes[0] <= LAYERS:
        free = free[1:]
    if not free:
        return None
    fits = (d for d in free if sizes[d] % n == 0)
    return along_one(rank, next(fits, max(free, key=lambda d: sizes[d])), n)
