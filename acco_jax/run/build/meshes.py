"""Mesh of a run's devices: domains, workers and model-parallel groups."""

import math
import types
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh


def described(axes: Mapping[str, int]) -> AbstractMesh:
    """Return the mesh of a run whose devices are not there, by its axes' sizes."""
    auto = (AxisType.Auto,) * len(axes)
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=auto)


def data_mesh(
    devices: Sequence[jax.Device],
    domains: int | None,
    group: Mapping[str, int] = types.MappingProxyType({}),
) -> Mesh:
    """Return the devices along a data axis, or along two if there are several domains.

    Args:
      devices: domain after domain.
      domains: number of equal parts, each on a fast network (hosts of GPUs, slices
        of TPUs); None: the slices that TPUs are in, else one.
      group: sizes of the axes "fsdp" and "tensor", along which neighbouring devices of
        a domain are one worker; sizes above 1 become the last axes.

    Raises:
      ValueError: if the devices do not divide so, or a domain spans slices.
    """
    group = {axis: size for axis, size in group.items() if size > 1}
    slices = [getattr(d, "slice_index", 0) for d in devices]
    joined = len(set(slices))
    domains = joined if domains is None else domains
    parts = joined if domains == 1 else domains  # make_mesh lays out a slice at a time
    if domains < 1 or len(devices) % parts:
        raise ValueError(
            f"domains is {domains}, but there are {len(devices)} devices: give a "
            "number that divides them."
        )
    size = len(devices) // parts
    workers, rest = divmod(size, math.prod(group.values()))
    if rest:
        each = "" if parts == 1 else f" in each of {parts} domains"
        raise ValueError(
            f"mesh.fsdp times mesh.tensor is {math.prod(group.values())}, but there "
            f"are {size} devices{each}: use sizes whose product divides that."
        )
    starts = range(0, len(devices), size)
    if any(len(set(slices[i : i + size])) > 1 for i in starts):
        raise ValueError(
            f"domains is {domains}, but the devices are in {joined} slices: "
            "give that number, or a multiple."
        )
    names, shape = ("data", *group), (workers, *group.values())
    auto = (AxisType.Auto,) * len(names)
    laid = [_laid(shape, names, auto, devices[i : i + size]) for i in starts]
    # with one worker in each domain, only the slow network is between workers
    if domains == 1 or workers == 1:
        return Mesh(np.concatenate(laid), names, auto)
    return Mesh(np.stack(laid), ("domain", *names), (*auto, AxisType.Auto))


def _laid(
    shape: tuple[int, ...],
    names: tuple[str, ...],
    types: tuple[AxisType, ...],
    devices: Sequence[jax.Device],
) -> np.ndarray:
    """Lay one slice's devices out along axes as `jax.make_mesh` does.

    Where an axis is only a part of one of a TPU's torus, which that rejects, split it.
    """
    try:
        return jax.make_mesh(shape, names, types, devices=devices).devices
    except NotImplementedError:
        return mesh_utils.create_device_mesh(
            shape, devices, allow_split_physical_axes=True
        )
