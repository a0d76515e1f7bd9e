"""Rows of numbers in 8 or 4 bits each, their scale included.

A row's values become integers in [-L, L], L = 127 or 7, times one scale, the row's
largest absolute value / L rounded up to bfloat16. So an integer times its scale is
exact in float32, and `old + value` is rounded once, the same on every device, whether
or not a compiler contracts it. The scale's 16 bits travel as the lowest bits of the
row's first 16 bytes: what crosses the network has the shape of what it replaces.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

BITS = (8, 4)
SCALE_BITS = 16
_SMALLEST, _NAN = 0x0080, 0x7FC0  # bfloat16: the smallest normal number, and NaN


def quantize(x: jax.Array, bits: int, axes: tuple[str, ...] = ()) -> jax.Array:
    """Round each row to integers of `bits` bits with a scale of its own.

    The rounding is to nearest: off by at most half a scale; by at most one scale in the
    row's first 16 values, whose lowest bit is given. A row of zeros stays zeros. A row
    that holds a NaN or an infinity becomes NaN, all of it.

    Args:
      x: [rows, width], floating point, taken as float32.
      bits: 8 or 4 (two values to a byte: columns c and c + width / 2).
      axes: mesh axes over which all devices must use the same scales, the largest.

    Returns:
      uint8 [rows, width * bits / 8].

    Raises:
      ValueError: `bits` is neither, or a row has fewer than 16 bytes.
    """
    width = x.shape[1]
    if bits not in BITS:
        raise ValueError(f"bits is {bits!r}: choose 8 or 4.")
    if width * bits < 8 * SCALE_BITS or width % 2:
        raise ValueError(
            f"a row of {width} values of {bits} bits has no {SCALE_BITS} bytes for its "
            "scale: use wider rows."
        )
    x, limit = x.astype(jnp.float32), 2 ** (bits - 1) - 1
    size = jnp.where(jnp.isfinite(x), jnp.abs(x), jnp.inf)  # a maximum may lose a NaN
    peak = jnp.max(size, 1, keepdims=True)
    if axes:
        peak = lax.pmax(peak, axes)
    code = _scale_above(peak / limit)
    scale = _scale(code)
    x = jnp.where(scale > 0, x * (1 / scale), 0)

    column = lax.broadcasted_iota(jnp.uint32, (1, width), 1)
    lowest = ((code >> jnp.minimum(column, SCALE_BITS - 1)) & 1).astype(jnp.float32)
    given = 2 * jnp.round((x - lowest) / 2) + lowest  # nearest with that lowest bit
    most = limit - 1 + lowest
    given = jnp.clip(given, -most, most)
    free = jnp.clip(jnp.round(x), -limit, limit)
    q = jnp.where(column < SCALE_BITS, given, free).astype(jnp.int32)
    if bits == 4:
        q = (q[:, : width // 2] & 15) | (q[:, width // 2 :] & 15) << 4
    return (q & 255).astype(jnp.uint8)


def dequantize(q: jax.Array, bits: int) -> jax.Array:
    """Integers times scales, exact products: the inverse of `quantize`.

    Args:
      q: uint8 [rows, width * bits / 8].
      bits: as given to `quantize`.

    Returns:
      float32 [rows, width].
    """
    place = lax.broadcasted_iota(jnp.uint32, (1, SCALE_BITS), 1)
    lowest = q[:, :SCALE_BITS].astype(jnp.uint32) & 1
    scale = _scale(jnp.sum(lowest << place, 1, keepdims=True, dtype=jnp.uint32))
    whole = q.astype(jnp.int32)
    if bits == 4:
        whole = jnp.concatenate([whole & 15, whole >> 4], 1)
    sign = 2 ** (bits - 1)
    return ((whole ^ sign) - sign).astype(jnp.float32) * scale


def _scale_above(least: jax.Array) -> jax.Array:
    """The bits, in a uint32, of the smallest normal bfloat16 that is not below."""
    above = lax.bitcast_convert_type(least, jnp.uint32) + 0xFFFF >> 16
    code = jnp.where(least > 0, jnp.maximum(above, _SMALLEST), 0)
    return jnp.where(jnp.isfinite(least), code, _NAN)


def _scale(code: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(code << 16, jnp.float32)
