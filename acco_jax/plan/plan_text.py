"""Text of a plan: READ numbers apart from PREDICTED ones."""

from typing import Any

import jax

from acco_jax.plan import exports
from acco_jax.plan.fitting import Fit
from acco_jax.plan.outcomes import Outcome, Part
from acco_jax.plan.planner import Plan
from acco_jax.schedule.causes import explained
from acco_jax.schedule.footprint import NEGLIGIBLE
from acco_jax.schedule.machines import Constant
from acco_jax.schedule.tables import (
    Columns,
    aligned,
    in_bytes,
    many,
    paragraph,
    quantity,
    seconds,
    table,
)
from acco_jax.schedule.verdict import (
    OVERLAPPED,
    Reading,
    Verdict,
    milliseconds,
    percent,
)

GIB = 2**30
ENDS = {"first": "estimate", "second": "commit"}  # of acco's halves
LISTED = 1 << 20  # bytes of a collective that has a line of its own, or an objection


def _speed(tokens: float) -> Columns:
    """Return columns of the time of `tokens` tokens, for comparing methods."""
    return {
        "exposed/step": lambda r: milliseconds(r["exposed"]),
        f"{tokens:,.0f} tokens": lambda r: seconds(tokens / r["tokens_per_second"]),
        "tokens/s": lambda r: f"{r['tokens_per_second']:,.0f}",
        "interval": lambda r: " - ".join(
            f"{end:,.0f}" for end in r["tokens_per_second_range"]
        ),
    }


def _gain(row: dict[str, Any]) -> Columns:
    def gain(r: dict[str, Any]) -> str:
        if not r["speedup"]:
            return "-"
        low, high = r["speedup_range"]
        return f"{r['speedup']:.2f}x ({low:.2f} - {high:.2f})"

    return {
        f"over {row['baseline']}": gain,
    }


def text(plan: Plan) -> str:
    """Return the whole report as text."""
    blocks = [_head(plan), _figures(plan)]
    blocks += [_method(plan, o) for o in plan.outcomes]
    blocks += [f"DOES NOT FIT\n  {why}" for why in plan.misfits.values()]
    blocks += [_comparison(plan)]
    if plan.few_bits:
        blocks.append(_few_bits(plan))
    if len(plan.growth) > len(plan.outcomes):
        blocks.append(_growth(plan))
    return "\n\n".join(blocks)


def _head(plan: Plan) -> str:
    program, config = plan.outcomes[0].program, plan.config
    counts = f", computed: {list(config.counts)}" if config.counts else ""
    for first, second in (o.program.halves for o in plan.outcomes if o.program.halves):
        counts = f", of acco {first} in the first half and {second} in the second"
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
        f"{config.microbatch_size} x {program.length} tokens{counts}\n"
        f"READ is from the schedule that jax {jax.__version__} compiled; PREDICTED "
        "follows from it and the figures below. Nothing was run."
    )


def _figures(plan: Plan) -> str:
    rows = [
        (name, quantity(f), _interval(f), f.source)
        for name, f in plan.machine.figures.items()
    ]
    block = "figures (per device; --set=NAME=VALUE changes one)\n"
    block += aligned(rows, "lrll")
    if plan.model.dtype != "bfloat16":
        block += (
            f"\nnote: model.dtype is {plan.model.dtype}, but products are timed "
            "at the peak above: set flops to what this dtype reaches"
        )
    ours = "/attention_forward/" in plan.outcomes[0].compiled.text
    if ours and plan.config.model.attention is None:
        block += (
            "\nnote: attention is compiled as this library's own kernel, because cuDNN "
            "is not installed here; on the machine it is cuDNN's: pip install "
            "'acco-jax[plan-cudnn]'"
        )
    return block


def _interval(figure: Constant) -> str:
    ends = figure.range or ()
    return " - ".join(quantity(Constant(end, figure.unit, "")) for end in ends)


