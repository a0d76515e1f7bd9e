"""What benchmarks share: disturbed runs, their texts and bits; processes on a link."""

import contextlib
import functools
import json
import os
import pathlib
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from typing import Any, Self

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from acco_jax.command import heartbeat  # noqa: E402
from acco_jax.run.compare import network  # noqa: E402

# What no two runs share.
CLOCKS = ("seconds", "tokens_per_second", "goodput", "stragglers", "probes")

CONFIG = """
from acco_jax.run.config.fields import default_config

def get_config():
    c = default_config()
    c.update({fields!r})
    c.length, c.microbatch_size, c.log_every = 32, 2, 1
    # 'auto' goes by times, and need not choose the same in two runs
    c.first_half = c.microbatches_per_step // 2
    c.model.layers, c.model.heads, c.model.window = 2, 2, 16
    c.model.dtype = c.model.param_dtype = "float32"
    c.data.name, c.data.path = "text_folder", {texts!r}
    return c
"""

# In a process of its own; as NumPy arrays, whatever devices have saved them.
_HASH = """
import hashlib, pathlib, sys
import numpy as np, orbax.checkpoint as ocp
reader, folder = ocp.PyTreeCheckpointer(), pathlib.Path(sys.argv[1], "arrays")
names = reader.metadata(folder).item_metadata.tree
whole = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
arrays = reader.restore(folder, args=ocp.args.PyTreeRestore(restore_args=whole))
sha = hashlib.sha256()
for name in sorted(arrays):
    sha.update(name.encode() + np.asarray(arrays[name]).tobytes())
print(len(arrays), sha.hexdigest())
"""


@contextlib.contextmanager
def workplace(kept: pathlib.Path | None) -> Iterator[pathlib.Path]:
    """Yields the folder that everything goes to; without one, one that is removed."""
    with contextlib.ExitStack() as stack:
        folder = kept or stack.enter_context(tempfile.TemporaryDirectory())
        place = pathlib.Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        yield place


def texts(place: pathlib.Path) -> pathlib.Path:
    """Writes a folder of 60 documents, some 800 kB; returns it."""
    folder, draw = place / "texts", random.Random(0)
    folder.mkdir()
    words = ["while", "you", "accumulate", "gradients", "communicate", "them", "\n"]
    for i in range(60):
        (folder / f"{i}.txt").write_text(" ".join(draw.choices(words, k=2000)))
    return folder


def write_config(path: pathlib.Path, texts: pathlib.Path, **fields: Any) -> None:
    """Writes an experiment of a small model, with these fields, on a folder of texts.

    `fields` have the forms of a config's: {"model": {"width": 16}} is model.width.
    """
    path.write_text(CONFIG.format(fields=fields, texts=str(texts)))


def environment(place: pathlib.Path) -> dict[str, str]:
    """Returns that of runs: on CPU, with data and compiled programs in `place`."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": network.without_devices(os.environ.get("XLA_FLAGS", "")),
        "PYTHONPATH": str(ROOT),
        "ACCO_DATA_DIR": str(place / "data"),
        "JAX_COMPILATION_CACHE_DIR": str(place / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }


def command(
    config: pathlib.Path,
    workdir: pathlib.Path,
    *flags: str,
    limits: dict[str, float],
    process: int = 0,
    processes: int = 1,
    coordinator: str | None = None,
) -> list[str]:
    """Returns a command of a run under supervision, with these limits: see aimed.py."""
    program = [sys.executable, str(ROOT / "benchmarks" / "aimed.py")]
    job: dict[str, Any] = {"workdir": str(workdir), "limits": limits}
    trains = [*program, f"--config={config}", f"--workdir={workdir}", *flags]
    if processes > 1:
        among = {
            "process": process,
            "processes": processes,
            "coordinator": coordinator,
        }
        trains += [f"--{name}={value}" for name, value in among.items()]
        job |= among
    return [*program, "--supervise", json.dumps(job | {"command": trains})]


class Commands:
    """The commands of one run's processes on this machine; some may be gone."""

    def __init__(
        self,
        place: pathlib.Path,
        workdir: pathlib.Path,
        config: pathlib.Path,
        processes: int,
        limits: dict[str, float],
    ) -> None:
        self._place, self.workdir, self._config = place, workdir, config
        self._processes, self._limits = processes, limits
        with socket.socket() as free:
            free.bind(("localhost", 0))
            self._address = f"localhost:{free.getsockname()[1]}"
        self.running: dict[int, subprocess.Popen] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in list(self.running):
            self.kill(process)

    def log(self, process: int) -> pathlib.Path:
        return self._place / f"{self.workdir.name}-{process}.log"

    def start(self, process: int, *flags: str, prefix: Sequence[str] = ()) -> None:
        """Starts a process's command, after others that run what follows them."""
        arguments = command(
            self._config, self.workdir, *flags, limits=self._limits, process=process,
            processes=self._processes, coordinator=self._address,
        )  # fmt: skip
        with self.log(process).open("a") as log:
            self.running[process] = subprocess.Popen(
                [*prefix, *arguments], env=environment(self._place),
                stdout=log, stderr=log,
                preexec_fn=functools.partial(heartbeat.die_with_parent, signal.SIGKILL),
            )  # fmt: skip

    def kill(self, process: int) -> None:
        """Kills a command, and with it its process."""
        self.running[process].kill()
        self.running.pop(process).wait()

    def stop(self) -> None:
        """Has all save and end."""
        for one in self.running.values():
            one.send_signal(signal.SIGTERM)

    def wait(self, *codes: int, seconds: float = 900.0) -> None:
        """Waits for the ends of all commands.

        Raises:
          RuntimeError: one has another exit code than these.
        """
        for process, one in self.running.items():
            if (code := one.wait(seconds)) not in codes:
                raise RuntimeError(self._said(process, f"ended with {code}"))
        self.running.clear()

    def until(
        self, condition: Callable[[], bool], what: str, seconds: float = 900.0
    ) -> None:
        """Waits until a condition holds, or a command has ended.

        Raises:
          RuntimeError: one has ended, or it takes too long.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            for process, one in self.running.items():
                if one.poll() is not None:
                    text = f"ended with {one.returncode} before {what}"
                    raise RuntimeError(self._said(process, text))
            if time.monotonic() > deadline:
                raise RuntimeError(self._said(0, f"no {what} within {seconds:.0f} s"))
            time.sleep(0.1)

    def _said(self, process: int, what: str) -> str:
        tail = self.log(process).read_text()[-3000:]
        return f"{self.workdir.name}, process {process}: {what}: {tail}"


def rows(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the rows of a run's metrics, but one that is being written."""
    path, found = workdir / "metrics.jsonl", []
    if path.exists():
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found


