"""Results of a comparison: a table, results.csv and pictures of the losses."""

import csv
import dataclasses
import io
import math
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import EngFormatter, MaxNLocator

from acco_jax.command import palette
from acco_jax.command.charts import legend_below, save, subplots
from acco_jax.command.files import is_number, read_object, write_whole
from acco_jax.run.observe import metrics, run_summary

SUMMARY = run_summary.FILE
DECIDED = 0.1  # percent of the loss: the difference that a comparison should resolve


@dataclasses.dataclass(frozen=True)
class Result:
    """One finished run; None marks what was not measured."""

    method: str
    seed: int
    final_loss: float  # nats per token, of all held-out documents
    best_loss: float  # the lowest at an evaluation, which takes eval_batches of them
    tokens: int
    steps: int
    microbatches: int | None  # of all workers in the whole run
    tokens_per_second: float | None  # median over the logging intervals
    seconds: float | None  # all of the run's, except those between its restarts
    training_seconds: float | None  # of the half-rounds that counted
    compiling_seconds: float | None
    bytes_sent_per_worker: int | None
    state_bytes_per_device: int
    exposed_ms_per_step: float | None
    evaluations: tuple[dict[str, Any], ...] = dataclasses.field(repr=False)


def finished(folder: Path) -> bool:
    """Return whether a run has ended with all results that a comparison needs.

    Raises:
      ValueError: if its summary is damaged.
    """
    path = folder / SUMMARY
    return path.exists() and "bytes_sent_per_worker" in read_object(path)


def read(folder: Path, method: str, seed: int) -> Result:
    """Read the result of a finished run from its workdir.

    Raises:
      ValueError: with the damaged file.
    """
    summary = numbers(
        folder / SUMMARY,
        ("loss", "tokens", "steps", "state_bytes_per_device"),
        ("bytes_sent_per_worker", "gradient_seconds_per_token", "lost_tokens",
         "microbatches", "wall_seconds"),
    )  # fmt: skip
    rows = metrics.read(folder)
    evaluations = tuple(
        r for r in rows if r["kind"] == "validation" and is_number(r.get("step"))
    )
    rate = typical_rate(rows)
    if not evaluations or rate == 0:
        raise ValueError(f"{folder / metrics.FILE} lacks rows of the run: restore it.")
    tokens, steps = summary["tokens"], summary["steps"]
    return Result(
        method,
        seed,
        final_loss=summary["loss"],
        best_loss=min(r["loss"] for r in evaluations),
        tokens=tokens,
        steps=steps,
        microbatches=summary.get("microbatches"),
        tokens_per_second=rate,
        seconds=_seconds(summary),
        training_seconds=_cause(summary, "training"),
        compiling_seconds=_cause(summary, "compiling"),
        bytes_sent_per_worker=summary["bytes_sent_per_worker"],
        state_bytes_per_device=summary["state_bytes_per_device"],
        exposed_ms_per_step=exposed_ms(rate, summary),
        evaluations=evaluations,
    )


def _seconds(summary: dict[str, Any]) -> float | None:
    """Return the wall time in which a process ran, None if it is not known."""
    wall, down = summary.get("wall_seconds"), _cause(summary, "down")
    return None if wall is None or down is None else wall - down


def _cause(summary: dict[str, Any], cause: str) -> float | None:
    """Return the seconds of a cause of goodput.py, None if they are not known."""
    causes = summary.get("seconds_by_cause")
    value = causes.get(cause) if isinstance(causes, dict) else None
    return value if is_number(value) else None


def typical_rate(rows: Sequence[dict[str, Any]]) -> float | None:
    """Return the median tokens per second of a run's rows; None if it is not known.

    Intervals that compiled have none.
    """
    rates = [r["tokens_per_second"] for r in rows if r["kind"] == "train"]
    known = [rate for rate in rates if rate is not None]
    return statistics.median(known) if known else None


