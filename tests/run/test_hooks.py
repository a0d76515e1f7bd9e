"""Where else rows go, and what a known accelerator adds to them."""

import contextlib
import sys
import threading
import time
import types

import jax
import jax.numpy as jnp
import pytest
from tensorboardX import event_file_writer

from acco_jax.command import exits
from acco_jax.run import loop, preparation, samples
from acco_jax.run.observe import hooks, metrics
from acco_jax.schedule import chips

SEEN = []


def collect(row):
    SEEN.append(dict(row))


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the module: its runs, by id, and what was logged to each."""
    runs = {}

    def init(**settings):
        logged = runs.setdefault(settings["id"], [])
        runs[settings["id"], "settings"] = settings

        def finish(exit_code):
            runs.setdefault("ends", []).append(exit_code)

        def define_metric(name, step_metric):  # W&B's own step does not go back
            assert (name, step_metric) == ("*", "half_round")

        log = lambda v: logged.append((v["half_round"], v))  # noqa: E731
        return types.SimpleNamespace(
            log=log, finish=finish, define_metric=define_metric
        )

    made = types.ModuleType("wandb")
    made.init = init
    made.util = types.SimpleNamespace(generate_id=lambda: "an-id")
    monkeypatch.setitem(sys.modules, "wandb", made)
    return runs


def test_every_row_goes_to_the_hook_and_to_wandb(train_quickly, tiny, tmp_path, wandb):
    """A continued run goes on in the same run of W&B."""
    SEEN.clear()
    changes = {"metrics_hook": f"{__name__}:collect", "wandb_project": "tests"}
    sys.modules.setdefault(__name__, sys.modules[collect.__module__])
    train_quickly(tmp_path, stop_after=5, **changes)
    train_quickly(tmp_path, **changes)
    rows = metrics.read(tmp_path)
    assert rows == SEEN and {r["kind"] for r in rows} == {
        "train", "validation", "final"
    }  # fmt: skip
    logged = wandb["an-id"]
    assert [step for step, _ in logged] == [row["half_round"] for row in rows]
    assert logged[0][1]["train/loss"] == rows[0]["loss"]
    settings = wandb["an-id", "settings"]
    assert settings["project"] == "tests" and settings["resume"] == "allow"
    assert settings["config"]["method"] == "acco"
    assert wandb["ends"] == [0, 0]  # all is sent before the process ends
    (tmp_path / "wandb_id.txt").write_text("")  # a kill has cut it off
    hooks._Wandb(sys.modules["wandb"], tiny(wandb_project="tests"), tmp_path)
    assert (tmp_path / "wandb_id.txt").read_text() == "an-id"


ROWS = [{"kind": "train", "half_round": h, "loss": 1.0 / h} for h in (1, 2, 3)]


def breaks(at):
    """A hook that raises at one half-round, and what it was given."""
    seen = []

    def hook(row):
        row["loss"] = 9.0  # of its own copy
        seen.append(row["half_round"])
        if row["half_round"] == at:
            raise RuntimeError("the server\nis gone")

    return hook, seen


def test_a_hook_that_raises_is_named_once_and_left_out(caplog):
    given = [dict(row) for row in ROWS]
    broken, seen = breaks(at=2)
    other, seen_by_other = breaks(at=None)
    found = hooks.Hooks()
    found.add("metrics_hook my:hook", lambda: broken)
    found.add("other", lambda: other)
    for row in given:
        found.row(row)
    found.close()
    assert seen == [1, 2] and seen_by_other == [1, 2, 3] and given == ROWS
    (warning,) = caplog.messages
    assert warning.startswith(
        "metrics_hook my:hook raised at the train row of half-round 2: RuntimeError: "
        "the server is gone: training goes on without it"
    )


def test_a_hook_that_blocks_misses_rows_and_nobody_waits(caplog, monkeypatch):
    monkeypatch.setattr(hooks, "WAITING", 2)
    monkeypatch.setattr(hooks, "CLOSE_SECONDS", 0.1)
    found, never = hooks.Hooks(), threading.Event()
    other, seen = breaks(at=None)
    found.add("wandb", never.wait)  # at its start
    found.add("metrics_hook my:hook", lambda: lambda row: never.wait())
    found.add("other", lambda: other)
    start = time.monotonic()
    for half_round in range(1, 6):
        found.row(ROWS[0] | {"half_round": half_round})
        while len(seen) < half_round:
            time.sleep(0.001)
    found.close()
    assert time.monotonic() - start < 2 and seen == [1, 2, 3, 4, 5]
    said = "wandb is 2 rows behind: it misses rows from half-round 3 on"
    assert caplog.messages.count(said) == 1
    assert sum("has not taken all rows after 0 s" in x for x in caplog.messages) == 2
    never.set()


def test_a_hook_that_is_behind_takes_all_rows_before_it_ends(caplog, monkeypatch):
    monkeypatch.setattr(hooks, "WAITING", 2)
    found, seen, go = hooks.Hooks(), [], threading.Event()

    def hook(row):
        go.wait()
        seen.append(row["half_round"])

    found.add("wandb", lambda: hook)
    for half_round in range(1, 5):
        found.row(ROWS[0] | {"half_round": half_round})
    threading.Timer(0.2, go.set).start()
    found.close()
    assert seen[:2] == [1, 2]
    assert not any("has not taken all rows" in x for x in caplog.messages)


def test_a_hook_changes_no_other_s_row():
    """Nor what a run goes on with: microbatches are the next call's, too."""
    found, seen = hooks.Hooks(strict=True), []
    found.add("one", lambda: lambda row: row["microbatches"].clear())
    found.add("other", lambda: lambda row: seen.append(row["microbatches"]))
    found.row(row := {"kind": "train", "half_round": 1, "microbatches": [2, 3]})
    assert seen == [[2, 3]] and row["microbatches"] == [2, 3]


