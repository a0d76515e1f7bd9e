"""Runs that start from adapters in PEFT's format: config.lora.init_from."""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from acco_jax.command.paths import expanded
from acco_jax.core.leaves import PyTree
from acco_jax.models import peft, transformer
from acco_jax.models.lora import Adapters
from acco_jax.run.weights import pretrained
from acco_jax.run.weights.folders import AdapterFolder


def identity(config: ConfigDict) -> dict[str, Any]:
    """Return the identity of the adapters of `lora.init_from`, wherever they lie.

    It has "ranks" by the paths of kernels, "scale", and "weights", a digest.

    Raises:
      ValueError: if they are damaged, of another form or of another model.
    """
    architecture = pretrained.model_config(
        config.init_from, pretrained.folder_of(config.init_from).config_json
    )
    found, scale = _read(config, architecture)
    digest = hashlib.sha256()
    for path in sorted(found):
        for x in found[path].values():
            digest.update(np.ascontiguousarray(x).tobytes())
    ranks = {path: ab["a"].shape[-1] for path, ab in found.items()}
    return {"ranks": ranks, "scale": scale, "weights": digest.hexdigest()[:16]}


def applied(config: ConfigDict, said: Mapping[str, Any]) -> ConfigDict:
    """Return a config with the ranks and the scale of adapters.

    Args:
      config: of the experiment.
      said: the result of `identity`; {}: the config is returned.
    """
    if not said:
        return config
    config = config.copy_and_resolve_references()
    config.lora.ranks = tuple(
        (f"^{re.escape(p)}$", r) for p, r in said["ranks"].items()
    )
    config.lora.scale = said["scale"]
    return config


def load(
    config: ConfigDict, architecture: transformer.Config, shardings: PyTree
) -> Adapters:
    """Read the adapters of `lora.init_from` to their devices.

    Args:
      config: of the experiment.
      architecture: of the model that is adapted.
      shardings: of the adapters, in their tree.

    Raises:
      ValueError: as `identity`.
    """
    found, _ = _read(config, architecture)
    return jax.tree.map(
        lambda x, sharding: jax.make_array_from_callback(
            x.shape, sharding, lambda index: x[index]
        ),
        found,
        shardings,
    )


def _read(
    config: ConfigDict, architecture: transformer.Config
) -> tuple[Adapters, float]:
    """Return adapters in `param_dtype`, and their scale; raise as `identity`."""
    folder = AdapterFolder(expanded(config.lora.init_from))
    said = folder.config_json
    try:
        found = peft.from_state(architecture, said, folder.names, folder.weight)
    except ValueError as error:
        why = str(error).removesuffix(".")
        raise ValueError(f"lora.init_from is {folder.path}, but {why}.") from error
    return found, peft.scale_of(said)
