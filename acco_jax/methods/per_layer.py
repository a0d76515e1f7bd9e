"""Optimizers that see one layer's array where parameters are stacked over layers.

A model that scans its layers keeps a parameter of all of them in one array, of shape
(layers, ...). An elementwise optimizer computes the same on it. An optimizer that looks
at whole arrays (muon, lamb, lars, adafactor, novograd, a decay mask by the number of
dimensions) must be shown one layer's.
"""

import collections
import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax

from acco_jax.core.leaves import path_names
from acco_jax.methods.dependence import dependence

PyTree = Any
Stacked = PyTree | Callable[[PyTree], PyTree]  # which leaves are over layers
State = dict[str, Any]  # the arrays of an optimizer's state by their paths


class PerLayerState(NamedTuple):
    """State of `per_layer`, with the structure of inner's own state for the whole tree.

    State that inner keeps for a stacked leaf has the layers on axis 0, so a moment has
    the shape of its parameter. State that belongs to no leaf (a count) is kept once.
    """

    inner_state: PyTree


def per_layer(
    inner: optax.GradientTransformation,
    stacked: Stacked,
) -> optax.GradientTransformationExtraArgs:
    """Apply `inner` to each layer of stacked parameters.

    The updates are those of `inner` on the tree that has one leaf per layer. `inner`
    runs once on the leaves that are not stacked and, under jax.vmap, once for each
    number of layers that occurs, so that neither the program nor the time to compile it
    grows with that number. The leaves that a run leaves out are optax.MaskedNode() to
    it, as in optax.partition: masks in `inner` work, functions or trees.

    `inner` must treat each leaf by itself. A transformation that looks across leaves or
    layers goes outside, where it sees the whole tree:

      optax.chain(
          optax.clip_by_global_norm(1.0),
          acco_jax.per_layer(optax.contrib.muon(1e-3), {"h": True, "wte": False}),
      )

    Extra arguments of `update` reach `inner` whole, not split into layers. A random key
    in inner's state is one for all layers, so all layers of a leaf sample the same
    numbers: put transformations that sample (optax.add_noise) outside.

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
    return _per_layer(_Inner(inner), stacked)


def checked_before(
    inner: optax.GradientTransformation, stacked: Stacked
) -> optax.GradientTransformationExtraArgs:
    """Return `per_layer` of what it has accepted before, whose check takes long."""
    return _per_layer(_Inner(inner, checks=False), stacked)


def _per_layer(
    inner: "_Inner", stacked: Stacked
) -> optax.GradientTransformationExtraArgs:
    return optax.GradientTransformationExtraArgs(
        functools.partial(_init, inner, stacked),
        functools.partial(_update, inner, stacked),
    )


class _Inner:
    """The inner transformation, and cached results of tracing it for a tree."""

    def __init__(
        self, inner: optax.GradientTransformation, checks: bool = True
    ) -> None:
        wide = optax.with_extra_args_support(inner)
        self.init, self.update = wide.init, wide.update
        # a method's `start` traces `init` several times, of one tree
        self.parts = functools.cache(functools.partial(_parts, wide))
        self._checks, self._checked = checks, set[Any]()

    def check(self, tree: "_Tree", extra: dict[str, Any]) -> None:
        """Raise as `_refuse_across`; a tree with traced arguments is read once."""
        if not self._checks:
            return
        leaves, treedef = jax.tree.flatten(extra)
        traced = all(isinstance(x, jax.core.Tracer) for x in leaves)
        key = (tree, treedef, *((x.shape, x.dtype) for x in leaves)) if traced else None
        if key not in self._checked:
            _refuse_across(self, tree, self.parts(tree), extra)
            self._checked |= {key} - {None}


def _init(inner: _Inner, stacked: Stacked, params: PyTree) -> PerLayerState:
    if not jax.tree.leaves(params):  # optax.tree_map_params gives a placeholder
        return PerLayerState(inner.init(params))
    tree = _read(stacked, params)
    inner.check(tree, {})
    parts = inner.parts(tree)

    def init(params: PyTree) -> State:
        return _by_path(inner.init(params))

    states = [
        part.over_layers(init, 0, part.axes)(tree.only(part, params)) for part in parts
    ]
    return PerLayerState(_join(jax.eval_shape(inner.init, tree.layer), states))


def _update(
    inner: _Inner,
    stacked: Stacked,
    /,
    updates: PyTree,
    state: PerLayerState,
    params: PyTree | None = None,
    **extra: Any,
) -> tuple[PyTree, PerLayerState]:
    tree = _read(stacked, updates)
    parts = inner.parts(tree)
    if extra:
        inner.check(tree, extra)
    whole = _by_path(state.inner_state)

    def run(part: _Part) -> tuple[list[Any], State]:
        def update(
            grads: PyTree, state: State, params: PyTree
        ) -> tuple[list[jax.Array], State]:
            own = part.treedef.unflatten(state[path] for path in part.axes)
            grads, own = inner.update(grads, own, params, **extra)
            return jax.tree.leaves(grads), _by_path(own)

        update = part.over_layers(update, (0, part.axes, 0), (0, part.axes))
        own = {path: whole[path] for path in part.axes}
        return update(tree.only(part, updates), own, tree.only(part, params))

    results = [run(part) for part in parts]
    updates = tree.join(parts, [own for own, _ in results])
    inner_state = _join(state.inner_state, [own for _, own in results])
    return updates, PerLayerState(inner_state)


@dataclasses.dataclass(frozen=True)
class _Part:
    """The leaves with the same number of layers, and what inner keeps for them."""

    layers: int | None  # None: of the leaves that are not stacked
    treedef: Any  # of inner's state for these leaves
    # by path of its arrays, which are those of the same path of the whole state, the
    # axis that counts layers; None: the array is kept once, for no leaf
    axes: dict[str, int | None]

    def over_layers(self, fn: Callable, in_axes: PyTree, out_axes: PyTree) -> Callable:
        """Turn fn for one layer into fn for all of them."""
        if self.layers is None:
            return fn
        return jax.vmap(fn, in_axes=in_axes, out_axes=out_axes)


class _Leaf(NamedTuple):
    name: str  # such as 'h/attn/kernel'
    layers: int | None  # how many axis 0 counts; None: the leaf is not stacked
    one_layer: jax.ShapeDtypeStruct  # what inner sees


@dataclasses.dataclass(frozen=True)
class _Tree:
    """The parameters' tree."""

    treedef: Any
    leaves: tuple[_Leaf, ...]

    @property
    def layer(self) -> PyTree:
        """The tree that inner would see if all leaves had one layer."""
        return self.treedef.unflatten(leaf.one_layer for leaf in self.leaves)

    def two_layers(self) -> Self:
        """Return the tree of two layers with a leaf for each."""
        tree = self.treedef.unflatten(
            leaf if leaf.layers is None else [leaf, leaf] for leaf in self.leaves
        )
        is_leaf = lambda x: isinstance(x, _Leaf)  # noqa: E731
        leaves, treedef = jax.tree.flatten(tree, is_leaf=is_leaf)
        return dataclasses.replace(self, treedef=treedef, leaves=tuple(leaves))

    @property
    def groups(self) -> list[int | None]:
        """The numbers of layers that occur, None first."""
        numbers = {leaf.layers for leaf in self.leaves}
        return sorted(numbers, key=lambda n: (n is not None, n))

    def masked(self, layers: int | None, values: Iterable[Any]) -> PyTree:
        """Mask the values of leaves with another number of layers."""
        return self.treedef.unflatten(
            x if leaf.layers == layers else optax.MaskedNode()
            for leaf, x in zip(self.leaves, values, strict=True)
        )

    def only(self, part: _Part, tree: PyTree | None) -> PyTree | None:
        return None if tree is None else self.masked(part.layers, jax.tree.leaves(tree))

    def join(self, parts: Sequence[_Part], values: Iterable[list[Any]]) -> PyTree:
        """Join the leaves of all parts: the inverse of `only`."""
        rest = {p.layers: iter(xs) for p, xs in zip(parts, values, strict=True)}
        return self.treedef.unflatten(next(rest[leaf.layers]) for leaf in self.leaves)


