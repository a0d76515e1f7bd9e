"""Planner of an experiment on target hardware: compiles, reads and predicts.

plan = planner.make(config, topologies.parse("gpu:h200:4x8"), PlanRequest())
print(report.text(plan))
"""

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from acco_jax.command.devices import usable_cores
from acco_jax.core.names import check_name
from acco_jax.methods import METHODS
from acco_jax.models.model import Model
from acco_jax.plan import fitting, programs
from acco_jax.plan.fitting import Fit, Shape, Tried
from acco_jax.plan.outcomes import Outcome, Part
from acco_jax.plan.programs import Program
from acco_jax.run.build import models
from acco_jax.run.build.optimizers import method as of_config
from acco_jax.run.build.validation import validate
from acco_jax.run.config import fields as configs
from acco_jax.schedule import costs, optimizer_collectives, verdict
from acco_jax.schedule.compiled import Compiled, DoesNotFit
from acco_jax.schedule.machines import Change, Machine, figures
from acco_jax.schedule.schedules import Collective, Schedule, hidden_share
from acco_jax.schedule.topologies import Topology
from acco_jax.schedule.verdict import Verdict
from acco_jax.step.first_half import LONGER

BASELINE = "zero1"
COMPILES = 3  # at most, beside the experiment's own program, to find what fits
RANGES = ("step", "tokens_per_second", "speedup", "hidden")  # predicted with intervals


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """Options of a plan."""

    methods: tuple[str, ...] = ()  # to compile; (): the experiment's own and zero1
    devices: tuple[int, ...] = ()  # to predict for, beside the topology's own number
    changes: Mapping[str, Change] = dataclasses.field(
        default_factory=dict
    )  # of figures
    measured: Mapping[str, Change] = dataclasses.field(
        default_factory=dict
    )  # figures, of --calibrate
    fit: bool = True  # look for the best and the largest microbatch: more compiles


@dataclasses.dataclass(frozen=True)
class Plan:
    """Content of a report."""

    config: ConfigDict
    model: Model
    machine: Machine
    checked: tuple[str, ...]  # methods whose communication must be overlapped
    outcomes: tuple[Outcome, ...]
    misfits: Mapping[str, str]  # methods that do not fit, and why
    growth: list[dict[str, Any]]  # a row per method and number of devices
    few_bits: list[dict[str, Any]]  # a row per method and choice of bits

    @property
    def topology(self) -> Topology:
        return self.machine.topology

    def objections(self, fraction: float = verdict.REQUIRED) -> dict[str, str]:
        """Return the methods that overlap less than a gate requires, and why.

        Each number of devices that was asked for is judged, the topology's first.
        """
        own, found = self.topology.devices, dict[str, str]()
        sizes = dict.fromkeys([own, *(row["devices"] for row in self.growth)])
        for o in self.outcomes:
            said = ((n, _grown(o, self.machine, n).objection(fraction)) for n in sizes)
            n, why = next(((n, why) for n, why in said if why), (own, ""))
            found[o.method] = why if n == own else f"with {n} devices {why}"
        found |= self.misfits
        return {m: why for m, why in found.items() if why and m in self.checked}

    def row(self, method: str) -> dict[str, Any]:
        """Return a method's predictions for the topology itself."""
        key = (method, self.topology.devices)
        return next(r for r in self.growth if (r["method"], r["devices"]) == key)


def objections(
    plans: Iterable[Plan], fraction: float, methods: Collection[str] | None = None
) -> dict[str, str]:
    """Return the objections of several plans, each method with its machine.

    Args:
      plans: of one or several machines.
      fraction: as for `Plan.objections`.
      methods: of which to return objections; None: of all that are checked.
    """
    return {
        f"{m} on {plan.topology}, {plan.machine.network}": why
        for plan in plans
        for m, why in plan.objections(fraction).items()
        if methods is None or m in methods
    }


class NothingFits(ValueError):
    """No method fits into the memory of a machine.

    Attributes:
      misfits: the reason, by method.
    """

    def __init__(self, misfits: Mapping[str, str]) -> None:
        super().__init__(" ".join(misfits.values()))
        self.misfits = misfits


def machine_of(topology: Topology, request: PlanRequest) -> Machine:
    """Return a topology with the figures that a request changes.

    Raises:
      ValueError: if a figure does not exist, or a value is not allowed for it.
    """
    return Machine(topology, figures(topology.chip, request.changes, request.measured))


