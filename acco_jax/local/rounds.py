"""Local steps on each worker, and any sharding method on what they moved.

With x the point where all workers start a round, theta_i where worker i's H inner steps
lead it and w_i its weight, the "gradient" that an outer method is given is

    sum over i of w_i (x - theta_i),  of total weight  sum over i of w_i

and the point that it returns is where everyone starts the next round. A worker without
weight contributes nothing and starts from there too: it may drop out and come back.
The outer method brings its own recurrence, sharding, wire dtype and exact master copy:
a round costs one reduce-scatter and one all-gather of the parameters' size, the bytes
of one ring all-reduce, however many steps it has.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from acco_jax.gradients import over_data
from acco_jax.layout import Layout, Pending
from acco_jax.local.base import (
    InnerSteps,
    LocalMethod,
    Round,
    Work,
    cast,
    check_steps,
    check_wire,
    init_rows,
    local_method,
    masters_of,
    shardings,
    to_rows,
    zeros,
)
from acco_jax.transforms.base import Method
from acco_jax.transforms.state import gather_exact

PyTree = Any
barrier = lax.optimization_barrier


class RoundState(NamedTuple):
    """State of `local_rounds`; the parameters of the loop are rows, all equal."""

    layout: Layout  # static
    steps: jax.Array  # int32 []: inner steps so far
    outer: Any  # the outer method's state, sharded: the exact point, its momentum
    inner: PyTree  # rows: each worker's own optimizer state

    def shardings(self) -> RoundState:
        return shardings(self, rows=("inner",))

    def committed(self, params: PyTree) -> PyTree:
        del params  # the point they started from, rounded to the wire's dtype
        return gather_exact(self.layout, self.outer.master)


def outer_hops(outer: Method) -> tuple[Callable[[Any], Any], ...]:
    """An outer method's collectives and its step between them, one hop each.

    Moving: (state, totals, whole leaves, buffers): packed before the first; (state,
    totals, gathered) after the last.
    """
    order, wire = outer.axis[::-1], outer.wires.all[0]

    def reduce(axis: str, moving: Any) -> Any:
        state, totals, whole, buffers = moving
        state, buffers = wire.send(state.layout, state, buffers, axis, totals.weight)
        return state, totals, whole, wire.reduce(state.layout, buffers, axis)

    def gather(axis: str, moving: Any) -> Any:
        state, totals, full = moving
        return state, totals, wire.gather(state.layout, full, axis)

    def advance_and_gather(moving: Any) -> Any:
        state, totals, whole, reduced = moving
        shards = wire.receive(state.layout, reduced, whole)
        state, point = outer.advance(state, shards, totals, {}, losses=False)
        state, full = wire.join(state.layout, state, point.shards)
        return gather(order[-1], barrier((state, totals, full)))

    return (
        *(functools.partial(reduce, axis) for axis in order),
        advance_and_gather,
        *(functools.partial(gather, axis) for axis in order[-2::-1]),
    )


def outer_send(state: Any, now: Pending) -> Any:
    """What is moving before an outer method's first hop."""
    totals, whole = state.layout.sum_small(now)
    return state, totals, whole, now.buffers


def differences(
    layout: Layout, weight: jax.Array, origin: PyTree, theta: PyTree, origin_spec: P
) -> Pending:
    """w_i (origin - theta_i), packed, and w_i: what an outer method communicates.

    Args:
      layout: of the outer method.
      weight: (n,) w_i.
      origin: where the workers started from, rows or the same for all.
      theta: theta_i, rows of the same structure, master dtype.
      origin_spec: P(data axes) or P().
    """

    def local(weight: jax.Array, origin: PyTree, theta: PyTree) -> PyTree:
        def one(a: jax.Array, b: jax.Array) -> jax.Array:
            return weight[0].astype(b.dtype) * (a.astype(b.dtype) - b)

        return jax.tree.map(one, origin, theta)

    rows = P(layout.axis)
    in_specs = (rows, origin_spec, rows)
    run = over_data(local, layout.mesh, layout.axis, in_specs, rows)
    return layout.pack(run(weight, origin, theta), weight)


def counted(weight: jax.Array, weighted: bool) -> jax.Array:
    """(n,) weights of an outer mean: as they are, or 1 for everyone who has any."""
    return weight if weighted else (weight != 0).astype(weight.dtype)


