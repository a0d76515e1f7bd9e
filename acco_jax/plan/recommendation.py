"""The method to take on a machine, and the command that trains with it.

It is chosen as `config.method="auto"` chooses, by predicted instead of measured time.
"""

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from acco_jax.methods import gaps
from acco_jax.methods.gaps import Candidate
from acco_jax.plan import planner
from acco_jax.plan.planner import Plan, PlanRequest
from acco_jax.run.build import optimizers
from acco_jax.run.build.validation import validate
from acco_jax.run.config import fields as configs
from acco_jax.schedule.tables import aligned, paragraph, seconds
from acco_jax.schedule.topologies import Topology
from acco_jax.step.first_half import LONGER, first_halves

EXPOSED = 1 / 3  # of a step: communication that a method with fewer bytes would save


@dataclasses.dataclass(frozen=True)
class Timed:
    """A candidate with its predicted speed."""

    candidate: Candidate
    gap: str  # of its loss to zero1's
    tokens_per_second: float
    step: float  # seconds, of the microbatches asked for
    exposed: float  # of them: communication that nothing overlaps
    fields: Mapping[str, Any]  # of the config, that the command sets


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """The candidates, the one to take, and how to start it."""

    plan: Plan
    timed: tuple[Timed, ...]
    left_out: tuple[str, ...]  # whose loss is not known to be within the tolerance
    chosen: Timed
    command: str

    def objections(self, fraction: float) -> dict[str, str]:
        """Return the method if it overlaps less than a gate requires, and why."""
        chosen, plan = self.chosen.candidate, self.plan
        own = [o for o in plan.outcomes if o.method == chosen.method]
        if chosen.options:
            own = [planner.in_few_bits(o, plan.machine, **chosen.options) for o in own]
        plan = dataclasses.replace(plan, outcomes=tuple(own))
        return planner.objections([plan], fraction, [chosen.method])


def make(
    config: ConfigDict,
    topology: Topology,
    request: PlanRequest,
    arguments: Sequence[str],
) -> Recommendation:
    """Plan zero1 and acco, and recommend a method.

    Args:
      config: of the experiment, checked; its method does not matter.
      topology: the machine.
      request: of a plan, without methods.
      arguments: flags that give a command this config.

    Raises:
      ValueError: if the input is invalid (before any compile), or nothing fits.
    """
    validate(config)
    if config.microbatches != "fixed":
        raise ValueError(
            f"microbatches is {config.microbatches!r}, but --recommend is for fixed "
            "ones, whose losses are measured: leave it out."
        )
    given, config = config, _quarters(config)
    found, left_out = gaps.allowed(
        config.optimizer.name, config.tolerance, uneven=optimizers.uneven(config)
    )
    methods = tuple(dict.fromkeys(c.method for c in found))
    plan = planner.make(config, topology, dataclasses.replace(request, methods=methods))
    plans = {False: plan, True: plan}
    divided = planner.with_domains(config, topology)
    reduces = [c.method for c in found if c.divides]
    if divided is not config and reduces:
        asked = dataclasses.replace(request, methods=tuple(dict.fromkeys(reduces)))
        try:
            plans[True] = planner.make(divided, topology, asked)
        except planner.NothingFits:
            found = [c for c in found if not c.divides]
    timed = [each for c in found for each in _timed(plans[c.divides], c, plan.config)]
    best = max(t.tokens_per_second for t in timed)
    chosen = next(t for t in timed if LONGER * t.tokens_per_second >= best)
    command = _command(given, chosen, arguments)
    plan = plans[chosen.candidate.divides]
    return Recommendation(plan, tuple(timed), tuple(left_out), chosen, command)


def _command(config: ConfigDict, chosen: Timed, arguments: Sequence[str]) -> str:
    """Return the command that trains with what was chosen.

    Raises:
      ValueError: if the config's own fields do not let it.
    """
    fields = {f"--config.{name}": value for name, value in chosen.fields.items()}
    named = {x: x.partition("=")[0] for x in arguments}
    options = {f"--config.method_options.{name}" for name in config.method_options}
    if rest := options - set(named.values()) - set(fields):
        raise ValueError(
            f"{chosen.candidate.name} is best here, but the config's file has "
            f"{min(rest)[len('--config.') :]}, of {config.method}: leave it out."
        )
    own = [x for x, name in named.items() if name not in options | set(fields)]
    own += [f"{name}={value}" for name, value in fields.items()]
    words = ["python", "-m", "acco_jax.train", *own, "--workdir=runs/recommended"]
    return shlex.join(words)


