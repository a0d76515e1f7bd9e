"""The split of each parameter over the workers, and its packing for the network.

    params --(shard)--> shards    worker i's part of each leaf
    grads  --(pack)---> InFlight --(reduce_scatter)-> Reduced --(split)--> shards
    shards --(join)---> outgoing --(all_gather)-----> gathered --(unpack)-> params

The optimizer sees every leaf in its own global shape (`view`), split over the workers
along one dimension; along two where no single one divides and the leaf is large. So it
computes what it would compute on one device, even across a whole leaf. Between the
optimizer and the network the workers' parts are packed into one buffer per dtype, in
which a gradient also stays until the optimizer takes it.
`reduce_scatter` and `all_gather` are only the collectives, so that a step can overlap
them with computation. A small leaf that no dimension splits evenly stays
whole, with its state, on every worker; its gradient is summed with the weights.

A layout is static (hashable, no arrays): it lives in the optimizer state as a pytree
node without leaves, so that any holder of the state can interpret it.
"""

import dataclasses
import functools
import math
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from acco_jax.core import buffers, direct, gloo
from acco_jax.core.buffers import (
    Arrays,
    Group,
    InFlight,
    Outgoing,
    Reduced,
    RoundingError,
    Totals,
)
from acco_jax.core.groups import of_chips, platform_of, sends_anywhere
from acco_jax.core.leaves import Leaf, PyTree, describe, numbering
from acco_jax.core.model_state import weighted
from acco_jax.core.parts import SMALL, Parts, evenly
from acco_jax.core.select import masked
from acco_jax.core.workers import over_data, to_row

