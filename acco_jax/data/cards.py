"""Dataset cards: the splits that a folder's README.md declares, as on the Hub.

    ---
    configs:
    - config_name: main
      data_files:
      - {split: train, path: main/train-*.parquet}
      - {split: test, path: main/test-*.parquet}
    ---

https://huggingface.co/docs/hub/datasets-manual-configuration has all forms.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import yaml  # type: ignore[import-untyped]

from acco_jax.core import small_files

CARD = "README.md"
_HEADER = re.compile(r"\A\ufeff?---\s*?\n(.*?)\n---\s*?(?:\n|\Z)", re.DOTALL)
_FORM = "write it as the Hub's page on data files has it, or remove the header"


@dataclasses.dataclass(frozen=True)
class Subset:
    """One of a data set's configurations, as the Hub's pages call a subset.

    Attributes:
      folder: that the patterns are relative to.
      patterns: of files, by split; {}: the names of files give the splits.
    """

    folder: Path
    patterns: Mapping[str, tuple[str, ...]]


def default(root: Path) -> Subset | None:
    """Return the subset that a folder's card declares; None: its card declares none.

    Raises:
      ValueError: the card cannot be read, or declares several and no default.
    """
    subsets = dict(_configs(root))
    if len(subsets) > 1:
        marked = [name for name, found in subsets.items() if found.get("default")]
        chosen = [name for name in subsets if name in ("default", *marked)]
        if len(chosen) != 1:
            raise ValueError(
                f"{root / CARD} declares the subsets {', '.join(subsets)}: set "
                "data.path to the files of one, or mark one with 'default: true'"
            )
        subsets = {name: subsets[name] for name in chosen}
    return next((_subset(root, found) for found in subsets.values()), None)


def _configs(root: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return the names and fields of the configurations that a card declares."""
    path = root / CARD
    if not path.is_file():
        return []
    try:
        header = _HEADER.match(small_files.text(path))
        if not header or not re.search(r"^configs[ \t]*:", header[1], re.MULTILINE):
            return []
        found = yaml.load(header[1], yaml.SafeLoader)["configs"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}): restore it") from error
    except yaml.YAMLError as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"{path}'s header is not YAML ({first}): mend it") from error
    found = found if isinstance(found, list) else [found]
    try:
        return [(_name(each.get("config_name", "default")), each) for each in found]
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{path} has odd configs: {_FORM}") from error


def _name(value: Any) -> str:
    """Return a name; YAML has numbers, too, and nested values that grow if printed."""
    if not isinstance(value, str | int | float):
        raise TypeError
    return str(value)


def _listed(value: Any) -> list[Any]:
    """Return a list, or a string in one; a mapping has other meanings for others."""
    if not isinstance(value, str | list):
        raise TypeError
    return [value] if isinstance(value, str) else value


def _subset(root: Path, fields: Mapping[str, Any]) -> Subset:
    folder = fields.get("data_dir", ".")
    patterns: dict[str, tuple[str, ...]] = {}
    try:
        for entry in _listed(fields.get("data_files", [])):
            if isinstance(entry, str):
                entry = {"split": "train", "path": entry}
            split = _name(entry["split"])
            patterns[split] = (*patterns.get(split, ()), *_listed(entry["path"]))
        names = [PurePath(name) for paths in patterns.values() for name in paths]
        names.append(PurePath(folder))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{root / CARD} has odd data_files: {_FORM}") from error
    for name in names:
        # a URL's first part is "hf:"
        if name.is_absolute() or any(p == ".." or p[-1] == ":" for p in name.parts):
            raise ValueError(
                f"{root / CARD} names {str(name)!r}, which is not in its folder: set "
                "data.path to the files"
            )
    return Subset(root / folder, patterns)
