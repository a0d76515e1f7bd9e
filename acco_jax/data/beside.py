"""The files beside a tokenizer's file: its special tokens, and a chat template."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from acco_jax.command.files import write_whole
from acco_jax.core import small_files

CONFIG, _MAP = "tokenizer_config.json", "special_tokens_map.json"
SPECIAL = ("bos_token", "pad_token", "unk_token")  # that CONFIG names
MORE = ("sep_token", "cls_token", "mask_token", "additional_special_tokens")


def read(path: Path, limit: int = small_files.LARGEST) -> dict[str, Any]:
    """Return the JSON object in a file of at most `limit` bytes, {} without a file.

    Raises:
      ValueError: the file is damaged.
    """
    if not os.path.lexists(path):
        return {}
    try:
        value = json.loads(small_files.text(path, limit))
        if not isinstance(value, dict):
            raise TypeError("it holds no object")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        why = small_files.reason(error)
        raise ValueError(f"{path} is damaged ({why}): restore it") from error
    return value


def kept(path: Path) -> dict[str, Any]:
    """Return the content of the files beside a tokenizer, its chat template included.

    Raises:
      ValueError: one of the files is damaged.
    """
    config, tokens = (read(path.with_name(name)) for name in (CONFIG, _MAP))
    names = (*SPECIAL, *MORE)
    said = {name: tokens[name] for name in names if name in tokens} | config
    said.pop("auto_map", None)  # names code
    template = path.with_name("chat_template.jinja")
    if os.path.lexists(template):
        try:
            said["chat_template"] = small_files.text(template)
        except (OSError, UnicodeDecodeError) as error:
            why = small_files.reason(error)
            raise ValueError(f"{template} is damaged ({why}): restore it") from error
    return said


def named_end(path: Path) -> str | None:
    """Return the eos_token that the files beside a tokenizer name, if they do."""
    ends = (eos(path.with_name(name)) for name in (CONFIG, _MAP))
    return next((end for end in ends if end is not None), None)


def eos(path: Path) -> str | None:
    """Return the eos_token that a file names; None if it names none.

    Raises:
      ValueError: the file is damaged, or its eos_token is not text.
    """
    if (named := read(path).get("eos_token")) is None:
        return None
    if (token := content(named)) is None:
        raise ValueError(
            f"{path} has eos_token={named!a:.200}, which is not text: restore it, or "
            "set data.end_of_text"
        )
    return token


def special(said: Mapping[str, Any]) -> dict[str, str | list[str]]:
    """Return the special tokens that CONFIG names, as text, as templates see them."""
    found: dict[str, str | list[str]] = {}
    for name in (*SPECIAL, "eos_token", *MORE):
        given = said.get(name)
        if isinstance(given, list):
            texts = map(content, given)
            found[name] = [text for text in texts if text is not None]
        elif (text := content(given)) is not None:
            found[name] = text
    return found


def content(token: object) -> str | None:
    """Return a token of tokenizer_config.json as text, None if it is not text."""
    token = token.get("content") if isinstance(token, dict) else token
    try:
        if isinstance(token, str):
            token.encode()  # raises for half a surrogate
            return token
    except UnicodeEncodeError:
        pass
    return None


def written(
    folder: Path, said: dict[str, Any], special: Mapping[str, int], model: Any
) -> dict[str, int]:
    """Write tokenizer_config.json; return the result of `Tokenizer.export`.

    Args:
      folder: where it is written.
      said: its content, which may name special tokens already.
      special: ids of the special tokens that it has to name.
      model: an object with the methods `token_to_id` and `id_to_token`.
    """
    ids: dict[str, int] = {}
    for name in SPECIAL:
        token = content(said.get(name))
        number = None if token is None else model.token_to_id(token)
        if special.get(name) not in (None, number):
            token = model.id_to_token(special[name])
            number = None if token is None else special[name]
            said |= {name: token}
        ids |= {} if number is None else {name: number}
    write(folder / CONFIG, json.dumps(said, indent=2) + "\n")
    return ids


def as_it_is(max_length: int, kind: str = "PreTrainedTokenizerFast") -> dict[str, Any]:
    """Return settings with which transformers takes a tokenizer's file unchanged."""
    return {
        "tokenizer_class": kind,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }


def write(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all, and the folder that it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content)
