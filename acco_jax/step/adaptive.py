"""Two-thread steps whose counts vary: adaptive ones, those of halves or of a log.

With adaptive counts a half-round accumulates until its communication is done, the
paper's way to use a slow network: until then every worker keeps adding microbatches, a
fast one more than a slow one. Only two-thread execution can do it, where the host sees
both. A single program runs a given number of microbatches.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from acco_jax.core.gradients import Accumulator, Span, Sums
from acco_jax.core.half_round import Inputs
from acco_jax.core.leaves import PyTree
from acco_jax.core.microbatches import whole_numbers
from acco_jax.core.state import State
from acco_jax.methods.method import Method
from acco_jax.step.fused import Arguments
from acco_jax.step.logged import LoggedStep
from acco_jax.step.replay import Replay
from acco_jax.step.split import Programs, SplitStep, placed


@dataclasses.dataclass(frozen=True)
class Adaptive:
    """Counts of microbatches that are found while a half-round communicates.

    Attributes:
      least: of each worker, however fast the communication.
      most: of each worker; batches hold this many.
    """

    least: int = 1
    most: int = 16

    def __post_init__(self) -> None:
        for name in ("least", "most"):
            object.__setattr__(self, name, whole_numbers(getattr(self, name)))
        whole = type(self.least) is int and type(self.most) is int
        if not whole or not 1 <= self.least <= self.most:
            raise ValueError(
                f"{self}: give the smallest count, at least 1, then the largest."
            )


class LoggedSplitStep(LoggedStep, SplitStep):
    """A two-thread train step with the counts of `Halves`: each half is one program.

    Its batches hold the largest count for each worker. `alternate` gives the counts.
    """

    def _run(
        self, phase: Hashable, args: Arguments
    ) -> tuple[PyTree, State, dict[str, Any]]:
        if args.inputs.counts is None and self._log is not None:
            line = self._gradients.counts_here(self._log.line(self.call))
            args = args._replace(inputs=args.inputs._replace(counts=line))
        return super()._run(phase, args)

    def _lowered(
        self, phase: Hashable, args: Arguments
    ) -> dict[str, jax.stages.Lowered]:
        if args.inputs.counts is None and self._log is not None:
            counts: Any = self._gradients.abstract_counts()
            args = args._replace(inputs=args.inputs._replace(counts=counts))
        return super()._lowered(phase, args)


class AdaptiveStep(LoggedSplitStep):
    """A two-thread train step whose microbatch counts are found while it runs.

    Its batches hold `most` microbatches for each worker. Microbatches for which there
    was no time are not computed. Every process counts for the workers on its devices.
    The counts of a half-round are in its metrics. Given as `counts=`, or read from the
    log of a run, they are repeated, bitwise, since each microbatch is a program.
    """

    def __init__(
        self,
        tx: Method,
        gradients: Accumulator,
        compiler_options: dict[str, Any],
        microbatches: Adaptive | Replay,
    ) -> None:
        super().__init__(tx, gradients, compiler_options)
        self._least = 1
        if isinstance(microbatches, Replay):
            self.repeat(microbatches)
        else:
            self._least = microbatches.least

    @functools.cached_property
    def _zeros(self) -> Any:
        return self._jit("zeros", _zeros, out_shardings=self._numbered)

    @functools.cached_property
    def _add(self) -> Any:
        shardings = self._numbered
        return self._jit("add", _one_more, donate_argnums=0, out_shardings=shardings)

    @property
    def _numbered(self) -> tuple[Any, NamedSharding]:
        """Shardings of sums and a number, or the second microbatch compiles again."""
        return None, NamedSharding(self._gradients.mesh, P())

    def _fuses(self, phase: Hashable) -> bool:
        return False  # each microbatch is a program

    def _trace(
        self, programs: Programs, params: PyTree, rest: PyTree, inputs: Inputs
    ) -> None:
        sums, i = jax.eval_shape(self._zeros, params, inputs, rest.model_state)
        jax.eval_shape(self._add, sums, i, params, inputs)

    def _lowered_compute(
        self, programs: Programs, params: PyTree, rest: PyTree, inputs: Inputs
    ) -> tuple[dict[str, jax.stages.Lowered], Callable[[], PyTree]]:
        start = params, inputs, rest.model_state
        zeros = self._zeros.lower(*start)
        sums, i = placed(zeros, self._zeros, *start)
        add = self._add.lower(sums, i, params, inputs)
        sums, _ = placed(add, self._add, sums, i, params, inputs)
        close = programs.close.lower(sums, rest, inputs)
        closed = placed(close, programs.close, sums, rest, inputs)
        named = {"zeros": zeros, "add": add, f"{programs.name} close": close}
        return named, lambda: closed

    def _compute(
        self,
        programs: Programs,
        params: PyTree,
        rest: PyTree,
        inputs: Inputs,
        exchange: Future | None,
    ) -> tuple[PyTree, Inputs]:
        gradients, counts = self._gradients, inputs.counts
        sums, i = self._zeros(params, inputs, rest.model_state)
        least, most, done = self._least, gradients.microbatches, 0
        if counts is not None:
            here = jax.device_get([s.data for s in counts.addressable_shards])
            least = most = max(int(c[0]) for c in here)
        while done < least or (done < most and exchange and not exchange.done()):
            sums, i = self._add(sums, i, params, inputs)
            jax.block_until_ready(sums.loss)
            done += 1
        if counts is None:
            counts = gradients.counts_here([done] * gradients.workers)
        progress = jax.block_until_ready(programs.close(sums, rest, inputs))
        return progress, inputs._replace(counts=counts)


def _zeros(
    params: PyTree, inputs: Inputs, model_state: PyTree
) -> tuple[Sums, jax.Array]:
    """Return the sums of no microbatch, and the next one's number on the devices."""
    gradients, batch, _, rng = inputs
    return gradients.zeros(params, batch, rng, model_state), jnp.int32(0)


def _one_more(
    sums: Sums, i: jax.Array, params: PyTree, inputs: Inputs
) -> tuple[Sums, jax.Array]:
    """Add microbatch i; with counts, only on the workers that have that many."""
    gradients, batch, counts, rng = inputs

    def span(count: int | jax.Array, i: jax.Array) -> Span:
        return i, i + 1 if counts is None else i + (count > i).astype(i.dtype)

    return gradients.add(sums, params, batch, rng, counts, span, at=i), i + 1
