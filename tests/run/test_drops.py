"""A run goes on without the workers whose numbers are not finite, and says so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from acco_jax.models.model import Model
from acco_jax.run import loop, prepared
from acco_jax.run.build import meshes, optimizers
from acco_jax.run.observe import goodput, metrics
from acco_jax.run.state.checkpoints import Checkpoints
from acco_jax.run.state.drops import Drops
from tests.run.own_models import linen_model
from tests.run.test_loop import arrays_of

MINE = {"model.factory": "tests.run.test_drops:touchy", "log_every": 1}
MARK = 5  # a token that no text of the fixture has


def touchy(vocab_size, length):
    """A model whose loss is NaN where a row begins with the mark."""
    sound = linen_model(vocab_size, length)

    def loss(params, batch, rng):
        nats, targets, aux = sound.loss(params, batch, rng)
        bad = (batch["tokens"][:, 0] == MARK).any()
        return jnp.where(bad, jnp.nan, nats), targets, aux

    return Model(init=sound.init, loss=loss, dtype="float32")


@pytest.fixture
def marked(monkeypatch):
    """marked(workers by half-round): marks the first row of each in its batch."""
    original = loop.to_devices

    def make(by_half_round):
        runs = []
        half_round = loop._Run.half_round

        def run(self):
            runs.append(self.done + 1)
            half_round(self)
            runs.clear()

        def to_devices(batch, mesh):
            if runs and isinstance(batch, dict) and (bad := by_half_round(runs[0])):
                tokens = batch["tokens"].copy()
                share = len(tokens) // mesh.size
                for worker in bad:
                    tokens[worker * share] = MARK
                batch = batch | {"tokens": tokens}
            return original(batch, mesh)

        monkeypatch.setattr(loop._Run, "half_round", run)
        monkeypatch.setattr(loop, "to_devices", to_devices)

    return make


def rows(workdir):
    return [r for r in metrics.read(workdir) if r["kind"] == "train"]


@pytest.mark.fast(slow=("twice",))
@pytest.mark.parametrize("stops", [(6,), (4, 9)], ids=["once", "twice"])
def test_it_goes_on_and_says_so_and_resumes_to_the_bit(
    train, tmp_path, marked, caplog, stops
):
    bad = {3: [1], 4: [1], 6: [0, 1], 9: [0]}
    marked(lambda half_round: bad.get(half_round, []))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    experiment, summary = train(whole, **MINE)
    assert summary is not None
    text = caplog.text
    order = prepared.batches(experiment)._order
    for worker, half_round, number in (
        (1, 3, 20), (1, 4, 28), (0, 6, 40), (1, 6, 44), (0, 9, 64),
    ):  # of 4 rows a half-round and worker  # fmt: skip
        (row,) = order.rows(0, np.array([number]))
        line = (
            f"worker {worker} was dropped in half-round {half_round}, which begins for "
            f"it at row {row} of the data:"
        )
        assert text.count(line) == 1
    assert text.count("was dropped") == 5
    found = {r["half_round"]: r["dropped"] for r in rows(whole)}
    assert found == {3: 1, 5: 1, 7: 2, 9: 1, 11: 0, 13: 0}
    for stop in stops:
        train(parts, stop_after=stop, **MINE)
    again, repeated = train(parts, **MINE)
    assert arrays_of(again) == arrays_of(experiment)
    assert repeated["loss"] == summary["loss"]
    assert {r["half_round"]: r["dropped"] for r in rows(parts)} == found


@pytest.mark.parametrize("dropping", [True, False])
def test_a_run_that_drops_no_longer_forgets_nobodys_half_rounds(dropping):
    """They would be the newest for ever, and no checkpoint would be written."""
    mesh = jax.make_mesh((2,), ("data",))
    state = {"in_a_row": [0, 0], "nobody": 1, "since": 0}
    assert Drops(dropping, mesh, 3, lambda *_: 0, state).nobody == int(dropping)


def test_a_half_round_of_nobody_has_no_row_and_no_checkpoint(train, tmp_path, marked):
    marked(lambda half_round: [0, 1] if half_round == 3 else [])
    changes = MINE | {"method": "zero1", "checkpoint_every": 1, "keep_checkpoints": 9}
    _, summary = train(tmp_path, **changes)
    assert summary is not None
    assert [r["half_round"] for r in rows(tmp_path)] == [1, 2, 4, 5, 6]
    assert [r["dropped"] for r in rows(tmp_path)] == [0, 0, 2, 0, 0]
    assert not (tmp_path / "checkpoints" / "3").exists()
    assert Checkpoints(tmp_path / "checkpoints", 9).latest() == 6


def test_a_run_that_stops_after_nobodys_half_rounds_says_what_it_has_saved(
    train, tmp_path, marked, caplog
):
    marked(lambda half_round: [0, 1] if half_round > 3 else [])
    changes = MINE | {"method": "zero1", "checkpoint_every": 2}
    stopped, nothing = train(tmp_path, stop_after=5, **changes)
    assert nothing is None and stopped.checkpoints.latest() == 2
    line = "stopped after half-round 5 of 6, of which nothing was finite and saved: "
    assert line + "the same command continues from before it" in caplog.text
    assert not goodput.read(tmp_path)[-1].get("stopped")


def test_a_run_whose_end_is_nobodys_does_not_finish(train, tmp_path, marked):
    marked(lambda half_round: [0, 1] if half_round > 3 else [])
    changes = MINE | {"method": "zero1", "checkpoint_every": 2}
    with pytest.raises(FloatingPointError, match="before 6 was finite, so the end is"):
        train(tmp_path, **changes)
    assert not (tmp_path / "summary.json").exists()
    assert Checkpoints(tmp_path / "checkpoints", 9).latest() == 2


def test_too_many_in_a_row_stop_the_run(train, tmp_path, marked):
    marked(lambda half_round: [1] if half_round > 4 else [0] if half_round % 2 else [])
    changes = MINE | {"most_dropped_in_a_row": 3, "eval_every": 1}
    message = "^worker 1 was dropped in 3 half-rounds in a row, the last of them half-"
    with pytest.raises(FloatingPointError, match=message + "round 7,") as error:
        train(tmp_path, **changes)
    assert "\n" not in str(error.value)
    with pytest.raises(FloatingPointError, match="worker 1 was dropped in 5 half-"):
        train(tmp_path, **changes | {"most_dropped_in_a_row": 5})  # counts on


@pytest.mark.parametrize(
    ("method", "asked", "drops"),
    [("acco", None, True), ("acco", False, False), ("fused_zero1", None, False),
     ("fused_zero1", True, True)],
)  # fmt: skip
def test_whether_it_is_asked_for(tiny, method, asked, drops):
    config = tiny(method=method)
    config.drop_nonfinite = asked
    mesh = meshes.data_mesh(jax.devices()[:2], None)
    tx = optimizers.method(config, method, mesh, mesh.axis_names)
    assert optimizers.drops_nonfinite(config, tx) == drops
