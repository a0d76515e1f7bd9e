"""Federated averaging that sends the largest changes only (CELLM, arXiv 2407.20557).

With x(t) the point where all workers start a round, theta_i where worker i's H local
steps lead it, w_i its weight (its amount of data) and e_i what it has not sent yet,

    u_i = w_i (x(t) - theta_i) + e_i(t)
    s_i = of every 256 entries of u_i the k of largest magnitude, in the dtype sent
    e_i(t+1) = u_i - s_i
    x(t+1) = a step of the outer optimizer from x(t) on sum_i s_i / sum_i w_i

A worker without weight sends nothing and keeps e_i. With k = 256 it is dense averaging.
The parameters are whatever the loop trains: with `acco_jax.models.lora`, adapters.
A place of an entry is 8 bits, close to the least there is, 6.8 for 4 of 256.

Of CELLM only the abstract is public: low-rank adapters, sparse updates, unequal data.
"""

from typing import Unpack

import optax
from jax.sharding import Mesh

from acco_jax.methods.local.local_method import LocalMethod, outer_step
from acco_jax.methods.local.rounds import RoundOptions
from acco_jax.methods.local.sparse import Message, entries, sparse_rounds


def cellm(
    inner: optax.GradientTransformation,
    *,
    mesh: Mesh,
    local_steps: int = 50,
    keep: float | int = 1 / 64,
    outer_learning_rate: float = 1.0,
    outer_momentum: float = 0.0,
    outer: optax.GradientTransformation | None = None,
    **options: Unpack[RoundOptions],
) -> LocalMethod:
    """Average the largest changes of H local steps; the rest waits for its turn.

    Bytes sent per worker and round: (n - 1) keep (1 + b) per parameter, b bytes of the
    communication dtype, as a gather of all workers' entries has it. Dense averaging
    sends 2 (n - 1) / n b: at the default keep 85 / n times as much in bfloat16 and
    102 / n in float32, so 10 times at 8 workers; for many more of them lower keep.
    Nothing is sharded: every worker holds x, the outer state and e_i.

    Args:
      inner: each worker's optimizer, an optax transformation.
      mesh: the devices.
      local_steps: H.
      keep: which part of the entries is sent, above 0 and at most 1; or an integer, how
        many of every 256.
      outer_learning_rate: of the outer step; 1 without momentum: federated averaging.
      outer_momentum: Nesterov's, of the outer step.
      outer: an optax transformation instead, on whole leaves in float32 or wider.
      **options: see `acco_jax.methods.local.rounds.RoundOptions`.

    Returns:
      A `LocalMethod`; one call of its train step is a round of H steps.

    Raises:
      ValueError: in one line, before any device work, what does not fit.

    References:
      CELLM (https://arxiv.org/abs/2407.20557), its abstract; McMahan et al.,
      Communication-Efficient Learning of Deep Networks from Decentralized Data
      (https://arxiv.org/abs/1602.05629); Stich et al., Sparsified SGD with Memory
      (https://arxiv.org/abs/1809.07599)
    """
    message = Message(entries(keep, 256))
    outer = outer_step(outer, outer_learning_rate, outer_momentum, (1.0, 0.0))
    return sparse_rounds(inner, outer, message, mesh, local_steps, options)
