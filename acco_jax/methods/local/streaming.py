"""Streaming DiLoCo: one fragment of the parameters at a time (arXiv 2501.18512).

The parameters are cut into P fragments. Every H/P inner steps it is another fragment's
turn; for fragment p, whose point x_p all workers last got in common,

    Delta_p = sum_i w_i (x_p - theta_i,p) / sum_i w_i
    x_p <- a step of an outer optimizer (Nesterov momentum) from x_p on Delta_p

crosses the network beside the next tau inner steps, and is then mixed in:

    theta_i,p <- alpha theta_i,p + (1 - alpha) x_p

With tau = 0 nothing has been done meanwhile, and workers take x_p as it is: with one
fragment that is DiLoCo. w_i is worker i's weight since that fragment was sent before; a
worker without any takes x_p as it is, too. One call of the train step is H/P inner
steps: it ends with fragment p sent, and the next call starts with its arrival.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from acco_jax.core.buffers import InFlight
from acco_jax.core.codec import Codec
from acco_jax.core.exchange import Exchange, ExchangeRound, Received
from acco_jax.core.layout import Layout
from acco_jax.core.leaves import Leaf, PyTree
from acco_jax.core.microbatches import whole_number
from acco_jax.core.select import choose
from acco_jax.core.state import ShardedState
from acco_jax.core.workers import over_data
from acco_jax.methods.delayed import dpu
from acco_jax.methods.local import local_method
from acco_jax.methods.local.local_method import (
    InnerSteps,
    LocalMethod,
    LocalProgress,
    LocalRound,
)
from acco_jax.methods.local.rounds import RoundOptions, counted, differences
from acco_jax.methods.method import (
    assembled,
    common_attributes,
    gather_exact,
    layout_of,
    placed_state,
)
from acco_jax.methods.sharded import ShardedMethod
from acco_jax.methods.zero1 import zero1

Fragment = dict[str, Any]  # leaves by their `keys`


class StreamingState(NamedTuple):
    """State of `streaming_diloco`; the parameters of the loop are rows, theta_i."""

    layout: Layout  # static: of all parameters
    calls_done: jax.Array  # int32 []: calls so far
    steps: jax.Array  # int32 []: inner steps so far
    outer: tuple[Any, ...]  # each fragment's outer state, sharded: exact x_p, momentum
    anchor: tuple[Fragment, ...]  # x_p as the workers got it, replicated
    weights: jax.Array  # (n, P): each worker's since each fragment was sent
    inner: PyTree  # rows: each worker's own optimizer state
    master: PyTree  # rows: theta_i in float32 if any parameter is narrower, else None

    def shardings(self) -> Self:
        layout = self.layout
        each = zip(keys(layout.leaves), layout.leaves, strict=True)
        out_shardings = {key: layout.sharding(*leaf.spec) for key, leaf in each}
        anchor = tuple(
            {name: out_shardings[name] for name in part} for part in self.anchor
        )
        state = local_method.shardings(self, rows=("weights", "inner", "master"))
        return state._replace(anchor=anchor)

    def committed(self, params: PyTree) -> PyTree:
        del params  # theta_i
        return self._joined(gather_exact)

    def theta(self, params: PyTree) -> PyTree:
        del params
        return self._joined(assembled)

    def _joined(self, gather: Callable[[Layout, PyTree], Fragment]) -> PyTree:
        leaves: Fragment = {}
        for state in self.outer:
            leaves |= gather(state.layout, state.master)
        layout = self.layout
        return layout.treedef.unflatten([leaves[key] for key in keys(layout.leaves)])


def fragments_of(leaves: Sequence[Leaf], count: int) -> tuple[tuple[int, ...], ...]:
    """Return the leaves, by index, of `count` fragments of about equal bytes.

    Where there are enough numbered blocks ("h/3/..."), they are dealt out in turn, so
    that each fragment spans the depth; all other leaves go, the largest first, to
    whichever fragment is smallest.

    Raises:
      ValueError: there are fewer leaves than fragments.
    """
    if len(leaves) < count:
        raise ValueError(
            f"fragments is {count}, but there are only {len(leaves)} parameters: use "
            f"at most {len(leaves)}."
        )
    blocks: dict[tuple[str, ...], list[int]] = {}
    loose = []
    for i, leaf in enumerate(leaves):
        at = next(
            (k for k, name in enumerate(leaf.path) if re.search(r"\d", name)), None
        )
        if at is None or at == len(leaf.path) - 1:
            loose.append(i)
        else:
            blocks.setdefault(leaf.path[: at + 1], []).append(i)
    if len(blocks) < count:
        blocks, loose = {}, list(range(len(leaves)))
    number = lambda path: [int(x) for x in re.findall(r"\d+", path[-1])]  # noqa: E731
    made: list[list[int]] = [[] for _ in range(count)]
    for k, path in enumerate(sorted(blocks, key=lambda p: (p[:-1], number(p)))):
        made[k % count] += blocks[path]

    def size(i: int) -> int:  # whole: a model axis changes no fragment
        return math.prod(leaves[i].shape) * leaves[i].dtype.itemsize

    for i in sorted(loose, key=size, reverse=True):
        min(made, key=lambda part: (sum(map(size, part)), len(part))).append(i)
    return tuple(tuple(sorted(part)) for part in made)


def keys(leaves: Sequence[Leaf]) -> list[str]:
    """Return a key for each leaf: its name; with its index, if leaves share a name."""
    names = list(map(str, leaves))
    if len(set(names)) == len(names):
        return names
    return [f"{i}.{name}" for i, name in enumerate(names)]


def take(layout: Layout, members: Sequence[int], tree: PyTree) -> Fragment:
    """Return the leaves of a fragment."""
    leaves, named = jax.tree.leaves(tree), keys(layout.leaves)
    return {named[i]: leaves[i] for i in members}


def put(layout: Layout, tree: PyTree, part: Fragment) -> PyTree:
    """The tree with a fragment's leaves replaced."""
    leaves = zip(keys(layout.leaves), jax.tree.leaves(tree), strict=True)
    return layout.treedef.unflatten([part.get(key, x) for key, x in leaves])


