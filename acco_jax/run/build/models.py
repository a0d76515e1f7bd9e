"""Model of an experiment: a transformer, or the result of a user's factory."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from absl import logging
from jax.sharding import AbstractMesh, Mesh
from ml_collections import ConfigDict

from acco_jax.core.groups import TENSOR, group_specs
from acco_jax.core.leaves import PyTree, Rng
from acco_jax.core.names import check_name, named
from acco_jax.models import lora, transformer
from acco_jax.models.model import Batch, Model
from acco_jax.models.placement import split_rows
from acco_jax.run.config.fields import dtype
from acco_jax.run.weights import pretrained

Described = Mapping[str, Any]  # the content of a config.json
# Sizes of a model that may be None.
MAY_BE_UNSET = ("kv_heads", "mlp_width", "experts", "experts_per_token")
BYTE_TOKENS = 257  # of data.tokenizers.ByteTokenizer, without loading it


def model(
    config: ConfigDict, vocab_size: int, described: Described | None = None
) -> Model:
    """Return the model for a tokenizer of `vocab_size` tokens.

    Args:
      config: of the experiment.
      vocab_size: of the tokenizer.
      described: config.json of init_from's model, if known; None: it is read.

    Raises:
      ValueError: if sizes do not fit together, the vocabulary is too small, or the
        factory does not exist or does not make a `Model`.
    """
    if config.model.factory is None:
        return transformer.model(transformer_config(config, vocab_size, described))
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
            "it must return an acco_jax.models.model.Model."
        )
    return made


def transformer_config(
    config: ConfigDict, vocab_size: int, described: Described | None = None
) -> transformer.Config:
    """Return the transformer's configuration for a tokenizer of `vocab_size` tokens.

    Arguments are as for `model`.

    Raises:
      ValueError: if the family or size is unknown, a field conflicts with a published
        size, sizes do not fit together, or the vocabulary is too small.
    """
    c, loop = config.model, config.model.scan_layers
    if loop is None and config.method == "fused_zero1":
        loop = True  # it reduces what a loop over the layers takes apart
    how = {
        "dtype": dtype("model.dtype", c.dtype),
        "param_dtype": dtype("model.param_dtype", c.param_dtype),
        "remat": c.remat,
        "attention": c.attention,
        "scan_layers": loop,
        "router_loss": c.router_loss,
    }
    if config.init_from is not None:
        said = described or pretrained.folder_of(config.init_from).config_json
        return _pretrained(config, said, how)
    fields = how | {
        "vocab_size": _rows(config, vocab_size),
        "max_length": config.length,
        "window": c.window,
    }
    check_name("model.family", c.family, transformer.FAMILIES)
    if not c.size:
        by_hand = ("width", "layers", "heads", *MAY_BE_UNSET)
        given = {name: c[name] for name in by_hand if c[name] is not None}
        parts = transformer.FAMILIES[c.family] | given
        return transformer.Config(**(parts | fields))
    for field in MAY_BE_UNSET:
        if c[field] is not None:
            raise ValueError(
                f"model.{field} is {c[field]}, but model.size {c.size!r} has its own: "
                "give one of them."
            )
    if "window" in transformer.SIZES.get(c.size, ()):
        del fields["window"]
    return transformer.size(c.size, **fields)


def _pretrained(
    config: ConfigDict, said: Described, how: dict[str, Any]
) -> transformer.Config:
    """Return the configuration of init_from's model; raise if it does not fit."""
    found = pretrained.model_config(config.init_from, said, **how)
    if config.length > found.max_length:
        raise ValueError(
            f"length is {config.length}, but the model of init_from="
            f"{config.init_from!r} has {found.max_length} positions: lower it."
        )
    if config.data.tokenizer == "bytes" and found.vocab_size != BYTE_TOKENS:
        raise ValueError(
            f"data.tokenizer is 'bytes', but the model of init_from="
            f"{config.init_from!r} knows {found.vocab_size} tokens: set "
            "data.tokenizer='init_from'."
        )
    return found


def _rows(config: ConfigDict, vocab_size: int) -> int:
    """Return the number of tokens in the model's embedding."""
    rows: int = config.model.vocab_size or vocab_size
    if rows < vocab_size:
        raise ValueError(
            f"model.vocab_size is {rows}, but the tokenizer has {vocab_size} tokens: "
            "leave it unset or raise it."
        )
    return rows


def warn_of_another_size(config: ConfigDict, made: Model, vocab_size: int) -> None:
    """Log a warning if a published size has other parameters with this tokenizer."""
    c = config.model
    if c.factory or not c.size:
        return
    count = made.parameters()
    published = transformer.size(c.size)
    if transformer.count_params(published) != count:
        logging.warning(
            "model.size is %s, but with the tokenizer's %s tokens and rows of %s it "
            "has %s parameters instead of %s: its own tokenizer has %s tokens",
            c.size, f"{vocab_size:,}", f"{config.length:,}", f"{count:,}",
            f"{transformer.count_params(published):,}", f"{published.vocab_size:,}",
        )  # fmt: skip


def specs(model: Model, params: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
    """Return the specs with which a group's devices split parameters or adapters.

    Raises:
      ValueError: if the model cannot be split over the mesh's axis "tensor".
    """
    size, tensor = dict(mesh.shape).get(TENSOR, 1), None
    if size > 1:
        if model.tensor is None:
            raise ValueError(
                f"mesh.tensor is {size}, but the model does not say how it is split: "
                "set mesh.tensor to 1, or give the Model its `tensor`."
            )
        tensor = model.tensor(params, size)
    stacked = model.stacked and model.stacked(params)
    return group_specs(params, mesh, specs=tensor, stacked=stacked)


def trained(
    config: ConfigDict,
    model: Model,
    freeze: Callable[[Callable[[], PyTree]], PyTree],
) -> tuple[Callable[..., Any], Callable[[], PyTree]]:
    """Return loss and initializer of what is trained, the model or adapters.

    For adapters, `freeze` turns the function that makes the model's parameters into
    frozen ones, or their shapes.

    Raises:
      ValueError: if the adapters do not fit the model.
    """
    c = config.lora

    def whole() -> PyTree:
        return model.drawn(jax.random.key(config.seed))

    def adapters() -> PyTree:
        key = jax.random.fold_in(jax.random.key(config.seed), 1)
        shapes = jax.eval_shape(whole)
        if c.ranks:
            return lora.init(shapes, key, dict(c.ranks))
        return lora.init(shapes, key, c.rank, c.pattern)

    def loss(params: PyTree, batch: Batch, rng: Rng) -> PyTree:
        return model.loss(params, split_rows(batch), rng)

    if not c.rank and not c.ranks:
        return loss, whole
    jax.eval_shape(adapters)  # raises before there is a model
    return lora.loss_fn(loss, freeze(whole), c.scale), adapters


def evaluated(config: ConfigDict, model: Model, loss_fn: Any) -> Callable[..., Any]:
    """Return the loss of held-out rows, for `trained`'s, with its frozen parameters."""
    if model.evaluation_loss is None:
        return loss_fn
    model = dataclasses.replace(model, loss=model.evaluation_loss)
    # a frozen model is an argument of its adapters' loss
    return trained(config, model, lambda make: loss_fn.args[0])[0]
