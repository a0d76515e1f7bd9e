"""From tokens to batches: those of training, of skewed workers, and held-out ones."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from acco_jax import data
from tests.examples import examples

END = 256


def make_corpus(train=1000, validation=100):
    """A corpus whose token i is i: rows can be recognised."""
    return data.Corpus(
        tokenizer=data.ByteTokenizer(),
        train_tokens=np.arange(train, dtype=np.uint16),
        validation_tokens=np.arange(validation, dtype=np.uint16),
        train_bytes=train,
        validation_bytes=max(validation, 1),
        train_documents=1,
        validation_documents=1,
        checksum=0,
    )


def part(process, workers):
    """The workers of process (index, number); as many as processes if None."""
    index, number = process
    workers = number if workers is None else workers
    share = workers // number
    return {"workers": workers, "own": range(index * share, (index + 1) * share)}


def iterate(
    corpus, batch_size=4, length=8, seed=0, process=(0, 1), workers=None, **options
):
    return data.train_iterator(
        corpus,
        length=length,
        batch_size=batch_size,
        seed=seed,
        **part(process, workers),
        **options,
    )


def take(iterator, n):
    return np.stack([next(iterator)["tokens"] for _ in range(n)])


def validate(corpus, batch_size=4, length=8, process=(0, 1), limit=None):
    return list(
        data.validation_batches(
            corpus,
            length=length,
            batch_size=batch_size,
            **part(process, None),
            limit=limit,
        )
    )


# Training batches


@given(
    train=st.integers(60, 400),
    length=st.integers(1, 12),
    share=st.integers(1, 2),
    processes=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
@examples(20)
def test_global_batches_do_not_depend_on_processes(
    train, length, share, processes, seed
):
    corpus = make_corpus(train)
    batch_size = min(share * processes, (train - 1) // length)
    batch_size -= batch_size % processes
    if not batch_size:
        return
    settings_ = {"batch_size": batch_size, "length": length, "seed": seed}
    alone = take(iterate(corpus, **settings_), 6)
    parts = [
        take(iterate(corpus, **settings_, process=(p, processes)), 6)
        for p in range(processes)
    ]
    assert alone.shape == (6, batch_size, length + 1)
    assert alone.dtype == np.int32
    np.testing.assert_array_equal(alone, np.concatenate(parts, axis=1))


@given(
    train=st.integers(50, 300), length=st.integers(1, 12), seed=st.integers(0, 2**31)
)
@examples(20)
def test_every_epoch_has_every_row_once_in_another_order(train, length, seed):
    corpus = make_corpus(train)
    rows = (train - 1) // length
    iterator = iterate(corpus, batch_size=1, length=length, seed=seed)
    epochs = take(iterator, 2 * rows).reshape(2, rows, length + 1)
    expected = np.arange(rows)[:, None] * length + np.arange(length + 1)
    for epoch in epochs:
        np.testing.assert_array_equal(epoch[np.argsort(epoch[:, 0])], expected)
    if rows > 20:
        assert not np.array_equal(epochs[0], epochs[1])
        assert not np.array_equal(epochs[0], expected)


@given(
    before=st.integers(0, 70),
    elsewhere=st.integers(0, 5),
    process=st.sampled_from([(0, 1), (1, 2)]),
    prefetch=st.booleans(),
)
@examples(20)
def test_restoring_gives_the_following_batches(before, elsewhere, process, prefetch):
    corpus = make_corpus()  # 124 rows: 31 batches an epoch
    iterator = iterate(corpus, process=process, prefetch=prefetch)
    if before:
        take(iterator, before)
    state = json.loads(json.dumps(iterator.get_state()))
    following = take(iterator, 40)
    fresh = iterate(corpus, process=process)
    if elsewhere:
        take(fresh, elsewhere)
    fresh.set_state(state)
    np.testing.assert_array_equal(take(fresh, 40), following)
    iterator.set_state(state)
    np.testing.assert_array_equal(take(iterator, 40), following)


def test_a_seed_gives_one_order():
    corpus = make_corpus()
    first = take(iterate(corpus, seed=1), 5)
    np.testing.assert_array_equal(take(iterate(corpus, seed=1), 5), first)
    assert not np.array_equal(take(iterate(corpus, seed=2), 5), first)


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"batch_size": 3, "process": (0, 2)}, "3 is not divisible by 2"),
        ({"batch_size": 0}, "batch_size 0"),
        ({"length": 0}, "length 0"),
        ({"process": (2, 2)}, r"own \[2\] must be workers, 0 .. 1"),
        ({"length": 1000}, "0 rows of 1000"),
        ({"batch_size": 125}, "124 rows.*125"),
    ],
)
def test_impossible_batches_are_refused_in_one_line(changes, hint):
    with pytest.raises(ValueError, match=hint) as raised:
        iterate(make_corpus(), **changes)
    assert "\n" not in str(raised.value)


# Workers with documents of their own


def documents(sizes, seed=0):
    """A corpus of documents whose tokens are all different, from 300 on, shuffled."""
    draw = np.random.default_rng(seed)
    texts, at = [], 300
    for size in sizes:
        texts.append(np.arange(at, at + size))
        at += size
    draw.shuffle(texts)
    tokens = np.concatenate([[END], *(x for t in texts for x in (t, [END]))])
    corpus = make_corpus()
    return dataclasses.replace(corpus, train_tokens=tokens.astype(np.uint16))


def workers_of(batches, workers):
    """What of (k, rows, length + 1) each worker has: (workers, rows, length + 1)."""
    k, rows, width = batches.shape
    parts = batches.reshape(k, workers, rows // workers, width)
    return parts.swapaxes(0, 1).reshape(workers, -1, width)


SIZES = [int(n) for n in np.random.default_rng(1).integers(1, 90, 40)]
SKEWED = {"batch_size": 8, "workers": 4, "length": 8}


def test_the_first_row_of_a_worker_is_a_row_of_the_data():
    corpus = documents(SIZES)
    iterator = iterate(corpus, **SKEWED)
    for _ in range(3):
        position = iterator.position
        for worker, rows in enumerate(np.split(next(iterator)["tokens"], 4)):
            at = 8 * iterator.first_row(position, worker)
            assert rows[0].tolist() == corpus.train_tokens[at : at + 9].tolist()


@pytest.mark.parametrize("length", [1, 8, 31])
def test_skewed_workers_read_disjoint_documents(length):
    corpus = documents(SIZES)
    two_epochs = len(corpus.train_tokens) // length // 4
    iterator = iterate(corpus, **SKEWED | {"length": length}, skew=1.0)
    seen = []
    for rows in workers_of(take(iterator, two_epochs), 4):
        # whole documents, as they are: a token's successor is the next or the end
        now, after = rows[:, :-1].ravel(), rows[:, 1:].ravel()
        inside = (now != END) & (after != END)
        np.testing.assert_array_equal(after[inside], now[inside] + 1)
        seen.append(set(rows.ravel().tolist()) - {END})
    assert not any(a & b for a, b in itertools.combinations(seen, 2))
    # all but what is left of a row, and groups of about a quarter, by their mean
    assert sum(map(len, seen)) > sum(SIZES) - 4 * (length + 1)
    for a, b in itertools.pairwise(seen):
        assert max(a) < min(b)
    assert max(map(len, seen)) < sum(SIZES) / 4 + max(SIZES)


def epoch_of(corpus, skew, seed=0, number=0):
    """What each worker reads in an epoch of its own: sets of rows, none twice."""
    rows = iterate(corpus, **SKEWED, skew=skew, seed=seed)._order
    found = []
    for worker in range(4):
        size = rows.epoch(worker)
        positions = np.arange(number * size, (number + 1) * size)
        found.append(rows.rows(worker, positions).tolist())
    return found


@given(st.floats(0.01, 1), st.integers(0, 2**31), st.integers(0, 5))
@examples(20)
def test_an_epoch_of_all_skewed_workers_has_every_row_once(skew, seed, number):
    corpus = documents(SIZES)
    groups = iterate(corpus, **SKEWED, skew=1.0)._rows.groups
    ends = np.cumsum(groups)
    workers = epoch_of(corpus, skew, seed, number)
    assert sorted(itertools.chain.from_iterable(workers)) == list(range(ends[-1]))
    for i, (rows, size, end) in enumerate(zip(workers, groups, ends, strict=True)):
        own = sum(end - size <= row < end for row in rows)
        # its share, and a fourth of what the group gives to all
        assert round(skew * size) <= own
        if skew == 1:
            assert own == len(rows) == size
        others = sum(groups) - sum(round(skew * g) for g in groups)
        assert len(rows) - round(skew * size) in (others // 4, others // 4 + 1), i


def test_half_a_skew_is_half_the_rows():
    corpus = documents(SIZES)
    whole, half = epoch_of(corpus, 1.0), epoch_of(corpus, 0.5)
    for mine, rows in zip(whole, half, strict=True):
        # half of them for sure, and of the other half a fourth by chance
        assert 0.5 <= len(set(mine) & set(rows)) / len(rows) < 0.75


@pytest.mark.parametrize("skew", [0.3, 1.0])
def test_skewed_batches_do_not_depend_on_processes_and_resume(skew):
    corpus = documents(SIZES)
    alone = iterate(corpus, **SKEWED, skew=skew)
    whole = take(alone, 70)
    for count in (2, 4):
        parts = [
            take(iterate(corpus, **SKEWED, skew=skew, process=(p, count)), 70)
            for p in range(count)
        ]
        np.testing.assert_array_equal(whole, np.concatenate(parts, 1))
    state = json.loads(json.dumps(alone.get_state()))
    following = take(alone, 40)
    fresh = iterate(corpus, **SKEWED, skew=skew, prefetch=False)
    fresh.set_state(state)
    np.testing.assert_array_equal(take(fresh, 40), following)
    other = take(iterate(corpus, **SKEWED, skew=skew, seed=1), 70)
    assert not np.array_equal(other, whole)


def test_the_order_is_what_it_was():
    """Recorded: a run that was begun goes on in its order."""
    found = take(iterate(make_corpus(), workers=2, skew=0.0), 3)
    recorded = [[336, 88, 440, 432], [288, 360, 616, 96], [416, 536, 848, 64]]
    assert found[..., 0].tolist() == recorded


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"skew": 1.5}, "skew 1.5"),
        ({"workers": 3}, "8 is not divisible by 3 workers"),
        ({"microbatches": 3}, "8 is not divisible by 4 workers with 3 microbatches"),
    ],
)
def test_impossible_skews_are_refused_in_one_line(changes, hint):
    options = SKEWED | {"skew": 1.0} | changes
    with pytest.raises(ValueError, match=hint) as raised:
        iterate(documents(SIZES), **options)
    assert "\n" not in str(raised.value)


def test_a_worker_without_documents_is_refused():
    with pytest.raises(ValueError, match="worker 0 have less than a row of 8 tokens"):
        iterate(documents([400, 3, 3]), **SKEWED, skew=1.0)


# Held-out batches


@given(
    validation=st.integers(2, 200),
    length=st.integers(1, 12),
    share=st.integers(1, 3),
    processes=st.integers(1, 3),
)
@examples(50)
def test_validation_has_every_target_once(validation, length, share, processes):
    corpus = make_corpus(validation=validation)
    parts = [
        validate(corpus, share * processes, length, (p, processes))
        for p in range(processes)
    ]
    assert len({len(part) for part in parts}) == 1
    inputs, targets = [], []
    for shares in zip(*parts, strict=True):
        for batch in shares:
            tokens, mask = batch["tokens"], batch["mask"]
            assert tokens.shape == (share, length + 1)
            assert tokens.dtype == np.int32
            assert mask.shape == (share, length)
            assert mask.dtype == np.float32
            inputs += tokens[:, :-1][mask == 1].tolist()
            targets += tokens[:, 1:][mask == 1].tolist()
            assert np.all(tokens[:, 1:][mask == 0] == END)
            assert np.all((mask == 0) | (mask == 1))
    assert inputs == list(range(validation - 1))
    assert targets == list(range(1, validation))


def test_validation_limit():
    corpus = make_corpus()
    everything = validate(corpus)
    assert len(everything) == math.ceil(99 / 32)
    some = validate(corpus, limit=2)
    assert len(some) == 2
    assert len(validate(corpus, limit=100)) == len(everything)
    # spread over the split: the first of each half of the four
    np.testing.assert_array_equal(some[0]["tokens"], everything[0]["tokens"])
    np.testing.assert_array_equal(some[1]["tokens"], everything[2]["tokens"])


def test_validation_refuses_at_the_call():
    with pytest.raises(ValueError, match="divisible"):
        data.validation_batches(make_corpus(), length=8, batch_size=3, workers=2)


def test_bits_per_byte():
    corpus = make_corpus(validation=101)  # 100 targets, 101 bytes
    assert data.bits_per_byte(101 * math.log(2), corpus) == pytest.approx(1)
    some = data.bits_per_byte(50 * math.log(2), corpus, targets=50)
    assert some == pytest.approx(data.bits_per_byte(100 * math.log(2), corpus))
