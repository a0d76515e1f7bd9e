"""Incremental decoding: a transformer one token at a time, with a cache of the past.

The computation is that of the transformer's own blocks. Only attention reads the keys
and values of earlier tokens from a cache instead of computing them again.

Shapes: B rows, T tokens of a prompt, S tokens that a cache has room for, L repetitions
of the pattern of layers, D width, K heads of keys and values, N of queries, H width of
a head, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from acco_jax.models.attention import attention, masked
from acco_jax.models.head import capped
from acco_jax.models.sizes import Config
from acco_jax.models.transformer import Params, Transformer, bound

# block of the pattern -> keys and values, each (L, B, S, K, H) of the config's dtype
Cache = dict[str, tuple[jax.Array, jax.Array]]


def empty_cache(config: Config, rows: int, size: int) -> Cache:
    """Return a cache with room for `size` tokens of each row, all zero.

    Raises:
      ValueError: the model has fewer positions.
    """
    if size > config.max_length:
        raise ValueError(
            f"{size} tokens exceed max_length={config.max_length}: shorten the prompt, "
            "or ask for fewer tokens"
        )
    layers = config.layers // len(config.pattern)
    shape = layers, rows, size, config.key_heads, config.head_size
    # arrays of their own, each of which a caller may donate
    return {
        name: (jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype))
        for name in config.blocks
    }


def prefill(config: Config, params: Params, tokens_BxT: jax.Array, size: int) -> Cache:
    """Return the cache of prompts, with room for `size` tokens of each.

    Prompts may be padded at their ends. Tokens before the padding do not see it, and
    `step` replaces its keys and values before it reads them.

    Args:
      config: of the model.
      params: in the tree of `transformer.init_params`.
      tokens_BxT: int32; T is at most `size`.
      size: S.

    Raises:
      ValueError: the model has fewer positions than `size`.
    """
    T = tokens_BxT.shape[1]
    model, cache = bound(config, params), empty_cache(config, len(tokens_BxT), size)

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, past: _Past, **how: Any
    ) -> jax.Array:
        past.keep((slice(None), slice(T)), k, v)
        return attention(q, k, v, implementation=config.attention, **how)

    return _through(model, tokens_BxT, jnp.arange(T)[None], cache, attend)[1]


def step(
    config: Config,
    params: Params,
    token_B: jax.Array,
    place_B: jax.Array,
    cache: Cache,
) -> tuple[jax.Array, Cache]:
    """Return the logits after one more token of each row, and the cache with it.

    Args:
      config: of the model.
      params: in the tree of `transformer.init_params`.
      token_B: int32.
      place_B: int32, where in its row each token stands: from 0 to S - 1. The cache has
        the tokens before it.
      cache: of the same rows.

    Returns:
      Logits (B, V) in float32, and the cache.
    """
    rows, (keys, _) = jnp.arange(len(token_B)), next(iter(cache.values()))
    before_BxS = place_B[:, None] - jnp.arange(keys.shape[2])

    def attend(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        past: _Past,
        *,
        window: int | None,
        **how: Any,
    ) -> jax.Array:
        keys_BxSxKxH, values_BxSxKxH = past.keep((rows, place_B), k[:, 0], v[:, 0])
        seen_BxS = before_BxS >= 0
        if window is not None:
            seen_BxS &= before_BxS < window
        return masked(q, keys_BxSxKxH, values_BxSxKxH, seen_BxS[:, None, None], **how)

    (x_Bx1xD, w_VxD), cache = _through(
        bound(config, params), token_B[:, None], place_B[:, None], cache, attend
    )
    logits_BxV = jnp.einsum(
        "BD,VD->BV", x_Bx1xD[:, 0], w_VxD, preferred_element_type=jnp.float32
    )
    return capped(logits_BxV, config.logit_softcap), cache


class _Past:
    """The keys and values of one block, to which its attention adds the new ones.

    Attributes:
      arrays: keys and values of all repetitions, each (L, B, S, K, H).
    """

    def __init__(self, arrays: tuple[jax.Array, jax.Array], layer: jax.Array) -> None:
        self.arrays, self._layer = arrays, layer

    def keep(
        self, places: tuple[slice | jax.Array, ...], *new: jax.Array
    ) -> list[jax.Array]:
        """Put new keys and values to places (of B and S); return all of this layer."""
        at = (self._layer, *places)
        keys, values = (x.at[at].set(y) for x, y in zip(self.arrays, new, strict=True))
        self.arrays = keys, values
        return [x[self._layer] for x in self.arrays]


def _through(
    model: Transformer,
    tokens_BxT: jax.Array,
    positions: jax.Array,
    cache: Cache,
    attend: Callable[..., jax.Array],
) -> tuple[tuple[jax.Array, jax.Array], Cache]:
    """Return the factors of the logits of tokens, and the updated cache."""
    x_BxTxD, turns = model.begin(tokens_BxT, positions)
    config = model.config

    # the cache is carried, so that it is written in place, not copied layer by layer
    @nnx.scan(in_axes=(0, 0, nnx.Carry), out_axes=nnx.Carry)
    def repeat(
        blocks: nnx.Dict, layer: jax.Array, carry: tuple[jax.Array, Cache]
    ) -> tuple[jax.Array, Cache]:
        x_BxTxD, cache = carry
        for name in config.blocks:
            past = _Past(cache[name], layer)

            def attend_here(*heads: Any, past: _Past = past, **how: Any) -> jax.Array:
                return attend(*heads, past, **how)

            x_BxTxD, _ = blocks[name](x_BxTxD, turns, attend_here)
            cache = cache | {name: past.arrays}
        return x_BxTxD, cache

    layers = jnp.arange(config.layers // len(config.pattern))
    x_BxTxD, cache = repeat(model.h, layers, (x_BxTxD, cache))
    return model.end(x_BxTxD), cache
