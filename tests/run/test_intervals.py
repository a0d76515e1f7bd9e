"""Sets of times against a raster: one Boolean per unit of time."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from acco_jax.run.observe import intervals

SIZE = 40
TIME = st.integers(0, SIZE)
SPANS = st.lists(st.tuples(TIME, TIME), max_size=12)


def raster(spans):
    """(SIZE,) Booleans: which units of time lie in a span."""
    inside = np.zeros(SIZE, bool)
    for begin, end in spans:
        inside[begin:end] = True
    return inside


def is_set(found):
    assert found.shape[1:] == (2,)
    assert (found[:, 0] < found[:, 1]).all()
    assert (found[1:, 0] > found[:-1, 1]).all()  # what touches is one
    return True


@given(SPANS)
def test_union(spans):
    found = intervals.union(spans)
    assert is_set(found)
    np.testing.assert_array_equal(raster(found), raster(spans))
    assert intervals.length(found) == raster(spans).sum()


@given(SPANS, SPANS)
def test_both_and_without(a, b):
    first, second = intervals.union(a), intervals.union(b)
    for found, expected in (
        (intervals.both(first, second), raster(a) & raster(b)),
        (intervals.without(first, second), raster(a) & ~raster(b)),
    ):
        np.testing.assert_array_equal(raster(found), expected)
        assert intervals.length(found) == expected.sum()
        assert intervals.length(intervals.union(found)) == expected.sum()


def test_large_times_stay_exact():
    start = 1_700_000_000_000_000_000  # nanoseconds since 1970
    found = intervals.union([(start, start + 3), (start + 2, start + 5)])
    assert found.tolist() == [[start, start + 5]] and intervals.length(found) == 5
