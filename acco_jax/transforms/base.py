"""What every method with sharded optimizer state is made of.

A method communicates gradients (reduce), takes an optimizer step on the shards
(advance) and communicates parameters (gather). `Method` carries these three stages;
the plain `update` below and the train step of `acco_jax.step` are both built from them
and know nothing else of a method.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding

from acco_jax import layout as layouts
from acco_jax.gradients import axis_names
from acco_jax.layout import Layout, LeafLayout, PackedLayout, Pending
from acco_jax.wire import Wire, Wires
from acco_jax.wire import wires as make_wires

PyTree = Any


class Point(NamedTuple):
    """What `advance` decided: where the parameters go, and what it saw on the way."""

    shards: PyTree  # the new parameters, master dtype
    grad_norm: jax.Array  # [] global norm of the mean gradient of this stage


class Method(optax.GradientTransformationExtraArgs):
    """An optax transformation that also carries its stages.

    Attributes:
      mesh: the devices.
      axis: the data axes.
      delayed: whether a half-round communicates the PREVIOUS half-round's gradients
        (`state.pending`), so that computation can hide it, or its own.
      half_rounds: how many updates make one step of the inner optimizer.
      warmup: so many first steps of a delayed method communicate their own gradients.
      accumulate_dtype: of the gradient accumulator; None: each parameter's own.
      accumulate: (gradients, layout, params, batch, counts, rng) -> (Pending, Sums):
        local gradients, ready for `reduce`; None: what `acco_jax.step` does itself. A
        method that communicates while it computes them returns raw buffers here.
      wires: what is communicated, and how, in each half-round.
      advance: (state, shards, weight, extra) -> (state, Point): the optimizer step on
        the reduced gradient sums and their total weight.
      check_state: raises a ValueError for a state of another method.
    """

    mesh: Mesh
    axis: tuple[str, ...]
    delayed: bool
    half_rounds: int
    warmup: int
    accumulate_dtype: Any
    accumulate: Callable[..., Any] | None
    wires: Wires
    advance: Callable[..., Any]
    check_state: Callable[[Any], None]

    steps_per_call = 1  # of the optimizer, that a call's batch holds

    def __new__(cls, init: Callable, update: Callable, **stages: Any) -> Method:
        self = super().__new__(cls, init, update)
        self.__dict__.update(stages)
        return self

    def start(self, params: PyTree) -> tuple[PyTree, Any]:
        """The parameters of the loop, which are `params`, and the initial state."""
        return params, self.init(params)

    def start_shardings(self, params: PyTree) -> tuple[PyTree, Any]:
        """NamedShardings of what `start` returns, as the train step leaves it."""
        shardings = state_shardings(self, params)
        return find_state(shardings).layout.params_shardings, shardings

    def calls(self, steps: int) -> int:
        """Half-rounds of so many steps; a delayed method's first one only primes."""
        return int(self.delayed and steps > self.warmup) + steps * self.half_rounds

    def steps_done(self, calls: int) -> int | None:
        """Steps after so many half-rounds; None in the middle of one."""
        done = calls - int(self.delayed and calls > self.warmup)
        return None if done % self.half_rounds else done // self.half_rounds

    def check(self, params: PyTree) -> None:
        """Raises whatever the optimizer raises, without computing anything."""
        state = jax.eval_shape(self.init, params)
        n = state.layout.workers
        row = lambda x: jax.ShapeDtypeStruct((n, *x.shape), x.dtype)  # noqa: E731
        jax.eval_shape(self.update, jax.tree.map(row, params), state, params)


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments that all methods share; see `acco_jax.acco`."""

    mesh: Mesh
    axis_name: str | tuple[str, ...] = "data"
    comm_dtype: Any = None
    accumulate_dtype: Any = None
    layout: str | type[Layout] = "auto"  # a class: the method's own layout
    param_specs: PyTree | None = None
    gather_bits: int | tuple[int | None, int | None] | None = None
    reduce_bits: int | None = None
    resync_every: int = 0

    def __post_init__(self) -> None:
        layouts.check_floating("comm_dtype", self.comm_dtype)
        layouts.check_floating("accumulate_dtype", self.accumulate_dtype)


def make_method(
    inner: optax.GradientTransformation,
    options: Options,
    *,
    state: type,
    start: Callable[[Layout, PyTree, Any], Any],
    advance: Callable[..., Any],
    delayed: bool,
    half_rounds: int,
    warmup: int = 0,
    **stages: Any,
) -> Method:
    """Build a method from how its state starts and how it advances.

    Args:
      inner: the optimizer that runs on the shards.
      options: mesh, dtypes and layout.
      state: the NamedTuple that is the method's state.
      start: (layout, master, inner_state) -> the initial one,
        whose field `pending` is a `Pending` where the method is delayed and whose field
        `wire` is left to this function.
      advance: (state, gradient shards, weight, step) -> (state, Point), where
        step(gradient, weight, inner_state, master) -> (master, inner_state, norm)
        is a guarded optimizer step on the mean gradient.
      delayed: see `Method`.
      half_rounds: see `Method`.
      warmup: see `Method`.
      **stages: others than the usual ones; see `Method`.

    Raises:
      ValueError: the mesh lacks the axis, or `layout` or the bits are unknown.
    """
    axis = axis_names(options.mesh, options.axis_name)
    bits = options.gather_bits, options.reduce_bits, options.resync_every
    wires = make_wires(*bits, half_rounds=half_rounds, axis=axis)
    own = isinstance(options.layout, type)
    if not own and options.layout not in ("auto", "packed", "leaf"):
        raise ValueError(
            f"layout is {options.layout!r}: choose 'auto', 'packed' or 'leaf'."
        )
    if not isinstance(inner, optax.GradientTransformation):
        raise ValueError(
            f"inner is {type(inner).__name__}: give an optax.GradientTransformation."
        )

    def init(params: PyTree) -> Any:
        _refuse_wrappers()
        layout = choose_layout(inner, params, options)

        def make(params: PyTree) -> Any:
            params = jax.device_put(params, layout.params_shardings)
            master = layout.shard(params)

            def begin(master: PyTree) -> PyTree:
                return layout.inner_store(inner.init(layout.inner_view(master)))

            shapes = jax.eval_shape(begin, _abstract(layout.shards))
            inner_state = in_auto(begin, layout, layout.state_shardings(shapes))(master)
            state = start(layout, master, inner_state)
            return state._replace(wire=wires.start(layout, params))

        shapes = jax.eval_shape(make, _abstract(params))
        params = jax.device_put(params, layout.params_shardings)
        return jax.jit(make, out_shardings=layout.state_shardings(shapes))(params)

    kind, ours = state, (PackedLayout, LeafLayout)

    def check_state(state: Any) -> None:
        layout = type(getattr(state, "layout", None))
        if type(state) is not kind or (
            layout is not options.layout if own else layout not in ours
        ):
            raise ValueError(
                f"the state is {type(state).__name__} in {layout.__name__}, of another "
                "method than tx: give the state of tx.init for the same tx."
            )
        wires.check(state)

    def advance_(state: Any, gradient: PyTree, weight: jax.Array, extra: dict) -> Any:
        layout = state.layout
        # the optimizer's region need not carry through what it does not read
        aside = {f: getattr(state, f) for f in ("pending", "wire") if hasattr(state, f)}
        state = state._replace(**dict.fromkeys(aside))

        captured: dict[int, jax.Array] = {}
        map_captured(lambda x: captured.setdefault(id(x), x), inner)

        def run(state, gradient, weight, extra, captured):  # type: ignore[no-untyped-def]
            own = map_captured(lambda x: captured[id(x)], inner)
            step = functools.partial(guarded_step, own, layout, extra)
            return advance(state, gradient, weight, step)

        args = (state, gradient, weight, extra, captured)
        state_sharding = layout.state_shardings(jax.eval_shape(lambda s: s, state))
        point = Point(
            jax.tree.map(lambda s: s.sharding, layout.shards), layout.sharding()
        )
        state, point = in_auto(run, layout, (state_sharding, point))(*args)
        return state._replace(**aside), point

    def update(
        grads: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        weight: Any = None,
        **extra: Any,
    ) -> tuple[PyTree, Any]:
        check_state(state)
        layout = state.layout
        check_params(layout, params)
        check_grads(layout, grads)
        _check_extra(inner, extra)
        grads = jax.device_put(grads, layout.grads_shardings)
        params = jax.device_put(params, layout.params_shardings)
        return run_update(grads, state, params, place_weight(layout, weight), extra)

    @jax.jit
    def run_update(grads, state, params, weight, extra):  # type: ignore[no-untyped-def]
        layout = state.layout
        _check_packed_with(inner, layout, extra)
        new = Pending(layout.pack(grads), weight)
        now = new
        if delayed:
            warming = state.steps < warmup
            now = choose(warming, new, state.pending) if warmup else state.pending
            held = choose(warming, state.pending, new) if warmup else new
            state = state._replace(pending=held)
        total = now.weight.sum()
        wire = wires.all[0]  # all reduce alike
        state, raw = wire.send(layout, state, now.buffers, total)
        for axis in layout.order:
            raw = wire.reduce(layout, raw, axis)
        state, point = advance_(state, wire.receive(layout, raw), total, extra)

        def move(wire: Wire, state: Any) -> tuple[Any, PyTree]:
            state, full = wire.join(layout, state, point.shards)
            for axis in reversed(layout.order):
                full = wire.gather(layout, full, axis)
            return state.wire, wire.unpack(layout, state, full, params)

        if wires.differ:
            number = wires.turn(state.wire.half_rounds)
            ways = [functools.partial(move, w) for w in wires.all]
            kept, target = jax.lax.switch(number, ways, state)
        else:
            kept, target = move(wire, state)
        state = state._replace(wire=kept)

        def difference(new: jax.Array, old: jax.Array) -> jax.Array:
            wide = jnp.promote_types(old.dtype, jnp.float32)
            return new.astype(wide) - old.astype(wide)

        return jax.tree.map(difference, target, params), in_place(layout, state)

    usual: dict[str, Any] = {
        "accumulate": None,
        "wires": wires,
        "advance": advance_,
        "check_state": check_state,
    }
    return Method(
        init,
        update,
        mesh=options.mesh,
        axis=axis,
        delayed=delayed,
        half_rounds=half_rounds,
        warmup=warmup,
        accumulate_dtype=options.accumulate_dtype,
        **(usual | stages),
    )


def guarded_step(
    inner: optax.GradientTransformation,
    layout: Layout,
    extra: dict[str, Any],
    gradient: PyTree,
    weight: jax.Array,
    inner_state: PyTree,
    master: PyTree,
) -> tuple[PyTree, PyTree, jax.Array]:
    """Opt(theta, G / W) on the shards; without weight nothing moves, whatever G is.

    Args:
      inner: the optimizer.
      layout: of the shards.
      extra: keyword arguments for inner.update.
      gradient: G, summed over microbatches and workers; shards in the master dtype.
      weight: W [], the sum of the weights.
      inner_state: of the committed point.
      master: theta, the committed point; shards.

    Returns:
      The new shards, the new inner state and the norm of G / W.
    """
    valid = weight != 0
    mean = jax.tree.map(
        lambda g: jnp.where(valid, g / jnp.where(valid, weight, 1).astype(g.dtype), 0),
        gradient,
    )
    mean, view = layout.inner_view(mean), layout.inner_view(inner_state)
    at = layout.inner_view(master)
    update = optax.with_extra_args_support(inner).update
    updates, stepped = update(mean, view, at, **extra)
    moved = layout.inner_store(optax.apply_updates(at, updates))
    return (
        choose(valid, moved, master),
        choose(valid, layout.inner_store(stepped), inner_state),
        optax.tree.norm(mean),
    )


def choose(condition: jax.Array, yes: PyTree, no: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def in_auto(fn: Callable, layout: Layout, out_shardings: PyTree) -> Callable:
    """fn where the compiler places everything but the results.

    An optimizer written for one device runs unchanged on sharded arrays where the
    mesh's axes are Auto; Explicit ones are made so for the region.
    """
    mesh = layout.mesh
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = tuple(a for a, kind in kinds if kind == AxisType.Explicit)

    def constrained(*args: Any) -> Any:
        out = fn(*args)
        if not explicit:
            out = jax.lax.with_sharding_constraint(out, out_shardings)
        return out

    if not explicit:
        return constrained
    return jax.sharding.auto_axes(fn, axes=explicit, out_sharding=out_shardings)


def in_place(layout: Layout, state: Any) -> Any:
    """The state where it belongs, so that the next update finds what this one found."""
    if AxisType.Explicit in layout.mesh.axis_types:
        return state  # as its types say
    return jax.lax.with_sharding_constraint(state, layout.state_shardings(state))


def map_captured(fn: Callable[[jax.Array], Any], x: Any) -> Any:
    """x (functions, alone or in containers) with fn applied to arrays they close over.

    optax.inject_hyperparams leaves traced values in closures of what it builds, where
    neither a change of axis types nor anything else that looks at arguments finds them.
    """
    if isinstance(x, jax.Array):
        return fn(x)
    if isinstance(x, tuple | list | dict) and x:
        parts, treedef = jax.tree.flatten(x, is_leaf=lambda y: y is not x)
        new = [map_captured(fn, part) for part in parts]
        same = all(a is b for a, b in zip(parts, new, strict=True))
        return x if same else jax.tree.unflatten(treedef, new)
    if isinstance(x, types.FunctionType) and x.__closure__:
        cells = [c.cell_contents for c in x.__closure__ if c != types.CellType()]
        new = [map_captured(fn, c) for c in cells if c is not x]
        if len(new) < len(x.__closure__) or all(map(operator.is_, cells, new)):
            return x  # nothing to change, or recursive
        closure = tuple(map(types.CellType, new))
        made = types.FunctionType(
            x.__code__, x.__globals__, x.__name__, x.__defaults__, closure
        )
        made.__kwdefaults__ = x.__kwdefaults__
        return made
    return x


def choose_layout(
    inner: optax.GradientTransformation, params: PyTree, options: Options
) -> Layout:
    """The layout for these parameters, as `options.layout` demands.

    Raises:
      ValueError: 'packed' was demanded, or fewer bits, and inner would notice; names
        leaf and why.
    """
    axis = axis_names(options.mesh, options.axis_name)
    args = layouts.describe(
        params,
        mesh=options.mesh,
        axis=axis,
        comm_dtype=options.comm_dtype,
        param_specs=options.param_specs,
    )
    if isinstance(options.layout, type):
        return options.layout(options.mesh, axis, *args)
    reason = "layout='leaf' was asked for"
    if options.layout != "leaf":
        from acco_jax.packable import why_not_packed  # jax.extend is slow to import

        packed = layouts.packed_layout(*args, options.mesh, axis)
        found = why_not_packed(inner, packed)
        if found is None:
            return packed
        reason = f"that would change what inner does: {found}"
        if options.layout == "packed":
            raise ValueError(
                f"layout='packed' would change what inner does: {found}. Use "
                "layout='auto' or 'leaf'."
            )
    for name in ("gather_bits", "reduce_bits"):
        if getattr(options, name):
            raise ValueError(
                f"{name} needs layout='packed', but {reason}. Leave {name} out."
            )
    return layouts.leaf_layout(*args, options.mesh, axis)


def place_weight(layout: Layout, weight: Any) -> jax.Array:
    """(n,) weights on their workers; None means 1 each."""
    n = layout.workers
    if weight is None:
        weight = jnp.ones(n)
    elif not isinstance(weight, jax.Array) and np.any(np.less(weight, 0)):
        raise ValueError(f"weight {np.asarray(weight).tolist()} has one below 0.")
    if np.shape(weight) != (n,):
        raise ValueError(
            f"weight has shape {np.shape(weight)}: give one weight per worker, ({n},)."
        )
    weight = jnp.asarray(weight, layout.scalar)
    return jax.device_put(weight, layout.sharding(layout.axis))


def check_params(layout: Layout, params: PyTree | None) -> None:
    """Raises a ValueError unless params are what `layout` was made for."""
    if params is None:
        raise ValueError(
            "update needs the current params: tx.update(grads, state, params)."
        )
    _check_structure("params", layout, params)
    for leaf, p in zip(layout.leaves, jax.tree.leaves(params), strict=True):
        if jnp.shape(p) != leaf.shape:
            raise ValueError(
                f"params {leaf} has shape {jnp.shape(p)}, but init saw {leaf.shape}."
            )


def check_grads(layout: Layout, grads: PyTree) -> None:
    """Raises a ValueError unless grads are rows of what `layout` was made for."""
    _check_structure("grads", layout, grads)
    n = layout.workers
    for leaf, g in zip(layout.leaves, jax.tree.leaves(grads), strict=True):
        if jnp.shape(g) != (n, *leaf.shape):
            raise ValueError(
                f"grads {leaf} has shape {jnp.shape(g)} instead of "
                f"{(n, *leaf.shape)}: give one row per worker, the sum of its own "
                "microbatch gradients (see acco_jax.local_gradients)."
            )


def _check_structure(what: str, layout: Layout, tree: PyTree) -> None:
    if jax.tree.structure(tree) != layout.treedef:
        raise ValueError(
            f"{what} has another tree structure than the parameters given to init."
        )


def _check_extra(inner: optax.GradientTransformation, extra: dict[str, Any]) -> None:
    names = ", ".join(sorted(extra))
    if extra and not isinstance(inner, optax.GradientTransformationExtraArgs):
        raise ValueError(f"inner takes no extra arguments, but update got {names}.")
    for name, value in extra.items():
        if any(callable(x) for x in jax.tree.leaves(value)):
            raise ValueError(
                f"update got {name}, a function: inner works on shards, of which no "
                "function of whole parameters can be computed."
            )


def _check_packed_with(
    inner: optax.GradientTransformation, layout: Layout, extra: dict[str, Any]
) -> None:
    """Raises a ValueError if these extra arguments need the leaf layout."""
    if extra and isinstance(layout, layouts.PackedLayout):
        from acco_jax.packable import why_not_packed  # jax.extend is slow to import

        reason = why_not_packed(inner, layout, extra)
        if reason is not None:
            raise ValueError(
                f"with {', '.join(sorted(extra))}, inner could tell packed shards from "
                f"whole leaves: {reason}. Use layout='leaf'."
            )


def _abstract(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


# --------------------------------------------- what a method may and may not stand in

# A sharding method must see every parameter and have the last word on the updates.
# These optax functions call a member's init and leave both intact (a chain only if
# nothing follows); every other wrapper would add per-worker rows to parameters.
_HARMLESS = {"chain", "named_chain", "inject_hyperparams", "with_extra_args_support"}
# chain: tuple(fn(params) for fn in init_fns); named_chain: for name, tx in transforms.
_LOOPS = {"chain": ("fn", "init_fns"), "named_chain": ("tx", "transforms")}


def _refuse_wrappers() -> None:
    """Raises a ValueError when an optax wrapper that would break it calls `init`.

    A member of a chain is not told what follows it, so the calling frames are asked.
    """
    frame: types.FrameType | None = sys._getframe(2)
    called: types.FrameType | None = None
    while frame is not None:
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        if module.startswith("optax.") and not module.endswith("_test"):
            wrapper = code.co_qualname.split(".")[0]
            if wrapper not in _HARMLESS:
                raise ValueError(
                    f"this method cannot stand inside optax.{wrapper}: put {wrapper} "
                    "inside, around its inner optimizer."
                )
            if wrapper in _LOOPS and code.co_name != "<genexpr>":
                _refuse_followers(wrapper, frame, called)
        frame, called = frame.f_back, frame


def _refuse_followers(
    wrapper: str, frame: types.FrameType, called: types.FrameType | None
) -> None:
    names = dict(frame.f_locals)
    if called is not None and called.f_code.co_name == "<genexpr>":
        names |= called.f_locals
    member, members = (names.get(name) for name in _LOOPS[wrapper])
    last: Any = members[-1] if members else None
    if member is None or member is not (last[1] if wrapper == "named_chain" else last):
        raise ValueError(
            f"this method must be the last member of optax.{wrapper}: what stands "
            "after it would change the parameters behind its back; put it inside, "
            "into inner."
        )


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
      The state's tree with NamedShardings: for jit, restore and planning.
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


__all__ = [
    "Method",
    "NamedSharding",
    "committed_params",
    "start",
    "start_shardings",
    "state_shardings",
]
