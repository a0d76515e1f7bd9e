"""How each parameter is split over the data axis, and what crosses the network.

Two layouts, one interface:

    params --(shard)--> shards       worker i's 1/n of each leaf: the optimizer's view
    grads  --(pack)---> buffers --(reduce_scatter)--> raw --(split)--> shards
    shards --(join)---> low     --(all_gather)------> full --(unpack)-> params

`reduce_scatter` and `all_gather` are the collectives and nothing else, so that a step
can put computation beside them. `PackedLayout` moves one buffer per dtype: worker i's
block of it holds 1/n of every leaf. `LeafLayout` keeps whole leaf shapes, split along
one dimension, for optimizers that look at shapes (adafactor, muon, centralize).

A layout is static (hashable, no arrays): it lives in the optimizer state as a pytree
node without leaves, so that whoever holds the state can interpret it.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

PyTree = Any

# A packed buffer is [rows, width]. TPUs fall back to a synchronous all-reduce for
# one-dimensional buffers and for row counts that do not fill a bf16 tile of 16 rows;
# wide rows are the cheapest to pack, narrow ones waste the least.
WIDTHS = (1024, 512, 256, 128)
ROW_MULTIPLE = 16
MAX_PADDING = 0.01  # of a buffer: the widest rows that stay below it are taken
MAX_LEAF_PADDING = 1 / 256  # of a leaf with rows of its own; others share a block
SMALL = 1 << 16  # elements: in the leaf layout, what cannot be split is replicated


class Pending(NamedTuple):
    """Local gradients that have not crossed the network yet."""

    buffers: tuple[jax.Array, ...]  # every worker's own sums, in the wire's dtype
    weight: jax.Array  # (n,) their weights


class LeftOut(NamedTuple):
    """What rounding left out of the gradients sent so far (see `acco_jax.wire`)."""

    buffers: tuple[jax.Array, ...]  # every worker's own, in the wire's dtype


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What is known of one parameter before any array exists."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype  # the parameter's
    wire: np.dtype  # what communication carries
    spec: P  # over the mesh's other axes; the data axes never appear
    local: tuple[int, ...]  # shape on one device, split over the other axes alone

    @property
    def name(self) -> str:
        return "/".join(self.path) or "parameter"

    def __str__(self) -> str:
        return self.name

    @property
    def size(self) -> int:
        return math.prod(self.local)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that split it, data axes excluded."""
        return tuple(a for entry in self.spec for a in _names(entry))

    @property
    def master(self) -> np.dtype:
        return np.dtype(jnp.promote_types(self.dtype, jnp.float32))


