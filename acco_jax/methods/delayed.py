"""Delayed updates: a gradient is applied one step after it was computed.

    dpu  theta(t+1) = Opt(theta(t), G(t-1) / W(t-1)),  g(t) computed at theta(t)
    wp   as dpu, but g(t) computed at a predicted point, a second step with the most
         recent gradient: theta~(t+1) = Opt(theta(t+1), G(t-1) / W(t-1)), not committed

Both communicate while they compute, as ACCO does, and leave the delay as it is.
"""

import functools
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from acco_jax.exchange import Point
from acco_jax.layout import Layout, Pending, PyTree, Totals
from acco_jax.methods import sharded
from acco_jax.methods.sharded import ShardedMethod, ShardedOptions, Step


@sharded.with_shards
class DelayedState(NamedTuple):
    """State of `dpu` and `wp`; shards hold 1/n of every parameter on each worker."""

    layout: Layout  # static
    half_rounds: jax.Array  # int32 []: so far
    steps: jax.Array  # int32 []: steps so far
    master: PyTree  # theta(t): shards, float32 or wider
    inner: PyTree  # the optimizer's state at theta(t), over the shards
    pending: Pending  # g, w of the last update: per worker, communication dtype
    residue: Any = None  # `acco_jax.codec.Residue`, if communication is quantized
    model_state: PyTree = None  # mean over the workers, e.g. batch-norm statistics


def start(layout: Layout, master: PyTree, inner: PyTree) -> DelayedState:
    counts = jnp.int32(0), jnp.int32(0)
    return DelayedState(layout, *counts, master, inner, layout.zeros())


def advance(
    state: DelayedState,
    gradient: PyTree,
    totals: Totals,
    step: Step,
    *,
    predict: bool,
) -> tuple[DelayedState, Point]:
    """Take a step on the gradient that arrived; with `predict` a second one ahead."""
    theta, inner_state, norm = step(gradient, totals, state.inner, state.master)
    ahead = step(gradient, totals, inner_state, theta)[0] if predict else theta
    steps = state.steps + jnp.int32(totals.weight != 0)
    state = state._replace(steps=steps, master=theta, inner=inner_state)
    return state, Point(ahead, norm)


delayed = functools.partial(
    sharded.sharded, state=DelayedState, start=start, delayed=True
)


def dpu(
    inner: optax.GradientTransformation,
    *,
    mesh: Mesh,
    warmup_steps: int = 0,
    **options: Unpack[ShardedOptions],
) -> ShardedMethod:
    """Apply each gradient one step late, so that its communication is overlapped.

    Args:
      inner: an optax transformation.
      mesh: the devices.
      warmup_steps: how many first half-rounds are synchronous, as in `zero1`.
      **options: as for `acco_jax.acco`.

    References:
      Ren et al., ZeRO-Offload, section 4.2: one-step delayed parameter update
      (https://arxiv.org/abs/2101.06840)
    """
    step = functools.partial(advance, predict=False)
    if warmup_steps < 0:
        raise ValueError(
            f"warmup_steps is {warmup_steps}: it must be at least 0, which is none."
        )
    return delayed(inner, mesh, options, advance=step, warmup=warmup_steps)


def wp(
    inner: optax.GradientTransformation,
    *,
    mesh: Mesh,
    **options: Unpack[ShardedOptions],
) -> ShardedMethod:
    """Compute each gradient where the next, late step is predicted to lead.

    Args:
      inner: an optax transformation.
      mesh: the devices.
      **options: as for `acco_jax.acco`.

    References:
      The weight prediction that Nabli et al. compare with
      (https://arxiv.org/abs/2406.02613, section 3)
    """
    step = functools.partial(advance, predict=True)
    return delayed(inner, mesh, options, advance=step)
