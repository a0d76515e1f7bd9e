"""Optimizers with linear algebra in a leaf, or with something between leaves."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from tests.handwritten.cases import norm, of_rank, scaled, stateless, unit


def t(g):
    return jnp.swapaxes(g, -1, -2)


def gram(g):
    return jnp.eye(g.shape[-2]) + g @ t(g)


def power(a, exponent):
    values, vectors = jnp.linalg.eigh(a)
    return (vectors * values[..., None, :] ** exponent) @ t(vectors)


def damped(g):
    u, s, v = jnp.linalg.svd(g, full_matrices=False)
    return (u * jnp.log1p(s)[..., None, :]) @ v


def rotated(g):
    q, r = jnp.linalg.qr(g)
    return q @ jnp.tanh(r)


def iterated(g):
    step = lambda _, v: unit(g @ (t(g) @ v), -2)  # noqa: E731
    return g + lax.fori_loop(0, 4, step, jnp.ones((*g.shape[:-1], 1)))


def full_matrix(g, p):
    """Full-matrix AdaGrad: all leaves are one vector."""
    flat, back = ravel_pytree(g)
    return back(jnp.linalg.solve(jnp.eye(flat.size) + jnp.outer(flat, flat), flat))


def triangular(g):
    lower = jnp.linalg.cholesky(gram(g))
    return jax.scipy.linalg.solve_triangular(lower, g, lower=True)


ALGEBRA = {
    "Gram matrix": of_rank(2, lambda g: g @ t(g) @ g),
    "Gram matrix, large": of_rank(2, lambda g: 1e-3 * g @ g.T @ g, "large"),
    "QR": of_rank(2, rotated),
    "SVD": of_rank(2, damped),
    "spectral norm": scaled(
        lambda g: 1 / (1 + jnp.linalg.norm(g, 2)) if g.ndim == 2 else 1
    ),
    "eigenvalues": of_rank(2, lambda g: power(gram(g), -0.25) @ g),
    "Cholesky": of_rank(2, triangular, "wide"),
    "solve": of_rank(2, lambda g: jnp.linalg.solve(gram(g), g)),
    "determinant": of_rank(
        2, lambda g: g / jnp.linalg.det(gram(t(g)))[..., None, None]
    ),
    "outer product": of_rank(
        2, lambda g: jnp.outer(g.sum(tuple(range(1, g.ndim))), g[0]).reshape(g.shape)
    ),
    "einsum": of_rank(3, lambda g: jnp.einsum("ijk,ljk,lmk->imk", g, g, g), "deep"),
    "power iteration": of_rank(2, iterated),
    "full matrix": stateless(full_matrix),
}


# ---------------------------------------------------------------------- between leaves


def swapped_sometimes(g, p):
    # 0.1234 is no multiple of what the gradients are made of
    yes = jnp.sum(g["u"]) > 0.1234
    return g | {"u": lax.cond(yes, lambda: g["u"], lambda: g["v"])}


def stacked_leaves(g, p):
    x = jnp.stack([g["u"], g["v"]])
    return {"u": x[0] - x.mean(0), "v": x[1] / (1 + x.std(0))}


def next_mean(g, p):
    leaves, treedef = jax.tree.flatten(g)
    after = leaves[1:] + leaves[:1]
    both = zip(leaves, after, strict=True)
    return treedef.unflatten([x * (1 + jnp.mean(y)) for x, y in both])


def others_norm(g, p):
    return jax.tree.map(lambda x: x / (1 + norm(g) - jnp.linalg.norm(x.ravel())), g)


BETWEEN = {
    "norm of the others": stateless(others_norm),
    "swap": stateless(lambda g, p: {"u": g["v"], "v": g["u"]}, "twins"),
    "swap sometimes": stateless(swapped_sometimes, "twins"),
    "product of leaves": stateless(
        lambda g, p: {"u": g["u"] @ g["v"].T @ g["u"], "v": g["v"] * p["u"]}, "twins"
    ),
    "stacked leaves": stateless(stacked_leaves, "twins"),
    "next leaf's mean": stateless(next_mean),
    "scalar into a matrix": stateless(
        lambda g, p: g | {"mu/a": g["mu/a"] + g["s"], "s": jnp.vdot(g["a"], p["a"])},
        "odd",
    ),
    "two vectors into a matrix": stateless(
        lambda g, p: g | {"t": g["t"] * g["a"] * g["mu"]["a"][:, None, None]}, "deep"
    ),
}