@dataclasses.dataclass(frozen=True)
class OuterRound(Round):
    """H inner steps of every worker and one step of an outer method."""

    steps: InnerSteps
    outer: Method
    weighted: bool

    @property
    def overlaps(self) -> bool:  # type: ignore[override]
        return self.outer.delayed

    @property
    def beside(self) -> int:  # type: ignore[override]
        return self.steps.steps

    @functools.cached_property
    def hops(self) -> tuple[Callable[[Any], Any], ...]:
        return outer_hops(self.outer)

    def theta(self, rows: PyTree, state: RoundState) -> PyTree:
        return cast(rows, masters_of(state.layout))

    def _moved(self, rows: PyTree, work: Work, layout: Layout) -> Pending:
        weight = counted(work.sums.weight, self.weighted)
        return differences(layout, weight, rows, work.theta, P(layout.axis))

    def send(self, rows: PyTree, state: RoundState, work: Work | None) -> Any:
        outer = state.outer
        if work is not None:
            now = self._moved(rows, work, state.layout)
        else:
            now, outer = outer.pending, outer._replace(pending=None)
        return outer_send(outer, now)

    def finish(self, rows: PyTree, state: RoundState, work: Work, moved: Any) -> Any:
        outer, _, full = moved
        layout = state.layout
        if self.overlaps:
            outer = outer._replace(pending=self._moved(rows, work, layout))
        state = state._replace(
            steps=state.steps + self.steps.steps, outer=outer, inner=work.inner
        )
        return to_rows(layout, layout.unpack(full)), state


def local_rounds(
    inner: optax.GradientTransformation,
    outer: Method,
    *,
    local_steps: int,
    weighted: bool = True,
    accumulate_dtype: Any = None,
) -> LocalMethod:
    """Local steps of `inner`, and `outer` on the weighted differences of each round.

    Every call of the train step is one round. Where the outer method is delayed (dpu,
    acco), a round's differences cross the network beside the next round's steps.

    Args:
      inner: any optax transformation; each worker runs it on its own whole leaves in
        float32 (or wider), on its own mean gradients. Its state is kept per worker.
      outer: a sharding method, e.g. acco_jax.zero1(optax.sgd(0.7, 0.9, nesterov=True),
        mesh=mesh); its wire dtype and layout are those of the exchange.
      local_steps: H, inner steps of a round.
      weighted: workers count by the weight of their microbatches in the round; else
        equally, those that computed any.
      accumulate_dtype: of the gradient accumulator; None means each parameter's own.

    Returns:
      A `LocalMethod` for `acco_jax.make_train_step`: a batch holds H times as many
      microbatches for each worker, step after step, and `counts` is per inner step.

    Raises:
      ValueError: in one line, before any device work, what does not fit.
    """
    check_steps("local_steps", local_steps)
    if not isinstance(outer, Method):
        raise ValueError(
            f"outer is a {type(outer).__name__}: give a sharding method, e.g. "
            "acco_jax.zero1(optax.sgd(0.7, 0.9, nesterov=True), mesh=mesh)."
        )
    if outer.warmup or outer.accumulate is not None:
        why = (
            f"has {outer.warmup} synchronous steps of warm-up"
            if outer.warmup
            else "communicates inside the backward pass"
        )
        raise ValueError(
            f"outer {why}, which a round cannot: give zero1, acco, or dpu without "
            "warmup_steps."
        )
    if outer.wires.gather_quantized:
        raise ValueError(
            "outer has gather_bits, which needs the parameters that all workers hold "
            "when a round ends, and then they differ: leave it out."
        )
    steps = InnerSteps(inner, local_steps)

    def init(params: PyTree) -> RoundState:
        state = outer.init(params)
        layout = state.layout
        check_wire(layout, weighted)

        def make(params: PyTree) -> PyTree:
            return init_rows(layout, inner, params)

        homes = layout.row_shardings(jax.eval_shape(make, params))
        params = jax.device_put(params, layout.params_shardings)
        state_rows = jax.jit(make, out_shardings=homes)(params)
        return RoundState(layout, zeros(layout, (), jnp.int32), state, state_rows)

    return local_method(
        inner,
        mesh=outer.mesh,
        axis=outer.axis,
        steps_per_call=local_steps,
        accumulate_dtype=accumulate_dtype,
        init=init,
        round=lambda phase: OuterRound(steps, outer, weighted),
        state=RoundState,
        check_parts=lambda state: outer.check_state(state.outer),
        delayed=outer.delayed,
    )