MAX_REPLICATED = 128  # elements of an optimizer's state that mirrors no parameter


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Layout:
    """The split of each parameter over the workers."""

    mesh: Mesh
    axis: tuple[str, ...]  # the data axes, slowest network first
    treedef: jax.tree_util.PyTreeDef  # the parameters' tree structure
    leaves: tuple[Leaf, ...]  # one record per parameter, in tree order
    # for each array of the optimizer's state the number of the parameter that it is a
    # moment of, or None
    mirrors: tuple[int | None, ...] = ()
    permutes: bool = False  # whether buffers are exchanged as `direct` does

    # up to this many elements of leaves that stay whole are summed with the weights
    together: ClassVar[int] = SMALL

    @classmethod
    def of(
        cls,
        params: PyTree,
        *,
        mesh: Mesh,
        axis: tuple[str, ...],
        comm_dtype: DTypeLike | None = None,
        param_specs: PyTree | None = None,
    ) -> Self:
        """Lay these parameters out; arguments and errors are as for `describe`."""
        treedef, leaves = describe(params, mesh, axis, comm_dtype, param_specs)
        n = math.prod(mesh.shape[a] for a in axis)
        split = (dataclasses.replace(f, parts=cls.parts_of(f, n)) for f in leaves)
        return cls(mesh, axis, treedef, tuple(split))

    @staticmethod
    def parts_of(leaf: Leaf, n: int) -> Parts:
        """Return the number of parts of each dimension of a leaf, among n workers."""
        return evenly(leaf, n)

    # ---- copies of a state, in which a layout is a node without arrays

    def __post_init__(self) -> None:
        flax = sys.modules.get("flax.serialization")
        if flax is not None:  # to_bytes passes over it, from_bytes keeps the target's
            flax.register_serialization_state(
                type(self), lambda _: {}, lambda layout, _: layout, override=True
            )

    def __copy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self

    __deepcopy__ = __copy__

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "the state of a method cannot be pickled, because its layout holds devices:"
            " save it with acco_jax.save."
        )

    # ---- sizes and shardings

    @property
    def workers(self) -> int:
        return math.prod(self.mesh.shape[a] for a in self.axis)

    @property
    def reduce_order(self) -> tuple[str, ...]:
        """The data axes as collectives take them: the fastest network first.

        Reduced there, a gradient has 1/k of its size on the slower network.
        So the worker at (slice s, chip c) owns part c * slices + s.
        """
        return self.axis[::-1]

    @property
    def model_axes(self) -> tuple[str, ...]:
        """The mesh's axes that are not data axes."""
        return tuple(a for a in self.mesh.axis_names if a not in self.axis)

    @property
    def scalar(self) -> np.dtype:
        """The dtype of weights: float32, or float64 if any master weights are."""
        return np.result_type(np.float32, *(leaf.master for leaf in self.leaves))

    def sharding(self, *spec: Any) -> NamedSharding:
        return NamedSharding(self.mesh, P(*spec))

    def tree(self, make: Callable[[Leaf], Any]) -> PyTree:
        """Return the parameters' tree with make(leaf) at each leaf."""
        return self.treedef.unflatten([make(leaf) for leaf in self.leaves])

    def map(self, fn: Callable[..., Any], *trees: PyTree) -> PyTree:
        """Apply fn(leaf, x, ...) over trees of the parameters' structure."""
        return jax.tree.map(fn, self.tree(lambda leaf: leaf), *trees)

    @property
    def params_shardings(self) -> PyTree:
        return self.tree(lambda leaf: self.sharding(*leaf.spec))

    @property
    def grads_shardings(self) -> PyTree:
        """Shardings of per-worker gradients: leaf (n, *shape), row i on worker i."""
        return self.tree(lambda leaf: self.sharding(self.axis, *leaf.spec))

    @property
    def shards(self) -> PyTree:
        """Abstract shards: ShapeDtypeStructs of the master weights, as stored."""
        return self.tree(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.stored, leaf.master, sharding=self._home(leaf)
            )
        )

    def _home(self, leaf: Leaf) -> NamedSharding:
        return NamedSharding(self.mesh, leaf.stored_spec(self.reduce_order))

    def everywhere(self, fn: Callable, in_specs: PyTree, out_specs: PyTree) -> Callable:
        """Run fn on each device's own blocks, manual over every axis of the mesh."""
        return jax.shard_map(
            fn, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def to_rows(self, tree: PyTree) -> PyTree:
        """Return a row for each worker of a tree that all have. No communication."""
        if tree is None:
            return None
        return over_data(to_row, self.mesh, self.axis, P(), P(self.axis))(tree)

    # ---- the optimizer's state

    def mirroring(self, inner: optax.GradientTransformation, state: PyTree) -> Self:
        """Return this layout with the marks of which state arrays are moments.

        `state` is what inner's `init` returns for the parameters' own shapes; abstract.
        """
        masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
        flat = jax.tree_util.tree_leaves_with_path(state)
        try:
            marks = optax.tree_map_params(
                inner,
                lambda x, number: x if masked(x) else number,
                state,
                self.treedef.unflatten(range(len(self.leaves))),
                transform_non_params=lambda x: -1,
                is_leaf=masked,
            )
            numbers = jax.tree.leaves(marks)
            assert len(numbers) == len(flat)
        except Exception:  # inner reads the parameters, and optax has only a stand-in
            number_of = numbering(self.leaves)
            numbers = [number_of(path) for path, _ in flat]
        mirrors = (
            i if i >= 0 and jnp.shape(x) == self.leaves[i].shape else None
            for i, (_, x) in zip(numbers, flat, strict=True)
        )
        return dataclasses.replace(self, mirrors=tuple(mirrors))

    def view(self, shards: PyTree) -> PyTree:
        """Turn stored shards into arrays of the leaves' shapes, for the optimizer."""
        return self.map(Leaf.view, shards)

    def store(self, shards: PyTree) -> PyTree:
        """Turn arrays of the leaves' shapes into stored shards: inverts `view`."""
        return self.map(Leaf.store, shards)

    def view_state(self, state: PyTree) -> PyTree:
        """Turn the optimizer's state as stored into what the optimizer sees."""
        return self._map_state(Leaf.view, state)

    def store_state(self, state: PyTree) -> PyTree:
        """Turn the state that the optimizer sees into what is stored."""
        return self._map_state(Leaf.store, state)

    def inner_shardings(self, state: PyTree) -> PyTree:
        """Return NamedShardings of the optimizer's state, as it is stored."""
        return self._map_state(lambda leaf, _: self._home(leaf), state, self._spread)

    def _map_state(
        self, fn: Callable, state: PyTree, other: Callable = lambda x: x
    ) -> PyTree:
        """Return fn(leaf, x) for arrays that mirror a leaf, other(x) for the others."""
        arrays, treedef = jax.tree.flatten(state)
        each = zip(self.mirrors, arrays, strict=True)
        mapped = [other(x) if i is None else fn(self.leaves[i], x) for i, x in each]
        return jax.tree.unflatten(treedef, mapped)

    def _spread(self, x: jax.Array) -> NamedSharding:
        """Return the sharding of an array that mirrors no leaf: split if large."""
        shape = jnp.shape(x)
        fits = [d for d, s in enumerate(shape) if s % self.workers == 0]
        if fits and math.prod(shape) > MAX_REPLICATED:
            return self.sharding(*[None] * fits[0], self.reduce_order)
        return self.sharding()

    def state_shardings(self, state: PyTree) -> PyTree:
        """Return a NamedSharding for every array of a (possibly abstract) method state.

        Its field `inner` is the optimizer's state; InFlight, Reduced and RoundingError
        lie on their workers; trees of shards are known by their structure and shapes,
        at any depth; everything else is replicated.
        """
        own: Any = NamedSharding(self.mesh, self._own)
        rows: Any = self.sharding(self.axis)
        whole: Any = tuple(self.sharding(self.axis, *s) for s in self._whole_specs)

        def home(x: PyTree) -> PyTree:
            if isinstance(x, InFlight):
                states = jax.tree.map(lambda _: rows, x.model_state)
                return InFlight((own,) * len(x.buffers), whole, rows, rows, states)
            if isinstance(x, RoundingError):
                return RoundingError((own,) * len(x.buffers))
            if isinstance(x, Reduced):
                sums: Any = tuple(self.sharding(*s) for s in self._whole_specs)
                return Reduced((own,) * len(x.buffers), sums)
            return self.tree(self._home) if self.holds_shards(x) else self.sharding()

        out_shardings = jax.tree.map(
            home,
            state._replace(inner=None, model_state=None),
            is_leaf=lambda x: (
                isinstance(x, InFlight | Reduced | RoundingError)
                or self.holds_shards(x)
            ),
        )
        carried = jax.tree.map(lambda _: self.sharding(), state.model_state)
        inner = self.inner_shardings(state.inner)
        return out_shardings._replace(inner=inner, model_state=carried)

    def holds_shards(self, x: PyTree) -> bool:
        """Return whether x is a tree of stored shards."""
        leaves, treedef = jax.tree.flatten(x)
        shapes = [leaf.stored for leaf in self.leaves]
        return treedef == self.treedef and list(map(jnp.shape, leaves)) == shapes

    def row_shardings(self, rows: PyTree) -> PyTree:
        """Return NamedShardings of rows (n, ...), split as their parameters are."""
        own = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows)
        return jax.tree.map(
            lambda spec: self.sharding(self.axis, *spec), self.own_specs(own)
        )

    def own_specs(self, tree: PyTree) -> PyTree:
        """Return the specs of one worker's arrays, split as their parameters are."""
        number_of = numbering(self.leaves)

        def spec(path: Sequence[Any], x: jax.Array) -> P:
            i = number_of(path)
            if i < 0 or x.shape != self.leaves[i].shape:
                return P()
            return self.leaves[i].spec

        return jax.tree_util.tree_map_with_path(spec, tree)

    # ---- the buffers

    @functools.cached_property
    def groups(self) -> tuple[Group, ...]:
        """The contents of the buffers, a group for each communication dtype.

        Leaves of different master dtypes are in different ones.
        """
        by_dtypes: dict[Any, dict[int, tuple[int, ...]]] = {}
        for i, leaf in enumerate(self.leaves):
            if not leaf.whole:
                dtypes = leaf.comm_dtype, leaf.master
                by_dtypes.setdefault(dtypes, {})[i] = leaf.part
        return tuple(
            buffers.make_group(dtype, parts) for (dtype, _), parts in by_dtypes.items()
        )

    @property
    def _masters(self) -> tuple[np.dtype, ...]:
        """The master dtype of each group."""
        return tuple(self.leaves[group.leaves[0]].master for group in self.groups)

    def _over(self, axes: tuple[str, ...]) -> P:
        """Return the spec of buffers that are split over these data axes."""
        return P((*axes, *self.model_axes)) if axes or self.model_axes else P()

    @property
    def _own(self) -> P:
        """The spec of buffers that each device has for itself."""
        return self._over(self.reduce_order)

    @property
    def _row_specs(self) -> PyTree:
        return self.tree(lambda leaf: P(self.axis, *leaf.spec))

    @property
    def _param_specs(self) -> PyTree:
        return self.tree(lambda leaf: leaf.spec)

    @property
    def _shard_specs(self) -> PyTree:
        return self.tree(lambda leaf: leaf.stored_spec(self.reduce_order))

    @property
    def _whole_specs(self) -> tuple[P, ...]:
        return tuple(leaf.spec for leaf in self.leaves if leaf.whole)

    def on_buffers(self, fn: Callable, gathered: bool = False) -> Callable:
        """Run fn on each device's own packed buffers, or on the gathered ones."""
        spec = self._over(()) if gathered else self._own
        return self.everywhere(fn, (spec,), spec)

    def whole(self, tree: PyTree) -> Arrays:
        """Return the leaves that every worker has: neither sent nor rounded."""
        each = zip(self.leaves, jax.tree.leaves(tree), strict=True)
        return tuple(x for leaf, x in each if leaf.whole)

    def _lay(self, tree: PyTree, dtypes: Sequence[DTypeLike | None]) -> Arrays:
        """Pack the leaves that are split, blocks (n, *part), into buffers.

        Each is in its group's dtype of `dtypes`; None: the communication dtype.
        """
        blocks = jax.tree.leaves(tree)
        each = zip(self.groups, dtypes, strict=True)
        return tuple(g.lay([blocks[i] for i in g.leaves], dtype) for g, dtype in each)

    def _take(
        self, fn: Callable, spec: P, specs: PyTree, buffers: Arrays, whole: Arrays
    ) -> PyTree:
        """Return fn(leaf, x) of each leaf, x its blocks (n, *part) or whole.

        Buffers are split as `spec` says, and what fn returns as `specs` do.
        """
        numbers = [i for group in self.groups for i in group.leaves]

        def local(buffers: Arrays) -> list[jax.Array]:
            each, one = zip(self.groups, buffers, strict=True), self._one()
            parts = [x for group, buffer in each for x in group.take(buffer, one)]
            return [fn(self.leaves[i], x) for i, x in zip(numbers, parts, strict=True)]

        split: list[jax.Array] = []
        if numbers:
            homes = jax.tree.leaves(specs)
            out_specs = [homes[i] for i in numbers]
            split = self.everywhere(local, (spec,), out_specs)(buffers)
        found, rest = dict(zip(numbers, split, strict=True)), iter(whole)
        each = enumerate(self.leaves)
        xs = [fn(leaf, next(rest)) if leaf.whole else found[i] for i, leaf in each]
        return self.treedef.unflatten(xs)

    def _one(self) -> jax.Array | None:
        """Return, on CPU, a uint32 [] of 1 that the compiler does not know.

        XLA:CPU compiles each kernel by itself, equal ones once: see `Group.take`.
        """
        if platform_of(self.mesh) != "cpu":
            return None
        return jnp.where(lax.axis_index(self.axis) >= 0, jnp.uint32(1), jnp.uint32(2))

    # ---- gradients, to the shards' owners

    def pack(
        self,
        grads: PyTree,
        weight: jax.Array,
        loss: jax.Array | None = None,
        *,
        check: bool = False,
    ) -> InFlight:
        """Pack local gradients for the network, without communication.

        Args:
          grads: leaves (n, *shape), row i on worker i.
          weight: (n,) their weights.
          loss: (n,) the sums of losses that have these gradients, or None.
          check: whether a row of weight 0 may hold anything but zeros, such as NaN; it
            is masked.
        """

        def local(grads: PyTree, weight: jax.Array) -> tuple[Arrays, Arrays]:
            cut = lambda leaf, g: g if leaf.whole else leaf.cut(g[0])  # noqa: E731
            blocks = self.map(cut, grads)
            packed = self._lay(blocks, [None] * len(self.groups)), self.whole(blocks)
            if not check:
                return packed
            # mask what is packed, so that leaves are not held twice
            return masked(weight[0] != 0, packed)

        grads = self.map(lambda leaf, g: g.astype(leaf.comm_dtype), grads)
        weight = weight.astype(self.scalar)
        # from weight, which has its sharding: zeros_like may not
        loss = jnp.where(weight != 0, 0, 0 * weight) if loss is None else loss
        buffers: Arrays = ()
        whole = self.whole(grads)
        if self.groups or check:
            in_specs = (self._row_specs, P(self.axis))
            rows = tuple(P(self.axis, *spec) for spec in self._whole_specs)
            run = self.everywhere(local, in_specs, (self._own, rows))
            buffers, whole = run(grads, weight)
        return InFlight(buffers, whole, weight, loss.astype(self.scalar))

    def zeros(self) -> InFlight:
        """Return zeros: the in-flight gradients before the first gradients."""

        def local() -> tuple[PyTree, jax.Array]:
            grads = self.tree(lambda leaf: jnp.zeros((1, *leaf.local), leaf.comm_dtype))
            return grads, jnp.zeros(1, self.scalar)

        run = self.everywhere(local, (), (self._row_specs, P(self.axis)))
        return self.pack(*run())

    def sum_small(self, in_flight: InFlight) -> tuple[Totals, Arrays, Arrays]:
        """Sum what is not packed over the workers, in one all-reduce if it is small.

        Returns the totals, the reduced gradients of the leaves that stay whole, and
        what `weighted` makes of the model states, if there are any.
        """

        def local(rows: Arrays, states: Arrays) -> Arrays:
            own = tuple(x[0] for x in rows)
            many = sum(x.size for x in own[2:]) > self.together
            if states:
                own = (*own, weighted([x[0] for x in states], own[0]))
            if self.workers == 1:
                return own
            if many:
                return lax.psum(own, self.axis)
            wider = functools.partial(max, key=lambda dtype: jnp.dtype(dtype).itemsize)
            dtypes = [wider(self.scalar, x.dtype) for x in own]
            if states:
                dtypes[-1] = own[-1].dtype
            widest = wider(dtypes)
            flat = [x.astype(widest).reshape(-1) for x in own]
            ends = np.cumsum([x.size for x in own])
            sums = jnp.split(lax.psum(jnp.concatenate(flat), self.axis), ends[:-1])
            each = zip(sums, own, dtypes, strict=True)
            return tuple(s.reshape(x.shape).astype(dtype) for s, x, dtype in each)

        specs = (P(), P(), *(self._whole_specs if in_flight.whole else ()))
        rows = (in_flight.weight, in_flight.loss, *in_flight.whole)
        states = tuple(jax.tree.leaves(in_flight.model_state))
        in_specs = tuple(P(self.axis, *spec) for spec in specs), P(self.axis)
        out_specs = (*specs, P()) if states else specs
        weight, loss, *sums = self.everywhere(local, in_specs, out_specs)(rows, states)
        k = len(in_flight.whole)
        return Totals(weight, loss), tuple(sums[:k]), tuple(sums[k:])

    def reduce_scatter(self, buffers: Arrays, axis: str) -> Arrays:
        """Sum the buffers over one data axis; each worker keeps its share.

        Only the collective; applied over the axes of `reduce_order` in turn.
        """

        def local(buffers: Arrays) -> Arrays:
            if self.mesh.shape[axis] == 1:
                return buffers  # the collective of one worker would be a copy
            return self._collectives.reduce_scatter(buffers, axis)

        return self.on_buffers(local)(buffers)

    def overlapping(self) -> Self:
        """Return the layout with collectives that compilers overlap with a loop."""
        permutes = of_chips(self.mesh, self.axis) and sends_anywhere(self.mesh)
        return dataclasses.replace(self, permutes=permutes)

    @property
    def _collectives(self) -> types.ModuleType:
        return direct if self.permutes else gloo

    def all_to_all(self, buffers: Arrays, axis: str) -> Arrays:
        """Send block i of every worker's buffers to worker i: [n * rows, ...]."""
        return self.on_buffers(lambda xs: gloo.all_to_all(xs, axis))(buffers)

    # ---- reduced gradients, on their owners

    def reduced(self, buffers: Arrays, whole: Arrays) -> Reduced:
        """Return reduced buffers and leaves in the master weights' dtypes."""
        each = zip(buffers, self._masters, strict=True)
        leaves = (leaf.master for leaf in self.leaves if leaf.whole)
        wholes = zip(whole, leaves, strict=True)
        return Reduced(
            tuple(x.astype(dtype) for x, dtype in each),
            tuple(x.astype(dtype) for x, dtype in wholes),
        )

    def rejoin(self, shards: PyTree) -> Reduced:
        """Pack shards in the master weights' dtypes: the inverse of `split`."""
        return Reduced(self._join(shards, self._masters), self.whole(shards))

    def reduced_zeros(self) -> Reduced:
        """Return zeros: reduced gradients before the first ones."""

        def local() -> Reduced:
            each = zip(self.groups, self._masters, strict=True)
            whole = (leaf for leaf in self.leaves if leaf.whole)
            return Reduced(
                tuple(jnp.zeros((g.rows, g.width), dtype) for g, dtype in each),
                tuple(jnp.zeros(leaf.local, leaf.master) for leaf in whole),
            )

        own: Any = (self._own,) * len(self.groups)
        sums: Any = self._whole_specs
        return self.everywhere(local, (), Reduced(own, sums))()

    def split(self, reduced: Arrays, whole: Arrays | None = None) -> PyTree:
        """Turn reduced buffers into shards, in the master weights' dtype.

        `whole` are the leaves that are not split; None: zeros.
        """
        if whole is None:
            leaves = (leaf for leaf in self.leaves if leaf.whole)
            whole = tuple(jnp.zeros(leaf.shape, leaf.comm_dtype) for leaf in leaves)

        def shard(leaf: Leaf, x: jax.Array) -> jax.Array:
            return (x if leaf.whole or leaf.in_blocks else x[0]).astype(leaf.master)

        return self._take(shard, self._own, self._shard_specs, reduced, whole)

    # ---- parameters, to all workers

    def join(self, shards: PyTree, dtype: DTypeLike | None = None) -> Arrays:
        """Pack shards into buffers to gather, in communication dtypes or `dtype`."""
        return self._join(shards, [dtype] * len(self.groups))

    def _join(self, shards: PyTree, dtypes: Sequence[DTypeLike | None]) -> Arrays:
        pack = lambda shards: self._lay(self.map(Leaf.blocks, shards), dtypes)  # noqa: E731
        return self.everywhere(pack, (self._shard_specs,), self._own)(shards)

    def all_gather(self, outgoing: Outgoing, axis: str) -> Outgoing:
        """Gather the shares along one data axis on every worker of it.

        Only the collective; applied over the axes of `reduce_order`, last one first.
        """

        def local(buffers: Arrays) -> Arrays:
            if self.mesh.shape[axis] == 1:
                return buffers
            return self._collectives.all_gather(buffers, axis)

        left = self.reduce_order[: self.reduce_order.index(axis)]
        before, after = self._over((*left, axis)), self._over(left)
        buffers = self.everywhere(local, (before,), after)(outgoing.buffers)
        return outgoing._replace(buffers=buffers)

    def unpack(self, gathered: Outgoing, dtype: DTypeLike | None = None) -> PyTree:
        """Turn what was gathered into parameters, without communication.

        Leaves that were split get `dtype`, or their own if that is None.
        """

        def param(leaf: Leaf, x: jax.Array) -> jax.Array:
            if leaf.whole:
                return x.astype(leaf.dtype)
            return leaf.assemble(x).astype(dtype or leaf.dtype)

        return self._take(param, self._over(()), self._param_specs, *gathered)

    # ---- without buffers

    def _leafwise(self, fn: Callable, in_specs: PyTree, out_specs: PyTree) -> Callable:
        return self.everywhere(functools.partial(self.map, fn), (in_specs,), out_specs)

    def shard(self, params: PyTree) -> PyTree:
        """Turn parameters into shards, in the master weights' dtype."""

        def share(leaf: Leaf, x: jax.Array) -> jax.Array:
            x = x.astype(leaf.master)
            if leaf.whole:
                return x
            blocks, i = leaf.cut(x), lax.axis_index(self.reduce_order)
            return lax.dynamic_index_in_dim(blocks, i, keepdims=leaf.in_blocks)

        return self._leafwise(share, self._param_specs, self._shard_specs)(params)

    def gather_exact(self, shards: PyTree) -> PyTree:
        """Gather shards to parameters, in their own dtype whatever is communicated."""

        def param(leaf: Leaf, x: jax.Array) -> jax.Array:
            x = x.astype(leaf.dtype)
            if leaf.whole:
                return x
            blocks = lax.all_gather(
                leaf.blocks(x), self.reduce_order, axis=0, tiled=True
            )
            return leaf.assemble(blocks)

        return self._leafwise(param, self._shard_specs, self._param_specs)(shards)
