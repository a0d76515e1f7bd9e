"""Hugging Face folder of a model: config.json, safetensors files, a tokenizer.

The weights are in model.safetensors, or in several files that
model.safetensors.index.json lists. They are read one array, or a slice of one, at a
time, and need no torch.
"""

import json
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from safetensors.numpy import save_file

from acco_jax.command.files import read_object, read_text
from acco_jax.core import small_files

CONFIG = "config.json"
GENERATION = "generation_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTERS = "adapter_model.safetensors"
SHARD_BYTES = 5 * 10**9  # of a file of weights, at most, unless one array is larger
_FLOATS = ("F64", "F32", "F16", "BF16")


class StoredWeight:
    """An array in a file, read in slices."""

    def __init__(self, part: Any) -> None:
        self._part = part
        self.shape = tuple(part.get_shape())

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        return self._part[index]


class Folder:
    """Files of a model in a folder, each read on first use."""

    config, weights, index = CONFIG, WEIGHTS, INDEX

    def __init__(self, path: Path) -> None:
        """Open a folder.

        Raises:
          ValueError: if it has no config.json.
        """
        self.path = path
        self._check_kind()
        self.config_json = _strict_object(path / self.config)
        self._sound: set[Path] = set()  # its files of weights that were checked
        self._files: dict[str, Path] | None = None  # name -> the file that has it

    def _check_kind(self) -> None:
        """Raise a ValueError if the folder holds only adapters."""
        if (self.path / ADAPTER_CONFIG).exists() and not (self.path / CONFIG).exists():
            raise ValueError(
                f"{self.path} holds adapters, not a model: give their base model, and "
                "this folder as lora.init_from."
            )

    @property
    def tokenizer(self) -> Path:
        """File of its tokenizer: tokenizer.json, or SentencePiece's.

        Raises:
          ValueError: if it has neither.
        """
        names = ("tokenizer.json", "tokenizer.model")
        found = next((p for p in map(self.path.joinpath, names) if p.is_file()), None)
        if found is None:
            raise ValueError(
                f"{self.path} has no {' or '.join(names)}: add its tokenizer, or set "
                "data.tokenizer to another file with the same tokens."
            )
        return found

    @property
    def generation(self) -> dict[str, Any]:
        """Content of generation_config.json; {} without one. Raises as the folder."""
        path = self.path / GENERATION
        return _strict_object(path) if os.path.lexists(path) else {}

    @property
    def names(self) -> list[str]:
        """Names of all arrays, and of weight files that hold none of them.

        Raises:
          ValueError: as `weight`.
        """
        known = {path.name for path in self._named.values()}
        files = {path.name for path in self.path.glob("*.safetensors")}
        return [*self._named, *sorted(files - known)]

    @property
    def _named(self) -> dict[str, Path]:
        if self._files is None:
            self._files = self._found()
        return self._files

    def weight(self, name: str) -> StoredWeight:
        """Return a handle of an array, without reading it.

        While the handle is held, the parts that were read stay mapped: the file is
        opened again for each array.

        Raises:
          KeyError: if there is no array of that name.
          ValueError: with the file's name, if a file is missing or damaged, or
            the array holds no floating-point numbers.
        """
        path = self._named[name]
        file = self._opened(path)
        try:
            part = file.get_slice(name)
        except safetensors.SafetensorError as error:
            raise ValueError(
                f"{path} does not have {name}, which {self.index} says it has: restore "
                "both."
            ) from error
        if part.get_dtype() not in _FLOATS:
            raise ValueError(
                f"{path} has {name} in {part.get_dtype()}, of which there are only "
                f"{', '.join(_FLOATS)} here: convert it."
            )
        return StoredWeight(part)

    def _opened(self, path: Path) -> Any:
        """Open a file of weights.

        Raises:
          ValueError: if it is damaged, or names an array twice.
        """
        try:
            opened = safetensors.safe_open(path, framework="np")
            if path not in self._sound:
                with path.open("rb") as file:  # the library has checked what is read
                    (size,) = struct.unpack("<Q", file.read(8))
                    _strict(file.read(size).decode())
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            why = " ".join(str(error).split())[:300]
            raise ValueError(f"{path} is damaged ({why}): restore it.") from error
        self._sound.add(path)
        return opened

    def _found(self) -> dict[str, Path]:
        """Return the file of each array."""
        whole, index = self.path / self.weights, self.path / self.index
        if whole.is_file():
            return dict.fromkeys(self._opened(whole).keys(), whole)
        if not index.is_file():
            raise ValueError(
                f"{self.path} has neither {self.weights} nor {self.index}: save the "
                "model with safe_serialization."
            )
        names = _strict_object(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise ValueError(f"{index} is damaged: it has no weight_map.")
        for file in names.values():
            if not isinstance(file, str) or Path(file).name != file:
                raise ValueError(
                    f"{index} names {file!r}, which is not a file of its folder: "
                    "restore it."
                )
            if not (self.path / file).is_file():
                raise ValueError(f"{index} names {file}, which is missing: add it.")
        return {name: self.path / file for name, file in names.items()}


class AdapterFolder(Folder):
    """Files of adapters in PEFT's format, as of a model."""

    config, weights = ADAPTER_CONFIG, ADAPTERS
    index = f"{ADAPTERS}.index.json"

    def _check_kind(self) -> None:
        pass


def _strict_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raise a ValueError if a name occurs twice."""
    found = read_object(path)
    try:
        _strict(read_text(path, limit=small_files.LARGEST))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}.") from error
    return found


def _strict(text: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            twice = next(n for n in names if names.count(n) > 1)
            raise ValueError(f"it has {twice!r} twice")
        return dict(pairs)

    return json.loads(text, object_pairs_hook=once)


def write_weights(
    folder: Path, arrays: Iterable[tuple[str, np.ndarray]], limit: int = SHARD_BYTES
) -> None:
    """Write arrays as safetensors files, with an index if there are several.

    Args:
      folder: where no weights are yet.
      arrays: names and arrays; at most one file's arrays are held at a time.
      limit: bytes of a file, which one larger array exceeds.
    """
    files: list[list[str]] = []
    total = 0
    for part in _parts(arrays, limit):
        total += sum(x.nbytes for x in part.values())
        save_arrays(folder / f"{len(files)}.partial", part)
        files.append(list(part))
    if len(files) == 1:
        (folder / "0.partial").rename(folder / WEIGHTS)
        return
    weight_map: dict[str, str] = {}
    for i, names in enumerate(files):
        file = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / f"{i}.partial").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def save_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write one safetensors file."""
    # transformers rejects a file without a format
    save_file(arrays, path, metadata={"format": "pt"})


def _parts(
    arrays: Iterable[tuple[str, np.ndarray]], limit: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yield arrays in groups of at most `limit` bytes, or of one array."""
    part: dict[str, np.ndarray] = {}
    size = 0
    for name, x in arrays:
        if part and size + x.nbytes > limit:
            yield part
            part, size = {}, 0
        part[name], size = x, size + x.nbytes
    yield part
