"""A worker whose numbers are not finite counts as one without weight, everywhere."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import acco_jax
from tests.methods.local import problem
from tests.methods.local.test_rounds import diloco
from tests.reference import AUTO, EXPLICIT, Unsharded, make_mesh, parameters
from tests.stablehlo import KINDS, collectives

pytestmark = pytest.mark.usefixtures("x64")
SHAPES = {"b": (16,), "s": (), "v": (16, 3), "w": (5, 16)}
WORKERS, HELD, HALF_ROUNDS = 4, 2, 6
# (half-round, worker) -> what spoils its last microbatch: 0 makes NaN of the gradient
# alone, the others are in the loss as well
SPOILED = {(1, 2): 0.0, (2, 0): np.inf, (2, 3): np.nan}
SPOILED |= {(3, i): np.nan for i in range(WORKERS)}


def loss_fn(params, batch, rng):
    x, y, spoil = batch
    out = jnp.tanh(x @ params["w"] + params["b"]) @ params["v"]
    error = (out - y) ** 2
    total = error.sum() + jnp.sqrt(spoil * params["s"]).sum()
    return total, y.size, {"largest": jnp.max(error * spoil[:, None])}


def inner():
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def batch_of(half_round, workers=WORKERS, held=HELD):
    rng = np.random.default_rng(half_round)
    rows = workers * held * 2
    spoil = np.ones(rows)
    for (number, worker), value in SPOILED.items():
        if number == half_round and worker < workers:
            spoil[(worker + 1) * held * 2 - 1] = value
    return rng.normal(size=(rows, 5)), rng.normal(size=(rows, 3)), spoil


def dropped_in(half_round):
    return np.array([(half_round, i) in SPOILED for i in range(WORKERS)])


def worker_sums(theta, half_round, held):
    """Every worker's sum of gradients at theta, and of losses; bad ones are bad."""
    x, y, spoil = batch_of(half_round, held=held)
    value = jax.jit(jax.value_and_grad(lambda *a: loss_fn(*a, None)[0]))
    sums = []
    for i in range(WORKERS):
        rows = slice(i * held * 2, (i + 1) * held * 2)
        sums.append(value(theta, (x[rows], y[rows], spoil[rows])))
    losses, gradients = zip(*sums, strict=True)
    return jax.tree.map(lambda *g: np.stack(g), *gradients), np.array(losses)


def dpu(reference, theta, gradients, weights):
    """Points of SGD on the gradients of the half-round before."""
    theta, state = reference.start(theta)
    points, late = [], None
    for gradient, weight in zip(gradients, weights, strict=True):
        if late is not None and late[1] > 0:
            theta, state = reference.opt(theta, state, *late, {})
        late = reference.total(gradient, weight)
        points.append((theta, theta))
    return points


@functools.cache
def expected(method, held):
    """(parameters, loss, weight) after each half-round, without the dropped workers."""
    reference, start = Unsharded(inner()), parameters(SHAPES)
    follow = getattr(reference, method, functools.partial(dpu, reference))
    gradients, weights, at, found = [], [], start, []
    for h in range(HALF_ROUNDS):
        gradient, losses = worker_sums(at, h, held)
        weights.append(np.where(dropped_in(h), 0.0, held * 2 * 3))
        gradients.append(gradient)
        at = follow(start, gradients, weights)[-1][0]
        weight = weights[-1].sum()
        total = losses[~dropped_in(h)].sum()
        found.append((at, total / weight if weight else np.nan, weight))
    return found


@pytest.mark.fast("acco-fused-2", "dpu-split-2")
@pytest.mark.parametrize(
    ("method", "form", "held"),
    [
        ("acco", "fused", 2),
        ("acco", "split", 2),
        ("acco", "adaptive", 2),
        ("acco", "fused", 1),
        ("zero1", "fused", 2),
        ("zero1", "split", 1),
        ("dpu", "split", 2),
        ("dpu", "fused", 1),
    ],
)
def test_it_is_as_if_the_worker_had_no_weight(method, form, held):
    tx = getattr(acco_jax, method)(inner(), mesh=make_mesh(WORKERS))
    step = acco_jax.make_train_step(
        loss_fn, tx, drop_nonfinite=True,
        microbatches=acco_jax.Adaptive(held, held) if form == "adaptive" else held,
        form="split" if form == "adaptive" else form,
    )  # fmt: skip
    params, state = acco_jax.start(tx, jax.tree.map(jnp.array, parameters(SHAPES)))
    for h, (theta, loss, weight) in enumerate(expected(method, held)):
        params, state, metrics = step(params, state, batch_of(h, held=held))
        for k in SHAPES:
            np.testing.assert_allclose(params[k], theta[k], rtol=0, atol=1e-12)
        np.testing.assert_array_equal(metrics["dropped"], dropped_in(h))
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-12)
        assert metrics["weight"] == weight
        assert np.isfinite(metrics["aux"]["largest"])
        assert np.isfinite(metrics["grad_norm"])
    assert np.any(theta["w"] != parameters(SHAPES)["w"])


def test_local_gradients_of_such_a_worker_are_zeros():
    make = functools.partial(
        acco_jax.local_gradients, loss_fn, mesh=make_mesh(WORKERS), microbatches=HELD
    )
    params, batch = parameters(SHAPES), batch_of(2)
    bad, sound = make()(params, batch), make(drop_nonfinite=True)(params, batch)
    kept = ~dropped_in(2)
    for g, b in zip(jax.tree.leaves(sound[0]), jax.tree.leaves(bad[0]), strict=True):
        np.testing.assert_allclose(g[kept], b[kept], rtol=1e-14)
        assert not np.any(g[~kept])
    np.testing.assert_array_equal(sound[1], np.where(kept, HELD * 2 * 3, 0))
    assert np.isfinite(sound[2]["largest"]) and not np.isfinite(bad[2]["largest"])


