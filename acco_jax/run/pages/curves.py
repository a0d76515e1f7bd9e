"""Pictures of the page: Bokeh figures of runs, whose data are in the page."""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bokeh.models import (
    BoxZoomTool,
    ColumnDataSource,
    DataRange1d,
    HoverTool,
    PanTool,
    Range1d,
    ResetTool,
    SaveTool,
    WheelZoomTool,
    ZoomOutTool,
)
from bokeh.plotting import figure

from acco_jax.command import palette
from acco_jax.run.pages.run_records import Row, RunRecords

POINTS = 400  # most points of a line: more rows are averaged
ROWS = 8  # least rows of metrics.jsonl for a figure of throughput
Figures = dict[str, Any]
Scale = tuple[str, float]  # a unit's name and size


def colors(runs: Sequence[RunRecords]) -> dict[str, str]:
    """Map each group of runs to its colour."""
    return palette.of_methods(run.group for run in runs)


def thinned(rows: Sequence[Row], names: Iterable[str]) -> list[Row]:
    """Average neighbours, so that at most `POINTS` rows remain."""
    size = math.ceil(len(rows) / POINTS) or 1
    parts = [rows[i : i + size] for i in range(0, len(rows), size)]
    return [
        {name: statistics.fmean(row[name] for row in part) for name in names}
        for part in parts
    ]


def rates(run: RunRecords) -> list[Row]:
    """Return tokens per second over parts of a run, without rows that compiled.

    Parts lie between two evaluations, and are at least `ROWS` rows long if there are
    so many.
    """
    rows = [row for row in run.train if row["tokens_per_second"]]  # or unknown
    ends = {row["half_round"] for row in run.evaluations}
    pairs = itertools.pairwise([{"tokens": 0}, *run.train])
    own = {row["half_round"]: row["tokens"] - last["tokens"] for last, row in pairs}
    size = max(ROWS, math.ceil(len(rows) / POINTS))
    segments: list[list[Row]] = [[]]
    for row in rows:
        segments[-1].append(row)
        if row["half_round"] in ends:
            segments.append([])
    found = []
    for segment in segments:
        cuts = [*range(0, len(segment) - size + 1, size)] or [0]
        for begin, end in itertools.pairwise([*cuts, len(segment)]):
            tokens, seconds = 0, 0.0
            for row in segment[begin:end]:
                tokens += own[row["half_round"]]
                seconds += own[row["half_round"]] / row["tokens_per_second"]
            if seconds:
                found.append(row | {"tokens_per_second": tokens / seconds})
    return found


def scale(largest: float, units: Sequence[Scale]) -> Scale:
    """Return the largest unit that does not exceed the largest value."""
    return next(((u, n) for u, n in reversed(units) if largest >= n), units[0])


TOKENS = (("tokens", 1.0), ("thousand tokens", 1e3), ("million tokens", 1e6),
          ("billion tokens", 1e9))  # fmt: skip
SECONDS = (("s", 1.0), ("min", 120.0), ("h", 7200.0))  # from two of them on
BYTES = (("B", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12))


class Axes:
    """Horizontal axes, in units that fit all runs."""

    def __init__(self, runs: Sequence[RunRecords]) -> None:
        def largest(value: Callable[[RunRecords, Row], float | None]) -> float:
            last = [(run, row) for run in runs for row in run.rows[-1:]]
            return max((value(run, row) or 0.0 for run, row in last), default=0.0)

        self.tokens, per_token = scale(largest(lambda _, r: r["tokens"]), TOKENS)
        self.time, per_time = scale(largest(lambda _, r: r["seconds"]), SECONDS)
        per_time = {"s": 1.0, "min": 60.0, "h": 3600.0}[self.time]
        self.sent, per_byte = scale(
            largest(lambda run, r: run.bytes_at(r["half_round"])), BYTES
        )
        self._units = per_token, per_time, per_byte

    def source(
        self, run: RunRecords, rows: Sequence[Row], *names: str
    ) -> ColumnDataSource:
        """Return rows as columns: x axes, and these fields of them."""
        tokens, time, size = self._units
        sent = [run.bytes_at(row["half_round"]) for row in rows]
        columns: dict[str, list[Any]] = {
            "half_round": [round(row["half_round"]) for row in rows],
            "tokens": [row["tokens"] / tokens for row in rows],
            "time": [row["seconds"] / time for row in rows],
            "sent": [math.nan if s is None else s / size for s in sent],
            **{name: [row.get(name, math.nan) for row in rows] for name in names},
        }
        return ColumnDataSource(columns)

    def tooltips(self, *shown: tuple[str, str]) -> list[tuple[str, str]]:
        return [
            ("run", "$name"),
            *shown,
            ("half-round", "@half_round"),
            (self.tokens, "@tokens{0,0.00}"),
            (f"time ({self.time})", "@time{0,0.0}"),
        ]


def loss_figures(runs: Sequence[RunRecords], axes: Axes) -> Figures:
    """Return losses against tokens, time and bytes; zooming along y goes together."""
    colour, y_range = colors(runs), _loss_range(runs)
    names = ("half_round", "tokens", "seconds", "loss")
    sources = [
        (
            axes.source(run, thinned(run.train, names), "loss"),
            axes.source(run, run.evaluations, "loss"),
            axes.source(run, [run.final] if run.final else [], "loss"),
        )
        for run in runs
    ]
    labels = {"tokens": axes.tokens, "time": f"time ({axes.time})",
              "sent": f"sent by each worker ({axes.sent})"}  # fmt: skip
    figures = {}
    for x, label in labels.items():
        plot = _figure(label, "loss (nats per token)", y_range)
        for run, columns in zip(runs, sources, strict=True):
            if x != "sent" or run.bytes_at(1) is not None:
                _draw_losses(plot, run, x, columns, colour[run.group])
        if not plot.renderers:
            continue
        thin = [r for r in plot.renderers if (r.name or "").endswith(", training")]
        points = [r for r in plot.renderers if r.name and r not in thin]
        hover = axes.tooltips(("loss", "@loss{0.0000}"))
        plot.add_tools(
            HoverTool(renderers=points, tooltips=hover),
            HoverTool(renderers=thin, tooltips=hover, line_policy="nearest"),
        )
        figures[f"loss_{x}"] = plot
    return figures


