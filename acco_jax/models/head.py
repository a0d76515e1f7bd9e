"""The output layer and its loss, without logits of all tokens at once.

Shapes: B batch, T length, D width, V vocabulary, C tokens of a row in a chunk.
"""

import functools
import math
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from acco_jax.models.embedding import Part, Split, split_of
from acco_jax.models.placement import platform

T = TypeVar("T")
_Saved = tuple[jax.Array, jax.Array, jax.Array]  # gradients of x and w, and targets

LOGITS = 2**25  # of a chunk, at most: 128 MiB in float32
# and 512 MiB: the output embedding's gradient is read and written once a chunk
GPU_LOGITS = 2**27


def cross_entropy(
    x_BxTxD: jax.Array,
    w_VxD: jax.Array,
    targets_BxT: jax.Array,
    weights_BxT: jax.Array,
    *,
    softcap: float | None = None,
    logits: int | None = None,
) -> jax.Array:
    """Return the weighted sum of the targets' cross-entropies under x w'.

        sum_bt weights_bt (log sum_v exp(x_bt . w_v) - x_bt . w_targets_bt)

    Logits are matmuls in x's dtype, accumulated in at least float32, of a few tokens at
    a time. Their gradients are computed with them in the forward pass: the values saved
    for the backward pass have the shapes of x and w.

    Args:
      x_BxTxD: floating.
      w_VxD: of the same dtype.
      targets_BxT: int32, from 0 to V - 1.
      weights_BxT: floating; not differentiated.
      softcap: c of c tanh(logit / c), which takes the place of each logit.
      logits: how many there may be at once; None: `GPU_LOGITS` on GPUs, else `LOGITS`.

    Returns:
      The sum in nats, a scalar in at least float32.
    """
    split = split_of(x_BxTxD.shape[0], w_VxD.shape)
    size = _chunk(x_BxTxD, w_VxD, split, logits)
    wide = jnp.promote_types(x_BxTxD.dtype, jnp.float32)
    x_BxTxD, targets_BxT, weights_BxT = _padded(
        size, x_BxTxD, targets_BxT, weights_BxT.astype(wide)
    )
    return _sum(x_BxTxD, w_VxD, targets_BxT, weights_BxT, size, split, softcap)


