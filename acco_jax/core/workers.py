"""The workers: the data axes of a mesh, and functions on each worker's own rows."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

PyTree = Any


def axis_names(mesh: Mesh, axis_name: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the data axes as a tuple; raise a ValueError if the mesh lacks one."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(
            f"mesh is {mesh!r}: give the devices as a jax.sharding.Mesh, such as "
            "jax.make_mesh((jax.device_count(),), ('data',))."
        )
    axis = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    for name in axis:
        if name not in mesh.axis_names:
            raise ValueError(
                f"axis_name {name!r} is not an axis of the mesh {mesh.axis_names}: "
                "name the axis over which the batch is split."
            )
    return axis


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


def reduce_scatter(arrays: PyTree, axis: str, dim: int = 0) -> PyTree:
    """Sum arrays over an axis; each device keeps its part of dimension dim.

    Between CPU processes it is an all-to-all and a sum, which send as much: gloo's
    reduce-scatter overwrites a large message before all of it has been sent, and the
    end of the first device's part is then wrong (jax-ml/jax#40830).
    """

    def asked(arrays: PyTree) -> PyTree:
        return lax.psum_scatter(arrays, axis, scatter_dimension=dim, tiled=True)

    def exchanged(arrays: PyTree) -> PyTree:
        n = lax.axis_size(axis)
        parts = lax.all_to_all(arrays, axis, dim, dim, tiled=True)
        by_sender = lambda x: x.reshape(*x.shape[:dim], n, -1, *x.shape[dim + 1 :])  # noqa: E731
        return jax.tree.map(lambda x: by_sender(x).sum(dim), parts)

    if not jax.distributed.is_initialized():
        return asked(arrays)
    return lax.platform_dependent(arrays, cpu=exchanged, default=asked)


def place(tree: PyTree, shardings: PyTree) -> PyTree:
    """Put arrays on their devices; give abstract arrays a sharding if they lack one."""
    if not any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree)):
        return jax.device_put(tree, shardings)
    shardings = jax.tree.broadcast(shardings, tree)

    def one(x: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        at = x.sharding or sharding
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)

    return jax.tree.map(one, tree, shardings)


def to_row(tree: PyTree) -> PyTree:
    """Return a worker's own values as its row of an array over workers."""
    return jax.tree.map(lambda x: x[None], tree)


def from_row(rows: PyTree) -> PyTree:
    """Return a worker's own values from its row: the inverse of `to_row`."""
    return jax.tree.map(lambda x: x[0], rows)
