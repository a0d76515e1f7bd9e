"""Plans an experiment for a machine: compiles, reads, predicts, reports.

plan = planner.make(config, topologies.parse("gpu:h200:4x8"), Request())
print(report.text(plan))
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, NamedTuple

from absl import logging
from ml_collections import ConfigDict

import acco_jax
from acco_jax.methods import METHODS
from acco_jax.models import gpt_neo
from acco_jax.planning import costs, optimizers, programs
from acco_jax.planning.programs import Compiled, DoesNotFit, Program
from acco_jax.planning.schedules import Collective
from acco_jax.planning.topologies import Topology
from acco_jax.training import config as configs

BASELINE = "zero1"
USABLE = 0.92  # of a chip's memory: the rest is the driver's and the network library's


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked beside experiment and topology.

    Attributes:
      methods: to compile; () for the experiment's own and zero1.
      devices: to predict for, beside the topology's own number.
      changes: figures to use instead of the table's, by name.
      fit: whether to look for the largest microbatch (one more compile per method).
    """

    methods: tuple[str, ...] = ()
    devices: tuple[int, ...] = ()
    changes: Mapping[str, float] = dataclasses.field(default_factory=dict)
    fit: bool = True


class Line(NamedTuple):
    """How a microbatch's rows fill the memory."""

    largest: int  # rows that fit
    per_row: float | None  # bytes that one more takes; None: no second one fits


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One method's program, what its compiler made of it, and what that may cost."""

    program: Program
    compiled: Compiled
    prediction: costs.Prediction
    line: Line | None  # None if it was not looked for, or not found
    own: list[tuple[Collective, int]] | None = None  # as `optimizers_own` says

    @property
    def method(self) -> str:
        return self.program.method

    @property
    def half_rounds(self) -> float:
        """Of an optimizer step; below 1 where a call takes several (inner) steps."""
        tx = self.program.tx
        return tx.half_rounds if tx.steps_per_call == 1 else 1 / tx.steps_per_call

    @property
    def collectives(self) -> list[Collective]:
        """The data axis's, of at least 1 MiB."""
        return self.compiled.schedule.select(groups=self.program.groups)

    @property
    def exposed(self) -> list[Collective]:
        return [c for c in self.collectives if not c.hidden]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that a report says."""

    config: ConfigDict
    model: gpt_neo.GPTNeoConfig
    machine: costs.Machine
    asked: tuple[str, ...]  # methods whose communication must be hidden
    outcomes: tuple[Outcome, ...]
    growth: tuple[dict[str, Any], ...]  # a row per method and number of devices
    few_bits: tuple[dict[str, Any], ...]  # a row per method and choice of bits

    @property
    def topology(self) -> Topology:
        return self.machine.topology

    @property
    def exposed(self) -> list[tuple[str, Collective]]:
        """What --require-hidden objects to."""
        asked = (o for o in self.outcomes if o.method in self.asked)
        return [(o.method, c) for o in asked for c in o.exposed]

    def row(self, method: str) -> dict[str, Any]:
        """Predicted for the topology itself."""
        wanted = (method, self.topology.devices)
        return next(r for r in self.growth if (r["method"], r["devices"]) == wanted)


def make(config: ConfigDict, topology: Topology, request: Request) -> Plan:
    """Plans an experiment.

    Args:
      config: of `acco_jax.training.config.default_config`'s form.
      topology: the machine.
      request: what else is asked.

    Raises:
      ValueError: in one line and before any compile, what cannot work; and after it,
        that a method does not fit into memory.
      RuntimeError: the compiler is not installed; says how to install it.
    """
    configs.validate(config)
    asked = request.methods or (config.method,)
    methods = dict.fromkeys(request.methods or (config.method, BASELINE))
    for name in methods:
        if name not in METHODS:
            near = difflib.get_close_matches(name, list(METHODS), 1, cutoff=0)[0]
            raise ValueError(
                f"there is no method {name!r} (did you mean {near!r}?): known are "
                + ", ".join(METHODS)
            )
    machine = costs.Machine(topology, costs.figures(topology.chip, request.changes))
    numbers = sorted({topology.devices, *request.devices})
    for n in numbers:
        _check_devices(n, machine)
    model = configs.model(config, programs.vocab_size(config))
    mesh = programs.data_mesh(topology, config.domains)
    described = [programs.describe(of_method(config, m), mesh) for m in methods]
    outcomes = tuple(_outcome(p, config, machine, request.fit) for p in described)
    growth = _growth(outcomes, config, model, machine, numbers)
    few = tuple(row for o in outcomes for row in _few_bits(o, config, machine))
    return Plan(config, model, machine, asked, outcomes, growth, few)


def of_method(config: ConfigDict, method: str) -> ConfigDict:
    """The experiment under a method: `method_options` are the config's own method's."""
    other = config.copy_and_resolve_references()
    with other.unlocked():
        if method != config.method:
            other.method_options = ConfigDict(type_safe=False)
        other.method = method
    return other


def _check_devices(n: int, machine: costs.Machine) -> None:
    domain = machine.domain(max(n, 1))
    if n < 1 or n % domain:
        name = "host" if machine.topology.platform == "gpu" else "slice"
        raise ValueError(
            f"devices is {n}: it must be at least 1 and, above {domain}, a multiple of "
            f"that, the devices of a {name}."
        )


def _outcome(
    program: Program, config: ConfigDict, machine: costs.Machine, fit: bool
) -> Outcome:
    method, size = program.method, config.microbatch_size
    logging.info("compiling %s for %s", method, machine.topology)
    try:
        compiled = _compile(program, machine)
    except DoesNotFit as error:
        advice = "lower it"
        if size == 1:
            advice = "set model.remat, or take more devices"
        elif fit:
            line = _line(config, program, machine, 1, None)
            fits = line is not None and line.largest
            advice = f"at most about {fits} would fit" if fits else "nor does 1"
        raise ValueError(
            f"{method} with microbatch_size {size} does not fit into the memory of a "
            f"{machine.topology.chip.title}: {error}; {advice}."
        ) from None
    line = _line(config, program, machine, size, compiled) if fit else None
    prediction = costs.predict(compiled.schedule, machine, machine.topology.devices)
    own = optimizers_own(program, compiled, machine.topology)
    return Outcome(program, compiled, prediction, line, own)


def optimizers_own(
    program: Program, compiled: Compiled, topology: Topology
) -> list[tuple[Collective, int]] | None:
    """The data axis's collectives that the step did not ask for, and their bytes.

    An optimizer that looks across shards causes them; a few scalars are the step's.
    None where they cannot be told: what it asked for is not known, or one data axis is
    over slices, for which the compiler splits every collective.
    """
    split = topology.slices > 1 and program.mesh.devices.ndim == 1
    if compiled.asked is None or split:
        return None
    found = compiled.schedule.select(1, groups=program.groups)
    return optimizers.own(found, compiled.asked)


def _compile(program: Program, machine: costs.Machine) -> Compiled:
    """Compiles, and refuses what a GPU's compiler does not."""
    compiled, memory = program.compile(), machine.value("memory_bytes")
    if compiled.memory.total > memory:
        need = f"{compiled.memory.total / 2**30:.1f}G of {memory / 2**30:.1f}G"
        raise DoesNotFit(f"it needs {need} of memory")
    return compiled


