"""Methods against the network's rate: one compile of each, predicted at many rates.

found = make(config, topologies.parse("gpu:a100:4x8"), PlanRequest())
print(text(found))
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from acco_jax.command import palette
from acco_jax.command.charts import legend_below, save, subplots
from acco_jax.plan import planner
from acco_jax.plan.decision import WINS
from acco_jax.plan.outcomes import Outcome
from acco_jax.plan.planner import BASELINE, Plan, PlanRequest
from acco_jax.run.config import fields as configs
from acco_jax.schedule import costs
from acco_jax.schedule.machines import Machine
from acco_jax.schedule.tables import aligned, paragraph
from acco_jax.schedule.topologies import Topology
from acco_jax.step.first_half import LONGER

SLOWEST, FASTEST = 1e8 / 8, 1e12 / 8  # bytes/s of a device: 0.1 to 1,000 Gbit/s
STEPS = 48  # of rates between them
SHOWN = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)  # Gbit/s, in the table


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Speed-ups over zero1 at equal tokens, by method and rate."""

    plans: tuple[Plan, ...]  # zero1's first
    link: str  # that varies
    rates: tuple[float, ...]  # bytes/s of a device, ascending
    speedups: Mapping[str, tuple[float, ...]]  # predicted, one for each rate
    misfits: Mapping[str, str]  # methods that do not fit, and why

    def best(self, i: int) -> str:
        """Return the method to take at a rate: the first that is as fast as any."""
        fastest = max(values[i] for values in self.speedups.values())
        return next(n for n, x in self.speedups.items() if WINS * x[i] >= fastest)

    @property
    def topology(self) -> Topology:
        return self.plans[0].topology

    @property
    def bands(self) -> list[tuple[str, float, float]]:
        """Methods with the rates from and to which each is best."""
        runs = itertools.groupby(range(len(self.rates)), self.best)
        found = [(name, list(run)) for name, run in runs]
        last = len(self.rates) - 1
        middles = [math.sqrt(a * b) for a, b in itertools.pairwise(self.rates)]
        ends = [self.rates[0], *middles, self.rates[last]]
        return [(name, ends[i[0]], ends[i[-1] + 1]) for name, i in found]


def make(config: ConfigDict, topology: Topology, request: PlanRequest) -> Sweep:
    """Predict methods, also in 8 bits, at rates from 0.1 Gbit/s on.

    At each rate acco has the first half that a run would choose. 8 bits have a domain
    for each host, where hosts have several devices.

    Args:
      config: of the experiment, checked.
      topology: the machine.
      request: its methods must have zero1; (): the config's, or acco if that is zero1
        or 'auto', and zero1.

    Raises:
      ValueError: if zero1 is not among the methods, counts are adaptive, or the input
        is invalid.
    """
    if config.microbatches == "adaptive":
        raise ValueError(
            "microbatches is 'adaptive', whose counts differ at each rate: plan with "
            "--network instead of --sweep-network, or leave it out."
        )
    own = "acco" if config.method in ("auto", BASELINE) else config.method
    methods = request.methods or (own, BASELINE)
    if BASELINE not in methods:
        raise ValueError(
            f"--sweep-network compares with {BASELINE}, which is not among --methods: "
            "add it."
        )
    others = tuple(m for m in dict.fromkeys(methods) if m != BASELINE)
    ask = functools.partial(dataclasses.replace, request, fit=False)
    plan = planner.make(config, topology, ask(methods=(BASELINE,)))
    divided = planner.with_domains(config, topology)

    def planned(config: ConfigDict) -> tuple[list[Plan], dict[str, str]]:
        """Return the plans of the halves that fit, and methods of which none does."""
        found, misfits = [], dict[str, str]()
        for each in _halved(config) if others else []:
            try:
                found.append(planner.make(each, topology, ask(methods=others)))
            except planner.NothingFits as error:
                misfits |= error.misfits
            else:
                misfits |= found[-1].misfits
        fit = {o.program.method for plan in found for o in plan.outcomes}
        return found, {m: why for m, why in misfits.items() if m not in fit}

    plans, misfits = planned(config)
    few = plans
    if divided is not config:
        few, other = planned(divided)
        misfits |= {f"{m}, 8 bits": f"In 8 bits: {why}" for m, why in other.items()}
    several = topology.devices > topology.fast_domain
    network = "slow" if several else "fast"
    rates = _rates()
    curves: dict[str, list[float]] = {BASELINE: []}
    for rate in rates:
        machine = plan.machine.at(network, rate)
        base = _speed(plan.outcomes[0], machine)
        curves[BASELINE].append(1.0)
        for method in others:
            for label, found in (
                (method, _speeds(plans, method, machine)),
                (f"{method}, 8 bits", _speeds(few, method, machine, bits=True)),
            ):
                if found:  # of halves the smallest first one that takes no longer
                    chosen = next(s for s in found if LONGER * s >= max(found))
                    curves.setdefault(label, []).append(chosen / base)
    link = "the network" if several else topology.chip.link
    speedups = {label: tuple(values) for label, values in curves.items()}
    shown = (plan, *plans, *(few if few is not plans else ()))
    return Sweep(shown, link, rates, speedups, misfits)


