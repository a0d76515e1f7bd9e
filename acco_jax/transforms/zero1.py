"""ZeRO stage 1: synchronous data parallelism with a sharded optimizer state.

    theta(t+1) = Opt(theta(t), G(t) / W(t)),  g(t) computed at theta(t)

Nothing is hidden: the gradients that are communicated are those just computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from acco_jax.layout import Layout
from acco_jax.transforms.base import Method, Options, Point, make_method

PyTree = Any


class Zero1State(NamedTuple):
    """State of `zero1`; shards hold 1/n of every parameter on each worker."""

    layout: Layout  # static
    steps: jax.Array  # int32 []: steps so far
    master: PyTree  # theta(t): shards, float32 or wider
    inner: PyTree  # the optimizer's state at theta(t), over the shards
    wire: Any = None  # `acco_jax.wire.Held`, if communication is quantized


def start(layout: Layout, master: PyTree, inner_state: PyTree) -> Zero1State:
    return Zero1State(layout, jnp.int32(0), master, inner_state)


def advance(
    state: Zero1State, gradient: PyTree, weight: jax.Array, step: Any
) -> tuple[Zero1State, Point]:
    theta, inner_state, norm = step(gradient, weight, state.inner, state.master)
    state = state._replace(
        steps=state.steps + (weight > 0), master=theta, inner=inner_state
    )
    return state, Point(theta, norm)


def zero1(
    inner: optax.GradientTransformation,
    *,
    mesh: Mesh,
    axis_name: str | tuple[str, ...] = "data",
    comm_dtype: Any = None,
    accumulate_dtype: Any = None,
    layout: str = "auto",
    param_specs: PyTree | None = None,
    gather_bits: int | None = None,
    reduce_bits: int | None = None,
    resync_every: int = 0,
) -> Method:
    """Reduce-scatter gradients, step on the shards, all-gather parameters.

    The baseline of `acco_jax.acco`, with the same arguments, shapes and errors; every
    update is one step of `inner`.

    References:
      Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter
      Models (https://arxiv.org/abs/1910.02054)
    """

    options = Options(
        mesh,
        axis_name,
        comm_dtype,
        accumulate_dtype,
        layout,
        param_specs,
        gather_bits,
        reduce_bits,
        resync_every,
    )
    return make_method(
        inner, options, start=start, advance=advance, delayed=False, half_rounds=1
    )
