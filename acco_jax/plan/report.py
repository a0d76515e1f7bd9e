"""A plan as text and as JSON: what was read apart from what is predicted."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from acco_jax.plan import pictures
from acco_jax.plan.causes import explained
from acco_jax.plan.footprint import NEGLIGIBLE
from acco_jax.plan.planner import Outcome, Plan
from acco_jax.plan.schedules import Collective
from acco_jax.plan.tables import (
    Columns,
    aligned,
    in_bytes,
    many,
    paragraph,
    quantity,
    seconds,
    table,
)
from acco_jax.plan.verdict import HIDDEN, Reading, Verdict

GIB = 2**30
LISTED = 1 << 20  # bytes of a collective that has a line of its own, or an objection

_SPEED: Columns = {
    "step": lambda r: seconds(r["step"]),
    "tokens/s": lambda r: f"{r['tokens_per_second']:,.0f}",
}
_GAIN: Columns = {
    "hidden time": lambda r: f"{r['hidden']:.0%}",
    "over zero1": lambda r: (
        f"{r['speedup_over_zero1']:.2f}x" if r["speedup_over_zero1"] else "-"
    ),
}


def text(plan: Plan) -> str:
    """Returns the whole report."""
    blocks = [_head(plan), _figures(plan)]
    blocks += [_method(plan, o) for o in plan.outcomes]
    blocks += [_comparison(plan)]
    if plan.few_bits:
        blocks.append(_few_bits(plan))
    if len(plan.growth) > len(plan.outcomes):
        blocks.append(_growth(plan))
    return "\n\n".join(blocks)


def as_dict(plan: Plan) -> dict[str, Any]:
    """Returns the same as JSON-ready values, in SI units."""
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
    plan: Plan, folder: Path, json_file: Path | None, hlo_folder: Path | None
) -> list[str]:
    """Writes pictures, JSON and programs; returns a line about each."""
    folder.mkdir(parents=True, exist_ok=True)
    parameters = f"{plan.outcomes[0].program.parameters / 1e6:,.1f}M parameters"
    title = f"{plan.topology}, {parameters}: prediction"
    lines = [f"picture  {folder / 'timeline.png'}"]
    predictions = {o.method: o.prediction for o in plan.outcomes}
    pictures.timeline(predictions, folder / "timeline.png", title)
    if len(plan.growth) > len(plan.outcomes):
        path = folder / "scaling.png"
        pictures.scaling(plan.growth, path, title, plan.topology.devices)
        lines.append(f"picture  {path}")
    if json_file:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(as_dict(plan), indent=2) + "\n")
        lines.append(f"JSON     {json_file}")
    if hlo_folder:
        hlo_folder.mkdir(parents=True, exist_ok=True)
        for o in plan.outcomes:
            path = hlo_folder / f"{o.method}.hlo.txt"
            path.write_text(o.compiled.text)
            lines.append(f"program  {path}")
    return lines


def _method_dict(plan: Plan, o: Outcome) -> dict[str, Any]:
    memory = o.compiled.memory
    return {
        "half_rounds_per_step": o.half_rounds,
        "microbatches": o.program.microbatches,
        "compile_seconds": o.compiled.seconds,
        "flops": o.compiled.schedule.flops,
        "hidden_bytes_fraction": hidden_bytes(o.verdict),
        "hidden_or_negligible": o.verdict.share,
        "optimizers_own": o.own and _own_dict(o.own),
        "collectives": [_collective_dict(r) for r in o.verdict.readings],
        "collectives_in_groups": [_collective_dict(r) for r in o.in_groups.readings],
        "hidden_bytes_fraction_in_groups": hidden_bytes(o.in_groups),
        "memory": {
            **memory.parts,
            "temporaries": memory.temporaries,
            "total": memory.total,
            "of": plan.machine.value("memory_bytes"),
        },
        "largest_microbatch": o.largest and o.largest.rows,
    }


def hidden_bytes(verdict: Verdict) -> float | None:
    """Returns the share of the bytes that is hidden, None if nothing is sent."""
    return verdict.hidden_bytes / verdict.bytes if verdict.bytes else None


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


def _head(plan: Plan) -> str:
    program, config = plan.outcomes[0].program, plan.config
    counts = f", computed: {list(config.counts)}" if config.counts else ""
    shape = program.mesh.shape
    sizes = " x ".join(str(shape[a]) for a in program.tx.axis)
    axes = f"; two data axes, {sizes}" if len(program.tx.axis) > 1 else ""
    if group := [f"{a} {k}" for a, k in shape.items() if a not in program.tx.axis]:
        axes += f"; {program.workers} workers, each a group of {' x '.join(group)}"
    return (
        f"{plan.topology}: {plan.topology.devices} x {plan.topology.chip.title}, "
        f"none of them here{axes}\n{program.parameters / 1e6:,.1f}M parameters in "
        f"{program.param_dtype}; per optimizer step and worker "
        f"{config.microbatches_per_step} microbatches of "
        f"{config.microbatch_size} x {config.length} tokens{counts}\n"
        f"READ is from the schedule that jax {jax.__version__} compiled; PREDICTED "
        "follows from it and the figures below. Nothing was run."
    )


def _figures(plan: Plan) -> str:
    rows = [(name, quantity(f), f.source) for name, f in plan.machine.figures.items()]
    block = "figures (per device; --set=NAME=VALUE changes one)\n"
    block += aligned(rows, "lrl")
    if plan.model.dtype != "bfloat16":
        block += (
            f"\nnote: model.dtype is {plan.model.dtype}, but products are timed "
            "at the peak above: set flops to what this dtype reaches"
        )
    ours = "/attention_forward/" in plan.outcomes[0].compiled.text
    if ours and plan.config.model.attention is None:
        block += (
            "\nnote: attention is compiled as this library's own kernel, because cuDNN "
            "is not installed here; on the machine it is cuDNN's"
        )
    return block


def _method(plan: Plan, o: Outcome) -> str:
    p, row = o.prediction, plan.row(o.method)
    tx, microbatches = o.program.tx, many(o.program.microbatches, "microbatch", "es")
    calls = f"{many(tx.half_rounds, 'half-round')} per step"
    if tx.steps_per_call > 1:
        calls = f"{tx.steps_per_call} inner steps per half-round"
    share = row["model_flops_utilization"]
    utilization = "" if share is None else f", {share:.0%} of peak FLOP/s"
    lines = [
        f"{o.method}: {calls}, {microbatches} in each",
        f"  READ from the schedule (compiled in {o.compiled.seconds:.0f} s), "
        "collectives of the data axis:",
        *_collectives(o.verdict),
        *(f"    {note}" for note in _notes(plan, o)),
        *_own(o),
        *_in_groups(o),
        f"  READ from the memory analysis, GiB per device of "
        f"{plan.machine.value('memory_bytes') / GIB:.1f}:",
        aligned(_memory(o), "lr", indent=4),
    ]
    if o.largest is not None:
        line = f"    largest microbatch that fits: about {o.largest.rows} rows"
        if (per_row := o.largest.bytes_per_row) is not None:
            line += f" ({per_row / 2**20:,.0f} MiB per row, from two compiles)"
        lines.append(line)
    lines += [
        "  PREDICTED:",
        f"    half-round    {seconds(p.total)} = computation {seconds(p.computation)}"
        f" + communication not hidden {seconds(p.exposed)}",
        f"    communication {seconds(p.communication)}, of which {p.hidden:.0%} hidden",
        f"    optimizer step {seconds(row['step'])}, "
        f"{row['tokens_per_second']:,.0f} tokens/s{utilization}",
    ]
    return "\n".join(lines)


def _collectives(verdict: Verdict) -> list[str]:
    """Describes large and exposed collectives one by one, the others together."""
    if not verdict.readings:
        return ["    none: nothing is communicated, so nothing is hidden"]
    against = verdict.objections
    own = [r for r in verdict.readings if r.collective.bytes >= LISTED or r in against]
    rest = [r for r in verdict.readings if r not in own]
    lines = [aligned([_collective(r) for r in own], "lrllll", indent=4)] if own else []
    for r in own:
        if r.cause.text and (r in against or r.status == HIDDEN):
            lines.append(paragraph(f"{r.collective.name}: {explained(r.cause)}", 4))
    if rest:
        times = sum(r.collective.times for r in rest)
        waited = seconds(sum(r.spent.exposed for r in rest))
        sent = in_bytes(sum(r.bytes for r in rest))
        lines.append(
            f"    {many(times, 'smaller one')}: {sent}, predicted to wait {waited}"
        )
    return [
        *lines,
        f"    hidden: {hidden_bytes(verdict):.0%} of the bytes{_but(verdict)}",
    ]


def _but(verdict: Verdict) -> str:
    """Says what a share of bytes does not."""
    exposed = [r for r in verdict.readings if r.status != HIDDEN]
    if not exposed:
        return ""
    waited = sum(r.spent.exposed for r in exposed)
    share = f"{waited / verdict.total:.1%} of the time" if verdict.total else ""
    held = "negligible: " if not verdict.objections else ""
    return f"; the rest is waited for {seconds(waited)} ({held}{share})"


def _in_groups(o: Outcome) -> list[str]:
    """Describes the collectives among the devices of one worker, by kind."""
    kinds: dict[str, list[Reading]] = {}
    for r in o.in_groups.readings:
        kinds.setdefault(f"{r.collective.kind} {r.collective.dtype}", []).append(r)
    if not kinds:
        return []
    rows = [
        (
            f"{sum(r.collective.times for r in found)} x {kind}",
            f"{sum(r.bytes for r in found) / 2**20:,.1f} MiB",
            f"{sum(r.bytes for r in found if r.status == HIDDEN) / total:.0%} hidden",
        )
        for kind, found in kinds.items()
        if (total := sum(r.bytes for r in found))
    ]
    return [
        "  READ likewise, collectives within a group of devices:",
        aligned(rows, "lrr", indent=4),
        f"    hidden: {hidden_bytes(o.in_groups):.0%} of these bytes",
    ]


def _collective(r: Reading) -> tuple[str, ...]:
    c = r.collective
    times = f" x {c.times}" if c.times > 1 else ""
    place = "" if c.where == "ENTRY" else f" of {c.where}"
    between = "nothing to hide behind"
    if not c.asynchronous:
        between = "synchronous"
    elif c.flops_between:
        loops = ", ".join(c.whiles_between)
        between = f"{c.flops_between / 1e9:,.0f} GFLOP between"
        if c.flops_carried is not None:
            between += f", {c.flops_carried / 1e9:,.0f} carry it on"
        between += f" ({loops})" if loops else ""
    return (
        c.kind + times,
        f"{in_bytes(c.bytes)} {c.dtype}",
        f"lines {c.start}-{'?' if c.done is None else c.done}{place}",
        r.status,
        c.name,
        between,
    )


def _own_dict(own: Sequence[tuple[Collective, int]]) -> dict[str, dict[str, int]]:
    """Returns number and bytes of the optimizer's own collectives, by kind."""
    kinds: dict[str, dict[str, int]] = {}
    for c, size in own:
        row = kinds.setdefault(c.kind, {"number": 0, "bytes": 0, "hidden_bytes": 0})
        row["number"] += c.times
        row["bytes"] += c.times * size
        row["hidden_bytes"] += c.times * size if c.hidden else 0
    return kinds


