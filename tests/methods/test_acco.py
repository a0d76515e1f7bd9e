"""The recurrence, against the authors' trajectories, and what happens at each half."""

import functools
import json
import math
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import acco_jax
from tests.reference import AUTO, EXPLICIT, Unsharded, draw, make_mesh, parameters

pytestmark = pytest.mark.usefixtures("x64")
RECORDED = Path(__file__).parents[1] / "recorded"
CASES = json.loads((RECORDED / "acco_small.json").read_text())
KINDS = {"auto": AUTO, "explicit": EXPLICIT}


def unflatten(flat, shapes):
    ends = np.cumsum([math.prod(s) for s in shapes])
    parts = np.split(np.asarray(flat), ends[:-1])
    return [p.reshape(s) for p, s in zip(parts, shapes, strict=True)]


def flatten(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def mlp_loss(params, microbatch, rng):
    del rng
    w1, b1, w2, b2 = params
    x, y = (part[0] for part in microbatch)  # one "example" is a whole microbatch
    return jnp.mean((jnp.tanh(x @ w1 + b1) @ w2 + b2 - y) ** 2)


def mlp_gradient(params, x, y):
    """The same by hand, in NumPy."""
    w1, b1, w2, b2 = params
    hidden = np.tanh(x @ w1 + b1)
    error = 2 * (hidden @ w2 + b2 - y) / y.size
    back = (error @ w2.T) * (1 - hidden**2)
    return [x.T @ back, back.sum(0), hidden.T @ error, error.sum(0)]


class NumpyAdamW:
    def __init__(self, lr, b1, b2, eps, wd):
        self.hp = lr, b1, b2, eps, wd

    def init(self, theta):
        return 0, [np.zeros_like(p) for p in theta], [np.zeros_like(p) for p in theta]

    def __call__(self, theta, state, mean):
        lr, b1, b2, eps, wd = self.hp
        t, m, v = state[0] + 1, [], []
        for mi, vi, g in zip(*state[1:], mean, strict=True):
            m.append(b1 * mi + (1 - b1) * g)
            v.append(b2 * vi + (1 - b2) * g * g)
        new = [
            p - lr * (mi / (1 - b1**t) / (np.sqrt(vi / (1 - b2**t)) + eps) + wd * p)
            for p, mi, vi in zip(theta, m, v, strict=True)
        ]
        return new, (t, m, v)


class NumpySgd:
    def __init__(self, lr, momentum):
        self.lr, self.momentum = lr, momentum

    def init(self, theta):
        return [np.zeros_like(p) for p in theta]

    def __call__(self, theta, state, mean):
        state = [self.momentum * s + g for s, g in zip(state, mean, strict=True)]
        return [p - self.lr * s for p, s in zip(theta, state, strict=True)], state


def numpy_acco(opt, theta, data):
    """ACCO.md's recurrence: parameters after each half-round but the priming one."""
    state, points = opt.init(theta), []

    def gradient(at, half_round):  # summed over workers and microbatches
        total = [np.zeros_like(p) for p in at]
        weight = 0
        for worker in half_round:
            for x, y in worker:
                total = [
                    t + g for t, g in zip(total, mlp_gradient(at, x, y), strict=True)
                ]
                weight += 1
        return total, weight

    G, W = gradient(theta, data[0])  # priming
    for t in range((len(data) - 1) // 2):
        tilde, _ = opt(theta, state, [g / W for g in G])
        points.append(tilde)
        G1, W1 = gradient(theta, data[2 * t + 1])  # meanwhile, at theta(t)
        mean = [(a + b) / (W + W1) for a, b in zip(G, G1, strict=True)]
        G, W = gradient(tilde, data[2 * t + 2])
        theta, state = opt(theta, state, mean)
        points.append(theta)
    return points


@functools.cache
def mlp_run(n, N, kind, opt, hp):
    """Functions of the public contract, compiled once per case of that shape."""
    hp = dict(hp)
    if opt == "adamw":
        inner = optax.adamw(
            hp["lr"], hp["b1"], hp["b2"], hp["eps"], weight_decay=hp["wd"]
        )
    else:
        inner = optax.sgd(hp["lr"], momentum=hp.get("momentum"))
    mesh = make_mesh(n, types=KINDS[kind])
    tx = acco_jax.acco(inner, mesh=mesh, comm_dtype=jnp.float64)
    gradients = acco_jax.local_gradients(mlp_loss, mesh=mesh, microbatches=N)
    return tx, gradients, jax.jit(tx.update)


def run_contract(run, theta, data, N):
    tx, gradients, update = run
    n = len(data[0])
    params = [jnp.asarray(p) for p in theta]
    state = tx.init(params)
    points, x0, y0 = [], *(np.asarray(a) for a in data[0][0][0])
    for half_round in data:
        xs, ys = (
            np.full((n * N, *x0.shape), np.nan),
            np.full((n * N, *y0.shape), np.nan),
        )
        for w, worker in enumerate(half_round):
            for k, (x, y) in enumerate(worker):
                xs[w * N + k], ys[w * N + k] = x, y
        counts = [len(worker) for worker in half_round]
        grads, weight, _ = gradients(params, (xs, ys), counts=counts)
        updates, state = update(grads, state, params, weight=weight)
        params = optax.apply_updates(params, updates)
        points.append([np.asarray(p) for p in params])
    return points[1:]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_reproduces_the_authors_trajectories(case, kind):
    case = CASES[case]
    N = max(map(max, case["counts"]))
    run = mlp_run(case["W"], N, kind, case["opt"], tuple(case["hp"].items()))
    theta = unflatten(case["theta0"], case["shapes"])
    points = run_contract(run, theta, case["data"], N)
    assert len(points) == len(case["traj"])
    for point, expected in zip(points, case["traj"], strict=True):
        np.testing.assert_allclose(flatten(point), expected, rtol=0, atol=1e-8)


ADAMW = (("lr", 0.03), ("b1", 0.9), ("b2", 0.95), ("eps", 1e-8), ("wd", 0.1))
SGD = (("lr", 0.05), ("momentum", 0.9))


@pytest.mark.fast("adamw-hp0-4", "sgd-hp1-1")
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize(("opt", "hp"), [("adamw", ADAMW), ("sgd", SGD)])
def test_more_cases_of_the_same_kind(n, opt, hp):
    N, shapes = 3, [(4, 6), (6,), (6, 3), (3,)]
    run = mlp_run(n, N, "auto", opt, hp)
    for seed in range(2):
        rng = np.random.default_rng(seed)
        theta = [rng.normal(size=s) for s in shapes]
        data = [
            [
                [
                    (rng.normal(size=(5, 4)), rng.normal(size=(5, 3)))
                    # somebody always works, others may idle
                    for _ in range(rng.integers(1 if w == 0 else 0, N + 1))
                ]
                for w in range(n)
            ]
            for _ in range(9)
        ]
        reference = NumpyAdamW if opt == "adamw" else NumpySgd
        expected = numpy_acco(reference(**dict(hp)), theta, data)
        for a, b in zip(run_contract(run, theta, data, N), expected, strict=True):
            np.testing.assert_allclose(flatten(a), flatten(b), rtol=0, atol=1e-10)


# --------------------------------------------------------------------------- estimates


@pytest.mark.parametrize("factor", [0.5, 1.3])
def test_an_estimate_goes_as_much_further(factor):
    inner, shapes = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)), [
        (6, 4), (5,)]  # fmt: skip
    theta, mesh = parameters(shapes), make_mesh(2)
    tx = acco_jax.acco(inner, mesh=mesh, extrapolation=factor)
    gradients, counts = (
        draw(shapes, 2, 7, seed=3),
        [[1, 2]] * 3 + [[0, 0]] + [[1, 1]] * 3,
    )
    expected = Unsharded(inner).acco(theta, gradients, counts, extrapolation=factor)
    plain = Unsharded(inner).acco(theta, gradients, counts)
    params, state, update = theta, tx.init(theta), jax.jit(tx.update)
    for g, w, (here, committed) in zip(gradients, counts, expected, strict=True):
        updates, state = update(g, state, params, weight=np.asarray(w))
        params = optax.apply_updates(params, updates)
        chex.assert_trees_all_close(params, here, rtol=0, atol=1e-9)
        held = acco_jax.committed_params(state, params)
        chex.assert_trees_all_close(held, committed, rtol=0, atol=1e-9)
    gaps = [
        flatten(a) - flatten(b) for (a, _), (b, _) in zip(expected, plain, strict=True)
    ]
    assert np.abs(gaps[1]).max() > 1e-3 and np.abs(gaps[2]).max() == 0


