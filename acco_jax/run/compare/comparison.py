"""Comparison of methods and seeds, each an ordinary run in its own process."""

import contextlib
import dataclasses
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from absl import logging
from ml_collections import ConfigDict

import acco_jax
from acco_jax.command import devices, exits, heartbeat, program_store
from acco_jax.command.files import read_object, write_whole
from acco_jax.run.compare import network, pool, results, tuning
from acco_jax.run.compare.tuning import Candidate
from acco_jax.run.config import fields, parsing
from acco_jax.run.config.identity import differing_field
from acco_jax.run.observe import metrics

CHOSEN = ("method", "method_options", "domains", "first_half")  # by a run of auto
TUNING = 1_000  # seeds after a comparison's first one, those that tune begin
LIMITS = ("spike", "drop_nonfinite", "most_dropped_in_a_row")  # end one as diverged
LINK = "link.json"  # of the workdir: how the processes of its runs are joined
RUNS = ("*/seed-*", f"{tuning.FOLDER}/*/*/seed-*")  # of any comparison in the workdir


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
        """Return the flags of a method's runs, with acco's smallest first half.

        Where a run would time several, all seeds then compute the same, whatever else
        the machine does. On a link of its own each run chooses.
        """
        given = [*self.config, *entry.flags]
        config = parsing.config_of(given)
        chosen = config.get("first_half") != "auto" or config.method == "auto"
        if self.rate is not None or chosen:
            return given
        first = next(iter(fields.first_halves(config, 2)), 0)
        if not 0 < first < config.microbatches_per_step:
            return given
        return [*given, f"--config.first_half={first}"]

    def folder(self, entry: Entry, seed: int) -> Path:
        return self.workdir / entry.name / f"seed-{seed}"

    @property
    def link(self) -> dict[str, Any]:
        """Return the processes of each run and the rate of their link, for `LINK`."""
        mbit = None if self.rate is None else network.parse(self.rate)
        return {"mbit": mbit, "processes": self.processes}

    @property
    def seed_numbers(self) -> range:
        first = parsing.config_of(list(self.config)).seed
        return range(first, first + self.seeds)

    @property
    def tuning_seeds(self) -> range:
        """Return seeds that stay the same with more of the comparison's."""
        first = self.seed_numbers.start + max(TUNING, self.seeds)
        return range(first, first + self.tune_seeds)

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
    """Check and build a run of every method, in this process; no run is recorded.

    Returns:
      The fields of a `tuning.Length` and the workers, for each candidate of the sweep;
      without a sweep, for one run of each method.

    Raises:
      ValueError: with the first method that cannot run.
    """
    _check_link(request)
    first = parsing.config_of(list(request.config))
    total = request.processes * (first.get("devices") or 1)
    several = request.rate is not None
    devices.choose_platform(
        total if several else first.get("devices"), several_processes=False
    )
    program_store.keep_programs()
    # slow, and only now may anything touch devices
    from acco_jax.run import preparation, trials
    from acco_jax.run.state.workdir import held

    lengths = []
    for c in request.candidates:
        entry, seeds = Entry(c.method, c.flags), request.seed_numbers
        folders = [request.folder(entry, seed) for seed in seeds]
        if c.point:
            seeds = request.tuning_seeds
            folders = [tuning.folder_of(request.workdir, c, seed) for seed in seeds]
        folder, seed = folders[0], seeds[0]
        try:
            flags = [*request.flags(entry), f"--config.seed={seed}"]
            config = parsing.config_of(flags)
            preparation.check(config)
            if config.method == "auto" and request.budget:
                raise ValueError(
                    f"--budget={request.budget} ends runs early, at calls of a known "
                    "method: name methods instead of auto, or leave it out."
                )
            for other, number in zip(folders, seeds, strict=True):
                again = [*request.flags(entry), f"--config.seed={number}"]
                _check_folder(other, parsing.config_of(again))
            begun = (folder / "config.json").exists()
            if config.method == "auto" and not begun:
                config.method = "zero1"  # each run chooses: this one is always allowed
            config = trials.with_method(config, folder)
            with tempfile.TemporaryDirectory() as empty:
                # a living run's checkpoints are its own, and a new folder stays unmade
                own = begun and not held(folder)
                experiment = preparation.build(config, folder if own else Path(empty))
            _check_workers(folders, experiment.workers)
        except (ValueError, OSError) as error:
            at = f" at {c.name}" if c.point else ""
            raise ValueError(f"{c.method}{at}: {error}") from error
        lengths.append(_length(experiment))
    return lengths


def _most(experiment: Any) -> int:
    """Return the most microbatches of a worker in a half-round, on average."""
    varying = experiment.varying
    if isinstance(varying, acco_jax.Adaptive):
        return varying.most
    grows = isinstance(varying, acco_jax.Balanced) and varying.grows
    return varying.most if grows else experiment.microbatches


