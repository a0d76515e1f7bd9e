"""The loop: a resumed run is the uninterrupted one, bit for bit, for every method."""

import contextlib
import json
import math
import os
import shutil
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import acco_jax
from acco_jax import data
from acco_jax.command import exits
from acco_jax.models import transformer
from acco_jax.run import evaluation, loop, preparation
from acco_jax.run.build import models
from acco_jax.run.observe import goodput, metrics, profiling, run_summary
from acco_jax.run.state import worlds
from acco_jax.run.state.checkpoints import Checkpoints
from tests.compiling import compilations, optimized

RUNS = {
    "acco": {},
    "unequal counts, bf16": {
        "counts": (1, 2),
        "model.dtype": "bfloat16",
        "model.param_dtype": "bfloat16",
    },
    "zero1": {"method": "zero1"},
    "few bits": {
        "method_options": {"gather_bits": (4, 8), "reduce_bits": 8, "resync_every": 5}
    },
    "diloco": {
        "method": "diloco",
        "method_options": {"local_steps": 2},
        "steps": 12,
        "model.param_dtype": "bfloat16",
    },
}
CLOCKS = ("seconds", "tokens_per_second", "goodput")


def rows_of(workdir):
    """metrics.jsonl but for its clocks."""
    return [
        {k: v for k, v in row.items() if k not in CLOCKS}
        for row in metrics.read(workdir)
    ]


def arrays_of(experiment):
    """The newest checkpoint's parameters and state, as bytes."""
    checkpoints = experiment.checkpoints
    like = experiment.abstract
    tree, _ = checkpoints.restore(checkpoints.latest(), like)
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.fixture(scope="module", params=RUNS)
def whole(request, train, tmp_path_factory):
    """(changes, experiment, summary, workdir) of an uninterrupted run."""
    changes = RUNS[request.param]
    if not changes:
        return changes, *request.getfixturevalue("acco_run")[:3]
    workdir = tmp_path_factory.mktemp("whole")
    experiment, summary = train(workdir, **changes)
    return changes, experiment, summary, workdir


@pytest.fixture(scope="module")
def acco_run(train, tmp_path_factory):
    """(experiment, summary, workdir, what was compiled by half-round) of acco."""
    workdir = tmp_path_factory.mktemp("acco")
    with compilations() as names:
        experiment, summary = train(workdir)
    return experiment, summary, workdir, names


@pytest.mark.fast("acco", slow=("few bits", "diloco"))
def test_a_stopped_run_continues_bit_for_bit(whole, train, tmp_path):
    changes, experiment, summary, workdir = whole
    delayed = experiment.tx.delayed
    for stop in (6, 9) if delayed else (3,):  # after an estimate, after a commit
        stopped, nothing = train(tmp_path, stop_after=stop, **changes)
        assert nothing is None and stopped.checkpoints.latest() == stop
    again, resumed = train(tmp_path, **changes)
    assert rows_of(tmp_path) == rows_of(workdir)
    assert arrays_of(again) == arrays_of(experiment)
    assert resumed["loss"] == summary["loss"]
    losses = [r["loss"] for r in rows_of(workdir) if r["kind"] == "train"]
    calls = experiment.config.steps // experiment.tx.steps_per_call
    assert len(losses) == len(set(losses)) == calls


@pytest.mark.fast("acco", slow=())
def test_what_was_logged_past_the_checkpoint_is_logged_once(whole, train, tmp_path):
    """As after a SIGKILL: the newest checkpoint is older than the last row."""
    changes, experiment, _, workdir = whole
    shutil.copytree(workdir, tmp_path, dirs_exist_ok=True)
    newest = experiment.checkpoints.latest()
    shutil.rmtree(tmp_path / "checkpoints" / str(newest))
    again, _ = train(tmp_path, **changes)
    assert again.checkpoints.latest() == newest
    assert rows_of(tmp_path) == rows_of(workdir)
    assert arrays_of(again) == arrays_of(experiment)


def test_a_signal_before_the_first_half_round(train, tmp_path, monkeypatch):
    begin = loop._Run.__init__

    def told(*args):
        begin(*args)
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(loop._Run, "__init__", told)
        stopped, summary = train(tmp_path)
    assert summary is None and stopped.checkpoints.latest() == 0


@pytest.mark.slow
def test_a_finished_run_is_only_reported_again(acco_run, train, tiny, tmp_path):
    _, summary, workdir, _ = acco_run
    shutil.copytree(workdir, tmp_path, dirs_exist_ok=True)
    _, again = train(tmp_path)
    assert rows_of(tmp_path) == rows_of(workdir)
    assert again["loss"] == summary["loss"]
    assert again["seconds"] < summary["seconds"] + 60
    # other devices evaluate, and have trained nothing
    one = preparation.prepare(tiny(), tmp_path, jax.devices()[:1])
    elsewhere = loop.run(one)
    assert elsewhere["loss"] == pytest.approx(summary["loss"], rel=1e-6)
    for key in run_summary.TRAINING:
        assert elsewhere.get(key) == again.get(key), key
    before, after = (list(worlds.recorded(x)) for x in (workdir, tmp_path))
    assert after == before and elsewhere["workers"] == 2


