"""SparseLoCo: the largest 1 to 3 % of a round's changes, in 2 bits (arXiv 2508.15706).

    theta_r = theta(t) after H steps of the inner optimizer on worker r's data
    Delta_r = theta(t) - theta_r
    e_r <- beta e_r + w_r Delta_r
    Delta^_r = Q(Top-k(e_r)),  e_r <- e_r - Delta^_r
    theta(t+1) = theta(t) - alpha sum_r Delta^_r / sum_r w_r

Top-k takes the k largest magnitudes of every chunk of 4096 entries. The decayed error
e_r stands in for an outer momentum. w_r is worker r's weight: with weighted=False it is
1, as in the paper. A worker without weight sends nothing and keeps e_r as it is.

An entry is 12 bits of place, a sign and the other value bits. Q divides the range from
a chunk's smallest to its largest sent magnitude into 2^(value_bits - 1) equal intervals
and sends the middle of one. The range is 32 bits a chunk. If the smallest is 0, the
first middle is 0 and the last middle is the largest magnitude: 0 is sent as 0.

The authors' earlier code, CCLoco, differs in three points: its chunks are blocks of 64
by 64 of a matrix, here they are consecutive entries; its Q sends a table of means; and
it divides an entry by the number of workers that sent it, the equation above by all.

At 1 % and 2 bits a worker sends 0.0185 bytes per parameter, (n - 1) times: all workers
gather every message. diloco's reduction and gather stay below 4 bytes in bfloat16. So
sparseloco sends 216 / n times fewer bytes than diloco, and from 217 workers on more.
docs/site/methods.md has a table by keep, value_bits and n.
"""

from typing import Unpack

import optax
from jax.sharding import Mesh

from acco_jax.methods.local.local_method import LocalMethod, outer_step
from acco_jax.methods.local.rounds import RoundOptions
from acco_jax.methods.local.sparse import (
    Message,
    SparseLocoState,
    entries,
    sparse_rounds,
)

CHUNK = 4096


def sparseloco(
    inner: optax.GradientTransformation,
    *,
    mesh: Mesh,
    local_steps: int = 50,
    keep: float | int = 1 / 64,
    value_bits: int = 2,
    error_decay: float = 0.95,
    outer_learning_rate: float = 1.0,
    outer_momentum: float = 0.0,
    outer: optax.GradientTransformation | None = None,
    **options: Unpack[RoundOptions],
) -> LocalMethod:
    """Average the largest changes of H local steps in few bits, with error feedback.

    Bytes sent per worker and round: (n - 1) (keep (12 + value_bits) / 8 + 1 / 1024) per
    parameter. Nothing is sharded: every worker holds theta, the outer state and e_r.

    Args:
      inner: each worker's optimizer, an optax transformation (the paper's is AdamW).
      mesh: the devices.
      local_steps: H.
      keep: which part of the entries is sent, above 0 and at most 1; or an integer, how
        many of every 4096.
      value_bits: 2, 3 or 4 of every value sent, its sign included.
      error_decay: beta, from 0 to 1.
      outer_learning_rate: alpha.
      outer_momentum: Nesterov's, of the outer step; the paper has none.
      outer: an optax transformation instead, on whole leaves in float32 or wider.
      **options: see `acco_jax.methods.local.rounds.RoundOptions`; comm_dtype changes
        nothing, because values are sent in value_bits.

    Returns:
      A `LocalMethod`; one call of its train step is a round of H steps.

    Raises:
      ValueError: if `value_bits` is not 2, 3 or 4, `error_decay` is not from 0 to 1,
        `keep` is not a part or number of a chunk, or `inner` is not of optax.

    References:
      Sarfi et al., Communication Efficient LLM Pre-training with SparseLoCo
      (https://arxiv.org/abs/2508.15706)
    """
    if value_bits not in (2, 3, 4):
        raise ValueError(f"value_bits is {value_bits!r}: choose 2, 3 or 4.")
    if not 0 <= error_decay <= 1:
        raise ValueError(f"error_decay is {error_decay!r}: it must lie from 0 to 1.")
    message = Message(entries(keep, CHUNK), CHUNK, value_bits)
    outer = outer_step(outer, outer_learning_rate, outer_momentum, (1.0, 0.0))
    return sparse_rounds(
        inner, outer, message, mesh, local_steps, options, error_decay, SparseLocoState
    )
