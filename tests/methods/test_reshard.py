"""More workers or fewer: what the run has computed so far is the same afterwards."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import acco_jax
from acco_jax.methods import reshard
from tests.reference import make_mesh

pytestmark = pytest.mark.usefixtures("x64")

SHAPES = {"a": (6, 4), "b": (5,), "c": (), "d": (3, 7), "e": (300, 260)}
WORLDS = (4,), (2,), (3,), (1,), (2, 2)
FEW = (4,), (3,), (2, 2)
INNER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def params():
    draw = np.random.default_rng(0)
    return {k: jnp.asarray(draw.normal(size=s)) for k, s in SHAPES.items()}


def mesh_of(sizes):
    return make_mesh(*sizes, names=("data",) if len(sizes) == 1 else ("host", "chip"))


def method(name, sizes, mesh=None, **options):
    mesh = mesh_of(sizes) if mesh is None else mesh
    return getattr(acco_jax, name)(
        INNER, mesh=mesh, axis_name=mesh.axis_names, **options
    )


def rows(h, n):
    """What n workers have computed in a half-round: sums that do not depend on n."""
    draw = np.random.default_rng(h)
    total = {k: draw.normal(size=s) for k, s in SHAPES.items()}
    shares = np.random.default_rng((h, n)).dirichlet(np.ones(n))
    weights = np.random.default_rng((h, n, 1)).dirichlet(np.ones(n)) * (1 + h % 3)
    grads = {k: np.multiply.outer(shares, x) for k, x in total.items()}
    return grads, weights


def run(name, worlds, calls, **options):
    """(parameters, committed ones) after so many calls in each of the worlds."""
    theta, state, h, points = params(), None, 0, []
    for sizes in worlds:
        tx = method(name, sizes, **options)
        n = int(np.prod(sizes))
        if state is None:
            theta, state = acco_jax.start(tx, theta)
        else:
            theta, state = acco_jax.reshard((theta, state), tx)
        for _ in range(calls):
            grads, weights = rows(h, n)
            updates, state = tx.update(grads, state, theta, weight=jnp.asarray(weights))
            theta = optax.apply_updates(theta, updates)
            h += 1
        held = acco_jax.committed_params(state, theta)
        points.append(jax.tree.map(np.asarray, (theta, held)))
    return points, state


@pytest.mark.fast("zero1-*")
@pytest.mark.parametrize(
    ("name", "worlds"),
    [
        ("acco", WORLDS),
        pytest.param("zero1", FEW, marks=pytest.mark.slow),
        ("dpu", FEW),
        pytest.param("wp", FEW, marks=pytest.mark.long),  # dpu's state
    ],
)
def test_sums_are_what_counts(name, worlds):
    """Each world's end, in the middle of acco's step too, is one worker's alone."""
    found, _ = run(name, worlds, 3)
    alone, _ = run(name, [(1,)] * len(worlds), 3)
    chex.assert_trees_all_close(found, alone, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_a_fed_back_update_moves_with_its_parameters():
    found, _ = run("dpu", [(4,), (2,)], 3, feedback=1.0)
    alone, _ = run("dpu", [(1,), (1,)], 3, feedback=1.0)
    chex.assert_trees_all_close(found, alone, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_few_bits_lose_nothing():
    """Sums of gradients and of what rounding left out; replicas are copied."""
    kinds = {"gather_bits": 8, "reduce_bits": 8}
    _, state = run("acco", [(4,)], 5, **kinds)
    before = sums(state)
    for sizes in [(2, 2), (3,), (2, 2)]:
        tx = method("acco", sizes, **kinds)
        state = acco_jax.reshard(state, tx)
        chex.assert_trees_all_close(sums(state), before, rtol=1e-6, atol=1e-9)
        chex.assert_trees_all_equal_shapes(state, jax.eval_shape(tx.init, params()))


def sums(state):
    """What the workers hold, added up, and what all hold alike."""
    layout = state.layout
    in_flight = reshard._rows(layout, state.in_flight.buffers, state.in_flight.whole)
    error = state.residual.error.buffers
    error = reshard._rows(layout, error, summed=len(layout.axis) - 1)
    total = jax.tree.map(lambda x: np.asarray(x).sum(0), (in_flight, error))
    replica = state.residual.replica
    if replica is not None:
        replica = jax.tree.map(np.asarray, layout.view(replica))
    return total, state.in_flight.weight.sum(), replica


@pytest.mark.fast("dpu")
@pytest.mark.parametrize("name", ["acco", "dpu"])
def test_error_feedback_of_leaves_that_become_whole_is_sent(name):
    """Three workers split d and round it. Two have it whole, as in-flight gradients."""
    _, state = run(name, [(3,)], 2, reduce_bits=8)
    (gradients, error), weight, _ = sums(state)
    assert np.abs(error["d"]).max() > 1e-4
    state = acco_jax.reshard(state, method(name, (2,), reduce_bits=8))
    (resharded, left), after, _ = sums(state)
    assert not left["d"].any()
    before, found = (
        jax.tree.map(np.add, *x) for x in [(gradients, error), (resharded, left)]
    )
    chex.assert_trees_all_close(found, before, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(after, weight)


def loss_fn(params, batch, rng):
    flat = sum(jnp.sum(x) for x in jax.tree.leaves(params))
    loss = (jnp.sin(flat) * batch["x"] + flat**2 * 1e-4).sum()
    return loss, len(batch["x"])


LOCAL = {
    "diloco": {"local_steps": 2},
    "slowmo": {"local_steps": 2},
    "co2": {"local_steps": 2},
    "gossip": {"local_steps": 2},
    "streaming_diloco": {"local_steps": 4, "fragments": 2, "overlap_steps": 1},
    "cellm": {"local_steps": 2},
    "sparseloco": {"local_steps": 2},
}


ALIKE = ("slowmo", "co2", "sparseloco")  # whose states are diloco's or cellm's


@pytest.mark.fast("diloco")
@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[pytest.mark.long] * (x in ALIKE)) for x in LOCAL],
)
def test_workers_of_local_methods_are_averaged(name):
    """The mean over workers stays, and training goes on from it."""
    theta, state, mean = params(), None, None
    for sizes in [(4,), (2,), (4,)]:
        tx = method(name, sizes, **LOCAL[name])
        step = acco_jax.make_train_step(loss_fn, tx, microbatches=1)
        if state is None:
            theta, state = acco_jax.start(tx, theta)
        else:
            theta, state = acco_jax.reshard((theta, state), tx)
            chex.assert_trees_all_close(means(theta, state), mean, rtol=1e-12)
        batch = {"x": np.random.default_rng(1).normal(size=8 * tx.steps_per_call)}
        theta, state, metrics = step(theta, state, batch)
        assert np.isfinite(metrics["loss"])
        mean = means(theta, state)


