"""Reads from a compiled program what hides its communication.

    schedule = read(compiled.as_text(), trip_counts=2)
    assert schedule.hidden_fraction() == 1.0
    print(schedule.summary())

`as_text()` of a program compiled for GPU or TPU is optimized HLO in which the order of
the lines is the order of execution. A collective is hidden if it is asynchronous and
matrix products of the model run between its launch and its completion. What the forms
of such a pair are was read from schedules of jax 0.10.2 and 0.12 (libtpu 0.0.42.1 and
0.0.50.1). Bytes and FLOPs are those of one device and one execution of the program.
JAX is not imported.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from acco_jax.planning.hlo import (
    Computation,
    Groups,
    Instruction,
    device_groups,
    parse,
    product_flops,
    size_of,
)

_KINDS = {
    "reduce-scatter": "reduce-scatter",
    "all-gather": "all-gather",
    "all-reduce": "all-reduce",
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "all-to-all",
    "collective-permute": "collective-permute",
    "send": "send-recv",
    "recv": "send-recv",
}
_FREE = {"parameter", "constant", "iota", "get-tuple-element", "tuple", "bitcast"}
_FREE |= {"after-all", "add-dependency", "partition-id", "replica-id", "opt-barrier"}
_MOVES = {"copy", "copy-start", "copy-done", "bitcast", "convert", "opt-barrier"}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the schedule.

    Attributes:
        name: the instruction that starts it.
        kind: "reduce-scatter", "all-gather", "all-reduce", "all-to-all",
            "collective-permute" or "send-recv" (one transfer's sends and receives).
        bytes: of the full buffer: a reduce-scatter's operand, an all-gather's result.
        dtype: what travels, in HLO's name ("bf16").
        asynchronous: whether other operations can run meanwhile.
        start: position of the real launch in `where`.
        done: position of the completion there; None if it was not found.
        where: "ENTRY", or the computation that holds it (a loop's body).
        times: executions per execution of the program (loops around it).
        groups: devices that take part together, numbered within a slice where there
            are several TPU slices; () if the text does not say.
        flops_between: FLOPs of matrix products between launch and completion.
        flops_carried: those of them in fusions that carry the collective on, where the
            compiler wove it into fusions (TPU v5e): it is taken to go on inside these
            alone. None where the hardware needs no such help.
        whiles_between: loops with matrix products between launch and completion; only
            loops that lie there whole.
    """

    name: str
    kind: str
    bytes: int
    dtype: str
    asynchronous: bool
    start: int
    done: int | None
    where: str
    times: int
    groups: Groups
    flops_between: int
    flops_carried: int | None
    whiles_between: tuple[str, ...]

    @property
    def hidden(self) -> bool:
        """Whether matrix products run while it is under way."""
        return self.asynchronous and self.flops_between > 0 and self.flops_carried != 0

    @property
    def group_size(self) -> int | None:
        """Number of devices per group, None if unknown."""
        return max(map(len, self.groups)) if self.groups else None


