"""A run goes on with other devices, and its record repeats it."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import acco_jax
from acco_jax.command import heartbeat
from acco_jax.command.files import sealed
from acco_jax.run import continuing, loop, preparation, prepared
from acco_jax.run.observe import metrics
from acco_jax.run.state import worlds

pytestmark = pytest.mark.usefixtures("x64")
FLOAT64 = {"model.dtype": "float64", "model.param_dtype": "float64"}
WORLDS = [(4, 3), (2, 6), (3, 8), (1, 10), (4, None)]  # devices, up to a half-round


@pytest.fixture(scope="module")
def world(tiny):
    """world(workdir, devices, stop_after, replay, **changes): a run goes on."""

    def run(workdir, devices, stop_after=None, replay=None, **changes):
        changes = FLOAT64 | {"optimizer.options": {"eps": 1e-3}} | changes
        config = tiny(**changes)
        found = preparation.prepare(config, workdir, jax.devices()[:devices])
        if replay is not None:
            replay = continuing.repeating(found, replay)
        return found, loop.run(found, stop_after=stop_after, replay=replay)

    return run


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory):
    """The rows of a run whose four devices never change."""
    workdir = tmp_path_factory.mktemp("whole")
    world(workdir, 4)
    return metrics.read(workdir)


@pytest.fixture(scope="module")
def changed(world, tmp_path_factory):
    """The workdir of a run on 4, 2, 3, 1 and 4 devices, and its last experiment."""
    workdir = tmp_path_factory.mktemp("changed")
    for devices, end in WORLDS:
        experiment, summary = world(workdir, devices, end)
    assert summary is not None
    return workdir, experiment


@pytest.fixture(scope="module")
def begun(world, tmp_path_factory):
    """The workdir of a run on 4 devices and then on 2, which has not ended."""
    workdir = tmp_path_factory.mktemp("begun")
    world(workdir, 4, 2)
    world(workdir, 2, 3)
    return workdir


def series(rows, *fields):
    return {(r["kind"], r["half_round"]): [r[f] for f in fields] for r in rows}


@pytest.mark.slow
def test_it_learns_what_it_would_have_learnt(whole, changed):
    """In float64 to 1e-9: the same rows in the same half-rounds, whoever computes."""
    found, expected = (
        series(r, "loss", "tokens") for r in (metrics.read(changed[0]), whole)
    )
    assert found.keys() == expected.keys() and len(found) > 8
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-9)


@pytest.mark.slow
def test_the_record_says_who_did_what(changed):
    said = worlds.recorded(changed[0])
    assert [(h, w.axes["data"], w.counts) for h, w in said] == [
        (0, 4, [2, 2, 2, 2]),
        (3, 2, [4, 4]),
        (6, 3, [3, 3, 2]),
        (8, 1, [8]),
        (10, 4, [2, 2, 2, 2]),
    ]


@pytest.mark.slow
def test_a_replay_is_the_run_to_the_bit(world, changed, tmp_path):
    workdir, experiment = changed
    stops = [end for _, end in WORLDS]
    for (devices, _), end in zip(WORLDS, stops, strict=True):
        again, summary = world(tmp_path, devices, replay=workdir)
        assert (summary is None) == (end is not None)
        assert again.checkpoints.latest() == (end or again.total_calls)
    fields = "loss", "tokens"
    rows = [series(metrics.read(w), *fields) for w in (tmp_path, workdir)]
    assert rows[0] == rows[1]
    ends = [theta(e) for e in (again, experiment)]
    jax.tree.map(np.testing.assert_array_equal, *ends)


def theta(experiment):
    latest = experiment.checkpoints.latest()
    like = prepared.as_saved(experiment, latest)
    arrays, _ = experiment.checkpoints.restore(latest, like)
    params, state = prepared.here(experiment, arrays)
    return jax.device_get(acco_jax.committed_params(state, params))


@pytest.mark.slow
def test_a_replay_of_another_world_or_run_is_refused(world, begun, tmp_path):
    said = [(h, w.axes["data"], w.counts) for h, w in worlds.recorded(begun)]
    assert said == [(0, 4, [2, 2, 2, 2]), (2, 2, [4, 4])]
    with pytest.raises(ValueError, match="after half-round 0 with 4 workers in 1 pro"):
        world(tmp_path / "a", 2, replay=begun)
    with pytest.raises(ValueError, match="is of a run with seed=0, not 3"):
        world(tmp_path / "b", 4, replay=begun, seed=3)
    with pytest.raises(ValueError, match="cannot be read"):
        world(tmp_path / "c", 4, replay=tmp_path / "none")


METHODS = {
    "zero1": {},
    "diloco": {"steps": 10, "method_options": {"local_steps": 2}},
    "few bits": {"method_options": {"gather_bits": 8, "reduce_bits": 8}},
}


@pytest.mark.long
@pytest.mark.parametrize("name", list(METHODS))
def test_other_methods_go_on_and_are_repeated(world, name, tmp_path):
    """zero1 exactly, the others to half a per cent of the undisturbed run's loss."""
    changes = {"method": "acco" if name == "few bits" else name} | METHODS[name]
    world(tmp_path / "whole", 4, **changes)
    visits = list(zip([4, 2, 3, 1, 4], [1, 2, 3, 4, None], strict=True))
    for devices, end in visits:
        experiment, summary = world(tmp_path / "changed", devices, end, **changes)
    assert summary is not None and experiment.total_calls > 4
    for devices, _ in visits:
        again, repeated = world(
            tmp_path / "again", devices, replay=tmp_path / "changed", **changes
        )
    assert repeated["loss"] == summary["loss"]
    jax.tree.map(np.testing.assert_array_equal, theta(again), theta(experiment))
    whole, changed, replayed = (
        series(metrics.read(tmp_path / w), "loss", "tokens")
        for w in ("whole", "changed", "again")
    )
    assert replayed == changed and whole.keys() == changed.keys()
    exact = name == "zero1"
    for key, (loss, tokens) in whole.items():
        assert changed[key][1] == tokens
        rtol = 1e-9 if exact else 5e-3
        np.testing.assert_allclose(changed[key][0], loss, rtol=rtol)


