"""The model of an experiment: GPT-Neo, or what a factory of the user's makes."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from absl import logging
from ml_collections import ConfigDict

from acco_jax.models import gpt_neo, lora
from acco_jax.models.base import Model
from acco_jax.runner.config import dtype
from acco_jax.runner.names import named

PyTree = Any


def model(config: ConfigDict, vocab_size: int) -> Model:
    """Returns the model for a tokenizer of so many tokens.

    Raises:
      ValueError: sizes that do not fit together, too small a vocabulary, or a factory
        that is not there or does not make a `Model`.
    """
    if config.model.factory is None:
        return gpt_neo.model(gpt_neo_config(config, vocab_size))
    factory = named("model.factory", config.model.factory)
    rows, options = _rows(config, vocab_size), config.model.options.to_dict()
    try:
        made = factory(vocab_size=rows, length=config.length, **options)
    except TypeError as error:
        raise ValueError(
            f"model.factory {config.model.factory} does not take vocab_size={rows}, "
            f"length={config.length} and model.options {options}: {error}"
        ) from error
    if not isinstance(made, Model):
        raise ValueError(
            f"model.factory {config.model.factory} returned a {type(made).__name__}: "
            "it must return an acco_jax.models.base.Model."
        )
    return made


def gpt_neo_config(config: ConfigDict, vocab_size: int) -> gpt_neo.GPTNeoConfig:
    """Returns the sizes of the GPT-Neo for a tokenizer of so many tokens.

    Raises:
      ValueError: sizes that do not fit together, or too small a vocabulary.
    """
    c = config.model
    sizes = {} if c.size else {k: c[k] for k in ("width", "layers", "heads")}
    make: Callable[..., gpt_neo.GPTNeoConfig] = gpt_neo.GPTNeoConfig
    if c.size:
        make = functools.partial(gpt_neo.size, c.size)
    return make(
        **sizes,
        vocab_size=_rows(config, vocab_size),
        max_length=config.length,
        window=c.window,
        dtype=dtype("model.dtype", c.dtype),
        param_dtype=dtype("model.param_dtype", c.param_dtype),
        remat=c.remat,
        attention=c.attention,
    )


def _rows(config: ConfigDict, vocab_size: int) -> int:
    """Returns the tokens that the model has room for."""
    rows: int = config.model.vocab_size or vocab_size
    if rows < vocab_size:
        raise ValueError(
            f"model.vocab_size is {rows}, but the tokenizer has {vocab_size} tokens: "
            "leave it unset or raise it."
        )
    return rows


def warn_of_another_size(config: ConfigDict, made: Model, vocab_size: int) -> None:
    """Logs that a published size has other parameters with this tokenizer."""
    c = config.model
    if c.factory or not c.size:
        return
    count = made.parameters()
    published = gpt_neo.size(c.size)
    if gpt_neo.count_params(published) != count:
        logging.warning(
            "model.size is %s, but with the tokenizer's %s tokens and rows of %s it "
            "has %s parameters instead of %s: its own tokenizer has %s tokens",
            c.size, f"{vocab_size:,}", f"{config.length:,}", f"{count:,}",
            f"{gpt_neo.count_params(published):,}", f"{published.vocab_size:,}",
        )  # fmt: skip


def trained(
    config: ConfigDict,
    model: Model,
    freeze: Callable[[Callable[[], PyTree]], PyTree],
) -> tuple[Callable[..., Any], Callable[[], PyTree]]:
    """Returns the loss of what is trained, the model or adapters, and its initializer.

    Where adapters are trained, `freeze` turns the function that makes the model's
    parameters into what stands for them.

    Raises:
      ValueError: the adapters do not fit the model.
    """
    c = config.lora

    def whole() -> PyTree:
        return model.init(jax.random.key(config.seed))

    def adapters() -> PyTree:
        key = jax.random.fold_in(jax.random.key(config.seed), 1)
        shapes = jax.eval_shape(whole)
        if c.ranks:
            return lora.init(shapes, key, dict(c.ranks))
        return lora.init(shapes, key, c.rank, c.pattern)

    if not c.rank and not c.ranks:
        return model.loss, whole
    jax.eval_shape(adapters)  # says what is wrong before there is a model
    return lora.loss_fn(model.loss, freeze(whole), c.scale), adapters
