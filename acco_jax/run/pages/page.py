"""Page of runs: one HTML file that loads nothing."""

import datetime
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from typing import Any, NamedTuple

import jinja2
from bokeh.embed import components
from bokeh.resources import Resources

from acco_jax.run.compare import results
from acco_jax.run.config.identity import HARMLESS
from acco_jax.run.config.schema import FIELDS
from acco_jax.run.observe import goodput, profiling
from acco_jax.run.pages import curves, run_records
from acco_jax.run.pages.run_records import RunRecords
from acco_jax.run.state.worlds import workers_of

UNKNOWN = "–"
CAUSES = {  # of goodput.CAUSES: their names on the page, and their colour
    "training": ("half-rounds that counted", "#2a9d7c"),
    "repeated": ("repeated after a loss", "#d1446c"),
    "start_up": ("start-up", "#8b68d4"),
    "compiling": ("compiling", "#e0792b"),
    "evaluation": ("evaluation", "#3f7fd9"),
    "checkpoints": ("checkpoints", "#a87b23"),
    "profiling": ("profiling", "#3d9bb5"),
    "waiting": ("waiting for data or processes", "#c05ab4"),
    "down": ("down, or lost with a killed process", "#808080"),
}


class Plot(NamedTuple):
    """A row of a table: its name, a remark, and each run's value."""

    name: str
    remark: str
    values: list[str]


class ProfileTable(NamedTuple):
    """A trace: its name, why it is unknown, and a row for each half-round."""

    name: str
    unknown: str
    rows: list[list[str]]


class Paired(NamedTuple):
    """Final losses of runs that differ only in their seed, against others' seeds."""

    name: str
    seeds: str
    loss: str  # the mean
    change: str  # mean and standard error; '' of the first, which others are against
    pairs: str


class Bar(NamedTuple):
    """A run's wall time by cause."""

    run: RunRecords
    wall: str
    parts: list[tuple[str, str, float]]  # its text, colour, percent


def written(runs: Sequence[RunRecords], now: datetime.datetime) -> str:
    """Return the page of runs, in the order given."""
    axes = curves.Axes(runs)
    figures = {
        **curves.loss_figures(runs, axes),
        **curves.throughput_figure(runs, axes),
        **curves.microbatch_figure(runs),
    }
    script, divs = components(figures, wrap_script=False)
    folder = resources.files("acco_jax.run.pages")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string((folder / "page.html").read_text("utf-8"))
    inline = Resources(mode="inline", components=["bokeh"])
    return template.render(
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        now=now.strftime("%Y-%m-%d %H:%M"),
        runs=runs,
        colours=curves.colors(runs),
        style=(folder / "page.css").read_text("utf-8"),
        theme=(folder / "page.js").read_text("utf-8"),
        bokeh="\n".join(inline.js_raw),
        script=script,
        divs=divs,
        overview=list(_overview(runs)),
        paired=_paired(runs),
        fields=[(n, list(map(_value, v))) for n, v in run_records.differences(runs)],
        microbatches=[(run, _microbatches(run)) for run in runs],
        communication=list(_communication(runs)),
        profiles=[profile for run in runs for profile in _profiles(run)],
        memory=list(_memory(runs)),
        bars=[bar for run in runs if (bar := _bar(run))],
        spent=list(_spent(runs)),
        faults=[(run, list(_faults(run))) for run in runs],
    )


def _figures(
    runs: Sequence[RunRecords],
    rows: Sequence[tuple[str, str, Callable[[RunRecords], Any], Callable[[Any], str]]],
) -> Iterator[Plot]:
    """Yield the rows in which at least one run has a value."""
    for name, remark, value, show in rows:
        values = [value(run) for run in runs]
        if any(v is not None for v in values):
            shown = [UNKNOWN if v is None else show(v) for v in values]
            yield Plot(name, remark, shown)


