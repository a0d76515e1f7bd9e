"""A loop around nnx.Optimizer, as it was and with acco_jax.

See docs/site/migrate/nnx.md. python -m experiments.trainers nnx_optimizer
"""

import jax.numpy as jnp
import optax
from flax import nnx

import acco_jax


class MLP(nnx.Module):
    def __init__(self, width, rngs):
        self.hidden = nnx.Linear(width, width, rngs=rngs)
        self.out = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.tanh(self.hidden(x)))


def loss_of(model, batch):
    x, y = batch
    return jnp.mean((model(x) - y) ** 2)


def before(width):
    model = MLP(width, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(loss_of)(model, batch)
        optimizer.update(model, grads)
        return loss

    def train_step(state, batch):
        return state, step(*state, batch)

    return (model, optimizer), train_step


def after(width, method, mesh, microbatches):
    model = MLP(width, nnx.Rngs(0))
    tx = method(optax.adamw(1e-3), mesh=mesh)  # 1: wrap the optimizer
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    graph = nnx.graphdef(model)

    def loss_fn(params, batch, rng):
        return loss_of(nnx.merge(graph, params), batch)

    step = acco_jax.make_train_step(loss_fn, tx, microbatches=microbatches)  # 2

    def train_step(state, batch):
        model, optimizer = state
        params, opt_state, metrics = step(*arguments(state), batch)  # 3
        nnx.update(model, params)
        nnx.update(optimizer.opt_state, nnx.state(opt_state))
        return state, metrics["loss"]

    return (model, optimizer), train_step, step


def arguments(state):
    model, optimizer = state
    params = nnx.as_pure(nnx.state(model, nnx.Param))
    return params, nnx.as_pure(optimizer.opt_state)
