"""ZeRO stage 1: synchronous data parallelism with a sharded optimizer state.

    theta(t+1) = Opt(theta(t), G(t) / W(t)),  g(t) computed at theta(t)

Nothing is hidden: the gradients that are communicated are those just computed. `ddp` is
the same step with the state replicated and one all-reduce of each gradient.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from acco_jax.layout import Layout, Leaf, Totals
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
    state: Zero1State, gradient: PyTree, totals: Totals, step: Any
) -> tuple[Zero1State, Point]:
    theta, inner_state, norm = step(gradient, totals, state.inner, state.master)
    steps = state.steps + (totals.weight != 0)
    state = state._replace(steps=steps, master=theta, inner=inner_state)
    return state, Point(theta, norm)


synchronous = functools.partial(
    make_method,
    state=Zero1State,
    start=start,
    advance=advance,
    delayed=False,
    half_rounds=1,
)


def zero1(
    inner: optax.GradientTransformation,
    *,
    mesh: Mesh,
    axis_name: str | tuple[str, ...] = "data",
    comm_dtype: Any = None,
    accumulate_dtype: Any = None,
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
        param_specs,
        gather_bits,
        reduce_bits,
        resync_every,
    )
    return synchronous(inner, options)


@jax.tree_util.register_static
class ReplicatedLayout(Layout):
    """Every worker has all of everything; nothing is gathered, hence nor rounded."""

    together = 0

    @staticmethod
    def parts_of(leaf: Leaf, n: int) -> None:
        return None


def ddp(
    inner: optax.GradientTransformation,
    *,
    mesh: Mesh,
    axis_name: str | tuple[str, ...] = "data",
    comm_dtype: Any = None,
    accumulate_dtype: Any = None,
    param_specs: PyTree | None = None,
) -> Method:
    """All-reduce gradients and take the same step on every worker.

    Arguments, shapes and errors are those of `zero1`, and so are the numbers; every
    worker holds the whole optimizer state, and sends as many bytes as with `zero1`.

    References:
      Li et al., PyTorch Distributed (https://arxiv.org/abs/2006.15704)
    """
    options = Options(mesh, axis_name, comm_dtype, accumulate_dtype, param_specs)
    return synchronous(inner, options, layout=ReplicatedLayout)
