"""Plans an experiment for a machine: compiles, reads, predicts, reports.

plan = planner.make(config, topologies.parse("gpu:h200:4x8"), Request())
print(report.text(plan))
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

from absl import logging
from ml_collections import ConfigDict

from acco_jax.methods import METHODS
from acco_jax.models.base import Model
from acco_jax.plan import costs, optimizers, programs, verdict
from acco_jax.plan.programs import Compiled, DoesNotFit, Program
from acco_jax.plan.schedules import Collective
from acco_jax.plan.topologies import Topology
from acco_jax.plan.verdict import Verdict
from acco_jax.runner import models
from acco_jax.runner.names import check_name
from acco_jax.runner.optimizers import method as of_config
from acco_jax.runner.validation import validate

BASELINE = "zero1"
USABLE = 0.92  # of a chip's memory: the rest is the driver's and the network library's


@dataclasses.dataclass(frozen=True)
class Request:
    """Options of a plan."""

    methods: tuple[str, ...] = ()  # to compile; (): the experiment's own and zero1
    devices: tuple[int, ...] = ()  # to predict for, beside the topology's own number
    changes: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of figures
    fit: bool = True  # look for the largest microbatch: one more compile per method


class LargestMicrobatch(NamedTuple):
    """How many rows of a microbatch fit into memory."""

    rows: int
    bytes_per_row: float | None  # None: no second size fits


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One method's program, what its compiler made of it, and what that may cost."""

    program: Program
    compiled: Compiled
    prediction: costs.Prediction
    verdict: Verdict  # on the data axis's collectives, of whatever size
    in_groups: Verdict  # on those among the devices of one worker
    largest: LargestMicrobatch | None  # None: not looked for, or nothing fits
    own: list[tuple[Collective, int]] | None = None  # as `optimizers_own` returns

    @property
    def method(self) -> str:
        return self.program.method

    @property
    def half_rounds(self) -> float:
        """Half-rounds of an optimizer step; below 1 where one takes inner steps."""
        tx = self.program.tx
        return tx.half_rounds if tx.steps_per_call == 1 else 1 / tx.steps_per_call

    @property
    def collectives(self) -> list[Collective]:
        """The data axis's collectives of at least 1 MiB: gradients and parameters."""
        return self.compiled.schedule.select(groups=self.program.groups)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that a report says."""

    config: ConfigDict
    model: Model
    machine: costs.Machine
    checked: tuple[str, ...]  # methods whose communication must be hidden
    outcomes: tuple[Outcome, ...]
    growth: list[dict[str, Any]]  # a row per method and number of devices
    few_bits: list[dict[str, Any]]  # a row per method and choice of bits

    @property
    def topology(self) -> Topology:
        return self.machine.topology

    @property
    def objections(self) -> dict[str, str]:
        """Methods, and why --require-hidden refuses them."""
        found = {o.method: o.verdict.objection() for o in self.outcomes}
        return {m: why for m, why in found.items() if why and m in self.checked}

    def row(self, method: str) -> dict[str, Any]:
        """Returns the predictions for the topology itself."""
        key = (method, self.topology.devices)
        return next(r for r in self.growth if (r["method"], r["devices"]) == key)


def make(config: ConfigDict, topology: Topology, request: Request) -> Plan:
    """Plans an experiment, a config of `default_config`'s form, for a machine.

    Raises:
      ValueError: in one line, before any compile what cannot work; after it that a
        method does not fit into memory.
      RuntimeError: the compiler is not installed; says how to install it.
    """
    validate(config)
    methods = dict.fromkeys(request.methods or (config.method, BASELINE))
    for name in methods:
        check_name("--method", name, METHODS)
    machine = costs.Machine(topology, costs.figures(topology.chip, request.changes))
    numbers = sorted({topology.devices, *request.devices})
    for n in numbers:
        _check_devices(n, machine)
    model = models.model(config, programs.vocab_size(config))
    mesh = programs.data_mesh(topology, config.domains, config.mesh)
    described = [programs.describe(of_method(config, m), mesh) for m in methods]
    outcomes = tuple(_outcome(p, config, machine, request.fit) for p in described)
    checked = request.methods or (config.method,)
    growth = (_growth(outcomes, config, model, machine, n) for n in numbers)
    few = (_few_bits(o, config, machine) for o in outcomes)
    rows = [list(itertools.chain(*blocks)) for blocks in (growth, few)]
    return Plan(config, model, machine, checked, outcomes, *rows)


def of_method(config: ConfigDict, method: str) -> ConfigDict:
    """Returns the experiment with another method, without the first's options."""
    other = config.copy_and_resolve_references()
    with other.unlocked():
        if method != config.method:
            other.method_options = ConfigDict(type_safe=False)
        other.method = method
    return other


