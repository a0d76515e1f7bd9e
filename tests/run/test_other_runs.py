"""Runs with other optimizers, tokenizers and local methods, which continue as well."""

import jax
import pytest
from jax.sharding import Mesh

from acco_jax.run import loop, preparation
from acco_jax.run.observe import metrics
from tests.run.test_loop import arrays_of, rows_of

OTHERS = {
    "lion": {"optimizer.name": "lion"},
    "sgd": {"optimizer.name": "sgd", "options": {"momentum": 0.9}},
    "adafactor": {
        "optimizer.name": "adafactor",
        "options": {"min_dim_size_to_factor": 16},
    },
    "bpe": {"data.tokenizer": "bpe", "data.vocab_size": 280, "model.remat": "block"},
    "qwen3": {
        "model.family": "qwen3",
        "model.kv_heads": 1,
        "data.document_mask": True,
    },
}


@pytest.mark.fast(slow=("qwen3",))
@pytest.mark.parametrize("name", OTHERS)
def test_trains_and_continues_with(tiny, tmp_path, name):
    """What was not stopped and what was give the same last loss, below the first."""
    changes = dict(OTHERS[name])
    options = changes.pop("options", {})
    changes |= {"steps": 3, "optimizer.learning_rate": 1e-2}
    ends = []
    for name, stops in ("whole", (None,)), ("stopped", (4, None)):
        for stop in stops:
            config = tiny(**changes)
            config.optimizer.options.update(options)
            e = preparation.prepare(config, tmp_path / name, jax.devices()[:2])
            ends.append((loop.run(e, stop_after=stop), rows_of(tmp_path / name)))
    (summary, rows), _, (_, resumed) = ends
    assert rows == resumed
    first = next(r for r in rows if r["kind"] == "train")
    assert summary["loss"] < first["loss"]
    assert (tmp_path / "whole" / "tokenizer.json").exists() == (
        "data.tokenizer" in changes
    )


@pytest.mark.slow
def test_rounds_of_local_steps(train, tmp_path):
    """A call of several steps evaluates and saves whatever multiples it has passed."""
    changes = {"method": "diloco", "method_options": {"local_steps": 4}, "steps": 12,
               "eval_every": 3, "checkpoint_every": 7, "counts": (0, 2)}  # fmt: skip
    _, summary = train(tmp_path, **changes)
    rows = metrics.read(tmp_path)
    steps = [(r["half_round"], r["step"]) for r in rows if r["kind"] == "validation"]
    assert steps == [(1, 4), (2, 8), (3, 12)]
    trained = [r for r in rows if r["kind"] == "train"]
    # 4 steps x 2 microbatches of one worker x 2 rows x 32 targets
    assert [r["tokens"] for r in trained] == [512, 1024, 1536]
    assert [r["step"] for r in trained] == [4, 8, 12]
    folder = tmp_path / "checkpoints"
    assert {p.name for p in folder.iterdir() if p.is_dir()} == {"2", "3"}
    assert summary["loss"] < trained[0]["loss"]


LOCAL = {
    "slowmo": {"local_steps": 2},
    "co2": {"local_steps": 2},
    "gossip": {"topology": "exponential"},
    "streaming_diloco": {
        "local_steps": 4, "fragments": 2, "overlap_steps": 1, "bits": 8
    },
}  # fmt: skip


@pytest.mark.fast(slow=("streaming_diloco",))
@pytest.mark.parametrize("method", LOCAL)
def test_local_methods_train_and_continue_bit_for_bit(train, tmp_path, method):
    changes = {"method": method, "method_options": LOCAL[method], "steps": 8,
               "optimizer.learning_rate": 3e-3}  # fmt: skip
    experiment, summary = train(tmp_path / "whole", **changes)
    train(tmp_path / "stopped", stop_after=3, **changes)  # mid-turn of the fragments
    again, resumed = train(tmp_path / "stopped", **changes)
    assert rows_of(tmp_path / "stopped") == rows_of(tmp_path / "whole")
    assert arrays_of(again) == arrays_of(experiment)
    assert resumed["loss"] == summary["loss"]
    first = next(r for r in rows_of(tmp_path / "whole") if r["kind"] == "train")
    assert summary["loss"] < first["loss"]


def test_rows_per_worker_follow_counts(train_quickly, tmp_path):
    experiment, _ = train_quickly(tmp_path, stop_after=3, counts=(0, 2))
    rows = metrics.read(tmp_path)
    assert rows[-1]["microbatches"] == [0, 2]
    assert [r["tokens"] for r in rows] == [384]
    assert isinstance(experiment.mesh, Mesh)
