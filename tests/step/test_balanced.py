"""Counts that follow the workers' speed: the policy, the clock, and the fused step."""

import itertools
import json
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import acco_jax
from acco_jax.step import balance
from acco_jax.step.balance import Balancer, dealt, filled, pace
from acco_jax.step.probe import Probe
from tests.reference import make_mesh

# ---- the policy: seconds of a microbatch -> counts

SECONDS = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=5)


@st.composite
def cases(draw):
    """(seconds, total, floor, most) with counts that fit."""
    seconds = draw(SECONDS)
    n, floor = len(seconds), draw(st.integers(0, 2))
    most = draw(st.integers(max(floor, 1), 6))
    return seconds, draw(st.integers(n * floor, n * most)), floor, most


@given(cases())
def test_no_counts_of_this_sum_end_sooner(case):
    seconds, total, floor, most = case
    counts = dealt(*case)
    assert sum(counts) == total
    assert all(floor <= c <= most for c in counts)
    every = itertools.product(range(floor, most + 1), repeat=len(seconds))
    ends = [end(c, seconds) for c in every if sum(c) == total]
    assert end(counts, seconds) == min(ends)


def end(counts, seconds):
    return max(c * s for c, s in zip(counts, seconds, strict=True))


@given(SECONDS, st.integers(1, 40), st.integers(8, 16))
def test_a_growing_batch_waits_for_nobody(seconds, total, most):
    each = -(-total // len(seconds))
    assume(each <= most)
    counts = filled(seconds, total, most)
    assert sum(counts) >= total and max(counts) <= most
    assert end(counts, seconds) <= each * max(seconds) * (1 + 1e-6)
    for count, s in zip(counts, seconds, strict=True):  # nor could one do more
        assert count == most or (count + 1) * s > each * max(seconds) * (1 - 1e-6)


@given(cases(), st.data(), st.booleans())
def test_counts_stay_unless_it_is_worth_it(case, data, grows):
    seconds, total, floor, most = case
    assume(max(total, 1) <= most * len(seconds) and total > 0)
    bounds = acco_jax.Balanced(total, most, floor, grows, gain=0.1)
    balancer = Balancer(bounds, len(seconds))
    numbers = st.lists(st.floats(0.01, 10.0), min_size=len(seconds),
                       max_size=len(seconds))  # fmt: skip
    for _ in range(4):
        before = balancer.counts
        balancer.take(data.draw(numbers), 0.0, 1.0, 1.0)
        known, after = balancer.seconds, balancer.counts
        assert sum(after) == total or grows
        assert max(floor, 0) <= min(after) and max(after) <= most
        gain = pace(after, known) / pace(before, known)
        assert before == after or gain > 1.1
        best = filled(known, total, most) if grows else dealt(known, total, floor, most)
        assert pace(best, known) <= 1.1 * pace(after, known) * (1 + 1e-9)


@pytest.mark.parametrize(("total", "single"), [(3, True), (4, True), (5, False)])
@pytest.mark.parametrize("grows", [False, True])
def test_a_program_for_one_microbatch_is_expected_where_counts_have_at_most_one(
    total, single, grows
):
    balancer = Balancer(acco_jax.Balanced(total, 4, grows=grows), 4)
    assert balancer.may_be_single is single
    assert (max(balancer.counts) == 1) is single


def test_small_differences_move_nothing():
    balancer, draw = Balancer(acco_jax.Balanced(64, 32), 4), np.random.default_rng(0)
    for _ in range(50):
        balancer.take(draw.uniform(0.95, 1.05, 4), 0.0, 1.0, 1.0)
        assert balancer.counts == [16] * 4


@pytest.mark.parametrize("seed", range(5))
def test_a_clock_that_is_a_quarter_off_finds_the_speeds(seed):
    truth, draw = np.array([1.0, 1.0, 1.0, 4.0]), np.random.default_rng(seed)
    balancer = Balancer(acco_jax.Balanced(80, 60), 4)
    ideal, found = pace(dealt(truth, 80, 0, 60), truth), []
    for _ in range(40):
        balancer.take(truth * draw.uniform(0.75, 1.25, 4), 0.0, 1.0, 1.0)
        found.append(pace(balancer.counts, truth) / ideal)
    assert np.mean(found[8:]) > 0.88 and np.min(found[8:]) > 0.75


# ---- the clock: half-rounds and probes of workers whose speed changes


def simulate(bounds, speeds, calls):
    """The counts of each half-round, and the share of the time that probes took.

    speeds(half_round) -> seconds of a microbatch on every worker.
    """
    balancer = Balancer(bounds, len(speeds(0)))
    now = spent = probed = 0.0
    since, found = 0, []
    for h in range(calls):
        seconds = speeds(h)
        if not balancer.wait:
            each, began = (now - probed) / max(since, 1), now
            cost = max(s * max(1, balancer.duration // s) for s in seconds)
            now, spent = now + cost, spent + cost
            balancer.take(seconds, spent, began, each)
            since, probed = 0, now
        balancer.wait -= 1
        since += 1
        now += end(balancer.counts, seconds)
        found.append(balancer.counts)
    return found, spent / now


@pytest.mark.parametrize("n", [2, 4, 16])
@pytest.mark.parametrize("at", [100, 104, 109, 113])
def test_a_worker_that_slows_down_and_recovers_is_followed(n, at):
    """Within 20 half-rounds, and probes take at most a hundredth of the time."""

    def speeds(h):
        return [1.0] * (n - 1) + [4.0 if at <= h < at + 100 else 1.0]

    found, share = simulate(acco_jax.Balanced(20 * n, 80), speeds, 400)
    assert share <= 0.01 + 1e-3
    ideal = dealt(speeds(at), 20 * n, 0, 80)
    assert found[at - 1] == [20] * n
    good = [pace(c, speeds(at)) > 0.9 * pace(ideal, speeds(at)) for c in found]
    assert all(good[at + 20 : at + 100])
    assert all(pace(c, [1.0] * n) > 0.9 * n for c in found[at + 120 :])


def test_a_hiccup_is_not_followed():
    hiccup = 47

    def speeds(h):
        return [1.0, 1.0, 1.0, 10.0 if h <= hiccup < h + 10 else 1.0]

    found, _ = simulate(acco_jax.Balanced(400, 200), speeds, 100)
    assert found == [[100] * 4] * 100


def test_stragglers_are_named():
    balancer = Balancer(acco_jax.Balanced(64, 32), 4)
    assert balancer.stragglers == {}
    for _ in range(2):
        balancer.take([1.0, 1.1, 4.0, 1.4], 0.0, 1.0, 1.0)
    assert balancer.stragglers == {2: pytest.approx(4.0 / 1.25)}
    assert balancer.counts[2] == min(balancer.counts)


# ---- the step

N, HELD, ROWS, WIDTH = 4, 6, 2, 8


def loss_fn(params, microbatch, rng):
    if rng is not None:
        microbatch = microbatch * jax.random.bernoulli(rng, 0.9, microbatch.shape)
    return jnp.mean(jnp.tanh(microbatch @ params["w"]) ** 2)


def batches(number, per_call=1):
    draw = np.random.default_rng(0)
    shape = N * HELD * ROWS * per_call, WIDTH
    return [draw.normal(size=shape).astype(np.float32) for _ in range(number)]


def make(
    microbatches, name="acco", fn=loss_fn, axes=("data",), form="fused", **options
):
    sizes = (N,) if len(axes) == 1 else (2, N // 2)
    mesh = make_mesh(*sizes, names=axes)
    tx = getattr(acco_jax, name)(
        optax.adamw(1e-2), mesh=mesh, axis_name=axes, **options
    )
    step = acco_jax.make_train_step(fn, tx, microbatches=microbatches, form=form)
    params = {"w": jnp.ones((WIDTH, WIDTH), jnp.float32) / 8}
    return step, acco_jax.start(tx, params)


def told(monkeypatch, times):
    """Has every probe measure the next of these times, then the last again."""
    times = iter(times)
    last = []

    def seconds(probe, params, inputs, duration):
        last[:] = next(times, last)
        return list(last)

    take = balance.Balancer.take

    def every_time(balancer, *probe):
        take(balancer, *probe)
        balancer.wait = 1

    monkeypatch.setattr(balance.Balancer, "take", every_time)
    monkeypatch.setattr("acco_jax.step.probe.Probe.seconds", seconds)
    monkeypatch.setattr("acco_jax.step.probe.Probe.prepare", lambda *_: None)


def train(step, held, number, rng=None, **options):
    counts = []
    for batch in batches(number, **options):
        *held, metrics = step(*held, batch, rng=rng)
        counts.append(np.asarray(metrics["counts"]).tolist())
        assert counts[-1] == step.counts
    return jax.device_get(held[0]), counts


def test_the_step_follows_and_a_replay_is_the_run_to_the_bit(monkeypatch, tmp_path):
    told(monkeypatch, [[1e-6] * 4, [4e-6, *[1e-6] * 3]])
    step, held = make(acco_jax.Balanced(N * 4, HELD))
    rng = jax.random.key(1)
    points, counts = train(step, held, 6, rng)
    assert counts[0] == [4] * N and counts[-1] == [1, 5, 5, 5]
    assert step._programs[next(iter(step._programs))]._cache_size() == 1
    log = tmp_path / "counts.jsonl"
    log.write_text("[1]\n" + "".join(f"{json.dumps(row)}\n" for row in counts))
    again, held = make(acco_jax.Replay(log, HELD, first=1))
    repeated, found = train(again, held, 6, rng)
    assert found == counts
    np.testing.assert_array_equal(points["w"], repeated["w"])
    with pytest.raises(ValueError, match="7 half-rounds: it cannot be repeated"):
        train(again, make(1)[1], 1, rng)


def test_a_log_of_a_synchronous_method_is_of_balanced_counts(tmp_path):
    log = tmp_path / "counts.jsonl"
    log.write_text(f"{[1] * N}\n" * 3)
    again, held = make(acco_jax.Replay(log, HELD), "zero1", form="auto")
    assert again.form == "fused"
    assert train(again, held, 2, jax.random.key(1))[1] == [[1] * N] * 2


def test_counts_are_whole_numbers():
    with pytest.raises(ValueError, match=r"total=2\.0.*give whole numbers"):
        acco_jax.Balanced(total=2.0, most=2)


def test_a_key_may_lie_on_one_device():
    """The probe, too, takes what jax.random.key returns."""
    step, held = make(acco_jax.Balanced(N * 2, HELD), "zero1")
    rng = jax.random.key(1)
    args = step._placed(step._arguments(*held, batches(1)[0], rng=rng))
    step._prober(args.state).lower(args.params, args.inputs)


@pytest.mark.parametrize(
    ("name", "axes", "options"),
    [
        ("zero1", ("data",), {}),
        pytest.param("acco", ("host", "chip"), {}, marks=pytest.mark.slow),
        pytest.param("diloco", ("data",), {"local_steps": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_probe_sends_nothing_and_times_every_worker(name, axes, options):
    share = 0.5
    step, held = make(acco_jax.Balanced(N * 2, HELD, share=share), name, axes=axes,
                      **options)  # fmt: skip
    per_call = options.get("local_steps", 1)
    (batch,) = batches(1, per_call)
    args = step._placed(step._arguments(*held, batch))
    text = step._prober(args.state).lower(args.params, args.inputs).compile().as_text()
    called = r"(all-|reduce-scatter|collective)[a-z-]*\("
    assert "dot(" in text or "__onednn" in text or "custom-call" in text
    assert not re.search(called, text)
    train(step, held, 3, per_call=per_call)
    assert len(step.seconds) == N and min(step.seconds) > 0
    assert 0 < step.probing[0] < step.probing[1]


def test_a_probe_goes_on_while_there_is_time(monkeypatch):
    step, held = make(acco_jax.Balanced(N * 2, HELD))
    train(step, held, 1)
    probe, run, runs = step._prober(held[1]), Probe._run, []

    def slower(self, args):
        time.sleep(0.05)
        runs.append(run(self, args))
        return [x + 0.05 for x in runs[-1]]

    monkeypatch.setattr(Probe, "_run", slower)
    (batch,) = batches(1)
    _, held = make(acco_jax.Balanced(N * 2, HELD))
    args = step._placed(step._arguments(*held, batch))
    for duration, least, most in ((0.0, 1, 1), (0.07, 1, 1), (0.6, 2, 12)):
        runs.clear()
        seconds = probe.seconds(args.params, args.inputs, duration)
        assert least <= len(runs) <= most
        means = np.mean(runs, 0) + 0.05
        np.testing.assert_allclose(seconds, means, rtol=1e-12)


def test_a_worker_that_takes_longer_is_found():
    """Worker 2 sleeps in each microbatch; what it takes is measured, not told."""

    def slow(params, microbatch, rng):
        me = jax.lax.axis_index("data")

        def wait(x, me):
            time.sleep(0.12 if me == 2 else 0.05)
            return x

        x = jax.lax.stop_gradient(microbatch)
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        x = jax.pure_callback(wait, shape, x, me)
        return loss_fn(params, x, rng)

    step, held = make(acco_jax.Balanced(N * 2, HELD, share=0.9), fn=slow)
    _, counts = train(step, held, 2)
    assert list(step.stragglers) == [2], step.seconds
    assert counts[0][2] == 1 and sum(counts[0]) == N * 2


def test_compiled_ahead_is_not_compiled_again(caplog):
    step, held = make(acco_jax.Balanced(N * 2, HELD))
    (batch,) = batches(1)
    step.compile(*held, batch)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        step(*held, batch)
    done = [m for m in caplog.messages if "Finished XLA compilation" in m]
    assert not [m for m in done if "run_call" in m or "_timed" in m]


def test_counts_may_be_given():
    step, held = make(acco_jax.Balanced(N * 2, HELD))
    (batch,) = batches(1)
    *_, metrics = step(*held, batch, counts=[0, 6, 1, 2])
    assert metrics["counts"].tolist() == [0, 6, 1, 2] and metrics["weight"] == 9
    assert step.seconds == []


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        ((8, 2, 3), "floor from 0 to most"),
        ((8, 0), "at least 1"),
        ((8, 2, 0, False, 1.0), "share of the time between"),
        ((8, 2, 0, False, 0.1, -1.0), "a gain of"),
        ((9, 2), "4 workers compute from 1 to 8"),
        ((0, 2), "4 workers compute from 1 to 8"),
        ((7, 4, 2), "4 workers compute from 8 to 16"),
    ],
)
def test_bounds_that_cannot_be(bounds, said):
    with pytest.raises(ValueError, match=said):
        make(acco_jax.Balanced(*bounds))


def test_what_cannot_be_balanced_is_refused():
    tx = acco_jax.acco(optax.sgd(0.1), mesh=make_mesh(N))
    balanced = acco_jax.Balanced(N, 2)
    with pytest.raises(ValueError, match="needs form='fused'"):
        acco_jax.make_train_step(loss_fn, tx, microbatches=balanced, form="split")
    step, held = make(balanced)
    batch = np.ones((N * 2 * ROWS, WIDTH), np.float32)
    with pytest.raises(ValueError, match="inside jit or scan: give microbatches as a"):
        jax.jit(lambda *x: step(*x))(*held, batch)


@pytest.mark.parametrize("form", ["fused", "split"])
def test_a_failed_call_is_repeated_with_its_counts(form, tmp_path):
    log = tmp_path / "counts.jsonl"
    log.write_text("[2, 2]\n[1, 2]\n[2, 1]\n")
    tx = acco_jax.acco(optax.sgd(0.1), mesh=make_mesh(2))
    step = acco_jax.make_train_step(
        lambda p, x, rng: jnp.mean(x @ p),
        tx,
        microbatches=acco_jax.Replay(log, 2),
        form=form,
    )
    params, state = acco_jax.start(tx, jnp.ones(3))
    found = []
    for _ in range(3):
        with pytest.raises(TypeError, match="contracting dimensions"):
            step(params, state, np.ones((4, 2), np.float32))
        params, state, metrics = step(params, state, np.ones((4, 3), np.float32))
        found.append(metrics["counts"].tolist())
    assert found == [[2, 2], [1, 2], [2, 1]]
