"""Checks of a method's arguments, and of the optax wrappers that it may stand in."""

import inspect
import re
import sys
import traceback
import types
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.typing import ArrayLike, DTypeLike

from acco_jax.core.layout import Layout
from acco_jax.core.leaves import Leaf, path_names

PyTree = Any


def place_weight(layout: Layout, weight: ArrayLike | None) -> jax.Array:
    """Put (n,) weights on their workers; None means 1 each.

    A jax.Array is not read, since reading would block: a weight below 0 becomes 0.

    Raises:
      ValueError: wrong shape, or a weight that can be read and is negative.
    """
    n = layout.workers
    if weight is None:
        weight = jnp.ones(n)
    elif not isinstance(weight, jax.Array) and np.any(np.less(weight, 0)):
        raise ValueError(
            f"weight {np.asarray(weight).tolist()} has one below 0: give each worker 0 "
            "or more, such as its number of targets."
        )
    if np.shape(weight) != (n,):
        raise ValueError(
            f"weight has shape {np.shape(weight)}: give one weight per worker, ({n},)."
        )
    weight = jnp.asarray(weight, layout.scalar)
    weight = jnp.where(weight < 0, 0, weight)  # NaN stays
    return jax.device_put(weight, layout.sharding(layout.axis))


def check_layout(
    layout: Layout, mesh: Mesh, axis: tuple[str, ...], comm_dtype: DTypeLike | None
) -> None:
    """Raise a ValueError for a state of other workers or communication than tx's."""
    if (layout.mesh, layout.axis) != (mesh, axis):
        raise ValueError(
            "the state's workers are not tx's: move it with acco_jax.reshard."
        )
    given = comm_dtype and jax.dtypes.canonicalize_dtype(comm_dtype)
    for leaf in layout.leaves:
        if leaf.comm_dtype != (given or leaf.dtype):
            raise ValueError(
                f"the state of {leaf} communicates {leaf.comm_dtype}, tx "
                f"{given or leaf.dtype}: give the state of tx.init for the same tx."
            )


def check_params(layout: Layout, params: PyTree | None) -> None:
    """Raise a ValueError unless params are what `layout` was made for."""
    if params is None:
        raise ValueError(
            "update needs the current params: tx.update(grads, state, params)."
        )
    for leaf, p in _by_leaf("params", layout, params):
        if jnp.shape(p) != leaf.shape:
            raise ValueError(
                f"params {leaf} has shape {jnp.shape(p)}, but init saw {leaf.shape}: "
                "make a new state with init."
            )
    check_dtypes(layout, params)


def check_dtypes(layout: Layout, params: PyTree) -> None:
    """Raise a ValueError unless params, or rows of them, are of the dtypes of init."""
    for leaf, p in _by_leaf("params", layout, params):
        # NumPy's float64 becomes float32 where jax_enable_x64 is off
        dtype, expected = jnp.result_type(p), jnp.result_type(leaf.dtype)
        if dtype != expected:
            raise ValueError(
                f"params {leaf} is {dtype}, but init saw {expected}: cast it back, or "
                "make a new state with init."
            )


def check_grads(layout: Layout, grads: PyTree) -> None:
    """Raise a ValueError unless grads are rows of what `layout` was made for."""
    for leaf, g in _by_leaf("grads", layout, grads):
        shape = (layout.workers, *leaf.shape)
        if jnp.shape(g) != shape:
            raise ValueError(
                f"grads {leaf} has shape {jnp.shape(g)} instead of {shape}: give one "
                "row per worker, the sum of its own microbatch gradients (see "
                "acco_jax.local_gradients)."
            )


def _by_leaf(what: str, layout: Layout, tree: PyTree) -> Iterable[tuple[Leaf, Any]]:
    if jax.tree.structure(tree) != layout.treedef:
        raise ValueError(
            f"{what} has another tree structure than the parameters given to init: "
            "give the same tree, or make a new state with init."
        )
    return zip(layout.leaves, jax.tree.leaves(tree), strict=True)


def check_extra(inner: optax.GradientTransformation, extra: dict[str, Any]) -> None:
    """Raise a ValueError for extra arguments that inner cannot take."""
    if extra and not isinstance(inner, optax.GradientTransformationExtraArgs):
        names = ", ".join(sorted(extra))
        raise ValueError(
            f"inner takes no extra arguments, but update got {names}: leave them out."
        )
    for name, value in extra.items():
        if any(callable(x) for x in jax.tree.leaves(value)):
            raise ValueError(
                f"update got {name}, a function: inner works on shards, of which no "
                "function of whole parameters can be computed."
            )


def takes(inner: optax.GradientTransformation, name: str) -> bool:
    """Return whether inner.update takes an extra argument of this name, or any.

    optax.contrib.sam is of the type that takes any, and takes none.
    """
    if not isinstance(inner, optax.GradientTransformationExtraArgs):
        return False
    parameters = inspect.signature(inner.update).parameters.values()
    return any(p.name == name or p.kind is p.VAR_KEYWORD for p in parameters)


