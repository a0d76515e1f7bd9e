"""What a loop asks of a method and its state, whichever it is."""

from __future__ import annotations

import functools
from typing import Any

import jax
import optax

from acco_jax.layout import Layout

PyTree = Any


def find_state(state: PyTree) -> Any:
    """The state of the one sharding method in an optimizer state, wrapped or not.

    Raises:
      ValueError: there is none, or more than one.
    """
    is_ours = lambda x: isinstance(getattr(x, "layout", None), Layout)  # noqa: E731
    found = [x for x in jax.tree.leaves(state, is_leaf=is_ours) if is_ours(x)]
    if len(found) != 1:
        raise ValueError(
            f"the state holds {len(found)} states of sharding methods instead of one: "
            "pass what tx.init or tx.update returned."
        )
    return found[0]


@functools.partial(jax.jit, static_argnums=0)
def gather_exact(layout: Layout, master: PyTree) -> PyTree:
    return layout.gather_exact(master)


def committed_params(state: PyTree, params: PyTree) -> PyTree:
    """Return theta, the committed parameters: to evaluate, export and checkpoint.

    Args:
      state: the optimizer state, also inside optax.chain or inject_hyperparams.
      params: the parameters of the loop (theta, theta~ or rows); for their structure.

    Returns:
      The master copy, gathered and rounded to each parameter's own dtype (whatever
      dtype communication uses); replicated over the data axis. Of a method without a
      common copy (gossip): the mean over the workers.

    Raises:
      ValueError: `state` holds no sharding method's state, or `params` is of another
        structure.
    """
    ours = find_state(state)
    if jax.tree.structure(params) != ours.layout.treedef:
        raise ValueError(
            "params has another tree structure than the optimizer state's."
        )
    if hasattr(ours, "committed"):  # of a local method
        return ours.committed(params)
    return gather_exact(ours.layout, ours.master)


def start(tx: Any, params: PyTree) -> tuple[PyTree, Any]:
    """Return what a train step starts from.

    Args:
      tx: a method of this library.
      params: arrays.

    Returns:
      (params, state). Where each worker keeps parameters of its own they are rows,
      (n, *param.shape), row i on worker i and all equal; else `params` as they are.
    """
    return tx.start(params)


def start_shardings(tx: Any, abstract_params: PyTree) -> tuple[PyTree, PyTree]:
    """Return a NamedSharding for every array of what `start` returns.

    Args:
      tx: a method of this library.
      abstract_params: arrays or ShapeDtypeStructs, without rows.
    """
    return tx.start_shardings(abstract_params)


def state_shardings(
    tx: optax.GradientTransformation, abstract_params: PyTree
) -> PyTree:
    """Return a NamedSharding for every array of tx's state.

    Args:
      tx: a sharding method, or an optax transformation around one.
      abstract_params: arrays or ShapeDtypeStructs.

    Returns:
      The state's tree with NamedShardings: for jit, restore and planning. What
      flax.serialization.from_bytes has read belongs there, too: jax.device_put(state,
      shardings).
    """
    shapes = jax.eval_shape(tx.init, abstract_params)
    ours = find_state(shapes)
    replicated = ours.layout.sharding()
    is_ours = lambda x: isinstance(getattr(x, "layout", None), Layout)  # noqa: E731

    def of(x: Any) -> PyTree:
        if hasattr(x, "shardings"):  # of a local method
            return x.shardings()
        return x.layout.state_shardings(x) if is_ours(x) else replicated

    return jax.tree.map(of, shapes, is_leaf=is_ours)
