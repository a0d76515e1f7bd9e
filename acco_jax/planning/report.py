"""What a plan says, as text and as JSON: what was read apart from what is predicted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import acco_jax
from acco_jax.footprint import NEGLIGIBLE
from acco_jax.planning import pictures
from acco_jax.planning.costs import Figure
from acco_jax.planning.planner import Outcome, Plan
from acco_jax.planning.schedules import Collective

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_SMALL = ((1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))
GIB = 2**30


def text(plan: Plan) -> str:
    """The whole report, in lines."""
    blocks = [_head(plan), _figures(plan)]
    blocks += [_method(plan, o) for o in plan.outcomes]
    blocks += [_comparison(plan)]
    if plan.few_bits:
        blocks.append(_few_bits(plan))
    if len(plan.growth) > len(plan.outcomes):
        blocks.append(_growth(plan))
    return "\n\n".join(blocks)


def as_dict(plan: Plan) -> dict[str, Any]:
    """The same as JSON-ready values, in SI units."""
    return {
        "topology": str(plan.topology),
        "devices": plan.topology.devices,
        "chip": plan.topology.chip.title,
        "jax": jax.__version__,
        "parameters": plan.outcomes[0].program.parameters,
        "figures": {
            name: {"value": f.value, "unit": f.unit, "source": f.source}
            for name, f in plan.machine.figures.items()
        },
        "methods": {o.method: _read_dict(plan, o) for o in plan.outcomes},
        "predicted": list(plan.growth),
        "few_bits": list(plan.few_bits),
        "exposed": [{"method": m, "name": c.name} for m, c in plan.exposed],
    }


def write(
    plan: Plan, folder: Path, json_file: Path | None, hlo_folder: Path | None
) -> list[str]:
    """Writes pictures, JSON and programs; returns a line about each."""
    folder.mkdir(parents=True, exist_ok=True)
    title = f"{plan.topology}, {plan.outcomes[0].program.parameters / 1e6:,.1f}M"
    title += " parameters: prediction"
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


def _read_dict(plan: Plan, o: Outcome) -> dict[str, Any]:
    memory = o.compiled.memory
    return {
        "half_rounds_per_step": o.half_rounds,
        "microbatches": o.program.microbatches,
        "compile_seconds": o.compiled.seconds,
        "flops": o.compiled.schedule.flops,
        "hidden_bytes_fraction": _hidden(o),
        "optimizers_own": o.own and _own_dict(o.own),
        "collectives": [
            {
                "name": c.name,
                "kind": c.kind,
                "bytes": c.bytes,
                "dtype": c.dtype,
                "times": c.times,
                "start": c.start,
                "done": c.done,
                "where": c.where,
                "loops_between": list(c.whiles_between),
                "flops_between": c.flops_between,
                "flops_carried": c.flops_carried,
                "hidden": c.hidden,
            }
            for c in o.collectives
        ],
        "memory": {
            **memory.parts,
            "temporaries": memory.temporaries,
            "total": memory.total,
            "of": plan.machine.value("memory_bytes"),
        },
        "largest_microbatch": o.line and o.line.largest,
    }


def _hidden(o: Outcome) -> float:
    total = sum(c.bytes * c.times for c in o.collectives)
    hidden = sum(c.bytes * c.times for c in o.collectives if c.hidden)
    return hidden / total if total else 1.0


def _head(plan: Plan) -> str:
    program, config = plan.outcomes[0].program, plan.config
    counts = f", computed: {list(config.counts)}" if config.counts else ""
    sizes = " x ".join(map(str, program.mesh.devices.shape))
    axes = f"; two data axes, {sizes}" if program.mesh.devices.ndim > 1 else ""
    return "\n".join(
        (
            f"{plan.topology}: {plan.topology.devices} x {plan.topology.chip.title}, "
            f"none of them here{axes}",
            f"{program.parameters / 1e6:,.1f}M parameters in "
            f"{config.model.param_dtype}; per optimizer step and worker "
            f"{config.microbatches_per_step} microbatches of "
            f"{config.microbatch_size} x {config.length} tokens{counts}",
            f"READ is from the schedule that jax {jax.__version__} compiled; PREDICTED "
            "follows from it and the figures below. Nothing was run.",
        )
    )


def _figures(plan: Plan) -> str:
    rows = [(name, quantity(f), f.source) for name, f in plan.machine.figures.items()]
    lines = ["figures (per device; --set=NAME=VALUE changes one)", _table(rows, "lrl")]
    if plan.model.dtype != jnp.bfloat16:
        lines.append(
            f"note: model.dtype is {plan.config.model.dtype}, but products are timed "
            "at the peak above: set flops to what this dtype reaches"
        )
    return "\n".join(lines)


def _method(plan: Plan, o: Outcome) -> str:
    p, row = o.prediction, plan.row(o.method)
    lines = [
        f"{o.method}: {_calls(o)}, "
        f"{_many(o.program.microbatches, 'microbatch', 'es')} in each",
        f"  READ from the schedule (compiled in {o.compiled.seconds:.0f} s), "
        "collectives of the data axis of at least 1 MiB:",
        _table([_collective(c) for c in o.collectives], "lrlll", indent=4)
        or "    none",
        *(f"    {note}" for note in _notes(plan, o)),
        f"    hidden: {_hidden(o):.0%} of the bytes",
        *(f"    {words}" for words in _own(o)),
        f"  READ from the memory analysis, GiB per device of "
        f"{plan.machine.value('memory_bytes') / GIB:.1f}:",
        _table(_memory(o), "lr", indent=4),
    ]
    if o.line is not None:
        lines.append(
            f"    largest microbatch that fits: about {o.line.largest} rows"
            + (
                f" ({o.line.per_row / 2**20:,.0f} MiB per row, from two compiles)"
                if o.line.per_row is not None
                else ""
            )
        )
    lines += [
        "  PREDICTED:",
        f"    half-round    {seconds(p.total)} = computation {seconds(p.computation)}"
        f" + communication not hidden {seconds(p.exposed)}",
        f"    communication {seconds(p.communication)}, of which {p.hidden:.0%} hidden",
        f"    optimizer step {seconds(row['step'])}, "
        f"{row['tokens_per_second']:,.0f} tokens/s, "
        f"{row['model_flops_utilization']:.0%} of peak FLOP/s",
    ]
    return "\n".join(lines)


def _calls(o: Outcome) -> str:
    """How half-rounds make a step, or (inner) steps a call."""
    tx = o.program.tx
    if tx.steps_per_call > 1:
        return f"{tx.steps_per_call} inner steps per half-round"
    return f"{_many(tx.half_rounds, 'half-round')} per step"


def _many(number: int, noun: str, ending: str = "s") -> str:
    return f"{number} {noun}{ending if number != 1 else ''}"


def _collective(c: Collective) -> tuple[str, ...]:
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
        f"{c.bytes / 2**20:,.1f} MiB {c.dtype}",
        f"lines {c.start}-{'?' if c.done is None else c.done}{place}",
        "hidden" if c.hidden else "EXPOSED",
        between,
    )


def _own_dict(own: Sequence[tuple[Collective, int]]) -> dict[str, dict[str, int]]:
    """Number and bytes of the optimizer's own collectives, by kind."""
    found: dict[str, dict[str, int]] = {}
    for c, size in own:
        row = found.setdefault(c.kind, {"number": 0, "bytes": 0, "hidden_bytes": 0})
        row["number"] += c.times
        row["bytes"] += c.times * size
        row["hidden_bytes"] += c.times * size if c.hidden else 0
    return found


