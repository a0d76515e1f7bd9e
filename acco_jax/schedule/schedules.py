"""Reader of a compiled program's schedule: what overlaps its communication.

    schedule = read(compiled.as_text(), trip_counts=2)
    assert schedule.hidden_fraction() == 1.0
    print(schedule.summary())

`as_text()` of a program compiled for GPU or TPU is optimized HLO in which the order of
the lines is the order of execution. A collective is overlapped (`hidden`) if it is
asynchronous and matmuls of the model run between its launch and its completion. The
forms of such pairs were read from schedules of jax 0.10.2 and 0.12 (libtpu 0.0.42.1
and 0.0.50.1). Bytes and FLOPs are those of one device and one execution of the
program. JAX is not imported.
"""

import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence

from acco_jax.schedule.hlo import (
    Computation,
    Groups,
    Instruction,
    Pairs,
    bytes_of,
    device_groups,
    permuted,
)
from acco_jax.schedule.module import FREE, KINDS, MOVES, Module, tuple_index

# Groups of devices that collectives are over: the groups, their size, or None: any.
Over = int | Collection[Collection[int]] | None


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the schedule."""

    name: str  # the instruction that starts it
    # "reduce-scatter", "all-gather", "all-reduce", "all-to-all", "collective-permute",
    # or "send-recv": one transfer's sends and receives
    kind: str
    bytes: int  # of the full buffer: a reduce-scatter's operand, an all-gather's result
    dtype: str  # of what travels, as HLO names it ("bf16")
    asynchronous: bool  # whether other operations can run meanwhile
    start: int  # position of the real launch in `where`
    done: int | None  # position of the completion there; None if there is none
    where: str  # "ENTRY", or the computation that holds it (a loop's body)
    times: int  # executions per execution of the program (loops around it)
    # Devices that take part together, numbered within a slice where there are several
    # TPU slices; () if the text lacks them.
    groups: Groups
    flops_between: int  # matmuls' FLOPs between launch and completion
    # FLOPs of these in fusions that carry the collective on, if the compiler wove it
    # into fusions (TPU v5e): it is taken to advance only inside these. Else None.
    flops_carried: int | None
    whiles_between: tuple[str, ...]  # loops with matmuls that lie there whole
    # part of the time of the operation at `done`, a loop whose body has the end, that
    # lies before it; 1 where the end is that operation
    within: float = 1.0
    uncounted: str = ""  # a loop around it whose iterations the text lacks
    op_name: str = ""  # the scopes and the operation in JAX that caused it
    source: str = ""  # "file:line (function)" of that, "" if the text lacks it
    pairs: Pairs = ()  # of a permute: each source and its target, numbered likewise

    @property
    def hidden(self) -> bool:
        """True if matmuls run while it is under way."""
        return self.asynchronous and self.flops_between > 0 and self.flops_carried != 0

    @property
    def group_size(self) -> int | None:
        """Number of devices per group, None if unknown."""
        return max(map(len, self.groups)) if self.groups else None


@dataclasses.dataclass(frozen=True)
class Loop:
    """A while loop; trips is None where neither compiler nor caller gives it."""

    name: str
    where: str
    iterations: int | None
    flops_per_trip: int
    body: str = ""  # the computation that it runs


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation: matmuls' FLOPs, bytes read and written."""

    position: int
    kind: str
    name: str
    flops: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Collectives, operations and loops of a compiled program."""

    # In order, ENTRY's before those of loops; a conditional's are those of the branch
    # that exposes the most bytes, and of equal ones communicates the most.
    collectives: tuple[Collective, ...]
    operations: tuple[Operation, ...]  # ENTRY's, without those that cost nothing
    loops: tuple[Loop, ...]  # every one that runs; trips None counts as one iteration
    flops: int  # of all matmuls
    # The operations, as above, of every computation that holds collectives, by `where`.
    bodies: Mapping[str, tuple[Operation, ...]]
    devices: int  # that it runs on
    unknown: tuple[str, ...] = ()  # apparent communication in unknown forms
    platform: str = ""  # that it was compiled for: "gpu", "tpu", or "": not in the text

    def select(self, min_bytes: int = 1 << 20, groups: Over = None) -> list[Collective]:
        """Return the collectives of at least `min_bytes` over the given groups.

        Args:
            min_bytes: smallest buffer counted.
            groups: the groups, for example `axis_groups(mesh.shape, "data")`, or their
                size; None for all collectives. One whose groups the text lacks
                (a send) matches None only.
        """
        return [
            c
            for c in self.collectives
            if c.bytes >= min_bytes and _matches(c.groups, groups)
        ]

    def hidden_fraction(self, min_bytes: int = 1 << 20, groups: Over = None) -> float:
        """Return the fraction of the selected collectives' bytes that is overlapped.

        Raises:
            ValueError: if there is no such collective.
        """
        collectives = self.select(min_bytes, groups)
        if not sum(c.bytes * c.times for c in collectives):
            over = "" if groups is None else f" over groups {groups}"
            raise ValueError(
                f"no collective of at least {min_bytes} bytes{over} among the "
                f"{len(self.collectives)} of the schedule"
            )
        return hidden_share(collectives)

    def placed(self, places: Sequence[int]) -> "Schedule":
        """Return it with other numbers for the devices: `places[i]` for number i."""

        def moved(c: Collective) -> Collective:
            groups = tuple(tuple(sorted(places[i] for i in g)) for g in c.groups)
            pairs = tuple((places[a], places[b]) for a, b in c.pairs)
            return dataclasses.replace(c, groups=groups, pairs=pairs)

        collectives = tuple(moved(c) for c in self.collectives)
        return dataclasses.replace(self, collectives=collectives)

    def summary(self, min_bytes: int = 1 << 20) -> str:
        """Describe collectives and loops in lines of text; small ones in one line."""
        large = self.select(min_bytes)
        small = [c for c in self.collectives if c.bytes < min_bytes]
        lines = [_line(c) for c in large]
        if large:
            lines.append(
                f"overlapped: {self.hidden_fraction(min_bytes):.1%} of the bytes"
            )
        lines.append(
            f"smaller than {min_bytes} bytes: {sum(c.times for c in small)} "
            f"collectives, {sum(c.bytes * c.times for c in small)} bytes"
        )
        for x in self.loops:
            iterations = (
                "? iterations" if x.iterations is None else f"{x.iterations} iterations"
            )
            flops = f"{x.flops_per_trip / 1e9:.1f} GFLOP"
            lines.append(f"loop {x.name} in {x.where}: {iterations} of {flops}")
        return "\n".join([*lines, f"{self.flops / 1e9:.1f} GFLOP"])


def _line(c: Collective) -> str:
    done = "?" if c.done is None else c.done
    line = f"{c.where}:{c.start}-{done} {c.name}: {c.kind} {c.bytes / 2**20:.1f} MiB "
    line += f"{c.dtype} x {c.times}, groups of {c.group_size or '?'}, "
    line += "overlapped by " if c.hidden else "exposed, "
    line += f"{c.flops_between / 1e9:.1f} GFLOP"
    if c.flops_carried is not None:
        line += f", {c.flops_carried / 1e9:.1f} of which carry it on"
    return line + (f" ({', '.join(c.whiles_between)})" if c.whiles_between else "")


def hidden_share(collectives: Iterable[Collective]) -> float:
    """Return the share of the collectives' bytes that is overlapped; 1 without any."""
    collectives = list(collectives)
    total = sum(c.bytes * c.times for c in collectives)
    hidden = sum(c.bytes * c.times for c in collectives if c.hidden)
    return hidden / total if total else 1.0


