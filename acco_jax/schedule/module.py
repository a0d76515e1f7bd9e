"""Loop iterations, FLOPs and accessed bytes of a compiled module."""

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from acco_jax.schedule.hlo import (
    Computation,
    Instruction,
    bytes_of,
    parse,
    product_flops,
)
from acco_jax.schedule.sources import Sources

# The kind of a collective, by opcode.
KINDS = {
    "reduce-scatter": "reduce-scatter",
    "all-gather": "all-gather",
    "all-reduce": "all-reduce",
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "all-to-all",
    "collective-permute": "collective-permute",
    "collective-broadcast": "collective-broadcast",
    "send": "send-recv",
    "recv": "send-recv",
}
# Possible communication: operations that may be collectives of a newer compiler, and
# targets and settings of custom calls that are.
_LIKE = r"(all|collective|reduce-scatter|ragged|send|recv)\b"
_CALLS = (
    r'custom_call_target="(?!AsyncCollective)[^"]*(?i:nccl|rccl|shmem|mpi_|collective'
    r"|(all|reduce)_?(gather|reduce|scatter|to_?all)|send_?recv|permute)"
)
_KERNELS = r'"has_communication": ?true|\buses_xla_collective_metadata ?= ?true'
# Python functions that the program calls, which may do anything.
_CALLBACKS = r'custom_call_target="\w*(python|callback)'
FREE = {"parameter", "constant", "iota", "get-tuple-element", "tuple", "bitcast"}
FREE |= {"after-all", "add-dependency", "partition-id", "replica-id", "opt-barrier"}
SLICES = {"bitcast", "dynamic-slice", "slice", "gather"}  # these read only a part
MOVES = {"copy", "copy-start", "copy-done", "bitcast", "convert", "opt-barrier"}