def _method(plan: Plan, o: Outcome) -> str:
    p, row = o.prediction, plan.row(o.method)
    tx, microbatches = o.program.tx, many(o.program.microbatches, "microbatch", "es")
    if o.program.adaptive:
        microbatches = (
            f"{many(o.program.counts[0], 'microbatch', 'es')} (found: as many as the "
            f"communication lasts, at most {o.program.microbatches})"
        )
    calls = f"{many(tx.calls_per_step, 'call')} per step"
    if tx.steps_per_call > 1:
        calls = f"{tx.steps_per_call} inner steps per call"
    share = row["model_flops_utilization"]
    utilization = "" if share is None else f", {share:.0%} of peak FLOP/s"
    each = f"{microbatches} in each"
    if o.program.halves:
        each = "{} and {} microbatches in them".format(*o.program.halves)
    lines = [
        f"{o.method}: {calls}, {each}",
        *(line for part in o.parts for line in _part(plan, part)),
        *(f"    {note}" for note in _notes(plan, o)),
        *_own(o),
        *_in_groups(o),
        f"  READ from the memory analysis, GiB per device of "
        f"{plan.machine.usable_memory / GIB:.1f}:",
        aligned(_memory(o), "lr", indent=4),
    ]
    if o.fit is not None:
        lines += _fit(plan, o.fit)
    what = "both halves   " if o.program.halves else "one call      "
    lines += [
        "  PREDICTED:",
        f"    {what}{seconds(p.total)} = matrix products {seconds(p.matmul)} + "
        f"memory {seconds(p.memory)} + exposed communication {seconds(p.exposed)}"
        + (f" + slowed by communication {seconds(p.slowing)}" if p.slowing else "")
        + (f" + the call itself {seconds(p.call)}" if p.call else ""),
        *_halves(o),
        f"    of the data axis overlapped: {o.verdict.shares()}",
        f"    optimizer step {seconds(row['step'])} "
        f"({' - '.join(map(seconds, row['step_range']))}), "
        f"{row['tokens_per_second']:,.0f} tokens/s{utilization}",
    ]
    return "\n".join(lines)


def _part(plan: Plan, part: Part) -> list[str]:
    """Describe the collectives of a half-round."""
    compiled, half = part.compiled, part.program.half_name
    of = f" of the {half} half, the {ENDS[half]}" if half else ""
    return [
        f"  READ from the schedule{of} (compiled in {compiled.seconds:.0f} s"
        f"{', at another time' if compiled.cached else ''}), "
        "collectives of the data axis:",
        *_collectives(part.verdict),
    ]


def _halves(o: Outcome) -> list[str]:
    """Describe the time of each of unequal halves."""
    rows = []
    for part in o.parts if o.program.halves else ():
        waited = part.verdict.exposed + part.in_groups.exposed
        name = f"the {part.program.half_name}"
        rows.append(
            f"      {name:<12}{seconds(part.verdict.total)}, of which "
            f"{seconds(waited)} is exposed communication"
        )
    return rows


def _fit(plan: Plan, fit: Fit) -> list[str]:
    """Describe the candidates for a microbatch, and which one is fastest."""
    rows = []
    for t in fit.tried:
        shape = f"{t.shape.rows} rows x {t.shape.microbatches}"
        if t.memory is None:
            rows.append((shape, "does not fit", "", "", ""))
            continue
        rows.append((
            shape,
            f"{t.memory / GIB:,.1f} GiB",
            "" if t.hidden is None else f"{percent(t.hidden)} of the bytes overlapped",
            f"{t.tokens_per_second:,.0f} tokens/s",
            "the fastest at as many tokens a step" if t is fit.best else "",
        ))  # fmt: skip
    line = f"largest microbatch that fits: {fit.largest} rows"
    if fit.misfit:
        line += f"; {fit.misfit} do not"
    elif fit.filled:
        line += f" ({fit.filled / plan.machine.usable_memory:.0%} of the memory)"
    return [
        f"    {line} ({many(fit.compiled, 'program')} compiled):",
        aligned(rows, "rrlrl", indent=6),
    ]


def _collectives(verdict: Verdict) -> list[str]:
    """Describe large and exposed collectives one by one, the others together."""
    if not verdict.readings:
        return ["    none: nothing is communicated, so nothing is overlapped"]
    against = verdict.objections
    own = [r for r in verdict.readings if r.collective.bytes >= LISTED or r in against]
    rest = [r for r in verdict.readings if r not in own]
    lines = [aligned([_collective(r) for r in own], "lrllll", indent=4)] if own else []
    for r in own:
        if r.cause.text and (r in against or r.status == OVERLAPPED):
            lines.append(paragraph(f"{r.collective.name}: {explained(r.cause)}", 4))
    if rest:
        times = sum(r.collective.times for r in rest)
        waited = seconds(sum(r.spent.exposed for r in rest))
        sent = in_bytes(sum(r.bytes for r in rest))
        lines.append(
            f"    {many(times, 'smaller one')}: {sent}, {waited} predicted exposed"
        )
    held = "" if verdict.objections else ", negligible"
    return [
        *lines,
        f"    overlapped: {verdict.shares()}; exposed {milliseconds(verdict.exposed)}, "
        f"{verdict.exposed / verdict.total:.2%} of its time{held}",
    ]


