"""How parameters are split over the workers; see `acco_jax.layout`."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from acco_jax.layout.buffers import Group, make_group
from acco_jax.layout.leaves import Leaf, PyTree, describe, path_names
from acco_jax.layout.parts import SMALL, Parts, evenly

Arrays = tuple[jax.Array, ...]
FEW = 128  # elements: optimizer state of unknown origin is replicated up to here


class Pending(NamedTuple):
    """Local gradients that have not crossed the network yet: every worker's own."""

    buffers: Arrays  # sums over microbatches, packed in the wire's dtypes
    whole: Arrays  # rows (n, *shape): the same of leaves that stay whole
    weight: jax.Array  # (n,) their weights
    loss: jax.Array  # (n,) the sums of their losses; 0 where nobody gave one


class Totals(NamedTuple):
    """What gradients are sums of, over all workers."""

    weight: jax.Array  # []
    loss: jax.Array  # []


class LeftOut(NamedTuple):
    """What rounding left out of the gradients sent so far (see `acco_jax.wire`)."""

    buffers: Arrays  # every worker's own, in the wire's dtype


class Outgoing(NamedTuple):
    """Parameters on their way to all workers; also when they have arrived."""

    buffers: Arrays  # of each worker's shards, then of all; in the wire's dtypes
    whole: Arrays  # leaves that every worker has; they stay where they are


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Layout:
    """How each parameter is split over the workers.

    Attributes:
      mesh: the devices.
      axis: the data axes' names, slowest first; their product is the number of workers.
      treedef: the parameters' tree structure.
      leaves: one record per parameter, in tree order.
      mirrors: for each array of the optimizer's state the number of the parameter that
        it is a moment of, or None.
    """

    mesh: Mesh
    axis: tuple[str, ...]
    treedef: Any
    leaves: tuple[Leaf, ...]
    mirrors: tuple[int | None, ...] = ()

    # So many elements of leaves that stay whole are summed with the weights, in their
    # dtype; more of them by themselves, as they are.
    together: ClassVar[int] = SMALL

    @classmethod
    def of(
        cls,
        params: PyTree,
        *,
        mesh: Mesh,
        axis: tuple[str, ...],
        comm_dtype: Any = None,
        param_specs: PyTree | None = None,
    ) -> Layout:
        """The layout of these parameters; arguments and errors as for `describe`."""
        treedef, leaves = describe(
            params,
            mesh=mesh,
            axis=axis,
            comm_dtype=comm_dtype,
            param_specs=param_specs,
        )
        n = math.prod(mesh.shape[a] for a in axis)
        split = (dataclasses.replace(f, parts=cls.parts_of(f, n)) for f in leaves)
        return cls(mesh, axis, treedef, tuple(split))

    @staticmethod
    def parts_of(leaf: Leaf, n: int) -> Parts:
        """Into how many parts n workers cut each dimension of a leaf."""
        return evenly(leaf, n)

    # ---- copies of a state, in which a layout is a node without arrays

    def __post_init__(self) -> None:
        flax = sys.modules.get("flax.serialization")
        if flax is not None:  # to_bytes passes over it, from_bytes keeps the target's
            flax.register_serialization_state(
                type(self), lambda _: {}, lambda layout, _: layout, override=True
            )

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "the state of a method cannot be pickled, because its layout holds devices:"
            " save its arrays with orbax, as acco_jax.training.checkpoints does."
        )

    # ---- sizes and shardings

    @property
    def workers(self) -> int:
        return math.prod(self.mesh.shape[a] for a in self.axis)

    @property
    def order(self) -> tuple[str, ...]:
        """The data axes as collectives take them: the fastest network first.

        Reduced there, a gradient is 1/k of its size when it meets the slower network.
        So the worker at (slice s, chip c) owns part c * slices + s.
        """
        return self.axis[::-1]

    @property
    def others(self) -> tuple[str, ...]:
        """The mesh's axes that are not data axes."""
        return tuple(a for a in self.mesh.axis_names if a not in self.axis)

    @property
    def scalar(self) -> np.dtype:
        """The dtype of weights: float32, or float64 if any master copy is."""
        return np.result_type(np.float32, *(leaf.master for leaf in self.leaves))

    def sharding(self, *spec: Any) -> NamedSharding:
        return NamedSharding(self.mesh, P(*spec))

    def tree(self, make: Callable[[Leaf], Any]) -> PyTree:
        """The parameters' tree with make(leaf) at each leaf."""
        return self.treedef.unflatten([make(leaf) for leaf in self.leaves])

    def map(self, fn: Callable[..., Any], *trees: PyTree) -> PyTree:
        """fn(leaf, x, ...) over trees of the parameters' structure."""
        return jax.tree.map(fn, self.tree(lambda leaf: leaf), *trees)

    @property
    def params_shardings(self) -> PyTree:
        return self.tree(lambda leaf: self.sharding(*leaf.spec))

    @property
    def grads_shardings(self) -> PyTree:
        """Of per-worker gradients: leaf (n, *shape), row i on worker i."""
        return self.tree(lambda leaf: self.sharding(self.axis, *leaf.spec))

    @property
    def shards(self) -> PyTree:
        """Abstract shards: ShapeDtypeStructs of the master copy, as it is stored."""
        return self.tree(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.stored, leaf.master, sharding=self._home(leaf)
            )
        )

    def _home(self, leaf: Leaf) -> NamedSharding:
        return NamedSharding(self.mesh, leaf.stored_spec(self.order))

    def everywhere(self, fn: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """fn on each device's own blocks: manual over every axis of the mesh."""
        return jax.shard_map(
            fn, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    # ---- the optimizer's state

    def mirroring(self, inner: optax.GradientTransformation, state: PyTree) -> Layout:
        """This layout, knowing which arrays of the optimizer's state are moments.

        Args:
          inner: the optimizer.
          state: what its `init` makes of the parameters' own shapes; abstract.
        """
        numbers = self.treedef.unflatten(range(len(self.leaves)))
        masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
        # a number for each array: of a parameter, or -1
        try:
            marked = optax.tree_map_params(
                inner,
                lambda x, number: x if masked(x) else number,
                state,
                numbers,
                transform_non_params=lambda x: -1,
                is_leaf=masked,
            )
            found = jax.tree.leaves(marked)
            assert len(found) == len(jax.tree.leaves(state))
        except Exception:  # inner looks at the parameters, and optax has but a stand-in
            by_path = {leaf.path: i for i, leaf in enumerate(self.leaves)}
            paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
            found = [_number(by_path, path_names(path)) for path in paths]
        arrays = zip(found, jax.tree.leaves(state), strict=True)
        mirrors = (
            i if i >= 0 and jnp.shape(x) == self.leaves[i].shape else None
            for i, x in arrays
        )
        return dataclasses.replace(self, mirrors=tuple(mirrors))

    def _each(self, fn: Callable[[Leaf, Any], Any], tree: PyTree, numbers: Any) -> Any:
        """fn(leaf, array) over arrays that mirror the leaf of that number."""
        arrays, treedef = jax.tree.flatten(tree)
        each = zip(numbers, arrays, strict=True)
        return jax.tree.unflatten(
            treedef, [x if i is None else fn(self.leaves[i], x) for i, x in each]
        )

    def view(self, shards: PyTree) -> PyTree:
        """Stored shards -> arrays of the leaves' own shapes, as the optimizer sees."""
        return self.map(Leaf.view, shards)

    def store(self, shards: PyTree) -> PyTree:
        """The inverse of `view`."""
        return self.map(Leaf.store, shards)

    def view_state(self, state: PyTree) -> PyTree:
        """The optimizer's state as it is stored -> as the optimizer sees it."""
        return self._each(Leaf.view, state, self.mirrors)

    def store_state(self, state: PyTree) -> PyTree:
        """The inverse of `view_state`."""
        return self._each(Leaf.store, state, self.mirrors)

    def inner_shardings(self, state: PyTree) -> PyTree:
        """NamedShardings of the optimizer's state, as it is stored."""
        arrays, treedef = jax.tree.flatten(state)
        each = zip(self.mirrors, arrays, strict=True)
        return jax.tree.unflatten(
            treedef,
            [
                self._spread(jnp.shape(x)) if i is None else self._home(self.leaves[i])
                for i, x in each
            ],
        )

    def _spread(self, shape: tuple[int, ...]) -> NamedSharding:
        """Of an array of unknown origin: split if it is large and a dimension fits."""
        if math.prod(shape) > FEW:
            for d, s in enumerate(shape):
                if s % self.workers == 0:
                    return self.sharding(*[None] * d, self.order)
        return self.sharding()

    def state_shardings(self, state: PyTree) -> PyTree:
        """A NamedSharding for every array of a (possibly abstract) method state.

        Args:
          state: a NamedTuple. Its field `inner` is the optimizer's state; Pending and
            LeftOut lie on their workers; trees of shards are known by their structure
            and shapes, at any depth; everything else is replicated.
        """
        return type(state)(
            *(
                self.inner_shardings(value) if field == "inner" else self._homes(value)
                for field, value in zip(state._fields, state, strict=True)
            )
        )

    def _homes(self, value: PyTree) -> PyTree:
        own: Any = NamedSharding(self.mesh, self._own)
        shapes = [leaf.stored for leaf in self.leaves]

        def known(x: Any) -> bool:
            if isinstance(x, Pending | LeftOut):
                return True
            leaves, treedef = jax.tree.flatten(x)
            same = treedef == self.treedef
            return same and [jnp.shape(leaf) for leaf in leaves] == shapes

        def of(x: Any) -> Any:
            if isinstance(x, Pending):
                rows: Any = self.sharding(self.axis)
                whole: Any = [self.sharding(self.axis, *s) for s in self._whole_specs]
                return Pending((own,) * len(x.buffers), tuple(whole), rows, rows)
            if isinstance(x, LeftOut):
                return LeftOut((own,) * len(x.buffers))
            return self.tree(self._home) if known(x) else self.sharding()

        return jax.tree.map(of, value, is_leaf=known)

    def row_shardings(self, rows: PyTree) -> PyTree:
        """NamedShardings of rows (n, ...); those of a parameter are split as it is."""
        by_path = {leaf.path: i for i, leaf in enumerate(self.leaves)}

        def of(path: Sequence[Any], x: Any) -> NamedSharding:
            i = _number(by_path, path_names(path))
            known = i >= 0 and x.shape == (self.workers, *self.leaves[i].shape)
            return self.sharding(self.axis, *(self.leaves[i].spec if known else ()))

        return jax.tree_util.tree_map_with_path(of, rows)

    # ---- the buffers

    @functools.cached_property
    def groups(self) -> tuple[Group, ...]:
        """What the buffers hold, one for each dtype that travels."""
        by_dtype: dict[np.dtype, dict[int, tuple[int, ...]]] = {}
        for i, leaf in enumerate(self.leaves):
            if not leaf.whole:
                by_dtype.setdefault(leaf.wire, {})[i] = leaf.part
        return tuple(make_group(dtype, parts) for dtype, parts in by_dtype.items())

    @property
    def _own(self) -> P:
        """Of what every device has for itself."""
        return P((*self.order, *self.others))

    def _over(self, axes: tuple[str, ...]) -> P:
        """Of gathered buffers that are still split over these data axes."""
        return P((*axes, *self.others)) if axes or self.others else P()

    @property
    def _row_specs(self) -> PyTree:
        return self.tree(lambda leaf: P(self.axis, *leaf.spec))

    @property
    def _param_specs(self) -> PyTree:
        return self.tree(lambda leaf: leaf.spec)

    @property
    def _shard_specs(self) -> PyTree:
        return self.tree(lambda leaf: leaf.stored_spec(self.order))

    @property
    def _whole_specs(self) -> tuple[P, ...]:
        return tuple(leaf.spec for leaf in self.leaves if leaf.whole)

    def on_buffers(self, fn: Callable, gathered: bool = False) -> Callable:
        """fn on each device's own packed buffers, or on the gathered ones, to such."""
        spec = self._over(()) if gathered else self._own
        return self.everywhere(fn, (spec,), spec)

    def _lay(self, parts: Sequence[Any], dtype: Any = None) -> Arrays:
        """(n, *part) by leaf number -> buffers."""
        return tuple(g.lay([parts[i] for i in g.leaves], dtype) for g in self.groups)

    def _take(self, buffers: Arrays) -> dict[int, jax.Array]:
        """Buffers -> leaf number -> (n, *part)."""
        found: dict[int, jax.Array] = {}
        for group, buffer in zip(self.groups, buffers, strict=True):
            found |= dict(zip(group.leaves, group.take(buffer), strict=True))
        return found

    # ---- gradients, to the shards' owners

    def pack(
        self, grads: PyTree, weight: jax.Array, loss: Any = None, *, check: bool = False
    ) -> Pending:
        """Local gradients -> what will be communicated. No communication.

        Args:
          grads: leaves (n, *shape), row i on worker i.
          weight: (n,) their weights.
          loss: (n,) the sums that the gradients are of, or None.
          check: whether a row of weight 0 may hold anything but zeros, such as NaN; it
            counts for nothing.
        """

        def local(grads: PyTree, weight: jax.Array) -> tuple[Arrays, Arrays]:
            cast = self.map(lambda leaf, g: g.astype(leaf.wire), grads)
            each = list(zip(self.leaves, jax.tree.leaves(cast), strict=True))
            buffers = self._lay([x if f.whole else f.cut(x[0]) for f, x in each])
            whole = tuple(x for f, x in each if f.whole)
            if not check:
                return buffers, whole
            # of what is packed, so that leaves are not held twice
            return jax.tree.map(
                lambda x: jnp.where(weight[0] != 0, x, jnp.zeros_like(x)),
                (buffers, whole),
            )

        in_specs = (self._row_specs, P(self.axis))
        rows = tuple(P(self.axis, *spec) for spec in self._whole_specs)
        run = self.everywhere(local, in_specs, (self._own, rows))
        weight = weight.astype(self.scalar)
        # of weight, which knows where it lies: zeros_like may not
        loss = jnp.where(weight != 0, 0, 0 * weight) if loss is None else loss
        buffers, whole = run(grads, weight)
        return Pending(buffers, whole, weight, loss.astype(self.scalar))

    def zeros(self) -> Pending:
        """Nothing is pending."""

        def local() -> tuple[PyTree, jax.Array]:
            grads = self.tree(lambda leaf: jnp.zeros((1, *leaf.local), leaf.wire))
            return grads, jnp.zeros(1, self.scalar)

        run = self.everywhere(local, (), (self._row_specs, P(self.axis)))
        return self.pack(*run())

    def sum_small(self, pending: Pending) -> tuple[Totals, Arrays]:
        """Sums over the workers what is not packed, in one all-reduce if it is small.

        Returns:
          The totals, and the reduced gradients of the leaves that stay whole.
        """

        def local(mine: Arrays) -> Arrays:
            if self.workers == 1:
                return mine
            if sum(x.size for x in mine[2:]) > self.together:
                return lax.psum(mine, self.axis)
            flat = jnp.concatenate([x.astype(self.scalar).reshape(-1) for x in mine])
            ends = np.cumsum([x.size for x in mine])
            parts = jnp.split(lax.psum(flat, self.axis), ends[:-1])
            return tuple(
                part.reshape(x.shape) for part, x in zip(parts, mine, strict=True)
            )

        specs = self._whole_specs if pending.whole else ()
        rows = tuple(P(self.axis, *spec) for spec in (P(), P(), *specs))
        run = self.everywhere(
            lambda rows: local(tuple(x[0] for x in rows)), (rows,), (P(), P(), *specs)
        )
        weight, loss, *whole = run((pending.weight, pending.loss, *pending.whole))
        return Totals(weight, loss), tuple(whole)

    def reduce_scatter(self, buffers: Arrays, axis: str) -> Arrays:
        """Sums the buffers over one data axis; each worker keeps its share.

        The collective alone; applied over the axes of `order`, one after the other.
        """

        def local(buffers: Arrays) -> Arrays:
            if self.mesh.shape[axis] == 1:
                return buffers  # the collective of one worker would be a copy
            return tuple(
                lax.psum_scatter(b, axis, scatter_dimension=0, tiled=True)
                for b in buffers
            )

        return self.on_buffers(local)(buffers)

    def all_to_all(self, buffers: Arrays, axis: str) -> Arrays:
        """Block i of every worker's buffers on worker i, by sender: [n * rows, ...]."""

        def local(buffers: Arrays) -> Arrays:
            return tuple(lax.all_to_all(b, axis, 0, 0, tiled=True) for b in buffers)

        return self.on_buffers(local)(buffers)

    def split(self, reduced: Arrays, whole: Arrays | None = None) -> PyTree:
        """Reduced buffers -> shards, in the master copy's dtype.

        Args:
          reduced: of the leaves that are split.
          whole: the others; None: zeros.
        """
        if whole is None:
            kept = [leaf for leaf in self.leaves if leaf.whole]
            whole = tuple(jnp.zeros(leaf.shape, leaf.wire) for leaf in kept)

        def local(reduced: Arrays, whole: Arrays) -> PyTree:
            parts, rest = self._take(reduced), iter(whole)
            shards = []
            for i, leaf in enumerate(self.leaves):
                if leaf.whole:
                    x = next(rest)
                else:
                    x = parts[i] if leaf.in_blocks else parts[i][0]
                shards.append(x.astype(leaf.master))
            return self.treedef.unflatten(shards)

        in_specs = (self._own, self._whole_specs)
        return self.everywhere(local, in_specs, self._shard_specs)(reduced, whole)

    # ---- parameters, to all workers

    def join(self, shards: PyTree, dtype: Any = None) -> Arrays:
        """Shards -> buffers to gather, in the wire's dtypes or another."""

        def local(shards: PyTree) -> Arrays:
            each = zip(self.leaves, jax.tree.leaves(shards), strict=True)
            blocks = [x if f.in_blocks or f.whole else x[None] for f, x in each]
            return self._lay(blocks, dtype)

        return self.everywhere(local, (self._shard_specs,), self._own)(shards)

    def whole(self, shards: PyTree) -> Arrays:
        """The leaves that every worker has: they are not sent, hence nor rounded."""
        each = zip(self.leaves, jax.tree.leaves(shards), strict=True)
        return tuple(x for leaf, x in each if leaf.whole)

    def all_gather(self, outgoing: Outgoing, axis: str) -> Outgoing:
        """The shares along one data axis on every worker of it.

        The collective alone; applied over the axes of `order`, the last one first.
        """

        def local(buffers: Arrays) -> Arrays:
            if self.mesh.shape[axis] == 1:
                return buffers
            return tuple(lax.all_gather(x, axis, axis=0, tiled=True) for x in buffers)

        left = self.order[: self.order.index(axis)]
        before, after = self._over((*left, axis)), self._over(left)
        buffers = self.everywhere(local, (before,), after)(outgoing.buffers)
        return outgoing._replace(buffers=buffers)

    def unpack(self, gathered: Outgoing, dtype: Any = None) -> PyTree:
        """What was gathered -> parameters of their own dtype. No communication.

        Args:
          gathered: by all axes.
          dtype: instead, of the leaves that were split.
        """

        def local(gathered: tuple[Arrays, Arrays]) -> PyTree:
            parts, whole = self._take(gathered[0]), iter(gathered[1])
            return self.treedef.unflatten(
                [
                    next(whole).astype(leaf.dtype)
                    if leaf.whole
                    else leaf.assemble(parts[i]).astype(dtype or leaf.dtype)
                    for i, leaf in enumerate(self.leaves)
                ]
            )

        in_specs: Any = (self._over(()), self._whole_specs)
        run = self.everywhere(local, (in_specs,), self._param_specs)
        return run((gathered.buffers, gathered.whole))

    # ---- without buffers

    def shard(self, params: PyTree) -> PyTree:
        """Parameters -> shards, in the master copy's dtype."""

        def share(leaf: Leaf, x: jax.Array) -> jax.Array:
            x = x.astype(leaf.master)
            if leaf.whole:
                return x
            mine = lax.dynamic_index_in_dim(
                leaf.cut(x), lax.axis_index(self.order), keepdims=leaf.in_blocks
            )
            return mine

        run = self.everywhere(
            functools.partial(self.map, share), (self._param_specs,), self._shard_specs
        )
        return run(params)

    def gather_exact(self, shards: PyTree) -> PyTree:
        """Shards -> parameters, in their own dtype whatever the wire's."""

        def whole(leaf: Leaf, x: jax.Array) -> jax.Array:
            x = x.astype(leaf.dtype)
            if leaf.whole:
                return x
            if not leaf.in_blocks:
                x = x[None]
            return leaf.assemble(lax.all_gather(x, self.order, axis=0, tiled=True))

        run = self.everywhere(
            functools.partial(self.map, whole), (self._shard_specs,), self._param_specs
        )
        return run(shards)


def _number(by_path: dict[tuple[str, ...], int], names: tuple[str, ...]) -> int:
    """Of the parameter whose path ends `names`, the longest; -1 if there is none."""
    ends = (names[start:] for start in range(len(names) + 1))
    return next((by_path[end] for end in ends if end in by_path), -1)