def _draw_losses(
    plot: Any, run: RunRecords, x: str, columns: Sequence[ColumnDataSource], colour: str
) -> None:
    """Draw a run's training loss, its evaluations and the final one."""
    train, held_out, final = columns
    name = f"{run.name}, held out"
    plot.line(x, "loss", source=train, color=colour, alpha=0.45, line_width=1,
              name=f"{run.name}, training")  # fmt: skip
    plot.line(x, "loss", source=held_out, color=colour, line_width=2)
    plot.scatter(x, "loss", source=held_out, color=colour, size=6, name=name)
    plot.scatter(x, "loss", source=final, color=colour, size=11, marker="diamond",
                 fill_alpha=0, line_width=2, name=f"{name}, all documents")  # fmt: skip
    _tag(plot, run)


def _tag(plot: Any, run: RunRecords) -> None:
    """Tag what was drawn since the last call as a run's, for the page's boxes."""
    for renderer in plot.renderers:
        renderer.tags = renderer.tags or [run.group]


def throughput_figure(runs: Sequence[RunRecords], axes: Axes) -> Figures:
    """Return tokens per second of parts of the runs, from `rates`, against tokens."""
    colour, plot = colors(runs), _figure(axes.tokens, "tokens per second", None)
    plot.y_range.start = 0
    for run in runs:
        source = axes.source(run, rates(run), "tokens_per_second")
        plot.line("tokens", "tokens_per_second", source=source, line_width=1.5,
                  color=colour[run.group], name=run.name)  # fmt: skip
        plot.scatter("tokens", "tokens_per_second", source=source, size=4,
                     color=colour[run.group], name=run.name)  # fmt: skip
        _tag(plot, run)
    rate = ("tokens/s", "@tokens_per_second{0,0}")
    plot.add_tools(HoverTool(tooltips=axes.tooltips(rate), line_policy="nearest"))
    return {"throughput": plot}


def microbatch_figure(runs: Sequence[RunRecords]) -> Figures:
    """Return microbatches of workers, where they change: mean, fewest and most."""
    changing = [r for r in runs if len({tuple(m) for _, m in r.microbatches()}) > 1]
    if not changing:
        return {}
    colour = colors(runs)
    plot = _figure("half-round", "microbatches of a worker", None)
    plot.y_range.start = 0
    lines = []
    for run in changing:
        rows = [
            {"half_round": h, "mean": statistics.fmean(m), "least": min(m),
             "most": max(m)}
            for h, m in run.microbatches()
        ]  # fmt: skip
        names = ("half_round", "mean", "least", "most")
        thin = thinned(rows, names)
        source = ColumnDataSource({n: [row[n] for row in thin] for n in names})
        style = {"color": colour[run.group]}
        plot.varea("half_round", "least", "most", source=source, alpha=0.2, **style)
        lines.append(plot.line("half_round", "mean", source=source, line_width=1.5,
                               name=run.name, **style))  # fmt: skip
        _tag(plot, run)
    tooltips = [("run", "$name"), ("half-round", "@half_round{0}"),
                ("mean", "@mean{0.00}"), ("fewest", "@least{0.0}"),
                ("most", "@most{0.0}")]  # fmt: skip
    plot.add_tools(HoverTool(renderers=lines, tooltips=tooltips, line_policy="nearest"))
    return {"microbatches": plot}


def _figure(x: str, y: str, y_range: Range1d | None) -> Any:
    """Return an empty figure, as wide as its place; colours come with the theme."""
    zoom = BoxZoomTool()
    plot: Any = figure(
        height=330,
        sizing_mode="stretch_width",
        x_axis_label=x,
        y_axis_label=y,
        x_range=DataRange1d(),
        y_range=y_range or DataRange1d(),
        tools=[
            zoom,
            PanTool(),
            WheelZoomTool(),
            ZoomOutTool(),
            ResetTool(),
            SaveTool(),
        ],
        active_drag=zoom,
        toolbar_location="above",
        min_border_right=12,
    )
    plot.toolbar.logo = None
    plot.toolbar.autohide = False
    plot.xaxis.formatter.use_scientific = False
    plot.yaxis.formatter.use_scientific = False
    for axis in (plot.xaxis, plot.yaxis):
        axis.axis_label_text_font_style = "normal"
        axis.ticker.desired_num_ticks = 5
    return plot


def _loss_range(runs: Sequence[RunRecords]) -> Range1d:
    """Return a range without the descent of the first fifth of each run."""
    losses = []
    for run in runs:
        rows = [r for r in run.rows if r["kind"] != "train"] or run.rows
        last = max((r["tokens"] for r in run.rows), default=0)
        losses += [r["loss"] for r in rows if r["tokens"] >= 0.2 * last]
    if not losses:
        return Range1d(start=0, end=1)
    margin = 0.15 * (max(losses) - min(losses)) or 0.05 * max(losses) or 1
    return Range1d(start=min(losses) - margin, end=max(losses) + margin)
