"""Lock and checks of a workdir: one run at a time, one experiment."""

import contextlib
import hashlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging
from etils import epath

from acco_jax.command.files import is_remote, read_object
from acco_jax.core import small_files
from acco_jax.run.state import processes

LOCK = "lock.json"
BEAT_SECONDS = 10.0  # between signs of life in the lock
STALE_SECONDS = 60.0  # without one, a process on another host counts as dead
DYING_SECONDS = 10.0  # that an earlier attempt on this host may take to end
TAKEOVER_SECONDS = 5.0  # that another process may take for its takeover
PROBE_SECONDS = 30.0  # until a file of process 0 must be seen by the others


def own(workdir: Path, checkpoints: Path | epath.Path) -> list[Path]:
    """Return the folders that a run locks: its workdir and its checkpoints' folder.

    One lock serves both if the checkpoints lie in the workdir. A remote folder has
    none.
    """
    folder = Path(checkpoints).resolve()
    inside = workdir.resolve() in (folder, *folder.parents)
    return [workdir] if inside or is_remote(checkpoints) else [workdir, folder]


@contextlib.contextmanager
def claimed(workdir: Path, patience: float = 0.0) -> Iterator[None]:
    """Hold a workdir, or a folder of checkpoints, for this run, through process 0.

    The lock has host, process and when that process started. It is stale, and taken
    over, when that process is gone, or gives no sign of life from another host or
    container.

    Args:
      workdir: of the run.
      patience: seconds to wait until the lock is stale, as it may be this run's own
        from an earlier attempt, whose host is lost.

    Raises:
      ValueError: if another run holds it.
    """
    path, mine, refusal = workdir / LOCK, _identity(), ""
    if jax.process_index() == 0:
        workdir.mkdir(parents=True, exist_ok=True)
        refusal = _take(path, mine, time.monotonic() + patience)
    if processes.from_process_0(np.bool_(refusal)) and jax.process_index():
        refusal = f"process 0 rejects workdir {workdir}: see its line."
    if refusal:
        raise ValueError(refusal)
    if jax.process_index():
        yield
        return
    done = threading.Event()
    beat = threading.Thread(target=_beat, args=(path, done), daemon=True)
    beat.start()
    try:
        yield
    finally:
        done.set()
        beat.join()
        with contextlib.suppress(ValueError):
            if read_object(path) == mine:
                path.unlink()


def _identity() -> dict[str, Any]:
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "pid": pid,
        "started": _started(pid),
        "processes": _numbering(),
    }


def _numbering() -> str | None:
    """Return what numbers this process: boot and PID namespace; None if unknown.

    Containers may share a host name, but each has its own namespace.
    """
    if sys.platform != "linux":
        return socket.gethostname()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _started(pid: int) -> str | None:
    """Return when a process of this host started; None if there is no such process.

    One that has ended is not there, even if nobody has asked how (a zombie).
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        state, *fields = stat.rpartition(")")[2].split()
        return None if state in "ZX" else fields[18]  # clock ticks after the boot
    except OSError:
        pass
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return None
    except PermissionError:
        pass
    return "unknown"


def _take(path: Path, mine: dict[str, Any], deadline: float) -> str:
    """Write the lock, replacing only a stale one; return why not, or ''."""
    begun = time.monotonic()
    patience = begun + TAKEOVER_SECONDS
    while not _acquire(path, mine):
        held, now = _content(path), time.monotonic()
        left = held is None or _is_stale(path, held)
        if now < patience and left:  # just now, or another process takes it over
            time.sleep(0.01)
        elif now < deadline and (now < begun + DYING_SECONDS or not _lives(held)):
            time.sleep(1.0)
        else:
            text = " ".join((held or b"").decode(errors="replace").split())[:200]
            return (
                f"another run works in {path.parent} ({text}): use another workdir "
                f"or, if that run is dead, remove {path}."
            )
    return ""


def _acquire(path: Path, mine: dict[str, Any]) -> bool:
    """Write a lock, if nobody holds it or it is stale; return whether it is ours.

    Several processes may find the same lock stale. One of them makes the claim to it, a
    lock whose name has the stale lock's digest. The claim's rename replaces the stale
    lock and removes the claim at once. Who makes a claim later sees another lock.
    """
    if _create(path, mine):
        return True
    stale = _content(path)
    if stale is None or not _is_stale(path, stale):
        return False
    claim = path.with_name(f"{path.name}.{hashlib.sha256(stale).hexdigest()[:16]}")
    if not _acquire(claim, mine):
        return False
    if _content(path) != stale:
        claim.unlink(missing_ok=True)
        return False
    logging.info("%s is of a run that is gone: taken over", path)
    with contextlib.suppress(FileNotFoundError):
        claim.replace(path)
    return _content(path) == json.dumps(mine).encode()


def _create(path: Path, mine: dict[str, Any]) -> bool:
    """Write a lock, whole at once, if there is none; return whether it was written."""
    if path.exists():
        return False
    whole = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
    whole.write_text(json.dumps(mine))
    try:
        os.link(whole, path)
        return True
    except FileExistsError:  # on NFS also if an earlier answer was lost
        return whole.stat().st_nlink == 2
    except OSError:  # a file system without hard links
        with contextlib.suppress(FileExistsError), path.open("x") as file:
            file.write(whole.read_text())
        return _content(path) == whole.read_bytes()
    finally:
        whole.unlink()


def _content(path: Path) -> bytes | None:
    """Return what a lock holds; None if there is none."""
    try:
        return small_files.content(path)
    except FileNotFoundError:
        return None


def held(folder: Path) -> bool | None:
    """Return whether a process that lives holds a folder; None if it has no lock.

    Nothing is written.
    """
    path = folder / LOCK
    try:
        gone = _is_gone(small_files.content(path))
        age = time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return None
    return age <= STALE_SECONDS if gone is None else not gone


def _is_gone(held: bytes) -> bool | None:
    """Return whether a lock's process has ended; None if it is not of this host."""
    try:
        match json.loads(held):
            case {"processes": str(numbering), "pid": int(pid), "started": started} if (
                numbering == _numbering()
            ):
                return _started(pid) != started
    except (ValueError, RecursionError):  # a killed process left it cut
        pass
    return None


