"""Where else rows go, and what a known accelerator adds to them."""

import sys
import types

import jax
import jax.numpy as jnp
import pytest

from acco_jax.plan import chips
from acco_jax.runner import hooks, loop, metrics, preparation

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
        return types.SimpleNamespace(log=lambda v, step: logged.append((step, v)))

    made = types.ModuleType("wandb")
    made.init = init
    made.util = types.SimpleNamespace(generate_id=lambda: "an-id")
    monkeypatch.setitem(sys.modules, "wandb", made)
    return runs


def test_every_row_goes_to_the_hook_and_to_wandb(train, tmp_path, wandb):
    """A continued run goes on in the same run of W&B."""
    SEEN.clear()
    changes = {"metrics_hook": f"{__name__}:collect", "wandb_project": "tests"}
    sys.modules.setdefault(__name__, sys.modules[collect.__module__])
    train(tmp_path, stop_after=5, **changes)
    train(tmp_path, **changes)
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


def test_without_wandb_it_is_refused_in_one_line(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="wandb is not installed: pip install wandb"):
        hooks.of(tiny(wandb_project="tests"), tmp_path)


def test_utilization_is_model_flops_over_the_devices_peak(tmp_path):
    recorder = metrics.Recorder(
        tmp_path, total=4, done=0, tokens=0, seconds=0.0, late=False, flops=(5.0, 20.0)
    )
    for k in (1, 2):
        row = {"kind": "train", "half_round": k, "tokens": 100 * k}
        recorder.train(row, {"loss": jnp.float32(1)})
    recorder.close()
    for row in metrics.read(tmp_path):
        expected = row["tokens_per_second"] * 5 / 20
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
