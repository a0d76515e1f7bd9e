"""Parameters and wires of 16 bits and wider ones: what is rounded, and where."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import acco_jax
from tests.methods.test_sharded import HALF_ROUNDS, TREES, clip
from tests.reference import Unsharded, draw, make_mesh, parameters

pytestmark = pytest.mark.usefixtures("x64")

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
    in_flight = state.in_flight
    wires = {str(x.dtype) for x in (*in_flight.buffers, *in_flight.whole)}
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
    assert {b.dtype for b in state.in_flight.buffers} == {np.dtype(jnp.bfloat16)}
    zero = jax.tree.map(lambda p: np.zeros((4, *p.shape), np.float32), theta)
    updates, state = update(zero, state, theta)
    params = optax.apply_updates(theta, updates)
    # the model sees what was gathered, the master copy keeps every bit; what every
    # worker has whole is not gathered
    for leaf in state.layout.leaves:
        p = params[str(leaf)]
        assert p.dtype == np.float32
        assert (p == (theta[str(leaf)] if leaf.whole else 1)).all()
    assert not all(leaf.whole for leaf in state.layout.leaves)
    held = acco_jax.committed_params(state, params)
    chex.assert_trees_all_equal(held, theta)


def _is_shape(s):
    return isinstance(s, tuple)


def test_a_wider_wire():
    """Sums that float32 would round cross the network in float64."""
    tx = acco_jax.acco(optax.sgd(1.0), mesh=make_mesh(4), comm_dtype=jnp.float64)
    shapes = {"w": (16, 8), "whole": (3,)}
    theta = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    state, update = tx.init(theta), jax.jit(tx.update)
    row = np.array([1, 2.0**-30, -1, 2.0**-31])
    g = {k: np.multiply.outer(row, np.ones(shape)) for k, shape in shapes.items()}
    _, state = update(g, state, theta, weight=np.full(4, 0.25))
    updates, state = update(g, state, theta)
    for x in updates.values():
        np.testing.assert_array_equal(x, np.float32(-(2.0**-30) - 2.0**-31))
        assert x.dtype == np.float32


def test_a_wire_for_leaves_of_different_master_dtypes():
    """A sum keeps its own leaf's digits, no more and no fewer."""
    tx = acco_jax.zero1(optax.sgd(1.0), mesh=make_mesh(4), comm_dtype=jnp.float64)
    shape, digits = (16, 8), 1 + 2.0**-40
    theta = {"narrow": np.zeros(shape, np.float32), "wide": np.zeros(shape, np.float64)}
    state = tx.init(theta)
    g = {k: np.full((4, *shape), digits / 4) for k in theta}
    weight = np.full(4, 0.25)
    updates, state = jax.jit(tx.update)(g, state, theta, weight=weight)
    np.testing.assert_array_equal(updates["narrow"], np.float32(-1))
    np.testing.assert_array_equal(updates["wide"], -digits)
    assert [x.dtype for x in state.master.values()] == [np.float32, np.float64]
