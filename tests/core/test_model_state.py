"""A model state: each worker's own rows, averaged over the workers at the exchange."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import acco_jax
from tests.reference import AUTO, make_mesh
from tests.stablehlo import collectives

WORKERS, HELD, ROWS = 4, 2, 2
DELAYED = ("acco", "dpu", "wp")
METHODS = ("zero1", "ddp", "fused_zero1", *DELAYED)


@pytest.fixture
def mesh():
    return jax.make_mesh((WORKERS,), ("data",), devices=jax.devices()[:WORKERS])


def loss_fn(params, x, rng, state):
    mean, var = x.mean(0), x.var(0)
    new = {"mean": 0.9 * state["mean"] + 0.1 * mean}
    new["var"] = 0.9 * state["var"] + 0.1 * var
    normal = (x - mean) * params["s"]
    weight = jnp.sum(x[:, 0] > -50).astype(jnp.float32)
    return jnp.sum((normal @ params["w"] - 1) ** 2), weight, {}, new


def begin(tx):
    params = {"s": jnp.ones(3), "w": jnp.full(3, 0.5)}
    zeros = jnp.zeros(3)
    return acco_jax.start(tx, params, {"mean": zeros, "var": zeros + 1})


def batches(calls=3):
    rng = np.random.default_rng(0)
    return rng.normal(1, 2, (calls, WORKERS * HELD * ROWS, 3)).astype(np.float32)


def expected(data, counts, delayed):
    """The means after each call, in NumPy: every worker its microbatches in order."""
    own = np.array([[[0.0] * 3, [1.0] * 3]] * WORKERS)
    mean, means, last = own[0].copy(), [], None
    for batch, count in zip(data, counts, strict=True):
        weight = np.zeros(WORKERS)
        for i, rows in enumerate(batch.reshape(WORKERS, HELD, ROWS, 3)):
            for x in rows[: count[i]]:
                own[i] = 0.9 * own[i] + 0.1 * np.array([x.mean(0), x.var(0)])
                weight[i] += ROWS
        new = (own.copy(), weight)
        sent, last = (last, new) if delayed else (new, None)
        if sent and sent[1].sum():
            mean = np.average(sent[0], axis=0, weights=sent[1])
        if not delayed:
            own[:] = mean
        means.append(mean)
    return means


@pytest.mark.fast("acco-*", "zero1-fused", "fused_zero1-fused", "dpu-split")
@pytest.mark.parametrize("form", ["fused", "split"])
@pytest.mark.parametrize("name", METHODS)
def test_states_follow_each_workers_rows_and_are_averaged(name, form, mesh):
    tx = getattr(acco_jax, name)(optax.sgd(0.1), mesh=mesh)
    step = acco_jax.make_train_step(loss_fn, tx, microbatches=HELD, form=form)
    params, state = begin(tx)
    data, counts = batches(), [[2, 2, 1, 2], [2, 0, 1, 2], [0, 0, 0, 0]]
    right = expected(data, counts, tx.delayed)
    for batch, count, (mean, var) in zip(data, counts, right, strict=True):
        params, state, _ = step(params, state, batch, counts=np.array(count))
        found = acco_jax.committed_model_state(state)
        np.testing.assert_allclose(found["mean"], mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found["var"], var, rtol=1e-5)


@pytest.mark.parametrize("name", ["zero1", "acco"])
def test_one_microbatch_and_a_dropped_worker(name, mesh):
    tx = getattr(acco_jax, name)(optax.sgd(0.1), mesh=mesh)
    step = acco_jax.make_train_step(loss_fn, tx, microbatches=1, drop_nonfinite=True)
    params, state = begin(tx)
    data = batches(2)[:, : WORKERS * ROWS].copy()
    data[0, ROWS] = np.nan  # worker 1
    for batch in data:
        params, state, _metrics = step(params, state, batch)
    parts = data[0].reshape(WORKERS, ROWS, 3)[[0, 2, 3]]
    right = 0.1 * parts.mean((0, 1))
    if name == "zero1":
        right = 0.9 * right + 0.1 * data[1].mean(0)
    found = acco_jax.committed_model_state(state)["mean"]
    np.testing.assert_allclose(found, right, rtol=1e-5)


@pytest.mark.parametrize("name", ["zero1", "acco"])
def test_no_further_collective(name, mesh):
    tx = getattr(acco_jax, name)(optax.sgd(0.1), mesh=mesh)
    batch = batches(1)[0]

    def plain(params, x, rng):
        return loss_fn(params, x, rng, {"mean": 0.0, "var": 1.0})[:3]

    found = []
    for loss, carried in ((plain, ()), (loss_fn, ({"mean": jnp.ones(3)},))):
        if carried:
            carried = ({"mean": jnp.zeros(3), "var": jnp.ones(3)},)
        params = {"s": jnp.ones(3), "w": jnp.ones(3)}
        step = acco_jax.make_train_step(loss, tx, microbatches=HELD, form="fused")
        text = step.lower(*acco_jax.start(tx, params, *carried), batch).as_text()
        found.append(collectives(text))
    assert len(found[0]) == len(found[1])


def test_reshard_keeps_the_mean_and_a_copied_state_goes_on_bitwise(mesh):
    tx = acco_jax.acco(optax.sgd(0.1), mesh=mesh)
    step = acco_jax.make_train_step(loss_fn, tx, microbatches=HELD)
    params, state = begin(tx)
    data = batches(3)
    for batch in data[:2]:
        params, state, _ = step(params, state, batch)
    copies = jax.tree.map(jnp.copy, (params, state))
    small = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    fewer = acco_jax.acco(optax.sgd(0.1), mesh=small)
    rows = np.asarray(state.in_flight.model_state["var"])
    moved = acco_jax.reshard((params, state), fewer)
    np.testing.assert_array_equal(moved[1].model_state["var"], state.model_state["var"])
    found = moved[1].in_flight.model_state["var"]
    np.testing.assert_allclose(found, rows.reshape(2, 2, 3).mean(1), rtol=1e-6)
    ends = [step(*start, data[2])[1].model_state for start in ((params, state), copies)]
    jax.tree.map(np.testing.assert_array_equal, *ends)


@pytest.mark.parametrize("more", [6, 8])
def test_more_workers_have_the_same_weighted_mean(more, mesh):
    def acco(mesh):
        return acco_jax.acco(optax.sgd(0.1), mesh=mesh)

    def mean(state):
        weight, rows = state.in_flight.weight, state.in_flight.model_state["var"]
        return np.asarray(weight) @ np.asarray(rows) / np.sum(weight)

    step = acco_jax.make_train_step(loss_fn, acco(mesh), microbatches=HELD)
    params, state = begin(acco(mesh))
    counts = np.arange(WORKERS) % HELD + 1
    params, state, _ = step(params, state, batches(1)[0], counts)
    wider = jax.make_mesh((more,), ("data",), devices=jax.devices()[:more])
    moved = acco_jax.reshard((params, state), acco(wider))[1]
    np.testing.assert_allclose(mean(moved), mean(state), rtol=1e-5)


@pytest.mark.fast("adaptive", "warmup")
@pytest.mark.parametrize("kind", ["adaptive", "balanced", "warmup"])
def test_counts_that_are_found_and_a_warm_up_carry_it(kind, mesh):
    microbatches, options = HELD, {}
    if kind == "adaptive":
        microbatches = acco_jax.Adaptive(HELD, HELD)
        mesh = make_mesh(WORKERS, types=AUTO)
    elif kind == "balanced":
        microbatches = acco_jax.Balanced(WORKERS * HELD, HELD)
    else:
        options = {"warmup_steps": 2}
    tx = acco_jax.dpu(optax.sgd(0.1), mesh=mesh, **options)
    step = acco_jax.make_train_step(loss_fn, tx, microbatches=microbatches)
    params, state = begin(tx)
    data, counts = batches(), []
    for batch in data:
        params, state, metrics = step(params, state, batch)
        counts.append(metrics.get("counts", np.full(WORKERS, HELD)))
    delayed = kind != "warmup"  # of two, the third call only fills the pipeline
    mean, _ = expected(data, counts, delayed)[-1 if delayed else 1]
    found = acco_jax.committed_model_state(state)["mean"]
    np.testing.assert_allclose(found, mean, rtol=1e-5)


@pytest.mark.parametrize("microbatches", [HELD, acco_jax.Adaptive(HELD, HELD)])
def test_a_warm_up_goes_on_from_the_mean(microbatches):
    """It is zero1, also where the loss reads the state."""

    def loss(params, x, rng, state):
        value, weight, aux, new = loss_fn(params, x, rng, state)
        return value + jnp.sum(params["w"] * state["mean"]), weight, aux, new

    found, mesh = [], make_mesh(WORKERS, types=AUTO)
    for tx, counts in (
        (acco_jax.zero1(optax.sgd(0.1), mesh=mesh), HELD),
        (acco_jax.dpu(optax.sgd(0.1), mesh=mesh, warmup_steps=3), microbatches),
    ):
        step = acco_jax.make_train_step(loss, tx, microbatches=counts)
        params, state = begin(tx)
        for batch in batches():
            params, state, _ = step(params, state, batch)
        found.append((params, state.model_state))
    chex.assert_trees_all_close(*found, rtol=1e-6)


@pytest.mark.parametrize("n", [1, 2])
@jax.enable_x64(True)
def test_a_state_wider_than_the_parameters_keeps_its_bits(n):
    def loss(params, x, rng, state):
        return jnp.sum(params["w"] * x), 1.0, None, state

    tx = acco_jax.zero1(optax.sgd(0.1), mesh=make_mesh(n))
    step = acco_jax.make_train_step(loss, tx, microbatches=1)
    wide, narrow = np.array([1 / 3, 2.0**24 + 1]), np.float32([1 / 3])
    carried = {"narrow": jnp.asarray(narrow), "wide": jnp.asarray(wide)}
    start = acco_jax.start(tx, {"w": jnp.ones(4, jnp.float32)}, carried)
    _, state, _ = step(*start, np.ones((2, 4), np.float32))
    found = acco_jax.committed_model_state(state)
    np.testing.assert_array_equal(found["wide"], wide)
    np.testing.assert_array_equal(found["narrow"], narrow)


def test_a_checkpoint_is_restored_bitwise(mesh, tmp_path):
    import orbax.checkpoint as ocp  # slow

    tx = acco_jax.acco(optax.sgd(0.1), mesh=mesh)
    step = acco_jax.make_train_step(loss_fn, tx, microbatches=HELD)
    start, data = begin(tx), batches(3)
    for batch in data[:2]:
        start = step(*start, batch)[:2]
    like = acco_jax.abstract_start(tx, start[0], start[1].model_state)
    leaves, treedef = jax.tree.flatten(start)
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "0", leaves)
        saver.wait_until_finished()
        back = saver.restore(tmp_path / "0", jax.tree.leaves(like))
    ends = [step(*x, data[2])[:2] for x in (start, treedef.unflatten(back))]
    jax.tree.map(np.testing.assert_array_equal, *ends)


def linen_model():
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x, train):
            x = linen.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            return linen.Dense(1)(x)

    net = Net()
    variables = net.init(jax.random.key(0), jnp.zeros((1, 3)), train=True)

    def loss(params, microbatch, rng, model_state):
        x, y = microbatch
        variables = {"params": params, "batch_stats": model_state}
        out, new = net.apply(variables, x, train=True, mutable=["batch_stats"])
        return jnp.mean((out - y) ** 2), 1.0, {}, new["batch_stats"]

    def evaluate(params, model_state, x):
        variables = {"params": params, "batch_stats": model_state}
        return net.apply(variables, x, train=False)

    return loss, evaluate, variables["params"], variables["batch_stats"]


def nnx_model():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(3, momentum=0.9, rngs=rngs)
            self.dense = nnx.Linear(3, 1, rngs=rngs)

        def __call__(self, x):
            return self.dense(self.norm(x))

    graph, *states = nnx.split(Net(nnx.Rngs(0)), nnx.Param, nnx.BatchStat)
    params, statistics = map(nnx.to_pure_dict, states)

    def loss(params, microbatch, rng, model_state):
        x, y = microbatch
        net = nnx.merge(graph, params, model_state)
        net.train()
        value = jnp.mean((net(x) - y) ** 2)
        return value, 1.0, {}, nnx.to_pure_dict(nnx.state(net, nnx.BatchStat))

    def evaluate(params, model_state, x):
        net = nnx.merge(graph, params, model_state)
        net.eval()
        return net(x)

    return loss, evaluate, params, statistics


@pytest.mark.fast("linen_model")
@pytest.mark.parametrize("make", [linen_model, nnx_model])
def test_batch_norm_trains_and_evaluates(make, mesh):
    loss, evaluate, params, statistics = make()
    tx = acco_jax.acco(optax.adamw(0.2, weight_decay=0.1), mesh=mesh)
    step = acco_jax.make_train_step(loss, tx, microbatches=HELD)
    params, state = acco_jax.start(tx, params, statistics)
    rng = np.random.default_rng(0)
    for _ in range(150):
        x = rng.normal(5, 3, (WORKERS * HELD * 16, 3)).astype(np.float32)
        y = x @ np.array([[1.0], [-1.0], [0.5]], np.float32)
        params, state, metrics = step(params, state, (x, y))
    theta = acco_jax.committed_params(state, params)
    carried = acco_jax.committed_model_state(state)
    var = next(v for k, v in jax.tree.leaves_with_path(carried) if "var" in str(k))
    np.testing.assert_allclose(var, 9, rtol=0.2)
    error = float(np.mean((evaluate(theta, carried, x) - y) ** 2))
    assert error < 2 * float(metrics["loss"]) + 0.5 < np.var(y) / 4


def test_what_does_not_fit_is_refused(mesh):
    tx = acco_jax.zero1(optax.sgd(0.1), mesh=mesh)
    w = {"w": jnp.ones(3)}
    with pytest.raises(ValueError, match=r"model_state\['n'\] is int32.*float32"):
        acco_jax.start(tx, w, {"n": jnp.zeros(3, jnp.int32)})
    local = acco_jax.diloco(optax.sgd(0.1), mesh=mesh, local_steps=2)
    with pytest.raises(ValueError, match=r"local method.*use acco"):
        acco_jax.start(local, w, {"m": jnp.zeros(3)})
    params, state = begin(tx)
    batch = batches(1)[0]
    make = functools.partial(acco_jax.make_train_step, tx=tx, microbatches=HELD)
    for counts in (None, [1 + i % 2 for i in range(WORKERS)]):  # computed apart
        with pytest.raises(ValueError, match=r"takes none: give loss_fn\(params"):
            make(lambda p, x, r: 0.0)(params, state, batch, counts)
        with pytest.raises(ValueError, match=r"\(loss, weight, aux, model_state\)"):
            make(lambda p, x, r, s: p["w"].sum())(params, state, batch, counts)
    with pytest.raises(ValueError, match=r"not take 4 arguments.*rng, model_state\)"):
        make(lambda p, x: 0.0)(params, state, batch)
    with pytest.raises(ValueError, match=r"not take 3 arguments.*microbatch, rng\)"):
        make(lambda p, x: 0.0)(*acco_jax.start(tx, params), batch)
    with pytest.raises(ValueError, match=r"there is none.*start\(tx, params, model_s"):
        make(loss_fn)(*acco_jax.start(tx, params), batch)
    with pytest.raises(ValueError, match=r"return \(loss, weight, aux, model_state\)"):
        make(lambda p, x, r, s: (p["w"].sum(), s))(params, state, batch)

    def wider(p, x, r, s):
        return p["w"].sum(), 1.0, {}, s | {"var": jnp.ones((3, 1))}

    with pytest.raises(ValueError, match=r"\['var'\] as float32\[3, 1\].*was given"):
        make(wider)(params, state, batch)
    with pytest.raises(ValueError, match="update cannot advance: use make_train_step"):
        tx.update(jax.tree.map(lambda p: jnp.ones((4, 3)), params), state, params)
    with pytest.raises(ValueError, match="carries no model state: start with"):
        acco_jax.committed_model_state(tx.init(w))


def test_statistics_among_the_parameters_are_refused(mesh):
    tx = acco_jax.zero1(optax.sgd(0.1), mesh=mesh)
    _, _, params, statistics = linen_model()
    with pytest.raises(ValueError, match=r"batch_stats.*carry it as model_state"):
        acco_jax.start(tx, {"params": params, "batch_stats": statistics})
    norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    variables = nnx.state(norm)
    with pytest.raises(ValueError, match=r"mean.* is an nnx.BatchStat"):
        acco_jax.start(tx, variables)
    with pytest.warns(UserWarning, match=re.escape("mean and var among the parame")):
        acco_jax.start(tx, nnx.to_pure_dict(variables))
