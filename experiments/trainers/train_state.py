"""flax's TrainState, its loop as it was and with acco_jax.

See docs/site/migrate/train_state.md. python -m experiments.trainers train_state
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen
from flax.training.train_state import TrainState

import acco_jax


class MLP(linen.Module):
    width: int

    @linen.compact
    def __call__(self, x):
        return linen.Dense(1)(jnp.tanh(linen.Dense(self.width)(x)))


def start(width, tx):
    model = MLP(width)
    params = model.init(jax.random.key(0), jnp.zeros((1, width)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def before(width):
    state = start(width, optax.adamw(1e-3))

    def loss_fn(params, batch):
        x, y = batch
        return jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)

    @jax.jit
    def train_step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    return state, train_step


def after(width, method, mesh, microbatches):
    tx = method(optax.adamw(1e-3), mesh=mesh)  # 1: wrap the optimizer
    state = start(width, tx)

    def loss_fn(params, batch, rng):
        x, y = batch
        return jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)

    step = acco_jax.make_train_step(loss_fn, tx, microbatches=microbatches)  # 2

    def train_step(state, batch):
        params, opt_state, metrics = step(state.params, state.opt_state, batch)  # 3
        state = state.replace(params=params, opt_state=opt_state, step=metrics["step"])
        return state, metrics["loss"]

    return state, train_step, step


def arguments(state):
    return state.params, state.opt_state