def test_metrics_rows(acco_run):
    _, summary, workdir, _ = acco_run
    rows = metrics.read(workdir)
    train_rows = [row for row in rows if row["kind"] == "train"]
    ends = range(3, 14, 2)  # half-rounds that commit a step; the first one primes
    assert [r["half_round"] for r in train_rows] == list(ends)
    fields = {"kind", "half_round", "step", "tokens", "tokens_per_second", "seconds",
              "loss", "grad_norm", "learning_rate", "microbatches",
              "dropped"}  # fmt: skip
    assert all(set(row) == fields for row in train_rows)
    # a half-round: 2 workers x 2 microbatches x 2 rows x 32 targets
    assert [r["tokens"] for r in train_rows] == [256 * h for h in ends]
    assert [r["step"] for r in train_rows] == [1, 2, 3, 4, 5, 6]
    assert all(r["microbatches"] == [2, 2] for r in train_rows)
    assert all(r["grad_norm"] > 0 for r in train_rows)
    for row in train_rows:
        taken = row["step"] - 1  # before the row's step: a step's rate is of these
        expected = 1e-3 * (1 + math.cos(math.pi * taken / 6)) / 2
        assert row["learning_rate"] == pytest.approx(expected, abs=1e-9)
    seconds = [r["seconds"] for r in rows]
    assert seconds == sorted(seconds)
    held_out = [row for row in rows if row["kind"] == "validation"]
    assert [(r["half_round"], r["step"]) for r in held_out] == [(5, 2), (9, 4), (13, 6)]
    assert set(held_out[0]) == {"kind", "half_round", "step", "tokens", "seconds",
                                "loss", "bits_per_byte", "goodput"}  # fmt: skip
    assert held_out[-1]["loss"] < held_out[0]["loss"]
    assert rows[-1]["kind"] == "final" and rows[-1]["half_round"] == 13
    assert rows[-1]["loss"] == summary["loss"]


def test_summary_and_picture(acco_run):
    experiment, summary, workdir, _ = acco_run
    assert json.loads((workdir / "summary.json").read_text()) == summary
    assert summary["method"] == "acco" and summary["devices"] == 2
    assert summary["tokens"] == 13 * 256 and summary["steps"] == 6
    assert summary["parameters"] == experiment.model.parameters()
    bigram = data.bigram_bits_per_byte(experiment.corpus)
    assert summary["bigram_bits_per_byte"] == bigram
    # 13 half-rounds, each one reduce-scatter and one all-gather of float32 rows
    sent = summary["bytes_sent_per_worker"] / 13
    assert 4 * summary["parameters"] <= sent < 4.5 * summary["parameters"]
    # parameters and in-flight gradients whole; master, moments, carry: half of each
    held = summary["state_bytes_per_device"] / summary["parameters"]
    assert 4 * (2 + 4 / 2) <= held < 18
    assert (workdir / "loss.png").read_bytes()[:4] == b"\x89PNG"


def test_nothing_is_compiled_twice(acco_run):
    *_, names = acco_run
    ours = [n for n in names if n in ("jit(run_call)", "jit(add)", "jit(<lambda>)")]
    repeated = {n for n in names if names.count(n) > 1 and "lambda" not in n}
    assert "jit(run_call)" in names, names
    assert [n for n in repeated if n in ("jit(run_call)", "jit(add)")] == [], names
    assert len(ours) <= 6, names


@pytest.mark.slow
def test_a_resumed_run_compiles_its_step_once(train, tmp_path):
    """Restored arrays are what the step returns: same shardings, same dtypes."""
    train(tmp_path, stop_after=4)
    with compilations() as names:
        train(tmp_path, stop_after=9)
    assert names.count("jit(run_call)") == 1, names


def test_the_loop_makes_no_implicit_transfer(train_quickly, tmp_path, monkeypatch):
    """The guard is on inside the loop: a host array given to a program is refused."""
    seen = []
    half_round = loop._Run.half_round

    def spy(run):
        with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
            jnp.sin(np.ones(3))
        seen.append(run.done)
        half_round(run)

    monkeypatch.setattr(loop._Run, "half_round", spy)
    train_quickly(tmp_path, stop_after=2)
    assert seen == [0, 1]