def _line(
    config: ConfigDict,
    program: Program,
    machine: costs.Machine,
    rows: int,
    compiled: Compiled | None,
) -> Line | None:
    """Memory by the microbatch's rows, from two compiles; None if none fits.

    Args:
      config: the experiment.
      program: its method's.
      machine: whose memory it is.
      rows: of one of the two microbatches.
      compiled: with so many, if that is known.
    """

    def total(size: int) -> int:
        other = of_method(config, program.method)
        other.microbatch_size = size
        logging.info("compiling %s with microbatches of %d", program.method, size)
        return _compile(programs.describe(other, program.mesh), machine).memory.total

    room = machine.value("memory_bytes") * USABLE
    try:
        low = compiled.memory.total if compiled else total(rows)
    except DoesNotFit:
        return None
    sizes = [rows // 2, 2 * rows]  # of the second; the best one lies near the limit
    if compiled and compiled.memory.temporaries > 0:
        free = room - sum(compiled.memory.parts.values())
        sizes.append(int(0.7 * rows * free / compiled.memory.temporaries))
    for size in reversed(sizes):
        if size < 1 or size == rows:
            continue
        try:
            per_row = (total(size) - low) / (size - rows)
        except DoesNotFit:
            continue
        most = rows + int((room - low) // per_row) if per_row > 0 else rows
        return Line(max(most, 0), per_row)
    return Line(rows, None)


def _few_bits(
    o: Outcome, config: ConfigDict, machine: costs.Machine
) -> list[dict[str, Any]]:
    """Predictions for gathers and reductions in few bits, of a method that sends all.

    The first row is the method as compiled; () for what cannot, or already does.
    """
    tx = o.program.tx
    if isinstance(tx, acco_jax.LocalMethod):
        return []
    if tx.wires.gather_quantized or tx.wires.reduce_quantized:
        return []
    names = [c.name for c in o.collectives]
    within = [c.name for c in o.collectives if machine.domains(c) == 1]
    rows: list[dict[str, Any]] = []
    for gather_bits, reduce_bits in ((None, None), *costs.FEW_BITS):
        other = of_method(config, o.method)
        with other.unlocked():
            other.method_options.gather_bits = gather_bits
            other.method_options.reduce_bits = reduce_bits
        try:
            configs.validate(other)  # whether the method has such options
            configs.method(other, o.method, tx.mesh, tx.axis)
        except ValueError:
            continue
        schedule = costs.in_few_bits(
            o.compiled.schedule,
            names,
            gather_bits,
            reduce_bits,
            hide_reduction=machine.topology.platform == "gpu",
            within=within if len(tx.axis) > 1 else (),
        )
        p = costs.predict(schedule, machine, machine.topology.devices)
        sent = sum(c.bytes * c.times for c in schedule.collectives if c.name in names)
        rows.append(
            {
                "method": o.method,
                "gather_bits": gather_bits,
                "reduce_bits": reduce_bits,
                "bytes": o.half_rounds * sent,
                "communication": o.half_rounds * p.communication,
                "hidden": p.hidden,
                "step": o.half_rounds * p.total,
            }
        )
    if len(rows) < 2:
        return []
    for row in rows:
        row["share_of_bytes"] = row["bytes"] / max(rows[0]["bytes"], 1)
        row["speedup"] = rows[0]["step"] / row["step"]
    return rows


def _growth(
    outcomes: tuple[Outcome, ...],
    config: ConfigDict,
    model: gpt_neo.GPTNeoConfig,
    machine: costs.Machine,
    numbers: list[int],
) -> tuple[dict[str, Any], ...]:
    """Predictions for several numbers of devices, from one compile of each method."""
    here = machine.topology.devices
    rows: list[dict[str, Any]] = []
    for n in numbers:
        times: dict[str, float] = {}
        formulas: dict[str, float] = {}
        for o in outcomes:
            p = costs.predict(o.compiled.schedule, machine, n)
            h = o.half_rounds
            tokens = h * o.program.computed * n / here
            tokens *= config.microbatch_size * config.length
            memory = o.compiled.memory
            times[o.method] = h * p.total
            if isinstance(o.program.tx, acco_jax.Method):  # it communicates each step's
                formulas[o.method] = costs.synchronous(p, o.program.tx.half_rounds)
            model_flops = gpt_neo.flops_per_token(model, config.length) * tokens
            rows.append(
                {
                    "method": o.method,
                    "devices": n,
                    "computation": h * p.computation,
                    "communication": h * p.communication,
                    "exposed": h * p.exposed,
                    "hidden": p.hidden,
                    "step": h * p.total,
                    "tokens_per_step": int(tokens),
                    "tokens_per_second": tokens / (h * p.total),
                    "model_flops_utilization": model_flops
                    / (h * p.total * n * machine.value("flops")),
                    "memory": int(memory.total + memory.shards * (here / n - 1)),
                }
            )
        for row in rows[-len(outcomes) :]:
            baseline = times.get(BASELINE, formulas.get(row["method"]))
            row["speedup_over_zero1"] = baseline and baseline / row["step"]
            row["zero1_compiled"] = BASELINE in times
    return tuple(rows)
