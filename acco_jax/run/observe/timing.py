"""Times of a run: when its work ends, compilations, and the gradients' own time."""

import concurrent.futures
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from acco_jax.core.gradients import Accumulator
from acco_jax.core.groups import data_axes
from acco_jax.run.state import processes

PyTree = Any
Span = tuple[float, float]  # begin and end, of time.perf_counter
COMPILER = "/jax/core/compile/"  # its events, of which some contain others


class Ends:
    """Recorder of when arrays are computed, without waiting for them."""

    def __init__(self) -> None:
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "ends")

    def of(self, arrays: PyTree) -> concurrent.futures.Future[float]:
        """Return the time at which arrays that may be under way are computed."""
        if all(x.is_ready() for x in jax.tree.leaves(arrays)):
            done: concurrent.futures.Future[float] = concurrent.futures.Future()
            done.set_result(time.perf_counter())
            return done
        return self._thread.submit(_end, arrays)

    def close(self) -> None:
        self._thread.shutdown(wait=False)


def _end(arrays: PyTree) -> float:
    jax.block_until_ready(arrays)
    return time.perf_counter()


class Compilations:
    """Recorder of when JAX traces, lowers or compiles, until it is closed."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        jax.monitoring.register_event_time_span_listener(self._notice)

    def seconds(self, begin: float, end: float) -> float:
        """Return the seconds of a span in which JAX compiled; forget earlier ones."""
        self._spans = [span for span in self._spans if span[1] > begin]
        return covered([(b, min(e, end)) for b, e in self._spans], begin)

    def close(self) -> None:
        jax.monitoring.unregister_event_time_span_listener(self._notice)

    def _notice(
        self, event: str, start_time: float, end_time: float, **_: str | int
    ) -> None:
        if event.startswith(COMPILER):
            now = time.perf_counter()
            self._spans.append((now - (end_time - start_time), now))


def covered(spans: Sequence[Span], start: float) -> float:
    """Return how many seconds after `start` are in at least one span."""
    total = 0.0
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, start))
        start = max(start, end)
    return total


def gradient_seconds(
    loss_fn: Callable[..., Any],
    mesh: Mesh,
    params: PyTree,
    batch: PyTree,
    counts: jax.Array | None,
    *,
    microbatches: int,
    accumulate_dtype: DTypeLike | None = None,
    times: int = 5,
) -> float:
    """Time the local gradients of one batch, in seconds of all workers.

    It is the median of `times` on each process, after one to warm up; then the
    slowest process's. Nothing is communicated meanwhile, and no optimizer runs.

    Args:
      loss_fn: as for `acco_jax.local_gradients`.
      mesh: of n workers, each a device or a group of them.
      params: as `loss_fn` takes them, equal on all workers.
      batch: leaves (n * microbatches * b, ...), split over the workers.
      counts: (n,) of the microbatches to compute, or None for all.
      microbatches: of each worker.
      accumulate_dtype: of the sums.
      times: number of timed calls.
    """
    accumulator = Accumulator(
        loss_fn, mesh, data_axes(mesh), microbatches, accumulate_dtype
    ).placed()

    @jax.jit
    def gradients(
        accumulator: Accumulator,
        params: PyTree,
        batch: PyTree,
        counts: jax.Array | None,
    ) -> PyTree:
        return accumulator.add(None, params, batch, None, counts)

    def seconds() -> float:
        start = time.perf_counter()
        jax.block_until_ready(gradients(accumulator, params, batch, counts))
        return time.perf_counter() - start

    median = np.float32(statistics.median([seconds() for _ in range(1 + times)][1:]))
    return float(processes.gathered(median).max())
