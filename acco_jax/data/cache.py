"""Tokens on disk, written once and verified whenever they are read.

Beside the tokens lie the checksums of their blocks, verified as a whole when the
cache is opened. The checksum of these checksums is in counts.json, which has one of
its own.
"""

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from acco_jax.core import small_files
from acco_jax.data import tasks
from acco_jax.data.chat import ChatTemplate
from acco_jax.data.corpora import Source
from acco_jax.data.stored import Tokens, block_sums, damaged
from acco_jax.data.tasks import Document
from acco_jax.data.tokenizers import Tokenizer

# The fields of counts.json that `Corpus` takes, beside the tokens.
_COUNTS = ("train_bytes", "train_documents", "validation_bytes",
           "validation_documents", "checksum")  # fmt: skip
FORMAT = 3  # of the files; part of their folder's name
_DOCUMENTS_AT_ONCE = 256


def write_tokens(
    folder: Path, source: Source, tokenizer: Tokenizer, chat: ChatTemplate | None = None
) -> None:
    """Write the tokens of both splits, whole or not at all.

    Args:
      folder: to write.
      source: of the documents.
      tokenizer: of texts.
      chat: of conversations, if the documents are these.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # a killed process left it
    partial.mkdir(parents=True)
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    counts: dict[str, Any] = {"dtype": dtype.name}
    digest = hashlib.sha256()
    for split, texts in ("train", source.train()), ("validation", source.validation()):
        path = partial / f"{split}.bin"
        with open(path, "wb") as file:
            digested = _digested(texts, digest)
            if chat is None:
                documents, size, spans = _pack(digested, tokenizer, dtype, file)
            else:
                with open(partial / f"{split}.targets.bin", "wb") as targets:
                    documents, size, spans = _pack_chats(
                        digested, chat, tokenizer.end_of_text, dtype, file, targets
                    )
        for file_of in partial.glob(f"{split}*.bin"):
            np.save(file_of.with_suffix(".sums.npy"), block_sums(file_of))
        if spans:
            np.save(partial / f"{split}.spans.npy", np.concatenate(spans))
        if not documents:
            raise ValueError(
                f"the {split} split of this data set has no documents: change "
                f"{split}_split or held_out"
            )
        counts |= {f"{split}_documents": documents, f"{split}_bytes": size}
        digest.update(b"end of split")
    counts |= {"documents": digest.hexdigest()[:16], "checksum": _checksum(partial)}
    counts["sizes"] = {path.name: path.stat().st_size for path in _files(partial)}
    write_counts(partial, counts)
    os.replace(partial, folder)


def write_counts(folder: Path, counts: dict[str, Any]) -> None:
    """Write counts.json, with a checksum of its own."""
    text = json.dumps({"counts": counts, "sum": _sum(counts)}, indent=2)
    (folder / "counts.json").write_text(text)


def read_counts(folder: Path) -> dict[str, Any]:
    """Return the counts of the written tokens, after checking that they are unchanged.

    It checks counts.json, the sizes of all files, and the checksums of blocks and
    spans. A block itself is checked whenever it is read.

    Raises:
      ValueError: a file is damaged.
    """
    path = folder / "counts.json"
    try:
        found = json.loads(small_files.text(path))
        whole, found = found["sum"] == _sum(found["counts"]), found["counts"]
        sizes, counts = dict(found["sizes"]), {name: found[name] for name in _COUNTS}
        said = {name: str(found[name]) for name in ("dtype", "documents")}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(path) from error
    whole &= all(type(count) is int and count >= 0 for count in counts.values())
    if not whole or said["dtype"] not in ("uint16", "uint32"):
        raise damaged(path)
    for name, size in sizes.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size:
            raise damaged(file)
    if _checksum(folder) != counts["checksum"]:
        raise damaged(folder)
    return counts | said


def open_arrays(folder: Path, dtype: str) -> dict[str, Any]:
    """Open tokens and spans, by their names in `Corpus`.

    Raises:
      ValueError: a file is damaged.
    """
    arrays: dict[str, Any] = {}
    for split in ("train", "validation"):
        path = folder / f"{split}.bin"
        try:
            sums = np.load(folder / f"{split}.sums.npy")
            tokens = arrays[f"{split}_tokens"] = Tokens(path, dtype, sums)
            path = folder / f"{split}.targets.bin"
            if path.exists():
                sums = np.load(path.with_suffix(".sums.npy"))
                targets = arrays[f"{split}_targets"] = Tokens(path, "uint8", sums)
                _check_targets(targets, len(tokens))
            path = folder / f"{split}.spans.npy"
            if path.exists():
                spans = arrays[f"{split}_spans"] = np.load(path, mmap_mode="r")
                _check_spans(spans, len(tokens))
        except Exception as error:  # numpy's, of any type
            raise damaged(path) from error
    return arrays


def _check_targets(targets: Tokens, tokens: int) -> None:
    """Raise a ValueError for targets that do not fit the number of tokens."""
    if len(targets) != tokens:
        raise ValueError("targets beyond the tokens")


def _check_spans(spans: np.ndarray, tokens: int) -> None:
    """Raise a ValueError for spans that do not fit the number of tokens."""
    if spans.dtype != np.int64 or spans.ndim != 2 or spans.shape[1] != 3:
        raise ValueError("no spans")
    ascending = np.diff(spans, axis=1, prepend=1, append=tokens - 1) >= 0
    if not len(spans) or not ascending.all():
        raise ValueError("spans beyond the tokens")


def _files(folder: Path) -> list[Path]:
    """List the files of tokens, checksums and spans, in the order of their names."""
    return sorted([*folder.glob("*.bin"), *folder.glob("*.npy")])


def _checksum(folder: Path) -> int:
    """Return the CRC-32 of a folder's block checksums and spans, so of all tokens."""
    checksum = 0
    for path in sorted(folder.glob("*.npy")):
        with open(path, "rb") as file:
            while part := file.read(2**24):
                checksum = zlib.crc32(part, checksum)
    return checksum


