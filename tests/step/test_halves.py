"""Unequal halves: the counts of each half-round, and what they do to stability."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import acco_jax
from acco_jax.step.halves import Turns
from tests.reference import Unsharded, make_mesh

pytestmark = pytest.mark.usefixtures("x64")
N, ROWS, WIDTH = 4, 2, 6
HALVES = acco_jax.Halves(1, 3)


def loss_fn(params, microbatch, rng):
    return jnp.mean(jnp.tanh(microbatch @ params["w"]) ** 2)


def batches(number, most):
    draw, shape = np.random.default_rng(0), (N * most * ROWS, WIDTH)
    return [draw.normal(size=shape) for _ in range(number)]


def noisy(params, microbatch, rng):
    return loss_fn(params, microbatch * jax.random.bernoulli(rng, 0.7, (WIDTH,)), rng)


def make(halves, form, name="acco", loss_fn=loss_fn):
    tx = getattr(acco_jax, name)(optax.adamw(1e-2), mesh=make_mesh(N))
    step = acco_jax.make_train_step(loss_fn, tx, microbatches=halves, form=form)
    params = {"w": jnp.ones((WIDTH, WIDTH), jnp.float64) / 8}
    return step, acco_jax.start(tx, params)


def test_other_halves_fit_the_batch():
    step, (params, state) = make(acco_jax.Halves(1, 2), "fused")
    with pytest.raises(ValueError, match="computes 3 microbatches, but the step was"):
        step.alternate(HALVES)
    step.alternate(acco_jax.Halves(2, 1))
    for counts in ([1] * N, [2] * N):
        params, state, metrics = step(params, state, batches(1, 2)[0])
        assert metrics["counts"].tolist() == counts


def test_halves_replace_measured_counts():
    step, (params, state) = make(acco_jax.Balanced(4, 2), "fused")
    step.alternate(acco_jax.Halves(1, 2))
    for counts in ([2] * N, [1] * N):
        params, state, metrics = step(params, state, batches(1, 2)[0])
        assert metrics["counts"].tolist() == counts


@pytest.mark.parametrize("before", [1, 2])
def test_halves_replace_measured_counts_in_the_middle(before):
    """A step of measured counts has counted its own calls, not the state's."""
    first, (params, state) = make(HALVES, "fused")
    for batch in batches(before, 3):
        params, state, _ = first(params, state, batch)
    step, _ = make(acco_jax.Balanced(4, 3), "fused")
    params, state, _ = step(params, state, batches(1, 3)[0])
    step.alternate(HALVES)
    for call in (before + 1, before + 2):
        params, state, metrics = step(params, state, batches(1, 3)[0])
        assert metrics["counts"].tolist() == [1 if call % 2 else 3] * N


def test_counts_may_be_of_numpy():
    of = np.int64
    assert acco_jax.Halves(of(1), of(3)) == HALVES
    assert acco_jax.Halves(np.array([1, 2]), 3) == acco_jax.Halves([1, 2], 3)
    assert acco_jax.Adaptive(of(1), of(4)) == acco_jax.Adaptive(1, 4)
    for wrong in (1.0, True, np.float32(1), "1", -1):
        with pytest.raises(ValueError, match="give an integer"):
            acco_jax.Halves(wrong, 3)


@pytest.mark.parametrize("form", ["fused", "split"])
def test_half_rounds_compute_their_own_number(form):
    """The points are those of an unsharded loop over the same microbatches."""
    step, (params, state) = make(HALVES, form)
    calls, start = batches(7, 3), jax.device_get(params)
    found, counts = [], []
    for batch in calls:
        params, state, metrics = step(params, state, batch)
        found.append(jax.device_get(params)["w"])
        counts.append(metrics["counts"].tolist())
    assert counts == [[3] * N, [1] * N] * 3 + [[3] * N]

    gradient = jax.jit(jax.grad(lambda p, x: loss_fn(p, x, None)))
    here, gradients, weights = start, [], []
    for number, batch in enumerate(calls):
        count = counts[number][0]
        rows = batch.reshape(N, 3, ROWS, WIDTH)[:, :count]
        each = [[gradient(here, x)["w"] for x in worker] for worker in rows]
        gradients.append({"w": np.sum(np.asarray(each), axis=1)})
        weights.append([count] * N)
        points = Unsharded(optax.adamw(1e-2)).acco(start, gradients, weights)
        here = points[-1][0]
        np.testing.assert_allclose(found[number], here["w"], rtol=0, atol=1e-9)


