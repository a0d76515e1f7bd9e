"""A train step whose counts are known before it runs: those of halves, or of a log."""

from collections.abc import Hashable
from typing import Any

from acco_jax.core.gradients import Accumulator
from acco_jax.core.leaves import PyTree
from acco_jax.core.microbatches import Counts, differ
from acco_jax.core.state import State
from acco_jax.methods.method import Method
from acco_jax.step.fused import Arguments, TrainStep
from acco_jax.step.halves import Halves, Turns
from acco_jax.step.replay import Lines, Replay


class LoggedStep(TrainStep):
    """The base of steps of either form whose counts come from halves or from a log.

    Attributes:
      call: number of the next call, the line of the log; set it when a run
        continues. With halves the state determines it.
    """

    def __init__(
        self, tx: Method, gradients: Accumulator, compiler_options: dict[str, Any]
    ) -> None:
        super().__init__(tx, gradients, compiler_options)
        self.call = 0
        self._log: Lines | Turns | None = None
        self._uneven = True  # whether counts may differ where the caller gives none

    def alternate(self, halves: Halves) -> None:
        """Take the counts of the coming calls from two halves.

        Raises:
          ValueError: the halves are for another number of workers, or of more
            microbatches than a worker's part of a batch holds.
        """
        most = self._gradients.microbatches
        if halves.most > most:
            raise ValueError(
                f"{halves} computes {halves.most} microbatches, but the step was built "
                f"with {most}: build it with the larger halves."
            )
        turns = Turns(halves, self._gradients.workers)
        if not self._numbers_calls:  # it has counted its own calls, not the state's
            self._counted = None, 0
        self._log, self._numbers_calls = turns, True
        self._uneven = any(map(differ, turns.lines))

    def repeat(self, log: Replay) -> None:
        """Take the counts of the coming calls from a log.

        Raises:
          ValueError: the log's counts do not fit these workers.
        """
        lines = Lines(log, self._gradients.workers, self._gradients.microbatches)
        self._log, self.call = lines, log.first
        self._uneven = any(map(differ, lines.lines))

    def _may_differ(self, counts: Counts) -> bool:
        return self._uneven if counts is None else differ(counts)

    def _call(self, state: State) -> int:
        call = super()._call(state)
        if isinstance(self._log, Turns):
            self.call = call
        return call

    def _run(
        self, phase: Hashable, args: Arguments
    ) -> tuple[PyTree, State, dict[str, Any]]:
        found = super()._run(phase, args)
        self.call += 1  # a call that fails can be repeated with its counts
        return found
