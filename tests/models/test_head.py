"""The chunked loss against the plain one, and what is in memory meanwhile."""

import functools
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from acco_jax.models import head
from acco_jax.models.head import cross_entropy
from acco_jax.schedule import hlo
from tests.examples import examples


def _plain(x, w, targets, weights):
    logits = jnp.einsum("BTD,VD->BTV", x, w)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.sum(losses * weights)


def _arguments(B, T, D, V, dtype, seed=0):
    draw = np.random.default_rng(seed)
    x = jnp.asarray(draw.normal(size=(B, T, D)), dtype)
    w = jnp.asarray(draw.normal(size=(V, D)), dtype)
    targets = jnp.asarray(draw.integers(0, V, (B, T)), jnp.int32)
    weights = jnp.asarray(draw.integers(0, 2, (B, T)), jnp.float32)
    return x, w, targets, weights


def test_soft_caps():
    arguments = _arguments(2, 7, 4, 30, jnp.float32)
    weights, softcap = arguments[3], 0.8

    def plain(x, w, targets, weights):
        logits = softcap * jnp.tanh(jnp.einsum("BTD,VD->BTV", x, w) / softcap)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return jnp.sum(losses * weights)

    loss = functools.partial(cross_entropy, softcap=softcap, logits=100)
    both = jax.jit(lambda *a: [_both(f, *a) for f in (loss, plain)])
    got, expected = both(*arguments)
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-6)
    nats, _ = head.each(*arguments[:3], softcap=softcap, logits=100)
    np.testing.assert_allclose(jnp.sum(nats * weights), 7 * expected[0], rtol=1e-5)


def _both(loss, x, w, targets, weights):
    """Loss and gradients of a loss that is scaled, as a mean is."""
    return jax.value_and_grad(lambda x, w: loss(x, w, targets, weights) / 7, (0, 1))(
        x, w
    )


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@examples(5)
@given(st.integers(1, 3), st.integers(1, 9), st.integers(2, 30), st.integers(1, 300))
def test_any_chunks_give_the_plain_loss(platform, B, T, V, logits):
    arguments = _arguments(B, T, 4, V, jnp.float32, seed=T)
    loss = functools.partial(cross_entropy, logits=logits)

    @jax.jit
    def all_at_once(*arguments):
        alone = loss(*arguments) / 7  # not differentiated
        return _both(loss, *arguments), _both(_plain, *arguments), alone

    with mock.patch.object(head, "platform", return_value=platform):
        (got, gradients), (expected, plain), alone = all_at_once(*arguments)
    chex.assert_trees_all_close(got, expected, rtol=1e-6, atol=1e-6)
    chex.assert_trees_all_close(alone, expected, rtol=1e-6, atol=1e-6)
    chex.assert_trees_all_close(gradients, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("bfloat16", 2e-2), ("float64", 1e-12)]
)
def test_dtypes(dtype, tolerance):
    with jax.enable_x64(dtype == "float64"):
        arguments = _arguments(2, 12, 8, 40, dtype)
        loss = functools.partial(cross_entropy, logits=200)
        got, gradients = jax.jit(functools.partial(_both, loss))(*arguments)
        wide = "float64" if dtype == "float64" else "float32"
        x, w, targets, weights = arguments
        arguments = x.astype(wide), w.astype(wide), targets, weights
        expected, plain = jax.jit(functools.partial(_both, _plain))(*arguments)
        assert got.dtype == jnp.promote_types(dtype, "float32")
        for a, b in zip((got, *gradients), (expected, *plain), strict=True):
            error = jnp.abs(a.astype(b.dtype) - b).max() / jnp.abs(b).max()
            assert error < tolerance


@pytest.mark.parametrize(("platform", "length", "logits", "tokens"), [
    ("gpu", 1024, None, 64),  # 13 chunks would do; 16 need no padding
    ("gpu", 1024, 2**40, 1024),
    ("gpu", 1021, None, 79),  # a prime number of tokens is padded
    ("tpu", 1024, None, 21),
])  # fmt: skip
def test_chunks_on_gpus_divide_the_length_where_they_can(
    platform, length, logits, tokens
):
    x = jax.ShapeDtypeStruct((32, length, 768), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((50304, 768), jnp.bfloat16)
    targets = jax.ShapeDtypeStruct((32, length), jnp.int32)
    weights = jax.ShapeDtypeStruct((32, length), jnp.float32)
    loss = functools.partial(cross_entropy, logits=logits)
    device = jax.sharding.AbstractDevice("x", None, platform)
    mesh = jax.sharding.AbstractMesh((1,), ("data",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        text = str(jax.make_jaxpr(loss)(x, w, targets, weights))
    assert f"f32[32,{tokens},50304]" in text


def test_no_logits_of_all_tokens_are_in_memory():
    x, w, targets, weights = _arguments(2, 64, 8, 1000, jnp.float32)
    loss = functools.partial(cross_entropy, logits=2 * 8 * 1000)

    def run(x, w):
        return _both(loss, x, w, targets, weights)

    def largest(f):
        computations, _ = hlo.parse(jax.jit(f).lower(x, w).compile().as_text())
        return max(
            np.prod(i.dims, dtype=int)
            for c in computations.values()
            for i in c.instructions
        )

    assert largest(run) <= 2 * 8 * 1000
    assert largest(lambda x, w: _both(_plain, x, w, targets, weights)) >= 2 * 64 * 1000
