"""What a layout has to know of each parameter, and how it is cut into parts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What is known of one parameter before any array exists."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype  # the parameter's
    wire: np.dtype  # what communication carries
    spec: P  # over the mesh's other axes; the data axes never appear
    local: tuple[int, ...]  # shape on one device, split over the other axes alone
    # Into how many parts the workers cut each dimension of `local`, n in all; None:
    # every worker has the leaf whole.
    parts: tuple[int, ...] | None = None

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
        return tuple(a for entry in self.spec for a in axes_in(entry))

    @property
    def master(self) -> np.dtype:
        return np.dtype(jnp.promote_types(self.dtype, jnp.float32))

    @property
    def whole(self) -> bool:
        """Whether every worker has all of it."""
        return self.parts is None

    @property
    def part(self) -> tuple[int, ...]:
        """Shape of one worker's part, on one device."""
        return part_of(self.local, self.parts or (1,) * len(self.local))

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions that the workers split."""
        return tuple(d for d, k in enumerate(self.parts or ()) if k > 1)

    @property
    def padding(self) -> list[tuple[int, int]]:
        """What its parts hold beyond `local`, as for jnp.pad."""
        parts = self.parts or (1,) * len(self.local)
        return [(0, -s % k) for s, k in zip(self.local, parts, strict=True)]

    @property
    def padded(self) -> bool:
        """Whether its parts hold more elements than it has."""
        return any(after for _, after in self.padding)

    @property
    def in_blocks(self) -> bool:
        """Whether shards are stored as blocks (n, *part): no spec could split them so.

        Those of other leaves have the leaf's own shape, one dimension of it padded.
        """
        return len(self.dims) > 1 or (
            self.padded and self.local[self.dims[0]] != self.shape[self.dims[0]]
        )

    def on_wire(self, x: jax.Array) -> jax.Array:
        """x, in the master dtype, as the wire and the parameter can hold it.

        A cast there and back would not do: compilers take the pair away.
        """
        x = x.astype(self.master)
        for dtype in (self.wire, self.dtype):
            info = jnp.finfo(dtype)
            if info.nmant < jnp.finfo(self.master).nmant:
                x = lax.reduce_precision(x, info.nexp, info.nmant)
        return x

    def cut(self, x: jax.Array) -> jax.Array:
        """Of shape `local` -> (n, *part)."""
        assert self.parts is not None
        return _cut(x, self.parts, (1,) * x.ndim)

    def assemble(self, blocks: jax.Array) -> jax.Array:
        """(n, *part) -> of shape `local`."""
        assert self.parts is not None
        return _assemble(blocks, self.parts, (1,) * len(self.local), self.local)

    def view(self, x: jax.Array) -> jax.Array:
        """A stored shard, as one array over the mesh -> of the leaf's own shape."""
        if self.whole or not (self.padded or self.in_blocks):
            return x
        if not self.in_blocks:
            return x[tuple(map(slice, self.shape))]
        assert self.parts is not None
        return _assemble(x, self.parts, self._split, self.local)

    def store(self, x: jax.Array) -> jax.Array:
        """The inverse of `view`; padding is zeros."""
        if self.whole or not (self.padded or self.in_blocks):
            return x
        if not self.in_blocks:
            return jnp.pad(x, list(_paddings(self.shape, self.stored)))
        assert self.parts is not None
        return _cut(x, self.parts, self._split)

    @property
    def _split(self) -> tuple[int, ...]:
        """How often the mesh's other axes split each dimension."""
        return tuple(
            s // k if k else 1 for s, k in zip(self.shape, self.local, strict=True)
        )

    @property
    def stored(self) -> tuple[int, ...]:
        """Global shape of its shards: of the master copy and of moments."""
        if self.parts is None:
            return self.shape
        whole = zip(self.part, self._split, strict=True)
        if self.in_blocks:
            return math.prod(self.parts), *(p * k for p, k in whole)
        return tuple(p * k * j for (p, k), j in zip(whole, self.parts, strict=True))

    def stored_spec(self, axes: tuple[str, ...]) -> P:
        """How shards are split over the data axes, in the order of the parts."""
        if self.parts is None:
            return self.spec
        if self.in_blocks:
            return P(axes, *self.spec)
        spec = [*self.spec, *[None] * (len(self.shape) - len(self.spec))]
        for d in self.dims:
            spec[d] = (*axes_in(spec[d]), *axes)
        return P(*spec)


