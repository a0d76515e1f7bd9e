"""The synchronous baseline, against an unsharded loop."""

import chex
import jax
import numpy as np
import optax
import pytest

import acco_jax
from acco_jax.schedule.footprint import NEGLIGIBLE, collectives
from tests.reference import AUTO, EXPLICIT, Unsharded, draw, make_mesh, parameters

pytestmark = pytest.mark.usefixtures("x64")
SHAPES = {"b": (77,), "s": (), "t": (3, 4, 5), "w": (5, 13)}
CLIP = optax.clip_by_global_norm(0.5)
INNER = {
    "adamw": optax.chain(CLIP, optax.adamw(1e-2)),
    "sgd": optax.sgd(0.1, momentum=0.9),
    "centralize": optax.chain(optax.centralize(), optax.adamw(1e-2)),
}
METHODS = {"zero1": acco_jax.zero1, "ddp": acco_jax.ddp}


@pytest.mark.fast(
    "*-adamw-4-explicit",
    *(f"zero1-{x}-auto" for x in ("adamw-1", "sgd-2", "centralize-4")),
)
@pytest.mark.parametrize("types", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize(
    ("method", "name"), [*(("zero1", name) for name in INNER), ("ddp", "adamw")]
)
def test_every_update_is_one_step_of_inner(method, name, n, types):
    inner = INNER[name]
    tx = METHODS[method](inner, mesh=make_mesh(n, types=types))
    theta = parameters(SHAPES)
    params, state, update = theta, tx.init(theta), jax.jit(tx.update)
    gradients = draw(SHAPES, n, 6, 0)
    weight = np.random.default_rng(1).integers(0, 3, (6, n))
    weight[2] = 0  # nobody had anything: nothing moves, not even for NaN
    sent = list(gradients)
    sent[2] = jax.tree.map(lambda g: np.full_like(g, np.nan), gradients[2])
    points = Unsharded(inner).zero1(theta, gradients, weight)
    steps = 0
    for g, w, (here, _) in zip(sent, weight, points, strict=True):
        before = state
        updates, state = update(g, state, params, weight=w)
        params = optax.apply_updates(params, updates)
        chex.assert_trees_all_close(params, here, rtol=0, atol=1e-10)
        held = acco_jax.committed_params(state, params)
        chex.assert_trees_all_close(held, here, rtol=0, atol=1e-10)
        steps += int(w.sum() > 0)
        assert int(state.steps) == steps
        if not w.any():
            chex.assert_trees_all_equal(state.inner, before.inner)


def test_ddp_replicates_its_state_and_reduces_once():
    theta = {"w": np.ones((64, 32), np.float32), "b": np.ones(32, np.float32)}
    mesh = make_mesh(4)
    tx = acco_jax.ddp(optax.adam(1e-2), mesh=mesh, comm_dtype="bfloat16")
    step = acco_jax.make_train_step(
        lambda p, x, rng: (x @ p["w"] + p["b"]).sum(), tx, microbatches=2
    )
    params, state = acco_jax.start(tx, theta)
    batch = np.full((8, 64), 0.1, np.float32)
    found = [
        (c.kind, c.dtype, c.shape)
        for c in collectives(step.lower(params, state, batch))
        if c.whole >= NEGLIGIBLE or c.dtype == "bf16"
    ]
    assert sorted(found) == [
        ("all_reduce", "bf16", (32,)),
        ("all_reduce", "bf16", (64, 32)),
    ]
    params, state, _ = step(params, state, batch)
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(state))
    for k, x in acco_jax.committed_params(state, params).items():
        np.testing.assert_array_equal(x, params[k])  # nothing gathered, nothing rounded
        assert np.abs(np.asarray(x) - 0.99).max() < 1e-6  # Adam's first step


def test_equals_acco_that_commits_the_same_gradients():
    """With estimates of weight 0, ACCO's commits are ZeRO-1's steps, one later."""
    inner, mesh = INNER["adamw"], make_mesh(2)
    theta = parameters(SHAPES)
    gradients = draw(SHAPES, 2, 3, 5)
    zero1, acco = (f(inner, mesh=mesh) for f in (acco_jax.zero1, acco_jax.acco))
    params, state = theta, zero1.init(theta)
    expected = []
    for g in gradients:
        updates, state = jax.jit(zero1.update)(g, state, params)
        params = optax.apply_updates(params, updates)
        expected.append(params)
    params, state, update = theta, acco.init(theta), jax.jit(acco.update)
    seen = []
    idle = np.zeros(2)
    for g in [*gradients, gradients[0]]:
        # a commit, whose own gradients are dropped; then an estimate that sends nothing
        for rows, w in ((g, idle), (g, np.ones(2))):
            updates, state = update(rows, state, params, weight=w)
            params = optax.apply_updates(params, updates)
            seen.append(params)
    for k, here in enumerate(expected):
        chex.assert_trees_all_close(seen[2 * k + 2], here, rtol=0, atol=1e-12)
