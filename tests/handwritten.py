"""Optimizers that nobody would write, each with something of its own; see OPTIMIZERS.

What makes arrays is a function, so that importing this makes none.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.flatten_util import ravel_pytree


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["a", "count"], meta_fields=["name"]
)
@dataclasses.dataclass
class Held:
    a: Any
    count: Any
    name: str = "held"


TREES = {  # of shapes
    # nothing divides; a name that reads like the path of a moment of `a`
    "odd": {"a": (7,), "mu/a": (3, 5), "s": ()},
    # a dimension divides by 2 and 4, or by 2 alone
    "wide": {"m": (8, 1), "w": (6, 10)},
    # a path like a moment's, and more dimensions
    "deep": {"a": (5,), "mu": {"a": (4,)}, "t": (4, 3, 5)},
    # more than 65,536 elements that nothing divides; no mean gradient is 0
    "large": {"b": (7,), "p": (257, 259)},
    "empty": {"b": (7,), "w": (4, 6), "z": (0, 3)},
    # one worker's gradient has a NaN in one half-round
    "nan": {"a": (5,), "m": (8, 1), "s": ()},
    "twins": {"u": (5, 3), "v": (5, 3)},
    "list": [(3, 5), Held((7,), ()), None],
    "one": (6, 10),
}


class Case(NamedTuple):
    inner: Any  # a transformation, or a function that makes one
    tree: str | None = None  # a key of TREES; None: it takes any

    def build(self):
        return self.inner() if callable(self.inner) else self.inner


def by_leaf(fn, tree=None):
    """-0.1 fn(gradient, parameter) on every leaf."""
    step = lambda g, p: -0.1 * fn(g, p)  # noqa: E731
    return Case(optax.stateless(lambda g, p: jax.tree.map(step, g, p)), tree)


def of_rank(rank, fn, tree=None):
    """fn(gradient) where a leaf has so many dimensions or more, else the gradient."""
    return by_leaf(lambda g, _: fn(g) if g.ndim >= rank else g, tree)


def scaled(fn, tree=None):
    """The gradient times what fn makes of it."""
    return by_leaf(lambda g, _: g * fn(g), tree)


def whole(fn, tree=None, init=lambda p: ()):
    """fn(gradients, state, params) -> (directions, state), of trees."""

    def update(g, state, params=None):
        direction, state = fn(g, state, params)
        return jax.tree.map(lambda d: -0.1 * d, direction), state

    return Case(optax.GradientTransformation(init, update), tree)


def stateless(fn, tree=None):
    """fn(gradients, params) -> directions, of trees."""
    return whole(lambda g, s, p: (fn(g, p), s), tree)


def held(init, fn, tree=None):
    """State per leaf: fn(gradient, state) -> (direction, state)."""

    def step(g, state, params):
        leaves, treedef = jax.tree.flatten(g)
        states = treedef.flatten_up_to(state)
        directions, states = zip(*map(fn, leaves, states), strict=True)
        return treedef.unflatten(directions), treedef.unflatten(states)

    return whole(step, tree, lambda p: jax.tree.map(init, p))


def iota(x):
    return jnp.arange(x.size, dtype=x.dtype).reshape(x.shape)


# -------------------------------------------------------------------------- reductions


def other_largest(g, p):
    most = functools.reduce(jnp.maximum, map(jnp.max, jax.tree.leaves(g)))
    return jax.tree.map(lambda x: x / (1 + most), g)


def under_a_mask(g, p):
    odd = np.array([[1.0], [0.0]] * 4)  # (8, 1)
    return jax.tree.map(lambda x: x / (1 + jnp.linalg.norm(g["m"] * odd)), g)


def unit(x, axis):
    return x / (0.1 + jnp.linalg.norm(x, axis=axis, keepdims=True))


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

# ---------------------------------------------------------------- elements and places


def slope(fn, p):
    """The derivative of a sum, as a regularizer has it."""
    return jax.grad(lambda p: jnp.sum(fn(p)))(p)


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

# --------------------------------------------------------------------- linear algebra


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

# --------------------------------------------------------------------- between leaves

norm = optax.tree.norm


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

# ------------------------------------------------------------------------------ state


def momentum(dtype):
    def step(g, m):
        m = 0.9 * m + g
        return m.astype(g.dtype), m.astype(dtype)

    return held(lambda p: jnp.zeros(p.shape, dtype), step)


def eight_bits(g, s):
    m = 0.9 * s["q"] * s["scale"] + g
    scale = jnp.max(jnp.abs(m)) / 127 + 1e-9
    # a shift, so that no value lies where rounding turns
    q = jnp.round(m / scale + 0.123).astype(jnp.int8)
    return m, {"q": q, "scale": scale}


def shampoo_init(p):
    if p.ndim != 2:
        return ()
    return {"l": jnp.eye(p.shape[0]), "r": jnp.eye(p.shape[1])}


def shampoo(g, s):
    if not s:
        return g, s
    s = {"l": s["l"] + g @ g.T, "r": s["r"] + g.T @ g}
    return power(s["l"], -0.25) @ g @ power(s["r"], -0.25), s


def ring(g, s):
    """The mean of the last three gradients, from a buffer of them."""
    past = lax.dynamic_update_index_in_dim(s["past"], g, s["at"] % 3, 0)
    return past.mean(0), {"past": past, "at": s["at"] + 1}


def anchored(g, s, p):
    far = jax.tree.map(jnp.subtract, p, s)
    s = jax.tree.map(lambda y, f: y + 0.1 * f, s, far)
    return jax.tree.map(lambda x, f: x + 0.5 * f, g, far), s


def rows_and_columns(g, s):
    s = [s[0] + 1, s[1] + jnp.mean(g**2, tuple(range(g.ndim - 1)))]
    return g / (1 + s[0].sum() + s[1]), s


def flat_momentum(g, m, p):
    flat, back = ravel_pytree(g)
    m = 0.9 * m + flat
    return back(m * jnp.cos(jnp.arange(m.size))), m


def flat_zeros(p):
    return jnp.zeros(sum(x.size for x in jax.tree.leaves(p)))


def flat_squares(g, m):
    m = m + jnp.ravel(g) ** 2
    return g / m.reshape(g.shape), m


def turned(g, m):
    return m.T + g, 0.9 * m + g.T


def misleading_init(p):
    """Under the parameters' names, what is none of theirs."""
    return {
        "mu/a": jnp.zeros(()),
        "mu": {"a": jnp.zeros((5, 3)), "s": jnp.ones(7)},
        "nu": {"mu/a": jnp.zeros(15), "a": jnp.int32(1)},
        "s": jnp.zeros(3),
        "a": jnp.arange(7.0),
    }


