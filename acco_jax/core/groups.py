"""Model-parallel groups of devices, one worker each, and their parameters' split."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from acco_jax.core.compiler import generation
from acco_jax.core.leaves import axes_in

PyTree = Any

# Axes of a mesh along which the devices of a group divide one worker's computation.
ROWS = "fsdp"  # splits a microbatch's rows, and parameters, which are gathered for use
TENSOR = "tensor"  # splits heads and hidden units


def data_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Return the axes along which the workers are: all axes that are not of a group."""
    return tuple(name for name in mesh.axis_names if name not in (ROWS, TENSOR))


def members(mesh: Mesh) -> np.ndarray:
    """Return the devices as rows, one for each worker; a group's axes come last."""
    n = math.prod(mesh.shape[a] for a in data_axes(mesh))
    return mesh.devices.reshape(n, -1)


def platform_of(mesh: Mesh | AbstractMesh) -> str:
    """Return the platform of a mesh's devices, '' if it is abstract."""
    abstract = isinstance(mesh, AbstractMesh)
    return "" if abstract else mesh.devices.flat[0].platform


def of_chips(mesh: Mesh | AbstractMesh, axis: Sequence[str]) -> bool:
    """Return whether the workers along data axes are groups of TPU chips."""
    workers = math.prod(mesh.shape[a] for a in axis)
    return platform_of(mesh) == "tpu" and workers < mesh.size


def sends_anywhere(mesh: Mesh | AbstractMesh) -> bool:
    """Return whether any chips of a mesh's one slice may send to each other at once.

    XLA:TPU on v5e makes a permute asynchronous in a slice of more than 16 chips only
    where each pair is 1, 2 or 4 chips apart along one dimension: "On platforms with
    limited ICI routing all [...] pairs [...] must satisfy routing limitations".
    """
    if platform_of(mesh) != "tpu":
        return False
    devices = mesh.devices.flat
    if generation(devices[0].device_kind) == "v5e" and mesh.size > 16:
        return False
    return len({getattr(d, "slice_index", 0) for d in devices}) == 1


def group_specs(
    params: PyTree,
    mesh: Mesh | AbstractMesh,
    *,
    specs: PyTree | None = None,
    stacked: PyTree | None = None,
) -> PyTree:
    """Return `param_specs` that also split parameters over the mesh's axis "fsdp".

    Each array of at least two dimensions is split along the largest one that is free
    and that the axis divides. Vectors, and arrays that the axis does not divide, are
    whole on every device of a group.

    Args:
      params: arrays or ShapeDtypeStructs.
      mesh: the devices.
      specs: a PartitionSpec of each over axes such as "tensor"; None: over none.
      stacked: a bool of each, whether axis 0 is over layers, which is not split; None:
        it is of none.

    Returns:
      The tree of `params` with a PartitionSpec for each array.
    """
    every = lambda value: jax.tree.map(lambda _: value, params)  # noqa: E731
    specs = every(P()) if specs is None else specs
    stacked = every(False) if stacked is None else stacked
    return jax.tree.map(
        lambda x, spec, layers: fitted(x.shape, spec, dict(mesh.shape), int(layers)),
        params,
        specs,
        stacked,
    )


def fitted(
    shape: tuple[int, ...], spec: P, sizes: Mapping[str, int], first: int = 0
) -> P:
    """Return the axes of a spec that divide an array, and with them "fsdp".

    Args:
      shape: of the array.
      spec: an axis, or None, for each dimension, over other axes than "fsdp".
      sizes: of the mesh's axes.
      first: "fsdp" splits no dimension before this one.

    Raises:
      ValueError: the spec has more dimensions than the array.
    """
    if len(spec) > len(shape):
        raise ValueError(f"{spec} has more dimensions than an array of shape {shape}.")

    def divides(entry: str | tuple[str, ...] | None, length: int) -> bool:
        pieces = [sizes.get(axis, 0) for axis in axes_in(entry)]
        return all(pieces) and length % math.prod(pieces) == 0

    entries = [
        entry if divides(entry, length) else None
        for entry, length in itertools.zip_longest(spec, shape)
    ]
    size = sizes.get(ROWS, 1)
    free = [
        d
        for d in range(first, len(shape))
        if entries[d] is None and shape[d] and shape[d] % size == 0
    ]
    if size > 1 and len(shape) - first > 1 and free:
        entries[max(free, key=lambda d: shape[d])] = ROWS
    return P(*entries)
