"""CO2: the exchange of a round overlapped by the next round's steps (arXiv 2401.16265).

With Delta of the round before, which crosses the network while the workers take the
steps of round t from x(t):

    Delta(t-1) = sum_i w_i (x(t-1) - theta_i) / sum_i w_i
    m(t) = clip(beta m(t-1) + Delta(t-1) / Lambda, -phi, phi)     elementwise
    x(t+1) = x(t) - alpha m(t)

Where the steps of round t lead counts in round t + 1; the first round moves nobody, and
what the last one led to is not applied.

This is the update of the code that the authors published with fairscale, where Lambda
is a constant ("co2_gap_penalty"); the clipped momentum is kept here, whereas that code
discards the result of its clamp. How the paper computes Lambda(t) from the distance
between stale and current parameters could not be confirmed from the text, so only a
constant is offered.
"""

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from acco_jax.core.leaves import PyTree
from acco_jax.methods.delayed import dpu
from acco_jax.methods.local.local_method import LocalMethod
from acco_jax.methods.local.rounds import RoundOptions, rounds_with


class OuterMomentumState(NamedTuple):
    """State of `outer_momentum`."""

    m: PyTree


def outer_momentum(
    learning_rate: float, beta: float, staleness_penalty: float, clip: float | None
) -> optax.GradientTransformation:
    """The outer optimizer of `co2`: m and the step in the module's equations."""

    def init(params: PyTree) -> OuterMomentumState:
        return OuterMomentumState(jax.tree.map(jnp.zeros_like, params))

    def update(
        updates: PyTree, state: OuterMomentumState, params: PyTree | None = None
    ) -> tuple[PyTree, OuterMomentumState]:
        del params

        def step(m: jax.Array, delta: jax.Array) -> jax.Array:
            m = beta * m + delta / staleness_penalty
            return m if clip is None else jnp.clip(m, -clip, clip)

        m = jax.tree.map(step, state.m, updates)
        return jax.tree.map(lambda x: -learning_rate * x, m), OuterMomentumState(m)

    return optax.GradientTransformation(init, update)


def co2(
    inner: optax.GradientTransformation,
    *,
    mesh: Mesh,
    local_steps: int = 12,
    outer_learning_rate: float = 1.0,
    outer_momentum_factor: float = 0.5,
    staleness_penalty: float = 1.0,
    clip: float | None = 1.0,
    **options: Unpack[RoundOptions],
) -> LocalMethod:
    """Take local steps while the round before crosses the network.

    Bytes as in `acco_jax.diloco`, all of them overlapped while communication takes no
    longer than H steps: the reduce-scatter beside the first half, the all-gather beside
    the second.

    Args:
      inner: each worker's optimizer, an optax transformation.
      mesh: the devices.
      local_steps: H (the paper's tau).
      outer_learning_rate: alpha.
      outer_momentum_factor: beta.
      staleness_penalty: Lambda, at least 1 to dampen what is stale.
      clip: phi, in units of parameters; None: no clipping.
      **options: as for `acco_jax.diloco`.

    Raises:
      ValueError: in one line, before any device work, what does not fit.

    References:
      Sun et al., CO2: Efficient Distributed Training with Full
      Communication-Computation Overlap (https://arxiv.org/abs/2401.16265)
    """
    for name, value in (("staleness_penalty", staleness_penalty), ("clip", clip)):
        if value is not None and not value > 0:
            raise ValueError(f"{name} is {value}: it must be above 0.")
    momentum = outer_momentum(
        outer_learning_rate, outer_momentum_factor, staleness_penalty, clip
    )
    return rounds_with(dpu, momentum, inner, mesh, local_steps, options)