def unclocked(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the rows of a run's metrics without what depends on the clock."""
    return [{k: v for k, v in r.items() if k not in CLOCKS} for r in rows(workdir)]


def last_checkpoint(workdir: pathlib.Path) -> int:
    """Returns the half-round of a run's last checkpoint; 0 if there is none."""
    names = [path.name for path in (workdir / "checkpoints").glob("*")]
    return max((int(name) for name in names if name.isdigit()), default=0)


def bits(workdir: pathlib.Path) -> str:
    """Returns the SHA-256 of all arrays in the last checkpoint, and how many there are.

    Raises:
      RuntimeError: they cannot be read.
    """
    folder = workdir / "checkpoints" / str(last_checkpoint(workdir))
    done = subprocess.run(
        [sys.executable, "-c", _HASH, folder],
        env=environment(workdir),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return done.stdout.strip()


# ---- processes on a shaped link


def answering() -> Callable[[Any], None]:
    """Returns what answers a parent with JSON; what else is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # gloo prints

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    return answer


class WorkerEnded(RuntimeError):
    """A process of `Workers` ended before it answered."""


class Workers:
    """Processes of one program on a network: a line to each, one of JSON from each."""

    def __init__(
        self,
        program: Sequence[str],
        spec: dict[str, Any],
        net: network.Network,
        logs: pathlib.Path,
        port: int = 9911,
    ) -> None:
        """Starts them.

        Args:
          program: its last argument will be `spec` in JSON, with "index", its own
            "address", and the first process's with the port, "coordinator".
          spec: has the number of "processes".
          net: their network.
          logs: the folder for what they print to stderr.
          port: of the coordinator.
        """
        self.set_rate = net.set_rate
        self.logs = [logs / f"{i}.log" for i in range(spec["processes"])]
        spec = {**spec, "coordinator": f"{net.address(0)}:{port}"}
        self.processes = [
            self._start(
                program, {**spec, "index": i, "address": net.address(i)}, net, log
            )
            for i, log in enumerate(self.logs)
        ]

    @staticmethod
    def _start(
        program: Sequence[str],
        spec: dict[str, Any],
        net: network.Network,
        log: pathlib.Path,
    ) -> Any:
        work = net.command(spec["index"], [*program, json.dumps(spec)])
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *work],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"),
            text=True, env={**network.environment(), "PYTHONPATH": str(ROOT)},
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for p in self.processes:
            p.kill()
        for p in self.processes:
            p.wait()

    def ask(self, line: str) -> list[Any]:
        """Sends a line to all processes; returns their answers, in their order.

        Raises:
          WorkerEnded: one has ended.
        """
        for p in self.processes:
            with contextlib.suppress(BrokenPipeError):
                p.stdin.write(line + "\n")
                p.stdin.flush()
        return self.answers(line)

    def answers(self, what: str) -> list[Any]:
        """Waits for a line from each process; returns them, in the processes' order.

        Args:
          what: they are doing, for the error.

        Raises:
          WorkerEnded: one has ended.
        """
        found: dict[int, Any] = {}
        waiting = {p.stdout: i for i, p in enumerate(self.processes)}
        while waiting:
            for out in connection.wait(list(waiting)):
                i = waiting.pop(out)
                text = out.readline()
                if not text:
                    tail = "".join(x.read_text()[-2000:] for x in self.logs)
                    raise WorkerEnded(f"worker {i} ended during {what!r}:\n{tail}")
                found[i] = json.loads(text)
        return [found[i] for i in sorted(found)]

    def cpu_seconds(self) -> float:
        """Returns the CPU seconds of all processes so far."""

        def of(pid: int) -> int:
            fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1]
            return sum(map(int, fields.split()[11:13]))

        return sum(of(p.pid) for p in self.processes) / os.sysconf("SC_CLK_TCK")


def end_on_signals() -> None:
    """Makes signals end the program in one line, after it has tidied up."""

    def end(number: int, _: Any) -> None:
        raise SystemExit(f"ended by {signal.Signals(number).name}")

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, end)


def busy_seconds() -> float:
    """Returns the CPU seconds of all programs so far, without the kernel's own work."""
    fields = pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()
    user, nice, system = map(int, fields[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def quotients(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """Returns median and quartiles of ratios, each within a repetition."""
    samples = [a / b for a, b in zip(above, below, strict=True)]
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return {"median": middle, "low": low, "high": high}
