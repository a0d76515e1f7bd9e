"""The platform that computes a model, and the mesh axes that split its arrays."""

import functools
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from acco_jax.core.groups import ROWS, fitted

PyTree = Any


def platform() -> str:
    """Return the platform that this is traced for: 'cpu', 'gpu' or 'tpu'.

    It is the platform of the mesh in context, which plan may have without such devices.
    Without a mesh it is the platform of JAX's default backend.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    name: str = jax.default_backend() if device is None else device.platform
    return "gpu" if name in ("cuda", "rocm") else name


def automatic_axes() -> dict[str, int]:
    """Return the sizes of the mesh's axes over which the compiler splits arrays."""
    mesh = jax.sharding.get_abstract_mesh()
    return {
        name: size
        for name, size, kind in zip(
            mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True
        )
        if kind == AxisType.Auto and size > 1
    }


def split_rows(tree: PyTree) -> PyTree:
    """Split axis 0 of arrays, rows of a microbatch, over a group's axis "fsdp"."""
    size = automatic_axes().get(ROWS, 1)

    def split(x: jax.Array) -> jax.Array:
        if size == 1 or not x.ndim or x.shape[0] % size:
            return x
        unknown = [P.UNCONSTRAINED] * (x.ndim - 1)
        return lax.with_sharding_constraint(x, P(ROWS, *unknown))

    return jax.tree.map(split, tree)


def gathered(x: jax.Array, spec: P = P()) -> jax.Array:
    """Return a parameter gathered over a group's axis "fsdp", where that splits it.

    Its gradient is split again. Inside a loop over layers only one layer is whole.

    Args:
      x: of one layer.
      spec: how other axes split it.
    """
    axes = automatic_axes()
    split = fitted(x.shape, spec, axes)
    if ROWS not in split:
        return x
    return _gathered(x, P(*(None if a == ROWS else a for a in split)), split)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(x: jax.Array, whole: P, split: P) -> jax.Array:
    return lax.with_sharding_constraint(x, whole)


_gathered.defvjp(
    lambda x, whole, split: (lax.with_sharding_constraint(x, whole), None),
    lambda whole, split, _, g: (lax.with_sharding_constraint(g, split),),
)
