"""Small models of tokens in flax nnx, flax linen and equinox, as users would bring."""

import equinox
import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx

from acco_jax.models.model import Model

WIDTH = 16


def summed(logits, batch):
    """Sum of the cross-entropies of the next tokens in nats, and their number."""
    targets = batch["tokens"][:, 1:]
    mask = batch.get("mask", jnp.ones_like(targets)).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.sum(losses * mask), jnp.sum(mask), {}


class Nnx(nnx.Module):
    def __init__(self, vocab_size, rate, rngs):
        self.embed = nnx.Embed(vocab_size, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(rate)
        self.head = nnx.Linear(WIDTH, vocab_size, rngs=rngs)

    def __call__(self, tokens, key):
        x = self.norm(self.embed(tokens))
        rngs = None if key is None else nnx.Rngs(dropout=key)
        return self.head(self.dropout(x, deterministic=key is None, rngs=rngs))


def nnx_model(vocab_size, length, rate=0.5):
    make = lambda key: Nnx(vocab_size, rate, nnx.Rngs(key))  # noqa: E731
    graph = nnx.graphdef(nnx.eval_shape(lambda: make(jax.random.key(0))))

    def loss(params, batch, rng):
        logits = nnx.merge(graph, params)(batch["tokens"][:, :-1], rng)
        return summed(logits, batch)

    return Model(
        init=lambda key: nnx.to_pure_dict(nnx.state(make(key))),
        loss=loss,
        flops_per_token=lambda length: 6.0 * WIDTH * vocab_size,
        draws=True,
        dtype="float32",
    )


class Linen(linen.Module):
    vocab_size: int

    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(self.vocab_size, WIDTH)(tokens)
        return linen.Dense(self.vocab_size)(linen.LayerNorm()(x))


def linen_model(vocab_size, length):
    model, tokens = Linen(vocab_size), jnp.zeros((1, length), jnp.int32)
    return Model(
        init=lambda key: model.init(key, tokens)["params"],
        loss=lambda params, batch, rng: summed(
            model.apply({"params": params}, batch["tokens"][:, :-1]), batch
        ),
        dtype="float32",
    )


class Equinox(equinox.Module):
    embed: equinox.nn.Embedding
    norm: equinox.nn.LayerNorm
    head: equinox.nn.Linear

    def __init__(self, vocab_size, key):
        first, second = jax.random.split(key)
        self.embed = equinox.nn.Embedding(vocab_size, WIDTH, key=first)
        self.norm = equinox.nn.LayerNorm(WIDTH)
        self.head = equinox.nn.Linear(WIDTH, vocab_size, key=second)

    def __call__(self, token):
        return self.head(self.norm(self.embed(token)))


def equinox_model(vocab_size, length):
    def init(key):
        return equinox.filter(Equinox(vocab_size, key), equinox.is_inexact_array)

    static = equinox.filter(
        jax.eval_shape(lambda: Equinox(vocab_size, jax.random.key(0))),
        lambda x: not isinstance(x, jax.ShapeDtypeStruct),
    )

    def loss(params, batch, rng):
        model = equinox.combine(params, static)
        return summed(jax.vmap(jax.vmap(model))(batch["tokens"][:, :-1]), batch)

    return Model(init=init, loss=loss, dtype="float32")


def no_model(vocab_size, length):
    return {"vocab_size": vocab_size}
