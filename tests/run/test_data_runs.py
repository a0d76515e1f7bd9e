"""Runs on instructions, on masked documents and with adaptive counts: their rows."""

import json
import math
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from acco_jax.run import load_run, loop, preparation, prepared
from acco_jax.run.compare import results
from acco_jax.run.config import identity
from acco_jax.run.observe import metrics
from acco_jax.run.trained import splits
from acco_jax.schedule import chips
from tests.compiling import compilations
from tests.run.test_loop import arrays_of, manual_loss, rows_of

RECORDED = Path(__file__).parents[1] / "recorded"


@pytest.fixture(scope="module")
def instructions(tmp_path_factory):
    """A file of 60 instructions, whose answers are 1 to 24 bytes long."""
    path = tmp_path_factory.mktemp("instructions") / "all.jsonl"
    rows = [
        {"instruction": f"Count {i % 5}.", "input": "", "output": "ab" * (1 + i % 12)}
        for i in range(60)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "data.name": "jsonl",
        "data.path": str(path),
        "data.task": "instruct",
        "data.lengths": (165, 171, 200),
        "length": 200,
        "method": "zero1",
        "steps": 4,
        "eval_every": 100,
        "checkpoint_every": 100,
    }


@pytest.mark.slow
def test_instructions_are_learnt_and_resumed(instructions, train, tmp_path):
    with compilations() as names:
        whole, summary = train(tmp_path / "whole", **instructions)
    # a program for each length that occurs, and no more
    assert 1 < names.count("jit(run_call)") <= 3
    rows = [r for r in metrics.read(tmp_path / "whole") if r["kind"] == "train"]
    batches = prepared.batches(whole)
    targets = [next(batches)["mask"].sum() for _ in range(whole.total_calls)]
    assert summary["tokens"] == sum(targets)
    assert rows[-1]["tokens"] == np.cumsum(targets)[rows[-1]["half_round"] - 1]
    train(tmp_path / "parts", stop_after=3, **instructions)
    again, _ = train(tmp_path / "parts", **instructions)
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")
    assert arrays_of(again) == arrays_of(whole)


@pytest.mark.slow
def test_padded_examples_have_no_utilization_and_no_exposed_time(
    instructions, tiny, tmp_path, monkeypatch
):
    """Prompts and padding take time, and are no targets: each batch has others."""
    monkeypatch.setattr(chips, "of_kind", lambda kind: chips.CHIPS["h200"])
    changes = {"model.factory": "tests.run.own_models:nnx_model", "eval_every": 2}
    config = tiny(**instructions | changes)
    e = preparation.prepare(config, tmp_path, jax.devices()[:2])
    summary = loop.run(e, time_gradients=True)
    assert summary["gradient_seconds_per_token"] is None
    train = [r for r in metrics.read(tmp_path) if r["kind"] == "train"]
    assert train and not any("model_flops_utilization" in row for row in train)
    assert results.read(tmp_path, "zero1", 0).exposed_ms_per_step is None


@pytest.mark.slow
def test_figures_of_a_split_are_those_of_the_targets_that_are_kept(
    instructions, saved, tmp_path
):
    changes = instructions | {"data.lengths": (), "length": 166}
    e, theta = saved(tmp_path, 1, **changes)
    found = splits.of_split(tmp_path, "validation")
    loss, bits = loop.Evaluator(e)(theta, None)
    spans = e.corpus.validation_spans
    prompts, targets = spans[:, 1] - spans[:, 0], spans[:, 2] - spans[:, 1] + 1
    kept = np.clip(166 - prompts, 0, targets).sum()
    assert found["tokens"] == kept < targets.sum()
    share = kept / targets.sum()
    size = share * (targets - 1).sum()  # an answer's bytes, and one word each
    nats = loss * kept
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    per_word = math.log(found["perplexity_per_word"])
    assert per_word == pytest.approx(nats / (share * len(spans)), rel=1e-5)
    words = round(share * len(spans))
    assert (found["words"], found["bytes"]) == (words, round(size))