def part_of(shape: Sequence[int], parts: Sequence[int]) -> tuple[int, ...]:
    return tuple(-(-s // k) for s, k in zip(shape, parts, strict=True))


def _paddings(shape: Sequence[int], to: Sequence[int]) -> Iterator[tuple[int, int]]:
    return ((0, b - a) for a, b in zip(shape, to, strict=True))


def _cut(x: jax.Array, parts: Sequence[int], split: Sequence[int]) -> jax.Array:
    """The inverse of `_assemble`: -> (n, *(split * part))."""
    local = [s // k for s, k in zip(x.shape, split, strict=True)]
    part = part_of(local, parts)
    padded = [p * j for p, j in zip(part, parts, strict=True)]
    if padded != local:
        x = x.reshape(_woven(split, local))
        x = jnp.pad(x, list(_paddings(x.shape, _woven(split, padded))))
    x = x.reshape(_woven(split, parts, part))
    rank = x.ndim // 3
    grid = [3 * d + 1 for d in range(rank)]
    rest = [a for d in range(rank) for a in (3 * d, 3 * d + 2)]
    x = _transposed(x, grid + rest)
    held = (k * p for k, p in zip(split, part, strict=True))
    return x.reshape(math.prod(parts), *held)


def _assemble(
    blocks: jax.Array,
    parts: Sequence[int],
    split: Sequence[int],
    local: Sequence[int],
) -> jax.Array:
    """Puts an array together from its parts.

    Args:
      blocks: (n, *(split * part)); block i is part i, in the order of the parts' grid.
      parts: into how many each dimension is cut.
      split: how often it had been split before, by other axes.
      local: the shape of each of the pieces of that split.

    Returns:
      An array of shape split * local, without padding.
    """
    part, rank = part_of(local, parts), len(local)
    x = blocks.reshape(*parts, *_woven(split, part))
    order = (a for d in range(rank) for a in (rank + 2 * d, d, rank + 2 * d + 1))
    x = _transposed(x, list(order))
    padded = [p * j for p, j in zip(part, parts, strict=True)]
    if padded != list(local):
        x = x.reshape(_woven(split, padded))
        x = x[tuple(map(slice, _woven(split, local)))]
    return x.reshape([k * s for k, s in zip(split, local, strict=True)])


def _woven(*factors: Sequence[int]) -> list[int]:
    """The factors of each dimension, one after the other."""
    return [v for each in zip(*factors, strict=True) for v in each]


def _transposed(x: jax.Array, order: Sequence[int]) -> jax.Array:
    """x.transpose(order), of the dimensions that are larger than 1 alone."""
    shape = [x.shape[a] for a in order]
    large = [a for a, s in enumerate(x.shape) if s != 1]
    kept = [large.index(a) for a in order if x.shape[a] != 1]
    return x.reshape([x.shape[a] for a in large]).transpose(kept).reshape(shape)


def axes_in(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def path_names(path: Sequence[Any]) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def check_floating(name: str, dtype: Any) -> None:
    """Raises a ValueError for an argument that is neither None nor floating point."""
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"{name} is {np.dtype(dtype)}: give a floating-point dtype. To send few "
            "bits there are gather_bits and reduce_bits."
        )


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
      ValueError: a parameter is not floating point or has 8 bits, a spec names a data
        axis or does not divide the shape, or specs are needed and missing.
    """
    check_floating("comm_dtype", comm_dtype)
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
        if dtype.itemsize < 2:
            raise ValueError(
                f"{name} is {dtype}, which optimizers cannot add to: keep it in "
                "bfloat16 or float32 and cast it inside loss_fn."
            )
        used = P() if spec is None else spec
        used = P(*used[: max((i + 1 for i, e in enumerate(used) if e), default=0)])
        for a in (a for entry in used for a in axes_in(entry)):
            if a in axis or a not in mesh.shape:
                raise ValueError(
                    f"the spec of {name} is {used}, but {a!r} is "
                    + ("the data axis, over which parameters are replicated."
                       if a in axis else f"no axis of the mesh {mesh.axis_names}.")
                )  # fmt: skip
        parts = [math.prod(mesh.shape[a] for a in axes_in(e)) for e in used]
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
