"""The step of an optimizer, written for one device, on the shards of many."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from acco_jax.core.buffers import Totals
from acco_jax.core.layout import Layout
from acco_jax.core.leaves import PyTree, only
from acco_jax.core.select import choose
from acco_jax.core.state import StateT
from acco_jax.methods import products


@jax.tree_util.register_static
class _MeanLoss:
    """A placeholder among an optimizer's extra arguments for the mean loss."""

    def __reduce__(self) -> str:
        return "MEAN_LOSS"  # there is one


MEAN_LOSS = _MeanLoss()


def guarded_step(
    update: jax.stages.Wrapped,
    layout: Layout,
    extra: dict[str, Any],
    gradient: PyTree,
    totals: Totals,
    inner_state: PyTree,
    master: PyTree,
    commit: jax.Array | bool = True,
) -> tuple[PyTree, PyTree]:
    """Take the step Opt(theta, G / W) on the shards; without weight nothing moves.

    Args:
      update: the optimizer's, jitted: (gradient, state, params, extra) -> (updates,
        state).
      layout: of the shards.
      extra: keyword arguments of the optimizer; MEAN_LOSS stands for the mean loss.
      gradient: G, summed over microbatches and workers; shards in the master dtype,
        finite where W is 0.
      totals: W, and the sum of the losses.
      inner_state: the optimizer's at theta.
      master: theta, the committed point; shards.
      commit: whether the inner state advances, too.

    Returns:
      The new shards and the new inner state.
    """
    valid = totals.weight != 0
    weight = jnp.where(valid, totals.weight, 1)
    mean = jax.tree.map(lambda g: g / weight.astype(g.dtype), gradient)
    arguments = {
        k: totals.loss / weight if x is MEAN_LOSS else x for k, x in extra.items()
    }
    mean, at = layout.view(mean), layout.view(master)
    view = layout.view_state(inner_state)
    updates, stepped = products.placed(update, layout, mean, view, at, arguments)
    moved = layout.store(optax.apply_updates(at, updates))
    return (
        choose(valid, moved, master),
        choose(valid & commit, layout.store_state(stepped), inner_state),
    )


def in_auto(fn: Callable, layout: Layout, out_shardings: PyTree) -> Callable:
    """Wrap fn so that the compiler places its intermediate results.

    An optimizer written for one device runs unchanged on sharded arrays where the
    mesh's axes are Auto; Explicit ones are made so for the region, whose results get
    `out_shardings`.
    """
    mesh = layout.mesh
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = tuple(a for a, kind in kinds if kind == AxisType.Explicit)

    if not explicit:
        return fn  # whoever keeps the results says where; a constraint is an operation
    if not jax.tree.leaves(out_shardings):  # jax takes them for none given
        return lambda *args: out_shardings
    shown = jax.tree.map(lambda s: _shown(s, explicit), out_shardings)

    def made_auto(*args: Any) -> PyTree:
        run, captured = with_captured(fn, *args)
        in_region = jax.sharding.auto_axes(run, axes=explicit, out_sharding=shown)
        out = in_region(captured, *args)
        return (
            out if len(explicit) == len(mesh.axis_names) else pinned(out, out_shardings)
        )

    return made_auto


def _shown(sharding: NamedSharding, axes: tuple[str, ...]) -> NamedSharding:
    """Return the sharding over only those of these axes that a type shows."""
    return NamedSharding(sharding.mesh, only(sharding.spec, axes))


def in_worker(fn: Callable, layout: Layout, specs: PyTree) -> Callable:
    """Wrap fn as `in_auto` does, inside a function that is manual over the data axes.

    `specs` are PartitionSpecs of its results over the mesh's other axes.
    """
    kinds = zip(layout.mesh.axis_names, layout.mesh.axis_types, strict=True)
    explicit = tuple(
        a for a, kind in kinds if kind == AxisType.Explicit and a not in layout.axis
    )
    if not explicit or not jax.tree.leaves(specs):
        return fn
    shown = jax.tree.map(lambda spec: only(spec, explicit), specs)

    def made_auto(*args: Any) -> PyTree:
        run, captured = with_captured(fn, *args)
        in_region = jax.sharding.auto_axes(run, axes=explicit, out_sharding=shown)
        return in_region(captured, *args)

    return made_auto


def with_captured(fn: Callable, *args: Any) -> tuple[Callable, list[Any]]:
    """Return fn as a function of (captured, *args), and the arrays that it captures.

    optax.inject_hyperparams leaves traced values in closures of what it builds. Their
    axes have the outer program's types. Arguments can be cast, closures cannot.
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        closed, out = jax.make_jaxpr(fn, return_shape=True)(*shapes)

    def run(captured: list[Any], *args: Any) -> PyTree:
        leaves = jax.core.eval_jaxpr(closed.jaxpr, captured, *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(out), leaves)

    return run, closed.consts


def in_place(layout: Layout, state: StateT) -> StateT:
    """Return the state in its place, where the next update must find it."""
    kinds = set(layout.mesh.axis_types)
    if kinds == {AxisType.Explicit}:
        return state  # as its types say
    out_shardings = layout.state_shardings(state)
    if AxisType.Explicit in kinds:
        return pinned(state, out_shardings)
    return jax.lax.with_sharding_constraint(state, out_shardings)


def pinned(tree: PyTree, shardings: PyTree) -> PyTree:
    """Return the tree with these shardings, also where some mesh axes are Explicit."""
    tree = jax.jit(lambda x: x, out_shardings=shardings)(tree)

    def constrained(x: jax.Array, sharding: NamedSharding) -> jax.Array:
        mesh = sharding.mesh  # a nested jit may not pin what types do not show
        kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
        auto = tuple(a for a, kind in kinds if kind == AxisType.Auto)
        if not auto:
            return x
        return jax.lax.with_sharding_constraint(x, _shown(sharding, auto))

    return jax.tree.map(constrained, tree, shardings)
