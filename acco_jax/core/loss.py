"""The results of a loss function, and their sums over microbatches."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from jax.typing import DTypeLike

from acco_jax.core.dtypes import promoted
from acco_jax.core.leaves import PyTree, Rng
from acco_jax.core.model_state import check_call, check_same
from acco_jax.core.select import choose, masked

# a loss, and (weight, aux, model state)
Evaluated = tuple[jax.Array, tuple["jax.Array | np.ndarray", PyTree, PyTree]]


class Sums(NamedTuple):
    """The sums of each worker over its microbatches; row i is worker i's."""

    grads: PyTree  # (n, *param.shape), the accumulator's dtype
    loss: jax.Array  # (n,)
    weight: Any  # (n,) jax.Array; of NumPy where a microbatch's is no computed number
    aux: PyTree  # (n, ...)
    # (n, n) int32, row i zero except at place i: how often worker i was dropped; None
    # where numbers are not checked to be finite
    dropped: jax.Array | None = None
    # (n, ...) each worker's own after its last microbatch; None: the model has none
    model_state: PyTree = None


def with_arrays(fn: Callable[..., Any]) -> Partial:
    """Return a function as a pytree of the arrays that it carries, a Partial as is."""
    return fn if isinstance(fn, Partial) else Partial(fn)


def untraced(fn: Callable[..., Any]) -> Partial:
    """Return a function that no earlier step has traced, with what it reads by then."""
    given = with_arrays(fn)
    func: Callable[..., Any] = given.func

    @functools.wraps(func, updated=())
    def traced(*args: Any, **named: Any) -> Any:
        return func(*args, **named)

    return Partial(traced, *given.args, **given.keywords)


def with_state(
    loss_fn: Callable[..., Any], state: PyTree, params: PyTree, batch: PyTree, rng: Rng
) -> tuple[jax.Array, jax.Array, PyTree]:
    """Return (loss, weight, aux), where the new model state is not needed."""
    check_call(loss_fn, state)
    return _without_state(loss_fn(params, batch, rng, state), state)[0]


def _without_state(out: PyTree, state: PyTree) -> tuple[tuple[Any, ...], PyTree]:
    """Return what a loss function returned with a model state, apart from that state.

    Raises:
      ValueError: it returned something else.
    """
    if not isinstance(out, tuple) or len(out) != 4:
        raise ValueError(
            "loss_fn is given a model state and must return its successor: return "
            "(loss, weight, aux, model_state)."
        )
    *rest, successor = out
    check_same(state, successor)
    return tuple(rest), successor


def _check_numbers(out: PyTree) -> None:
    """Raise a ValueError unless a loss function returned numbers, which are summed."""
    for path, x in jax.tree_util.tree_leaves_with_path(out):
        dtype = getattr(x, "dtype", None)
        if dtype is None and isinstance(x, int | float | complex):
            continue
        kinds = np.number, np.bool_
        if dtype is None or not any(jnp.issubdtype(dtype, kind) for kind in kinds):
            place = jax.tree_util.keystr(path)
            raise ValueError(
                f"loss_fn returned {repr(x) if dtype is None else dtype}"
                f"{place and ' at ' + place}: return only numbers, because they are "
                "summed over the microbatches."
            )


