"""Texts that a run's model writes at its evaluations."""

from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial
from ml_collections import ConfigDict

from acco_jax import data
from acco_jax.models import lora
from acco_jax.models.sampling import Sampling
from acco_jax.run.build import models
from acco_jax.run.prepared import Experiment
from acco_jax.run.trained.language import Language, ends_of, keys_of, prefix_of

PyTree = Any


def gathered(experiment: Experiment, params: PyTree) -> PyTree:
    """Gather the whole model, its adapters merged, on one device of each process.

    Args:
      experiment: of a transformer.
      params: committed, trained parameters.
    """
    e = experiment
    whole = jax.jit(_merged, static_argnums=0, out_shardings=NamedSharding(e.mesh, P()))
    with jax.transfer_guard("allow"):
        # a frozen model is an argument of its adapters' loss
        adapted = e.loss_fn.args[0] if isinstance(e.loss_fn, Partial) else None
        params = whole(e.config.lora.scale, params, adapted)
    return jax.tree.map(lambda x: x.addressable_data(0), params)


def written(experiment: Experiment, params: PyTree) -> list[str]:
    """Return `config.samples` texts: the prompt, and its continuation.

    Every process writes them by itself.

    Args:
      experiment: of a transformer.
      params: `gathered`.
    """
    e, c = experiment, experiment.config
    tokens, seed = c.sample_tokens, c.seed
    with jax.transfer_guard("allow"):
        model = _model(c, e.corpus.tokenizer, params, e.identity.get("generation"))
        prompt = model.tokens(c.sample_prompt)
        prompts, how = [prompt] * c.samples, Sampling(temperature=1.0)
        (texts,) = model.write(prompts, tokens, how, keys_of(seed, c.samples), tokens)
    return [c.sample_prompt + text for text in texts]


def check(config: ConfigDict, tokenizer: data.Tokenizer) -> None:
    """Raise a ValueError for a prompt that leaves no room for `config.samples`."""
    if not config.samples:
        return
    model, tokens = _model(config, tokenizer), config.sample_tokens
    many = len(model.tokens(config.sample_prompt))
    if many > (room := model.config.max_length - tokens):
        raise ValueError(
            f"sample_prompt has {many} tokens, and sample_tokens={tokens} leave room "
            f"for {room}: shorten it."
        )


def _model(
    config: ConfigDict,
    tokenizer: data.Tokenizer,
    params: PyTree = None,
    generation: Any = None,
) -> Language:
    transformer = models.transformer_config(config, tokenizer.vocab_size)
    ends, prefix = ends_of(generation, transformer), prefix_of(config, tokenizer)
    return Language(transformer, params, tokenizer, prefix, ends)


def _merged(scale: float, params: PyTree, adapted: PyTree | None) -> PyTree:
    return params if adapted is None else lora.merge(adapted, params, scale)
