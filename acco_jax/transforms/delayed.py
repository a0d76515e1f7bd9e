"""Delayed updates: the gradient that arrives belongs to the parameters of before.

    dpu  theta(t+1) = Opt(theta(t), G(t-1) / W(t-1)),  g(t) computed at theta(t)
    wp   the same, but g(t) computed at a predicted point, a second step with the most
         recent gradient: theta~(t+1) = Opt(theta(t+1), G(t-1) / W(t-1)), not committed

Both communicate while they compute, as ACCO does, and leave the delay as it is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from acco_jax.layout import Layout, Pending, PyTree, Totals
from acco_jax.transforms.base import Method, Options, Point, make_method


class DelayedState(NamedTuple):
    """State of `dpu` and `wp`; shards hold 1/n of every parameter on each worker."""

    layout: Layout  # static
    steps: jax.Array  # int32 []: steps so far
    master: PyTree  # theta(t): shards, float32 or wider
    inner: PyTree  # the optimizer's state at theta(t), over the shards
    pending: Pending  # g, w of the last update: every worker's own, wire dtype
    wire: Any = None  # `acco_jax.wire.Held`, if communication is quantized


def _start(layout: Layout, master: PyTree, inner_state: PyTree) -> DelayedState:
    return DelayedState(layout, jnp.int32(0), master, inner_state, layout.zeros())


def _delayed(
    inner: optax.GradientTransformation,
    options: dict[str, Any],
    *,
    predict: bool,
    warmup: int = 0,
) -> Method:
    def advance(
        state: DelayedState, gradient: PyTree, totals: Totals, step: Any
    ) -> tuple[DelayedState, Point]:
        theta, inner_state, norm = step(gradient, totals, state.inner, state.master)
        at = step(gradient, totals, inner_state, theta)[0] if predict else theta
        steps = state.steps + (totals.weight != 0)
        state = state._replace(steps=steps, master=theta, inner=inner_state)
        return state, Point(at, norm)

    return make_method(
        inner,
        Options(**options),
        state=DelayedState,
        start=_start,
        advance=advance,
        delayed=True,
        half_rounds=1,
        warmup=warmup,
    )


def dpu(
    inner: optax.GradientTransformation, *, warmup_steps: int = 0, **options: Any
) -> Method:
    """Apply each gradient one step late, so that its communication is hidden.

    Args:
      inner: any optax transformation.
      warmup_steps: so many first steps are synchronous, as in `zero1`.
      **options: mesh, axis_name, comm_dtype, accumulate_dtype, param_specs,
        gather_bits, reduce_bits and resync_every, as for `acco_jax.acco`.

    References:
      Ren et al., ZeRO-Offload, section 4.2: one-step delayed parameter update
      (https://arxiv.org/abs/2101.06840)
    """
    return _delayed(inner, options, predict=False, warmup=warmup_steps)


def wp(inner: optax.GradientTransformation, **options: Any) -> Method:
    """Compute each gradient where the next, late step is predicted to lead.

    Args:
      inner: any optax transformation.
      **options: as for `dpu`.

    References:
      The weight prediction that Nabli et al. compare with
      (https://arxiv.org/abs/2406.02613, section 3)
    """
    return _delayed(inner, options, predict=True)
