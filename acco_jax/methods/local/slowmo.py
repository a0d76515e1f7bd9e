"""SlowMo: slow momentum over rounds of local steps (arXiv 1910.00643).

    Delta(t) = sum_i w_i (x(t) - theta_i) / sum_i w_i
    u(t+1) = beta u(t) + Delta(t) / gamma(t)
    x(t+1) = x(t) - alpha gamma(t) u(t+1)

with gamma(t) the inner learning rate of round t: its first step's, where it is a
schedule. A constant gamma cancels; one that decays keeps old momentum from outweighing
the smaller differences of now. beta = 0 and alpha = 1 are plain averaging.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from acco_jax.core.leaves import PyTree
from acco_jax.methods.local.local_method import LocalMethod
from acco_jax.methods.local.rounds import RoundOptions, rounds_with
from acco_jax.methods.zero1 import zero1


class SlowMomentumState(NamedTuple):
    """State of `slow_momentum`."""

    rounds: jax.Array  # int32 []: outer steps so far
    u: PyTree  # the slow momentum, in units of gradients


def slow_momentum(
    slow_learning_rate: float, beta: float, gamma: Callable[[jax.Array], Any]
) -> optax.GradientTransformation:
    """The outer optimizer of `slowmo`; gamma: rounds so far -> inner learning rate."""

    def init(params: PyTree) -> SlowMomentumState:
        return SlowMomentumState(
            jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params)
        )

    def update(
        updates: PyTree, state: SlowMomentumState, params: PyTree | None = None
    ) -> tuple[PyTree, SlowMomentumState]:
        del params
        rate = gamma(state.rounds)
        # where a warm-up starts at 0, Delta says nothing of the momentum: plain average
        known, safe = rate > 0, jnp.where(rate > 0, rate, 1)
        u = jax.tree.map(
            lambda m, g: jnp.where(
                known, beta * m + g / safe.astype(g.dtype), m
            ).astype(m.dtype),
            state.u,
            updates,
        )
        scale = slow_learning_rate * safe
        moved = jax.tree.map(
            lambda m, g: -scale.astype(m.dtype) * jnp.where(known, m, g), u, updates
        )
        return moved, SlowMomentumState(state.rounds + 1, u)

    return optax.GradientTransformation(init, update)


def slowmo(
    inner: optax.GradientTransformation,
    *,
    mesh: Mesh,
    local_steps: int = 12,
    slow_learning_rate: float = 1.0,
    slow_momentum_factor: float = 0.7,
    inner_learning_rate: float | optax.Schedule = 1.0,
    **options: Unpack[RoundOptions],
) -> LocalMethod:
    """Average what local steps moved and take a step of slow momentum.

    Bytes as in `acco_jax.diloco`. The inner optimizers' states stay as they are from
    round to round ("maintain" in the paper).

    Args:
      inner: each worker's optimizer, an optax transformation.
      mesh: the devices.
      local_steps: H (the paper's tau).
      slow_learning_rate: alpha.
      slow_momentum_factor: beta.
      inner_learning_rate: gamma; the schedule of `inner`, counted in inner steps, or a
        number, which cancels. The runner gives the config's schedule.
      **options: as for `acco_jax.diloco`.

    Raises:
      ValueError: in one line, before any device work, what does not fit.

    References:
      Wang et al., SlowMo: Improving Communication-Efficient Distributed SGD with Slow
      Momentum (https://arxiv.org/abs/1910.00643), algorithm 1
    """

    def gamma(rounds: jax.Array) -> jax.Array:
        rate = inner_learning_rate
        return jnp.asarray(rate(rounds * local_steps) if callable(rate) else rate)

    momentum = slow_momentum(slow_learning_rate, slow_momentum_factor, gamma)
    return rounds_with(zero1, momentum, inner, mesh, local_steps, options)
