"""Checkpoints of parameters, optimizer state and data iterator, verified when read."""

import json
import math
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from jax.experimental import multihost_utils

from acco_jax.runner.files import read_object, write_whole

PyTree = Any


class Checkpoints:
    """The checkpoints of one run, by half-round.

    orbax writes the arrays, sharded; beside each checkpoint lies a file of checksums,
    so that a damaged one is seen instead of trained on. While one is written a file
    N.saving is there: what a killed process leaves is unfinished, not damaged.
    """

    def __init__(self, folder: Path, keep: int, *, repair: bool = True) -> None:
        """Opens a folder, and sets damaged checkpoints in it aside.

        Args:
          folder: of the checkpoints.
          keep: how many of the newest ones.
          repair: False for a folder that may be another run's: nothing in it changes.

        Raises:
          ValueError: there are checkpoints, and all of them are damaged.
        """
        self._folder, self._keep = folder.absolute(), keep
        self._losses: dict[int, float | None] = {}  # held out, by half-round
        sound = True
        if repair and jax.process_index() == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._discard_unfinished()
            sound = self._set_aside_damaged()
        if jax.process_count() > 1:
            sound = bool(multihost_utils.broadcast_one_to_all(np.bool_(sound)))
        if not sound:
            raise ValueError(
                f"every checkpoint in {self._folder} is damaged: restore an intact "
                "copy or, to start from scratch, use another workdir."
            )
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=None,  # `save` removes those that are too many
                enable_async_checkpointing=False,
                cleanup_tmp_directories=repair,  # of a process killed while writing
                create=repair,
                read_only=not repair,
            ),
        )

    def latest(self) -> int | None:
        """Returns the half-rounds of the newest sound checkpoint, None without any."""
        return self._manager.latest_step()

    def save(self, half_round: int, arrays: PyTree, host: dict[str, Any]) -> None:
        """Writes a checkpoint whole; `host` is JSON, the same on every process.

        Of those before it the newest are kept, `keep` with this one, and the one whose
        host["held_out_loss"] is lowest.

        Raises:
          OSError: it cannot be written (a full disk); those before it are whole.
        """
        if jax.process_index() == 0:
            self._saving(half_round).touch()
        self._manager.save(
            half_round,
            args=ocp.args.Composite(
                arrays=ocp.args.StandardSave(_named(arrays)),
                host=ocp.args.JsonSave(host),
            ),
        )
        self._manager.wait_until_finished()
        if jax.process_index() == 0:
            sums = _checksums(self._folder / str(half_round))
            write_whole(self._sums(half_round), json.dumps(sums))
            self._saving(half_round).unlink()
        if jax.process_count() > 1:  # or the others wait in a collective that times out
            multihost_utils.sync_global_devices(f"checkpoint {half_round} written")
        # only now: a process killed before the checksums leaves the last sound one
        self._losses[half_round] = host.get("held_out_loss")
        steps = sorted(self._manager.all_steps())
        best = min(steps, key=self._held_out_loss)
        for step in steps[: -self._keep]:
            if step == best and self._held_out_loss(step) < math.inf:
                continue
            self._manager.delete(step)
            if jax.process_index() == 0:
                self._sums(step).unlink(missing_ok=True)

    def _held_out_loss(self, half_round: int) -> float:
        """Returns the held-out loss that a checkpoint says; infinity without."""
        if half_round not in self._losses:
            self._losses[half_round] = self.host(half_round).get("held_out_loss")
        loss = self._losses[half_round]
        return math.inf if loss is None else float(loss)

    def restore(self, half_round: int, like: PyTree) -> tuple[PyTree, dict[str, Any]]:
        """Returns a checkpoint's arrays and host data.

        Args:
          half_round: as in `save`.
          like: the tree to restore, of arrays or ShapeDtypeStructs with shardings.
        """
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, _named(like))
        checkpoint = self._manager.restore(
            half_round,
            args=ocp.args.Composite(
                arrays=ocp.args.StandardRestore(abstract), host=ocp.args.JsonRestore()
            ),
        )
        leaves, treedef = jax.tree.flatten(like)
        arrays = [
            jax.random.wrap_key_data(a, impl=_key_impl(x)) if _is_key(x) else a
            for x, a in zip(leaves, checkpoint.arrays.values(), strict=True)
        ]
        return jax.tree.unflatten(treedef, arrays), checkpoint.host

    def host(self, half_round: int) -> dict[str, Any]:
        """Returns the host data of a checkpoint, without its arrays."""
        only = ocp.args.Composite(host=ocp.args.JsonRestore())
        host: dict[str, Any] = self._manager.restore(half_round, args=only).host
        return host

    def close(self) -> None:
        self._manager.close()

    def _sums(self, half_round: int) -> Path:
        return self._folder / f"{half_round}.checksums"

    def _saving(self, half_round: int) -> Path:
        return self._folder / f"{half_round}.saving"

    def _discard_unfinished(self) -> None:
        """Removes what a process that was killed while it saved has left."""
        for mark in sorted(self._folder.glob("*.saving")):
            step = self._folder / mark.stem
            if step.exists() and not self._sums(int(mark.stem)).exists():
                logging.info("checkpoint %s was not finished: discarded", step)
                shutil.rmtree(step)
            mark.unlink()

    def _set_aside_damaged(self) -> bool:
        """Renames checkpoints whose files are not those that were written.

        Returns False if there are or were checkpoints, and none is sound.
        """
        names = [path.name for path in self._folder.iterdir()]
        for step in sorted((int(n) for n in names if n.isdigit()), reverse=True):
            problem = self.problem(step)
            if problem is None:
                return True
            damaged = self._folder / f"{step}.damaged"
            logging.warning(
                "checkpoint %s is damaged (%s): it is set aside as %s",
                self._folder / str(step), problem, damaged.name,
            )  # fmt: skip
            shutil.rmtree(damaged, ignore_errors=True)
            os.replace(self._folder / str(step), damaged)
            self._sums(step).unlink(missing_ok=True)
        return not any(n.isdigit() or n.endswith(".damaged") for n in names)

    def problem(self, step: int) -> str | None:
        """Returns why the files of a checkpoint are not those written, or None."""
        try:
            written = read_object(self._sums(step))
        except ValueError:
            return "its checksums are missing or damaged"
        actual = _checksums(self._folder / str(step))
        names = sorted(written.keys() | actual)
        wrong = next((k for k in names if written.get(k) != actual.get(k)), None)
        return wrong and f"{wrong} differs"


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _key_impl(x: Any) -> Any:
    impls: list[Any] = []
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), x)
    return impls[0]


def _data(x: Any) -> Any:
    """Replaces keys, arrays or abstract, by their data, which orbax can write."""
    if not _is_key(x):
        return x
    if isinstance(x, jax.Array):
        return jax.random.key_data(x)
    bits = jax.eval_shape(jax.random.key_data, x)
    return jax.ShapeDtypeStruct(bits.shape, bits.dtype, sharding=x.sharding)


def _named(tree: PyTree) -> dict[str, Any]:
    """Names leaves by an index, which keeps their order, and by their path."""
    return {
        f"{i:05d}.{jax.tree_util.keystr(path, simple=True, separator='.')}": _data(x)
        for i, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(tree))
    }


def _checksums(folder: Path) -> dict[str, int]:
    sums = {}
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        crc = 0
        with open(file, "rb") as stream:
            while chunk := stream.read(1 << 24):
                crc = zlib.crc32(chunk, crc)
        sums[str(file.relative_to(folder))] = crc
    return sums
