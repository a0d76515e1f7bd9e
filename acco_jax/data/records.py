"""Records of text in files: JSON Lines, Parquet, and `datasets` saved to disk.

Nothing here runs the data set's code. Its formats need only pyarrow.
"""

import codecs
import dataclasses
import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from acco_jax.core import small_files
from acco_jax.data import listing

SUFFIXES = {
    "jsonl": (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz"),
    "parquet": (".parquet",),
    "huggingface": (".arrow",),
}

# Files that hold records, and what to do about them where they cannot be read.
REMEDIES = {
    **{end: f"set data.name='{k}'" for k, ends in SUFFIXES.items() for end in ends},
    **dict.fromkeys((".json", ".csv", ".tsv", ".xml", ".yaml", ".yml"),
                    "write it as one JSON object a line and set data.name='jsonl'"),
    **dict.fromkeys((".gz", ".zip", ".zst", ".bz2", ".xz", ".tar"), "unpack it"),
    **dict.fromkeys((".tfrecord", ".array_record"),
                    "set data.name to its tfds name, data.data_dir to where it is"),
}  # fmt: skip
METADATA = {
    "dataset_dict.json": "huggingface",
    "dataset_info.json": "huggingface",
    "dataset_infos.json": "parquet",
    "state.json": "huggingface",
    "features.json": "",  # tfds
}
_ROWS_AT_ONCE = 1024
LONGEST_LINE = 2**28  # bytes: a small .gz may hold a line that no memory does


@dataclasses.dataclass(frozen=True)
class Files:
    """The files of each split of a data set; () where a split has none."""

    kind: str
    train: tuple[Path, ...]
    validation: tuple[Path, ...]
    # For training, held out and not used: names of files, or of splits that the data
    # set declares.
    names: list[list[str]]

    def listing(self) -> list[tuple[str, int, int]]:
        """Return values that change when a file changes."""
        stats = [(str(path), path.stat()) for path in (*self.train, *self.validation)]
        return [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]


def remedy(name: str) -> str | None:
    """Return a remedy for a file that is not text by its name; None if it may be."""
    if name in METADATA:
        kind = METADATA[name]
        what = f"'{kind}'" if kind else "its tfds name"
        return f"it is a data set's metadata: set data.name to {what}"
    lower = name.lower()
    ends = [end for end in REMEDIES if lower.endswith(end)]
    return REMEDIES[max(ends, key=len)] if ends else None


def find(kind: str, path: str | None, train_split: str, validation_split: str) -> Files:
    """Find the files of a data set.

    For 'jsonl' and 'parquet' the path is a file, a folder or a glob pattern; the words
    in a file's name, and in its folders' names, give its split (see
    `acco_jax.data.listing`).
    For 'huggingface' it is a folder that `datasets` has saved to disk.

    Raises:
      ValueError: the files are missing or cannot be read.
    """
    if not path:
        raise ValueError(
            f"data.name={kind!r} needs a path: set data.path to where it is"
        )
    root = Path(path).expanduser().absolute()
    if kind == "huggingface":
        return _saved(root, train_split, validation_split)
    base, files = listing.matching(root)
    files = _readable(kind, root, files)
    splits = listing.choose(files, base, train_split, validation_split)
    names = [
        [path.relative_to(base).as_posix() for path in paths]
        for paths in (splits.train, splits.validation, splits.unused)
    ]
    return Files(kind, splits.train, splits.validation, names)


def read(
    files: Files, paths: Iterable[Path], columns: Sequence[str], optional: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Iterate over the records of some files, with the given columns, all text.

    Raises:
      ValueError: a file cannot be read or lacks a column.
    """
    for path in paths:
        if files.kind == "jsonl":
            yield from _json_lines(path, columns, optional)
        else:
            yield from _table(files.kind, path, columns, optional)


def _readable(kind: str, root: Path, found: Sequence[Path]) -> list[Path]:
    """Return the files, among those found, that hold records of a kind.

    Raises:
      ValueError: there are none, or there are files of other records, too.
    """
    good = [p for p in found if p.name.lower().endswith(SUFFIXES[kind])]
    for path in found:
        say = remedy(path.name)
        if path not in good and (
            not root.is_dir() or (say and path.name not in METADATA)
        ):
            raise ValueError(
                f"{path} is not {' or '.join(SUFFIXES[kind])}, as data.name={kind!r} "
                f"wants: {say or 'rename it, or name other files in data.path'}"
            )
    if not good:
        raise ValueError(
            f"no {SUFFIXES[kind][0]} files at {root}: set data.path to a file, a "
            "folder or a glob pattern of them"
        )
    return good


def _saved(root: Path, train_split: str, validation_split: str) -> Files:
    """Find the arrow files of a folder that `datasets` has saved."""
    listing.check_names(train_split, validation_split)
    if (root / "dataset_dict.json").is_file():
        splits = _json(root / "dataset_dict.json").get("splits")
        splits = splits if isinstance(splits, list) else []
        splits = [s for s in splits if isinstance(s, str)]
        held_out = listing.held_out(splits, validation_split)
        chosen = [train_split, *([held_out] if held_out else [])]
        for name in chosen:
            if name not in splits:
                raise ValueError(
                    f"{root} has no split {name!r}: set data.train_split and "
                    f"data.validation_split to some of {splits}"
                )
        names = [chosen[:1], chosen[1:], [s for s in splits if s not in chosen]]
        train, validation = (
            tuple(path for split in part for path in _shards(root / split))
            for part in names[:2]
        )
        return Files("huggingface", train, validation, names)
    if (root / "state.json").is_file():
        return Files("huggingface", _shards(root), (), [[root.name], [], []])
    raise ValueError(
        f"{root} is no folder that datasets' save_to_disk wrote (it has neither "
        "dataset_dict.json nor state.json): save it so, or set data.name='parquet'"
    )


def _shards(folder: Path) -> tuple[Path, ...]:
    """Return the files that a saved Dataset consists of."""
    state = _json(folder / "state.json")
    if state.get("_indices_data_files"):
        raise ValueError(
            f"{folder} holds a selection of rows by index: call flatten_indices() "
            "before save_to_disk()"
        )
    try:
        names = [entry["filename"] for entry in state["_data_files"]]
        paths = tuple(folder / Path(name).name for name in names)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{folder / 'state.json'} names no data files: save the data set again"
        ) from error
    for path in paths:
        if not path.is_file():
            raise ValueError(
                f"{folder / repr(path.name)[1:-1]} is missing: restore it, or save the "
                "data set again"
            )
    return paths


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(small_files.text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} cannot be read as JSON: restore it, or save the data set again"
        ) from error
    return value if isinstance(value, dict) else {}


def _json_lines(
    path: Path, columns: Sequence[str], optional: Sequence[str]
) -> Iterator[dict[str, Any]]:
    opened: Any = gzip.open if path.name.lower().endswith(".gz") else open
    with opened(path, "rb") as file:
        try:
            lines = iter(lambda: file.readline(LONGEST_LINE + 1), b"")
            for number, line in enumerate(lines, 1):
                where = f"line {number} of {path}"
                if len(line) > LONGEST_LINE:
                    raise ValueError(
                        f"{where} has more than {LONGEST_LINE:,} bytes: write one "
                        "record a line, and long documents in several"
                    )
                # byte order marks of the files that were put together
                line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    yield _record(line, where, columns, optional)
        except (OSError, EOFError, zlib.error) as error:  # of gzip
            raise ValueError(f"{path} is damaged ({error}): restore it") from error


def _record(
    line: bytes, where: str, columns: Sequence[str], optional: Sequence[str]
) -> dict[str, Any]:
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        record = error
    if not isinstance(record, dict):
        raise ValueError(f"{where} is no JSON object: write one a line, in UTF-8")
    for name in columns:
        if name in record and record[name] is None:
            raise ValueError(f"{where} has null in {name!r}: leave such lines out")
        if not isinstance(record.get(name), str):
            texts = sorted(k for k, v in record.items() if isinstance(v, str))
            raise ValueError(f"{where} {lacks(name, texts, columns)}")
    for name in optional:
        if not isinstance(record.get(name, ""), str | None):
            raise ValueError(f"{where} has {name!r} that is no text: write a string")
    return record


def _table(
    kind: str, path: Path, columns: Sequence[str], optional: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Iterate over the records of a Parquet file, or one in Arrow's stream format."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with open(path, "rb") as file:
            if kind == "parquet":
                opened = parquet.ParquetFile(file)
                names = _present(path, opened.schema_arrow, columns, optional)
                batches = opened.iter_batches(_ROWS_AT_ONCE, columns=names)
            else:
                opened = pa.ipc.open_stream(file)
                names = _present(path, opened.schema, columns, optional)
                batches = (batch.select(names) for batch in opened)
            for batch in batches:
                batch.validate(full=True)  # else pyarrow trusts each offset in it
                yield from _complete(batch.to_pylist(), path, columns)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{path} is no whole {kind} file ({first}): restore it, or remove it"
        ) from error


def _present(
    path: Path, schema: Any, columns: Sequence[str], optional: Sequence[str]
) -> list[str]:
    """Return the columns to read; raise a ValueError if a required one is not text."""
    texts = [f.name for f in schema if _is_text(f.type)]
    for name in columns:
        if name not in texts:
            raise ValueError(f"{path} {lacks(name, texts, columns)}")
    return [*columns, *(name for name in optional if name in texts)]


def _is_text(kind: Any) -> bool:
    """Return whether an Arrow type is text, which may be encoded if it repeats."""
    while str(kind).startswith(("dictionary<", "run_end_encoded<")):
        kind = kind.value_type
    return str(kind) in ("string", "large_string", "string_view")


def _complete(
    records: list[dict[str, Any]], path: Path, columns: Sequence[str]
) -> Iterator[dict[str, Any]]:
    for record in records:
        for name in columns:
            if record[name] is None:
                raise ValueError(
                    f"{path} has a row whose {name!r} is null: leave such rows out"
                )
        yield record


def lacks(name: str, texts: Sequence[str], columns: Sequence[str]) -> str:
    """Return a message that there is no column of text of a name, and what to do.

    Args:
      name: of the column.
      texts: names of the data's columns of text.
      columns: names of the columns that the task reads.
    """
    others = [text for text in texts if text != name]
    if len(columns) > 1:
        return (
            f"has no text in {name!r}, its columns of text are {others}: rename them "
            f"to {', '.join(columns)}, or set data.task='pretrain'"
        )
    if not others:
        return f"has no text in {name!r}, nor in another column: use other data"
    return (
        f"has no text in {name!r}: set data.text_feature to one of {others}, or "
        "data.task to what its columns are for"
    )


def outside(path: Path, *ours: str | os.PathLike) -> None:
    """Raise a ValueError for a folder of data in which our own files would become data.

    Args:
      path: of the data: a folder, or a pattern of files in a folder and below it.
      ours: folders that training writes to.

    Raises:
      ValueError: one of `ours` is in the folder.
    """
    path = path.expanduser().absolute()
    if not path.is_dir() and "**" not in path.parts:
        return
    root = listing.base(path)
    below = {os.path.realpath(folder) for folder, _ in listing.folders(root)}
    for own in map(Path, ours):
        real = own.expanduser().resolve()
        if below & {str(real), *map(str, real.parents)}:
            raise ValueError(
                f"folder {root} holds {own}, which training writes to: its files would "
                "become text; use a workdir and a data_dir outside"
            )
