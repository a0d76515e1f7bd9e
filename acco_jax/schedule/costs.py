"""Cost model of a schedule on a chip: predictions, never measurements.

An operation takes its matmuls at the chip's peak plus its bytes at the memory's: a sum,
so that a loop costs what its body does when it is unrolled. Collectives run one after
the other, overlapped with the operations that the schedule puts between their launch
and completion. Beside a collective an operation takes longer, by the machine's
`contention`: the two share cores and memory. So does the collective, which is not
counted; an exposed one is therefore not shortened by the longer operations.

The efficiencies are ranges (`machines.py`): a prediction is of their likely values,
and its interval of every combination of their ends.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from acco_jax.schedule import torus
from acco_jax.schedule.machines import Machine
from acco_jax.schedule.schedules import Collective, Loop, Operation, Schedule

PRODUCTS = "loops and matrix products"
OTHER = "other operations"
SLOWING = "slowed by communication"
PARTS = ("-start", "-update", "-done")  # of collectives, and of operations in LAUNCHED
LAUNCHED = ("copy-start", "slice-start", "fusion-start")  # operations of the device
FEW_BITS = ((8, None), (4, None), (8, 8), (4, 8))  # gather_bits, reduce_bits
_BITS = {"f32": 32, "bf16": 16, "f16": 16}


@dataclasses.dataclass(frozen=True)
class Span:
    """A stretch of predicted time, in seconds."""

    track: str  # "computation", "communication" or "waiting"
    name: str
    start: float
    end: float


class Spent(NamedTuple):
    """Seconds of one collective in all its executions."""

    seconds: float
    exposed: float  # seconds of these
    slowing: float = 0.0  # by which it delays the operations beside it


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Predicted seconds of one execution of a program, or of several in sequence."""

    spans: tuple[Span, ...]  # for a timeline
    matrix: float  # loops and operations that hold matmuls
    matmul: float  # of the computation, the matmuls' FLOPs
    memory: float  # the rest of it: reading and writing memory
    communication: float  # all collectives, overlapped or exposed
    exposed: float  # exposed communication
    slowing: float  # by which overlapped communication delays the computation
    each: tuple[Spent, ...]  # of every collective of the schedule, in its order
    call: float = 0.0  # time of a call beside its schedule
    executions: int = 1

    @property
    def computation(self) -> float:
        """Seconds of the computation, without exposed communication."""
        return self.matmul + self.memory

    @property
    def total(self) -> float:
        return self.computation + self.slowing + self.exposed + self.call

    @property
    def hidden(self) -> float:
        """Share of the communication's time that is overlapped."""
        if not self.communication:
            return 1.0
        return max(0.0, 1 - self.exposed / self.communication)


def predict(
    schedule: Schedule,
    machine: Machine,
    devices: int,
    in_group: Callable[[Collective], bool] = lambda _: False,
) -> Prediction:
    """Predict how long a schedule takes.

    Args:
      schedule: as compiled for the machine's topology.
      machine: figures and network.
      devices: how many to predict for; where it is not the topology's own number, the
        data axis's collectives grow (or shrink) to it and nothing else changes.
      in_group: whether a collective stays within a model-parallel group, whose size
        does not change.
    """
    each = [Spent(0.0, 0.0)] * len(schedule.collectives)
    places: dict[str, list[int]] = {"ENTRY": []}
    for i, c in enumerate(schedule.collectives):
        places.setdefault(c.where, []).append(i)
    here = machine.topology.devices
    together = _permutes(schedule.collectives, machine)
    seconds = list[float]()
    for i, c in enumerate(schedule.collectives):
        many = here if devices == here or in_group(c) else devices
        if i in together:
            seconds.append(_crossing(c, together[i], machine, many))
        else:
            seconds.append(collective_seconds(c, machine, many))
    inside: dict[str, dict[str, float]] = {}  # by the loop, and link
    entry = _Timeline(machine, inside)
    for where, own in reversed(places.items()):  # what a loop runs before the loop
        timeline = entry if where == "ENTRY" else _Timeline(machine, inside)
        operations = schedule.operations if where == "ENTRY" else schedule.bodies[where]
        found = [(schedule.collectives[i], seconds[i]) for i in own]
        used = dict.fromkeys(("fast", "slow"), 0.0)
        for i, spent in zip(own, timeline.run(operations, found), strict=True):
            c = schedule.collectives[i]
            each[i] = Spent(*(x * c.times for x in spent))
            used[_link(c, machine)] += spent.seconds - spent.exposed
        _use(inside, schedule.loops, where, used)
    for where, own in places.items():
        if where != "ENTRY":  # a loop body's exposed communication, after all else
            for i in own:
                entry.wait(schedule.collectives[i].kind, each[i].exposed)
                entry.slow(each[i].slowing)
    return Prediction(
        tuple(entry.spans),
        entry.matrix,
        entry.matmul,
        entry.memory,
        sum(spent.seconds for spent in each),
        sum(spent.exposed for spent in each),
        sum(spent.slowing for spent in each),
        tuple(each),
        machine.value("call_seconds"),
    )