STEPS, ROUNDS = 3, 3


@functools.cache
def spoiled_rounds(workers):
    """(theta, batches, the same without the bad steps, counts, dropped per call)."""
    theta, batches, counts = problem.draw(workers, STEPS, HELD, ROUNDS)
    counts, rows = [np.full(workers, HELD)] * ROUNDS, HELD * problem.ROWS
    bad, spared, dropped = [], [], np.zeros((ROUNDS, workers), int)
    for call, (x, y, _) in enumerate(batches):
        used, sound = np.ones(len(x)), np.ones(len(x))
        x = x.copy()
        for worker, h in {0: [(1, 1)], 1: [(0, 0), (1, 2), (1, 0)]}.get(call, []):
            first = (worker * STEPS + h) * rows
            x[first + rows - 1] = np.nan
            sound[first : first + rows] = 0
            dropped[call, worker] += 1
        bad.append((x, y, used))
        spared.append((np.nan_to_num(x), y, sound))
    return theta, bad, spared, counts, dropped


@pytest.mark.parametrize("form", ["fused", "split"])
def test_a_bad_inner_step_of_diloco_is_none(form):
    theta, bad, spared, counts, dropped = spoiled_rounds(2)
    tx = acco_jax.diloco(
        problem.adamw(), mesh=make_mesh(2), local_steps=STEPS,
        outer_learning_rate=0.6, outer_momentum=0.8,
    )  # fmt: skip
    step = acco_jax.make_train_step(
        problem.loss_fn, tx, microbatches=HELD, form=form, drop_nonfinite=True
    )
    params, state = acco_jax.start(tx, problem.device(theta))
    points = diloco(theta, spared, counts, 2)
    for call, point in enumerate(points):
        params, state, metrics = step(params, state, bad[call])
        problem.assert_close(acco_jax.committed_params(state, params), point)
        np.testing.assert_array_equal(metrics["dropped"], dropped[call])
        assert np.isfinite(metrics["loss"])


@pytest.mark.parametrize("types", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_devices_that_share_a_worker_agree(types):
    """Only one device of the model axis holds the entry whose gradient is NaN."""
    mesh = make_mesh(2, 2, types=types)
    specs = {"w": P(None, "model")}
    sharding = jax.sharding.NamedSharding(mesh, specs["w"])
    params = {"w": jax.device_put(np.ones((4, 8)), sharding)}

    def loss_fn(params, batch, rng):
        x, spoil = batch
        w = params["w"]
        bent = jnp.sqrt(w * jnp.where(jnp.arange(8) == 7, spoil.min(), 1.0))
        return ((x @ w) ** 2).mean() + bent.sum()

    tx = acco_jax.zero1(optax.sgd(1e-2), mesh=mesh, param_specs=specs)
    step = acco_jax.make_train_step(loss_fn, tx, microbatches=1, drop_nonfinite=True)
    x = np.random.default_rng(0).normal(size=(4, 4))
    params, state = acco_jax.start(tx, params)
    params, state, metrics = step(params, state, (x, np.array([1.0, 1, 1, 0])))
    np.testing.assert_array_equal(metrics["dropped"], [0, 1])
    half = jax.grad(lambda w: loss_fn({"w": w}, (x[:2], np.ones(2)), None))(
        np.ones((4, 8))
    )
    np.testing.assert_allclose(params["w"], 1 - 1e-2 * half, atol=1e-12)


def test_what_the_wire_cannot_hold_is_not_finite():
    tx = acco_jax.zero1(optax.sgd(1.0), mesh=make_mesh(2), comm_dtype=jnp.float16)
    step = acco_jax.make_train_step(
        lambda params, x, rng: (params["w"] * x).mean(), tx,
        microbatches=1, drop_nonfinite=True,
    )  # fmt: skip
    params, state = acco_jax.start(tx, {"w": jnp.zeros(4, jnp.float32)})
    x = np.float32([[1] * 4, [1e6] * 4])
    params, state, metrics = step(params, state, x)
    np.testing.assert_array_equal(metrics["dropped"], [0, 1])
    np.testing.assert_array_equal(params["w"], [-0.25] * 4)


def test_fused_zero1_refuses():
    tx = acco_jax.fused_zero1(inner(), mesh=make_mesh(2))
    with pytest.raises(ValueError, match="before they are reduced, but tx") as error:
        acco_jax.make_train_step(loss_fn, tx, microbatches=1, drop_nonfinite=True)
    assert "\n" not in str(error.value)


@functools.cache
def lowered(method, drop):
    options = {} if drop is None else {"drop_nonfinite": drop}
    tx = getattr(acco_jax, method)(inner(), mesh=make_mesh(WORKERS))
    made = acco_jax.make_train_step(
        loss_fn, tx, microbatches=HELD, form="fused", **options
    )
    params, state = acco_jax.start(tx, parameters(SHAPES))
    held = HELD * tx.steps_per_call
    return made.lower(params, state, batch_of(0, held=held))


def executed(program):
    names = "|".join(kind.replace("_", "-") for kind in KINDS)
    return re.findall(rf" ({names})(?:-start)?\(", program.compile().as_text())


@pytest.mark.fast("acco")
@pytest.mark.parametrize("method", ["acco", "zero1", "diloco"])
def test_it_sends_nothing_more_and_off_costs_nothing(method):
    off, on = lowered(method, False), lowered(method, True)
    assert off.as_text() == lowered(method, None).as_text()
    assert "is_finite" not in off.as_text() and "is_finite" in on.as_text()
    assert collectives(on, few=0) == collectives(off, few=0)
    assert "reduce-scatter" in executed(on)
    assert Counter(executed(on)) <= Counter(executed(off))