def each(
    x_BxTxD: jax.Array,
    w_VxD: jax.Array,
    targets_BxT: jax.Array,
    *,
    softcap: float | None = None,
    logits: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return each target's cross-entropy under x w', and whether it is the likeliest.

    Arguments are as for `cross_entropy`; a group of devices is not supported. A target
    that is as likely as one before it in the vocabulary is not the likeliest.

    Returns:
      Nats (B, T) in at least float32, and (B, T) bool.
    """
    split = Split(frozenset(), None, None, 1, 1, wide=False)
    (B, T), size = targets_BxT.shape, _chunk(x_BxTxD, w_VxD, split, logits)
    x_BxTxD, targets_BxT = _padded(size, x_BxTxD, targets_BxT)

    def chunk(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        targets_BxC = _part(targets_BxT, i, size)
        losses_BxC, logits_BxCxV, *_ = _losses(
            0, _part(x_BxTxD, i, size), w_VxD, targets_BxC, split, softcap
        )
        return losses_BxC, jnp.argmax(logits_BxCxV, axis=-1) == targets_BxC

    parts = lax.map(chunk, jnp.arange(x_BxTxD.shape[1] // size))
    losses, likeliest = (x.swapaxes(0, 1).reshape(B, -1)[:, :T] for x in parts)
    return losses, likeliest


def _chunk(
    x_BxTxD: jax.Array, w_VxD: jax.Array, split: Split, logits: int | None
) -> int:
    """Return the number of tokens of each row that have at most `logits` logits."""
    B, T, _ = x_BxTxD.shape
    held = B * T * w_VxD.shape[0] / (split.groups * split.parts)
    on_gpu = platform() == "gpu"
    logits = logits or (GPU_LOGITS if on_gpu else LOGITS)
    least = min(T, math.ceil(held / logits))
    if on_gpu:  # without padding, if twice as many chunks suffice
        divisors = (n for n in range(least, min(T, 2 * least) + 1) if T % n == 0)
        least = next(divisors, least)
    return math.ceil(T / least)


def _padded(size: int, *arrays: jax.Array) -> list[jax.Array]:
    """Return arrays (B, T, ...) with T rounded up to a multiple of a chunk's tokens."""
    if not (rest := -arrays[0].shape[1] % size):
        return list(arrays)
    return [jnp.pad(x, ((0, 0), (0, rest)) + ((0, 0),) * (x.ndim - 2)) for x in arrays]


def capped(logits: jax.Array, softcap: float | None) -> jax.Array:
    """Return c tanh(logit / c) of each logit, c the soft cap; None: the logits."""
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _sum(
    x: jax.Array,
    w: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    size: int,
    split: Split,
    softcap: float | None,
) -> jax.Array:
    def local(
        part: Part, x: jax.Array, w: jax.Array, targets: jax.Array, weights: jax.Array
    ) -> jax.Array:
        def chunk(i: int | jax.Array, total: jax.Array) -> jax.Array:
            losses, *_ = _losses(
                part, _part(x, i, size), w, _part(targets, i, size), split, softcap
            )
            return total + jnp.sum(losses * _part(weights, i, size))

        return split.over_rows(
            _over_chunks(x, size, chunk, jnp.zeros((), weights.dtype))
        )

    rows = split.rows_spec
    in_specs = rows, split.table_spec, rows, rows
    return split.run(local, in_specs, P())(x, w, targets, weights)


def _part(x: jax.Array, i: int | jax.Array, size: int) -> jax.Array:
    """Return chunk i of an array (B, T, ...)."""
    return lax.dynamic_slice_in_dim(x, i * size, size, axis=1)


def _over_chunks(
    x: jax.Array, size: int, chunk: Callable[[int | jax.Array, T], T], start: T
) -> T:
    number = x.shape[1] // size
    if number > 1 and platform() != "tpu":
        return lax.fori_loop(0, number, chunk, start)
    # TPU v5e's compiler overlaps nothing with a loop that has this one inside.
    for i in range(number):
        start = chunk(i, lax.optimization_barrier(start))
    return start


def _log_sum_exp(x: jax.Array) -> jax.Array:
    """Return the logarithm of the sum of exponentials along the last dimension.

    On GPUs x is read once: logits are larger than any cache, and jax.nn.logsumexp reads
    them for the maximum and again for the sum.
    """
    if platform() != "gpu":
        return jax.nn.logsumexp(x, axis=-1)

    def join(a: tuple, b: tuple) -> tuple[jax.Array, jax.Array]:
        (most_a, sum_a), (most_b, sum_b) = a, b
        less = jnp.exp(-jnp.abs(most_a - most_b))
        a_is_most = most_a >= most_b
        return (
            jnp.where(a_is_most, most_a, most_b),
            jnp.where(a_is_most, sum_a + sum_b * less, sum_a * less + sum_b),
        )

    none = jnp.array(jnp.finfo(x.dtype).min, x.dtype), jnp.zeros((), x.dtype)
    most, total = lax.reduce((x, jnp.ones_like(x)), none, join, (x.ndim - 1,))
    return most + jnp.log(total)


def _losses(
    part: Part,
    x_BxCxD: jax.Array,
    w_VxD: jax.Array,
    targets_BxC: jax.Array,
    split: Split,
    softcap: float | None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return cross-entropies (B, C), and what turns them into gradients of logits.

    The latter are the logits (B, C, V) of this device's part of the vocabulary, the
    logarithm of the sum of the whole vocabulary's exponentials (B, C), and the targets'
    places (B, C, V).
    """
    wide = jnp.promote_types(x_BxCxD.dtype, jnp.float32)
    logits_BxCxV = jnp.einsum(
        "BCD,VD->BCV", x_BxCxD, w_VxD, preferred_element_type=wide
    )
    logits_BxCxV = capped(logits_BxCxV, softcap)
    own_BxC = targets_BxC - part * w_VxD.shape[0]
    is_target_BxCxV = own_BxC[..., None] == jnp.arange(w_VxD.shape[0])
    total_BxC = _log_sum_exp(logits_BxCxV)
    if split.vocabulary is not None:
        most_BxC = lax.pmax(total_BxC, split.vocabulary)
        parts_BxC = split.over_vocabulary(jnp.exp(total_BxC - most_BxC))
        total_BxC = most_BxC + jnp.log(parts_BxC)
    here_BxC = jnp.clip(own_BxC, 0, w_VxD.shape[0] - 1)[..., None]
    target_BxC = jnp.take_along_axis(logits_BxCxV, here_BxC, axis=-1)[..., 0]
    if split.vocabulary is not None:
        target_BxC = jnp.where(is_target_BxCxV.any(-1), target_BxC, 0)
    losses_BxC = total_BxC - split.over_vocabulary(target_BxC)
    return losses_BxC, logits_BxCxV, total_BxC, is_target_BxCxV


def _sum_forward(
    x: jax.Array,
    w: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    size: int,
    split: Split,
    softcap: float | None,
) -> tuple[jax.Array, _Saved]:
    def local(
        part: Part, x: jax.Array, w: jax.Array, targets: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        def chunk(
            i: int | jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            total, dx, dw = carry
            x_BxCxD, weights_BxC = _part(x, i, size), _part(weights, i, size)
            losses, logits_BxCxV, total_BxC, is_target_BxCxV = _losses(
                part, x_BxCxD, w, _part(targets, i, size), split, softcap
            )
            p_BxCxV = jnp.exp(logits_BxCxV - total_BxC[..., None])
            dlogits_BxCxV = (p_BxCxV - is_target_BxCxV) * weights_BxC[..., None]
            if softcap is not None:
                dlogits_BxCxV *= 1.0 - jnp.square(logits_BxCxV / softcap)
            dlogits_BxCxV = dlogits_BxCxV.astype(x.dtype)
            dx_BxCxD = jnp.einsum("BCV,VD->BCD", dlogits_BxCxV, w)
            dx_BxCxD = split.over_vocabulary(dx_BxCxD)
            dx = lax.dynamic_update_slice_in_dim(dx, dx_BxCxD, i * size, axis=1)
            dw += jnp.einsum(
                "BCV,BCD->VD", dlogits_BxCxV, x_BxCxD, preferred_element_type=dw.dtype
            )
            return total + jnp.sum(losses * weights_BxC), dx, dw

        # zeros_like keeps how other mesh axes split them
        dw = jnp.zeros_like(w, dtype=weights.dtype)
        start = jnp.zeros((), weights.dtype), jnp.zeros_like(x), dw
        total, dx, dw = _over_chunks(x, size, chunk, start)
        return split.over_rows(total), dx, split.reduced(dw).astype(w.dtype)

    rows = split.rows_spec
    in_specs = rows, split.table_spec, rows, rows
    run = split.run(local, in_specs, (P(), rows, split.gradient_spec))
    total, dx, dw = run(x, w, targets, weights)
    return total, (dx, dw, targets)


def _sum_backward(
    size: int, split: Split, softcap: float | None, saved: _Saved, g: jax.Array
) -> tuple[jax.Array, jax.Array, np.ndarray, jax.Array]:
    del size, split, softcap
    dx, dw, targets = saved
    none = np.zeros(targets.shape, jax.dtypes.float0)
    weights = jnp.zeros(targets.shape, g.dtype)
    return (dx * g).astype(dx.dtype), (dw * g).astype(dw.dtype), none, weights


_sum.defvjp(_sum_forward, _sum_backward)