def _in_groups(o: Outcome) -> list[str]:
    """Describe the collectives within a model-parallel group, by kind."""
    kinds: dict[str, list[Reading]] = {}
    for r in o.in_groups.readings:
        kinds.setdefault(f"{r.collective.kind} {r.collective.dtype}", []).append(r)
    if not kinds:
        return []
    rows = [
        (
            f"{sum(r.collective.times for r in found)} x {kind}",
            f"{sum(r.bytes for r in found) / 2**20:,.1f} MiB",
            percent(sum(r.bytes for r in found if r.status == OVERLAPPED) / total)
            + " overlapped (READ)",
        )
        for kind, found in kinds.items()
        if (total := sum(r.bytes for r in found))
    ]
    return [
        "  READ likewise, collectives within a group of devices:",
        aligned(rows, "lrr", indent=4),
        f"    overlapped: {o.in_groups.shares()}",
    ]


def _collective(r: Reading) -> tuple[str, ...]:
    c = r.collective
    times = f" x {c.times}" if c.times > 1 else ""
    place = "" if c.where == "ENTRY" else f" of {c.where}"
    between = "no computation beside it"
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


def _own(o: Outcome) -> list[str]:
    """Describe the optimizer's collectives if one has at least NEGLIGIBLE bytes."""
    if o.own is None or all(size < NEGLIGIBLE for _, size in o.own):
        return []
    rows = exports.own_dict(o.own)
    kinds = (
        f"{many(row['number'], kind)}, {in_bytes(row['bytes'])}"
        for kind, row in rows.items()
    )
    total = sum(row["bytes"] for row in rows.values())
    hidden = sum(row["hidden_bytes"] for row in rows.values())
    line = f"    the optimizer's own, of any size: {'; '.join(kinds)}"
    return [f"{line}; {hidden / total:.0%} of these bytes overlapped"]


def _notes(plan: Plan, o: Outcome) -> list[str]:
    """Return notes on the table of collectives."""
    notes = []
    if len(o.program.step.turns()) > 1:
        notes.append("note: its calls differ; this is one of them, and stands for all")
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
    found = {o.method: o.verdict for o in plan.outcomes}
    rows = [plan.row(o.method) for o in plan.outcomes]
    tokens = max(r["tokens_per_step"] for r in rows)
    columns: Columns = {
        "method": lambda r: r["method"],
        **_speed(tokens),
        "overlapped: bytes (READ)": lambda r: percent(found[r["method"]].hidden_share),
        "seconds (PREDICTED)": lambda r: percent(found[r["method"]].covered_share),
        **_gain(rows[0]),
    }
    how = "as compiled"
    if not rows[0]["baseline_compiled"]:
        how = "by formula: it was not among the methods"
    return (
        f"PREDICTED side by side, at equal tokens, {plan.machine.network} "
        f"({rows[0]['baseline']} {how}; "
        "intervals: all combinations of the figures' ranges)\n"
        + table(columns, rows, "lrrrrrrr")
    )


def _few_bits(plan: Plan) -> str:
    columns: Columns = {
        "method": lambda r: r["method"],
        "gather": lambda r: f"{r['gather_bits']} bits" if r["gather_bits"] else "all",
        "reduce": lambda r: f"{r['reduce_bits']} bits" if r["reduce_bits"] else "all",
        "MiB/step": lambda r: f"{r['bytes'] / 2**20:,.1f}",
        "share": lambda r: f"{r['share_of_bytes']:.3f}",
        "exposed/step": lambda r: milliseconds(r["exposed"]),
        "communication": lambda r: seconds(r["communication"]),
        "seconds overlapped": lambda r: percent(r["hidden"]),
        "step": lambda r: seconds(r["step"]),
        "faster": lambda r: f"{r['speedup']:.2f}x",
    }
    block = (
        "PREDICTED with method_options.gather_bits and reduce_bits (the same schedule, "
        "its collectives\nscaled; packing not counted)\n"
        + table(columns, plan.few_bits, "lllrrrrrrr")
    )
    topology, flat = plan.topology, len(plan.outcomes[0].program.tx.axis) == 1
    hosts = topology.devices // topology.fast_domain
    if topology.platform == "gpu" and flat and 1 < hosts < topology.devices:
        block += (
            f"\n  note: with config.domains={hosts} gradients are summed within a host "
            "first, and reduce_bits\n  is only for the network between hosts"
        )
    return block


def _growth(plan: Plan) -> str:
    columns: Columns = {
        "devices": lambda r: f"{r['devices']:,}",
        "method": lambda r: r["method"],
        **_speed(1e6),
        **_gain(plan.growth[0]),
        "GiB": lambda r: f"{r['memory'] / GIB:,.2f}",
    }
    return (
        f"PREDICTED as devices grow (compiled for {plan.topology.devices}; for others "
        "the collectives by formula, the same work per device)\n"
        + table(columns, plan.growth, "rlrrrrrr")
    )
