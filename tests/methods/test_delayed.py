"""dpu and wp against NumPy loops written from their equations, in double precision."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import acco_jax
from tests.reference import make_mesh

pytestmark = pytest.mark.usefixtures("x64")

ROWS, INPUTS, OUTPUTS, MICROBATCHES, UPDATES = 2, 5, 3, 2, 8
LEARNING_RATE, B1, B2, EPS, DECAY = 1e-2, 0.9, 0.95, 1e-8, 0.1


def loss_fn(params, microbatch, rng):
    x, y = microbatch
    return jnp.mean((x @ params["w"] - y) ** 2)


def mean_gradient(w, batch, counts):
    """G / W of one update, from every worker's first counts[i] microbatches."""
    total = np.zeros_like(w)
    for worker, count in enumerate(counts):
        for k in range(count):
            start = (worker * MICROBATCHES + k) * ROWS
            x, y = (a[start : start + ROWS] for a in batch)
            total += 2 / y.size * x.T @ (x @ w - y)
    return total / sum(counts)


def adamw(w, state, g):
    m, v, t = state
    m, v, t = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g**2, t + 1
    step = (m / (1 - B1**t)) / (np.sqrt(v / (1 - B2**t)) + EPS)
    return w - LEARNING_RATE * (step + DECAY * w), (m, v, t)


def reference(w, batches, counts, *, warmup=0, predict=False, feedback=0.0):
    """[(where the parameters go, theta)] after each update."""
    state, in_flight, points = (0.0, 0.0, 0), None, []
    at, last = w, np.zeros_like(w)

    def late_step(w, state):
        new, state = adamw(w, state, in_flight)
        u = new - w
        return w + u + feedback * (u - last), state, u

    for batch, count in zip(batches, counts, strict=True):
        gradient = mean_gradient(at, batch, count)
        if state[2] < warmup:
            new, state = adamw(w, state, gradient)
            at, w, last = new, new, new - w
        else:
            if in_flight is not None:
                w, state, last = late_step(w, state)
                at = late_step(w, state)[0] if predict else w
            in_flight = gradient
        points.append((at, w))
    return points


def run(tx, form, w, batches, counts):
    mesh = tx.mesh
    params = {"w": jnp.asarray(w)}
    state = tx.init(params)
    gradients = acco_jax.local_gradients(loss_fn, mesh=mesh, microbatches=MICROBATCHES)
    if form != "plain":
        step = acco_jax.make_train_step(
            loss_fn, tx, microbatches=MICROBATCHES, form=form
        )
    update = jax.jit(tx.update)
    points = []
    for batch, count in zip(batches, counts, strict=True):
        if form == "plain":
            grads, weight, _ = gradients(params, batch, count)
            updates, state = update(grads, state, params, weight=weight)
            params = optax.apply_updates(params, updates)
        else:
            params, state, metrics = step(params, state, batch, count)
            assert int(metrics["step"]) == int(state.steps)
        theta = acco_jax.committed_params(state, params)
        points.append((np.asarray(params["w"]), np.asarray(theta["w"])))
    return points


def draw(workers):
    rng = np.random.default_rng(workers)
    rows = workers * MICROBATCHES * ROWS
    batches = [
        (rng.normal(size=(rows, INPUTS)), rng.normal(size=(rows, OUTPUTS)))
        for _ in range(UPDATES)
    ]
    counts = [rng.integers(1, MICROBATCHES + 1, workers) for _ in range(UPDATES)]
    return rng.normal(size=(INPUTS, OUTPUTS)), batches, counts


