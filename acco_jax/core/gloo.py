"""Collectives over a data axis; between CPU processes they are made of sums.

There gloo communicates, and only its all-reduce is right and fast:

- Its reduce-scatter overwrites a large message of which the end has not been sent yet:
  the last elements of the first worker's part are then wrong (jax-ml/jax#40830).
- Its all-gather and all-to-all post a message before they can receive. A worker that
  is late says that it can only behind its own message, so the two directions of a link
  take turns.

Two workers a and b exchange x by one sum of the bits as integers, modulo 2^32:

    s = bits(x_a) + bits(x_b),    x_b = bits^-1(s - bits(x_a)) on a, and x_a on b

This is exact and sends what an exchange must. Of n = 2^k workers, pairs at distances
n / 2, n / 4, ... 1 halve what they sum, and pairs at 1, 2, ... n / 2 double what they
gather: (n - 1) / n of the array, as in a ring. Other numbers exchange all-to-all.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from acco_jax.core.leaves import PyTree

WORD = 4  # bytes of the integers that are summed


def reduce_scatter(arrays: PyTree, axis: str, dim: int = 0) -> PyTree:
    """Sum arrays over an axis; each device keeps its part of dimension dim."""

    def in_blocks(x: jax.Array, n: int) -> jax.Array:
        return x.reshape(*x.shape[:dim], n, -1, *x.shape[dim + 1 :])

    def by_pairs(arrays: PyTree) -> PyTree:
        n, i = lax.axis_size(axis), lax.axis_index(axis)
        if n & (n - 1):
            parts = lax.all_to_all(arrays, axis, dim, dim, tiled=True)
            return jax.tree.map(lambda x: in_blocks(x, n).sum(dim, x.dtype), parts)
        blocks = jax.tree.map(lambda x: jnp.moveaxis(in_blocks(x, n), dim, 0), arrays)
        while n > 1:
            n //= 2
            own = jax.tree.map(lambda x: _half(x, i & n != 0), blocks)  # noqa: B023
            sent = jax.tree.map(lambda x: _half(x, i & n == 0), blocks)  # noqa: B023
            blocks = jax.tree.map(jnp.add, own, _swapped(sent, axis, n))
        return jax.tree.map(lambda x: x[0], blocks)

    def asked(arrays: PyTree) -> PyTree:
        return lax.psum_scatter(arrays, axis, scatter_dimension=dim, tiled=True)

    return _chosen(by_pairs, asked, arrays)


def all_gather(arrays: PyTree, axis: str) -> PyTree:
    """Join the arrays of all devices of an axis, along the first dimension."""

    def asked(arrays: PyTree) -> PyTree:
        return lax.all_gather(arrays, axis, axis=0, tiled=True)

    def by_pairs(arrays: PyTree) -> PyTree:
        n, i, distance = lax.axis_size(axis), lax.axis_index(axis), 1
        if n & (n - 1):
            return asked(arrays)
        while distance < n:
            others = _swapped(arrays, axis, distance)
            second = i & distance != 0
            arrays = jax.tree.map(
                lambda x, other: _joined(x, other, second),  # noqa: B023
                arrays, others,
            )  # fmt: skip
            distance *= 2
        return arrays

    return _chosen(by_pairs, asked, arrays)


def all_to_all(arrays: PyTree, axis: str) -> PyTree:
    """Send block i of the first dimension to device i of an axis, of n blocks."""

    def asked(arrays: PyTree) -> PyTree:
        return lax.all_to_all(arrays, axis, 0, 0, tiled=True)

    def by_pairs(arrays: PyTree) -> PyTree:
        if lax.axis_size(axis) != 2:
            return asked(arrays)
        second = lax.axis_index(axis) == 1
        own = jax.tree.map(lambda x: _half(x, second), arrays)
        sent = jax.tree.map(lambda x: _half(x, ~second), arrays)
        others = _swapped(sent, axis, 1)
        return jax.tree.map(lambda x, other: _joined(x, other, second), own, others)

    return _chosen(by_pairs, asked, arrays)


def _chosen(by_pairs: Callable, asked: Callable, arrays: PyTree) -> PyTree:
    if not jax.distributed.is_initialized():
        return asked(arrays)
    return lax.platform_dependent(arrays, cpu=by_pairs, default=asked)


def _half(x: jax.Array, second: jax.Array) -> jax.Array:
    size = x.shape[0] // 2
    return lax.dynamic_slice_in_dim(x, jnp.where(second, size, 0), size)


def _joined(x: jax.Array, other: jax.Array, second: jax.Array) -> jax.Array:
    """Return x and the other's array, x behind it if this device is the second."""
    return jnp.where(second, jnp.concatenate([other, x]), jnp.concatenate([x, other]))


def _swapped(arrays: PyTree, axis: str, distance: int) -> PyTree:
    """Return the arrays of the device at this distance, a power of two."""
    n = lax.axis_size(axis)
    pairs = [[i, i + distance] for i in range(n) if not i & distance]
    bits = jax.tree.map(_words, arrays)
    sums = lax.psum(bits, axis, axis_index_groups=pairs if n > 2 else None)
    return jax.tree.map(
        lambda x, own, total: _from_words(total - own, x), arrays, bits, sums
    )


def _words(x: jax.Array) -> jax.Array:
    """Return the bits of x as a flat array of unsigned integers."""
    size = x.dtype.itemsize
    if size >= WORD:
        return lax.bitcast_convert_type(x, jnp.uint32).reshape(-1)
    flat = jnp.pad(x.reshape(-1), (0, -x.size % (WORD // size)))
    return lax.bitcast_convert_type(flat.reshape(-1, WORD // size), jnp.uint32)


def _from_words(words: jax.Array, like: jax.Array) -> jax.Array:
    """Return an array of the shape and dtype of `like`: the inverse of `_words`."""
    size = like.dtype.itemsize
    if size >= WORD:
        shape = (*like.shape, size // WORD) if size > WORD else like.shape
        return lax.bitcast_convert_type(words.reshape(shape), like.dtype)
    flat = lax.bitcast_convert_type(words, like.dtype).reshape(-1)
    return flat[: like.size].reshape(like.shape)
