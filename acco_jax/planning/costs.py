"""What a schedule would cost on a chip: predictions, never measurements.

An operation takes its matrix products at the chip's peak plus its bytes at the
memory's: a sum, so that a loop costs what its body does when it is unrolled.
Collectives run one after the other, beside the operations that the schedule puts
between their launch and completion.

Sources of the formulas: rings as in NCCL's src/graph/tuning.cc (n - 1 steps, of which
hosts - 1 cross the network; every GPU of a host drives its own adapter), and its trees
for what is small; an all-to-all through each device's own links, without the ring's
advantage that only hosts - 1 steps cross the network; on TPU along all links of a torus
at once, between slices a second stage over the data-centre network
(jax-ml.github.io/scaling-book, "Sharded matrices").
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from acco_jax.planning.chips import Chip
from acco_jax.planning.schedules import Collective, Operation, Schedule
from acco_jax.planning.topologies import Topology

# JAX devices of the largest slice: docs.cloud.google.com/tpu/docs/{v5e,v5p,v6e,tpu7x}
LARGEST_SLICE = {"v5e": 256, "v5p": 8960, "v6e": 256, "tpu7x": 2 * 9216}
EFFICIENCY = 0.8
PRODUCTS = "loops and matrix products"
OTHER = "other operations"
SMALL = 1 << 16  # bytes: below, NCCL takes a tree and the protocol of low latency,
SMALL_HOP, SMALL_FAR = 0.6e-6, 5e-6  # seconds per step over NVLink and the network
FEW_BITS = ((8, None), (4, None), (8, 8), (4, 8))  # gather_bits, reduce_bits
_BITS = {"f32": 32, "bf16": 16, "f16": 16}


@dataclasses.dataclass(frozen=True)
class Figure:
    """A number that predictions rest on, and where it is from."""

    value: float
    unit: str
    source: str


def figures(
    chip: Chip, changes: Mapping[str, float] | None = None
) -> dict[str, Figure]:
    """All that predictions rest on, by name.

    Args:
      chip: whose figures to take.
      changes: other values, by name, in the same units (SI).

    Raises:
      ValueError: a name that does not exist, or a value that is not positive.
    """
    sheet = (
        "NVIDIA's data sheet"
        if chip.platform == "gpu"
        else f"docs.cloud.google.com/tpu/docs/{chip.name}"
    )
    nccl = "NCCL's tuning.cc"
    hop = nccl if chip.platform == "gpu" else "JAX's scaling book, per hop"
    assumed = "assumed: share of the peak that is reached"
    found = {
        "flops": Figure(chip.flops, "FLOP/s", f"{sheet}: bf16, dense"),
        "memory_bytes": Figure(chip.memory_bytes, "B", sheet),
        "memory_bandwidth": Figure(chip.memory_bandwidth, "B/s", sheet),
        "fast_bandwidth": Figure(
            chip.fast_bandwidth,
            "B/s",
            f"{sheet}: {'NVLink' if chip.gpu else 'ICI'}, one way, all links",
        ),
        "slow_bandwidth": Figure(
            chip.slow_bandwidth,
            "B/s",
            "NVIDIA's DGX data sheet: a network adapter per GPU"
            if chip.gpu
            else f"{sheet}: data-centre network",
        ),
        "fast_latency": Figure(chip.fast_latency, "s", hop),
        "slow_latency": Figure(chip.slow_latency, "s", nccl),
        "compute_efficiency": Figure(EFFICIENCY, "", assumed),
        "memory_efficiency": Figure(EFFICIENCY, "", assumed),
        "network_efficiency": Figure(EFFICIENCY, "", assumed),
    }
    for name, value in (changes or {}).items():
        if name not in found:
            near = difflib.get_close_matches(name, list(found), 1, cutoff=0)[0]
            raise ValueError(
                f"there is no figure {name!r} (did you mean {near!r}?): known are "
                + ", ".join(found)
            )
        if not 0 < value < math.inf:
            raise ValueError(f"the figure {name} is {value:g}: it must be positive.")
        found[name] = Figure(value, found[name].unit, "given on the command line")
    return found


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices joined fast in domains (hosts, slices), and domains by a network."""

    topology: Topology
    figures: Mapping[str, Figure]

    def value(self, name: str) -> float:
        return self.figures[name].value

    def domain(self, devices: int) -> int:
        """How many of `devices` one domain holds, when there are so many in all."""
        largest = self.topology.fast_domain
        if self.topology.platform == "tpu" and self.topology.slices == 1:
            largest = LARGEST_SLICE[self.topology.chip.name]
        return min(devices, largest)

    def domains(self, c: Collective) -> int:
        """How many domains of the topology a collective's first group lies in."""
        if c.kind == "send-recv" or not c.groups:
            return self.topology.devices // self.topology.fast_domain
        return len({device // self.topology.fast_domain for device in c.groups[0]})

    def seconds(self, kind: str, size: int, devices: int, domain: int) -> float:
        """Time of one collective.

        Args:
          kind: as in `Collective`.
          size: bytes of the full buffer.
          devices: that take part.
          domain: how many of them are in one host or slice.
        """
        if devices < 2:
            return 0.0
        efficiency = self.value("network_efficiency")
        fast = self.value("fast_bandwidth") * efficiency
        slow = self.value("slow_bandwidth") * efficiency
        hop, far = self.value("fast_latency"), self.value("slow_latency")
        if kind == "send-recv":  # between slices
            return size / slow + far
        rounds = 2 if kind == "all-reduce" else 1
        domains = -(-devices // domain)
        outside = (devices - domain) / devices  # of a device's blocks, for all-to-all
        if self.topology.platform == "gpu" and size < SMALL:
            return 2 * ((domain - 1) * SMALL_HOP + math.log2(domains) * SMALL_FAR)
        if kind == "collective-permute":  # to one neighbour
            return size / fast + hop if domains == 1 else size / slow + far
        if self.topology.platform == "gpu":
            latency = (devices - domains) * hop + (domains - 1) * far
            if kind == "all-to-all":  # through a device's own links, both at once
                inside = (domain - 1) / devices
                return size * max(inside / fast, outside / slow) + latency
            link = fast if domains == 1 else min(fast, domain * slow)
            return rounds * (size * (devices - 1) / devices / link + latency)
        sides = self.topology.chip.dimensions
        side = domain ** (1 / sides)
        latency = sides * (side - 1) * hop + (domains - 1) * far
        if kind == "all-to-all":  # a block crosses side / 4 links of each dimension
            within = size * (1 - outside) * sides * side / 4 / fast
            return within + size * outside / slow + latency
        within = size * (domain - 1) / domain / fast
        between = size / domain * (domains - 1) / domains / slow
        return rounds * (within + between + latency)


@dataclasses.dataclass(frozen=True)
class Span:
    """A stretch of predicted time, in seconds."""

    track: str  # "computation", "communication" or "waiting"
    name: str
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One half-round, in seconds.

    Attributes:
      spans: for a timeline.
      matrix: of the computation, loops and operations that hold matrix products.
      computation: all of it, without waiting.
      communication: all collectives, hidden or not.
      exposed: waiting for them.
    """

    spans: tuple[Span, ...]
    matrix: float
    computation: float
    communication: float
    exposed: float

    @property
    def total(self) -> float:
        return self.computation + self.exposed

    @property
    def hidden(self) -> float:
        """Share of the communication's time that is hidden."""
        if not self.communication:
            return 1.0
        return max(0.0, 1 - self.exposed / self.communication)


def predict(schedule: Schedule, machine: Machine, devices: int) -> Prediction:
    """Walks through a schedule.

    Args:
      schedule: as compiled for the machine's topology.
      machine: figures and network.
      devices: how many to predict for; where it is not the topology's own number, the
        data axis's collectives grow (or shrink) to it and nothing else changes.
    """
    return _Walk(schedule, machine, devices).run()


def synchronous(prediction: Prediction, half_rounds: int) -> float:
    """Seconds of a ZeRO-1 step that computes what `half_rounds` half-rounds do.

    All loops and matrix products, once what is beside them (the optimizer), and one
    half-round's communication with nothing beside it.
    """
    update = prediction.computation - prediction.matrix
    return half_rounds * prediction.matrix + update + prediction.communication


def in_few_bits(
    schedule: Schedule,
    names: Sequence[str],
    gather_bits: int | None,
    reduce_bits: int | None,
    *,
    hide_reduction: bool,
    within: Collection[str] = (),
) -> Schedule:
    """The schedule if its collectives carried fewer bits; packing is not counted.

    Args:
      schedule: of a method that sends plain values.
      names: of the collectives that carry gradients or parameters.
      gather_bits: of every parameter; None: as it is.
      reduce_bits: of every gradient; None: as it is.
      hide_reduction: whether the chip runs an all-to-all, which a reduction in few bits
        is, beside computation.
      within: names of those that a first data axis has to itself; gradients cross it
        as they are.
    """

    # the gradients' way comes first, whatever a compiler made of its collectives
    reduces = set(list(names)[: len(names) // 2])

    def fewer(c: Collective) -> Collective:
        bits = reduce_bits if c.name in reduces else gather_bits
        if c.name in reduces and c.name in within:
            bits = None
        if c.name not in names or bits is None or c.dtype not in _BITS:
            return c
        size = c.bytes * bits // _BITS[c.dtype]
        if c.name not in reduces or c.kind == "send-recv":
            return dataclasses.replace(c, bytes=size)
        hidden = c.asynchronous and hide_reduction
        return dataclasses.replace(
            c, bytes=size, asynchronous=hidden, kind="all-to-all"
        )

    collectives = tuple(map(fewer, schedule.collectives))
    return dataclasses.replace(schedule, collectives=collectives)


class _Walk:
    def __init__(self, schedule: Schedule, machine: Machine, devices: int) -> None:
        self.schedule, self.machine, self.devices = schedule, machine, devices
        self.clock = self.network_free = self.exposed = self.matrix = 0.0
        self.communication = 0.0
        self.begun: dict[str, float] = {}
        self.spans: list[Span] = []

    def run(self) -> Prediction:
        schedule = self.schedule
        # (position, order there, what happens, to what); what ends in an operation (a
        # TPU's loop) ends after it, the rest before
        before, during, start, after = range(4)
        events: list[tuple[int, int, Callable[[Any], None], Any]] = [
            (o.position, during, self.compute, o) for o in schedule.operations
        ]
        working = {o.position for o in schedule.operations if o.flops}
        for c in schedule.collectives:
            if c.where != "ENTRY":
                continue
            done = c.done if c.asynchronous and c.done is not None else c.start
            late = done in working or done == c.start
            events.append((c.start, start, self.begin, c))
            events.append((done, after if late else before, self.end, c))
        for _, _, happens, what in sorted(events, key=lambda event: event[:2]):
            happens(what)
        for c in self.schedule.collectives:
            if c.where != "ENTRY":
                self.inside(c)
        computation = sum(
            s.end - s.start for s in self.spans if s.track == "computation"
        )
        return Prediction(
            tuple(self.spans),
            self.matrix,
            computation,
            self.communication,
            self.exposed,
        )

    def compute(self, o: Operation) -> None:
        if o.kind.endswith(("-start", "-update", "-done")) or any(
            o.position == c.start and c.where == "ENTRY" and not o.flops
            for c in self.schedule.collectives
        ):
            return
        value = self.machine.value
        seconds = o.flops / (value("flops") * value("compute_efficiency"))
        seconds += o.bytes / (value("memory_bandwidth") * value("memory_efficiency"))
        self.matrix += seconds if o.flops else 0.0
        name = PRODUCTS if o.flops else OTHER
        self.add("computation", name, self.clock, self.clock + seconds)
        self.clock += seconds

    def seconds(self, c: Collective) -> float:
        machine, topology = self.machine, self.machine.topology
        if c.kind == "send-recv":  # 1 - 1/slices of what a slice holds
            seconds = machine.seconds(c.kind, c.bytes, topology.devices, 1)
            slices = max(1, self.devices * topology.slices // topology.devices)
            return seconds * (1 - 1 / slices) / (1 - 1 / max(topology.slices, 2))
        if (c.group_size or topology.devices) == topology.devices:  # everyone
            domain = machine.domain(self.devices)
            return machine.seconds(c.kind, c.bytes, self.devices, domain)
        size, domains = len(c.groups[0]), machine.domains(c)
        here = topology.devices // topology.fast_domain
        if here > 1 and domains == here:  # across all of them, however many there are
            domains = max(1, self.devices // topology.fast_domain)
            size = size // here * domains
        return machine.seconds(c.kind, c.bytes, size, size // domains)

    def begin(self, c: Collective) -> None:
        self.begun[c.name] = max(self.clock, self.network_free)
        self.network_free = self.begun[c.name] + self.seconds(c)

    def end(self, c: Collective) -> None:
        seconds, begun = self.seconds(c), self.begun[c.name]
        # woven into the fusions of a TPU v5e it goes on inside these alone
        share = 1.0
        if c.flops_carried is not None:
            share = c.flops_carried / c.flops_between if c.flops_between else 0.0
        passed = max(0.0, self.clock - begun)
        if passed * share >= seconds:
            finished = begun + seconds / share if share else begun
        else:
            finished = max(begun, self.clock) + seconds - passed * share
        self.add("communication", c.kind, begun, finished)
        if finished > self.clock:
            self.add("waiting", c.kind, self.clock, finished)
            self.exposed += finished - self.clock
            self.clock = finished
        self.communication += seconds
        self.network_free = max(finished, self.network_free)

    def inside(self, c: Collective) -> None:
        """A collective in a loop's body, once per trip: what outlasts the products."""
        seconds, value = self.seconds(c), self.machine.value
        beside = c.flops_between / (value("flops") * value("compute_efficiency"))
        waits = c.times * max(0.0, seconds - (beside if c.hidden else 0.0))
        self.communication += c.times * seconds
        self.add("waiting", c.kind, self.clock, self.clock + waits)
        self.clock += waits
        self.exposed += waits

    def add(self, track: str, name: str, start: float, end: float) -> None:
        last = self.spans[-1] if self.spans else None
        if last and (last.track, last.name, last.end) == (track, name, start):
            self.spans[-1] = dataclasses.replace(last, end=end)
        elif end > start:
            self.spans.append(Span(track, name, start, end))