def _overview(runs: Sequence[RunRecords]) -> Iterator[Plot]:
    def of(field: str) -> Callable[[RunRecords], Any]:
        return lambda run: run.summary.get(field)

    whole, loss = "{:,.0f}".format, "{:.4f}".format
    yield from _figures(
        runs,
        [
            ("method", "", lambda run: run.config["method"], str),
            ("state", "", lambda run: run.status, str),
            ("workers", "", _workers, str),
            ("parameters", "", lambda run: run.parameters, whole),
            ("tokens", "targets of training", _last("tokens"), whole),
            ("final loss", "nats per token, all held-out documents", of("loss"), loss),
            ("bits per byte", "the same", of("bits_per_byte"), loss),
            ("smoothed bigram", "bits per byte", of("bigram_bits_per_byte"), loss),
            (
                "lowest loss at an evaluation",
                "of the documents that evaluations take: eval_batches of them, so it "
                "can lie above or below the final loss",
                lambda run: min((r["loss"] for r in run.evaluations), default=None),
                loss,
            ),
            ("tokens per second", "median of the logging intervals that did not "
             "compile, without evaluations", lambda run: run.rate, whole),
            ("model FLOPs utilization", "median; only on accelerators whose peak is "
             "known", _utilization, "{:.1%}".format),
            ("time", "of the run, compilations and evaluations included; not that "
             "between restarts", _last("seconds"), duration),
            ("compiling", "of the wall time, start-up included", _compiling,
             duration),
            ("goodput", "share of the wall time in half-rounds that counted",
             lambda run: run.goodput, "{:.1%}".format),
        ],
    )  # fmt: skip


def _paired(runs: Sequence[RunRecords]) -> list[Paired]:
    """Return finished runs by method, against the seeds that the first one shares.

    Runs of a method with other fields, such as another learning rate, are apart. So
    are runs that began with other workers, whose batches are of another size. A second
    run of a row and seed has a row of its own.
    """
    harmless = {name for name, field in FIELDS.items() if not field.identity}
    same = {"method", "seed", *HARMLESS, *harmless} - {"workers"}
    fields = [n for n, _ in run_records.differences(runs) if n not in same]
    losses: dict[str, dict[int, float]] = {}
    for run in runs:
        if run.state == "finished":
            others = (f", {name}={_value(run.config.get(name))}" for name in fields)
            name = "".join([run.config["method"], *others])
            seed = run.config.get("seed", 0)
            if seed in losses.get(name, {}):
                name += f", {run.name}"
            losses.setdefault(name, {})[seed] = run.summary["loss"]
    rows, first = [], next(iter(losses.values()), {})
    for name, group in losses.items():
        if changes := results.changes(first, group):
            text = "" if group is first else results.change_text(changes)
            loss = f"{statistics.fmean(group.values()):.4f}"
            rows.append(Paired(name, str(len(group)), loss, text, str(len(changes))))
    return rows if len(rows) > 1 else []


def _workers(run: RunRecords) -> str | None:
    """Return the workers of the newest world; if they changed, of all."""
    numbers = [workers_of(world.axes) for _, world in run.worlds]
    if not numbers:
        return None
    return " → ".join(str(n) for n, _ in itertools.groupby(numbers))


def _last(field: str) -> Callable[[RunRecords], Any]:
    return lambda run: max((row[field] for row in run.rows), default=None)


def _utilization(run: RunRecords) -> float | None:
    name = "model_flops_utilization"
    found = [r[name] for r in run.train if r.get(name) is not None]
    return statistics.median(found) if found else None


def _compiling(run: RunRecords) -> float | None:
    return goodput.spent(run.record)["compiling"] if run.record else None


def _communication(runs: Sequence[RunRecords]) -> Iterator[Plot]:
    def exposed(run: RunRecords) -> float | None:
        return results.exposed_ms(run.rate, run.summary)

    def per_half_round(run: RunRecords) -> float | None:
        return run.bytes_at(1)

    yield from _figures(
        runs,
        [
            ("sent by each worker", "read off the program's collectives, with a "
             "ring's costs", lambda r: r.summary.get("bytes_sent_per_worker"),
             results.bytes_text),
            ("in each half-round", "on average", per_half_round, results.bytes_text),
            ("exposed per optimizer step", "time of a step minus time of only its "
             "gradients: exposed communication and the optimizer's own "
             "arithmetic; needs --time_gradients, which compare gives", exposed,
             "{:,.1f} ms".format),
        ],
    )  # fmt: skip


