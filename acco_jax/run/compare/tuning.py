"""Sweep over fields of the config, for each method's best, before a comparison.

Every candidate (a method and a value for each field) is a run of acco_jax.train on
seeds that the comparison does not use. If the budget does not allow all of them to
their end, successive halving ends it in time (Jamieson and Talwalkar, arXiv
1502.07943): all run to a first part of the steps, the better half goes on to twice that
part, and so on. A run that goes on is continued, not begun again, and it has the
schedule of the whole: a rate that needs its decay looks worse half-way than it is.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import logging
from matplotlib.axes import Axes

from acco_jax import methods
from acco_jax.command import exits, palette
from acco_jax.command.charts import legend_below, save, subplots
from acco_jax.command.files import read_text, write_whole
from acco_jax.run.compare import results
from acco_jax.run.compare.pool import Pool, RunFailed, Task, raise_failed
from acco_jax.run.observe import metrics

DIVERGED = "diverged"  # a file with its limits, in the folder of a run that has
FOLDER = "tuning"
LOSSES = """\
Held-out loss in nats per token, the mean of the tuning seeds; the best of each
method in bold. At the last step it is of all held-out documents, before of a
part of them (eval_batches): compare rows of equal steps."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A method at one point of the sweep."""

    method: str  # as the comparison names it
    point: tuple[tuple[str, str], ...]  # (field, value), as on the command line
    flags: tuple[str, ...]  # of the method and the point

    @property
    def name(self) -> str:
        return ",".join(f"{field}={value}" for field, value in self.point)


@dataclasses.dataclass(frozen=True)
class Length:
    """Length of the runs of a method."""

    steps: int
    tokens: int  # of the whole run
    calls: dict[int, int]  # by the steps at which a run can be judged
    limits: str = ""  # settings that decide when a run has diverged

    def step(self, part: float) -> int:
        """Return the step nearest to a part of the run at which it can be judged."""
        return min(self.calls, key=lambda step: abs(step - part * self.steps))


@dataclasses.dataclass(frozen=True)
class TuningScore:
    """Losses that a candidate has reached."""

    steps: int
    part: float  # of its run
    losses: tuple[float, ...]  # held-out, of the tuning seeds; infinite if diverged

    @property
    def mean(self) -> float:
        return statistics.fmean(self.losses)


