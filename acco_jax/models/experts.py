"""A mixture of experts: each token's own few gated MLPs, by grouped matmuls.

No token is dropped. Each device of a group computes its own rows ("fsdp") and its part
of every expert's hidden units ("tensor").

Shapes: B batch, T length, D width, E experts, F hidden units of an expert, k experts of
a token, R = B T k rows of grouped matmuls.

Sources: Shazeer et al., sparsely gated mixtures of experts (arXiv 1701.06538); Fedus et
al., Switch Transformers (arXiv 2101.03961), equations 4 to 6, for the loss.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from acco_jax.core.groups import ROWS, TENSOR
from acco_jax.models.placement import automatic_axes

# rows that each expert has been chosen for, and its summed probabilities: (..., E)
Routed = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Experts:
    """The computation of a layer's experts.

    Attributes:
      per_token: k.
      normalized: whether the weights of a token's experts are made to sum to 1.
      gate: (gate, up) -> the hidden units.
      name: marks results of matmuls for policies of `jax.checkpoint`.
    """

    per_token: int
    normalized: bool
    gate: Callable[[jax.Array, jax.Array], jax.Array]
    name: Callable[[jax.Array], jax.Array]

    def __call__(
        self,
        x_BxTxD: jax.Array,
        logits_BxTxE: jax.Array,
        gate_ExDxF: jax.Array,
        up_ExDxF: jax.Array,
        down_ExFxD: jax.Array,
    ) -> tuple[jax.Array, Routed]:
        """Return weighted sums of tokens' experts (B, T, D), and the routing."""
        sizes = automatic_axes()
        divided = {ROWS: x_BxTxD.shape[0], TENSOR: gate_ExDxF.shape[2]}
        axes = {a for a in divided if a in sizes}
        if not axes:
            y_1xBxTxD, routed = self._local(
                x_BxTxD, logits_BxTxE, gate_ExDxF, up_ExDxF, down_ExFxD
            )
            return y_1xBxTxD[0], routed
        rows, hidden = (
            a if a in axes and divided[a] % sizes[a] == 0 else None for a in divided
        )
        columns = P(None, None, hidden)
        split = jax.shard_map(
            self._local,
            in_specs=(P(rows), P(rows), columns, columns, P(None, hidden)),
            out_specs=(P(hidden, rows), (P(rows), P(rows))),
            axis_names=axes,
            check_vma=False,
        )
        y_SxBxTxD, routed = split(
            x_BxTxD, logits_BxTxE, gate_ExDxF, up_ExDxF, down_ExFxD
        )
        return y_SxBxTxD.sum(0), routed

    def _local(self, x: Any, logits: Any, gate: Any, up: Any, down: Any) -> Any:
        """Return results (1, B, T, D) of these hidden units, and the routing (B, E)."""
        (B, T, D), E, k = x.shape, logits.shape[-1], self.per_token
        wide = jnp.promote_types(x.dtype, jnp.float32)
        p_BxTxE = jax.nn.softmax(logits.astype(wide), axis=-1)
        weights_BxTxk, chosen_BxTxk = lax.top_k(p_BxTxE, k)
        if self.normalized:
            weights_BxTxk /= weights_BxTxk.sum(axis=-1, keepdims=True)
        chosen_R = chosen_BxTxk.reshape(-1)
        order_R = jnp.argsort(chosen_R)  # stable
        sizes_E = jnp.bincount(chosen_R, length=E)
        x_RxD = x.reshape(-1, D)[order_R // k]
        hidden_RxF = self.gate(
            self.name(lax.ragged_dot(x_RxD, gate, sizes_E)),
            self.name(lax.ragged_dot(x_RxD, up, sizes_E)),
        )
        y_RxD = lax.ragged_dot(hidden_RxF, down, sizes_E)[jnp.argsort(order_R)]
        y_BxTxkxD = self.name(y_RxD).reshape(B, T, k, D)
        y_BxTxD = jnp.einsum("BTkD,BTk->BTD", y_BxTxkxD, weights_BxTxk.astype(x.dtype))
        counts_BxE = jax.nn.one_hot(chosen_BxTxk, E, dtype=wide).sum((1, 2))
        return y_BxTxD[None], (counts_BxE, p_BxTxE.sum(1))


def balance(routed: Sequence[Routed]) -> jax.Array:
    """Return the load-balancing loss: E sum_e (share of tokens)_e (mean probability)_e.

    It is k where all experts are chosen equally often, and larger otherwise.

    Args:
      routed: of all layers, each with any leading dimensions.
    """
    counts_E, p_E = (
        sum(x.reshape(-1, x.shape[-1]).sum(0) for x in parts)
        for parts in zip(*routed, strict=True)
    )
    rows = p_E.sum()  # probabilities of a token sum to 1
    return len(counts_E) * jnp.sum(counts_E * p_E) / lax.stop_gradient(rows) ** 2
