"""Texts at evaluations, and a run's model in the commands that read it."""

import json

import jax
import numpy as np
import pytest

from acco_jax.run import preparation, samples
from acco_jax.run.observe import metrics
from acco_jax.run.trained import splits
from acco_jax.run.trained.language import Sampling, from_run, keys_of

CHANGES = {
    "samples": 2, "sample_prompt": "while", "sample_tokens": 12, "eval_every": 6,
    "checkpoint_every": 6, "data.document_mask": True,
}  # fmt: skip


@pytest.mark.slow
def test_a_run_writes_texts_and_its_splits_are_evaluated(train, texts, tmp_path):
    """One test, for the sake of one run."""
    experiment, summary = train(tmp_path, **CHANGES)
    rows = metrics.read(tmp_path)
    written = [row["samples"] for row in rows if row["kind"] != "train"]
    assert len(written) == 2 and written[0] == written[1]  # of one half-round
    assert all(text.startswith("while") and len(text) > 5 for text in written[0])
    assert written[0][0] != written[0][1]
    assert "samples" not in summary

    model = from_run(tmp_path, jax.devices()[:1])
    prompts, how = [model.tokens("while")] * 2, Sampling(temperature=1.0)
    (again,) = model.write(prompts, 12, how, keys_of(0, 2), 12)
    assert ["while" + text for text in again] == written[0]

    found = splits.of_split(tmp_path, "validation")
    for name in ("loss", "bits_per_byte"):
        assert found[name] == pytest.approx(summary[name], rel=1e-5)
    assert found["tokens"] == len(experiment.corpus.validation_tokens) - 1
    both = found["words"], splits.of_split(tmp_path, "train")["words"]
    words = [len(file.read_text().split()) for file in texts.iterdir()]
    assert sum(both) == sum(words) and both[0] < both[1]

    described = json.loads((tmp_path / "config.json").read_text())
    moved = described["data"] | {"path": "/gone"}
    other = described["corpus"] | {"documents": "other"}
    for change, match in (
        ({"data": moved}, r"cannot be read \(no folder /gone\): restore .* --file"),
        ({"corpus": other}, r"was trained on other data than data\.name"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(described | change))
        with pytest.raises(ValueError, match=match):
            splits.of_split(tmp_path, "validation")


@pytest.mark.slow
def test_adapters_are_merged_and_groups_gathered(tiny, tmp_path):
    changes = {**CHANGES, "lora.rank": 2, "mesh.fsdp": 2, "sample_prompt": "x" * 19}
    config = tiny(**changes)
    experiment = preparation.prepare(config, tmp_path, jax.devices()[:4])
    adapters = jax.tree.map(np.zeros_like, experiment.start())
    texts = samples.written(experiment, samples.gathered(experiment, adapters))
    assert len(texts) == 2 and texts[0].startswith("x" * 19)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"sample_tokens": 32}, "sample_tokens is 32, but with a prompt .* length=32"),
        ({"samples": -1}, "samples is -1: give 0 for none"),
        ({"model.factory": "a:b"}, "only the loss of model.factory a:b is known"),
        ({"sample_prompt": "x" * 99}, r"has 99 tokens, .* leave room for 20: shorten"),
    ],
)
def test_what_cannot_be_written_is_refused(tiny, tmp_path, changes, match):
    with pytest.raises(ValueError, match=match):
        preparation.prepare(tiny(**{**CHANGES, **changes}), tmp_path)
