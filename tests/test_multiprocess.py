"""Two real processes that talk over gloo take the unsharded loop's steps."""

import json

import jax
import numpy as np
import pytest

from tests import multiprocess_problem as problem
from tests import programs
from tests.reference import Unsharded

pytestmark = pytest.mark.usefixtures("x64")


def run(processes, devices, folder):
    """The first process's result; every process is gone when this returns."""
    outputs = programs.together(
        "tests.multiprocess_worker",
        processes,
        lambda i, port: (i, processes, devices, port, folder),
    )
    (line,) = [x for x in outputs[0].splitlines() if x.startswith("RESULT")]
    return json.loads(line.removeprefix("RESULT"))


def expected(method, n):
    """[parameters and committed parameters] of the loop on one device."""
    reference, gradients, weights = Unsharded(problem.inner()), [], []
    gradient = jax.jit(jax.grad(problem.loss))
    theta = problem.theta()
    at, points = theta, []
    for h in range(problem.HALF_ROUNDS):
        batch, counts, rows = problem.batch(n, h), problem.counts(n, h), []
        for i, count in enumerate(counts):
            total = jax.tree.map(np.zeros_like, theta)
            for k in range(i * problem.N, i * problem.N + count):
                one = jax.tree.map(lambda x, k=k: x[2 * k : 2 * k + 2], batch)
                total = jax.tree.map(np.add, total, gradient(at, one, None))
            rows.append(total)
        gradients.append(jax.tree.map(lambda *x: np.stack(x), *rows))
        weights.append(counts)
        points = getattr(reference, method)(theta, gradients, weights)
        at = points[-1][0]
    flat = lambda p: np.concatenate([np.ravel(x) for x in jax.tree.leaves(p)])  # noqa: E731
    return [flat(p) for p in points]


@pytest.mark.fast("2")
@pytest.mark.parametrize("devices", [1, 2])
def test_two_processes(devices, tmp_path):
    result = run(2, devices, tmp_path)
    assert result["auto"] == "split"
    assert "processes gave different arrays as batch" in result["own rows"]
    for method in ("acco", "zero1"):
        points = expected(method, 2 * devices)
        for form in ("split", "fused", "plain"):
            np.testing.assert_allclose(
                result[f"{method}-{form}"], points, rtol=0, atol=1e-9
            )
        np.testing.assert_array_equal(
            result[f"{method}-split"], result[f"{method}-fused"]
        )
