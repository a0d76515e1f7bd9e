"""Exports of a plan: JSON, pictures and programs' texts."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from acco_jax.plan.outcomes import Outcome, Part
from acco_jax.plan.planner import Plan
from acco_jax.schedule import pictures
from acco_jax.schedule.schedules import Collective
from acco_jax.schedule.verdict import Reading


def as_dict(plan: Plan) -> dict[str, Any]:
    """Return a report's content as JSON-ready values, in SI units."""
    return {
        "topology": str(plan.topology),
        "devices": plan.topology.devices,
        "chip": plan.topology.chip.title,
        "jax": jax.__version__,
        "parameters": plan.outcomes[0].program.parameters,
        "figures": {
            name: dataclasses.asdict(figure)
            for name, figure in plan.machine.figures.items()
        },
        "methods": {o.method: _method_dict(plan, o) for o in plan.outcomes},
        "do_not_fit": dict(plan.misfits),
        "predicted": plan.growth,
        "few_bits": plan.few_bits,
        "exposed": [
            {"method": o.method, "name": r.collective.name}
            for o in plan.outcomes
            if o.method in plan.checked
            for r in o.verdict.objections
        ],
    }


def write(
    plan: Plan,
    folder: Path | None,
    json_file: Path | None,
    hlo_folder: Path | None,
) -> list[str]:
    """Write what has a place: pictures, JSON, programs; return a line about each."""
    lines = []
    if folder:
        lines += _pictures(plan, folder)
    if json_file:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(as_dict(plan), indent=2) + "\n")
        lines.append(f"JSON     {json_file}")
    if hlo_folder:
        hlo_folder.mkdir(parents=True, exist_ok=True)
        for o in plan.outcomes:
            for part in o.parts:
                name = "-".join(filter(None, (o.method, part.program.half_name)))
                path = hlo_folder / f"{name}.hlo.txt"
                path.write_text(part.compiled.text)
                lines.append(f"program  {path}")
    return lines


def _pictures(plan: Plan, folder: Path) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    parameters = f"{plan.outcomes[0].program.parameters / 1e6:,.1f}M parameters"
    title = f"{plan.topology}, {parameters}: prediction"
    path = folder / "timeline.png"
    pictures.timeline(_at_equal_tokens(plan), path, title)
    lines = [f"picture  {path}"]
    if len(plan.growth) > len(plan.outcomes):
        path = folder / "scaling.png"
        pictures.scaling(plan.growth, path, title, plan.topology.devices)
        lines.append(f"picture  {path}")
    return lines


def _at_equal_tokens(plan: Plan) -> list[pictures.TimelineRow]:
    """Return a timeline of each method; all take equal numbers of tokens."""
    tokens = {o.method: plan.row(o.method)["tokens_per_step"] for o in plan.outcomes}
    most = max(tokens.values())
    times = {
        o.method: o.program.repeats * most / tokens[o.method] for o in plan.outcomes
    }
    return [
        pictures.TimelineRow(
            o.method, o.prediction, times[o.method], o.verdict.shares()
        )
        for o in plan.outcomes
    ]


def _method_dict(plan: Plan, o: Outcome) -> dict[str, Any]:
    memory = o.compiled.memory
    return {
        "half_rounds_per_step": o.program.repeats * len(o.parts),
        "microbatches": o.program.microbatches,
        "halves": [_half_dict(part) for part in o.parts if o.program.halves],
        "compile_seconds": o.compiled.seconds,
        "flops": sum(schedule.flops for schedule in o.schedules),
        "exposed_seconds": o.program.repeats * o.verdict.exposed,
        "slowing_seconds": o.program.repeats * o.verdict.slowing,
        "hidden_bytes_fraction": o.verdict.hidden_share,
        "hidden_seconds_fraction": o.verdict.covered_share,
        "hidden_or_negligible": o.verdict.share,
        "optimizers_own": o.own and own_dict(o.own),
        "collectives": [_collective_dict(r) for r in o.verdict.readings],
        "collectives_in_groups": [_collective_dict(r) for r in o.in_groups.readings],
        "hidden_bytes_fraction_in_groups": o.in_groups.hidden_share,
        "memory": {
            **memory.parts,
            "temporaries": memory.temporaries,
            "total": memory.total,
            "of": plan.machine.usable_memory,
        },
        "adaptive": o.program.adaptive,
        "counts": list(o.program.counts),
        "largest_microbatch": o.fit and o.fit.largest,
        "smallest_misfit": o.fit and o.fit.misfit,
        "candidates": o.fit
        and [
            {
                "microbatch_size": t.shape.rows,
                "microbatches_per_step": t.shape.microbatches,
                "memory": t.memory,
                "tokens_per_second": t.tokens_per_second if t.memory else None,
                "hidden_bytes_fraction": t.hidden,
                "best": t is o.fit.best,
            }
            for t in o.fit.tried
        ],
    }


def _half_dict(part: Part) -> dict[str, Any]:
    return {
        "microbatches": max(part.program.counts),
        "seconds": part.verdict.total,
        "exposed_seconds": part.verdict.exposed,
        "hidden_bytes_fraction": part.verdict.hidden_share,
        "hidden_seconds_fraction": part.verdict.covered_share,
        "flops": part.compiled.schedule.flops,
    }


def _collective_dict(r: Reading) -> dict[str, Any]:
    c = r.collective
    names = ("name", "kind", "bytes", "dtype", "times", "start", "done", "where",
             "flops_between", "flops_carried", "hidden")  # fmt: skip
    values = {name: getattr(c, name) for name in names}
    return values | {
        "loops_between": list(c.whiles_between),
        "seconds": r.spent.seconds,
        "exposed_seconds": r.spent.exposed,
        "cause": r.cause.text,
        "advice": r.cause.advice,
    }


def own_dict(own: Sequence[tuple[Collective, int]]) -> dict[str, dict[str, int]]:
    """Return count and bytes of the optimizer's own collectives, by kind."""
    kinds: dict[str, dict[str, int]] = {}
    for c, size in own:
        row = kinds.setdefault(c.kind, {"number": 0, "bytes": 0, "hidden_bytes": 0})
        row["number"] += c.times
        row["bytes"] += c.times * size
        row["hidden_bytes"] += c.times * size if c.hidden else 0
    return kinds