def checked_update(
    inner: optax.GradientTransformation,
    gradient: PyTree,
    state: PyTree,
    params: PyTree,
    extra: dict[str, Any],
    *,
    in_loop: bool = False,
) -> tuple[PyTree, PyTree]:
    """Run inner.update, and check that its state keeps its form.

    Its dtypes may become wider, as the first updates of some optimizers make them. They
    may not `in_loop`, in a compiled loop.

    Raises:
      ValueError: it needs an argument that is not in `extra`, or the state has another
        tree structure, shape or dtype.
    """
    update = optax.with_extra_args_support(inner).update
    try:
        updates, new = update(gradient, state, params, **extra)
    except TypeError as error:
        missing = re.search(r"required keyword-only arguments?: (.*)", str(error))
        if missing is None:
            raise
        if "'value_fn'" in missing[1]:
            raise ValueError(
                "inner needs value_fn, as line searches do, but works on shards, or on "
                "one worker's part of the batch, where the loss of whole parameters "
                "cannot be computed: give it a learning rate instead, such as "
                "optax.lbfgs(1e-2, linesearch=None)."
            ) from error
        raise ValueError(
            f"inner needs {missing[1]}, which it was not given: pass it to tx.update "
            "by keyword, or as step(..., extra={...}). Local methods give an optimizer "
            "gradients alone: use another one there."
        ) from error
    _check_unchanged(state, new, in_loop)
    return updates, new


def _check_unchanged(state: PyTree, new: PyTree, in_loop: bool) -> None:
    before, after = _by_name(state), _by_name(new)
    for name in [*before, *after]:
        old, now = before.get(name), after.get(name)
        was, is_ = _described(old), _described(now)
        if was != is_ and not _compatible(old, now, in_loop):
            raise ValueError(
                f"inner changes its state: {name or 'it'} was {was} and is {is_} after "
                "an update, which must return what init does."
            )
    structure: Any = jax.tree.structure(state)
    if structure != jax.tree.structure(new):  # a list for a tuple, say
        raise ValueError(
            "inner changes its state: its leaves are in another kind of container "
            "after an update, which must return what init does."
        )


def _by_name(tree: PyTree) -> dict[str, Any]:
    named = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(path_names(path)): x for path, x in named}


def _described(x: ArrayLike | None) -> str:
    return "absent" if x is None else f"{jnp.result_type(x)}{list(jnp.shape(x))}"


def _compatible(old: ArrayLike | None, new: ArrayLike | None, in_loop: bool) -> bool:
    """Return whether jnp.where gives the two a result of the dtype of either."""
    if new is None or old is None or jnp.shape(new) != jnp.shape(old):
        return False
    with jax.numpy_dtype_promotion("standard"):  # as guarded by `choose`
        dtypes = [jnp.result_type(x) for x in ((old,) if in_loop else (old, new))]
        return jnp.result_type(new, old) in dtypes


def check_optimizer(name: str, optimizer: object, give: str) -> None:
    """Raise a ValueError unless an argument is an optax transformation."""
    if isinstance(optimizer, optax.GradientTransformation):
        return
    if hasattr(optimizer, "gradient_transformation"):  # optax.MultiSteps
        give = (
            "its gradient_transformation(), whose k count optimizer steps, or more "
            "microbatches instead"
        )
    raise ValueError(f"{name} is a {type(optimizer).__name__}: give {give}.")


# --------------------------------------------- what a method may and may not stand in

# A sharding method must see every parameter and have the last word on the updates.
# These optax functions call a member's init and leave both intact (a chain only if
# nothing else is in it); every other wrapper would add per-worker rows to parameters.
_HARMLESS = {"chain", "named_chain", "inject_hyperparams", "with_extra_args_support"}
# chain: tuple(fn(params) for fn in init_fns); named_chain: for name, tx in transforms.
_LOOPS = {"chain": ("fn", "init_fns"), "named_chain": ("tx", "transforms")}


def as_updated(params: PyTree) -> PyTree:
    """Return what `init` was given, in the form that `update` will be given.

    flax's nnx.Optimizer gives init its Variables, and update the arrays in them.
    """
    nnx = sys.modules.get("flax.nnx")
    callers = (_module(frame) for frame, _ in traceback.walk_stack(sys._getframe(1)))
    if nnx is not None and "flax.nnx.training.optimizer" in callers:
        return nnx.as_pure(params)
    return params


def _module(frame: types.FrameType) -> str:
    return frame.f_globals.get("__name__", "")


def refuse_wrappers() -> None:
    """Raise a ValueError if an optax wrapper that breaks the method calls `init`.

    A member of a chain is not told what follows it, so the calling frames are read.
    """
    called: types.FrameType | None = None
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        module, code = _module(frame), frame.f_code
        if module.startswith("optax.") and not module.endswith("_test"):
            wrapper = code.co_qualname.split(".")[0]
            if wrapper == "tree_map_params":
                raise ValueError(
                    "optax.tree_map_params does not see through a state that is packed "
                    "and sharded: acco_jax.state_shardings has its arrays' shardings."
                )
            if wrapper not in _HARMLESS:
                raise ValueError(
                    f"this method cannot stand inside optax.{wrapper}: put {wrapper} "
                    "inside, around its inner optimizer"
                    + (", or use microbatches." if wrapper == "MultiSteps" else ".")
                )
            if wrapper in _LOOPS and code.co_name != "<genexpr>":
                _refuse_others(wrapper, frame, called)
        called = frame


def _refuse_others(
    wrapper: str, frame: types.FrameType, called: types.FrameType | None
) -> None:
    names = dict(frame.f_locals)
    if called is not None and called.f_code.co_name == "<genexpr>":
        names |= called.f_locals
    member, members = (names.get(name) for name in _LOOPS[wrapper])
    # an optax that names them otherwise is not understood, which is not an error
    if not isinstance(members, tuple | list):
        return
    if wrapper == "named_chain":
        members = [pair[-1] for pair in members if isinstance(pair, tuple) and pair]
    if len(members) > 1 and any(other is member for other in members):
        raise ValueError(
            f"this method must be the only member of optax.{wrapper}: what stands "
            "before it would see sums of each worker, what stands after it would "
            "change the parameters behind its back; put it inside, into inner."
        )
