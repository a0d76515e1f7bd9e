"""Corrupt parameters: a run stops, goes on, and says what time that took."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from acco_jax.run import loop, preparation
from acco_jax.run.observe import goodput, metrics
from acco_jax.run.state import replicas
from acco_jax.run.state.checkpoints import Checkpoints
from tests.run.test_replicas import flip, with_copies

LINEN = "tests.run.own_models:linen_model"


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """Three starts in one workdir; each time one copy of a parameter gets other bits.

    After half-round 3, with a comparison in each; after the 4th, where only saving
    compares; and after the 4th without comparisons.
    """
    workdir, ends, checkpoints = tmp_path_factory.mktemp("corrupted"), [], []
    half_round = loop._Run.half_round

    def start(at, **changes):
        def corrupted(run):
            half_round(run)
            if run.done == at:
                leaves, treedef = jax.tree.flatten(run.params)
                with jax.transfer_guard("allow"):
                    leaves[0] = with_copies(leaves[0], flip(), {1})
                    run.state = jax.tree.map(jnp.copy, run.state)
                run.params = jax.tree.unflatten(treedef, leaves)

        config = tiny(**{"model.factory": LINEN}, method="zero1", steps=4, **changes)
        experiment = preparation.prepare(config, workdir, jax.devices()[:3])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop._Run, "half_round", corrupted)
            try:
                ends.append(loop.run(experiment))
            except OSError as error:
                ends.append(error)
        checkpoints.append(Checkpoints(workdir / "checkpoints", 2).latest())

    start(3, compare_replicas_every=1)
    start(4, compare_replicas_every=100)
    start(4, compare_replicas_every=0)
    return SimpleNamespace(workdir=workdir, ends=ends, checkpoints=checkpoints)


@pytest.mark.slow
def test_it_stops_and_keeps_a_sound_checkpoint(run):
    for error, half_round in zip(run.ends, (3, 4), strict=False):
        assert isinstance(error, replicas.ReplicasDiffer)
        line = str(error)
        assert f"by half-round {half_round}: worker 1 (process 0 on " in line
        assert "holds other bits of params." in line and "\n" not in line
    assert run.checkpoints == [2, 2, 4]


@pytest.mark.slow
def test_never_is_never(run):
    assert run.ends[2]["loss"] > 0


@pytest.mark.slow
def test_lost_half_rounds_are_repeated(run):
    summary, lines = run.ends[2], goodput.read(run.workdir)
    seconds = summary["seconds_by_cause"]
    assert {cause for cause in goodput.CAUSES if not seconds[cause]} == {"profiling"}
    wall = lines[-1]["time"] - lines[0]["time"]
    assert sum(seconds.values()) == pytest.approx(wall) == summary["wall_seconds"]
    assert summary["goodput"] == seconds["training"] / summary["wall_seconds"]
    assert [row.get("half_round") for row in lines].count(3) >= 2
    assert lines[-1]["over"] and lines[-1]["half_round"] == 4
    shown = json.loads((run.workdir / "summary.json").read_text())
    assert shown["seconds_by_cause"] == seconds


def test_evaluations_say_the_goodput_so_far(run):
    rows = [r for r in metrics.read(run.workdir) if r["kind"] != "train"]
    assert [r["half_round"] for r in rows] == [2, 4, 4]
    assert all(0 < r["goodput"] < 1 for r in rows)
    assert rows[-1]["goodput"] == run.ends[2]["goodput"]
