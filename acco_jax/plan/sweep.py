"""Methods against the network's rate: one compile of each, predicted at many rates.

found = of_plan(plan)
print(text(found))
"""

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from acco_jax.command import palette
from acco_jax.command.charts import legend_below, subplots
from acco_jax.plan import planner
from acco_jax.plan.decision import WINS
from acco_jax.plan.outcomes import Outcome
from acco_jax.plan.planner import BASELINE, Plan
from acco_jax.schedule import costs
from acco_jax.schedule.machines import Constant, Machine
from acco_jax.schedule.tables import aligned, paragraph

SLOWEST, FASTEST = 1e8 / 8, 1e12 / 8  # bytes/s of a device: 0.1 to 1,000 Gbit/s
EACH = 12  # rates per factor of ten
SHOWN = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)  # Gbit/s, in the table


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Speed-ups over zero1 at equal tokens, by method and rate."""

    plan: Plan
    link: str  # that varies
    rates: tuple[float, ...]  # bytes/s of a device, ascending
    speedups: Mapping[str, tuple[float, ...]]  # predicted, one for each rate

    def best(self, i: int) -> str:
        """Return the method to take at a rate: zero1 unless another is faster."""
        name = max(self.speedups, key=lambda n: self.speedups[n][i])
        return name if self.speedups[name][i] >= WINS else BASELINE

    @property
    def bands(self) -> list[tuple[str, float, float]]:
        """Methods with the rates from and to which each is best."""
        runs = itertools.groupby(range(len(self.rates)), self.best)
        found = [(name, list(run)) for name, run in runs]
        return [(name, self.rates[i[0]], self.rates[i[-1]]) for name, i in found]


def of_plan(plan: Plan) -> Sweep:
    """Predict all methods of a plan, also in 8 bits, at rates from 0.1 Gbit/s on.

    The programs stay those that were compiled, also acco's first half.

    Raises:
      ValueError: if zero1 is not among the plan's methods, or did not fit.
    """
    if BASELINE not in [o.method for o in plan.outcomes]:
        why = plan.misfits.get(BASELINE, "it is not among --methods")
        raise ValueError(f"--sweep-network compares with {BASELINE}: {why}.")
    several = plan.topology.devices > plan.topology.fast_domain
    name = "slow_bandwidth" if several else "fast_bandwidth"
    number = round(EACH * 4) + 1
    ratio = (FASTEST / SLOWEST) ** (1 / (number - 1))
    rates = tuple(SLOWEST * ratio**i for i in range(number))
    speeds: dict[str, list[float]] = {}
    for rate in rates:
        figures = {**plan.machine.figures, name: Constant(rate, "B/s", "varied")}
        machine = Machine(plan.topology, figures)
        for o in plan.outcomes:
            for label, speed in _speeds(plan, o, machine).items():
                speeds.setdefault(label, []).append(speed)
    base = speeds[BASELINE]
    speedups = {
        label: tuple(s / b for s, b in zip(found, base, strict=True))
        for label, found in speeds.items()
    }
    link = "the network" if several else plan.topology.chip.link
    return Sweep(plan, link, rates, speedups)


def _speeds(plan: Plan, o: Outcome, machine: Machine) -> dict[str, float]:
    """Return microbatches per second of a method, and of it in 8 bits both ways."""
    total = costs.in_turn(o.schedules, machine, machine.topology.devices).total
    found = {o.method: o.program.computed / total}
    if o.method != BASELINE:
        for row in planner.few_bits(o, plan.config, machine):
            if (row["gather_bits"], row["reduce_bits"]) == (8, 8):
                found[f"{o.method}, 8 bits"] = found[o.method] * row["speedup"]
    return found


def text(sweep: Sweep) -> str:
    """Return the table and the bands as text."""
    names = list(sweep.speedups)
    rows = [["Gbit/s per device", *names, "take"]]
    for shown in SHOWN:
        rate = shown * 1e9 / 8
        i = min(range(len(sweep.rates)), key=lambda i: abs(sweep.rates[i] / rate - 1))
        values = [f"{sweep.speedups[n][i]:.2f}" for n in names]
        rows.append([f"{shown:g}", *values, sweep.best(i)])
    lines = [
        f"{sweep.plan.topology}: speed-up over {BASELINE} against {sweep.link}, "
        "PREDICTED from compiled schedules; nothing was run",
        aligned(rows, "r" * (len(names) + 1) + "l"),
        "",
        paragraph("; ".join(_band(*band, sweep) for band in sweep.bands) + ".", 0),
    ]
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
    methods = {o.method for o in sweep.plan.outcomes}
    colors = palette.of_methods(methods)
    x = [rate * 8 / 1e9 for rate in sweep.rates]
    for label, values in sweep.speedups.items():
        method, _, bits = label.partition(",")
        ax.plot(x, values, label=label, color=colors[method], ls="--" if bits else "-")
    for name, low, high in sweep.bands:
        color = colors[name.partition(",")[0]]
        ax.axvspan(low * 8 / 1e9, high * 8 / 1e9, color=color, alpha=0.1, lw=0)
    ax.set_xscale("log")
    ax.set_xlim(x[0], x[-1])
    ax.set_xticks(SHOWN, [f"{tick:g}" for tick in SHOWN])
    ax.minorticks_off()
    ax.set_ylim(bottom=0)
    ax.set_xlabel(f"{sweep.link} per device, Gbit/s")
    ax.set_ylabel(f"predicted speed-up over {BASELINE}")
    legend_below(figure)
    figure.suptitle(f"{sweep.plan.topology}: shaded in the colour of the fastest")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def as_dict(sweep: Sweep) -> dict[str, Any]:
    """Return the sweep as JSON-ready values; rates are in bytes/s of a device."""
    return {
        "topology": str(sweep.plan.topology),
        "rates": list(sweep.rates),
        "speedups": {name: list(values) for name, values in sweep.speedups.items()},
        "bands": [list(band) for band in sweep.bands],
    }