def test_two_threads_compute_a_half_in_one_program():
    """As equal halves are, and not in a program for each microbatch."""
    step, begun = make(HALVES, "split")
    equal, begun_equal = make(2, "split")
    programs = len(step.lowered(*begun, batches(1, 3)[0]))
    assert programs == len(equal.lowered(*begun_equal, batches(1, 2)[0]))


def test_a_larger_second_half_is_stable_where_equal_ones_are_not():
    """kappa h is 2.5: e' = -kappa h (1 - f) e, and heavy ball is stable up to 3.8."""
    beta, kappa = 0.9, 2.5  # of curvature 1
    rate = kappa / (1 - beta)
    inner = optax.chain(optax.ema(beta, debias=False), optax.sgd(rate))
    noise = np.random.default_rng(0).normal(scale=1e-3, size=(401, 4, 3))

    def quadratic(params, microbatch, rng):
        return 0.5 * jnp.sum((params - microbatch.mean(0)) ** 2)

    def ends(microbatches, most, name="acco"):
        tx = getattr(acco_jax, name)(inner, mesh=make_mesh(1))
        step = acco_jax.make_train_step(quadratic, tx, microbatches=microbatches)
        params, state = acco_jax.start(tx, jnp.ones(3, jnp.float64))
        for batch in noise[: tx.calls(200)]:
            params, state, _ = step(params, state, batch[:most])
        return float(jnp.abs(acco_jax.committed_params(state, params)).max())

    assert ends(4, 4, "zero1") < 0.1
    assert ends(2, 2) > 1e6
    assert ends(HALVES, 3) < 0.1


@pytest.mark.parametrize(
    ("first", "overlaps"), [(1, True), ([1, 0, 1, 1], True), (1, False)]
)
def test_a_single_microbatch_is_what_its_count_would_compute(
    monkeypatch, first, overlaps
):
    """Where calls overlap its program is another; rows and random numbers are not."""
    monkeypatch.setattr(acco_jax.TrainStep, "overlaps", overlaps)
    rng, halves = jax.random.key(3), acco_jax.Halves(first, 3)
    turns = Turns(halves, N)
    step, held = make(halves, "fused", loss_fn=noisy)
    other, same = make(3, "fused", loss_fn=noisy)
    for number, batch in enumerate(batches(5, 3)):
        key, counts = jax.random.fold_in(rng, number), np.int32(turns.line(number))
        *held, found = step(*held, batch, rng=key)
        *same, asked = other(*same, batch, counts=counts, rng=key)
        chex.assert_trees_all_close((held, found), (same, asked), rtol=0, atol=1e-12)
    sizes = [program._cache_size() for program in step._programs.values()]
    assert sizes == [1 + overlaps]  # of one microbatch, and of any number


@pytest.mark.parametrize("form", ["fused", "split"])
def test_the_state_knows_which_half_comes_next(form):
    """A step that is built anew for a restored state computes that half."""
    _, (params, state) = make(HALVES, form)
    for batch, expected in zip(batches(4, 3), [3, 1, 3, 1], strict=True):
        step, _ = make(HALVES, form)
        params, state, metrics = step(params, state, batch)
        assert metrics["counts"].tolist() == [expected] * N


@pytest.mark.parametrize("form", ["fused", "split"])
def test_both_halves_are_compiled_ahead(form, caplog):
    step, held = make(HALVES, form)
    calls = batches(3, 3)
    step.compile(*held, calls[0])
    with jax.log_compiles(), caplog.at_level("WARNING"):
        for batch in calls:
            *held, _ = step(*held, batch)
    done = [m for m in caplog.messages if "Finished XLA compilation" in m]
    ours = "run_call", "computed", "exchanged"
    assert not [m for m in done if any(name in m for name in ours)]


def test_counts_may_be_of_each_worker():
    halves = acco_jax.Halves([1, 0, 1, 1], [2, 4, 3, 3])
    assert halves.most == 4
    turns = Turns(halves, 4)
    assert [turns.line(k) for k in range(3)] == [
        [2, 4, 3, 3], [1, 0, 1, 1], [2, 4, 3, 3]]  # fmt: skip
    with pytest.raises(ValueError, match="has 4 counts: give one for each of the 2"):
        Turns(halves, 2)


@pytest.mark.parametrize("parts", [(0, 3), (1, 0), (-1, 2), (1.0, 2), ([0, 0], 1)])
def test_what_is_no_half_is_refused(parts):
    with pytest.raises(ValueError, match="is not a number of microbatches"):
        acco_jax.Halves(*parts)


def test_it_is_for_two_half_rounds():
    with pytest.raises(ValueError, match="is for acco, whose steps have two"):
        make(HALVES, "auto", "zero1")
