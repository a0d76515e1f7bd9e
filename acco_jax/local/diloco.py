"""DiLoCo: many local steps, then Nesterov momentum on how far they led (2311.08105).

    theta_i = x(t) after H steps of the inner optimizer on worker i's data
    Delta(t) = sum_i w_i (x(t) - theta_i) / sum_i w_i
    m(t) = mu m(t-1) + Delta(t)
    x(t+1) = x(t) - eta (Delta(t) + mu m(t))

With H = 1, eta = 1 and mu = 0 it is plain averaging of parameters.
"""

from __future__ import annotations

from typing import Any

import optax
from jax.sharding import Mesh

from acco_jax.local.base import LocalMethod, nesterov
from acco_jax.local.rounds import local_rounds
from acco_jax.transforms.zero1 import zero1

PyTree = Any


def diloco(
    inner: optax.GradientTransformation,
    *,
    mesh: Mesh,
    axis_name: str | tuple[str, ...] = "data",
    local_steps: int = 50,
    outer_learning_rate: float = 0.7,
    outer_momentum: float = 0.9,
    outer: optax.GradientTransformation | None = None,
    weighted: bool = True,
    comm_dtype: Any = None,
    accumulate_dtype: Any = None,
    param_specs: PyTree | None = None,
) -> LocalMethod:
    """Average what H local steps moved and take one outer step with momentum.

    Bytes sent per worker: per H steps those that `acco_jax.zero1` sends per step.

    Args:
      inner: each worker's optimizer, any optax transformation (the paper's is AdamW).
      mesh: the devices.
      axis_name: the mesh axis (or axes) of the n data-parallel workers.
      local_steps: H.
      outer_learning_rate: eta.
      outer_momentum: mu.
      outer: an optax transformation instead of Nesterov momentum, on the shards; its
        "gradients" are Delta.
      weighted: see `local_rounds`; the paper weighs by the workers' amounts of data.
      comm_dtype: what both collectives carry; None means each parameter's own dtype.
      accumulate_dtype: of the gradient accumulator; None means each parameter's own.
      param_specs: as for `acco_jax.acco`.

    Raises:
      ValueError: in one line, before any device work, what does not fit.

    References:
      Douillard et al., DiLoCo: Distributed Low-Communication Training of Language
      Models (https://arxiv.org/abs/2311.08105), algorithm 1
    """
    outer = outer or nesterov(outer_learning_rate, outer_momentum)
    method = zero1(
        outer,
        mesh=mesh,
        axis_name=axis_name,
        comm_dtype=comm_dtype,
        param_specs=param_specs,
    )
    return local_rounds(
        inner,
        method,
        local_steps=local_steps,
        weighted=weighted,
        accumulate_dtype=accumulate_dtype,
    )
