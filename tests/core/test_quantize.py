"""Rows in few bits, against the same in NumPy and against what is promised of them."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from acco_jax.core.quantize import dequantize, dequantized_sum, quantize
from tests.examples import examples
from tests.reference import make_mesh, quantization_step, quantized

ROWS, WIDTH = 6, 128
compiled = functools.partial(jax.jit, static_argnames=("bits", "apart"))
encode, decode = compiled(quantize), compiled(dequantize)


rows = st.builds(
    lambda seed, exponents, zeros: (
        np.random.default_rng(seed).normal(size=(ROWS, WIDTH))
        * 10.0 ** np.array(exponents)[:, None]
        * (np.random.default_rng(seed + 1).random((ROWS, WIDTH)) >= zeros)
    ).astype(np.float32),
    st.integers(0, 2**32),
    st.lists(st.integers(-34, 36), min_size=ROWS, max_size=ROWS),
    st.sampled_from([0, 0.5, 1]),
)


@examples(60)
@given(rows, st.sampled_from([8, 4]), st.booleans())
def test_off_by_half_a_quantization_step(x, bits, apart):
    q = encode(x, bits, apart=apart)
    assert (q.shape, q.dtype) == ((ROWS, WIDTH * bits // 32 + apart), np.uint32)
    y = np.asarray(decode(q, bits, apart=apart))
    scale = quantization_step(x, bits)
    np.testing.assert_array_equal(y, quantized(x, bits, apart))
    wide = x.astype(np.float64)
    error = np.abs(wide - y)
    assert np.all(error[:, 16:] <= scale / 2 * (1 + 1e-6))
    assert np.all(error[:, :16] <= scale / (1 + apart) * (1 + 1e-6))
    assert np.all(y[~x.any(1)] == 0)
    if apart:
        assert np.all(y[x == 0] == 0)
    # products are exact, so that a contracted sum is the same as another
    with np.errstate(divide="ignore", invalid="ignore"):
        whole = np.where(scale > 0, y.astype(np.float64) / scale, 0)
    assert np.all(whole == np.rint(whole))
    assert np.abs(whole).max() <= 2 ** (bits - 1) - 1


@pytest.mark.fast("False-8-*", "*-21-8")
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("senders", [1, 2, 8, 21])
@pytest.mark.parametrize("apart", [False, True])
def test_a_sum_is_of_one_sender_after_the_other(apart, senders, bits):
    x = np.random.default_rng(senders).normal(size=(senders * ROWS, WIDTH))
    q = encode(x.astype(np.float32), bits, apart=apart)
    want = np.zeros((ROWS, WIDTH), np.float32)
    values = np.asarray(decode(q, bits, apart=apart))
    for sent in values.reshape(senders, ROWS, WIDTH):
        want += sent
    run = jax.jit(dequantized_sum, static_argnums=(1, 2), static_argnames="apart")
    got = run(q, bits, senders, apart=apart)
    chex.assert_trees_all_equal(np.asarray(got), want)


def test_largest_values_and_every_integer_come_back():
    for bits in (8, 4):
        most = 2 ** (bits - 1) - 1
        x = np.zeros((2, 3 * WIDTH), np.float32)
        x[:, 16 : 16 + 2 * most + 1] = np.arange(-most, most + 1)
        x[1] *= -(2.0**-20)
        y = np.asarray(decode(encode(x, bits), bits))
        np.testing.assert_array_equal(y[:, 16:], x[:, 16:])  # 127 / 127 is a bfloat16


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_not_finite_arrives_as_nan(bits, apart):
    x = np.ones((4, WIDTH), np.float32)
    x[1, 40], x[2, 3], x[3, -1] = np.nan, np.inf, -np.inf
    y = np.asarray(decode(encode(x, bits, apart=apart), bits, apart=apart))
    assert np.isfinite(y[0]).all()
    assert np.isnan(y[1:]).all()


def test_what_follows_repeats_shrinks_to_nothing():
    """Sent as differences to what arrived, a value is met in a few rounds."""
    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    for bits, rounds in ((8, 5), (4, 12)):
        held = np.zeros_like(x)
        for _ in range(rounds):
            held = held + np.asarray(decode(encode(x - held, bits), bits))
        np.testing.assert_allclose(held, x, rtol=0, atol=1e-7)


def test_the_devices_of_an_axis_share_their_scales():
    """A row's scale is the largest of the axis, NaN if any row's is."""
    mesh = make_mesh(2, names=("model",))
    x = np.random.default_rng(0).normal(size=(2 * ROWS, WIDTH)).astype(np.float32)
    x[ROWS:, 16:] *= 5
    x[:, :16] = 1  # the same on both, and must stay the same
    x[3, 20] = np.nan
    P = jax.sharding.PartitionSpec
    both = jax.shard_map(
        lambda x: dequantize(quantize(x, 8, ("model",)), 8),
        mesh=mesh,
        in_specs=P("model"),
        out_specs=P("model"),
    )
    a, b = np.split(np.asarray(jax.jit(both)(x)), 2)
    np.testing.assert_array_equal(a[:, :16], b[:, :16])
    assert np.isnan(a[3]).all() and np.isnan(b[3]).all()
    assert np.isfinite(np.delete(a, 3, 0)).all()


@pytest.mark.parametrize(
    ("shape", "bits", "said"),
    [
        ((2, 128), 5, "bits is 5"),
        ((2, 64), 4, "a row of 64 values of 4 bits is 8 words"),
        ((2, 66), 8, "a row of 66 values of 8 bits is 16.5 words"),
    ],
)
def test_refusals(shape, bits, said):
    with pytest.raises(ValueError, match=said):
        quantize(jnp.zeros(shape), bits)
