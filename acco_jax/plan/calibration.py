"""Calibration: measures local devices, and a train step beside its prediction.

calibrate(config) -> Report measures kernels first (matmuls, copies, collectives), then
a step with two numbers of microbatches. Their difference tells how much slower a
model's own operations are than these kernels, and the rest what a call takes beside its
schedule. Last comes the experiment's own step, held out, beside plan's prediction with
those figures. `python -m acco_jax.plan --calibration=FILE` uses them for other plans of
the chip.
"""

import dataclasses
import json
import math
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from ml_collections import ConfigDict

from acco_jax.core.gloo import all_gather, reduce_scatter
from acco_jax.core.leaves import PyTree
from acco_jax.plan import programs
from acco_jax.plan.planner import of_method
from acco_jax.plan.programs import Program
from acco_jax.run.config import fields as configs
from acco_jax.schedule import costs
from acco_jax.schedule.chips import CHIPS, Chip, of_kind
from acco_jax.schedule.machines import Change, Constant, Machine, figures
from acco_jax.schedule.schedules import Schedule
from acco_jax.schedule.tables import aligned, quantity, seconds
from acco_jax.schedule.topologies import Topology

WIDTH = 1.18  # of the interval to each side of the measured value: 1.4 in all
# Most times that collectives are slower or faster than their kernels. On CPUs 1:
# the same cores dispatch, compute and communicate, and that is a call's own time.
LIMIT = 20.0
REPEATS = 5  # of each measurement; the least counts, as nothing else slowed it
_SIZES = {"cpu": (256, 512), "gpu": (2048, 4096, 8192), "tpu": (2048, 4096, 8192)}
_BYTES = {"cpu": (1 << 22, 1 << 24), "gpu": (1 << 26, 1 << 28)}
_BYTES["tpu"] = _BYTES["gpu"]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One measurement of a kernel on all devices at once."""

    name: str
    size: int  # rows of a square matrix, or bytes of a buffer
    rate: float  # per device: FLOP/s, or bytes/s
    unit: str


@dataclasses.dataclass(frozen=True)
class Step:
    """A call of a train step: one half-round."""

    method: str
    microbatches: int
    measured: float  # seconds
    predicted: float  # from the figures before calibration
    interval: tuple[float, float]  # from the figures after calibration
    hidden: float  # predicted overlapped share of the communication's time, after
    measured_hidden: float | None  # None: no communication to overlap
    held_out: bool  # whether the calibration did not use it

    @property
    def inside(self) -> bool:
        return self.interval[0] <= self.measured <= self.interval[1]


@dataclasses.dataclass(frozen=True)
class Report:
    """Measurements, and the figures that follow from them."""

    kind: str  # of the devices
    chip: str
    devices: int
    kernels: tuple[Kernel, ...]
    figures: dict[str, Change]  # for plan's --calibration
    steps: tuple[Step, ...]


def calibrate(config: ConfigDict) -> Report:
    """Measure kernels and train steps, with an experiment's model and batch.

    Raises:
      ValueError: if an experiment cannot run so.
    """
    groups = {f"mesh.{axis}": size for axis, size in config.mesh.items()}
    for name, size in {**groups, "domains": config.domains}.items():
        if (size or 1) > 1:
            raise ValueError(
                f"{name}={size}: --calibrate measures devices that each are a worker, "
                f"all on one axis. Leave out --config.{name}."
            )
    devices = np.array(jax.devices())
    mesh, platform = Mesh(devices, ("data",)), devices[0].platform
    topology = _topology(devices)
    kernels = (*_products(mesh), *_copies(mesh), *_collectives(mesh))
    kind = devices[0].device_kind
    rates = _of_kernels(kernels, platform) | _memory(kind, topology.chip)
    machine = Machine(topology, figures(topology.chip, measured=rates))

    shapes = _shapes(config)
    prepared = [_Prepared(*shape, config, mesh) for shape in shapes]
    times = _interleaved([p.run for p in prepared])
    few, many, held_out = prepared
    apart = many.program.microbatches - few.program.microbatches
    slope = (times[1] - times[0]) / apart
    before = [costs.predict(p.schedule, machine, devices.size) for p in prepared]
    predicted = (before[1].computation - before[0].computation) / apart
    scale = predicted / slope if slope > 0 else 1.0  # of the rates of all kernels
    changed = rates | _scaled(machine, scale)
    rest = max(0.0, times[0] - few.program.microbatches * slope)
    after = Machine(topology, figures(topology.chip, measured=changed))
    p = costs.predict(few.schedule, after, devices.size)
    # the rest of a step, without its microbatches and the optimizer
    left = max(0.0, rest - (p.computation - few.program.microbatches * slope))
    if p.communication:
        most = p.communication * (1 if platform == "cpu" else LIMIT)
        taken = min(max(left, p.communication / LIMIT), most)
        changed |= _network(machine, p.communication / taken)
        left = max(0.0, left - taken)
    changed["call_seconds"] = _ends(left)
    final = Machine(topology, figures(topology.chip, measured=changed))
    steps = [
        _step(p, measured, old, final, slope, rest, p is held_out)
        for p, measured, old in zip(prepared, times, before, strict=True)
    ]
    return Report(
        kind, topology.chip.name, devices.size, kernels, changed,
        tuple(steps),
    )  # fmt: skip


def _shapes(config: ConfigDict) -> list[tuple[str, int]]:
    """Return methods and microbatches: two to calibrate with, one held out."""
    own = config.microbatches_per_step
    method = "acco" if config.method == "auto" else config.method
    return [("zero1", own), ("zero1", 3 * own), (method, 2 * own)]


class _Prepared:
    """A step with its inputs on the devices."""

    def __init__(
        self, method: str, microbatches: int, config: ConfigDict, mesh: Mesh
    ) -> None:
        other = of_method(config, method)
        with other.unlocked():
            other.microbatches, other.counts = "fixed", ()
        other.microbatches_per_step = microbatches
        other = configs.with_first_half(other, microbatches // 2)  # equal ones suffice
        self.program: Program = programs.describe(other, mesh)
        lowered = self.program.step.lower(*self.program.arguments)
        text = lowered.compile().as_text()
        assert text is not None
        self.schedule: Schedule = self.program.read(text)
        self._arguments = [_array(x) for x in self.program.arguments]

    def run(self) -> None:
        """Run a call and block until it ends."""
        params, state, *rest = self._arguments
        params, state, _ = self.program.step(params, state, *rest)
        self._arguments[:2] = jax.block_until_ready((params, state))


def _array(tree: PyTree) -> PyTree:
    """Make arrays like abstract ones: small floats, zeros of other kinds."""

    def make(x: jax.ShapeDtypeStruct) -> jax.Array:
        def fill() -> jax.Array:
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                return jax.random.key(0)
            if jnp.issubdtype(x.dtype, jnp.floating):
                return jnp.full(x.shape, 0.01, x.dtype)
            return jnp.zeros(x.shape, x.dtype)

        return jax.jit(fill, out_shardings=x.sharding)()

    return jax.tree.map(make, tree)


def _interleaved(calls: Sequence[Callable[[], None]]) -> list[float]:
    """Time each call REPEATS times, in turns; return the least, in seconds."""
    times: list[list[float]] = [[] for _ in calls]
    for repeat in range(REPEATS + 1):
        for call, found in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            if repeat:  # the first compiles
                found.append(time.perf_counter() - start)
    return [min(found) for found in times]


def _memory(kind: str, chip: Chip) -> dict[str, Change]:
    """Return the memory of a card that has another than its data sheet's."""
    own, sheets = (re.search(r"\b(\d+)GB", name) for name in (kind, chip.title))
    if own is None or sheets is None or own[1] == sheets[1]:
        return {}
    return {"memory_bytes": chip.memory_bytes * int(own[1]) / int(sheets[1])}


