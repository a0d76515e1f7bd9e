"""What a case is, the trees it runs on, and the ways in which it may be written."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

norm = optax.tree.norm


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


def times(g, s):
    return jax.tree.map(lambda x: x * s, g)


def unit(x, axis):
    return x / (0.1 + jnp.linalg.norm(x, axis=axis, keepdims=True))


def slope(fn, p):
    """The derivative of a sum, as a regularizer has it."""
    return jax.grad(lambda p: jnp.sum(fn(p)))(p)
