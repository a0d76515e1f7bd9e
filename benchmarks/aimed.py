"""acco_jax.train, killed where an aim says; for soak.py and chaos.py.

    python benchmarks/aimed.py FLAGS OF acco_jax.train        the process that trains
    python benchmarks/aimed.py --supervise JSON               its command, of a Job

The folder SOAK_AIMS, if there is one, holds a file for each kill to come: its name says
where, the first process that gets there removes the file, and dies by SIGKILL.

Every process writes what it compiles into the compilation cache. On GPUs and TPUs all
find there what process 0 has written; on CPUs the process is in the cache's keys, so
that JAX, which lets process 0 alone write, has the others compile in every attempt.
"""

import contextlib
import json
import os
import pathlib
import random
import runpy
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def claimed(stage: str) -> bool:
    """Returns whether a kill is to come here: once, to whoever is first."""
    path = pathlib.Path(os.environ["SOAK_AIMS"], stage)
    with contextlib.suppress(FileNotFoundError):
        path.rename(path.with_suffix(".done"))
        return True
    return False


def here(stage: str) -> None:
    """Dies if a kill is to come here."""
    if claimed(stage):
        die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before(owner: Any, name: str, stage: str, seconds: float = 0.0) -> None:
    """Has a function begin with `here`, or call it up to so many seconds later."""
    original: Callable[..., Any] = getattr(owner, name)

    def wrapped(*args: Any, **options: Any) -> Any:
        if seconds:
            delay = random.uniform(0.0, seconds)
            threading.Timer(delay, here, [stage]).start()
        else:
            here(stage)
        return original(*args, **options)

    setattr(owner, name, wrapped)


def after(owner: Any, name: str, stage: str) -> None:
    original: Callable[..., Any] = getattr(owner, name)

    def wrapped(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        here(stage)
        return result

    setattr(owner, name, wrapped)


def arm() -> None:
    """Puts the places in."""
    import jax

    from acco_jax.command import heartbeat
    from acco_jax.run import evaluation, preparation
    from acco_jax.run.observe import metrics  # fmt: skip
    from acco_jax.run.state import checkpoints, copies, memory, neighbours

    before(preparation, "build", "starting")
    before(heartbeat, "reached", "half-round")
    jax.monitoring.register_event_listener(
        lambda event, **_: here("compiling") if "compile_requests" in event else None
    )
    batches = evaluation.held_out_batches

    def evaluating(*args: Any) -> Iterator[Any]:
        for number, batch in enumerate(batches(*args)):
            if number:
                here("evaluating")
            yield batch

    evaluation.held_out_batches = evaluating  # type: ignore[attr-defined]
    before(checkpoints.Checkpoints, "save", "saving", seconds=0.05)
    checksums = checkpoints._checksums

    def renamed(folder: Any, remote: bool) -> dict[str, int]:
        if (folder.parent / f"{folder.name}.saving").exists():  # of a save, not a check
            here("renamed")
        return checksums(folder, remote)

    checkpoints._checksums = renamed
    before(memory.MemoryCopies, "_write", "copying", seconds=0.01)
    before(copies, "write_rows", "unmarked")
    before(neighbours, "sent", "sending", seconds=0.01)
    write_copy = memory.MemoryCopies._write

    def losing(kept: memory.MemoryCopies, half_round: int, *rest: Any) -> float:
        seconds = write_copy(kept, half_round, *rest)
        if (own := kept._folder) is None:
            return seconds
        if claimed("flipped"):
            path = own / f"{half_round}.data"
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
            die()
        if claimed("host"):
            shutil.rmtree(own)
            die()
        if claimed("hosts"):
            assert kept._holder is not None
            other = f"host{kept._holder[jax.process_index()]}"
            theirs = memory.of_host(own.parents[1], kept._workdir / other)  # type: ignore[attr-defined]
            shutil.rmtree(own.parent)
            shutil.rmtree(theirs.parent, ignore_errors=True)
            die()
        return seconds

    memory.MemoryCopies._write = losing  # type: ignore[method-assign]
    after(checkpoints, "write_whole", "summed")
    before(checkpoints.Checkpoints, "_remove", "removing")
    after(checkpoints.Checkpoints, "save", "training on")
    write = metrics.Recorder._write

    def cut(recorder: metrics.Recorder, row: dict[str, Any]) -> None:
        if recorder._file.tell() and row["half_round"] % 3 == 0:
            recorder._file.write(json.dumps(row)[:20])
            recorder._file.flush()
            here("row")
            recorder._file.seek(recorder._file.tell() - 20)
            recorder._file.truncate()
        write(recorder, row)

    metrics.Recorder._write = cut  # type: ignore[method-assign]


def give_hosts() -> None:
    """Gives every process a host of its own, and a memory."""
    import jax

    from acco_jax.run.state import memory as copies

    host, opened = f"host{jax.process_index()}", copies._opened

    def own(place: pathlib.Path, workdir: pathlib.Path) -> pathlib.Path | None:
        return opened(place, workdir / host)

    socket.gethostname = lambda: host
    copies._opened, copies.of_host = own, opened  # type: ignore[attr-defined]


def keep_programs() -> None:
    """Has every process write into the compilation cache."""
    from jax._src import compiler, distributed

    write = compiler._cache_write

    def written(*args: Any) -> None:
        with mock.patch.object(distributed.global_state, "process_id", 0):
            write(*args)

    compiler._cache_write = written


def main() -> None:
    if sys.argv[1] == "--supervise":
        from acco_jax.run.supervise import meeting, supervisor

        job = json.loads(sys.argv[2])
        job |= {"workdir": pathlib.Path(job["workdir"])}
        job |= {"limits": meeting.Limits(**job["limits"])}
        sys.exit(supervisor.supervise(supervisor.Job(**job)))
    from acco_jax.command import devices

    connect = devices.connect

    def connected(*args: Any, **options: Any) -> None:
        connect(*args, **options)
        give_hosts()
        keep_programs()
        if "SOAK_AIMS" in os.environ:
            arm()

    devices.connect = connected
    runpy.run_module("acco_jax.train", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
