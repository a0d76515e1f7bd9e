"""The recurrence, against the authors' trajectories and an unsharded loop."""

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
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import acco_jax
from tests.examples import examples
from tests.reference import (
    AUTO,
    EXPLICIT,
    Unsharded,
    draw,
    make_mesh,
    parameters,
)

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


# ------------------------------------------------- any inner optimizer, as unsharded

TREES = {
    # scalars, indivisible sizes, more than two dimensions
    "odd": {"b": (77,), "s": (), "t": (3, 4, 5), "w": (5, 13)},
    # divides everywhere
    "even": {"b": (64,), "t": (2, 8, 16), "w": (16, 8)},
    # adafactor factors from 128; more than 65,536 elements that 2 and 4 do not divide
    "large": {"b": (129,), "f": (130, 132), "p": (257, 259)},
    "line": {"p": (65539,), "s": ()},
}
ndim_mask = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)  # noqa: E731


def mask(tree):
    return {k: len(s) > 1 for k, s in TREES[tree].items()}


def labels(params):
    name = lambda path, p: (  # noqa: E731
        "frozen" if path[0].key == "b" else "matrix" if p.ndim > 1 else "vector"
    )
    return jax.tree_util.tree_map_with_path(name, params)


def partition(param_labels):
    return optax.partition(
        {
            "matrix": optax.adamw(1e-2),
            "vector": optax.sgd(0.1, momentum=0.9),
            "frozen": optax.set_to_zero(),
        },
        param_labels,
    )


LABELS = {"b": "frozen", "s": "vector", "t": "matrix", "w": "matrix"}
schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-2, 2, 6)
clip = optax.clip_by_global_norm
INNER = {  # inner, tree
    "adamw": (optax.adamw(1e-2), "odd"),
    "lion": (optax.lion(1e-2), "odd"),
    "sgd": (optax.sgd(0.1, momentum=0.9, nesterov=True), "odd"),
    "lamb": (optax.lamb(1e-2), "even"),
    "lamb on odd sizes": (optax.lamb(1e-2), "odd"),
    "global norm": (optax.chain(clip(0.5), optax.adamw(1e-2)), "odd"),
    "global norm, padded": (optax.chain(clip(0.5), optax.adamw(1e-2)), "line"),
    "block rms": (
        optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)), "odd"),
    "block rms, even": (
        optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)), "even"),
    "adaptive clip": (
        optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)), "even"),
    "centralize": (optax.chain(optax.centralize(), optax.sgd(0.1)), "odd"),
    "noise": (optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)), "odd"),
    "mask tree": (optax.adamw(1e-2, weight_decay=0.5, mask=mask("odd")), "odd"),
    "mask callable": (optax.adamw(1e-2, weight_decay=0.5, mask=ndim_mask), "odd"),
    "labels tree": (partition(LABELS), "odd"),
    "labels callable": (partition(labels), "odd"),
    "schedule": (optax.adamw(schedule), "odd"),
    "adafactor": (optax.adafactor(1e-2), "large"),
    "muon": (optax.contrib.muon(1e-2), "large"),
    "moments, padded": (
        optax.chain(optax.centralize(), optax.adamw(1e-2)), "large"),
    "apply_if_finite": (optax.apply_if_finite(optax.adamw(1e-2), 3), "odd"),
    "inject_hyperparams": (
        optax.inject_hyperparams(optax.adamw)(learning_rate=schedule), "odd"),
    "MultiSteps": (
        optax.MultiSteps(optax.adamw(1e-2), 2).gradient_transformation(), "odd"),
    "schedule free": (optax.contrib.schedule_free_adamw(1e-2), "odd"),
}  # fmt: skip
EIGHT = ("adamw", "global norm", "centralize")
RUNS = [(name, n) for name in INNER for n in (1, 2, 4, 8) if n < 8 or name in EIGHT]
HALF_ROUNDS = 7


