"""Collectives between groups of TPU chips, as permutes that do not wait for each other.

XLA:TPU runs no reduce-scatter or all-gather beside a loop that has some of its own, as
the loops of a group's microbatches have. It does run permutes there, where chips may
send anywhere (`groups.sends_anywhere`): n - 1 of them, one for each distance between
two of n workers, send the bytes of the collective.

Arrays have any dtype. Other workers' parts are summed in the order of their distance.
"""

import functools
import operator
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax import lax

from acco_jax.core.leaves import PyTree

Part = tuple[jax.Array, jax.Array]  # who sent it, int32 [], and (rows, ...)


def reduce_scatter(arrays: PyTree, axis: str) -> PyTree:
    """Sum arrays (n * rows, ...) over an axis; device i keeps part i, (rows, ...)."""

    def one(x: jax.Array) -> jax.Array:
        parts = x.reshape(lax.axis_size(axis), -1, *x.shape[1:])
        part = lambda i: lax.dynamic_index_in_dim(parts, i, keepdims=False)  # noqa: E731
        return functools.reduce(operator.add, (x for _, x in _exchanged(part, axis)))

    return jax.tree.map(one, arrays)


def all_gather(arrays: PyTree, axis: str) -> PyTree:
    """Join arrays (rows, ...) of all devices of an axis: (n * rows, ...)."""

    def one(x: jax.Array) -> jax.Array:
        n = lax.axis_size(axis)
        whole = jnp.zeros((n, *x.shape), x.dtype)
        for sender, part in _exchanged(lambda _: x, axis):
            whole = lax.dynamic_update_index_in_dim(whole, part, sender, 0)
        return whole.reshape(-1, *x.shape[1:])

    return jax.tree.map(one, arrays)


def _exchanged(sent: Callable[[jax.Array], jax.Array], axis: str) -> Iterator[Part]:
    """Yield senders and what they sent(to this worker), this one first."""
    n, i = lax.axis_size(axis), lax.axis_index(axis)
    yield i, sent(i)
    for distance in range(1, n):
        pairs = [(j, (j + distance) % n) for j in range(n)]
        part = lax.ppermute(sent((i + distance) % n), axis, pairs)
        yield (i - distance) % n, part
