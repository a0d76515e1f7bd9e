"""A smoothed bigram over a corpus's tokens: the baseline of a trained model."""

from collections.abc import Sequence

import numpy as np

from acco_jax.data.pipeline import Corpus, bits_per_byte
from acco_jax.data.stored import Tokens

_DENSE_VOCABULARY = 4096
_CHUNK = 2**22  # tokens that are counted at once,
_MOST = 2**27  # and of a large corpus in all


def bigram_bits_per_byte(corpus: Corpus) -> float:
    """Return an interpolated Witten-Bell bigram's bits per byte of held-out text.

    With c the training counts, V tokens in the vocabulary, and t(.) the number of
    distinct tokens seen after x (or at all):

        p(y)     = (c(y) + t / V) / (c + t)
        p(y | x) = (c(x, y) + t(x) p(y)) / (c(x) + t(x))

    The targets are all held-out ones, ends of text included, also those of examples
    that `validation_batches` cuts or leaves out. For instructions they are answers, for
    conversations the assistant's turns, and the bigram is counted on these too. Of the
    training tokens the first 134 million count.

    Source: Witten and Bell, "The zero-frequency problem" (1991), method C,
    interpolated as in Chen and Goodman, "An empirical study of smoothing techniques
    for language modeling" (1999).
    """
    vocab_size = corpus.tokenizer.vocab_size
    pairs, counts = _count_pairs(
        corpus.train_tokens,
        corpus.train_spans,
        corpus.train_targets,
        vocab_size,
        _MOST,
    )
    contexts, targets = np.divmod(pairs, vocab_size)
    target_counts = np.bincount(targets, counts, vocab_size)  # c(y)
    context_counts = np.bincount(contexts, counts, vocab_size)  # c(x)
    kinds_after = np.bincount(contexts, minlength=vocab_size)  # t(x)
    kinds = np.count_nonzero(target_counts)
    unigram = (target_counts + kinds / vocab_size) / (target_counts.sum() + kinds)

    held_out, times = _count_pairs(
        corpus.validation_tokens,
        corpus.validation_spans,
        corpus.validation_targets,
        vocab_size,
    )
    x, y = np.divmod(held_out, vocab_size)
    place = np.minimum(np.searchsorted(pairs, held_out), len(pairs) - 1)
    together = np.where(pairs[place] == held_out, counts[place], 0)  # c(x, y)
    unseen = kinds_after[x] == 0  # then p(y | x) = p(y)
    weight = np.where(unseen, 1, kinds_after[x])
    probability = (together + weight * unigram[y]) / (context_counts[x] + weight)
    return bits_per_byte(float(-(times * np.log(probability)).sum()), corpus)


def _count_pairs(
    tokens: np.ndarray | Tokens,
    spans: np.ndarray | None,
    targets: np.ndarray | Tokens | None,
    vocab_size: int,
    most: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Count adjacent tokens x, y: the distinct x V + y, ascending, and their counts.

    With spans or targets only pairs are counted whose y is a target: see `Corpus`.
    Given `most`, only as many of the first tokens are, in whole chunks.
    """
    dense = np.zeros(vocab_size**2 if vocab_size <= _DENSE_VOCABULARY else 0, np.int64)
    found = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
    for start in range(0, len(tokens) - 1, _CHUNK)[: most and -(-most // _CHUNK)]:
        chunk = np.asarray(tokens[start : start + _CHUNK + 1], np.int64)
        codes = chunk[:-1] * vocab_size + chunk[1:]
        if targets is not None:
            codes = codes[targets[start + 1 : start + 1 + len(codes)] == 1]
        elif spans is not None:  # answers begin and end at these, in turn
            edges, y = (
                (spans[:, 1:] + [0, 1]).ravel(),
                np.arange(len(codes)) + start + 1,
            )
            codes = codes[np.searchsorted(edges, y, "right") % 2 == 1]
        if dense.size:
            dense += np.bincount(codes, minlength=dense.size)
        else:
            found.append(np.unique(codes, return_counts=True))
            # as in a binary counter: a pair is merged once for each doubling
            while len(found) > 1 and len(found[-1][0]) >= len(found[-2][0]):
                found[-2:] = [_merged(found[-2:])]
    if dense.size:
        pairs = np.flatnonzero(dense)
        return pairs, dense[pairs]
    return _merged(found)


def _merged(
    parts: Sequence[tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray]:
    """Add counts of the same pairs."""
    pairs, counts = map(np.concatenate, zip(*parts, strict=True))
    pairs, place = np.unique(pairs, return_inverse=True)
    return pairs, np.bincount(place, counts, len(pairs)).astype(np.int64)
