"""Times a run's gradients by themselves, which no communication can shorten."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from acco_jax.gradients import Accumulator
from acco_jax.groups import data_axes
from acco_jax.runner import processes

PyTree = Any


def gradient_seconds(
    loss_fn: Callable[..., Any],
    mesh: Mesh,
    params: PyTree,
    batch: PyTree,
    counts: jax.Array | None,
    *,
    microbatches: int,
    accumulate_dtype: Any = None,
    times: int = 5,
) -> float:
    """Times the local gradients of one batch, in seconds of all workers.

    It is the median of `times` on each process, after one to warm up; then the
    slowest's. Nothing is communicated meanwhile, and no optimizer runs.

    Args:
      loss_fn: as for `acco_jax.local_gradients`.
      mesh: of n workers, each a device or a group of them.
      params: as `loss_fn` takes them, the same on all workers.
      batch: leaves (n * microbatches * b, ...), split over the workers.
      counts: (n,) of the microbatches to compute, or None for all.
      microbatches: of each worker.
      accumulate_dtype: of the sums.
      times: how many to time.
    """
    accumulator = Accumulator(
        loss_fn, mesh, data_axes(mesh), microbatches, accumulate_dtype
    ).placed()

    @jax.jit
    def gradients(
        accumulator: Accumulator, params: PyTree, batch: PyTree, counts: Any
    ) -> PyTree:
        zeros = accumulator.zeros(params, batch, None)
        return accumulator.add(zeros, params, batch, None, counts)

    def seconds() -> float:
        start = time.perf_counter()
        jax.block_until_ready(gradients(accumulator, params, batch, counts))
        return time.perf_counter() - start

    median = np.float32(statistics.median([seconds() for _ in range(1 + times)][1:]))
    return float(processes.gathered(median).max())