def manual_loss(experiment, params):
    """Mean loss of all held-out targets, one document stream, no batches, no mesh."""
    tokens = np.asarray(experiment.corpus.validation_tokens, np.int32)
    length, nats = experiment.config.length, 0.0
    starts = range(0, len(tokens) - 1, length)
    rows = np.full((len(starts), length + 1), 256, np.int32)
    for row, start in zip(rows, starts, strict=True):
        cut = tokens[start : start + length + 1]
        row[: len(cut)] = cut
    sizes = models.transformer_config(experiment.config, 257)
    logits = jax.jit(lambda p, x: transformer.apply(sizes, p, x))(params, rows[:, :-1])
    nats = -jax.nn.log_softmax(logits)[
        np.arange(len(rows))[:, None], np.arange(length), rows[:, 1:]
    ]
    real = np.arange(nats.size) < len(tokens) - 1
    return float(np.asarray(nats, np.float64).reshape(-1)[real].mean())


@pytest.mark.fast("estimate", slow=("commit",))
@pytest.mark.parametrize(
    ("stop", "exact"),
    [(6, False), (9, False), (9, True)],
    ids=["estimate", "commit", "commit as users compile it"],
)
def test_evaluates_committed_parameters_on_every_target(train, tmp_path, stop, exact):
    # a commit's last bit is that of its gather if optimized
    with optimized() if exact else contextlib.nullcontext():
        experiment, _ = train(tmp_path, stop_after=stop)
    (params, state), _ = experiment.checkpoints.restore(stop, experiment.abstract)
    committed = acco_jax.committed_params(state, params)
    loss, bits = loop.Evaluator(experiment)(committed, None)
    corpus = experiment.corpus
    here = jax.device_put(committed, jax.devices()[0])
    assert loss == pytest.approx(manual_loss(experiment, here), rel=1e-6)
    targets = len(corpus.validation_tokens) - 1
    total = loss * targets / math.log(2)
    assert bits == pytest.approx(total / corpus.validation_bytes, rel=1e-6)
    if stop == 6:  # theta~ is another point: evaluating it would be seen
        ahead = manual_loss(experiment, jax.device_put(params, jax.devices()[0]))
        assert abs(ahead - loss) > 1e-4
    else:
        for a, b in zip(
            jax.tree.leaves(params), jax.tree.leaves(committed), strict=True
        ):
            atol = 0 if exact else 1e-9
            np.testing.assert_allclose(a, b, rtol=0 if exact else 1e-5, atol=atol)


def test_what_the_loop_reports_is_that_evaluation(acco_run, monkeypatch):
    experiment, summary, _, _ = acco_run
    checkpoints = experiment.checkpoints
    (params, state), _ = checkpoints.restore(13, experiment.abstract)
    here = jax.device_put(params, jax.devices()[0])
    assert summary["loss"] == pytest.approx(manual_loss(experiment, here), rel=1e-6)
    monkeypatch.setattr(evaluation, "BATCHES", 2)  # and part by part
    committed = acco_jax.committed_params(state, params)
    loss, _ = loop.Evaluator(experiment)(committed, None)
    assert loss == pytest.approx(summary["loss"], rel=1e-6)


def test_a_nan_stops_the_run_and_spares_the_checkpoints(train_quickly, tmp_path):
    """The step's parameters become NaN in the middle of a run that saves every step."""
    changes = {"log_every": 100, "eval_every": 100, "checkpoint_every": 1,
               "drop_nonfinite": False}  # fmt: skip
    half_round = loop._Run.half_round

    def spoiled(run):
        half_round(run)
        if run.done == 6:
            run.params = jax.tree.map(lambda x: x * float("nan"), run.params)
            run.state = jax.tree.map(jnp.copy, run.state)  # its own would be refused

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop._Run, "half_round", spoiled)
        with jax.transfer_guard("allow"), pytest.raises(FloatingPointError) as error:
            patch.setattr(jax, "transfer_guard", lambda _: contextlib.nullcontext())
            train_quickly(tmp_path, **changes)
    assert "\n" not in str(error.value) and "half-round 7" in str(error.value)
    again, summary = train_quickly(tmp_path, **changes)  # from half-round 5, sound
    assert math.isfinite(summary["loss"])
    assert again.checkpoints.latest() == 13


@pytest.mark.fast("logged late", slow=())
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"log_every": 2}, id="logged late"),
        pytest.param({"eval_every": 1}, id="evaluated"),
        pytest.param({}, id="only saved"),
    ],
)
def test_divergence_is_seen_wherever_it_is_looked_for(train_quickly, tmp_path, changes):
    diverging = {"optimizer.name": "sgd", "optimizer.learning_rate": 1e30,
                 "optimizer.clip": 0.0, "optimizer.schedule": "constant"}  # fmt: skip
    never = dict.fromkeys(("log_every", "eval_every", "checkpoint_every"), 100)
    with pytest.raises(FloatingPointError, match=r"lower optimizer\.learning_rate"):
        train_quickly(tmp_path, **never | changes, **diverging)
    assert not [p for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit()]
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.fast("15")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_with_a_checkpoint(
    acco_run, train, tmp_path, number, monkeypatch
):
    _, _, whole, _ = acco_run
    before = signal.getsignal(number)
    half_round = loop._Run.half_round

    def told(run):
        half_round(run)
        if run.done == 4:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(loop._Run, "half_round", told)
        stopped, summary = train(tmp_path)
    assert summary is None and stopped.checkpoints.latest() == 4
    assert signal.getsignal(number) == before
    train(tmp_path)
    assert rows_of(tmp_path) == rows_of(whole)


