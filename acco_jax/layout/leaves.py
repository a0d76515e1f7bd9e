"""What a layout has to know of each parameter, and what is wrong with some."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
      ValueError: a parameter is not floating point, a spec names a data axis or does
        not divide the shape, or specs are needed and missing.
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
