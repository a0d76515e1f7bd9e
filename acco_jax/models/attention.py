"""Attention by the kernel that fits the devices a program is compiled for.

Shapes: B batch, T length, N heads of queries, K heads of keys and values (K divides N),
H width of a head.
"""

import functools
import importlib.util
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from acco_jax.core.groups import ROWS, TENSOR
from acco_jax.models import flash
from acco_jax.models.placement import automatic_axes, platform

XLA, CUDNN, PALLAS, SPLASH = "xla", "cudnn", "pallas", "splash"
IMPLEMENTATIONS = (XLA, CUDNN, PALLAS, SPLASH)
_BLOCK = 512  # queries and keys of a block of splash attention, at most
_LANES = 128  # of which a block of a TPU's kernel is a multiple


def default(dtype: DTypeLike, segments: bool, width: int, capped: bool = False) -> str:
    """Return the implementation that `attention` takes by default.

    Scores stay out of memory wherever there is a kernel for it. It needs 16 bits, and
    no mesh axis that splits the arrays in a way that only the compiler knows.

    Args:
      dtype: of queries, keys and values.
      segments: whether there are documents to keep apart.
      width: of a head. cuDNN takes multiples of 8 up to 128 on every GPU.
      capped: whether the scores have a soft cap, which cuDNN's lack.
    """
    here = platform()
    auto = set(automatic_axes()) - {ROWS, TENSOR}
    if here == "cpu" or jnp.dtype(dtype).itemsize != 2 or auto:
        return XLA
    if here == "tpu":
        return SPLASH
    suits = not segments and not capped and width % 8 == 0 and width <= 128
    return CUDNN if suits and _has_cudnn() else PALLAS


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float = 1.0,
    window: int | None = None,
    softcap: float | None = None,
    segments: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Return softmax(scale q k') v, each query seeing the keys up to its own place.

    Args:
      q: (B, T, N, H).
      k, v: (B, T, K, H), of the same dtype.
      scale: of the scores.
      window: how many keys a query sees, itself included; None: all before it.
      softcap: c of c tanh(score / c), which takes the place of each score.
      segments: (B, T) int32; a query sees only its own segment; None: all are one.
      implementation: one of `IMPLEMENTATIONS`; None: see `default`.

    Returns:
      (B, T, N H), of q's dtype, heads side by side.

    Raises:
      ValueError: there is no such implementation, cuDNN is not installed, or cuDNN is
        asked to keep documents apart or to cap scores.
    """
    documents, capped = segments is not None, softcap is not None
    chosen = implementation or default(q.dtype, documents, q.shape[-1], capped)
    if chosen not in _KERNELS:
        raise ValueError(
            f"attention is {chosen!r}: use one of {', '.join(IMPLEMENTATIONS)}."
        )
    if window is not None and window >= q.shape[1]:
        window = None
    kernel = functools.partial(
        _KERNELS[chosen], scale=scale, window=window, softcap=softcap
    )
    if chosen == XLA:
        return kernel(q, k, v, segments)
    # plan reads from this name how much a kernel computes
    with jax.named_scope(f"attention_{q.shape[1]}x{window or q.shape[1]}"):
        return _in_groups(kernel)(q, k, v, segments)


def _has_cudnn() -> bool:
    """Return whether JAX can compile cuDNN's attention here (JAX for NVIDIA's can)."""
    if "cuda" in jax.local_devices()[0].client.platform_version:
        return True
    try:
        return importlib.util.find_spec("nvidia.cudnn") is not None
    except ModuleNotFoundError:
        return False


def _in_groups(kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return the kernel on each device's own rows and heads.

    Compilers cannot split a kernel.

    Heads of keys that are too few for the devices are repeated, so that each device has
    the keys of its own heads of queries.
    """
    axes = [axis for axis in (ROWS, TENSOR) if axis in automatic_axes()]
    if not axes:
        return kernel
    rows, heads = (axis if axis in axes else None for axis in (ROWS, TENSOR))
    spec, out_spec = P(rows, None, heads, None), P(rows, None, heads)

    def run(
        q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None
    ) -> jax.Array:
        devices = automatic_axes().get(TENSOR, 1)
        if (copies := devices // math.gcd(k.shape[2], devices)) > 1:
            k, v = (jnp.repeat(x, copies, axis=2) for x in (k, v))
        in_specs = spec, spec, spec, None if segments is None else P(rows)
        split = jax.shard_map(
            kernel, in_specs=in_specs, out_specs=out_spec, axis_names=set(axes),
            check_vma=False,
        )  # fmt: skip
        return split(q, k, v, segments)

    return run


def _side_by_side(y: jax.Array) -> jax.Array:
    return y.reshape(*y.shape[:2], -1)


def masked(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    *,
    scale: float,
    softcap: float | None,
) -> jax.Array:
    """Return attention by a mask, its scores in memory.

    Args:
      q: (B, T, N, H).
      k, v: (B, S, K, H), of the same dtype.
      mask: (B or 1, 1, T, S), whether a query sees a key.
      scale: of the scores.
      softcap: as for `attention`.

    Returns:
      (B, T, N H), of q's dtype.
    """
    if softcap is None:
        y = jax.nn.dot_product_attention(
            q, k, v, mask=mask, scale=scale, implementation="xla"
        )
        return _side_by_side(y)
    (B, T, N, H), K = q.shape, k.shape[2]
    q_BxTxKxGxH, wide = q.reshape(B, T, K, N // K, H), jnp.promote_types(q.dtype, "f4")
    s_BxKxGxTxS = scale * jnp.einsum(
        "BTKGH,BSKH->BKGTS", q_BxTxKxGxH, k, preferred_element_type=wide
    )
    s_BxKxGxTxS = softcap * jnp.tanh(s_BxKxGxTxS / softcap)
    s_BxKxGxTxS = jnp.where(mask[:, :, None], s_BxKxGxTxS, jnp.finfo(wide).min)
    p_BxKxGxTxS = jax.nn.softmax(s_BxKxGxTxS, axis=-1).astype(v.dtype)
    return _side_by_side(jnp.einsum("BKGTS,BSKH->BTKGH", p_BxKxGxTxS, v))


def _scores(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> jax.Array:
    if softcap is not None:
        return _capped(q, k, v, segments, scale, window, softcap)
    mask = None
    if segments is not None:
        mask = (segments[:, :, None] == segments[:, None, :])[:, None]
    # jax counts the keys before a query, this the query as well
    before = None if window is None else (window - 1, 0)
    y = jax.nn.dot_product_attention(
        q, k, v, mask=mask, scale=scale, is_causal=True, local_window_size=before,
        implementation="xla",
    )  # fmt: skip
    return checkpoint_name(_side_by_side(y), flash.SAVED)


def _capped(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    scale: float,
    window: int | None,
    softcap: float,
) -> jax.Array:
    before = jnp.arange(q.shape[1])[:, None] - jnp.arange(q.shape[1])
    seen = (before >= 0)[None]
    if window is not None:
        seen &= before < window
    if segments is not None:
        seen &= segments[:, :, None] == segments[:, None, :]
    y = masked(q, k, v, seen[:, None], scale=scale, softcap=softcap)
    return checkpoint_name(y, flash.SAVED)


def _cudnn(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> jax.Array:
    if softcap is not None:
        raise ValueError(
            f"attention is 'cudnn', which has no score_softcap={softcap}: leave it "
            "unset."
        )
    if segments is not None:
        raise ValueError(
            "attention is 'cudnn', which does not keep documents apart: leave it unset."
        )
    if not _has_cudnn():
        raise ValueError(
            "attention is 'cudnn', which is not installed here: leave it unset."
        )
    before = None if window is None else (window - 1, 0)
    y = jax.nn.dot_product_attention(
        q, k, v, scale=scale, is_causal=True, local_window_size=before,
        implementation="cudnn",
    )  # fmt: skip
    return _side_by_side(y)


def _pallas(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> jax.Array:
    return flash.attention(
        q, k, v, segments, scale=scale, window=window, softcap=softcap,
        interpret=platform() == "cpu",
    )  # fmt: skip


def _splash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> jax.Array:
    # here, for it is not part of JAX on every platform
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as splash,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as masks,
    )

    T, N = q.shape[1], q.shape[2]
    size = min(_BLOCK, _LANES * math.ceil(T / _LANES))
    length = -T % size
    shape = T + length, T + length
    mask: masks.Mask = masks.CausalMask(shape)
    if window is not None:
        mask = masks.LocalMask(shape, (window - 1, 0), 0)
    blocks = splash.BlockSizes(
        block_q=size, block_kv=size, block_kv_compute=size,
        block_q_dkv=size, block_kv_dkv=size, block_kv_dkv_compute=size,
        block_q_dq=size, block_kv_dq=size,
    )  # fmt: skip
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([mask] * N),
        block_sizes=blocks,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=flash.SAVED,
        attn_logits_soft_cap=softcap,
        interpret=platform() == "cpu",
    )

    def heads_first(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, length), (0, 0), (0, 0))) if length else x
        return x.swapaxes(1, 2)

    ids = None
    if segments is not None:
        padded = jnp.pad(segments, ((0, 0), (0, length)), mode="edge")
        ids = splash.SegmentIds(q=padded, kv=padded)
    scaled = q if scale == 1.0 else q * jnp.asarray(scale, q.dtype)
    args = map(heads_first, (scaled, k, v))
    y = jax.vmap(kernel)(*args) if ids is None else jax.vmap(kernel)(*args, ids)
    return _side_by_side(y.swapaxes(1, 2)[:, :T])


_KERNELS = {XLA: _scores, CUDNN: _cudnn, PALLAS: _pallas, SPLASH: _splash}