class Module:
    """The text of a compiled program, with trip counts for its loops."""

    def __init__(self, text: str, trip_counts: Mapping[str, int] | int | None) -> None:
        header = text.split("\n", 1)[0]
        counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", header)
        # how many devices it runs on
        self.devices = math.prod(map(int, counts))
        self.computations, entry = parse(text)
        self.entry = self.computations[entry]
        self.sources = Sources(text)
        self._trip_counts = trip_counts
        # TPUs' layouts have tiles; S(n) has another meaning there than on GPUs
        self._tpu = re.search(r"\{[\d,]*:T\(", text) is not None
        gpu = "gpu" if '"operation_queue_id"' in text else ""
        self.platform = "tpu" if self._tpu else gpu
        # of a computation, each found once
        self.flops_in = functools.cache(lambda c: sum(map(self.flops, c.instructions)))
        self.bytes_in = functools.cache(lambda c: sum(map(self.bytes, c.instructions)))
        self.collectives_in = functools.cache(self._collectives_in)

    def called(self, x: Instruction) -> list[Computation]:
        """Return the computations that an instruction runs."""
        return [self._computation(name, x) for name in x.called]

    def body(self, loop: Instruction) -> Computation:
        return self._computation(loop.attribute(r"\bbody=%?([\w.\-]+)") or "", loop)

    def condition(self, loop: Instruction) -> Computation:
        name = loop.attribute(r"\bcondition=%?([\w.\-]+)") or ""
        return self._computation(name, loop)

    def _computation(self, name: str, caller: Instruction) -> Computation:
        """Return a computation by its name.

        Raises:
          ValueError: if the text lacks it.
        """
        if name not in self.computations:
            raise ValueError(
                f"{caller.name} ({caller.opcode}) calls the computation {name!r}, "
                "which the text lacks: give the whole text of compiled.as_text()."
            )
        return self.computations[name]

    def runs(
        self,
        c: Computation | None = None,
        times: int = 1,
        weigh: Callable[[Computation], Any] | None = None,
    ) -> Iterator[tuple[Computation, int]]:
        """Yield c (ENTRY if None) and what it runs line by line, with executions.

        The branches of a conditional run 0 times, except the first of the heaviest;
        without `weigh` that is the one that communicates the most bytes.
        """
        weigh = weigh or self.sent
        c = c or self.entry
        yield c, times
        for x in c.instructions:
            if x.opcode in ("while", "call", "conditional"):
                iterations = self.count(x) if x.opcode == "while" else 1
                called = self.called(x)
                counts = [times * iterations] * len(called)
                if x.opcode == "conditional":
                    weights = list(map(weigh, called))
                    most = weights.index(max(weights))
                    counts = [times * (i == most) for i in range(len(called))]
                for other, count in zip(called, counts, strict=True):
                    yield from self.runs(other, count, weigh)
            if x.opcode == "while":
                condition = self.condition(x)
                yield from self.runs(condition, times * (iterations + 1), weigh)

    def sent(self, c: Computation) -> int:
        """Count the bytes of the buffers of all collectives that c executes."""
        return sum(
            times * max(x.bytes, sum(operand.bytes for operand in x.operands))
            for inner, times in self.runs(c)
            for x in inner.instructions
            if self.communicates(x)
        )

    # ---- iterations of loops

    def iterations(self, loop: Instruction) -> int | None:
        """Return the iterations of a loop, from its text or else from `trip_counts`."""
        iterations, counts = self.stated_trips(loop), self._trip_counts
        if iterations is not None:
            return iterations
        return counts.get(loop.name) if isinstance(counts, Mapping) else counts

    def count(self, loop: Instruction) -> int:
        """Return the iterations of a loop; an unknown number counts as one."""
        iterations = self.iterations(loop)
        return 1 if iterations is None else iterations

    def stated_trips(self, loop: Instruction) -> int | None:
        """Return iterations from the compiler's note (GPU) or `i < constant` (TPU)."""
        note = loop.attribute(r'"known_trip_count":\{"n":"(\d+)"\}')
        if note is not None:
            return int(note)
        condition = self.condition(loop)
        test, start = condition.root, loop.operand(0)
        if test.opcode != "compare" or "direction=LT" not in test.attributes:
            return None
        counter, limit = map(_source, test.operands)
        opcodes = (counter.opcode, start and start.opcode)
        if start is None or opcodes != ("get-tuple-element", "tuple"):
            return None
        index = tuple_index(counter)
        first, last = _constant(_source(start.operands[index])), _constant(limit)
        step = _step(self.body(loop), index)
        if first is None or last is None or step is None:
            return None
        return len(range(first, last, step))

    # ---- FLOPs and bytes

    def flops(self, x: Instruction) -> int:
        """Count matmuls' FLOPs; a conditional counts its cheapest branch."""
        inside = [self.flops_in(c) for c in self.called(x)]
        if x.opcode == "while":
            return self.count(x) * sum(inside)
        if x.opcode == "conditional":
            return min(inside)
        return sum(inside) or product_flops(x)

    def bytes(self, x: Instruction) -> int:
        """Count bytes read and written; a conditional counts its costliest branch.

        On TPU arrays in vector or scalar memory do not count: they take no part of the
        HBM's bandwidth.
        """
        if x.opcode in FREE or x.opcode.endswith("-done"):
            return 0
        if _kind(x) != "fusion" and self.communicates(x):
            return 0  # its time is the network's
        if x.opcode in ("while", "call", "conditional"):
            inside = [self.bytes_in(c) for c in self.called(x)]
            if x.opcode == "conditional":
                return max(inside)
            return sum(inside) * (self.count(x) if x.opcode == "while" else 1)
        if x.attribute(r'custom_call_target="(AllocateBuffer|ConcatBitcast)"'):
            return 0  # a TPU only allocates it, or has it in one piece already
        if x.opcode in ("dynamic-slice", "slice", "gather"):
            return self._moved(x.operands[0], x, x.bytes)
        if x.opcode == "dynamic-update-slice":
            return self._moved(x.operands[1], x, x.operands[1].bytes)
        if x.opcode in ("fusion", "fusion-start"):
            return self._fused_bytes(x)
        if x.opcode == "slice-start":  # ((operand), slice, context)
            size = bytes_of(x.arrays[1:2])
            return size * (self._outside(x.operands[0]) + self._outside(x, 1))
        read = sum(map(self._size, x.operands))
        if x.opcode.endswith(("-start", "-update")):  # its result repeats the operands
            return max(self._size(x), read)
        return self._size(x) + read

    def _outside(self, x: Instruction, i: int = 0) -> bool:
        """Return whether an array of x's result is in the counted memory (TPU: HBM)."""
        return not self._tpu or i >= len(x.in_hbm) or x.in_hbm[i]

    def _size(self, x: Instruction) -> int:
        """Count the bytes of x's result in the counted memory."""
        arrays = enumerate(x.arrays)
        return bytes_of([array for i, array in arrays if self._outside(x, i)])

    def _moved(self, source: Instruction, target: Instruction, size: int) -> int:
        """Count `size` bytes read from one buffer and written to another."""
        return size * (self._outside(source) + self._outside(target))

    def _fused_bytes(self, x: Instruction) -> int:
        """Count a fusion's bytes; buffers that it only slices count by their slices.

        Buffers that pass through it are neither read nor written. So the buffers of a
        collective that goes on in a TPU's fusion do not count: their time is that of
        the collective, once, and not of every fusion that carries it on.
        """
        inner, operands = self.called(x)[0], x.operands
        total = 0
        for p in inner.instructions:
            if p.opcode == "parameter" and int(p.arguments) < len(operands):
                operand = operands[int(p.arguments)]
                total += min(self._bytes_read(p), self._size(operand))
        # ((operands), results, context) is what an asynchronous one starts with
        first = len(operands) if x.opcode == "fusion-start" else 0
        for i, result in enumerate(_results(inner), first):
            if not self._outside(x, i):
                continue
            if result.opcode == "parameter" or _is_carried(result):
                continue
            while result.opcode == "bitcast" and result.operands:
                result = result.operands[0]
            sliced = result.opcode == "dynamic-update-slice"
            update = result.operand(1) if sliced else None
            total += (update or result).bytes
        return total

    def _bytes_read(self, x: Instruction) -> int:
        """Count bytes read of a fused computation's value, of slices only theirs."""
        total = x.bytes if x.is_root else 0
        for user in x.computation.instructions:
            if x.name not in user.operand_names or _is_carried(user):
                continue
            first = user.operand_names[0] == x.name
            if user.opcode == "fusion":
                total += self._read_inside(x, user)
            elif first and user.opcode in SLICES:
                total += self._bytes_read(user)
            elif user.opcode == "tuple" and x.opcode == "parameter":
                continue
            elif not first or user.opcode != "dynamic-update-slice":
                total += x.bytes
            # an updated buffer is not read, only written at the slice
        return min(total, x.bytes)

    def _read_inside(self, x: Instruction, user: Instruction) -> int:
        """Count the bytes that a fusion within a fusion reads of one operand."""
        inner = self.called(user)[0].instructions
        return sum(
            self._bytes_read(p)
            for p in inner
            if p.opcode == "parameter"
            and user.operand_names[int(p.arguments)] == x.name
        )

    # ---- collectives inside of instructions

    def _collectives_in(self, c: Computation) -> tuple[Instruction, ...]:
        direct = [x for x in c.instructions if _kind(x) in KINDS]
        callers = (x for x in c.instructions if _kind(x) not in KINDS)
        return (*direct, *itertools.chain(*map(self.collectives_of, callers)))

    def collectives_of(self, x: Instruction) -> list[Instruction]:
        """Return the collectives in the computations that an instruction runs."""
        return list(itertools.chain(*map(self.collectives_in, self.called(x))))

    def communicates(self, x: Instruction) -> bool:
        """Return whether an instruction is a collective or starts one inside it."""
        kind = _kind(x)
        holds = kind != x.opcode or kind == "fusion"
        return kind in KINDS or (holds and bool(self.collectives_of(x)))

    def unknown(self) -> list[Instruction]:
        """Return the instructions that seem to communicate in an unknown form."""

        def is_unknown(x: Instruction) -> bool:
            if x.opcode.removesuffix("-start") == "custom-call":
                return bool(
                    re.search(f"{_CALLS}|{_KERNELS}|{_CALLBACKS}", x.attributes)
                )
            kind = re.sub("-(start|update|done)$", "", x.opcode)
            if kind in ("send", "recv"):
                host = "is_host_transfer=true" in x.attributes
                return host and "xla_megascale_runtime" not in x.attributes
            return bool(re.match(_LIKE, kind)) and kind not in KINDS

        lines = itertools.chain(*(c.instructions for c in self.computations.values()))
        return [x for x in lines if is_unknown(x) and not x.opcode.endswith("-done")]

    def holds(self, x: Instruction, target: str) -> bool:
        """Return whether a fusion contains a custom call to `target`."""
        return x.opcode == "fusion" and any(
            f'custom_call_target="{target}"' in inner.attributes
            for c in self.called(x)
            for inner in c.instructions
        )


