"""The parameters that states were begun from, to notice others at the first call."""

import weakref
from typing import Any

import jax
import jax.numpy as jnp

from acco_jax.core.leaves import PyTree
from acco_jax.core.state import State

# by the identity of a state's counter, which is one array of its own: that array, and
# the leaves of the parameters, none of which is kept alive
_begun: dict[int, tuple[weakref.ref[Any], list[weakref.ref[Any] | None]]] = {}


def remember(params: PyTree, state: State) -> None:
    """Note that the state was begun from these very arrays."""
    counter, leaves = state.calls_done, jax.tree.leaves(params)
    if any(isinstance(x, jax.core.Tracer) for x in (counter, *leaves)):
        return
    key = id(counter)
    held = weakref.ref(counter, lambda _: _begun.pop(key, None))
    # an array of NumPy's may be changed in place
    arrays = [weakref.ref(x) if isinstance(x, jax.Array) else None for x in leaves]
    _begun[key] = held, arrays


def begun_from(params: PyTree, state: State) -> bool | None:
    """Return whether the state was begun from these very arrays; None: unknown."""
    known = _begun.get(id(state.calls_done))
    if known is None or known[0]() is not state.calls_done:
        return None
    leaves = jax.tree.leaves(params)
    begun = (None if ref is None else ref() for ref in known[1])
    return all(a is b for a, b in zip(begun, leaves, strict=True))


def _equal(params: PyTree, others: PyTree) -> list[jax.Array]:
    def equal(a: jax.Array, b: jax.Array) -> jax.Array:
        b = jnp.broadcast_to(b, a.shape)  # of a method whose workers have rows
        return ((a == b) | ((a != a) & (b != b))).all()

    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(others), strict=True)
    return [equal(a, b) for a, b in pairs]


def check(params: PyTree, state: State) -> None:
    """Raise a ValueError unless a state that has made no call holds these parameters.

    Args:
      params: of the loop, where the train step has them.
      state: of a method that keeps the parameters, too.
    """
    if int(jax.device_get(state.calls_done)):
        return
    equal = jax.jit(_equal, out_shardings=state.layout.sharding())
    found = jax.device_get(equal(params, state.committed(params)))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    for path, same in zip(paths, found, strict=True):
        if not same:
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} has other values than those "
                "that the state was begun from and holds: begin from these with "
                "acco_jax.start, or give what it returned."
            )
