"""Delayed updates: a gradient is applied one step after it was computed.

    dpu  theta(t+1) = Opt(theta(t), G(t-1) / W(t-1)),  g(t) computed at theta(t)
    wp   as dpu, but g(t) computed at a predicted point, a second step with the most
         recent gradient: theta~(t+1) = Opt(theta(t+1), G(t-1) / W(t-1)), not committed

Both communicate while they compute, as ACCO does, and leave the delay as it is.

With `feedback` f each step makes up for the delay by the change of the update since the
step before (update-level error feedback), u being what Opt moves:

    theta(t+1) = theta(t) + u(t) + f (u(t) - u(t-1)),
    u(t) = Opt(theta(t), G(t-1) / W(t-1)) - theta(t)
"""

import functools
import math
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from acco_jax.core.buffers import InFlight, Totals
from acco_jax.core.layout import Layout
from acco_jax.core.leaves import PyTree
from acco_jax.core.microbatches import whole_number
from acco_jax.core.select import choose, difference
from acco_jax.methods import sharded
from acco_jax.methods.sharded import ShardedMethod, ShardedOptions, Step


@sharded.with_shards
class DpuState(NamedTuple):
    """State of `dpu`; shards hold 1/n of every parameter on each worker."""

    layout: Layout  # static
    calls_done: jax.Array  # int32 []: so far
    steps: jax.Array  # int32 []: steps so far
    master: PyTree  # theta(t): shards, float32 or wider
    inner: PyTree  # the optimizer's state at theta(t), over the shards
    in_flight: InFlight  # g, w of the last update: per worker, communication dtype
    residual: Any = None  # `core.codec.Residual`, if communication is quantized
    model_state: PyTree = None  # mean over the workers, e.g. batch-norm statistics
    update: PyTree = None  # u(t-1): shards; None without `feedback`


class WpState(DpuState):
    """State of `wp`, with the fields of dpu's: the parameters beside it differ."""


def start(
    layout: Layout,
    master: PyTree,
    inner: PyTree,
    *,
    state: type[DpuState] = DpuState,
    feedback: float = 0.0,
) -> DpuState:
    counts = jnp.int32(0), jnp.int32(0)
    began = state(layout, *counts, master, inner, layout.zeros())
    if not feedback:
        return began
    return began._replace(update=jax.tree.map(jnp.zeros_like, master))


def advance(
    state: DpuState,
    gradient: PyTree,
    totals: Totals,
    step: Step,
    *,
    predict: bool,
    feedback: float,
    warmup: int = 0,
) -> tuple[DpuState, PyTree]:
    """Take a step on the sums that arrived; with `predict` a second one, ahead."""
    if (state.update is not None) != bool(feedback):
        raise ValueError(
            f"the state was made {'without' if feedback else 'with'} feedback, and tx "
            f"has feedback {feedback}: give the state of tx.init for the same tx."
        )
    # this half-round is counted already; in a warm-up no gradient is late
    valid = totals.weight != 0
    late = valid & (state.calls_done > warmup)

    def fed_back(point: PyTree, at: PyTree, before: PyTree) -> tuple[PyTree, PyTree]:
        """Return where a step to `point` ends, and its update."""
        if not feedback:
            return point, before
        update = jax.tree.map(difference, point, at)
        further = jax.tree.map(
            lambda x, u, last: x + feedback * (u - last), point, update, before
        )
        return choose(late, further, point), choose(valid, update, before)

    theta, inner_state = step(gradient, totals, state.inner, state.master)
    theta, update = fed_back(theta, state.master, state.update)
    ahead = theta
    if predict:
        ahead = step(gradient, totals, inner_state, theta)[0]
        ahead, _ = fed_back(ahead, theta, update)
    state = state._replace(
        steps=state.steps + jnp.int32(totals.weight != 0),
        master=theta,
        inner=inner_state,
        update=update,
    )
    return state, ahead


delayed = functools.partial(sharded.sharded, state=DpuState, start=start, delayed=True)


def _late(
    inner: optax.GradientTransformation,
    mesh: Mesh,
    options: ShardedOptions,
    *,
    predict: bool,
    feedback: float,
    warmup: int = 0,
) -> ShardedMethod:
    """Build a delayed method; raise a ValueError for a negative or endless feedback."""
    if not 0 <= feedback < math.inf:
        raise ValueError(
            f"feedback is {feedback}: give 0 for none, or a positive number; 1 makes "
            "up for the whole change of the update."
        )
    feedback = float(feedback)  # NumPy's would make float64 of the master weights
    step = functools.partial(advance, predict=predict, feedback=feedback, warmup=warmup)
    state = WpState if predict else DpuState
    begin = functools.partial(start, state=state, feedback=feedback)
    return delayed(
        inner, mesh, options, state=state, start=begin, advance=step, warmup=warmup
    )


def dpu(
    inner: optax.GradientTransformation,
    *,
    mesh: Mesh,
    warmup_steps: int = 0,
    feedback: float = 0.0,
    **options: Unpack[ShardedOptions],
) -> ShardedMethod:
    """Apply each gradient one step late, so that its communication is overlapped.

    Args:
      inner: an optax transformation.
      mesh: the devices.
      warmup_steps: how many first half-rounds are synchronous, as in `zero1`.
      feedback: how much of the update's change since the last step each late step adds
        (the module's f); 1 as in arXiv 2606.30634, 0 for none. Adds a shard of the
        parameters in float32.
      **options: as for `acco_jax.acco`.

    References:
      Ren et al., ZeRO-Offload, section 4.2: one-step delayed parameter update
      (https://arxiv.org/abs/2101.06840)
      Update-level error feedback for delayed updates (https://arxiv.org/abs/2606.30634)
    """
    remedy = "give a whole number, 0 for none."
    warmup = whole_number("warmup_steps", warmup_steps, 0, remedy)
    return _late(inner, mesh, options, predict=False, feedback=feedback, warmup=warmup)


def wp(
    inner: optax.GradientTransformation,
    *,
    mesh: Mesh,
    feedback: float = 0.0,
    **options: Unpack[ShardedOptions],
) -> ShardedMethod:
    """Compute each gradient where the next, late step is predicted to lead.

    Args:
      inner: an optax transformation.
      mesh: the devices.
      feedback: as for `dpu`; the predicted step has it, too.
      **options: as for `acco_jax.acco`.

    References:
      The weight prediction that Nabli et al. compare with
      (https://arxiv.org/abs/2406.02613, section 3)
    """
    return _late(inner, mesh, options, predict=True, feedback=feedback)
