"""ACCO: accumulate while you communicate (arXiv 2406.02613).

With G, W the sums of the workers' local gradients and weights, and Opt one step of any
optimizer from its committed state:

    estimate  communicates g(t-1)   theta~(t+1) = Opt(theta(t), G(t-1) / W(t-1))
              while g'(t) is computed at theta(t); the optimizer state stays
    commit    communicates g'(t)    theta(t+1) = Opt(theta(t),
                                            (G(t-1) + G'(t)) / (W(t-1) + W'(t)))
              while g(t) is computed at theta~(t+1); the optimizer state advances

The first half-round (priming) has nothing to communicate: it is a commit of weight 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from acco_jax.layout import Layout, Pending, Totals
from acco_jax.transforms.base import Method, Options, Point, choose, make_method

PyTree = Any
ESTIMATE, COMMIT = 0, 1


class AccoState(NamedTuple):
    """State of `acco`; shards hold 1/n of every parameter on each worker."""

    layout: Layout  # static
    stage: jax.Array  # int32 []: what the next half-round does, ESTIMATE or COMMIT
    steps: jax.Array  # int32 []: commits so far
    master: PyTree  # theta(t): shards, float32 or wider
    inner: PyTree  # the optimizer's state at theta(t), over the shards
    pending: Pending  # g, w of the last half-round: every worker's own, wire dtype
    carry: PyTree  # G(t-1), reduced by the estimate for the commit: shards
    carried: Totals  # W(t-1), and the sum of its losses
    wire: Any = None  # `acco_jax.wire.Held`, if communication is quantized


def acco(
    inner: optax.GradientTransformation,
    *,
    mesh: Mesh,
    axis_name: str | tuple[str, ...] = "data",
    comm_dtype: Any = None,
    accumulate_dtype: Any = None,
    param_specs: PyTree | None = None,
    gather_bits: int | tuple[int | None, int | None] | None = None,
    reduce_bits: int | None = None,
    resync_every: int = 0,
) -> Method:
    """Communicate the last half-round's gradients while computing the next ones.

    Two updates make one step of `inner`: an estimate, which moves the parameters ahead
    to theta~, and a commit, which moves them to theta and advances the state of
    `inner`, so its schedules count commits. The first update only primes.

    Args:
      inner: any optax transformation; sees mean gradients and the float32 master copy,
        every leaf in its own shape. Clipping, masks and schedules belong in it.
      mesh: the devices.
      axis_name: the mesh axis (or axes) of the n data-parallel workers.
      comm_dtype: what both collectives carry; None means each parameter's own dtype.
        With float32 parameters and bfloat16 here, the model sees the gathered, rounded
        values (held in float32); `committed_params` gives the master copy.
      accumulate_dtype: of the gradient accumulator; None means each parameter's own.
      param_specs: PartitionSpecs of the parameters over the mesh's other axes; needed
        where such an axis is Auto.
      gather_bits: 8 or 4 gathers differences to what the workers hold, in so many bits
        with a scale per row, not values; or a pair for (estimate, commit). The master
        copy stays exact. Adds a shard of the parameters.
      reduce_bits: 8 sends gradients in 8 bits to the shards' owners, which add them in
        float32; what rounding left out is added to each worker's next gradient. Adds a
        buffer as large as what is rounded, with one data axis all of a worker's
        gradients. Of several only the first named, the slowest, is
        crossed in 8 bits: of hosts of GPUs, where an all-to-all of all workers crosses
        the network more often than a ring does, name one axis for the hosts and one for
        a host's GPUs. Not hidden within a TPU slice: its all-to-all is synchronous.
      resync_every: with gather_bits, the first of so many half-rounds gathers values.

    Returns:
      A `Method`. update(grads, state, params, weight=None, **extra) takes grads leaves
      (n, *param.shape), row i the sum of worker i's microbatch gradients, and weight
      (n,), and returns updates in float32 (float64 for such parameters) relative to
      the params passed in. A negative weight is refused; in a jax.Array, which is not
      read, it counts as 0 and its row for nothing.

    Raises:
      ValueError: in one line, before any device work, what does not fit.

    References:
      Nabli et al., ACCO: Accumulate While You Communicate for Communication-Overlapped
      Sharded LLM Training (https://arxiv.org/abs/2406.02613)
    """

    def start(layout: Layout, master: PyTree, inner_state: PyTree) -> AccoState:
        return AccoState(
            layout=layout,
            stage=jnp.int32(COMMIT),
            steps=jnp.int32(0),
            master=master,
            inner=inner_state,
            pending=layout.zeros(),
            carry=jax.tree.map(jnp.zeros_like, master),
            carried=Totals(*2 * (jnp.zeros((), layout.scalar),)),
        )

    def advance(
        state: AccoState, gradient: PyTree, totals: Totals, step: Any
    ) -> tuple[AccoState, Point]:
        commit = state.stage == COMMIT
        # without weight nothing counts, not even what few bits had left out
        gradient = jax.tree.map(lambda g: jnp.where(totals.weight != 0, g, 0), gradient)
        both, total = jax.tree.map(
            lambda g, c: g + jnp.where(commit, c, 0),
            (gradient, totals),
            (state.carry, state.carried),
        )
        theta, inner_state, norm = step(both, total, state.inner, state.master)
        state = state._replace(
            stage=ESTIMATE + COMMIT - state.stage,
            steps=state.steps + (commit & (total.weight != 0)),
            master=choose(commit, theta, state.master),
            inner=choose(commit, inner_state, state.inner),
            carry=gradient,
            carried=totals,
        )
        return state, Point(theta, norm)

    options = Options(
        mesh,
        axis_name,
        comm_dtype,
        accumulate_dtype,
        param_specs,
        gather_bits,
        reduce_bits,
        resync_every,
    )
    return make_method(
        inner,
        options,
        state=AccoState,
        start=start,
        advance=advance,
        delayed=True,
        half_rounds=2,
    )