def _own(o: Outcome) -> list[str]:
    """Describes the optimizer's collectives if one carries more than a few numbers."""
    if o.own is None or all(size < NEGLIGIBLE for _, size in o.own):
        return []
    rows = _own_dict(o.own)
    kinds = (
        f"{many(row['number'], kind)}, {in_bytes(row['bytes'])}"
        for kind, row in rows.items()
    )
    total = sum(row["bytes"] for row in rows.values())
    hidden = sum(row["hidden_bytes"] for row in rows.values())
    line = f"    the optimizer's own, of any size: {'; '.join(kinds)}"
    return [f"{line}; {hidden / total:.0%} of these bytes hidden"]


def _notes(plan: Plan, o: Outcome) -> list[str]:
    """Returns notes on the table of collectives."""
    notes = []
    if len(o.program.step.turns()) > 1:
        notes.append(
            "note: its half-rounds differ; this is one of them, and stands for all"
        )
    own = {c.name for c, size in o.own or () if size == c.bytes}
    kinds = {c.kind for c in o.collectives if c.name not in own}
    averages = o.method == "ddp" or o.program.tx.local
    if "all-reduce" not in kinds or averages:
        return notes
    gone = "reduce-scatter" if "reduce-scatter" not in kinds else "all-gather"
    notes.append(
        f"note: {plan.topology.chip.title}'s compiler turned the {gone} into an "
        "all-reduce, which moves twice the bytes"
    )
    return notes