def misleading(g, s, p):
    s = {
        "mu/a": s["mu/a"] + jnp.sum(g["a"]),
        "mu": {"a": s["mu"]["a"] + g["mu/a"].T, "s": jnp.flip(s["mu"]["s"]) + g["a"]},
        "nu": {"mu/a": s["nu"]["mu/a"] + g["mu/a"].ravel(), "a": s["nu"]["a"] + 1},
        "s": s["s"] + g["mu/a"].sum(-1),
        "a": jnp.roll(s["a"], 1) + g["a"],
    }
    direction = {
        "a": s["a"] * s["mu/a"] + s["mu"]["s"],
        "mu/a": s["mu"]["a"].T * s["s"][:, None] + s["nu"]["mu/a"].reshape(3, 5),
        "s": g["s"] / s["nu"]["a"] + jnp.vdot(s["s"], np.arange(3.0)),
    }
    return direction, s


def elsewhere(g, s, p):
    """One leaf in a place of its own, and a sum that knows its places."""
    scale = jnp.sum(jnp.cumsum(s["old"].ravel()))
    return jax.tree.map(lambda x: x * scale, g), {"old": g["u"]}


def a_list(g, s, p):
    return s[3], [s[0] + 1, [], None, g]


def a_dataclass(g, s, p):
    return jax.tree.map(lambda x, y: x + y * s.count, g, s.a), Held(g, s.count + 1)


def times(g, s):
    return jax.tree.map(lambda x: x * s, g)


def zeros(p):
    return jax.tree.map(jnp.zeros_like, p)