def _own(o: Outcome) -> list[str]:
    """A line about them, if one carries more than a few numbers."""
    if o.own is None or all(size < NEGLIGIBLE for _, size in o.own):
        return []
    rows = _own_dict(o.own)
    kinds = (
        f"{_many(row['number'], kind)}, {_bytes(row['bytes'])}"
        for kind, row in rows.items()
    )
    total = sum(row["bytes"] for row in rows.values())
    hidden = sum(row["hidden_bytes"] for row in rows.values())
    line = f"the optimizer's own, of any size: {'; '.join(kinds)}"
    return [f"{line}; {hidden / total:.0%} of these bytes hidden"]


def _bytes(size: int) -> str:
    if size < 1000:
        return f"{size} bytes"
    return f"{size / 2**20:,.1f} MiB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


def _notes(plan: Plan, o: Outcome) -> list[str]:
    """What the table of collectives does not say of itself."""
    notes = []
    if len(o.program.step.turns()) > 1:
        notes.append(
            "note: its half-rounds differ; this is one of them, and stands for all"
        )
    own = {c.name for c, size in o.own or () if size == c.bytes}
    asked = [c for c in o.collectives if c.name not in own]
    reduces = [c for c in asked if c.kind == "all-reduce"]
    means = o.method == "ddp" or isinstance(o.program.tx, acco_jax.LocalMethod)
    if not reduces or means:
        return notes
    kinds = {c.kind for c in asked}
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
    rows: list[tuple[str, ...]] = [
        ("method", "step", "tokens/s", "hidden (read)", "hidden time", "over zero1")
    ]
    for o in plan.outcomes:
        row = plan.row(o.method)
        rows.append(
            (
                o.method,
                seconds(row["step"]),
                f"{row['tokens_per_second']:,.0f}",
                f"{_hidden(o):.0%}",
                f"{row['hidden']:.0%}",
                _times(row["speedup_over_zero1"]),
            )
        )
    compiled = plan.growth[0]["zero1_compiled"]
    how = "as compiled" if compiled else "by formula: it was not among the methods"
    return f"PREDICTED side by side (zero1 {how})\n" + _table(rows, "lrrrrr")