def _length(experiment: Any) -> dict[str, Any]:
    """Return the fields of a `tuning.Length`, and the workers, of an `Experiment`."""
    e, config = experiment, experiment.config
    calls, every = {}, config.eval_every
    for step in (*range(every, config.steps, every), config.steps):
        with contextlib.suppress(ValueError):  # within a round of a local method
            calls[step] = e.tx.calls(step)
    return {
        "steps": config.steps,
        "tokens": e.tokens * e.total_calls * _most(e) // e.microbatches,
        "calls": calls,
        "limits": json.dumps([config.get(name) for name in LIMITS], default=dict),
        "workers": e.workers,
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
    lengths = _check_elsewhere(checking, slots[0], on_cpu=request.rate is not None)
    request.workdir.mkdir(parents=True, exist_ok=True)
    write_whole(request.workdir / LINK, json.dumps(request.link) + "\n")
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
        codes = runs.run(tasks)
    lacking = [task for task in tasks if not results.finished(task.folder)]
    diverged = [t.name for t in lacking if codes.get(t) == exits.DIVERGED]
    failed = [t.name for t in lacking if t.name not in diverged]
    table, problems = _report(request, diverged), []
    if failed:
        again = "repeat the command to try again"
        problems.append(f"no result of {', '.join(failed)}: {again}")
    if diverged:
        problems.append(f"diverged: {', '.join(diverged)}")
    if problems:
        raise pool.RunFailed(
            f"{'; '.join(problems)} (see the errors above); table.md has the others."
        )
    return table


def _tuned(
    request: ComparisonRequest, lengths: list[dict[str, Any]], runs: pool.Pool
) -> ComparisonRequest:
    """Return the request with each method at its own best point."""
    found = request.candidates
    own = [tuple(request.flags(Entry(c.method, c.flags))) for c in found]
    full = [dataclasses.replace(c, flags=f) for c, f in zip(found, own, strict=True)]
    known = {
        c: tuning.Length(
            length["steps"],
            length["tokens"],
            {int(k): v for k, v in length["calls"].items()},
            length["limits"],
        )
        for c, length in zip(full, lengths, strict=True)
    }
    chosen = tuning.tune(
        full, known, request.tuning_seeds, request.budget, request.workdir, runs
    )
    workers = {c: n["workers"] for c, n in zip(full, lengths, strict=True)}
    for m, c in chosen.items():
        entry = Entry(m, c.flags)
        folders = [request.folder(entry, seed) for seed in request.seed_numbers]
        _check_workers(folders, workers[c])
    best = [Entry(m, c.flags[len(request.config) :]) for m, c in chosen.items()]
    return dataclasses.replace(request, entries=tuple(best))


def _check_elsewhere(
    arguments: list[str], slot: pool.Slot, *, on_cpu: bool
) -> list[dict[str, Any]]:
    """Call `check` in its own process: this one must not take the devices.

    It gets the environment of a run in the slot, and so as many devices.
    """
    command = [sys.executable, "-m", "acco_jax.compare", *arguments]
    inherited = network.environment() if on_cpu else os.environ
    environment = {**inherited, **slot.environment}
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        preexec_fn=functools.partial(heartbeat.die_with_parent, signal.SIGTERM),
    )
    if done.returncode:
        lines = done.stderr.splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        if errors and done.returncode == exits.REFUSED:
            # other libraries may have a last word after it
            raise ValueError(errors[-1].removeprefix("error: "))
        raise exits.Failed(f"the check of the methods failed: {done.stderr.strip()}")
    lengths: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return lengths


def _check_folders(request: ComparisonRequest) -> None:
    """Raise a ValueError if the folder of a run holds one of another config."""
    for entry in request.entries:
        for seed in request.seed_numbers:
            flags = [*request.flags(entry), f"--config.seed={seed}"]
            _check_folder(request.folder(entry, seed), parsing.config_of(flags))


def _check_folder(folder: Path, config: ConfigDict) -> None:
    """Raise a ValueError if a folder holds a run of another config.

    A run that has begun also keeps its `eval_batches`: losses at evaluations are
    compared.
    """
    path, new = folder / "config.json", json.loads(config.to_json_best_effort())
    if not path.exists():
        return
    old = read_object(path)
    if config.method == "auto":
        if old.get("method") == "acco" and config.first_half == "auto":
            new = json.loads(fields.with_quarters(config).to_json_best_effort())
        new = {name: value for name, value in new.items() if name not in CHOSEN}
    batches = new["eval_batches"]
    field = differing_field(old, old | new)
    if _begun(folder) and (was := old.get("eval_batches", batches)) != batches:
        field = field or f"eval_batches={was!r:.60}, not {batches}"
    if field:
        raise ValueError(
            f"workdir {folder} belongs to a run with {field}: use another workdir, or "
            "move that one away."
        )


def _begun(folder: Path) -> bool:
    """Return whether a run has trained in a folder, to its end or not."""
    return (folder / metrics.FILE).exists()


def _check_workers(folders: list[Path], workers: int) -> None:
    """Raise a ValueError if a run began with the batch of other workers."""
    for folder in filter(_begun, folders):
        old = read_object(folder / "config.json").get("workers", workers)
        if old != workers:
            raise ValueError(
                f"workdir {folder} has a run of workers={old!r:.60}, not {workers}: "
                "use another workdir, or devices for as many workers."
            )


def _check_link(request: ComparisonRequest) -> None:
    """Raise a ValueError if the workdir has runs over another link."""
    new, path = request.link, request.workdir / LINK
    if not path.exists():
        return
    old = read_object(path)
    folders = [f for p in RUNS for f in request.workdir.glob(p)]
    for name, flag in (("mbit", "--network"), ("processes", "--processes")):
        if old.get(name) != new[name] and any(map(_begun, folders)):
            raise ValueError(
                f"workdir {request.workdir} has runs with {name}="
                f"{old.get(name)!r:.60} ({flag}), not {new[name]}: use another workdir."
            )


def _report(request: ComparisonRequest, diverged: list[str]) -> str:
    runs = [
        results.read(request.folder(entry, seed), entry.name, seed)
        for entry in request.entries
        for seed in request.seed_numbers
        if results.finished(request.folder(entry, seed))
    ]
    if not runs:
        raise pool.RunFailed("every run has failed: see the errors above.")
    return results.write(runs, request.workdir, diverged)
