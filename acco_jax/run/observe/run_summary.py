"""Picture and short summary of a finished run."""

import json
from pathlib import Path
from typing import Any

from acco_jax.command.charts import save, subplots
from acco_jax.command.files import read_object, write_whole

FILE = "summary.json"
TRAINING = (  # of summary.json: what does not change where a finished run is repeated
    "devices", "workers", "bytes_sent_per_worker", "state_bytes_per_device",
    "gradient_seconds_per_token", "microbatches", "lost_tokens",
)  # fmt: skip


def trained(workdir: Path) -> dict[str, Any]:
    """Return what summary.json says of the training, {} where it cannot be read."""
    try:
        summary = read_object(workdir / FILE)
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in summary.items() if k in TRAINING}


def draw(rows: list[dict[str, Any]], bigram: float, path: Path, title: str) -> None:
    """Draw the rows of metrics.jsonl as a PNG: loss against tokens and against time.

    A line marks `bigram`, the bits per byte of the smoothed bigram.
    """
    figure, axes = subplots(10, 4, 1, 2, sharey=True)
    per_nat = next(r["bits_per_byte"] / r["loss"] for r in rows if "bits_per_byte" in r)
    kinds: dict[str, dict[str, Any]] = {
        "train": {"color": "0.75", "lw": 0.8, "label": "training"},
        "validation": {"lw": 2, "marker": "o", "ms": 3, "label": "held out"},
        "final": {"ls": "", "marker": "D", "ms": 5, "mfc": "none",
                  "label": "held out, all documents"},
    }  # fmt: skip
    scales = (("tokens", "tokens (millions)", 1e6), ("seconds", "time (seconds)", 1))
    for ax, (x, label, unit) in zip(axes, scales, strict=True):
        for kind, style in kinds.items():
            points = [r for r in rows if r["kind"] == kind]
            bits = [r.get("bits_per_byte", r["loss"] * per_nat) for r in points]
            ax.plot([r[x] / unit for r in points], bits, **{"color": "C0"} | style)
        ax.axhline(bigram, color="C3", ls="--", lw=1, label="smoothed bigram")
        ax.set_xlabel(label)
    # The training loss starts far above the range of interest: only it is cut.
    shown = [bigram, *(r["bits_per_byte"] for r in rows if r["kind"] != "train")]
    axes[0].set_ylim(0.95 * min(shown), max(1.5 * bigram, 1.05 * max(shown)))
    axes[0].set_ylabel("loss (bits per byte)")
    axes[0].legend(frameon=False)
    figure.suptitle(title)
    save(figure, path)


def summarize(summary: dict[str, Any], workdir: Path) -> str:
    """Write summary.json and return the lines to show."""
    write_whole(workdir / FILE, json.dumps(summary, indent=2) + "\n")
    sent = summary["bytes_sent_per_worker"]
    sent = "an unknown number of" if sent is None else f"{sent:,}"
    ratio = summary["bits_per_byte"] / summary["bigram_bits_per_byte"]
    causes = ", ".join(
        f"{cause.replace('_', '-')} {seconds:.0f} s"
        for cause, seconds in summary["seconds_by_cause"].items()
        if cause != "training" and round(seconds)
    )
    rate = summary["tokens"] / max(summary["seconds"], 1e-9)
    return (
        "{method} on {devices} devices: {parameters:,} parameters, {steps:,} steps, "
        f"{{tokens:,}} tokens in {{seconds:.0f}} s ({rate:,.0f} tokens/s)\n"
        "held-out loss  {loss:.4f} nats per token, {bits_per_byte:.4f} bits per byte\n"
        "smoothed bigram {bigram_bits_per_byte:.4f} bits per byte "
        f"(this run: {ratio:.2f} of it)\n"
        f"each worker sent {sent} bytes; a device holds "
        "{state_bytes_per_device:,} of parameters and state\n"
        "goodput        {goodput:.1%} of {wall_seconds:.0f} s on half-rounds"
        f"{causes and '; ' + causes}\n"
        "picture        {picture}"
    ).format(**summary, picture=workdir / "loss.png")