def tuple_index(x: Instruction) -> int:
    """Return the index of the element that a get-tuple-element takes."""
    return int(x.attribute(r"\bindex=(\d+)") or 0)


def _results(c: Computation) -> list[Instruction]:
    """Return the results of a computation, a tuple's elements each."""
    return c.root.operands if c.root.opcode == "tuple" else [c.root]


def _kind(x: Instruction) -> str:
    """Return the opcode of what an instruction does or starts."""
    return x.opcode.removesuffix("-start")


def _is_carried(x: Instruction) -> bool:
    """Return whether an instruction in a fusion is part of a collective."""
    return _kind(x) in KINDS or (
        x.opcode == "custom-call" and 'target="AsyncCollective' in x.attributes
    )


def _source(x: Instruction) -> Instruction:
    """Return the instruction that a value comes from, past copies."""
    while x.opcode in MOVES and x.operands:
        x = x.operands[0]
    return x


def _constant(x: Instruction) -> int | None:
    is_integer = x.opcode == "constant" and re.fullmatch(r"-?\d+", x.arguments)
    return int(x.arguments) if is_integer else None


def _step(body: Computation, index: int) -> int | None:
    """Return the constant that a loop's body adds to element `index` of its tuple."""
    if body.root.opcode != "tuple":
        return None
    x = _source(body.root.operands[index])
    if x.opcode != "add":
        return None
    values = [_constant(_source(operand)) for operand in x.operands]
    return next((v for v in values if v is not None and v > 0), None)