def _check_devices(n: int, machine: costs.Machine) -> None:
    domain = machine.domain(max(n, 1))
    if n < 1 or n % domain:
        raise ValueError(
            f"devices is {n}: it must be at least 1 and, above {domain}, a multiple of "
            f"that, the devices of a {machine.topology.domain_name}."
        )


def _outcome(
    program: Program, config: ConfigDict, machine: costs.Machine, fit: bool
) -> Outcome:
    method, size = program.method, config.microbatch_size
    logging.info("compiling %s for %s", method, machine.topology)
    try:
        compiled = _compile(program, machine)
    except DoesNotFit as error:
        advice = "lower it" if size > 1 else "set model.remat, or take more devices"
        if fit and size > 1:
            largest = _largest_microbatch(config, program, machine, 1, None)
            rows = largest and largest.rows
            advice = f"at most about {rows} would fit" if rows else "nor does 1"
        raise ValueError(
            f"{method} with microbatch_size {size} does not fit into the memory of a "
            f"{machine.topology.chip.title}: {error}; {advice}."
        ) from None
    largest = None
    if fit:
        largest = _largest_microbatch(config, program, machine, size, compiled)
    schedule = compiled.schedule
    prediction = costs.predict(schedule, machine, machine.topology.devices)
    data = {id(c) for c in schedule.select(0, groups=program.groups)}
    own = {id(c) for c in schedule.collectives if program.in_group(c)}
    on_data, in_groups = (
        verdict.judge(
            schedule,
            prediction,
            machine,
            [i for i, c in enumerate(schedule.collectives) if id(c) in chosen],
        )
        for chosen in (data, own)
    )
    return Outcome(
        program,
        compiled,
        prediction,
        on_data,
        in_groups,
        largest,
        optimizers_own(program, compiled, machine.topology),
    )


def optimizers_own(
    program: Program, compiled: Compiled, topology: Topology
) -> list[tuple[Collective, int]] | None:
    """Returns the data axis's collectives that the step did not write, and their bytes.

    An optimizer that looks across shards causes them; a few scalars are the step's.
    None where they cannot be told: the step's own are not known, or one data axis is
    over slices, for which the compiler splits every collective.
    """
    split = topology.slices > 1 and len(program.tx.axis) == 1
    if compiled.source_collectives is None or split:
        return None
    collectives = compiled.schedule.select(1, groups=program.groups)
    return optimizers.own(collectives, compiled.source_collectives)


def _compile(program: Program, machine: costs.Machine) -> Compiled:
    """Compiles, and refuses what a GPU's compiler does not."""
    compiled, memory = program.compile(), machine.value("memory_bytes")
    if compiled.memory.total > memory:
        need = f"{compiled.memory.total / 2**30:.1f}G of {memory / 2**30:.1f}G"
        raise DoesNotFit(f"it needs {need} of memory")
    return compiled