@functools.cache
def unsharded(name):
    return Unsharded(INNER[name][0])


@functools.cache
def compiled(name, n):
    inner, tree = INNER[name]
    tx = acco_jax.acco(inner, mesh=make_mesh(n))
    theta = parameters(TREES[tree])
    return theta, tx.init(theta), jax.jit(tx.update)


def weights(n):
    worker = st.integers(0, 3)
    return st.lists(
        st.lists(worker, min_size=n, max_size=n),
        min_size=HALF_ROUNDS,
        max_size=HALF_ROUNDS,
    )


FEW = {"global norm": (1, 4), "lamb on odd sizes": (2,), "noise": (4,), "muon": (4,),
       "global norm, padded": (2,), "labels callable": (2,)}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "n"),
    [
        pytest.param(name, n, marks=[pytest.mark.slow] * (n not in FEW.get(name, ())))
        for name, n in RUNS
    ],
)
def test_inner_behaves_as_unsharded(name, n):
    theta, start, update = compiled(name, n)
    tree = INNER[name][1]

    @examples(2 if tree in ("large", "line") else 4)
    @given(seed=st.integers(0, 2**32 - 1), weight=weights(n))
    def check(seed, weight):
        gradients = draw(TREES[tree], n, HALF_ROUNDS, seed)
        expected = unsharded(name).acco(theta, gradients, weight)
        params, state = theta, start
        for g, w, (here, committed) in zip(gradients, weight, expected, strict=True):
            updates, state = update(g, state, params, weight=np.asarray(w))
            params = optax.apply_updates(params, updates)
            chex.assert_trees_all_close(params, here, rtol=0, atol=1e-9)
            held = acco_jax.committed_params(state, params)
            chex.assert_trees_all_close(held, committed, rtol=0, atol=1e-9)

    check()
    # NumPy parameters first, arrays after that; keys have an entry of their own
    assert update._cache_size() <= 2 + (name == "noise")


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


def test_zero1_and_acco_take_the_same_state_shapes():
    theta = parameters(TREES["odd"])
    states = [
        f(optax.adamw(1e-2), mesh=make_mesh(4)).init(theta)
        for f in (acco_jax.acco, acco_jax.zero1)
    ]
    for field in ("master", "inner"):
        chex.assert_trees_all_equal_shapes_and_dtypes(
            *(getattr(s, field) for s in states)
        )


# ----------------------------------------------------------------- mixed precision


MIXED = {"b": jnp.bfloat16, "s": jnp.float32, "t": jnp.float32, "w": jnp.bfloat16}


@functools.cache
def mixed():
    inner = optax.chain(clip(0.5), optax.adamw(1e-2))
    tx = acco_jax.acco(inner, mesh=make_mesh(4))
    theta = parameters(TREES["odd"], dtypes=MIXED)
    return tx, Unsharded(inner, np.float32), theta, jax.jit(tx.update)


def test_sixteen_bit_parameters():
    tx, reference, theta, update = mixed()
    state = tx.init(theta)
    assert {x.dtype for x in jax.tree.leaves(state.master)} == {np.dtype("float32")}
    pending = state.pending
    wires = {str(x.dtype) for x in (*pending.buffers, *pending.whole)}
    assert wires == {"bfloat16", "float32"}
    gradients = draw(TREES["odd"], 4, HALF_ROUNDS, 0, MIXED)
    weight = np.random.default_rng(0).integers(0, 3, (HALF_ROUNDS, 4))
    params = theta
    points = reference.acco(theta, gradients, weight)
    for g, w, (here, committed) in zip(gradients, weight, points, strict=True):
        updates, state = update(g, state, params, weight=w)
        assert {u.dtype for u in jax.tree.leaves(updates)} == {np.dtype("float32")}
        params = optax.apply_updates(params, updates)
        chex.assert_trees_all_equal_dtypes(params, theta)
        rounded = jax.tree.map(lambda x, p: x.astype(p.dtype), here, theta)
        # one unit in the last place of bfloat16 where float32 rounds otherwise
        chex.assert_trees_all_close(params, rounded, rtol=8e-3, atol=1e-6)
        held = acco_jax.committed_params(state, params)
        chex.assert_trees_all_equal_dtypes(held, theta)
        rounded = jax.tree.map(lambda x, p: x.astype(p.dtype), committed, theta)
        chex.assert_trees_all_close(held, rounded, rtol=8e-3, atol=1e-6)
        # the master copy is the unrounded one
        wide = state.layout.tree(lambda leaf: leaf)
        exact = jax.jit(lambda s: _replace_dtypes(s.layout).gather_exact(s.master))(
            state
        )
        del wide
        chex.assert_trees_all_close(exact, committed, rtol=0, atol=2e-6)


