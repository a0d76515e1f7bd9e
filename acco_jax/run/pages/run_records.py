"""Records that a run has left in its folder, read without a device."""

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from acco_jax.command.files import read_object
from acco_jax.run.compare import results
from acco_jax.run.config.fields import default_config
from acco_jax.run.observe import goodput, metrics, profiling
from acco_jax.run.state import workdir, worlds
from acco_jax.run.state.counts import FILE as COUNTS
from acco_jax.step.replay import read_counts

Row = dict[str, Any]
# Positive numbers of summary.json that the page shows; later versions may have more.
NEEDED = ("loss", "tokens", "steps", "seconds", "state_bytes_per_device")
OPTIONAL = ("bytes_sent_per_worker", "gradient_seconds_per_token", "bits_per_byte",
            "bigram_bits_per_byte", "devices", "workers", "parameters")  # fmt: skip
FOUND = (
    "corpus",
    "generation",
    "pretrained",
    "workers",
)  # keys of config.json that are not fields


@dataclasses.dataclass(frozen=True)
class RunRecords:
    """A run, finished or not."""

    name: str  # on the page, different from the names of all other runs there
    group: str  # of runs in one colour: the seeds of a method in a comparison
    folder: Path
    config: dict[str, Any]  # dotted field -> value
    rows: list[Row]  # of metrics.jsonl
    summary: dict[str, Any]  # {} where the run has not ended
    record: list[Row]  # of goodput.jsonl
    worlds: list[tuple[int, worlds.World]]
    counts: list[list[int]]  # where they adapt: of each half-round, one per worker
    failures: list[str]  # names of the folders in failures/
    profiles: list[tuple[str, dict[str, Any]]]  # process, summary of its trace
    locked: bool

    @property
    def train(self) -> list[Row]:
        return [r for r in self.rows if r["kind"] == "train"]

    @property
    def evaluations(self) -> list[Row]:
        return [r for r in self.rows if r["kind"] == "validation"]

    @property
    def final(self) -> Row | None:
        """Evaluation on all held-out documents."""
        return next((r for r in self.rows if r["kind"] == "final"), None)

    @property
    def starts(self) -> int:
        """Number of processes that began this run; 0 if nothing is recorded."""
        return sum(row["cause"] == "down" for row in self.record)

    @property
    def rollbacks(self) -> list[tuple[int, int]]:
        """Training that was lost, to a kill or a spike: (from, to) in half-rounds."""
        found, reached = [], 0
        for row in self.record:
            now = row.get("half_round", reached)
            if now < reached:
                found.append((reached, now))
            reached = now
        return found

    @property
    def status(self) -> str:
        if self.summary and self.final:
            return "finished"
        step = next((r["step"] for r in reversed(self.rows) if "step" in r), 0)
        fixed = self.config.get("tokens") is None and self.config.get("epochs") is None
        of = f" of {self.config.get('steps')}" if fixed else ""
        lock = f"; {workdir.LOCK} is there: running, or killed" if self.locked else ""
        return f"unfinished, step {step}{of}{lock}"

    def bytes_at(self, half_round: int) -> float | None:
        """Return the bytes that a worker has sent; half-rounds count equally."""
        sent = self.summary.get("bytes_sent_per_worker")
        if sent is None or self.final is None:
            return None
        return sent * half_round / self.final["half_round"]

    def microbatches(self) -> list[tuple[int, list[int]]]:
        """Return (half-round, microbatches of each worker) for the recorded ones."""
        if self.counts:
            return list(enumerate(self.counts, 1))
        rows = [(r["half_round"], r.get("microbatches")) for r in self.train]
        return [(h, m) for h, m in rows if isinstance(m, list) and m]


def read(folders: Sequence[Path]) -> list[RunRecords]:
    """Read the runs in folders: workdirs, comparisons, or folders of workdirs.

    Raises:
      ValueError: if a folder has no run, or a file in it is damaged.
    """
    found = list(dict.fromkeys(run for folder in folders for run in _runs_in(folder)))
    return [
        _read(folder, name) for folder, name in zip(found, names_of(found), strict=True)
    ]


def _runs_in(folder: Path) -> Iterator[Path]:
    folder = Path(os.path.abspath(folder))
    if not folder.is_dir():
        why = "is a file" if folder.exists() else "does not exist"
        raise ValueError(f"{folder} {why}: name the workdir of a run or a comparison.")
    if (folder / "config.json").exists():
        yield folder
        return
    inside = sorted([*folder.glob("*/config.json"), *folder.glob("*/*/config.json")])
    runs = [p.parent for p in inside if "method" in read_object(p)]
    if not runs:
        raise ValueError(
            f"{folder} holds no run, and neither do folders in it: name the --workdir "
            "of acco_jax.train or acco_jax.compare."
        )
    yield from runs


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return the folders' paths relative to their common folder; for one its name."""
    if len(folders) == 1:
        return [folders[0].name]
    top = os.path.commonpath(folders)
    names = [os.path.relpath(folder, top) for folder in folders]
    return [
        folder.name if n == "." else n for n, folder in zip(names, folders, strict=True)
    ]


def _read(folder: Path, name: str) -> RunRecords:
    config = read_object(folder / "config.json")
    if not isinstance(config.get("method"), str):
        raise ValueError(
            f"{folder / 'config.json'} is of no run: name the workdir of a run."
        )
    path, summary = folder / results.SUMMARY, dict[str, Any]()
    if path.exists():
        summary = results.numbers(path, NEEDED, OPTIONAL)
    rows, counts, failures = metrics.read(folder), folder / COUNTS, folder / "failures"
    reached = max((row["half_round"] for row in rows), default=0)
    return RunRecords(
        name=name,
        group=re.sub(r"/seed-\d+$", "", name),
        folder=folder,
        config=flat(config),
        rows=rows,
        summary=summary,
        record=goodput.read(folder),
        worlds=worlds.recorded(folder),
        counts=read_counts(counts, reached) if counts.exists() else [],
        failures=_failures(failures) if failures.is_dir() else [],
        profiles=profiling.summaries(folder),
        locked=(folder / workdir.LOCK).exists(),
    )


def _failures(folder: Path) -> list[str]:
    """Return attempt-1/process-0, ...: the processes that have left messages."""
    return sorted(
        str(p.relative_to(folder)) for p in folder.glob("attempt-*/process-*")
    )


def flat(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted names and values."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def differences(runs: Sequence[RunRecords]) -> list[tuple[str, list[Any]]]:
    """Return the fields in which runs differ, each with every run's value.

    A single run is compared with the defaults, whose value comes first. A missing value
    is None.
    """
    configs = [run.config for run in runs]
    names = set().union(*configs)
    if len(runs) == 1:
        default = flat(json.loads(default_config().to_json_best_effort()))
        configs = [default, *configs]
        # besides fields it has results about the data and the workers
        names = {n for n in names | set(default) if n.partition(".")[0] not in FOUND}
    found = [(name, [c.get(name) for c in configs]) for name in sorted(names)]
    return [(n, values) for n, values in found if any(v != values[0] for v in values)]