def _largest_microbatch(
    config: ConfigDict,
    program: Program,
    machine: costs.Machine,
    rows: int,
    compiled: Compiled | None,
) -> LargestMicrobatch | None:
    """Extrapolates memory by a microbatch's rows from two compiles; None if none fits.

    `compiled` is the program with so many `rows`, if there is one already.
    """

    def total_bytes(size: int) -> int:
        other = of_method(config, program.method)
        other.microbatch_size = size
        logging.info("compiling %s with microbatches of %d", program.method, size)
        return _compile(programs.describe(other, program.mesh), machine).memory.total

    room = machine.value("memory_bytes") * USABLE
    try:
        low = compiled.memory.total if compiled else total_bytes(rows)
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
            per_row = (total_bytes(size) - low) / (size - rows)
        except DoesNotFit:
            continue
        most = rows + int((room - low) // per_row) if per_row > 0 else rows
        return LargestMicrobatch(max(most, 0), per_row)
    return LargestMicrobatch(rows, None)


def _few_bits(
    o: Outcome, config: ConfigDict, machine: costs.Machine
) -> list[dict[str, Any]]:
    """Predicts gathers and reductions in few bits, for a method that sends all bits.

    Returns a row per choice of bits, the first as compiled; [] for a method that has no
    such options, or already sends few bits.
    """
    tx = o.program.tx
    if {"gather_bits", "reduce_bits"} & set(of_method(config, o.method).method_options):
        return []
    names = [c.name for c in o.collectives]
    within = [c.name for c in o.collectives if machine.domains(c) == 1]
    rows: list[dict[str, Any]] = []
    for gather_bits, reduce_bits in ((None, None), *costs.FEW_BITS):
        bits: dict[str, Any] = {"gather_bits": gather_bits, "reduce_bits": reduce_bits}
        other = of_method(config, o.method)
        with other.unlocked():
            other.method_options.update(bits)
        try:
            validate(other)  # whether the method has such options
            of_config(other, o.method, tx.mesh, tx.axis)
        except ValueError:
            continue
        schedule = costs.in_few_bits(
            o.compiled.schedule,
            names,
            **bits,
            hide_reduction=machine.topology.platform == "gpu",
            within=within if len(tx.axis) > 1 else (),
        )
        p = costs.predict(schedule, machine, machine.topology.devices)
        sent = sum(c.bytes * c.times for c in schedule.collectives if c.name in names)
        row: dict[str, Any] = {
            "method": o.method,
            **bits,
            "bytes": o.half_rounds * sent,
            "communication": o.half_rounds * p.communication,
            "hidden": p.hidden,
            "step": o.half_rounds * p.total,
        }
        first = rows[0] if rows else row
        row["share_of_bytes"] = row["bytes"] / max(first["bytes"], 1)
        row["speedup"] = first["step"] / row["step"]
        rows.append(row)
    return rows if len(rows) > 1 else []


def _growth(
    outcomes: tuple[Outcome, ...],
    config: ConfigDict,
    model: Model,
    machine: costs.Machine,
    devices: int,
) -> list[dict[str, Any]]:
    """Predicts a step of each method on so many devices, from its one compile."""
    here = machine.topology.devices
    flops_per_token = model.flops_per_token and model.flops_per_token(config.length)
    rows, formulas = [], []
    for o in outcomes:
        p = costs.predict(o.compiled.schedule, machine, devices)
        step, memory = o.half_rounds * p.total, o.compiled.memory
        tokens = o.half_rounds * o.program.computed * devices / here
        tokens *= config.microbatch_size * config.length
        peak_flops = step * devices * machine.value("flops")
        # zero1 stands for methods that communicate in each step
        formula = None
        if not o.program.tx.local:
            formula = costs.synchronous(p, o.program.tx.half_rounds)
        formulas.append(formula)
        rows.append(
            {
                "method": o.method,
                "devices": devices,
                "computation": o.half_rounds * p.computation,
                "communication": o.half_rounds * p.communication,
                "exposed": o.half_rounds * p.exposed,
                "hidden": p.hidden,
                "step": step,
                "tokens_per_step": int(tokens),
                "tokens_per_second": tokens / step,
                "model_flops_utilization": flops_per_token
                and flops_per_token * tokens / peak_flops,
                "memory": int(memory.total + memory.shards * (here / devices - 1)),
            }
        )
    compiled = next((r["step"] for r in rows if r["method"] == BASELINE), None)
    for row, formula in zip(rows, formulas, strict=True):
        baseline = compiled or formula
        row["speedup_over_zero1"] = baseline and baseline / row["step"]
        row["zero1_compiled"] = compiled is not None
    return rows