@dataclasses.dataclass(frozen=True)
class Loop:
    """A while loop: trips is None where neither compiler nor caller knows it."""

    name: str
    where: str
    trips: int | None
    flops_per_trip: int


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of ENTRY: FLOPs of matrix products, bytes read and written."""

    position: int
    kind: str
    name: str
    flops: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What `read` found.

    Attributes:
        collectives: in order of execution, those of a loop's body after its ENTRY.
        operations: ENTRY's, for a timeline; those that cost nothing are left out.
        loops: every loop that runs; one with trips None is counted as one trip.
        flops: FLOPs of all matrix products.
    """

    collectives: tuple[Collective, ...]
    operations: tuple[Operation, ...]
    loops: tuple[Loop, ...]
    flops: int

    def select(
        self,
        min_bytes: int = 1 << 20,
        groups: int | Collection[Collection[int]] | None = None,
    ) -> list[Collective]:
        """Returns the collectives of at least `min_bytes` over the given groups.

        Args:
            min_bytes: smallest buffer counted.
            groups: the groups, for example `axis_groups(mesh.shape, "data")`, or their
                size; None for all collectives. One whose groups the text does not say
                (a send) matches None only.
        """
        return [
            c
            for c in self.collectives
            if c.bytes >= min_bytes and _matches(c.groups, groups)
        ]

    def hidden_fraction(
        self,
        min_bytes: int = 1 << 20,
        groups: int | Collection[Collection[int]] | None = None,
    ) -> float:
        """Fraction of the bytes of the selected collectives that is hidden.

        Raises:
            ValueError: if there is no such collective.
        """
        chosen = self.select(min_bytes, groups)
        total = sum(c.bytes * c.times for c in chosen)
        if not total:
            over = "" if groups is None else f" over groups {groups}"
            raise ValueError(
                f"no collective of at least {min_bytes} bytes{over} among the "
                f"{len(self.collectives)} of the schedule"
            )
        return sum(c.bytes * c.times for c in chosen if c.hidden) / total

    def summary(self, min_bytes: int = 1 << 20) -> str:
        """Describes collectives and loops in lines of text, small collectives apart."""
        large = self.select(min_bytes)
        small = [c for c in self.collectives if c.bytes < min_bytes]
        lines = [_line(c) for c in large]
        if large:
            lines.append(f"hidden: {self.hidden_fraction(min_bytes):.1%} of the bytes")
        lines.append(
            f"smaller than {min_bytes} bytes: {sum(c.times for c in small)} "
            f"collectives, {sum(c.bytes * c.times for c in small)} bytes"
        )
        for x in self.loops:
            trips = "? trips" if x.trips is None else f"{x.trips} trips"
            flops = f"{x.flops_per_trip / 1e9:.1f} GFLOP"
            lines.append(f"loop {x.name} in {x.where}: {trips} of {flops}")
        return "\n".join([*lines, f"{self.flops / 1e9:.1f} GFLOP"])


def _line(c: Collective) -> str:
    done = "?" if c.done is None else c.done
    line = f"{c.where}:{c.start}-{done} {c.name}: {c.kind} {c.bytes / 2**20:.1f} MiB "
    line += f"{c.dtype} x {c.times}, groups of {c.group_size or '?'}, "
    line += "hidden behind " if c.hidden else "exposed, "
    line += f"{c.flops_between / 1e9:.1f} GFLOP"
    if c.flops_carried is not None:
        line += f", {c.flops_carried / 1e9:.1f} of which carry it on"
    return line + (f" ({', '.join(c.whiles_between)})" if c.whiles_between else "")


def read(text: str, *, trip_counts: Mapping[str, int] | int | None = None) -> Schedule:
    """Reads `compiled.as_text()`.

    Args:
        text: a scheduled module's HLO.
        trip_counts: trips of loops that the compiler does not know, by the loop's name
            or one number for all; None counts one trip.

    Raises:
        ValueError: if the text has no schedule, or `trip_counts` names a loop that does
            not exist or whose count the compiler knows.
    """
    if "is_scheduled=true" not in text.split("\n", 1)[0]:
        raise ValueError(
            f"not the text of a compiled, scheduled module: {text[:40]!r}; "
            "pass jit(f).lower(...).compile().as_text()"
        )
    return _Reader(text, trip_counts).schedule()


def _matches(found: Groups, wanted: int | Collection[Collection[int]] | None) -> bool:
    if wanted is None:
        return True
    if isinstance(wanted, int):
        return bool(found) and max(map(len, found)) == wanted
    return bool(found) and {frozenset(g) for g in found} == set(map(frozenset, wanted))


@dataclasses.dataclass(frozen=True)
class _Site:
    """A computation whose lines run in order, and how often it runs."""

    computation: Computation
    times: int


_Real = tuple[Computation, Instruction]  # a collective and the computation it is in