# -------------------------------------------------------------------------- the round


@dataclasses.dataclass(frozen=True)
class StreamingRound(ExchangeRound[StreamingState], LocalRound[StreamingState]):
    """H/P inner steps of every worker; fragment `phase` is sent at their end."""

    steps: InnerSteps
    exchange: Exchange  # of a fragment's outer method
    fragments: int  # P
    phase: int  # whose turn it is
    overlap: int  # tau; 0: what is sent arrives in the same call, after the steps
    mixing: float  # alpha
    weighted: bool  # see `RoundOptions`

    @property
    def overlaps(self) -> bool:  # type: ignore[override]
        return self.overlap > 0

    @property
    def beside(self) -> int:
        return self.overlap or self.steps.steps

    @property
    def arriving(self) -> int:
        return (self.phase - self.overlaps) % self.fragments

    def open(
        self, params: PyTree, state: StreamingState
    ) -> tuple[InFlight | None, ShardedState, StreamingState]:
        """Return the arriving fragment's state as the owner's; in-flight ones stay."""
        owner, outer = state.outer[self.arriving], list(state.outer)
        others = set(owner._fields) - {"layout", "in_flight"}
        outer[self.arriving] = owner._replace(**dict.fromkeys(others))
        in_flight = None
        if self.overlaps:
            in_flight, owner = owner.in_flight, owner._replace(in_flight=None)
        return in_flight, owner, state._replace(outer=tuple(outer))

    def _members(self, layout: Layout, fragment: int) -> tuple[int, ...]:
        return fragments_of(layout.leaves, self.fragments)[fragment]

    def _weights(self, rest: StreamingState, progress: LocalProgress) -> jax.Array:
        """Return (n, P) weights at the end of this call's steps."""
        return rest.weights + progress.sums.weight[:, None].astype(rest.weights.dtype)

    def outgoing(
        self, params: PyTree, rest: StreamingState, progress: LocalProgress
    ) -> InFlight:
        """Return what fragment `phase` sends."""
        layout, anchor = rest.layout, rest.anchor[self.phase]
        theta = take(layout, self._members(layout, self.phase), progress.theta)
        weight = counted(self._weights(rest, progress)[:, self.phase], self.weighted)
        outer = rest.outer[self.phase].layout
        return differences(outer, weight, anchor, theta, P())

    def merge(
        self, rest: StreamingState, progress: LocalProgress, received: Received
    ) -> LocalProgress:
        q, layout = self.arriving, rest.layout
        if self.overlaps:
            weight = rest.outer[q].in_flight.weight
        else:
            weight = self._weights(rest, progress)[:, q]

        def local(
            total: jax.Array, weight: jax.Array, theta: PyTree, anchor: PyTree
        ) -> PyTree:
            keeps = (weight[0] != 0) & self.overlaps

            def one(x: jax.Array, common: jax.Array) -> jax.Array:
                common = common[None].astype(x.dtype)
                mixed = self.mixing * x + (1 - self.mixing) * common
                return jnp.where(total != 0, jnp.where(keeps, mixed, common), x)

            return jax.tree.map(one, theta, anchor)

        theta = take(layout, self._members(layout, q), progress.theta)
        row = P(layout.axis)
        in_specs = (P(), row, row, P())
        run = over_data(local, layout.mesh, layout.axis, in_specs, row)
        merged = run(received.totals.weight, weight, theta, received.params)
        return progress._replace(theta=put(layout, progress.theta, merged))

    def conclude(
        self,
        rows: PyTree,
        rest: StreamingState,
        progress: LocalProgress,
        received: Received,
    ) -> tuple[PyTree, StreamingState]:
        p, q, layout = self.phase, self.arriving, rest.layout
        outer, anchor = list(rest.outer), list(rest.anchor)
        # nothing arrives of a fragment that nobody has sent yet
        sent = received.totals.weight != 0
        anchor[q] = choose(sent, received.params, anchor[q])
        outer[q] = received.state
        if self.overlaps:
            # read no more before it is written again
            outer[q] = outer[q]._replace(in_flight=rest.outer[q].in_flight)
            # it differs from the point that has just arrived, if it is the same one
            leaving = self.outgoing(rows, rest._replace(anchor=tuple(anchor)), progress)
            outer[p] = outer[p]._replace(in_flight=leaving)
        weights = self._weights(rest, progress)
        sends = np.arange(weights.shape[1]) == p
        state = rest._replace(
            outer=tuple(outer),
            anchor=tuple(anchor),
            weights=jnp.where(sends, 0, weights).astype(rest.weights.dtype),
            inner=progress.inner,
            master=None if rest.master is None else progress.theta,
        )
        return local_method.narrowed(layout, progress.theta), state


