"""The records of parameters that a layout needs, and their division into parts."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from acco_jax.core.dtypes import promoted

PyTree = Any
Rng = jax.Array | None  # a key of jax.random; None: the loss function needs none
Array = jax.Array | np.ndarray | jax.ShapeDtypeStruct  # with a shape and a dtype


@dataclasses.dataclass(frozen=True)
class Leaf:
    """The record of one parameter before any array exists."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype  # the parameter's
    comm_dtype: np.dtype  # what communication carries
    spec: P  # over the mesh's other axes; the data axes never appear
    local: tuple[int, ...]  # shape on one device, split over only the other axes
    # The number of parts into which the workers cut each dimension of `local`, n in
    # all; None: every worker has the leaf whole.
    parts: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return "/".join(self.path) or "parameter"

    @property
    def size(self) -> int:
        return math.prod(self.local)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that split the leaf, data axes excluded."""
        return tuple(a for entry in self.spec for a in axes_in(entry))

    @property
    def master(self) -> np.dtype:
        return np.dtype(promoted(self.dtype, jnp.float32))

    @property
    def whole(self) -> bool:
        """Return whether every worker holds the whole leaf."""
        return self.parts is None

    @property
    def part(self) -> tuple[int, ...]:
        """The shape of one worker's part, on one device."""
        return tuple(-(-s // k) for s, k in zip(self.local, self._parts, strict=True))

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions that the workers split."""
        return tuple(d for d, k in enumerate(self._parts) if k > 1)

    @property
    def padding(self) -> list[tuple[int, int]]:
        """The padding of the parts beyond `local`, as for jnp.pad."""
        return [(0, -s % k) for s, k in zip(self.local, self._parts, strict=True)]

    @property
    def padded(self) -> bool:
        """Return whether the parts hold more elements than the leaf has."""
        return any(after for _, after in self.padding)

    @property
    def in_blocks(self) -> bool:
        """Return whether shards are stored as blocks (n, *part), as no spec fits.

        Shards of other leaves have the leaf's own shape, one dimension of it padded.
        """
        return len(self.dims) > 1 or (
            self.padded and self.local[self.dims[0]] != self.shape[self.dims[0]]
        )

    @property
    def stored(self) -> tuple[int, ...]:
        """The global shape of the leaf's shards: of master weights and of moments."""
        if self.parts is None:
            return self.shape
        shape = [p * k for p, k in zip(self.part, self._split, strict=True)]
        if self.in_blocks:
            return math.prod(self.parts), *shape
        return tuple(s * k for s, k in zip(shape, self.parts, strict=True))

    def stored_spec(self, axes: tuple[str, ...]) -> P:
        """Return the spec of shards over the data axes, in the order of the parts."""
        if self.parts is None:
            return self.spec
        if self.in_blocks:
            return P(axes, *self.spec)
        spec = [*self.spec, *[None] * (len(self.shape) - len(self.spec))]
        for d in self.dims:
            spec[d] = (*axes_in(spec[d]), *axes)
        return P(*spec)

    def on_wire(self, x: jax.Array) -> jax.Array:
        """Round x, in the master dtype, to the communication and leaf dtypes.

        A cast there and back would not do: compilers remove the pair.
        """
        x = x.astype(self.master)
        full = jnp.finfo(self.master)
        for dtype in (self.comm_dtype, self.dtype):
            info = jnp.finfo(dtype)
            if info.nmant < full.nmant:
                near = lax.reduce_precision(x, info.nexp, info.nmant)
                if info.nexp < full.nexp:  # subnormal numbers became 0; a cast has them
                    unit = float(info.smallest_subnormal)  # a power of two
                    small = jnp.abs(x) < float(info.smallest_normal)
                    near = jnp.where(small, jnp.round(x / unit) * unit, near)
                x = near
        return x

    def cut(self, x: jax.Array) -> jax.Array:
        """Cut an array of shape `local` into the workers' parts, [n, *part]."""
        return self._cut(x, (1,) * x.ndim)

    def assemble(self, blocks: jax.Array) -> jax.Array:
        """Put parts [n, *part] together: the inverse of `cut`."""
        return self._assemble(blocks, (1,) * len(self.local))

    def store(self, x: jax.Array) -> jax.Array:
        """Turn an array of the leaf's own shape into a stored shard, padded by zeros.

        Both are one array over the mesh.
        """
        if self.in_blocks:
            return self._cut(x, self._split)
        return jnp.pad(x, self.padding) if self.padded else x

    def view(self, x: jax.Array) -> jax.Array:
        """Turn a stored shard into an array of the leaf's shape: inverts `store`."""
        if self.in_blocks:
            return self._assemble(x, self._split)
        return x[tuple(map(slice, self.shape))] if self.padded else x

    def blocks(self, x: jax.Array) -> jax.Array:
        """Turn a device's own shard into blocks [1, *part]; keep whole leaves."""
        return x if self.whole or self.in_blocks else x[None]

    @property
    def _parts(self) -> tuple[int, ...]:
        return (1,) * len(self.local) if self.parts is None else self.parts

    @property
    def _split(self) -> tuple[int, ...]:
        """The number of pieces into which other mesh axes split each dimension."""
        return tuple(
            s // k if k else 1 for s, k in zip(self.shape, self.local, strict=True)
        )

    def _cut(self, x: jax.Array, split: Sequence[int]) -> jax.Array:
        """Cut an array of shape split * local into blocks [n, *(split * part)].

        Block i is part i, in the order of the parts' grid, of each of the pieces into
        which other axes have split the array before.
        """
        rank = x.ndim
        if self.padded:
            x = x.reshape(_interleave(split, self.local))
            x = jnp.pad(x, _interleave([(0, 0)] * rank, self.padding))
        rest = [a for a in range(3 * rank) if a % 3 != 1]
        shape = (k * p for k, p in zip(split, self.part, strict=True))
        return _transposed(
            x,
            _interleave(split, self._parts, self.part),
            [*range(1, 3 * rank, 3), *rest],
            (math.prod(self._parts), *shape),
        )

    def _assemble(self, blocks: jax.Array, split: Sequence[int]) -> jax.Array:
        """Put blocks [n, *(split * part)] together: the inverse of `_cut`."""
        rank = len(self.local)
        pieces, inside = range(rank, 3 * rank, 2), range(rank + 1, 3 * rank, 2)
        shape = [k * s for k, s in zip(split, self.local, strict=True)]
        together = shape
        if self.padded:
            padded = [p * k for p, k in zip(self.part, self._parts, strict=True)]
            together = _interleave(split, padded)
        x = _transposed(
            blocks,
            [*self._parts, *_interleave(split, self.part)],
            _interleave(pieces, range(rank), inside),
            together,
        )
        if not self.padded:
            return x
        return x[tuple(map(slice, _interleave(split, self.local)))].reshape(shape)


def _interleave(*factors: Iterable[Any]) -> list[Any]:
    """Return the factors of each dimension, one after the other."""
    return [v for each in zip(*factors, strict=True) for v in each]


def _transposed(
    x: jax.Array, apart: Sequence[int], order: Sequence[int], shape: Sequence[int]
) -> jax.Array:
    """Return x.reshape(apart).transpose(order).reshape(shape), with fewer operations.

    Only dimensions larger than 1 are transposed, and none where these are in order.
    """
    large = [a for a, s in enumerate(apart) if s != 1]
    moved = [large.index(a) for a in order if apart[a] != 1]
    if moved != sorted(moved):
        x = x.reshape([apart[a] for a in large]).transpose(moved)
    return x.reshape(shape)


def wide(x: jax.Array) -> jax.Array:
    """Return x in float32 if its dtype is narrower."""
    return x.astype(promoted(x.dtype, jnp.float32))


def axes_in(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the mesh axes that one entry of a PartitionSpec names."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def path_names(path: Sequence[Any]) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def numbering(leaves: Sequence[Leaf]) -> Callable[[Sequence[Any]], int]:
    """Return a function that maps an array's path to its parameter's index.

    It is the parameter with the longest path that ends the array's path, or -1.
    """
    by_path = {leaf.path: i for i, leaf in enumerate(leaves)}

    def number(path: Sequence[Any]) -> int:
        names = path_names(path)
        ends = (names[start:] for start in range(len(names) + 1))
        return next((by_path[end] for end in ends if end in by_path), -1)

    return number


def only(spec: P, axes: Iterable[str]) -> P:
    """Return the spec over only these axes."""
    kept = (tuple(a for a in axes_in(entry) if a in axes) for entry in spec)
    return P(*(entry or None for entry in kept))


def check_floating(name: str, dtype: DTypeLike | None) -> None:
    """Raise a ValueError unless a dtype is None or floating, of 16 bits or more."""
    if dtype is None:
        return
    if not jnp.issubdtype(dtype, jnp.floating) or np.dtype(dtype).itemsize < 2:
        raise ValueError(
            f"{name} is {np.dtype(dtype)}: give a floating-point dtype of at least 16 "
            "bits. To send fewer there are gather_bits and reduce_bits."
        )


def describe(
    params: PyTree,
    mesh: Mesh,
    axis: tuple[str, ...],
    comm_dtype: DTypeLike | None,
    param_specs: PyTree | None,
) -> tuple[jax.tree_util.PyTreeDef, tuple[Leaf, ...]]:
    """Describe the parameters before they are split over the workers.

    Args:
      params: arrays or anything with shape and dtype.
      mesh: the devices; axes other than `axis` may split the parameters.
      axis: the data axes.
      comm_dtype: what communication carries; None means each parameter's own dtype.
      param_specs: a PartitionSpec per parameter (or a prefix of the tree) over the
        other axes; None reads it from the arrays, which Explicit axes allow.

    Returns:
      The parameters' tree structure and a record of each leaf.

    Raises:
      ValueError: a parameter is not floating point or has 8 bits, a spec names a data
        axis or does not divide the shape, or specs are needed and missing.
    """
    check_floating("comm_dtype", comm_dtype)
    flat, treedef = jax.tree_util.tree_flatten_with_path(params)
    if not flat:
        raise ValueError("params has no arrays: there is nothing to optimize.")
    if param_specs is None:
        _check_specs_visible(mesh, axis)
        specs = [visible_spec(x) for _, x in flat]
    else:
        is_spec = lambda x: x is None or isinstance(x, P)  # noqa: E731
        specs = jax.tree.broadcast(param_specs, params, is_leaf=is_spec)
        specs = treedef.flatten_up_to(specs)  # type: ignore[attr-defined]
    leaves = []
    for (path, x), spec in zip(flat, specs, strict=True):
        names = path_names(path)
        name = "/".join(names) or "parameter"
        _check_trainable(name, x)
        # without jax_enable_x64 arrays of NumPy's float64 become float32
        shape, dtype = tuple(x.shape), jax.dtypes.canonicalize_dtype(x.dtype)
        spec, local = _split_by_spec(name, shape, spec, mesh, axis)
        sent = (
            dtype if comm_dtype is None else jax.dtypes.canonicalize_dtype(comm_dtype)
        )
        leaves.append(Leaf(names, shape, dtype, sent, spec, local))
    return treedef, tuple(leaves)


def _check_specs_visible(mesh: Mesh, axis: tuple[str, ...]) -> None:
    for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True):
        if name not in axis and mesh.shape[name] > 1 and kind == AxisType.Auto:
            raise ValueError(
                f"mesh axis {name!r} is Auto, so how it splits the parameters "
                "cannot be seen while tracing: pass param_specs."
            )


def visible_spec(x: Array) -> P | None:
    """Return the spec that an Explicit array's type shows."""
    sharding = getattr(x, "sharding", None)
    if isinstance(x, jax.Array):
        sharding = jax.typeof(x).sharding
    return getattr(sharding, "spec", None)


def _check_trainable(name: str, x: Array) -> None:
    if not hasattr(x, "dtype"):
        raise ValueError(f"{name} is {x!r}: params must be a tree of arrays.")
    dtype = x.dtype
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


def _split_by_spec(
    name: str,
    shape: tuple[int, ...],
    spec: P | None,
    mesh: Mesh,
    axis: tuple[str, ...],
) -> tuple[P, tuple[int, ...]]:
    """Return the spec without trailing Nones, and the shape left on a device."""
    entries = list(spec or ())
    while entries and not entries[-1]:
        entries.pop()
    spec = P(*entries)
    for a in (a for entry in spec for a in axes_in(entry)):
        if a in axis:
            raise ValueError(
                f"the spec of {name} is {spec}, but {a!r} is the data axis, over which "
                "parameters are replicated: name only other axes of the mesh."
            )
        if a not in mesh.shape:
            raise ValueError(
                f"the spec of {name} is {spec}, but {a!r} is not an axis of the mesh "
                f"{mesh.axis_names}: name one of them."
            )
    split = [math.prod(mesh.shape[a] for a in axes_in(entry)) for entry in spec]
    split += [1] * (len(shape) - len(split))
    if len(split) > len(shape) or any(map(int.__mod__, shape, split)):
        raise ValueError(
            f"the spec {spec} does not divide {name} of shape {shape}: choose "
            "another dimension or pad the parameter."
        )
    return spec, tuple(map(int.__floordiv__, shape, split))


def with_shardings(tree: PyTree, shardings: PyTree) -> PyTree:
    """Return a tree of ShapeDtypeStructs with a tree of shardings."""
    return jax.tree.map(lambda x, home: x.update(sharding=home), tree, shardings)
