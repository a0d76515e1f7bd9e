"""Trees chosen by a condition, in few operations, since every leaf needs them."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

PyTree = Any


def choose(condition: jax.Array, yes: PyTree, no: PyTree) -> PyTree:
    """Return one of two trees of equal shapes; the condition is a bool []."""
    return jax.tree.map(lambda a, b: _one(condition, a, b), yes, no)


def masked(condition: jax.Array, tree: PyTree) -> PyTree:
    """Return the tree, or zeros where the condition, a bool [], does not hold."""
    return jax.tree.map(lambda x: _one(condition, x, jnp.zeros_like(x)), tree)


def difference(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a - b, which is 0 where they are equal, also if they are infinite.

    An additive mask of -inf among the parameters would become NaN.
    """
    found = a - b
    return _one(a == b, jnp.zeros_like(found), found)


def _one(condition: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    if jnp.shape(a) == jnp.shape(b) and jnp.result_type(a) == jnp.result_type(b):
        return lax.select(condition, a, b)  # jnp.where is a call of a function
    return jnp.where(condition, a, b)
