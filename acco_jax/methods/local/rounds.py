"""Local steps on each worker, and any sharding method on what they moved.

With x the point where all workers start a round, theta_i where worker i's H inner steps
lead it and w_i its weight, the "gradient" that an outer method is given is

    sum over i of w_i (x - theta_i),  of total weight  sum over i of w_i

and the point that it returns is where everyone starts the next round. A worker without
weight contributes nothing and starts from there too: it may drop out and come back.
The outer method brings its own recurrence, sharding, communication dtype and
exact master weights: a round costs one reduce-scatter and one all-gather of the
parameters' size, the bytes of one ring all-reduce, however many steps it has.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from acco_jax.core.buffers import InFlight
from acco_jax.core.exchange import Exchange, ExchangeRound, Received
from acco_jax.core.layout import Layout
from acco_jax.core.leaves import PyTree
from acco_jax.core.select import difference
from acco_jax.core.state import ShardedState
from acco_jax.core.workers import over_data, to_row
from acco_jax.methods.local import local_method
from acco_jax.methods.local.local_method import (
    InnerSteps,
    LocalMethod,
    LocalProgress,
    LocalRound,
)
from acco_jax.methods.method import (
    CommonOptions,
    assembled,
    common_attributes,
    gather_exact,
    placed_state,
)
from acco_jax.methods.sharded import ShardedMethod, ShardedRound

OF_ROUNDS = ("weighted", "accumulate_dtype")  # the rest is the exchange's


class RoundState(NamedTuple):
    """State of `local_rounds`; the parameters of the loop are rows, all equal."""

    layout: Layout  # static
    calls_done: jax.Array  # int32 []: rounds so far
    steps: jax.Array  # int32 []: inner steps so far
    outer: Any  # the outer method's state, sharded: the exact point, its momentum
    inner: PyTree  # rows: each worker's own optimizer state

    def shardings(self) -> Self:
        return local_method.shardings(self, rows=("inner",))

    def committed(self, params: PyTree) -> PyTree:
        del params  # the point they started from, rounded to the communication dtype
        return gather_exact(self.layout, self.outer.master)

    def theta(self, params: PyTree) -> PyTree:
        del params
        return assembled(self.layout, self.outer.master)


def differences(
    layout: Layout, weight: jax.Array, origin: PyTree, theta: PyTree, origin_spec: P
) -> InFlight:
    """w_i (origin - theta_i), packed, and w_i: what an outer method communicates.

    The workers started from `origin`: rows, if its spec is P(data axes), or the same
    for all, if it is P(). theta_i are rows in the master dtype, and `weight` is (n,).
    """

    def local(weight: jax.Array, origin: PyTree, theta: PyTree) -> PyTree:
        def one(a: jax.Array, b: jax.Array) -> jax.Array:
            return weight[0].astype(b.dtype) * difference(a.astype(b.dtype), b)

        if origin_spec == P():
            origin = to_row(origin)
        return jax.tree.map(one, origin, theta)

    rows = P(layout.axis)
    in_specs = (rows, origin_spec, rows)
    run = over_data(local, layout.mesh, layout.axis, in_specs, rows)
    return layout.pack(run(weight, origin, theta), weight)


def counted(weight: jax.Array, weighted: bool) -> jax.Array:
    """Return (n,) weights of an outer mean: as they are, or 1 where not 0."""
    return weight if weighted else (weight != 0).astype(weight.dtype)


@dataclasses.dataclass(frozen=True)
class OuterRound(ExchangeRound[RoundState], LocalRound[RoundState]):
    """H inner steps of every worker and one step of an outer method."""

    steps: InnerSteps
    exchange: Exchange  # of the outer method
    overlaps: bool
    weighted: bool  # see `local_rounds`

    def open(
        self, params: PyTree, state: RoundState
    ) -> tuple[InFlight | None, ShardedState, RoundState]:
        outer, rest = state.outer, state._replace(outer=None)
        if not self.overlaps:
            return None, outer, rest
        return outer.in_flight, outer._replace(in_flight=None), rest

    def outgoing(
        self, params: PyTree, rest: RoundState, progress: LocalProgress
    ) -> InFlight:
        weight = counted(progress.sums.weight, self.weighted)
        rows = P(rest.layout.axis)
        return differences(rest.layout, weight, params, progress.theta, rows)

    def conclude(
        self,
        rows: PyTree,
        rest: RoundState,
        progress: LocalProgress,
        received: Received,
    ) -> tuple[PyTree, RoundState]:
        outer = received.state
        if self.overlaps:
            outer = outer._replace(in_flight=self.outgoing(rows, rest, progress))
        state = rest._replace(outer=outer, inner=progress.inner)
        return rest.layout.to_rows(received.params), state


class RoundOptions(CommonOptions, total=False):
    """Keyword arguments of methods that take rounds, beside the common ones.

    Attributes:
      weighted: workers count by the weight of their microbatches in the round (True),
        or equally, those that computed any.
    """

    weighted: bool


def local_rounds(
    inner: optax.GradientTransformation,
    outer: ShardedMethod,
    *,
    local_steps: int,
    weighted: bool = True,
    accumulate_dtype: DTypeLike | None = None,
) -> LocalMethod:
    """Local steps of `inner`, and `outer` on the weighted differences of each round.

    Every call of the train step is one round. Where the outer method is delayed (dpu,
    acco), a round's differences cross the network beside the next round's steps.

    Args:
      inner: an optax transformation; each worker runs it on its own whole leaves in
        float32 (or wider), on its own mean gradients. Its state is kept per worker.
      outer: a sharding method, e.g. acco_jax.zero1(optax.sgd(0.7, 0.9, nesterov=True),
        mesh=mesh); its communication dtype and layout are those of the exchange.
      local_steps: H, inner steps of a round.
      weighted: see `RoundOptions`.
      accumulate_dtype: of the gradient accumulator; None means each parameter's own.

    Returns:
      A method for `acco_jax.make_train_step`: a batch holds H times as many
      microbatches for each worker, step after step, and `counts` is per inner step.

    Raises:
      ValueError: in one line, before any device work, what does not fit.
    """
    local_steps = local_method.checked_steps("local_steps", local_steps)
    if not isinstance(outer, ShardedMethod):
        raise ValueError(
            f"outer is a {type(outer).__name__}: give a sharding method, e.g. "
            "acco_jax.zero1(optax.sgd(0.7, 0.9, nesterov=True), mesh=mesh)."
        )
    if outer.warmup or outer.round_type is not ShardedRound:
        why = (
            f"has {outer.warmup} synchronous steps of warm-up"
            if outer.warmup
            else "communicates inside the backward pass"
        )
        raise ValueError(
            f"outer {why}, which a round cannot: give zero1, acco, or dpu without "
            "warmup_steps."
        )
    if outer.codecs.gather_quantized:
        raise ValueError(
            "outer has gather_bits, which needs the parameters that all workers hold "
            "when a round ends, and then they differ: leave it out."
        )
    steps = InnerSteps(inner, local_steps)

    def init(params: PyTree) -> RoundState:
        state = outer.init(params)
        layout = state.layout
        local_method.check_wire(layout, weighted)

        def make(params: PyTree) -> RoundState:
            rows = local_method.init_rows(layout, inner, params)
            return RoundState(layout, jnp.int32(0), jnp.int32(0), None, rows)

        return placed_state(make, params, layout)._replace(outer=state)

    exchange = outer.exchange(outer.codecs.all[0])
    dtype = accumulate_dtype or outer.accumulate_dtype
    options = CommonOptions(
        axis_name=outer.axis, comm_dtype=outer.comm_dtype, accumulate_dtype=dtype
    )
    return local_method.local_method(
        inner,
        common_attributes(outer.mesh, options, CommonOptions),
        steps_per_call=local_steps,
        state_type=RoundState,
        make_state=init,
        round=lambda phase: OuterRound(steps, exchange, outer.delayed, weighted),
        check_parts=lambda state: outer.check_state(state.outer),
        on=lambda mesh, axis, specs: local_rounds(
            inner,
            outer.on(mesh, axis, specs),
            local_steps=local_steps,
            weighted=weighted,
            accumulate_dtype=accumulate_dtype,
        ),
        delayed=outer.delayed,
    )


def rounds_with(
    make: Callable[..., ShardedMethod],
    outer: optax.GradientTransformation,
    inner: optax.GradientTransformation,
    mesh: Mesh,
    local_steps: int,
    options: RoundOptions,
) -> LocalMethod:
    """`local_rounds` around make(outer, ...), given the options of an exchange."""
    own: Any = {k: v for k, v in options.items() if k in OF_ROUNDS}
    exchange = {k: v for k, v in options.items() if k not in own}
    method = make(outer, mesh=mesh, **exchange)
    return local_rounds(inner, method, local_steps=local_steps, **own)
