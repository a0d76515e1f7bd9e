"""ACCO: accumulate while you communicate (arXiv 2406.02613).

With G, W the sums of the workers' local gradients and weights, and Opt one step of any
optimizer from its committed state:

    estimate  communicates g(t-1)   theta~(t+1) = Opt(theta(t), G(t-1) / W(t-1))
              while g'(t) is computed at theta(t); the optimizer state stays
    commit    communicates g'(t)    theta(t+1) = Opt(theta(t),
                                            (G(t-1) + G'(t)) / (W(t-1) + W'(t)))
              while g(t) is computed at theta~(t+1); the optimizer state advances

With `extrapolation` r the estimate goes r times as far, which looks ahead as Nesterov's
momentum does: theta~(t+1) = theta(t) + r (Opt(theta(t), G(t-1) / W(t-1)) - theta(t)).

In each half-round the exchange sends `in_flight`, the in-flight gradients that the
half-round before has left. The owners of shards run `advance` between its reduction and
its gather. Meanwhile the next gradients are computed, at the parameters that the
previous exchange gathered. They are the next half-round's `in_flight`. The first
half-round (the pipeline fill) has nothing to communicate: it is a commit of weight 0.
"""

import functools
import math
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from acco_jax.core.buffers import InFlight, Reduced, Totals
from acco_jax.core.layout import Layout
from acco_jax.core.leaves import PyTree
from acco_jax.core.select import choose, difference, masked
from acco_jax.methods import sharded
from acco_jax.methods.sharded import ShardedMethod, ShardedOptions, Step


@sharded.with_shards
class AccoState(NamedTuple):
    """State of `acco`; shards hold 1/n of every parameter on each worker."""

    layout: Layout  # static
    calls_done: jax.Array  # int32 []: so far; the next one commits if they are even
    steps: jax.Array  # int32 []: commits so far
    master: PyTree  # theta(t): shards, float32 or wider
    inner: PyTree  # the optimizer's state at theta(t), over the shards
    in_flight: InFlight  # g, w of the last half-round: per worker, communication dtype
    carry: Reduced  # G(t-1), reduced by the estimate for the commit
    carried: Totals  # W(t-1), and the sum of its losses
    residual: Any = None  # `core.codec.Residual`, if communication is quantized
    model_state: PyTree = None  # mean over the workers, e.g. batch-norm statistics


def start(layout: Layout, master: PyTree, inner: PyTree) -> AccoState:
    return AccoState(
        layout=layout,
        calls_done=jnp.int32(0),
        steps=jnp.int32(0),
        master=master,
        inner=inner,
        in_flight=layout.zeros(),
        carry=layout.reduced_zeros(),
        carried=Totals(*2 * (jnp.zeros((), layout.scalar),)),
    )


def _commits(state: AccoState) -> jax.Array:
    return state.calls_done & 1 == 1  # this half-round is counted already


def accumulate(
    state: AccoState, gradient: Reduced, totals: Totals
) -> tuple[AccoState, Reduced, Totals]:
    """Return what a half-round steps on: in a commit with the estimate's, G(t-1)."""
    before = masked(_commits(state), (state.carry, state.carried))
    both = jax.tree.map(jnp.add, (gradient, totals), before)
    return state._replace(carry=gradient, carried=totals), *both


def advance(
    state: AccoState,
    gradient: PyTree,
    totals: Totals,
    step: Step,
    *,
    extrapolation: float,
) -> tuple[AccoState, PyTree]:
    """Advance the shards by one half-round of the recurrence."""
    commit = _commits(state)
    theta, inner_state = step(gradient, totals, state.inner, state.master, commit)
    point = theta
    if extrapolation != 1:
        ahead = jax.tree.map(
            lambda x, at: at + extrapolation * difference(x, at), theta, state.master
        )
        point = choose(commit, theta, ahead)
    state = state._replace(
        steps=state.steps + jnp.int32(commit & (totals.weight != 0)),
        master=choose(commit, theta, state.master),
        inner=inner_state,
    )
    return state, point


def acco(
    inner: optax.GradientTransformation,
    *,
    mesh: Mesh,
    extrapolation: float = 1.0,
    **options: Unpack[ShardedOptions],
) -> ShardedMethod:
    """Communicate the last half-round's gradients while computing the next ones.

    Two updates make one step of `inner`: an estimate, which moves the parameters ahead
    to theta~, and a commit, which moves them to theta and advances the state of
    `inner`, so its schedules count commits. The first update only fills the pipeline.

    Args:
      inner: an optax transformation; sees mean gradients and the float32 master
        weights, every leaf in its own shape. Clipping, masks and schedules belong in
        it.
      mesh: the devices.
      extrapolation: how far an estimate goes, as a multiple of the optimizer's step;
        above 1 it looks ahead, also past what a projection of `inner` allows. It costs
        nothing. For optimizers without Nesterov's momentum;
        experiments/results/dynamics.md has what it gains.
      **options: see `acco_jax.methods.sharded.ShardedOptions`.

    Returns:
      A method. update(grads, state, params, weight=None, **extra) takes grads leaves
      (n, *param.shape), row i the sum of worker i's microbatch gradients, and weight
      (n,), and returns updates in float32 (float64 for such parameters) relative to
      the params passed in: the next update undoes what else was done to those. `value`
      reaches `inner` with these gradients: give it in every call or in none. A
      negative weight raises a ValueError. A jax.Array is not read: there a negative
      weight counts as 0, and its row is ignored.

    Raises:
      ValueError: `extrapolation` is not positive and finite, `inner` is not an optax
        transformation or is sharded itself, the mesh lacks the axis, or an option is
        not one of its choices.

    References:
      Nabli et al., ACCO: Accumulate While You Communicate for Communication-Overlapped
      Sharded LLM Training (https://arxiv.org/abs/2406.02613)
    """
    if not 0 < extrapolation < math.inf:
        raise ValueError(
            f"extrapolation is {extrapolation}: give a positive number, 1 for none."
        )
    return sharded.sharded(
        inner,
        mesh,
        options,
        state=AccoState,
        start=start,
        accumulate=accumulate,
        advance=functools.partial(advance, extrapolation=float(extrapolation)),
        delayed=True,
        calls_per_step=2,
    )
