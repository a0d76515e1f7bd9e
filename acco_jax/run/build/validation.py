"""Validation of a config before a run, with one-line errors."""

from etils import epath
from ml_collections import ConfigDict

from acco_jax.command.files import is_remote
from acco_jax.core.names import named
from acco_jax.run.build import models, optimizers
from acco_jax.run.config import field_checks


def validate(config: ConfigDict) -> None:
    """Raise a ValueError for a config that cannot run, before touching a device.

    Raises:
      ValueError: with the field, its value and the remedy.
    """
    field_checks.check(config)
    optimizers.optimizer(config)
    if config.model.factory is None:  # the tokenizer's tokens come with the corpus
        models.transformer_config(config, vocab_size=1)
    else:
        named("model.factory", config.model.factory)
    if is_remote(config.checkpoints):
        _check_remote(config.checkpoints)


def _check_remote(folder: str) -> None:
    """Raise a ValueError if the installed packages do not reach a remote folder."""
    try:
        epath.Path(folder).exists()
    except Exception as error:  # each store has its own, from several packages
        why = " ".join(str(error).split())
        raise ValueError(
            f"checkpoints is {folder}, which cannot be reached from here: {why}"
        ) from error
