"""Records that a run has left in its folder, read without a device."""

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from acco_jax.command.files import is_number, read_object
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
            "bigram_bits_per_byte", "lost_tokens", "parameters")  # fmt: skip
# Keys of config.json that are not fields.
FOUND = ("adapters", "corpus", "frozen", "generation", "parameters", "pretrained",
         "total_steps", "workers")  # fmt: skip


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
    held: bool | None  # by a process that lives; None: it has no lock

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
    def state(self) -> str:
        """'running', 'finished', 'stopped', 'failed', or 'unknown' before any record.

        A run that was stopped has saved; one that has failed may have lost steps.
        """
        if self.held:
            return "running"
        if self.summary and self.final:
            return "finished"
        if self.held is None and not self.record:
            return "unknown"
        saved = self.held is None and self.record[-1].get("stopped")
        return "stopped" if saved else "failed"

    @property
    def step(self) -> int:
        """Optimizer steps so far."""
        steps = (row.get("step") for row in reversed(self.rows))
        return next((int(step) for step in steps if is_number(step)), 0)

    @property
    def steps(self) -> int | None:
        """Optimizer steps of the whole run; None if they are not known."""
        fixed = self.config.get("tokens") is None and self.config.get("epochs") is None
        known = self.config.get("steps") if fixed else self.summary.get("steps")
        return self.config.get("total_steps", known)

    @property
    def parameters(self) -> int | None:
        """Number of the model's parameters; None if it is not known."""
        return self.summary.get("parameters", self.config.get("parameters"))

    @property
    def model(self) -> str:
        """Name of the model: a factory, a folder, a published size, or a family."""
        names = ("model.factory", "init_from", "model.size", "model.family")
        return str(next(filter(None, map(self.config.get, names)), ""))

    @property
    def rate(self) -> float | None:
        """Tokens per second: median of the logging intervals; None if not known."""
        return results.typical_rate(self.rows)

    @property
    def goodput(self) -> float | None:
        """Share of the wall time in half-rounds that counted; None if not recorded."""
        return goodput.share(goodput.spent(self.record)) if self.record else None

    @property
    def status(self) -> str:
        """State, and how far the run is unless it has finished."""
        if self.state == "finished":
            return "finished"
        of = "" if self.steps is None else f" of {self.steps}"
        return f"{self.state}, step {self.step}{of}"

    def bytes_at(self, half_round: int) -> float | None:
        """Return the bytes that a worker has sent; half-rounds count equally."""
        sent = self.summary.get("bytes_sent_per_worker")
        if sent is None or self.final is None:
            return None
        return sent * half_round / self.final["half_round"]

    def microbatches(self) -> list[tuple[int, list[int]]]:
        """Return (half-round, microbatches of each worker) for the recorded ones.

        The log of counts is of an inner step, the rows of metrics of a whole call.
        """
        rows: list[tuple[int, list[int]]] = [
            (r["half_round"], r["microbatches"])
            for r in self.train
            if isinstance(r.get("microbatches"), list) and r["microbatches"]
        ]
        if not self.counts:
            return rows
        logged = {h: sum(counts) for h, counts in enumerate(self.counts, 1)}
        steps = (sum(m) // logged[h] for h, m in rows if logged.get(h))
        inner = next(steps, 1)  # of a call
        return [(h, [inner * n for n in c]) for h, c in enumerate(self.counts, 1)]


def read(folders: Sequence[Path]) -> list[RunRecords]:
    """Read the runs in folders: workdirs, comparisons, or folders of workdirs.

    Raises:
      ValueError: if a folder has no run, or a file in it is damaged.
    """
    found = list(dict.fromkeys(run for folder in folders for run in _runs_in(folder)))
    return [
        read_run(folder, name)
        for folder, name in zip(found, names_of(found), strict=True)
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


def read_run(folder: Path, name: str) -> RunRecords:
    """Read one run's folder; raise as `read`."""
    numbers = ("parameters", "seed", "steps", "total_steps")
    config = results.numbers(folder / "config.json", (), numbers)
    if not isinstance(config.get("method"), str):
        raise ValueError(
            f"{folder / 'config.json'} is of no run: name the workdir of a run."
        )
    path, summary = folder / results.SUMMARY, dict[str, Any]()
    if path.exists():
        summary = results.numbers(path, NEEDED, OPTIONAL)
    rows, counts, failures = metrics.read(folder), folder / COUNTS, folder / "failures"
    reached = max((row["half_round"] for row in rows), default=0)
    alone = re.fullmatch(r"seed-\d+", name)  # a folder of one method was named
    return RunRecords(
        name=name,
        group=folder.parent.name if alone else re.sub(r"/seed-\d+$", "", name),
        folder=folder,
        config=flat(config),
        rows=rows,
        summary=summary,
        record=goodput.read(folder),
        worlds=worlds.recorded(folder),
        counts=read_counts(counts, reached) if counts.exists() else [],
        failures=_failures(failures) if failures.is_dir() else [],
        profiles=profiling.summaries(folder),
        held=workdir.held(folder),
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
