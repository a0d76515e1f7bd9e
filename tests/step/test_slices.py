"""Two data axes, as of slices joined by a slower network, against one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import acco_jax
from tests.compiling import optimized
from tests.reference import make_mesh

pytestmark = pytest.mark.usefixtures("x64")

MICROBATCHES, ROWS, HALF_ROUNDS = 5, 2, 5


def loss_fn(params, microbatch, rng):
    x, y = microbatch
    hidden = jnp.tanh(x @ params["w1"] @ params["w2"] + params["bias"])
    return jnp.mean((hidden * params["scale"] - y) ** 2)


def trajectory(sizes, names, *, form, microbatches=MICROBATCHES):
    mesh = make_mesh(*sizes, names=names)
    rng = np.random.default_rng(0)
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    tx = acco_jax.acco(inner, mesh=mesh, axis_name=names)
    step = acco_jax.make_train_step(loss_fn, tx, microbatches=microbatches, form=form)
    params = {
        "w1": jnp.asarray(rng.normal(size=(8, 16))),
        "w2": jnp.asarray(rng.normal(size=(16, 13))),
        "bias": jnp.asarray(rng.normal(size=13)),
        "scale": jnp.asarray(1.5),
    }
    state, points = tx.init(params), []
    rows = mesh.size * microbatches * ROWS
    for _ in range(HALF_ROUNDS):
        batch = rng.normal(size=(rows, 8)), rng.normal(size=(rows, 13))
        counts = rng.integers(0, microbatches + 1, mesh.size)
        params, state, _ = step(params, state, batch, counts)
        theta = acco_jax.committed_params(state, params)
        leaves = jax.tree.leaves((params, theta))
        points.append(np.concatenate([np.ravel(x) for x in leaves]))
    return np.stack(points)


@optimized()  # the forms' bits
@pytest.mark.fast(slow=(str(MICROBATCHES),))
@pytest.mark.parametrize("microbatches", [MICROBATCHES, 1])
def test_two_axes_are_one_to_the_arithmetic(microbatches):
    options = {"microbatches": microbatches}
    expected = trajectory((4,), ("data",), form="fused", **options)
    fused = trajectory((2, 2), ("slice", "chip"), form="fused", **options)
    split = trajectory((2, 2), ("slice", "chip"), form="split", **options)
    np.testing.assert_allclose(fused, expected, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(split, fused)
    assert np.all(np.any(np.diff(expected, axis=0) != 0, axis=1))