def parse(texts: Sequence[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Parse sweeps as the command line has them: 'optimizer.learning_rate=1e-3,2e-3'.

    Raises:
      ValueError: if the text has another form.
    """
    sweep: list[tuple[str, tuple[str, ...]]] = []
    for text in texts:
        field, equals, values = text.replace(" ", "").partition("=")
        field = field.removeprefix("config.")
        options = values.split(",")
        if not field or not equals or not all(options) or len(options) < 2:
            raise ValueError(
                f"--tune has {text!r}: write FIELD=VALUE,VALUE,... with at least two "
                "values, such as optimizer.learning_rate=1e-3,2e-3."
            )
        if "/" in values:
            raise ValueError(
                f"--tune has {text!r}: values name folders, so there is no / in them."
            )
        if len(set(options)) < len(options):
            raise ValueError(f"--tune has {text!r}, a value twice: give it once.")
        if field == "seed" or field in dict(sweep):
            raise ValueError(
                f"--tune has {text!r}: name each field once, and not the seed, which "
                "--seeds and --tune_seeds are for."
            )
        sweep.append((field, tuple(options)))
    return tuple(sweep)


def candidates(
    name: str,
    flags: tuple[str, ...],
    sweep: tuple[tuple[str, tuple[str, ...]], ...],
) -> list[Candidate]:
    """Return every point of the sweep for a method.

    It leaves out options that the method lacks, and fields that its flags set.

    Args:
      name: of the method, with options.
      flags: that make a run one of it.
      sweep: from `parse`.
    """
    method = name.partition("(")[0]
    known = list(methods.options(method)) if method in methods.METHODS else []
    given = [flag.partition("=")[0].removeprefix("--config.") for flag in flags]

    def applies(field: str) -> bool:
        family, _, option = field.partition(".")
        has = family != "method_options" or option in known
        return has and field not in given

    fields = [
        [(field, value) for value in values]
        for field, values in sweep
        if applies(field)
    ]
    return [
        Candidate(name, point, (*flags, *(f"--config.{f}={v}" for f, v in point)))
        for point in itertools.product(*fields)
    ]


def rungs(
    groups: dict[str, list[Candidate]],
    lengths: dict[Candidate, Length],
    seeds: int,
    budget: int | None,
) -> dict[str, list[float]]:
    """Return the parts of their runs after which a method's candidates are judged.

    Args:
      groups: candidates of each method.
      lengths: of their runs.
      seeds: number of seeds per candidate.
      budget: tokens of all runs together; None: unlimited.

    Raises:
      ValueError: if even the smallest plan takes more.
    """
    least = math.inf
    for halvings in range(max(_halvings(len(g)) for g in groups.values()) + 1):
        plan = {
            m: [0.5**k for k in range(min(halvings, _halvings(len(g))), -1, -1)]
            for m, g in groups.items()
        }
        tokens = seeds * sum(_tokens(g, plan[m], lengths) for m, g in groups.items())
        if budget is None or tokens <= budget:
            logging.info("tuning takes at most %s tokens", f"{tokens:,}")
            return plan
        least = min(least, tokens)
    raise ValueError(
        f"--budget is {budget:,} tokens: with these methods, values and --tune_seeds "
        f"tuning takes at least {least:,}."
    )


def _halvings(candidates: int) -> int:
    return math.ceil(math.log2(candidates))


def _tokens(
    group: list[Candidate], parts: list[float], lengths: dict[Candidate, Length]
) -> int:
    """Return the most tokens that a group takes, when half of them go on each time.

    A run that goes on takes only what lies between two rungs.
    """
    total, before = 0.0, dict.fromkeys(group, 0.0)
    count = len(group)
    for part in parts:
        share = {c: lengths[c].step(part) / lengths[c].steps for c in group}
        owed = sorted((share[c] - before[c]) * lengths[c].tokens for c in group)
        total += sum(owed[-count:])
        before, count = share, _kept(count)
    return math.ceil(total)


def _kept(candidates: int) -> int:
    return math.ceil(candidates / 2)


def tune(
    found: list[Candidate],
    lengths: dict[Candidate, Length],
    seeds: Sequence[int],
    budget: int | None,
    workdir: Path,
    pool: Pool,
) -> dict[str, Candidate]:
    """Run a sweep and return the best candidate of each method.

    WORKDIR/tuning gets the runs, table.md and loss.png. Finished runs are not repeated.

    Args:
      found: candidates of all methods.
      lengths: of their runs.
      seeds: not used by the comparison.
      budget: as for `rungs`.
      workdir: of the comparison.
      pool: that runs the tasks.

    Raises:
      ValueError: if the budget is too small, there is nothing to tune, or all runs of
        a method that went on have diverged.
      RunFailed: if a run has no result.
      Stopped: if told to stop.
    """
    every = {c.method: [d for d in found if d.method == c.method] for c in found}
    groups = {m: group for m, group in every.items() if len(group) > 1}
    if not groups:
        raise ValueError("--tune names no option of these methods: leave it out.")
    plan = rungs(groups, lengths, len(seeds), budget)
    scores: dict[Candidate, TuningScore] = {}
    alive = dict(groups)
    while any(plan.values()):
        due = {c: plan[m][0] for m in alive if plan[m] for c in alive[m]}
        _run(due, lengths, seeds, workdir, pool)
        for c, part in due.items():
            step = lengths[c].step(part)
            folders = [folder_of(workdir, c, seed) for seed in seeds]
            losses = [_loss(folder, step, lengths[c]) for folder in folders]
            scores[c] = TuningScore(
                step, part, tuple(x for x in losses if x is not None)
            )
            if None in losses:
                lacks = folders[losses.index(None)]
                raise RunFailed(
                    f"{lacks} has no evaluation of step {step}: repeat the command, "
                    "and remove that folder if it stays so."
                )
        for m in alive:
            if plan[m]:
                ranked = sorted(alive[m], key=lambda c: scores[c].mean)
                alive[m] = ranked[: _kept(len(ranked))]
                plan[m] = plan[m][1:]
    best = {m: ranked[0] for m, ranked in alive.items()}
    chosen = {m: c for m, c in best.items() if math.isfinite(scores[c].mean)}
    folder = workdir / FOLDER
    text = table(groups, scores, chosen)
    write_whole(folder / "table.md", text + "\n")
    for m, group in groups.items():
        if m in chosen:
            continue
        if any(math.isfinite(scores[c].mean) for c in group):
            raise ValueError(
                f"the values of {m} that went on have diverged ({folder}/table.md): "
                "sweep others, or raise --budget."
            )
        raise ValueError(
            f"every run of {m} in the sweep has diverged: sweep other values."
        )
    draw(groups, scores, chosen, folder / "loss.png")
    for m, c in chosen.items():
        logging.info("%s: %s", m, c.name)
        for field, value in at_the_edge(groups[m], c):
            logging.warning("%s is best at %s=%s, an end of the sweep: sweep further",
                            m, field, value)  # fmt: skip
    return {m: chosen.get(m, group[0]) for m, group in every.items()}


def _run(
    due: dict[Candidate, float],
    lengths: dict[Candidate, Length],
    seeds: Sequence[int],
    workdir: Path,
    pool: Pool,
) -> None:
    """Run candidates up to a part of their runs, unless they have come so far."""
    tasks = {}
    for seed in seeds:
        for c, part in due.items():
            length, folder = lengths[c], folder_of(workdir, c, seed)
            step = length.step(part)
            if _loss(folder, step, length) is not None:
                continue
            flags = [*c.flags, f"--config.seed={seed}"]
            if step < length.steps:
                flags.append(f"--stop_after={length.calls[step]}")
            name = f"{c.method}, {c.name}, seed {seed}"
            task = Task(f"{name}: to step {step}", folder, tuple(flags))
            tasks[task] = length.limits
    codes = pool.run(list(tasks))
    for task, code in codes.items():
        if code == exits.DIVERGED:
            write_whole(task.folder / DIVERGED, tasks[task])
    raise_failed(codes)


def folder_of(workdir: Path, c: Candidate, seed: int) -> Path:
    """Return the workdir of a candidate's run."""
    return workdir / FOLDER / c.method / c.name / f"seed-{seed}"


def _loss(folder: Path, steps: int, length: Length) -> float | None:
    """Return the held-out loss of a run at `steps` steps, None if there is none.

    At the end it is of all held-out documents. A run that diverged earlier, under the
    same limits, has an infinite loss.
    """
    if steps < length.steps:
        rows = metrics.read(folder)
        found = [r for r in rows if r["kind"] == "validation" and r["step"] == steps]
        if found:
            return float(found[-1]["loss"])
    elif results.finished(folder):
        return float(results.numbers(folder / results.SUMMARY, ("loss",))["loss"])
    marker = folder / DIVERGED
    diverged = marker.exists() and read_text(marker) == length.limits
    return math.inf if diverged else None


def at_the_edge(group: list[Candidate], chosen: Candidate) -> list[tuple[str, str]]:
    """Return the numeric fields whose best value is the lowest or highest."""
    edges = []
    for k, (field, value) in enumerate(chosen.point):
        numbers = [_number(c.point[k][1]) for c in group]
        found = [x for x in numbers if x is not None]
        ordered = len(found) == len(numbers) and len(set(found)) > 2
        if ordered and _number(value) in (min(found), max(found)):
            edges.append((field, value))
    return edges


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def table(
    groups: dict[str, list[Candidate]],
    scores: dict[Candidate, TuningScore],
    chosen: dict[str, Candidate],
) -> str:
    """Return a Markdown table of the candidates' losses, the best one in bold."""
    rows = []
    for method, group in groups.items():
        for c in group:
            score = scores[c]
            loss = f"{score.mean:.4f}" if math.isfinite(score.mean) else "diverged"
            row = [method, c.name, str(score.steps), loss]
            best = c == chosen.get(method)
            rows.append([f"**{x}**" for x in row] if best else row)
    grid = results.grid(["method", "value", "steps", "held-out loss"], rows)
    return f"{grid}\n\n{LOSSES}"


def draw(
    groups: dict[str, list[Candidate]],
    scores: dict[Candidate, TuningScore],
    chosen: dict[str, Candidate],
    path: Path,
) -> None:
    """Draw the loss over each field of the sweep, a line for each method that has it.

    Small hollow marks are candidates that were not run to their end. A large mark
    is around the best.
    """
    points = [c.point for group in groups.values() for c in group]
    fields = list(dict.fromkeys(field for point in points for field, _ in point))
    count = len(fields)
    figure, axes = subplots(6.4 * count, 4.4, 1, count, sharey=True)
    for ax, field in zip(axes, fields, strict=True):
        _draw_field(ax, field, groups, scores, chosen)
    axes[0].set_ylabel("held-out loss (nats per token)")
    legend_below(figure)
    save(figure, path)


def _draw_field(
    ax: Axes,
    field: str,
    groups: dict[str, list[Candidate]],
    scores: dict[Candidate, TuningScore],
    chosen: dict[str, Candidate],
) -> None:
    """Draw the loss over a field; a method without it only gets a place in the legend.

    Arguments are as for `draw`.
    """
    every = [c for group in groups.values() for c in group]
    values = {c: dict(c.point)[field] for c in every if field in dict(c.point)}
    ticks = list(dict.fromkeys(values.values()))
    numbers = [_number(value) for value in ticks]
    if all(x is not None and x > 0 for x in numbers):
        place: Callable[[str], float] = float
        ax.set_xscale("log")
        ax.minorticks_off()
    else:
        place = ticks.index
    ax.set_xticks([place(value) for value in ticks], ticks)
    colors = palette.of_methods(groups)
    for method, group in groups.items():
        best, color = chosen[method], colors[method]
        at = {c: (place(values[c]), scores[c].mean) for c in group
              if c in values and math.isfinite(scores[c].mean)}  # fmt: skip
        whole = sorted(xy for c, xy in at.items() if scores[c].part == 1)
        xs, ys = [x for x, _ in whole], [y for _, y in whole]
        ax.plot(xs, ys, "o-", label=method, lw=1.4, ms=4, c=color)
        for c, xy in at.items():
            if scores[c].part < 1:
                ax.plot(*xy, "o", mfc="none", ms=4, c=color)
        if best in at:
            ax.plot(*at[best], "o", mfc="none", ms=11, c=color)
    ax.set_xlabel(field)
