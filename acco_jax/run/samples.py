"""Texts that a run's model writes at its evaluations."""

from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial

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
        config = models.transformer_config(c, e.corpus.tokenizer.vocab_size)
        ends = ends_of(e.identity.get("generation"), config)
        prefix = prefix_of(c, e.corpus.tokenizer)
        model = Language(config, params, e.corpus.tokenizer, prefix, ends)
        prompt, room = model.tokens(c.sample_prompt), config.max_length - tokens
        if len(prompt) > room:
            raise ValueError(
                f"sample_prompt has {len(prompt)} tokens, and sample_tokens={tokens} "
                f"leave room for {room}: shorten it."
            )
        prompts, how = [prompt] * c.samples, Sampling(temperature=1.0)
        (texts,) = model.write(prompts, tokens, how, keys_of(seed, c.samples), tokens)
    return [c.sample_prompt + text for text in texts]


def _merged(scale: float, params: PyTree, adapted: PyTree | None) -> PyTree:
    return params if adapted is None else lora.merge(adapted, params, scale)