def _sum(counts: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(counts, sort_keys=True).encode())


def _digested(documents: Iterable[Document], digest: Any) -> Iterator[Document]:
    """Add each document to a digest on its way."""
    for document in documents:
        for text in tasks.texts(document):
            content = text.encode()
            digest.update(len(content).to_bytes(8, "big") + content)
        yield document


def _pack(
    documents: Iterable[Document], tokenizer: Tokenizer, dtype: np.dtype, file: BinaryIO
) -> tuple[int, int, list[np.ndarray]]:
    """Write tokens, each document between two ends of text.

    Returns:
      The number of documents, the number of bytes of text to predict (prompts do not
      count), and the spans of prompts and answers that `Examples` takes, in parts.
    """
    end = np.asarray([tokenizer.end_of_text], dtype)
    file.write(end.tobytes())
    count = size = 0
    place, spans = 1, list[np.ndarray]()
    documents = iter(documents)
    while group := list(itertools.islice(documents, _DOCUMENTS_AT_ONCE)):
        parts = [tasks.texts(document) for document in group]
        ids = iter(tokenizer.encode_batch([text for part in parts for text in part]))
        pieces = [
            piece for part in parts for piece in (*(next(ids) for _ in part), end)
        ]
        file.write(np.concatenate(pieces).astype(dtype).tobytes())
        count += len(group)
        size += sum(len(part[-1].encode()) for part in parts)
        places = place + np.cumsum([len(piece) for piece in pieces])
        if len(parts[0]) == 2:  # prompt, answer, end
            answers, _, after = places.reshape(-1, 3).T
            spans.append(
                np.stack([np.append(place, after[:-1]), answers, after - 1], 1)
            )
        place = int(places[-1])
    return count, size, spans


def _pack_chats(
    documents: Iterable[Document],
    chat: ChatTemplate,
    end_of_text: int,
    dtype: np.dtype,
    file: BinaryIO,
    targets_file: BinaryIO,
) -> tuple[int, int, list[np.ndarray]]:
    """Write tokens of conversations between ends of text, and which are targets.

    Returns:
      As `_pack`; the spans of `Corpus`, in parts.
    """
    file.write(np.asarray([end_of_text], dtype).tobytes())
    targets_file.write(b"\0")
    count = size = 0
    place, spans = 1, list[list[int]]()
    documents = iter(documents)
    while group := list(itertools.islice(documents, _DOCUMENTS_AT_ONCE)):
        chats = [document for document in group if isinstance(document, tasks.Chat)]
        for ids, targets, bytes_to_predict in chat.encode_batch(chats):
            file.write(np.append(ids, end_of_text).astype(dtype).tobytes())
            targets_file.write(targets.tobytes() + b"\0")
            first, last = np.flatnonzero(targets)[[0, -1]]
            spans.append([place + 1, place + int(first), place + int(last)])
            place += len(ids) + 1
            size += bytes_to_predict
            count += 1
    return count, size, [np.asarray(spans, np.int64)] if spans else []


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold a file's lock; the system drops it if the process dies."""
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
