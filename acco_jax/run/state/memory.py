"""Copies of the newest states in the hosts' memory, from which a restart continues.

Each process keeps the shards that it holds as files of a file system in memory, which
outlive it, and more rarely those of a process on another host. A restart takes the
newest state whose shards are all there, on whatever hosts, and whose checksums are
right, for as many devices as there are. Without one it takes the checkpoint on disk.

Beside them lie the compiled programs of the train step, which the next process of the
same code, machine and run loads instead of tracing and compiling.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
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
from acco_jax.command.files import write_whole
from acco_jax.core import leaf_names
from acco_jax.run.state import neighbours, processes, shards, worlds
from acco_jax.run.state.copies import Copies
from acco_jax.run.state.replicas import ReplicasDiffer

PyTree = Any
SHARE = 0.01  # of the time, which copies on the own host may take
SENT_SHARE = 0.005  # and which sending them to other hosts may
FIRST = 4  # half-rounds between the first copies, whose time is not known
PROGRAMS = "programs"  # the file of compiled programs, with a checksum before them
HELD = "held"  # the folder of another host's shards
TRIED = ".tried"  # its ending from when it is taken until it has run
STARTS = "memory_starts.json"  # in the workdir
LEFT_SECONDS = 86400  # after which copies of a run that is gone are removed


class _Pace:
    """How rarely something is done, so that it takes a share of the time."""

    def __init__(self, share: float) -> None:
        self._share, self.every, self._due = share, FIRST, 0
        self._costs = collections.deque[float](maxlen=8)  # seconds of each time

    def due(self, half_round: int) -> bool:
        return half_round >= self._due

    def took(self, seconds: float) -> None:
        self._costs.append(seconds)

    def put_off(self, half_round: int) -> None:
        """Let it be due again some time after a half-round."""
        self._due = half_round + self.every

    @property
    def cost(self) -> float:
        """Seconds of one time, typically."""
        return statistics.median(self._costs) if self._costs else 0.0

    def set(self, cost: float, each: float) -> None:
        """Take what one time costs, and a half-round, of the slowest process."""
        self.every = max(2, math.ceil(cost / (self._share * each)))


class MemoryCopies:
    """This process's copies of a run's newest states; without a folder it keeps none.

    All processes call its methods at the same half-rounds.
    """

    def __init__(
        self,
        place: Path | None,
        workdir: Path,
        identity: dict[str, Any],
        world: worlds.World,
    ) -> None:
        """Open the copies of a run.

        Args:
          place: a folder in memory; None, or one that does not exist: no copies.
          workdir: of the run.
          identity: JSON of the run: of others nothing is restored.
          world: the devices, for which programs are compiled.
        """
        self._enabled, self._folder = place is not None, None
        self._workdir, self._world = workdir, dataclasses.asdict(world)
        self._history: str | None = None  # of the states that this process computes
        self._holder: list[int] | None = None
        if place is not None:
            first = {"first workers": identity.get("workers")}  # theirs is the batch
            self._identity = json.loads(json.dumps(identity)) | first
            self._folder = _opened(place, workdir)
            self._hosts, self._holder = neighbours.find()
            some = processes.gathered(np.bool_(self._folder is not None))
            self._enabled = bool(some.any())
        self._began = time.time()
        self._writing: concurrent.futures.Future[float] | None = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "memory")
        self._copies = 0  # that were begun
        self._copying, self._sending = _Pace(SHARE), _Pace(SENT_SHARE)
        self._last = (0, 0.0)  # half-round of the last one, and when it was made
        self._sent: int | None = None  # half-round of the last one that was sent
        self._remain = False

    def due(self, half_round: int) -> bool:
        """Return whether to keep the state after a half-round."""
        if not self._enabled:
            return False
        if self._last == (0, 0.0):
            self._copying.put_off(half_round)
            self._last = half_round, time.perf_counter()
        return self._copying.due(half_round)

    def keep(
        self, half_round: int, arrays: PyTree, host: Callable[[], dict[str, Any]]
    ) -> None:
        """Copy arrays that are computed to the host and start to write them.

        Copies become so rare that they take at most `SHARE` of the time, and those that
        are sent to other hosts at most `SENT_SHARE`.

        Args:
          half_round: of the state.
          arrays: may be donated as soon as this returns.
          host: returns what a checkpoint's host data are.
        """
        if not self._enabled:
            return
        # on CPU time in which other processes have the cores is not the copy's
        cpu = jax.default_backend() == "cpu"
        clock = time.thread_time if cpu else time.perf_counter
        began = time.perf_counter()
        written = 0.0
        if self._writing is not None:
            written, self._writing = self._writing.result(), None
        described = host()  # process 0's records must be on disk, whoever has copies
        waited = time.perf_counter() - began  # for disks, too
        begin = clock()
        if self._folder is not None:
            with contextlib.suppress(OSError):  # they have run
                path = self._folder / PROGRAMS
                path.with_suffix(TRIED).replace(path)
        named, held = leaf_names.named(arrays), None
        with jax.transfer_guard("allow"):  # intended here
            own = shards.on_host(named, saved=False) if self._folder else {}
        sending, earlier = 0.0, self._sent
        if self._holder and self._sending.due(half_round):
            before, begun = clock(), time.perf_counter()
            with jax.transfer_guard("allow"):
                held = neighbours.sent(named, self._holder)
            sending = clock() - before
            self._sending.took(time.perf_counter() - begun)
            self._sent = half_round
        self._say(own, held)
        if self._history is None:
            with jax.transfer_guard("allow"):
                self._history = self._history_of(half_round)
        if self._folder is not None:
            pace = self._copying.every, self._sending.every
            about = {"history": self._history, "host": described, "pace": pace}
            write = functools.partial(self._write, half_round, own, held, about)
            self._writing = self._thread.submit(write, earlier)
        last, when = self._last
        each = (began - when) / max(half_round - last, 1)
        self._copies = count = self._copies + 1
        self._copying.took(waited + clock() - begin - sending + written)
        if count >= FIRST and count & (count - 1) == 0:  # all agree now and then
            costs = self._copying.cost, self._sending.cost
            mine = [*costs, each, self._folder is not None]
            with jax.transfer_guard("allow"):
                everyones = processes.gathered(np.array(mine, np.float32))
            copied, sent, each, some = everyones.max(0).tolist()
            self._enabled = bool(some)
            self._copying.set(copied, each)
            if self._holder:
                self._sending.set(sent, each)
        self._copying.put_off(half_round)
        if held is not None:
            self._sending.put_off(half_round)
        self._last = half_round, time.perf_counter()

    def restore_newest(
        self, like: Callable[[dict[str, int]], PyTree], least: int
    ) -> tuple[int, PyTree, dict[str, Any]] | None:
        """Return what `Checkpoints.restore_newest` does, of the newest whole copy.

        All other copies are removed, but the newest one of which other hosts have the
        shards: it may be older.

        Args:
          like: returns the tree to restore, of ShapeDtypeStructs with shardings, for a
            state of a mesh of these axes.
          least: half-rounds of the newest checkpoint: an older copy is not taken.
        """
        if not self._enabled:
            return None
        stores = self._stores()
        found = [store.found(least) for store in stores]
        mine = [sorted(set().union(*x)) for x in (found, found[1::2])]  # all, and held
        everyone = map(json.loads, processes.all_bytes(json.dumps(mine).encode()))
        every, held = (set().union(*x) for x in zip(*everyone, strict=True))
        taken = None
        for half_round in sorted(every, reverse=True):
            here = [(s, x[half_round]) for s, x in zip(stores, found, strict=True)
                    if half_round in x]  # fmt: skip
            if restored := self._restored(half_round, here, like):
                taken = half_round, *restored
                break
        else:
            if any(store.any(least) for store in stores):
                logging.warning(
                    "no copy in the hosts' memory is whole: continuing from the "
                    "checkpoint on disk"
                )
        kept = [taken[0]] if taken else []
        self._sent = max((x for x in held if kept and x <= kept[0]), default=None)
        for store in stores:
            store.remove_but(*kept, self._sent)
        return taken

    def _restored(
        self,
        half_round: int,
        here: list[tuple[Copies, dict[str, Any]]],
        like: Callable[[dict[str, int]], PyTree],
    ) -> tuple[PyTree, dict[str, Any]] | None:
        """Return a state and its host data; None if not all of it is there.

        Args:
          half_round: of the state.
          here: the copies of it on this host, and what they are about.
          like: as for `restore_newest`.
        """
        history = self._history_of(half_round)
        here = [(store, about) for store, about in here if about["history"] == history]
        some = processes.gathered(np.bool_(bool(here)))
        if not some.any():
            return None
        said = json.dumps(here[0][1] if here else {}).encode()
        said = json.loads(processes.bytes_from(int(some.argmax()), said))
        host, pace = said["host"], said.get("pace", (FIRST, FIRST))
        self._copying.every, self._sending.every = pace
        tree, same = like(host["axes"]), host["axes"] == self._world["axes"]
        wanted = leaf_names.named(tree)
        dtypes = {name: np.dtype(x.dtype) for name, x in wanted.items()}
        own: shards.Shards = {}
        for store, _ in here[:1]:  # this process's own, if it has one
            own = self._read(store, half_round, dtypes)
        complete = same and neighbours.has_all(own, wanted)
        arrays: dict[str, jax.Array] | None
        if processes.gathered(np.bool_(complete)).all():
            arrays = {name: shards.placed(x, own[name]) for name, x in wanted.items()}
        else:
            for store, _ in here[1:]:
                for name, places in self._read(store, half_round, dtypes).items():
                    own.setdefault(name, {}).update(places)
            arrays = neighbours.completed(own, wanted, same=same)
            if arrays is None:
                return None
            logging.info("parts of the state were in other hosts' memory")
        leaves, treedef = jax.tree.flatten(tree)
        pairs = zip(leaves, wanted, strict=True)
        leaves = [leaf_names.as_key(x, arrays[name]) for x, name in pairs]
        return jax.tree.unflatten(treedef, leaves), host

    def _read(
        self, store: Copies, half_round: int, dtypes: dict[str, np.dtype]
    ) -> shards.Shards:
        """Return the shards of a copy; none, with a warning, if it is damaged."""
        found, problem = store.read(half_round, dtypes)
        if problem:
            logging.warning(
                "a copy of half-round %d in memory is damaged: %s", half_round, problem
            )
        return found

    def _history_of(self, half_round: int) -> str:
        """Return what tells a state from those that other starts have computed."""
        rows = [row for row in self._starts() if row[0] < half_round]
        data = processes.bytes_from(0, json.dumps(rows).encode())
        return hashlib.sha256(data).hexdigest()

    def begin(self, half_round: int) -> None:
        """Record that this start of the run computes what follows a half-round."""
        path = self._workdir / STARTS
        if jax.process_index() == 0 and (self._enabled or path.exists()):
            rows = [row for row in self._starts() if row[0] < half_round]
            rows.append([half_round, secrets.randbelow(2**31)])
            write_whole(path, json.dumps(rows) + "\n")

    def _starts(self) -> list[list[int]]:
        """Return the run's starts: after which half-round, and a random number."""
        try:
            rows = json.loads((self._workdir / STARTS).read_text())
            return [[int(half_round), int(number)] for half_round, number in rows]
        # none, or damaged: copies are not taken
        except (OSError, ValueError, TypeError):
            return []

    def _stores(self) -> list[Copies]:
        """Return copies on this host: this process's own ones first.

        What processes have left that are not here now is divided among those that are.
        """
        if self._folder is None:
            return []
        process = jax.process_index()
        here = [i for i, x in enumerate(self._hosts) if x == self._hosts[process]]
        run = self._folder.parent
        left = sorted(x for x in run.iterdir() if x.name not in set(map(str, here)))
        folders = self._folder, *left[here.index(process) :: len(here)]
        both = [y for x in folders for y in (x, x / HELD)]
        return [Copies(folder, self._identity) for folder in both]

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
        known = json.dumps([self._identity, self._world], sort_keys=True)
        sha = hashlib.sha256(known.encode())
        sha.update(program_store.environment().encode() + data)
        return sha.hexdigest().encode()

    def __enter__(self) -> Self:
        return self

    def remain(self) -> None:
        """Leave the copies when the run ends: it has saved nothing as new."""
        self._remain = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Remove all copies if the run has ended well, or they may be wrong."""
        wrong = FloatingPointError, ReplicasDiffer
        folder = self._folder  # a copy that cannot be written leaves none
        well = kind is None and not self._remain
        if folder is not None and (well or (kind and issubclass(kind, wrong))):
            if self._writing is not None:
                concurrent.futures.wait([self._writing])
            shutil.rmtree(folder, ignore_errors=True)
            self._remove_left(folder.parent)
            with contextlib.suppress(OSError):  # another process's are there
                folder.parent.rmdir()

    def _say(self, own: shards.Shards, held: shards.Shards | None) -> None:
        if not self._copies:
            size, of_other = (f"{shards.size(x or {}) / 1e6:,.1f}" for x in (own, held))
            other = f", and {of_other} MB of another host's" if held else ""
            logging.info("copies in memory: %s MB of this process%s", size, other)

    def _write(
        self,
        half_round: int,
        own: shards.Shards,
        held: shards.Shards | None,
        about: dict[str, Any],
        sent: int | None,
    ) -> float:
        """Write a copy in place of older ones; return the processor's seconds.

        The newest one stays, and the last one of which other hosts have the shards.

        Args:
          half_round: of the state.
          own: this process's shards.
          held: those of another process; None if none were sent this time.
          about: JSON.
          sent: half-round of the last copy before this one that was sent; None: none.
        """
        folder = self._folder
        assert folder is not None
        begin = time.thread_time()
        try:
            mine, others = (Copies(x, self._identity) for x in (folder, folder / HELD))
            mine.remove_but_newest(sent)
            if held or not self._holder:
                others.remove_but_newest() if held else others.remove_but()
            size = shards.size(own) + shards.size(held or {})
            if size > shutil.disk_usage(folder).free:  # the state matters more
                (folder / PROGRAMS).unlink(missing_ok=True)
            if size > (free := shutil.disk_usage(folder).free):
                raise OSError(f"{size:,} bytes are needed, and {free:,} are free")
            for store, copied in ((mine, own), (others, held)):
                if copied:
                    store.write(half_round, copied, about)
            if self._copies >= FIRST:  # all that are here have made some
                self._remove_left(folder.parent)
        except OSError as error:
            logging.warning("no copies in %s any more: %s", folder, error)
            shutil.rmtree(folder, ignore_errors=True)
            self._folder = None
        return time.thread_time() - begin

    def _remove_left(self, run: Path) -> None:
        """Remove copies of processes that are not on this host any more."""
        mine = self._hosts[jax.process_index()]
        here = {str(i) for i, host in enumerate(self._hosts) if host == mine}
        with contextlib.suppress(OSError):  # another process removes them, too
            for other in run.iterdir():
                newest = max(x.stat().st_mtime for x in (other, *other.glob(HELD)))
                if newest < self._began and other.name not in here:
                    shutil.rmtree(other, ignore_errors=True)


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
            with contextlib.suppress(FileNotFoundError):  # another process removes it
                newest = max(x.stat().st_mtime for x in (other, *other.glob("*")))
                if other != run and time.time() - newest > LEFT_SECONDS:
                    shutil.rmtree(other, ignore_errors=True)
    except OSError as error:
        logging.warning("no copies in memory: %s", error)
        return None
    return folder
