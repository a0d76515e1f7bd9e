"""Compares methods and seeds, each an ordinary run in a process of its own."""

import contextlib
import dataclasses
import functools
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from absl import logging

from acco_jax.runner import (
    commands,
    devices,
    exits,
    heartbeat,
    network,
    results,
    signals,
)
from acco_jax.runner.files import read_object
from acco_jax.runner.identity import differing_field


class RunFailed(Exception):
    """Some runs have no result; those of the others are written."""


Start = Callable[[list[str]], list[subprocess.Popen]]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A method to compare."""

    name: str  # as written; also of its folder and in the table
    flags: tuple[str, ...]  # that make a run one of this method


@dataclasses.dataclass(frozen=True)
class Request:
    """What to compare."""

    config: tuple[str, ...]  # flags that say the experiment
    entries: tuple[Entry, ...]
    workdir: Path  # of all runs and the results
    seeds: int  # of each method
    rate: str | None = None  # of the link between processes, for `network.parse`
    processes: int = 1  # of each run

    def flags(self, entry: Entry) -> list[str]:
        return [*self.config, *entry.flags]

    def folder(self, entry: Entry, seed: int) -> Path:
        return self.workdir / entry.name / f"seed-{seed}"

    @property
    def seed_numbers(self) -> range:
        first = commands.config_of(list(self.config)).seed
        return range(first, first + self.seeds)


def parse(text: str) -> tuple[Entry, ...]:
    """Parses methods as the command line has them: 'acco,dpu(warmup_steps=40)'.

    In parentheses: arguments of the method, or config.FIELD=VALUE.

    Raises:
      ValueError: in one line, what is wrong.
    """
    names = _split(text.replace(" ", ""))
    entries = tuple(map(_entry, names))
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"--methods names {name} twice: give it once.")
    return entries


def _split(text: str) -> list[str]:
    """Splits at the commas outside of parentheses."""
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


def check(request: Request) -> None:
    """Prepares a run of every method, here, as its own process would.

    Raises:
      ValueError: in one line that names the method, the first that cannot run.
    """
    if request.rate is not None:
        network.parse(request.rate)
    first = commands.config_of(list(request.config))
    total = request.processes * (first.get("devices") or 1)
    several = request.rate is not None
    devices.choose_platform(
        total if several else first.get("devices"), several_processes=False
    )
    # slow, and only now may anything touch devices
    from acco_jax.runner import preparation

    for entry in request.entries:
        folder = request.folder(entry, request.seed_numbers[0])
        try:
            preparation.prepare(commands.config_of(request.flags(entry)), folder)
        except (ValueError, OSError) as error:
            raise ValueError(f"{entry.name}: {error}") from error


def compare(request: Request, checking: list[str]) -> str:
    """Runs what is not finished, writes the results, and returns the table.

    The arguments `checking` make `python -m acco_jax.compare` only `check`.

    Raises:
      ValueError: before the first run, what cannot work.
      RunFailed: after the last one, which runs have no result.
      Stopped: told to stop; the runs so far have saved what they had.
    """
    if request.rate is not None:
        network.parse(request.rate)
        if reason := network.why_not():
            raise ValueError(f"--network cannot shape a link: {reason}")
    _check_elsewhere(checking, request.rate is not None)
    _check_folders(request)
    failed = []
    with _starting(request) as start, _passing_signals() as wait:
        for seed in request.seed_numbers:
            for entry in request.entries:
                folder = request.folder(entry, seed)
                if results.finished(folder):
                    logging.info("%s, seed %d: finished before", entry.name, seed)
                    continue
                logging.info("%s, seed %d", entry.name, seed)
                flags = [f"--config.seed={seed}", f"--workdir={folder}"]
                wait(start([*request.flags(entry), *flags, "--time_gradients"]))
                if not results.finished(folder):
                    failed.append(f"{entry.name}/seed-{seed}")
    table = _report(request)
    if failed:
        raise RunFailed(
            f"no result of {', '.join(failed)} (see the errors above): repeat the "
            "command to try again; table.md has the others."
        )
    return table


def _check_elsewhere(arguments: list[str], on_cpu: bool) -> None:
    """Calls `check` in a process of its own: this one must not take the devices."""
    command = [sys.executable, "-m", "acco_jax.compare", *arguments]
    environment = network.environment() if on_cpu else None
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        lines = done.stderr.splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        if errors:  # other libraries may have a last word after it
            raise ValueError(errors[-1].removeprefix("error: "))
        raise ValueError(f"the check of the methods failed: {done.stderr}")


def _check_folders(request: Request) -> None:
    """Refuses folders of the other seeds that hold runs of other configs."""
    for entry in request.entries:
        first, *seeds = request.seed_numbers
        path = request.folder(entry, first) / "config.json"
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


def _report(request: Request) -> str:
    runs = [
        results.read(request.folder(entry, seed), entry.name, seed)
        for entry in request.entries
        for seed in request.seed_numbers
        if results.finished(request.folder(entry, seed))
    ]
    if not runs:
        raise RunFailed("every run has failed: see the errors above.")
    return results.write(runs, request.workdir)


@contextlib.contextmanager
def _starting(request: Request) -> Iterator[Start]:
    """Yields what starts a run's processes, on a shaped network if asked for."""
    command = [sys.executable, "-m", "acco_jax.train"]
    if request.rate is None:
        yield lambda arguments: [_popen([*command, *arguments])]
        return
    with network.joined(request.processes, network.parse(request.rate)) as net:
        flags = [f"--coordinator={net.address(0)}:9911"]
        flags += [f"--processes={request.processes}"]

        def start(arguments: list[str]) -> list[subprocess.Popen]:
            together = [*command, *arguments, *flags]
            return [
                _popen(
                    net.command(i, [*together, f"--process={i}"]),
                    env=network.environment(),
                )
                for i in range(request.processes)
            ]

        yield start


def _popen(command: list[str], **options: Any) -> subprocess.Popen:
    """Starts a process that stops when this one dies, and not by the terminal."""
    return subprocess.Popen(
        command,
        stdout=sys.stderr,  # gloo prints: the table is alone on stdout
        preexec_fn=functools.partial(heartbeat.die_with_parent, signal.SIGTERM),
        start_new_session=True,
        **options,
    )


@contextlib.contextmanager
def _passing_signals() -> Iterator[Callable[[list[subprocess.Popen]], None]]:
    """Yields wait(processes), which passes on signals while they run.

    SIGINT and SIGTERM reach the run as SIGTERM, so that it stops with a checkpoint; a
    second SIGINT stops it at once. Then nothing more is started.

    Raises:
      Stopped: says how to go on.
    """
    received: list[int] = []
    running: list[subprocess.Popen] = []

    def handle(number: int, frame: Any) -> None:
        received.append(number)
        for process in running:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM if len(received) == 1 else number)

    def wait(processes: list[subprocess.Popen]) -> None:
        running[:] = processes
        for process in processes:
            # the others wait in vain for one that failed
            if process.wait() not in (exits.FINISHED, exits.STOPPED):
                for other in processes:
                    other.terminate()
        if received:
            raise exits.Stopped("stopped: the same command continues.")

    with signals.handler(handle):
        yield wait
