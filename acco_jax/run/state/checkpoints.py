"""Asynchronous, verified checkpoints of parameters, optimizer state and data."""

import concurrent.futures
import functools
import json
import logging as levels
import math
import os
import stat
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from acco_jax.command.exits import Damaged
from acco_jax.command.files import (
    MISSING,
    is_number,
    is_remote,
    read_written,
    write_whole,
)
from acco_jax.core import leaf_names
from acco_jax.run.state import processes, shards

PyTree = Any
HOST = "metadata"  # orbax's name of the file of host data


class Checkpoints:
    """Checkpoints of one run, by half-round.

    orbax writes the arrays, sharded, while training goes on. Two kinds of checksums are
    kept. Those of the shards are taken from the copies on the host, before anything is
    written, and lie inside the checkpoint. They find faults in the arrays as they are
    restored, whatever has changed them. Those of the files are taken from the written
    files and lie beside them, in N.checksums. They find, before anything is restored,
    files that have changed since, are missing or too many. In a remote folder, whose
    store has checksums of its own, they are the files' sizes.

    While a checkpoint is written or removed a file N.saving exists: what a killed
    process leaves is unfinished, not damaged.
    """

    def __init__(
        self,
        folder: Path | epath.Path | str,
        keep: int,
        *,
        repair: bool = True,
        fence: Callable[[], None] = lambda: None,
    ) -> None:
        """Open a folder, and set damaged checkpoints in it aside.

        Args:
          folder: of the checkpoints; also a remote one, as gs://bucket/run.
          keep: number of the newest ones to keep.
          repair: False for a folder that may be another run's: nothing in it changes.
          fence: called by process 0 before it writes, in the background too; an OSError
            that it raises ends the save, before any other checkpoint is removed.

        Raises:
          Damaged: if there are checkpoints, and all of them are damaged.
          OSError: on all processes, if one cannot be read for another reason.
        """
        self._remote = is_remote(folder)
        self._folder = epath.Path(folder if self._remote else os.path.abspath(folder))
        self._keep, self._repair, self._fence = keep, repair, fence
        self._losses: dict[int, float | None] = {}  # held out, by half-round
        self._writing: tuple[int, list[int], concurrent.futures.Future[None]] | None
        self._writing = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        if repair and jax.process_index() == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            if self._remote:  # a bucket has no empty folders: not there is gone
                (self._folder / "begun").touch()
            self._discard_unfinished()
        self._steps = self._sound()  # finished, oldest first
        self._checkpointer = _checkpointer(fence)

    @property
    def saved_calls(self) -> list[int]:
        """Half-rounds of all finished checkpoints, ascending; the newest is sound."""
        return sorted(self._steps)

    def latest(self) -> int | None:
        """Return the half-rounds of the newest sound checkpoint, None without any.

        A checkpoint being written counts once `wait` has returned.
        """
        return max(self._steps, default=None)

    def save(self, half_round: int, arrays: PyTree, host: dict[str, Any]) -> None:
        """Wait for the last save, copy arrays to the host and start to write them.

        Once it is whole, `keep` of the newest are kept, this one included, and the one
        whose host["held_out_loss"] is lowest.

        Args:
          half_round: of the checkpoint.
          arrays: may be donated as soon as this returns.
          host: JSON, equal on every process.

        Raises:
          OSError: if this one or the last cannot be written (a full disk); earlier ones
            are whole.
        """
        self.wait()
        if jax.process_index() == 0:
            self._fence()
            self._sums(half_round).unlink(missing_ok=True)
            self._saving(half_round).touch()
        named = leaf_names.named(arrays)
        with jax.transfer_guard_device_to_host("allow"):  # intended here
            copies = shards.on_host(named)
            self._checkpointer.save(
                self._folder / str(half_round),
                args=ocp.args.Composite(
                    arrays=ocp.args.PyTreeSave(named),  # finds the same copies
                    host=ocp.args.JsonSave(host),
                    shards=shards.Save(copies),
                ),
            )
        self._losses[half_round] = host.get("held_out_loss")
        steps = [*self._steps, half_round]
        surplus = self._surplus(steps)
        finished = self._thread.submit(self._finish, half_round, surplus)
        kept = [step for step in steps if step not in surplus]
        self._writing = half_round, kept, finished

    def wait(self) -> None:
        """Wait until the last save is written, verifiable and counted by `latest`.

        Raises:
          OSError: if it could not be written.
        """
        if self._writing is None:
            return
        (half_round, steps, finished), self._writing = self._writing, None
        try:
            finished.result()
        except Exception as error:
            path, why = self._folder / str(half_round), " ".join(str(error).split())
            raise OSError(f"checkpoint {path} could not be written: {why}") from error
        self._steps = steps

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait on the way out; an error inside has priority over one of writing."""
        if kind is None:
            self.wait()
        elif self._writing is not None:
            concurrent.futures.wait([self._writing[2]])

    def _finish(self, half_round: int, surplus: list[int]) -> None:
        """Make a checkpoint count; runs beside training, without collectives.

        Others are removed only then: a process killed before leaves the last sound one.
        """
        self._checkpointer.wait_until_finished()  # for all processes' shards
        if jax.process_index():
            return
        self._fence()
        sums = _checksums(self._folder / str(half_round), self._remote)
        write_whole(self._sums(half_round), json.dumps(sums))
        self._saving(half_round).unlink()
        for step in surplus:
            try:
                self._remove(step)
            except OSError as error:
                path = self._folder / str(step)
                logging.warning("checkpoint %s cannot be removed: %s", path, error)

    def _surplus(self, steps: list[int]) -> list[int]:
        """Return the checkpoints that are neither among the newest nor the best.

        Where a loss cannot be read there are none: it may be the best one's.
        """
        try:
            best = min(steps, key=self._held_out_loss)
        except OSError as error:
            logging.warning("older checkpoints are not removed yet: %s", error)
            return []
        if self._held_out_loss(best) == math.inf:
            return steps[: -self._keep]
        return [step for step in steps[: -self._keep] if step != best]

    def _remove(self, step: int) -> None:
        """Remove a checkpoint; a process killed meanwhile leaves no damaged one."""
        self._saving(step).touch()
        self._sums(step).unlink(missing_ok=True)
        (self._folder / str(step)).rmtree()
        self._saving(step).unlink()

    def _held_out_loss(self, half_round: int) -> float:
        """Return the held-out loss of a checkpoint; infinity without one.

        A file that has changed since it was opened raises nothing: it counts as none.
        """
        if half_round not in self._losses:
            sound = self._host_problem(half_round) is None
            host = self.host(half_round) if sound else {}
            self._losses[half_round] = host.get("held_out_loss")
        loss = self._losses[half_round]
        return float(loss) if is_number(loss) else math.inf

    def restore_newest(
        self, like: PyTree | Callable[[int], PyTree]
    ) -> tuple[int, PyTree, dict[str, Any]] | None:
        """Restore the newest checkpoint that is sound, and set damaged ones aside.

        Args:
          like: as for `restore`, or a function that makes it from the half-rounds.

        Returns:
          The checkpoint's half-rounds and what `restore` returns; None without one.

        Raises:
          Damaged: if there are checkpoints, and all of them are damaged.
        """
        while (step := self.latest()) is not None:
            try:
                return step, *self.restore(step, like(step) if callable(like) else like)
            except Damaged as error:
                if not self._repair:
                    raise
                if jax.process_index() == 0:
                    self._set_aside(step, str(error))
                self._steps = self._sound()
        return None

    def restore(self, half_round: int, like: PyTree) -> tuple[PyTree, dict[str, Any]]:
        """Return a checkpoint's arrays and host data.

        Args:
          half_round: as in `save`.
          like: the tree to restore, of arrays or ShapeDtypeStructs with shardings.

        Raises:
          Damaged: on all processes, if its files or a restored shard differ from what
            was saved.
          OSError: on all processes, if one cannot read it for another reason, such as
            too little memory.
        """
        leaves, treedef = jax.tree.flatten(like)
        found = self.restore_some(half_round, like, range(len(leaves)))
        arrays = jax.tree.unflatten(treedef, list(found.values()))
        return arrays, self.host(half_round)

    def restore_some(
        self, half_round: int, like: PyTree, which: Sequence[int]
    ) -> dict[int, jax.Array]:
        """Return some of a checkpoint's arrays; read only these.

        Args:
          half_round: as in `save`.
          like: the whole tree, as for `restore`.
          which: numbers of its leaves, ascending.

        Raises:
          Damaged, OSError: as `restore`.
        """
        path, leaves = self._folder / str(half_round), jax.tree.leaves(like)
        names = list(leaf_names.named(like))
        some = {names[i]: leaf_names.data(leaves[i]) for i in which}
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, some)
        found, failure = {}, ""
        try:
            self.host(half_round)
            found = self._checkpointer.restore(
                path,
                args=ocp.args.Composite(
                    arrays=ocp.args.PyTreeRestore(
                        abstract,
                        restore_args=ocp.checkpoint_utils.construct_restore_args(
                            abstract
                        ),
                        partial_restore=len(some) < len(names),
                    )
                ),
            ).arrays
        except Exception as error:  # whatever orbax makes of a file
            failure = " ".join(str(error).split())[:500] or type(error).__name__
        with jax.transfer_guard_device_to_host("allow"):
            self._verify(half_round, names, found, failure)

        return {i: leaf_names.as_key(leaves[i], found[names[i]]) for i in which}

    def _verify(
        self,
        half_round: int,
        names: Sequence[str],
        arrays: dict[str, jax.Array],
        failure: str,
    ) -> None:
        """Raise, on all processes, if one could not read arrays or they differ.

        Reading fails of damage, and of much else, which is no reason to set a
        checkpoint aside: then process 0 compares its files with what was written.
        """
        problem, path = None, self._folder / str(half_round)
        try:
            sums = shards.read(path)
            if failure:
                failure = _other_arrays(names, list(sums)) or failure
            else:
                problem = shards.problem(arrays, sums)
        except (ValueError, IndexError) as error:
            problem = str(error)
        except OSError as error:
            failure = str(error) or type(error).__name__
        wrong = processes.gathered(np.array([bool(failure), problem is not None]))
        differs = wrong.reshape(-1, 2)[:, 1].any()
        if not wrong.any():
            return
        sound = jax.process_index() == 0 and not differs
        sound = sound and not self._is_damaged(half_round)
        said = problem or failure
        if not processes.from_process_0(np.bool_(sound)):
            raise Damaged(said or "a shard on another process differs")
        raise OSError(
            f"checkpoint {path} cannot be restored, and none of its files differs from "
            f"what was written: {said or 'another process says why'}"
        )

    def host(self, half_round: int) -> dict[str, Any]:
        """Return the host data of a checkpoint, without its arrays."""
        return read_written(self._folder / str(half_round) / "host" / HOST)

    def close(self) -> None:
        self.wait()
        self._thread.shutdown()
        self._checkpointer.close()

    def _sums(self, half_round: int) -> epath.Path:
        return self._folder / f"{half_round}.checksums"

    def _saving(self, half_round: int) -> epath.Path:
        return self._folder / f"{half_round}.saving"

    def _discard_unfinished(self) -> None:
        """Remove the remains of a process that was killed while it saved."""
        for mark in sorted(self._folder.glob("*.saving")):
            if not mark.stem.isdecimal():
                continue  # another program's file
            step = self._folder / mark.stem
            if step.exists() and not self._sums(int(mark.stem)).exists():
                logging.info("checkpoint %s was not finished: discarded", step)
                step.rmtree()
            for rest in self._folder.glob(f"{mark.stem}.orbax-checkpoint-tmp*"):
                rest.rmtree()
            mark.unlink()

    def _sound(self) -> list[int]:
        """Return the finished checkpoints, equal on all processes.

        The newest of them is sound; newer, damaged ones have been set aside.
        """
        steps: list[int] | None = []
        failure, number = "", 0
        try:
            if jax.process_index() == 0 and self._folder.exists():
                steps = self._set_aside_damaged() if self._repair else self._finished()
        except OSError as error:
            failure = str(error) or type(error).__name__
            number = error.errno or 0
        if processes.from_process_0(np.bool_(failure)):
            unread = OSError(
                f"the checkpoints in {self._folder} cannot be read "
                f"({failure or 'process 0 says why'}): start again once they can."
            )
            unread.errno = int(processes.from_process_0(np.int32(number)))
            raise unread
        if (agreed := processes.numbers_from_process_0(steps)) is None:
            raise Damaged(
                f"every checkpoint in {self._folder} is damaged: restore an intact "
                "copy or, to start from scratch, use another workdir."
            )
        return agreed

    def _finished(self) -> list[int]:
        names = {path.name for path in self._folder.iterdir()}
        unfinished = {
            name.removesuffix(".saving")
            for name in names
            if name.endswith(".saving")
            and name.removesuffix("saving") + "checksums" not in names
        }
        return sorted(int(n) for n in names - unfinished if n.isdecimal())

    def _set_aside_damaged(self) -> list[int] | None:
        """Rename checkpoints whose files differ from those that were written.

        All files of the newest are verified. Of older ones only the host data are,
        which tell which of them is kept. Their arrays are verified when restored.

        Returns the remaining checkpoints; None if there were any, and none is sound.

        Raises:
          OSError: as `problem`.
        """
        steps = []
        for step in self._finished():
            if (problem := self._host_problem(step)) is None:
                steps.append(step)
            else:
                self._set_aside(step, problem)
        while steps:
            if (problem := self.problem(steps[-1])) is None:
                return steps
            self._set_aside(steps.pop(), problem)
        return None if any(self._folder.glob("*.damaged")) else []

    def _set_aside(self, step: int, problem: str) -> None:
        damaged = self._folder / f"{step}.damaged"
        logging.warning(
            "checkpoint %s is damaged (%s): it is set aside as %s",
            self._folder / str(step), problem, damaged.name,
        )  # fmt: skip
        if damaged.exists():
            damaged.rmtree()
        (self._folder / str(step)).rename(damaged)
        if self._sums(step).exists():  # to look at, or to put both back
            self._sums(step).replace(self._folder / f"{damaged.name}.checksums")

    def _host_problem(self, step: int) -> str | None:
        """Return why a checkpoint's host data differ from those written, or None.

        Raises:
          OSError: as `problem`.
        """
        name = f"host/{HOST}"
        file = self._folder / str(step) / name
        try:
            written = read_written(self._sums(step)).get(name)
            if _checksum(file, self._remote) != written:
                return f"{name} differs"
            self.host(step)
        except (*MISSING, ValueError) as error:
            return f"its host data cannot be verified: {error}"
        return None

    def _is_damaged(self, step: int) -> bool:
        """Return whether its files differ, or are gone: not where reading fails."""
        try:
            return self.problem(step) is not None
        except OSError:
            return False

    def problem(self, step: int) -> str | None:
        """Return why a checkpoint's files differ from those written, or None.

        Raises:
          OSError: if one cannot be read for another reason than that it is missing.
        """
        try:
            written = read_written(self._sums(step))
        except ValueError:
            return "its checksums are missing or damaged"
        try:
            actual = _checksums(self._folder / str(step), self._remote)
        except (*MISSING, Damaged) as error:
            return str(error)
        names = sorted(written.keys() | actual)
        wrong = next((k for k in names if written.get(k) != actual.get(k)), None)
        return wrong and f"{wrong} differs"


def _checkpointer(fence: Callable[[], None]) -> ocp.AsyncCheckpointer:
    """Return orbax's checkpointer; processes meet through the coordination service.

    None of its barriers is a collective of the devices, which could come between those
    of the train step, in another order on another process. Each shard is written by one
    process, so that its checksum is that of what is written.
    """
    _silence_orbax()
    several = set(range(jax.process_count())) if jax.process_count() > 1 else None
    processes = ocp.options.MultiprocessingOptions(
        active_processes=several, barrier_sync_key_prefix="acco" if several else None
    )
    background = ocp.options.AsyncOptions(post_finalization_callback=fence)
    arrays = ocp.PyTreeCheckpointHandler(
        use_compression=False,  # trained numbers hardly shrink
        multiprocessing_options=processes,
        type_handler_registry=ocp.type_handlers.create_type_handler_registry(
            (jax.Array, ocp.type_handlers.ArrayHandler(use_replica_parallel=False))
        ),
    )
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(
            multiprocessing_options=processes, async_options=background
        ),
        arrays=arrays,
        host=ocp.JsonCheckpointHandler(HOST, multiprocessing_options=processes),
        shards=shards.Handler(),
    )
    return ocp.AsyncCheckpointer(
        handler, async_options=background, multiprocessing_options=processes
    )


@functools.cache
def _silence_orbax() -> None:
    """Drop orbax's own messages: the one line that is raised names the failure."""
    ours = lambda record: "/orbax/" not in record.pathname  # noqa: E731
    logging.get_absl_logger().addFilter(
        lambda record: record.levelno < levels.ERROR or ours(record)
    )
    levels.getLogger("asyncio").setLevel(levels.CRITICAL)  # orbax's tasks, no others
    sys.unraisablehook = _but_for_orbax(sys.unraisablehook)


