"""Goodput: every second of a run's wall time has one cause, whenever it was killed."""

import itertools
import json
import math

import hypothesis
import hypothesis.strategies as st
import jax
import pytest

from acco_jax.run import preparation
from acco_jax.run.observe import goodput, timing


def rows(*lines):
    """Rows of (time, cause, half-round or None, other fields)."""
    return [
        {"time": time, "cause": cause, **more}
        | ({} if half_round is None else {"half_round": half_round})
        for time, cause, half_round, more in (
            (*line[:3], line[3] if len(line) > 3 else {}) for line in lines
        )
    ]


def spent(*lines):
    """The causes that took time."""
    return {k: v for k, v in goodput.spent(rows(*lines)).items() if v}


START = ((100, "down", None), (103, "start_up", 0))


def test_a_run_that_nothing_stopped():
    assert spent(
        *START,
        (113, "training", 2, {"compiling": 6, "waiting": 1}),
        (115, "training", 4),
        (116, "evaluation", 4),
        (120, "checkpoints", 4),
    ) == {"start_up": 3, "compiling": 6, "waiting": 1, "training": 5,
          "evaluation": 1, "checkpoints": 4}  # fmt: skip


def test_what_a_kill_lost_is_repeated():
    """Killed after half-round 10, of which 7 were saved; then nothing ran for 50 s."""
    before = (*START, (113, "training", 6), (121, "training", 10))
    assert spent(*before) == {"start_up": 3, "training": 18}
    down = (*before, (171, "down", None))
    assert spent(*down) == {"start_up": 3, "training": 18, "down": 50}
    again = (*down, (175, "start_up", 7))
    assert spent(*again) == {
        "start_up": 7, "training": 10 + 2, "repeated": 6, "down": 50
    }  # fmt: skip
    twice = (*again, (180, "training", 9), (181, "down", None), (183, "start_up", 7))
    assert spent(*twice) == {
        "start_up": 9, "training": 10 + 2, "repeated": 6 + 5, "down": 51
    }  # fmt: skip
    first = (*twice, (184, "start_up", 0))
    assert "training" not in spent(*first) and spent(*first)["repeated"] == 23


def test_a_start_that_was_killed_is_down():
    assert spent(*START[:1], (160, "down", None), (165, "start_up", 0)) == {
        "down": 60, "start_up": 5
    }  # fmt: skip


def test_a_clock_that_is_set_back_stands_still():
    lines = (*START, (60, "training", 2), (90, "checkpoints", 2), (105, "down", 2))
    assert spent(*lines) == {"start_up": 3, "down": 2}


def test_nothing_yet():
    assert goodput.share(goodput.spent([])) == 0
    assert goodput.share(goodput.spent(rows(*START[:1]))) == 0


LINE = st.fixed_dictionaries(
    {"time": st.floats(-1e9, 2e9), "cause": st.sampled_from(goodput.CAUSES)},
    optional={"half_round": st.integers(0, 30), "compiling": st.floats(0, 1e9),
              "waiting": st.floats(0, 1e9), "over": st.booleans()},
)  # fmt: skip


@hypothesis.given(st.lists(LINE))
def test_every_second_has_one_cause(lines):
    seconds = goodput.spent(lines)
    assert list(seconds) == list(goodput.CAUSES)
    assert all(value >= 0 for value in seconds.values())
    times = list(itertools.accumulate((row["time"] for row in lines), max))
    pairs = zip(lines, itertools.pairwise(times), strict=False)
    wall = sum(now - before for last, (before, now) in pairs if not last.get("over"))
    assert math.isclose(sum(seconds.values()), wall, rel_tol=1e-9, abs_tol=1e-3)
    assert 0 <= goodput.share(seconds) <= 1 + 1e-9


@pytest.fixture
def clock(monkeypatch):
    """A clock that its first element says."""
    now = [1000.0]
    monkeypatch.setattr(goodput.time, "time", lambda: now[0])
    monkeypatch.setattr(goodput.time, "perf_counter", lambda: now[0])
    return now


def test_the_record_measures_waiting_and_compiling(tmp_path, clock):
    record = goodput.Record(tmp_path, 990.0, over=False)
    record.mark("start_up", 0)
    for fetching in (0.0, 3.0, 9.0):
        with record.waiting():
            clock[0] += 5
        with record.fetching():
            clock[0] += fetching
        record.trained(1 + len(goodput.read(tmp_path)))
    record.trained(5)  # no half-round more: no line
    clock[0] += 10
    for begin, end in ((1026, 1028), (1030, 1034), (1031, 1033), (1033.5, 1036)):
        jax.monitoring.record_event_time_span(timing.COMPILER + "x", begin, end)
    jax.monitoring.record_event_time_span("/other", 1000, 1036)
    record.mark("evaluation", 5)
    record.close()
    jax.monitoring.record_event_time_span(timing.COMPILER + "x", 1000, 1036)
    found = goodput.spent(goodput.read(tmp_path))
    assert found == record.summary()["seconds_by_cause"]
    assert {k: v for k, v in found.items() if v} == {
        "start_up": 10, "waiting": 5 + 2, "training": 6 + 14, "compiling": 1 + 6,
        "evaluation": 3,
    }  # fmt: skip
    assert record.summary()["wall_seconds"] == 47
    assert record.summary()["goodput"] == 20 / 47


def test_a_line_that_a_kill_cut_is_replaced(tmp_path, clock):
    goodput.Record(tmp_path, 1000.0, over=False).close()
    path = tmp_path / goodput.FILE
    path.write_text(path.read_text() + '{"time": 1000.5, "cau')
    goodput.Record(tmp_path, 1007.0, over=False).close()
    times = [json.loads(line)["time"] for line in path.read_text().splitlines()]
    assert times == [1000, 1007]


@pytest.mark.parametrize(
    "line", ['{"time": "x", "cause": "down"}', '{"time": 1, "cause": "x"}', "[]"]
)
def test_a_damaged_record_is_refused(tiny, tmp_path, line):
    (tmp_path / goodput.FILE).write_text(line + "\n")
    with pytest.raises(ValueError, match=r"goodput\.jsonl is damaged in line 1"):
        preparation.prepare(tiny(), tmp_path, jax.devices()[:2])


def test_a_run_that_has_ended_has_no_more_wall_time(tmp_path, clock):
    for over in (False, True):
        record = goodput.Record(tmp_path, clock[0], over=over)
        clock[0] += 1
        record.mark("evaluation", 9, over=True)
        record.close()
        clock[0] += 1000
        assert record.summary()["wall_seconds"] == 1
    goodput.Record(tmp_path, clock[0], over=False).close()  # a checkpoint was removed
    assert goodput.read(tmp_path)[-1] == {"time": clock[0], "cause": "down"}


def test_the_preparation_counts(tiny, tmp_path):
    assert preparation.build(tiny(), tmp_path, began=12.5).began == 12.5