def methods_of(config: ConfigDict, request: PlanRequest) -> tuple[str, ...]:
    """Return the methods to compile.

    Raises:
      ValueError: if a method does not exist, or a run is to choose it.
    """
    if not request.methods and config.method == "auto":
        raise ValueError(
            "method is 'auto', which a run chooses by timing: give --recommend, or "
            "--methods."
        )
    methods = tuple(dict.fromkeys(request.methods or (config.method, BASELINE)))
    for name in methods:
        check_name("--methods", name, METHODS)
    return methods


class Prepared(NamedTuple):
    """A checked and described plan; nothing is compiled yet."""

    config: ConfigDict
    model: Model
    machine: Machine
    numbers: tuple[int, ...]  # of devices to predict for
    programs: tuple[Program, ...]  # one of each method
    checked: tuple[str, ...]  # methods whose communication must be overlapped
    fit: bool


def prepare(config: ConfigDict, topology: Topology, request: PlanRequest) -> Prepared:
    """Check an experiment and describe its programs, before any compile.

    Raises:
      ValueError: if the config, a method, a figure or a number of devices is invalid.
      RuntimeError: if the compiler is not installed, with how to install it.
    """
    validate(config)
    methods = methods_of(config, request)
    machine = machine_of(topology, request)
    if request.devices and config.microbatches == "adaptive":
        raise ValueError(
            "microbatches is 'adaptive', and other --devices have other counts: plan "
            "each number with a --topology of its own."
        )
    numbers = tuple(sorted({topology.devices, *request.devices}))
    for n in numbers:
        _check_devices(n, machine, config.mesh.fsdp * config.mesh.tensor)
    model = models.model(config, programs.vocab_size(config))
    mesh = programs.data_mesh(topology, config.domains, config.mesh)
    described = [programs.describe(of_method(config, m), mesh) for m in methods]
    if numbers[-1] > topology.devices and described[0].workers == 1:
        raise ValueError(
            f"devices is {numbers[-1]}, but {topology} is one worker, whose program "
            "sends nothing: give a --topology of two workers or more."
        )
    if config.counts and len({p.tx.calls_per_step for p in described}) > 1:
        raise ValueError(
            f"counts is {config.counts}, of a call, and {' and '.join(methods)} have "
            "different numbers of calls per step: give one of them in --methods."
        )
    return Prepared(
        config, model, machine, numbers, tuple(described),
        request.methods or (config.method,), request.fit,
    )  # fmt: skip


def make(config: ConfigDict, topology: Topology, request: PlanRequest) -> Plan:
    """Plan an experiment, a config of `default_config`'s form, for a machine.

    Raises:
      ValueError: if the input is invalid (before any compile); NothingFits if no
        method fits into memory.
      RuntimeError: if the compiler is not installed, with how to install it.
    """
    return finish(prepare(config, topology, request))


def finish(prepared: Prepared) -> Plan:
    """Compile what was prepared, one method per core at a time, read and predict.

    Raises:
      NothingFits: if no method fits into memory.
    """
    config, model, machine, numbers, described, checked, fit = prepared
    outcomes, misfits = [], {}
    with ThreadPoolExecutor(usable_cores()) as threads:
        found = [threads.submit(_outcome, p, config, machine, fit) for p in described]
    for program, outcome in zip(described, found, strict=True):
        try:
            outcomes.append(outcome.result())
        except DoesNotFit as error:
            misfits[program.method] = str(error)
    if not outcomes:
        raise NothingFits(misfits)
    rows = (_with_ranges(outcomes, config, model, machine, n) for n in numbers)
    few = (few_bits(o, config, machine) for o in outcomes)
    blocks = [list(itertools.chain(*found)) for found in (rows, few)]
    return Plan(config, model, machine, checked, tuple(outcomes), misfits, *blocks)


def of_method(config: ConfigDict, method: str) -> ConfigDict:
    """Return the experiment with another method, without the first's options."""
    other = config.copy_and_resolve_references()
    with other.unlocked():
        if method != config.method:
            other.method_options = ConfigDict(type_safe=False)
        other.method = method
    return other


def with_domains(config: ConfigDict, topology: Topology) -> ConfigDict:
    """Return the config with a domain for each host, where hosts have several devices.

    An all-to-all of reduce_bits then crosses the network once for each host. A worker
    that is a group of more devices than a host has leaves no room for domains.
    """
    hosts, within = topology.devices // topology.fast_domain, topology.fast_domain
    group = config.mesh.fsdp * config.mesh.tensor
    if config.domains is not None or hosts < 2 or within < 2 or within % group:
        return config
    config = config.copy_and_resolve_references()
    config.domains = hosts
    return config


