"""A method's state on other devices: more workers or fewer, or in other groups.

State of the whole run stays the same: the committed parameters, the optimizer's state
and the sum of the workers' in-flight gradients. Its splits, padding and packing follow
the new devices. State that each of n workers has for itself goes to m workers so:

    gradients and their error feedback, and        worker i's are added to those of
    what sparse methods have yet to send           worker floor(i m / n); others have 0
    (sums over the workers)
    rows of local methods (parameters, states of   worker j has the mean over the i
    inner optimizers: means over the workers)      with floor(i m / n) = j, or a copy
                                                   of worker floor(j n / m)'s
    weights                                        as gradients, or the copies of a
                                                   worker share its weight equally
    keys of random numbers                         as rows; a copy's are its own

So G / W does not change. Nor does the mean of rows if m divides n or n divides m. What
sparse methods with weighted=False have yet to send is averaged like rows: they divide
its sum by the number of workers.

A leaf that n workers split and m workers have whole is no longer rounded. Its error
feedback is added to its in-flight gradients. zero1 has none and loses that feedback.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from acco_jax.core.buffers import Arrays, InFlight, Reduced, RoundingError
from acco_jax.core.layout import Layout
from acco_jax.core.leaf_names import array
from acco_jax.core.leaves import Leaf, PyTree, axes_in, only, wide
from acco_jax.methods import method
from acco_jax.methods.optimizer import in_auto


def reshard(old: PyTree, tx: method.Method) -> PyTree:
    """Return a state, and the parameters beside it, for the workers of another mesh.

    Args:
      old: a method's state, or (params, state) as `start` returned and steps went on
        with them; of a local method the latter. Arrays may lie on any devices that
        this process can move them from, or in host memory. A checkpoint of another
        set of devices is restored in `saved`'s form, on the available devices.
      tx: the same method with the same options and inner optimizer, on the new mesh.

    Returns:
      The form of `old`, on the devices of tx: `make_train_step(loss_fn, tx)` goes on
      with it. See the module for what becomes of each worker's own.

    Raises:
      ValueError: the state is another method's, or of other parameters.
    """
    method.check_method(tx)
    pair = type(old) is tuple
    state = old[1] if pair else old
    if not method.is_state(state):
        raise ValueError(
            f"what is resharded is a {type(state).__name__}: give a method's state, or "
            "(params, state)."
        )
    if tx.local and not pair:
        raise ValueError(
            "the workers of a local method have parameters of their own: give "
            "(params, state)."
        )

    def shape(leaf: Leaf) -> jax.ShapeDtypeStruct:
        # types of Explicit axes show it; what splits the model may be a data axis now
        spec = only(leaf.spec, set(tx.mesh.axis_names) - set(tx.axis))
        sharding = NamedSharding(tx.mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    carried = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
        getattr(state, "model_state", None),
    )
    begun = state.layout.tree(shape), carried
    like: PyTree = method.abstract_start(tx, *begun)
    if type(like[1]) is not type(state):
        raise ValueError(
            f"the state is {type(state).__name__}, of another method than tx: give the "
            "same method on another mesh."
        )
    if _options(state) != _options(like[1]):
        raise ValueError(
            "the state is of another inner optimizer or other options than tx: give "
            "the same ones on another mesh."
        )
    if not pair:
        like = like[1]
    old = jax.tree.map(array, old)
    old = jax.tree.map(lambda x: jax.device_put(x, anywhere(x.shape, tx.mesh)), old)
    weighted = getattr(tx.round(tx.phase(0)), "weighted", True)
    move = functools.partial(moved, new=like, weighted=weighted)
    return jax.jit(move, out_shardings=jax.tree.map(lambda x: x.sharding, like))(old)


def _options(state: PyTree) -> Any:
    """Return what inner optimizer and options make of a state's form."""
    residual = getattr(state, "residual", None) or ()
    held = [getattr(state, name, None) is None for name in ("residual", "update")]
    inner = jax.tree.structure(getattr(state, "inner", None))
    outer = getattr(state, "outer", None)  # an optimizer's state, or methods' states
    parts: Any = outer
    if type(outer) is not tuple or not any(map(method.is_state, outer)):
        parts = (outer,)
    outers = [
        _options(x) if method.is_state(x) else jax.tree.structure(x) for x in parts
    ]
    return type(state), inner, held, [x is None for x in residual], outers


