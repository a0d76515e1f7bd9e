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

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from acco_jax.plan.chips import Chip
from acco_jax.plan.schedules import Collective, Operation, Schedule
from acco_jax.plan.topologies import Topology
from acco_jax.runner.names import check_name

# JAX devices of the largest slice: docs.cloud.google.com/tpu/docs/{v5e,v5p,v6e,tpu7x}
LARGEST_SLICE = {"v5e": 256, "v5p": 8960, "v6e": 256, "tpu7x": 2 * 9216}
EFFICIENCY = 0.8
PRODUCTS = "loops and matrix products"
OTHER = "other operations"
# Below so many bytes NCCL takes a tree and the protocol of low latency: seconds per
# step over NVLink and over the network.
SMALL_BYTES = 1 << 16
SMALL_HOP_SECONDS, SMALL_NETWORK_SECONDS = 0.6e-6, 5e-6
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
    """Returns all that predictions rest on, by name.

    Args:
      chip: the device.
      changes: values to use instead, by name, in the same units (SI).

    Raises:
      ValueError: a name that does not exist, or a value that is not positive.
    """
    gpu = chip.platform == "gpu"
    sheet = f"docs.cloud.google.com/tpu/docs/{chip.name}"
    sheet = "NVIDIA's data sheet" if gpu else sheet
    nccl = "NCCL's tuning.cc"
    fast = f"{sheet}: {'NVLink' if gpu else 'ICI'}, one way, all links"
    slow = f"{sheet}: data-centre network"
    slow = "NVIDIA's DGX data sheet: a network adapter per GPU" if gpu else slow
    sources = {
        "flops": ("FLOP/s", f"{sheet}: bf16, dense"),
        "memory_bytes": ("B", sheet),
        "memory_bandwidth": ("B/s", sheet),
        "fast_bandwidth": ("B/s", fast),
        "slow_bandwidth": ("B/s", slow),
        "fast_latency": ("s", nccl if gpu else "JAX's scaling book, per hop"),
        "slow_latency": ("s", nccl),
    }
    table = {k: Figure(getattr(chip, k), *source) for k, source in sources.items()}
    for part in ("compute", "memory", "network"):
        assumed = "assumed: share of the peak that is reached"
        table[f"{part}_efficiency"] = Figure(EFFICIENCY, "", assumed)
    for name, value in (changes or {}).items():
        check_name("the name of a figure", name, table)
        if not 0 < value < math.inf:
            raise ValueError(f"the figure {name} is {value:g}: it must be positive.")
        table[name] = Figure(value, table[name].unit, "given on the command line")
    return table


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices joined fast in domains (hosts, slices), and domains by a network."""

    topology: Topology
    figures: Mapping[str, Figure]

    def value(self, name: str) -> float:
        return self.figures[name].value

    def domain(self, devices: int) -> int:
        """Returns how many of `devices` one domain holds."""
        largest = self.topology.fast_domain
        if self.topology.platform == "tpu" and self.topology.slices == 1:
            largest = LARGEST_SLICE[self.topology.chip.name]
        return min(devices, largest)

    def domains(self, c: Collective) -> int:
        """Counts the topology's domains that a collective's first group lies in."""
        if c.kind == "send-recv" or not c.groups:
            return self.topology.devices // self.topology.fast_domain
        return len({device // self.topology.fast_domain for device in c.groups[0]})

    def seconds(self, kind: str, size: int, devices: int, domain: int) -> float:
        """Predicts the time of one collective, in seconds.

        Args:
          kind: as in `Collective`.
          size: bytes of the full buffer.
          devices: number of devices that take part.
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
        if self.topology.platform == "gpu" and size < SMALL_BYTES:
            within = (domain - 1) * SMALL_HOP_SECONDS
            return 2 * (within + math.log2(domains) * SMALL_NETWORK_SECONDS)
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
    """One half-round, in seconds."""

    spans: tuple[Span, ...]  # for a timeline
    matrix: float  # loops and operations that hold matrix products
    computation: float  # all of it, without waiting
    communication: float  # all collectives, hidden or not
    exposed: float  # waiting for them

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
    """Predicts how long a schedule takes.

    Args:
      schedule: as compiled for the machine's topology.
      machine: figures and network.
      devices: how many to predict for; where it is not the topology's own number, the
        data axis's collectives grow (or shrink) to it and nothing else changes.
    """
    timeline = _Timeline(schedule, machine, devices)
    # (position, order there, method, argument); a collective that ends in an operation
    # (a TPU's loop) ends after it, the others before
    before, during, launch, after = range(4)
    events: list[tuple[int, int, Any, Any]] = [
        (o.position, during, timeline.compute, o) for o in schedule.operations
    ]
    working = {o.position for o in schedule.operations if o.flops}
    for c in schedule.collectives:
        if c.where == "ENTRY":
            done = c.done if c.asynchronous and c.done is not None else c.start
            late = done in working or done == c.start
            events.append((c.start, launch, timeline.begin, c))
            events.append((done, after if late else before, timeline.end, c))
    for _, _, method, argument in sorted(events, key=lambda event: event[:2]):
        method(argument)
    for c in schedule.collectives:
        if c.where != "ENTRY":
            timeline.repeat(c)
    computation = (s.end - s.start for s in timeline.spans if s.track == "computation")
    return Prediction(
        tuple(timeline.spans),
        timeline.matrix,
        sum(computation),
        timeline.communication,
        timeline.exposed,
    )