def _names(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def path_names(path: Sequence[Any]) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


@dataclasses.dataclass(frozen=True)
class Layout(abc.ABC):
    """What both layouts share; see the module's docstring for the interface.

    Attributes:
      mesh: the devices.
      axis: the data axes' names, slowest first; their product is the number of workers.
      treedef: the parameters' tree structure.
      leaves: one record per parameter, in tree order.
    """

    mesh: Mesh
    axis: tuple[str, ...]
    treedef: Any
    leaves: tuple[Leaf, ...]

    # ---- sizes and shardings

    @property
    def workers(self) -> int:
        return math.prod(self.mesh.shape[a] for a in self.axis)

    @property
    def order(self) -> tuple[str, ...]:
        """The data axes as collectives take them: the fastest network first.

        Reduced there, a gradient is 1/k of its size when it meets the slower network.
        So the worker at (slice s, chip c) owns block c * slices + s.
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

    @property
    def params_shardings(self) -> PyTree:
        return self.tree(lambda leaf: self.sharding(*leaf.spec))

    @property
    def grads_shardings(self) -> PyTree:
        """Of per-worker gradients: leaf (n, *shape), row i on worker i."""
        return self.tree(lambda leaf: self.sharding(self.axis, *leaf.spec))

    def everywhere(self, fn: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """fn on each device's own blocks: manual over every axis of the mesh."""
        return jax.shard_map(
            fn, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def _specs(self, shardings: PyTree) -> PyTree:
        return jax.tree.map(lambda s: s.spec, shardings)

    @functools.cached_property
    def _by_path(self) -> dict[tuple[str, ...], Leaf]:
        return {leaf.path: leaf for leaf in self.leaves}

    def owner(self, path: Sequence[Any], shape: tuple[int, ...]) -> Leaf | None:
        """The parameter whose shard a leaf of some optimizer state mirrors.

        A moment of parameter `a/b` lies at `.../mu/a/b` and has the shard's shape.
        """
        names = path_names(path)
        for start in range(len(names) + 1):
            leaf = self._by_path.get(names[start:])
            if leaf is not None and self.shard_shape(leaf) == tuple(shape):
                return leaf
        return None

    def state_shardings(self, state: PyTree) -> PyTree:
        """A NamedSharding for every array of a (possibly abstract) method state."""

        def of(path: Sequence[Any], x: Any) -> Any:
            rows: Any = self.sharding(self.axis)
            buffers: Any = self.buffer_shardings
            if isinstance(x, Pending):
                return Pending(buffers, rows)
            if isinstance(x, LeftOut):
                return LeftOut(buffers)
            leaf = self.owner(path, x.shape)
            return self.sharding(*self.shard_spec(leaf)) if leaf else self.sharding()

        return jax.tree_util.tree_map_with_path(
            of, state, is_leaf=lambda x: isinstance(x, Pending | LeftOut)
        )

    # ---- what a layout must define

    @abc.abstractmethod
    def shard_shape(self, leaf: Leaf) -> tuple[int, ...]:
        """Global shape of what the optimizer sees of a leaf."""

    @abc.abstractmethod
    def shard_spec(self, leaf: Leaf) -> P:
        """How that array is split over the mesh."""

    @property
    @abc.abstractmethod
    def buffer_shardings(self) -> tuple[NamedSharding, ...]:
        """Of the wire buffers, in the order of `pack`."""

    @abc.abstractmethod
    def pack(self, grads: PyTree) -> tuple[jax.Array, ...]:
        """(n, *shape) rows -> wire buffers. No communication."""

    @abc.abstractmethod
    def reduce_scatter(
        self, buffers: tuple[jax.Array, ...], axis: str
    ) -> tuple[jax.Array, ...]:
        """Sums the buffers over one data axis; each keeps its share.

        The collective alone; applied over the axes of `order`, one after the other.
        """

    @abc.abstractmethod
    def split(self, raw: tuple[jax.Array, ...]) -> PyTree:
        """Reduced buffers -> the tree of shards, in the master copy's dtype."""

    @abc.abstractmethod
    def join(self, shards: PyTree) -> tuple[jax.Array, ...]:
        """The tree of shards -> buffers to gather, in the wire's dtype."""

    @abc.abstractmethod
    def all_gather(
        self, low: tuple[jax.Array, ...], axis: str
    ) -> tuple[jax.Array, ...]:
        """The shares along one data axis on every worker of it.

        The collective alone; applied over the axes of `order`, the last one first.
        """

    @abc.abstractmethod
    def unpack(self, full: tuple[jax.Array, ...]) -> PyTree:
        """Gathered buffers -> parameters of their own dtype. No communication."""

    @abc.abstractmethod
    def shard(self, params: PyTree) -> PyTree:
        """Parameters -> the tree of shards, in the master copy's dtype."""

    @abc.abstractmethod
    def gather_exact(self, shards: PyTree) -> PyTree:
        """The tree of shards -> parameters, in their own dtype whatever the wire's."""

    def inner_view(self, tree: PyTree) -> PyTree:
        """State or shards as the inner optimizer must see them (padding taken off)."""
        return tree

    def inner_store(self, tree: PyTree) -> PyTree:
        """The inverse of `inner_view`."""
        return tree

    # ---- derived

    @property
    def shards(self) -> PyTree:
        """Abstract shards: ShapeDtypeStructs of the master copy."""
        return self.tree(
            lambda leaf: jax.ShapeDtypeStruct(
                self.shard_shape(leaf),
                leaf.master,
                sharding=self.sharding(*self.shard_spec(leaf)),
            )
        )

    @property
    def _shard_specs(self) -> PyTree:
        return self.tree(self.shard_spec)

    @property
    def _rows_specs(self) -> PyTree:
        return self._specs(self.grads_shardings)

    @property
    def _param_specs(self) -> PyTree:
        return self.tree(lambda leaf: leaf.spec)

    def zeros(self) -> tuple[jax.Array, ...]:
        """Wire buffers of zeros: nothing is pending."""
        grads = self.everywhere(
            lambda: self.tree(lambda leaf: jnp.zeros((1, *leaf.local), leaf.wire)),
            in_specs=(),
            out_specs=self._rows_specs,
        )()
        return self.pack(grads)


# --------------------------------------------------------------------------- packed


@dataclasses.dataclass(frozen=True)
class Slot:
    """Where a worker's share of one leaf lies in its block of a packed buffer."""

    leaf: int  # index into Layout.leaves
    start: int  # first element (from the block's start)
    size: int  # elements of each worker
    aligned: bool  # whole rows of its own, or part of the shared tail


@dataclasses.dataclass(frozen=True)
class Group:
    """One buffer: all leaves that travel in one dtype. Global [n * rows, width]."""

    dtype: np.dtype
    width: int
    rows: int  # of one worker's block
    slots: tuple[Slot, ...]

    @property
    def block(self) -> int:
        return self.rows * self.width

    @property
    def tail(self) -> int:
        """Where the leaves that share rows begin."""
        return min((s.start for s in self.slots if not s.aligned), default=self.used)

    @property
    def used(self) -> int:
        return max(s.start + s.size for s in self.slots)


def _make_group(
    leaves: Sequence[Leaf], members: list[int], workers: int, width: int
) -> Group:
    """Lays out the blocks of one dtype: whole rows first, then what shares rows."""
    slots, start = [], 0
    ceil = lambda size, unit: -(-size // unit) * unit  # noqa: E731
    aligned = {}
    for i in members:
        padded = ceil(leaves[i].size, workers * width)
        aligned[i] = padded - leaves[i].size <= MAX_LEAF_PADDING * leaves[i].size
    for i in sorted(members, key=lambda i: not aligned[i]):
        size = ceil(leaves[i].size, workers * (width if aligned[i] else 1)) // workers
        slots.append(Slot(i, start, size, aligned[i]))
        start += size
    rows = ceil(max(start, 1), width * ROW_MULTIPLE) // width
    return Group(leaves[members[0]].wire, width, rows, tuple(slots))


def _best_group(leaves: Sequence[Leaf], members: list[int], workers: int) -> Group:
    elements = sum(leaves[i].size for i in members)
    for width in WIDTHS:
        group = _make_group(leaves, members, workers, width)
        if group.block * workers <= (1 + MAX_PADDING) * elements:
            break
    return group


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class PackedLayout(Layout):
    """One buffer per dtype; worker i's block holds its 1/n of every leaf.

    A leaf large enough has whole rows of its own; the small ones share a tail, so that
    padding stays below 1 % also with hundreds of workers. The optimizer sees each
    leaf's elements in an array of the leaf's own rank (a scalar as one dimension), in
    another order: right for elementwise rules and norms, which is what
    `acco_jax.packable` checks.
    """

    groups: tuple[Group, ...]

    @functools.cached_property
    def _slots(self) -> dict[Leaf, tuple[Group, Slot]]:
        return {self.leaves[s.leaf]: (g, s) for g in self.groups for s in g.slots}

    def _local_shape(self, leaf: Leaf) -> tuple[int, ...]:
        group, slot = self._slots[leaf]
        rank = max(len(leaf.shape), 1)
        if rank == 1 or not slot.aligned:
            return (1,) * (rank - 1) + (slot.size,)
        rows = slot.size // group.width
        return (1,) * (rank - 2) + (rows, group.width)

    def _split_dim(self, leaf: Leaf) -> int:
        rank = max(len(leaf.shape), 1)
        return rank - 2 if rank > 1 and self._slots[leaf][1].aligned else rank - 1

    def shard_shape(self, leaf: Leaf) -> tuple[int, ...]:
        shape = list(self._local_shape(leaf))
        blocks = self.workers * math.prod(self.mesh.shape[a] for a in leaf.axes)
        shape[self._split_dim(leaf)] *= blocks
        return tuple(shape)

    def shard_spec(self, leaf: Leaf) -> P:
        # A leaf that no other axis splits is the same on all of them: P(data) alone,
        # or every norm would count it once per device.
        return P(*[None] * self._split_dim(leaf), (*self.order, *leaf.axes))

    @property
    def _everyone(self) -> P:
        return P((*self.order, *self.others))

    @property
    def buffer_shardings(self) -> tuple[NamedSharding, ...]:
        return tuple(NamedSharding(self.mesh, self._everyone) for _ in self.groups)

    def _pack_group(self, group: Group, leaves: list[jax.Array]) -> jax.Array:
        """Model-local leaves -> [n * rows, width]."""
        n, blocks = self.workers, []

        def per_worker(slot: Slot, *shape: int) -> jax.Array:
            x = leaves[slot.leaf].astype(group.dtype)
            if x.size != n * slot.size:
                x = jnp.pad(x.reshape(-1), (0, n * slot.size - x.size))
            return x.reshape(n, *shape)

        for slot in (s for s in group.slots if s.aligned):
            rows = slot.size // group.width
            blocks.append(per_worker(slot, rows, group.width))
        tail = [per_worker(s, s.size) for s in group.slots if not s.aligned]
        pad = group.block - group.used
        if tail or pad:
            tail.append(jnp.zeros((n, pad), group.dtype))
            blocks.append(jnp.concatenate(tail, 1).reshape(n, -1, group.width))
        return jnp.concatenate(blocks, 1).reshape(-1, group.width)

    def _unpack_leaf(self, leaf: Leaf, buffers: Sequence[jax.Array]) -> jax.Array:
        """[n * rows, width] -> one model-local leaf."""
        group, slot = self._slots[leaf]
        n, width = self.workers, group.width
        blocks = buffers[self.groups.index(group)].reshape(n, group.rows, width)
        if slot.aligned:
            x = blocks[:, slot.start // width : (slot.start + slot.size) // width]
        else:
            tail = blocks[:, group.tail // width :].reshape(n, -1)
            start = slot.start - group.tail
            x = tail[:, start : start + slot.size]
        if x.size != leaf.size:
            x = x.reshape(-1)[: leaf.size]
        return x.reshape(leaf.local)

    def pack(self, grads: PyTree) -> tuple[jax.Array, ...]:
        def local(grads: PyTree) -> tuple[jax.Array, ...]:
            rows = [g[0] for g in jax.tree.leaves(grads)]
            return tuple(self._pack_group(group, rows) for group in self.groups)

        specs = (self._rows_specs,)
        return self.everywhere(local, specs, self._everyone)(grads)

    def reduce_scatter(
        self, buffers: tuple[jax.Array, ...], axis: str
    ) -> tuple[jax.Array, ...]:
        def local(buffers: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            if self.mesh.shape[axis] == 1:
                return buffers  # the collective of one worker would be a copy
            return tuple(
                lax.psum_scatter(b, axis, scatter_dimension=0, tiled=True)
                for b in buffers
            )

        return self.everywhere(local, self._everyone, self._everyone)(buffers)

    def all_to_all(
        self, buffers: tuple[jax.Array, ...], axis: str
    ) -> tuple[jax.Array, ...]:
        """Block i of every worker's buffers on worker i, by sender: [n * rows, ...]."""

        def local(buffers: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            return tuple(lax.all_to_all(b, axis, 0, 0, tiled=True) for b in buffers)

        return self.on_buffers(local)(buffers)

    def on_buffers(self, fn: Callable, gathered: bool = False) -> Callable:
        """fn on each device's own packed buffers, or on the gathered ones, to such."""
        spec = self._gathered(()) if gathered else self._everyone
        return self.everywhere(fn, (spec,), spec)

    def split(self, raw: tuple[jax.Array, ...]) -> PyTree:
        def local(raw: tuple[jax.Array, ...]) -> PyTree:
            def share(leaf: Leaf) -> jax.Array:
                group, slot = self._slots[leaf]
                x, width = raw[self.groups.index(group)], group.width
                if slot.aligned:
                    x = x[slot.start // width : (slot.start + slot.size) // width]
                else:
                    start = slot.start - group.tail
                    x = x[group.tail // width :].reshape(-1)[start : start + slot.size]
                return x.reshape(self._local_shape(leaf)).astype(leaf.master)

            return self.tree(share)

        return self.everywhere(local, (self._everyone,), self._shard_specs)(raw)

    def join(self, shards: PyTree, dtype: Any = None) -> tuple[jax.Array, ...]:
        def local(shards: PyTree) -> tuple[jax.Array, ...]:
            leaves = jax.tree.leaves(shards)

            def block(group: Group) -> jax.Array:
                to = dtype or group.dtype
                part = lambda s: leaves[s.leaf].astype(to)  # noqa: E731
                rows = [
                    part(s).reshape(-1, group.width) for s in group.slots if s.aligned
                ]
                tail = [part(s).reshape(-1) for s in group.slots if not s.aligned]
                pad = group.block - group.used
                if tail or pad:
                    tail.append(jnp.zeros(pad, to))
                    rows.append(jnp.concatenate(tail).reshape(-1, group.width))
                return jnp.concatenate(rows)

            return tuple(block(group) for group in self.groups)

        specs = (self._shard_specs,)
        return self.everywhere(local, specs, self._everyone)(shards)

    def _gathered(self, axes: tuple[str, ...]) -> P:
        """Of buffers that are still split over these data axes."""
        return P((*axes, *self.others)) if axes or self.others else P()

    def all_gather(
        self, low: tuple[jax.Array, ...], axis: str
    ) -> tuple[jax.Array, ...]:
        def local(low: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            if self.mesh.shape[axis] == 1:
                return low
            return tuple(lax.all_gather(x, axis, axis=0, tiled=True) for x in low)

        left = self.order[: self.order.index(axis)]
        before, after = self._gathered((*left, axis)), self._gathered(left)
        return self.everywhere(local, before, after)(low)

    def unpack(self, full: tuple[jax.Array, ...], dtype: Any = None) -> PyTree:
        def local(full: tuple[jax.Array, ...]) -> PyTree:
            return self.tree(
                lambda leaf: self._unpack_leaf(leaf, full).astype(dtype or leaf.dtype)
            )

        return self.everywhere(local, (self._gathered(()),), self._param_specs)(full)

    def _per_worker(self, leaf: Leaf, x: jax.Array) -> jax.Array:
        """A model-local leaf as [n, elements of each worker]."""
        _, slot = self._slots[leaf]
        pad = self.workers * slot.size - x.size
        return jnp.pad(x.reshape(-1), (0, pad)).reshape(self.workers, slot.size)

    def shard(self, params: PyTree) -> PyTree:
        def local(params: PyTree) -> PyTree:
            mine = lax.axis_index(self.order)

            def share(leaf: Leaf, x: jax.Array) -> jax.Array:
                x = self._per_worker(leaf, x)[mine]
                return x.reshape(self._local_shape(leaf)).astype(leaf.master)

            return jax.tree.map(share, self.tree(lambda leaf: leaf), params)

        return self.everywhere(local, (self._param_specs,), self._shard_specs)(params)

    def gather_exact(self, shards: PyTree) -> PyTree:
        def local(shards: PyTree) -> PyTree:
            def whole(leaf: Leaf, x: jax.Array) -> jax.Array:
                x = x.reshape(-1).astype(leaf.dtype)
                x = lax.all_gather(x, self.order, axis=0, tiled=True)
                return x[: leaf.size].reshape(leaf.local)

            return jax.tree.map(whole, self.tree(lambda leaf: leaf), shards)

        return self.everywhere(local, (self._shard_specs,), self._param_specs)(shards)


# ----------------------------------------------------------------------------- leaf


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class LeafLayout(Layout):
    """Whole leaf shapes, each split over the workers along one dimension.

    The dimension is the first whose size on a device divides by n. A leaf that has none
    is replicated with its whole optimizer state if it has at most 65,536 elements (its
    gradient is all-reduced), else its largest dimension is padded with zeros, which
    `inner` never sees.
    """

    @functools.cached_property
    def _dims(self) -> dict[Leaf, tuple[int | None, int]]:
        """Leaf -> (dimension to split or None, its padded size on one device)."""
        n = self.workers
        dims: dict[Leaf, tuple[int | None, int]] = {}
        for leaf in self.leaves:
            fits = [d for d, s in enumerate(leaf.local) if s and s % n == 0]
            free = [d for d, s in enumerate(leaf.local) if s == leaf.shape[d]]
            if fits:
                dims[leaf] = (fits[0], leaf.local[fits[0]])
            elif leaf.size <= SMALL or not free:
                dims[leaf] = (None, 0)
            else:
                d = max(free, key=lambda d: leaf.local[d])
                dims[leaf] = (d, -(-leaf.local[d] // n) * n)
        return dims

    def _padding(self, leaf: Leaf) -> list[tuple[int, int]]:
        d, size = self._dims[leaf]
        pad = [(0, 0)] * len(leaf.shape)
        if d is not None:
            pad[d] = (0, size - leaf.local[d])
        return pad

    def _padded(self, leaf: Leaf) -> bool:
        return any(after for _, after in self._padding(leaf))

    def shard_shape(self, leaf: Leaf) -> tuple[int, ...]:
        after = (p[1] for p in self._padding(leaf))
        return tuple(s + p for s, p in zip(leaf.shape, after, strict=True))

    def shard_spec(self, leaf: Leaf) -> P:
        return self._split_spec(leaf, self.order)

    def _split_spec(self, leaf: Leaf, axes: tuple[str, ...]) -> P:
        """Of a leaf that is still split over these data axes."""
        d, _ = self._dims[leaf]
        if d is None or not axes:
            return leaf.spec
        spec = [*leaf.spec, *[None] * (len(leaf.shape) - len(leaf.spec))]
        spec[d] = (*_names(spec[d]), *axes)
        return P(*spec)

    @property
    def buffer_shardings(self) -> tuple[NamedSharding, ...]:
        return tuple(self.sharding(self.axis, *leaf.spec) for leaf in self.leaves)

    def _each(
        self, fn: Callable, ins: Callable[[Leaf], P], outs: Callable[[Leaf], P]
    ) -> Callable:
        """fn(leaf, block) over a tuple of arrays, one per leaf, manual everywhere."""

        def local(blocks: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            return tuple(map(fn, self.leaves, blocks))

        return self.everywhere(
            local, (tuple(map(ins, self.leaves)),), tuple(map(outs, self.leaves))
        )

    def _row(self, leaf: Leaf) -> P:
        return P(self.axis, *leaf.spec)

    def pack(self, grads: PyTree) -> tuple[jax.Array, ...]:
        def pad(leaf: Leaf, x: jax.Array) -> jax.Array:
            x = x.astype(leaf.wire)
            pads = [(0, 0), *self._padding(leaf)]
            return jnp.pad(x, pads) if self._padded(leaf) else x

        return self._each(pad, self._row, self._row)(tuple(jax.tree.leaves(grads)))

    def reduce_scatter(
        self, buffers: tuple[jax.Array, ...], axis: str
    ) -> tuple[jax.Array, ...]:
        last = axis == self.order[-1]  # until then every worker has sums of its own

        def reduce(leaf: Leaf, x: jax.Array) -> jax.Array:
            d, _ = self._dims[leaf]
            if self.mesh.shape[axis] == 1:
                x = x[0]  # the collective of one worker would be a copy
            elif d is None:
                x = lax.psum(x[0], axis)
            else:
                x = lax.psum_scatter(x[0], axis, scatter_dimension=d, tiled=True)
            return x if last else x[None]

        after = self.shard_spec if last else self._row
        return self._each(reduce, self._row, after)(buffers)

    def split(self, raw: tuple[jax.Array, ...]) -> PyTree:
        cast = [x.astype(f.master) for f, x in zip(self.leaves, raw, strict=True)]
        return self.treedef.unflatten(cast)

    def join(self, shards: PyTree) -> tuple[jax.Array, ...]:
        leaves = zip(self.leaves, jax.tree.leaves(shards), strict=True)
        return tuple(x.astype(leaf.wire) for leaf, x in leaves)

    def all_gather(
        self, low: tuple[jax.Array, ...], axis: str
    ) -> tuple[jax.Array, ...]:
        def gather(leaf: Leaf, x: jax.Array) -> jax.Array:
            d, _ = self._dims[leaf]
            if d is None or self.mesh.shape[axis] == 1:
                return x
            return lax.all_gather(x, axis, axis=d, tiled=True)

        left = self.order[: self.order.index(axis)]
        before = functools.partial(self._split_spec, axes=(*left, axis))
        after = functools.partial(self._split_spec, axes=left)
        return self._each(gather, before, after)(low)

    def unpack(self, full: tuple[jax.Array, ...]) -> PyTree:
        def strip(leaf: Leaf, x: jax.Array) -> jax.Array:
            return x[tuple(map(slice, leaf.local))].astype(leaf.dtype)

        spec = lambda leaf: leaf.spec  # noqa: E731
        return self.treedef.unflatten(self._each(strip, spec, spec)(full))

    def shard(self, params: PyTree) -> PyTree:
        def share(leaf: Leaf, x: jax.Array) -> jax.Array:
            d, size = self._dims[leaf]
            x = x.astype(leaf.master)
            if d is None:
                return x
            x, part = jnp.pad(x, self._padding(leaf)), size // self.workers
            start = lax.axis_index(self.order) * part
            return lax.dynamic_slice_in_dim(x, start, part, d)

        run = self._each(share, lambda leaf: leaf.spec, self.shard_spec)
        return self.treedef.unflatten(run(tuple(jax.tree.leaves(params))))

    def gather_exact(self, shards: PyTree) -> PyTree:
        leaves = zip(self.leaves, jax.tree.leaves(shards), strict=True)
        full = tuple(x.astype(leaf.dtype) for leaf, x in leaves)
        for axis in reversed(self.order):
            full = self.all_gather(full, axis)
        return self.unpack(full)

    def inner_view(self, tree: PyTree) -> PyTree:
        def strip(path: Sequence[Any], x: Any) -> Any:
            leaf = self.owner(path, jnp.shape(x))
            if leaf is None or not self._padded(leaf):
                return x
            return x[tuple(map(slice, leaf.shape))]

        return jax.tree_util.tree_map_with_path(strip, tree)

    def inner_store(self, tree: PyTree) -> PyTree:
        padded = {leaf.path: leaf for leaf in self.leaves if self._padded(leaf)}

        def pad(path: Sequence[Any], x: Any) -> Any:
            names = path_names(path)
            for start in range(len(names) + 1):
                leaf = padded.get(names[start:])
                if leaf is not None and leaf.shape == jnp.shape(x):
                    return jnp.pad(x, self._padding(leaf))
            return x

        return jax.tree_util.tree_map_with_path(pad, tree) if padded else tree


# ------------------------------------------------------------------------- building


def describe(
    params: PyTree,
    *,
    mesh: Mesh,
    axis: tuple[str, ...],
    comm_dtype: Any = None,
    param_specs: PyTree | None = None,
) -> tuple[Any, tuple[Leaf, ...]]:
    """The parameters' tree structure and a record of each leaf.

    Args:
      params: arrays or anything with shape and dtype.
      mesh: the devices; axes other than `axis` may split the parameters.
      axis: the data axes.
      comm_dtype: what communication carries; None means each parameter's own dtype.
      param_specs: a PartitionSpec per parameter (or a prefix of the tree) over the
        other axes; None reads it from the arrays, which Explicit axes allow.

    Raises:
      ValueError: a parameter is not floating point, a spec names a data axis or does
        not divide the shape, or specs are needed and missing.
    """
    others = [a for a in mesh.axis_names if a not in axis and mesh.shape[a] > 1]
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    flat, treedef = jax.tree_util.tree_flatten_with_path(params)
    if not flat:
        raise ValueError("params has no arrays: there is nothing to optimize.")
    if param_specs is not None:
        specs = jax.tree.leaves(
            jax.tree.broadcast(param_specs, params, is_leaf=_is_spec), is_leaf=_is_spec
        )
    else:
        hidden = [a for a in others if types[a] == jax.sharding.AxisType.Auto]
        if hidden:
            raise ValueError(
                f"mesh axis {hidden[0]!r} is Auto, so how it splits the parameters "
                "cannot be seen while tracing: pass param_specs."
            )
        specs = [_visible_spec(x) for _, x in flat]
    leaves = []
    for (path, x), spec in zip(flat, specs, strict=True):
        names = path_names(path)
        name = "/".join(names) or "parameter"
        if not hasattr(x, "dtype"):
            raise ValueError(f"{name} is {x!r}: params must be a tree of arrays.")
        shape, dtype = tuple(x.shape), np.dtype(x.dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"{name} is {dtype}: only floating-point parameters can be trained, "
                "keep the others outside of params."
            )
        used = P() if spec is None else spec
        used = P(*used[: max((i + 1 for i, e in enumerate(used) if e), default=0)])
        for a in (a for entry in used for a in _names(entry)):
            if a in axis or a not in mesh.shape:
                raise ValueError(
                    f"the spec of {name} is {used}, but {a!r} is "
                    + ("the data axis, over which parameters are replicated."
                       if a in axis else f"no axis of the mesh {mesh.axis_names}.")
                )  # fmt: skip
        parts = [math.prod(mesh.shape[a] for a in _names(e)) for e in used]
        parts += [1] * (len(shape) - len(parts))
        if len(parts) > len(shape) or any(
            s % k for s, k in zip(shape, parts, strict=True)
        ):
            raise ValueError(
                f"the spec {used} does not divide {name} of shape {shape}: choose "
                "another dimension or pad the parameter."
            )
        local = tuple(s // k for s, k in zip(shape, parts, strict=True))
        wire = dtype if comm_dtype is None else np.dtype(comm_dtype)
        leaves.append(Leaf(names, shape, dtype, wire, used, local))
    return treedef, tuple(leaves)


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, P)


def _visible_spec(x: Any) -> P | None:
    """The spec that an Explicit array's type shows."""
    sharding = getattr(x, "sharding", None)
    if isinstance(x, jax.Array):
        sharding = jax.typeof(x).sharding
    return getattr(sharding, "spec", None)


def packed_layout(
    treedef: Any, leaves: tuple[Leaf, ...], mesh: Mesh, axis: tuple[str, ...]
) -> PackedLayout:
    workers = math.prod(mesh.shape[a] for a in axis)
    by_dtype: dict[np.dtype, list[int]] = {}
    for i, leaf in enumerate(leaves):
        by_dtype.setdefault(leaf.wire, []).append(i)
    groups = tuple(_best_group(leaves, m, workers) for m in by_dtype.values())
    return PackedLayout(mesh, axis, treedef, leaves, groups)


def leaf_layout(
    treedef: Any, leaves: tuple[Leaf, ...], mesh: Mesh, axis: tuple[str, ...]
) -> LeafLayout:
    return LeafLayout(mesh, axis, treedef, leaves)