def _matches(groups: Groups, choice: Over) -> bool:
    if choice is None:
        return True
    if isinstance(choice, int):
        return bool(groups) and max(map(len, groups)) == choice
    return bool(groups) and set(map(frozenset, groups)) == set(map(frozenset, choice))


def read(text: str, *, trip_counts: Mapping[str, int] | int | None = None) -> Schedule:
    """Parse `compiled.as_text()`.

    Args:
        text: a scheduled module's HLO.
        trip_counts: iterations of loops that the compiler does not report, by the
            loop's name or one number for all; None counts one iteration.

    Raises:
        ValueError: if the text has no schedule, or `trip_counts` names a loop that does
            not exist or whose count the compiler reports.
    """
    if "is_scheduled=true" not in text.split("\n", 1)[0]:
        raise ValueError(
            f"not the text of a compiled, scheduled module: {text[:40]!r}; "
            "pass jit(f).lower(...).compile().as_text()"
        )
    module = Module(text, trip_counts)
    runs = list(module.runs(weigh=functools.cache(functools.partial(_weight, module))))
    loops = [x for c, _ in runs for x in c.instructions if x.opcode == "while"]
    given = trip_counts.values() if isinstance(trip_counts, Mapping) else [trip_counts]
    if any(n is not None and n < 0 for n in given):
        raise ValueError(f"trip_counts is {trip_counts}, but is a number of iterations")
    if isinstance(trip_counts, Mapping):
        unknown = [x.name for x in loops if module.stated_trips(x) is None]
        if wrong := set(trip_counts) - set(unknown):
            raise ValueError(
                f"trip count given for {min(wrong)!r}, but the loops of unknown "
                f"trip count are {unknown}"
            )
    collectives = _collectives(module, runs, _uncounted(module, loops))
    members = (max(map(max, c.groups)) for c in collectives if c.groups)
    return Schedule(
        collectives=collectives,
        operations=_operations(module, module.entry),
        loops=tuple(
            Loop(
                x.name,
                _place(module, x.computation),
                module.iterations(x),
                sum(map(module.flops_in, module.called(x))),
                module.body(x).name,
            )
            for x in loops
        ),
        flops=module.flops_in(module.entry),
        bodies={
            _place(module, c): _operations(module, c)
            for c, _ in runs
            if any(map(module.communicates, c.instructions))
        },
        devices=max(module.devices, 1 + max(members, default=0)),
        unknown=tuple(f"{x.name}: {x.opcode}" for x in module.unknown()),
        platform=module.platform,
    )


