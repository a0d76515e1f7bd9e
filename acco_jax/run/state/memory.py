"""Copies of the newest states in this host's memory, from which a restart continues.

Each process keeps the shards that it holds as files of a file system in memory, which
outlive it: N.data has their bytes after half-round N, N.json their checksums. N.json
is written last, so that a copy with it is whole. Two copies exist at most. A restart
takes the newest one that all processes have and whose checksums are right; a file that
has changed, a host without copies or another number of processes leave the checkpoint
on disk.

Beside them lie the compiled programs of the train step, which the next process of the
same code, machine and run loads instead of tracing and compiling.
"""

import collections
import concurrent.futures
import contextlib
import hashlib
import json
import math
import os
import secrets
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from absl import logging

from acco_jax.command import program_store
from acco_jax.command.files import read_rows, sealed, write_rows
from acco_jax.core import leaf_names
from acco_jax.run.state import processes, shards
from acco_jax.run.state.replicas import ReplicasDiffer

PyTree = Any
SHARE = 0.01  # of the time, which copies may take
FIRST = 4  # half-rounds between the first copies, whose time is not known
PROGRAMS = "programs"  # the file of compiled programs, with a checksum before them
TRIED = ".tried"  # its ending from when it is taken until it has run
RUN = "memory_id.txt"  # in the workdir: another run there has another number
LEFT_SECONDS = 86400  # after which copies of a run that is gone are removed