def test_a_last_evaluation_that_was_stopped_is_made_up_for(
    train_quickly, tmp_path, monkeypatch
):
    """Also where the run's last step is no multiple of eval_every."""

    def stopped(evaluator, params, limit):
        raise exits.Stopped

    with monkeypatch.context() as patch:
        patch.setattr(loop.Evaluator, "__call__", stopped)
        _, summary = train_quickly(tmp_path, eval_every=100)
    assert summary is None
    _, summary = train_quickly(tmp_path, eval_every=100)
    assert [row["kind"] for row in rows_of(tmp_path)][-3:] == [
        "train", "validation", "final",
    ]  # fmt: skip
    assert summary is not None


def test_a_stop_in_an_evaluation_keeps_its_time_and_the_trace(
    train_quickly, tmp_path, monkeypatch
):
    def stopped(evaluator, params, limit):
        raise exits.Stopped

    monkeypatch.setattr(loop.Evaluator, "__call__", stopped)
    _, summary = train_quickly(tmp_path, profile="3:8")
    assert summary is None
    ((_, trace),) = profiling.summaries(tmp_path)
    assert [row["half_round"] for row in trace["calls"]] == [3, 4, 5]
    causes = [row["cause"] for row in goodput.read(tmp_path)]
    assert causes[-4:-1] == ["evaluation", "profiling", "checkpoints"]


def test_runs_outside_the_main_thread(train_quickly, tmp_path):
    results = []
    thread = threading.Thread(
        target=lambda: results.append(train_quickly(tmp_path, stop_after=1))
    )
    thread.start()
    thread.join()
    assert results[0][0].checkpoints.latest() == 1


# ---- the same workdir once more


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"optimizer.learning_rate": 2e-3},
            r"optimizer.learning_rate=0.001, not 0.002",
        ),
        ({"model.width": 32}, r"model.width=16, not 32"),
        ({"method": "zero1"}, r"method='acco', not 'zero1'"),
        ({"steps": 7}, r"steps=6, not 7"),
    ],
)
def test_refuses_the_workdir_of_another_run(acco_run, tiny, changes, message):
    _, _, workdir, _ = acco_run
    with pytest.raises(ValueError, match=message) as error:
        preparation.prepare(tiny(**changes), workdir, jax.devices()[:2])
    assert str(workdir) in str(error.value) and "\n" not in str(error.value)


def test_what_does_not_change_a_run_may_change(acco_run, tiny):
    _, _, workdir, _ = acco_run
    changes = {"log_every": 5, "eval_every": 3, "checkpoint_every": 1,
               "eval_batches": 1, "keep_checkpoints": 1}  # fmt: skip
    preparation.prepare(tiny(**changes), workdir, jax.devices()[:2])


def test_a_save_waits_with_patience_for_the_last_one_and_syncs_records(
    tiny, tmp_path, monkeypatch
):
    """A checkpoint may take longer than any half-round, and outlives the host."""
    made, done = [], []

    class Watchdog(loop.stalls.Watchdog):
        def __init__(self, least):
            super().__init__(least)
            made.append(self)

    def wait(self):
        done.append(("wait", made[-1].most))
        original(self)

    def sync(self):
        done.append(("sync", made[-1].most))

    original = Checkpoints.wait
    monkeypatch.setattr(loop.stalls, "Watchdog", Watchdog)
    monkeypatch.setattr(Checkpoints, "wait", wait)
    monkeypatch.setattr(metrics.Recorder, "sync", sync)
    config = tiny(**{"model.factory": "tests.run.own_models:linen_model"})
    experiment = preparation.prepare(config, tmp_path, jax.devices()[:2])
    loop.run(experiment, stop_after=4, stuck_after=100.0)
    (save, *_) = found = [name for name, _ in done]
    patience = loop.stalls.ASIDE * 100.0
    last = found.index("sync")
    assert save == "wait" and found[last + 1] == "wait"
    assert {seconds for _, seconds in done[: last + 2]} == {patience}
    waits = [seconds for name, seconds in done if name == "wait"]
    assert len(waits) == 4  # the third after the last row, the fourth without watchdog
    assert set(waits[:3]) == {patience}
