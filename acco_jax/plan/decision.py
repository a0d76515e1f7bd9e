"""Choice of method and machine: plans side by side, for all tokens of a run.

decision = make(config, [topologies.parse("gpu:h100:4x8")], request, Terms(tokens=10e9))
print(text(decision))
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from acco_jax.plan import planner
from acco_jax.plan.outcomes import Outcome
from acco_jax.plan.planner import Plan, PlanRequest
from acco_jax.schedule import costs
from acco_jax.schedule.machines import Machine
from acco_jax.schedule.tables import aligned, paragraph, seconds
from acco_jax.schedule.topologies import Topology
from acco_jax.schedule.verdict import milliseconds

WINS = 1.02  # times as fast, at least, to count as faster
_SLOWEST, _FASTEST = 1e7, 1e12  # bytes/s of a network: where the search goes
_STEPS = 120  # of it


@dataclasses.dataclass(frozen=True)
class Terms:
    """A run's length, prices and failure figures."""

    tokens: float  # of the whole run
    # of a device for an hour, by the chip's name, in any currency
    prices: Mapping[str, float] = dataclasses.field(default_factory=dict)
    # bytes/s of a device's network; None: the chip's figure
    networks: tuple[float | None, ...] = (None,)
    failure_hours: float | None = None  # between failures of one device; None: none
    checkpoint_seconds: float = 60.0  # that a checkpoint stops training
    restart_seconds: float = 300.0  # from a failure to the next step


@dataclasses.dataclass(frozen=True)
class Choice:
    """A method on a machine."""

    topology: Topology
    network: float  # bytes/s of a device over the network
    method: str
    misfit: str = ""  # why it does not fit; the fields below are then 0
    rows: int = 0  # of the best microbatch
    microbatches: int = 0  # of it in a step
    tokens_per_second: float = 0.0
    interval: tuple[float, float] = (0.0, 0.0)
    hours: float = 0.0  # of the run, failures included
    device_hours: float = 0.0
    goodput: float = 1.0  # share of the time that is not lost to failures
    price: float | None = None  # of the run; None: not given
    kilowatt_hours: float | None = None  # at most; None: no data sheet gives it


@dataclasses.dataclass(frozen=True)
class Decision:
    """All choices, their plans and the sentence about them."""

    terms: Terms
    choices: tuple[Choice, ...]
    plans: tuple[Plan, ...]
    sentence: str

    def objections(self, fraction: float) -> dict[str, str]:
        """Return the methods that overlap less than a gate requires, and why.

        One that does not fit is among them.
        """
        found = planner.objections(self.plans, fraction)
        planned = {(p.topology, p.machine.value("slow_bandwidth")) for p in self.plans}
        nowhere = (c for c in self.choices if (c.topology, c.network) not in planned)
        return found | {f"{c.method} on {c.topology}": c.misfit for c in nowhere}


def goodput(terms: Terms, devices: int) -> float:
    """Return the share of time not lost to checkpoints, repeated work and restarts.

    Checkpoints are apart by Young's sqrt(2 d M), which loses least: d is a checkpoint's
    seconds and M the seconds between failures (Young 1974; Daly 2006).
    """
    if terms.failure_hours is None:
        return 1.0
    between = terms.failure_hours * 3600 / devices
    apart = math.sqrt(2 * terms.checkpoint_seconds * between)
    lost = terms.checkpoint_seconds / apart + apart / 2 / between
    return max(0.0, 1 - lost - terms.restart_seconds / between)


def make(
    config: ConfigDict,
    topologies: Sequence[Topology],
    request: PlanRequest,
    terms: Terms,
) -> Decision:
    """Plan an experiment for several machines and networks, and compare the plans.

    Raises:
      ValueError: if the input is invalid (before any compile). A machine that nothing
        fits becomes choices with a `misfit`.
      RuntimeError: if a compiler is not installed, with how to install it.
    """
    for topology in topologies:
        if not goodput(terms, topology.devices):
            raise ValueError(
                f"--failure-hours={terms.failure_hours:g} leaves {topology} no time to "
                "train: its devices fail faster than they restart. Give more hours, or "
                "fewer --restart-seconds."
            )
    requests = [
        dataclasses.replace(
            request,
            changes=request.changes
            if network is None
            else {**request.changes, "slow_bandwidth": network},
        )
        for network in terms.networks
    ]
    prepared = [planner.prepare(config, t, r) for t in topologies for r in requests]
    plans, choices = [], []
    for each in prepared:
        try:
            plan = planner.finish(each)
        except planner.NothingFits as error:
            network = each.machine.value("slow_bandwidth")
            choices += [
                Choice(each.machine.topology, network, method, misfit=why)
                for method, why in error.misfits.items()
            ]
            continue
        plans.append(plan)
        choices += _choices(plan, terms)
    return Decision(terms, tuple(choices), tuple(plans), _sentence(choices, plans))