def _topology(devices: np.ndarray) -> Topology:
    """Return the local devices as a topology.

    Raises:
      ValueError: if no figures of the devices are known, or they are no box of chips.
    """
    hosts = len({d.process_index for d in devices.flat})
    first = devices.flat[0]
    chip = of_kind(first.device_kind)
    if chip is None and first.platform != "cpu":
        raise ValueError(
            f"no data sheet of {first.device_kind} is known: --calibrate is for "
            f"{', '.join(CHIPS)} and CPUs."
        )
    if chip is None:
        chip = Chip(
            "cpu", first.device_kind, "cpu", flops=1.0, memory_bytes=1,
            memory_bandwidth=1.0, fast_bandwidth=1.0, slow_bandwidth=1.0,
            fast_latency=1e-6,
        )  # fmt: skip
    shape: tuple[int, ...] = (hosts, devices.size // hosts)
    if chip.platform == "tpu":
        places = np.array([d.coords[: chip.dimensions] for d in devices.flat])
        shape = tuple((np.ptp(places, axis=0) + 1).tolist())
        if math.prod(shape) * chip.devices_per_chip != devices.size:
            raise ValueError(
                f"--calibrate needs a whole box of chips, but these {devices.size} "
                f"devices lie in one of {'x'.join(map(str, shape))} chips."
            )
    return Topology(chip.platform, chip, shape)


# ---- kernels


def _products(mesh: Mesh) -> list[Kernel]:
    """Measure square matmuls on all devices at once."""
    platform = mesh.devices.flat[0].platform
    dtype = jnp.float32 if platform == "cpu" else jnp.bfloat16
    found = []
    for n in _SIZES[platform]:
        x = _split(mesh, (mesh.size, n, n), dtype)
        multiply = jax.jit(lambda a: a @ a, out_shardings=x.sharding)
        taken = _taken(multiply, x)
        found.append(Kernel("matrix product", n, 2 * n**3 / taken, "FLOP/s"))
    return found


def _copies(mesh: Mesh) -> list[Kernel]:
    """Measure reading and writing memory on all devices at once."""
    found = []
    for size in _BYTES[mesh.devices.flat[0].platform]:
        x = _split(mesh, (mesh.size, size // 4), jnp.float32)
        copy = jax.jit(lambda a: a + 1, out_shardings=x.sharding)
        taken = _taken(copy, x)
        found.append(Kernel("copy", size, 2 * size / taken, "B/s"))
    return found


def _collectives(mesh: Mesh) -> list[Kernel]:
    """Measure reductions and gathers; rates count what a ring sends."""
    if mesh.size == 1:
        return []
    rows, replicated = P("data"), P()
    forms = {
        "reduce-scatter": (
            lambda a: reduce_scatter(a, "data"), replicated, rows,
        ),
        "all-gather": (
            lambda a: all_gather(a, "data"), rows, replicated,
        ),
    }  # fmt: skip
    found = []
    for size in _BYTES[mesh.devices.flat[0].platform]:
        n = size // 4 // mesh.size * mesh.size
        for name, (run, before, after) in forms.items():
            x = jax.device_put(
                jnp.zeros((n,), jnp.float32), NamedSharding(mesh, before)
            )
            call = jax.jit(
                jax.shard_map(
                    run, mesh=mesh, in_specs=before, out_specs=after, check_vma=False
                )
            )
            taken = _taken(call, x)
            sent = 4 * n * (mesh.size - 1) / mesh.size
            found.append(Kernel(name, 4 * n, sent / taken, "B/s"))
    return found


def _taken(call: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
    """Time a kernel, in seconds."""

    def run() -> None:
        jax.block_until_ready(call(x))

    return _interleaved([run])[0]


def _split(mesh: Mesh, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    sharding = NamedSharding(mesh, P("data"))
    return jax.jit(lambda: jnp.ones(shape, dtype), out_shardings=sharding)()


# ---- figures


def _of_kernels(kernels: Sequence[Kernel], platform: str) -> dict[str, Change]:
    """Return the figures that follow from the kernels only."""
    rates = {
        "flops": [k.rate for k in kernels if k.unit == "FLOP/s"],
        "memory_bandwidth": [k.rate for k in kernels if k.name == "copy"],
        "fast_bandwidth": [k.rate for k in kernels if "-" in k.name],
    }
    if platform != "cpu":
        return {}  # the data sheets' peaks stay; the step tells what share is reached
    best = {name: max(found) for name, found in rates.items() if found}
    shares = ("compute_efficiency", "memory_efficiency", "network_efficiency")
    return {**best, **dict.fromkeys(shares, 1.0)}


def _scaled(machine: Machine, scale: float) -> dict[str, Change]:
    """Return the compute and memory rates that a model's operations reached."""
    return {
        "flops": _ends(_reached(machine, "flops", "compute") * scale),
        "memory_bandwidth": _ends(
            _reached(machine, "memory_bandwidth", "memory") * scale
        ),
        "compute_efficiency": 1.0,
        "memory_efficiency": 1.0,
    }


def _network(machine: Machine, scale: float) -> dict[str, Change]:
    """Return the rates of collectives; networks that were not crossed keep theirs."""
    several = machine.topology.devices > machine.topology.fast_domain
    network = "slow" if several else "fast"
    rate = machine.reached(network) * scale
    return {f"{network}_bandwidth": _ends(rate), f"{network}_efficiency": 1.0}


def _reached(machine: Machine, rate: str, part: str) -> float:
    return machine.value(rate) * machine.value(f"{part}_efficiency")


def _ends(value: float) -> tuple[float, float]:
    return value / WIDTH, value * WIDTH


def _step(
    prepared: _Prepared,
    measured: float,
    before: costs.Prediction,
    machine: Machine,
    slope: float,
    rest: float,
    held_out: bool,
) -> Step:
    program, devices = prepared.program, machine.topology.devices
    p = costs.predict(prepared.schedule, machine, devices)
    totals = [
        costs.predict(prepared.schedule, corner, devices).total
        for corner in machine.corners()
    ]
    hidden = None
    if p.communication and not program.tx.local:  # whose calls have steps between
        waited = (
            measured - program.microbatches * slope - max(0.0, rest - p.communication)
        )
        hidden = 1 - min(1.0, max(0.0, waited / p.communication))
    return Step(
        program.method, program.microbatches, measured, before.total,
        (min(totals), max(totals)), p.hidden, hidden, held_out,
    )  # fmt: skip


# ---- text and files


def text(report: Report) -> str:
    """Return the report as text."""
    kernels = [
        (
            k.name,
            f"{k.size:,}",
            quantity(Constant(k.rate, k.unit, "measured")),
        )
        for k in report.kernels
    ]
    steps = [
        ("step", "microbatches", "before", "interval", "MEASURED", "", "overlapped")
    ]
    for s in report.steps:
        hidden = "-" if s.measured_hidden is None else f"{s.measured_hidden:.0%}"
        steps.append((
            s.method + (", held out" if s.held_out else ""),
            str(s.microbatches),
            seconds(s.predicted),
            " - ".join(map(seconds, s.interval)),
            seconds(s.measured),
            "inside" if s.inside else "OUTSIDE",
            f"{s.hidden:.0%} predicted, {hidden} measured",
        ))  # fmt: skip
    return "\n".join([
        f"{report.devices} x {report.kind}, MEASURED",
        aligned(kernels, "lrr"),
        "calls, PREDICTED with the figures before and after calibration",
        aligned(steps, "lrrrrll"),
    ])  # fmt: skip


def save(report: Report, file: Path) -> None:
    """Write a report as JSON."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(dataclasses.asdict(report), indent=2) + "\n")


def read(file: Path) -> tuple[str, dict[str, Change]]:
    """Return the chip and the figures of a report that was saved.

    Raises:
      ValueError: if the file is not a report of --calibrate.
    """
    try:
        found = json.loads(file.read_text())
        chip, values = found["chip"], dict(found["figures"])
        ends = [x if isinstance(x, list) else [x] for x in values.values()]
        numbers = {type(x) for found in ends for x in found} <= {int, float}
        if not isinstance(chip, str) or not numbers or {*map(len, ends)} - {1, 2}:
            raise ValueError("it has no chip, or a figure that is no number or range")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--calibration={file} is not a report of --calibrate: {error}."
        ) from error
    whole = (x if len(x) > 1 else x[0] for x in map(tuple, ends))
    return chip, dict(zip(values, whole, strict=True))