def evaluate(
    loss_fn: Callable[..., Any],
    microbatch: PyTree,
    rng: Rng,
    model_state: PyTree,
    params: PyTree,
) -> Evaluated:
    """Return (loss [], (weight [], aux, model_state)), with None for absent parts.

    Raises:
      ValueError: the loss function takes or returns something else.
    """
    check_call(loss_fn, model_state)
    carried = () if model_state is None else (model_state,)
    out = loss_fn(params, microbatch, rng, *carried)
    _check_numbers(out)
    if carried:
        out, model_state = _without_state(out, model_state)
    forms = "return loss, (loss, aux) or (loss, weight, aux)."
    if not isinstance(out, tuple):
        out = out, 1.0, None
    elif len(out) == 2:
        out = out[0], 1.0, out[1]
    if len(out) != 3:
        raise ValueError(f"loss_fn returned a tuple of {len(out)}: {forms}")
    for name, x in zip(("loss", "weight"), out, strict=False):
        if x is None or not jax.tree_util.all_leaves([x]):
            raise ValueError(f"loss_fn returned {type(x).__name__} as {name}: {forms}")
    loss, weight = jnp.asarray(out[0]), _as_known(out[1])
    if loss.shape or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ValueError(
            f"loss_fn returned a loss of shape {loss.shape} and dtype {loss.dtype}:"
            " return a floating-point scalar, the mean or the sum over the rows."
        )
    if weight.shape or jnp.iscomplexobj(weight):
        raise ValueError(
            f"loss_fn returned a weight of shape {weight.shape} and dtype "
            f"{weight.dtype}: return a real scalar, the number of targets."
        )
    aux, model_state = jax.tree.map(jnp.asarray, (out[2], model_state))
    return loss, (weight, aux, model_state)


def _as_known(weight: Any) -> jax.Array | np.ndarray:
    """Return a weight as an array, of NumPy where the program computes none."""
    if isinstance(weight, jax.Array):
        return weight
    return np.asarray(weight, jnp.result_type(weight))


def counted(sums: Sums) -> Sums:
    """Return the sums; without weight they count for nothing, not even a NaN."""
    if isinstance(sums.weight, np.ndarray) and sums.weight.all():
        return sums  # known while it is traced, and nothing to mask
    found = sums.grads, sums.loss, sums.aux
    grads, loss, aux = masked(sums.weight != 0, found)
    return sums._replace(grads=grads, loss=loss, aux=aux)


def keep(sums: Sums, before: PyTree) -> Sums:
    """Return one worker's sums; without weight the model state is `before`."""
    if before is None:
        return sums
    valid = sums.weight != 0
    return sums._replace(model_state=choose(valid, sums.model_state, before))


def finite(sums: Sums, grads: PyTree, me: jax.Array, before: PyTree = None) -> Sums:
    """Return one worker's sums, or zeros unless they and its gradients are finite.

    A worker without weight counts for nothing, whatever its sums, and is not dropped.

    Args:
      sums: of this worker, without a leading axis.
      grads: of this worker, as they are sent.
      me: (n,) true only in this worker's place.
      before: its model state before these microbatches.
    """
    numbers = jax.tree.leaves((sums.loss, sums.weight, sums.model_state, grads))
    # not of the largest: where devices share a leaf, a maximum may lose a NaN
    each = [jnp.isfinite(x).all() for x in numbers]
    bad = (sums.weight != 0) & ~functools.reduce(jnp.logical_and, each)
    good = masked(~bad, sums._replace(model_state=None))
    dropped, state = (me & bad).astype(jnp.int32), sums.model_state
    return keep(good._replace(dropped=dropped, model_state=state), before)


def add(sums: Sums, more: Sums) -> Sums:
    """Return the sum of both, in the first one's dtypes, with the later model state."""
    state = keep(more, sums.model_state).model_state
    a, b = (x._replace(model_state=None) for x in (sums, more))
    added = jax.tree.map(lambda a, b: a + b.astype(a.dtype), a, b)
    return added._replace(model_state=state)


def widened(sums: Sums) -> Sums:
    """Return the sums in at least 32 bits, gradients as they are.

    This lets booleans be summed and keeps small increments.
    """

    def wide(x: jax.Array, least: DTypeLike = jnp.float32) -> jax.Array:
        return x.astype(promoted(x.dtype, least))

    def number(x: jax.Array) -> jax.Array:
        inexact = jnp.issubdtype(x.dtype, jnp.inexact)
        return wide(x, jnp.float32 if inexact else jnp.int32)

    loss, weight = wide(sums.loss), wide(sums.weight)
    aux = jax.tree.map(number, sums.aux)
    return sums._replace(loss=loss, weight=weight, aux=aux)