def _but_for_orbax(hook: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Return a hook without orbax's tasks, which complain when another's work failed.

    It also drops writes under way then, which end when their event loop is closed.
    """

    def heard(unraisable: Any) -> None:
        task = getattr(unraisable.object, "cr_code", None)
        late = str(unraisable.exc_value) == "Event loop is closed"
        if not late and (task is None or "/orbax/" not in task.co_filename):
            hook(unraisable)

    return heard


def _files(folder: epath.Path) -> Iterator[epath.Path]:
    for path in folder.iterdir():
        if path.is_dir():
            yield from _files(path)
        else:
            yield path


def _checksums(folder: epath.Path, remote: bool) -> dict[str, int]:
    """Return the CRC-32 of each file, or its size in a remote folder."""
    files = sorted(_files(folder))
    return {str(f.relative_to(folder)): _checksum(f, remote) for f in files}


def _checksum(file: epath.Path, remote: bool) -> int:
    if remote:
        return int(file.stat().length)
    if not stat.S_ISREG(os.stat(file).st_mode):  # a FIFO waits for its peer
        raise Damaged(f"{file.name} is not a regular file")
    crc = 0
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 24):
            crc = zlib.crc32(chunk, crc)
    return crc


def _other_arrays(wanted: Sequence[str], saved: Sequence[str]) -> str:
    """Return what a saved state has, or lacks, besides the state to restore, or ""."""
    has, wants = ({x.partition(".")[2] for x in names} for names in (saved, wanted))
    parts = {"has": has - wants, "lacks": wants - has}
    said = [
        f"{k} {', '.join(sorted(names)[:5])}" for k, names in parts.items() if names
    ]
    if not said:
        return ""
    return (
        f"its state {' and '.join(said)}: it is of another version of acco_jax or "
        "optax; continue with that one, or begin again in another folder"
    )
