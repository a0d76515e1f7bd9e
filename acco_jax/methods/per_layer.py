"""Optimizers that see one layer's array where parameters are stacked over layers.

A model that scans its layers keeps a parameter of all of them in one array, of shape
(layers, ...). To an elementwise optimizer that is all the same. One that looks at whole
arrays (muon, lamb, lars, adafactor, novograd, a decay mask by the number of dimensions)
must be shown one layer's.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from acco_jax.layout import path_names
from acco_jax.methods.dependence import dependence

PyTree = Any


class PerLayerState(NamedTuple):
    """State of `per_layer`.

    Attributes:
      inner_state: has the structure of inner's own state for the whole tree. What inner
        keeps for a stacked leaf has the layers on axis 0, so a moment has the shape of
        its parameter; what it keeps for no leaf (a count) is there once.
    """

    inner_state: PyTree


def per_layer(
    inner: optax.GradientTransformation,
    stacked: PyTree | Callable[[PyTree], PyTree],
) -> optax.GradientTransformationExtraArgs:
    """Apply `inner` to each layer of stacked parameters.

    The updates are those of `inner` on the tree that has one leaf per layer. `inner`
    runs once on the leaves that are not stacked and, under jax.vmap, once for each
    number of layers that occurs, so that neither the program nor the time to compile it
    grows with that number. The leaves that a run leaves out are optax.MaskedNode() to
    it, as in optax.partition: masks in `inner` work, functions or trees.

    `inner` must treat each leaf by itself. What looks across leaves or layers goes
    outside, where it sees the whole tree:

      optax.chain(
          optax.clip_by_global_norm(1.0),
          acco_jax.per_layer(optax.contrib.muon(1e-3), {"h": True, "wte": False}),
      )

    Extra arguments of `update` reach `inner` whole, not split into layers. A random key
    in inner's state is one for all layers, so that all layers of a leaf draw the same
    numbers: put what draws (optax.add_noise) outside.

    Args:
      inner: an optax transformation that treats each leaf by itself.
      stacked: a tree of bools, or a prefix of one, or a function from the parameters to
        it. True: axis 0 of the leaf counts layers.

    Returns:
      A transformation whose state is a `PerLayerState`.

    Raises:
      ValueError: from `init`, before any device work (from `update` for what `inner`
        does with extra arguments only): an update would depend on another leaf or
        layer, or a leaf that is marked as stacked has no axis.
    """
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: PyTree) -> PerLayerState:
        if not jax.tree.leaves(params):  # optax.tree_map_params gives a placeholder
            return PerLayerState(inner.init(params))
        leaves = _leaves(stacked, params)
        parts = _parts(inner, leaves)
        _refuse_across(inner, leaves, parts, {})

        def init(params: PyTree) -> list[Any]:
            return jax.tree.leaves(inner.init(params))

        states = [
            part.over_layers(init, 0, part.axes)(leaves.only(part, params))
            for part in parts
        ]
        like = jax.eval_shape(inner.init, leaves.layer)
        return PerLayerState(_join(like, parts, states))

    def update_fn(
        updates: PyTree,
        state: PerLayerState,
        params: PyTree | None = None,
        **extra: Any,
    ) -> tuple[PyTree, PerLayerState]:
        leaves = _leaves(stacked, updates)
        parts = _parts(inner, leaves)
        if extra:
            _refuse_across(inner, leaves, parts, extra)

        def run(part: _Part) -> tuple[list[Any], list[Any]]:
            def update(grads: PyTree, state: list[Any], params: PyTree) -> Any:
                own = part.treedef.unflatten(state)
                grads, own = inner.update(grads, own, params, **extra)
                return jax.tree.leaves(grads), jax.tree.leaves(own)

            update = part.over_layers(update, (0, part.axes, 0), (0, part.axes))
            grads, at = (leaves.only(part, tree) for tree in (updates, params))
            return update(grads, _own(part, state.inner_state), at)

        found = [run(part) for part in parts]
        moved = leaves.join(parts, [updates for updates, _ in found])
        states = [own for _, own in found]
        return moved, PerLayerState(_join(state.inner_state, parts, states))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


@dataclasses.dataclass(frozen=True)
class _Part:
    """The leaves with as many layers, and what inner keeps for them.

    Attributes:
      layers: their number; None: of the leaves that are not stacked.
      treedef: the structure of inner's state for these leaves.
      paths: of its arrays; the array of the same path of the whole state is theirs.
      axes: which axis of each counts layers; None: it is kept once, for no leaf.
    """

    layers: int | None
    treedef: Any
    paths: list[str]
    axes: list[int | None]

    def over_layers(self, fn: Callable, in_axes: Any, out_axes: Any) -> Callable:
        """fn for one layer -> fn for all of them."""
        if self.layers is None:
            return fn
        return jax.vmap(fn, in_axes=in_axes, out_axes=out_axes)


@dataclasses.dataclass(frozen=True)
class _Leaves:
    """The parameters' tree: one record per leaf.

    Attributes:
      treedef: the tree.
      names: such as 'h/attn/kernel'.
      layers: how many of them axis 0 counts; None: the leaf is not stacked.
      one_layer: shape and dtype of what inner sees.
    """

    treedef: Any
    names: list[str]
    layers: list[int | None]
    one_layer: list[jax.ShapeDtypeStruct]

    @property
    def layer(self) -> PyTree:
        """The tree that inner would see if all leaves had one layer."""
        return self.treedef.unflatten(self.one_layer)

    def two_layers(self) -> _Leaves:
        """The tree of two layers with a leaf for each."""
        both = [
            i for i, n in enumerate(self.layers) for _ in range(1 + (n is not None))
        ]
        pairs = zip(self.layers, self.one_layer, strict=True)
        tree = self.treedef.unflatten(x if n is None else [x, x] for n, x in pairs)
        return _Leaves(
            jax.tree.structure(tree),
            [self.names[i] for i in both],
            [self.layers[i] for i in both],
            [self.one_layer[i] for i in both],
        )

    @property
    def groups(self) -> list[int | None]:
        """The numbers of layers that occur, None first."""
        return sorted(set(self.layers), key=lambda n: (n is not None, n))

    def masked(self, layers: int | None, leaves: Sequence[Any]) -> PyTree:
        """The tree with only those of the leaves that have so many layers."""
        return self.treedef.unflatten(
            x if n == layers else optax.MaskedNode()
            for n, x in zip(self.layers, leaves, strict=True)
        )

    def only(self, part: _Part, tree: PyTree | None) -> PyTree | None:
        if tree is None:
            return None
        return self.masked(part.layers, jax.tree.leaves(tree))

    def join(self, parts: Sequence[_Part], leaves: Sequence[list[Any]]) -> PyTree:
        """The inverse of `only` for all parts."""
        rest = {p.layers: iter(xs) for p, xs in zip(parts, leaves, strict=True)}
        return self.treedef.unflatten(next(rest[n]) for n in self.layers)


def _leaves(stacked: PyTree | Callable[[PyTree], PyTree], tree: PyTree) -> _Leaves:
    """Reads the tree; raises a ValueError for a stacked leaf without an axis."""
    marks = stacked(tree) if callable(stacked) else stacked
    marks = jax.tree.leaves(jax.tree.broadcast(marks, tree))
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
    names = ["/".join(path_names(path)) or "the parameter" for path, _ in flat]
    shapes = [jnp.shape(x) for _, x in flat]
    for name, shape, mark in zip(names, shapes, marks, strict=True):
        if mark and not shape:
            raise ValueError(
                f"{name} is marked as stacked, but its shape is (): mark leaves whose "
                "axis 0 counts layers."
            )
    layers = [s[0] if mark else None for s, mark in zip(shapes, marks, strict=True)]
    one_layer = [
        jax.ShapeDtypeStruct(jnp.shape(x)[n is not None :], jnp.result_type(x))
        for n, (_, x) in zip(layers, flat, strict=True)
    ]
    return _Leaves(treedef, names, layers, one_layer)


# ------------------------------------------- inner's state, part by part and as a whole


def _parts(inner: optax.GradientTransformation, leaves: _Leaves) -> list[_Part]:
    """What inner keeps for each group of leaves, by tracing its init alone."""
    states = [
        jax.eval_shape(inner.init, leaves.masked(n, leaves.one_layer))
        for n in leaves.groups
    ]
    count = collections.Counter(path for s in states for path in _paths(s))
    nothing = leaves.treedef.unflatten([optax.MaskedNode()] * len(leaves.names))
    with contextlib.suppress(Exception):  # if it fails, inner needs a leaf to begin
        count.update(_paths(jax.eval_shape(inner.init, nothing)))
    # What is kept for several groups, or where there is no leaf at all, is no leaf's.
    return [
        _Part(
            layers=n,
            treedef=jax.tree.structure(state),
            paths=_paths(state),
            axes=[None if count[path] > 1 else 0 for path in _paths(state)],
        )
        for n, state in zip(leaves.groups, states, strict=True)
    ]


def _paths(state: PyTree) -> list[str]:
    flat = jax.tree_util.tree_leaves_with_path(state)
    return [jax.tree_util.keystr(path) for path, _ in flat]


def _own(part: _Part, state: PyTree) -> list[Any]:
    """The arrays of the whole state that are a part's."""
    found = dict(zip(_paths(state), jax.tree.leaves(state), strict=True))
    return [found[path] for path in part.paths]