def _choices(plan: Plan, terms: Terms) -> list[Choice]:
    network = plan.machine.value("slow_bandwidth")
    found = [_choice(plan, o, network, terms) for o in plan.outcomes]
    found += [
        Choice(plan.topology, network, method, misfit=why)
        for method, why in plan.misfits.items()
    ]
    return found


def _choice(plan: Plan, o: Outcome, network: float, terms: Terms) -> Choice:
    row, best = plan.row(o.method), o.fit.best if o.fit else None
    speed, interval = row["tokens_per_second"], row["tokens_per_second_range"]
    rows, count = plan.config.microbatch_size, o.program.per_step
    if o.program.adaptive:
        count = o.program.counts[0] * o.program.tx.calls_per_step
    if best is not None:
        speed, interval, (rows, count) = (
            best.tokens_per_second, best.interval, best.shape,
        )  # fmt: skip
    devices, chip = plan.topology.devices, plan.topology.chip
    share = goodput(terms, devices)
    hours = terms.tokens / speed / 3600 / share
    price = terms.prices.get(chip.name)
    watts = chip.watts
    return Choice(
        plan.topology, network, o.method, "", rows, count, speed,
        (interval[0], interval[1]), hours, hours * devices, share,
        None if price is None else price * hours * devices,
        None if watts is None else watts * hours * devices / 1000,
    )  # fmt: skip


# ---- the sentence


def _sentence(choices: Sequence[Choice], plans: Sequence[Plan]) -> str:
    """Return which choice is best and why, and where overlapping communication pays."""
    fitting = [c for c in choices if not c.misfit]
    if not fitting:
        return "No method fits into any of these machines."
    priced = all(c.price is not None for c in fitting)

    def cost(c: Choice) -> float:
        return c.hours if c.price is None or not priced else c.price

    # Equal costs: the slower network suffices; then names, never the flags' order.
    best = min(
        fitting,
        key=lambda c: (float(f"{cost(c):.3g}"), c.network, str(c.topology), c.method),
    )
    what = f"costs least, {best.price:,.2f} in" if priced else "takes least time,"
    plan = next(
        p
        for p in plans
        if p.topology == best.topology
        and p.machine.value("slow_bandwidth") == best.network
    )
    place = f"{best.topology} ({plan.machine.network})"
    text = f"{best.method} on {place} {what} {_hours(best.hours)}"
    others = [
        c
        for c in fitting
        if (c.topology, c.network) == (best.topology, best.network) and c is not best
    ]
    if others:
        second = min(others, key=lambda c: (cost(c), c.method))
        times = best.tokens_per_second / second.tokens_per_second
        text += f": {times:.2f} times as fast as {second.method} there"
        if times < WINS:
            text += ", which is not a difference that these figures can tell"
        elif times * _least(plan, best.method, second.method) < 1:
            text += ", though not at every end of the figures' ranges"
        text += f" ({_why(plan, best.method)})"
    return f"{text}; {_network(plan)}"


def _least(plan: Plan, method: str, other: str) -> float:
    """Return how far a method's lead over another shrinks within the figures' ranges.

    Both are of the microbatches asked for, at the same figures.
    """
    a, b = (next(o for o in plan.outcomes if o.method == m) for m in (method, other))
    leads = [
        _speed(a, m) / _speed(b, m) for m in (plan.machine, *plan.machine.corners())
    ]
    return min(leads) / leads[0]


def _why(plan: Plan, method: str) -> str:
    row = plan.row(method)
    found = next(o.verdict for o in plan.outcomes if o.method == method)
    exposed = f"{milliseconds(row['exposed'])} of its {milliseconds(row['step'])} step"
    return f"{exposed} is exposed communication; overlapped: {found.shares()}"


def _hours(hours: float) -> str:
    return f"{hours:,.1f} h" if hours >= 0.1 else seconds(hours * 3600)


def _network(plan: Plan) -> str:
    """Describe the bandwidths at which overlap pays, each band with both ends."""
    hiding = [o for o in plan.outcomes if _overlaps(o)]
    others = [o for o in plan.outcomes if not _overlaps(o)]
    if not hiding or not others:
        return "no pair of these methods, one that overlaps and one that does not"
    a, b = hiding[0], others[0]
    if a.program.adaptive or b.program.adaptive:
        return "adaptive counts differ at each rate, so that no band of rates is given"
    found = crossing(plan, a, b)
    pair = f"{a.method} is at least {WINS - 1:.0%} faster than {b.method}"
    if not found.bands:
        return f"at no rate of {found.link} {pair}"
    bands = " and ".join(_band(*ends) for ends in found.bands)
    return (
        f"{pair} where {found.link} gives a device {bands}, at most "
        f"{found.most:.2f} times as fast at {_gbps(found.at)}"
    )


def _overlaps(o: Outcome) -> bool:
    """Return whether most bytes overlap with products, on any network (READ)."""
    return (o.verdict.hidden_share or 0) > 0.9


