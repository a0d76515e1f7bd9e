"""The search for microbatches, on memories and speeds that are made up."""

import pytest

from acco_jax.plan import fitting
from acco_jax.plan.fitting import Shape, Tried

GIB = 2**30


def searched(
    memory, speed, *, first=(4, 8), usable_memory=16 * GIB, most=4, unit=2, divisor=1
):
    """Searches; returns the result and the shapes that were tried, in order."""
    tried = []

    def attempt(shape):
        tried.append(shape)
        size = memory(shape.rows)
        if size is None or size > usable_memory:
            return Tried(shape, None)
        return Tried(shape, size, speed(shape.rows), (0.0, 0.0), 1.0)

    found = fitting.search(
        attempt(Shape(*first)), attempt, usable_memory=usable_memory, held=GIB,
        unit=unit, divisor=divisor, most=most,
    )  # fmt: skip
    return found, tried


def test_a_linear_memory_is_bracketed_in_few_compiles():
    found, tried = searched(lambda r: GIB + r * GIB // 4, lambda r: r, first=(4, 60))
    assert found.largest <= 60 < (found.misfit or 61)
    assert found.largest >= 60 / fitting.MOST
    assert len(tried) == found.compiled <= 5
    assert found.best.shape.rows == found.largest


def test_the_fastest_is_not_the_largest():
    """Near the limit what was hidden is not any more."""
    found, _ = searched(
        lambda r: GIB + r * GIB // 4, lambda r: r if r < 40 else 10, first=(4, 60)
    )
    assert found.best.shape.rows < found.largest


def test_a_candidate_that_fills_the_memory_ends_the_search():
    _, tried = searched(lambda r: GIB + r * GIB // 4, lambda r: r, first=(4, 60))
    assert [s.rows for s in tried] == [4, 60, 15]  # and one between them, as fast?
    _, tried = searched(lambda r: GIB + r * GIB // 4, lambda r: r, first=(52, 2))
    assert [s.rows for s in tried] == [52]  # 14 of 16 GiB
    found, tried = searched(lambda r: GIB + r * GIB // 4, lambda r: r, first=(48, 2))
    assert [s.rows for s in tried] == [48, 60] and found.filled == 16 * GIB


def test_the_best_has_as_large_a_step_as_is_asked_for():
    found, _ = searched(lambda r: GIB + r * GIB // 16, lambda r: r, first=(4, 2))
    assert found.largest > 4 and found.best.shape == (4, 2)


def test_memory_that_reads_as_nothing_is_not_extrapolated():
    """Temporaries of one row were all in a TPU's vector memory; of 12 they are not."""
    memory = lambda r: GIB if r < 12 else (GIB * r if r < 16 else None)  # noqa: E731
    found, tried = searched(memory, lambda r: r, first=(2, 8), most=6)
    assert found.largest < 16 <= found.misfit <= fitting.CLOSE * found.largest
    assert max(s.rows for s in tried) <= 2 * fitting.MOST


def test_tokens_of_a_step_stay_near():
    _, tried = searched(lambda r: GIB + r * GIB // 4, lambda r: r, first=(3, 16))
    assert all(shape.microbatches % 2 == 0 for shape in tried)
    assert all(
        abs(shape.total - 48) <= shape.rows for shape in tried if shape.rows <= 24
    )
    assert fitting.cut(100, 48, 2) == (100, 2)


@pytest.mark.parametrize(("first", "fits"), [((4, 8), 30), ((64, 2), 30), ((4, 2), 3)])
def test_only_rows_that_a_group_divides_are_tried(first, fits):
    memory = lambda r: GIB + r * GIB // 4 if r <= fits else None  # noqa: E731
    found, tried = searched(memory, lambda r: r, first=first, divisor=4, most=6)
    assert all(shape.rows % 4 == 0 for shape in tried)
    assert (found.largest, found.misfit) == ((28, 32) if fits == 30 else (None, 4))


@pytest.mark.parametrize("most", [1, 5])
def test_a_first_one_that_does_not_fit_is_halved(most):
    found, tried = searched(
        lambda r: r * GIB,
        lambda r: r,
        first=(64, 2),
        usable_memory=7.5 * GIB,
        most=most,
    )
    assert [s.rows for s in tried[:2]] == [64, 32]
    assert (found.largest, found.misfit) == ((None, 32) if most == 1 else (6, 8))


def test_nothing_smaller_than_one_row_is_tried():
    found, tried = searched(lambda r: None, lambda r: r, first=(1, 2))
    assert len(tried) == 1 and found.largest is None and found.best is None
