"""A least-squares problem and its local steps in plain NumPy; nothing of acco_jax."""

import jax.numpy as jnp
import numpy as np
import optax

ROWS, INPUTS, OUTPUTS = 2, 8, 3
RATE, B1, B2, EPS, DECAY = 3e-2, 0.9, 0.95, 1e-8, 0.1
SHAPES = {"b": (OUTPUTS,), "w": (INPUTS, OUTPUTS)}


def loss_fn(params, microbatch, rng):
    """The SUM of errors and how many there are: microbatches weigh by their targets."""
    x, y, used = microbatch
    error = (x @ params["w"] + params["b"] - y) ** 2
    return (error * used[:, None]).sum(), used.sum() * OUTPUTS, None


def adamw():
    return optax.adamw(RATE, B1, B2, EPS, weight_decay=DECAY)


class AdamW:
    """One worker's optimizer, on a dict of arrays."""

    def __init__(self):
        self.m = self.v = dict.fromkeys(SHAPES, 0.0)
        self.t = 0

    def step(self, theta, g):
        self.t += 1
        self.m = {k: B1 * self.m[k] + (1 - B1) * g[k] for k in g}
        self.v = {k: B2 * self.v[k] + (1 - B2) * g[k] ** 2 for k in g}
        out = {}
        for k, x in theta.items():
            m, v = self.m[k] / (1 - B1**self.t), self.v[k] / (1 - B2**self.t)
            out[k] = x - RATE * (m / (np.sqrt(v) + EPS) + DECAY * x)
        return out


class Sgd:
    def step(self, theta, g):
        return {k: theta[k] - RATE * g[k] for k in theta}


def gradient(theta, batch, microbatches):
    """G and W over the microbatches with these numbers."""
    total, weight = {k: np.zeros(s) for k, s in SHAPES.items()}, 0.0
    for number in microbatches:
        rows = slice(number * ROWS, (number + 1) * ROWS)
        x, y, used = (a[rows] for a in batch)
        error = (x @ theta["w"] + theta["b"] - y) * used[:, None]
        total["w"] += 2 * x.T @ error
        total["b"] += 2 * error.sum(0)
        weight += used.sum() * OUTPUTS
    return total, weight


def local_steps(theta, inner, batch, worker, count, steps, held, span=None):
    """Worker's theta and weight after its steps span of a call of `steps`.

    held: microbatches of a step in the batch; count: those that are computed.
    """
    weight = 0.0
    for h in range(*(span or (0, steps))):
        start = (worker * steps + h) * held
        g, w = gradient(theta, batch, range(start, start + count))
        if w > 0:
            theta = inner.step(theta, {k: x / w for k, x in g.items()})
        weight += w
    return theta, weight


def mean_difference(anchor, thetas, weights):
    """sum_i w_i (anchor - theta_i) / sum_i w_i; None without weight."""
    total = sum(weights)
    if total == 0:
        return None
    return {
        k: sum(w * (anchor[k] - t[k]) for t, w in zip(thetas, weights, strict=True))
        / total
        for k in anchor
    }


def draw(workers, steps, held, calls, seed=0):
    """Parameters, a batch per call, and counts per call: some unequal, some 0."""
    rng = np.random.default_rng([seed, workers])
    rows = workers * steps * held * ROWS
    batches = [
        (
            rng.normal(size=(rows, INPUTS)),
            rng.normal(size=(rows, OUTPUTS)),
            rng.integers(0, 2, rows).astype(float),
        )
        for _ in range(calls)
    ]
    counts = [rng.integers(1, held + 1, workers) for _ in range(calls)]
    counts[1 % calls][-1] = 0  # one worker sits out: for one worker, everyone
    theta = {k: rng.normal(size=s) for k, s in SHAPES.items()}
    return theta, batches, counts


def device(theta):
    return {k: jnp.asarray(x) for k, x in theta.items()}


def assert_close(found, expected, atol=1e-10):
    for k in SHAPES:
        np.testing.assert_allclose(found[k], expected[k], rtol=0, atol=atol)
