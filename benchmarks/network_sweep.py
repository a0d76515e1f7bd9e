"""Predicts acco's speed-up over zero1 against the network, and draws README's pictures.

python benchmarks/network_sweep.py

Compiles both methods of experiments/openwebtext_125m.py for four hosts of eight A100,
once, and predicts an optimizer step of both at each of RATES. Writes
experiments/results/network.md, and docs/site/assets/speedup*.svg and step*.svg, light
and dark. Nothing is run on a GPU.
"""

import json
import math
import runpy
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

from acco_jax.command import palette
from acco_jax.command.charts import subplots
from acco_jax.plan import decision, planner
from acco_jax.plan.outcomes import Outcome
from acco_jax.schedule import costs, topologies
from acco_jax.schedule.machines import Constant, Machine

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks import pictures  # noqa: E402

OUT = ROOT / "experiments" / "results" / "network.md"
EXPERIMENT, TOPOLOGY = "openwebtext_125m", "gpu:a100:4x8"
RATES = (0.5, 1, 2, 3, 3.7, 6, 12.5, 25, 50, 100, 200)  # Gbit/s of a device
SHOWN = 6  # Gbit/s, in the picture of a step
CURVE = [0.4 * (250 / 0.4) ** (i / 160) for i in range(161)]  # Gbit/s

COLORS = {
    "computation": palette.COMPUTATION,
    **{x: palette.COLLECTIVES[x] for x in ("reduce-scatter", "all-gather")},
}


def at(machine: Machine, gbps: float) -> Machine:
    """Returns the machine with another network, in Gbit/s of a device."""
    network = Constant(gbps * 1e9 / 8, "B/s", "varied")
    return Machine(machine.topology, {**machine.figures, "slow_bandwidth": network})


def step(outcome: Outcome, machine: Machine) -> list[costs.Prediction]:
    """Predicts the calls of one optimizer step."""
    whole = costs.in_turn(outcome.schedules, machine, machine.topology.devices)
    return [whole] * outcome.program.repeats


def seconds(outcome: Outcome, machine: Machine) -> float:
    """Predicts the seconds of one optimizer step."""
    return sum(p.total for p in step(outcome, machine))


def speedup(acco: Outcome, zero1: Outcome, machine: Machine) -> float:
    """Predicts how many times as fast as zero1 acco is at equal tokens a step."""
    return seconds(zero1, machine) / seconds(acco, machine)


def bounds(acco: Outcome, zero1: Outcome, machine: Machine) -> tuple[float, float]:
    """Returns the speed-up's least and most, both methods at the same figures."""
    found = [speedup(acco, zero1, corner) for corner in machine.corners()]
    return min(found), max(found)


# ---- pictures


def draw_speedup(
    acco: Outcome,
    zero1: Outcome,
    machine: Machine,
    band: tuple[float, float],
    ending: str,
) -> None:
    """Draws the curve with its interval, the band (Gbit/s) shaded."""
    ink = pictures.STYLES[ending].ink
    figure, (ax,) = subplots(7.2, 3.1, 1)
    low, high = band
    machines = [at(machine, x) for x in CURVE]
    curve = [speedup(acco, zero1, m) for m in machines]
    least, most = zip(*(bounds(acco, zero1, m) for m in machines), strict=True)
    color = palette.METHODS["acco"]
    ax.axvspan(low, high, color=color, alpha=0.1, lw=0)
    ax.fill_between(CURVE, least, most, color=color, alpha=0.22, lw=0)
    ax.plot(CURVE, curve, color=color, lw=2)
    ax.axhline(1, color=ink, lw=0.8, ls=":")
    ax.set_xscale("log")
    ax.set_xlim(CURVE[0], CURVE[-1])
    ticks = (0.5, 1, 2, 5, 10, 20, 50, 100, 200)
    ax.set_xticks(ticks, [f"{x:g}" for x in ticks])
    ax.minorticks_off()
    ax.set_xlabel("network per device, Gbit/s")
    ax.set_ylabel("speed-up over zero1")
    ax.text(
        math.sqrt(low * high), 0.56, f"acco is faster: {low:.2g} to {high:.2g} Gbit/s",
        ha="center", color=ink, fontsize=10,
    )  # fmt: skip
    ax.text(low * 0.92, 1.03, "zero1 is faster", ha="right", color=ink, fontsize=9)
    ax.text(high * 1.1, 1.06, "no difference", ha="left", color=ink, fontsize=9)
    pictures.save(figure, f"speedup{ending}.svg")


