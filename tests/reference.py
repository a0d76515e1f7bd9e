"""ACCO.md's recurrence on one device, and what the tests share; nothing of acco_jax."""

import functools

import jax
import numpy as np
import optax
from jax.sharding import AxisType

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def make_mesh(*sizes, names=("data", "model"), types=AUTO):
    devices = jax.devices()[: int(np.prod(sizes))]
    axis_types = (types,) * len(sizes)
    return jax.make_mesh(
        sizes, names[: len(sizes)], axis_types=axis_types, devices=devices
    )


class Unsharded:
    """The points that half-rounds return, from every worker's sums and weights."""

    def __init__(self, inner, dtype=np.float64):
        self.inner, self.dtype = inner, dtype
        self.init = jax.jit(inner.init)

    @functools.cached_property
    def opt(self):
        def step(theta, state, total, weight, extra):
            mean = jax.tree.map(lambda g: g / weight.astype(g.dtype), total)
            update = optax.with_extra_args_support(self.inner).update
            updates, state = update(mean, state, theta, **extra)
            return optax.apply_updates(theta, updates), state

        return jax.jit(step)

    def start(self, params):
        theta = jax.tree.map(lambda p: np.asarray(p, self.dtype), params)
        return theta, self.init(theta)

    def total(self, gradient, weight):
        sums = jax.tree.map(lambda g: np.asarray(g, self.dtype).sum(0), gradient)
        return sums, np.asarray(weight, self.dtype).sum()

    def acco(self, params, gradients, weights, extra=None):
        """[(what the parameters become, theta)] after each half-round."""
        theta, state = self.start(params)
        points, extra = [], extra or {}
        zero = jax.tree.map(np.zeros_like, theta)
        pending, carry = (zero, 0.0), (zero, 0.0)
        for half_round, (gradient, weight) in enumerate(
            zip(gradients, weights, strict=True)
        ):
            arrived = pending if pending[1] > 0 else (zero, 0.0)  # even if it is NaN
            pending = self.total(gradient, weight)
            if half_round % 2:  # estimate
                here, carry = theta, arrived
                if arrived[1] > 0:
                    here, _ = self.opt(theta, state, *arrived, extra)
            else:  # commit
                total, weight = jax.tree.map(np.add, carry, arrived)
                if weight > 0:
                    theta, state = self.opt(theta, state, total, weight, extra)
                here = theta
            points.append((here, theta))
        return points

    def zero1(self, params, gradients, weights, extra=None):
        theta, state = self.start(params)
        points = []
        for gradient, weight in zip(gradients, weights, strict=True):
            total, weight = self.total(gradient, weight)
            if weight > 0:
                theta, state = self.opt(theta, state, total, weight, extra or {})
            points.append((theta, theta))
        return points


def draw(shapes, n, half_rounds, seed, dtypes=None, scale=8):
    """Gradients whose sums are exact in any order: small integers over powers of 2."""
    rng = np.random.default_rng(seed)

    def one(shape, dtype):
        values = rng.integers(-7, 8, (n, *shape)) / 2.0 ** rng.integers(0, 4)
        return (values / scale).astype(dtype)

    dtypes = dtypes or jax.tree.map(
        lambda _: np.float64, shapes, is_leaf=lambda s: isinstance(s, tuple)
    )
    is_shape = lambda s: isinstance(s, tuple)  # noqa: E731
    return [
        jax.tree.map(one, shapes, dtypes, is_leaf=is_shape) for _ in range(half_rounds)
    ]


def parameters(shapes, seed=0, dtypes=None):
    rng = np.random.default_rng(seed)
    is_shape = lambda s: isinstance(s, tuple)  # noqa: E731
    dtypes = dtypes or jax.tree.map(lambda _: np.float64, shapes, is_leaf=is_shape)
    make = lambda s, d: np.asarray(rng.normal(size=s) + 1.5, d)  # noqa: E731
    return jax.tree.map(make, shapes, dtypes, is_leaf=is_shape)