def exposed_ms(rate: float | None, summary: dict[str, Any]) -> float | None:
    """Return an optimizer step's time beyond its gradients, in milliseconds.

    It is None if the gradients were not timed, or took longer than the whole: then
    one of the two was timed on a machine with other work.

    Args:
      rate: tokens per second of training.
      summary: of the run.
    """
    alone = summary.get("gradient_seconds_per_token")
    if not rate or alone is None:
        return None
    tokens = summary["tokens"] - (summary.get("lost_tokens") or 0)
    exposed: float = 1000 * (1 / rate - alone) * tokens / summary["steps"]
    return exposed if exposed >= 0 else None


def numbers(
    path: Path, needed: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the object in a file, if these of its values are positive numbers.

    Optional values may be missing, null or 0.

    Raises:
      ValueError: with the value that is not.
    """
    values = read_object(path)
    named = {name: values.get(name) for name in needed}
    named |= {k: values[k] for k in optional if values.get(k) is not None}
    for name, value in named.items():
        if not is_number(value) or value < 0 or (name in needed and not value):
            raise ValueError(
                f"{path} is damaged, {name} is {value!r:.60}: restore it, or remove "
                "the run's folder and repeat the command."
            )
    return values


def write(runs: list[Result], folder: Path, diverged: Sequence[str] = ()) -> str:
    """Write table.md, results.csv and loss.png into a folder; return the table."""
    text = table(runs, diverged)
    write_whole(folder / "table.md", text + "\n")
    names = [f.name for f in dataclasses.fields(Result) if f.name != "evaluations"]
    lines = io.StringIO(newline="")
    writer = csv.writer(lines)
    writer.writerow(names)
    writer.writerows([getattr(r, name) for name in names] for r in runs)
    write_whole(folder / "results.csv", lines.getvalue())
    draw(runs, folder / "loss.png")
    return text


def by_method(runs: list[Result]) -> dict[str, list[Result]]:
    names = dict.fromkeys(r.method for r in runs)
    return {name: [r for r in runs if r.method == name] for name in names}


Cell = Callable[[list[Result]], str]

LOSSES = """\
Held-out loss in nats per token: the seeds' mean, and in parentheses their
largest minus smallest. "final" is of all held-out documents. "lowest" is the
best of the evaluations on the way, which take a part of them (eval_batches):
it can lie below or above "final", and does not compare methods.
"against" says how far "final" lies above the first method's, seed by seed,
with its standard error."""
TIMES = """\
Time of a run, the seeds' mean: "training" in half-rounds that counted,
"compiling" apart from it, "in all" with start-up, evaluations and checkpoints.
"tokens/s" is the median of logging intervals, without compiling and
evaluating. "exposed" is what a step takes beyond only its gradients:
exposed communication and the optimizer; n/a if that is negative,
and for instructions and conversations."""
SIZES = """\
"microbatches" are those of all workers in the whole run. "sent" is by each
worker in it, at a ring's costs; "state" is parameters and optimizer state on a
device, without activations."""


def table(runs: list[Result], diverged: Sequence[str] = ()) -> str:
    """Return Markdown tables of losses, times and sizes, each with an explanation.

    Each method has a row, no longer than a terminal's line if its name is short. Runs
    that `diverged` are named.
    """
    groups = by_method(runs)
    first, *others = groups
    against = {f"against {first}": _against(groups[first])} if others else {}
    losses: dict[str, Cell] = {
        "method": lambda rs: rs[0].method,
        "seeds": lambda rs: str(len(rs)),
        "final": lambda rs: _spread([r.final_loss for r in rs]),
        **against,
        "lowest": lambda rs: _spread([r.best_loss for r in rs]),
    }
    times: dict[str, Cell] = {
        "method": lambda rs: rs[0].method,
        "tokens/s": _mean("tokens_per_second", "{:,.0f}".format),
        "training": _mean("training_seconds", "{:,.1f} s".format),
        "compiling": _mean("compiling_seconds", "{:,.1f} s".format),
        "in all": _mean("seconds", "{:,.1f} s".format),
        "exposed": _mean("exposed_ms_per_step", "{:,.1f} ms/step".format),
    }
    sizes: dict[str, Cell] = {
        "method": lambda rs: rs[0].method,
        "microbatches": _mean("microbatches", "{:,.0f}".format),
        "sent": _mean("bytes_sent_per_worker", bytes_text),
        "state": _mean("state_bytes_per_device", bytes_text),
    }
    said = LOSSES + _more_seeds(groups)
    if diverged:
        names = f"Diverged, not in the means: {', '.join(diverged)}."
        said += "\n" + textwrap.fill(names, 79, break_on_hyphens=False)
    parts = ((losses, said), (times, TIMES), (sizes, SIZES))
    return "\n\n".join(f"{_grid(t, groups)}\n\n{text}" for t, text in parts)


def _grid(columns: dict[str, Cell], groups: dict[str, list[Result]]) -> str:
    rows = [[cell(rs) for cell in columns.values()] for rs in groups.values()]
    return grid(list(columns), rows)


def grid(columns: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table whose columns line up."""
    widths = [max(map(len, c)) for c in zip(columns, *rows, strict=True)]
    lines = [columns, ["-" * w for w in widths], *rows]
    return "\n".join(
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def _mean(field: str, show: Callable[[float], str]) -> Cell:
    def cell(results: list[Result]) -> str:
        values = [getattr(r, field) for r in results]
        return "n/a" if None in values else show(statistics.fmean(values))

    return cell


def _against(first: list[Result]) -> Cell:
    """Return a column: final losses above a method's, in percent of its own.

    It is the mean of the seeds that both have, and for several its standard error.
    """

    def cell(results: list[Result]) -> str:
        if results[0].method == first[0].method:
            return ""
        found = changes(_by_seed(first), _by_seed(results))
        return change_text(found) if found else "n/a"

    return cell


def changes(first: Mapping[int, float], others: Mapping[int, float]) -> list[float]:
    """Return, in percent, how far losses lie above those of the same seeds.

    Args:
      first: seed -> final loss of the runs compared with.
      others: likewise, of the runs compared.
    """
    return [100 * (x / first[seed] - 1) for seed, x in others.items() if seed in first]


def change_text(changes: Sequence[float]) -> str:
    """Format the mean of `changes`, and for several its standard error."""
    mean = f"{statistics.fmean(changes):+.2f}"
    if len(changes) == 1:
        return f"{mean} %"
    return f"{mean} ± {statistics.stdev(changes) / len(changes) ** 0.5:.2f} %"


def _by_seed(runs: Sequence[Result]) -> dict[int, float]:
    return {run.seed: run.final_loss for run in runs}


def seeds_needed(changes: Sequence[float]) -> int:
    """Return how many seeds resolve a difference of `DECIDED` percent.

    It is then two standard errors, if seeds scatter as these, at least two, do.
    """
    return max(math.ceil((2 * statistics.stdev(changes) / DECIDED) ** 2), 2)


def _more_seeds(groups: dict[str, list[Result]]) -> str:
    """Return a sentence on how many seeds would decide; '' if that is not known."""
    first, *others = groups.values()
    known = _by_seed(first)
    found = [(rs[0].method, changes(known, _by_seed(rs))) for rs in others]
    needed = [
        f"{name} {max(seeds_needed(paired) - len(paired), 0):,}"
        for name, paired in found
        if len(paired) > 1
    ]
    if not needed:
        return ""
    return (
        f"\nMore seeds until a difference of {DECIDED} % is two standard errors, if\n"
        f"they scatter as these do: {', '.join(needed)}."
    )


def _spread(values: list[float]) -> str:
    """Format the mean, and the largest minus the smallest."""
    return f"{statistics.fmean(values):.4f} ({max(values) - min(values):.4f})"


def bytes_text(number: float) -> str:
    """Format bytes in the largest decimal unit that leaves a whole part."""
    units = ["TB", "GB", "MB", "kB", "B"]  # smallest last
    while number >= 999.95 and len(units) > 1:
        number /= 1000
        units.pop()
    return f"{number:.4g} {units[-1]}"


@dataclasses.dataclass(frozen=True)
class Curve:
    """A method's losses: at each evaluation the seeds' mean, lowest and highest."""

    tokens: list[float]
    seconds: list[float]
    bytes_sent: list[float] | None
    mean: list[float]
    low: list[float]
    high: list[float]


def curve(runs: list[Result]) -> Curve:
    """Return the evaluations that all seeds of a method have, as a curve."""
    rows = [{e["step"]: e for e in r.evaluations} for r in runs]
    common = sorted(set.intersection(*(set(r) for r in rows)))
    calls = [rows[0][step]["half_round"] for step in common]
    values = {
        key: [[row[step][key] for row in rows] for step in common]
        for key in ("tokens", "seconds", "loss")
    }
    sent = runs[0].bytes_sent_per_worker
    return Curve(
        tokens=list(map(statistics.fmean, values["tokens"])),
        seconds=list(map(statistics.fmean, values["seconds"])),
        # every half-round sends as much
        bytes_sent=None if sent is None else [sent * h / calls[-1] for h in calls],
        mean=list(map(statistics.fmean, values["loss"])),
        low=list(map(min, values["loss"])),
        high=list(map(max, values["loss"])),
    )


def draw(runs: list[Result], path: Path) -> None:
    """Draw held-out loss against tokens, time and bytes; bands are seeds' ranges."""
    curves = {name: curve(group) for name, group in by_method(runs).items()}
    colors = palette.of_methods(curves)
    figure, axes = subplots(13, 4.6, 1, 3, sharey=True)
    panels = (("tokens", "tokens", ""), ("seconds", "time", "s"),
              ("bytes_sent", "sent by each worker", "B"))  # fmt: skip
    for ax, (field, label, unit) in zip(axes, panels, strict=True):
        for i, (name, c) in enumerate(curves.items()):
            x = getattr(c, field)
            if x is None:
                continue
            style = {"color": colors[name], "ls": ("-", "--", ":")[i // 12 % 3]}
            ax.plot(x, c.mean, label=name, lw=1.6, marker="o", ms=2.5, **style)
            ax.fill_between(x, c.low, c.high, color=style["color"], alpha=0.2, lw=0)
        ax.set_xlabel(label)
        ax.set_xlim(left=0)
        ax.xaxis.set_major_locator(MaxNLocator(6))
        ax.xaxis.set_major_formatter(EngFormatter(unit))
    ends = [c.bytes_sent[-1] for c in curves.values() if c.bytes_sent]
    if ends and min(ends) > 0 and max(ends) > 5 * min(ends):
        axes[2].set_xscale("log")
        axes[2].autoscale(axis="x")  # the limit of 0 would stay, off the scale
        axes[2].xaxis.set_major_formatter(EngFormatter("B"))
    axes[0].set_ylim(*_loss_limits(curves.values()))
    axes[0].set_ylabel("held-out loss (nats per token)")
    legend_below(figure)
    save(figure, path)


def _loss_limits(curves: Iterable[Curve]) -> tuple[float, float]:
    """Return limits of an axis without the descent of the first fifth of each run."""
    losses = [
        loss
        for c in curves
        for tokens, *ends in zip(c.tokens, c.low, c.high, strict=True)
        if tokens >= 0.2 * c.tokens[-1]
        for loss in ends
    ]
    margin = 0.05 * (max(losses) - min(losses)) or 0.05 * max(losses)
    return min(losses) - margin, max(losses) + margin
