"""Rows of tokens: the parts of a batch, read by number, many at once.

A batch holds "tokens", int32 (rows, T + 1): inputs and targets, which overlap. It may
hold "mask", float32 (rows, T), 1 where there is a target, and "segments", int32
(rows, T), which number the documents of a row's inputs: attention stays within them.
Row number -1 is filled up with end-of-text, at mask 0.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import numpy as np

from acco_jax.data.stored import Tokens

Batch = dict[str, np.ndarray]


class Rows(abc.ABC):
    """A sequence of rows with random access.

    Attributes:
      groups: the number of rows of each group of documents, one group after another.
      widths: every T that batches may have.
    """

    groups: Sequence[int]
    widths: Sequence[int]

    def __len__(self) -> int:
        return sum(self.groups)

    @abc.abstractmethod
    def width(self, rows: np.ndarray) -> int:
        """Return T of a batch of these rows, -1 among them or not."""

    @abc.abstractmethod
    def targets(self, rows: np.ndarray) -> int:
        """Return the number of targets of these rows."""

    @abc.abstractmethod
    def read(self, rows: np.ndarray, width: int) -> Batch:
        """Return the batch of these rows at a `width` that fits them."""


class PackedRows(Rows):
    """Rows in which row i of a group is tokens [i T, i T + T] of its documents."""

    def __init__(
        self,
        groups: Sequence[np.ndarray | Tokens | Documents],
        length: int,
        end_of_text: int,
        *,
        segments: bool = False,
        mask: bool = False,
    ):
        """Cut the documents of each group into rows of `length` targets.

        Args:
          groups: arrays of tokens: see `Corpus`.
          length: T.
          end_of_text: the token at which a document begins.
          segments: whether batches carry "segments".
          mask: whether batches carry "mask", and a group's last row may be shorter.
        """
        self._tokens, self._length, self._end = groups, length, end_of_text
        self._segments, self._mask, self.widths = segments, mask, (length,)
        short = length - 1 if mask else 0
        self.groups = [max(len(t) - 1 + short, 0) // length for t in groups]
        self._first = np.cumsum([0, *self.groups])

    def width(self, rows: np.ndarray) -> int:
        return self._length

    def targets(self, rows: np.ndarray) -> int:
        return int(np.sum(rows >= 0)) * self._length

    def read(self, rows: np.ndarray, width: int) -> Batch:
        tokens = np.full((len(rows), width + 1), self._end, np.int32)
        targets = np.zeros(len(rows), np.int64)
        group = np.searchsorted(self._first, rows, "right") - 1
        starts = (rows - self._first[np.maximum(group, 0)]) * width
        for i in np.flatnonzero(rows >= 0):
            part = self._tokens[group[i]][starts[i] : starts[i] + width + 1]
            tokens[i, : len(part)] = part
            targets[i] = len(part) - 1
        batch = {"tokens": tokens}
        if self._mask:
            batch["mask"] = (np.arange(width) < targets[:, None]).astype(np.float32)
        if self._segments:
            starts_here = tokens[:, :-1] == self._end
            batch["segments"] = np.cumsum(starts_here, axis=1, dtype=np.int32)
        return batch


class Examples(Rows):
    """Rows that are examples, padded: a prompt, and an answer to be learnt.

    Row i is end of text, the prompt, the answer, end of text; targets are the answer
    and the end of text after it. A row of a conversation begins with its first token
    and ends with its last target; its targets are given. A row longer than the largest
    length loses its end. `fitting` leaves out examples that would keep no target.
    """

    def __init__(
        self,
        tokens: np.ndarray | Tokens,
        spans: np.ndarray,
        lengths: Sequence[int],
        end_of_text: int,
        groups: Sequence[int] | None = None,
        targets: np.ndarray | Tokens | None = None,
    ):
        """Take examples of a token array.

        Args:
          tokens: of all examples, one after the other.
          spans: int64 (n, 3): see `Corpus`.
          lengths: of padded batches, ascending.
          end_of_text: the token for padding.
          groups: as in `Rows`; None: one.
          targets: of conversations: see `Corpus`.
        """
        self._targets = targets
        self._tokens, self._end, self.widths = tokens, end_of_text, lengths
        self._lengths = np.asarray(lengths, np.int64)
        first, answer, end = np.asarray(spans, np.int64).T
        self._start = first - 1  # the token before it
        self._sizes = np.minimum(end - self._start, self._lengths[-1])  # inputs
        self._prompt = answer - self._start - 1  # inputs before the first target
        self.groups = [len(spans)] if groups is None else groups

    def width(self, rows: np.ndarray) -> int:
        sizes = self._sizes[rows[rows >= 0]]
        return int(self._lengths[np.searchsorted(self._lengths, sizes.max(initial=0))])

    def targets(self, rows: np.ndarray) -> int:
        rows = rows[rows >= 0]
        if self._targets is not None:
            return sum(int(self._counted(row).sum()) for row in rows)
        return int((self._sizes[rows] - self._prompt[rows]).sum())

    def _counted(self, row: int) -> np.ndarray:
        """Return the targets of a row, 1 or 0 for each input."""
        start, size = self._start[row] + 1, self._sizes[row]
        if self._targets is not None:
            return self._targets[start : start + size]
        return (np.arange(size) >= self._prompt[row]).astype(np.uint8)

    def read(self, rows: np.ndarray, width: int) -> Batch:
        tokens = np.full((len(rows), width + 1), self._end, np.int32)
        mask = np.zeros((len(rows), width), np.float32)
        for i in np.flatnonzero(rows >= 0):
            start, size = self._start[rows[i]], self._sizes[rows[i]]
            tokens[i, : size + 1] = self._tokens[start : start + size + 1]
            mask[i, :size] = self._counted(rows[i])
        return {"tokens": tokens, "mask": mask}


def fitting(spans: np.ndarray, longest: int) -> tuple[np.ndarray, int]:
    """Return examples that keep a target in rows of `longest`, and the number cut.

    Spans are int64 (n, 3): see `Corpus`.
    """
    spans = np.asarray(spans, np.int64)
    kept = spans[spans[:, 1] - spans[:, 0] < longest]
    return kept, int(np.sum(kept[:, 2] - kept[:, 0] >= longest))


def by_mean(tokens: np.ndarray, spans: np.ndarray, count: int) -> list[np.ndarray]:
    """Group documents in the order of their mean token, in parts of about equal size.

    Args:
      tokens: of all documents.
      spans: int64 (n, 2): the places of a document's first token and of the end of
        text that follows it.
      count: of groups.

    Returns:
      The documents' numbers, group by group.
    """
    starts, ends = spans.T
    edges = np.stack([starts, ends], 1).ravel()
    sums = np.add.reduceat(tokens, edges, dtype=np.int64)[::2]
    sums = np.where(ends > starts, sums, 0)  # an empty part would be its first element
    sizes = ends - starts + 1
    order = np.argsort(sums / np.maximum(sizes - 1, 1), kind="stable")
    middle = np.cumsum(sizes[order]) - sizes[order] / 2
    group = (middle * count // sizes.sum()).astype(int)
    return [order[group == i] for i in range(count)]


class Documents:
    """Some documents of a token array, as an array of their own: see `Corpus`."""

    def __init__(self, tokens: np.ndarray | Tokens, spans: np.ndarray):
        # the end of text before the first document is one of a single token
        self._tokens = tokens
        self._starts = np.concatenate([[0], spans[:, 0]])
        sizes = np.concatenate([[1], spans[:, 1] - spans[:, 0] + 1])
        self._ends = np.cumsum(sizes)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, span: slice) -> np.ndarray:
        stop = min(span.stop, len(self))
        first, last = np.searchsorted(self._ends, [span.start, stop - 1], "right")
        pieces = []
        for i in range(first, last + 1):
            before = self._ends[i - 1] if i else 0
            a, b = max(span.start, before), min(stop, self._ends[i])
            at = self._starts[i] - before
            pieces.append(self._tokens[at + a : at + b])
        return np.concatenate(pieces)