def _few_bits(plan: Plan) -> str:
    head = "method gather reduce MiB/step share communication hidden step faster"
    rows: list[tuple[str, ...]] = [tuple(head.split())]

    rows += [
        (
            r["method"],
            *(
                f"{r[b]} bits" if r[b] else "all"
                for b in ("gather_bits", "reduce_bits")
            ),
            f"{r['bytes'] / 2**20:,.1f}",
            f"{r['share_of_bytes']:.3f}",
            seconds(r["communication"]),
            f"{r['hidden']:.0%}",
            seconds(r["step"]),
            f"{r['speedup']:.2f}x",
        )
        for r in plan.few_bits
    ]
    table = (
        "PREDICTED with method_options.gather_bits and reduce_bits (the same schedule, "
        "its collectives\nscaled; packing not counted)\n" + _table(rows, "lllrrrrrr")
    )
    topology, flat = plan.topology, plan.outcomes[0].program.mesh.devices.ndim == 1
    hosts = topology.devices // topology.fast_domain
    if topology.platform == "gpu" and flat and 1 < hosts < topology.devices:
        table += (
            f"\n  note: with config.domains={hosts} gradients are summed within a host "
            "first, and reduce_bits\n  is for the network between hosts alone"
        )
    return table


def _growth(plan: Plan) -> str:
    rows: list[tuple[str, ...]] = [
        ("devices", "method", "step", "tokens/s", "hidden time", "over zero1", "GiB")
    ]
    rows += [
        (
            f"{r['devices']:,}",
            r["method"],
            seconds(r["step"]),
            f"{r['tokens_per_second']:,.0f}",
            f"{r['hidden']:.0%}",
            _times(r["speedup_over_zero1"]),
            f"{r['memory'] / GIB:,.2f}",
        )
        for r in plan.growth
    ]
    return (
        f"PREDICTED as devices grow (compiled for {plan.topology.devices}; for others "
        "the collectives by formula, the same work per device)\n"
        + _table(rows, "rlrrrrr")
    )


def _table(rows: Sequence[Sequence[str]], align: str, indent: int = 2) -> str:
    if not rows:
        return ""
    widths = [max(len(row[i]) for row in rows) for i in range(len(align))]
    lines = []
    for row in rows:
        cells = (
            f"{cell:>{w}}" if a == "r" else f"{cell:<{w}}"
            for cell, w, a in zip(row, widths, align, strict=True)
        )
        lines.append((" " * indent + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def seconds(value: float) -> str:
    return _scaled(value, "s", _SMALL)


def quantity(figure: Figure) -> str:
    """With a prefix: 989.4 TFLOP/s."""
    if not figure.unit:
        return f"{figure.value:g}"
    prefixes = _SMALL if figure.unit == "s" else _PREFIXES
    return _scaled(figure.value, figure.unit, prefixes)


def _scaled(value: float, unit: str, prefixes: Any) -> str:
    for scale, prefix in prefixes:
        if value >= scale:
            return f"{value / scale:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"
