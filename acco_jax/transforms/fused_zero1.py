"""ZeRO stage 1 that reduces gradients while the backward pass still runs.

    theta(t+1) = Opt(theta(t), G(t) / W(t)),  g(t) computed at theta(t)

The numbers are those of `acco_jax.zero1`. In the backward pass of a step's last
microbatch each layer's gradient is added to that of the earlier microbatches and
reduce-scattered at once, beside the backward pass of the layers before it: the best
that a step without delay can do for its gradients. The all-gather stays exposed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from acco_jax.gradients import Accumulator, Sums
from acco_jax.layout import (
    ROW_MULTIPLE,
    SMALL,
    WIDTHS,
    Layout,
    Leaf,
    LeafLayout,
    Pending,
)
from acco_jax.transforms.base import Method, Options
from acco_jax.transforms.zero1 import synchronous
from acco_jax.wire import Wire, Wires

PyTree = Any
LAYERS = 256  # a longer leading dimension is not taken for one over layers


@jax.tree_util.register_static
class LayeredLayout(LeafLayout):
    """A LeafLayout that leaves a leading dimension, perhaps over layers, whole.

    Split is the first other dimension whose size divides by n, else the largest one,
    padded; a leaf is replicated only if it has no dimension that other axes leave
    whole. All leaves of a dtype are gathered in one buffer.
    """

    @functools.cached_property
    def _dims(self) -> dict[Leaf, tuple[int | None, int]]:
        return {leaf: self._dim(leaf) for leaf in self.leaves}

    def _dim(self, leaf: Leaf) -> tuple[int | None, int]:
        n, sizes = self.workers, leaf.local
        free = [d for d, s in enumerate(sizes) if s == leaf.shape[d]]
        if len(free) > 1 and free[0] == 0 and sizes[0] <= LAYERS:
            free = free[1:]
        if not free:
            return None, 0
        d = next(
            (d for d in free if sizes[d] and sizes[d] % n == 0),
            max(free, key=lambda d: sizes[d]),
        )
        return d, -(-sizes[d] // n) * n

    def part(self, leaf: Leaf) -> tuple[int, ...]:
        """Shape on one device of a worker's share."""
        d, size = self._dims[leaf]
        shape = list(leaf.local)
        if d is not None:
            shape[d] = size // self.workers
        return tuple(shape)

    def _together(self, exact: bool) -> tuple[list[list[int]], list[int]]:
        """Numbers of the leaves of each buffer, and of the replicated leaves."""
        groups: dict[Any, list[int]] = {}
        for i, leaf in enumerate(self.leaves):
            if self._dims[leaf][0] is not None:
                groups.setdefault(leaf.dtype if exact else leaf.wire, []).append(i)
        rest = [i for i, f in enumerate(self.leaves) if self._dims[f][0] is None]
        return list(groups.values()), rest

    def _specs_over(self, axes: tuple[str, ...], exact: bool) -> tuple[P, ...]:
        """Of buffers that are still split over these data axes."""
        groups, rest = self._together(exact)
        axes = (*axes, *self.others)
        return (*[P(axes or None)] * len(groups), *[self.leaves[i].spec for i in rest])

    def _join(self, shards: PyTree, exact: bool) -> tuple[jax.Array, ...]:
        groups, rest = self._together(exact)

        def local(shards: PyTree) -> tuple[jax.Array, ...]:
            cast = [
                x.astype(leaf.dtype if exact else leaf.wire)
                for leaf, x in zip(self.leaves, jax.tree.leaves(shards), strict=True)
            ]
            buffers = [_buffer([cast[i].reshape(1, -1) for i in g]) for g in groups]
            return (*buffers, *[cast[i] for i in rest])

        specs = self._specs_over(self.order, exact)
        return self.everywhere(local, (self._shard_specs,), specs)(shards)

    def _gather(
        self, low: tuple[jax.Array, ...], axis: str, exact: bool
    ) -> tuple[jax.Array, ...]:
        count = len(self._together(exact)[0])

        def local(low: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            full = [lax.all_gather(x, axis, tiled=True) for x in low[:count]]
            return (*full, *low[count:])

        left = self.order[: self.order.index(axis)]
        before, after = (self._specs_over(a, exact) for a in ((*left, axis), left))
        return self.everywhere(local, (before,), after)(low)

    def _unpack(self, full: tuple[jax.Array, ...], exact: bool) -> PyTree:
        groups, rest = self._together(exact)

        def local(full: tuple[jax.Array, ...]) -> PyTree:
            leaves = dict(zip(rest, full[len(groups) :], strict=True))
            for group, buffer in zip(groups, full, strict=False):
                shapes = [self.part(self.leaves[i]) for i in group]
                parts = _cut(buffer, self.workers, shapes)
                for i, x in zip(group, parts, strict=True):
                    d, size = self._dims[self.leaves[i]]
                    shape = list(self.leaves[i].local)
                    assert d is not None
                    shape[d] = size
                    x = jnp.moveaxis(x, 0, d).reshape(shape)
                    leaves[i] = x[tuple(map(slice, self.leaves[i].local))]
            return self.treedef.unflatten(
                [leaves[i].astype(leaf.dtype) for i, leaf in enumerate(self.leaves)]
            )

        specs = self._specs_over((), exact)
        return self.everywhere(local, (specs,), self._param_specs)(full)

    def join(self, shards: PyTree) -> tuple[jax.Array, ...]:
        return self._join(shards, exact=False)

    def all_gather(
        self, low: tuple[jax.Array, ...], axis: str
    ) -> tuple[jax.Array, ...]:
        return self._gather(low, axis, exact=False)

    def unpack(self, full: tuple[jax.Array, ...]) -> PyTree:
        return self._unpack(full, exact=False)

    def gather_exact(self, shards: PyTree) -> PyTree:
        full = self._join(shards, exact=True)
        for axis in reversed(self.order):
            full = self._gather(full, axis, exact=True)
        return self._unpack(full, exact=True)


def _buffer(blocks: list[jax.Array]) -> jax.Array:
    """(n, elements) arrays side by side, padded: [n * rows, width]."""
    elements = sum(x.shape[1] for x in blocks)
    padding = lambda width: -elements % (width * ROW_MULTIPLE)  # noqa: E731
    fits = (w for w in WIDTHS if padding(w) <= elements // 32)
    width = next(fits, WIDTHS[-1])
    pad = padding(width)
    zeros = jnp.zeros((blocks[0].shape[0], pad), blocks[0].dtype)
    return jnp.concatenate([*blocks, zeros], 1).reshape(-1, width)


def _cut(
    buffer: jax.Array, n: int, shapes: Sequence[tuple[int, ...]]
) -> list[jax.Array]:
    """The inverse of `_buffer`: arrays (n, *shape)."""
    rows, start, blocks = buffer.reshape(n, -1), 0, []
    for shape in shapes:
        end = start + math.prod(shape)
        blocks.append(rows[:, start:end].reshape(n, *shape))
        start = end
    return blocks


def fused_zero1(
    inner: optax.GradientTransformation,
    *,
    mesh: Mesh,
    axis_name: str | tuple[str, ...] = "data",
    comm_dtype: Any = None,
    accumulate_dtype: Any = None,
    layout: str = "auto",
    param_specs: PyTree | None = None,
    pipelined: bool | None = None,
) -> Method:
    """`acco_jax.zero1` with its reduce-scatter inside the backward pass.

    The strongest synchronous rival of `acco_jax.acco`, with the same arguments, shapes
    and errors. Stacked parameters that the loss scans over are reduced layer by layer,
    others leaf by leaf. Its shards have whole leaf shapes: layout may not be 'packed'.

    Args:
      inner: the optimizer.
      mesh: the devices.
      axis_name: the data axis or axes.
      comm_dtype: what communication carries.
      accumulate_dtype: of the sums over microbatches.
      layout: 'auto' or 'leaf', which are the same.
      param_specs: how other axes of the mesh split the parameters.
      pipelined: whether a layer's gradients are reduced beside the backward pass of
        the layer before it, not at the end of its own; None: unless the devices are
        CPUs, whose compiler puts nothing beside a collective. A scan over L layers then
        reduces L + 1 times: the first time there is nothing yet.

    References:
      https://arxiv.org/abs/2305.06942
    """
    if layout not in ("auto", "leaf"):
        raise ValueError(
            f"layout is {layout!r}, but fused_zero1 has a layout of its own, of whole "
            "leaves: choose 'auto' or 'leaf'."
        )
    if pipelined is None:
        pipelined = mesh.devices.flat[0].platform != "cpu"
    options = Options(
        mesh, axis_name, comm_dtype, accumulate_dtype, LayeredLayout, param_specs
    )
    return synchronous(
        inner,
        options,
        accumulate=functools.partial(_accumulate, pipelined),
        wires=Wires((_Reduced(),)),
    )


class _Reduced(Wire):
    """The backward pass has reduced its gradients."""

    def reduce(self, layout: Layout, buffers: Any, axis: str) -> Any:
        return buffers


def _accumulate(
    pipelined: bool,
    gradients: Accumulator,
    layout: LayeredLayout,
    params: PyTree,
    batch: PyTree,
    counts: jax.Array | None,
    rng: Any,
) -> tuple[Pending, Sums]:
    """Gradients of all microbatches, reduced in the backward pass of the last."""
    sums = None
    if gradients.microbatches > 1:
        sums = gradients.zeros(params, batch, rng)
        before = lambda count: (0, count - 1)  # noqa: E731
        sums = gradients.add(sums, params, batch, rng, counts, before)
    take = functools.partial(_reduced, pipelined, gradients, layout)
    dims = (layout._dims[leaf][0] for leaf in layout.leaves)
    specs = tuple(P() if d is None else P(*[None] * d, layout.order) for d in dims)
    raw, sums = gradients.last(sums, params, batch, rng, counts, take, specs)
    return Pending(raw, sums.weight.astype(layout.scalar)), sums


def _reduced(
    pipelined: bool,
    gradients: Accumulator,
    layout: LayeredLayout,
    loss_of: Callable[[PyTree], Any],
    params: PyTree,
    earlier: PyTree | None,
    valid: jax.Array | None,
) -> tuple[Any, tuple[jax.Array, ...]]:
    """(value, this worker's shards of the reduced gradients), on each worker.

    Args:
      pipelined: see `fused_zero1`.
      gradients: what is accumulated, and in which dtype.
      layout: of the shards.
      loss_of: params -> (loss, the rest), of this worker's last microbatch.
      params: whole.
      earlier: sums of this worker's other gradients, None if there are none.
      valid: [] whether the microbatch counts, None: it does.
    """
    # imports jax.extend, which takes its time
    from acco_jax.layerwise import Reduction, reduced_gradients

    n, whole = layout.workers, jax.tree.leaves(params)
    held = [None] * len(whole) if earlier is None else jax.tree.leaves(earlier)

    def empty(leaf: Leaf, p: jax.Array) -> jax.Array:
        d, size = layout._dims[leaf]
        if d is not None:  # keeps how other axes split the parameter
            p = jnp.pad(p, layout._padding(leaf))
            p = lax.slice_in_dim(p, 0, size // n, axis=d)
        return jnp.zeros_like(p, leaf.wire)

    wire = _Wire(layout, gradients.dtype)
    dims = [layout._dims[leaf][0] for leaf in layout.leaves]
    reduction = Reduction(
        wire.pack,
        wire.scatter,
        slices=[d is not None and d > 0 for d in dims],
        small=[leaf.size <= SMALL for leaf in layout.leaves],
        pipelined=pipelined,
    )
    shards = list(map(empty, layout.leaves, whole))
    out, raw = reduced_gradients(loss_of, params, held, shards, valid, reduction)
    return out, tuple(raw)


class _Wire(NamedTuple):
    """Local gradients of some leaves, whole or one layer's, to buffers and to shards.

    One buffer for all that travels in a dtype: one collective. Where another axis of
    the mesh may split leaves, each is a buffer of its own: packing would gather them.
    """

    layout: LayeredLayout
    dtype: Any  # of the accumulator

    def pack(
        self,
        leaves: Sequence[int],
        grads: list[jax.Array],
        earlier: list[jax.Array | None],
        valid: jax.Array | None,
    ) -> list[jax.Array]:
        """Adds what came earlier as zero1's loop does; no communication."""
        blocks = {}
        for i, g, e in zip(leaves, grads, earlier, strict=True):
            leaf = self.layout.leaves[i]
            g = g.astype(leaf.dtype).astype(self.dtype or leaf.dtype)
            if valid is not None:
                g = jnp.where(valid, g, jnp.zeros_like(g))
            g = (g if e is None else e + g).astype(leaf.wire)
            padding = self.layout._padding(leaf)
            blocks[i] = g if g.ndim == 0 else jnp.pad(g, padding[-g.ndim :])
        packed, alone = self._groups(leaves)
        buffers = [_buffer([self._rows(i, blocks[i]) for i in g]) for g in packed]
        return buffers + [blocks[i] for i in alone]

    def _rows(self, i: int, x: jax.Array) -> jax.Array:
        """(n, elements): what each worker keeps of a leaf or of a slice of it."""
        leaf = self.layout.leaves[i]
        d, part = self.layout._dims[leaf][0], self.layout.part(leaf)
        assert d is not None
        sliced = len(part) - x.ndim
        d, part = d - sliced, part[sliced:]
        x = x.reshape(*part[:d], self.layout.workers, *part[d:])
        return jnp.moveaxis(x, d, 0).reshape(self.layout.workers, -1)

    def scatter(
        self, leaves: Sequence[int], buffers: list[jax.Array], sliced: bool
    ) -> list[jax.Array]:
        """Sums over the workers; each keeps its part. The collective, then views."""
        packed, alone = self._groups(leaves)
        shards: dict[int, jax.Array] = {}
        for group, buffer in zip(packed, buffers, strict=False):
            raw = self._scatter(buffer, 0)
            shapes = [self.layout.part(self.layout.leaves[i])[sliced:] for i in group]
            parts = _cut(raw, 1, shapes)
            shards |= {i: x[0] for i, x in zip(group, parts, strict=True)}
        for i, buffer in zip(alone, buffers[len(packed) :], strict=True):
            leaf = self.layout.leaves[i]
            d = self.layout._dims[leaf][0]
            over = functools.partial(
                self._scatter, dim=None if d is None else d - sliced
            )
            if self.layout.others:  # JAX cannot scatter an array with Explicit axes
                spec = P(*leaf.spec[sliced:])
                names = set(self.layout.others)
                over = jax.shard_map(
                    over,
                    in_specs=spec,
                    out_specs=spec,
                    axis_names=names,
                    check_vma=False,
                )
            shards[i] = over(buffer)
        return [shards[i] for i in leaves]

    def _scatter(self, x: jax.Array, dim: int | None) -> jax.Array:
        for axis in self.layout.order:
            if dim is None:
                x = lax.psum(x, axis)
            else:
                x = lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
        return x

    def _groups(self, leaves: Sequence[int]) -> tuple[list[list[int]], list[int]]:
        """The leaves of each buffer, and those that are not packed."""
        groups: dict[Any, list[int]] = {}
        alone = []
        for i in leaves:
            leaf = self.layout.leaves[i]
            if self.layout.others or self.layout._dims[leaf][0] is None:
                alone.append(i)
            else:
                groups.setdefault(leaf.wire, []).append(i)
        return list(groups.values()), alone