@pytest.mark.fast(
    "dpu-4-*",
    "dpu_warmup-2-fused",
    "wp-4-fused",
    "dpu_feedback-4-fused",
    "wp_feedback-2-plain",
    "dpu_warm_feedback-2-split",
)
@pytest.mark.parametrize("form", ["plain", "fused", "split"])
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize(
    ("method", "options", "recurrence"),
    [
        (acco_jax.dpu, {}, {}),
        (acco_jax.dpu, {"warmup_steps": 3}, {"warmup": 3}),
        (acco_jax.wp, {}, {"predict": True}),
        (acco_jax.dpu, {"feedback": 1.0}, {"feedback": 1.0}),
        (acco_jax.wp, {"feedback": 0.5}, {"predict": True, "feedback": 0.5}),
        (
            acco_jax.dpu,
            {"feedback": 1.0, "warmup_steps": 3},
            {"feedback": 1.0, "warmup": 3},
        ),
    ],
    ids=["dpu", "dpu_warmup", "wp", "dpu_feedback", "wp_feedback", "dpu_warm_feedback"],
)
def test_follows_its_equations(method, options, recurrence, workers, form):
    inner = optax.adamw(LEARNING_RATE, B1, B2, EPS, weight_decay=DECAY)
    tx = method(inner, mesh=make_mesh(workers), **options)
    w, batches, counts = draw(workers)
    found = run(tx, form, w, batches, counts)
    np.testing.assert_allclose(
        found, reference(w, batches, counts, **recurrence), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("method", [acco_jax.dpu, acco_jax.wp])
@pytest.mark.parametrize("factor", [-1.0, np.inf, np.nan])
def test_a_feedback_that_is_none_is_refused(method, factor):
    with pytest.raises(ValueError, match=f"feedback is {factor}: give"):
        method(optax.sgd(1.0), mesh=make_mesh(1), feedback=factor)


@pytest.mark.parametrize(("made", "used"), [(0.0, 1.0), (1.0, 0.0)])
def test_a_state_of_another_feedback_is_refused(made, used):
    before, tx = (
        acco_jax.dpu(optax.sgd(1.0), mesh=make_mesh(1), feedback=f)
        for f in (made, used)
    )
    params = {"w": jnp.zeros(2)}
    with pytest.raises(ValueError, match=f"feedback, and tx has feedback {used}: give"):
        tx.update({"w": jnp.ones((1, 2))}, before.init(params), params)


def test_without_weight_the_fed_back_update_stays():
    tx = acco_jax.dpu(optax.sgd(1.0), mesh=make_mesh(1), feedback=1.0)
    params = {"w": jnp.zeros(2)}
    state, points = tx.init(params), []
    for weight in (1.0, 1.0, 0.0, 1.0, 1.0):
        grads = {"w": jnp.ones((1, 2))}
        updates, state = tx.update(grads, state, params, weight=jnp.full(1, weight))
        params = optax.apply_updates(params, updates)
        points.append(float(params["w"][0]))
    # late by one: nothing, then -1 - (1 - 0), -1 - (1 - 1), nothing, -1
    assert points == [0, -2, -3, -3, -4]


def test_the_warm_ups_last_update_is_fed_back():
    """Gradients of 1 move by 1 a step, the first late one as well."""
    tx = acco_jax.dpu(optax.sgd(1.0), mesh=make_mesh(1), feedback=1.0, warmup_steps=2)
    params = {"w": jnp.zeros(2)}
    state, points = tx.init(params), []
    for _ in range(5):
        updates, state = tx.update({"w": jnp.ones((1, 2))}, state, params)
        params = optax.apply_updates(params, updates)
        points.append(float(params["w"][0]))
    assert points == [-1, -2, -2, -3, -4]  # the third call fills the pipeline


def test_endless_warmup_is_zero1():
    mesh = make_mesh(4)
    w, batches, counts = draw(4)
    inner = optax.adamw(LEARNING_RATE)
    dpu = run(
        acco_jax.dpu(inner, mesh=mesh, warmup_steps=99), "fused", w, batches, counts
    )
    zero1 = run(acco_jax.zero1(inner, mesh=mesh), "fused", w, batches, counts)
    np.testing.assert_array_equal(dpu, zero1)


def test_an_update_without_weight_leaves_theta():
    mesh = make_mesh(2)
    w, batches, counts = draw(2)
    counts[3] = np.zeros(2, int)
    for method in (acco_jax.dpu, acco_jax.wp):
        points = run(
            method(optax.sgd(0.1, 0.9), mesh=mesh), "plain", w, batches, counts
        )
        # the empty update is communicated by the next one, which moves nothing
        np.testing.assert_allclose(points[4][0], points[3][1], rtol=1e-15)
        np.testing.assert_array_equal(points[4][1], points[3][1])
        assert np.any(points[5][1] != points[4][1])
