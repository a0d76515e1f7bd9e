"""A loss that is finite and far above what it was; and what is kept of better days."""

import json
import math
import re

import jax
import jax.numpy as jnp
import pytest

from acco_jax.run import continuing, loop
from acco_jax.run.observe import metrics, spikes
from acco_jax.run.state.checkpoints import Checkpoints

CHANGES = {"checkpoint_every": 1, "spike.threshold": 1.0, "method": "zero1",
           "spike.calls": 1, "spike.tokens": 1}  # fmt: skip


def spoil(run):
    """Give a run other parameters, which a step takes with a new state only."""
    with jax.transfer_guard("allow"):
        run.params = jax.tree.map(lambda x: x * 40, run.params)
        run.state = jax.tree.map(jnp.copy, run.state)


@pytest.fixture
def spoiled(monkeypatch):
    """The parameters of one half-round are not those of the run: its loss is 8 more."""
    half_round, seen = loop._Run.half_round, []

    def run(self):
        seen.append((self.done, self._batches.get_state()["row"]))
        if self.done == 3 and [done for done, _ in seen].count(3) == 1:
            spoil(self)
        half_round(self)

    monkeypatch.setattr(loop._Run, "half_round", run)
    return seen


def judged(losses, *, calls=8, tokens=8192, each=32, threshold=3.0, state=None):
    """(half-round of the spike or None, what was said, what a checkpoint keeps)."""
    found = spikes.Spikes(threshold, calls, tokens, state)
    for number, loss in enumerate(losses, 1):
        try:
            found.see(spikes.Call(number, each, loss, float(each)))
        except spikes.LossSpike as spike:
            return number, str(spike), found.state()
    return None, "", found.state()


NORMAL = [0.6 + 3.0 * 0.99**k for k in range(1000)]


@pytest.mark.parametrize(
    ("series", "options"),
    [
        ([*NORMAL, 4.19, *[0.6] * 500], {}),  # an odd row of 32 tokens
        ([*NORMAL, 4000.0, *[0.6] * 500], {}),
        ([*NORMAL, 4.19, *[0.6] * 50], {"each": 10**6}),  # a large batch
        ([*NORMAL, *[4.19, 0.6, 0.6] * 200], {}),  # every third is odd
        ([0.6] * 20 + [9.0] * 4, {"each": 10**6}),  # not most of the calls
        ([0.6] * 20 + [9.0] * 5, {"tokens": 320}),  # a window of ten
        ([9.0, *[0.6] * 20, 3.5, *[3.5] * 20], {"each": 10**6}),  # 2.9 above
        ([0.6] * 20 + [99.0] * 20, {"threshold": math.inf}),
        ([0.6] * 20 + [math.nan] * 20, {"each": 10**6}),  # another's matter
        ([], {}),
    ],
)
def test_no_spike(series, options):
    assert judged(series, **options)[0] is None


@pytest.mark.parametrize(
    ("series", "options", "at"),
    [
        ([0.6] * 20 + [9.0] * 9, {"each": 10**6}, 25),  # 5 of 8
        ([0.6] * 20 + [900.0] * 9, {"each": 10**6}, 25),
        ([*NORMAL, *[4.19] * 300], {"threshold": 2.0}, 1143),  # 256 calls, 32 each
        ([0.6] * 3 + [9.0], {"calls": 1, "tokens": 1}, 4),
        ([0.6] * 20 + [9.0] * 9, {"tokens": 64}, 25),
    ],
)
def test_a_spike(series, options, at):
    assert judged(series, **options)[0] == at


def test_it_says_what_it_saw():
    _, text, state = judged([0.5] * 20 + [9.0] * 9, each=2048)
    assert re.search(
        r"mean over 16,384 tokens, half-rounds 18 to 25, is 5\.812, 5\.312 above the "
        r"lowest such mean \(0\.500 up to half-round 8\), and 5 of these 8 losses are "
        r"as high: lower optimizer\.learning_rate and use a new workdir, or allow it ",
        text,
    )
    assert state == {"lowest": [0.5, 8]}


def test_what_counted_for_nobody_is_left_out():
    found = spikes.Spikes(3.0, 1, 1)
    found.see(spikes.Call(1, 32, 0.6, 32.0))
    found.see(spikes.Call(2, 32, 99.0, 0.0))
    assert found.state() == {"lowest": [0.6, 1]}


def test_a_continued_run_knows_the_lowest_loss():
    """Its window is empty: what a rollback left behind is not judged again."""
    _, _, state = judged([0.5] * 20, each=2048)
    state = json.loads(json.dumps(state))
    assert judged([9.0] * 7, each=2048, state=state)[0] is None
    assert judged([9.0] * 8, each=2048, state=state)[0] == 8
    assert judged([9.0] * 99, each=2048, state={"lowest": [None, 0]})[0] is None


def test_calls_are_read_up_to_where_the_metrics_are(monkeypatch):
    found = spikes.Spikes(3.0, 2, 1)
    for number, loss in enumerate([0.5, 0.5, 9.0, 9.0], 1):
        made = {"loss": jnp.float32(loss), "weight": jnp.float32(4)}
        found.add(number, 4, made)
    found.read(3)
    with pytest.raises(spikes.LossSpike, match="half-rounds 3 to 4"):
        found.read(4)


