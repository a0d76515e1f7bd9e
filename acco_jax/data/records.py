"""Records of text in files: JSON Lines, CSV, Parquet, `datasets` saved to disk.

Nothing here runs the data set's code. Its formats need only pyarrow.
"""

import codecs
import csv
import dataclasses
import glob
import gzip
import itertools
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from acco_jax.command.paths import expanded
from acco_jax.core import small_files
from acco_jax.data import cards, listing, tasks

SUFFIXES = {
    "jsonl": (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz"),
    "csv": (".csv", ".csv.gz"),
    "parquet": (".parquet",),
    "huggingface": (".arrow",),
}

# Files that hold records, and what to do about them where they cannot be read.
REMEDIES = {
    **{end: f"set data.name='{k}'" for k, ends in SUFFIXES.items() for end in ends},
    ".json": "if it has one JSON object a line, name it .jsonl, else write it so; "
             "and set data.name='jsonl'",
    **dict.fromkeys((".tsv", ".xml", ".yaml", ".yml"),
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
_SAID = "write one record a line, and long documents in several"


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

    For 'jsonl', 'csv' and 'parquet' the path is a file, a folder or a glob pattern. The
    folder's card gives the splits (`acco_jax.data.cards`); without one the words in a
    file's name, and in its folders' names, do (`acco_jax.data.listing`).
    For 'huggingface' it is a folder that `datasets` has saved to disk.

    Raises:
      ValueError: the files are missing or cannot be read.
    """
    if not path:
        raise ValueError(
            f"data.name={kind!r} needs a path: set data.path to where it is"
        )
    root = expanded(path).absolute()
    if kind == "huggingface":
        return _saved(root, train_split, validation_split)
    card = None if train_split == listing.ALL else cards.default(root)
    if card and card.patterns:
        names = _named(root, [*card.patterns], train_split, validation_split)
        splits = listing.distinct(*(_declared(kind, card, part) for part in names[:2]))
        return Files(kind, splits.train, splits.validation, names)
    if card:
        root = card.folder
    base, found = listing.matching(root)
    files = _readable(kind, root, found)
    splits = listing.choose(files, base, train_split, validation_split)
    names = [
        [path.relative_to(base).as_posix() for path in paths]
        for paths in (splits.train, splits.validation, splits.unused)
    ]
    return Files(kind, splits.train, splits.validation, names)


def read(
    files: Files,
    paths: Iterable[Path],
    columns: Sequence[str],
    optional: Sequence[str],
    *,
    chats: bool = False,
) -> Iterator[dict[str, Any]]:
    """Iterate over the records of some files, with the given columns, all text.

    With `chats` the columns hold lists of messages, and records have `tasks.Chat`.

    Raises:
      ValueError: a file cannot be read or lacks a column.
    """
    for path in paths:
        if files.kind == "jsonl":
            found = _json_lines(path)
        elif files.kind == "csv":
            found = _csv(path, columns, optional)
        else:
            found = _table(files.kind, path, columns, optional, chats)
        for where, record in found:
            if chats:
                yield _chats(record, where, columns)
            else:
                _check(record, where, columns, optional)
                yield record


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


def _declared(kind: str, card: cards.Subset, splits: Iterable[str]) -> Iterator[Path]:
    """Iterate over the files that a card declares for some splits."""
    for pattern in (p for split in splits for p in card.patterns[split]):
        root = card.folder / pattern
        yield from _readable(kind, root, listing.matching(root)[1])


def _named(
    root: Path, splits: Sequence[str], train_split: str, validation_split: str
) -> list[list[str]]:
    """Choose among declared splits: for training, held out, not used.

    Raises:
      ValueError: one that is asked for is not among them.
    """
    listing.check_names(train_split, validation_split)
    held_out = listing.held_out(splits, train_split, validation_split)
    chosen = [train_split, *([held_out] if held_out else [])]
    for name in chosen:
        if name not in splits:
            raise ValueError(
                f"{root} has no split {name!r}: set data.train_split and "
                f"data.validation_split to some of {list(splits)}"
            )
    return [chosen[:1], chosen[1:], [s for s in splits if s not in chosen]]


def _saved(root: Path, train_split: str, validation_split: str) -> Files:
    """Find the arrow files of a folder that `datasets` has saved."""
    if (root / "dataset_dict.json").is_file():
        splits = _json(root / "dataset_dict.json").get("splits")
        splits = splits if isinstance(splits, list) else []
        splits = [s for s in splits if isinstance(s, str)]
        names = _named(root, splits, train_split, validation_split)
        train, validation = (
            tuple(path for split in part for path in _shards(root / split))
            for part in names[:2]
        )
        return Files("huggingface", train, validation, names)
    if (root / "state.json").is_file():
        whole = train_split in ("train", listing.ALL)
        if not whole or validation_split != "validation":
            raise ValueError(
                f"{root} is a Dataset without splits, but data.train_split is "
                f"{train_split!r} and data.validation_split {validation_split!r}: set "
                "them to 'train' and 'validation', which hold out data.held_out of it, "
                "or save a DatasetDict"
            )
        return Files("huggingface", _shards(root), (), [[root.name], [], []])
    raise ValueError(
        f"{root} is not a folder that datasets' save_to_disk wrote (it has neither "
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


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the lines of a file, each with its place in words."""
    opened: Any = gzip.open if path.name.lower().endswith(".gz") else open
    with opened(path, "rb") as file:
        try:
            lines = iter(lambda: file.readline(LONGEST_LINE + 1), b"")
            for number, line in enumerate(lines, 1):
                where = f"line {number} of {path}"
                if len(line) > LONGEST_LINE:
                    raise ValueError(
                        f"{where} has more than {LONGEST_LINE:,} bytes: {_SAID}"
                    )
                # byte order marks of the files that were put together
                yield where, line.removeprefix(codecs.BOM_UTF8)
        except (OSError, EOFError, zlib.error) as error:  # of gzip
            raise ValueError(f"{path} is damaged ({error}): restore it") from error


def _json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for where, line in _lines(path):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode())
        except (ValueError, RecursionError) as error:
            record = error
        if not isinstance(record, dict):
            raise ValueError(
                f"{where} is not a JSON object: write one a line, in UTF-8"
            )
        yield where, record


def _csv(
    path: Path, columns: Sequence[str], optional: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Iterate over the records of a file of comma-separated values with a header."""
    csv.field_size_limit(LONGEST_LINE)  # of the whole process
    rows = csv.reader((line.decode() for _, line in _lines(path)), strict=True)
    header: list[str] | None = None
    try:
        for row in rows:
            where = f"line {rows.line_num} of {path}"
            if header is None:
                header = row
                needed = [*columns, *(name for name in optional if name in header)]
                if twice := [name for name in needed if header.count(name) > 1]:
                    raise ValueError(f"{where} has {twice[0]!r} twice: rename one")
                for name in columns:
                    if name not in header:
                        raise ValueError(f"{path} {lacks(name, header, columns)}")
            elif row and len(row) != len(header):
                raise ValueError(
                    f"{where} has {len(row)} fields, not the {len(header)} of the "
                    "header: quote texts with commas"
                )
            elif row:
                record = dict(zip(header, row, strict=True))
                yield where, {name: record[name] for name in needed}
    except (csv.Error, UnicodeDecodeError) as error:
        why = "no UTF-8" if isinstance(error, UnicodeDecodeError) else error
        raise ValueError(
            f"line {rows.line_num} of {path} is not CSV ({why}): write UTF-8 with "
            "commas, and quotes doubled in quotes"
        ) from error


def _chats(
    record: dict[str, Any], where: str, columns: Sequence[str]
) -> dict[str, Any]:
    try:
        return {name: tasks.conversation(record.get(name)) for name in columns}
    except ValueError as error:
        raise ValueError(f"{where} {error}") from error


def _check(
    record: dict[str, Any], where: str, columns: Sequence[str], optional: Sequence[str]
) -> None:
    """Raise a ValueError for a record whose columns are not text."""
    for name in columns:
        if name in record and record[name] is None:
            raise ValueError(f"{where} has null in {name!r}: leave such records out")
        if not isinstance(record.get(name), str):
            texts = sorted(k for k, v in record.items() if isinstance(v, str))
            raise ValueError(f"{where} {lacks(name, texts, columns)}")
    for name in optional:
        if not isinstance(record.get(name, ""), str | None):
            raise ValueError(f"{where} has {name!r} that is not text: write a string")


def _table(
    kind: str, path: Path, columns: Sequence[str], optional: Sequence[str], chats: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Iterate over the records of a Parquet file, or one in Arrow's stream format."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with open(path, "rb") as file:
            if kind == "parquet":
                opened = parquet.ParquetFile(file)
                schema = opened.schema_arrow
                names = _present(path, schema, columns, optional, chats)
                batches = opened.iter_batches(_ROWS_AT_ONCE, columns=names)
            else:
                opened = pa.ipc.open_stream(file)
                names = _present(path, opened.schema, columns, optional, chats)
                batches = (batch.select(names) for batch in opened)
            numbers = itertools.count(1)
            for batch in batches:
                batch.validate(full=True)  # else pyarrow trusts each offset in it
                for record in batch.to_pylist():
                    yield f"row {next(numbers)} of {path}", record
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{path} is not a complete {kind} file ({first}): restore it, or remove it"
        ) from error


def _present(
    path: Path,
    schema: Any,
    columns: Sequence[str],
    optional: Sequence[str],
    chats: bool,
) -> list[str]:
    """Return the columns to read; raise a ValueError if a required one is not text."""
    if chats:
        return [name for name in columns if name in schema.names]
    texts = [f.name for f in schema if _is_text(f.type)]
    for name in columns:
        if name not in texts:
            raise ValueError(f"{path} {lacks(name, texts, columns)}")
    for name in optional:
        if name in schema.names and name not in texts:
            kind = schema.field(name).type
            if str(kind) != "null":  # of rows that all have none
                raise ValueError(
                    f"{path} has {name!r} of type {kind}, which is not text: write "
                    "strings"
                )
    return [*columns, *(name for name in optional if name in texts)]


def _is_text(kind: Any) -> bool:
    """Return whether an Arrow type is text, which may be encoded if it repeats."""
    while str(kind).startswith(("dictionary<", "run_end_encoded<")):
        kind = kind.value_type
    return str(kind) in ("string", "large_string", "string_view")


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
    path = expanded(path).absolute()
    if not path.is_dir() and "**" not in path.parts:
        return
    root, pattern = listing.divided(path)
    if pattern and not glob.has_magic(pattern[0]):
        return  # matches nothing
    below = {os.path.realpath(folder) for folder, _ in listing.folders(root)}
    for own in map(Path, ours):
        real = expanded(own).resolve()
        if below & {str(real), *map(str, real.parents)}:
            raise ValueError(
                f"folder {root} holds {own}, which training writes to: its files would "
                "become text; use a workdir and a data_dir outside"
            )
