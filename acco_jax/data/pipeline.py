"""Documents to tokens to batches: written once, memory-mapped, shuffled by grain."""

import contextlib
import dataclasses
import fcntl
import itertools
import json
import math
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import grain
import ml_collections
import numpy as np

from acco_jax.data import corpora
from acco_jax.data.tokenizers import BpeTokenizer, ByteTokenizer, Tokenizer

_DOCUMENTS_AT_ONCE = 256
_ENDLESS = 2**40  # batches


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Hold the tokens of the training and of the held-out documents.

    A token array is end-of-text, then every document followed by end-of-text: each
    document's tokens and its end all have a predecessor, so all are targets.
    """

    tokenizer: Tokenizer
    train_tokens: np.ndarray  # uint16 or uint32 (n,), memory-mapped
    validation_tokens: np.ndarray
    train_bytes: int  # of the documents' text in UTF-8
    validation_bytes: int
    train_documents: int
    validation_documents: int
    checksum: int  # CRC-32 of all tokens, training's first


def load_corpus(
    config: ml_collections.ConfigDict, *, workdir: str | os.PathLike
) -> Corpus:
    """Prepare a corpus, or find it prepared, and memory-map its tokens.

    Args:
      config: name ("stdlib", "text_folder" or a tfds name), folder (of "text_folder"),
        text_feature, train_split and validation_split (as tfds takes them),
        held_out (fraction of the documents, where the data set does not have a
        validation split), data_dir (None: $ACCO_DATA_DIR or ~/.cache/acco_jax),
        tokenizer ("bytes" or "bpe"), vocab_size (of the BPE, end of text included;
        None for bytes).
      workdir: where a BPE's tokenizer.json is read from, or written to.

    Raises:
      ValueError: if a setting is wrong or what it names is not there.
    """
    _check(config)
    data_dir = config.data_dir or os.environ.get("ACCO_DATA_DIR")
    data_dir = Path(data_dir or "~/.cache/acco_jax").expanduser().absolute()
    if config.name == "text_folder" and config.folder:
        _check_apart(Path(config.folder), data_dir, Path(workdir))
    data_dir.mkdir(parents=True, exist_ok=True)
    with _lock(data_dir / "lock"):
        source = corpora.open_source(config, data_dir)
        tokenizer = _tokenizer(config, source, data_dir, Path(workdir).expanduser())
        folder = data_dir / "tokens" / f"{source.fingerprint}-{tokenizer.fingerprint}"
        if not folder.is_dir():
            _write_tokens(folder, source, tokenizer)
    counts = json.loads((folder / "counts.json").read_text())
    if "checksum" not in counts:  # of an earlier version
        counts["checksum"] = _checksum(folder)
    dtype = np.dtype(counts.pop("dtype"))
    train, validation = (
        np.memmap(folder / f"{split}.bin", dtype, mode="r")
        for split in ("train", "validation")
    )
    return Corpus(tokenizer, train, validation, **counts)


def _check_apart(folder: Path, *ours: Path) -> None:
    """Refuse a folder of text in which our own files would become text."""
    folder = folder.expanduser().resolve()
    for path in ours:
        if path.expanduser().resolve().is_relative_to(folder):
            raise ValueError(
                f"folder {folder} holds {path}, which training writes to: its files "
                "would become text; use a workdir and a data_dir outside"
            )


def train_iterator(
    corpus: Corpus,
    *,
    length: int,
    batch_size: int,
    seed: int,
    process_index: int,
    process_count: int,
    prefetch: int = 2,
    workers: int = 1,
    skew: float = 0.0,
) -> grain.DatasetIterator:
    """Iterate for ever over this process's part of the shuffled training batches.

    Row i is tokens [i T, i T + T] of the training split: inputs and targets overlap.
    Rows are shuffled globally, anew each epoch; global batch k holds the same rows in
    the same order for any `process_count`, process p having the p-th part of them.
    The iterator has `get_state()` (JSON-able) and `set_state(state)`.

    With a skew, that share of worker i's part of each global batch comes from the i-th
    of as many groups of documents: in the order of their mean token, cut where they
    hold equal numbers of tokens, so that groups differ in what tokens are frequent. The
    other rows come from all documents. Finding the groups reads the whole split once.

    Args:
      corpus: from `load_corpus`.
      length: T, targets per row.
      batch_size: rows of the global batch.
      seed: of the shuffle.
      process_index, process_count: this process, of how many share the global batch.
      prefetch: batches made ahead of time, each in its own thread; 0: none.
      workers: that share the global batch, in equal contiguous parts.
      skew: 0 to 1, which part of a worker's rows is of its own group.

    Returns:
      An iterator over {"tokens": int32 (batch_size // process_count, length + 1)}.

    Raises:
      ValueError: if the corpus has less than one batch, or it cannot be divided.
    """
    share = _rows_per_process(batch_size, length, process_index, process_count)
    rows = _Rows(corpus.train_tokens, length)
    if len(rows) < batch_size:
        raise ValueError(
            f"the training split has {len(rows)} rows of {length} tokens, less than a "
            f"batch of {batch_size}: lower batch_size or length, or use more text"
        )
    if skew:
        if workers % process_count:
            raise ValueError(
                f"{workers} workers are not divisible by {process_count} processes: "
                f"set workers to a multiple of {process_count}"
            )
        parts = _skewed(corpus, rows, batch_size, seed, workers, skew)
        first = process_index * workers // process_count
        parts = parts[first : first + workers // process_count]
        dataset = grain.MapDataset.range(_ENDLESS).map(
            lambda k: {"tokens": np.concatenate([part[k]["tokens"] for part in parts])}
        )
    else:
        dataset = grain.MapDataset.source(rows).shuffle(seed=seed).repeat()
        # Endless, so nothing is dropped; else grain overflows at 1 row.
        dataset = dataset.batch(share, drop_remainder=True)
        dataset = dataset[process_index::process_count]
    options = grain.ReadOptions(num_threads=prefetch, prefetch_buffer_size=prefetch)
    return iter(dataset.to_iter_dataset(options))


def validation_batches(
    corpus: Corpus,
    *,
    length: int,
    batch_size: int,
    process_index: int,
    process_count: int,
    limit: int | None = None,
) -> Iterator[dict[str, np.ndarray]]:
    """Iterate once, in order, over this process's part of the held-out batches.

    Every held-out target appears once with mask 1; the last batch is filled up with
    end-of-text at mask 0. All processes get the same number of batches. With a limit,
    the batches are spread evenly over the split, whose parts differ.

    Args:
      corpus, length, batch_size, process_index, process_count: as `train_iterator`'s.
      limit: number of batches; None: all.

    Returns:
      An iterator over {"tokens": int32 (rows, length + 1), "mask": float32 (rows,
      length)}, rows = batch_size // process_count.
    """
    rows = _rows_per_process(batch_size, length, process_index, process_count)
    tokens, end_of_text = corpus.validation_tokens, corpus.tokenizer.end_of_text
    batches = math.ceil((len(tokens) - 1) / (batch_size * length))
    count = batches if limit is None else min(batches, limit)
    targets = rows * length
    columns = np.arange(rows)[:, None] * length + np.arange(length + 1)

    def batch(k: int) -> dict[str, np.ndarray]:
        start = (k * process_count + process_index) * targets
        chunk = np.asarray(tokens[start : start + targets + 1], np.int32)
        padding = (0, targets + 1 - len(chunk))
        padded = np.pad(chunk, padding, constant_values=end_of_text)
        mask = np.arange(targets) < len(chunk) - 1
        return {
            "tokens": padded[columns],
            "mask": mask.reshape(rows, length).astype(np.float32),
        }

    return map(batch, (i * batches // count for i in range(count)))


def bits_per_byte(
    total_nats: float, corpus: Corpus, *, targets: float | None = None
) -> float:
    """Convert the summed loss of held-out targets, nats, to bits per byte of text.

    `targets` is their number; None: all. Fewer (`limit` of `validation_batches`) are
    taken to have the whole split's bytes per target.
    """
    total = len(corpus.validation_tokens) - 1
    share = 1.0 if targets is None else targets / total
    return total_nats / math.log(2) / (share * corpus.validation_bytes)


def rows_per_epoch(corpus: Corpus, length: int) -> int:
    """Return the rows of `length` targets in the training documents."""
    return len(_Rows(corpus.train_tokens, length))


class _Rows:
    """Give random access to the rows of a token array."""

    def __init__(self, tokens: "np.ndarray | _Documents", length: int):
        self._tokens = tokens
        self.length = length

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self.length

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        start = int(row) * self.length
        row_tokens = self._tokens[start : start + self.length + 1]
        return {"tokens": np.asarray(row_tokens, np.int32)}


def _skewed(
    corpus: Corpus, rows: _Rows, batch_size: int, seed: int, workers: int, skew: float
) -> list[grain.MapDataset]:
    """Each worker's endless part of the global batches."""
    if not 0 < skew <= 1:
        raise ValueError(f"skew {skew} is out of range: set it to 0 .. 1")
    if batch_size % workers:
        raise ValueError(
            f"batch_size {batch_size} is not divisible by {workers} workers: set it to "
            f"a multiple of {workers}"
        )
    parts = []
    for i, own in enumerate(_groups(corpus, rows.length, workers)):
        if not len(own):
            raise ValueError(
                f"the documents of worker {i} have less than a row of {rows.length} "
                "tokens: lower length, set skew to 0, or use more text"
            )
        seeds = map(int, np.random.SeedSequence([seed, i]).generate_state(2))
        shuffled = [
            grain.MapDataset.source(source).shuffle(seed=s).repeat()
            for source, s in zip((own, rows), seeds, strict=True)
        ]
        dataset = shuffled[0]
        if skew < 1:
            dataset = grain.MapDataset.mix(shuffled, weights=[skew, 1 - skew])
        parts.append(dataset.batch(batch_size // workers, drop_remainder=True))
    return parts


def _groups(corpus: Corpus, length: int, count: int) -> list[_Rows]:
    """The documents in the order of their mean token, in parts of about equal size."""
    tokens, end = corpus.train_tokens, corpus.tokenizer.end_of_text
    ends = np.flatnonzero(tokens == end)
    starts, sizes = ends[:-1] + 1, np.diff(ends)  # each with the end of text after it
    sums = np.add.reduceat(tokens, starts, dtype=np.int64)
    means = (sums - end) / np.maximum(sizes - 1, 1)
    order = np.argsort(means, kind="stable")
    middle = np.cumsum(sizes[order]) - sizes[order] / 2
    group = (middle * count // sizes.sum()).astype(int)
    return [
        _Rows(_Documents(tokens, starts[chosen], sizes[chosen]), length)
        for chosen in (order[group == i] for i in range(count))
    ]


class _Documents:
    """Some documents of a token array, as an array of their own: see `Corpus`."""

    def __init__(self, tokens: np.ndarray, starts: np.ndarray, sizes: np.ndarray):
        # the end of text before the first document is one of a single token
        self._tokens = tokens
        self._starts = np.concatenate([[0], starts])
        self._ends = np.cumsum(np.concatenate([[1], sizes]))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, span: slice) -> np.ndarray:
        first, last = np.searchsorted(self._ends, [span.start, span.stop - 1], "right")
        pieces = []
        for i in range(first, last + 1):
            before = self._ends[i - 1] if i else 0
            a, b = max(span.start, before), min(span.stop, self._ends[i])
            at = self._starts[i] - before
            pieces.append(self._tokens[at + a : at + b])
        return np.concatenate(pieces)


def _rows_per_process(
    batch_size: int, length: int, process_index: int, process_count: int
) -> int:
    if length < 1 or batch_size < 1:
        raise ValueError(
            f"length {length} and batch_size {batch_size} must be 1 or more"
        )
    if batch_size % process_count:
        raise ValueError(
            f"batch_size {batch_size} is not divisible by {process_count} processes: "
            f"set it to a multiple of {process_count}"
        )
    if not 0 <= process_index < process_count:
        raise ValueError(
            f"process_index {process_index} must be in 0 .. {process_count - 1}"
        )
    return batch_size // process_count


def _check(config: ml_collections.ConfigDict) -> None:
    """Refuse settings that no data set could make right."""
    if config.tokenizer not in ("bytes", "bpe"):
        raise ValueError(f"tokenizer {config.tokenizer!r} must be 'bytes' or 'bpe'")
    if config.tokenizer == "bpe" and config.vocab_size is None:
        raise ValueError("tokenizer='bpe' needs vocab_size: set it, e.g. to 10000")
    if config.tokenizer == "bytes" and config.vocab_size not in (None, 257):
        raise ValueError(
            f"vocab_size {config.vocab_size} is not the 257 of tokenizer='bytes': set "
            "it to None, or tokenizer to 'bpe'"
        )
    if not 0 < config.held_out < 1:
        raise ValueError(f"held_out {config.held_out} must be between 0 and 1")


def _tokenizer(
    config: ml_collections.ConfigDict,
    source: corpora.Source,
    data_dir: Path,
    workdir: Path,
) -> Tokenizer:
    """Find the workdir's tokenizer, or the one trained before, or train it."""
    if config.tokenizer == "bytes":
        return ByteTokenizer()
    path = workdir / "tokenizer.json"
    trained = data_dir / "tokenizers" / f"{source.fingerprint}-{config.vocab_size}.json"
    if path.exists():
        tokenizer = BpeTokenizer.load(path)
        if tokenizer.vocab_size != config.vocab_size:
            raise ValueError(
                f"vocab_size {config.vocab_size} is not the {tokenizer.vocab_size} of "
                f"{path}: set it to {tokenizer.vocab_size}, or use another workdir"
            )
        return tokenizer
    if trained.exists():
        tokenizer = BpeTokenizer.load(trained)
    else:
        tokenizer = BpeTokenizer.train(source.train(), config.vocab_size)
        tokenizer.save(trained)
    tokenizer.save(path)
    return tokenizer


def _write_tokens(folder: Path, source: corpora.Source, tokenizer: Tokenizer) -> None:
    """Write the tokens of both splits, whole or not at all."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # a killed process left it
    partial.mkdir(parents=True)
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    counts: dict[str, int | str] = {"dtype": dtype.name}
    for split, texts in ("train", source.train()), ("validation", source.validation()):
        with open(partial / f"{split}.bin", "wb") as file:
            documents, size = _pack(texts, tokenizer, dtype, file)
        if not documents:
            raise ValueError(
                f"the {split} split of this data set has no documents: change "
                f"{split}_split or held_out"
            )
        counts |= {f"{split}_documents": documents, f"{split}_bytes": size}
    counts["checksum"] = _checksum(partial)
    (partial / "counts.json").write_text(json.dumps(counts, indent=2))
    os.replace(partial, folder)


def _checksum(folder: Path) -> int:
    """CRC-32 of the tokens in a folder."""
    checksum = 0
    for split in ("train", "validation"):
        with open(folder / f"{split}.bin", "rb") as file:
            while part := file.read(2**24):
                checksum = zlib.crc32(part, checksum)
    return checksum


def _pack(
    texts: Iterable[str], tokenizer: Tokenizer, dtype: np.dtype, file: BinaryIO
) -> tuple[int, int]:
    """Write tokens, each document between two ends of text; count texts and bytes."""
    end_of_text = np.asarray([tokenizer.end_of_text], dtype)
    file.write(end_of_text.tobytes())
    documents = size = 0
    texts = iter(texts)
    while group := list(itertools.islice(texts, _DOCUMENTS_AT_ONCE)):
        ids = tokenizer.encode_batch(group)
        ends = [end_of_text] * len(ids)
        pieces = itertools.chain.from_iterable(zip(ids, ends, strict=True))
        file.write(np.concatenate(list(pieces)).astype(dtype).tobytes())
        documents += len(group)
        size += sum(len(text.encode()) for text in group)
    return documents, size


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a file's lock; the system drops it if the process dies."""
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
