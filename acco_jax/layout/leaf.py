"""Whole leaf shapes, each split along one dimension."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from acco_jax.layout.base import Layout
from acco_jax.layout.leaves import Leaf, PyTree, axes_in, path_names

SMALL = 1 << 16  # elements: in the leaf layout, what cannot be split is replicated


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
        spec[d] = (*axes_in(spec[d]), *axes)
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


def leaf_layout(
    treedef: Any, leaves: tuple[Leaf, ...], mesh: Mesh, axis: tuple[str, ...]
) -> LeafLayout:
    return LeafLayout(mesh, axis, treedef, leaves)
