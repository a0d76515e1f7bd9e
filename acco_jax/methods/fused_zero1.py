"""ZeRO stage 1 that reduces gradients while the backward pass still runs.

    theta(t+1) = Opt(theta(t), G(t) / W(t)),  g(t) computed at theta(t)

The numbers are those of `acco_jax.zero1`. In the backward pass of a step's last
microbatch each layer's gradient is added to that of the earlier microbatches and
reduce-scattered at once, beside the backward pass of the layers before it. A step
without delay can do no better for its gradients. The all-gather stays exposed.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from acco_jax.core.buffers import Arrays, Group, InFlight, make_group
from acco_jax.core.codec import Codec
from acco_jax.core.exchange import Exchange
from acco_jax.core.gloo import reduce_scatter
from acco_jax.core.gradients import Accumulator, Sums
from acco_jax.core.groups import platform_of
from acco_jax.core.half_round import Inputs
from acco_jax.core.layout import Layout
from acco_jax.core.leaves import Leaf, PyTree
from acco_jax.core.parts import SMALL, Parts, beyond_layers
from acco_jax.core.select import masked
from acco_jax.methods.layerwise import Reduction, reduced_gradients
from acco_jax.methods.method import CommonOptions
from acco_jax.methods.sharded import Rest, ShardedMethod, ShardedRound
from acco_jax.methods.zero1 import synchronous


@jax.tree_util.register_static
class LayeredLayout(Layout):
    """A layout that leaves axis 0 of a leaf whole where it may be over layers."""

    @staticmethod
    def parts_of(leaf: Leaf, n: int) -> Parts:
        return beyond_layers(leaf, n)


def _padded(leaf: Leaf, x: jax.Array) -> jax.Array:
    """Return a leaf, or a slice, padded to the total size of the workers' parts."""
    if not leaf.dims:
        return x
    return jnp.pad(x, leaf.padding[-x.ndim :])


@dataclasses.dataclass(frozen=True)
class FusedRound(ShardedRound):
    """A half-round whose computation ends with its gradients reduced."""

    pipelined: bool = False

    drops = False

    def compute(
        self,
        k: int,
        parts: int,
        progress: PyTree,
        params: PyTree,
        rest: Rest,
        inputs: Inputs,
    ) -> tuple[InFlight, Sums]:
        return progress if k else _accumulate(self.pipelined, rest, params, inputs)

    def close(
        self, progress: PyTree, rest: Rest, inputs: Inputs
    ) -> tuple[InFlight, Sums]:
        return progress


class _Reduced(Codec):
    """The codec of gradients that the backward pass has reduced already."""

    def reduce(self, layout: Layout, buffers: Arrays, axis: str) -> Arrays:
        return buffers

    def decode(
        self, layout: Layout, reduced: Arrays, whole: Arrays, valid: jax.Array
    ) -> PyTree:
        each = zip(layout.leaves, masked(valid, reduced), strict=True)
        return layout.treedef.unflatten([x.astype(leaf.master) for leaf, x in each])


def fused_zero1(
    inner: optax.GradientTransformation,
    *,
    mesh: Mesh,
    pipelined: bool | None = None,
    **options: Unpack[CommonOptions],
) -> ShardedMethod:
    """Build `acco_jax.zero1` with its reduce-scatter inside the backward pass.

    The strongest synchronous rival of `acco_jax.acco`. Stacked parameters that the loss
    scans over are reduced layer by layer, others leaf by leaf. (Give this package's
    models `scan_layers=True`; the runner does.) A last microbatch whose
    weight `loss_fn` finds to be 0 counts for nothing, but its gradients must be finite:
    they are reduced where they are computed. For the same reason a train step rejects
    `drop_nonfinite`. A plain `update`, which is given gradients, is that of zero1.

    Args:
      inner: the optimizer.
      mesh: the devices.
      pipelined: whether a layer's gradients are reduced beside the backward pass of
        the layer before it, not at the end of its own; None: unless the devices are
        CPUs, whose compiler overlaps nothing with a collective. A scan over L layers
        then reduces L + 1 times: the first time there is nothing yet.
      **options: see `acco_jax.methods.method.CommonOptions`.

    References:
      https://arxiv.org/abs/2305.06942
    """

    def round(exchange: Exchange, overlaps: bool) -> FusedRound:
        beside = platform_of(mesh) != "cpu" if pipelined is None else pipelined
        return FusedRound(
            dataclasses.replace(exchange, codec=_Reduced()), overlaps, beside
        )

    return synchronous(
        inner, mesh, options, layout=LayeredLayout, round=round, known=CommonOptions
    )


def _accumulate(
    pipelined: bool, rest: Rest, params: PyTree, inputs: Inputs
) -> tuple[InFlight, Sums]:
    """Return the gradients of all microbatches, reduced in the last backward pass."""
    gradients, batch, counts, rng = inputs
    (layout, states), sums = rest, None
    if gradients.microbatches > 1:
        before = lambda count: (0, count - 1)  # noqa: E731
        sums = gradients.add(None, params, batch, rng, counts, before, states)
    take = functools.partial(_reduced, pipelined, gradients, layout)
    dims = map(_dim, layout.leaves)
    specs = tuple(
        P() if d is None else P(*[None] * d, layout.reduce_order) for d in dims
    )
    args = sums, params, batch, rng, counts, take, specs, states
    shards, sums = gradients.last(*args)
    weight, loss = (x.astype(layout.scalar) for x in (sums.weight, sums.loss))
    in_flight = InFlight(shards, (), weight, loss, sums.model_state)
    return in_flight, sums._replace(model_state=None)


