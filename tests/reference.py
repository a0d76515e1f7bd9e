"""ACCO.md's recurrence on one device, and what the tests share; nothing of acco_jax."""

import functools

import jax
import ml_dtypes
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
        weight = np.asarray(weight, self.dtype)
        rows = weight != 0  # the gradients of a worker without weight do not count
        sums = jax.tree.map(lambda g: np.asarray(g, self.dtype)[rows].sum(0), gradient)
        return sums, weight.sum()

    def acco(self, params, gradients, weights, extra=None, extrapolation=1):
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
                    ahead, _ = self.opt(theta, state, *arrived, extra)
                    here = jax.tree.map(
                        lambda x, at: at + extrapolation * (x - at), ahead, theta
                    )
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


def draw(shapes, n, calls, seed, dtypes=None, scale=8):
    """Gradients whose sums are exact in any order: small integers over powers of 2."""
    rng = np.random.default_rng(seed)

    def one(shape, dtype):
        values = rng.integers(-7, 8, (n, *shape)) / 2.0 ** rng.integers(0, 4)
        return (values / scale).astype(dtype)

    dtypes = dtypes or jax.tree.map(
        lambda _: np.float64, shapes, is_leaf=lambda s: isinstance(s, tuple)
    )
    is_shape = lambda s: isinstance(s, tuple)  # noqa: E731
    return [jax.tree.map(one, shapes, dtypes, is_leaf=is_shape) for _ in range(calls)]


def parameters(shapes, seed=0, dtypes=None):
    rng = np.random.default_rng(seed)
    is_shape = lambda s: isinstance(s, tuple)  # noqa: E731
    dtypes = dtypes or jax.tree.map(lambda _: np.float64, shapes, is_leaf=is_shape)
    make = lambda s, d: np.asarray(rng.normal(size=s) + 1.5, d)  # noqa: E731
    return jax.tree.map(make, shapes, dtypes, is_leaf=is_shape)


def quantization_step(x, bits):
    """The scale of each row [rows, 1]: the smallest bfloat16 that is not below."""
    least = np.abs(x).max(1, keepdims=True) * np.float32(1 / (2 ** (bits - 1) - 1))
    mantissa, exponent = np.frexp(least)
    scale = np.ldexp(np.ceil(mantissa * 2**8) / 2**8, exponent).astype(np.float32)
    return np.where(least > 0, np.maximum(scale, np.float32(2.0**-126)), 0)


def quantized(x, bits, apart=False):
    """What arrives of finite rows [rows, width], in few bits.

    Unless the scale is sent `apart`, the first 16 values carry its bits.
    """
    most, scale = 2 ** (bits - 1) - 1, quantization_step(x, bits)
    pattern = scale.astype(ml_dtypes.bfloat16).view(np.uint16)  # exact: 8 bits
    lowest = (pattern >> np.arange(16) & 1).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        x = np.where(scale > 0, x * (1 / scale), 0)
    q = np.clip(np.rint(x), -most, most)
    if apart:
        return q.astype(np.float32) * scale
    first = 2 * np.rint((x[:, :16] - lowest) / 2) + lowest
    # beyond the range lies the nearest with the same lowest bit
    first -= 2 * np.sign(first) * (np.abs(first) > most)
    q[:, :16] = first
    assert np.all(q[:, :16] % 2 == lowest)
    return q.astype(np.float32) * scale
