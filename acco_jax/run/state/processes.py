"""Communication between the processes of a run, on the host.

Numbers and names go by JAX's coordination service, to which every process is connected:
a collective would be compiled for each size. What is large goes by the devices.

Where a peer is gone JAX's client fails, in some versions with a ValueError. Here it is
`Parted`, which no caller takes for a rejected value.
"""

import contextlib
import itertools
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.typing import ArrayLike
from orbax.checkpoint import multihost

LARGE = 1 << 20  # bytes of all processes together that go by the devices
TIMEOUT = 1_800_000  # milliseconds; a process may compile so much longer than another
_turns = itertools.count(1)


class Parted(RuntimeError):
    """Another process of the run is gone."""


@contextlib.contextmanager
def _together() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise Parted(f"the processes have lost each other: {error}") from error


def _by_coordinator(data: bytes) -> list[bytes]:
    """Return every process's bytes; all call it in the same order."""
    client, turn = multihost.get_jax_distributed_client(), next(_turns)
    mine = f"{jax.process_index():06}"
    client.key_value_set_bytes(f"acco_jax/{turn}/{mine}", data)
    client.wait_at_barrier(f"acco_jax/{turn}", TIMEOUT)
    found = sorted(client.key_value_dir_get_bytes(f"acco_jax/{turn}/"))
    # whoever is here has read the turn before
    client.key_value_delete(f"acco_jax/{turn - 1}/{mine}")
    return [value for _, value in found]


def gathered(x: ArrayLike) -> np.ndarray:
    """Return every process's x, (processes, *x.shape).

    Raises:
      Parted: if another process is gone.
    """
    x, count = np.asarray(x), jax.process_count()
    if count == 1:
        return x[None]
    with _together():
        if x.nbytes * count > LARGE:
            return np.asarray(multihost_utils.process_allgather(x))
        rows = _by_coordinator(x.tobytes())
    return np.stack([np.frombuffer(row, x.dtype).reshape(x.shape) for row in rows])


def from_process(source: int, x: ArrayLike) -> np.ndarray:
    """Return one process's x; shape and dtype must be equal on all processes.

    Raises:
      Parted: if another process is gone.
    """
    x, mine = np.asarray(x), jax.process_index() == source
    if jax.process_count() == 1:
        return x
    with _together():
        if x.nbytes > LARGE:
            found = multihost_utils.broadcast_one_to_all(x, is_source=mine)
            return np.asarray(found)
        data = _by_coordinator(x.tobytes() if mine else b"")[source]
    return np.frombuffer(data, x.dtype).reshape(x.shape).copy()


def from_process_0(x: ArrayLike) -> np.ndarray:
    """Return process 0's x, as `from_process` does."""
    return from_process(0, x)


def bytes_from(source: int, data: bytes) -> bytes:
    """Return one process's bytes on all."""
    size = int(from_process(source, np.int32(len(data))))
    mine = np.zeros(size, np.uint8)
    if jax.process_index() == source:
        mine[:] = np.frombuffer(data, np.uint8)
    return from_process(source, mine).tobytes()


def all_bytes(data: bytes) -> list[bytes]:
    """Return every process's bytes."""
    sizes = gathered(np.int32(len(data))).tolist()
    padded = np.zeros(max(sizes), np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    rows = gathered(padded)
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]


def numbers_from_process_0(numbers: list[int] | None) -> list[int] | None:
    """Return process 0's list of numbers, or its None, on all processes."""
    if jax.process_count() == 1:
        return numbers
    share = from_process_0
    size = int(share(np.int32(-1 if numbers is None else len(numbers))))
    if size < 1:
        return None if size < 0 else []
    mine = np.zeros(size, np.int32)
    if numbers:
        mine[:] = numbers
    return sorted(share(mine).tolist())


def meet(name: str) -> None:
    """Wait until all processes have called this with the same name.

    Raises:
      Parted: if another process is gone.
    """
    if jax.process_count() > 1:
        with _together():
            names = set(_by_coordinator(name.encode()))
            if names != {name.encode()}:
                raise RuntimeError(f"they meet at different places: {sorted(names)}")