def _lives(held: bytes | None) -> bool:
    """Return whether a lock's process is seen to live, on this host."""
    return held is not None and _is_gone(held) is False


def _is_stale(path: Path, held: bytes) -> bool:
    if (gone := _is_gone(held)) is not None:
        return gone
    # a file's age is measured by the file system's own clock
    probe = path.with_name(f"{LOCK}.{secrets.token_hex(8)}.clock")
    try:
        probe.touch()
        return probe.stat().st_mtime - path.stat().st_mtime > STALE_SECONDS
    except FileNotFoundError:
        return False  # it was left just now
    finally:
        probe.unlink(missing_ok=True)


def is_new(folder: Path) -> bool:
    """Return whether a folder has nothing but its lock."""
    return all(path.name.startswith(LOCK) for path in folder.iterdir())


def check_held(*folders: Path) -> None:
    """Raise an OSError if another process has taken over a folder.

    A process that was stopped for long, with its whole machine, may wake up when the
    run goes on elsewhere.

    Raises:
      OSError: with the new holder.
    """
    for folder in folders:
        try:
            holder = read_object(folder / LOCK)
        except ValueError:  # it is not held, or just being taken
            continue
        mine = _identity()
        if mine["processes"] is not None:  # tells the machine, which may be renamed
            mine["host"] = holder.get("host")
        if holder != mine:
            raise OSError(f"another run has taken over {folder} ({json.dumps(holder)})")


def _beat(path: Path, done: threading.Event) -> None:
    while not done.wait(BEAT_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(path)


def check_shared(workdir: Path, called: str = "workdir") -> None:
    """Raise a ValueError for a folder that is remote or not shared by all processes.

    Process 0 writes a file, and each of the others looks for it.

    Raises:
      ValueError: on all processes, with the processes that do not see it, or with why
        process 0 cannot write it.
    """
    if is_remote(workdir):
        raise ValueError(
            f"--workdir={workdir} is remote, and its lock and metrics need a file "
            "system: name a folder here, and the remote one in --config.checkpoints."
        )
    if jax.process_count() == 1:
        return
    name = processes.from_process_0(np.uint32(secrets.randbits(32)))
    path = workdir / f"probe-{int(name):08x}"
    failure = ""
    if jax.process_index() == 0:
        try:
            workdir.mkdir(parents=True, exist_ok=True)
            path.touch()
        except OSError as error:
            failure = str(error)
    if failure := processes.bytes_from(0, failure.encode()).decode():
        raise ValueError(
            f"process 0 cannot write to {called} {workdir}: {failure}; give a folder "
            "that the processes of all hosts may write to."
        )
    limit = time.monotonic() + PROBE_SECONDS
    while not (seen := path.exists()) and time.monotonic() < limit:
        with contextlib.suppress(OSError):  # makes network file systems look again
            os.listdir(workdir)
        time.sleep(0.5)
    everyone = processes.gathered(np.bool_(seen)).tolist()
    if jax.process_index() == 0:
        path.unlink(missing_ok=True)
    blind = [i for i, found in enumerate(everyone) if not found]
    if blind:
        raise ValueError(
            f"{called} {workdir} is not one folder for all processes: process "
            f"{', '.join(map(str, blind))} does not see what process 0 writes there; "
            "give a folder on a file system that all hosts share."
        )
