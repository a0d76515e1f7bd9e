"""Figures of a machine that predictions rest on, and the time of one collective.

Sources of the formulas: rings as in NCCL's src/graph/tuning.cc (n - 1 steps, of which
hosts - 1 cross the network; every GPU of a host drives its own adapter), and its trees
for what is small; an all-to-all through each device's own links, without the ring's
advantage that only hosts - 1 steps cross the network; on TPU along all links of the
dimensions of a torus that the devices span, one way each if a dimension is no ring,
between slices a second stage over the data-centre network
(jax-ml.github.io/scaling-book, "Sharded matrices").
"""

import dataclasses
import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from acco_jax.core.names import check_name
from acco_jax.schedule.chips import LARGEST_SLICE, Chip
from acco_jax.schedule.schedules import Collective
from acco_jax.schedule.topologies import Topology

# Below this size NCCL takes a tree and the protocol of low latency: seconds per
# step over NVLink and over the network. A larger all-reduce takes a tree where it is
# faster than a ring; it reaches a share of the ring's rate.
SMALL_BYTES = 1 << 16
SMALL_HOP_SECONDS, SMALL_NETWORK_SECONDS = 0.6e-6, 5e-6
TREE_HOP_SECONDS, TREE_NETWORK_SECONDS, TREE_RATE = 4e-6, 14e-6, 0.92
# The share of a GPU's memory that JAX takes when it starts, by default.
PREALLOCATED = 0.75


class Range(NamedTuple):
    """Share of a peak that programs reach: least, likely and most."""

    low: float
    likely: float
    high: float


# Assumed, if nothing was measured: large matmuls of cuBLAS and of a TPU's matrix
# unit, streaming copies and NCCL's benchmarks reach the most of each; a model's own
# matmuls are smaller, and chips lower their clocks under load.
EFFICIENCIES = {
    "compute": Range(0.5, 0.7, 0.9),
    "memory": Range(0.6, 0.8, 0.95),
    "network": Range(0.6, 0.8, 0.95),
}
# By how much an operation takes longer beside a collective: on GPUs beside copies and
# additions that send 50 GB/s and more, matmuls and additions; see the source.
CONTENTION = {
    "gpu": (Range(0.03, 0.07, 0.17), "experiments/results/contention.md: one H200"),
    "tpu": (Range(0.0, 0.05, 0.1), "assumed: the memory's bandwidth is shared"),
    "cpu": (Range(0.0, 0.0, 0.0), "none is assumed"),
}


@dataclasses.dataclass(frozen=True)
class Constant:
    """A number that predictions rest on, and its source."""

    value: float
    unit: str
    source: str
    range: tuple[float, float] | None = None  # least and most; None: it is known


Change = float | tuple[float, float]  # a value to use instead, or its least and most
MEASURED = "measured by --calibrate"  # source of such figures
# The shares that are reached of a rate; one that was measured is of the measured rate.
SHARES = {
    "flops": ["compute_efficiency"],
    "memory_bandwidth": ["memory_efficiency"],
    "fast_bandwidth": ["fast_efficiency"],
    "slow_bandwidth": ["slow_efficiency"],
    "network_efficiency": ["fast_efficiency", "slow_efficiency"],
}


