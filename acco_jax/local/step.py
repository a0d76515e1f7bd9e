"""The train step of a local method: inner steps, and the hops of an exchange.

As in `acco_jax.step`: fused, one program in which each hop's collective runs beside a
part of the inner steps, with barriers that pin the order; split, for CPU processes, the
hops and the steps as two programs from two host threads.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from acco_jax.compiler import naming_unknown_options
from acco_jax.gradients import Accumulator
from acco_jax.layout import Layout
from acco_jax.local.base import LocalMethod, Round, Work
from acco_jax.step import TrainStep, _metrics, check_fused, in_trace, placed, read
from acco_jax.transforms.checks import check_dtypes, check_grads
from acco_jax.transforms.state import find_state

PyTree = Any
barrier = lax.optimization_barrier


class LocalStep(TrainStep):
    """One call of a local method: (params, state, batch, counts, rng) -> the same.

    Attributes:
      form: 'fused' or 'split'.
      compiler_options: what the fused program is compiled with.
    """

    _tx: LocalMethod  # type: ignore[assignment]

    def __init__(
        self,
        tx: LocalMethod,
        gradients: Accumulator,
        form: str,
        options: dict[str, Any],
    ) -> None:
        super().__init__(tx, gradients, "fused", options)  # type: ignore[arg-type]
        self.form = form
        held = gradients.microbatches * tx.steps_per_call
        self._whole = dataclasses.replace(gradients, microbatches=held)
        self._seen: tuple[jax.Array | None, int] = (
            None,
            0,
        )  # a step count, on the host
        self._parts: dict[tuple[Layout, int], tuple[Any, ...]] = {}

    def _phase(self, state: Any) -> int:
        """Which kind of call comes next; waits for the device only after a restore."""
        if self._tx.phases == 1:
            return 0
        array, steps = self._seen
        if state.steps is not array:
            steps = read(state.steps, "fragments or an exponential graph")
            self._seen = state.steps, steps
        return steps // self._tx.steps_per_call % self._tx.phases

    def _call(self, state: Any, phase: int, nested: bool = False) -> Any:
        key = (state.layout, phase)
        programs = self._parts_of_others if nested else self._programs
        if key not in programs:
            layout = state.layout
            homes = (layout.grads_shardings, state.shardings(), layout.sharding())
            programs[key] = jax.jit(
                functools.partial(_whole, self._tx.round(phase)),
                donate_argnums=() if nested else (1, 2),
                out_shardings=homes,
                compiler_options=None if nested else self.compiler_options or None,
            )
        return programs[key]

    def _nested(self, state: Any) -> Any:
        return self._call(state, self._phase(state), nested=True)

    def __call__(
        self,
        params: PyTree,
        state: Any,
        batch: PyTree,
        counts: Any = None,
        rng: Any = None,
        extra: dict[str, Any] | None = None,
    ) -> tuple[PyTree, Any, dict[str, Any]]:
        """Runs one call; see `acco_jax.make_train_step`."""
        self._tx.check_extra(extra or {})
        args = self._place(params, state, batch, counts, rng)
        if in_trace(args):
            check_fused(self.form)
            return self._nested(state)(self._gradients, *args)
        phase = self._phase(state)
        steps = self._seen[1]
        split = self.form == "split" and self._tx.round(phase).overlaps
        with naming_unknown_options():
            if split:
                out = self._apart(*args)
            else:
                out = self._call(state, phase)(self._gradients, *args)
        params, state, metrics = out
        if self.form == "split":  # its sums must not meet the next call's collectives
            jax.block_until_ready(out)
        self._seen = state.steps, steps + self._tx.steps_per_call
        return params, state, metrics

    def lower(
        self,
        params: PyTree,
        state: Any,
        batch: PyTree,
        counts: Any = None,
        rng: Any = None,
        extra: dict[str, Any] | None = None,
        *,
        half_round: int = 0,
    ) -> Any:
        """The fused program for abstract (or real) arguments, as jax.jit's `lower`.

        Of a method whose calls take turns, that of call `half_round`.
        """
        run = self._call(state, half_round % self._tx.phases)
        return run.lower(self._gradients, params, state, batch, counts, rng)

    def turns(self) -> dict[int, int]:
        return dict.fromkeys(range(self._tx.phases), 1)

    def lowered(  # type: ignore[override]
        self,
        params: PyTree,
        state: Any,
        batch: PyTree,
        counts: Any = None,
        rng: Any = None,
        extra: dict[str, Any] | None = None,
        *,
        half_round: int = 0,
    ) -> tuple[Any, ...]:
        """The programs that one call runs; see `TrainStep.lowered`."""
        phase = half_round % self._tx.phases
        if self.form == "fused" or not self._tx.round(phase).overlaps:
            args = (params, state, batch, counts, rng)
            return (self.lower(*args, half_round=phase),)
        send, hops, steps, finish = self._split_programs(state, phase)
        acc = self._gradients
        first = send.lower(params, state)
        moving = placed(first.compile(), send, params, state)
        second = hops.lower(moving)
        work = (acc, params, state, batch, counts, rng)
        third = steps.lower(*work)
        last = finish.lower(
            acc,
            params,
            state,
            placed(third.compile(), steps, *work),
            placed(second.compile(), hops, moving),
            batch,
            counts,
            rng,
        )
        return first, second, third, last

    def _compile(
        self,
        extra: dict[str, Any] | None,
        params: PyTree,
        state: Any,
        batch: PyTree,
        counts: Any,
        rng: Any,
    ) -> None:
        args = (params, state, batch, counts, rng)
        for phase in self.turns():
            for program in self.lowered(*args, half_round=phase):
                program.compile()

    def _place(
        self, params: PyTree, state: Any, batch: PyTree, counts: Any, rng: Any
    ) -> tuple[Any, ...]:
        layout = getattr(state, "layout", None)
        if not isinstance(layout, Layout) or not hasattr(state, "shardings"):
            found = type(find_state(state)).__name__
            raise ValueError(
                f"the state is {found}, wrapped or of another method: give the state "
                "of acco_jax.start(tx, params) for the tx the step was built with."
            )
        self._tx.check_state(state)
        try:
            check_grads(layout, params)
        except ValueError:
            raise ValueError(
                "params are not the rows of this method, a copy for every worker: "
                "give those of acco_jax.start(tx, params)."
            ) from None
        check_dtypes(layout, params)
        return (
            jax.device_put(params, layout.grads_shardings),
            state,
            self._whole.place_batch(batch),
            self._gradients.place_counts(counts),
            rng,
        )

    def _split_programs(self, state: Any, phase: int) -> tuple[Any, ...]:
        """What is sent, the hops, the steps beside them, and what comes after both."""
        key = (state.layout, phase)
        if key not in self._parts:
            self._parts[key] = _split_programs(self._tx.round(phase), state)
        return self._parts[key]

    def _apart(
        self, params: PyTree, state: Any, batch: PyTree, counts: Any, rng: Any
    ) -> tuple[PyTree, Any, dict[str, Any]]:
        send, hops, steps, finish = self._split_programs(state, self._phase(state))
        moving = send(params, state)
        moved = self._communicator.submit(lambda: jax.block_until_ready(hops(moving)))
        acc = self._gradients
        work = jax.block_until_ready(steps(acc, params, state, batch, counts, rng))
        return finish(acc, params, state, work, moved.result(), batch, counts, rng)

    @functools.cached_property
    def _communicator(self) -> Any:
        from concurrent.futures import ThreadPoolExecutor

        return ThreadPoolExecutor(1, "acco-communicate")


def _whole(
    round: Round,
    gradients: Accumulator,
    rows: PyTree,
    state: Any,
    batch: PyTree,
    counts: jax.Array | None,
    rng: Any,
) -> tuple[PyTree, Any, dict[str, Any]]:
    """A call as one program."""
    hops = round.hops
    part = functools.partial(
        _part, round, gradients, batch=batch, counts=counts, rng=rng
    )
    work: Any = None
    if round.overlaps:
        # all that the steps start from, or they start before the first collective
        moving, rows, state = barrier((round.send(rows, state, None), rows, state))
        for k, hop in enumerate(hops):
            moving = hop(moving)
            work = part(k, work, rows, state)
            # the last one too, or the collective is waited for before the loop
            moving, work, rows = barrier((moving, work, rows))
    else:
        for k in range(len(hops)):
            work = part(k, work, rows, state)
        moving = barrier(round.send(rows, state, barrier(work)))
        for hop in hops:
            moving = barrier(hop(moving))
    return _end(round, gradients, rows, state, work, moving, batch, counts, rng)


def _part(
    round: Round,
    gradients: Accumulator,
    k: int,
    begun: Work | None,
    rows: PyTree,
    state: Any,
    *,
    batch: PyTree,
    counts: jax.Array | None,
    rng: Any,
) -> Work:
    return round.part(k, begun, gradients, rows, state, batch, counts, rng)


def _end(
    round: Round,
    gradients: Accumulator,
    rows: PyTree,
    state: Any,
    work: Work,
    moved: Any,
    batch: PyTree,
    counts: jax.Array | None,
    rng: Any,
) -> tuple[PyTree, Any, dict[str, Any]]:
    """What a call does when its exchange is over."""
    work = round.merge(rows, state, work, moved)
    last = len(round.hops)  # the steps after the exchange, where there are any
    work = round.part(last, work, gradients, rows, state, batch, counts, rng)
    rows, state = round.finish(rows, state, work, moved)
    norm = work.norm.sum() / jnp.maximum(work.steps.sum(), 1)
    return rows, state, _metrics(work.sums, counts, norm, state.steps)


def _split_programs(round: Round, state: Any) -> tuple[Any, ...]:
    """Four programs; only the second communicates more than scalars."""

    def hops(moving: Any) -> Any:
        for hop in round.hops:
            moving = barrier(hop(moving))
        return moving

    def steps(
        gradients: Accumulator,
        rows: PyTree,
        state: Any,
        batch: PyTree,
        counts: Any,
        rng: Any,
    ) -> Work:
        work: Any = None
        for k in range(len(round.hops)):
            work = round.part(k, work, gradients, rows, state, batch, counts, rng)
        return work

    layout = state.layout
    homes = (
        layout.grads_shardings,
        state.shardings(),
        layout.sharding(),
    )
    return (
        jax.jit(lambda rows, state: round.send(rows, state, None)),
        jax.jit(hops),
        jax.jit(steps),
        jax.jit(functools.partial(_end, round), out_shardings=homes),
    )
