"""What a finished run leaves for people: a picture and a short summary."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is there whole or not at all, however the process ends."""
    partial = path.with_suffix(".partial")
    partial.write_text(text + "\n")
    os.replace(partial, path)


def draw(rows: list[dict[str, Any]], bigram: float, path: Path, title: str) -> None:
    """Draws the loss against tokens and against time.

    Args:
      rows: of metrics.jsonl, in order.
      bigram: bits per byte of the smoothed bigram, for a line to beat.
      path: of the PNG to write.
      title: of the picture.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2, sharey=True)
    per_nat = next(r["bits_per_byte"] / r["loss"] for r in rows if "bits_per_byte" in r)
    for ax, x, label, unit in (
        (axes[0], "tokens", "tokens (millions)", 1e6),
        (axes[1], "seconds", "time (seconds)", 1),
    ):
        train = [r for r in rows if r["kind"] == "train"]
        held_out = [r for r in rows if r["kind"] == "validation"]
        ax.plot(
            [r[x] / unit for r in train],
            [r["loss"] * per_nat for r in train],
            color="0.75", lw=0.8, label="training",
        )  # fmt: skip
        ax.plot(
            [r[x] / unit for r in held_out],
            [r["bits_per_byte"] for r in held_out],
            color="C0", lw=2, marker="o", ms=3, label="held out",
        )  # fmt: skip
        ax.plot(
            [r[x] / unit for r in rows if r["kind"] == "final"],
            [r["bits_per_byte"] for r in rows if r["kind"] == "final"],
            color="C0", ls="", marker="D", ms=5, mfc="none",
            label="held out, all documents",
        )  # fmt: skip
        ax.axhline(bigram, color="C3", ls="--", lw=1, label="smoothed bigram")
        ax.set_xlabel(label)
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    # The training loss starts far above what is of interest: cut it, nothing else.
    shown = [bigram, *(r["bits_per_byte"] for r in rows if r["kind"] != "train")]
    axes[0].set_ylim(0.95 * min(shown), max(1.5 * bigram, 1.05 * max(shown)))
    axes[0].set_ylabel("loss (bits per byte)")
    axes[0].legend(frameon=False)
    figure.suptitle(title)
    figure.savefig(path)


def summarize(summary: dict[str, Any], workdir: Path) -> str:
    """Writes summary.json and returns the lines to show."""
    write_whole(workdir / "summary.json", json.dumps(summary, indent=2))
    sent = summary["bytes_sent_per_worker"]
    sent = "an unknown number of" if sent is None else f"{sent:,}"
    ratio = summary["bits_per_byte"] / summary["bigram_bits_per_byte"]
    return "\n".join(
        (
            f"{summary['method']} on {summary['devices']} devices: "
            f"{summary['parameters']:,} parameters, {summary['steps']:,} steps, "
            f"{summary['tokens']:,} tokens in {summary['seconds']:.0f} s "
            f"({summary['tokens'] / max(summary['seconds'], 1e-9):,.0f} tokens/s)",
            f"held-out loss  {summary['loss']:.4f} nats per token, "
            f"{summary['bits_per_byte']:.4f} bits per byte",
            f"smoothed bigram {summary['bigram_bits_per_byte']:.4f} bits per byte "
            f"(this run: {ratio:.2f} of it)",
            f"each worker sent {sent} bytes; a device "
            f"holds {summary['state_bytes_per_device']:,} of parameters and state",
            f"picture        {workdir / 'loss.png'}",
        )
    )