def streaming_diloco(
    inner: optax.GradientTransformation,
    *,
    mesh: Mesh,
    local_steps: int = 100,
    fragments: int = 4,
    overlap_steps: int = 5,
    mixing: float = 0.5,
    bits: int | None = None,
    outer_learning_rate: float = 0.7,
    outer_momentum: float = 0.9,
    outer: optax.GradientTransformation | None = None,
    **options: Unpack[RoundOptions],
) -> LocalMethod:
    """DiLoCo a fragment at a time, its exchange overlapped by inner steps.

    Bytes sent per worker: per H steps those of `acco_jax.diloco`, but never more than
    one fragment's at once; with `bits` the way there takes 1 byte (8 bits) or half a
    byte (4) per parameter, and 4 bytes per row of at least 128.

    Args:
      inner: each worker's optimizer, an optax transformation.
      mesh: the devices.
      local_steps: H, from one exchange of a fragment to its next; a multiple of P.
      fragments: P.
      overlap_steps: tau, at most H / P. From 4 on a GPU's program overlaps both
        collectives: with 2, each is beside a loop of one step, which XLA unrolls.
      mixing: alpha, how much of its own parameters a worker keeps when a fragment
        arrives; without overlap, none.
      bits: 8 or 4: outer gradients as integers with a scale per row; None: they travel
        in the communication dtype, as parameters always do on their way back.
      outer_learning_rate: eta, as for `acco_jax.diloco`.
      outer_momentum: mu, as for `acco_jax.diloco`.
      outer: as for `acco_jax.diloco`; every fragment has an optimizer of its own,
        which sees {name: leaf}.
      **options: as for `acco_jax.diloco`.

    Returns:
      A `LocalMethod`; one call of its train step is H / P inner steps.

    Raises:
      ValueError: in one line, before any device work, what does not fit.

    References:
      Douillard et al., Streaming DiLoCo with overlapping communication: Towards a
      Distributed Free Lunch (https://arxiv.org/abs/2501.18512)
    """
    local_steps = local_method.checked_steps("local_steps", local_steps)
    fragments = local_method.checked_steps("fragments", fragments)
    overlap_steps = whole_number(
        "overlap_steps", overlap_steps, 0, "give an integer of at least 0."
    )
    interval = _interval(local_steps, fragments, overlap_steps)
    if not 0 <= mixing < 1:
        raise ValueError(f"mixing is {mixing}: it must lie from 0 to below 1.")
    if bits not in (None, 8, 4):
        raise ValueError(f"bits is {bits!r}: choose 8, 4 or None.")
    given = outer_learning_rate, outer_momentum
    outer = local_method.outer_step(outer, *given, (0.7, 0.9))
    weighted = options.get("weighted", True)
    steps = InnerSteps(inner, interval)

    common = common_attributes(mesh, options, RoundOptions)
    exchange_options = {"axis_name": common["axis"], "comm_dtype": common["comm_dtype"]}

    def outer_method(specs: PyTree | None) -> ShardedMethod:
        make = dpu if overlap_steps else zero1
        return make(outer, mesh=mesh, **exchange_options, param_specs=specs)

    of_any = outer_method(None)
    codec = Codec(reduce_bits=bits, feedback=False)

    def init(params: PyTree) -> StreamingState:
        whole = layout_of(params, common)
        local_method.check_wire(whole, weighted)
        params = jax.device_put(params, whole.params_shardings)
        members = fragments_of(whole.leaves, fragments)
        specs = whole.tree(lambda leaf: leaf.spec)
        states = tuple(
            outer_method(take(whole, numbers, specs)).init(take(whole, numbers, params))
            for numbers in members
        )

        def make(params: PyTree) -> StreamingState:
            # copies: a train step is given the parameters and the state to keep
            params = jax.tree.map(jnp.copy, params)
            return StreamingState(
                whole,
                calls_done=jnp.int32(0),
                steps=jnp.int32(0),
                outer=(),
                anchor=tuple(take(whole, numbers, params) for numbers in members),
                weights=jnp.zeros((whole.workers, fragments), whole.scalar),
                inner=local_method.init_rows(whole, inner, params),
                master=local_method.master_rows(whole, params),
            )

        return placed_state(make, params, whole)._replace(outer=states)

    def round_of(phase: int) -> StreamingRound:
        exchange = of_any.exchange(codec)
        return StreamingRound(
            steps, exchange, fragments, phase, overlap_steps, mixing, weighted
        )

    def check_parts(state: StreamingState) -> None:
        if len(state.outer) != fragments:
            raise ValueError(
                f"the state has {len(state.outer)} fragments and tx {fragments}: give "
                "the state of acco_jax.start(tx, params) for the same tx."
            )
        for part in state.outer:
            of_any.check_state(part)

    return local_method.local_method(
        inner,
        common,
        steps_per_call=interval,
        state_type=StreamingState,
        make_state=init,
        round=round_of,
        check_parts=check_parts,
        on=lambda mesh, axis, specs: streaming_diloco(
            inner,
            mesh=mesh,
            local_steps=local_steps,
            fragments=fragments,
            overlap_steps=overlap_steps,
            mixing=mixing,
            bits=bits,
            outer=outer,
            **options | {"axis_name": axis, "param_specs": specs},
        ),
        period=fragments,
        delayed=overlap_steps > 0,
    )


def _interval(local_steps: int, fragments: int, overlap_steps: int) -> int:
    """H / P, checked."""
    if local_steps % fragments:
        raise ValueError(
            f"local_steps is {local_steps}, no multiple of the {fragments} fragments "
            "that take turns: use a multiple."
        )
    interval = local_steps // fragments
    if overlap_steps > interval:
        raise ValueError(
            f"overlap_steps is {overlap_steps}: it must lie from 0 to local_steps / "
            f"fragments = {interval}, when the next fragment is sent."
        )
    return interval