class MemoryCopies:
    """This process's copies of a run's newest states; without a folder it keeps none.

    All processes call its methods at the same half-rounds.
    """

    def __init__(
        self, place: Path | None, workdir: Path, identity: dict[str, Any]
    ) -> None:
        """Open the copies of a run.

        Args:
          place: a folder in memory; None, or one that does not exist: no copies.
          workdir: of the run.
          identity: JSON of the run and its devices: of others nothing is restored.
        """
        self._enabled, self._folder = place is not None, None
        if place is not None:
            self._identity = json.loads(json.dumps(identity)) | {
                "run": _number(workdir)
            }
            self._folder = _opened(place, workdir)
        self._writing: concurrent.futures.Future[float] | None = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "memory")
        self._copies = 0  # that were begun
        self._costs = collections.deque[float](maxlen=8)  # seconds of each copy
        self._due: int | None = None  # half-round of the next one
        self._last = (0, 0.0)  # half-round of the last one, and when it was made
        self._every = FIRST

    def due(self, half_round: int) -> bool:
        """Return whether to keep the state after a half-round."""
        if not self._enabled:
            return False
        if self._due is None:
            self._due = half_round + FIRST
            self._last = half_round, time.perf_counter()
        return half_round >= self._due

    def keep(
        self, half_round: int, arrays: PyTree, host: Callable[[], dict[str, Any]]
    ) -> None:
        """Copy arrays that are computed to the host and start to write them.

        Copies become so rare that they take at most `SHARE` of the time.

        Args:
          half_round: of the state.
          arrays: may be donated as soon as this returns.
          host: returns what a checkpoint's host data are.
        """
        begin = time.perf_counter()
        written = 0.0
        if self._writing is not None:
            written, self._writing = self._writing.result(), None
        if self._folder is not None:
            with contextlib.suppress(OSError):  # they have run
                path = self._folder / PROGRAMS
                path.with_suffix(TRIED).replace(path)
        if self._folder is not None:
            with jax.transfer_guard_device_to_host("allow"):  # intended here
                copies = shards.on_host(leaf_names.named(arrays), saved=False)
            self._writing = self._thread.submit(self._write, half_round, copies, host())
        before, when = self._last
        each = (begin - when) / max(half_round - before, 1)
        self._costs.append(time.perf_counter() - begin + written)
        self._copies = count = self._copies + 1
        if count >= FIRST and count & (count - 1) == 0:  # all agree now and then
            mine = [statistics.median(self._costs), each]
            with jax.transfer_guard("allow"):
                cost, each = (
                    processes.gathered(np.array(mine, np.float32)).max(0).tolist()
                )
            self._every = max(2, math.ceil(cost / (SHARE * each)))
        self._last = half_round, time.perf_counter()
        self._due = half_round + self._every

    def restore_newest(
        self, like: Callable[[], PyTree], least: int
    ) -> tuple[int, PyTree, dict[str, Any]] | None:
        """Return what `Checkpoints.restore_newest` does, of the newest common copy.

        Every copy but that one is removed.

        Args:
          like: returns the tree to restore, of ShapeDtypeStructs with shardings.
          least: half-rounds of the newest checkpoint: an older copy is not taken.
        """
        if not self._enabled:
            return None
        found = self._found(least)
        padded = np.full(2, -1, np.int32)
        padded[: len(found)] = sorted(found)[-2:]
        everyone = processes.gathered(padded)
        common = set.intersection(*(set(row.tolist()) for row in everyone)) - {-1}
        taken = None
        for half_round in sorted(common, reverse=True):
            tree, problem = self._read(half_round, like(), found[half_round]["shards"])
            if problem:
                logging.warning(
                    "the copy of half-round %d in memory is damaged: %s",
                    half_round, problem,
                )  # fmt: skip
            if not processes.gathered(np.bool_(problem is not None)).any():
                taken = half_round, tree, found[half_round]["host"]
                break
        else:
            if any(int(path.stem) >= least for path in self._marks()):
                logging.warning(
                    "no copy in memory is whole, of these processes and of all of them:"
                    " continuing from the checkpoint on disk"
                )
        self._remove_but(taken and taken[0])
        return taken

    @property
    def enabled(self) -> bool:
        """Whether this run keeps anything."""
        return self._enabled

    def take_programs(
        self, take: Callable[[bytes], None], forget: Callable[[], None]
    ) -> bool:
        """Call `take` with the programs that earlier processes in these places kept.

        All processes take what was kept together, or none does: a compiler may ask all
        for a part of its work. Until `keep` they are not offered again, so that a
        process that fails with them is not followed by one that does the same.

        Returns whether all have taken them; `forget` is called if only some could.
        """
        if not self._enabled:
            return False
        tag, data = self._kept_programs()
        tags = processes.gathered(np.int32(tag))
        if not tag or (tags != tag).any():
            return False
        try:
            take(data)
            problem = None
        except Exception as error:  # of a library that loads them
            problem = error
        if processes.gathered(np.bool_(problem is not None)).any():
            why = problem or "another process could not load its own"
            logging.warning("the programs in memory are compiled again: %s", why)
            forget()
            return False
        logging.info("the compiled programs were in memory")
        return True

    def keep_programs(self, programs: Callable[[], bytes | None]) -> None:
        """Keep programs, if there are any, for the next processes in these places."""
        if not self._enabled:
            return
        tag = int(processes.from_process_0(np.int32(1 + secrets.randbelow(2**31 - 1))))
        if self._folder is None:
            return
        path = self._folder / PROGRAMS
        try:
            path.with_suffix(TRIED).unlink(missing_ok=True)
            if (found := programs()) is None:
                return
            data = b"%d\n%s" % (tag, found)
            if len(data) > shutil.disk_usage(self._folder).free // 2:
                raise OSError(f"{len(data):,} bytes are more than half of what is free")
            new = path.with_suffix(".new")
            new.write_bytes(self._programs_key(data) + b"\n" + data)
            new.replace(path)
        except Exception as error:  # a tree of the user's that cannot be pickled, say
            logging.info("the compiled programs are not kept in memory: %s", error)

    def _kept_programs(self) -> tuple[int, bytes]:
        """Return the number of what was kept together, and the programs; 0: none."""
        if self._folder is None:
            return 0, b""
        path = self._folder / PROGRAMS
        try:
            key, data = path.read_bytes().split(b"\n", 1)
            if key != self._programs_key(data):
                return 0, b""
            path.replace(path.with_suffix(TRIED))
        except (OSError, ValueError, RuntimeError):
            return 0, b""
        tag, programs = data.split(b"\n", 1)
        return int(tag), programs

    def _programs_key(self, data: bytes) -> bytes:
        """Return a checksum of programs and of what they depend on.

        Raises:
          RuntimeError: code was changed since this process began.
        """
        sha = hashlib.sha256(json.dumps(self._identity, sort_keys=True).encode())
        sha.update(program_store.environment().encode() + data)
        return sha.hexdigest().encode()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Remove all copies if the run has ended well, or they may be wrong."""
        wrong = FloatingPointError, ReplicasDiffer
        if self._folder is not None and (kind is None or issubclass(kind, wrong)):
            if self._writing is not None:
                concurrent.futures.wait([self._writing])
            shutil.rmtree(self._folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # another process's are there
                self._folder.parent.rmdir()

    def _write(
        self, half_round: int, copies: shards.Shards, host: dict[str, Any]
    ) -> float:
        """Write a copy in place of the older one; return the processor's seconds."""
        assert self._folder is not None
        begin = time.thread_time()
        try:
            names = [int(path.stem) for path in self._marks()]
            self._remove_but(max(names, default=None))
            size = sum(x.nbytes for own in copies.values() for x in own.values())
            if size > shutil.disk_usage(self._folder).free:  # the state matters more
                (self._folder / PROGRAMS).unlink(missing_ok=True)
            if size > (free := shutil.disk_usage(self._folder).free):
                raise OSError(f"{size:,} bytes are needed, and {free:,} are free")
            with open(self._folder / f"{half_round}.data", "wb") as file:
                sums = shards.written(file, copies)
            row = sealed({"identity": self._identity, "host": host, "shards": sums})
            write_rows(self._folder / f"{half_round}.json", [row])
        except OSError as error:
            logging.warning("no copies in %s any more: %s", self._folder, error)
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        return time.thread_time() - begin

    def _found(self, least: int) -> dict[int, dict[str, Any]]:
        """Return the descriptions of this run's whole copies, by half-round."""
        found = {}
        for path in self._marks():
            fields = {"identity", "host", "shards"}
            with contextlib.suppress(ValueError):
                (row,) = read_rows(path, fields, seals=True)
                if row["identity"] == self._identity and int(path.stem) >= least:
                    found[int(path.stem)] = row
        return found

    def _read(
        self, half_round: int, like: PyTree, sums: shards.Sums
    ) -> tuple[PyTree, str | None]:
        """Return the arrays of a copy, and which shard is wrong, or None."""
        assert self._folder is not None
        leaves, treedef = jax.tree.flatten(like)
        named = leaf_names.named(like)
        try:
            with open(self._folder / f"{half_round}.data", "rb") as file:
                arrays = shards.arrays(file, named, sums)
        except (OSError, ValueError, KeyError) as error:
            return None, str(error)
        found = [
            leaf_names.as_key(x, arrays[k]) for x, k in zip(leaves, named, strict=True)
        ]
        problem = shards.problem(arrays, sums)
        return jax.tree.unflatten(treedef, found), problem

    def _marks(self) -> list[Path]:
        """Return the files that mark copies as whole."""
        return list(self._folder.glob("[0-9]*.json")) if self._folder else []

    def _remove_but(self, kept: int | None) -> None:
        for path in self._folder.glob("[0-9]*") if self._folder else ():
            if path.stem != str(kept):
                path.unlink()


