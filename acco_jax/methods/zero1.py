"""ZeRO stage 1: synchronous data parallelism with a sharded optimizer state.

    theta(t+1) = Opt(theta(t), G(t) / W(t)),  g(t) computed at theta(t)

Communication is not overlapped: it sends the gradients just computed. `ddp` is the same
step with the state replicated and one all-reduce of each gradient.
"""

import functools
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from acco_jax.core.buffers import Totals
from acco_jax.core.layout import Layout
from acco_jax.core.leaves import Leaf, PyTree
from acco_jax.methods import sharded
from acco_jax.methods.method import CommonOptions
from acco_jax.methods.sharded import ShardedMethod, ShardedOptions, Step


@sharded.with_shards
class Zero1State(NamedTuple):
    """State of `zero1`; shards hold 1/n of every parameter on each worker."""

    layout: Layout  # static
    calls_done: jax.Array  # int32 []: so far
    steps: jax.Array  # int32 []: steps so far
    master: PyTree  # theta(t): shards, float32 or wider
    inner: PyTree  # the optimizer's state at theta(t), over the shards
    residual: Any = None  # `core.codec.Residual`, if communication is quantized
    model_state: PyTree = None  # mean over the workers, e.g. batch-norm statistics


def start(layout: Layout, master: PyTree, inner: PyTree) -> Zero1State:
    return Zero1State(layout, jnp.int32(0), jnp.int32(0), master, inner)


def advance(
    state: Zero1State, gradient: PyTree, totals: Totals, step: Step
) -> tuple[Zero1State, PyTree]:
    theta, inner_state = step(gradient, totals, state.inner, state.master)
    steps = state.steps + jnp.int32(totals.weight != 0)
    state = state._replace(steps=steps, master=theta, inner=inner_state)
    return state, theta


synchronous = functools.partial(
    sharded.sharded, state=Zero1State, start=start, advance=advance, delayed=False
)


def zero1(
    inner: optax.GradientTransformation,
    *,
    mesh: Mesh,
    **options: Unpack[ShardedOptions],
) -> ShardedMethod:
    """Reduce-scatter gradients, step on the shards, all-gather parameters.

    The baseline of `acco_jax.acco`, with the same arguments except `extrapolation`,
    the same shapes and errors; every update is one step of `inner`.

    References:
      Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter
      Models (https://arxiv.org/abs/1910.02054)
    """
    return synchronous(inner, mesh, options)


@jax.tree_util.register_static
class ReplicatedLayout(Layout):
    """A layout of leaves that are whole on every worker: not gathered, not rounded."""

    together = 0

    @staticmethod
    def parts_of(leaf: Leaf, n: int) -> None:
        return None


def ddp(
    inner: optax.GradientTransformation,
    *,
    mesh: Mesh,
    **options: Unpack[CommonOptions],
) -> ShardedMethod:
    """All-reduce gradients and take the same step on every worker.

    The numbers are those of `zero1`; every worker holds the whole optimizer state, and
    sends as many bytes.

    References:
      Li et al., PyTorch Distributed (https://arxiv.org/abs/2006.15704)
    """
    return synchronous(
        inner, mesh, options, layout=ReplicatedLayout, known=CommonOptions
    )
