"""Text generation by a transformer, with tokens sampled or the likeliest, in a loop.

Shapes: B rows, S tokens that a row has room for, V vocabulary.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from acco_jax.models import decoding
from acco_jax.models.sizes import Config
from acco_jax.models.transformer import Params

LEAST_TEMPERATURE = 1e-37  # smaller numbers may count as 0
SHORTEST = 16  # room for tokens comes in powers of two from here on: few programs


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The choice of a token from logits.

    Attributes:
      temperature: divides the logits; 0: the likeliest token is taken.
      top_k: samples from this many of the likeliest tokens; None: from all.
      top_p: samples from the fewest likeliest tokens whose probabilities sum to this;
        None: from all.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}: give 0 or more")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}: give 1 or more, or leave it out")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_p is {self.top_p}: give more than 0 and at most 1, or leave it "
                "out"
            )


class Texts(NamedTuple):
    """The rows that are being generated."""

    tokens: jax.Array  # (B, S) int32; values beyond a row's length have no meaning
    lengths: jax.Array  # (B,) int32
    ended: jax.Array  # (B,) bool: its last token ends a text, or it has its last one
    limits: jax.Array  # (B,) int32, lengths at which rows end
    keys: jax.Array  # (B,) of random numbers
    cache: decoding.Cache  # of all but a row's last token


def choose(sampling: Sampling, logits_BxV: jax.Array, keys_B: jax.Array) -> jax.Array:
    """Return a token of each row, (B,) int32, sampled with its own key."""
    if sampling.temperature == 0:
        return jnp.argmax(logits_BxV, axis=-1).astype(jnp.int32)
    logits_BxV -= logits_BxV.max(axis=-1, keepdims=True)  # else small ones overflow
    logits_BxV = logits_BxV / max(sampling.temperature, LEAST_TEMPERATURE)
    if sampling.top_k is not None:
        most = min(sampling.top_k, logits_BxV.shape[-1])
        logits_BxV = _at_least(logits_BxV, jax.lax.top_k(logits_BxV, most)[0][:, -1])
    if sampling.top_p is not None:
        descending_BxV = -jnp.sort(-logits_BxV, axis=-1)
        p_BxV = jax.nn.softmax(descending_BxV, axis=-1)
        before_BxV = jnp.cumsum(p_BxV, axis=-1) - p_BxV
        kept_BxV = jnp.where(before_BxV < sampling.top_p, descending_BxV, jnp.inf)
        logits_BxV = _at_least(logits_BxV, kept_BxV.min(axis=-1))
    return jax.vmap(jax.random.categorical)(keys_B, logits_BxV).astype(jnp.int32)


def _at_least(logits_BxV: jax.Array, least_B: jax.Array) -> jax.Array:
    return jnp.where(logits_BxV >= least_B[:, None], logits_BxV, -jnp.inf)


def begin(
    config: Config,
    params: Params,
    prompts: list[np.ndarray],
    tokens: int | np.ndarray,
    keys: jax.Array,
) -> Texts:
    """Return texts that begin with prompts, before any token is generated.

    Args:
      config: of the model.
      params: in the tree of `transformer.init_params`.
      prompts: int (n,) each, n at least 1; lengths may differ.
      tokens: how many are to follow each prompt, at least 1; (B,) for each its own.
      keys: (B,) of random numbers; a row's tokens depend only on its own key.

    Raises:
      ValueError: a prompt is empty, no token is to follow one, or it has more tokens
        with those that are to follow than the model has positions.
    """
    if (fewest := int(np.min(tokens))) < 1:
        raise ValueError(f"{fewest} tokens are to follow a prompt: ask for at least 1")
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    if not lengths.min():
        raise ValueError("a prompt has no token: begin it with the end of text")
    limits = lengths + np.asarray(tokens, np.int32)
    if (longest := int(limits.max())) > config.max_length:
        given = lengths[limits.argmax()]
        raise ValueError(
            f"a prompt of {given} tokens and {longest - given} more are {longest}, but "
            f"the model has {config.max_length} positions: ask for fewer tokens, or "
            "shorten the prompt"
        )
    width = min(padded_length(int(lengths.max())), config.max_length)
    padded = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    size = min(padded_length(longest), config.max_length)
    return _begin(config, size, params, padded, lengths, limits, keys)


def padded_length(tokens: int) -> int:
    """Return the least power of two, from `SHORTEST` on, that holds the tokens."""
    return max(SHORTEST, 1 << (tokens - 1).bit_length())


@functools.partial(jax.jit, static_argnums=(0, 1))
def _begin(
    config: Config,
    size: int,
    params: Params,
    padded: jax.Array,
    lengths: jax.Array,
    limits: jax.Array,
    keys: jax.Array,
) -> Texts:
    cache = decoding.prefill(config, params, padded, size)
    tokens = jnp.pad(padded, ((0, 0), (0, size - padded.shape[1])))
    return Texts(tokens, lengths, jnp.zeros(len(padded), bool), limits, keys, cache)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=4)
def write(
    config: Config,
    sampling: Sampling,
    params: Params,
    ends: ArrayLike,
    texts: Texts,
    tokens: int | jax.Array,
) -> Texts:
    """Return texts with at most `tokens` more tokens of each that has not ended.

    Args:
      config: of the model.
      sampling: how tokens are chosen.
      params: in the tree of `transformer.init_params`.
      ends: the token after which a row ends, or several.
      texts: from `begin` or this; its arrays are not to be used again.
      tokens: how many; not part of the compiled program.
    """
    rows = jnp.arange(len(texts.tokens))

    def one(carry: tuple[jax.Array, Texts]) -> tuple[jax.Array, Texts]:
        left, t = carry
        places = t.lengths - 1
        logits, cache = decoding.step(
            config, params, t.tokens[rows, places], places, t.cache
        )
        # the key follows from the place: a text does not depend on how it is requested
        new = choose(sampling, logits, jax.vmap(jax.random.fold_in)(t.keys, t.lengths))
        at = jnp.where(t.ended, t.tokens.shape[1], t.lengths)  # beyond: dropped
        lengths = t.lengths + ~t.ended
        ended = t.ended | jnp.isin(new, ends) | (lengths == t.limits)
        written = t.tokens.at[rows, at].set(new, mode="drop")
        t = t._replace(tokens=written, lengths=lengths, ended=ended, cache=cache)
        return left - 1, t

    def goes_on(carry: tuple[jax.Array, Texts]) -> jax.Array:
        return (carry[0] > 0) & ~carry[1].ended.all()

    left = jnp.asarray(tokens, jnp.int32)
    return jax.lax.while_loop(goes_on, one, (left, texts))[1]
