"""What every layout can do; see `acco_jax.layout`."""

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
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from acco_jax.layout.leaves import Leaf, PyTree, path_names


class Pending(NamedTuple):
    """Local gradients that have not crossed the network yet."""

    buffers: tuple[jax.Array, ...]  # every worker's own sums, in the wire's dtype
    weight: jax.Array  # (n,) their weights


class LeftOut(NamedTuple):
    """What rounding left out of the gradients sent so far (see `acco_jax.wire`)."""

    buffers: tuple[jax.Array, ...]  # every worker's own, in the wire's dtype


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
        return self._mirrored(path, shape, self.shard_shape)

    def _mirrored(
        self,
        path: Sequence[Any],
        shape: tuple[int, ...],
        shape_of: Callable[[Leaf], tuple[int, ...]],
    ) -> Leaf | None:
        names = path_names(path)
        for start in range(len(names) + 1):
            leaf = self._by_path.get(names[start:])
            if leaf is not None and shape_of(leaf) == tuple(shape):
                return leaf
        return None

    def row_shardings(self, rows: PyTree) -> PyTree:
        """NamedShardings of rows (n, ...); those of a parameter are split as it is."""

        def shape_of(leaf: Leaf) -> tuple[int, ...]:
            return self.workers, *leaf.shape

        def of(path: Sequence[Any], x: Any) -> NamedSharding:
            leaf = self._mirrored(path, x.shape, shape_of)
            return self.sharding(self.axis, *(leaf.spec if leaf else ()))

        return jax.tree_util.tree_map_with_path(of, rows)

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