def _band(low: float, high: float) -> str:
    if low <= _SLOWEST and high >= _FASTEST:
        return f"any rate from {_gbps(low)} to {_gbps(high)}"
    if low <= _SLOWEST:
        return f"{_gbps(high)} or less"
    if high >= _FASTEST:
        return f"{_gbps(low)} or more"
    return f"{_gbps(low)} to {_gbps(high)}"


def _gbps(value: float) -> str:
    return f"{float(f'{value * 8 / 1e9:.3g}'):,g} Gbit/s"


@dataclasses.dataclass(frozen=True)
class Crossing:
    """Bandwidths at which a method is faster than another."""

    link: str  # "the network", or the link of a host's devices
    bands: tuple[tuple[float, float], ...]  # bytes/s, both ends; (): nowhere
    most: float  # times as fast, at best
    at: float  # bytes/s there


def crossing(plan: Plan, a: Outcome, b: Outcome) -> Crossing:
    """Vary the bandwidth that is crossed last; keep the other figures.

    A band's ends are found to 0.1 %; one narrower than a step of the search (10 %) may
    be missed.
    """
    several = plan.topology.devices > plan.topology.fast_domain
    network = "slow" if several else "fast"
    link = "the network" if several else plan.topology.chip.link

    def gain(bandwidth: float) -> float:
        machine = plan.machine.at(network, bandwidth)
        return _speed(a, machine) / _speed(b, machine)

    def end(outside: float, inside: float) -> float:
        """Return the bandwidth next to `outside` from which on a is faster."""
        while abs(inside / outside - 1) > 1e-3:
            middle = math.sqrt(inside * outside)
            wins = gain(middle) >= WINS
            outside, inside = (outside, middle) if wins else (middle, inside)
        return inside

    ratio = (_FASTEST / _SLOWEST) ** (1 / _STEPS)
    tried = [_SLOWEST * ratio**i for i in range(_STEPS + 1)]
    gains = [gain(x) for x in tried]
    bands: list[tuple[float, float]] = []
    for wins, run in itertools.groupby(range(len(tried)), lambda i: gains[i] >= WINS):
        if wins:
            indices = list(run)
            first, last = indices[0], indices[-1]
            low = end(tried[first - 1], tried[first]) if first else _SLOWEST
            high = end(tried[last + 1], tried[last]) if last < _STEPS else _FASTEST
            bands.append((low, high))
    most = max(gains)
    return Crossing(link, tuple(bands), most, tried[gains.index(most)])


def _speed(o: Outcome, machine: Machine) -> float:
    """Return microbatches per second, of all workers."""
    devices = machine.topology.devices
    p = costs.in_turn(o.schedules, machine, devices)
    return o.program.computed / p.total


# ---- text and JSON


def text(decision: Decision) -> str:
    """Return the table and the sentence as text."""
    head = [
        "machine", "network", "method", "microbatch", "tokens/s", "interval", "hours",
        "device-hours", "price", "kWh at most", "goodput",
    ]  # fmt: skip
    rows = [head, *map(_row, decision.choices)]
    left = "".join("l" if name in ("machine", "method") else "r" for name in head)
    lines = [
        f"{decision.terms.tokens:,.3g} tokens, PREDICTED from compiled schedules; "
        "nothing was run",
        aligned(rows, left),
    ]
    for c in decision.choices:
        if c.misfit:
            lines.append(paragraph(f"{c.topology}: {c.misfit}", 2))
    stands = {p.topology.chip: p.topology.chip.compiled_as for p in decision.plans}
    for chip, other in stands.items():
        if other:
            lines.append(
                f"  note: there is no compiler for {chip.title} here: the schedule is "
                f"that of {other}, the figures are its own"
            )
    return "\n".join([*lines, "", paragraph(decision.sentence, 0)])


def _row(c: Choice) -> list[str]:
    network = f"{c.network * 8 / 1e9:,.4g} Gbit/s"
    if c.topology.devices <= c.topology.fast_domain:
        network = c.topology.chip.link
    if c.misfit:
        return [str(c.topology), network, c.method, "does not fit", *[""] * 7]
    return [
        str(c.topology),
        network,
        c.method,
        f"{c.rows} x {c.microbatches}",
        f"{c.tokens_per_second:,.0f}",
        " - ".join(f"{x:,.0f}" for x in c.interval),
        f"{c.hours:,.2f}",
        f"{c.device_hours:,.1f}",
        "-" if c.price is None else f"{c.price:,.2f}",
        "-" if c.kilowatt_hours is None else f"{c.kilowatt_hours:,.1f}",
        f"{c.goodput:.1%}",
    ]


def as_dict(decision: Decision) -> dict[str, Any]:
    """Return the decision as JSON-ready values, in SI units except hours and kWh."""
    return {
        "terms": dataclasses.asdict(decision.terms),
        "choices": [
            {**_plain(c), "topology": str(c.topology), "devices": c.topology.devices}
            for c in decision.choices
        ],
        "sentence": decision.sentence,
    }


def _plain(c: Choice) -> dict[str, Any]:
    fields = (f.name for f in dataclasses.fields(c) if f.name != "topology")
    return {name: getattr(c, name) for name in fields}