def figures(
    chip: Chip,
    changes: Mapping[str, Change] | None = None,
    measured: Mapping[str, Change] | None = None,
) -> dict[str, Constant]:
    """Return all figures that predictions rest on, by name.

    Args:
      chip: the device.
      changes: values or ranges to use instead, by name, in SI units.
      measured: the same, of --calibrate; `changes` come before them. Their share of a
        rate goes where `changes` have the rate.

    Raises:
      ValueError: if a name does not exist, or a value is not allowed for it.
    """
    gpu = chip.platform == "gpu"
    sheet = chip.source
    nccl = "NCCL's tuning.cc"
    fast = f"{sheet}: {chip.link}, one way, all links"
    slow = f"{sheet}: data-centre network"
    slow = "the vendor's servers: a network adapter per GPU" if gpu else slow
    sources = {
        "flops": ("FLOP/s", f"{sheet}: bf16, dense"),
        "memory_bytes": ("B", sheet),
        "memory_bandwidth": ("B/s", sheet),
        "fast_bandwidth": ("B/s", fast),
        "slow_bandwidth": ("B/s", slow),
        "fast_latency": ("s", nccl if gpu else "JAX's scaling book, per hop"),
        "slow_latency": ("s", nccl),
    }
    table = {k: Constant(getattr(chip, k), *source) for k, source in sources.items()}
    for part, share in EFFICIENCIES.items():
        assumed = "assumed: share of the peak that is reached"
        ends = share.low, share.high
        table[f"{part}_efficiency"] = Constant(share.likely, "", assumed, ends)
    share, source = CONTENTION[chip.platform]
    table["contention"] = Constant(
        share.likely, "", source, (share.low, share.high) if share.high else None
    )
    room = "XLA_PYTHON_CLIENT_MEM_FRACTION's default" if gpu else "the compiler's limit"
    table["memory_fraction"] = Constant(
        PREALLOCATED if gpu else 1.0, "", f"of the memory for JAX: {room}"
    )
    table["call_seconds"] = Constant(
        0.0, "s", "of a call beside its schedule: none, unless --calibrate measures it"
    )
    given = dict(changes or {})
    gone = given.keys() | {share for name in given for share in SHARES.get(name, [])}
    left = {k: x for k, x in (measured or {}).items() if k not in gone}
    for name in ("fast_efficiency", "slow_efficiency"):
        if name in left | given:
            table[name] = Constant(1.0, "", "instead of network_efficiency")
    for name, change in [*left.items(), *given.items()]:
        check_name("the name of a figure", name, table)
        ends = change if isinstance(change, tuple) else (change, change)
        for value in ends:
            _check_value(name, value)
        if ends[0] > ends[1]:
            raise ValueError(
                f"the figure {name} is {ends[0]:g}:{ends[1]:g}: give the least first."
            )
        table[name] = Constant(
            (ends[0] + ends[1]) / 2,
            table[name].unit,
            MEASURED if name in left else "given on the command line",
            ends if ends[0] < ends[1] else None,
        )
    return table


def _check_value(name: str, value: float) -> None:
    none = value == 0 and name in ("call_seconds", "contention")
    if not none and not 0 < value < math.inf:
        raise ValueError(f"the figure {name} is {value:g}: it must be positive.")
    if name.endswith(("_efficiency", "_fraction")) and value > 1:
        raise ValueError(
            f"the figure {name} is {value:g}: it is a share of the peak, at most 1 "
            "(0.4 for 40 %)."
        )