def test_a_copied_worker_mixes_as_its_original():
    """Of streaming_diloco: its fragment is in flight when the workers double."""
    options = {"local_steps": 4, "fragments": 2, "overlap_steps": 1, "mixing": 0.5}
    made = None
    for n in (2, 4):
        tx = method("streaming_diloco", (n,), **options)
        made = acco_jax.reshard(made, tx) if made else acco_jax.start(tx, params())
        step = acco_jax.make_train_step(loss_fn, tx, microbatches=1)
        x = np.random.default_rng(1).normal(size=n * tx.steps_per_call)
        counts = None if n == 2 else np.zeros(n, np.int32)
        made = step(*made, {"x": x}, counts)[:2]
    for x in jax.tree.leaves(made[0]):
        np.testing.assert_allclose(x[::2], x[1::2], rtol=1e-12)
    assert np.abs(made[0]["a"][0] - made[0]["a"][2]).max() > 0


@pytest.mark.fast("True")
@pytest.mark.parametrize("weighted", [True, False])
def test_what_sparse_methods_have_yet_to_send_is_kept(weighted):
    """Its sum over the workers; where they count equally the mean, as n divides it."""

    def owed(state):
        rows = [np.asarray(state.error[k]) for k in SHAPES]
        return [x.sum(0) if weighted else x.mean(0) for x in rows]

    options = LOCAL["cellm"] | {"keep": 1, "weighted": weighted}
    tx = method("cellm", (2,), **options)
    step = acco_jax.make_train_step(loss_fn, tx, microbatches=1)
    batch = {"x": np.arange(8 * tx.steps_per_call) + 1.0}
    made = step(*acco_jax.start(tx, params()), batch)[:2]
    before = owed(made[1])
    assert np.abs(before[0]).max() > 1e-3
    for n in (4, 2, 1):
        made = acco_jax.reshard(made, method("cellm", (n,), **options))
        chex.assert_trees_all_close(owed(made[1]), before, rtol=1e-9)


