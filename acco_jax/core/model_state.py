"""Model state: arrays that a model carries along and that are not differentiated.

Examples are the running statistics of batch norm. Each worker updates its own with
the rows of its microbatches, in their order. The committed state is the workers' mean,
weighted as their gradients are. The sum over the workers is part of the small
all-reduce of the weights. With r_i(t) and w_i(t) worker i's state after its last
microbatch of half-round t and its weight,

    m(t) = sum_i w_i(t) r_i(t) / sum_i w_i(t), or m(t-1) if no worker had weight.

Without delay, as in a warm-up, every worker begins half-round t + 1 at m(t). A delayed
method knows m(t) a half-round late: there each goes on at its own r_i(t). A microbatch
without weight, and a worker that is dropped, leave r_i as it was.
"""

import functools
import inspect
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from acco_jax.core.dtypes import promoted

PyTree = Any
_ELSEWHERE = (
    "not to be trained: leave it out of params and carry it as model_state, "
    "acco_jax.start(tx, params, model_state) (docs: Your own model)."
)


def check_state(model_state: PyTree) -> None:
    """Raise a ValueError unless it is a tree of floating arrays, which have a mean."""
    flat = jax.tree_util.tree_leaves_with_path(model_state)
    if not flat:
        raise ValueError("model_state has no arrays: leave it out.")
    for path, x in flat:
        name = f"model_state{jax.tree_util.keystr(path)}"
        dtype = getattr(x, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"{name} is {repr(x) if dtype is None else dtype}, of which workers "
                "cannot take a mean: keep it float32, and random keys out of it, "
                "because each microbatch is given one as rng."
            )


def check_trained(params: PyTree) -> None:
    """Raise a ValueError for state among the parameters; warn of what looks like it.

    Raises:
      ValueError: flax keeps a leaf as state that is not differentiated.
    """
    nnx = sys.modules.get("flax.nnx")
    is_leaf = (lambda x: isinstance(x, nnx.Variable)) if nnx else None
    named: dict[tuple[str, ...], set[str]] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_leaf):
        name, key = jax.tree_util.keystr(path), jax.tree_util.keystr
        kind, names = type(x).__name__, tuple(key((k,), simple=True) for k in path)
        if "batch_stats" in names:
            raise ValueError(f"params{name} is a statistic, {_ELSEWHERE}")
        if nnx and isinstance(x, nnx.BatchStat | nnx.RngState):
            raise ValueError(f"params{name} is an nnx.{kind}, {_ELSEWHERE}")
        named.setdefault(names[:-1], set()).update(names[-1:])
    for above, found in named.items():
        for pair in ({"mean", "var"}, {"running_mean", "running_var"}):
            if pair <= found:
                where = "/".join(above) or "params"
                warnings.warn(
                    f"{where} has {' and '.join(sorted(pair))} among the parameters: "
                    f"if they are statistics of batch norm, they are {_ELSEWHERE}",
                    stacklevel=2,
                )


def check_call(loss_fn: Callable[..., Any], model_state: PyTree) -> None:
    """Raise a ValueError unless a loss function takes what it is given.

    It must take a model state where there is one, and none where there is none.
    """
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # a callable that does not say what it takes
        return

    def takes(k: int) -> bool:
        try:
            signature.bind(*[None] * k)
        except TypeError:
            return False
        return True

    given = 3 + (model_state is not None)
    if takes(given):
        return
    if not takes(7 - given):
        state = ", model_state" * (given == 4)
        raise ValueError(
            f"loss_fn does not take {given} arguments: give loss_fn(params, "
            f"microbatch, rng{state}), which may leave rng unused."
        )
    if given == 3:
        raise ValueError(
            "loss_fn takes a model state, but there is none: use make_train_step with "
            "the state of acco_jax.start(tx, params, model_state)."
        )
    raise ValueError(
        "the state carries a model state, but loss_fn takes none: give loss_fn(params, "
        "microbatch, rng, model_state) -> (loss, weight, aux, model_state)."
    )


def check_same(before: PyTree, after: PyTree) -> None:
    """Raise a ValueError unless a loss function returned a state like the one given."""
    given, found = (str(jax.tree.structure(x)) for x in (before, after))
    if given != found:
        raise ValueError(
            f"loss_fn returned a model state {found}, but was given {given}: return "
            "the same tree."
        )
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True
    )
    for (path, a), b in pairs:
        was, is_ = (f"{jnp.result_type(x)}{list(jnp.shape(x))}" for x in (a, b))
        if was != is_:
            raise ValueError(
                f"loss_fn returned model_state{jax.tree_util.keystr(path)} as {is_}, "
                f"but was given {was}: return the same shape and dtype."
            )


def weighted(states: Sequence[jax.Array], weight: jax.Array) -> jax.Array:
    """Return a worker's leaves times its weight, as a vector; zeros without weight.

    Its dtype holds the weight and every leaf.
    """
    dtype = functools.reduce(promoted, (x.dtype for x in states), weight.dtype)
    flat = jnp.concatenate([x.astype(dtype).reshape(-1) for x in states])
    return jnp.where(weight != 0, weight.astype(dtype) * flat, 0)


def averaged(before: PyTree, total: jax.Array, weight: jax.Array) -> PyTree:
    """Return the mean of the workers' states, or `before` if no worker had weight.

    Args:
      before: a tree of arrays.
      total: the sum of what `weighted` returned of every worker.
      weight: [] the sum of the weights.
    """
    leaves, treedef = jax.tree.flatten(before)
    ends = np.cumsum([math.prod(x.shape) for x in leaves])
    divisor = jnp.where(weight != 0, weight, 1).astype(total.dtype)
    means = jnp.split(total / divisor, ends[:-1])
    new = [
        jnp.where(weight != 0, mean.reshape(x.shape).astype(x.dtype), x)
        for x, mean in zip(leaves, means, strict=True)
    ]
    return jax.tree.unflatten(treedef, new)
