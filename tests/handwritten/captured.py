"""Optimizers with arrays that come from somewhere else; what makes them, by name."""

import functools

import jax
import jax.numpy as jnp
import optax

from tests.handwritten.cases import by_leaf, times, whole


def column():
    return jnp.arange(6.0).reshape(6, 1)


GLOBAL = {}


def from_global():
    GLOBAL["column"] = column()
    return by_leaf(lambda g, _: g * GLOBAL["column"]).inner


def from_closure():
    x = column()
    return by_leaf(lambda g, _: g * x).inner


def from_one_device():
    x = jax.device_put(column(), jax.devices()[0])
    return by_leaf(lambda g, _: g * x).inner


def from_default():
    def step(g, p, *, x=column()):  # noqa: B008
        return g * x

    return by_leaf(step).inner


def from_partial():
    step = lambda x, tree, g, p: g * x + tree["x"]  # noqa: E731
    return by_leaf(functools.partial(step, column(), {"x": jnp.arange(10.0)})).inner


class Scaling:
    def __init__(self):
        self.x, self.more = column(), {"all": [jnp.arange(10.0)]}

    def __call__(self, g, p):
        return g * self.x + self.more["all"][0]

    def method(self, g, p):
        return g / (1 + self.x)


def from_init():
    x = jnp.arange(10.0)
    return whole(lambda g, s, p: (times(g, s), s + x), None, lambda p: x).inner


def from_factors():
    """Kronecker factors that were computed before, as large as the leaf's sides."""
    left, right = jnp.eye(6) + 0.1, jnp.eye(10) - 0.1
    return by_leaf(lambda g, _: left @ g @ right).inner


def as_large():
    """Of the leaf's size, and of its shape or its transpose's."""
    a, b = jnp.arange(60.0).reshape(6, 10), jnp.arange(60.0).reshape(10, 6)
    return by_leaf(lambda g, p: (g * a).at[0].add(b[:, 0]) / (1 + jnp.vdot(a, p))).inner


def from_schedule():
    rates = jnp.array([0.1, 0.2, 0.3])
    return optax.sgd(functools.partial(lambda rates, k: rates[k % 3], rates))


CAPTURED = {
    "in a closure": from_closure,
    "in a default": from_default,
    "in a partial": from_partial,
    "in a global": from_global,
    "in an object": lambda: by_leaf(Scaling()).inner,
    "in a bound method": lambda: by_leaf(Scaling().method).inner,
    "in an object in a partial": lambda: by_leaf(functools.partial(Scaling())).inner,
    "on one device": from_one_device,
    "in the initial state": from_init,
    "in factors": from_factors,
    "as large as the leaf": as_large,
    "in a schedule": from_schedule,
    "in a transformation": lambda: optax.scale(jnp.arange(10.0)),
}
