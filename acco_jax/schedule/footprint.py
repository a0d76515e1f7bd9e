"""Bytes that a program sends and a device holds, read from program and arrays.

bytes_sent(*step.lowered(params, state, batch))  # of one half-round, by each worker
bytes_held((params, state))  # on one device

The collectives are those of the StableHLO, as written. What a backend makes of them
(XLA:CPU widens 16-bit floats) does not count, nor does what the compiler adds for an
optimizer that looks across shards, such as the few bytes of a global norm.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.mlir import ir
from jax.sharding import Mesh

from acco_jax.core.groups import ROWS, TENSOR, members

PyTree = Any

# Bytes that a worker of a group of n sends, in units of the whole: the ring's costs.
RING: dict[str, Callable[[int], float]] = {
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "collective_permute": lambda n: float(n > 1),
    "collective_broadcast": lambda n: float(n > 1),  # what passes it on, in a ring
}
NEGLIGIBLE = 1000  # bytes of an all-reduce that are not counted: losses, norms, weights


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One collective operation of a program."""

    kind: str  # a key of RING
    dtype: str  # as StableHLO names it, such as 'bf16' or 'ui8'
    shape: tuple[int, ...]  # of the whole buffer: reduced, or gathered
    group: int  # how many devices take part together
    times: int = 1  # executions in one run of the program

    @property
    def whole(self) -> int:
        """Bytes of the whole buffer."""
        return -(-math.prod(self.shape) * _bits(self.dtype) // 8)

    @property
    def sent(self) -> float:
        """Bytes that each worker sends in one run of the program."""
        return self.times * RING[self.kind](self.group) * self.whole


def _bits(dtype: str) -> int:
    """Return the bits of an element of 'f32', 'ui8', 'f8E4M3FN', 'complex<f32>'."""
    if dtype == "i1":
        return 8
    number = int(re.findall(r"\d+", dtype)[0])
    return 2 * number if dtype.startswith("complex") else number


def bytes_held(tree: PyTree) -> int:
    """Return the bytes on one device of a tree of (abstract) arrays with shardings."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    )


def bytes_sent(*lowered: Any, mesh: Mesh | None = None) -> int:
    """Return the bytes that each worker sends when each of these programs runs once.

    All-reduces below 1 kB are left out.

    Args:
      *lowered: what `jax.jit(f).lower(...)` or `TrainStep.lowered` return.
      mesh: of the workers. Where they are groups of devices, it is what each device
        sends to other groups; None: every device is a worker.

    Raises:
      ValueError: if a collective runs in a loop whose length the program lacks, or is
        a ragged all-to-all.
    """
    every = (c for program in lowered for c in collectives(program, mesh))
    large = (c for c in every if c.kind != "all_reduce" or c.whole >= NEGLIGIBLE)
    return round(sum(c.sent for c in large))


def collectives(
    lowered: jax.stages.Lowered, mesh: Mesh | None = None
) -> list[Transfer]:
    """Return a program's collectives in order; of a conditional the costliest branch.

    Those within the groups of devices of a mesh are left out.

    Raises:
      ValueError: as `bytes_sent`.
    """
    module = lowered.compiler_ir("stablehlo")
    assert module is not None
    size = 1 if mesh is None else members(mesh).shape[1]
    with module.context:
        functions = {
            ir.StringAttr(f.attributes["sym_name"]).value: f
            for f in module.body.operations
        }

        @functools.cache
        def called(name: str) -> list[Transfer]:
            return _of(functions[name], called, size)

        return called("main")


def _of(
    op: ir.OpView | ir.Operation, called: Callable[[str], list[Transfer]], size: int
) -> list[Transfer]:
    """Return the collectives in an operation and in what it holds or calls.

    `size` devices, one after the other, are a worker.
    """
    op = op.operation
    dialect, _, kind = op.name.partition(".")
    if kind in RING and dialect == "stablehlo":
        return [] if _within(op, kind, size) else _collective(op, kind)
    if op.name == "stablehlo.custom_call" and "ragged_all_to_all" in str(
        op.attributes["call_target_name"]
    ):
        raise ValueError(
            "the bytes of a ragged all-to-all are in its data, so that the bytes sent "
            "cannot be counted: use jax.lax.all_to_all."
        )
    if op.name == "func.call":
        return called(ir.FlatSymbolRefAttr(op.attributes["callee"]).value)
    inside = [
        [c for block in region for o in block.operations for c in _of(o, called, size)]
        for region in op.regions
    ]
    if op.name in ("stablehlo.case", "stablehlo.if"):
        return max(inside, key=lambda branch: sum(c.sent for c in branch))
    collectives = [c for region in inside for c in region]
    if op.name == "stablehlo.while" and collectives:
        iterations = _trip_count(op)
        return [dataclasses.replace(c, times=iterations * c.times) for c in collectives]
    return collectives


def _within(op: ir.Operation, kind: str, size: int) -> bool:
    """Return whether a collective stays within groups of `size` devices."""
    if size == 1:
        return False
    if kind != "collective_permute" and (axes := _named_axes(op)):
        return not axes[0] - {ROWS, TENSOR}
    name = "source_target_pairs" if kind == "collective_permute" else "replica_groups"
    return all(len({i // size for i in row}) == 1 for row in _rows(op.attributes[name]))


def _collective(op: ir.Operation, kind: str) -> list[Transfer]:
    """Return a collective for each array that the operation moves."""
    if kind == "collective_permute":
        pairs = _rows(op.attributes["source_target_pairs"])
        group = 1 + any(a != b for a, b in pairs)
    else:
        group = _group_size(op)
    values = op.results if kind == "all_gather" else op.operands
    types = [ir.RankedTensorType(v.type) for v in values]
    return [Transfer(kind, str(t.element_type), tuple(t.shape), group) for t in types]


def _group_size(op: ir.Operation) -> int:
    """Count the devices that take part together."""
    if named := _named_axes(op):
        axes, sizes = named
        return math.prod(sizes[axis] for axis in axes)
    return len(_rows(op.attributes["replica_groups"])[0])


def _named_axes(op: ir.Operation) -> tuple[set[str], dict[str, int]] | None:
    """Return a collective's mesh axes and the sizes of all axes (newer jax's form).

    Returns None where the devices are numbered instead.
    """
    groups = str(op.attributes["replica_groups"])
    if "replica_group_mesh_axes" not in groups:
        return None
    name = re.findall(r"mesh = @([\w.]+)", groups)[0]
    axes = re.findall(r'axis_ref<name = "([^"]+)"', groups)
    module = op.operation
    while module.name != "builtin.module":
        assert module.parent is not None
        module = module.parent.operation
    operations = module.regions[0].blocks[0].operations
    mesh = next(o for o in operations if str(o.attributes["sym_name"]) == f'"{name}"')
    sizes = re.findall(r'"([^"]+)"=(\d+)', str(mesh.attributes["mesh"]))
    return set(axes), {axis: int(size) for axis, size in sizes}


def _rows(attribute: ir.Attribute) -> list[list[int]]:
    return np.asarray(ir.DenseIntElementsAttr(attribute)).tolist()


def _trip_count(loop: ir.Operation) -> int:
    """Return the iterations of a loop `for (i = start; i < stop; i += step)`.

    Raises:
      ValueError: if the loop is of another kind, or its bounds are not constants.
    """
    condition, body = (region.blocks[0] for region in loop.regions)
    test = _last(condition).operands[0].owner
    if not isinstance(test, ir.Block) and "comparison_direction" in test.attributes:
        i, stop = test.operands
        less = "LT" in str(test.attributes["comparison_direction"])
        if less and isinstance(i.owner, ir.Block):
            k = ir.BlockArgument(i).arg_number
            update = _last(body).operands[k].owner
            bounds = [_constant(loop.operands[k]), _constant(stop)]
            if not isinstance(update, ir.Block) and update.name == "stablehlo.add":
                counter = body.arguments[k]
                bounds += [_constant(x) for x in update.operands if x != counter]
            if len(bounds) == 3 and None not in bounds:
                return len(range(*bounds))  # type: ignore[arg-type]
    raise ValueError(
        "a collective runs in a loop whose length the program does not say, so that "
        "the bytes sent cannot be counted: give the loop constant bounds."
    )


def _last(block: ir.Block) -> ir.OpView:
    return block.operations[len(block.operations) - 1]


def _constant(value: ir.Value) -> int | None:
    """Return an integer constant, also one that a loop or region passes on."""
    owner = value.owner
    if not isinstance(owner, ir.Block):
        if owner.name != "stablehlo.constant":
            return None
        return int(ir.DenseIntElementsAttr(owner.attributes["value"])[0])
    op, k = owner.owner.operation, ir.BlockArgument(value).arg_number
    if op.name == "stablehlo.while":
        body = op.regions[1].blocks[0]
        passed_on = _last(body).operands[k] == body.arguments[k]
    else:
        passed_on = op.name == "sdy.manual_computation"
    return _constant(op.operands[k]) if passed_on else None
