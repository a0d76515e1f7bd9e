"""Optimizers that reduce, that look at single elements, or at where they lie."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.handwritten.cases import (
    by_leaf,
    iota,
    of_rank,
    scaled,
    slope,
    stateless,
    unit,
)


def other_largest(g, p):
    most = functools.reduce(jnp.maximum, map(jnp.max, jax.tree.leaves(g)))
    return jax.tree.map(lambda x: x / (1 + most), g)


def under_a_mask(g, p):
    odd = np.array([[1.0], [0.0]] * 4)  # (8, 1)
    return jax.tree.map(lambda x: x / (1 + jnp.linalg.norm(g["m"] * odd)), g)


REDUCTIONS = {
    "a constant in a norm": scaled(lambda g: 1 / jnp.sum((g + 1) ** 2)),
    "cosine in a sum": scaled(lambda g: jnp.sum(jnp.cos(g))),
    "largest": scaled(jnp.max),
    "largest of negatives": scaled(lambda g: 1 / jnp.max(-(g**2) - 1)),
    "least": scaled(lambda g: jnp.min(jnp.abs(g) + 0.1)),
    "product": scaled(lambda g: jnp.prod(1 + 0.01 * g)),
    "mean": scaled(lambda g: 1 / (1 + jnp.mean(g**2))),
    "mean, large": scaled(lambda g: 1 / (1 + jnp.mean(g)), "large"),
    "variance": scaled(lambda g: 1 / (1 + jnp.var(g))),
    "median": scaled(lambda g: 1 + jnp.median(g)),
    "quantiles": by_leaf(
        lambda g, _: jnp.clip(g, *jnp.quantile(g, np.array([0.2, 0.8])))
    ),
    "how many zeros": scaled(lambda g: 1 / (1 + jnp.sum(g == 0))),
    "how many": scaled(lambda g: 1 / g.size),
    "how many rows": scaled(lambda g: 1 / (*g.shape, 1)[0]),
    "log-sum-exp": scaled(jax.nn.logsumexp),
    "softmax": by_leaf(lambda g, _: jax.nn.softmax(g, axis=None)),
    "largest of all leaves": stateless(other_largest),
    "norm under a mask": stateless(under_a_mask, "wide"),
    "rows of norm 1": of_rank(2, lambda g: unit(g, -1)),
    "columns of norm 1": of_rank(2, lambda g: unit(g, 0)),
    "columns of norm 1, large": of_rank(2, lambda g: unit(g, 0), "large"),
    "standardized rows": of_rank(
        1,
        lambda g: (g - g.mean(-1, keepdims=True)) / (0.1 + g.std(-1, keepdims=True)),
    ),
    "inner dimension": of_rank(3, lambda g: g / (1 + jnp.max(g, 1, keepdims=True))),
    "sum of one half": scaled(lambda g: jnp.sum(jnp.ravel(g)[: g.size // 2]) + 1),
}


# ---------------------------------------------------------------------------- elements


ELEMENTS = {
    "a constant": by_leaf(lambda g, _: g + 0.1),
    "one over the parameter": by_leaf(lambda g, p: g / (0.1 + p**2)),
    "logarithm": by_leaf(lambda g, p: g * jnp.log(0.1 + p**2)),
    "where": by_leaf(lambda g, p: jnp.where(p > 1, g, 2.0)),
    "column (6, 1)": by_leaf(lambda g, _: g * np.arange(6.0).reshape(6, 1), "one"),
    "row (10,)": by_leaf(lambda g, _: g + np.arange(10.0), "one"),
    "iota": by_leaf(lambda g, _: g * iota(g)),
    "iota, large": by_leaf(lambda g, _: g * jnp.cos(iota(g)), "large"),
    "iota along rows": of_rank(
        1, lambda g: g * lax.broadcasted_iota(g.dtype, g.shape, g.ndim - 1)
    ),
    "no gradients": by_leaf(lambda g, p: jnp.cos(p) + iota(p)),
    "32 bits": by_leaf(lambda g, _: g.astype(jnp.float32)),
    "a slope": by_leaf(lambda g, p: g + slope(lambda p: jnp.tanh(p) ** 2, p)),
}


# ------------------------------------------------------------------------------ places


def top(g):
    """The three largest elements."""
    least = lax.top_k(jnp.abs(g).ravel(), min(3, g.size))[0][-1]
    return jnp.where(jnp.abs(g) >= least, g, 0)


def smooth(g):
    """Convolution down the columns."""
    kernel = np.array([1.0, 2.0, 1.0])
    run = lambda x: jnp.convolve(x, kernel, "same")  # noqa: E731
    return jax.vmap(run, 1, 1)(g.reshape(len(g), -1)).reshape(g.shape)


def add_at_rows(g, p):
    return g | {"w": g["w"].at[np.array([0, 5, 5])].add(1.0)}


PLACES = {
    "cumsum": of_rank(1, lambda g: jnp.cumsum(g, -1)),
    "cumsum of everything": by_leaf(lambda g, _: jnp.cumsum(g).reshape(g.shape)),
    "cumsum, large": of_rank(2, lambda g: 0.01 * jnp.cumsum(g, 0), "large"),
    "sort": of_rank(1, lambda g: jnp.sort(g, 0)),
    "flip": by_leaf(lambda g, _: jnp.flip(g)),
    "roll": of_rank(1, lambda g: jnp.roll(g, 1, 0)),
    "roll, large": of_rank(2, lambda g: jnp.roll(g, 3), "large"),
    "differences": of_rank(1, lambda g: jnp.diff(g, axis=0, append=1.0)),
    "transpose": by_leaf(lambda g, _: g.T.reshape(g.shape)),
    "triangle": of_rank(2, jnp.tril),
    "first row": of_rank(1, lambda g: g[:1] + 0 * g),
    "last row": of_rank(1, lambda g: g.at[-1].multiply(3.0)),
    "permutation": of_rank(1, lambda g: g[np.argsort(np.cos(np.arange(len(g))))]),
    "top three": by_leaf(lambda g, _: top(g)),
    "segments": of_rank(
        1, lambda g: jax.ops.segment_sum(g, np.arange(len(g)) // 2, len(g))
    ),
    "convolution": of_rank(1, smooth),
    "Fourier transform": of_rank(1, lambda g: jnp.fft.fft(g, axis=0).imag + g),
    "halves swapped": of_rank(
        1, lambda g: jnp.concatenate([g[len(g) // 2 :], g[: len(g) // 2]])
    ),
    "checkerboard": by_leaf(lambda g, _: jnp.where(iota(g) % 2 == 0, g, -g)),
    "scatter": stateless(add_at_rows, "wide"),
}
