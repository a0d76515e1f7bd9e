"""Comparison of methods and seeds, each an ordinary run in its own process."""

import contextlib
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from absl import logging

from acco_jax.command import devices, program_store
from acco_jax.command.files import read_object
from acco_jax.run.compare import network, pool, results, tuning
from acco_jax.run.compare.tuning import Candidate
from acco_jax.run.config import parsing
from acco_jax.run.config.identity import differing_field


@dataclasses.dataclass(frozen=True)
class Entry:
    """A method to compare."""

    name: str  # as written; also its folder's name and in the table
    flags: tuple[str, ...]  # for a run of this method


@dataclasses.dataclass(frozen=True)
class ComparisonRequest:
    """A comparison to run: config, methods, seeds and resources."""

    config: tuple[str, ...]  # flags of the experiment
    entries: tuple[Entry, ...]
    workdir: Path  # of all runs and the results
    seeds: int  # of each method
    rate: str | None = None  # of the link between processes, for `network.parse`
    processes: int = 1  # of each run
    at_once: int = 1  # runs; 0: as many as fit
    sweep: tuple[tuple[str, tuple[str, ...]], ...] = ()  # of `tuning.parse`
    tune_seeds: int = 1  # of each candidate in the sweep
    budget: int | None = None  # tokens of the sweep; None: of all its runs

    def flags(self, entry: Entry) -> list[str]:
        return [*self.config, *entry.flags]

    def folder(self, entry: Entry, seed: int) -> Path:
        return self.workdir / entry.name / f"seed-{seed}"

    @property
    def seed_numbers(self) -> range:
        first = parsing.config_of(list(self.config)).seed
        return range(first, first + self.seeds)

    @property
    def tuning_seeds(self) -> range:
        end = self.seed_numbers.stop
        return range(end, end + self.tune_seeds)

    @property
    def candidates(self) -> list[Candidate]:
        return [
            candidate
            for entry in self.entries
            for candidate in tuning.candidates(entry.name, entry.flags, self.sweep)
        ]


def parse(text: str) -> tuple[Entry, ...]:
    """Parse methods as the command line has them: 'acco,dpu(warmup_steps=40)'.

    Parentheses hold arguments of the method, or config.FIELD=VALUE.

    Raises:
      ValueError: if the text has another form, or a name occurs twice.
    """
    names = _split(text.replace(" ", ""))
    entries = tuple(map(_entry, names))
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"--methods names {name} twice: give it once.")
    return entries


def _split(text: str) -> list[str]:
    """Split at the commas outside of parentheses."""
    parts, depth = [""], 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _entry(name: str) -> Entry:
    match = re.fullmatch(r"(\w+)(?:\(([^/]+)\))?", name)
    options = _split(match[2]) if match and match[2] else []
    option = r"[\w.]+=([^=()]+|\([^=()]+\))"
    if not match or not all(re.fullmatch(option, o) for o in options):
        raise ValueError(
            f"--methods has {name!r}: write NAME or NAME(option=value,...), separated "
            "by commas."
        )
    fields = (o if o.startswith("config.") else f"config.method_options.{o}"
              for o in options)  # fmt: skip
    return Entry(name, (f"--config.method={match[1]}", *(f"--{f}" for f in fields)))


def check(request: ComparisonRequest) -> list[dict[str, Any]]:
    """Prepare a run of every method, in this process, as its own process would.

    Returns:
      The fields of a `tuning.Length` for each candidate of the sweep; without a sweep,
      for one run of each method.

    Raises:
      ValueError: with the first method that cannot run.
    """
    if request.rate is not None:
        network.parse(request.rate)
    first = parsing.config_of(list(request.config))
    total = request.processes * (first.get("devices") or 1)
    several = request.rate is not None
    devices.choose_platform(
        total if several else first.get("devices"), several_processes=False
    )
    program_store.keep_programs()
    # slow, and only now may anything touch devices
    from acco_jax.run import preparation

    lengths = []
    for c in request.candidates:
        entry, seed = Entry(c.method, c.flags), request.seed_numbers[0]
        folder = request.folder(entry, seed)
        if c.point:
            seed = request.tuning_seeds[0]
            folder = tuning.folder_of(request.workdir, c, seed)
        try:
            flags = [*request.flags(entry), f"--config.seed={seed}"]
            config = parsing.config_of(flags)
            if config.method == "auto":  # each run chooses: this one is always allowed
                config.method = "zero1"
            experiment = preparation.prepare(config, folder)
        except (ValueError, OSError) as error:
            at = f" at {c.name}" if c.point else ""
            raise ValueError(f"{c.method}{at}: {error}") from error
        lengths.append(_length(experiment))
    return lengths