def saved(
    tx: method.Method, params: PyTree, mesh: Mesh, model_state: PyTree = None
) -> tuple[PyTree, Any]:
    """Return what a checkpoint of tx's workers is restored as, before `reshard`.

    Args:
      tx: the method as it was, on a `jax.sharding.AbstractMesh` of its axes and sizes.
      params: arrays or ShapeDtypeStructs, without rows.
      mesh: the available devices.
      model_state: arrays or ShapeDtypeStructs; None: the model has none.

    Returns:
      (params, state), abstract: shapes as they were, shardings over `mesh`.
    """
    found = jax.eval_shape(functools.partial(method.start, tx), params, model_state)
    return jax.tree.map(lambda x: x.update(sharding=anywhere(x.shape, mesh)), found)


def anywhere(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Return a sharding that splits the first dimension that all devices divide."""
    free = [d for d, size in enumerate(shape) if size and size % mesh.size == 0]
    return NamedSharding(mesh, P(*[None] * free[0], mesh.axis_names) if free else P())


def moved(old: PyTree, new: PyTree, weighted: bool = True) -> PyTree:
    """Return a state, or (params, state), as other workers store it.

    All arrays are global ones: run it inside jax.jit, with the new one's shardings.

    Args:
      old: arrays.
      new: the same, abstract, of the same method and parameters.
      weighted: whether workers of a local method count by weight; see `RoundOptions`.

    Raises:
      ValueError: an array is of another shape for another reason.
    """
    if type(old) is tuple:
        rows = functools.partial(_as, old[1].layout, new[1].layout)
        return jax.tree.map(rows, old[0], new[0]), moved(old[1], new[1], weighted)
    source, target = old.layout, new.layout

    def is_unit(x: PyTree) -> bool:
        return (
            isinstance(x, InFlight | Reduced | RoundingError | Layout)
            or method.is_state(x)
            or source.holds_shards(x)
        )

    def convert(a: PyTree, b: PyTree) -> PyTree:
        if isinstance(a, Layout):
            return b
        if method.is_state(a):
            return moved(a, b)
        if isinstance(a, InFlight):

            def own(a: InFlight) -> PyTree:
                rows = _rows(source, a.buffers, a.whole)
                summed, loss = _summed((rows, a.loss), target)
                return summed, _shared(a.weight, target), loss

            rows = a.weight, a.model_state
            states = _placed(target, lambda x: _states(target, *x), rows)
            summed, weight, loss = _placed(target, own, a)
            summed = jax.device_put(summed, target.grads_shardings)
            error = old.residual and old.residual.error
            if error is not None:
                left = _left_out(source, target, error.buffers)
                summed = target.map(
                    lambda leaf, g, e: g + e if leaf.whole else g, summed, left
                )
            packed = target.pack(summed, weight, loss)
            return packed._replace(model_state=states)
        if isinstance(a, RoundingError):
            left = _left_out(source, target, a.buffers)
            return RoundingError(_fed_back(target, left))
        if isinstance(a, Reduced):

            def stored(a: Reduced) -> PyTree:
                rows = [x[None] for x in a.whole]
                sums = _rows(source, a.buffers, rows, summed=len(source.axis))
                return target.store(jax.tree.map(lambda x: x[0], sums))

            homes = jax.tree.map(lambda x: x.sharding, target.shards)
            return target.rejoin(in_auto(stored, target, homes)(a))
        if source.holds_shards(a) and target.holds_shards(b):
            homes = jax.tree.map(lambda x: x.sharding, target.shards)
            return in_auto(lambda x: target.store(source.view(x)), target, homes)(a)
        return jax.tree.map(functools.partial(_as, source, target), a, b)

    fields, over_shards = {}, "residual" in old._fields  # of sharding methods' states
    for name, a, b in zip(old._fields, old, new, strict=True):
        if name == "inner" and over_shards:
            change = lambda x: target.store_state(source.view_state(x))  # noqa: E731
            fields[name] = in_auto(change, target, target.inner_shardings(b))(a)
        elif name == "model_state":
            fields[name] = a
        elif name == "error" and weighted:  # of sparse methods
            fields[name] = _placed(target, lambda rows: _summed(rows, target), a)
        else:
            fields[name] = jax.tree.map(convert, a, b, is_leaf=is_unit)
    return type(old)(**fields)


def _as(
    source: Layout, target: Layout, a: jax.Array, b: jax.Array | jax.ShapeDtypeStruct
) -> jax.Array:
    """Return rows of n workers as rows of m; an array common to all as it is."""
    if a.shape == b.shape:
        return a
    n, m = source.workers, target.workers
    if (a.shape[:1], b.shape[:1]) != ((n,), (m,)) or a.shape[1:] != b.shape[1:]:
        raise ValueError(f"an array of shape {a.shape} should have {b.shape}.")
    if m > n:
        return _placed(target, lambda a: _copied(a, m), a)
    owner = np.arange(n) * m // n
    if not jnp.issubdtype(a.dtype, jnp.inexact):  # counts and keys: the first's
        first = np.unique(owner, return_index=True)[1]
        return _placed(target, lambda a: a[first], a)
    sizes = np.bincount(owner).reshape(-1, *[1] * (a.ndim - 1))

    def mean(a: jax.Array) -> jax.Array:
        total = jax.ops.segment_sum(wide(a), owner, m)
        return (total / sizes.astype(total.dtype)).astype(a.dtype)

    return _placed(target, mean, a)


def _copied(a: jax.Array, m: int) -> jax.Array:
    """Return rows for m workers; a copy's random numbers are not its original's."""
    own = _originals(a.shape[0], m)
    rows = a[own]
    if a.ndim > 1 or not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        return rows
    others = jax.vmap(jax.random.fold_in)(rows, np.arange(m))
    return jnp.where(np.diff(own, prepend=-1) > 0, rows, others)


def _originals(n: int, m: int) -> np.ndarray:
    """Return whose copy each of m workers is, of n that are not more."""
    return np.arange(m) * n // m


def _placed(target: Layout, fn: Callable[[Any], PyTree], x: PyTree) -> PyTree:
    """Return the rows fn(x) of the target's workers, placed by the compiler in fn."""
    mesh = target.mesh
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = tuple(a for a, kind in kinds if kind == AxisType.Explicit)
    if not explicit:
        return fn(x)
    rows = P(tuple(a for a in target.axis if a in explicit) or None)
    out = NamedSharding(mesh, rows)
    return jax.sharding.auto_axes(fn, axes=explicit, out_sharding=out)(x)


def _states(target: Layout, weight: jax.Array, rows: PyTree) -> PyTree:
    """Return model states for other workers: weighted means, or copies."""
    n, m = weight.shape[0], target.workers
    if m >= n:
        return jax.tree.map(lambda x: x[_originals(n, m)], rows)
    owner = np.arange(n) * m // n
    total = jax.ops.segment_sum(weight, owner, m)
    weight = jnp.where(total[owner] != 0, weight, 1)  # all of them where none has any

    def mean(x: jax.Array) -> jax.Array:
        w = weight.reshape(-1, *[1] * (x.ndim - 1))
        found = jax.ops.segment_sum(jnp.where(w != 0, w * wide(x), 0), owner, m)
        return (found / jax.ops.segment_sum(w, owner, m)).astype(x.dtype)

    return jax.tree.map(mean, rows)


def _summed(rows: PyTree, target: Layout) -> PyTree:
    """Add each worker's own (k, ...), of any k, up to (n, ...) of the target's."""

    def summed(x: jax.Array) -> jax.Array:
        n, k = target.workers, x.shape[0]
        if n == k:
            return x
        return jax.ops.segment_sum(wide(x), np.arange(k) * n // k, n).astype(x.dtype)

    return jax.tree.map(summed, rows)


def _shared(weight: jax.Array, target: Layout) -> jax.Array:
    """Return workers' weights (k,) as those of the target's (n,), of equal sum."""
    n, k = target.workers, weight.shape[0]
    if n <= k:
        return _summed(weight, target)
    own = _originals(k, n)
    return weight[own] / np.bincount(own)[own].astype(weight.dtype)


def _left_out(source: Layout, target: Layout, buffers: Arrays) -> PyTree:
    """Return the error feedback as rows of the target's workers."""

    def own(buffers: Arrays) -> PyTree:
        rows = _rows(source, buffers, summed=len(source.axis) - 1)
        return _summed(rows, target)

    return jax.device_put(_placed(target, own, buffers), target.grads_shardings)


def _fed_back(target: Layout, rows: PyTree) -> Arrays:
    """Return the error feedback, for rounding on the target's slowest axis."""
    weight = jax.device_put(jnp.ones(target.workers), target.sharding(target.axis))
    found = target.pack(rows, weight).buffers
    for axis in target.reduce_order[:-1]:
        found = target.reduce_scatter(found, axis)
    return found


def _rows(
    layout: Layout,
    buffers: Arrays,
    whole: Sequence[jax.Array] | None = None,
    *,
    summed: int = 0,
) -> PyTree:
    """Return every worker's gradients, leaves (n, *shape), from packed buffers.

    Leaves that stay whole are zeros if `whole` is None. Of buffers that were `summed`
    over so many data axes, the fastest first, the rows are of the other axes.
    """
    data = [layout.mesh.shape[a] for a in layout.reduce_order]
    models = [layout.mesh.shape[a] for a in layout.model_axes]
    fast, data = math.prod(data[:summed]), data[summed:]
    devices = (*data, math.prod(models))
    found: dict[int, jax.Array] = {}
    for group, buffer in zip(layout.groups, buffers, strict=True):
        shares = buffer.reshape(fast, *devices, -1, group.width)
        pieces = jnp.moveaxis(shares, 0, -3)  # a device's shares, one after the other
        pieces = pieces.reshape(math.prod(devices), -1, group.width)
        parts = jax.vmap(group.take)(pieces)  # of every device: (n, *part)
        for i, x in zip(group.leaves, parts, strict=True):
            local = jax.vmap(layout.leaves[i].assemble)(x)
            found[i] = _joined(layout, layout.leaves[i], local, data, models)
    rest, n = iter(whole or ()), math.prod(data)

    def row(i: int, leaf: Leaf) -> jax.Array:
        if not leaf.whole:
            return found[i]
        if whole is None:
            return jnp.zeros((n, *leaf.shape), leaf.comm_dtype)
        return next(rest)

    rows = [row(i, leaf) for i, leaf in enumerate(layout.leaves)]
    return layout.treedef.unflatten(rows)


def _joined(
    layout: Layout, leaf: Leaf, x: jax.Array, data: list[int], models: list[int]
) -> jax.Array:
    """Join devices' pieces (devices, *local) to rows (n, *shape), by worker."""
    k, n = len(data), math.prod(data)
    x = x.reshape(*data, *models, *leaf.local)
    x = x.transpose(*reversed(range(k)), *range(k, x.ndim))
    x = x.reshape(n, *x.shape[k:])
    axes = list(layout.model_axes)
    for axis in [a for a in axes if a not in leaf.axes]:
        x = x.take(0, axis=1 + axes.index(axis))  # all devices along it have the same
        axes.remove(axis)
    # (n, *axes, *local) -> each dimension after the axes that split it
    order, shape = [0], [n]
    entries = [*leaf.spec, *[None] * (len(leaf.shape) - len(leaf.spec))]
    for d, entry in enumerate(entries):
        order += [1 + axes.index(a) for a in axes_in(entry)] + [1 + len(axes) + d]
        shape.append(leaf.shape[d])
    return x.transpose(order).reshape(shape)
