"""A loss that is finite and far above what it was; and what is kept of better days."""

import jax
import jax.numpy as jnp
import pytest

from acco_jax.runner import loop, metrics
from acco_jax.runner.checkpoints import Checkpoints

CHANGES = {"checkpoint_every": 1, "spike.threshold": 1.0, "method": "zero1"}


@pytest.fixture
def spoiled(monkeypatch):
    """The parameters of one half-round are not those of the run: its loss is 8 more."""
    half_round, seen = loop._Run.half_round, []

    def run(self):
        seen.append((self.done, self._batches.get_state()["row"]))
        if self.done == 3 and [done for done, _ in seen].count(3) == 1:
            with jax.transfer_guard("allow"):
                self.params = jax.tree.map(lambda x: x * 40, self.params)
        half_round(self)

    monkeypatch.setattr(loop._Run, "half_round", run)
    return seen


def losses(workdir):
    return [r["loss"] for r in metrics.read(workdir) if r["kind"] == "train"]


def test_a_spike_stops_the_run_and_spares_the_checkpoints(train, tmp_path, spoiled):
    with pytest.raises(metrics.LossSpike, match="above the lowest one: lower") as error:
        train(tmp_path, **CHANGES)
    assert "half-round 4," in str(error.value) and "\n" not in str(error.value)
    assert Checkpoints(tmp_path / "checkpoints", 2).latest() == 3
    assert len(losses(tmp_path)) == 3
    _, summary = train(tmp_path, **CHANGES)  # this time nothing spoils it
    assert summary is not None and len(losses(tmp_path)) == 6


def test_off_lets_it_pass(train, tmp_path, spoiled):
    _, summary = train(tmp_path, **CHANGES | {"spike.policy": "off"})
    found = losses(tmp_path)
    assert len(found) == 6 and found[3] > min(found) + 1
    assert summary is not None


def test_rollback_goes_on_from_the_checkpoint_with_later_rows(
    train, tmp_path, spoiled, caplog
):
    _, summary = train(tmp_path, **CHANGES | {"spike.policy": "rollback"})
    assert summary is not None and max(losses(tmp_path)) < losses(tmp_path)[0] + 1
    numbers = [r["half_round"] for r in metrics.read(tmp_path) if r["kind"] == "train"]
    assert numbers == [1, 2, 3, 4, 5, 6]
    assert "rolled back to half-round 3" in caplog.text
    rows = [row for _, row in spoiled]
    assert rows == sorted(set(rows))  # no row was read twice
    assert [done for done, _ in spoiled].count(3) == 2


def test_rollbacks_come_to_an_end(train, tmp_path, monkeypatch):
    half_round = loop._Run.half_round

    def run(self):
        if self.done == 3:
            with jax.transfer_guard("allow"):
                self.params = jax.tree.map(lambda x: x * 40, self.params)
        half_round(self)

    monkeypatch.setattr(loop._Run, "half_round", run)
    with pytest.raises(metrics.LossSpike):
        train(tmp_path, **CHANGES | {"spike.policy": "rollback"})
    assert Checkpoints(tmp_path / "checkpoints", 2).latest() == 3


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