STATE = {
    "16 bits": momentum(jnp.bfloat16),
    "32 bits, held": momentum(jnp.float32),
    "32 bits at first": held(
        lambda p: jnp.zeros(p.shape, jnp.float32), lambda g, m: (m + g, 0.9 * m + g)
    ),
    "8 bits and a scale": held(
        lambda p: {"q": jnp.zeros(p.shape, jnp.int8), "scale": jnp.ones(())}, eight_bits
    ),
    "booleans": held(
        lambda p: jnp.zeros(p.shape, bool),
        lambda g, s: (jnp.where(s, g, 0.5), s ^ (g > 0)),
    ),
    "counts": held(
        lambda p: jnp.zeros(p.shape, jnp.int32), lambda g, c: (g / (1 + c), c + (g > 0))
    ),
    "complex numbers": held(
        lambda p: jnp.zeros(p.shape, complex),
        lambda g, s: ((s * s).real + g, 0.5j * s + g),
    ),
    "ones": held(jnp.ones_like, lambda g, v: (g / jnp.sqrt(v), 0.5 * v + g**2)),
    "iota, held": held(iota, lambda g, v: (g * v, v + 1)),
    "growth": held(jnp.zeros_like, lambda g, v: (v, v + 1)),
    "a sum over state": held(jnp.ones_like, lambda g, v: (g / jnp.sum(v), v + 1)),
    "a sum over state, large": held(
        jnp.ones_like, lambda g, v: (g / jnp.mean(v), v + 1), "large"
    ),
    "transposed": held(lambda p: jnp.zeros(p.shape[::-1]), turned),
    "transposed, large": held(lambda p: jnp.zeros(p.shape[::-1]), turned, "large"),
    "flattened": held(lambda p: jnp.ones(p.size), flat_squares),
    "flattened, large": held(lambda p: jnp.ones(p.size), flat_squares, "large"),
    "flattened, backwards": held(
        lambda p: jnp.zeros(p.size),
        lambda g, m: (m[::-1].reshape(g.shape), 0.9 * m + jnp.ravel(g)),
    ),
    "rows and columns": held(
        lambda p: [jnp.zeros(p.shape[:1]), jnp.zeros(p.shape[-1:])], rows_and_columns
    ),
    "in two halves": held(
        lambda p: (jnp.zeros(p.shape), jnp.ones(p.shape)),
        lambda g, s: (s[0] + g * s[1], (s[1] * g, s[0])),
    ),
    "stacked": held(
        lambda p: jnp.zeros((2, *p.shape)),
        lambda g, s: (s.sum(0) + g, jnp.stack([g, s[0]])),
    ),
    "last of three": held(
        lambda p: {"past": jnp.zeros((3, *p.shape)), "at": jnp.int32(0)}, ring
    ),
    "larger by one": held(
        lambda p: jnp.ones([d + 1 for d in p.shape]),
        lambda g, s: (g * s[tuple(map(slice, g.shape))], jnp.roll(s, 1) + 1),
    ),
    "Shampoo": held(shampoo_init, shampoo, "odd"),
    "a list": whole(a_list, None, lambda p: [jnp.zeros(()), [], None, zeros(p)]),
    "a dataclass": whole(a_dataclass, None, lambda p: Held(zeros(p), jnp.int32(0))),
    "an array": whole(
        lambda g, s, p: (times(g, s), s / (1 + norm(g))), None, lambda p: jnp.ones(())
    ),
    "an array like the leaf": held(jnp.zeros_like, lambda g, s: (s, s + g), "one"),
    "parameters at the start": whole(anchored, None, lambda p: p),
    "NumPy's": held(lambda p: np.ones(p.shape), lambda g, s: (g * s, 2 * s)),
    "a number of Python's": whole(
        lambda g, s, p: (times(g, 1 / (1 + s)), s + 1), None, lambda p: 0
    ),
    "one vector": whole(flat_momentum, None, flat_zeros),
    "one vector, large": whole(flat_momentum, "large", flat_zeros),
    "names that mislead": whole(misleading, "odd", misleading_init),
    "a place of its own": whole(elsewhere, "twins", lambda p: {"old": p["v"]}),
    "another leaf's": whole(
        lambda g, s, p: (s, {"u": s["u"] + g["v"], "v": g["u"]}),
        "twins",
        lambda p: {"u": p["v"], "v": p["u"]},
    ),
    "a sum of nothing": held(
        jnp.ones_like, lambda g, v: (g / (1 + jnp.sum(v)), v), "empty"
    ),
}

# ---------------------------------------------------------------------------- control


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

# ------------------------------------------------------------------------------- keys


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

# ------------------------------------------------- arrays that come from somewhere else


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

HANDWRITTEN = {
    **REDUCTIONS,
    **ELEMENTS,
    **PLACES,
    **ALGEBRA,
    **BETWEEN,
    **STATE,
    **CONTROL,
    **KEYS,
    **{name: Case(make, "one") for name, make in CAPTURED.items()},
}
