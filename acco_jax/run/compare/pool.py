"""Runs of `acco_jax.train`, each in its own processes, several at once."""

import contextlib
import dataclasses
import functools
import itertools
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from acco_jax.command import exits, heartbeat, signals
from acco_jax.run.compare import network

RUN_BYTES = 2 << 30  # host memory per run when several run at once
POLL_SECONDS = 0.05
_CGROUP = Path("/sys/fs/cgroup")  # a container's own


class RunFailed(exits.Failed):
    """Some runs have no result; the results of the others are written."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A run, or a part of one."""

    name: str  # in messages
    folder: Path  # its workdir
    flags: tuple[str, ...]  # of the command, beside --workdir


class Slot(NamedTuple):
    """Part of the machine for one run."""

    environment: Mapping[str, str] = {}
    cores: frozenset[int] | None = None  # None: all


Start = Callable[[Task, Slot], list[subprocess.Popen]]


def slots(at_once: int) -> list[Slot]:
    """Divide this machine into slots of one run, as many as fit if `at_once` is 0.

    That is one per NVIDIA GPU; without a GPU one per core, each with `RUN_BYTES`
    of the free memory.

    Raises:
      ValueError: if there are fewer GPUs or cores, or this is not Linux.
    """
    if at_once == 1:
        return [Slot()]
    if sys.platform != "linux":
        raise ValueError(
            f"--at_once={at_once} divides cores or GPUs as Linux does: leave it out."
        )
    gpus, cores = _gpus(), sorted(os.sched_getaffinity(0))
    fit = len(gpus) or max(min(len(cores), _free_bytes() // RUN_BYTES), 1)
    most, what = (len(gpus), "GPUs") if gpus else (len(cores), "cores")
    if at_once > most:
        raise ValueError(
            f"--at_once is {at_once}, and this machine has {most} {what}: give at most "
            "that, or 0, as many as fit."
        )
    count = at_once or fit
    if gpus:
        return [Slot({"CUDA_VISIBLE_DEVICES": gpu}) for gpu in gpus[:count]]
    return [Slot(cores=frozenset(cores[i::count])) for i in range(count)]


def _gpus() -> list[str]:
    """Return CUDA_VISIBLE_DEVICES' names of this process's NVIDIA GPUs.

    CUDA counts from 0 whatever the devices' files are called, and takes the names
    before the first that it does not know, as -1.
    """
    there = len(list(Path("/dev").glob("nvidia[0-9]*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not there or os.environ.get("JAX_PLATFORMS") == "cpu":
        return []
    if visible is None:
        return list(map(str, range(there)))
    names = (name.strip() for name in visible.split(","))
    return list(itertools.takewhile(lambda name: name not in ("", "-1"), names))


def _free_bytes() -> int:
    """Return the memory that can be taken without swapping, in bytes.

    A container's limit counts, too: its files in memory can go.
    """
    with open("/proc/meminfo") as lines:
        fields = dict(line.split(":") for line in lines)
    free = int(fields["MemAvailable"].split()[0]) * 1024
    with contextlib.suppress(OSError, ValueError):  # no container, or its limit is max
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        rows = map(str.split, (_CGROUP / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(dict(rows).get("inactive_file", 0)))
    return free


class Pool:
    """Runner of tasks, one in each slot at a time."""

    def __init__(self, start: Start, slots: Sequence[Slot]) -> None:
        self._start, self._slots = start, slots
        self._running: dict[int, tuple[Task, list[subprocess.Popen]]] = {}
        self._received = signals.Received()

    def run(self, tasks: Sequence[Task]) -> dict[Task, int]:
        """Run all tasks, in this order.

        Returns:
          The exit code of each task. For several processes it is that of the first that
          failed by itself, else the first that is not 0.

        Raises:
          Stopped: if a signal came, with the runs that could not save their state.
        """
        queue, codes = list(tasks), dict[Task, int]()
        told = self._received.numbers
        while (queue and not told) or self._running:
            for k, slot in enumerate(self._slots):
                if queue and not told and k not in self._running:
                    task = queue.pop(0)
                    processes = self._start(task, slot)
                    self._running[k] = task, processes
                    if told:  # while it started
                        _send(processes, signal.SIGTERM)
            for k, (task, processes) in list(self._running.items()):
                if (code := _ended(processes)) is not None:
                    codes[task] = code
                    del self._running[k]
            time.sleep(POLL_SECONDS)
        if told:
            late = "; ".join(_without_result(codes))
            from_ = f", {late} from an earlier checkpoint" if late else ""
            raise exits.Stopped(f"stopped: the same command continues{from_}.")
        return codes

    def signal(self, number: int, frame: types.FrameType | None) -> None:
        """Pass on a signal: the first as SIGTERM, later ones unchanged."""
        if not self._received.add(number):
            return
        first = len(self._received.numbers) == 1
        for _, processes in self._running.values():
            _send(processes, signal.SIGTERM if first else number)


def _send(processes: list[subprocess.Popen], number: int) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)


def _ended(processes: list[subprocess.Popen]) -> int | None:
    """Return the exit code of processes that belong together, None while one runs.

    If one fails, the others would wait in vain: they are told to stop, and its code
    counts.
    """
    codes = [p.poll() for p in processes]
    if any(c not in (None, exits.FINISHED, exits.STOPPED) for c in codes):
        for process in processes:
            if process.poll() is None:
                process.terminate()
    if None in codes:
        return None
    found = [c for c in codes if c]
    own = [c for c in found if c not in (exits.STOPPED, -signal.SIGTERM)]
    return next(iter(own + found), exits.FINISHED)


def raise_failed(codes: Mapping[Task, int]) -> None:
    """Raise a RunFailed that names the tasks that neither ended nor diverged."""
    if failed := _without_result(codes):
        raise RunFailed(
            f"no result of {'; '.join(failed)} (see the errors above): repeat the "
            "command to try again."
        )


def _without_result(codes: Mapping[Task, int]) -> list[str]:
    """Return the names of tasks that neither ended, nor stopped, nor diverged."""
    good = exits.FINISHED, exits.STOPPED, exits.DIVERGED
    return [task.name for task, code in codes.items() if code not in good]


@contextlib.contextmanager
def opened(
    slots: Sequence[Slot], rate: str | None = None, processes: int = 1
) -> Iterator[Pool]:
    """Yield a pool; signals to this process reach its runs as SIGTERM.

    Args:
      slots: of the machine.
      rate: of the link between a run's processes, for `network.parse`; None: each run
        is one process.
      processes: of each run, with a rate.
    """
    with _starting(rate, processes) as start:
        pool = Pool(start, slots)
        with signals.handler(pool.signal):
            yield pool


@contextlib.contextmanager
def _starting(rate: str | None, processes: int) -> Iterator[Start]:
    """Yield a function that starts a run's processes, shaping a network if asked."""

    def command(task: Task) -> list[str]:
        train = [sys.executable, "-m", "acco_jax.train"]
        return [*train, *task.flags, f"--workdir={task.folder}"]

    if rate is None:
        yield lambda task, slot: [_popen(command(task), slot, os.environ)]
        return
    with network.joined(processes, network.parse(rate)) as net:
        meet = [f"--coordinator={net.address(0)}:9911", f"--processes={processes}"]

        def start(task: Task, slot: Slot) -> list[subprocess.Popen]:
            together = [*command(task), *meet]
            return [
                _popen(
                    net.command(i, [*together, f"--process={i}"]),
                    slot,
                    network.environment(),
                )
                for i in range(processes)
            ]

        yield start


def _popen(
    command: list[str], slot: Slot, environment: Mapping[str, str]
) -> subprocess.Popen:
    """Start a process that stops when this one dies, and not by the terminal."""
    return subprocess.Popen(
        command,
        stdout=sys.stderr,  # gloo prints: only the table is on stdout
        preexec_fn=functools.partial(_confine, slot),
        start_new_session=True,
        env={**environment, **slot.environment},
    )


def _confine(slot: Slot) -> None:
    """Set up a new process: its parent's death ends it, and it keeps to its cores."""
    heartbeat.die_with_parent(signal.SIGTERM)
    if slot.cores is not None:
        os.sched_setaffinity(0, slot.cores)
