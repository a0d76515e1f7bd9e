"""A run that starts from a Hugging Face folder: config.init_from."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from acco_jax.layout import path_names
from acco_jax.models import huggingface, transformer
from acco_jax.runner.folders import Folder

PyTree = Any
CORNER = 8  # of an array, along each dimension: what tells two models apart
TOKENIZER = "init_from"  # of data.tokenizer: the folder's own


def folder_of(path: str | Path) -> Folder:
    """Returns a Hugging Face folder; raises as `Folder`."""
    return Folder(Path(path).expanduser())


def model_config(
    path: str | Path, described: Mapping[str, Any], **overrides: Any
) -> transformer.Config:
    """Returns the configuration that a folder's config.json describes.

    Args:
      path: of the folder, for the errors.
      described: the content of its config.json.
      **overrides: fields that replace what it says.

    Raises:
      ValueError: in one line with the folder's name, it describes none.
    """
    try:
        return huggingface.config_of(described, **overrides)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} has a model that fails: {error}") from error


def identity(path: str) -> dict[str, Any]:
    """Returns what makes a folder another model, wherever it lies.

    That is "model", a config.json with nothing in it but what is computed, and
    "weights", a digest of a corner of each array. A copy that was saved in other files,
    or in a wider dtype, is the same model.

    Raises:
      ValueError: in one line, an array is missing or has another shape.
    """
    folder = folder_of(path)
    config = model_config(path, folder.config_json)
    digest = hashlib.sha256()
    for keys, x in jax.tree_util.tree_leaves_with_path(transformer.shapes_of(config)):
        names = path_names(keys)
        layers = (slice(None),) if names[0] == "h" else ()  # of all the first numbers
        index = layers + (slice(CORNER),) * (x.ndim - len(layers))
        part = huggingface.leaf(config, "/".join(names), folder.weight, index)
        digest.update(np.ascontiguousarray(part).tobytes())
    said = huggingface.config_json(config)
    return {"model": said, "weights": digest.hexdigest()[:16]}


def check_tokens(config: ConfigDict, end_of_text: int) -> None:
    """Refuses a tokenizer that ends texts with another token than the model does.

    The config.json may name several, or none; data.end_of_text overrules it.

    Raises:
      ValueError: in one line, which tokens.
    """
    if config.init_from is None or config.data.end_of_text is not None:
        return
    said = folder_of(config.init_from).config_json.get("eos_token_id")
    known = said if isinstance(said, list) else [said]
    if said is not None and end_of_text not in known:
        raise ValueError(
            f"the tokenizer ends a text with token {end_of_text}, but the model of "
            f"init_from={config.init_from!r} with {said}: set data.end_of_text to the "
            "token that is meant, or give the model's own tokenizer."
        )


def data_fields(config: ConfigDict) -> ConfigDict:
    """Returns the fields of `data`, its tokenizer a file where it is the folder's."""
    if config.data.tokenizer != TOKENIZER:
        return config.data
    fields = config.data.copy_and_resolve_references()
    fields.tokenizer = str(folder_of(config.init_from).tokenizer)
    return fields


def load(config: transformer.Config, folder: Folder, shardings: PyTree) -> PyTree:
    """Reads parameters to where they belong, leaf after leaf.

    Of each leaf a process reads the parts that its devices hold, each once.

    Args:
      config: of the folder's model.
      folder: with the weights.
      shardings: of the parameters, in the tree of `transformer.init_params`.

    Raises:
      ValueError: in one line, a weight is missing, or its file is damaged.
    """

    def placed(path: Any, x: jax.ShapeDtypeStruct, sharding: Any) -> jax.Array:
        name, parts = "/".join(path_names(path)), dict[str, np.ndarray]()

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            key = str(index)  # devices that hold the same part share it
            if key not in parts:
                parts[key] = huggingface.leaf(config, name, folder.weight, index or ())
            return parts[key]

        return jax.make_array_from_callback(x.shape, sharding, part)

    return jax.tree_util.tree_map_with_path(
        placed, transformer.shapes_of(config), shardings
    )
