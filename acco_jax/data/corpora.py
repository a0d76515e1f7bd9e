"""The sources of documents: text, records in files, any tfds name."""

import contextlib
import dataclasses
import difflib
import hashlib
import io
import json
import os
import platform
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np
import tensorflow_datasets as tfds
from absl import logging

from acco_jax.command.paths import expanded
from acco_jax.core import small_files
from acco_jax.data import listing, prepared, records, tasks
from acco_jax.data.tasks import Document

RECORDS = ("jsonl", "csv", "parquet", "huggingface")
BUILT_IN = ("stdlib", "text_folder", *RECORDS)
_FEATURES = "features.json"  # of tfds
# incremented when equal files begin to give other documents
_READ_AS = 2
_LARGEST_TEXT = 2**30  # bytes: a record of tfds holds less than twice as many
_EXCLUDED = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclasses.dataclass(frozen=True)
class Source:
    """The documents of a prepared data set, by split."""

    fingerprint: str  # names the documents and their split; fit for a file name
    train: Callable[[], Iterator[Document]]
    validation: Callable[[], Iterator[Document]]


@dataclasses.dataclass(eq=False, kw_only=True)
class FolderConfig(tfds.core.BuilderConfig):
    """The configuration of a folder of text: its files, as paths below `root`."""

    root: Path
    train: tuple[str, ...]
    validation: tuple[str, ...] = ()  # (): `held_out` of the files of `train`
    held_out: float = 0.05
    checked: bool = True  # whether a file that is not text is an error, or left out


class TextFolder(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """A data set of the UTF-8 files of a folder, one document a file."""

    VERSION = tfds.core.Version("1.0.0")
    # Nothing is downloaded; looking for checksums needs importlib_resources, which
    # tfds 4.9.10 imports without declaring it.
    url_infos = None

    def _info(self) -> tfds.core.DatasetInfo:
        features = {name: tfds.features.Text() for name in ("path", "text")}
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features)
        )

    def _split_generators(self, dl_manager: object) -> dict[str, Any]:
        del dl_manager  # nothing is downloaded
        config = self.builder_config
        paths = [*config.train, *config.validation]
        if config.checked:
            _check_text(config.root, paths)
        paths = [path for path in paths if _read_text(config.root / path)]
        held_out = sorted({*paths} & {*config.validation})
        if (
            len(paths) < 2
            or len(held_out) == len(paths)
            or (config.validation and not held_out)
        ):
            raise ValueError(
                f"{config.root} has {len(paths)} files of UTF-8 text, {len(held_out)} "
                "of them held out: put in at least 2, one document each (training and "
                "held-out documents are apart)"
            )
        if not config.validation:
            paths.sort(key=_uniform)
            count = sum(_uniform(path) < config.held_out for path in paths)
            held_out = paths[: min(max(count, 1), len(paths) - 1)]
        return {
            "train": self._generate_examples(sorted({*paths} - {*held_out})),
            "validation": self._generate_examples(sorted(held_out)),
        }

    def _generate_examples(self, paths: list[str]) -> Iterator[tuple[bytes, Any]]:
        for path in paths:
            key = os.fsencode(path)  # a file's name need not be UTF-8
            text = _read_text(self.builder_config.root / path)
            yield key, {"path": key, "text": text}


class StdlibSource(TextFolder, skip_registration=True):  # type: ignore[call-arg]
    """A data set of the running interpreter's own source files."""


