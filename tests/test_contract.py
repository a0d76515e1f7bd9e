"""What does not fit is refused in one line, and what callers expect of optax works."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import acco_jax
from tests.reference import make_mesh

LOCAL = ("diloco", "slowmo", "co2", "streaming_diloco", "gossip", "cellm")


@contextlib.contextmanager
def refused(words, kind=ValueError):
    """The error is of this kind, has these words and is one line."""
    with pytest.raises(kind, match=words) as error:
        yield
    assert "\n" not in str(error.value)


def loss_fn(params, batch, rng):
    return jnp.mean((batch @ params["w"]) ** 2)


def theta(dtype=jnp.float32):
    return {"w": jnp.ones((3, 2), dtype)}


def method(name="acco", inner=None, n=2, **options):
    if name in LOCAL:
        options = {"local_steps": 2} | options
    if name == "streaming_diloco":
        options = {"fragments": 1, "overlap_steps": 1} | options
    make = getattr(acco_jax, name)
    return make(inner or optax.adam(0.1), mesh=make_mesh(n), **options)


def step_of(tx, loss=loss_fn, **options):
    options = {"microbatches": 1} | options
    return acco_jax.make_train_step(loss, tx, mesh=tx.mesh, **options)


def batch_for(tx, seed=0, microbatches=1):
    rows = 2 * tx.mesh.shape["data"] * tx.steps_per_call * microbatches
    return np.random.default_rng(seed).normal(size=(rows, 3)).astype(np.float32)


@pytest.mark.parametrize("name", ["acco", "diloco"])
def test_leaves_of_different_numbers_of_rows_are_refused(name):
    tx = method(name)

    def loss(params, batch, rng):
        return jnp.mean((batch["x"] @ params["w"]) ** 2) + jnp.mean(batch["y"])

    batch = {"x": np.ones((16, 3)), "y": np.ones(8)}
    words = r"leaf \['x'\] has 16 rows and \['y'\] has 8"
    params, state = acco_jax.start(tx, theta())
    with refused(words):
        step_of(tx, loss)(params, state, batch)
    with refused(words):
        acco_jax.local_gradients(loss, mesh=tx.mesh, microbatches=2)(theta(), batch)


@pytest.mark.parametrize("name", ["zero1", "acco", "ddp", "fused_zero1", "gossip"])
def test_params_of_another_dtype_than_at_init_are_refused(name):
    tx = method(name)
    params, state = acco_jax.start(tx, theta())
    words = "params w is bfloat16, but init saw float32"
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    with refused(words):
        step_of(tx)(narrow, state, batch_for(tx))
    if name not in LOCAL:
        grads = {"w": np.ones((2, 3, 2), np.float32)}
        with refused(words):
            tx.update(grads, state, narrow)
        with refused("params w is float32, but init saw bfloat16"):
            tx.update(grads, tx.init(theta(jnp.bfloat16)), params)
        # NumPy's float64 is float32 to jax
        tx.update(grads, state, {"w": np.ones((3, 2))})
    step_of(tx)(params, state, batch_for(tx))