@pytest.mark.parametrize("factor", [0, -1.0, math.inf, math.nan])
def test_an_extrapolation_that_is_none_is_refused(factor):
    with pytest.raises(ValueError, match="give a positive number, 1 for none"):
        acco_jax.acco(optax.sgd(1.0), mesh=make_mesh(1), extrapolation=factor)


# ------------------------------------------------------------------------------ stages


@functools.cache
def small(n=2):
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-1))
    tx = acco_jax.acco(inner, mesh=make_mesh(n))
    theta = parameters({"b": (7,), "w": (4, 6)})
    return tx, Unsharded(inner), theta, jax.jit(tx.update)


def rows(seed, n=2):
    (g,) = draw({"b": (7,), "w": (4, 6)}, n, 1, seed)
    return g


def nan_rows():
    return jax.tree.map(lambda g: np.full_like(g, np.nan), rows(0))


def same(a, b):
    chex.assert_trees_all_equal(a, b)


def test_priming_keeps_everything():
    tx, _, theta, update = small()
    start = tx.init(theta)
    updates, state = update(rows(1), start, theta)
    same(updates, jax.tree.map(np.zeros_like, theta))
    same((state.master, state.inner, state.steps), (start.master, start.inner, 0))
    assert int(state.calls_done) == 1
    assert float(state.in_flight.weight.sum()) == 2
    # also when there are rests of something else in what the caller holds
    updates, _ = update(nan_rows(), start, jax.tree.map(lambda p: p + 1, theta))
    chex.assert_trees_all_close(
        updates, jax.tree.map(lambda p: -np.ones_like(p), theta), rtol=1e-12
    )