def draw_step(acco: Outcome, zero1: Outcome, machine: Machine, ending: str) -> None:
    """Draws an optimizer step of both methods to scale: computation, communication."""
    ink, _, waits = pictures.STYLES[ending]
    figure, axes = subplots(7.2, 2.9, 2, sharex=True)
    longest = seconds(zero1, machine)
    for ax, outcome in zip(axes, (zero1, acco), strict=True):
        begin, exposed = 0.0, 0.0
        for p in step(outcome, machine):
            for span in p.spans:
                _bar(ax, begin, span, waits)
            begin, exposed = begin + p.total, exposed + p.exposed
            ax.axvline(begin * 1e3, color=ink, lw=0.8, ls=":")
        ax.set_yticks([1, 0], ["compute", "network"])
        ax.set_ylim(-0.55, 1.55)
        ax.tick_params(axis="y", length=0)
        ax.grid(visible=False)
        ax.spines["left"].set_visible(False)
        ax.set_title(
            f"{outcome.method}: {begin * 1e3:.0f} ms, "
            f"{exposed * 1e3:.0f} ms of communication exposed",
            loc="left", fontsize=10, color=ink,
        )  # fmt: skip
        ax.set_xlim(0, longest * 1e3 * 1.01)
    axes[-1].set_xlabel("predicted time of one optimizer step of the same tokens, ms")
    patch = mpl.patches.Patch
    handles = [patch(color=c, label=name) for name, c in COLORS.items()]
    handles.append(patch(fc="none", ec=waits, hatch="////", lw=0, label="waiting"))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=4, frameon=False,
        labelcolor=ink,
    )  # fmt: skip
    pictures.save(figure, f"step{ending}.svg")


def _bar(ax: Any, begin: float, span: costs.Span, waits: str) -> None:
    box = {"left": (begin + span.start) * 1e3, "width": (span.end - span.start) * 1e3}
    if span.track == "waiting":
        ax.barh(1, **box, height=0.7, fc="none", ec=waits, hatch="////", lw=0)
    elif span.track == "computation":
        ax.barh(1, **box, height=0.7, color=COLORS["computation"], lw=0.5)
    elif span.name in COLORS:  # the others are too short to be seen
        ax.barh(0, **box, height=0.7, color=COLORS[span.name], lw=0)


# ---- the page


TEXT = """# acco's speed-up over zero1 against the network

    python benchmarks/network_sweep.py

{model} of `experiments/{experiment}.py` on
`{topology}`: both methods were compiled for
these GPUs, and their schedules READ. Every time below is PREDICTED from the chips'
figures in `acco_jax/schedule/chips.py`. Nothing was run on a GPU. A step of both
methods has the same {tokens:,} tokens. The interval is the least and the most of the
speed-up at the ends of the figures' ranges, both methods at the same figures. The
network's rate is that of one device; times are ms of an optimizer step.

| Gbit/s | zero1 | acco | zero1 exposed | acco exposed | speed-up | interval |
|---|---|---|---|---|---|---|
{rows}

acco is at least {faster:.0%} faster from {low:.2g} to {high:.2g} Gbit/s,
and at most {most:.2f} times as fast, at {at_most:.2g} Gbit/s. It sends
twice zero1's bytes. Below {even:.2g} Gbit/s that takes longer than it saves,
and zero1 is faster.

{pictures}
"""


def row(acco: Outcome, zero1: Outcome, machine: Machine, gbps: float) -> str:
    """Returns a row of the table."""
    there = at(machine, gbps)
    exposed = [sum(p.exposed for p in step(o, there)) for o in (zero1, acco)]
    low, high = bounds(acco, zero1, there)
    times = [seconds(zero1, there), seconds(acco, there), *exposed]
    cells = [f"{x * 1e3:,.1f}" for x in times]
    gain = f"{speedup(acco, zero1, there):.3f}"
    return f"| {gbps:g} | {' | '.join(cells)} | {gain} | {low:.3f} - {high:.3f} |"


def main() -> None:
    topologies.use_cpu()
    config = runpy.run_path(str(ROOT / "experiments" / f"{EXPERIMENT}.py"))
    request = planner.PlanRequest(methods=("acco", "zero1"), fit=False)
    plan = planner.make(config["get_config"](), topologies.parse(TOPOLOGY), request)
    acco, zero1 = plan.outcomes
    tokens = {plan.row(o.method)["tokens_per_step"] for o in plan.outcomes}
    assert len(tokens) == 1, "a step of both must have the same tokens"
    (ends,) = decision.crossing(plan, acco, zero1).bands
    low, high = (rate * 8 / 1e9 for rate in ends)
    slower = [x for x in CURVE if speedup(acco, zero1, at(plan.machine, x)) < 1]
    even = max(x for x in slower if x < low)
    most, at_most = max((speedup(acco, zero1, at(plan.machine, x)), x) for x in CURVE)
    for ending in pictures.styled():
        draw_speedup(acco, zero1, plan.machine, (low, high), ending)
        draw_step(acco, zero1, at(plan.machine, SHOWN), ending)
    OUT.write_text(
        TEXT.format(
            model=f"GPT-Neo, {acco.program.parameters / 1e6:.0f}M parameters,",
            experiment=EXPERIMENT, topology=TOPOLOGY, tokens=round(tokens.pop()),
            rows="\n".join(row(acco, zero1, plan.machine, x) for x in RATES),
            pictures="\n\n".join(
                pictures.both(name, alt) for name, alt in (
                    ("speedup", "The predicted speed-up against the network"),
                    ("step", f"An optimizer step of both at {SHOWN:g} Gbit/s"),
                )
            ),
            faster=decision.WINS - 1, low=low, high=high, even=even,
            most=most, at_most=at_most,
        )
    )  # fmt: skip
    print(json.dumps({"band": [low, high], "even": even}))


if __name__ == "__main__":
    main()
