"""The likelihood of given texts under a transformer.

Shapes: B rows, T targets of a row.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from acco_jax.models import head
from acco_jax.models.sampling import padded_length
from acco_jax.models.sizes import Config
from acco_jax.models.transformer import Params, bound

ROWS = 8  # that are computed at once, at most
TOKENS = 2**13  # of them together, at most, unless one row has more


class ScoredRow(NamedTuple):
    """Tokens, of which the last ones are to be scored."""

    tokens: np.ndarray  # (n,) of integers; n is at most 1 + the model's positions
    targets: int  # how many of the last ones: at least 1, less than n


class Score(NamedTuple):
    """The cost of a row's targets."""

    nats: float  # the sum of their cross-entropies
    likeliest: bool  # whether each is the likeliest token after those before it


def windows(tokens: np.ndarray, length: int, stride: int) -> Iterator[ScoredRow]:
    """Yield rows that have each token but the first as a target exactly once.

    Each row has `length` targets, or all if there are fewer. Each row but the first
    begins at most `stride` tokens after the row before. Only its targets that no
    earlier row has are scored.

    Args:
      tokens: (n,) of integers.
      length: at least 1.
      stride: from 1 to `length`.
    """
    last, done = len(tokens) - 1, 0
    while done < last:
        end = min(max(done + stride, length), last)
        yield ScoredRow(tokens[max(end - length, 0) : end + 1], end - done)
        done = end


def score(config: Config, params: Params, rows: Sequence[ScoredRow]) -> list[Score]:
    """Return the cost of each row's targets.

    Rows of like length are computed together, padded.

    Args:
      config: of the model.
      params: in the tree of `transformer.init_params`.
      rows: any number.
    """
    order = np.argsort([-len(row.tokens) for row in rows], kind="stable")
    found: dict[int, Score] = {}
    while len(found) < len(rows):
        left = order[len(found) :]
        longest = len(rows[left[0]].tokens) - 1
        T = min(padded_length(longest), config.max_length)
        most = 1 << (max(TOKENS // T, 1).bit_length() - 1)
        numbers = left[: min(ROWS, most)]
        B = 1 << (len(numbers) - 1).bit_length()  # few programs
        tokens, mask = np.zeros((B, T + 1), np.int32), np.zeros((B, T), bool)
        for i, number in enumerate(numbers):
            row = rows[number]
            n = len(row.tokens)
            tokens[i, :n], mask[i, n - 1 - row.targets : n - 1] = row.tokens, True
        nats, likeliest = jax.device_get(_scores(config, params, tokens, mask))
        for i, number in enumerate(numbers):
            found[number] = Score(float(nats[i]), bool(likeliest[i]))
    return [found[number] for number in range(len(rows))]


@functools.partial(jax.jit, static_argnums=0)
def _scores(
    config: Config, params: Params, tokens: jax.Array, mask: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return nats and bools (B,) of tokens (B, T + 1), with a target mask (B, T)."""
    x_BxTxD, w_VxD = bound(config, params)(tokens[:, :-1])
    nats_BxT, likeliest_BxT = head.each(
        x_BxTxD, w_VxD, tokens[:, 1:], softcap=config.logit_softcap
    )
    return jnp.where(mask, nats_BxT, 0).sum(1), (likeliest_BxT | ~mask).all(1)