def _replace_dtypes(layout):
    """The layout of float32 parameters, whose gather_exact rounds nothing."""
    import dataclasses

    return _relabel(layout, lambda f: dataclasses.replace(f, dtype=f.master))


def _relabel(layout, fn):
    import dataclasses

    return dataclasses.replace(layout, leaves=tuple(map(fn, layout.leaves)))


def test_p_plus_u_is_new_whatever_params_were():
    """Errors never accumulate: the update is relative to the params passed in."""
    tx, _, theta, update = mixed()
    state = tx.init(theta)
    (g,) = draw(TREES["odd"], 4, 1, 3, MIXED)
    for _ in range(2):  # priming, estimate
        _, state = update(g, state, theta)
    elsewhere = jax.tree.map(lambda p: (p * 1.37 - 0.1).astype(p.dtype), theta)
    points = []
    for start in (theta, elsewhere):
        updates, _ = update(g, state, start)
        points.append(optax.apply_updates(start, updates))
    chex.assert_trees_all_close(*points, rtol=1e-6, atol=1e-6)
    held = [p for k, p in points[0].items() if MIXED[k] == jnp.bfloat16]
    assert all(
        np.array_equal(a, b)
        for a, b in zip(
            held,
            [p for k, p in points[1].items() if MIXED[k] == jnp.bfloat16],
            strict=True,
        )
    )


def test_float32_parameters_over_a_16_bit_wire():
    tx = acco_jax.acco(optax.sgd(0.1), mesh=make_mesh(4), comm_dtype=jnp.bfloat16)
    theta = jax.tree.map(
        lambda s: np.full(s, 1 + 2**-12, np.float32), TREES["even"], is_leaf=_is_shape
    )
    state, update = tx.init(theta), jax.jit(tx.update)
    assert {b.dtype for b in state.pending.buffers} == {np.dtype(jnp.bfloat16)}
    zero = jax.tree.map(lambda p: np.zeros((4, *p.shape), np.float32), theta)
    updates, state = update(zero, state, theta)
    params = optax.apply_updates(theta, updates)
    # the model sees what was gathered, the master copy keeps every bit; what every
    # worker has whole is not gathered
    for leaf in state.layout.leaves:
        p = params[leaf.name]
        assert p.dtype == np.float32
        assert (p == (theta[leaf.name] if leaf.whole else 1)).all()
    assert not all(leaf.whole for leaf in state.layout.leaves)
    held = acco_jax.committed_params(state, params)
    chex.assert_trees_all_equal(held, theta)


def _is_shape(s):
    return isinstance(s, tuple)


def test_a_wider_wire():
    """Sums that float32 would round cross the network in float64."""
    tx = acco_jax.acco(optax.sgd(1.0), mesh=make_mesh(4), comm_dtype=jnp.float64)
    theta = {"w": np.zeros((16, 8), np.float32)}
    state, update = tx.init(theta), jax.jit(tx.update)
    row = np.array([1, 2.0**-30, -1, 2.0**-31]).reshape(4, 1, 1)
    g = {"w": np.broadcast_to(row, (4, 16, 8)).copy()}
    _, state = update(g, state, theta, weight=np.full(4, 0.25))
    updates, state = update(g, state, theta)
    np.testing.assert_array_equal(updates["w"], np.float32(-(2.0**-30) - 2.0**-31))
    assert updates["w"].dtype == np.float32


