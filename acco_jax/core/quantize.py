"""Quantization of rows of numbers to 8 or 4 bits each, their scale included.

A row's values become integers in [-L, L], L = 127 or 7, times one scale, the row's
largest absolute value / L rounded up to bfloat16. So an integer times its scale is
exact in float32, and `old + value` is rounded once, identically on every device,
whether or not a compiler contracts it. Integers are sent four or eight to a 32-bit
word: TPUs gather words asynchronously, but not bytes. The scale is sent in one of two
ways:

    inside  as the lowest bits of the row's first 16 values. Only 8 or 4 bits per value
            cross the network, but a 0 among the 16 may arrive as one scale. The next
            message must correct it: error feedback or differences to a replica
    apart   as a word of its own behind the row. A 0 arrives as 0
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BITS = (8, 4)
SCALE_BITS = 16
_SMALLEST, _NAN = 0x0080, 0x7FC0  # bfloat16: the smallest normal number, and NaN


def quantize(
    x: jax.Array, bits: int, axes: tuple[str, ...] = (), *, apart: bool = False
) -> jax.Array:
    """Round each row to integers of `bits` bits with a scale of its own.

    The rounding is to nearest: off by at most half a scale. Unless the scale is sent
    `apart`, the lowest bits of the row's first 16 values are given: these are off by at
    most one scale. A row of zeros stays zeros. A row that holds a NaN or an infinity
    becomes NaN, all of it.

    Args:
      x: [rows, width], floating point, taken as float32.
      bits: 8 or 4.
      axes: mesh axes over which all devices must use the same scales, the largest.
      apart: send the scale as a word of its own.

    Returns:
      uint32 [rows, words], words = width * bits / 32, at least 16; word c holds the
      integers of columns c, c + words, ..., the first one in its lowest bits. If
      `apart`, [rows, words + 1]: the last word holds the scale's bits.
    """
    width = x.shape[1]
    if bits not in BITS:
        raise ValueError(f"bits is {bits!r}: choose 8 or 4.")
    words, rest = divmod(width * bits, 32)
    if words < SCALE_BITS or rest:
        raise ValueError(
            f"a row of {width} values of {bits} bits is {width * bits / 32:g} words: "
            f"it must be a whole number, at least {SCALE_BITS}."
        )
    x, limit = x.astype(jnp.float32), 2 ** (bits - 1) - 1
    size = jnp.where(jnp.isfinite(x), jnp.abs(x), jnp.inf)  # a maximum may lose a NaN
    peak = jnp.max(size, 1, keepdims=True)
    if axes:
        peak = lax.pmax(peak, axes)
    # some compilers turn a constant divisor into this factor: here all multiply
    code = _scale_above(peak * np.float32(1 / limit))
    scale = _scale(code)
    x = jnp.where(scale > 0, x * (1 / scale), 0)

    q = (_nearest(x, limit) if apart else _marked(x, limit, code)).astype(jnp.int32)
    q = q.astype(jnp.uint32) & (2**bits - 1)
    parts = [q[:, i : i + words] for i in range(0, width, words)]
    shifted = [part << bits * i for i, part in enumerate(parts)]
    joined = functools.reduce(jnp.bitwise_or, shifted)
    return jnp.concatenate([joined, code], 1) if apart else joined


def dequantize(q: jax.Array, bits: int, *, apart: bool = False) -> jax.Array:
    """Multiply integers by their scales, exactly: the inverse of `quantize`.

    Turns what `quantize` returned into float32 [rows, width].
    """
    return _integers(_words(q, apart), bits) * _scales(q, apart)


def dequantized_sum(
    q: jax.Array, bits: int, senders: int, *, apart: bool = False
) -> jax.Array:
    """Sum values that several senders quantized, in their order.

    Turns uint32 [senders * rows, ...], as `quantize` returns them, into float32
    [rows, width]. XLA:CPU does not vectorize one reduction over the senders, which
    takes some twenty times as long as these additions.
    """

    def add(total: jax.Array, sent: list[jax.Array]) -> tuple[jax.Array, None]:
        words, scales = sent
        return total + _integers(words, bits) * scales, None

    both = _words(q, apart), _scales(q, apart)
    sent = [x.reshape(senders, -1, x.shape[1]) for x in both]
    start = jnp.zeros_like(_integers(sent[0][0], bits))
    return lax.scan(add, start, sent, unroll=min(senders, 8))[0]


def _nearest(x: jax.Array, limit: int) -> jax.Array:
    return jnp.clip(jnp.round(x), -limit, limit)


def _marked(x: jax.Array, limit: int, code: jax.Array) -> jax.Array:
    """Round to nearest, with the scale's bits as lowest bits of the first values."""
    column = lax.broadcasted_iota(jnp.uint32, (1, x.shape[1]), 1)
    lowest = ((code >> jnp.minimum(column, SCALE_BITS - 1)) & 1).astype(jnp.float32)
    marked = 2 * jnp.round((x - lowest) / 2) + lowest  # nearest with that lowest bit
    most = limit - 1 + lowest
    marked = jnp.clip(marked, -most, most)
    free = _nearest(x, limit)
    return jnp.where(column < SCALE_BITS, marked, free)


def _words(q: jax.Array, apart: bool) -> jax.Array:
    """Return the words that hold integers."""
    return q[:, :-1] if apart else q


def _scales(q: jax.Array, apart: bool) -> jax.Array:
    """Return the scales, float32 [rows, 1]."""
    if apart:
        return _scale(q[:, -1:])
    place = lax.broadcasted_iota(jnp.uint32, (1, SCALE_BITS), 1)
    lowest = q[:, :SCALE_BITS] & 1
    return _scale(jnp.sum(lowest << place, 1, keepdims=True, dtype=jnp.uint32))


def _integers(q: jax.Array, bits: int) -> jax.Array:
    """Return the integers as float32 [rows, width], without their scales."""
    q = lax.bitcast_convert_type(q, jnp.int32)
    # up to the highest bits, then down with their sign
    parts = [q << 32 - bits - up >> 32 - bits for up in range(0, 32, bits)]
    return jnp.concatenate(parts, 1).astype(jnp.float32)


def _scale_above(least: jax.Array) -> jax.Array:
    """Return the bits, as uint32, of the smallest normal bfloat16 not below `least`."""
    above = lax.bitcast_convert_type(least, jnp.uint32) + 0xFFFF >> 16
    code = jnp.where(least > 0, jnp.maximum(above, _SMALLEST), 0)
    return jnp.where(jnp.isfinite(least), code, _NAN)


def _scale(code: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(code << 16, jnp.float32)
