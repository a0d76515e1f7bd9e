"""Runs that become longer: bitwise as a run of that length, or with --extend."""

import json

import jax
import pytest

from acco_jax.run import loop, preparation
from acco_jax.run.build import optimizers
from acco_jax.run.observe import goodput
from acco_jax.run.pages import run_table
from acco_jax.run.state import lengths
from tests.run.test_loop import arrays_of, rows_of

LONGER = [  # schedule, its fields, steps done of 6, whether it needs --extend
    ("constant", {}, 6, False),
    ("cosine", {}, 0, False),
    ("cosine", {}, 1, True),
    ("linear", {"warmup_steps": 2}, 2, False),
    ("linear", {"warmup_steps": 2}, 3, True),
    ("wsd", {"decay_fraction": 0.5}, 3, False),
    ("wsd", {"decay_fraction": 0.5}, 4, True),
    ("exponential_decay", {}, 6, False),
]


class Two:
    """A method whose step is two calls, after a first one that fills the pipeline."""

    def steps_done(self, calls):
        return None if (calls - 1) % 2 else (calls - 1) // 2


def asked(tiny, steps, done, extend=False, **fields):
    """The config of a run of 6 steps that is to have others, after `done` steps."""
    config = tiny(steps=6, **{f"optimizer.{k}": v for k, v in fields.items()})
    if config.optimizer.schedule == "exponential_decay":
        options = {"transition_steps": 3, "decay_rate": 0.5}
        config.optimizer.schedule_options.update(options)
    old = json.loads(config.to_json_best_effort()) | {"total_steps": 6}
    given, config.steps = old | {"steps": steps}, steps
    calls = 2 * done + 1
    return lengths.lengthened(config, given, old, Two(), calls, extend=extend)


@pytest.mark.parametrize(("schedule", "fields", "done", "changes"), LONGER)
def test_longer_is_exact_or_needs_a_flag(tiny, schedule, fields, done, changes):
    fields = {"schedule": schedule, **fields}
    if changes:
        with pytest.raises(ValueError, match="give --extend") as error:
            asked(tiny, 9, done, **fields)
        assert "\n" not in str(error.value) and f"first {done} steps of 6" in str(
            error.value
        )
    config = asked(tiny, 9, done, extend=True, **fields)
    assert config.extended == (((done, 6),) if changes else ())
    short, long = tiny(steps=6), tiny(steps=9)
    for c in (short, long):
        c.optimizer = config.optimizer
    rate, old, new = map(optimizers.learning_rate, (config, short, long))
    for step in range(9):
        assert rate(step) == (old if step < done else new)(step)


@pytest.mark.parametrize("steps", [5, 1])
def test_shorter_is_refused(tiny, steps):
    with pytest.raises(ValueError, match=r"has 6 steps.*Give --config\.steps=6"):
        asked(tiny, steps, 0, extend=True)


def test_the_field_that_determines_the_length_is_named():
    assert lengths._asked({"epochs": 3.0, "tokens": 10}, 6) == "--config.epochs=3.0"
    assert lengths._asked({"epochs": None, "tokens": 10}, 6) == "--config.tokens=10"
    assert lengths._asked({}, 6) == "--config.steps=6"


def test_a_step_that_has_begun_keeps_its_rate(tiny):
    assert [lengths._steps_begun(Two(), calls) for calls in range(6)] == [
        0,
        0,
        1,
        1,
        2,
        2,
    ]


@pytest.mark.parametrize("pair", [3, (1,), (1, "2"), (7, 6), (-1, 6)])
def test_invalid_extensions_are_refused(tiny, tmp_path, pair):
    with pytest.raises(ValueError, match="extended has") as error:
        preparation.prepare(tiny(extended=(pair,)), tmp_path, jax.devices()[:2])
    assert "\n" not in str(error.value)


def test_the_time_after_the_end_does_not_count():
    rows = [("down", 0), ("training", 10), ("evaluation", 12), ("down", 1000),
            ("training", 1020)]  # fmt: skip
    record = [{"time": t, "cause": c, "half_round": t} for c, t in rows]
    assert goodput.spent(record)["down"] == 988
    record[2]["over"] = True
    seconds = goodput.spent(record)
    assert seconds["down"] == 0 and sum(seconds.values()) == 32


@pytest.fixture(scope="module")
def go(tiny):
    """go(workdir, steps, stop_after=None, extend=False, **fields): train."""

    def train(workdir, steps, stop_after=None, extend=False, **fields):
        config = tiny(steps=steps, **fields)
        e = preparation.prepare(config, workdir, jax.devices()[:2], extend=extend)
        return e, loop.run(e, stop_after=stop_after)

    return train


@pytest.mark.slow
def test_a_finished_run_goes_on_as_if_it_had_been_longer(go, tmp_path):
    fields = {"optimizer.schedule": "constant", "tokens": None}
    go(tmp_path / "a", 2, **fields)
    assert (tmp_path / "a" / "summary.json").exists()
    with pytest.raises(ValueError, match="steps=2, not 4"):  # as compare prepares
        go(tmp_path / "a", 4, extend=None, **fields)
    longer, summary = go(tmp_path / "a", 4, **fields)
    whole, expected = go(tmp_path / "b", 4, **fields)
    assert arrays_of(longer) == arrays_of(whole)
    assert rows_of(tmp_path / "a") == rows_of(tmp_path / "b")
    assert summary["loss"] == expected["loss"] and summary["steps"] == 4
    with pytest.raises(ValueError, match="can only become longer"):
        go(tmp_path / "a", 2, **fields)


@pytest.mark.slow
def test_an_extended_run_resumes_and_is_repeated_bitwise(go, tmp_path):
    go(tmp_path / "a", 2, stop_after=4)  # in the middle of its second step
    with pytest.raises(ValueError, match="'cosine': give --extend"):
        go(tmp_path / "a", 4)
    go(tmp_path / "a", 4, stop_after=6, extend=True)
    (row,) = run_table.rows_of(tmp_path)
    assert row["state"] == "stopped" and row["steps"] == 4
    resumed, _ = go(tmp_path / "a", 4)
    kept = json.loads((tmp_path / "a" / "config.json").read_text())
    assert kept["extended"] == [[2, 2]] and kept["total_steps"] == kept["steps"] == 4
    (row,) = run_table.rows_of(tmp_path)
    assert row["state"] == "finished" and row["step"] == row["steps"] == 4
    assert row["parameters"] == resumed.model.parameters()
    again, _ = go(tmp_path / "b", 4, extended=((2, 2),))
    assert arrays_of(again) == arrays_of(resumed)
    assert rows_of(tmp_path / "a") == rows_of(tmp_path / "b")
    with pytest.raises(ValueError, match="leave it out"):
        go(tmp_path / "a", 4, extended=((1, 2),))