def _collectives(
    module: Module,
    runs: Iterable[tuple[Computation, int]],
    uncounted: Mapping[Computation, str],
) -> tuple[Collective, ...]:
    return tuple(
        dataclasses.replace(found, uncounted=uncounted.get(c, ""))
        for c, times in runs
        if times
        for found in _Section(module, c, times).collectives()
    )


def _uncounted(module: Module, loops: Iterable[Instruction]) -> dict[Computation, str]:
    """Return what runs inside loops of unknown iterations: computations and loops."""
    found: dict[Computation, str] = {}
    for loop in loops:
        if module.iterations(loop) is None:
            for part in (module.body(loop), module.condition(loop)):
                for c, _ in module.runs(part):
                    found.setdefault(c, loop.name)
    return found


def _weight(module: Module, branch: Computation) -> tuple[int, int]:
    """Return a branch's bytes that are not overlapped, and those of its collectives."""
    collectives = _collectives(module, module.runs(branch), {})
    exposed = sum(c.bytes * c.times for c in collectives if not c.hidden)
    return exposed, module.sent(branch)


def _operations(module: Module, c: Computation) -> tuple[Operation, ...]:
    return tuple(
        Operation(x.position, x.opcode, x.name, module.flops(x), module.bytes(x))
        for x in c.instructions
        if x.opcode not in FREE
    )


def _place(module: Module, c: Computation) -> str:
    return "ENTRY" if c is module.entry else c.name


