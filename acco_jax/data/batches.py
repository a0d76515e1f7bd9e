"""Batches of rows, in an order that does not depend on how many workers read them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from acco_jax.data.order import Order
from acco_jax.data.rows import Batch, Rows


@dataclasses.dataclass(frozen=True)
class Slots:
    """The places of the rows of a global batch, and which of them are computed.

    A batch holds worker after worker, of each step after step, of each microbatch after
    microbatch. Rows are taken for all workers of a step before the next step. Where
    counts adapt, they are taken for a microbatch of all workers before the next one, so
    that the oldest rows are computed first.

    Attributes:
      workers: n.
      steps: inner steps of each worker in a batch.
      microbatches: for which a worker's step has room.
      rows: of a microbatch.
      counts: how many microbatches each worker computes; None: all; () means that they
        are known only after the batch was computed.
    """

    workers: int
    steps: int
    microbatches: int
    rows: int
    counts: tuple[int, ...] | None = None

    @property
    def adaptive(self) -> bool:
        return self.counts == ()

    @property
    def size(self) -> int:
        """The number of rows of a batch, computed or not."""
        return math.prod(self._shape)

    @property
    def _shape(self) -> tuple[int, int, int, int]:
        return self.workers, self.steps, self.microbatches, self.rows

    def places(self) -> np.ndarray:
        """Return the places that get rows, in the order in which they get them."""
        numbers = np.arange(self.size).reshape(self._shape)
        if self.adaptive:
            return numbers.transpose(1, 2, 0, 3).ravel()
        places = numbers.transpose(1, 0, 2, 3).ravel()
        return (
            places
            if self.counts is None
            else places[self.computed(self.counts)[places]]
        )

    def computed(self, counts: Sequence[int]) -> np.ndarray:
        """Return which places these counts compute, bool (size,)."""
        number = np.arange(self.microbatches)[:, None]
        per_worker = np.asarray(counts).reshape(-1, 1, 1, 1)
        return np.broadcast_to(number < per_worker, self._shape).ravel()

    def worker(self, places: np.ndarray) -> np.ndarray:
        """Return the workers of the places of a batch."""
        return places // (self.size // self.workers)


@dataclasses.dataclass(frozen=True)
class Position:
    """The rows read from each stream, the rows left of them, and the targets so far."""

    rows: list[int]
    left: list[list[int]]
    targets: int = 0


class Batches:
    """An endless iterator over one part of the global batches.

    The position is the number of rows handed out so far, `row`, in the endless sequence
    that `order` gives, and the rows among them that were not computed, `left`. These
    come first in the next batch. With several streams every worker has both.
    """

    def __init__(
        self,
        rows: Rows,
        order: Order,
        slots: Slots,
        own: np.ndarray | None = None,
        prefetch: bool = True,
    ):
        """Begin at row 0.

        Args:
          rows: to read.
          order: of the rows.
          slots: of the global batch.
          own: the places of the global batch whose rows are read; None: all.
          prefetch: whether the next batch is read while this one is used.
        """
        self._rows, self._order, self._slots = rows, order, slots
        self._own = np.arange(slots.size) if own is None else own
        self._places = slots.places()
        whose = slots.worker(self._places)
        if order.streams == 1:
            whose = np.zeros_like(whose)
        self._chosen = [whose == stream for stream in range(order.streams)]
        self._position = Position([0] * order.streams, [[]] * order.streams)
        self._open: np.ndarray | None = None  # positions in a batch not yet `computed`
        self._pool = ThreadPoolExecutor(1) if prefetch and not slots.adaptive else None
        self._ahead: Future[tuple[Batch, Position]] | None = None

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Batch:
        """Return the next batch.

        Raises:
          ValueError: counts adapt, and the counts of the last batch were not set.
        """
        self._check_closed()
        if self._ahead is not None:
            batch, self._position = self._ahead.result()
        else:
            batch, self._position = self._make(self._position)
        if self._pool is not None:
            self._ahead = self._pool.submit(self._make, self._position)
        return batch

    def computed(self, counts: Sequence[int]) -> None:
        """Set, where counts adapt, the counts computed of the batch handed out last."""
        if self._open is None:
            return
        done = self._slots.computed(counts)
        targets = self._position.targets
        left: list[list[int]] = []
        for stream, chosen in enumerate(self._chosen):
            places, waiting = self._places[chosen], self._position.left[stream]
            positions = self._open[places]
            left.append(sorted([*positions[~done[places]].tolist(), *waiting]))
            rows = self._order.rows(stream, positions[done[places]])
            targets += self._rows.targets(rows)
        self._position = Position(self._position.rows, left, targets)
        self._open = None

    @property
    def position(self) -> Position:
        """The position at which the next batch begins."""
        return self._position

    def first_row(self, position: Position, worker: int) -> int:
        """Return the row of the data that a worker reads first from a position."""
        stream = worker if self._order.streams > 1 else 0
        places, left = self._places[self._chosen[stream]], position.left[stream]
        first = int(np.argmax(self._slots.worker(places) == worker))
        new = position.rows[stream] + first - len(left)
        number = left[first] if first < len(left) else new
        return int(self._order.rows(stream, np.array([number]))[0])

    @property
    def targets(self) -> int:
        """The number of targets of all rows that were computed so far."""
        return self._position.targets

    def shapes(self) -> list[Batch]:
        """Return a batch without rows for every shape that batches may have."""
        none = np.full(len(self._own), -1)
        return [self._rows.read(none, width) for width in self._rows.widths]

    def get_state(self) -> dict[str, Any]:
        """Return the position, JSON-able and equal in all processes.

        Raises:
          ValueError: as for `next`.
        """
        self._check_closed()
        rows, left, targets = dataclasses.astuple(self._position)
        if self._order.streams == 1:
            rows, left = rows[0], left[0]
        return {"row": rows, "left": left, "targets": targets}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a position of `get_state`.

        Raises:
          ValueError: if it is not a position in these rows.
        """
        several = self._order.streams > 1
        try:
            rows, left = state["row"], state["left"]
            rows, left = (rows, left) if several else ([rows], [left])
            position = Position(list(rows), list(left), state["targets"])
            numbers = [*rows, *itertools.chain(*left), position.targets]
            whole = all(type(x) is int and 0 <= x < 2**62 for x in numbers)
            if not whole or {len(rows), len(left)} != {self._order.streams}:
                raise ValueError(f"row {str(rows)[:60]}")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{str(state)[:60]!r} is not a position in these rows ({error!r}): "
                "start again, or use the version and the config that wrote it"
            ) from error
        if self._ahead is not None:
            self._ahead.cancel()
        self._position, self._ahead, self._open = position, None, None

    def _check_closed(self) -> None:
        if self._open is not None:
            raise ValueError(
                "counts adapt, and what was computed of the last batch is not known: "
                "call computed(counts) first"
            )

    def _make(self, position: Position) -> tuple[Batch, Position]:
        """Return the batch at a position, and the position after it."""
        rows = np.full(self._slots.size, -1)
        positions = np.full(self._slots.size, -1)
        after, left = [], []
        for stream, chosen in enumerate(self._chosen):
            places, old = self._places[chosen], position.left[stream]
            new = position.rows[stream] + np.arange(max(len(places) - len(old), 0))
            taken = np.concatenate([np.asarray(old, np.int64), new])[: len(places)]
            positions[places] = taken
            rows[places] = self._order.rows(stream, taken)
            after.append(position.rows[stream] + len(new))
            left.append(old[len(places) :])
        targets = position.targets
        if self._slots.adaptive:
            self._open = positions
        else:
            targets += self._rows.targets(rows)
        batch = self._rows.read(rows[self._own], self._rows.width(rows))
        return batch, Position(after, left, targets)