def _check_devices(n: int, machine: Machine, group: int) -> None:
    if n % group:
        raise ValueError(
            f"devices is {n}, but a worker is a group of {group}: give a multiple."
        )
    domain = machine.domain(max(n, 1))
    if n < 1 or n % domain:
        raise ValueError(
            f"devices is {n}: it must be at least 1 and, above {domain}, a multiple of "
            f"that, the devices of a {machine.topology.domain_name}."
        )


def _outcome(
    program: Program, config: ConfigDict, machine: Machine, fit: bool
) -> Outcome:
    program, config, compiled = _with_first_half(program, config, machine)
    method, shape = program.method, Shape(config.microbatch_size, program.per_step)
    unit, first = program.tx.calls_per_step, config.first_half
    if first != "auto":
        unit = math.lcm(unit, program.per_step // math.gcd(first, program.per_step))

    def attempt(shape: Shape) -> Tried:
        other = of_method(config, method)
        other.microbatch_size, other.microbatches_per_step = shape
        if first != "auto":  # its share stays
            own = first * shape.microbatches // program.per_step
            other = configs.with_first_half(other, own)
        candidate = programs.describe(other, program.mesh)
        try:
            found = programs.compile_within(candidate, machine)
        except DoesNotFit as error:
            return Tried(shape, None, compiled=error.compiled)
        return _tried(shape, candidate, found, machine)

    # counts are of the microbatches asked for
    fit = fit and not config.counts and not program.adaptive

    def search(first: Tried) -> Fit:
        return fitting.search(
            first,
            attempt,
            usable_memory=machine.usable_memory,
            held=program.held().total,
            unit=unit,
            divisor=config.mesh.fsdp,
            most=COMPILES,
        )

    try:
        compiled = compiled or programs.compile_within(program, machine)
    except DoesNotFit as error:
        fewer = shape.rows > config.mesh.fsdp
        advice = "lower it" if fewer else "set model.remat, or take more devices"
        if error.compiled and fit and fewer:
            smaller = search(Tried(shape, None))
            advice = f"nor does {smaller.misfit}"
            if smaller.largest:
                advice = f"{smaller.largest} would fit"
        elif not error.compiled:
            advice = "take more devices, or a group of them as a worker (mesh.fsdp)"
        raise DoesNotFit(
            f"{method} with microbatch_size {shape.rows} does not fit into the memory "
            f"of a {machine.topology.chip.title}: {error}; {advice}.",
        ) from None
    found = None
    if program.adaptive:
        program, settled = _settled(program, compiled[0], machine)
        compiled = (settled,)
    elif fit:
        found = search(_tried(shape, program, compiled, machine))
    parts = tuple(map(_part, program.parts, compiled, itertools.repeat(machine)))
    return Outcome(
        program,
        parts,
        _predicted(compiled, machine),
        found,
        optimizers_own(program, compiled[0], machine.topology),
    )


def _with_first_half(
    program: Program, config: ConfigDict, machine: Machine
) -> tuple[Program, ConfigDict, tuple[Compiled, ...]]:
    """Return the program with the smallest first half that makes no step longer.

    The config returned is of the program's method, and has that first half, 'auto' if
    there is none. What was compiled of the program is the last value, () if there was
    nothing to choose.
    """
    config = of_method(config, program.method)
    firsts = configs.first_halves(config, program.tx.calls_per_step)
    if len(firsts) < 2:
        first = firsts[0] if firsts else "auto"
        return program, configs.with_first_half(config, first), ()
    found = list[tuple[float, tuple[Program, ConfigDict, tuple[Compiled, ...]]]]()
    for first in firsts:
        other = configs.with_first_half(config, first)
        candidate = programs.describe(other, program.mesh)
        try:
            compiled = programs.compile_within(candidate, machine)
        except DoesNotFit:
            found.append((math.inf, (candidate, other, ())))
            continue
        step = _predicted(compiled, machine)
        seconds = step.total * candidate.repeats
        found.append((seconds, (candidate, other, tuple(compiled))))
        if step.exposed <= (LONGER - 1) * step.total:
            break
    least = min(seconds for seconds, _ in found)
    return next(rest for seconds, rest in found if seconds <= LONGER * least)


def _part(program: Program, compiled: Compiled, machine: Machine) -> Part:
    data, own = _judged(program, compiled.schedule, machine, machine.topology.devices)
    return Part(program, compiled, data, own)


def _judged(
    program: Program, schedule: Schedule, machine: Machine, devices: int
) -> tuple[Verdict, Verdict]:
    """Judge the data axis's collectives and a group's own, on a number of devices."""
    prediction = costs.predict(schedule, machine, devices, program.in_group)
    data = {id(c) for c in program.of_data(schedule, 0)}
    own = {id(c) for c in schedule.collectives if program.in_group(c)}
    at = [
        [i for i, c in enumerate(schedule.collectives) if id(c) in chosen]
        for chosen in (data, own)
    ]
    of_data, of_group = (
        verdict.judge(schedule, prediction, machine, chosen, devices) for chosen in at
    )
    return of_data, of_group


def _grown(outcome: Outcome, machine: Machine, devices: int) -> Verdict:
    """Return the verdict on the data axis's collectives, on a number of devices."""
    return verdict.merged(
        [
            _judged(p.program, p.compiled.schedule, machine, devices)[0]
            for p in outcome.parts
        ]
    )


def _predicted(compiled: Sequence[Compiled], machine: Machine) -> costs.Prediction:
    schedules = [c.schedule for c in compiled]
    return costs.in_turn(schedules, machine, machine.topology.devices)


def optimizers_own(
    program: Program, compiled: Compiled, topology: Topology
) -> list[tuple[Collective, int]] | None:
    """Return the data axis's collectives that the step did not write, and their bytes.

    An optimizer that looks across shards causes them; a few scalars are the step's.
    None if they cannot be told apart: the step's own are unknown, or one data axis is
    over slices, for which the compiler splits every collective.
    """
    split = topology.slices > 1 and len(program.tx.axis) == 1
    if compiled.source_collectives is None or split:
        return None
    collectives = program.of_data(compiled.schedule)
    return optimizer_collectives.own(collectives, compiled.source_collectives)


def _settled(
    program: Program, compiled: Compiled, machine: Machine
) -> tuple[Program, Compiled]:
    """Return an adaptive program with the microbatches that it would settle at.

    They are the smallest count that covers the communication. If more microbatches
    overlap no more, they are the least count.
    """
    read: dict[int, tuple[Program, Compiled, costs.Prediction]] = {}

    def at(count: int) -> costs.Prediction:
        counts = (count,) * program.workers
        chosen = dataclasses.replace(program, counts=counts)
        schedule = chosen.read(compiled.text)
        p = costs.predict(schedule, machine, machine.topology.devices)
        read[count] = chosen, dataclasses.replace(compiled, schedule=schedule), p
        return p

    low, high = program.counts[0], program.microbatches
    least, most = at(low), at(high)
    if most.exposed > 0.95 * least.exposed:
        return read[low][:2]
    enough = 1.05 * most.exposed + verdict.NEGLIGIBLE * least.total
    if least.exposed <= enough:
        return read[low][:2]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if at(middle).exposed <= enough else (middle, high)
    return read[high][:2]


def _tried(
    shape: Shape,
    program: Program,
    compiled: Sequence[Compiled],
    machine: Machine,
) -> Tried:
    """Time a compiled candidate."""
    tokens = program.computed * shape.rows * program.length
    data = [
        c
        for part, found in zip(program.parts, compiled, strict=True)
        for c in part.of_data(found.schedule, 0)
    ]
    machines = (machine, *machine.corners())
    times = [_predicted(compiled, m).total for m in machines]
    return Tried(
        shape,
        max(c.memory.total for c in compiled),
        tokens / times[0],
        (tokens / max(times), tokens / min(times)),
        hidden_share(data) if data else None,
    )


def few_bits(o: Outcome, config: ConfigDict, machine: Machine) -> list[dict[str, Any]]:
    """Predict quantized gathers and reductions, for a method that does not quantize.

    Returns a row per choice of bits, the first as compiled; [] for a method that has no
    such options, or already quantizes.
    """
    tx = o.program.tx
    if {"gather_bits", "reduce_bits"} & set(of_method(config, o.method).method_options):
        return []
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
        schedules, sent = [], 0
        for part in o.parts:
            names = [c.name for c in part.collectives]
            schedule = _in_few_bits(part, machine, **bits)
            schedules.append(schedule)
            sent += sum(
                c.bytes * c.times for c in schedule.collectives if c.name in names
            )
        p = costs.in_turn(schedules, machine, machine.topology.devices)
        times = o.program.repeats
        row: dict[str, Any] = {
            "method": o.method,
            **bits,
            "bytes": times * sent,
            "communication": times * p.communication,
            "exposed": times * p.exposed,
            "hidden": p.hidden,
            "step": times * p.total,
        }
        first = rows[0] if rows else row
        row["share_of_bytes"] = row["bytes"] / max(first["bytes"], 1)
        row["speedup"] = first["step"] / row["step"]
        rows.append(row)
    return rows if len(rows) > 1 else []


def in_few_bits(o: Outcome, machine: Machine, **bits: int | None) -> Outcome:
    """Return an outcome as if its gathers and reductions were quantized."""
    parts = [
        (
            p.program,
            dataclasses.replace(p.compiled, schedule=_in_few_bits(p, machine, **bits)),
        )
        for p in o.parts
    ]
    return dataclasses.replace(
        o,
        parts=tuple(_part(*part, machine) for part in parts),
        prediction=_predicted([compiled for _, compiled in parts], machine),
    )


def _in_few_bits(
    part: Part,
    machine: Machine,
    gather_bits: int | None = None,
    reduce_bits: int | None = None,
) -> Schedule:
    """Return a part's schedule with its collectives over data axes quantized."""
    several = len(part.program.tx.axis) > 1
    found = optimizers_own(part.program, part.compiled, machine.topology) or ()
    own = {c.name for c, size in found if size == c.bytes}  # they stay as they are
    return costs.in_few_bits(
        part.compiled.schedule,
        [c.name for c in part.collectives if c.name not in own],
        gather_bits,
        reduce_bits,
        hide_reduction=machine.topology.platform == "gpu",
        within=[
            c.name for c in part.collectives if several and machine.domains(c) == 1
        ],
    )


def _with_ranges(
    outcomes: Sequence[Outcome],
    config: ConfigDict,
    model: Model,
    machine: Machine,
    devices: int,
) -> list[dict[str, Any]]:
    """Return `_growth`'s rows, each with the intervals of its predictions.

    They span all combinations of the ends of the figures' ranges.
    """
    args = outcomes, config, model
    rows = _growth(*args, machine, devices)
    corners = [_growth(*args, m, devices) for m in machine.corners()]
    for row, *found in zip(rows, *corners, strict=True):
        for name in RANGES:
            values = [r[name] for r in (row, *found) if r[name] is not None]
            row[f"{name}_range"] = [min(values), max(values)] if values else None
    return rows


def _growth(
    outcomes: Sequence[Outcome],
    config: ConfigDict,
    model: Model,
    machine: Machine,
    devices: int,
) -> list[dict[str, Any]]:
    """Predict a step of each method on `devices` devices, from its one compile."""
    here = machine.topology.devices
    rows, formulas = [], []
    for o in outcomes:
        p = costs.in_turn(o.schedules, machine, devices, o.program.in_group)
        length = o.program.length
        flops_per_token = model.flops_per_token and model.flops_per_token(length)
        times, memory = o.program.repeats, o.compiled.memory
        step = times * p.total
        tokens = times * o.program.computed * devices / here
        tokens *= config.microbatch_size * length
        peak = machine.figures["flops"]  # a range is of what is reached, not a peak
        flops = peak.value if peak.range is None else machine.topology.chip.flops
        peak_flops = step * devices * flops
        # zero1 represents methods that communicate in each step, and as many bytes
        formula = None
        if not o.program.tx.local and not _quantized(of_method(config, o.method)):
            formula = tokens / costs.synchronous(p, times)
        formulas.append(formula)
        rows.append(
            {
                "method": o.method,
                "devices": devices,
                "matmul": times * p.matmul,
                "memory_access": times * p.memory,
                "computation": times * p.computation,
                "communication": times * p.communication,
                "exposed": times * p.exposed,
                "slowing": times * p.slowing,
                "hidden": p.hidden,
                "step": step,
                "tokens_per_step": int(tokens),
                "tokens_per_second": tokens / step,
                "model_flops_utilization": flops_per_token
                and flops_per_token * tokens / peak_flops,
                "memory": int(memory.total + memory.shards * (here / devices - 1)),
            }
        )
    baseline = _baseline([r["method"] for r in rows])
    speed = next((r["tokens_per_second"] for r in rows if r["method"] == baseline), 0)
    for row, formula in zip(rows, formulas, strict=True):
        other = speed or formula
        row["baseline"], row["baseline_compiled"] = baseline or BASELINE, bool(speed)
        row["speedup"] = other and row["tokens_per_second"] / other
    return rows


def _quantized(config: ConfigDict) -> bool:
    options = config.method_options
    return bool(options.get("gather_bits") or options.get("reduce_bits"))


def _baseline(methods: Sequence[str]) -> str | None:
    """Return the method that others are compared with.

    It is zero1, or else a synchronous one; None if `methods` has neither.
    """
    synchronous = (BASELINE, "ddp", "fused_zero1")
    return next((m for m in synchronous if m in methods), None)
