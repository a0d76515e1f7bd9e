"""Counts that are found while a half-round runs, and repeated from their log."""

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import acco_jax
from tests.reference import make_mesh

WORKERS, MINIMUM, MAXIMUM, ROWS, WIDTH, HALF_ROUNDS = 2, 2, 5, 2, 8, 6


def loss_fn(params, microbatch, rng):
    return jnp.mean(jnp.tanh(microbatch @ params["w"]) ** 2)


ADAPTIVE = acco_jax.Adaptive(MINIMUM, MAXIMUM)


def make_step(microbatches, **options):
    mesh = make_mesh(WORKERS)
    tx = options.pop("tx", None) or acco_jax.acco(optax.adamw(1e-2), mesh=mesh)
    step = acco_jax.make_train_step(loss_fn, tx, microbatches=microbatches, **options)
    return step, tx


def repeated(log):
    return acco_jax.Replay(log, MAXIMUM)


def run(step, tx, counts=None):
    """Parameters and counts of every half-round."""
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(WIDTH, WIDTH)), jnp.float32)}
    state, points, found = tx.init(params), [], []
    for half_round in range(HALF_ROUNDS):
        batch = rng.normal(size=(WORKERS * MAXIMUM * ROWS, WIDTH)).astype(np.float32)
        given = None if counts is None else counts[half_round]
        params, state, metrics = step(params, state, batch, given)
        points.append(np.asarray(params["w"]))
        found.append(np.asarray(metrics["counts"]).tolist())
        assert float(metrics["weight"]) == sum(found[-1])
    return points, found


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """A run that found its counts, and their log."""
    step, tx = make_step(ADAPTIVE)
    points, counts = run(step, tx)
    log = tmp_path_factory.mktemp("adaptive") / "counts.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in counts))
    return points, counts, log


def test_counts_keep_their_bounds(logged):
    _, counts, _ = logged
    assert all(MINIMUM <= c <= MAXIMUM for row in counts for c in row)


def test_a_logged_run_is_repeated_to_the_bit(logged):
    points, counts, log = logged
    step, tx = make_step(repeated(log))
    again, found = run(step, tx)
    assert found == counts
    np.testing.assert_array_equal(again, points)


def test_counts_may_be_given_and_differ_between_workers():
    given = [[1, 4], [0, 3], [5, 5], [2, 0], [3, 1], [4, 2]]
    adaptive, found = run(*make_step(ADAPTIVE), counts=given)
    assert found == given
    fixed, _ = run(*make_step(MAXIMUM, form="fused"), counts=given)
    np.testing.assert_allclose(adaptive, fixed, rtol=2e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("delay", "expected"), [(1.0, MAXIMUM), (0.0, MINIMUM)])
def test_slow_communication_is_filled_and_fast_is_not_waited_for(
    monkeypatch, delay, expected
):
    step, tx = make_step(ADAPTIVE)
    run(step, tx)  # compile first
    communicate, add = step._communicate, step._add

    def slow_communication(*args):
        time.sleep(delay)
        return communicate(*args)

    def slow_computation(*args):
        time.sleep(0.0 if delay else 0.5)
        return add(*args)

    monkeypatch.setattr(step, "_communicate", slow_communication)
    monkeypatch.setattr(step, "_add", slow_computation)
    _, counts = run(step, tx)
    assert counts == [[expected] * WORKERS] * HALF_ROUNDS


def test_what_cannot_adapt_is_refused(tmp_path):
    mesh = make_mesh(WORKERS)
    zero1 = acco_jax.zero1(optax.sgd(0.1), mesh=mesh)
    for options, words in (
        ({"tx": zero1}, "synchronous step has no time to fill"),
        ({"form": "fused"}, "form='split'"),
    ):
        with pytest.raises(ValueError, match=words):
            make_step(ADAPTIVE, **options)
    for bounds in ((0, 4), (4, 2)):
        with pytest.raises(ValueError, match="smallest count"):
            acco_jax.Adaptive(*bounds)
    with pytest.raises(ValueError, match=r"Adaptive\(least, most\), Balanced"):
        make_step("dynamic")
    with pytest.raises(ValueError, match="no log of counts"):
        make_step(repeated(tmp_path / "missing"))
    bad = tmp_path / "bad.jsonl"
    bad.write_text("[1, 2]\n{}\n")
    with pytest.raises(ValueError, match="line 2"):
        make_step(repeated(bad))
    short = tmp_path / "short.jsonl"
    short.write_text("[2, 2]\n")
    with pytest.raises(ValueError, match="1 half-rounds"):
        run(*make_step(repeated(short)))


@pytest.mark.parametrize("row", [[1, 2, 3], [MAXIMUM + 1, 0], [-1, 1]])
def test_a_log_of_another_run_is_refused_before_it_starts(tmp_path, row):
    log = tmp_path / "counts.jsonl"
    log.write_text(f"[1, 2]\n{row}\n")
    with pytest.raises(ValueError, match=r"line 2 of .* one count from 0 to 5, the"):
        make_step(repeated(log))


@pytest.mark.parametrize("counts", [None, [1, 2]])
def test_compiled_ahead_is_not_compiled_again(counts, caplog):
    step, tx = make_step(ADAPTIVE)
    params = {"w": jnp.ones((WIDTH, WIDTH))}
    state = tx.init(params)
    params = jax.device_put(params, state.layout.params_shardings)
    batch = np.ones((WORKERS * MAXIMUM * ROWS, WIDTH), np.float32)
    step.compile(params, state, batch, counts)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        step(params, state, batch, counts)
    ours = ("_zeros", "_one_more", "close", "exchanged")
    done = [m for m in caplog.messages if "Finished XLA compilation" in m]
    assert not [m for m in done if any(name in m for name in ours)]


def test_compiled_once():
    jax.clear_caches()  # steps share the programs of a function: count none but these
    step, tx = make_step(ADAPTIVE)
    run(step, tx)
    assert step._add._cache_size() == 1
    (programs,) = step._programs.values()
    assert programs.communicate._cache_size() == 1