def _join(like: PyTree, parts: Sequence[_Part], states: Sequence[list[Any]]) -> PyTree:
    """The whole state, of the structure of `like`, from those of the parts."""
    found: dict[str, Any] = {}
    for part, own in zip(parts, states, strict=True):
        for path, x in zip(part.paths, own, strict=True):
            found.setdefault(path, x)
    paths = _paths(like)
    if set(paths) != set(found):
        differ = sorted(set(paths) ^ set(found))
        raise ValueError(
            f"inner keeps {differ[0]} for the whole tree or for a part of it, but not "
            "for both: per_layer needs a state made of trees like the parameters'."
        )
    return jax.tree.unflatten(jax.tree.structure(like), [found[p] for p in paths])


# ------------------------------------------------------------ what looks across leaves


def _refuse_across(
    inner: optax.GradientTransformationExtraArgs,
    leaves: _Leaves,
    parts: Sequence[_Part],
    extra: dict[str, Any],
) -> None:
    """Raises a ValueError if a stacked leaf meets another leaf in inner's program.

    The program is read for one layer, and for two with a leaf each. An inner that
    cannot be traced lacks extra arguments; it is read once `update` gets them.
    """
    if all(n is None for n in leaves.layers):
        return
    once = {
        path
        for part in parts
        for path, axis in zip(part.paths, part.axes, strict=True)
        if axis is None
    }
    for tree in (leaves, leaves.two_layers()):
        try:
            updates, state = _met(inner, tree.layer, extra)
        except Exception:
            continue
        stacked = sum(1 << i for i, n in enumerate(tree.layers) if n is not None)
        for i, met in enumerate(updates):
            own = 1 << i
            if others := met & (~own if own & stacked else stacked):
                name = tree.names[i]
                raise _across(f"the update of {name}", name, others, tree)
        for path, met in state.items():
            if met & stacked and (met & (met - 1) or path in once):
                raise _across(f"{path} of inner's state", "", met, tree)