def _dim(leaf: Leaf) -> int | None:
    """Return the dimension that is split."""
    return leaf.dims[0] if leaf.dims else None


def _reduced(
    pipelined: bool,
    gradients: Accumulator,
    layout: Layout,
    loss_of: Callable[[PyTree], Any],
    params: PyTree,
    earlier: PyTree | None,
    valid: jax.Array | None,
) -> tuple[Any, tuple[jax.Array, ...]]:
    """Return (value, this worker's shards of the reduced gradients), on each worker.

    `loss_of` and what follows it is as in the `take` of `Accumulator.last`.
    """
    whole = jax.tree.leaves(params)
    before = [None] * len(whole) if earlier is None else jax.tree.leaves(earlier)

    def empty(leaf: Leaf, p: jax.Array) -> jax.Array:
        d = _dim(leaf)
        if d is not None:  # keeps how other axes split the parameter
            p = lax.slice_in_dim(_padded(leaf, p), 0, leaf.part[d], axis=d)
        return jnp.zeros_like(p, leaf.comm_dtype)

    network = _Scatter(layout, gradients.dtype)
    dims = list(map(_dim, layout.leaves))
    reduction = Reduction(
        network.pack,
        network.scatter,
        slices=[d is not None and d > 0 for d in dims],
        small=[leaf.size <= SMALL for leaf in layout.leaves],
        pipelined=pipelined,
    )
    shards = list(map(empty, layout.leaves, whole))

    def counted(params: PyTree) -> Any:
        """Return what `loss_of` does; without weight the loss has no gradient."""
        loss, rest = loss_of(params)
        return jnp.where(rest[0] != 0, loss, 0), rest

    out, reduced = reduced_gradients(counted, params, before, shards, valid, reduction)
    return out, tuple(reduced)


class _Scatter(NamedTuple):
    """The packing and reduction of local gradients, of whole leaves or one layer's.

    All leaves of one communication dtype share a buffer, and so one collective. Where
    another axis of the mesh may split leaves, each leaf is a buffer of its own: packing
    would gather them.
    """

    layout: Layout
    dtype: Any  # of the accumulator

    def pack(
        self,
        leaves: Sequence[int],
        grads: list[jax.Array],
        earlier: list[jax.Array | None],
        valid: jax.Array | None,
    ) -> list[jax.Array]:
        """Add earlier gradients as zero1's loop does, without communication."""
        blocks = {}
        for i, g, e in zip(leaves, grads, earlier, strict=True):
            leaf = self.layout.leaves[i]
            g = g.astype(leaf.dtype).astype(self.dtype or leaf.dtype)
            if valid is not None:
                g = jnp.where(valid, g, jnp.zeros_like(g))
            g = (g if e is None else e + g).astype(leaf.comm_dtype)
            blocks[i] = _padded(leaf, g)
        sliced = any(blocks[i].ndim < len(self.layout.leaves[i].local) for i in leaves)
        groups, alone = self._groups(leaves, sliced)
        buffers = [
            group.lay([self._cut(i, blocks[i], sliced) for i in group.leaves])
            for group in groups
        ]
        return buffers + [blocks[i] for i in alone]

    def _cut(self, i: int, x: jax.Array, sliced: bool) -> jax.Array:
        """Return what each worker keeps of a leaf or of a slice of it: (n, *part)."""
        d, part = _dim(self.layout.leaves[i]), self.layout.leaves[i].part[sliced:]
        assert d is not None
        d -= sliced
        x = x.reshape(*part[:d], self.layout.workers, *part[d:])
        return jnp.moveaxis(x, d, 0)

    def scatter(
        self, leaves: Sequence[int], buffers: list[jax.Array], sliced: bool
    ) -> list[jax.Array]:
        """Sum over the workers; each keeps its part. The collective, then views."""
        groups, alone = self._groups(leaves, sliced)
        shards: dict[int, jax.Array] = {}
        for group, buffer in zip(groups, buffers, strict=False):
            parts = group.take(self._scatter(buffer, 0))
            shards |= {i: x[0] for i, x in zip(group.leaves, parts, strict=True)}
        for i, buffer in zip(alone, buffers[len(groups) :], strict=True):
            leaf = self.layout.leaves[i]
            d = _dim(leaf)
            over = functools.partial(
                self._scatter, dim=None if d is None else d - sliced
            )
            if self.layout.model_axes:  # JAX cannot scatter an array with Explicit axes
                spec = P(*leaf.spec[sliced:])
                names = set(self.layout.model_axes)
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
        for axis in self.layout.reduce_order:
            x = lax.psum(x, axis) if dim is None else reduce_scatter(x, axis, dim)
        return x

    def _groups(
        self, leaves: Sequence[int], sliced: bool
    ) -> tuple[list[Group], list[int]]:
        """Return the leaves of each buffer, and the leaves that are not packed."""
        parts: dict[Any, dict[int, tuple[int, ...]]] = {}
        alone = []
        for i in leaves:
            leaf = self.layout.leaves[i]
            if self.layout.model_axes or _dim(leaf) is None:
                alone.append(i)
            else:
                parts.setdefault(leaf.comm_dtype, {})[i] = leaf.part[sliced:]
        return [make_group(dtype, part) for dtype, part in parts.items()], alone
