"""The method that is chosen by timing, and what a run keeps of the choice."""

import json

import jax
import numpy as np
import pytest

from acco_jax.methods import gaps
from acco_jax.run import loop, preparation, trials


@pytest.fixture
def choose(tiny, monkeypatch, tmp_path):
    """choose(seconds, **changes): the config, and what was timed and said."""

    def go(seconds, computing=1.0, devices=2, workdir=tmp_path, **changes):
        said, timed = [], []

        def timing(experiment, halves, compiled=False):
            assert halves == [None]
            options = experiment.config.method_options
            timed.append((experiment.config.method, len(options)))
            times = np.atleast_1d(seconds[timed[-1]])  # the first time, and again
            number = min(timed.count(timed[-1]), len(times)) - 1
            assert compiled == (timed.count(timed[-1]) > 1)
            return times[number : number + 1, None]

        monkeypatch.setattr(trials, "_timed", timing)
        monkeypatch.setattr(
            trials.measures, "gradient_seconds", lambda *_, **__: computing
        )
        for level in ("info", "warning"):
            monkeypatch.setattr(
                trials.logging, level, lambda text, *words: said.append(text % words)
            )
        config = trials.with_method(
            tiny(method="auto", first_half="auto", **changes),
            workdir,
            jax.devices()[:devices],
        )
        return config, timed, said

    return go


@pytest.mark.slow
def test_the_fastest_within_the_tolerance_is_taken(choose):
    zero1, acco, gathers, both = ("zero1", 0), ("acco", 0), ("acco", 1), ("acco", 2)
    config, timed, _ = choose({zero1: 2.0, acco: 1.5, gathers: 1.2, both: 1.1})
    begun, more = trials.TURNS, trials.MOST_TURNS - trials.TURNS
    once = [zero1, acco, gathers, both]  # then those that are near, then the close ones
    assert timed == [*once, *[acco, gathers, both] * begun, *[gathers, both] * more]
    assert config.method == "acco"
    assert dict(config.method_options) == {"gather_bits": 8, "reduce_bits": 8}
    config, timed, said = choose({zero1: 2.0, acco: 1.02})  # nothing is left to hide
    assert timed == [zero1, acco] and config.method == "acco"
    assert not config.method_options
    assert said[-1] == "method auto: acco"
    config, *_ = choose({zero1: 1.01})
    assert config.method == "zero1"
    # other load the first time
    config, *_ = choose({zero1: 2.0, acco: 1.8, gathers: 1.4, both: (1.9, 1.1)})
    assert len(config.method_options) == 2
    # other load in one turn, on both
    times = {gathers: (*[1.25] * 3, 2.5, 1.25), both: (*[1.18] * 3, 3.0, 1.18)}
    config, *_ = choose({zero1: 2.0, acco: 1.9} | times)
    assert len(config.method_options) == 2
    # two that are close, of which the first turns say the wrong one
    n = trials.TURNS
    slow, fast = (1.3, *[1.06] * n, 1.15), (1.3, *[1.13] * n, 1.09)
    times = {zero1: 2.0, acco: 1.9, gathers: slow, both: fast}
    config, timed, _ = choose(times)
    assert len(config.method_options) == 2
    assert timed[-2:] == [gathers, both]
    # one that is clear after the first turns
    config, timed, said = choose({zero1: 1.4, acco: 1.3, gathers: 1.3, both: 1.1})
    assert len(timed) == 4 * (1 + trials.TURNS) and len(config.method_options) == 2
    # as fast: what changes the optimizer's steps less
    config, *_ = choose({zero1: 1.23, acco: 1.2, gathers: 1.21, both: 1.2})
    assert config.method == "zero1"
    config, *_ = choose({zero1: 1.24, acco: 1.2, gathers: 1.21, both: 1.2})
    assert config.method == "acco" and not config.method_options


def test_an_unknown_loss_and_one_worker_leave_zero1(choose):
    config, timed, said = choose({}, **{"optimizer.name": "adan"})
    assert config.method == "zero1" and timed == []
    assert "method auto, with adan: not acco: not measured" in said
    assert said[-1] == "method auto: zero1, the only one"
    for rows, per_step in ((1, 2), (2, 1)):  # which are too few
        shape = {"microbatch_size": rows, "microbatches_per_step": per_step}
        config, timed, said = choose({}, **shape)
        assert config.method == "zero1" and timed == []
        assert "not acco: its losses are of a first half smaller" in said[0]
    for odd in (1, 3):
        shape = {"microbatch_size": 1, "microbatches_per_step": odd}
        config, timed, said = choose({}, **shape)
        assert config.method == "zero1" and timed == []
        assert said[0].endswith(f"not acco: microbatches_per_step={odd} is odd")
    config, timed, said = choose({}, devices=1)
    assert config.method == "zero1" and said[-1] == "method auto: zero1, one worker"


