"""Optimizers with control flow, or with keys."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.handwritten.cases import by_leaf, held, of_rank, scaled, slope, whole


def newton(g):
    """x with x^3 + x = g, by as many steps as it takes."""

    def more(held):
        x, k = held
        return (jnp.max(jnp.abs(x**3 + x - g)) > 1e-13) & (k < 60)

    def step(held):
        x, k = held
        return x - (x**3 + x - g) / (3 * x**2 + 1), k + 1

    return lax.while_loop(more, step, (g, 0))[0]


def down_the_rows(g):
    step = lambda c, row: (0.5 * c + row, c * row)  # noqa: E731
    return lax.scan(step, jnp.zeros(g.shape[1:]), g)[1]


def in_turn(g, s, p):
    every = lambda fn: lambda g: jax.tree.map(fn, g)  # noqa: E731
    return lax.switch(s % 3, [every(jnp.negative), every(jnp.sign), every(jnp.flip)], g)


@jax.custom_jvp
def straight_through(x):
    return jnp.clip(x, -0.5, 0.5)


@straight_through.defjvp
def _(primals, tangents):
    return straight_through(*primals), tangents[0]


def called_back(g):
    out = jax.ShapeDtypeStruct((), g.dtype)
    return jax.pure_callback(lambda x: 1 / (1 + np.abs(x).max()), out, g)


CONTROL = {
    "cond": by_leaf(
        lambda g, p: lax.cond(jnp.sum(g) > 0.1234, lambda: g, lambda: -2 * g * p)
    ),
    "size in a cond": scaled(
        lambda g: lax.cond(g.sum() > 0.1234, lambda: 1.0 / g.size, lambda: g.size * 1.0)
    ),
    "switch": whole(
        lambda g, s, p: (in_turn(g, s, p), s + 1), None, lambda p: jnp.int32(0)
    ),
    "while": by_leaf(lambda g, _: newton(g)),
    "scan": of_rank(1, down_the_rows),
    "associative scan": of_rank(1, lambda g: lax.associative_scan(jnp.maximum, g)),
    "as long as the leaf": scaled(
        lambda g: lax.fori_loop(0, g.size, lambda i, x: x + 0.1, 0.0)
    ),
    "map": of_rank(2, lambda g: lax.map(lambda row: row / (1 + jnp.sum(row**2)), g)),
    "vmap": of_rank(2, lambda g: jax.vmap(jax.vmap(lambda x: x * jnp.cos(x)))(g)),
    "jit": by_leaf(lambda g, p: jax.jit(lambda g, p: g * jnp.mean(p))(g, p)),
    "checkpoint": by_leaf(
        lambda g, p: slope(jax.checkpoint(lambda p: jnp.sin(p * g)), p)
    ),
    "custom_jvp": by_leaf(lambda g, p: slope(lambda p: straight_through(p) * g, p)),
    "barrier": by_leaf(lambda g, p: lax.optimization_barrier((g, g + 1))[1]),
    "callback": scaled(called_back),
}


# -------------------------------------------------------------------------------- keys


def noise(key, x):
    return jax.random.normal(key, x.shape, x.dtype)


def split_key(g, key, p):
    key, now = jax.random.split(key)
    leaves, treedef = jax.tree.flatten(g)
    keys = treedef.unflatten(list(jax.random.split(now, len(leaves))))
    return jax.tree.map(lambda x, k: x + noise(k, x), g, keys), key


def by_count(g, s, p):
    key = jax.random.fold_in(jax.random.key(3), s)
    keep = lambda x: x * jax.random.bernoulli(key, 0.5, x.shape)  # noqa: E731
    return jax.tree.map(keep, g), s + 1


KEYS = {
    "a key": whole(split_key, None, lambda p: jax.random.key(0)),
    "a key of two words": whole(split_key, "twins", lambda p: jax.random.PRNGKey(0)),
    "a key, large": whole(split_key, "large", lambda p: jax.random.key(0)),
    "a key for each leaf": held(
        lambda p: jax.random.key(p.size),
        lambda g, k: (g + noise(k, g), jax.random.split(k)[0]),
    ),
    "a key for each element": held(
        lambda p: jax.random.split(jax.random.key(0), p.shape),
        lambda g, k: (g + noise(k.ravel()[-1], g), jnp.flip(k)),
        "odd",
    ),
    "a key for each row": held(
        lambda p: jax.random.split(jax.random.key(0), p.shape[:1]),
        lambda g, k: (g + jax.vmap(noise)(k, g), jnp.flip(k)),
        "wide",
    ),
    "a key by the count": whole(by_count, None, lambda p: jnp.int32(0)),
    "the same noise": by_leaf(lambda g, _: noise(jax.random.key(0), g)),
    "a sum of noise": scaled(lambda g: jnp.sum(noise(jax.random.key(0), g))),
    "noise, held": held(
        lambda p: noise(jax.random.key(1), p), lambda g, v: (g * v, -v)
    ),
    "shuffled rows": of_rank(
        1, lambda g: jax.random.permutation(jax.random.key(2), g), "wide"
    ),
}
