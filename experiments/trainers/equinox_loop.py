"""An equinox loop, as it was and with acco_jax.

See docs/site/migrate/equinox.md. python -m experiments.trainers equinox_loop
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import acco_jax


def loss_of(model, batch):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def start(width):
    key = jax.random.key(0)
    return eqx.nn.MLP(width, 1, width, depth=1, activation=jnp.tanh, key=key)


def before(width):
    model, optimizer = start(width), optax.adamw(1e-3)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def train_step(state, batch):
        model, opt_state = state
        loss, grads = eqx.filter_value_and_grad(loss_of)(model, batch)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (eqx.apply_updates(model, updates), opt_state), loss

    return (model, opt_state), train_step


def after(width, method, mesh, microbatches):
    tx = method(optax.adamw(1e-3), mesh=mesh)  # 1: wrap the optimizer
    params, static = eqx.partition(start(width), eqx.is_inexact_array)

    def loss_fn(params, batch, rng):
        return loss_of(eqx.combine(params, static), batch)

    step = acco_jax.make_train_step(loss_fn, tx, microbatches=microbatches)  # 2

    def train_step(state, batch):
        *state, metrics = step(*state, batch)  # 3
        return state, metrics["loss"]

    return acco_jax.start(tx, params), train_step, step


def arguments(state):
    return state
