"""Runs that choose acco's first half by timing, and what they keep of the choice."""

import jax
import numpy as np
import pytest

from acco_jax.run import continuing, loop, preparation, trials
from acco_jax.run.state import worlds
from acco_jax.run.state.counts import FILE
from tests.run.test_balanced_runs import counts_of
from tests.run.test_loop import arrays_of

EQUAL, QUARTER = [2.0, 1.0], [1.0, 1.0]  # seconds: a quarter first takes longer, or not


@pytest.fixture
def run(tiny, monkeypatch):
    """run(workdir, seconds, devices=2, **changes): a run whose steps take these."""

    def go(workdir, seconds, devices=2, stop_after=None, replay=None, **changes):
        def timed(step, halves, *arrays, calls):
            assert len(halves) == 2 and calls == 2
            asked.append(devices)
            return np.atleast_2d(seconds)

        asked = []
        monkeypatch.setattr(trials, "step_seconds", timed)
        auto = {"first_half": "auto", "steps": 3, "form": "split"}
        config = tiny(**auto | changes)
        found = preparation.build(
            config, workdir, jax.devices()[:devices], replay=replay
        )
        again = None if replay is None else continuing.repeating(found, replay)
        preparation.record(found)
        loop.run(found, stop_after=stop_after, replay=again)
        return found, asked

    return go


def recorded(workdir):
    return [(at, world.first_half) for at, world in worlds.recorded(workdir)]


def test_the_choice_is_said_recorded_and_kept(run, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(trials.logging, "info", lambda *words: said.append(words))
    busy = [EQUAL, EQUAL, [9.0, 9.5]]  # the last beside other load
    _, asked = run(tmp_path, busy, stop_after=3)
    assert asked == [2] and recorded(tmp_path) == [(0, 2)]
    (line,) = (words for words in said if "of %d microbatches" in words[0])
    assert line[0] % line[1:] == (
        "acco: first half 2 of 4 microbatches: 1 s a step, a quarter 2 s"
    )
    _, asked = run(tmp_path, QUARTER)  # goes on as it began
    assert asked == [] and recorded(tmp_path) == [(0, 2)]
    assert counts_of(tmp_path) == [[2, 2]] * 7


@pytest.mark.slow
def test_nothing_is_timed_where_no_first_half_takes_longer(run, tmp_path):
    """One program on a CPU computes and communicates in turns."""
    _, asked = run(tmp_path, EQUAL, form="auto")
    assert asked == [] and recorded(tmp_path) == [(0, 1)]


@pytest.mark.slow
def test_other_workers_choose_anew_and_the_run_is_repeated(run, tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    run(a, EQUAL, stop_after=3)
    last, asked = run(a, QUARTER, devices=1)
    assert asked == []  # one worker has nothing to wait for
    assert recorded(a) == [(0, 2), (3, 1)]
    assert counts_of(a) == [[2, 2]] * 3 + [[2], [6]] * 2
    run(b, QUARTER, replay=a)
    again, asked = run(b, EQUAL, devices=1, replay=a)
    assert asked == [] and recorded(b) == recorded(a)
    assert (b / FILE).read_text() == (a / FILE).read_text()
    assert arrays_of(again) == arrays_of(last)


def test_a_first_half_is_of_acco_and_smaller_than_a_step(tiny, tmp_path):
    devices = jax.devices()[:2]
    with pytest.raises(ValueError, match="first_half is 4 of microbatches_per_step=4"):
        preparation.prepare(tiny(first_half=4), tmp_path, devices)
    with pytest.raises(ValueError, match="first_half is 'half': give a value of type"):
        preparation.prepare(tiny(first_half="half"), tmp_path, devices)
    zero1 = preparation.prepare(tiny(first_half=1, method="zero1"), tmp_path, devices)
    assert zero1.varying is None and trials.settled(zero1) is zero1