def _memory(o: Outcome) -> list[tuple[str, str]]:
    memory = o.compiled.memory
    parts = {
        **memory.parts,
        "activations and other temporaries": memory.temporaries,
        "all": memory.total,
    }
    return [(name, f"{size / GIB:,.3f}") for name, size in parts.items()]


def _comparison(plan: Plan) -> str:
    read = {o.method: hidden_bytes(o.verdict) for o in plan.outcomes}
    hidden = {m: "-" if share is None else f"{share:.0%}" for m, share in read.items()}
    columns: Columns = {
        "method": lambda r: r["method"],
        **_SPEED,
        "hidden (read)": lambda r: hidden[r["method"]],
        **_GAIN,
    }
    compiled = plan.growth[0]["zero1_compiled"]
    how = "as compiled" if compiled else "by formula: it was not among the methods"
    rows = [plan.row(o.method) for o in plan.outcomes]
    return f"PREDICTED side by side (zero1 {how})\n" + table(columns, rows, "lrrrrr")


def _few_bits(plan: Plan) -> str:
    columns: Columns = {
        "method": lambda r: r["method"],
        "gather": lambda r: f"{r['gather_bits']} bits" if r["gather_bits"] else "all",
        "reduce": lambda r: f"{r['reduce_bits']} bits" if r["reduce_bits"] else "all",
        "MiB/step": lambda r: f"{r['bytes'] / 2**20:,.1f}",
        "share": lambda r: f"{r['share_of_bytes']:.3f}",
        "communication": lambda r: seconds(r["communication"]),
        "hidden": lambda r: f"{r['hidden']:.0%}",
        "step": lambda r: seconds(r["step"]),
        "faster": lambda r: f"{r['speedup']:.2f}x",
    }
    block = (
        "PREDICTED with method_options.gather_bits and reduce_bits (the same schedule, "
        "its collectives\nscaled; packing not counted)\n"
        + table(columns, plan.few_bits, "lllrrrrrr")
    )
    topology, flat = plan.topology, len(plan.outcomes[0].program.tx.axis) == 1
    hosts = topology.devices // topology.fast_domain
    if topology.platform == "gpu" and flat and 1 < hosts < topology.devices:
        block += (
            f"\n  note: with config.domains={hosts} gradients are summed within a host "
            "first, and reduce_bits\n  is for the network between hosts alone"
        )
    return block


def _growth(plan: Plan) -> str:
    columns: Columns = {
        "devices": lambda r: f"{r['devices']:,}",
        "method": lambda r: r["method"],
        **_SPEED,
        **_GAIN,
        "GiB": lambda r: f"{r['memory'] / GIB:,.2f}",
    }
    return (
        f"PREDICTED as devices grow (compiled for {plan.topology.devices}; for others "
        "the collectives by formula, the same work per device)\n"
        + table(columns, plan.growth, "rlrrrrr")
    )