def _link(c: Collective, machine: Machine) -> str:
    return "fast" if machine.domains(c) == 1 else "slow"


def _use(
    inside: dict[str, dict[str, float]],
    loops: Sequence[Loop],
    where: str,
    used: Mapping[str, float],
) -> None:
    """Add the seconds of each link in a computation to the loops around it."""
    for loop in loops:
        if loop.body == where:
            trips = 1 if loop.iterations is None else loop.iterations
            times = {link: trips * seconds for link, seconds in used.items()}
            total = inside.setdefault(loop.name, dict.fromkeys(used, 0.0))
            for link, seconds in times.items():
                total[link] += seconds
            _use(inside, loops, loop.where, times)


def in_turn(
    schedules: Sequence[Schedule],
    machine: Machine,
    devices: int,
    in_group: Callable[[Collective], bool] = lambda _: False,
) -> Prediction:
    """Predict how long schedules take one after the other, each once.

    Arguments are as for `predict`; `each` has the collectives of all of them.
    """
    found = [predict(schedule, machine, devices, in_group) for schedule in schedules]
    spans, start = [], 0.0
    for p in found:
        spans += [
            dataclasses.replace(s, start=s.start + start, end=s.end + start)
            for s in p.spans
        ]
        start += p.total
    return Prediction(
        tuple(spans),
        matrix=sum(p.matrix for p in found),
        matmul=sum(p.matmul for p in found),
        memory=sum(p.memory for p in found),
        communication=sum(p.communication for p in found),
        exposed=sum(p.exposed for p in found),
        slowing=sum(p.slowing for p in found),
        each=tuple(spent for p in found for spent in p.each),
        call=sum(p.call for p in found),
        executions=len(found),
    )


def operation_seconds(o: Operation, machine: Machine) -> float:
    """Predict the time of an operation without its collectives, in seconds."""
    return sum(_parts(o, machine))


def _parts(o: Operation, machine: Machine) -> tuple[float, float]:
    """Return the seconds of an operation's FLOPs and of its bytes."""
    memory = machine.value("memory_bandwidth") * machine.value("memory_efficiency")
    products = machine.value("flops") * machine.value("compute_efficiency")
    return o.flops / products, o.bytes / memory


def synchronous(prediction: Prediction, repeats: float) -> float:
    """Predict the seconds of a ZeRO-1 step with the work of `repeats` half-rounds.

    One call has all loops and matmuls, the rest of the computation once (the
    optimizer), and one half-round's communication, exposed.
    """
    update = prediction.computation - prediction.matrix + prediction.call
    once = (update + prediction.communication) / prediction.executions
    return repeats * prediction.matrix + once


