"""Optimizers whose state is of every shape, dtype and structure."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

from tests.handwritten.algebra import power
from tests.handwritten.cases import Held, held, iota, norm, times, whole


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
