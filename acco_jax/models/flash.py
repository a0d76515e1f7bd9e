"""Flash attention for GPUs: causal, optionally in a window, scores never in memory.

Shapes are spelled in suffixes: B batch, T length, N heads of queries, K heads of keys
and values, which N / K heads of queries share, H width of a head. Blocks are of R rows
(queries) and C columns (keys).

Source: Dao, FlashAttention-2 (arXiv 2307.08691), algorithms 1 and 2.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

SAVED = "attention"  # name, for policies of jax.checkpoint, of what is saved
_LOG2E = math.log2(math.e)
_HIDDEN = -1e30  # score of a key that a query does not see

# a block in the memory of a kernel; the types of JAX do not describe its `at`
Ref = Any
Index = int | jax.Array  # of a block
# q, k, v, segments, o and log2 of the sums of exponentials
_Saved = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """The static parameters of an attention kernel."""

    scale: float
    window: int | None  # keys that a query sees, itself included; None: all before it
    softcap: float | None
    rows: int  # of a block of queries
    columns: int  # of a block of keys
    interpret: bool

    def scores(
        self,
        q_RxH: jax.Array,
        k_CxH: jax.Array,
        i: Index,
        j: Index,
        segments: Ref | None,
    ) -> jax.Array:
        """Return the scores of query block i and key block j, as exponents of two."""
        s_RxC = plgpu.dot(q_RxH, k_CxH.T) * (self.scale * _LOG2E)
        if self.softcap is not None:
            most = self.softcap * _LOG2E
            s_RxC = most * jnp.tanh(s_RxC / most)
        rows = (i * self.rows + jnp.arange(self.rows))[:, None]
        columns = (j * self.columns + jnp.arange(self.columns))[None, :]
        seen = columns <= rows
        if self.window is not None:
            seen &= columns > rows - self.window
        if segments is not None:
            of_rows = plgpu.load(segments.at[self.rows_at(i)])
            of_columns = plgpu.load(segments.at[self.columns_at(j)])
            seen &= of_rows[:, None] == of_columns[None, :]
        return jnp.where(seen, s_RxC, _HIDDEN)

    def before_cap(self, ds_RxC: jax.Array, s_RxC: jax.Array) -> jax.Array:
        """Return gradients of scores before the soft cap, from those of `scores`."""
        if self.softcap is None:
            return ds_RxC
        # hidden scores lie far below the cap; their gradients are 0
        part_RxC = jnp.maximum(s_RxC / (self.softcap * _LOG2E), -1.0)
        return ds_RxC * (1.0 - part_RxC * part_RxC)

    def rows_at(self, i: Index) -> slice | pl.Slice:
        return pl.ds(i * self.rows, self.rows)

    def columns_at(self, j: Index) -> slice | pl.Slice:
        return pl.ds(j * self.columns, self.columns)

    def columns_of(self, i: Index) -> tuple[Index, Index]:
        """Return the first and the end of the key blocks that query block i sees."""
        first: Index = 0
        if self.window is not None:
            first = jnp.maximum(i * self.rows - self.window + 1, 0) // self.columns
        return first, pl.cdiv((i + 1) * self.rows, self.columns)

    def rows_of(self, j: Index, length: int) -> tuple[Index, Index]:
        """Return the first and the end of the query blocks that see key block j."""
        end: Index = length
        if self.window is not None:
            end = jnp.minimum((j + 1) * self.columns + self.window - 1, length)
        return j * self.columns // self.rows, pl.cdiv(end, self.rows)

    def call(
        self, body: Callable[..., None], name: str, **options: Any
    ) -> Callable[..., Any]:
        return pl.pallas_call(
            body,
            compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
            interpret=self.interpret,
            name=name,
            **options,
        )


def _forward_kernel(
    kernel: _Kernel, q: Ref, k: Ref, v: Ref, segments: Ref | None, o: Ref, lse: Ref
) -> None:
    """Compute a block of queries' outputs and log2 of its sums of exponentials.

    q (R, H); k, v (T, H); segments (T,) or None; o (R, H); lse (R,).
    """
    i = pl.program_id(2)
    q_RxH = plgpu.load(q)

    def block(
        j: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        acc_RxH, largest_R, sum_R = carry
        s_RxC = kernel.scores(
            q_RxH, plgpu.load(k.at[kernel.columns_at(j), :]), i, j, segments
        )
        new_R = jnp.maximum(largest_R, s_RxC.max(axis=1))
        p_RxC = jnp.exp2(s_RxC - new_R[:, None])
        shrink_R = jnp.exp2(largest_R - new_R)
        v_CxH = plgpu.load(v.at[kernel.columns_at(j), :])
        acc_RxH = acc_RxH * shrink_R[:, None] + plgpu.dot(p_RxC.astype(v.dtype), v_CxH)
        return acc_RxH, new_R, sum_R * shrink_R + p_RxC.sum(axis=1)

    start_R = jnp.full((kernel.rows,), -jnp.inf, jnp.float32)
    zeros_RxH = jnp.zeros(q_RxH.shape, jnp.float32)
    start = zeros_RxH, start_R, jnp.zeros_like(start_R)
    acc_RxH, largest_R, sum_R = lax.fori_loop(*kernel.columns_of(i), block, start)
    plgpu.store(o, (acc_RxH / sum_R[:, None]).astype(o.dtype))
    plgpu.store(lse, largest_R + jnp.log2(sum_R))


def _queries_kernel(
    kernel: _Kernel,
    q: Ref,
    k: Ref,
    v: Ref,
    segments: Ref | None,
    do: Ref,
    lse: Ref,
    delta: Ref,
    dq: Ref,
) -> None:
    """Compute one block of queries' gradient.

    q, do, dq are (R, H); k, v (T, H); the others (R,).
    """
    i = pl.program_id(2)
    q_RxH, do_RxH = plgpu.load(q), plgpu.load(do)
    lse_R, delta_R = plgpu.load(lse), plgpu.load(delta)

    def block(j: jax.Array, dq_RxH: jax.Array) -> jax.Array:
        k_CxH = plgpu.load(k.at[kernel.columns_at(j), :])
        v_CxH = plgpu.load(v.at[kernel.columns_at(j), :])
        s_RxC = kernel.scores(q_RxH, k_CxH, i, j, segments)
        p_RxC = jnp.exp2(s_RxC - lse_R[:, None])
        ds_RxC = p_RxC * (plgpu.dot(do_RxH, v_CxH.T) - delta_R[:, None])
        ds_RxC = kernel.before_cap(ds_RxC, s_RxC)
        return dq_RxH + plgpu.dot(ds_RxC.astype(k.dtype), k_CxH)

    start = jnp.zeros(q_RxH.shape, jnp.float32)
    dq_RxH = lax.fori_loop(*kernel.columns_of(i), block, start)
    plgpu.store(dq, (dq_RxH * kernel.scale).astype(dq.dtype))


def _keys_kernel(
    kernel: _Kernel,
    q: Ref,
    k: Ref,
    v: Ref,
    segments: Ref | None,
    do: Ref,
    lse: Ref,
    delta: Ref,
    dk: Ref,
    dv: Ref,
) -> None:
    """Compute the gradients of one block of keys and values, for one head of queries.

    k, v, dk, dv (C, H); q, do (T, H); lse, delta (T,).
    """
    j = pl.program_id(2)
    k_CxH, v_CxH = plgpu.load(k), plgpu.load(v)

    def block(
        i: jax.Array, carry: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        dk_CxH, dv_CxH = carry
        at = kernel.rows_at(i)
        q_RxH, do_RxH = plgpu.load(q.at[at, :]), plgpu.load(do.at[at, :])
        s_RxC = kernel.scores(q_RxH, k_CxH, i, j, segments)
        p_RxC = jnp.exp2(s_RxC - plgpu.load(lse.at[at])[:, None])
        dv_CxH += plgpu.dot(p_RxC.astype(do.dtype).T, do_RxH)
        delta_R = plgpu.load(delta.at[at])
        ds_RxC = p_RxC * (plgpu.dot(do_RxH, v_CxH.T) - delta_R[:, None])
        ds_RxC = kernel.before_cap(ds_RxC, s_RxC)
        return dk_CxH + plgpu.dot(ds_RxC.astype(q.dtype).T, q_RxH), dv_CxH

    zeros = jnp.zeros(k_CxH.shape, jnp.float32)
    rows = kernel.rows_of(j, q.shape[0])
    dk_CxH, dv_CxH = lax.fori_loop(*rows, block, (zeros, zeros))
    plgpu.store(dk, (dk_CxH * kernel.scale).astype(dk.dtype))
    plgpu.store(dv, dv_CxH.astype(dv.dtype))


def attention(
    q_BxTxNxH: jax.Array,
    k_BxTxKxH: jax.Array,
    v_BxTxKxH: jax.Array,
    segments_BxT: jax.Array | None = None,
    *,
    scale: float = 1.0,
    window: int | None = None,
    softcap: float | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Return softmax(scale q k') v, each query seeing the keys up to its own place.

    Args:
      q_BxTxNxH: bfloat16 or float16.
      k_BxTxKxH, v_BxTxKxH: of the same dtype; K divides N.
      segments_BxT: int32; a query sees only keys of its own segment.
      scale: of the scores.
      window: how many keys a query sees, itself included; None: all before it.
      softcap: c of c tanh(score / c), which takes the place of each score.
      interpret: whether the kernel is interpreted, on CPU.

    Returns:
      (B, T, N H), of q's dtype, heads side by side; scores and sums are float32.
    """
    T, H = q_BxTxNxH.shape[1], q_BxTxNxH.shape[3]
    width = max(16, pl.next_power_of_2(H))
    # as many as fit an A100's shared memory, with all that a block needs
    rows = max(16, min(128, 128 * 64 // width, pl.next_power_of_2(T)))
    columns = min(64, rows)
    kernel = _Kernel(scale, window, softcap, rows, columns, interpret)
    length, width = -T % rows, width - H
    pads = (0, 0), (0, length), (0, 0), (0, width)
    q, k, v = (
        jnp.pad(x, pads) if length or width else x
        for x in (q_BxTxNxH, k_BxTxKxH, v_BxTxKxH)
    )
    if segments_BxT is not None and length:  # no query sees what comes after it
        segments_BxT = jnp.pad(segments_BxT, pads[:2], mode="edge")
    y = _attention(q, k, v, segments_BxT, kernel)
    if not length and not width:
        return y
    y_BxTxNxH = y.reshape(*q.shape)[:, :T, :, :H]
    return y_BxTxNxH.reshape(*y_BxTxNxH.shape[:2], -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    kernel: _Kernel,
) -> jax.Array:
    return _forward(q, k, v, segments, kernel)[0]


def _specs(
    shape: tuple[int, ...], group: int
) -> tuple[Callable[..., pl.BlockSpec], ...]:
    """Return makers of block specs of (B, T, N or K, H) and (B, N, T) arrays."""
    _, T, _, H = shape

    def block(size: int, shared: int = 1) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, size, None, H), lambda b, h, i: (b, i, h // shared, 0)
        )

    def whole(shared: int = 1) -> pl.BlockSpec:
        return pl.BlockSpec((None, T, None, H), lambda b, h, i: (b, 0, h // shared, 0))

    def numbers(size: int | None = None) -> pl.BlockSpec:
        if size is None:
            return pl.BlockSpec((None, None, T), lambda b, h, i: (b, h, 0))
        return pl.BlockSpec((None, None, size), lambda b, h, i: (b, h, i))

    return block, whole, numbers


def _segments_spec(segments: jax.Array | None) -> pl.BlockSpec | None:
    if segments is None:
        return None
    return pl.BlockSpec((None, segments.shape[1]), lambda b, h, i: (b, 0))


def _forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    kernel: _Kernel,
) -> tuple[jax.Array, jax.Array]:
    B, T, N, _ = q.shape
    group = N // k.shape[2]
    block, whole, numbers = _specs(q.shape, group)
    o, lse = kernel.call(
        functools.partial(_forward_kernel, kernel),
        "attention_forward",
        grid=(B, N, T // kernel.rows),
        in_specs=[
            block(kernel.rows), whole(group), whole(group), _segments_spec(segments)
        ],
        out_specs=[block(kernel.rows), numbers(kernel.rows)],
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((B, N, T), jnp.float32),
        ],
    )(q, k, v, segments)  # fmt: skip
    return o.reshape(B, T, -1), lse  # in the shape of use: one array is saved


def _attention_forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    kernel: _Kernel,
) -> tuple[jax.Array, _Saved]:
    o, lse = checkpoint_name(_forward(q, k, v, segments, kernel), SAVED)
    return o, (q, k, v, segments, o, lse)


def _attention_backward(
    kernel: _Kernel, saved: _Saved, do: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, segments, o, lse = saved
    B, T, N, H = q.shape
    K = k.shape[2]
    group = N // K
    o, do = o.reshape(q.shape), do.reshape(q.shape)
    delta = jnp.einsum("BTNH,BTNH->BNT", o, do, preferred_element_type=jnp.float32)
    block, whole, numbers = _specs(q.shape, group)
    dq = kernel.call(
        functools.partial(_queries_kernel, kernel),
        "attention_queries",
        grid=(B, N, T // kernel.rows),
        in_specs=[
            block(kernel.rows), whole(group), whole(group), _segments_spec(segments),
            block(kernel.rows), numbers(kernel.rows), numbers(kernel.rows),
        ],
        out_specs=block(kernel.rows),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
    )(q, k, v, segments, do, lse, delta)  # fmt: skip
    # gradients of a head that several heads of queries share are added up afterwards
    dtype = k.dtype if group == 1 else jnp.float32
    dk, dv = kernel.call(
        functools.partial(_keys_kernel, kernel),
        "attention_keys",
        grid=(B, N, T // kernel.columns),
        in_specs=[
            whole(), block(kernel.columns, group), block(kernel.columns, group),
            _segments_spec(segments), whole(), numbers(), numbers(),
        ],
        out_specs=[block(kernel.columns), block(kernel.columns)],
        out_shape=[jax.ShapeDtypeStruct((B, T, N, H), dtype)] * 2,
    )(q, k, v, segments, do, lse, delta)  # fmt: skip
    if group > 1:
        dk, dv = (
            x.reshape(B, T, K, group, H).sum(axis=3).astype(k.dtype) for x in (dk, dv)
        )
    return dq, dk, dv, None


_attention.defvjp(_attention_forward, _attention_backward)
