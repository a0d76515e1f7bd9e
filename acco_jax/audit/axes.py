"""Mesh axes that collectives are over."""

import math
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from acco_jax.core.leaves import PyTree
from acco_jax.schedule.hlo import Groups

UNKNOWN = "?"


def axes_of(groups: Groups, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the axes along which the devices of a group differ.

    Args:
      groups: devices that communicate, numbered in the mesh's row-major order.
      sizes: the mesh's axes and their sizes, outermost first.

    Returns:
      In the mesh's order; () if the groups are unknown, or are of other devices.
    """
    if not groups or max(map(max, groups)) >= math.prod(sizes.values()):
        return ()
    found: set[str] = set()
    for group in groups:
        places = np.stack(np.unravel_index(np.array(group), tuple(sizes.values())))
        differs = (places != places[:, :1]).any(axis=1)
        found |= {axis for axis, yes in zip(sizes, differs, strict=True) if yes}
    return tuple(axis for axis in sizes if axis in found)


def label(groups: Groups, sizes: Mapping[str, int], devices: int) -> str:
    """Return a name of a collective's axes: "data", "data+fsdp" or "?".

    Without a mesh it describes the groups: "4 groups of 8 (0,1,2,...)".
    """
    if not groups:
        return UNKNOWN
    if sizes:
        return "+".join(axes_of(groups, sizes)) or UNKNOWN
    size = max(map(len, groups))
    if size == devices:
        return f"all {devices} devices"
    first = ",".join(map(str, groups[0][:3])) + (",..." if len(groups[0]) > 3 else "")
    return f"{len(groups)} groups of {size} ({first})"


def mesh_of(tree: PyTree) -> Mesh | None:
    """Return the mesh that the arguments, or their shardings, lie on; None: none."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, NamedSharding))
    shardings = (getattr(x, "sharding", x) for x in leaves)
    meshes = (s.mesh for s in shardings if isinstance(s, NamedSharding))
    return next((m for m in meshes if isinstance(m, Mesh)), None)


def parse_mesh(text: str) -> dict[str, int]:
    """Parse "data:8,fsdp:4", a mesh's axes, outermost first.

    Raises:
      ValueError: if the text has another form.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition(":")
        if not name or not size.isdecimal() or int(size) < 1 or name in sizes:
            raise ValueError(
                f"the mesh {text!r} has {part!r}: give each axis once with its size, "
                "outermost first, for example data:4,fsdp:8."
            )
        sizes[name] = int(size)
    return sizes