@pytest.mark.parametrize(
    "idle", [(), (0,), (1,), (0, 1), (2,), (2, 3), (1, 2), (0, 1, 2, 3, 4), (3, 4, 5)]
)
def test_half_rounds_without_weight(idle):
    """Half-rounds of weight 0, their gradients NaN: as if nothing had been sent."""
    tx, reference, theta, update = small()
    state, params = tx.init(theta), theta
    gradients = [nan_rows() if h in idle else rows(h) for h in range(9)]
    weight = [[0, 0] if h in idle else [1, h % 3] for h in range(9)]
    clean = [rows(h) if h in idle else g for h, g in enumerate(gradients)]
    points = reference.acco(theta, clean, weight)
    for h, (g, w, (here, committed)) in enumerate(
        zip(gradients, weight, points, strict=True)
    ):
        before = state
        updates, state = update(g, state, params, weight=np.asarray(w))
        params = optax.apply_updates(params, updates)
        chex.assert_trees_all_close(params, here, rtol=0, atol=1e-12)
        held = acco_jax.committed_params(state, params)
        chex.assert_trees_all_close(held, committed, rtol=0, atol=1e-12)
        assert int(state.calls_done) == h + 1
        sent = h > 0 and sum(weight[h - 1]) > 0
        earlier = h > 1 and sum(weight[h - 2]) > 0
        estimate = h % 2 == 1
        if estimate or not (sent or earlier):
            same((state.inner, state.steps), (before.inner, before.steps))
            same(state.master, before.master)
        else:
            assert int(state.steps) == int(before.steps) + 1
        if not sent:
            same(state.carry, jax.tree.map(jnp.zeros_like, state.carry))


def test_steps_count_commits_and_so_do_schedules():
    seen = []
    inner = optax.inject_hyperparams(optax.sgd)(lambda count: 0.1 / (1 + count))
    tx = acco_jax.acco(inner, mesh=make_mesh(2))
    theta = parameters({"w": (4, 6)})
    state, update = tx.init(theta), jax.jit(tx.update)
    for h in range(7):
        g = {"w": rows(h)["w"]}
        _, state = update(g, state, theta)
        seen.append((int(state.steps), int(state.inner.count)))
    assert seen == [(0, 0), (0, 0), (1, 1), (1, 1), (2, 2), (2, 2), (3, 3)]


def test_weights_are_shares_of_one_mean():
    """Token weights: only their sum divides, and None means 1 each."""
    tx, _, theta, update = small()
    state = tx.init(theta)
    _, ones = update(rows(1), state, theta)
    _, explicit = update(rows(1), state, theta, weight=np.ones(2))
    same(ones, explicit)
    results = []
    for k in (0.5, 1024.0):
        g = jax.tree.map(lambda g, k=k: g * k, rows(1))
        _, sent = update(g, state, theta, weight=np.array([k, 3 * k]))
        results.append(update(rows(2), sent, theta)[0])
    chex.assert_trees_all_close(*results, rtol=1e-12)


# ---------------------------------------------------------------------------- refusals


def refuses(words, fn, *args, **kwargs):
    with pytest.raises(ValueError, match=words) as error:
        fn(*args, **kwargs)
    assert "\n" not in str(error.value)


def test_bad_input_is_refused_in_one_line():
    tx, _, theta, _ = small()
    state, g, mesh = tx.init(theta), rows(0), make_mesh(2)
    refuses("current params", tx.update, g, state)
    refuses("one row per worker", tx.update, theta, state, theta)
    refuses("grads has another tree", tx.update, {"w": g["w"]}, state, theta)
    refuses("params has another tree", tx.update, g, state, {"w": theta["w"]})
    refuses("but init saw", tx.update, g, state, theta | {"b": np.ones(8)})
    refuses("one weight per worker", tx.update, g, state, theta, weight=[1, 1, 1])
    refuses(
        "not an axis of the mesh", acco_jax.acco, optax.sgd(1), mesh=mesh, axis_name="x"
    )
    refuses("give an optax", acco_jax.acco, 1e-3, mesh=mesh)
    refuses("no arrays", tx.init, {})
    refuses("floating-point", tx.init, {"w": np.ones(3, np.int32)})
    refuses("tree of arrays", tx.init, {"w": 1.0})
    refuses("another tree", acco_jax.committed_params, state, {"w": theta["w"]})
    refuses("holds 0 states", acco_jax.committed_params, optax.EmptyState(), theta)
    bad = acco_jax.acco(optax.sgd(1), mesh=mesh, param_specs={"b": P("data"), "w": P()})
    refuses("is the data axis", bad.init, theta)
