"""Collectives between groups of TPU chips, as permutes that do not wait for each other.

XLA:TPU runs no reduce-scatter or all-gather beside a loop that has some of its own, as
the loops of a group's microbatches have. Permutes it does: n - 1 of them, each of one
n-th of the array, send the bytes of the collective, from each worker to each other one.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax

from acco_jax.core.leaves import PyTree


def reduce_scatter(arrays: PyTree, axis: str) -> PyTree:
    """Sum arrays over an axis; each device keeps its part of the first dimension."""

    def one(x: jax.Array) -> jax.Array:
        n, i = lax.axis_size(axis), lax.axis_index(axis)
        parts = x.reshape(n, -1, *x.shape[1:])

        def of(worker: jax.Array) -> jax.Array:
            return lax.dynamic_index_in_dim(parts, worker % n, keepdims=False)

        total = of(i)
        for distance, pairs in _distances(n):
            total += lax.ppermute(of(i + distance), axis, pairs)
        return total

    return jax.tree.map(one, arrays)


def all_gather(arrays: PyTree, axis: str) -> PyTree:
    """Join the arrays of all devices of an axis, along the first dimension."""

    def one(x: jax.Array) -> jax.Array:
        n, i = lax.axis_size(axis), lax.axis_index(axis)
        parts = jnp.zeros((n, *x.shape), x.dtype)
        parts = lax.dynamic_update_index_in_dim(parts, x, i, 0)
        for distance, pairs in _distances(n):
            part = lax.ppermute(x, axis, pairs)
            at = (i - distance) % n
            parts = lax.dynamic_update_index_in_dim(parts, part, at, 0)
        return parts.reshape(-1, *x.shape[1:])

    return jax.tree.map(one, arrays)


def _distances(n: int) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Yield the distances of other workers, and who sends to whom at that distance."""
    for distance in range(1, n):
        yield distance, [(j, (j + distance) % n) for j in range(n)]