def _read(stacked: Stacked, tree: PyTree) -> _Tree:
    """Read the tree; raise a ValueError for a stacked leaf without an axis."""
    marks = stacked(tree) if callable(stacked) else stacked
    marks = jax.tree.leaves(jax.tree.broadcast(marks, tree))
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
    leaves = []
    for (path, x), mark in zip(flat, marks, strict=True):
        name, shape = "/".join(path_names(path)) or "the parameter", jnp.shape(x)
        if mark and not shape:
            raise ValueError(
                f"{name} is marked as stacked, but its shape is (): mark leaves whose "
                "axis 0 counts layers."
            )
        one_layer = jax.ShapeDtypeStruct(shape[bool(mark) :], jnp.result_type(x))
        leaves.append(_Leaf(name, shape[0] if mark else None, one_layer))
    return _Tree(treedef, tuple(leaves))


# ------------------------------------------- inner's state, part by part and as a whole


def _parts(inner: optax.GradientTransformation, tree: _Tree) -> list[_Part]:
    """Return what inner keeps for each group of leaves, by tracing only its init."""
    one_layer = [leaf.one_layer for leaf in tree.leaves]
    states = [
        jax.eval_shape(inner.init, tree.masked(n, one_layer)) for n in tree.groups
    ]
    count = collections.Counter(path for state in states for path in _by_path(state))
    with contextlib.suppress(Exception):  # if it fails, inner needs a leaf to begin
        empty = tree.masked(-1, one_layer)
        count.update(list(_by_path(jax.eval_shape(inner.init, empty))))
    # What is kept for several groups, or where there is no leaf, is not a leaf's.
    return [
        _Part(
            layers=n,
            treedef=jax.tree.structure(state),
            axes={path: None if count[path] > 1 else 0 for path in _by_path(state)},
        )
        for n, state in zip(tree.groups, states, strict=True)
    ]