def stdlib_config(held_out: float = 0.05) -> FolderConfig:
    """Describe the standard library of the interpreter that runs.

    The name carries the version and the files' sizes: distributions leave out
    different parts of the same release, and must not share a cache.

    Raises:
      ValueError: if the interpreter came without its sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = _modules(root)
    if len(files) < 2:
        raise ValueError(
            f"no standard library sources in {root}: use an interpreter that has them, "
            "or data.name='text_folder' with a folder of text"
        )
    digest = _digest([(path, (root / path).stat().st_size) for path in files], held_out)
    name = f"{platform.python_implementation().lower()}-{platform.python_version()}"
    return FolderConfig(
        name=f"{name}-{digest}", root=root, train=tuple(files), held_out=held_out,
        checked=False,
    )  # fmt: skip


def folder_config(config: ml_collections.ConfigDict) -> FolderConfig:
    """Describe a folder of text, a document a file; a changed folder has another name.

    Raises:
      ValueError: if there is no such folder, or its files may be of several splits.
    """
    if not config.path:
        raise ValueError("data.name='text_folder' needs data.path: a folder of text")
    root = expanded(config.path).absolute()
    if not root.is_dir():
        raise ValueError(f"no folder {root}: set data.path to a folder of text files")
    files = [root / path for path in listing.walk(root, _EXCLUDED)]
    splits = listing.choose(
        files, root, config.train_split, config.validation_split, documents=True
    )
    train, validation, unused = (
        tuple(path.relative_to(root).as_posix() for path in paths)
        for paths in (splits.train, splits.validation, splits.unused)
    )
    stats = [(p, (root / p).stat()) for p in (*train, *validation)]
    listed = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    _say_splits(config, train, validation, unused)
    return FolderConfig(
        name=_digest(_READ_AS, str(root), listed, len(train), config.held_out),
        root=root, train=train, validation=validation, held_out=config.held_out,
    )  # fmt: skip


def _say_splits(
    config: ml_collections.ConfigDict,
    train: Sequence[str],
    validation: Sequence[str],
    unused: Sequence[str],
) -> None:
    said = listing.said(train, validation, unused, config.held_out)
    logging.info("Splits of data.name=%r: %s.", config.name, said)


def open_source(config: ml_collections.ConfigDict, data_dir: Path) -> Source:
    """Prepare a data set if it is not yet, and open it, without TensorFlow.

    Takes the config of `load_corpus` and where tfds keeps prepared data sets.

    Raises:
      ValueError: if the data set, the split or the text feature is not there.
    """
    if config.name in RECORDS:
        return _from_records(config)
    with _quiet():
        builder = _builder(config, data_dir)
        known = builder.is_prepared()
    if not known:
        logging.info("Preparing data set %s in %s.", builder.info.full_name, data_dir)
    with _quiet():
        _prepare(builder, config.name)
    if isinstance(builder, TextFolder):
        prepared.keep_sums(Path(builder.data_dir))
    return _documents(builder, config)


def _builder(
    config: ml_collections.ConfigDict, data_dir: Path
) -> tfds.core.DatasetBuilder:
    """Return the builder of a data set of text, or of a named data set."""
    chats = config.task == "chat"  # whose columns are no text
    if chats or (
        config.name in ("stdlib", "text_folder") and config.task != "pretrain"
    ):
        raise ValueError(
            f"data set {config.name!r} has no columns of data.task={config.task!r}: "
            "set data.name='jsonl', or data.task='pretrain'"
        )
    if config.name == "text_folder":
        return prepared.opened(TextFolder, folder_config(config), data_dir)
    named = None if config.name == "stdlib" else _named_builder(config.name, data_dir)
    if config.path is not None:
        raise ValueError(
            f"data.path is {config.path!r}, but data.name={config.name!r} does not "
            "read it: set data.name to text_folder, jsonl, csv, parquet or huggingface"
        )
    folder = stdlib_config(config.held_out)
    return named or prepared.opened(StdlibSource, folder, data_dir)


def _from_records(config: ml_collections.ConfigDict) -> Source:
    """Open records in files; without held-out files, a part of them is held out."""
    columns = tasks.columns(config.task, config.text_feature)
    optional = tasks.optional_columns(config.task)
    files = records.find(
        config.name, config.path, config.train_split, config.validation_split
    )

    def documents(paths: Sequence[Path]) -> Callable[[], Iterator[Document]]:
        def read() -> Iterator[Document]:
            chats = config.task == "chat"
            for record in records.read(files, paths, columns, optional, chats=chats):
                yield tasks.document(record, config.task, config.text_feature)

        return read

    by_hash = None if files.validation else config.held_out
    digest = _digest(
        _READ_AS, files.listing(), columns, optional, len(files.train), by_hash
    )
    _say_splits(config, *files.names)
    train, validation = documents(files.train), documents(files.validation)
    return _source(f"{config.name}-{digest}", train, validation, by_hash)


def _source(
    fingerprint: str,
    train: Callable[[], Iterator[Document]],
    validation: Callable[[], Iterator[Document]],
    held_out: float | None,
) -> Source:
    """Hold out the share `held_out` of the training documents, if that is given."""
    if held_out is None:
        return Source(fingerprint, train, validation)

    def part(held: bool) -> Iterator[Document]:
        for document in train():
            if (_uniform("".join(tasks.texts(document))) < held_out) == held:
                yield document

    return Source(fingerprint, lambda: part(False), lambda: part(True))


def _named_builder(name: str, data_dir: Path) -> tfds.core.DatasetBuilder:
    """Find a data set by its tfds name."""
    _check_features(name, data_dir)
    try:
        return tfds.builder(name, data_dir=data_dir, file_format="array_record")
    except tfds.core.registered.DatasetNotFoundError as error:
        names = [*BUILT_IN, *tfds.list_builders(with_community_datasets=False)]
        nearest = difflib.get_close_matches(name.split("/")[0], names, n=1)
        raise ValueError(
            f"no data set {name!r} in tfds or in {data_dir}: "
            + "".join(f"did you mean {other!r}? " for other in nearest)
            + "For your own text set data.name='text_folder' and data.path"
        ) from error
    except Exception as error:  # whatever the builder's own code raises
        raise ValueError(
            f"data set {name!r} cannot be opened ({_line(error)}): fix the name, or "
            "set data.data_dir to where it is, or can be made, in array_record files"
        ) from error


def _prepare(builder: tfds.core.DatasetBuilder, name: str) -> None:
    """Write the data set as array_record files, the format read without TensorFlow."""
    download = tfds.download.DownloadConfig(try_download_gcs=False)
    try:
        builder.download_and_prepare(
            download_config=download, file_format="array_record"
        )
    except Exception as error:  # downloads and the builder's own code raise anything
        if name in BUILT_IN and type(error) is RuntimeError:  # of what writes the files
            raise OSError(
                f"data set {name!r} cannot be written ({_line(error)}): make room, or "
                "set data.data_dir to another disk"
            ) from error
        if name in BUILT_IN:
            raise
        raise ValueError(
            f"data set {name!r} cannot be prepared here ({_line(error)}): prepare it "
            "elsewhere with file_format='array_record', set data.data_dir to the result"
        ) from error


def _documents(
    builder: tfds.core.DatasetBuilder, config: ml_collections.ConfigDict
) -> Source:
    """Choose the splits: the named ones, or a held-out part of the training split."""
    train: str = "train"
    validation: str | None = "validation"
    declared = sorted(builder.info.splits)
    if config.name != "text_folder":  # whose files are split by their names
        train = config.train_split
        listing.check_names(train, config.validation_split)
        validation = listing.held_out(declared, train, config.validation_split)
    splits = [split for split in (train, validation) if split]
    columns = tasks.columns(config.task, config.text_feature)
    optional = tasks.optional_columns(config.task)
    rows = {
        split: _rows(builder, config.name, columns, optional, split) for split in splits
    }
    if config.name != "text_folder":
        _check_apart(builder, splits)
        parts = {part.split("[")[0].strip() for s in splits for part in s.split("+")}
        _say_splits(config, splits[:1], splits[1:], sorted({*declared} - parts))
    columns += optional

    def read(split: str | None) -> Iterator[Document]:
        for example in _examples(rows[split or train], config.name):
            texts = {name: _text(example[name]) for name in columns if name in example}
            if config.name == "stdlib":  # byte for byte
                yield texts[config.text_feature]
            else:
                yield tasks.document(texts, config.task, config.text_feature)

    sizes = [
        (s.name, s.num_examples, s.num_bytes) for s in builder.info.splits.values()
    ]
    if config.name not in BUILT_IN:  # whose full_name changes with their files
        sizes += _prepared_files(Path(builder.data_dir))
    by_hash = None if validation else config.held_out
    what = config.text_feature if config.task == "pretrain" else config.task
    digest = _digest(_READ_AS, builder.info.full_name, sizes, what, splits, by_hash)
    fingerprint = f"{builder.name}-{digest}"
    return _source(fingerprint, lambda: read(train), lambda: read(validation), by_hash)


def _prepared_files(folder: Path) -> list[tuple[str, int, int]]:
    """Return values that change when a data set is prepared again; [] if remote."""
    files = sorted(path for path in folder.glob("*") if path.is_file())
    stats = [(path.name, path.stat()) for path in files]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def _check_apart(builder: tfds.core.DatasetBuilder, splits: Sequence[str]) -> None:
    """Raise a ValueError if parts of splits, such as 'train[:90%]', overlap.

    Raises:
      ValueError: they overlap.
    """
    if len(splits) < 2:
        return
    train, held_out = (
        tfds.core.ReadInstruction.from_spec(split).to_absolute(builder.info.splits)
        for split in splits
    )
    for a in train:
        size = builder.info.splits[a.splitname].num_examples
        for b in (b for b in held_out if b.splitname == a.splitname):
            start = max(a.from_ or 0, b.from_ or 0)
            if start < min(size if e.to is None else e.to for e in (a, b)):
                raise ValueError(
                    f"data.train_split={splits[0]!r} and data.validation_split="
                    f"{splits[1]!r} have examples in common: choose parts that do not "
                    "overlap"
                )


def _examples(rows: Sequence[dict[str, Any]], name: str) -> Iterator[dict[str, Any]]:
    """Iterate over a split.

    Raises:
      ValueError: its files cannot be read.
    """
    try:
        for number in range(len(rows)):
            yield rows[number]
    except Exception as error:  # array_record's RuntimeError, and what features raise
        raise _unreadable(name, error) from error


def _unreadable(name: str, error: Exception) -> ValueError:
    return ValueError(
        f"data set {name!r} cannot be read ({_line(error)}): restore its files, or "
        "prepare it again"
    )


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode(errors="replace")


def _rows(
    builder: tfds.core.DatasetBuilder,
    name: str,
    columns: Sequence[str],
    optional: Sequence[str],
    split: str,
) -> Sequence[dict[str, Any]]:
    """Open a split for random access, if it holds the columns of text."""
    splits = sorted(builder.info.splits)
    parts = [part.split("[")[0].strip() for part in split.split("+")]
    if not set(parts) <= set(splits):
        raise ValueError(
            f"data set {name!r} has no split {split!r}: set data.train_split and "
            f"data.validation_split to some of {splits}"
        )
    try:
        tfds.core.ReadInstruction.from_spec(split).to_absolute(builder.info.splits)
    except Exception as error:  # such as 'train[:200]' of 100
        raise ValueError(
            f"data set {name!r} has no part {split!r} ({_line(error)}): set "
            "data.train_split and data.validation_split to parts that it has"
        ) from error
    kinds = builder.info.features.items()
    texts = [key for key, k in kinds if k.shape == () and k.np_dtype == np.object_]
    for feature in columns:
        if feature not in texts:
            raise ValueError(
                f"data set {name!r} {records.lacks(feature, texts, columns)}"
            )
    for feature in optional:
        if feature in builder.info.features and feature not in texts:
            raise ValueError(
                f"data set {name!r} has {feature!r} that is not text: prepare it as "
                "strings, or without"
            )
    try:
        return builder.as_data_source(split)
    except Exception as error:  # of tfds and array_record, whatever their files hold
        raise _unreadable(name, error) from error


def _modules(root: Path) -> list[str]:
    """List the Python files under a folder: sorted relative paths, nothing hidden."""
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in _EXCLUDED and f[0] != "."]
        relative = Path(folder).relative_to(root)
        names = [n for n in names if n[0] != "." and n.endswith(".py")]
        paths += [(relative / n).as_posix() for n in names]
    return sorted(path for path in paths if (root / path).is_file())


def _check_text(root: Path, paths: Sequence[str]) -> None:
    """Raise a ValueError if a folder of text holds something else.

    Raises:
      ValueError: a file is not text; the message says what to do.
    """
    for path in paths:
        if say := records.remedy(Path(path).name):
            raise ValueError(f"{root / path} is not text but data: {say}, or move it")
        if (root / path).stat().st_size > _LARGEST_TEXT:
            raise ValueError(
                f"{root / path} has more than {_LARGEST_TEXT:,} bytes, too many for a "
                "document: split it"
            )
        if _read_text(root / path) is None:
            raise ValueError(
                f"{root / path} is not UTF-8 text: move it out of the folder, or "
                "convert it to UTF-8"
            )


def _check_features(name: str, data_dir: Path) -> None:
    """Raise a ValueError if a data set's files name code of other packages to import.

    Raises:
      ValueError: a file names such a class.
    """
    root = data_dir / name.split(":")[0].split("/")[0]
    found = listing.folders(root) if root.is_dir() else ()
    for path in (Path(f, _FEATURES) for f, names in found if _FEATURES in names):
        try:
            nodes = [json.loads(small_files.text(path))]
        except (OSError, ValueError, RecursionError):
            continue  # tfds says what is wrong with it
        while nodes:
            node = nodes.pop()
            if isinstance(node, list):
                nodes += node
            if not isinstance(node, dict):
                continue
            nodes += node.values()
            kinds = [node.get("pythonClassName", ""), node.get("type", "")]
            for kind in (k for k in kinds if isinstance(k, str) and "." in k):
                if not kind.startswith("tensorflow_datasets."):
                    raise ValueError(
                        f"{path} asks for {kind!r:.200}, which is not of "
                        "tensorflow_datasets and would run code of the data set's: "
                        "prepare it without"
                    )


def _read_text(path: Path) -> str | None:
    """Read a file's text, byte for byte; "" if it is blank, None if it is not UTF-8."""
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError:
        return None
    if "\0" in text:
        return None
    return text if text.lstrip("\ufeff").strip() else ""


def _uniform(text: str) -> float:
    """Hash a string to [0, 1), identically on every machine."""
    digest = hashlib.sha256(text.encode(errors="surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _digest(*values: Any) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def _line(error: Exception) -> str:
    """Shorten an exception to its first line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:500]}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep tfds from printing, logging and drawing progress bars."""
    verbosity = logging.get_verbosity()
    tfds.display_progress_bar(False)
    logging.set_verbosity(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
        tfds.display_progress_bar(True)
