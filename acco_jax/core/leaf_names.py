"""Leaves of a tree by their names in a checkpoint, keys as their data."""

from collections.abc import Hashable
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp

from acco_jax.core.leaves import Array, PyTree


def is_key(x: Array) -> TypeGuard[jax.Array | jax.ShapeDtypeStruct]:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def key_impl(x: Array) -> Hashable:
    impls: list[Any] = []
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), x)
    return impls[0]


def data(x: Array) -> Array:
    """Return the data of a key, array or abstract, which orbax can write; else x."""
    if not is_key(x):
        return x
    if isinstance(x, jax.Array):
        return jax.random.key_data(x)
    bits = jax.eval_shape(jax.random.key_data, x)
    return jax.ShapeDtypeStruct(bits.shape, bits.dtype, sharding=x.sharding)


def as_key(like: Array, x: jax.Array) -> jax.Array:
    """Return x, read as `data` of `like`, as a key if `like` is one."""
    if not is_key(like):
        return x
    return jax.random.wrap_key_data(x, impl=key_impl(like))


def array(x: Any) -> Array:
    """Return a number or a NumPy array as a step would take it."""
    return x if isinstance(x, jax.Array | jax.ShapeDtypeStruct) else jnp.asarray(x)


def named(tree: PyTree) -> dict[str, Any]:
    """Return leaves by name: an index, which keeps their order, and their path."""
    return {
        f"{i:05d}.{jax.tree_util.keystr(path, simple=True, separator='.')}": data(x)
        for i, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(tree))
    }