@pytest.mark.slow
def test_held_out_loss_is_without_the_router_loss(saved, tmp_path):
    """Of a model, and of adapters of one."""
    changes = {
        "model.family": "qwen3-moe", "model.experts": 4, "model.experts_per_token": 2,
        "model.router_loss": 0.5, "model.mlp_width": 8, "lora.rank": 2,
        "method": "zero1",
    }  # fmt: skip
    e, theta = saved(tmp_path, 1, **changes)
    expected = manual_loss(e, load_run(tmp_path, jax.devices()[:1]).params)
    found = splits.of_split(tmp_path, "validation")
    assert found["loss"] == pytest.approx(expected, rel=1e-5)
    loss, _ = loop.Evaluator(e)(theta, None)
    assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_conversations_are_learnt_resumed_and_scored(train, tmp_path):
    recorded = json.loads((RECORDED / "chat.json").read_text())
    tokenizer, rows = tmp_path / "t" / "tokenizer.json", tmp_path / "all.jsonl"
    tokenizer.parent.mkdir()
    tokenizer.write_text(recorded["tokenizer"])
    template = recorded["templates"]["headers"]
    (tokenizer.parent / "chat_template.jinja").write_text(template)
    said = {"bos_token": "<s>", "eos_token": "</s>"}
    (tokenizer.parent / "tokenizer_config.json").write_text(json.dumps(said))
    with rows.open("w") as file:
        for i in range(60):
            user = {"role": "user", "content": f"Count {i % 5}."}
            answer = {"role": "assistant", "content": "ab" * (1 + i % 12)}
            turns = (1 + i % 2) * [user, answer]
            file.write(json.dumps({"messages": turns}) + "\n")
    changes = {
        "data.name": "jsonl", "data.path": str(rows), "data.task": "chat",
        "data.tokenizer": str(tokenizer), "data.lengths": (40, 120), "length": 120,
        "steps": 4, "eval_every": 100, "checkpoint_every": 100, "method": "zero1",
    }  # fmt: skip
    whole, summary = train(tmp_path / "whole", **changes)
    batches = prepared.batches(whole)
    targets = [next(batches)["mask"].sum() for _ in range(whole.total_calls)]
    assert summary["tokens"] == sum(targets)
    train(tmp_path / "parts", stop_after=3, **changes)
    again, _ = train(tmp_path / "parts", **changes)
    assert arrays_of(again) == arrays_of(whole)
    figures = splits.of_split(tmp_path / "whole", "validation")
    assert figures["loss"] == pytest.approx(summary["loss"], rel=1e-5)
    with pytest.raises(ValueError, match=r"tokens is 9, but answers differ in length"):
        train(tmp_path / "other", **changes | {"tokens": 9})
    other = template.replace("<|im_end|>", "<|im_stop|>")
    assert other != template
    (tokenizer.parent / "chat_template.jinja").write_text(other)
    with pytest.raises(ValueError, match=r"restore them, or the chat template"):
        splits.of_split(tmp_path / "whole", "validation")


@pytest.mark.slow
def test_documents_are_masked_in_training_and_evaluation(train, tmp_path):
    masked, summary = train(
        tmp_path / "a", stop_after=1, **{"data.document_mask": True}
    )
    assert summary is None and set(next(prepared.batches(masked))) == {
        "tokens", "segments"}  # fmt: skip
    plain = preparation.prepare(
        masked.config.copy_and_resolve_references(), tmp_path / "b", jax.devices()[:2]
    )
    params = masked.init()
    both = [loop.Evaluator(masked)(params, None)]
    plain.config.data.document_mask = False
    both.append(loop.Evaluator(plain)(params, None))
    assert both[0] != both[1] and both[0][0] == pytest.approx(both[1][0], rel=0.2)