def _profiles(run: RunRecords) -> Iterator[ProfileTable]:
    """Yield a table of each trace of a run, in milliseconds."""
    for process, summary in run.profiles:
        name = f"{run.name}, {process}: means over {len(summary['devices'])} devices"
        rows = []
        for row in [] if summary["unknown"] else summary["calls"]:
            share = profiling.hidden_share(row)
            times = (row["seconds"], row["computation"], row["communication"])
            waited = profiling.waited(row, " ms")
            rows.append(
                [str(row["half_round"]), *(f"{1000 * x:,.1f} ms" for x in times),
                 UNKNOWN if share is None else f"{share:.0%}", waited]
            )  # fmt: skip
        yield ProfileTable(name, summary["unknown"], rows)


def _memory(runs: Sequence[RunRecords]) -> Iterator[Plot]:
    yield from _figures(
        runs,
        [("parameters and state on a device", "without activations and buffers",
          lambda r: r.summary.get("state_bytes_per_device"), results.bytes_text)],
    )  # fmt: skip


def _microbatches(run: RunRecords) -> str:
    """Return a line on how many microbatches workers computed."""
    rows = run.microbatches()
    if not rows:
        return "not recorded yet"
    distinct = list(dict.fromkeys(tuple(counts) for _, counts in rows))
    if len(distinct) == 1:
        (counts,) = distinct
        if len(set(counts)) == 1:
            return f"{counts[0]} in each half-round, on each of {len(counts)} workers"
        return f"in each half-round, worker by worker: {', '.join(map(str, counts))}"
    workers = {len(counts) for counts in distinct}
    if len(workers) > 1:
        return "the number of workers changed; the picture has the mean of those there"
    means = [statistics.fmean(c) for c in zip(*(m for _, m in rows), strict=True)]
    shown = ", ".join(f"{mean:.2f}" for mean in means)
    which = "half-rounds" if run.counts else "logged half-rounds"
    return f"mean of {len(rows):,} {which}, worker by worker: {shown}"


def _bar(run: RunRecords) -> Bar | None:
    """Return a run's wall time; None if nothing is recorded."""
    seconds = goodput.spent(run.record)
    wall = sum(seconds.values())
    if not wall:
        return None
    parts = [
        (f"{CAUSES[c][0]}: {duration(s)}", CAUSES[c][1], 100 * s / wall)
        for c, s in seconds.items()
        if s
    ]
    return Bar(run, duration(wall), parts)


def _spent(runs: Sequence[RunRecords]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield causes, their colours, and how long each run spent on them."""
    seconds = [goodput.spent(run.record) for run in runs]
    walls = [sum(s.values()) for s in seconds]
    for cause, (name, colour) in CAUSES.items():
        if any(s[cause] for s in seconds):
            yield name, colour, [
                f"{duration(s[cause])} ({s[cause] / wall:.1%})" if wall else UNKNOWN
                for s, wall in zip(seconds, walls, strict=True)
            ]  # fmt: skip


def _faults(run: RunRecords) -> Iterator[str]:
    """Yield lines on what went wrong, and how the run went on."""
    if run.starts > 1:
        yield f"started {run.starts} times; down in between for " + duration(
            goodput.spent(run.record)["down"]
        )
    for reached, again in run.rollbacks:
        yield f"half-rounds {again + 1} to {reached} were lost and done again"
    for folder in run.failures:
        yield f"messages and stacks of a failure: failures/{folder}"
    for half_round, world in run.worlds[1:]:
        yield f"after half-round {half_round} on other devices: {world.text}"
    dropped = sum(row.get("dropped", 0) for row in run.train)
    if dropped:
        yield f"{dropped:,} times a worker's numbers were not finite, and did not count"


def duration(seconds: float) -> str:
    """Format seconds as a person would say them: 0.4 s, 75 s, 12 min, 3.5 h."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 180:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _value(value: object) -> str:
    """Format a config's value: text unchanged, else JSON, at most 200 letters."""
    if value is None:
        return UNKNOWN
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    text = value if isinstance(value, str) else json.dumps(value)
    text = text or "''"
    return text if len(text) <= 200 else f"{text[:199]}…"