def in_few_bits(
    schedule: Schedule,
    names: Sequence[str],
    gather_bits: int | None,
    reduce_bits: int | None,
    *,
    hide_reduction: bool,
    within: Collection[str] = (),
) -> Schedule:
    """Return the schedule with quantized collectives; packing is not counted.

    Args:
      schedule: of a method that sends plain values.
      names: of the collectives that carry gradients or parameters.
      gather_bits: of every parameter; None: unchanged.
      reduce_bits: of every gradient; None: unchanged.
      hide_reduction: whether the chip overlaps an all-to-all (a quantized reduction)
        with computation.
      within: names of collectives within a first data axis; gradients cross it
        unquantized.
    """

    # of other kinds, which a compiler made, the gradients' come first
    first = set(names[: len(names) // 2])

    def fewer(c: Collective) -> Collective:
        reduces = c.kind == "reduce-scatter"
        if c.kind not in ("reduce-scatter", "all-gather"):
            reduces = c.name in first
        bits = reduce_bits if reduces else gather_bits
        if reduces and c.name in within:
            bits = None
        if c.name not in names or bits is None or c.dtype not in _BITS:
            return c
        c = dataclasses.replace(c, bytes=c.bytes * bits // _BITS[c.dtype])
        if not reduces or c.kind == "send-recv":
            return c
        hidden = c.asynchronous and hide_reduction
        return dataclasses.replace(c, asynchronous=hidden, kind="all-to-all")

    collectives = tuple(map(fewer, schedule.collectives))
    return dataclasses.replace(schedule, collectives=collectives)


@dataclasses.dataclass
class _Flight:
    """A collective that has been launched and not awaited."""

    kind: str
    start: float
    end: float
    link: str = ""  # "fast" or "slow"
    waited: float = 0.0  # seconds in which nothing was computed
    stopped: float = 0.0  # seconds in which loops' own collectives used its link


class _Timeline:
    """A walk through one computation: when it and the network are busy, in seconds."""

    def __init__(
        self, machine: Machine, inside: Mapping[str, Mapping[str, float]]
    ) -> None:
        """Take the seconds of each link that loops' own collectives use, by loop."""
        self._machine, self._inside = machine, inside
        self._clock = self._network_free = 0.0
        self._flying: dict[int, _Flight] = {}
        self.matrix = self.matmul = self.memory = 0.0
        self.spans: list[Span] = []

    def run(
        self,
        operations: Sequence[Operation],
        collectives: Sequence[tuple[Collective, float]],
    ) -> list[Spent]:
        """Run one execution of operations and of collectives with their seconds."""
        # (position, order there, what happens); a collective that ends in an operation
        # (a TPU's loop) ends after it, the others before
        before, during, launch, after = range(4)
        launches = {c.start for c, _ in collectives}
        working = {o.position: o for o in operations if o.flops}
        spent = [Spent(0.0, 0.0)] * len(collectives)
        events: list[tuple[int, int, Callable[[], None]]] = []

        def end(i: int) -> None:
            c, seconds = collectives[i]
            rest = 0.0  # of the loop inside of which it ends
            if c.within < 1 and c.done in working:
                rest = operation_seconds(working[c.done], self._machine)
            spent[i] = self._end(i, c, seconds, rest * (1 - c.within))

        for o in operations:
            if o.position not in launches or o.flops:
                compute = functools.partial(self._compute, o)
                events.append((o.position, during, compute))
        for i, (c, seconds) in enumerate(collectives):
            done = c.done if c.asynchronous and c.done is not None else c.start
            late = done in working or done == c.start
            events += [
                (c.start, launch, functools.partial(self._begin, i, c, seconds)),
                (done, after if late else before, functools.partial(end, i)),
            ]
        for _, _, happen in sorted(events, key=lambda event: event[:2]):
            happen()
        return spent

    def wait(self, name: str, seconds: float) -> None:
        """Add time in which nothing is computed."""
        self._add("waiting", name, self._clock, self._clock + seconds)
        self._clock += seconds

    def slow(self, seconds: float) -> None:
        """Add time that communication takes from the computation beside it."""
        self._add("computation", SLOWING, self._clock, self._clock + seconds)
        self._clock += seconds

    def _compute(self, o: Operation) -> None:
        """Add an operation, unless it is part of a collective."""
        if o.kind.endswith(PARTS) and o.kind not in LAUNCHED and not o.flops:
            return
        matmul, memory = _parts(o, self._machine)
        self.matmul, self.memory = self.matmul + matmul, self.memory + memory
        seconds = matmul + memory
        self.matrix += seconds if o.flops else 0.0
        name = PRODUCTS if o.flops else OTHER
        self._add("computation", name, self._clock, self._clock + seconds)
        used = self._inside.get(o.name, {})
        for flight in self._flying.values():
            left = max(0.0, flight.end + flight.stopped - self._clock)
            if left:
                flight.stopped += min(used.get(flight.link, 0.0), seconds)
        self._clock += seconds

    def _begin(self, i: int, c: Collective, seconds: float) -> None:
        """Launch collective number i, which starts when the network is free."""
        start = max(self._clock, self._network_free)
        self._network_free = start + seconds
        link = _link(c, self._machine)
        self._flying[i] = _Flight(c.kind, start, self._network_free, link)

    def _end(self, i: int, c: Collective, seconds: float, rest: float) -> Spent:
        """Wait for collective number i, which ended `rest` seconds ago.

        While the loops beside it used its link, it did not advance.
        """
        own = self._flying.pop(i)
        start = own.start
        for other in self._flying.values():  # what is before it waits first
            self._await(other, min(other.end, start))
        # woven into the fusions of a TPU v5e it advances only inside these
        share = 1.0
        if c.flops_carried is not None:
            share = c.flops_carried / c.flops_between if c.flops_between else 0.0
        passed = max(0.0, self._clock - start - rest - own.stopped)
        beside = min(passed, seconds / share) if share else 0.0
        beside = max(0.0, beside - own.waited)
        if passed * share >= seconds:
            finish = start + seconds / share if share else start
        else:
            finish = max(start, self._clock) + seconds - passed * share
        self._add("communication", c.kind, start, finish)
        self._await(own, finish)
        slowing = beside * self._machine.value("contention")
        self.slow(slowing)
        self._network_free = max(finish, self._network_free)
        return Spent(seconds, own.waited, slowing)

    def _await(self, flight: "_Flight", until: float) -> None:
        """Wait for a collective until a time."""
        if until > self._clock:
            flight.waited += until - self._clock
            self.wait(flight.kind, until - self._clock)

    def _add(self, track: str, name: str, start: float, end: float) -> None:
        last = self.spans[-1] if self.spans else None
        if last and (last.track, last.name, last.end) == (track, name, start):
            self.spans[-1] = dataclasses.replace(last, end=end)
        elif end > start:
            self.spans.append(Span(track, name, start, end))


def _permutes(
    collectives: Sequence[Collective], machine: Machine
) -> dict[int, list[Collective]]:
    """Return the permutes within a TPU's slice: each with those it shares links with.

    They are launched before the first of them ends.
    """
    found: dict[int, list[Collective]] = {}
    if machine.topology.platform != "tpu":
        return found
    open_: dict[str, list[Collective]] = {}
    for i, c in enumerate(collectives):
        if c.kind == "collective-permute" and c.pairs and machine.domains(c) == 1:
            own = open_.get(c.where, [])
            first = own[0].done if own and own[0].asynchronous else None
            if first is None or c.start >= first:
                own = open_[c.where] = []
            own.append(c)
            found[i] = own
    return found


def _crossing(
    c: Collective, together: Sequence[Collective], machine: Machine, devices: int
) -> float:
    """Predict a permute's part of the seconds that those beside it take with it.

    Together they take what the busiest link needs. Ways are as much longer on other
    numbers of devices as a slice is wider.
    """
    topology, chip = machine.topology, machine.topology.chip
    size, hops = torus.busiest(topology, tuple((x.pairs, x.bytes) for x in together))
    wider = (devices / topology.devices) ** (1 / chip.dimensions)
    link = machine.reached("fast") / (2 * chip.dimensions)
    seconds = wider * (size / link + hops * machine.value("fast_latency"))
    return seconds * c.bytes / max(sum(x.bytes for x in together), 1)


def collective_seconds(c: Collective, machine: Machine, devices: int) -> float:
    """Predict the seconds of one execution of a collective.

    Args:
      c: of a schedule compiled for the machine's topology.
      machine: figures and network.
      devices: as for `predict`.
    """
    topology = machine.topology
    if c.kind == "send-recv" and topology.slices == 1:  # to one neighbour
        domain = machine.domain(devices)
        return machine.seconds("collective-permute", c.bytes, devices, domain)
    if c.kind == "send-recv":  # 1 - 1/slices of a slice's bytes
        seconds = machine.seconds(c.kind, c.bytes, topology.devices, 1)
        slices = max(1, devices * topology.slices // topology.devices)
        return seconds * (1 - 1 / slices) / (1 - 1 / max(topology.slices, 2))
    if (c.group_size or topology.devices) == topology.devices:  # everyone
        return machine.seconds(c.kind, c.bytes, devices, machine.domain(devices))
    widest: Sequence[int] = max(c.groups, key=len)
    size, domains = len(widest), machine.domains(c)
    apart = any(len({i // len(g) for i in g}) > 1 for g in c.groups)
    hosts = topology.devices // topology.fast_domain
    if apart and (domains > 1 or hosts == 1):
        # across groups of neighbours, and across hosts, however many there are
        size = max(1, size * devices // topology.devices)
        domains = max(1, domains * -(-devices // machine.domain(devices)) // hosts)
    return machine.seconds(c.kind, c.bytes, size, max(1, size // domains), widest)
