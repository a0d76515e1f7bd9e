"""DiLoCo: many local steps, then Nesterov momentum on how far they led (2311.08105).

    theta_i = x(t) after H steps of the inner optimizer on worker i's data
    Delta(t) = sum_i w_i (x(t) - theta_i) / sum_i w_i
    m(t) = mu m(t-1) + Delta(t)
    x(t+1) = x(t) - eta (Delta(t) + mu m(t))

With H = 1, eta = 1 and mu = 0 it is plain averaging of parameters.
"""

from typing import Unpack

import optax
from jax.sharding import Mesh

from acco_jax.methods.local.local_method import LocalMethod, outer_step
from acco_jax.methods.local.rounds import RoundOptions, rounds_with
from acco_jax.methods.zero1 import zero1


def diloco(
    inner: optax.GradientTransformation,
    *,
    mesh: Mesh,
    local_steps: int = 50,
    outer_learning_rate: float = 0.7,
    outer_momentum: float = 0.9,
    outer: optax.GradientTransformation | None = None,
    **options: Unpack[RoundOptions],
) -> LocalMethod:
    """Average what H local steps moved and take one outer step with momentum.

    Bytes sent per worker: per H steps those that `acco_jax.zero1` sends per step.

    Args:
      inner: each worker's optimizer, an optax transformation (the paper's is AdamW).
      mesh: the devices.
      local_steps: H.
      outer_learning_rate: eta.
      outer_momentum: mu.
      outer: an optax transformation instead of Nesterov momentum, on the shards; its
        "gradients" are Delta.
      **options: see `acco_jax.methods.local.rounds.RoundOptions`; the paper weighs
        workers by their amounts of data.

    Raises:
      ValueError: in one line, before any device work, what does not fit.

    References:
      Douillard et al., DiLoCo: Distributed Low-Communication Training of Language
      Models (https://arxiv.org/abs/2311.08105), algorithm 1
    """
    outer = outer_step(outer, outer_learning_rate, outer_momentum, (0.7, 0.9))
    return rounds_with(zero1, outer, inner, mesh, local_steps, options)
