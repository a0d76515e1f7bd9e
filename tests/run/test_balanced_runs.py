"""Runs whose counts follow the workers' speed, and runs that repeat them."""

import json

import jax
import pytest

from acco_jax.run import continuing, loop, preparation
from acco_jax.run.observe import metrics
from acco_jax.run.state.counts import FILE
from acco_jax.step import balance
from tests.run.test_loop import arrays_of

BALANCED = {"microbatches": "balanced", "most_microbatches": 4, "steps": 4}
TIMES = [[1e-6] * 4, [1e-6, 4e-6, 1e-6, 1e-6], [1e-6, 4e-6, 1e-6, 1e-6], [1e-6] * 4]


@pytest.fixture
def measured(monkeypatch):
    """measured(times): what probes find, one after the other, of so many workers."""

    def use(times):
        left, last = iter(times), []

        def seconds(probe, params, inputs, duration):
            last[:] = next(left, last)
            return last[: len(probe._mine)]

        def every_time(balancer, *probe):
            take(balancer, *probe)
            balancer.wait = 1

        monkeypatch.setattr(balance.Balancer, "take", every_time)
        monkeypatch.setattr("acco_jax.step.probe.Probe.seconds", seconds)
        monkeypatch.setattr("acco_jax.step.probe.Probe.prepare", lambda *_: None)

    take = balance.Balancer.take

    return use


@pytest.fixture
def run(tiny):
    """run(workdir, devices=4, stop_after, replay, **changes): a balanced run."""

    def go(workdir, devices=4, stop_after=None, replay=None, **changes):
        found = preparation.prepare(
            tiny(**BALANCED | changes), workdir, jax.devices()[:devices]
        )
        again = None if replay is None else continuing.repeating(found, replay)
        return found, loop.run(found, stop_after=stop_after, replay=again)

    return go


def counts_of(workdir):
    return [json.loads(line) for line in (workdir / FILE).read_text().splitlines()]


@pytest.mark.slow
def test_a_slow_worker_is_followed_named_and_repeated(run, measured, tmp_path, caplog):
    measured(TIMES)
    first, summary = run(tmp_path / "a")
    found = counts_of(tmp_path / "a")
    assert found[0] == [2] * 4 and [3, 0, 3, 2] in found and found[-1] == [2] * 4
    assert {sum(row) for row in found} == {8}
    assert "worker 1 is slow: a microbatch takes it 4.0 times" in caplog.text
    rows = [r for r in metrics.read(tmp_path / "a") if r["kind"] == "train"]
    assert [1] in [r["stragglers"] for r in rows] and rows[-1]["stragglers"] == []
    assert all(0 < r["probes"] < 1 for r in rows if "stragglers" in r)
    size = first.config.microbatch_size * first.config.length
    assert [r["tokens"] for r in rows] == [8 * size * r["half_round"] for r in rows]
    measured([[1e-6] * 4])  # of which nothing is to be seen
    again, repeated = run(tmp_path / "b", replay=tmp_path / "a")
    assert counts_of(tmp_path / "b") == found
    assert repeated["loss"] == summary["loss"]
    assert arrays_of(again) == arrays_of(first)
    # a record that ends early is repeated so far, with a checkpoint
    log, text = tmp_path / "a" / FILE, (tmp_path / "a" / FILE).read_text()
    log.write_text("".join(text.splitlines(True)[:3]) + "[2, 2")  # killed in the fourth
    part, nothing = run(tmp_path / "c", replay=tmp_path / "a")
    assert nothing is None and part.checkpoints.latest() == 3
    assert run(tmp_path / "c", replay=tmp_path / "a")[1] is None
    log.write_text(text)
    part, repeated = run(tmp_path / "c", replay=tmp_path / "a")
    assert arrays_of(part) == arrays_of(first)


@pytest.mark.slow
def test_halves_go_on_with_other_workers_and_skip_no_row(run, tmp_path):
    halves = {"microbatches": "fixed", "first_half": 1}
    first, _ = run(tmp_path / "a", stop_after=4, **halves)
    two, _ = run(tmp_path / "a", devices=2, **halves)
    assert (first.capacity, two.capacity) == (3, 6) and two.tokens == first.tokens
    assert counts_of(tmp_path / "a") == [
        *([3] * 4, [1] * 4) * 2, *([6] * 2, [2] * 2) * 2, [6] * 2]  # fmt: skip
    rows = [r for r in metrics.read(tmp_path / "a") if r["kind"] == "train"]
    size = first.config.microbatch_size * first.config.length
    done = [0, 12, 16, 28, 32, 44, 48, 60, 64, 76]
    assert [r["tokens"] for r in rows] == [done[r["half_round"]] * size for r in rows]
    with pytest.raises(ValueError, match="first_half is 4 of microbatches_per_step=4"):
        run(tmp_path / "c", **halves | {"first_half": 4})


@pytest.mark.slow
def test_the_batch_stays_on_fewer_workers_and_a_log_is_repeated(
    run, measured, tmp_path
):
    """Of 4 workers, then of 1, which has room for what all four computed."""
    measured(TIMES[1:2] * 2)
    run(tmp_path / "a", stop_after=4)
    one, summary = run(tmp_path / "a", devices=1)
    assert one.capacity == 8 and one.tokens == 8 * 2 * 32
    assert counts_of(tmp_path / "a")[-1] == [8]
    run(tmp_path / "b", replay=tmp_path / "a")
    assert len(counts_of(tmp_path / "b")) == 4
    again, repeated = run(tmp_path / "b", devices=1, replay=tmp_path / "a")
    assert repeated["loss"] == summary["loss"]
    assert arrays_of(again) == arrays_of(one)
    log = tmp_path / "a" / FILE
    with pytest.raises(ValueError, match="one count from 0 to 4, the most that a"):
        run(tmp_path / "c", microbatches=f"replay:{log}", steps=3, form="fused")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"balance.floor": -1}, "balance.floor is -1: give 0 for none"),
        ({"balance.floor": 3}, "balance.floor is 3, but the 4 workers compute 8"),
        ({"form": "split"}, "needs form='fused'"),
        ({"most_microbatches": 1}, "most_microbatches is 1, less than the 2"),
        ({"tokens": 500, "balance.grows": True}, "tokens is 500, but .* give steps"),
    ],
)
def test_what_cannot_be_balanced_says_so(run, changes, said, tmp_path):
    with pytest.raises(ValueError, match=said) as error:
        run(tmp_path, **changes)
    assert "\n" not in str(error.value)