def test_strict_hooks_end_the_run():
    found = hooks.Hooks(strict=True)
    hook, _ = breaks(at=2)
    found.add("metrics_hook my:hook", lambda: hook)
    found.row(ROWS[0])
    with pytest.raises(exits.Failed, match=r"my:hook .* half-round 2: .*the server is"):
        found.row(ROWS[1])


def test_wandb_that_does_not_start_or_raises_is_left_out(
    tiny, tmp_path, wandb, caplog, monkeypatch
):
    config = tiny(wandb_project="tests")
    found = hooks.of(config, tmp_path)
    found.row(ROWS[0])
    with pytest.raises(KeyError), contextlib.closing(found):
        raise KeyError  # as of training
    assert len(wandb["an-id"]) == 1 and wandb["ends"] == [1]

    def gone(**settings):
        raise ConnectionError("no route")

    monkeypatch.setattr(sys.modules["wandb"], "init", gone)
    hooks.of(config, tmp_path).close()
    assert "wandb (wandb_project=tests) raised at its start: Conn" in caplog.text
    with pytest.raises(exits.Failed, match=r"wandb .* its start: ConnectionError"):
        hooks.of(config, tmp_path, strict=True)


def test_tensorboard_that_cannot_write_is_left_out(tmp_path, caplog, monkeypatch):
    """Its file is a full disk's from the second row on, and cannot be made later."""
    (tmp_path / "a").mkdir()
    write, events = event_file_writer.EventsWriter.write_event, []

    def full(writer, event):
        events.append(event)
        if len(events) > 2:  # the start, the first row
            raise OSError(28, "No space left on device")
        return write(writer, event)

    monkeypatch.setattr(event_file_writer.EventsWriter, "write_event", full)
    found = hooks.Hooks()
    found.open_board(tmp_path / "a", 0)
    for row in ROWS * 20:
        found.row(row)
    found.close_board()
    (warning,) = caplog.messages
    assert warning.startswith("TensorBoard's writer raised at the train row of half-ro")
    (tmp_path / "tensorboard").touch()  # no folder
    again = hooks.Hooks()
    again.open_board(tmp_path, 0)
    again.row(ROWS[0])
    again.close()
    assert "TensorBoard's writer raised at its start: FileExists" in caplog.text