class _Section:
    """A computation whose lines run in order, `times` per execution of the program."""

    def __init__(self, module: Module, computation: Computation, times: int) -> None:
        self._module, self._computation, self._times = module, computation, times
        self._lines = computation.instructions

    def collectives(self) -> list[Collective]:
        """Return the collectives of the computation, in order."""
        collectives: list[Collective] = []
        transfers: dict[str, list[Instruction]] = {}
        for x in self._lines:
            kind = x.opcode.removesuffix("-start")
            starts = kind != x.opcode
            if kind in ("send", "recv"):
                transfers.setdefault(_transfer(x), []).append(x)
            elif kind in KINDS:
                collectives.append(self._pair(x, x, starts))
            elif starts or kind == "fusion":
                woven = self._module.holds(x, "AsyncCollectiveStart")
                for inner in self._module.collectives_of(x):
                    if woven:
                        collectives.append(self._woven(x, inner))
                    elif not self._continues(x, inner):
                        collectives.append(self._pair(x, inner, starts))
        collectives += map(self._sent, transfers.values())
        return sorted(collectives, key=lambda c: c.start)

    def _continues(self, x: Instruction, inner: Instruction) -> bool:
        """Return whether a TPU fusion carries on or ends another one's collective."""
        return (
            '"async_collective_fusion_config"' in inner.attributes
            or self._module.holds(x, "AsyncCollectiveDone")
        )

    def _pair(self, x: Instruction, inner: Instruction, starts: bool) -> Collective:
        """Describe a collective that starts and ends in one computation."""
        if not starts or any(map(_synchronous, (x, inner))):
            return self._describe(x, inner, x, x, asynchronous=False)
        launch, done = x, None
        for y in self._lines[x.position + 1 :]:
            if launch.name in y.operand_names and y.opcode.endswith("-update"):
                launch = y  # the start has only made ready
            elif launch.name in y.operand_names and y.opcode.endswith("-done"):
                done = y
                break
        return self._describe(x, inner, launch, done)

    def _sent(self, halves: list[Instruction]) -> Collective:
        """Describe a transfer: from its last launch to its first completion.

        Where its send or its recv is missing, it does not end in this text.
        """
        names = {x.name for x in halves}
        ends = [
            y
            for y in self._lines
            if y.opcode in ("send-done", "recv-done")
            and not names.isdisjoint(y.operand_names)
        ]
        whole = {x.opcode for x in halves} == {"send", "recv"}
        done = ends[0] if whole and len(ends) == len(halves) else None
        largest = max(halves, key=lambda x: bytes_of(x.arrays[:1]))
        return self._describe(halves[0], largest, halves[-1], done)

    def _woven(self, x: Instruction, inner: Instruction) -> Collective:
        """Describe a TPU collective that a fusion starts and another ends."""
        for y in self._lines[x.position + 1 :]:
            loop = y.opcode == "while"
            for z in self._module.body(y).instructions if loop else [y]:
                ends = self._module.holds(z, "AsyncCollectiveDone")
                if ends and x is self._origin(z, y):
                    before = z.computation.instructions[: z.position] if loop else []
                    return self._describe(x, inner, x, y, before)
        return self._describe(x, inner, x, None)

    def _origin(self, done: Instruction, loop: Instruction) -> Instruction | None:
        """Return the fusion that started what `done`, maybe in a loop's body, ends."""
        index = 0
        x = done.operand(0)
        while x is not None and not self._module.holds(x, "AsyncCollectiveStart"):
            if x.opcode == "get-tuple-element":
                index, x = tuple_index(x), x.operand(0)
            elif x.opcode == "tuple":
                x = x.operand(index)
            elif x.opcode == "while" or x.opcode in MOVES:  # a loop keeps the state
                x = x.operand(0)
            elif x.opcode == "parameter" and x.computation is not self._computation:
                x = loop.operand(0)
            else:  # a fusion that carries it on
                alias = x.attribute(
                    rf"output_to_operand_aliasing=\{{.*?\{{{index}\}}: \((\d+), "
                )
                x = None if alias is None else x.operand(int(alias))
        return x

    def _carried(self, x: Instruction, chain: str | None) -> int:
        """Count FLOPs in x of fusions that carry on the collective of a chain."""
        if x.opcode == "while":
            body = self._module.body(x).instructions
            return self._module.count(x) * sum(self._carried(y, chain) for y in body)
        if x.opcode != "fusion":
            return 0
        chains = map(_chain, self._module.collectives_of(x))
        return self._module.flops(x) if chain in chains else 0

    def _describe(
        self,
        x: Instruction,
        inner: Instruction,
        launch: Instruction,
        done: Instruction | None,
        before: Sequence[Instruction] = (),
        asynchronous: bool = True,
    ) -> Collective:
        """Assemble a collective's description from the text.

        Instruction x starts it, `inner` is the collective itself, x or in what x runs;
        `launch` is its real launch, `done` its end, or the loop whose body has the end
        after the instructions `before`.
        """
        end = launch.position if done is None else done.position
        within, part = 1.0, sum(map(self._module.flops, before))
        if before and done is not None:
            within = min(1.0, part / max(self._module.flops(done), 1))
        between = [*self._lines[launch.position + 1 : end], *before]
        flops = {y: self._module.flops(y) for y in between}
        carried = None
        if self._module.holds(x, "AsyncCollectiveStart"):
            carried = sum(self._carried(y, _chain(inner)) for y in between)
        size, dtype = _buffer(inner, launch, done)
        return Collective(
            name=x.name,
            kind=KINDS[inner.opcode.removesuffix("-start")],
            bytes=size,
            dtype=dtype,
            asynchronous=asynchronous,
            start=launch.position,
            done=None if done is None else done.position,
            where=_place(self._module, self._computation),
            times=self._times,
            groups=device_groups(inner, self._module.devices),
            flops_between=sum(flops.values()),
            flops_carried=carried,
            whiles_between=tuple(
                y.name for y, f in flops.items() if f and y.opcode == "while"
            ),
            within=within,
            op_name=(cause := _cause(inner, x)).op_name,
            source=self._module.sources.line(cause.metadata),
            pairs=permuted(inner),
        )


