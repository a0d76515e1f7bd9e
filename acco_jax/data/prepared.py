"""Data sets of text files that tfds has prepared, verified when they are opened."""

import json
import zlib
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from acco_jax.core import small_files

_FILES = (
    "dataset_info.json",
    "features.json",
)  # array_record files have sums of theirs
_SUMS = "sums.json"


def opened(
    kind: type[tfds.core.DatasetBuilder],
    config: tfds.core.BuilderConfig,
    data_dir: Path,
) -> tfds.core.DatasetBuilder:
    """Open a data set of our own, prepared or not.

    Raises:
      ValueError: one of its files is damaged.
    """
    folder = data_dir / kind.name / config.name / str(kind.VERSION)
    try:
        whole = not folder.is_dir() or _sums(folder) == _written(folder)
        builder = kind(config=config, data_dir=data_dir) if whole else None
    except Exception as error:  # of tfds and protobuf, whatever their files hold
        raise _damaged(folder) from error
    if builder is None:
        raise _damaged(folder)
    return builder


def keep_sums(folder: Path) -> None:
    """Write the checksums of a data set that was just prepared, once."""
    if not (folder / _SUMS).exists():
        (folder / _SUMS).write_text(json.dumps(_sums(folder)))


def _sums(folder: Path) -> dict[str, int]:
    return {name: zlib.crc32(small_files.content(folder / name)) for name in _FILES}


def _written(folder: Path) -> Any:
    """Return the checksums as written; without them, the current ones.

    A process that was killed left none.
    """
    if not (folder / _SUMS).exists():
        return _sums(folder)
    return json.loads(small_files.text(folder / _SUMS))


def _damaged(folder: Path) -> ValueError:
    return ValueError(
        f"{folder} is damaged ({' or '.join(_FILES)}): remove that folder, and the "
        "data set is prepared again"
    )
