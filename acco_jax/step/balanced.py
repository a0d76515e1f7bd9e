"""The single-program step with counts known before it runs: balanced, halves or logged.

Counts are data of the program, (n,) integers: a change of speed compiles nothing. The
exception, where calls overlap, is a half-round in which no worker computes more than
one microbatch. A loop of one leaves no computation to overlap a second collective with,
so that half-round has a program of its own, with the forward and the backward pass
apart.
"""

import dataclasses
import time
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp

from acco_jax.core.gradients import Accumulator
from acco_jax.core.leaves import PyTree
from acco_jax.core.state import State
from acco_jax.core.workers import without_mesh
from acco_jax.methods.method import Method
from acco_jax.step.balance import Balanced, Balancer
from acco_jax.step.fused import Arguments, model_state
from acco_jax.step.halves import Halves, Turns
from acco_jax.step.logged import LoggedStep
from acco_jax.step.probe import Probe
from acco_jax.step.replay import Replay


class BalancedStep(LoggedStep):
    """A single-program train step that finds its counts, equal in every process.

    Its batches hold `most` microbatches for each worker. The counts of a call are in
    its metrics; counts given as `counts=` are used unchanged.

    Attributes:
      counts: microbatches of every worker in the last call that was not given any.
    """

    def __init__(
        self,
        tx: Method,
        gradients: Accumulator,
        compiler_options: dict[str, Any],
        microbatches: Balanced | Halves | Replay,
    ) -> None:
        super().__init__(tx, gradients, compiler_options)
        most = gradients.microbatches
        self._single = dataclasses.replace(gradients, microbatches=1, batch_holds=most)
        # whether one microbatch is divided, so that each hop has a piece beside it
        self._divides = self.overlaps and tx.delayed and not tx.local
        self.counts = list[int]()
        self._balancer: Balancer | None = None
        self._probe: Probe | None = None
        # half-rounds since the last probe, and when it ended; the first one's beginning
        self._since, self._probed, self._began = 0, 0.0, 0.0
        self._spent = 0.0  # seconds that probes have taken here
        self._there: Any = None  # the counts, on the devices
        if isinstance(microbatches, Replay):
            self.repeat(microbatches)
        elif isinstance(microbatches, Halves):
            self.alternate(microbatches)
        else:
            self._balancer = Balancer(microbatches, gradients.workers)

    def alternate(self, halves: Halves) -> None:
        """Take the counts of the coming calls from two halves; nothing is timed then.

        Raises:
          ValueError: as for `LoggedStep.alternate`.
        """
        super().alternate(halves)
        self._balancer = None

    def repeat(self, log: Replay) -> None:
        """Take the counts of the coming calls from a log.

        Raises:
          ValueError: the log's counts do not fit these workers.
        """
        super().repeat(log)
        self._balancer = None

    @property
    def seconds(self) -> list[float]:
        """The seconds per microbatch of each worker; empty where they are not known."""
        return self._balancer.seconds if self._balancer else []

    @property
    def stragglers(self) -> dict[int, float]:
        """The slow workers, each with its time as a multiple of the median."""
        return self._balancer.stragglers if self._balancer else {}

    @property
    def probing(self) -> tuple[float, float]:
        """Seconds that probes have taken here, and seconds since the first began."""
        return self._spent, time.perf_counter() - self._began if self._began else 0.0

    def compile(self, *args: Any, **named: Any) -> None:
        """Compile the single-program step's programs, and the one that is timed."""
        super().compile(*args, **named)
        if self._balancer:
            params, state, inputs, _ = self._placed(self._arguments(*args, **named))
            with without_mesh():
                self._prober(state).lower(params, inputs).compile()

    def _refuse_trace(self) -> None:
        raise ValueError(
            "counts that differ from call to call are found by the host, "
            "which cannot be done inside jit or scan: give microbatches as a number, "
            "and counts=, or use a Python loop."
        )

    def _run(
        self, phase: Hashable, args: Arguments
    ) -> tuple[PyTree, State, dict[str, Any]]:
        if args.inputs.counts is None:
            line = self._next(args)
            self._put(line)
            args = self._with(args, self._there, self._is_single(line))
        return super()._run(phase, args)

    def _expected(self, call: int, args: Arguments) -> Arguments:
        log = self._log
        single = isinstance(log, Turns) and self._is_single(log.line(call))
        return self._without_counts(args, single)

    def _variants(self, args: Arguments) -> list[Arguments]:
        if self._log is not None:
            found = {self._is_single(line) for line in self._log.lines}
        else:
            assert self._balancer is not None
            found = {False, self._divides and self._balancer.may_be_single}
        return [self._without_counts(args, single) for single in sorted(found)]

    def _without_counts(self, args: Arguments, single: bool) -> Arguments:
        """Return arguments for compilation, with only the shape of the counts."""
        if args.inputs.counts is not None:
            return args
        return self._with(args, self._gradients.abstract_counts(), single)

    def _with(self, args: Arguments, counts: Any, single: bool) -> Arguments:
        gradients = self._single if single else self._gradients
        inputs = args.inputs._replace(gradients=gradients, counts=counts)
        return args._replace(inputs=inputs)

    def _is_single(self, line: list[int]) -> bool:
        return self._divides and max(line) == 1

    def _put(self, counts: list[int]) -> None:
        if counts != self.counts:
            self.counts, self._there = counts, self._gradients.counts_here(counts)

    def _next(self, args: Arguments) -> list[int]:
        if self._balancer is None:
            assert self._log is not None
            return self._log.line(self.call)
        if not self._balancer.wait:
            with without_mesh():  # a probe's devices are this process's
                self._look(self._balancer, args)
        self._balancer.wait -= 1
        self._since += 1
        return self._balancer.counts

    def _prober(self, state: State) -> Probe:
        if self._probe is None:
            own, held = self._tx.local, self._batches.microbatches
            carried = jax.tree.map(jnp.copy, model_state(state))  # a step donates it
            self._probe = Probe(self._gradients.frozen(carried), held, own)
        return self._probe

    def _look(self, balancer: Balancer, args: Arguments) -> None:
        """Time a microbatch on every worker; all processes do so in the same call."""
        params, state, inputs, _ = args
        probe = self._prober(state)
        jax.block_until_ready(params)
        probe.prepare(params, inputs)  # compilation does not count as probe time
        start = time.perf_counter()
        self._began = self._began or start
        each = (start - self._probed) / self._since if self._since else 0.0
        seconds = probe.seconds(params, inputs, balancer.duration)
        spent = self._spent + time.perf_counter() - start
        table = probe.gathered([(s, spent, start - self._began, each) for s in seconds])
        times, spents, elapsed, call_seconds = table.T.tolist()
        balancer.take(times, max(spents), min(elapsed), min(call_seconds))
        self._since, self._probed = 0, time.perf_counter()
        self._spent += self._probed - start