def losses(workdir):
    return [r["loss"] for r in metrics.read(workdir) if r["kind"] == "train"]


@pytest.mark.slow
def test_a_spike_stops_the_run_and_spares_the_checkpoints(
    train_quickly, tmp_path, spoiled
):
    with pytest.raises(
        spikes.LossSpike, match=r"above the lowest such mean .*: lower"
    ) as error:
        train_quickly(tmp_path, **CHANGES)
    assert "half-rounds 4 to 4," in str(error.value) and "\n" not in str(error.value)
    assert Checkpoints(tmp_path / "checkpoints", 2).latest() == 3
    assert len(losses(tmp_path)) == 3
    _, summary = train_quickly(tmp_path, **CHANGES)  # this time nothing spoils it
    assert summary is not None and len(losses(tmp_path)) == 6


@pytest.mark.slow
def test_off_lets_it_pass(train_quickly, tmp_path, spoiled):
    _, summary = train_quickly(tmp_path, **CHANGES | {"spike.policy": "off"})
    found = losses(tmp_path)
    assert len(found) == 6 and found[3] > min(found) + 1
    assert summary is not None


def test_rollback_goes_on_from_the_checkpoint_with_later_rows(
    train_quickly, tmp_path, spoiled, caplog, monkeypatch
):
    held, restore = [], loop._Run._restore

    def restored(self):
        held.append(getattr(self, "state", None) is not None)
        return restore(self)

    monkeypatch.setattr(loop._Run, "_restore", restored)
    changes = CHANGES | {"spike.policy": "rollback"}
    experiment, summary = train_quickly(tmp_path, **changes)
    assert held == [False, False]  # the devices hold one state at a time
    assert summary is not None and max(losses(tmp_path)) < losses(tmp_path)[0] + 1
    numbers = [r["half_round"] for r in metrics.read(tmp_path) if r["kind"] == "train"]
    assert numbers == [1, 2, 3, 4, 5, 6]
    assert "rolled back to half-round 3" in caplog.text
    # 2 workers, 4 microbatches of 2 rows of 32 tokens in each of 6 steps
    assert summary["tokens"] - summary["lost_tokens"] == 6 * 512 < summary["tokens"]
    rows = [row for _, row in spoiled]
    assert rows == sorted(set(rows))  # no row was read twice
    assert [done for done, _ in spoiled].count(3) == 2
    with pytest.raises(ValueError, match="rolled back after a spike of its loss"):
        continuing.repeating(experiment, tmp_path)


@pytest.mark.slow
def test_rollbacks_come_to_an_end(train_quickly, tmp_path, monkeypatch):
    half_round = loop._Run.half_round

    def run(self):
        if self.done == 3:
            spoil(self)
        half_round(self)

    monkeypatch.setattr(loop._Run, "half_round", run)
    with pytest.raises(spikes.LossSpike):
        train_quickly(tmp_path, **CHANGES | {"spike.policy": "rollback"})
    assert Checkpoints(tmp_path / "checkpoints", 2).latest() == 3


def test_a_checkpoint_is_judged_by_its_own_evaluation_alone(train_quickly, tmp_path):
    """One between two evaluations is of other parameters than both."""
    e, _ = train_quickly(tmp_path, stop_after=5, method="zero1", checkpoint_every=3)
    rows = metrics.read(tmp_path)
    (at_4,) = (
        r["loss"] for r in rows if (r["kind"], r["half_round"]) == ("validation", 4)
    )
    assert e.checkpoints.host(3)["held_out_loss"] is None
    assert e.checkpoints.host(5)["held_out_loss"] is None
    again, _ = train_quickly(
        tmp_path / "b", stop_after=4, method="zero1", checkpoint_every=2
    )
    assert again.checkpoints.host(4)["held_out_loss"] == at_4


def test_the_best_checkpoint_is_kept_beside_the_newest(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    tree = {"x": jnp.ones(3)}
    for step, loss in ((1, 5.0), (2, 3.0), (3, 4.0), (4, None), (5, 4.5)):
        checkpoints.save(step, tree, {"held_out_loss": loss})
    checkpoints.wait()
    names = {p.name for p in (tmp_path / "checkpoints").iterdir()}
    kept = {"2", "4", "5"}
    assert names == kept | {f"{name}.checksums" for name in kept}
    again = Checkpoints(tmp_path / "checkpoints", keep=2)  # reads what was written
    again.save(6, tree, {"held_out_loss": 9.0})
    again.wait()
    assert {p.name for p in (tmp_path / "checkpoints").iterdir() if p.is_dir()} == {
        "2", "5", "6"
    }  # fmt: skip
    again.save(7, tree, {"held_out_loss": 1.0})
    again.wait()
    assert {p.name for p in (tmp_path / "checkpoints").iterdir() if p.is_dir()} == {
        "6", "7"
    }  # fmt: skip
