"""Pictures of a plan: timelines at equal tokens, and how a run grows with devices."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from acco_jax.command import palette
from acco_jax.command.charts import save, subplots
from acco_jax.schedule.costs import OTHER, PRODUCTS, Prediction

_COLORS = {
    PRODUCTS: palette.COMPUTATION,
    OTHER: palette.OTHER_COMPUTATION,
    **palette.COLLECTIVES,
}
_ROWS = {"communication": 0, "computation": 1}


class TimelineRow(NamedTuple):
    """A timeline: one execution of a program, repeated."""

    name: str
    prediction: Prediction
    times: float = 1.0  # executions, the last of them a part
    hidden: str = ""  # shares of bytes and of seconds


def timeline(
    rows: Sequence[TimelineRow],
    path: Path,
    title: str,
    what: str = "the same number of tokens",
) -> None:
    """Draw programs as a PNG: computation above communication.

    Args:
      rows: a timeline each, above one another.
      path: where the picture is written.
      title: above it.
      what: the work of each row, for the axis's label.
    """
    figure, all_axes = subplots(10, 1.3 + 1.4 * len(rows), len(rows), sharex=True)
    longest = max(row.times * row.prediction.total for row in rows)
    unit, scale = ("ms", 1e3) if longest > 2e-3 else ("µs", 1e6)
    seen: dict[str, Any] = {}
    for ax, row in zip(all_axes, rows, strict=True):
        end, p = row.times * row.prediction.total, row.prediction
        for k in range(math.ceil(row.times - 1e-9)):
            _execution(ax, p, k * p.total, end, longest, scale, seen)
            ax.axvline(k * p.total * scale, color="0.3", lw=0.8, ls=":")
        ax.set_yticks(list(_ROWS.values()), list(_ROWS))
        ax.set_ylim(-0.55, 1.55)
        ax.tick_params(axis="y", length=0)
        ax.grid(visible=False)
        ax.spines["left"].set_visible(False)
        runs = f" ({row.times:.3g} x {p.total * scale:.3g})" if row.times != 1 else ""
        ax.set_title(
            f"{row.name}: {p.exposed * row.times * 1e3:.3g} ms exposed of "
            f"{end * scale:.3g} {unit}{runs}\noverlapped: {row.hidden}",
            loc="left", fontsize=10,
        )  # fmt: skip
        ax.axvline(end * scale, color="0.3", lw=0.8, ls=":")
    all_axes[-1].set_xlim(0, longest * scale * 1.01)
    all_axes[-1].set_xlabel(f"predicted time of {what} ({unit})")
    order = [name for name in (*_COLORS, "waiting") if name in seen]
    figure.legend(
        [seen[name] for name in order], order,
        loc="outside lower center", ncols=len(order), frameon=False,
    )  # fmt: skip
    figure.suptitle(title)
    save(figure, path)


def _execution(
    ax: Axes,
    prediction: Prediction,
    begin: float,
    end: float,
    longest: float,
    scale: float,
    seen: dict[str, Any],
) -> None:
    """Draw one execution from `begin` on, as far as `end`, in seconds.

    Collectives too thin to be seen are drawn as wide as a line. Far thinner ones are
    left out.
    """
    thin = 0.003 * longest
    for span in prediction.spans:
        left, right = begin + span.start, min(begin + span.end, end)
        collective = span.track == "communication"
        if right <= left or (collective and right - left < 0.02 * thin):
            continue
        width = max(right - left, thin if collective else 0.0)
        box: dict[str, Any] = {"left": left * scale, "width": width * scale}
        if span.track == "waiting":
            ax.barh(1, **box, height=0.7, fc="white", ec="0.6", hatch="////", lw=0)
            seen["waiting"] = Patch(fc="white", ec="0.6", hatch="////")
            continue
        color = _COLORS.get(span.name, "0.5")
        ax.barh(_ROWS[span.track], **box, height=0.7, color=color)
        if collective or width > thin:
            seen.setdefault(span.name, Patch(color=color))


def scaling(
    rows: Sequence[Mapping[str, Any]], path: Path, title: str, compiled: int
) -> None:
    """Draw throughput and communication against the number of devices, as a PNG.

    Args:
      rows: with "method", "devices", "tokens_per_second" and, in seconds of an
        optimizer step, "computation", "communication" and "exposed".
      path: where the picture is written.
      title: above it.
      compiled: number of devices that the programs were compiled for.
    """
    figure, (left, right) = subplots(10, 4, 1, 2)
    methods = list(dict.fromkeys(r["method"] for r in rows))
    longest = max(max(r["computation"], r["communication"]) for r in rows)
    unit, scale = ("s", 1) if longest > 2 else ("ms", 1e3)
    for method, color in palette.of_methods(methods).items():
        points = sorted(
            (r for r in rows if r["method"] == method), key=lambda r: r["devices"]
        )
        n = [r["devices"] for r in points]
        style = {"color": color, "marker": "o", "ms": 4}
        each = [r["tokens_per_second"] / r["devices"] for r in points]
        left.plot(n, each, label=method, **style)
        right.plot(
            n, [r["exposed"] * scale for r in points],
            color=color, lw=5, alpha=0.35, label=f"{method}: exposed",
        )  # fmt: skip
        right.plot(
            n, [r["communication"] * scale for r in points],
            ls="--", label=f"{method}: communication", **style,
        )  # fmt: skip
    computation = next(r["computation"] for r in rows if r["method"] == methods[0])
    label = f"{methods[0]}: computation"
    right.axhline(computation * scale, color="0.4", ls=":", label=label)
    ticks = sorted({r["devices"] for r in rows})
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        ax.set_xticks(ticks, [f"{n:,}" for n in ticks])
        ax.minorticks_off()
        ax.set_xlabel("devices")
        ax.set_ylim(0, 1.08 * max(y for line in ax.lines for y in line.get_ydata()))
        ax.axvline(compiled, color="0.7", lw=0.8, zorder=0)
    left.yaxis.set_major_formatter(lambda y, _: f"{y:,.0f}")
    left.set_ylabel("predicted tokens/s per device")
    right.set_ylabel(f"predicted time of an optimizer step ({unit})")
    left.legend(frameon=False)
    right.legend(frameon=False, fontsize=8)
    figure.suptitle(f"{title} (compiled for {compiled} devices, others by formula)")
    save(figure, path)