# -------------------------------------------------------------------------- stages


@functools.cache
def small(n=2):
    inner = optax.chain(clip(1.0), optax.adamw(1e-1))
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
    assert int(state.half_rounds) == 1
    assert float(state.pending.weight.sum()) == 2
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
        assert int(state.half_rounds) == h + 1
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


# -------------------------------------------------------------------------- refusals


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
        "no axis of the mesh", acco_jax.acco, optax.sgd(1), mesh=mesh, axis_name="x"
    )
    refuses("give an optax", acco_jax.acco, 1e-3, mesh=mesh)
    refuses("no arrays", tx.init, {})
    refuses("floating-point", tx.init, {"w": np.ones(3, np.int32)})
    refuses("tree of arrays", tx.init, {"w": 1.0})
    refuses("another tree", acco_jax.committed_params, state, {"w": theta["w"]})
    refuses("holds 0 states", acco_jax.committed_params, optax.EmptyState(), theta)
    bad = acco_jax.acco(optax.sgd(1), mesh=mesh, param_specs={"b": P("data"), "w": P()})
    refuses("is the data axis", bad.init, theta)


@pytest.mark.parametrize("name", ["value", "other"])
def test_extra_arguments_reach_inner_or_are_refused(name):
    theta, mesh = parameters({"w": (4, 6)}), make_mesh(2)
    g = {"w": rows(0)["w"]}
    plain = optax.GradientTransformation(*optax.sgd(0.1))
    tx = acco_jax.acco(plain, mesh=mesh)
    refuses(f"update got {name}", tx.update, g, tx.init(theta), theta, **{name: 1.0})


def test_extra_arguments_as_unsharded():
    def update(g, state, params=None, *, value, **extra):
        return jax.tree.map(lambda x: -0.1 * value * x, g), state + value

    inner = optax.GradientTransformationExtraArgs(lambda p: jnp.zeros(()), update)
    theta = parameters({"b": (7,), "w": (4, 6)})
    expected = Unsharded(inner).acco(
        theta, [rows(h) for h in range(5)], [[1, 1]] * 5, {"value": 0.5}
    )
    tx = acco_jax.acco(inner, mesh=make_mesh(2))
    state, step, params = tx.init(theta), jax.jit(tx.update), theta
    for h, (here, _) in enumerate(expected):
        updates, state = step(rows(h), state, params, value=0.5)
        params = optax.apply_updates(params, updates)
        chex.assert_trees_all_close(params, here, rtol=0, atol=1e-12)
    refuses(
        "a function", tx.update, rows(0), state, params, value=0.5, value_fn=lambda p: 0
    )


def test_an_extra_tree_of_parameters():
    def update(g, state, params=None, *, scales=None, **extra):
        if scales is not None:
            g = jax.tree.map(jnp.multiply, g, scales)
        return jax.tree.map(jnp.negative, g), state

    inner = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)
    theta = parameters({"b": (7,), "w": (4, 6)})
    scales = jax.tree.map(lambda p: 0.1 * p, theta)
    tx = acco_jax.acco(inner, mesh=make_mesh(2))
    state, params = tx.init(theta), theta
    expected = Unsharded(inner).acco(
        theta, [rows(h) for h in range(3)], [[1, 1]] * 3, {"scales": scales}
    )
    for h, (here, _) in enumerate(expected):
        updates, state = jax.jit(tx.update)(rows(h), state, params, scales=scales)
        params = optax.apply_updates(params, updates)
        chex.assert_trees_all_close(params, here, rtol=0, atol=1e-12)