@pytest.mark.parametrize(("rows", "per_step"), [(4, 2), (8, 1), (4, 3), (3, 4)])
def test_few_microbatches_are_divided_for_acco_alone(choose, rows, per_step):
    """A step keeps its rows; zero1 computes them as the config says."""
    shape = {"microbatch_size": rows, "microbatches_per_step": per_step}
    config, timed, _ = choose({("zero1", 0): 2.0, ("acco", 0): 1.0}, **shape)
    assert [x for x, _ in timed] == ["zero1", "acco"]
    n, size = config.microbatches_per_step, config.microbatch_size
    assert (config.method, n * size) == ("acco", rows * per_step)
    assert n >= 4 and not n % 2 and config.first_half == -(-n // 4)
    assert (size == rows) == (per_step == 4)
    config, *_ = choose({("zero1", 0): 1.01}, **shape)
    assert (config.microbatches_per_step, config.microbatch_size) == (per_step, rows)


@pytest.mark.slow
def test_a_run_keeps_its_divided_microbatches(choose, tmp_path):
    shape = {"microbatch_size": 2, "microbatches_per_step": 2}
    config, *_ = choose({("zero1", 0): 2.0, ("acco", 0): 1.0}, **shape)
    e = preparation.prepare(config, tmp_path, jax.devices()[:2])
    loop.run(preparation.with_first_half(e, 0), stop_after=3)
    again, timed, _ = choose({}, **shape)
    assert (again.microbatches_per_step, again.microbatch_size) == (4, 1)
    assert timed == []
    loop.run(preparation.prepare(again, tmp_path, jax.devices()[:2]), stop_after=5)
    other, *_ = choose({}, **shape | {"microbatches_per_step": 4})
    with pytest.raises(ValueError, match=r"microbatch_size=1, not 2"):
        preparation.prepare(other, tmp_path, jax.devices()[:2])


def test_a_tolerance_decides_by_the_measured_gap():
    def names(*words):
        return [c.name for c in gaps.allowed(*words)[0]]

    assert names("adamw")[:2] == ["zero1", "acco"]
    assert names("nadamw") == ["zero1"]
    assert names("lion") == ["zero1"]
    assert "acco" in names("nadamw", 3.0)
    assert names("adamw", -1.0) == ["zero1"]


def test_exposed_communication_is_said(choose):
    times = {("zero1", 0): 9.0, ("acco", 0): 6.0, ("acco", 1): 5.0, ("acco", 2): 4.0}
    *_, said = choose(times)
    assert said[-1].startswith("75 % of a step is not its gradients: twice the ")
    assert "Where zero1's takes 5 times its computation" in said[-1]  # 8 times here


@pytest.mark.slow
def test_a_run_keeps_its_method(choose, tiny, tmp_path):
    config, *_ = choose({("zero1", 0): 2.0, ("acco", 0): 1.0})
    e = preparation.prepare(config, tmp_path, jax.devices()[:2])
    loop.run(preparation.with_first_half(e, 0), stop_after=3)
    assert json.loads((tmp_path / "config.json").read_text())["method"] == "acco"
    again, timed, _ = choose({("zero1", 0): 1.0})
    assert (again.method, again.first_half, timed) == ("acco", 1, [])
    loop.run(preparation.prepare(again, tmp_path, jax.devices()[:2]), stop_after=5)
    (tmp_path / "config.json").write_text('{"method": 3}')
    with pytest.raises(ValueError, match=r"config\.json is damaged"):
        choose({})


def test_groups_of_a_kept_method_are_of_the_hosts_that_are_there(choose, tmp_path):
    options = {"gather_bits": 8, "reduce_bits": 8}
    old = {"method": "acco", "method_options": options, "domains": 4, "first_half": 1}
    (tmp_path / "config.json").write_text(json.dumps(old))
    config, *_ = choose({})
    assert config.method_options.to_dict() == options and config.domains is None


def test_options_are_of_a_method(tiny):
    with pytest.raises(ValueError, match="name the method that has them"):
        preparation.check(tiny(method="auto", **{"method_options.gather_bits": 8}))
