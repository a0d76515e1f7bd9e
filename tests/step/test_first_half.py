"""The first half of acco's step that is chosen by timing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import acco_jax
from acco_jax.step import first_half
from tests.reference import make_mesh

N, ROWS, WIDTH = 2, 2, 4


def loss_fn(params, microbatch, rng):
    return jnp.mean((microbatch @ params["w"]) ** 2)


def test_candidates_are_a_quarter_and_a_half():
    found = {q: first_half.first_halves(q) for q in (2, 3, 4, 6, 8, 12, 16)}
    assert found == {2: (1,), 3: (1,), 4: (1, 2), 6: (2, 3), 8: (2, 4), 12: (3, 6),
                     16: (4, 8)}  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ([[1.0, 1.0]], 0),
        ([[1.02, 1.0]], 0),  # as long
        ([[1.1, 1.0]], 1),
        ([[1.0, 1.0], [1.0, 1.02], [9.0, 1.0]], 0),  # longer once: it was other load
        ([[1.1, 1.0], [1.5, 1.3], [1.0, 9.0]], 1),  # shorter once
        ([[2.0, 1.5, 1.0], [2.0, 1.0, 1.5]], 1),
    ],
)
def test_the_smallest_that_takes_no_longer_is_chosen(seconds, chosen):
    assert first_half.smallest(np.asarray(seconds)) == chosen


@pytest.mark.parametrize(("slow", "first"), [(None, 1), (1, 2)])
def test_a_loop_is_told_its_halves_and_keeps_its_parameters(monkeypatch, slow, first):
    """Where calls with one microbatch are the long ones, halves are equal."""
    clock, step_time = [0.0], {1: 3.0 if slow else 1.0, 2: 2.0, 3: 3.0}
    if slow is None:
        step_time[3] = 2.0
    run = acco_jax.TrainStep.__call__

    def timed(step, *args):
        params, state, metrics = run(step, *args)
        clock[0] += step_time[int(metrics["counts"][0])]
        return params, state, metrics

    monkeypatch.setattr(acco_jax.TrainStep, "__call__", timed)
    monkeypatch.setattr(acco_jax.TrainStep, "overlaps", True)  # as on GPUs
    monkeypatch.setattr(first_half.time, "perf_counter", lambda: clock[0])
    mesh = make_mesh(N)
    tx = acco_jax.acco(optax.adamw(1e-2), mesh=mesh)
    params = {"w": jnp.ones((WIDTH, WIDTH))}
    rows = np.arange(N * 4 * ROWS * WIDTH, dtype=np.float32).reshape(-1, WIDTH)
    batch = jax.device_put(rows, NamedSharding(mesh, P("data")))
    halves = acco_jax.find_halves(loss_fn, tx, params, batch, microbatches=4)
    assert halves == acco_jax.Halves(first, 4 - first)
    step = acco_jax.make_train_step(loss_fn, tx, microbatches=halves)
    rows = rows[: N * halves.most * ROWS]
    params, _, metrics = step(*acco_jax.start(tx, params), rows)
    assert metrics["counts"].tolist() == [4 - first] * N
    for wrong in (1, 2.0, True):
        with pytest.raises(ValueError, match=f"microbatches is {wrong}: a step of two"):
            acco_jax.find_halves(loss_fn, tx, params, batch, microbatches=wrong)
    with pytest.raises(ValueError, match="tx is a GradientTransformationExtraArgs"):
        acco_jax.find_halves(loss_fn, tx.inner, params, batch, microbatches=4)
    for other in (acco_jax.zero1, acco_jax.dpu):
        method = other(optax.adamw(1e-2), mesh=mesh)
        with pytest.raises(ValueError, match="find_halves is for acco"):
            acco_jax.find_halves(loss_fn, method, params, batch, microbatches=4)


def test_halves_of_a_model_with_a_state_whose_optimizer_takes_more(monkeypatch):
    def update(g, state, params=None, *, scale, **extra):
        return jax.tree.map(lambda x: -scale * x, g), state

    def loss(params, x, rng, mean):
        assert rng is None
        return jnp.mean((x @ params["w"] - mean) ** 2), 1.0, None, mean * 0.9

    monkeypatch.setattr(acco_jax.TrainStep, "overlaps", True)  # as on GPUs
    inner = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)
    tx = acco_jax.acco(inner, mesh=make_mesh(N))
    batch, params = np.ones((4 * N, WIDTH)), {"w": jnp.ones((WIDTH, WIDTH))}
    found = acco_jax.find_halves(
        loss, tx, params, batch, microbatches=4, extra={"scale": jnp.float32(0.1)},
        model_state=jnp.ones(WIDTH),
    )  # fmt: skip
    assert (found.first, found.second) in [(1, 3), (2, 2)]


def test_nothing_is_timed_where_nothing_overlaps(monkeypatch):
    monkeypatch.setattr(acco_jax.step, "step_seconds", None)
    tx = acco_jax.acco(optax.sgd(0.1), mesh=make_mesh(N))
    batch, params = np.ones((8, WIDTH)), {"w": jnp.ones((WIDTH, WIDTH))}
    found = acco_jax.find_halves(loss_fn, tx, params, batch, microbatches=4)
    assert found == acco_jax.Halves(1, 3)
    with pytest.raises(ValueError, match="does not divide into 2 workers x 4 microb"):
        acco_jax.find_halves(loss_fn, tx, params, batch[:7], microbatches=4)


def test_devices_of_one_worker_are_not_workers(monkeypatch):
    tx = acco_jax.acco(
        optax.sgd(0.1), mesh=make_mesh(2, 2), param_specs={"w": P(None, "model")}
    )
    seen = []

    def timed(step, halves, params, state, rows, counts, rng, extra):
        seen.append(rows[:, 0].tolist())
        return np.ones((1, len(halves)))

    monkeypatch.setattr(acco_jax.step, "step_seconds", timed)
    monkeypatch.setattr(acco_jax.TrainStep, "overlaps", True)  # as on GPUs
    batch = np.arange(8.0)[:, None] * np.ones(WIDTH)
    params = {"w": jnp.ones((WIDTH, WIDTH))}
    found = acco_jax.find_halves(loss_fn, tx, params, batch, microbatches=4)
    assert (found, seen) == (acco_jax.Halves(1, 3), [[0, 1, 2, 4, 5, 6]])
