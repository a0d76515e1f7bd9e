"""What the processes of tests/test_multiprocess.py train."""

import jax.numpy as jnp
import numpy as np
import optax

N, HALF_ROUNDS = 2, 6


def inner():
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def theta():
    rng = np.random.default_rng(0)
    return {"b": rng.normal(size=7), "s": np.float64(1.5), "w": rng.normal(size=(5, 7))}


def loss(params, batch, rng):
    out = jnp.tanh(batch["x"] @ params["w"] + params["b"]) * params["s"]
    return jnp.mean((out - batch["y"]) ** 2)


def batch(n, half_round):
    rng = np.random.default_rng(1 + half_round)
    rows = n * N * 2
    return {"x": rng.normal(size=(rows, 5)), "y": rng.normal(size=(rows, 7))}


def counts(n, half_round):
    return np.random.default_rng(half_round).integers(0, N + 1, n).astype(np.int32)
