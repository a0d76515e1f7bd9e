"""Communication between the processes of a run, on the host.

A collective whose peer is gone fails as JAX's client fails, in some versions with a
ValueError. Here it is `Parted`, which no caller takes for a rejected value.
"""

import contextlib
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.typing import ArrayLike


class Parted(RuntimeError):
    """Another process of the run is gone."""


@contextlib.contextmanager
def _together() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise Parted(f"the processes have lost each other: {error}") from error


def gathered(x: ArrayLike) -> np.ndarray:
    """Return every process's x, (processes, *x.shape).

    Raises:
      Parted: if another process is gone.
    """
    if jax.process_count() == 1:
        return np.asarray(x)[None]
    with _together():
        return np.asarray(multihost_utils.process_allgather(x))


def from_process(source: int, x: ArrayLike) -> np.ndarray:
    """Return one process's x; shape and dtype must be equal on all processes.

    Raises:
      Parted: if another process is gone.
    """
    if jax.process_count() == 1:
        return np.asarray(x)
    mine = jax.process_index() == source
    with _together():
        return np.asarray(multihost_utils.broadcast_one_to_all(x, is_source=mine))


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
            multihost_utils.sync_global_devices(name)