def synchronous(prediction: Prediction, half_rounds: int) -> float:
    """Predicts the seconds of a ZeRO-1 step that does the work of some half-rounds.

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
    """Returns the schedule with collectives of fewer bits; packing is not counted.

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
    gradients = set(names[: len(names) // 2])

    def fewer(c: Collective) -> Collective:
        reduces = c.name in gradients
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


class _Timeline:
    """A walk through a schedule, in seconds: when computation and network are busy."""

    def __init__(self, schedule: Schedule, machine: Machine, devices: int) -> None:
        self._machine, self._devices = machine, devices
        self._launches = {c.start for c in schedule.collectives if c.where == "ENTRY"}
        self._clock = self._network_free = 0.0
        self._starts: dict[str, float] = {}
        self.matrix = self.communication = self.exposed = 0.0
        self.spans: list[Span] = []

    def compute(self, o: Operation) -> None:
        """Adds an operation, unless it is part of a collective."""
        if o.kind.endswith(("-start", "-update", "-done")) or (
            o.position in self._launches and not o.flops
        ):
            return
        memory = self._machine.value("memory_bandwidth")
        memory *= self._machine.value("memory_efficiency")
        seconds = self._product_seconds(o.flops) + o.bytes / memory
        self.matrix += seconds if o.flops else 0.0
        name = PRODUCTS if o.flops else OTHER
        self._add("computation", name, self._clock, self._clock + seconds)
        self._clock += seconds

    def begin(self, c: Collective) -> None:
        """Launches a collective, which goes on when the network is free."""
        self._starts[c.name] = max(self._clock, self._network_free)
        self._network_free = self._starts[c.name] + self._seconds(c)

    def end(self, c: Collective) -> None:
        """Waits for a collective."""
        seconds, start = self._seconds(c), self._starts[c.name]
        # woven into the fusions of a TPU v5e it goes on inside these alone
        share = 1.0
        if c.flops_carried is not None:
            share = c.flops_carried / c.flops_between if c.flops_between else 0.0
        passed = max(0.0, self._clock - start)
        if passed * share >= seconds:
            finish = start + seconds / share if share else start
        else:
            finish = max(start, self._clock) + seconds - passed * share
        self._add("communication", c.kind, start, finish)
        if finish > self._clock:
            self._wait(c.kind, finish - self._clock)
            self._clock = finish
        self.communication += seconds
        self._network_free = max(finish, self._network_free)

    def repeat(self, c: Collective) -> None:
        """Adds a collective of a loop's body: what outlasts the products, each trip."""
        seconds = self._seconds(c)
        beside = self._product_seconds(c.flops_between) if c.hidden else 0.0
        wait = c.times * max(0.0, seconds - beside)
        self.communication += c.times * seconds
        self._wait(c.kind, wait)
        self._clock += wait

    def _product_seconds(self, flops: int) -> float:
        value = self._machine.value
        return flops / (value("flops") * value("compute_efficiency"))

    def _seconds(self, c: Collective) -> float:
        machine, topology = self._machine, self._machine.topology
        if c.kind == "send-recv":  # 1 - 1/slices of what a slice holds
            seconds = machine.seconds(c.kind, c.bytes, topology.devices, 1)
            slices = max(1, self._devices * topology.slices // topology.devices)
            return seconds * (1 - 1 / slices) / (1 - 1 / max(topology.slices, 2))
        if (c.group_size or topology.devices) == topology.devices:  # everyone
            domain = machine.domain(self._devices)
            return machine.seconds(c.kind, c.bytes, self._devices, domain)
        size, domains = len(c.groups[0]), machine.domains(c)
        total = topology.devices // topology.fast_domain
        if total > 1 and domains == total:  # across all of them, however many there are
            domains = max(1, self._devices // topology.fast_domain)
            size = size // total * domains
        return machine.seconds(c.kind, c.bytes, size, size // domains)

    def _wait(self, name: str, seconds: float) -> None:
        self._add("waiting", name, self._clock, self._clock + seconds)
        self.exposed += seconds

    def _add(self, track: str, name: str, start: float, end: float) -> None:
        last = self.spans[-1] if self.spans else None
        if last and (last.track, last.name, last.end) == (track, name, start):
            self.spans[-1] = dataclasses.replace(last, end=end)
        elif end > start:
            self.spans.append(Span(track, name, start, end))