def _across(what: str, own: str, met: int, tree: _Leaves) -> ValueError:
    """The refusal of what has met the leaves of these bits."""
    found = [name for i, name in enumerate(tree.names) if met >> i & 1]
    names = list(dict.fromkeys("its other layers" if x == own else x for x in found))
    shown = ", ".join(names[:3]) + ", ..." * (len(names) > 3)
    return ValueError(
        f"{what} depends on {shown}, but per_layer shows inner each layer by itself: "
        "put what looks across leaves or layers outside, as in optax.chain("
        "optax.clip_by_global_norm(1.0), acco_jax.per_layer(...))."
    )


def _met(
    inner: optax.GradientTransformationExtraArgs, tree: PyTree, extra: dict[str, Any]
) -> tuple[list[int], dict[str, int]]:
    """Which leaves have met in each update and in each array of inner's state.

    After any number of updates; bit i of a number stands for leaf i's gradient and
    parameter.
    """

    def update(grads: PyTree, state: PyTree, params: PyTree) -> Any:
        return inner.update(grads, state, params, **extra)

    first, state = jax.make_jaxpr(inner.init, return_shape=True)(tree)
    program = jax.make_jaxpr(update)(tree, state, tree)
    bits = [1 << i for i in range(len(jax.tree.leaves(tree)))]
    kept = dependence(first, bits)
    while True:
        out = dependence(program, bits + kept + bits)
        updates, after = out[: len(bits)], out[len(bits) :]
        if all(new | old == old for new, old in zip(after, kept, strict=True)):
            return updates, dict(zip(_paths(state), kept, strict=True))
        kept = [new | old for new, old in zip(after, kept, strict=True)]