class _Reader:
    def __init__(self, text: str, trip_counts: Mapping[str, int] | int | None):
        header = text.split("\n", 1)[0]
        counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", header)
        self.devices = math.prod(map(int, counts))
        self.computations, self.entry = parse(text)
        self.given = trip_counts
        self.flops_in = functools.cache(self._flops_in)
        self.bytes_in = functools.cache(self._bytes_in)
        self.trips = functools.cache(self._trips)
        self.collectives_in = functools.cache(self._collectives_in)

    def schedule(self) -> Schedule:
        sites = list(self.sites(_Site(self.computations[self.entry], 1)))
        loops = tuple(
            Loop(
                x.name, self.where(site), self.trips(c.name, x.name), self.body_flops(x)
            )
            for site in sites
            for c in [site.computation]
            for x in c.instructions
            if x.opcode == "while"
        )
        if isinstance(self.given, Mapping):
            unknown = [
                x.name
                for site in sites
                for x in site.computation.instructions
                if x.opcode == "while" and self.known_trips(site.computation, x) is None
            ]
            if wrong := set(self.given) - set(unknown):
                raise ValueError(
                    f"trip count given for {min(wrong)!r}, but the loops of unknown "
                    f"trip count are {unknown}"
                )
        entry = self.computations[self.entry]
        operations = tuple(
            Operation(x.position, x.opcode, x.name, self.flops(entry, x), size)
            for x in entry.instructions
            for size in [self.accessed(entry, x)]
            if x.opcode not in _FREE
        )
        return Schedule(
            collectives=tuple(f for site in sites for f in self.collectives(site)),
            operations=operations,
            loops=loops,
            flops=self.flops_in(self.entry),
        )

    # ---- which computations run, and how often

    def sites(self, site: _Site) -> Iterator[_Site]:
        """The computation and those that it runs line by line, once per call."""
        yield site
        c = site.computation
        for x in c.instructions:
            if x.opcode not in ("while", "call", "conditional"):
                continue
            times = site.times * self.count(c, x) if x.opcode == "while" else site.times
            for name in x.called:
                yield from self.sites(_Site(self.computations[name], times))

    def where(self, site: _Site) -> str:
        name = site.computation.name
        return "ENTRY" if name == self.entry else name

    def count(self, c: Computation, x: Instruction) -> int:
        """Trips of a loop, an unknown number counted as one."""
        trips = self.trips(c.name, x.name)
        return 1 if trips is None else trips

    def _trips(self, computation: str, loop: str) -> int | None:
        c = self.computations[computation]
        known = self.known_trips(c, c.by_name[loop])
        if known is not None:
            return known
        return self.given.get(loop) if isinstance(self.given, Mapping) else self.given

    def known_trips(self, c: Computation, x: Instruction) -> int | None:
        """From the compiler's note (GPU), else from a condition i < constant (TPU)."""
        noted = x.attribute(r'"known_trip_count":\{"n":"(\d+)"\}')
        if noted is not None:
            return int(noted)
        condition = self.computations[x.attribute(r"condition=%?([\w.\-]+)") or ""]
        test, start = condition.root, c.operand(x, 0)
        if test.opcode != "compare" or test.attribute("direction=(LT)") is None:
            return None
        counter, limit = (_source(condition, name) for name in test.operands)
        if counter.opcode != "get-tuple-element" or start is None:
            return None
        index = _index(counter)
        if start.opcode != "tuple":
            return None
        first = _constant(_source(c, start.operands[index]))
        last = _constant(limit)
        body = self.computations[_body(x)]
        step = _step(body, index)
        if first is None or last is None or step is None:
            return None
        return max(0, -(-(last - first) // step))

    # ---- FLOPs and bytes

    def body_flops(self, x: Instruction) -> int:
        return sum(map(self.flops_in, x.called))

    def _flops_in(self, name: str) -> int:
        c = self.computations[name]
        return sum(self.flops(c, x) for x in c.instructions)

    def flops(self, c: Computation, x: Instruction) -> int:
        """FLOPs of matrix products; of a conditional's branches the cheapest counts."""
        if x.opcode == "while":
            return self.count(c, x) * self.body_flops(x)
        inside = [self.flops_in(name) for name in x.called]
        if x.opcode == "conditional":
            return min(inside)
        return sum(inside) or product_flops(x, c.operands_of(x))

    def _bytes_in(self, name: str) -> int:
        c = self.computations[name]
        return sum(self.accessed(c, x) for x in c.instructions)

    def accessed(self, c: Computation, x: Instruction) -> int:
        """Bytes read and written; of a conditional's branches the dearest counts."""
        if x.opcode in _FREE or x.opcode.endswith("-done"):
            return 0
        if x.opcode == "while":
            return self.count(c, x) * sum(map(self.bytes_in, x.called))
        if x.opcode == "call":
            return sum(map(self.bytes_in, x.called))
        if x.opcode == "conditional":
            return max(map(self.bytes_in, x.called))
        if x.attribute(r'custom_call_target="(AllocateBuffer|ConcatBitcast)"'):
            return 0  # what a TPU only makes, or has already in one piece
        operands = c.operands_of(x)
        if x.opcode in ("dynamic-slice", "slice", "gather"):
            return 2 * x.size
        if x.opcode == "dynamic-update-slice":
            return 2 * operands[1].size
        if x.opcode == "fusion":
            return self.fused_bytes(x, operands)
        if x.opcode == "slice-start":
            return 2 * (x.size - operands[0].size)
        if x.opcode.endswith(("-start", "-update")):  # its result repeats the operands
            return max(x.size, sum(o.size for o in operands))
        return x.size + sum(o.size for o in operands)

    def fused_bytes(self, x: Instruction, operands: list[Instruction]) -> int:
        """Bytes of a fusion: only the slices where it reads or updates slices alone."""
        inner = self.computations[x.called[0]]
        total = 0
        for p in inner.instructions:
            if p.opcode == "parameter" and int(p.arguments) < len(operands):
                total += min(_read(inner, p), operands[int(p.arguments)].size)
        results = [inner.root]
        if inner.root.opcode == "tuple":
            results = inner.operands_of(inner.root)
        for r in results:
            while r.opcode == "bitcast" and r.operands:
                r = inner.by_name[r.operands[0]]
            update = inner.operand(r, 1) if r.opcode == "dynamic-update-slice" else None
            total += r.size if update is None else update.size
        return total

    # ---- collectives

    def collectives(self, site: _Site) -> list[Collective]:
        """The collectives of one computation, in order."""
        c = site.computation
        found: list[Collective] = []
        transfers: dict[str, list[Instruction]] = {}
        for x in c.instructions:
            kind = x.opcode.removesuffix("-start")
            started = kind != x.opcode
            if kind in ("send", "recv"):
                transfers.setdefault(_transfer(x), []).append(x)
            elif kind in _KINDS:
                found.append(self.paired(site, x, (c, x), started))
            elif started or kind == "fusion":
                fused = self.holds(x, "AsyncCollectiveStart")
                for real in itertools.chain(*map(self.collectives_in, x.called)):
                    if fused:
                        found.append(self.fused(site, x, real))
                    elif not self.continues(x, real[1]):
                        found.append(self.paired(site, x, real, started))
        found += [self.transferred(site, xs) for xs in transfers.values()]
        return sorted(found, key=lambda f: f.start)

    def _collectives_in(self, name: str) -> tuple[_Real, ...]:
        """Collectives inside a fusion or an asynchronously called computation."""
        c = self.computations[name]
        found: list[_Real] = [(c, x) for x in c.instructions if x.opcode in _KINDS]
        for x in c.instructions:
            if x.opcode in ("fusion", "call"):
                found += itertools.chain(*map(self.collectives_in, x.called))
        return tuple(found)

    def holds(self, x: Instruction, target: str) -> bool:
        """Whether a fusion contains a custom call to `target`."""
        return x.opcode == "fusion" and any(
            f'custom_call_target="{target}"' in y.attributes
            for name in x.called
            for y in self.computations[name].instructions
        )

    def continues(self, x: Instruction, real: Instruction) -> bool:
        """Whether a TPU fusion carries on or ends what another one started."""
        return '"async_collective_fusion_config"' in real.attributes or self.holds(
            x, "AsyncCollectiveDone"
        )

    def paired(
        self, site: _Site, x: Instruction, real: _Real, started: bool
    ) -> Collective:
        """A collective that starts and ends in one computation."""
        if not started or _is_sync(x) or _is_sync(real[1]):
            return self.described(site, x, real, x, x, asynchronous=False)
        launch, done = x, None
        for y in site.computation.instructions[x.position + 1 :]:
            if launch.name in y.operands and y.opcode.endswith("-update"):
                launch = y  # the start has only made ready
            elif launch.name in y.operands and y.opcode.endswith("-done"):
                done = y
                break
        return self.described(site, x, real, launch, done)

    def transferred(self, site: _Site, xs: list[Instruction]) -> Collective:
        """Sends and receives of one transfer: all launched, none completed."""
        c = site.computation
        done = [
            y
            for y in c.instructions
            if y.opcode in ("send-done", "recv-done")
            and any(x.name in y.operands for x in xs)
        ]
        first = min(done, key=lambda y: y.position) if len(done) == len(xs) else None
        largest = max(xs, key=lambda x: size_of(x.arrays[:1]))
        return self.described(site, xs[0], (c, largest), xs[-1], first)

    def fused(self, site: _Site, x: Instruction, real: _Real) -> Collective:
        """A TPU collective that a fusion starts and another, maybe in a loop, ends."""
        c = site.computation
        for y in c.instructions[x.position + 1 :]:
            inner = c if y.opcode != "while" else self.computations[_body(y)]
            for z in [y] if inner is c else inner.instructions:
                if self.holds(z, "AsyncCollectiveDone") and x is self.origin(
                    c, inner, z, y
                ):
                    within = inner.instructions[: z.position] if inner is not c else []
                    return self.described(site, x, real, x, y, (inner, within))
        return self.described(site, x, real, x, None)

    def origin(
        self,
        c: Computation,
        inner: Computation,
        done: Instruction,
        loop: Instruction,
    ) -> Instruction | None:
        """The fusion that started what `done`, in c or in a loop's body, ends."""
        at, index = inner, 0
        x = at.operand(done, 0)
        while x is not None and not self.holds(x, "AsyncCollectiveStart"):
            if x.opcode == "get-tuple-element":
                index = _index(x)
                x = at.operand(x, 0)
            elif x.opcode == "tuple":
                x = at.operand(x, index)
            elif x.opcode == "while" or x.opcode in _MOVES:  # a loop keeps the state
                x = at.operand(x, 0)
            elif x.opcode == "parameter" and at is not c:
                at, x = c, c.operand(loop, 0)
            else:  # a fusion that carries it on
                alias = x.attribute(
                    rf"output_to_operand_aliasing=\{{.*?\{{{index}\}}: \((\d+), "
                )
                x = None if alias is None else at.operand(x, int(alias))
        return x

    def carried(self, c: Computation, x: Instruction, state: str | None) -> int:
        """FLOPs in x of the fusions that carry on the collective `state`."""
        if x.opcode == "while":
            body = self.computations[_body(x)]
            inside = sum(self.carried(body, y, state) for y in body.instructions)
            return self.count(c, x) * inside
        if x.opcode != "fusion":
            return 0
        reals = itertools.chain(*map(self.collectives_in, x.called))
        return self.flops(c, x) if any(_state(r) == state for _, r in reals) else 0

    def described(
        self,
        site: _Site,
        x: Instruction,
        real: _Real,
        launch: Instruction,
        done: Instruction | None,
        inside: tuple[Computation, Sequence[Instruction]] | None = None,
        asynchronous: bool = True,
    ) -> Collective:
        """Puts together what is known of a collective.

        Args:
            site: where it is.
            x: what starts it.
            real: the collective itself.
            launch: its real launch.
            done: its end, or the loop that its end is in.
            inside: of that loop, the part before the end.
            asynchronous: whether other operations can run meanwhile.
        """
        c, (owner, r) = site.computation, real
        between: list[tuple[Computation, Instruction]] = []
        if done is not None:
            between = [
                (c, y) for y in c.instructions[launch.position + 1 : done.position]
            ]
        if inside is not None:
            between += [(inside[0], y) for y in inside[1]]
        arrays = r.arrays
        if r.opcode in ("send", "recv"):  # (buffer, flags, token)
            size = size_of(arrays[:1])
        else:
            if r is launch and done is launch and r.opcode.endswith("-start"):
                # that waits right there; its result repeats the operands
                arrays = arrays[len(r.operands) :] or arrays
            elif r is launch and done is not None:
                arrays = done.arrays
            size = max(size_of(arrays), sum(o.size for o in owner.operands_of(r)))
        carried = None
        if self.holds(x, "AsyncCollectiveStart"):
            carried = sum(self.carried(at, y, _state(r)) for at, y in between)
        flops = [self.flops(at, y) for at, y in between]
        return Collective(
            name=x.name,
            kind=_KINDS[r.opcode.removesuffix("-start")],
            bytes=size,
            dtype=arrays[0][0] if arrays else "",
            asynchronous=asynchronous,
            start=launch.position,
            done=None if done is None else done.position,
            where=self.where(site),
            times=site.times,
            groups=device_groups(r, self.devices),
            flops_between=sum(flops),
            flops_carried=carried,
            whiles_between=tuple(
                y.name
                for (_, y), f in zip(between, flops, strict=True)
                if f and y.opcode == "while"
            ),
        )


def _read(c: Computation, x: Instruction) -> int:
    """Bytes that are read of a fused computation's value: of slices only the slices."""
    total = x.size if x.root else 0
    for u in c.instructions:
        if x.name not in u.operands:
            continue
        first = u.operands[0] == x.name
        if first and u.opcode in ("bitcast", "dynamic-slice", "slice", "gather"):
            total += _read(c, u)
        elif not first or u.opcode != "dynamic-update-slice":
            total += x.size
        # an updated buffer is not read, only written at the slice
    return min(total, x.size)


def _is_sync(x: Instruction) -> bool:
    return '"is_sync":true' in x.attributes


def _body(loop: Instruction) -> str:
    return loop.attribute(r"\bbody=%?([\w.\-]+)") or ""


def _index(x: Instruction) -> int:
    return int(x.attribute(r"\bindex=(\d+)") or 0)


def _state(real: Instruction) -> str | None:
    """What the fusions of one TPU collective have in common."""
    chain = real.attribute(r'chain_id="(\d+)"')
    return chain and f"{real.opcode} {chain}"


def _transfer(x: Instruction) -> str:
    """What the sends and receives of one transfer have in common."""
    meeting = x.attribute(r'_xla_host_transfer_rendezvous="([^"]*)"')
    return meeting or x.attribute(r"channel_id=(\d+)") or x.name


def _source(c: Computation, name: str) -> Instruction:
    """The instruction that a value comes from, copies left out."""
    x = c.by_name[name]
    while x.opcode in _MOVES and x.operands:
        x = c.by_name[x.operands[0]]
    return x


def _constant(x: Instruction) -> int | None:
    found = re.fullmatch(r"-?\d+", x.arguments) if x.opcode == "constant" else None
    return int(found[0]) if found else None


def _step(body: Computation, index: int) -> int | None:
    """What a loop's body adds to element `index` of its tuple."""
    if body.root.opcode != "tuple":
        return None
    x = _source(body, body.root.operands[index])
    if x.opcode != "add":
        return None
    values = [_constant(_source(body, name)) for name in x.operands]
    return next((v for v in values if v is not None and v > 0), None)