def _cause(inner: Instruction, x: Instruction) -> Instruction:
    """Return the instruction whose metadata name a collective's cause.

    A collective that the compiler made of several has none: then it is the nearest
    instruction that computes its operands.
    """
    queue = [inner, x]
    for y in queue:
        if y.op_name:
            return y
        queue += [z for z in y.operands if z not in queue]
    return inner


def _buffer(
    x: Instruction, launch: Instruction, done: Instruction | None
) -> tuple[int, str]:
    """Return the bytes of a collective's full buffer and the data type it carries."""
    ragged = x.opcode.startswith("ragged-")  # its operands: data, result, offsets, ...
    sent = x.operands[:1] if ragged else x.operands
    arrays, operand_bytes = x.arrays, sum(operand.bytes for operand in sent)
    if x.opcode in ("send", "recv"):  # (buffer, flags, token)
        arrays, operand_bytes = arrays[:1], 0
    elif x is launch and done is launch and x.opcode.endswith("-start"):
        # that waits right there; its result repeats the operands
        arrays = arrays[len(x.operand_names) :] or arrays
    elif x is launch and done is not None:
        arrays = done.arrays
    return max(bytes_of(arrays), operand_bytes), arrays[0][0] if arrays else ""


def _synchronous(x: Instruction) -> bool:
    """Return whether the compiler marks a start as synchronous."""
    return x.attribute(r'\bis_sync"?(?:: ?|=)"?(true|1)\b') is not None


def _chain(x: Instruction) -> str | None:
    """Return the key that the fusions of one TPU collective share."""
    chain = x.attribute(r'chain_id="(\d+)"')
    return chain and f"{x.opcode} {chain}"


def _transfer(x: Instruction) -> str:
    """Return the key that the sends and receives of one transfer share."""
    rendezvous = x.attribute(r'_xla_host_transfer_rendezvous="([^"]*)"')
    return rendezvous or x.attribute(r"channel_id=(\d+)") or x.name
