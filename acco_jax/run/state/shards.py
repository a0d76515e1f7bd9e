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

from acco_jax.command.files import read_written

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
    own = {
        name: {
            place: x.addressable_data(i)
            for place, i, replica in _single(x)
            if replica == 0 or not saved
        }
        for name, x in arrays.items()
    }
    copies: Shards = jax.device_get(own)  # starts all before it waits for the first
    return copies


_known: dict[Any, list[tuple[str, int, int]]] = {}


def _single(x: jax.Array) -> list[tuple[str, int, int]]:
    """Return a shard for each place of an array, the saved replica if it is here.

    Each is the place, its index among the addressable ones, and its replica.
    """
    key = x.sharding, x.shape  # a copy asks for hundreds, and again and again
    if key not in _known:
        found = [
            (where(s.index, x.shape), i, s.replica_id)
            for i, s in enumerate(x.addressable_shards)
        ]
        found.sort(key=lambda shard: -shard[2])
        _known[key] = list({shard[0]: shard for shard in found}.values())
    return _known[key]


def written(file: BinaryIO, shards: Shards) -> Sums:
    """Write the bytes of shards, one after another; return the checksums."""
    sums: Sums = {name: {} for name in shards}
    for name, own in shards.items():
        for place, shard in own.items():
            file.write(octets(shard))
            sums[name][place] = crc(shard)
    return sums


def read_back(file: BinaryIO, dtypes: dict[str, np.dtype[Any]], sums: Sums) -> Shards:
    """Return the shards that were `written`.

    Raises:
      ValueError: if one differs from what was written.
      KeyError: if an array has no dtype.
    """
    found: Shards = {name: {} for name in sums}
    for name, own in sums.items():
        for at, expected in own.items():
            data = file.read(volume(at) * dtypes[name].itemsize)
            if zlib.crc32(data) != expected:
                raise ValueError(f"the shard [{at}] of {name} differs")
            found[name][at] = np.frombuffer(data, dtypes[name]).reshape(shape(at))
    return found


def placed(like: jax.ShapeDtypeStruct, own: dict[str, np.ndarray]) -> jax.Array:
    """Return an array from its shards by place, or from others that cover them."""
    sharding = like.sharding
    assert sharding is not None

    def shard(index: Any) -> np.ndarray:
        at = where(index, like.shape)
        return own[at] if at in own else _cut(own, at, like.dtype)

    return jax.make_array_from_callback(like.shape, sharding, shard)


def _cut(own: dict[str, np.ndarray], at: str, dtype: Any) -> np.ndarray:
    """Return the shard at a place from the shards that cover it."""
    wanted, found = _slices(at), np.empty(shape(at), dtype)
    for place, x in own.items():
        ranges = [
            (max(a.start, b.start), min(a.stop, b.stop), a.start, b.start)
            for a, b in zip(wanted, _slices(place), strict=True)
        ]
        if all(start < stop for start, stop, _, _ in ranges):
            there = tuple(slice(i - a, j - a) for i, j, a, _ in ranges)
            found[there] = x[tuple(slice(i - b, j - b) for i, j, _, b in ranges)]
    return found


def shape(place: str) -> tuple[int, ...]:
    """Return the shape of the shard at a place."""
    return tuple(s.stop - s.start for s in _slices(place))


def volume(place: str) -> int:
    """Return how many numbers the shard at a place has."""
    return math.prod(shape(place))


def size(shards: Shards) -> int:
    """Return the bytes of shards."""
    return sum(x.nbytes for own in shards.values() for x in own.values())


def crc(x: np.ndarray) -> int:
    """Return the CRC-32 of an array's bytes, in C order."""
    return zlib.crc32(octets(x))


def octets(x: np.ndarray) -> memoryview:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8).data


def read(checkpoint: epath.Path) -> Sums:
    """Return the checksums of a checkpoint, of all processes that saved it.

    Raises:
      ValueError: if a file of them is damaged.
      OSError: if one cannot be read for another reason.
    """
    sums: Sums = {}
    for file in sorted((checkpoint / FOLDER).glob("*.json")):
        for name, own in read_written(file).items():
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
    here = {where(s.index, x.shape): s.data for s in x.addressable_shards}
    for place in places:
        if place in here:
            yield place, jax.device_get(here[place])
        elif x.is_fully_addressable:
            yield place, jax.device_get(x)[_slices(place)]


def where(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
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
