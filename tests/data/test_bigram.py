"""The bigram against its definition, target by target."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from acco_jax import data
from acco_jax.data import bigram
from tests.examples import examples


class AnyTokenizer(data.ByteTokenizer):
    def __init__(self, vocab_size):
        self.vocab_size = vocab_size
        self.end_of_text = vocab_size - 1


def make_corpus(train, validation, vocab_size):
    return data.Corpus(
        tokenizer=AnyTokenizer(vocab_size),
        train_tokens=np.asarray(train, np.uint32),
        validation_tokens=np.asarray(validation, np.uint32),
        train_bytes=len(train),
        validation_bytes=3 * len(validation),
        train_documents=1,
        validation_documents=1,
        checksum=0,
    )


class Model:
    """Interpolated Witten-Bell by counting one at a time."""

    def __init__(self, corpus):
        tokens = corpus.train_tokens.tolist()
        self.vocab_size = corpus.tokenizer.vocab_size
        self.pairs = Counter(itertools.pairwise(tokens))
        self.seen = Counter(tokens[1:])

    def unigram(self, y):
        kinds = len(self.seen)
        uniform = kinds / self.vocab_size
        return (self.seen[y] + uniform) / (self.seen.total() + kinds)

    def probability(self, x, y):
        after = {pair: n for pair, n in self.pairs.items() if pair[0] == x}
        if not after:
            return self.unigram(y)
        kinds, total = len(after), sum(after.values())
        return (self.pairs[x, y] + kinds * self.unigram(y)) / (total + kinds)


corpora = st.integers(2, 6).flatmap(
    lambda n: st.builds(
        make_corpus,
        st.lists(st.integers(0, n - 1), min_size=2, max_size=40),
        st.lists(st.integers(0, n - 1), min_size=2, max_size=40),
        st.just(n + 1),
    )
)


@pytest.mark.parametrize("dense", [0, 4096])
@pytest.mark.parametrize("chunk", [3, 2**22])
@given(corpus=corpora)
@examples(40)
def test_bigram_is_its_definition_over_the_validation_batches(corpus, dense, chunk):
    model = Model(corpus)
    nats = 0.0
    for batch in data.validation_batches(corpus, length=3, batch_size=2):
        rows, columns = np.nonzero(batch["mask"])
        tokens = batch["tokens"]
        for x, y in zip(tokens[rows, columns], tokens[rows, columns + 1], strict=True):
            nats -= math.log(model.probability(int(x), int(y)))
    expected = data.bits_per_byte(nats, corpus)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bigram, "_DENSE_VOCABULARY", dense)
        patch.setattr(bigram, "_CHUNK", chunk)
        assert data.bigram_bits_per_byte(corpus) == pytest.approx(expected)


@given(corpus=corpora)
@examples(20)
def test_the_definition_is_a_distribution(corpus):
    model = Model(corpus)
    for x in range(model.vocab_size):
        probabilities = [model.probability(x, y) for y in range(model.vocab_size)]
        assert min(probabilities) > 0
        assert sum(probabilities) == pytest.approx(1)


@pytest.mark.parametrize("dense", [0, 4096])
def test_pairs_of_a_large_corpus_are_of_its_first_tokens(dense, monkeypatch):
    monkeypatch.setattr(bigram, "_DENSE_VOCABULARY", dense)
    monkeypatch.setattr(bigram, "_CHUNK", 7)
    tokens = np.random.default_rng(0).integers(0, 5, 500)
    pairs, counts = bigram._count_pairs(tokens, None, None, 5, 140)
    codes = 5 * tokens[:140] + tokens[1:141]
    expected = np.unique(codes, return_counts=True)
    np.testing.assert_array_equal((pairs, counts), expected)


def test_a_large_vocabulary():
    random = np.random.default_rng(0)
    tokens = random.zipf(1.3, 2_000_000) % 50_000
    corpus = make_corpus(tokens[:-200_000], tokens[-200_000:], 50_000)
    counts = np.bincount(tokens, minlength=50_000) / len(tokens)
    entropy = -np.sum(counts[counts > 0] * np.log2(counts[counts > 0])) / 3
    assert entropy < data.bigram_bits_per_byte(corpus) < 1.2 * entropy
