"""What every method with sharded optimizer state is made of.

A method communicates gradients (reduce), takes an optimizer step on the shards
(advance) and communicates parameters (gather). `Method` carries these three stages;
the plain `update` below and the train step of `acco_jax.step` are both built from them
and know nothing else of a method.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from acco_jax.gradients import axis_names
from acco_jax.layout import Layout, Totals, check_floating
from acco_jax.layout.leaves import axes_in
from acco_jax.transforms.checks import (
    as_updated,
    check_extra,
    check_grads,
    check_params,
    checked_update,
    place_weight,
    refuse_wrappers,
)
from acco_jax.transforms.state import find_state, state_shardings
from acco_jax.wire import Wire, Wires
from acco_jax.wire import wires as make_wires

PyTree = Any


@jax.tree_util.register_static
class _MeanLoss:
    """Stands among an optimizer's extra arguments for a value that is yet to come."""


MEAN_LOSS = _MeanLoss()


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
      advance: (state, shards, totals, extra, losses) -> (state, Point): the optimizer
        step on the reduced gradient sums; with `losses` it is given their mean loss as
        `value`, if it takes extra arguments.
      check_state: raises a ValueError for a state of another method.
      check_extra: raises a ValueError for arguments that the optimizer does not take.
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
    check_extra: Callable[[dict[str, Any]], None]

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
        number: Any = jax.ShapeDtypeStruct((), state.layout.scalar)
        advance = functools.partial(self.advance, losses=True)
        shards, totals = state.layout.shards, Totals(number, number)
        jax.eval_shape(advance, state, shards, totals, {})


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments that all methods share; see `acco_jax.acco`."""

    mesh: Mesh
    axis_name: str | tuple[str, ...] = "data"
    comm_dtype: Any = None
    accumulate_dtype: Any = None
    param_specs: PyTree | None = None
    gather_bits: int | tuple[int | None, int | None] | None = None
    reduce_bits: int | None = None
    resync_every: int = 0

    def __post_init__(self) -> None:
        check_floating("comm_dtype", self.comm_dtype)
        check_floating("accumulate_dtype", self.accumulate_dtype)


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
    layout: type[Layout] = Layout,
    **stages: Any,
) -> Method:
    """Build a method from how its state starts and how it advances.

    Args:
      inner: the optimizer that runs on the shards.
      options: mesh and dtypes.
      state: the NamedTuple that is the method's state.
      start: (layout, master, inner_state) -> the initial one,
        whose field `pending` is a `Pending` where the method is delayed and whose field
        `wire` is left to this function.
      advance: (state, gradient shards, totals, step) -> (state, Point), where
        step(gradient, totals, inner_state, master) -> (master, inner_state, norm)
        is a guarded optimizer step on the mean gradient.
      delayed: see `Method`.
      half_rounds: see `Method`.
      warmup: see `Method`.
      layout: how the method's shards lie.
      **stages: others than the usual ones; see `Method`.

    Raises:
      ValueError: the mesh lacks the axis, or the bits are unknown.
    """
    axis = axis_names(options.mesh, options.axis_name)
    bits = options.gather_bits, options.reduce_bits, options.resync_every
    wires = make_wires(*bits, half_rounds=half_rounds)
    if isinstance(inner, Method) or not isinstance(inner, optax.GradientTransformation):
        give = "an optax.GradientTransformation that is not sharded itself"
        if hasattr(inner, "gradient_transformation"):  # optax.MultiSteps
            give = "its gradient_transformation()"
        raise ValueError(f"the optimizer is {type(inner).__name__}: give {give}.")

    def init(params: PyTree) -> Any:
        refuse_wrappers()
        params = as_updated(params)
        whole = kind_of_layout.of(
            params,
            mesh=options.mesh,
            axis=axis,
            comm_dtype=options.comm_dtype,
            param_specs=options.param_specs,
        )
        seen = whole.tree(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.master))
        layout = whole.mirroring(inner, jax.eval_shape(inner.init, seen))

        def make(params: PyTree) -> Any:
            master = layout.shard(params)

            def begin(master: PyTree) -> PyTree:
                return layout.store_state(inner.init(layout.view(master)))

            shapes = jax.eval_shape(begin, _abstract(layout.shards))
            homes = layout.inner_shardings(shapes)
            state = start(layout, master, in_auto(begin, layout, homes)(master))
            return state._replace(wire=wires.start(layout, params))

        params = jax.device_put(params, layout.params_shardings)
        shapes = jax.eval_shape(make, params)
        return jax.jit(make, out_shardings=layout.state_shardings(shapes))(params)

    kind, kind_of_layout = state, layout

    def check_state(state: Any) -> None:
        layout = type(getattr(state, "layout", None))
        if type(state) is not kind or layout is not kind_of_layout:
            raise ValueError(
                f"the state is {type(state).__name__} in {layout.__name__}, of another "
                "method than tx: give the state of tx.init for the same tx."
            )
        wires.check(state)

    def advance_(
        state: Any, gradient: PyTree, totals: Totals, extra: dict, losses: bool
    ) -> Any:
        layout = state.layout
        if losses and isinstance(inner, optax.GradientTransformationExtraArgs):
            extra = {"value": MEAN_LOSS} | extra
        # the optimizer's region need not carry through what it does not read
        aside = {f: getattr(state, f) for f in ("pending", "wire") if hasattr(state, f)}
        state = state._replace(**dict.fromkeys(aside))

        def run(state, gradient, totals, extra):  # type: ignore[no-untyped-def]
            step = functools.partial(guarded_step, inner, layout, extra)
            return advance(state, gradient, totals, step)

        args = (state, gradient, totals, extra)
        homes = layout.state_shardings(state)
        point = Point(
            jax.tree.map(lambda s: s.sharding, layout.shards), layout.sharding()
        )
        state, point = in_auto(run, layout, (homes, point))(*args)
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
        check_extra(inner, extra)
        grads = jax.device_put(grads, layout.grads_shardings)
        params = jax.device_put(params, layout.params_shardings)
        return run_update(grads, state, params, place_weight(layout, weight), extra)

    @jax.jit
    def run_update(grads, state, params, weight, extra):  # type: ignore[no-untyped-def]
        layout = state.layout
        new = layout.pack(grads, weight, check=True)
        now = new
        if delayed:
            warming = state.steps < warmup
            now = choose(warming, new, state.pending) if warmup else state.pending
            held = choose(warming, state.pending, new) if warmup else new
            state = state._replace(pending=held)
        totals, whole = layout.sum_small(now)
        wire = wires.all[0]  # all reduce alike
        reduced = now.buffers
        for axis in layout.order:
            state, reduced = wire.send(layout, state, reduced, axis, totals.weight)
            reduced = wire.reduce(layout, reduced, axis)
        gradient = wire.receive(layout, reduced, whole)
        state, point = advance_(state, gradient, totals, extra, losses=False)

        def move(wire: Wire, state: Any) -> tuple[Any, PyTree]:
            state, gathered = wire.join(layout, state, point.shards)
            for axis in reversed(layout.order):
                gathered = wire.gather(layout, gathered, axis)
            return state.wire, wire.unpack(layout, state, gathered, params)

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
        "check_extra": functools.partial(check_extra, inner),
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
    totals: Totals,
    inner_state: PyTree,
    master: PyTree,
) -> tuple[PyTree, PyTree, jax.Array]:
    """Opt(theta, G / W) on the shards; without weight nothing moves, whatever G is.

    Args:
      inner: the optimizer.
      layout: of the shards.
      extra: keyword arguments for inner.update; MEAN_LOSS stands for the mean loss of
        exactly these gradients.
      gradient: G, summed over microbatches and workers; shards in the master dtype.
      totals: W, and the sum of the losses.
      inner_state: of the committed point.
      master: theta, the committed point; shards.

    Returns:
      The new shards, the new inner state and the norm of G / W.
    """
    valid = totals.weight != 0
    weight = jnp.where(valid, totals.weight, 1)
    mean = jax.tree.map(
        lambda g: jnp.where(valid, g / weight.astype(g.dtype), 0), gradient
    )
    given = {k: totals.loss / weight if x is MEAN_LOSS else x for k, x in extra.items()}
    mean, at = layout.view(mean), layout.view(master)
    view = layout.view_state(inner_state)
    updates, stepped = checked_update(inner, mean, view, at, given)
    moved = layout.store(optax.apply_updates(at, updates))
    return (
        choose(valid, moved, master),
        choose(valid, layout.store_state(stepped), inner_state),
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

    if not explicit:

        def constrained(*args: Any) -> Any:
            return jax.lax.with_sharding_constraint(fn(*args), out_shardings)

        return constrained
    shown = jax.tree.map(lambda s: _shown(s, explicit), out_shardings)

    def made_auto(*args: Any) -> Any:
        run, captured = with_captured(fn, *args)
        in_region = jax.sharding.auto_axes(run, axes=explicit, out_sharding=shown)
        out = in_region(captured, *args)
        return (
            out if len(explicit) == len(mesh.axis_names) else pinned(out, out_shardings)
        )

    return made_auto


def _shown(sharding: NamedSharding, axes: tuple[str, ...]) -> NamedSharding:
    """A sharding over these of its axes alone, which a type shows."""
    spec = (tuple(a for a in axes_in(entry) if a in axes) for entry in sharding.spec)
    return NamedSharding(sharding.mesh, P(*(entry or None for entry in spec)))


def with_captured(fn: Callable, *args: Any) -> tuple[Callable, list[Any]]:
    """fn as a function of (captured, *args), and the arrays that it captures.

    optax.inject_hyperparams leaves traced values in closures of what it builds. Their
    axes are of the outer program's types: arguments can be cast, closures cannot.
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        closed, out = jax.make_jaxpr(fn, return_shape=True)(*shapes)

    def run(captured: list[Any], *args: Any) -> Any:
        leaves = jax.core.eval_jaxpr(closed.jaxpr, captured, *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(out), leaves)

    return run, closed.consts


def in_place(layout: Layout, state: Any) -> Any:
    """The state where it belongs, so that the next update finds what this one found."""
    kinds = set(layout.mesh.axis_types)
    if kinds == {AxisType.Explicit}:
        return state  # as its types say
    homes = layout.state_shardings(state)
    if AxisType.Explicit in kinds:
        return pinned(state, homes)
    return jax.lax.with_sharding_constraint(state, homes)


def pinned(tree: PyTree, shardings: PyTree) -> PyTree:
    """The tree so sharded, also where some of the mesh's axes are Explicit."""
    tree = jax.jit(lambda x: x, out_shardings=shardings)(tree)

    def constrained(x: jax.Array, sharding: NamedSharding) -> jax.Array:
        mesh = sharding.mesh  # a nested jit may not pin what types do not show
        kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
        auto = tuple(a for a, kind in kinds if kind == AxisType.Auto)
        if not auto:
            return x
        return jax.lax.with_sharding_constraint(x, _shown(sharding, auto))

    return jax.tree.map(constrained, tree, shardings)


def _abstract(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
