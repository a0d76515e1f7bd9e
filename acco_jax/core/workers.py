"""The workers: the data axes of a mesh, and functions on each worker's own rows."""

import functools
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

PyTree = Any


def axis_names(mesh: Mesh, axis_name: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the data axes as a tuple; raise a ValueError if the mesh lacks one."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(
            f"mesh is {mesh!r}: give the devices as a jax.sharding.Mesh, such as "
            "jax.make_mesh((jax.device_count(),), ('data',))."
        )
    axis = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    if not axis or len(set(axis)) < len(axis):
        raise ValueError(
            f"axis_name is {axis_name!r}: name at least one axis of the mesh, and each "
            "once. A single worker needs an axis of size 1."
        )
    for name in axis:
        if name not in mesh.axis_names:
            raise ValueError(
                f"axis_name {name!r} is not an axis of the mesh {mesh.axis_names}: "
                "name the axis over which the batch is split."
            )
    return axis


def without_mesh() -> AbstractContextManager[Any]:
    """Leave the mesh of jax.set_mesh, for programs on other devices than its."""
    return jax.set_mesh(Mesh(np.empty((), object), ()))


def check_compiled() -> None:
    """Raise a ValueError inside jax.disable_jit, where collectives may not end."""
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        raise ValueError(
            "jax.disable_jit is on, but what runs on several workers is compiled: turn "
            "it off, and call loss_fn by itself or use jax.debug.print inside it."
        )


def over_data(
    fn: Callable, mesh: Mesh, axis: tuple[str, ...], in_specs: PyTree, out_specs: PyTree
) -> Callable:
    """Run fn on each worker's part, manual over only the data axes.

    check_vma is off: parameters stay unchanged on each worker and no psum is put in
    when a gradient is taken. Loss functions with scans of their own need not mark what
    varies.
    """
    shard_map = functools.partial(jax.shard_map, axis_names=set(axis), check_vma=False)
    return shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


def _is_here(x: Any) -> bool:
    """Return whether x is an array of numbers that this process has whole."""
    if isinstance(x, jax.core.Tracer) or not isinstance(x, np.ndarray | jax.Array):
        return False
    key = jnp.issubdtype(x.dtype, jax.dtypes.extended)
    return not key and getattr(x, "is_fully_addressable", True)


def check_same(name: str, tree: PyTree, mesh: Mesh) -> None:
    """Raise a ValueError if processes differ in arrays that each of them has whole.

    All processes must call it; nothing is compared if the mesh leaves some out.
    """
    everyone = {d.process_index for d in mesh.devices.flat}
    own = [np.asarray(jax.device_get(x)) for x in jax.tree.leaves(tree) if _is_here(x)]
    if len(everyone) < max(jax.process_count(), 2) or not own:
        return
    digest = 0
    for x in own:
        digest = zlib.crc32(f"{x.dtype}{x.shape}".encode() + x.tobytes(), digest)
    with without_mesh():
        found = multihost_utils.process_allgather(np.uint32(digest))
    if (found != digest).any():
        raise ValueError(
            f"processes gave different arrays as {name}: give the same whole arrays in "
            "each, or each one's part by jax.make_array_from_process_local_data."
        )


def place(tree: PyTree, shardings: PyTree) -> PyTree:
    """Put arrays on their devices; give abstract arrays a sharding if they lack one.

    An array that each process has whole is the same in all. `jax.device_put` would
    compare it, gathering it in every call, and call NaNs different.
    """
    leaves = jax.tree.leaves((tree, shardings))
    if not any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves) and all(
        x.is_fully_addressable for x in leaves if isinstance(x, NamedSharding)
    ):
        return jax.device_put(tree, shardings)
    shardings = jax.tree.broadcast(shardings, tree)

    def one(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct | jax.Array:
        if isinstance(x, jax.ShapeDtypeStruct):
            at = x.sharding or sharding
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)
        if not _is_here(x):
            return jax.device_put(x, sharding)
        own = np.asarray(jax.device_get(x), jax.dtypes.canonicalize_dtype(x.dtype))
        return jax.make_array_from_callback(own.shape, sharding, lambda i: own[i])

    return jax.tree.map(one, tree, shardings)


def strong(tree: PyTree) -> PyTree:
    """Return arrays without weak types, as `jnp.full(shape, 0.1)` has one.

    A step returns none, so that its second call would be compiled anew.
    """

    def one(x: Any) -> Any:
        weak = isinstance(x, jax.Array) and x.weak_type
        return x.astype(x.dtype) if weak else x

    return jax.tree.map(one, tree)


def on_mesh(tree: PyTree, mesh: Mesh) -> PyTree:
    """Put arrays that are committed to other devices on the mesh, whole on each."""
    devices = set(mesh.devices.flat)

    def one(x: Any) -> Any:
        if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
            return x
        if not x.committed or x.sharding.device_set == devices:
            return x
        return jax.device_put(x, NamedSharding(mesh, P()))

    return jax.tree.map(one, tree)


def to_row(tree: PyTree) -> PyTree:
    """Return a worker's own values as its row of an array over workers."""
    return jax.tree.map(lambda x: x[None], tree)


def from_row(rows: PyTree) -> PyTree:
    """Return a worker's own values from its row: the inverse of `to_row`."""
    return jax.tree.map(lambda x: x[0], rows)