def _length(experiment: Any) -> dict[str, Any]:
    """Return the fields of a `tuning.Length` of a run's `Experiment`."""
    e, every = experiment, experiment.config.eval_every
    calls = {}
    for step in (*range(every, e.config.steps, every), e.config.steps):
        with contextlib.suppress(ValueError):  # within a round of a local method
            calls[step] = e.tx.calls(step)
    return {
        "steps": e.config.steps,
        "tokens": e.tokens * e.total_calls,
        "calls": calls,
    }


def compare(request: ComparisonRequest, checking: list[str]) -> str:
    """Run what is not finished, write the results, and return the table.

    The arguments `checking` make `python -m acco_jax.compare` only `check`.

    Raises:
      ValueError: before the first run, if something cannot work.
      RunFailed: after the last run, with the runs that have no result.
      Stopped: if told to stop; the runs so far have saved their state.
    """
    if request.rate is not None:
        network.parse(request.rate)
        if reason := network.why_not():
            raise ValueError(f"--network cannot shape a link: {reason}")
    slots = pool.slots(request.at_once)
    lengths = _check_elsewhere(checking, request.rate is not None)
    with pool.opened(slots, request.rate, request.processes) as runs:
        if request.sweep:
            request = _tuned(request, lengths, runs)
        _check_folders(request)
        tasks = []
        for seed in request.seed_numbers:
            for entry in request.entries:
                folder = request.folder(entry, seed)
                if results.finished(folder):
                    logging.info("%s, seed %d: finished before", entry.name, seed)
                    continue
                flags = [f"--config.seed={seed}", "--time_gradients"]
                name = f"{entry.name}/seed-{seed}"
                flags = [*request.flags(entry), *flags]
                tasks.append(pool.Task(name, folder, tuple(flags)))
        runs.run(tasks)
    table = _report(request)
    failed = [task.name for task in tasks if not results.finished(task.folder)]
    if failed:
        raise pool.RunFailed(
            f"no result of {', '.join(failed)} (see the errors above): repeat the "
            "command to try again; table.md has the others."
        )
    return table


def _tuned(
    request: ComparisonRequest, lengths: list[dict[str, Any]], runs: pool.Pool
) -> ComparisonRequest:
    """Return the request with each method at its own best point."""
    found = request.candidates
    own = [(*request.config, *c.flags) for c in found]
    full = [dataclasses.replace(c, flags=f) for c, f in zip(found, own, strict=True)]
    known = {
        c: tuning.Length(
            length["steps"],
            length["tokens"],
            {int(k): v for k, v in length["calls"].items()},
        )
        for c, length in zip(full, lengths, strict=True)
    }
    chosen = tuning.tune(
        full, known, request.tuning_seeds, request.budget, request.workdir, runs
    )
    best = [Entry(m, c.flags[len(request.config) :]) for m, c in chosen.items()]
    return dataclasses.replace(request, entries=tuple(best))


def _check_elsewhere(arguments: list[str], on_cpu: bool) -> list[dict[str, Any]]:
    """Call `check` in its own process: this one must not take the devices."""
    command = [sys.executable, "-m", "acco_jax.compare", *arguments]
    environment = network.environment() if on_cpu else None
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        if errors:  # other libraries may have a last word after it
            raise ValueError(errors[-1].removeprefix("error: "))
        raise ValueError(f"the check of the methods failed: {done.stderr}")
    lengths: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return lengths


def _check_folders(request: ComparisonRequest) -> None:
    """Raise a ValueError if folders of the other seeds hold runs of other configs."""
    for entry in request.entries:
        first, *seeds = request.seed_numbers
        path = request.folder(entry, first) / "config.json"
        if request.sweep and not path.exists():
            continue  # its runs reject folders of other runs
        config = read_object(path)
        for seed in seeds:
            folder = request.folder(entry, seed)
            if not (folder / "config.json").exists():
                continue
            old = read_object(folder / "config.json")
            if field := differing_field(old, config | {"seed": seed}):
                raise ValueError(
                    f"workdir {folder} belongs to a run with {field}: use another "
                    "workdir, or the same config."
                )


def _report(request: ComparisonRequest) -> str:
    runs = [
        results.read(request.folder(entry, seed), entry.name, seed)
        for entry in request.entries
        for seed in request.seed_numbers
        if results.finished(request.folder(entry, seed))
    ]
    if not runs:
        raise pool.RunFailed("every run has failed: see the errors above.")
    return results.write(runs, request.workdir)
