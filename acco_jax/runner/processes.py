"""What the processes of a run tell each other.

A collective whose peer is gone fails as JAX's client fails, in some versions with a
ValueError. Here that is `Parted`, which nobody takes for a value that was refused.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


class Parted(RuntimeError):
    """Another process of the run is gone."""


@contextlib.contextmanager
def _together() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise Parted(f"the processes have lost each other: {error}") from error


def gathered(x: Any) -> np.ndarray:
    """Return every process's x, (processes, *x.shape).

    Raises:
      Parted: another process is gone.
    """
    if jax.process_count() == 1:
        return np.asarray(x)[None]
    with _together():
        return np.asarray(multihost_utils.process_allgather(x))


def from_process_0(x: Any) -> np.ndarray:
    """Return process 0's x, whose shape and dtype are the same on all processes.

    Raises:
      Parted: another process is gone.
    """
    if jax.process_count() == 1:
        return np.asarray(x)
    with _together():
        return np.asarray(multihost_utils.broadcast_one_to_all(x))


def numbers_from_process_0(numbers: list[int] | None) -> list[int] | None:
    """Return what process 0 gives, None or numbers, on all processes."""
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
    """Wait until all processes are at the place of this name.

    Raises:
      Parted: another process is gone.
    """
    if jax.process_count() > 1:
        with _together():
            multihost_utils.sync_global_devices(name)
