"""Table of the runs below a folder, for a terminal or as JSON."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from acco_jax.command.files import read_object
from acco_jax.run.observe import goodput, metrics
from acco_jax.run.pages.run_records import RunRecords, read_run

UNKNOWN = "–"
DAMAGED = "damaged"
COLOURS = {  # of states, as ANSI codes
    "running": 34, "finished": 32, "stopped": 33, "failed": 31, DAMAGED: 31,
}  # fmt: skip
TEXTS = ("name", "method", "model", "state")  # columns that are not numbers
Row = dict[str, Any]


def rows_of(folder: Path) -> list[Row]:
    """Return a row for each run in a folder and below it, sorted by name.

    A run whose folder is damaged has a row with the `problem`, and no figures.

    Raises:
      ValueError: if there is no run.
    """
    folder = Path(os.path.abspath(folder))
    if not folder.is_dir():
        why = "is a file" if folder.exists() else "does not exist"
        raise ValueError(f"{folder} {why}: name a folder of runs.")
    rows = [_row(run, folder) for run in _runs_below(folder)]
    if not rows:
        raise ValueError(
            f"{folder} holds no run, and neither do folders in it: name the --workdir "
            "of acco_jax.train, or a folder above it."
        )
    return sorted(rows, key=lambda row: row["name"])


def _runs_below(folder: Path) -> Iterator[Path]:
    """Yield the workdirs of runs; what is in a workdir is its own."""
    seen = set[str]()  # a link may lead back
    for top, inside, files in os.walk(folder, followlinks=True):
        if (place := os.path.realpath(top)) in seen:
            inside.clear()
            continue
        seen.add(place)
        if "config.json" in files and _is_run(Path(top)):
            inside.clear()
            yield Path(top)


def _is_run(folder: Path) -> bool:
    """Return whether a config.json is a run's, not that of a Hugging Face folder."""
    try:
        if "method" in read_object(folder / "config.json"):
            return True
    except (OSError, ValueError):
        pass
    return any((folder / file).exists() for file in (metrics.FILE, goodput.FILE))


def _row(folder: Path, top: Path) -> Row:
    name = folder.name if folder == top else str(folder.relative_to(top))
    row: Row = {"name": name, "folder": str(folder)}
    try:
        return row | _figures(read_run(folder, name))
    except (OSError, ValueError) as error:
        problem = str(error).replace(f"{folder}/", "")
        return row | {"state": DAMAGED, "problem": problem}


def _figures(run: RunRecords) -> Row:
    losses = [row["loss"] for row in run.rows if row["kind"] != "train"]
    return {
        "method": run.config["method"],
        "model": run.model,
        "parameters": run.parameters,
        "step": run.step,
        "steps": run.steps,
        "loss": losses[-1] if losses else None,
        "tokens_per_second": run.rate,
        "goodput": run.goodput,
        "state": run.state,
    }


def text(rows: Sequence[Row], *, colour: bool = False) -> str:
    """Return rows of `rows_of` as aligned lines, under the columns' names."""
    cells = [_cells(row) for row in rows]
    names = list(cells[0])
    lines = [names, *(list(map(_shown, c.values())) for c in cells)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = [str.ljust if name in TEXTS else str.rjust for name in names]
    shown = []
    for row, line in zip([None, *rows], lines, strict=True):
        *parts, state = line
        if colour and row and (code := COLOURS.get(row["state"])):
            state = state.replace(row["state"], f"\033[{code}m{row['state']}\033[0m", 1)
        padded = map(lambda side, cell, width: side(cell, width), sides, parts, widths)
        shown.append("  ".join([*padded, state]))
    return "\n".join(shown)


def _cells(row: Row) -> dict[str, str | None]:
    """Return a row's cells by the names of their columns; None is not known."""

    def cell(name: str, form: str) -> str | None:
        value = row.get(name)
        return None if value is None else form.format(value)

    step, steps, problem = row.get("step"), row.get("steps"), row.get("problem")
    of = "" if steps is None else f" of {steps:,}"
    return {
        "name": row["name"],
        "method": row.get("method"),
        "model": row.get("model"),
        "parameters": cell("parameters", "{:,}"),
        "step": None if step is None else f"{step:,}{of}",
        "loss": cell("loss", "{:.4f}"),
        "tokens/s": cell("tokens_per_second", "{:,.0f}"),
        "goodput": cell("goodput", "{:.1%}"),
        "state": f"{row['state']}: {problem}" if problem else row["state"],
    }


def _shown(cell: str | None) -> str:
    """Return a cell as one line that no terminal acts on."""
    if cell is None:
        return UNKNOWN
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in cell)
