"""The train step as several programs, with communication in a thread of its own.

For CPU processes: XLA:CPU runs a program's collectives and loops one after the other.
"""

import contextlib
import functools
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from acco_jax.core.gradients import Accumulator
from acco_jax.core.half_round import Inputs, Round, computed, exchanged, metrics
from acco_jax.core.leaves import PyTree
from acco_jax.core.state import State
from acco_jax.methods.method import Method
from acco_jax.step.fused import Arguments, TrainStep

# jax's settings that change what is traced; a context manager sets them in one thread
SETTINGS = (
    "enable_x64",
    "default_matmul_precision",
    "numpy_dtype_promotion",
    "numpy_rank_promotion",
    "default_prng_impl",
)


class Programs(NamedTuple):
    """The programs of one phase; only `communicate` sends more than a few sums."""

    name: str  # of the phase
    round: Round
    compute: Any  # (params, rest, inputs) -> closed work
    close: Any  # (work, rest, inputs) -> closed work
    communicate: Any  # (in_flight, owner, params, extra) -> received
    finish: Any  # (params, rest, inputs, progress, received); see `Round`
    traced: set[Any]  # the inputs for which the computation has been traced


class SplitStep(TrainStep):
    """A train step that computes in one thread and communicates in another."""

    form = "split"

    def __init__(
        self, tx: Method, gradients: Accumulator, compiler_options: dict[str, Any]
    ) -> None:
        super().__init__(tx, gradients, compiler_options)
        self._thread = ThreadPoolExecutor(1, "acco-communicate")
        everywhere = NamedSharding(tx.mesh, P())
        self._metrics = jax.jit(metrics, out_shardings=everywhere)

    @property
    def overlaps(self) -> bool:
        return self._gradients.workers > 1

    def _refuse_trace(self) -> None:
        raise ValueError(
            "a step of form='split' runs several programs, which cannot be done inside "
            "jit or scan: use make_train_step(form='fused'), or a Python loop."
        )

    def _run(
        self, phase: Hashable, args: Arguments
    ) -> tuple[PyTree, State, dict[str, Any]]:
        if self._fuses(phase):
            return jax.block_until_ready(super()._run(phase, args))
        params, state, inputs, extra = args
        programs = self._split(phase, params, state)
        in_flight, owner, rest = programs.round.open(params, state)
        if programs.round.overlaps:
            settings = _settings()
            like = jax.tree.structure(inputs), *map(jax.typeof, jax.tree.leaves(inputs))
            if (like, settings) not in programs.traced and not self._kept:
                # a loss that raises must do so before the exchange takes the state
                self._trace(programs, params, rest, inputs)
                programs.traced.add((like, settings))
            message = in_flight, owner, params, extra
            exchange = self._thread.submit(
                self._communicate, programs, settings, *message
            )
            try:
                progress, inputs = self._compute(
                    programs, params, rest, inputs, exchange
                )
            finally:  # or the next call might find the state not yet taken
                wait([exchange])
            received = exchange.result()
        else:
            progress, inputs = self._compute(programs, params, rest, inputs, None)
            in_flight = programs.round.outgoing(params, rest, progress)
            message = in_flight, owner, params, extra
            received = self._communicate(programs, _settings(), *message)
        params, state, sums, norm = programs.finish(
            params, rest, inputs, progress, received
        )
        # Its sums over workers must not meet the next call's collectives, which another
        # thread starts, in another order on another process.
        means = self._metrics(sums, inputs.counts, norm, state.steps)
        return params, state, jax.block_until_ready(means)

    def _fuses(self, phase: Hashable) -> bool:
        """Return whether calls of a phase are one program, since nothing overlaps."""
        return not self._tx.round(phase).overlaps

    def _communicate(
        self, programs: Programs, settings: tuple[Any, ...], *args: Any
    ) -> PyTree:
        """Run an exchange as in a thread of these settings."""
        with contextlib.ExitStack() as stack:
            for name, own, value in zip(SETTINGS, _settings(), settings, strict=True):
                if own != value:
                    stack.enter_context(getattr(jax, name)(value))
            return jax.block_until_ready(programs.communicate(*args))

    def _trace(
        self, programs: Programs, params: PyTree, rest: PyTree, inputs: Inputs
    ) -> None:
        """Trace the programs of `_compute` that call the loss function."""
        jax.eval_shape(programs.compute, params, rest, inputs)

    def _compute(
        self,
        programs: Programs,
        params: PyTree,
        rest: PyTree,
        inputs: Inputs,
        exchange: Future | None,
    ) -> tuple[PyTree, Inputs]:
        """Compute the work of this call, beside an exchange if there is one.

        Returns the closed work once it is done, and the inputs as they were used.
        """
        del exchange
        return jax.block_until_ready(programs.compute(params, rest, inputs)), inputs

    def _split(self, phase: Hashable, params: PyTree, state: State) -> Programs:
        key = self._key(phase, state)
        if key not in self._programs:
            round = self._tx.round(phase)
            owner = round.open(params, state)[1]
            finish: Any = round.finish
            name = str(phase)
            if round.late:
                out_shardings = (*self._out_shardings(state), None, None)
                finish = self._jit(
                    f"{name} finish", finish, out_shardings=out_shardings
                )
            self._programs[key] = Programs(
                name,
                round,
                self._jit(f"{name} compute", functools.partial(computed, round)),
                self._jit(f"{name} close", round.close),
                self._jit(
                    f"{name} communicate",
                    functools.partial(exchanged, round),
                    donate_argnums=1,
                    out_shardings=round.out_shardings(owner),
                    compiler_options=self.compiler_options or None,
                ),
                finish,
                set(),
            )
        return self._programs[key]

    def _lowered(
        self, phase: Hashable, args: Arguments
    ) -> dict[str, jax.stages.Lowered]:
        if self._fuses(phase):
            return super()._lowered(phase, args)
        params, state, inputs, extra = args
        programs = self._split(phase, params, state)
        in_flight, owner, rest = programs.round.open(params, state)
        lowered, closed = self._lowered_compute(programs, params, rest, inputs)
        if not programs.round.overlaps:
            in_flight = programs.round.outgoing(params, rest, closed())
        message = (in_flight, owner, params, extra)
        communicate = programs.communicate.lower(*message)
        lowered[f"{programs.name} communicate"] = communicate
        if programs.round.late:
            received = placed(communicate, programs.communicate, *message)
            finish = programs.finish.lower(params, rest, inputs, closed(), received)
            lowered[f"{programs.name} finish"] = finish
        return lowered

    def _lowered_compute(
        self, programs: Programs, params: PyTree, rest: PyTree, inputs: Inputs
    ) -> tuple[dict[str, jax.stages.Lowered], Callable[[], PyTree]]:
        """Return the programs of `_compute`, and a function for its abstract work."""
        progress = (params, rest, inputs)
        lowered = programs.compute.lower(*progress)
        named = {f"{programs.name} compute": lowered}
        return named, lambda: placed(lowered, programs.compute, *progress)


def _settings() -> tuple[Any, ...]:
    """Return the values of `SETTINGS` in this thread."""
    return tuple(getattr(jax.config, f"jax_{name}") for name in SETTINGS)


def placed(
    lowered: jax.stages.Lowered, program: Callable[..., Any], *args: Any
) -> PyTree:
    """Return the abstract results of a program, where its compiled form leaves them."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(program, *args),
        lowered.compile().output_shardings,
    )
