"""Counts of microbatches per worker with which all workers end together.

A worker that takes s_i seconds for a microbatch ends c_i of them after c_i s_i; the
half-round ends with the last one, after max_i c_i s_i.
"""

import dataclasses
import heapq
import math
import numbers
import statistics
from collections.abc import Sequence

EVERY = 8  # half-rounds between probes, at least
SLOW = 1.5  # a straggler takes this many times as long as the median
CHANGED = 1.5  # a worker takes this many times as long as before: not noise
NEWEST = 0.25  # weight of the newest time in a worker's mean


@dataclasses.dataclass(frozen=True)
class Balanced:
    """Counts of microbatches per worker that follow its measured speed.

    In a probe each worker times a microbatch by itself, in a program without any
    collective. It repeats it while `share` leaves time or the slowest is not done. The
    estimate is a running mean of these times. If the smaller of the last two differs
    from it by a factor of `CHANGED`, that time becomes the estimate. So a hiccup moves
    little. A worker that became much slower is followed at the second probe, one that
    recovered at the first. There are 8 half-rounds or more between probes, enough to
    keep their time within `share`. With some 20 microbatches per worker in a
    half-round (the time of a probe is the slowest worker's) a change to a quarter of
    the speed, and back, is followed within 20 half-rounds. With fewer it takes
    proportionally more, or a larger share.

    Attributes:
      total: microbatches of all workers in a half-round.
      most: of each worker; batches hold this many.
      floor: of each worker, however slow.
      grows: False: counts add up to `total`. True: the slowest worker computes its
        even part of it, the others what they end in the same time.
      share: of the time that probes may take.
      gain: counts change only where microbatches per second grow by more than this.
    """

    total: int
    most: int = 16
    floor: int = 0
    grows: bool = False
    share: float = 0.01
    gain: float = 0.1

    def __post_init__(self) -> None:
        counts = self.total, self.most, self.floor
        if not all(isinstance(x, numbers.Integral) for x in counts):
            raise ValueError(f"{self}: give whole numbers as total, most and floor.")
        if not 0 <= self.floor <= self.most or self.most < 1:
            raise ValueError(f"{self}: give a floor from 0 to most, at least 1.")
        if not 0 < self.share < 1 or not 0 <= self.gain < math.inf:
            raise ValueError(
                f"{self}: give a share of the time between 0 and 1, and a gain of at "
                "least 0."
            )

    def check(self, workers: int) -> None:
        """Raise a ValueError if this number of workers cannot have such counts."""
        least, most = workers * max(self.floor, 0), workers * self.most
        if not max(least, 1) <= self.total <= most:
            raise ValueError(
                f"{self}: {workers} workers compute from {max(least, 1)} to {most} "
                "microbatches: change total, floor or most."
            )


def dealt(seconds: Sequence[float], total: int, floor: int, most: int) -> list[int]:
    """Return counts of this sum with which the last worker ends as early as possible.

    Each microbatch goes to the worker who ends with it first, the lower one of two.

    Args:
      seconds: of a microbatch on each of n workers.
      total: the sum, from n floor to n most.
      floor, most: bounds of each count.
    """
    counts = [floor] * len(seconds)
    ends = [(s * (floor + 1), i) for i, s in enumerate(seconds) if floor < most]
    heapq.heapify(ends)
    for _ in range(total - sum(counts)):
        _, i = heapq.heappop(ends)
        counts[i] += 1
        if counts[i] < most:
            heapq.heappush(ends, (seconds[i] * (counts[i] + 1), i))
    return counts


def filled(seconds: Sequence[float], total: int, most: int) -> list[int]:
    """Return each worker's count while the slowest computes its part of `total`."""
    each = math.ceil(total / len(seconds))
    end = max(seconds) * each * (1 + 1e-9)
    return [min(most, max(each, int(end / max(s, 1e-12)))) for s in seconds]


def pace(counts: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the microbatches per second of all workers, which wait for the slowest."""
    end = max(c * s for c, s in zip(counts, seconds, strict=True))
    return sum(counts) / max(end, 1e-12)


def _followed(mean: float, last: float, newest: float) -> float:
    """Return a worker's estimated seconds per microbatch after another time."""
    both = min(last, newest)
    if not mean / CHANGED <= both <= mean * CHANGED:
        return both
    return mean + NEWEST * (min(newest, mean * CHANGED) - mean)


class Balancer:
    """The measured speed of the workers, and the counts that follow from it.

    Attributes:
      counts: of every worker.
      seconds: of a microbatch on every worker; empty before the first probe.
      wait: half-rounds until the next probe.
      duration: seconds for which workers repeat their microbatch in it.
    """

    def __init__(self, bounds: Balanced, workers: int) -> None:
        bounds.check(workers)
        self._bounds, self._last = bounds, list[float]()
        self.seconds: list[float] = []
        self.counts = dealt([1.0] * workers, bounds.total, bounds.floor, bounds.most)
        self.wait, self.duration = 0, 0.0

    @property
    def may_be_single(self) -> bool:
        """Return whether counts may come to at most one microbatch per worker."""
        return self._bounds.total <= len(self.counts)

    def take(
        self,
        seconds: Sequence[float],
        spent: float,
        elapsed: float,
        call_seconds: float,
    ) -> None:
        """Follow a probe.

        Args:
          seconds: of a microbatch on every worker.
          spent: seconds that all probes have taken, with this one.
          elapsed: seconds since the first began.
          call_seconds: seconds of each since the last probe; 0: there is none.
        """
        b, last = self._bounds, self._last or seconds
        known = self.seconds or seconds
        self._last = list(seconds)
        self.seconds = list(map(_followed, known, last, seconds))
        if b.grows:
            counts = filled(self.seconds, b.total, b.most)
        else:
            counts = dealt(self.seconds, b.total, b.floor, b.most)
        now, then = (pace(c, self.seconds) for c in (self.counts, counts))
        if then > (1 + b.gain) * now:
            self.counts = counts
        ends = max(c * s for c, s in zip(self.counts, self.seconds, strict=True))
        call_seconds = call_seconds or max(ends, 1e-12)
        self.duration = max(max(self.seconds), b.share * EVERY * call_seconds)
        cost = max(self.duration, max(seconds))
        within = ((spent + cost) / b.share - elapsed) / call_seconds
        self.wait = max(EVERY, math.ceil(within))

    @property
    def stragglers(self) -> dict[int, float]:
        """The slow workers, each with its time as a multiple of the median."""
        if not self.seconds:
            return {}
        middle = max(statistics.median(self.seconds), 1e-12)
        times = {i: s / middle for i, s in enumerate(self.seconds)}
        return {i: x for i, x in times.items() if x > SLOW}
