"""Any inner optimizer behaves as unsharded, and is given what else it asks for."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import acco_jax
from tests.examples import examples
from tests.methods.test_acco import refuses, rows
from tests.reference import AUTO, EXPLICIT, Unsharded, draw, make_mesh, parameters

pytestmark = pytest.mark.usefixtures("x64")

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


@pytest.mark.fast("global norm-4", "muon-4", "labels callable-2", slow=("*-4",))
@pytest.mark.parametrize(("name", "n"), RUNS)
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


def test_the_check_and_the_step_trace_an_update_once():
    traced = []

    def update(updates, state, params):
        traced.append(len(updates))
        return jax.tree.map(lambda g: -0.1 * g, updates), state

    inner = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    theta = parameters(TREES["odd"])
    for types in AUTO, EXPLICIT:
        mesh = make_mesh(4, types=types)
        tx = acco_jax.acco(inner, mesh=mesh)
        loss = lambda params, x, rng: sum(p.sum() for p in params.values())  # noqa: E731
        step = acco_jax.make_train_step(loss, tx, microbatches=2)
        traced.clear()
        tx.check(theta)
        once = len(traced)
        step.lower(*acco_jax.abstract_start(tx, theta), np.ones((8, 1)))
        assert len(traced) == once == 1


# --------------------------------------------------------------------- extra arguments


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


@pytest.mark.parametrize("method", ["acco", "dpu", "zero1"])
def test_a_loss_stays_with_its_gradients(method):
    """The optimizer's state keeps the losses that it was given, newest first."""

    def update(g, state, params=None, *, value, **extra):
        return g, jnp.roll(state, 1).at[0].set(value)

    inner = optax.GradientTransformationExtraArgs(lambda p: jnp.zeros(3), update)
    theta = parameters({"w": (4, 6)})
    tx = getattr(acco_jax, method)(inner, mesh=make_mesh(2))
    state, step = tx.init(theta), jax.jit(tx.update)
    weights = np.array([[1.0, 2.0], [0.0, 1.0], [3.0, 1.0], [1.0, 0.0], [2.0, 2.0]])
    losses = np.array([4.0, 2.0, 1.0, 8.0, 5.0])
    g = {"w": rows(0)["w"]}
    for value, weight in zip(losses, weights, strict=True):
        _, state = step(g, state, theta, value=value, weight=weight)
    sums, totals = losses * weights.sum(1), weights.sum(1)
    seen = {
        "zero1": losses,
        "dpu": losses[:-1],
        "acco": [sum(sums[i : i + 2]) / sum(totals[i : i + 2]) for i in (0, 2)],
    }[method]
    kept = np.zeros(3)
    kept[: len(seen)] = seen[::-1][:3]
    np.testing.assert_allclose(state.inner, kept, rtol=1e-12)


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