def _number(workdir: Path) -> int:
    """Return the number of the workdir's run; process 0 draws one if there is none."""
    path, number = workdir / RUN, 0
    if jax.process_index() == 0:
        with contextlib.suppress(OSError, ValueError):
            number = int(path.read_text())
        if not number:
            number = 1 + secrets.randbelow(2**31 - 1)
            path.write_text(f"{number}\n")
    return int(processes.from_process_0(np.int32(number)))


def _opened(place: Path, workdir: Path) -> Path | None:
    """Return this process's folder; None, with a warning, if it cannot be made."""
    if not place.is_dir():
        logging.info("%s is not a folder: no copies in memory", place)
        return None
    digest = hashlib.sha256(os.fsencode(workdir.resolve())).hexdigest()[:16]
    prefix = f"acco_jax-{os.getuid()}-"
    run = place / f"{prefix}{digest}"
    folder = run / str(jax.process_index())
    try:
        for path in (run, folder):
            path.mkdir(mode=0o700, exist_ok=True)
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                raise OSError(f"{path} is another user's")
        for other in place.glob(f"{prefix}*"):
            newest = max(path.stat().st_mtime for path in (other, *other.glob("*")))
            if other != run and time.time() - newest > LEFT_SECONDS:
                shutil.rmtree(other, ignore_errors=True)
    except OSError as error:
        logging.warning("no copies in memory: %s", error)
        return None
    return folder
