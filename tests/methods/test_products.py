"""Matrix products of an optimizer: what they read is moved once, and no more."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import acco_jax
from acco_jax.methods import products
from tests.reference import make_mesh

UNKNOWN = products.UNKNOWN


def newton_schulz(x, times=2):
    return jax.lax.fori_loop(0, times, lambda i, x: 1.5 * x - 0.5 * x @ x.T @ x, x)


def scanned(x):
    return jax.lax.scan(lambda x, c: (c * x - x @ x.T @ x, c), x, jnp.ones(3))[0]


@pytest.mark.parametrize(
    ("fn", "shapes", "splits", "needs", "after"),
    [
        # not split, or no product
        (lambda x: x @ x.T, [(8, 8)], [None], False, None),
        (lambda x: jnp.sqrt(x) / 2, [(8, 4)], [1], False, 1),
        # both operands keep the split dimension, or one sums over it
        (lambda x: x @ x.T, [(8, 16)], [0], True, None),
        (lambda x: x.T @ x, [(8, 16)], [0], True, None),
        (lambda x, y: x @ y, [(8, 8), (8, 8)], [1, None], True, None),
        # one operand keeps it: each worker has a part of the result
        (lambda x, y: x @ y, [(8, 4), (4, 8)], [0, None], False, 0),
        (lambda x, y: x @ y, [(8, 4), (4, 8)], [None, 1], False, 1),
        # layers
        (lambda x: jax.vmap(newton_schulz)(x), [(4, 8, 8)], [0], False, 0),
        (lambda x: jax.vmap(newton_schulz)(x), [(4, 8, 8)], [1], True, None),
        (lambda x: jax.vmap(scanned)(x), [(4, 8, 8)], [0], False, 0),
        (scanned, [(8, 8)], [1], True, None),
        # small sums
        (jnp.vdot, [(8, 8), (8, 8)], [0, 0], False, None),
        (jnp.vdot, [(8, 8), (8, 8)], [UNKNOWN, 1], False, None),
        # where the dimension goes
        (lambda x: x.T[None], [(8, 4)], [0], False, 2),
        (lambda x: x.sum(0), [(3, 8, 4)], [1], False, 0),
        (lambda x: x.sum(1), [(3, 8, 4)], [1], False, None),
        (lambda x: x.reshape(32, 5), [(8, 4, 5)], [0], False, 0),
        (lambda x: x.reshape(8, 20), [(8, 4, 5)], [1], False, 1),
        (lambda x: x.reshape(8, 20), [(8, 4, 5)], [2], False, UNKNOWN),
        (lambda x: x[0], [(3, 8)], [1], False, 0),
        # in a branch, and in a function of its own
        (
            lambda x, y: jax.lax.cond(y[0] > 0, newton_schulz, lambda x: x, x),
            [(8, 8), (1,)],
            [0, None],
            True,
            None,
        ),
        (jax.jit(lambda x: x @ x.T), [(8, 8)], [0], True, None),
        (jax.jit(lambda x: 2 * x), [(8, 8)], [1], False, 1),
    ],
)
def test_which_products_gather(fn, shapes, splits, needs, after):
    program = jax.make_jaxpr(fn)(*map(jnp.ones, shapes))
    found, (split,) = products._reads(program.jaxpr, splits)
    assert (found, split) == (needs, after)


PARAMS = {
    "wide": (8, 32),
    "wider": (8, 64),
    "another": (8, 32),
    "tall": (32, 8),
    "taller": (32, 8),
    "layers": (4, 8, 16),
    "odd": (3, 5),  # so small that every worker has it
    "bias": (32,),
}


def muon():
    """Muon of matrices and of stacked ones."""
    numbers = optax.contrib.MuonDimensionNumbers(-2, -1)
    return optax.contrib.muon(
        1e-2,
        muon_weight_dimension_numbers=lambda tree: jax.tree.map(
            lambda x: numbers if x.ndim > 1 else None, tree
        ),
    )


def program(inner, mesh, shapes=PARAMS):
    n = mesh.shape["data"]
    draw = np.random.default_rng(0)
    params = {k: jnp.asarray(draw.normal(size=s)) for k, s in shapes.items()}
    grads = {k: jnp.asarray(draw.normal(size=(n, *s))) for k, s in shapes.items()}
    tx = acco_jax.zero1(inner, mesh=mesh)
    state = tx.init(params)
    return params, grads, state, jax.jit(tx.update)


def moved(text, kind="all-gather"):
    """Elements that each collective of a kind in a compiled text makes."""
    lines = [x for x in text.splitlines() if f" {kind}(" in x]
    shapes = [x.split("= ")[1].split("[")[1].split("]")[0] for x in lines]
    return sorted(int(np.prod([int(n) for n in x.split(",")])) for x in shapes)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_each_matrix_of_muon_is_moved_once(kind):
    """Two of a shape are dealt out, others gathered; layers stay where they are."""
    mesh = jax.make_mesh((4,), ("data",), (kind,), devices=jax.devices()[:4])
    params, grads, state, update = program(muon(), mesh)
    text = update.lower(grads, state, params).compile().as_text()
    # the exchange's own has all parameters
    assert [x for x in moved(text) if x < 1500] == [512]  # wider
    # two pairs, each stacked and padded to four: there and back
    assert len(moved(text, "all-to-all")) == 4
    inner, unsharded = muon(), params
    plain = inner.init(params)
    for _ in range(3):
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        mean = jax.tree.map(lambda g: g.sum(0) / 4, grads)
        updates, plain = inner.update(mean, plain, unsharded)
        unsharded = optax.apply_updates(unsharded, updates)
        for x, y in zip(*map(jax.tree.leaves, (params, unsharded)), strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-12)


def test_two_workers_gather():
    params, grads, state, update = program(muon(), make_mesh(2))
    text = update.lower(grads, state, params).compile().as_text()
    assert not moved(text, "all-to-all")
    assert [x for x in moved(text) if 256 <= x < 1500] == [256] * 4 + [512]


def test_one_worker_has_every_matrix(monkeypatch):
    monkeypatch.delattr(products, "_Evaluation")
    params, grads, state, update = program(muon(), make_mesh(1))
    update.trace(grads, state, params)


def test_matrices_that_workers_do_not_divide():
    """Their shards are padded, and a stack of them goes back whole."""
    shapes = dict.fromkeys("abc", (259, 262)) | {"layers": (3, 259, 262)}
    params, grads, state, update = program(muon(), make_mesh(4), shapes)
    assert all(leaf.padded for leaf in state.layout.leaves)
    inner, mean = muon(), jax.tree.map(lambda g: g.sum(0) / 4, grads)
    updates, _ = update(grads, state, params)
    expected, _ = inner.update(mean, inner.init(params), params)
    for x, y in zip(*map(jax.tree.leaves, (updates, expected)), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)


def test_functions_of_their_own_are_entered():
    """A product in a jit, beside a function with a derivative of its own."""

    def update(grads, state, params=None):
        made = {k: jax.jit(newton_schulz)(jax.nn.relu(grads[k])) for k in matrices}
        return grads | made, state

    matrices = ("wide", "wider", "another", "tall")
    inner = optax.GradientTransformation(lambda params: (), update)
    params, grads, state, run = program(inner, make_mesh(4))
    text = run.lower(grads, state, params).compile().as_text()
    assert [x for x in moved(text) if x < 1000] == [256, 512]
    assert len(moved(text, "all-to-all")) == 2
    updates, _ = run(grads, state, params)
    expected, _ = update(jax.tree.map(lambda g: g.sum(0) / 4, grads), ())
    for x, y in zip(*map(jax.tree.leaves, (updates, expected)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_products_with_other_constants_are_not_one():
    """Of two programs with one text, each holds an array of its own."""
    factors = {"wide": jnp.eye(8), "another": 2 * jnp.eye(8)}

    def update(grads, state, params=None):
        made = {
            k: jax.jit(lambda g, factor=factor: factor @ g)(grads[k])
            for k, factor in factors.items()
        }
        return grads | made, state

    inner = optax.GradientTransformation(lambda params: (), update)
    params, grads, state, run = program(inner, make_mesh(4))
    assert params["wide"].shape == params["another"].shape
    updates, _ = run(grads, state, params)
    expected, _ = update(jax.tree.map(lambda g: g.sum(0) / 4, grads), ())
    for x, y in zip(*map(jax.tree.leaves, (updates, expected)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_a_product_that_is_asked_for_twice_is_one():
    gram = jax.jit(lambda g: g.T @ g)

    def update(grads, state, params=None):
        g = grads["tall"]
        return grads | {"tall": g @ (gram(g) + gram(g))}, state

    inner = optax.GradientTransformation(lambda params: (), update)
    params, grads, state, run = program(inner, make_mesh(4))
    updates, _ = run(grads, state, params)
    expected, _ = update(jax.tree.map(lambda g: g.sum(0) / 4, grads), ())
    for x, y in zip(*map(jax.tree.leaves, (updates, expected)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "inner",
    [optax.adamw(1e-3), optax.lbfgs(1e-3, linesearch=None)],
    ids=["adamw", "lbfgs"],
)
def test_others_are_as_they_were(inner, monkeypatch):
    """The dot of two trees is a small sum."""
    monkeypatch.delattr(products, "_Evaluation")
    params, grads, state, update = program(inner, make_mesh(4))
    update.trace(grads, state, params)


def test_model_axes_are_left_to_the_compiler(monkeypatch):
    monkeypatch.delattr(products, "_Evaluation")
    mesh, params = make_mesh(2, 2), {"wide": jnp.ones((8, 32))}
    specs = {"wide": P(None, "model")}
    inner = optax.contrib.muon(1e-2)
    tx = acco_jax.zero1(inner, mesh=mesh, axis_name="data", param_specs=specs)
    grads = {"wide": jnp.ones((2, 8, 32))}
    jax.jit(tx.update).trace(grads, tx.init(params), params)