@pytest.mark.slow
def test_adaptive_counts_are_repeated_over_several_worlds(world, tmp_path):
    """Their log has lines of 2, 1 and 3 counts; each world repeats its own."""
    changes = {"microbatches": "adaptive", "most_microbatches": 3, "steps": 4}
    worlds_of = [(2, 3), (1, 5), (3, None)]
    for devices, end in worlds_of:
        first, summary = world(tmp_path / "a", devices, end, **changes)
    for devices, _ in worlds_of:
        again, repeated = world(
            tmp_path / "b", devices, replay=tmp_path / "a", **changes
        )
    log = (tmp_path / "a" / "counts.jsonl").read_text()
    assert (tmp_path / "b" / "counts.jsonl").read_text() == log
    sizes = [len(json.loads(line)) for line in log.splitlines()]
    assert sizes == [2] * 3 + [1] * 2 + [3] * (first.total_calls - 5)
    assert repeated["loss"] == summary["loss"]
    jax.tree.map(np.testing.assert_array_equal, theta(again), theta(first))


@pytest.mark.slow
def test_a_batch_may_follow_the_workers(world, tmp_path):
    world(tmp_path, 2, 2, batch="per_worker")
    experiment, _ = world(tmp_path, 4, 3, batch="per_worker")
    assert experiment.tokens == 4 * 2 * 2 * 32
    with pytest.raises(ValueError, match="batch='per_worker', not 'kept'"):
        world(tmp_path, 2)


@pytest.mark.fast("changes0-*")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data.skew": 0.5}, "data.skew is 0.5, so each of the 2 workers has rows of"),
        (
            {"counts": (1, 2), "batch": "per_worker"},
            r"batch is 'per_worker', but counts is \(1, 2\), of 2 workers",
        ),
    ],
)
def test_what_cannot_follow_is_refused(world, changes, said, tmp_path):
    world(tmp_path, 2, 1, **changes)
    with pytest.raises(ValueError, match=said):
        world(tmp_path, 1, **changes)


def test_a_second_attempt_with_fewer_keeps_the_batch_before_any_checkpoint(
    tiny, tmp_path
):
    devices = jax.devices()
    preparation.prepare(tiny(), tmp_path, devices[:4])
    again = preparation.build(tiny(), tmp_path, devices[:2], again=True)
    preparation.record(again)
    assert (again.identity["workers"], again.tokens) == (4, 4 * 2 * 2 * 32)
    fresh = preparation.build(tiny(), tmp_path, devices[:2])  # by another command
    assert (fresh.identity["workers"], fresh.tokens) == (2, 2 * 2 * 2 * 32)


def test_a_second_attempt_keeps_the_batch_of_the_first_not_of_an_older_start(
    tiny, tmp_path, monkeypatch
):
    devices = jax.devices()
    preparation.prepare(tiny(), tmp_path, devices[:4])  # by another command
    monkeypatch.setattr(heartbeat, "supervised", lambda: True)
    preparation.build(tiny(), tmp_path, devices[:2])  # and dies before `record`
    again = preparation.build(tiny(), tmp_path, devices[:1], again=True)
    assert (again.identity["workers"], again.tokens) == (2, 2 * 2 * 2 * 32)


def test_a_run_that_lost_a_process_before_it_saved_can_be_repeated(tiny, tmp_path):
    devices, ran = jax.devices(), tmp_path / "ran"
    preparation.prepare(tiny(), ran, devices[:4])
    fewer = preparation.build(tiny(), ran, devices[:2], again=True)
    worlds.record(ran, 0, fewer.world)
    again = preparation.build(tiny(), tmp_path / "again", devices[:2], replay=ran)
    worlds.WorldsReplay(ran).check(again.identity, 0, again.world)
    assert again.tokens == fewer.tokens


def test_what_is_yet_to_send_is_averaged_where_it_has_no_weights(tiny, tmp_path):
    options = {"local_steps": 2, "weighted": False}
    config = tiny(method="sparseloco", method_options=options)
    two = preparation.build(config, tmp_path, jax.devices()[:2])
    old = jax.tree.map(
        lambda x: jnp.ones(x.shape, x.dtype, device=x.sharding),
        prepared.as_stored(two, {"data": 4}),
    )
    _, found = prepared.here(two, old)
    for x in jax.tree.leaves(found.error):
        assert len(x) == 2
        np.testing.assert_array_equal(x, np.ones_like(x))


def test_a_damaged_record_is_said(tmp_path):
    row = {
        "half_round": 0,
        "axes": {"data": 2},
        "processes": 1,
        "counts": [],
        "form": "",
    }
    for wrong in ({"axes": {"data": 0}}, {"axes": []}, {"half_round": "a"},
                  {"axes": {"tensor": 2, "data": 2}}):  # fmt: skip
        (tmp_path / worlds.FILE).write_text(json.dumps(sealed(row | wrong)) + "\n")
        with pytest.raises(ValueError, match="is damaged"):
            worlds.recorded(tmp_path)


@pytest.mark.parametrize(("total", "n"), [(8, 3), (2, 4), (8, 8), (7, 2)])
def test_microbatches_are_dealt_out_evenly(total, n):
    found = worlds.dealt(total, n)
    assert (len(found), sum(found)) == (n, total) and max(found) - min(found) <= 1
