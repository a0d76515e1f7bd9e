"""Shards of a state, and their checksums: taken when saved, verified when restored."""

import dataclasses
import json
import math
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from acco_jax.command.files import read_object

FOLDER = "shards"  # inside a checkpoint: a file of checksums from each process
# name of a leaf -> where in the global array the shard lies -> the shard
Shards = dict[str, dict[str, np.ndarray]]
Sums = dict[str, dict[str, int]]


def on_host(arrays: dict[str, jax.Array], *, saved: bool = True) -> Shards:
    """Copy to this host one replica of each shard that this process holds.

    The copies stay valid when the arrays are donated afterwards.

    Args:
      arrays: by name.
      saved: leave out shards that another process saves.
    """
    copied = {
        name: [s for s in _single(x) if s.replica_id == 0 or not saved]
        for name, x in arrays.items()
    }
    for shards in copied.values():
        for shard in shards:  # start all copies before waiting for the first
            shard.data.copy_to_host_async()
    return {
        name: {_place(s.index, arrays[name].shape): jax.device_get(s.data) for s in own}
        for name, own in copied.items()
    }


def _single(x: jax.Array) -> list[jax.Shard]:
    """Return one shard of an array for each place, the saved replica if it is here."""
    found = sorted(x.addressable_shards, key=lambda s: -s.replica_id)
    return list({_place(s.index, x.shape): s for s in found}.values())


def written(file: BinaryIO, shards: Shards) -> Sums:
    """Write the bytes of shards, one after another; return the checksums."""
    sums: Sums = {name: {} for name in shards}
    for name, own in shards.items():
        for place, shard in own.items():
            file.write(_bytes(shard))
            sums[name][place] = crc(shard)
    return sums


def arrays(
    file: BinaryIO, like: dict[str, jax.ShapeDtypeStruct], sums: Sums
) -> dict[str, jax.Array]:
    """Return the arrays whose shards of this process were `written`.

    Raises:
      ValueError: if the file is cut.
      KeyError: if a shard is not in it.
    """
    found: dict[str, jax.Array] = {}
    for name, own in sums.items():
        x, here = like[name], dict[str, np.ndarray]()

        def shard(index: Any, x: Any = x, here: dict[str, Any] = here) -> Any:
            return here[_place(index, x.shape)]

        for place in own:
            shape = [s.stop - s.start for s in _slices(place)]
            data = file.read(math.prod(shape) * x.dtype.itemsize)
            here[place] = np.frombuffer(data, x.dtype).reshape(shape)
        found[name] = jax.make_array_from_callback(x.shape, x.sharding, shard)
    return found


def crc(x: np.ndarray) -> int:
    """Return the CRC-32 of an array's bytes, in C order."""
    return zlib.crc32(_bytes(x))


def _bytes(x: np.ndarray) -> memoryview:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8).data


def read(checkpoint: epath.Path) -> Sums:
    """Return the checksums of a checkpoint, of all processes that saved it.

    Raises:
      ValueError: if a file of them is damaged.
    """
    sums: Sums = {}
    for file in sorted((checkpoint / FOLDER).glob("*.json")):
        for name, own in read_object(file).items():
            if not isinstance(own, dict):
                raise ValueError(f"{file} is damaged: {name} has no checksums.")
            sums.setdefault(name, {}).update(own)
    return sums


def problem(arrays: dict[str, jax.Array], sums: Sums) -> str | None:
    """Return which restored shard differs from the saved one, or None.

    Only shards that this process holds whole are compared: shards that lie where they
    lay when they were saved, and any part of an array that is addressable as a whole.
    """
    for name, x in arrays.items():
        for place, shard in _held(x, list(sums.get(name, ()))):
            if crc(shard) != sums[name][place]:
                return f"the shard [{place}] of {name} differs"
    return None


def _held(x: jax.Array, places: list[str]) -> Iterator[tuple[str, np.ndarray]]:
    here = {_place(s.index, x.shape): s.data for s in x.addressable_shards}
    for place in places:
        if place in here:
            yield place, jax.device_get(here[place])
        elif x.is_fully_addressable:
            yield place, jax.device_get(x)[_slices(place)]


def _place(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    """Format where a shard lies in the global array, as in 0:4,8:16."""
    ranges = (i.indices(size) for i, size in zip(index, shape, strict=True))
    return ",".join(f"{start}:{stop}" for start, stop, _ in ranges)


def _slices(place: str) -> tuple[slice, ...]:
    ranges = (r.split(":") for r in place.split(",") if r)
    return tuple(slice(int(start), int(stop)) for start, stop in ranges)


class Handler(ocp.AsyncCheckpointHandler):
    """Handler that writes a process's checksums into a checkpoint in background."""

    async def async_save(
        self, directory: epath.Path, args: "Save"
    ) -> list[ocp.future.Future]:
        write = self._write(directory, args.shards)
        return [ocp.future.CommitFutureAwaitingContractedSignals(write, name=FOLDER)]

    async def _write(self, directory: epath.Path, shards: Shards) -> None:
        sums = {
            name: {place: crc(shard) for place, shard in own.items()}
            for name, own in shards.items()
        }
        file = directory / f"{jax.process_index()}.json"
        file.write_text(json.dumps({k: v for k, v in sums.items() if v}))

    def save(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("checksums are written asynchronously alone.")

    def restore(self, directory: epath.Path, args: Any = None) -> None:
        raise NotImplementedError("`read` reads them.")


@ocp.args.register_with_handler(Handler, for_save=True, for_restore=True)
@dataclasses.dataclass(repr=False)
class Save(ocp.args.CheckpointArgs):
    """Request to save the checksums of these shards, which are on this host."""

    shards: Shards
