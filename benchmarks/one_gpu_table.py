"""The table and the goals of one_gpu.py's report."""

import statistics
from typing import Any

MICROBATCHES = 2  # of a half-round
UTILIZATION = 0.55  # wanted at 124M
Report = dict[str, Any]


def share(x: float | None) -> str:
    return "n/a" if x is None else f"{x:.1%}"


def gib(loop: Report) -> str:
    if loop.get("peak_bytes") is None:
        return "n/a"
    return f"{'<=' if loop['peak_is_bound'] else ''}{loop['peak_bytes'] / 2**30:.1f}"


def interval_text(found: Report | None) -> str:
    if found is None:
        return "n/a"
    if "error" in found:
        return found["error"]
    low, high = (1e3 * x for x in found["interval"])
    return f"{low:.1f} - {high:.1f}, {'inside' if found['inside'] else 'OUTSIDE'}"


def step_text(row: Report) -> str:
    acco, text = row["loops"]["acco"], []
    if "seconds" in acco:
        text.append(f"{1e3 * statistics.median(acco['seconds']):.1f} ms")
        text.append(f"{acco['tokens_per_second']:,.0f} tokens/s")
        text.append(f"{share(acco.get('utilization'))} of the peak")
        text.append(f"{gib(acco)} GiB, compiled in {acco['compile_seconds']:.1f} s")
    if "ratio" in row:
        text.append(f"{row['ratio']['median']:.3f} of the time by hand")
    text += [interval_text(row["predicted"])] if "predicted" in row else []
    return "; ".join([*text, *([row["error"]] if "error" in row else [])])


def error_text(row: Report) -> str:
    if "error" in row:
        return row["error"]
    verdict = "within" if row["within"] else "BEYOND"
    errors = f"value {row['value']:.1e}, gradients {row['gradients']:.1e}"
    return f"{errors}, {verdict} {row['tolerance']:.0e}"


def schedule_text(found: Report) -> str:
    if "error" in found:
        return found["error"]
    text = f"{found['operations']} operations, {len(found['loops'])} loops, "
    text += f"{found['collectives']} collectives"
    if found["overlapped"] is not None:
        text += f", {found['overlapped']:.1%} of their bytes overlapped"
    return f"{text}; compiled in {found['compile_seconds']:.1f} s"


def end_text(found: Report) -> str:
    if "error" in found:
        return found["error"]
    text = f"{found['how']}: loss {found['first']:.3f} to {found['last']:.3f}, resumed "
    text += f"{'bitwise identical' if found['bitwise'] else 'with OTHER BITS'}"
    why = found.get("error_of_the_command")
    if found["missing"] or why:
        text += f" (acco_jax.train: {why or 'missing ' + ', '.join(found['missing'])})"
    return text


def table(report: Report) -> str:
    """Return the report as markdown."""
    device, parts = report["device"], report["parts"]
    out = ["# One GPU", "", f"    {report['command']}", ""]
    what = f"{device.get('kind', 'unknown')}, jax {device.get('jax', '?')}"
    out += [f"{what}, Python {report['python']}, {report['seconds']:.0f} s.", ""]
    out += ["| goal | |", "|---|---|"]
    out += [f"| {goal} | {reached} |" for goal, reached in report["goals"].items()]
    out += ["", "## Steps", ""]
    out += [
        f"A half-round of {MICROBATCHES} microbatches. Ratios are acco's time to that "
        "of the loop written by hand; intervals are plan's, in ms.",
        "",
        "| model | attention | remat | rows | layers | ms | tokens/s | MFU | GiB | "
        "compile, s | ratio | by hand: MFU | GiB | compile, s | predicted | "
        "calibrated |",
        "|" + "---|" * 16,
    ]
    for row in parts.get("steps", []):
        out.append(f"| {' | '.join(cells(row))} |")
    found = parts.get("calibration", {"error": "not run"})
    out += ["", "## Calibration", ""]
    if "error" in found:
        out += [found["error"]]
    else:
        out += ["| kernel | size | rate |", "|---|---|---|"]
        for k in found["kernels"]:
            out.append(f"| {k['name']} | {k['size']:,} | {k['rate']:.4g} {k['unit']} |")
        out += ["", "| figure | value |", "|---|---|"]
        for name, x in found["figures"].items():
            ends = x if isinstance(x, (list, tuple)) else [x]
            out.append(f"| {name} | {' - '.join(f'{e:.4g}' for e in ends)} |")
    out += [
        "",
        "## Correctness",
        "",
        "| what | dtype | largest error |",
        "|---|---|---|",
    ]
    found = parts.get("correctness", {"error": "not run"})
    if "error" in found:
        out.append(f"| all | | {found['error']} |")
    for row in found.get("rows", []):
        out.append(f"| {row['what']} | {row['dtype']} | {error_text(row)} |")
    out += ["", "## Schedule", ""]
    found = parts.get("schedule", {"error": "not run"})
    if "error" in found:
        out.append(f"- {found['error']}")
    for name in ("one", "several"):
        if name in found:
            of = found[name]
            out.append(f"- {of['topology']}: {schedule_text(of)}")
    found = parts.get("end_to_end", {"error": "not run"})
    out += ["", "## End to end", "", end_text(found), ""]
    return "\n".join(out)


def cells(row: Report) -> list[str]:
    loops = row.get("loops", {})
    acco, hand = loops.get("acco", {}), loops.get("hand", {})
    taken = acco.get("seconds")
    ratio = row.get("ratio")
    why = row.get("error") or acco.get("error") or ""
    seconds = lambda x: f"{x['compile_seconds']:.1f}" if "compile_seconds" in x else "-"  # noqa: E731
    return [
        *(str(row[k]) for k in ("model", "attention", "remat", "rows", "layers")),
        f"{1e3 * statistics.median(taken):.1f}" if taken else why or "-",
        f"{acco['tokens_per_second']:,.0f}" if taken else "-",
        share(acco.get("utilization")),
        gib(acco),
        seconds(acco),
        f"{ratio['median']:.3f} ({ratio['low']:.3f}-{ratio['high']:.3f})" if ratio
        else hand.get("error", "-"),
        share(hand.get("utilization")),
        gib(hand),
        seconds(hand),
        interval_text(row.get("predicted")),
        interval_text(row.get("calibrated")),
    ]  # fmt: skip


def goals(parts: Report) -> dict[str, str]:
    """Return each goal and what was reached."""
    rows = parts.get("steps", [])
    used = [
        loop["utilization"]
        for row in rows
        if row["model"] == "gpt2-124m"
        for loop in [row.get("loops", {}).get("acco", {})]
        if "utilization" in loop
    ]
    kinds = ("predicted", "calibrated")
    inside = [
        row[kind]["inside"]
        for row in rows
        for kind in kinds
        if "inside" in row.get(kind, {})
    ]
    errors = [
        row["within"]
        for row in parts.get("correctness", {}).get("rows", [])
        if "within" in row
    ]
    most = (
        f"{max(used):.1%}: {'yes' if max(used) >= UTILIZATION else 'NO'}"
        if used
        else "n/a"
    )
    count = lambda found: f"{sum(found)} of {len(found)}" if found else "n/a"  # noqa: E731
    return {
        f"at least {UTILIZATION:.0%} model FLOPs utilization with 124M": most,
        "half-rounds inside their intervals": count(inside),
        "errors within their tolerances": count(errors),
    }
