"""Reduced gradients against jax.grad, and where in the loss they are reduced."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from acco_jax.methods.layerwise import Reduction, reduced_gradients

LAYERS, WIDTH = 3, 4


def layer(x, p):
    return jnp.tanh(x @ p["w"] + p["b"]), jnp.sum(x)


def scanned(params, x, **options):
    return jax.lax.scan(layer, x, params["layers"], **options)


def plain(params, x):
    y, sums = scanned(params, x + params["first"])
    return jnp.sum(y @ params["last"]) + sums.sum()


def backwards(params, x):
    y, _ = scanned(params, x + params["first"], reverse=True)
    return jnp.sum(y @ params["last"])


def in_jit(params, x):
    y, _ = jax.jit(scanned)(params, x + params["first"])
    return jnp.sum(y @ params["last"])


def in_remat(params, x):
    run = jax.checkpoint(scanned, policy=jax.checkpoint_policies.dots_saveable)
    y, _ = run(params, x + params["first"])
    return jnp.sum(y @ params["last"])


def remat_inside(params, x):
    body = jax.checkpoint(layer, prevent_cse=False)
    y, _ = jax.lax.scan(body, x + params["first"], params["layers"])
    return jnp.sum(y @ params["last"])


def converted(params, x):
    params = jax.tree.map(lambda p: p.astype(jnp.float64), params)
    return plain(params, x.astype(jnp.float64)).astype(jnp.float32)


def nested(params, x):
    def twice(x, p):
        return jax.lax.scan(lambda x, _: layer(x, p), x, None, length=2)

    y, _ = jax.lax.scan(twice, x + params["first"], params["layers"])
    return jnp.sum(y @ params["last"])


def unrolled(params, x):
    x = x + params["first"]
    for i in range(LAYERS):
        x, _ = layer(x, jax.tree.map(lambda p, i=i: p[i], params["layers"]))
    return jnp.sum(x @ params["last"])


def indexed(params, x):
    def step(i, x):
        return layer(x, jax.tree.map(lambda p: p[i], params["layers"]))[0]

    y = jax.lax.fori_loop(0, LAYERS, step, x + params["first"])
    return jnp.sum(y @ params["last"])


def shared(params, x):
    y, _ = scanned(params, x + params["first"])
    y, _ = scanned(params, y)
    return jnp.sum(y @ params["last"])


def regularized(params, x):
    return plain(params, x) + jnp.sum(params["layers"]["w"] ** 2)


@jax.custom_vjp
def own_rule(layers, x):
    return scanned({"layers": layers}, x)[0]


def own_rule_fwd(layers, x):
    return own_rule(layers, x), (layers, x)


def own_rule_bwd(kept, g):
    layers, x = kept
    return jax.vjp(lambda p, x: scanned({"layers": p}, x)[0], layers, x)[1](2 * g)


own_rule.defvjp(own_rule_fwd, own_rule_bwd)


def with_own_rule(params, x):
    return jnp.sum(own_rule(params["layers"], x + params["first"]) @ params["last"])


def unused(params, x):
    return jnp.sum(scanned(params, x)[0])


# What is reduced layer by layer: leaves 2 and 3 are layers/b and layers/w.
BOTH, B, NONE = [2, 3], [2], []
LOSSES = {
    plain: BOTH,
    backwards: BOTH,
    in_jit: BOTH,
    in_remat: BOTH,
    remat_inside: BOTH,
    converted: BOTH,
    nested: BOTH,
    unrolled: NONE,
    indexed: NONE,
    shared: NONE,
    regularized: B,
    with_own_rule: NONE,
    unused: BOTH,
}


CASES = [(loss, pipelined, None) for loss in LOSSES for pipelined in (True, False)]
CASES += [(plain, pipelined, v) for pipelined in (True, False) for v in (True, False)]


@pytest.mark.fast(
    *(f"{loss}-True-*" for loss in ("plain", "in_remat", "nested", "regularized"))
)
@pytest.mark.parametrize(("loss", "pipelined", "valid"), CASES)
def test_gradients_are_jax_grads_and_reduced_in_their_scan(x64, loss, pipelined, valid):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    layers = {"w": draw(LAYERS, WIDTH, WIDTH), "b": draw(LAYERS, WIDTH)}
    params = {"first": draw(WIDTH), "layers": layers, "last": draw(WIDTH, 2)}
    x, earlier = draw(5, WIDTH), jax.tree.map(lambda p: draw(*p.shape), params)
    calls = []

    def pack(leaves, gradients, earlier, valid):
        keep = 1 if valid is None else jnp.where(valid, 1, 0)
        return [
            e + (keep * g).astype(e.dtype)
            for g, e in zip(gradients, earlier, strict=True)
        ]

    def scatter(leaves, buffers, sliced):
        calls.append((list(leaves), sliced))
        return [7 * b for b in buffers]

    @jax.jit
    def run(params, x, earlier, valid):
        leaves = jax.tree.leaves(params)
        reduction = Reduction(
            pack,
            scatter,
            slices=[p.ndim > 1 for p in leaves],
            small=[p.ndim == 1 for p in leaves],
            pipelined=pipelined,
        )
        fn = lambda params: (loss(params, x), x.sum())  # noqa: E731
        shards = [jnp.ones_like(p) for p in leaves]
        earlier = jax.tree.leaves(earlier)
        return reduced_gradients(fn, params, earlier, shards, valid, reduction)

    (value, rest), shards = run(params, x, earlier, valid)
    expected, gradient = jax.value_and_grad(loss)(params, x)
    if valid is False:
        gradient = jax.tree.map(jnp.zeros_like, gradient)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(rest, x.sum(), rtol=1e-6)
    total = jax.tree.leaves(jax.tree.map(lambda g, e: 7 * (g + e), gradient, earlier))
    used = [True] * 4 if loss is not unused else [False, False, True, True]
    for got, want, seen in zip(shards, total, used, strict=True):
        if seen:  # without a use there are no earlier gradients either
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    sliced = {i for leaves, sliced in calls if sliced for i in leaves}
    whole = {i for leaves, sliced in calls if not sliced for i in leaves}
    assert sorted(sliced) == LOSSES[loss]
    assert not sliced & whole
    times = sum(sliced for _, sliced in calls)  # in the program, not in the run
    assert times == (1 + pipelined if LOSSES[loss] else 0)


def test_a_body_reduces_once_for_all_of_its_leaves():
    """Not once more where a jit or a conversion stands between."""
    params = {"w": jnp.ones((LAYERS, 2, 2)), "b": jnp.ones((LAYERS, 2))}
    calls = []

    def scatter(leaves, buffers, sliced):
        calls.append(list(leaves))
        return buffers

    def loss(params):
        params = jax.tree.map(functools.partial(jnp.asarray, dtype="bfloat16"), params)
        y, _ = jax.jit(scanned)({"layers": params}, jnp.ones((1, 2), "bfloat16"))
        return jnp.sum(y.astype("float32")), None

    reduction = Reduction(
        lambda leaves, gradients, earlier, valid: gradients,
        scatter,
        slices=[True, True],
        small=[True, True],
        pipelined=False,
    )
    shards = [p.astype("bfloat16") for p in jax.tree.leaves(params)]
    jax.jit(
        lambda params: reduced_gradients(
            loss, params, [None, None], shards, None, reduction
        )
    )(params)
    assert calls == [[0, 1]]
