"""One endless sequence of rows, however many workers and processes read it."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from acco_jax.data.batches import Batches, Slots
from acco_jax.data.order import Shuffled, Skewed, permuted
from acco_jax.data.rows import PackedRows
from tests.examples import examples

END = 10_000


def numbered(count):
    """Rows of one target: row i is tokens i, i + 1."""
    return PackedRows([np.arange(count + 1)], 1, END)


def batches_of(rows, seed, workers, microbatches, size, counts=None, **options):
    slots = Slots(workers, 1, microbatches, size, counts)
    order = Shuffled(len(rows), seed)
    return Batches(rows, order, slots, prefetch=False, **options)


def read(iterators):
    """The rows of the next global batch, from all processes: -1 where there is none."""
    parts = [next(iterator)["tokens"][:, 0] for iterator in iterators]
    found = np.concatenate(parts)
    return np.where(found == END, -1, found)


@given(st.integers(1, 5000), st.integers(0, 2**63), st.integers(0, 100))
@examples(50)
def test_a_permutation_has_every_number_once(size, seed, epoch):
    whole = permuted(np.arange(size), size, seed, epoch)
    np.testing.assert_array_equal(np.sort(whole), np.arange(size))
    some = np.random.default_rng(0).integers(0, size, 10)
    np.testing.assert_array_equal(permuted(some, size, seed, epoch), whole[some])


def test_permutations_are_even():
    """Of 1,000 permutations of 50, every number comes to every place about 20 times."""
    found = np.zeros((50, 50))
    for epoch in range(1000):
        found[np.arange(50), permuted(np.arange(50), 50, 7, epoch)] += 1
    chi_squared = ((found - 20) ** 2 / 20).sum()
    assert abs(chi_squared - 49**2) < 5 * (2 * 49**2) ** 0.5  # five sigmas
    pairs = {tuple(permuted(np.arange(4), 4, 7, epoch)) for epoch in range(400)}
    assert len(pairs) == 24


@given(
    count=st.integers(16, 300),
    share=st.integers(1, 2),
    seed=st.integers(0, 2**32),
    prefetch=st.booleans(),
)
@examples(12)
def test_the_sequence_is_one_for_all_workers_and_processes(
    count, share, seed, prefetch
):
    rows, size = numbered(count), 8 * share
    calls = 2 * count // size + 1
    sequences = []
    for workers in (1, 2, 4):
        for processes in (p for p in (1, 2, 4) if p <= workers):
            slots = Slots(workers, 1, 2, size // workers // 2)
            parts = [
                Batches(rows, Shuffled(count, seed), slots, own, prefetch)
                for own in np.split(np.arange(slots.size), processes)
            ]
            found = [read(parts) for _ in range(calls)]
            sequences.append(np.concatenate(found)[: 2 * count])
            assert len({json.dumps(part.get_state()) for part in parts}) == 1
            assert parts[0].get_state()["row"] == calls * size
    for sequence in sequences:
        np.testing.assert_array_equal(sequence, sequences[0])
    for epoch in sequences[0].reshape(2, count):
        np.testing.assert_array_equal(np.sort(epoch), np.arange(count))
    assert not np.array_equal(*sequences[0].reshape(2, count))


@given(st.integers(64, 5000), st.integers(0, 2**32))
@examples(30)
def test_two_seeds_share_no_order(count, seed):
    """Nor any epoch: seed + 1 is not where seed is an epoch later."""
    epochs = [
        tuple(Shuffled(count, s).rows(0, np.arange(e * count, (e + 1) * count)))
        for s in (seed, seed + 1)
        for e in range(3)
    ]
    assert len(set(epochs)) == 6
    same = [np.mean(np.equal(a, b)) for a, b in itertools.combinations(epochs, 2)]
    assert max(same) < 0.2  # a fixed point or two


@given(
    counts=st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(any),
    steps=st.integers(1, 3),
    size=st.integers(1, 2),
    count=st.integers(50, 90),
)
@examples(25)
def test_what_is_not_computed_is_not_consumed(counts, steps, size, count):
    slots = Slots(len(counts), steps, 3, size, tuple(counts))
    batches = Batches(numbered(count), Shuffled(count, 0), slots)
    taken = sum(counts) * steps * size
    sequence = []
    while len(sequence) < count:
        found = read([batches]).reshape(len(counts), steps, 3, size)
        assert batches.get_state()["row"] == len(sequence) + taken
        for worker, number in enumerate(counts):
            assert np.all(found[worker, :, number:] == -1)
        # step after step, of each step worker after worker
        order = found.swapaxes(0, 1).ravel()
        sequence += order[order >= 0].tolist()
        assert len(sequence) % taken == 0 and batches.targets == len(sequence)
    assert sorted(sequence[:count]) == list(range(count))


@given(st.data(), st.integers(1, 4), st.integers(1, 2), st.integers(40, 90))
@examples(15)
def test_where_counts_adapt_nothing_is_skipped_or_repeated(drawn, workers, size, count):
    """Also where a run goes on with another number of workers."""
    rows, most = numbered(count), workers
    batches = batches_of(rows, 3, workers, 4, size, ())
    computed = []
    for _ in range(count // size):
        found = read([batches]).reshape(workers, 4, size)
        assert np.all(found >= 0)  # full
        counts = drawn.draw(
            st.lists(st.integers(1, 4), min_size=workers, max_size=workers)
        )
        batches.computed(counts)
        computed += np.concatenate(
            [part[:n].ravel() for part, n in zip(found, counts, strict=True)]
        ).tolist()
        state = json.loads(json.dumps(batches.get_state()))
        assert state["row"] - len(state["left"]) == len(computed) == batches.targets
        workers = drawn.draw(st.sampled_from([workers, 1, most]))
        batches = batches_of(rows, 3, workers, 4, size, ())
        batches.set_state(state)
    left = Shuffled(count, 3).rows(0, np.asarray(state["left"], int)).tolist()
    whole = Shuffled(count, 3).rows(0, np.arange(state["row"])).tolist()
    assert sorted(computed + left) == sorted(whole)
    # no row waits for long: the oldest are computed first
    assert state["row"] - min(state["left"], default=state["row"]) <= 8 * most * size


def test_a_smaller_batch_begins_with_the_rows_that_a_larger_one_left():
    """And leaves those that it has no place for, whether or not its counts adapt."""
    large = batches_of(numbered(90), 3, 4, 4, 1, ())
    next(large)
    large.computed([1] * 4)
    state = large.get_state()
    assert len(state["left"]) == 12
    for counts in ((), (4,)):
        small = Batches(numbered(90), Shuffled(90, 3), Slots(1, 1, 4, 1, counts))
        small.set_state(state)
        expected = Shuffled(90, 3).rows(0, np.asarray(state["left"]))
        for rows in expected.reshape(3, 4):
            np.testing.assert_array_equal(read([small]), rows)
            small.computed([4])


@pytest.mark.parametrize("counts", [None, (1, 3, 2)])
@given(skew=st.floats(0.1, 1), before=st.integers(0, 30))
@examples(10)
def test_skewed_workers_resume(counts, skew, before):
    rows = PackedRows([np.arange(a, a + 41) for a in (0, 50, 100)], 1, END)

    def make():
        order = Skewed(rows.groups, 5, skew)
        return Batches(rows, order, Slots(3, 1, 3, 2, counts), prefetch=False)

    batches = make()
    for _ in range(before):
        next(batches)
    state = json.loads(json.dumps(batches.get_state()))
    assert len(state["row"]) == 3
    fresh = make()
    fresh.set_state(state)
    for _ in range(20):
        np.testing.assert_array_equal(read([fresh]), read([batches]))


def test_adaptive_skewed_workers_compute_all_of_their_own():
    rows = PackedRows([np.arange(a, a + 41) for a in (0, 50)], 1, END)
    order = Skewed(rows.groups, 5, 1.0)
    batches = Batches(rows, order, Slots(2, 1, 4, 2, ()))
    draw, computed = np.random.default_rng(0), [[], []]
    while batches.targets < 60:
        found, counts = read([batches]).reshape(2, 4, 2), draw.integers(1, 5, 2)
        batches.computed(counts)
        for worker in range(2):
            computed[worker] += found[worker, : counts[worker]].ravel().tolist()
    state = batches.get_state()
    for worker in range(2):
        left, row = state["left"][worker], state["row"][worker]
        whole = order.rows(worker, np.arange(row)).tolist()
        # row 40 is token 50: the second group begins there
        tokens = [r + 10 * worker for r in whole]
        left = [r + 10 * worker for r in order.rows(worker, np.asarray(left, int))]
        assert sorted(computed[worker] + left) == sorted(tokens)


def test_wrong_use_is_refused_in_one_line():
    batches = batches_of(numbered(40), 0, 2, 2, 1, ())
    next(batches)
    for call in (lambda: next(batches), batches.get_state):
        with pytest.raises(ValueError, match=r"call computed\(counts\) first") as error:
            call()
        assert "\n" not in str(error.value)
    batches.computed([1, 2])
    next(batches)
    for state in ({"next_index": 3}, {"row": [1, 2], "left": [], "targets": 0}, 7):
        with pytest.raises(
            ValueError, match="is not a position in these rows"
        ) as error:
            batches.set_state(state)
        assert "\n" not in str(error.value)