def _rates() -> tuple[float, ...]:
    """Return STEPS rates to each of which the next has one ratio, and those SHOWN."""
    ratio = (FASTEST / SLOWEST) ** (1 / STEPS)
    shown = [x * 1e9 / 8 for x in SHOWN]
    between = [SLOWEST * ratio**i for i in range(STEPS + 1)]
    near = [any(abs(x / rate - 1) < 1e-6 for rate in shown) for x in between]
    kept = itertools.compress(between, map(operator.not_, near))
    return tuple(sorted([*shown, *kept]))


def _halved(config: ConfigDict) -> list[ConfigDict]:
    """Return the config with each first half that acco may have, ascending."""
    firsts = configs.first_halves(config, 2)
    return [configs.with_first_half(config, x) for x in firsts] or [config]


def _speeds(
    plans: Sequence[Plan], method: str, machine: Machine, *, bits: bool = False
) -> list[float]:
    """Return microbatches per second in each plan that has the method, or its bits."""
    found = []
    for plan in plans:
        for o in plan.outcomes:
            rows = planner.few_bits(o, plan.config, machine) if bits else [None]
            found += [
                _speed(o, machine) * (row["speedup"] if row else 1.0)
                for row in rows
                if o.method == method
                and (not row or (row["gather_bits"], row["reduce_bits"]) == (8, 8))
            ]
    return found


def _speed(o: Outcome, machine: Machine) -> float:
    """Return microbatches per second of a method."""
    total = costs.in_turn(o.schedules, machine, machine.topology.devices).total
    return o.program.computed / total


def text(sweep: Sweep) -> str:
    """Return the table and the bands as text."""
    names = list(sweep.speedups)
    rows = [["Gbit/s per device", *names, "take"]]
    for shown in SHOWN:
        i = sweep.rates.index(shown * 1e9 / 8)
        values = [f"{sweep.speedups[n][i]:.2f}" for n in names]
        rows.append([f"{shown:g}", *values, sweep.best(i)])
    lines = [
        f"{sweep.topology}: speed-up over {BASELINE} against {sweep.link}, "
        "PREDICTED from compiled schedules; nothing was run",
        aligned(rows, "r" * (len(names) + 1) + "l"),
        "",
        paragraph("; ".join(_band(*band, sweep) for band in sweep.bands) + ".", 0),
    ]
    lines += [f"DOES NOT FIT\n  {why}" for why in sweep.misfits.values()]
    return "\n".join(lines)


def _band(name: str, low: float, high: float, sweep: Sweep) -> str:
    first, last = (f"{float(f'{x * 8 / 1e9:.2g}'):g}" for x in (low, high))
    if low == sweep.rates[0] and high == sweep.rates[-1]:
        return f"{name} at every rate"
    if low == sweep.rates[0]:
        return f"{name} up to {last} Gbit/s"
    if high == sweep.rates[-1]:
        return f"{name} from {first} Gbit/s on"
    return f"{name} from {first} to {last} Gbit/s"


def picture(sweep: Sweep, path: Path) -> None:
    """Draw the speed-ups against the rate, with the band of the best one shaded."""
    figure, (ax,) = subplots(7.2, 3.6, 1)
    colors = palette.of_methods(name.partition(",")[0] for name in sweep.speedups)
    x = [rate * 8 / 1e9 for rate in sweep.rates]
    for label, values in sweep.speedups.items():
        method, _, bits = label.partition(",")
        ax.plot(x, values, label=label, color=colors[method], ls="--" if bits else "-")
    for name, low, high in sweep.bands:
        method, _, bits = name.partition(",")
        ax.axvspan(
            low * 8 / 1e9, high * 8 / 1e9, fc=colors[method], ec="w", alpha=0.14,
            lw=0, hatch="//" * bool(bits),
        )  # fmt: skip
    ax.set_xscale("log")
    ax.set_xlim(x[0], x[-1])
    ax.set_xticks(SHOWN, [f"{tick:g}" for tick in SHOWN])
    ax.minorticks_off()
    ax.set_ylim(bottom=0)
    ax.set_xlabel(f"{sweep.link} per device, Gbit/s")
    ax.set_ylabel(f"predicted speed-up over {BASELINE}")
    legend_below(figure)
    figure.suptitle(f"{sweep.topology}: shaded in the colour of the fastest")
    path.parent.mkdir(parents=True, exist_ok=True)
    save(figure, path)


def as_dict(sweep: Sweep) -> dict[str, Any]:
    """Return the sweep as JSON-ready values; rates are in bytes/s of a device."""
    return {
        "topology": str(sweep.topology),
        "rates": list(sweep.rates),
        "speedups": {name: list(values) for name, values in sweep.speedups.items()},
        "bands": [list(band) for band in sweep.bands],
        "do_not_fit": dict(sweep.misfits),
    }
