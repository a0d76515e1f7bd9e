"""Unequal halves of an optimizer step: how much of it the estimate contains."""

import dataclasses
from collections.abc import Sequence

from acco_jax.core.microbatches import whole_numbers


@dataclasses.dataclass(frozen=True)
class Halves:
    """Microbatches of acco's two half-rounds, the same in every step.

    `first` are computed at theta(t), beside the estimate's communication, `second` at
    theta~(t+1), beside the commit's. The pipeline fill computes `second`, too. With
    f the second half's share of a step's weight, theta~ misses 1 - f of the gradients
    that the commit will have, and f of the commit's gradients are computed there. On a
    loss of curvature h, with a step of kappa = eta (1 - beta) per gradient (momentum
    beta), the error e = theta~ - theta obeys

        e(t+1) = -kappa h (1 - f) e(t) + noise of variance ~ (1 - f) / f,

    and enters the gradient as f h e. A larger f is stable at larger learning rates, and
    the remaining error is smaller (f (1 - f) of its variance). f -> 1 is zero1. The
    cost is overlap: the estimate's communication has only `first` beside it, so take
    the smallest count that covers it. A single microbatch overlaps both collectives,
    with its forward and its backward pass one each.

    Attributes:
      first: of each worker, or one number for every worker.
      second: likewise.
    """

    first: int | Sequence[int]
    second: int | Sequence[int]

    def __post_init__(self) -> None:
        for name in ("first", "second"):
            object.__setattr__(self, name, whole_numbers(getattr(self, name)))
        for name, counts in (("first", self._first), ("second", self._second)):
            whole = all(type(c) is int and c >= 0 for c in counts)
            if not whole or not any(counts):
                raise ValueError(
                    f"{self}: {name} is not a number of microbatches: give an integer "
                    "of at least 1, or one for each worker."
                )

    @property
    def _first(self) -> Sequence[int]:
        return self.first if isinstance(self.first, Sequence) else [self.first]

    @property
    def _second(self) -> Sequence[int]:
        return self.second if isinstance(self.second, Sequence) else [self.second]

    @property
    def most(self) -> int:
        """The number of microbatches that a worker's part of a batch holds."""
        return max(*self._first, *self._second)


class Turns:
    """The counts of `Halves` by half-round, one for each worker."""

    def __init__(self, halves: Halves, workers: int) -> None:
        """Expand the halves to one count per worker.

        Raises:
          ValueError: the halves are for another number of workers.
        """
        self.lines = list[list[int]]()  # the second half's (pipeline fill), the first's
        for counts in (halves._second, halves._first):
            if len(counts) not in (1, workers):
                raise ValueError(
                    f"{halves} has {len(counts)} counts: give one for each of the "
                    f"{workers} workers, or one for all."
                )
            self.lines.append(list(counts) * (workers // len(counts)))

    def line(self, call: int) -> list[int]:
        """Return the counts of a half-round; half-round 0 is the pipeline fill."""
        return self.lines[call % 2]
