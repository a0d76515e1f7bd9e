"""co2 against a NumPy loop written from its equations, and what its program sends."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import acco_jax
from tests.methods.local import problem
from tests.methods.local.test_rounds import HELD, STEPS, run
from tests.reference import make_mesh
from tests.stablehlo import collectives

pytestmark = pytest.mark.usefixtures("x64")
ALPHA, BETA, PENALTY, PHI, ROUNDS = 0.9, 0.5, 1.5, 0.05, 5
OPTIONS = {
    "local_steps": STEPS,
    "outer_learning_rate": ALPHA,
    "outer_momentum_factor": BETA,
    "staleness_penalty": PENALTY,
}


def co2(theta, batches, counts, workers, phi=np.inf):
    inner = [problem.AdamW() for _ in range(workers)]
    m, stale, points = dict.fromkeys(theta, 0.0), None, []
    for batch, count in zip(batches, counts, strict=True):
        done = [
            problem.local_steps(theta, inner[i], batch, i, count[i], STEPS, HELD)
            for i in range(workers)
        ]
        fresh = problem.mean_difference(theta, *zip(*done, strict=True))
        if stale is not None:
            m = {k: np.clip(BETA * m[k] + stale[k] / PENALTY, -phi, phi) for k in theta}
            theta = {k: theta[k] - ALPHA * m[k] for k in theta}
        stale = fresh
        points.append(theta)
    return points


@pytest.mark.fast("4-*")
@pytest.mark.parametrize("form", ["fused", "split"])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_follows_its_equations(workers, form):
    drawn = problem.draw(workers, STEPS, HELD, ROUNDS)
    mesh = make_mesh(workers)
    for phi, clip in ((np.inf, None), (PHI, PHI)) if workers == 4 else ((PHI, PHI),):
        tx = acco_jax.co2(problem.adamw(), mesh=mesh, clip=clip, **OPTIONS)
        expected = co2(*drawn, workers, phi)
        for (rows, committed, _), theta in zip(
            run(tx, *drawn, form), expected, strict=True
        ):
            problem.assert_close(committed, theta)
            problem.assert_close({k: rows[k][-1] for k in rows}, theta)
    assert any(
        np.abs(a[k] - b[k]).max() > 1e-3  # clipping did something
        for a, b in zip(expected, co2(*drawn, workers), strict=True)
        for k in a
    )


def test_its_collectives_are_those_of_one_step():
    """Beside H steps, one reduce-scatter and one all-gather of bfloat16."""
    tx = acco_jax.co2(
        optax.sgd(1.0), mesh=make_mesh(4), local_steps=STEPS, comm_dtype=jnp.bfloat16
    )
    theta, batches, counts = problem.draw(4, STEPS, HELD, 1)
    step = acco_jax.make_train_step(problem.loss_fn, tx, microbatches=HELD)
    started = acco_jax.start(tx, problem.device(theta))
    text = step.lower(*started, batches[0], jnp.asarray(counts[0])).as_text()
    found = collectives(text)
    assert [c.kind for c in found] == ["reduce_scatter", "all_gather"]
    assert all(c.dtype == "bf16" for c in found)


@pytest.mark.parametrize("name", ["staleness_penalty", "clip"])
def test_refuses(name):
    with pytest.raises(ValueError, match=f"{name} is 0: it must be above 0"):
        acco_jax.co2(optax.sgd(1.0), mesh=make_mesh(2), **{name: 0})
