"""Half-rounds in which a worker did not count: its numbers were not finite."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh

from acco_jax.core.groups import members
from acco_jax.data.batches import Position


class Drops:
    """Drops so far; all processes have them, each logs its own workers.

    They are read when metrics are, an interval late, so that the loop does not wait.

    Attributes:
      dropping: whether the train step looks for bad numbers.
      nobody: successive half-rounds, up to the last one read, in which nobody counted.
    """

    def __init__(
        self,
        dropping: bool,
        mesh: Mesh,
        most: int,
        first_row: Callable[[Position, int], int],
        state: dict[str, Any] | None = None,
    ) -> None:
        """Begin with nothing dropped, or with the given `state`.

        Args:
          dropping: whether the train step looks for bad numbers.
          mesh: of the workers, each a device or a group of them.
          most: half-rounds in a row of a worker that end the run.
          first_row: (where a batch begins, worker) -> the number of its first row.
          state: of a checkpoint.
        """
        groups = members(mesh)
        state = state or {"in_a_row": [], "nobody": 0, "since": 0}
        self.dropping, self.nobody = dropping, state["nobody"] if dropping else 0
        same = len(state["in_a_row"]) == len(groups)  # else these are other workers
        self._in_a_row = np.array(state["in_a_row"] if same else [0] * len(groups))
        self._since = state["since"]  # the last row of metrics
        self._most, self._first_row = most, first_row
        here = jax.process_index()
        self._here = [group[0].process_index == here for group in groups]
        self._unread: list[tuple[int, Position, tuple[jax.Array, jax.Array]]] = []

    def add(self, half_round: int, start: Position, metrics: dict[str, Any]) -> None:
        """Take a half-round's metrics, possibly not computed yet, and its `start`."""
        if self.dropping:
            arrays = metrics["dropped"], metrics["weight"]
            self._unread.append((half_round, start, arrays))

    def read(self, half_round: int) -> None:
        """Read all half-rounds up to this one; wait for it.

        Raises:
          FloatingPointError: if a worker was dropped in too many of them in a row.
        """
        ready = [x for x in self._unread if x[0] <= half_round]
        del self._unread[: len(ready)]
        found = jax.device_get([arrays for *_, arrays in ready])
        for (number, start, _), (dropped, weight) in zip(ready, found, strict=True):
            self._look(number, start, dropped, not weight)

    def _look(
        self, half_round: int, start: Position, dropped: np.ndarray, none_left: bool
    ) -> None:
        self._in_a_row = (self._in_a_row + 1) * (dropped > 0)
        self.nobody = (self.nobody + 1) * int(none_left and dropped.any())
        self._since += int(dropped.sum())
        for worker in np.flatnonzero(dropped).tolist():
            if self._here[worker]:
                logging.warning(
                    "worker %d was dropped in half-round %d, which begins for it at "
                    "row %d of the data: its loss or gradients are not finite%s",
                    worker, half_round, self._first_row(start, worker),
                    f" ({dropped[worker]} times)" if dropped[worker] > 1 else "",
                )  # fmt: skip
        if (most := int(self._in_a_row.max())) >= self._most:
            worker = int(self._in_a_row.argmax())
            raise FloatingPointError(
                f"worker {worker} was dropped in {most} half-rounds in a row, the last "
                f"of them half-round {half_round}, because its loss or gradients are "
                "not finite: lower optimizer.learning_rate and use a new workdir, look "
                "at its rows or its device, or raise most_dropped_in_a_row."
            )

    def since_last(self) -> int:
        """Return how often workers were dropped since the last call."""
        since, self._since = self._since, 0
        return since

    def state(self) -> dict[str, Any]:
        """Return a checkpoint's state, JSON-able and equal in all processes."""
        in_a_row = self._in_a_row.tolist()
        return {"in_a_row": in_a_row, "nobody": self.nobody, "since": self._since}