class Links(NamedTuple):
    """Links of a TPU's torus that a collective has."""

    dimensions: int  # that its devices span
    share: float  # of all links of a device


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices joined fast in domains (hosts, slices), and a network between these."""

    topology: Topology
    figures: Mapping[str, Constant]

    def value(self, name: str) -> float:
        return self.figures[name].value

    @property
    def network(self) -> str:
        """Link that joins the devices: "network of 400 Gbit/s", or a host's link."""
        return self.network_of(self.topology.devices)

    def network_of(self, devices: int) -> str:
        """Return the link that would join a number of devices."""
        if devices <= self.domain(devices):
            return self.topology.chip.link
        return f"network of {self.value('slow_bandwidth') * 8 / 1e9:,.4g} Gbit/s"

    def reached(self, network: str) -> float:
        """Return the bytes/s that collectives reach on the "fast" or "slow" network."""
        own = f"{network}_efficiency"  # of a network that was measured
        share = own if own in self.figures else "network_efficiency"
        return self.value(f"{network}_bandwidth") * self.value(share)

    @property
    def usable_memory(self) -> float:
        """Bytes of a device's memory that programs may take."""
        return self.value("memory_bytes") * self.value("memory_fraction")

    def at(self, network: str, rate: float) -> "Machine":
        """Return the machine with another rate of its "fast" or "slow" network.

        A share that was measured was of the measured rate.
        """
        rate_name = f"{network}_bandwidth"
        gone = [x for x in SHARES[rate_name] if self._measured(x)]
        table = {k: x for k, x in self.figures.items() if k not in gone}
        table[rate_name] = Constant(rate, "B/s", "varied")
        return Machine(self.topology, table)

    def _measured(self, name: str) -> bool:
        return name in self.figures and self.figures[name].source == MEASURED

    def corners(self) -> Iterator["Machine"]:
        """Yield the machine with each combination of its ranges' ends."""
        ranges = {n: f.range for n, f in self.figures.items() if f.range is not None}
        for ends in itertools.product(*ranges.values()):
            chosen = zip(ranges, ends, strict=True)
            values = {
                name: dataclasses.replace(self.figures[name], value=value, range=None)
                for name, value in chosen
            }
            yield Machine(self.topology, {**self.figures, **values})

    def domain(self, devices: int) -> int:
        """Return how many of `devices` one domain holds."""
        largest = self.topology.fast_domain
        if self.topology.platform == "tpu" and self.topology.slices == 1:
            largest = LARGEST_SLICE[self.topology.chip.name]
        return min(devices, largest)

    def domains(self, c: Collective) -> int:
        """Count the topology's domains that a collective's widest group spans."""
        if c.kind == "send-recv" or not c.groups:
            return self.topology.devices // self.topology.fast_domain
        fast = self.topology.fast_domain
        return max(len({device // fast for device in group}) for group in c.groups)

    def links(self, domain: int, group: Sequence[int] = ()) -> Links:
        """Return the links of a slice that a collective has.

        Args:
          domain: devices of a slice, which all take part where there is no group. If
            they are not the topology's they form a square or a cube.
          group: numbers of the devices of a slice that take part. Of n groups that lie
            between each other each has 1/n of the links.
        """
        topology, chip = self.topology, self.topology.chip
        if group:
            places = [topology.coordinates[i] for i in group]
            spans = [sorted(set(along)) for along in zip(*places, strict=True)]
            sizes = [len(span) for span in spans]
            apart = [(s[-1] - s[0]) / max(len(s) - 1, 1) for s in spans]
            around = map(operator.mul, sizes, apart)
            whole = map(operator.eq, around, topology.shape)
            rings = list(map(operator.and_, whole, topology.rings))
        elif domain == topology.fast_domain:
            sizes, rings = list(topology.shape), list(topology.rings)
            apart = [1.0] * len(sizes)
        else:
            side = (domain / chip.devices_per_chip) ** (1 / chip.dimensions)
            side = round(side, 6)  # of a cube of 64 it is 4
            sizes = [math.ceil(side)] * chip.dimensions
            rings, apart = [side >= chip.ring] * len(sizes), [1.0] * len(sizes)
        own = [
            (2 if ring else 1) / distance
            for size, ring, distance in zip(sizes, rings, apart, strict=True)
            if size > 1
        ]
        if not own:  # the devices of one chip
            return Links(1, 1.0)
        return Links(len(own), sum(own) / (2 * chip.dimensions))

    def seconds(
        self,
        kind: str,
        size: int,
        devices: int,
        domain: int,
        group: Sequence[int] = (),
    ) -> float:
        """Predict the seconds of one collective.

        Args:
          kind: as in `Collective`.
          size: bytes of the full buffer.
          devices: number of devices that take part.
          domain: how many of them are in one host or slice.
          group: numbers of the devices of a TPU's slice, if not all take part.
        """
        if devices < 2:
            return 0.0
        fast, slow = self.reached("fast"), self.reached("slow")
        hop, far = self.value("fast_latency"), self.value("slow_latency")
        if kind == "send-recv":  # between slices
            return size / slow + far
        rounds = 2 if kind == "all-reduce" else 1
        domains = -(-devices // domain)
        outside = (devices - domain) / devices  # of a device's blocks, for all-to-all
        if kind == "collective-permute":  # to one neighbour
            if domains > 1:
                return size / slow + far
            return size / (fast / self.topology.chip.neighbours) + hop
        if self.topology.platform != "tpu" and size < SMALL_BYTES:
            within = (domain - 1) * SMALL_HOP_SECONDS
            return 2 * (within + math.log2(domains) * SMALL_NETWORK_SECONDS)
        if self.topology.platform != "tpu":
            latency = (devices - domains) * hop + (domains - 1) * far
            if kind == "all-to-all":  # through a device's own links, both at once
                inside = (domain - 1) / devices
                return size * max(inside / fast, outside / slow) + latency
            link = fast if domains == 1 else min(fast, domain * slow)
            ring = rounds * (size * (devices - 1) / devices / link + latency)
            if rounds == 1:
                return ring
            up = (domain - 1) * TREE_HOP_SECONDS
            up += math.log2(domains) * TREE_NETWORK_SECONDS
            return min(ring, 2 * (up + size / (TREE_RATE * link)))
        sides, share = self.links(domain, group)
        side, fast = domain ** (1 / sides), fast * share
        latency = sides * (side - 1) * hop + (domains - 1) * far
        if kind == "all-to-all":  # a block crosses side / 4 links of each dimension
            within = size * (1 - outside) * sides * side / 4 / fast
            return within + size * outside / slow + latency
        within = size * (domain - 1) / domain / fast
        between = size / domain * (domains - 1) / domains / slow
        return rounds * (within + between + latency)
