"""The smallest first half of acco's step that covers the communication, measured.

The estimate is closer to the next commit the more of a step it has seen: the fewer
microbatches the first half computes, the closer acco learns to a synchronous method
(`Halves` has the recurrence). The first half's computation also has the estimate's
communication beside it. So the best first half is the smallest that takes no longer.
"""

import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from acco_jax.core.leaves import PyTree, Rng
from acco_jax.core.state import State
from acco_jax.step.fused import TrainStep
from acco_jax.step.halves import Halves
from acco_jax.step.logged import LoggedStep

SMALLEST = 4  # a first half of a quarter of a step is the smallest whose loss is known
LONGER = 1.03  # times as long, at most: what timing cannot tell from as long
FEWEST, MOST = 3, 30  # timed steps of each candidate,
SECONDS = 2.0  # as many as take these


def first_halves(microbatches: int) -> tuple[int, ...]:
    """Return the first halves to choose from: a quarter of a step, and a half.

    Args:
      microbatches: of each worker in a step.

    Returns:
      Microbatches, ascending: first_halves(4) is (1, 2), first_halves(2) is (1,).
    """
    quarter = -(-microbatches // SMALLEST)
    return tuple(sorted({quarter, max(microbatches // 2, 1)}))


def ratios(seconds: np.ndarray) -> np.ndarray:
    """Return how many times as long as the fastest each candidate typically takes.

    Candidates are compared within a turn: other load on a machine comes and goes.

    Args:
      seconds: (times, candidates).

    Returns:
      (candidates,), the smallest is 1.
    """
    found = np.median(seconds / seconds.min(axis=1, keepdims=True), axis=0)
    return found / found.min()


def smallest(seconds: np.ndarray) -> int:
    """Return the index of the first candidate that typically takes no longer.

    Args:
      seconds: (times, candidates).
    """
    return int(np.argmax(ratios(seconds) <= LONGER))


def step_seconds(
    step: TrainStep,
    halves: Sequence[Halves | None],
    params: PyTree,
    state: State,
    batch: PyTree,
    counts: Any = None,
    rng: Rng = None,
    extra: dict[str, Any] | None = None,
    *,
    calls: int = 2,
) -> np.ndarray:
    """Time optimizer steps with each of some halves.

    Args:
      step: of halves, if any are given.
      halves: to time one after the other; None: the step's own counts.
      params, state, batch, counts, rng, extra: of a call; params and state are donated.
      calls: of a step.

    Returns:
      float32 (times, candidates): seconds of a step, on the slowest process. They are
      as many as take two seconds, but 3 to 30.
    """

    def turn() -> list[float]:
        nonlocal params, state
        seconds = list[float]()
        for each in halves:
            if each is not None:
                assert isinstance(step, LoggedStep)
                step.alternate(each)
            start = time.perf_counter()
            for _ in range(calls):
                params, state, metrics = step(params, state, batch, counts, rng, extra)
            jax.block_until_ready((params, state, metrics))
            seconds.append(time.perf_counter() - start)
        return seconds

    turn()  # compiles
    first = _slowest([turn()])
    times = min(max(FEWEST, int(SECONDS / max(first.max(), 1e-9))), MOST)
    return np.concatenate([first, _slowest([turn() for _ in range(times - 1)])])


def _slowest(seconds: list[list[float]]) -> np.ndarray:
    """Return, on every process, the seconds of the slowest."""
    own = np.asarray(seconds, np.float32)
    if jax.process_count() == 1:
        return own
    found: np.ndarray = multihost_utils.process_allgather(own).max(axis=0)
    return found
