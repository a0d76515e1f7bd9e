"""slowmo against a NumPy loop written from its equations, in double precision."""

import optax
import pytest

import acco_jax
from tests.methods.local import problem
from tests.methods.local.test_rounds import HELD, ROUNDS, STEPS, run
from tests.reference import make_mesh

pytestmark = pytest.mark.usefixtures("x64")
ALPHA, BETA = 0.8, 0.6


def slowmo(theta, batches, counts, workers, gamma):
    inner = [problem.AdamW() for _ in range(workers)]
    u, points, t = dict.fromkeys(theta, 0.0), [], 0
    for batch, count in zip(batches, counts, strict=True):
        done = [
            problem.local_steps(theta, inner[i], batch, i, count[i], STEPS, HELD)
            for i in range(workers)
        ]
        delta = problem.mean_difference(theta, *zip(*done, strict=True))
        if delta is not None:
            u = {k: BETA * u[k] + delta[k] / gamma(t * STEPS) for k in theta}
            theta = {k: theta[k] - ALPHA * gamma(t * STEPS) * u[k] for k in theta}
            t += 1
        points.append(theta)
    return points


@pytest.mark.fast("4-*")
@pytest.mark.parametrize("form", ["fused", "split"])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_follows_its_equations(workers, form):
    """With a rate that changes from round to round; the inner one stays, for NumPy."""
    gamma = lambda step: 0.1 / (1 + step)  # noqa: E731
    tx = acco_jax.slowmo(
        problem.adamw(), mesh=make_mesh(workers), local_steps=STEPS,
        slow_learning_rate=ALPHA, slow_momentum_factor=BETA, inner_learning_rate=gamma,
    )  # fmt: skip
    drawn = problem.draw(workers, STEPS, HELD, ROUNDS)
    expected = slowmo(*drawn, workers, gamma)
    for (_, committed, _), theta in zip(run(tx, *drawn, form), expected, strict=True):
        problem.assert_close(committed, theta)


def test_a_constant_rate_is_heavy_ball():
    mesh, drawn = make_mesh(2), problem.draw(2, STEPS, HELD, ROUNDS)
    points = []
    for tx in (
        acco_jax.slowmo(
            problem.adamw(), mesh=mesh, local_steps=STEPS, slow_learning_rate=ALPHA,
            slow_momentum_factor=BETA, inner_learning_rate=0.03,
        ),
        acco_jax.diloco(
            problem.adamw(), mesh=mesh, local_steps=STEPS,
            outer=optax.sgd(ALPHA, BETA),
        ),
    ):  # fmt: skip
        points.append(run(tx, *drawn))
    for (_, a, _), (_, b, _) in zip(*points, strict=True):
        problem.assert_close(a, b, atol=1e-13)


def test_without_momentum_it_is_averaging():
    mesh, drawn = make_mesh(4), problem.draw(4, STEPS, HELD, 2)
    plain = acco_jax.diloco(
        problem.adamw(), mesh=mesh, local_steps=STEPS,
        outer_learning_rate=1.0, outer_momentum=0.0,
    )  # fmt: skip
    tx = acco_jax.slowmo(
        problem.adamw(), mesh=mesh, local_steps=STEPS, slow_momentum_factor=0.0
    )
    for (_, a, _), (_, b, _) in zip(run(tx, *drawn), run(plain, *drawn), strict=True):
        problem.assert_close(a, b, atol=1e-14)


def test_a_round_whose_first_rate_is_zero_is_averaged():
    """A warm-up from 0: nothing is lost, and the momentum learns nothing."""
    mesh = make_mesh(2)
    slow = acco_jax.slowmo(
        problem.adamw(), mesh=mesh, local_steps=STEPS,
        inner_learning_rate=lambda step: 0.0 * step,
    )  # fmt: skip
    plain = acco_jax.diloco(
        problem.adamw(), mesh=mesh, local_steps=STEPS, outer_learning_rate=1.0,
        outer_momentum=0.0,
    )  # fmt: skip
    theta, batches, counts = problem.draw(2, STEPS, HELD, 2)
    found = run(slow, theta, batches, counts)
    expected = run(plain, theta, batches, counts)
    for (_, a, _), (_, b, _) in zip(found, expected, strict=True):
        problem.assert_close(a, b, atol=1e-12)
