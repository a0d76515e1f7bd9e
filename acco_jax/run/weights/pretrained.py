"""Runs that start from a Hugging Face folder: config.init_from."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.tree_util import KeyPath
from ml_collections import ConfigDict

from acco_jax.command.files import read_object
from acco_jax.command.paths import expanded
from acco_jax.core.leaves import path_names
from acco_jax.models import huggingface, transformer
from acco_jax.run.weights.folders import CONFIG, GENERATION, Folder

PyTree = Any
CORNER = 8  # of an array, along each dimension: distinguishes two models
# Fields of generation_config.json; earlier transformers had them in config.json.
SAMPLING = (
    "do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p",
    "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "num_beams",
    "max_length", "min_length", "bad_words_ids", "suppress_tokens",
    "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id",
)  # fmt: skip
TOKENIZER = "init_from"  # of data.tokenizer: the folder's own


def folder_of(path: str | Path) -> Folder:
    """Return a Hugging Face folder; raise as `Folder`."""
    return Folder(expanded(path))


def model_config(
    path: str | Path, described: Mapping[str, Any], **overrides: Any
) -> transformer.Config:
    """Return the configuration that a folder's config.json describes.

    Args:
      path: of the folder, for the errors.
      described: the content of its config.json.
      **overrides: fields that replace its fields.

    Raises:
      ValueError: with the folder's name, if it describes no such model.
    """
    try:
        return huggingface.config_of(described, **overrides)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} has a model that fails: {error}") from error


def check_read(config: transformer.Config, folder: Folder, ignored: str | None) -> None:
    """Raise a ValueError for weights that a folder's config.json has no place for.

    Args:
      config: of the folder's model.
      folder: with the weights.
      ignored: a regular expression of names that may be left out.

    Raises:
      ValueError: with their names.
    """
    left = huggingface.unread(config, folder.names)
    if config.tied and huggingface.HEAD in left and _is_tied(config, folder):
        left.remove(huggingface.HEAD)
    try:
        left = [name for name in left if not re.fullmatch(ignored or "", name)]
    except re.error as error:
        raise ValueError(
            f"ignore_weights is {ignored!r}, not a regular expression: {error}."
        ) from error
    if left:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        raise ValueError(
            f"{folder.path} has weights that the model of its config.json does not "
            f"read: {', '.join(left[:3])}{more}; mend config.json, or name them in "
            f"ignore_weights, a pattern such as {re.escape(left[0])!r}."
        )


def _is_tied(config: transformer.Config, folder: Folder) -> bool:
    """Return whether the output embedding equals the input's, on a corner of both."""
    index = (slice(CORNER), slice(CORNER))
    head = folder.weight(huggingface.HEAD)[index]
    wte = huggingface.leaf(config, "wte/embedding", folder.weight, index)
    return np.array_equal(head.astype(wte.dtype), wte, equal_nan=True)


def generation(path: str) -> dict[str, Any]:
    """Return a folder's settings for generated texts.

    They are eos_token_id, a list, bos_token_id and pad_token_id, if given, and the
    sampling defaults. generation_config.json comes before config.json.

    Raises:
      ValueError: if an id is not an integer.
    """
    folder = folder_of(path)
    both = folder.generation, folder.config_json
    said = {n: both[1][n] for n in SAMPLING if n in both[1]} | both[0]
    for name in ("transformers_version", "_from_model_config"):
        said.pop(name, None)
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        ids = [i for x in both for i in _ids(folder.path, name, x.get(name))]
        said.pop(name, None)
        if ids:
            said[name] = [*dict.fromkeys(ids)] if name == "eos_token_id" else ids[0]
    return said


def _ids(path: Path, name: str, value: object) -> list[int]:
    ids: list[Any] = (
        value if isinstance(value, list) else [] if value is None else [value]
    )
    if not all(type(i) is int for i in ids) or (name != "eos_token_id" and ids[1:]):
        raise ValueError(
            f"{path} has {name}={value!r:.200} in {CONFIG} or {GENERATION}: give an "
            "integer, or of eos_token_id a list of them."
        )
    return [i for i in ids if i >= 0]  # -1 is none


def kept_generation(config: ConfigDict) -> dict[str, Any]:
    """Return `generation` of the folder that a run, or its `base`, starts from.

    It is {} without such a folder.
    """
    if config.init_from is not None:
        return generation(config.init_from)
    if config.base is None:
        return {}
    try:
        described = read_object(expanded(config.base) / "config.json")
    except ValueError:  # raised when the base is opened
        return {}
    said = described.get("generation")
    return said if isinstance(said, dict) else {}


def identity(path: str, ignored: str | None = None) -> dict[str, Any]:
    """Return the identity of a folder's model, wherever the folder lies.

    It has "model", a config.json with only what is computed, and "weights", a digest of
    a corner of each array. Copies in other files or in a wider dtype have the same one.

    Args:
      path: of the folder.
      ignored: as for `check_read`.

    Raises:
      ValueError: if an array is missing, has another shape, or is not read.
    """
    folder = folder_of(path)
    config = model_config(path, folder.config_json)
    check_read(config, folder, ignored)
    digest = hashlib.sha256()
    for keys, x in jax.tree_util.tree_leaves_with_path(transformer.shapes_of(config)):
        names = path_names(keys)
        layers = (slice(None),) if names[0] == "h" else ()  # corners of all layers
        index = layers + (slice(CORNER),) * (x.ndim - len(layers))
        part = huggingface.leaf(config, "/".join(names), folder.weight, index)
        digest.update(np.ascontiguousarray(part).tobytes())
    said = huggingface.config_json(config)
    return {"model": said, "weights": digest.hexdigest()[:16]}


def check_tokens(config: ConfigDict, end_of_text: int) -> None:
    """Raise a ValueError if tokenizer and model end texts with different tokens.

    The model's folder may name several, or none; data.end_of_text overrules it.

    Raises:
      ValueError: with both tokens.
    """
    if config.init_from is None or config.data.end_of_text is not None:
        return
    known = generation(config.init_from).get("eos_token_id", [])
    if known and end_of_text not in known:
        raise ValueError(
            f"the tokenizer ends a text with token {end_of_text}, but the model of "
            f"init_from={config.init_from!r} with {known}: set data.end_of_text to the "
            "token that is meant, or give the model's own tokenizer."
        )


def data_fields(config: ConfigDict) -> ConfigDict:
    """Return the fields of `data`; the folder's tokenizer becomes a file."""
    if config.data.tokenizer != TOKENIZER:
        return config.data
    fields = config.data.copy_and_resolve_references()
    fields.tokenizer = str(folder_of(config.init_from).tokenizer)
    return fields


def load(config: transformer.Config, folder: Folder, shardings: PyTree) -> PyTree:
    """Read parameters to their devices, leaf after leaf.

    A process reads only the parts of a leaf that its devices hold, each once.

    Args:
      config: of the folder's model.
      folder: with the weights.
      shardings: of the parameters, in the tree of `transformer.init_params`.

    Raises:
      ValueError: if a weight is missing, or its file is damaged.
    """

    def placed(
        path: KeyPath, x: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding
    ) -> jax.Array:
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
