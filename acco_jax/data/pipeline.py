"""The pipeline from documents to tokens to batches."""

import dataclasses
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np
from absl import logging

from acco_jax.command.paths import expanded
from acco_jax.data import beside, cache, corpora, records, tasks
from acco_jax.data.batches import Batches, Slots
from acco_jax.data.chat import ChatTemplate
from acco_jax.data.order import Shuffled, Skewed
from acco_jax.data.rows import (
    Batch,
    Documents,
    Examples,
    PackedRows,
    Rows,
    by_mean,
    fitting,
)
from acco_jax.data.stored import Tokens
from acco_jax.data.tokenizers import (
    BpeTokenizer,
    ByteTokenizer,
    FileTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    copied,
    read_tokenizer,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """The tokens of the training and of the held-out documents.

    A token array is end-of-text, then every document followed by end-of-text: each
    document's tokens and its end all have a predecessor, so all are targets. Of
    instructions only answers and their ends are targets; spans give their places. Of
    conversations only the assistant's turns are.
    """

    tokenizer: Tokenizer
    train_tokens: np.ndarray | Tokens  # uint16 or uint32 (n,)
    validation_tokens: np.ndarray | Tokens
    train_bytes: int  # in UTF-8, of the text that is to be predicted
    validation_bytes: int
    train_documents: int
    validation_documents: int
    checksum: int  # of all tokens and spans
    # Of instructions, int64 (documents, 3): the places of a prompt's first token, of
    # its answer's first, and of the end of text after that. Of conversations: of the
    # second token, and of the first and the last target.
    train_spans: np.ndarray | None = None
    validation_spans: np.ndarray | None = None
    # Of conversations, uint8 (n,): 1 where a token is a target.
    train_targets: np.ndarray | Tokens | None = None
    validation_targets: np.ndarray | Tokens | None = None
    documents: str = ""  # a digest of both splits' documents, in their order


def load_corpus(
    config: ml_collections.ConfigDict,
    *,
    workdir: str | os.PathLike,
    base: str | os.PathLike | None = None,
) -> Corpus:
    """Prepare a corpus, or find it prepared, and open its tokens.

    Args:
      config: the fields of `data`, documented in `run/config/schema.py`:
        of the data set name, path, text_feature, train_split, validation_split,
        held_out, task and data_dir; of the tokenizer tokenizer, vocab_size and
        end_of_text.
      workdir: where a copy of the tokenizer is read from, or written to. Until a run
        has written config.json there, a BPE of other documents is replaced.
      base: another workdir, whose BPE a new one takes instead of training its own.

    Raises:
      ValueError: if a setting is wrong, or names something that does not exist.
    """
    _check(config)
    data_dir = config.data_dir or os.environ.get("ACCO_DATA_DIR")
    data_dir = expanded(data_dir or "~/.cache/acco_jax").absolute()
    workdir = expanded(workdir)
    if config.name in corpora.BUILT_IN and config.path:
        records.outside(Path(config.path), data_dir, workdir)
    data_dir.mkdir(parents=True, exist_ok=True)
    with cache.lock(data_dir / "lock"):
        source = corpora.open_source(config, data_dir)
        base = None if base is None else expanded(base)
        tokenizer = _tokenizer(config, source, data_dir, workdir, base)
        chat = ChatTemplate(tokenizer) if config.task == "chat" else None
        parts = [source.fingerprint, tokenizer.fingerprint, str(cache.FORMAT)]
        if chat is not None:
            parts.insert(2, chat.fingerprint)
        folder = data_dir / "tokens" / "-".join(parts)
        if not folder.is_dir():
            cache.write_tokens(folder, source, tokenizer, chat)
    counts = cache.read_counts(folder)
    arrays: dict[str, Any] = cache.open_arrays(folder, counts.pop("dtype"))
    return Corpus(tokenizer, **arrays, **counts)


def train_iterator(
    corpus: Corpus,
    *,
    length: int,
    batch_size: int,
    seed: int,
    workers: int = 1,
    own: Sequence[int] | None = None,
    prefetch: bool = True,
    steps: int = 1,
    microbatches: int = 1,
    counts: Sequence[int] | None = None,
    skew: float = 0.0,
    lengths: Sequence[int] = (),
    document_mask: bool = False,
) -> Batches:
    """Iterate endlessly over some workers' part of the shuffled training batches.

    Packed row i is tokens [i T, i T + T] of the training split: inputs and targets
    overlap. Of instructions every example is a row, padded with its whole global batch.
    Rows are in one endless sequence, epoch after epoch a permutation of them, which
    depends only on the seed. A batch takes the next rows of it, as many as are
    computed, whatever the number of workers and processes is. The iterator has
    `get_state()` (JSON-able) and `set_state(state)`.

    With a skew every worker has a sequence of its own. Documents are in as many groups
    as there are workers: in the order of their mean token, cut where they hold equal
    numbers of tokens, so that groups differ in what tokens are frequent. In each epoch
    the share `skew` of a group's rows is its worker's; the other rows are pooled and
    dealt to all. Finding the groups reads the whole split once.

    Args:
      corpus: from `load_corpus`.
      length: T, targets per row.
      batch_size: rows of the global batch.
      seed: of the order.
      workers: how many share the global batch, in equal contiguous parts.
      own: the workers whose parts are read, such as those of this process, ascending;
        None: all.
      prefetch: whether the next batch is read, in a thread, while one is used.
      steps: of each worker in a batch.
      microbatches: of each step.
      counts: how many of its microbatches each worker computes; the other places of the
        batch take no rows. None: all. (): the counts are not known yet, and must be set
        with `computed(counts)` after each batch; rows that were not computed come
        again.
      skew: 0 to 1, fraction of a worker's rows from its own group.
      lengths: the padded lengths of examples: each global batch has the smallest that
        fits its longest row; (): only `length`.
      document_mask: whether batches number documents: see `acco_jax.data.rows`.

    Returns:
      An iterator over batches of batch_size // workers rows of each own worker: see
      `acco_jax.data.rows`.

    Raises:
      ValueError: if the corpus has less than one batch, or it cannot be divided.
    """
    places = _own_places(batch_size, length, workers, own)
    if not 0 <= skew <= 1:
        raise ValueError(f"data.skew {skew} is out of range: set it to 0 .. 1")
    parts = workers * steps * microbatches
    if batch_size % parts:
        raise ValueError(
            f"batch_size {batch_size} is not divisible by {workers} workers with "
            f"{steps * microbatches} microbatches: set it to a multiple of {parts}"
        )
    rows = _rows(
        corpus, "train", length, lengths, document_mask, workers if skew else 0
    )
    check_rows(corpus, len(rows), length, batch_size, lengths)
    order = Skewed(rows.groups, seed, skew) if skew else Shuffled(len(rows), seed)
    counts = None if counts is None else tuple(counts)
    slots = Slots(workers, steps, microbatches, batch_size // parts, counts)
    return Batches(rows, order, slots, places, prefetch)


def validation_batches(
    corpus: Corpus,
    *,
    length: int,
    batch_size: int,
    workers: int = 1,
    own: Sequence[int] | None = None,
    limit: int | None = None,
    block: int | None = None,
    lengths: Sequence[int] = (),
    document_mask: bool = False,
) -> Iterator[Batch]:
    """Iterate once, in order, over some workers' part of the held-out batches.

    Every held-out target appears once with mask 1; the last batch is filled up with
    end-of-text at mask 0. All processes get the same number of batches. With a limit,
    blocks of rows are spread evenly over the split, since its parts differ.

    Args:
      corpus, length, batch_size, workers, own, lengths, document_mask: as for
        `train_iterator`.
      limit: number of blocks; None: all.
      block: rows of a block; None: `batch_size`.

    Returns:
      An iterator over batches of batch_size // workers rows of each own worker, with
      "mask".
    """
    places = _own_places(batch_size, length, workers, own)
    rows = _rows(corpus, "validation", length, lengths, document_mask)
    if not len(rows):
        longest, names = _longest(length, lengths)
        raise ValueError(
            f"no held-out example has room for its answer in {longest} tokens: raise "
            f"{names}, or hold out more"
        )
    block = batch_size if block is None else block
    blocks = math.ceil(len(rows) / block)
    count = blocks if limit is None else min(blocks, limit)
    chosen = np.arange(count) * blocks // count
    numbers = (chosen[:, None] * block + np.arange(block)).ravel()
    numbers = np.where(numbers < len(rows), numbers, -1)
    missing = -len(numbers) % batch_size
    numbers = np.pad(numbers, (0, missing), constant_values=-1)

    def batch(numbers: np.ndarray) -> Batch:
        return rows.read(numbers[places], rows.width(numbers))

    return map(batch, numbers.reshape(-1, batch_size))


def bits_per_byte(
    total_nats: float, corpus: Corpus, *, targets: float | None = None
) -> float:
    """Convert the summed loss of held-out targets, nats, to bits per byte of text.

    `targets` is their number; None: all. A part (`limit` of `validation_batches`) is
    assumed to have the whole split's bytes per target.
    """
    total = held_out_targets(corpus)
    share = 1.0 if targets is None else targets / total
    return total_nats / math.log(2) / (share * corpus.validation_bytes)


def held_out_targets(corpus: Corpus) -> int:
    """Return the number of held-out targets before examples are cut or left out."""
    total = len(corpus.validation_tokens) - 1
    if (spans := corpus.validation_spans) is not None:
        total = int((spans[:, 2] - spans[:, 1] + 1).sum())
    if corpus.validation_targets is not None:
        total = int(np.asarray(corpus.validation_targets).sum())
    return total


def rows_per_epoch(corpus: Corpus, length: int, lengths: Sequence[int] = ()) -> int:
    """Return the rows of the training split; arguments are as for `train_iterator`."""
    return len(_rows(corpus, "train", length, lengths, document_mask=False))


def check_rows(
    corpus: Corpus, rows: int, length: int, batch_size: int, lengths: Sequence[int] = ()
) -> None:
    """Raise a ValueError for a training split that has less than one batch.

    Args:
      corpus: from `load_corpus`.
      rows: of its training split: see `rows_per_epoch`.
      length, batch_size, lengths: as for `train_iterator`.

    Raises:
      ValueError: there are too few rows; the message says what to change.
    """
    if rows >= batch_size:
        return
    longest, names = _longest(length, lengths)
    remedy = "lower microbatch_size, microbatches_per_step or the number of workers"
    if (spans := corpus.train_spans) is None:
        raise ValueError(
            f"the training split has {rows} rows of {length} tokens, less than a batch "
            f"of {batch_size}: {remedy}, lower length, or use more text"
        )
    if out := len(spans) - rows:
        remedy = f"raise {names} for the {out} longer ones, {remedy}"
    raise ValueError(
        f"the training split has {rows} examples with room for their answers in "
        f"{longest} tokens, less than a batch of {batch_size}: {remedy}, or use more"
    )


def _longest(length: int, lengths: Sequence[int]) -> tuple[int, str]:
    """Return the longest row of instructions, and the fields that determine it."""
    return (lengths[-1], "data.lengths (and length)") if lengths else (length, "length")


def _rows(
    corpus: Corpus,
    split: str,
    length: int,
    lengths: Sequence[int],
    document_mask: bool,
    groups: int = 0,
) -> Rows:
    """Cut a split into rows, in groups of documents where their number is given."""
    tokens = getattr(corpus, f"{split}_tokens")
    spans, end = getattr(corpus, f"{split}_spans"), corpus.tokenizer.end_of_text
    if spans is not None:
        lengths = tuple(lengths) or (length,)
        spans, _ = fitting(spans, lengths[-1])
        targets = getattr(corpus, f"{split}_targets")
        if not groups:
            return Examples(tokens, spans, lengths, end, targets=targets)
        order = by_mean(np.asarray(tokens), spans[:, ::2], groups)
        sizes = [len(group) for group in order]
        if not all(sizes):
            raise ValueError(
                f"worker {sizes.index(0)} has none of the {len(spans)} examples: set "
                "data.skew to 0, or use more of them"
            )
        spans = spans[np.concatenate(order)]
        return Examples(tokens, spans, lengths, end, sizes, targets)
    parts: list[np.ndarray | Tokens | Documents] = [tokens]
    if groups:
        whole = np.asarray(tokens)
        ends = np.flatnonzero(whole == end)
        places = np.stack([ends[:-1] + 1, ends[1:]], 1)
        parts = [Documents(tokens, places[g]) for g in by_mean(whole, places, groups)]
    mask = split == "validation"
    rows = PackedRows(parts, length, end, segments=document_mask, mask=mask)
    _check_groups(rows.groups if groups else (), length)
    return rows


def cuts(corpus: Corpus, longest: int) -> list[str]:
    """Return a line per split on examples cut to `longest` targets, or left out."""
    lines = []
    for split in ("train", "validation"):
        if (spans := getattr(corpus, f"{split}_spans")) is None:
            continue
        kept, cut = fitting(spans, longest)
        out = len(spans) - len(kept)
        if cut or out:
            lines.append(
                f"{cut} of {len(spans)} examples of the {split} split are cut to "
                f"{longest} tokens; {out} more are left out: only their prompt is as "
                "long"
            )
    return lines


def _check_groups(sizes: Sequence[int], length: int) -> None:
    """Raise a ValueError for a group of documents that is too small."""
    for worker, size in enumerate(sizes):
        if not size:
            raise ValueError(
                f"the documents of worker {worker} have less than a row of {length} "
                "tokens: lower length, set data.skew to 0, or use more text"
            )


def _own_places(
    batch_size: int, length: int, workers: int, own: Sequence[int] | None
) -> np.ndarray:
    """Return the places of a batch that the own workers have; None: all workers."""
    if length < 1 or batch_size < 1:
        raise ValueError(
            f"length {length} and batch_size {batch_size} must be 1 or more"
        )
    if batch_size % workers:
        raise ValueError(
            f"batch_size {batch_size} is not divisible by {workers} workers: "
            f"set it to a multiple of {workers}"
        )
    own = range(workers) if own is None else own
    if not set(own) <= set(range(workers)):
        raise ValueError(f"own {list(own)} must be workers, 0 .. {workers - 1}")
    return np.arange(batch_size).reshape(workers, -1)[list(own)].ravel()


def _check(config: ml_collections.ConfigDict) -> None:
    """Raise a ValueError for settings that no data set could make right."""
    if config.task not in tasks.TASKS:
        raise ValueError(f"data.task {config.task!r} must be one of {tasks.TASKS}")
    own = config.tokenizer not in ("bytes", "bpe")
    if own and not config.tokenizer.endswith((".json", ".model")):
        raise ValueError(
            f"data.tokenizer {config.tokenizer!r} must be 'bytes', 'bpe', or the path "
            "of a tokenizer.json or of a SentencePiece .model"
        )
    if config.tokenizer == "bpe" and config.vocab_size is None:
        raise ValueError(
            "data.tokenizer='bpe' needs data.vocab_size: set it, e.g. to 10000"
        )
    if config.tokenizer == "bytes" and config.vocab_size not in (None, 257):
        raise ValueError(
            f"data.vocab_size {config.vocab_size} is not the 257 of data.tokenizer="
            "'bytes': set it to None, or data.tokenizer to 'bpe'"
        )
    if own and config.vocab_size is not None:
        raise ValueError(
            f"data.vocab_size {config.vocab_size} is only for 'bpe', "
            f"{config.tokenizer} has its own: set it to None"
        )
    if config.task == "chat" and not config.tokenizer.endswith(".json"):
        raise ValueError(
            "data.task='chat' needs a tokenizer.json with a chat template: set "
            "data.tokenizer to its path, or to 'init_from'"
        )
    if not own and config.end_of_text is not None:
        raise ValueError(
            f"data.end_of_text {config.end_of_text!r} is of a tokenizer's file: set it "
            f"to None, {config.tokenizer!r} has its own"
        )
    if not 0 < config.held_out < 1:
        raise ValueError(f"data.held_out {config.held_out} must be between 0 and 1")


def kept_tokenizer(
    config: ml_collections.ConfigDict, workdir: str | os.PathLike
) -> Tokenizer:
    """Return the tokenizer of a run from only its workdir.

    Args:
      config: as for `load_corpus`.
      workdir: that a corpus was loaded with.

    Raises:
      ValueError: the copy is missing or damaged.
    """
    if config.tokenizer == "bytes":
        return ByteTokenizer()
    workdir = Path(workdir)
    if config.tokenizer == "bpe":
        return BpeTokenizer.load(workdir / "tokenizer.json")
    if (kept := copied(workdir)) is None:
        raise ValueError(f"{workdir} has lost its copy of the tokenizer: restore it")
    return kept


def _tokenizer(
    config: ml_collections.ConfigDict,
    source: corpora.Source,
    data_dir: Path,
    workdir: Path,
    base: Path | None,
) -> Tokenizer:
    """Find a run's own, its base's, the trained or the given tokenizer, and copy it.

    Until the run has written config.json, a copy in the workdir is of a start that was
    refused or interrupted, and is replaced.

    Raises:
      ValueError: the workdir has another tokenizer.
    """
    old = workdir / "tokenizer.json"
    if not (workdir / "config.json").exists():
        return _begun(config, source, data_dir, workdir, base)
    trained = old.exists()  # before `copied` looks: another host may write meanwhile
    kept = copied(workdir)
    if config.tokenizer in ("bytes", "bpe") and kept is not None:
        raise ValueError(
            f"data.tokenizer {config.tokenizer!r} is not the one that {workdir} keeps "
            "a copy of: use another workdir"
        )
    if config.tokenizer == "bpe":
        return _trained(config, source, data_dir, old, base)
    if trained and kept is None:
        raise ValueError(
            f"data.tokenizer {config.tokenizer!r} is not the 'bpe' of {old}: set it to "
            "'bpe', or use another workdir"
        )
    if config.tokenizer == "bytes":
        return ByteTokenizer()
    if kept is not None and not expanded(config.tokenizer).exists():
        return kept
    given = read_tokenizer(config.tokenizer, config.end_of_text)
    if kept is None:
        given.save(workdir)
    elif kept.fingerprint != given.fingerprint:
        raise ValueError(
            f"data.tokenizer {config.tokenizer} is not the one that {workdir} keeps "
            "a copy of: give that one, or use another workdir"
        )
    return given


def _begun(
    config: ml_collections.ConfigDict,
    source: corpora.Source,
    data_dir: Path,
    workdir: Path,
    base: Path | None,
) -> Tokenizer:
    """Return the tokenizer of a run that begins, with a copy of it alone."""
    path, names = workdir / FileTokenizer.file, set[str]()
    all_names = (path.name, SentencePieceTokenizer.file, beside.CONFIG)
    found = {workdir / x for x in all_names if (workdir / x).is_file()}
    before = {file: file.read_bytes() for file in found}
    if config.tokenizer == "bytes":
        tokenizer: Tokenizer = ByteTokenizer()
    elif config.tokenizer == "bpe":
        tokenizer, names = _trained(config, source, data_dir, path, base), {path.name}
    else:
        given = read_tokenizer(config.tokenizer, config.end_of_text)
        given.save(workdir)
        names = {beside.CONFIG, given.file}
        tokenizer = given
    for name in {*all_names} - names:
        (workdir / name).unlink(missing_ok=True)
    for file, content in before.items():
        if not file.exists() or file.read_bytes() != content:
            kept = file.with_name(f"{file.name}.before")
            kept.write_bytes(content)
            logging.warning("%s is of no run: it is %s now", file, kept.name)
    return tokenizer


def _trained(
    config: ml_collections.ConfigDict,
    source: corpora.Source,
    data_dir: Path,
    path: Path,
    base: Path | None,
) -> Tokenizer:
    """Find a run's BPE at `path`, the base's or the one trained before, or train it.

    A start that was interrupted may have left another one at `path`.
    """
    begun = path.with_name("config.json").exists()
    if begun and path.exists():
        return _loaded(path, config.vocab_size)
    found = data_dir / "tokenizers" / f"{source.fingerprint}-{config.vocab_size}.json"
    if base and (base / path.name).exists() and copied(base) is None:
        found = base / path.name
    if not found.exists():
        texts = itertools.chain.from_iterable(map(tasks.texts, source.train()))
        trained = BpeTokenizer.train(texts, config.vocab_size)
        trained.save(found)
    tokenizer = _loaded(found, config.vocab_size)
    if not path.exists() or path.read_bytes() != found.read_bytes():
        tokenizer.save(path)
    return tokenizer


def _loaded(path: Path, vocab_size: int) -> BpeTokenizer:
    """Read a BPE.

    Raises:
      ValueError: it has another vocabulary size, or is damaged.
    """
    tokenizer = BpeTokenizer.load(path)
    if tokenizer.vocab_size != vocab_size:
        raise ValueError(
            f"data.vocab_size {vocab_size} is not the {tokenizer.vocab_size} of "
            f"{path}: set it to {tokenizer.vocab_size}, or use another workdir"
        )
    return tokenizer