@pytest.mark.slow
def test_adaptive_runs_compute_every_row_once(train, tmp_path, monkeypatch):
    """Rows of the checkpoint's position, but those left, are those computed."""
    handed, counted = [], []
    half_round = loop._Run.half_round

    def spy(run):
        source, half = run._batches, run._batches.computed

        def computed(counts):
            handed.append(source._open.copy())
            counted.append(source._slots.computed(counts))
            half(counts)

        with monkeypatch.context() as patch:
            patch.setattr(source, "computed", computed)
            half_round(run)

    monkeypatch.setattr(loop._Run, "half_round", spy)
    changes = {"microbatches": "adaptive", "most_microbatches": 3}
    train(tmp_path, stop_after=5, **changes)
    experiment, summary = train(tmp_path, **changes)
    assert len(handed) == experiment.total_calls
    done = np.concatenate([a[b] for a, b in zip(handed, counted, strict=True)])
    assert len(np.unique(done)) == len(done)
    assert summary["tokens"] == len(done) * experiment.config.length
    latest = experiment.checkpoints.latest()
    _, host = experiment.checkpoints.restore(latest, experiment.abstract)
    state = host["batches"]
    everything = sorted([*done.tolist(), *state["left"]])
    assert everything == list(range(state["row"]))


def test_data_may_move_but_not_change(instructions, tiny, tmp_path):
    def prepared(**changes):
        config = tiny(**{**instructions, **changes})
        return preparation.prepare(config, tmp_path / "run", jax.devices()[:2])

    before = prepared().corpus
    moved = {"data.path": str(tmp_path / "scratch" / "*.jsonl")}
    moved["data.data_dir"] = str(tmp_path / "other")
    (tmp_path / "scratch").mkdir()
    path = tmp_path / "scratch" / "a name.jsonl"
    shutil.copy(instructions["data.path"], path)
    after = prepared(**moved).corpus
    assert after.documents == before.documents and after.checksum == before.checksum
    rows = path.read_text().splitlines(keepends=True)
    (tmp_path / "scratch" / "b.jsonl").write_text("".join(rows[40:]))  # in two files
    path.write_text("".join(rows[:40]))
    prepared(**moved)
    for changed in (rows[1:40], rows[39::-1], [rows[0].replace("Count", "count")]):
        path.write_text("".join(changed) * (40 // len(changed)))
        with pytest.raises(
            ValueError, match=r"run in workdir .*: restore them"
        ) as error:
            prepared(**moved)
        line = str(error.value)
        assert line.startswith(
            f"the documents of data.name='jsonl', data.path='{tmp_path}"
        )
        assert before.documents in line and "\n" not in line


@pytest.mark.parametrize(
    ("a", "b", "differ"),
    [
        ({"data": {"data_dir": None}}, {"data": {"data_dir": "/x"}}, False),
        ({"data": {"path": "/y"}}, {"data": {"path": "/x"}}, False),
        ({"data": {"path": "/y", "name": "jsonl"}}, {"data": {"name": "stdlib"}}, True),
        ({"data": {"tokenizer": "/y.json"}}, {"data": {"tokenizer": "/x.json"}}, False),
        ({"data": {"tokenizer": "bytes"}}, {"data": {"tokenizer": "/x.json"}}, True),
        ({"data": {"tokenizer": "bytes"}}, {"data": {"tokenizer": "bpe"}}, True),
        ({"init_from": "/y"}, {"init_from": "/x"}, False),
        ({"init_from": "/y"}, {"init_from": None}, True),
        ({"init_from": ["/y"]}, {"init_from": "/x"}, True),
        ({"corpus": {"documents": "a"}}, {"corpus": {"documents": "b"}}, True),
        ({"corpus": {"tokenizer": "a"}}, {"corpus": {"tokenizer": "b"}}, True),
        ({"corpus": {"documents": "a"}}, {}, True),
    ],
)
def test_what_makes_another_run(a, b, differ):
    for old, new in ((a, b), (b, a)):
        assert bool(identity.differing_field(old, new)) == differ
