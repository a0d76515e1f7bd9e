"""Communication buffers: one buffer for the workers' parts of many leaves.

A buffer is [n * rows, width]; rows i * rows to (i + 1) * rows, block i, hold part i of
every leaf: first the leaves that fill whole rows, then the other leaves, one after
another, then zeros.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

# TPUs fall back to a synchronous all-reduce for one-dimensional buffers and for row
# counts that do not fill a bf16 tile of 16 rows. v6e cuts a block into halves only, and
# falls back where what is left, the odd part of its elements, is too large: 631 was
# seen to work and 915 not (tests/schedule/test_buffers.py).
TILE = 16
MAX_ODD = 512
WIDTHS = (1024, 768, 512, 256, 128)  # wide rows are the cheapest to pack
WIDE = (1024, 512, 256, 128)  # where most leaves have no such rows of their own
MAX_PADDING = 0.01  # of a buffer


Arrays = tuple[jax.Array, ...]


class InFlight(NamedTuple):
    """In-flight gradients: local, not reduced yet, every worker's own."""

    buffers: Arrays  # sums over microbatches, packed in the communication dtypes
    whole: Arrays  # rows (n, *shape): the sums of leaves that stay whole
    weight: jax.Array  # (n,) their weights
    loss: jax.Array  # (n,) the sums of their losses; 0 where none was given
    model_state: Any = None  # (n, ...) each worker's own, after its last microbatch


class Totals(NamedTuple):
    """The totals over all workers that belong to summed gradients."""

    weight: jax.Array  # []
    loss: jax.Array  # []


class Reduced(NamedTuple):
    """Gradients summed over the workers: packed, on the owners of their shards."""

    buffers: Arrays  # [n * rows, width] of every group, a block an owner; master dtype
    whole: Arrays  # (*shape) the sums of leaves that stay whole; master dtype


class RoundingError(NamedTuple):
    """Error feedback: the rounding error of sent gradients (`core/codec.py`)."""

    buffers: Arrays  # every worker's own, in the communication dtype


class Outgoing(NamedTuple):
    """Parameters on their way to all workers; also when they have arrived."""

    buffers: Arrays  # of each worker's shards, then of all; in communication dtypes
    whole: Arrays  # leaves that every worker has; they stay where they are


@dataclasses.dataclass(frozen=True)
class Group:
    """The leaves of one buffer."""

    dtype: np.dtype  # that is communicated
    width: int  # of a row
    rows: int  # of each worker's block
    leaves: tuple[int, ...]  # their numbers, in the order in which they lie
    parts: tuple[tuple[int, ...], ...]  # the shape of one worker's part of each

    @property
    def aligned(self) -> int:
        """The number of leaves that have rows of their own; they come first."""
        return sum(_fills_rows(part, self.width) for part in self.parts)

    def lay(
        self, parts: Sequence[jax.Array], dtype: DTypeLike | None = None
    ) -> jax.Array:
        """Pack (n, *part) of every leaf, in the group's order, to [n * rows, width]."""
        n, k = parts[0].shape[0], self.aligned
        parts = [x.astype(dtype or self.dtype) for x in parts]
        blocks = [x.reshape(n, -1, self.width) for x in parts[:k]]
        tail = [x.reshape(n, -1) for x in parts[k:]]
        pad = self.rows * self.width - sum(map(math.prod, self.parts))
        if tail or pad:
            tail.append(jnp.zeros((n, pad), dtype or self.dtype))
            blocks.append(jnp.concatenate(tail, 1).reshape(n, -1, self.width))
        return jnp.concatenate(blocks, 1).reshape(-1, self.width)

    def take(self, buffer: jax.Array, one: jax.Array | None = None) -> list[jax.Array]:
        """Return (n, *part) of every leaf: the inverse of `lay`.

        With `one`, a uint32 [] of 1 that the compiler does not know to be 1, it does
        not know either where a leaf lies. A compiler of kernels then has one for all
        leaves of a shape.
        """
        blocks = buffer.reshape(-1, self.rows, self.width)
        k = self.aligned
        rows = sum(map(math.prod, self.parts[:k])) // self.width
        tail = blocks[:, rows:].reshape(blocks.shape[0], -1)
        return [
            *_cut(blocks[:, :rows], self.parts[:k], self.width, one),
            *_cut(tail, self.parts[k:], 1, one),
        ]


def _cut(
    blocks: jax.Array,
    parts: Sequence[tuple[int, ...]],
    unit: int,
    one: jax.Array | None,
) -> list[jax.Array]:
    """Return (n, *part) of each; blocks (n, ...) hold `unit` elements an index."""
    sizes = [math.prod(part) // unit for part in parts]
    if one is None or blocks.shape[1] > np.iinfo(np.uint32).max:
        ends = np.cumsum([0, *sizes])
        found = [blocks[:, a:b] for a, b in itertools.pairwise(ends)]
    else:
        found, at = [], one - 1
        for size in sizes:
            found.append(lax.dynamic_slice_in_dim(blocks, at, size, axis=1))
            # a division is not computed again for each leaf behind it
            at = lax.div(at + jnp.uint32(size), one)
    return [x.reshape(-1, *part) for x, part in zip(found, parts, strict=True)]


def _fills_rows(part: tuple[int, ...], width: int) -> bool:
    return math.prod(part) % width == 0


def make_group(dtype: np.dtype, parts: Mapping[int, tuple[int, ...]]) -> Group:
    """Lay out one buffer; `parts` maps leaf numbers to the shapes of workers' parts."""
    total = sum(map(math.prod, parts.values()))
    width = _best_width(total, parts.values())
    order = sorted(parts, key=lambda i: not _fills_rows(parts[i], width))
    rows = _padded(total, width) // width
    return Group(dtype, width, rows, tuple(order), tuple(parts[i] for i in order))


def _padded(size: int, width: int) -> int:
    """Return the elements of a block that holds at least `size`."""
    unit, odd = width * TILE, width // (width & -width)
    while -(-size // unit) * odd > MAX_ODD:
        unit *= 2
    return max(-(-size // unit), 1) * unit


def _best_width(total: int, parts: Iterable[tuple[int, ...]]) -> int:
    """Return the width of most leaves' own rows, which pack unchanged, or a default.

    Only widths that pad a buffer by at most 1 % count. The default is the widest of
    them in `WIDE`, or the narrowest of `WIDE` if there is none.
    """
    fits = [w for w in WIDTHS if _padded(total, w) <= (1 + MAX_PADDING) * total]
    elements: collections.Counter[int] = collections.Counter()  # by own rows' width
    for part in parts:
        if part and part[-1] in fits:
            elements[part[-1]] += math.prod(part)
    for width, most in elements.most_common(1):
        if most >= total / 2:
            return width
    return next((w for w in fits if w in WIDE), min(WIDE))