@pytest.mark.slow
def test_a_run_outlives_its_hooks(train, tmp_path, monkeypatch, caplog):
    """The user's function, the samples: all rows are written, and summary.json."""

    def raises(*_):
        raise RuntimeError("gone")

    monkeypatch.setattr(hooks, "named", lambda *_: raises)
    monkeypatch.setattr(samples, "written", raises)
    gathered, all_of = [], samples.gathered
    monkeypatch.setattr(
        samples, "gathered", lambda *x: gathered.append(all_of(*x)) or x
    )
    changes = {"metrics_hook": f"{__name__}:collect", "samples": 1}
    changes |= {"sample_tokens": 4, "steps": 2}
    sys.modules.setdefault(__name__, sys.modules[collect.__module__])
    _, summary = train(tmp_path, **changes)
    rows = metrics.read(tmp_path)
    assert summary["loss"] == rows[-1]["loss"] and "samples" not in rows[-1]
    assert len(gathered) == sum(row["kind"] != "train" for row in rows) == 2
    messages = [m for m in caplog.messages if "raised at" in m]
    assert len(messages) == 2
    assert "samples raised at the validation row of half-round 5: Run" in caplog.text
    assert f"metrics_hook {__name__}:collect raised at the train row" in caplog.text
    with pytest.raises(
        exits.Failed, match=r"raised at .*: RuntimeError: gone: mend it"
    ):
        train(tmp_path / "strict", strict_hooks=True, **changes)


def test_without_wandb_it_is_refused_in_one_line(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="wandb is not installed: pip install wandb"):
        hooks.of(tiny(wandb_project="tests"), tmp_path)


def test_utilization_is_model_flops_over_the_devices_peak(tmp_path):
    loss = jnp.float32(1)  # compiled before: an interval of compiling has no rate
    recorder = metrics.Recorder(
        tmp_path, done=0, tokens=0, seconds=0.0, late=False, flops=(5.0, 2e9)
    )
    for k in (1, 2):
        row = {"kind": "train", "half_round": k, "tokens": 100 * k}
        time.sleep(0.01)  # nor has one too short
        recorder.train(row, {"loss": loss})
    recorder.close()
    for row in metrics.read(tmp_path):
        expected = row["tokens_per_second"] * 5 / 2e9
        assert row["model_flops_utilization"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "chip"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("TPU v5 lite", "v5e"),
        ("TPU v6 lite", "v6e"),
        ("cpu", None),
        ("NVIDIA GeForce RTX 2070", None),
    ],
)
def test_chips_by_their_device_kind(kind, chip):
    found = chips.of_kind(kind)
    assert (found and found.name) == chip


def test_a_cpu_has_no_utilization_and_a_chip_has(tiny, tmp_path, monkeypatch):
    experiment = preparation.prepare(tiny(), tmp_path, jax.devices()[:2])
    assert loop._flops_rate(experiment) is None
    monkeypatch.setattr(chips, "of_kind", lambda kind: chips.CHIPS["h200"])
    per_token, peak = loop._flops_rate(experiment)
    assert peak == 2 * 989.4e12
    assert per_token == experiment.model.flops_per_token(32) > 0


@pytest.mark.parametrize("field", [{"rank": 2}, {"ranks": (("q", 2),)}], ids=str)
def test_adapters_have_no_utilization(tiny, tmp_path, monkeypatch, field):
    """The model's FLOPs include gradients of its weights, which are frozen here."""
    changes = {f"lora.{name}": value for name, value in field.items()}
    experiment = preparation.prepare(tiny(**changes), tmp_path, jax.devices()[:2])
    monkeypatch.setattr(chips, "of_kind", lambda kind: chips.CHIPS["h200"])
    assert loop._flops_rate(experiment) is None