def means(theta, state):
    inner = [x for x in jax.tree.leaves(state.inner) if x.dtype == float]
    rows = jax.tree.map(lambda x: np.asarray(x).mean(0), (theta, inner))
    return rows, acco_jax.committed_params(state, theta)


def test_a_world_that_is_gone():
    """What four workers saved is restored on two, by shapes alone."""
    _, state = run("acco", [(4,)], 3)
    host = jax.tree.map(np.asarray, state)
    gone = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
    mesh = mesh_of((2,))
    _, like = acco_jax.saved(method("acco", (4,), gone), params(), mesh)
    chex.assert_trees_all_equal_shapes_and_dtypes(
        jax.tree.leaves(like), jax.tree.leaves(host)
    )
    there = jax.tree.structure(like).unflatten(
        jax.device_put(x, y.sharding)
        for x, y in zip(jax.tree.leaves(host), jax.tree.leaves(like), strict=True)
    )
    tx = method("acco", (2,))
    found = acco_jax.reshard(there, tx)
    chex.assert_trees_all_equal(found, acco_jax.reshard(state, tx))


def test_refusals():
    _, state = run("zero1", [(2,)], 1)
    with pytest.raises(ValueError, match="a dict: give a method's state"):
        acco_jax.reshard({}, method("zero1", (1,)))
    with pytest.raises(ValueError, match="the state is Zero1State, of another method"):
        acco_jax.reshard(state, method("acco", (1,)))
    with pytest.raises(ValueError, match=r"of their own: give \(params, s"):
        acco_jax.reshard(state, method("diloco", (1,), local_steps=2))
    for name in ("diloco", "cellm"):
        pair = acco_jax.start(method(name, (2,), outer_momentum=0.9), params())
        with pytest.raises(ValueError, match="of another inner optimizer or other opt"):
            acco_jax.reshard(pair, method(name, (1,), outer_momentum=0.0))
    late = acco_jax.dpu(optax.sgd(1.0), mesh=make_mesh(1))
    prompt = acco_jax.zero1(optax.sgd(1.0), mesh=make_mesh(1))
    first, other = (
        acco_jax.local_rounds(INNER, x, local_steps=2) for x in (prompt, late)
    )
    pair = acco_jax.start(first, params())
    with pytest.raises(ValueError, match="of another inner optimizer or other opt"):
        acco_jax.reshard(pair, other)


def test_an_axis_that_split_the_model_may_be_a_data_axis():
    """Its type, if Explicit, still shows how it split the parameters."""
    mesh = make_mesh(2, 2, names=("data", "model"), types=AxisType.Explicit)
    w = jax.device_put(np.arange(16.0).reshape(4, 4), NamedSharding(mesh, P("model")))
    pair = acco_jax.start(acco_jax.acco(INNER, mesh=mesh), {"w": w})
    tx = acco_jax.acco(INNER, mesh=mesh, axis_name=("data", "model"))
    theta, state = acco_jax.reshard(pair, tx)
    np.testing.assert_array_equal(theta["w"], w)
    np.testing.assert_array_equal(acco_jax.committed_params(state, theta)["w"], w)


@pytest.mark.fast("sizes0-*")
@pytest.mark.parametrize("name", ["acco", "diloco"])
@pytest.mark.parametrize("sizes", [(2, 4), (4, 2)])
def test_axes_of_explicit_type_are_resharded_alike(name, sizes):
    def resharded(types):
        before, after = (make_mesh(n, names=("data",), types=types) for n in sizes)
        made = acco_jax.start(method(name, sizes[:1], before), params())
        if name == "acco":  # something is pending
            tx, (theta, state) = method(name, sizes[:1], before), made
            grads, weights = rows(0, sizes[0])
            _, state = tx.update(grads, state, theta, weight=jnp.asarray(weights))
            made = theta, state
        return acco_jax.reshard(made, method(name, sizes[1:], after))

    found = (resharded(types) for types in (AxisType.Auto, AxisType.Explicit))
    auto, explicit = (jax.tree.map(np.asarray, jax.tree.leaves(x)) for x in found)
    chex.assert_trees_all_equal(auto, explicit)
