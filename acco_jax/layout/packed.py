"""One buffer per dtype: worker i's block of it holds 1/n of every leaf."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from acco_jax.layout.base import Layout
from acco_jax.layout.leaves import Leaf, PyTree

# A packed buffer is [rows, width]. TPUs fall back to a synchronous all-reduce for
# one-dimensional buffers and for row counts that do not fill a bf16 tile of 16 rows;
# wide rows are the cheapest to pack, narrow ones waste the least.
WIDTHS = (1024, 512, 256, 128)
ROW_MULTIPLE = 16
MAX_PADDING = 0.01  # of a buffer: the widest rows that stay below it are taken
MAX_LEAF_PADDING = 1 / 256  # of a leaf with rows of its own; others share a block


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


def packed_layout(
    treedef: Any, leaves: tuple[Leaf, ...], mesh: Mesh, axis: tuple[str, ...]
) -> PackedLayout:
    workers = math.prod(mesh.shape[a] for a in axis)
    by_dtype: dict[np.dtype, list[int]] = {}
    for i, leaf in enumerate(leaves):
        by_dtype.setdefault(leaf.wire, []).append(i)
    groups = tuple(_best_group(leaves, m, workers) for m in by_dtype.values())
    return PackedLayout(mesh, axis, treedef, leaves, groups)
