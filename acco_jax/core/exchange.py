"""The exchange of a sharded method: reduce gradients, advance, gather parameters.

    InFlight --send--> Reducing --(encode, reduce) over each data axis--> gradient sums
    sums --advance--> Advanced --(encode, gather) over each--> Gathering --> Received

Each data axis has a reduction and a gather, which are the hops. Between them comes the
method's own `advance`, on the shards. The exchange does not depend on the computation
beside the hops: see `acco_jax.core.half_round`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from acco_jax.core.buffers import Arrays, InFlight, Outgoing, Reduced, Totals
from acco_jax.core.codec import Codec
from acco_jax.core.half_round import Hop, Round
from acco_jax.core.leaves import PyTree
from acco_jax.core.model_state import averaged
from acco_jax.core.state import ShardedState, StateT


class Point(NamedTuple):
    """The decision of `advance`: where the parameters go, and the norm on the way."""

    shards: PyTree  # the new parameters, master dtype
    grad_norm: jax.Array  # [] global norm of the mean gradient of this half-round


class Reducing(NamedTuple):
    """The data of an exchange until the gradients have been reduced."""

    state: ShardedState  # of the method, without the in-flight gradients
    extra: dict[str, Any]  # arguments of the optimizer
    totals: Totals
    whole: Arrays  # reduced gradients of leaves that stay whole
    buffers: Arrays


class Advanced(NamedTuple):
    """The result of the owners' step on the shards."""

    state: ShardedState
    totals: Totals
    point: Point


class Gathering(NamedTuple):
    """The data of an exchange until the parameters have been gathered."""

    state: ShardedState
    totals: Totals
    grad_norm: jax.Array  # []
    outgoing: Outgoing


class Received(NamedTuple):
    """The result of an exchange."""

    params: PyTree  # of their own dtypes, on every worker
    state: ShardedState  # advanced
    totals: Totals
    grad_norm: jax.Array  # []


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Reduce-scatter, the optimizer on the shards, all-gather: a hop per data axis."""

    axis: tuple[str, ...]  # the data axes, slowest first
    # (state, gradient, totals, extra) -> (state, Point): the step of the owners of
    # shards, between the reduction and the gather
    advance: Callable[
        [ShardedState, Reduced | PyTree, Totals, dict[str, Any]],
        tuple[ShardedState, Point],
    ]
    codec: Codec  # how this half-round communicates

    def send(
        self, in_flight: InFlight, state: ShardedState, extra: dict[str, Any]
    ) -> Reducing:
        """Sum what is small: an all-reduce later would take the asynchronous slot."""
        totals, whole, sums = state.layout.sum_small(in_flight)
        if sums:
            new = averaged(state.model_state, sums[0], totals.weight)
            state = state._replace(model_state=new)
        return Reducing(state, extra, totals, whole, in_flight.buffers)

    @functools.cached_property
    def hops(self) -> tuple[Hop, ...]:
        first, *others = self.gathers
        first = first._replace(encode=lambda x: self._encode_params(self.act(x)))
        return (*self.reduces, first, *others)

    @functools.cached_property
    def reduces(self) -> tuple[Hop, ...]:
        """The hops of gradients to the owners of shards, the fastest network first."""
        partial = functools.partial
        return tuple(
            Hop(partial(self._encode, axis), partial(self._reduce, axis))
            for axis in self.axis[::-1]
        )

    @functools.cached_property
    def gathers(self) -> tuple[Hop, ...]:
        """The hops of an advanced point to all workers, the slowest network first."""
        first, *others = (
            Hop(lambda x: x, functools.partial(self._gather, axis))
            for axis in self.axis
        )
        return (first._replace(encode=self._encode_params), *others)

    def _encode(self, axis: str, x: Reducing) -> Reducing:
        residual, buffers = self.codec.encode(
            x.state.layout, x.state.residual, x.buffers, axis, x.totals.weight
        )
        return x._replace(state=x.state._replace(residual=residual), buffers=buffers)

    def _reduce(self, axis: str, x: Reducing) -> Reducing:
        return x._replace(buffers=self.codec.reduce(x.state.layout, x.buffers, axis))

    def act(self, x: Reducing) -> Advanced:
        """Advance the shards on the reduced sums, as their owners."""
        # without weight nothing counts, not even the error feedback of rounding
        valid = x.totals.weight != 0
        gradient = self.codec.decode(x.state.layout, x.buffers, x.whole, valid)
        state, point = self.advance(x.state, gradient, x.totals, x.extra)
        return Advanced(state, x.totals, point)

    def _encode_params(self, x: Advanced) -> Gathering:
        state, totals, (shards, norm) = x
        residual, outgoing = self.codec.encode_params(
            state.layout, state.residual, shards
        )
        return Gathering(state._replace(residual=residual), totals, norm, outgoing)

    def _gather(self, axis: str, x: Gathering) -> Gathering:
        return x._replace(outgoing=x.state.layout.all_gather(x.outgoing, axis))

    def decode(self, x: Gathering, params: PyTree) -> Received:
        state = x.state
        new = self.codec.decode_params(state.layout, state.residual, x.outgoing, params)
        return Received(new, state, x.totals, x.grad_norm)

    def out_shardings(self, state: ShardedState) -> Received:
        """Return the shardings of what `decode` returns."""
        layout = state.layout
        everywhere: Any = layout.sharding()  # in the places of arrays
        totals = Totals(everywhere, everywhere)
        return Received(layout.params_shardings, state.shardings(), totals, everywhere)


class ExchangeRound(Round[StateT]):
    """A round whose hops are those of an exchange."""

    exchange: Exchange  # of the method whose state `open` returns as the owners'

    @property
    def hops(self) -> tuple[Hop, ...]:  # type: ignore[override]
        return self.exchange.hops

    def send(
        self, in_flight: InFlight, owner: ShardedState, extra: dict[str, Any]
    ) -> Reducing:
        return self.exchange.send(in_flight, owner, extra)

    def decode(self, message: Gathering, params: PyTree) -> Received:
        return self.exchange.decode(message, params)

    def out_shardings(self, owner: ShardedState) -> Received:
        return self.exchange.out_shardings(owner)