def _by_path(state: PyTree) -> State:
    flat = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): x for path, x in flat}


def _join(like: PyTree, states: Sequence[State]) -> PyTree:
    """Join the parts' states to the whole state, in the structure of `like`."""
    arrays, paths = collections.ChainMap(*states), list(_by_path(like))
    if differ := sorted(set(paths) ^ set(arrays)):
        raise ValueError(
            f"inner keeps {differ[0]} for the whole tree or for a part of it, but not "
            "for both: per_layer needs a state made of trees like the parameters'."
        )
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[p] for p in paths])


# ------------------------------------------------------------ what looks across leaves


def _refuse_across(
    inner: _Inner,
    whole: _Tree,
    parts: Sequence[_Part],
    extra: dict[str, Any],
) -> None:
    """Raise a ValueError if a stacked leaf meets another leaf in inner's program.

    The program is read for one layer, and for two with a leaf each. An inner that
    cannot be traced lacks extra arguments; it is read once `update` gets them.
    """
    if all(leaf.layers is None for leaf in whole.leaves):
        return
    once = {path for p in parts for path, axis in p.axes.items() if axis is None}
    for tree in (whole, whole.two_layers()):
        try:
            updates, state = _dependences(inner, tree.layer, extra)
        except Exception:
            continue
        marks = enumerate(leaf.layers is not None for leaf in tree.leaves)
        stacked = sum(1 << i for i, mark in marks if mark)
        for i, inputs in enumerate(updates):
            own = 1 << i
            if others := inputs & (~own if own & stacked else stacked):
                name = tree.leaves[i].name
                raise _across(f"the update of {name}", name, others, tree)
        for path, inputs in state.items():
            if inputs & stacked and (inputs & (inputs - 1) or path in once):
                raise _across(f"{path} of inner's state", "", inputs, tree)


def _across(what: str, own: str, inputs: int, tree: _Tree) -> ValueError:
    """Return the error for a result that depends on the leaves of these bits."""
    names = [leaf.name for i, leaf in enumerate(tree.leaves) if inputs >> i & 1]
    names = list(dict.fromkeys("its other layers" if x == own else x for x in names))
    shown = ", ".join(names[:3]) + ", ..." * (len(names) > 3)
    return ValueError(
        f"{what} depends on {shown}, but per_layer shows inner each layer by itself: "
        "put what looks across leaves or layers outside, as in optax.chain("
        "optax.clip_by_global_norm(1.0), acco_jax.per_layer(...))."
    )


def _dependences(
    inner: _Inner, tree: PyTree, extra: dict[str, Any]
) -> tuple[list[int], dict[str, int]]:
    """Return the leaves on which each update and each array of inner's state depends.

    The sets hold after any number of updates. Bit i of a number stands for leaf i's
    gradient and parameter.
    """

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        return inner.update(grads, state, params, **extra)

    first, state = jax.make_jaxpr(inner.init, return_shape=True)(tree)
    program = jax.make_jaxpr(update)(tree, state, tree)
    bits = [1 << i for i in range(len(jax.tree.leaves(tree)))]
    sets = dependence(first, bits)
    while True:
        out = dependence(program, bits + sets + bits)
        updates, after = out[: len(bits)], out[len(bits) :]
        after = list(map(operator.or_, after, sets))
        if after == sets:
            return updates, dict(zip(_by_path(state), sets, strict=True))
        sets = after