def _quarters(config: ConfigDict) -> ConfigDict:
    """Return the config with steps of at least four microbatches, of as many rows."""
    config = planner.of_method(config, "acco")
    config.method_options = ConfigDict()  # of candidates only their own are known
    return configs.with_quarters(config)


def _timed(plan: Plan, candidate: Candidate, config: ConfigDict) -> list[Timed]:
    """Return a candidate with its predictions; [] if there are none."""
    method, options = candidate.method, candidate.options
    outcome = next((o for o in plan.outcomes if o.method == method), None)
    if outcome is None:
        return []
    row = plan.row(method)
    speed, step, exposed = row["tokens_per_second"], row["step"], row["exposed"]
    program = outcome.program
    shape = plan.config.microbatch_size, program.per_step
    if outcome.fit and outcome.fit.best:
        speed, shape = outcome.fit.best.tokens_per_second, outcome.fit.best.shape
    if options:
        bits = [options.get("gather_bits"), options.get("reduce_bits")]
        few = [
            r
            for r in plan.few_bits
            if [r["method"], r["gather_bits"], r["reduce_bits"]] == [method, *bits]
        ]
        if not few:
            return []
        speed *= few[0]["speedup"]
        step, exposed = few[0]["step"], few[0]["exposed"]
    fields = {"method": method, "microbatch_size": shape[0]}
    fields |= {"microbatches_per_step": shape[1]}
    if program.halves:
        fields["first_half"] = first_halves(shape[1])[0]
    fields |= {f"method_options.{name}": value for name, value in options.items()}
    if plan.config.domains != config.domains:
        fields["domains"] = plan.config.domains
    gap = candidate.gap(config.optimizer.name)
    return [Timed(candidate, gap, speed, step, exposed, fields)]


def text(recommendation: Recommendation) -> str:
    """Return the table, the reason and the command as text."""
    r, chosen = recommendation, recommendation.chosen
    devices = len(r.plan.outcomes[0].program.tx.mesh.devices.flat)
    rows = [["method", "step", "exposed", "tokens/s", "loss against zero1's"]]
    rows += [
        [
            t.candidate.name, seconds(t.step), seconds(t.exposed),
            f"{t.tokens_per_second:,.0f}", t.gap,
        ]
        for t in r.timed
    ]  # fmt: skip
    lines = [
        f"{r.plan.topology}, {r.plan.machine.network}: PREDICTED from compiled "
        "schedules; nothing was run",
        aligned(rows, "lrrrl"),
        *(f"  not measured well enough, or too far: {why}" for why in r.left_out),
        "",
        paragraph(f"RECOMMENDED: {chosen.candidate.name}{_why(r, devices)}", 0),
        r.command,
    ]
    return "\n".join(lines)


def _why(r: Recommendation, devices: int) -> str:
    chosen = r.chosen
    if devices == 1:
        return ", which is plain optax on one device."
    zero1 = next((t for t in r.timed if t.candidate.name == "zero1"), chosen)
    said = ""
    if zero1 is not chosen:
        times = chosen.tokens_per_second / zero1.tokens_per_second
        said = f", {times:.2f} times as fast as zero1"
    share = chosen.exposed / chosen.step
    if share <= EXPOSED:
        return f"{said}."
    return (
        f"{said}. {share:.0%} of its step is exposed communication: "
        f"{gaps.where_exposed(zero1.exposed / (zero1.step - zero1.exposed))}"
    )


def as_dict(recommendation: Recommendation) -> dict[str, Any]:
    """Return the recommendation as JSON-ready values, in SI units."""
    return {
        "recommended": recommendation.chosen.candidate.name,
        "command": recommendation.command,
        "candidates": [_plain(t) for t in recommendation.timed],
        "left_out": list(recommendation.left_out),
    }


def _plain(t: Timed) -> dict[str, Any]:
    return {
        "name": t.candidate.name, "gap": t.gap, "step": t.step, "exposed": t.exposed,
        "tokens_per_second": t.tokens_per_second, "fields": dict(t.fields),
    }  # fmt: skip
