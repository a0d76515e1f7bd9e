"""The runner trains adapters with any method, and continues them bit for bit."""

import json

import jax
import numpy as np
import pytest

import acco_jax
from acco_jax.models import lora
from acco_jax.run import loop, preparation
from acco_jax.run.observe import metrics
from acco_jax.run.trained.trained_runs import load_run

CHANGES = {"lora.rank": 2, "lora.scale": 2.0, "steps": 4}
CLOCKS = ("seconds", "tokens_per_second", "goodput")


def rows_of(workdir):
    return [
        {k: v for k, v in row.items() if k not in CLOCKS}
        for row in metrics.read(workdir)
    ]


@pytest.fixture(scope="module")
def whole(train, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("lora")
    experiment, summary = train(workdir, **CHANGES)
    return experiment, summary, workdir


@pytest.mark.slow
def test_a_stopped_run_continues_bit_for_bit(whole, train, tmp_path):
    train(tmp_path, stop_after=4, **CHANGES)
    _, summary = train(tmp_path, **CHANGES)
    assert rows_of(tmp_path) == rows_of(whole[2])
    assert summary["loss"] == whole[1]["loss"]


@pytest.mark.slow
def test_evaluates_the_merged_model(whole):
    experiment, summary, _ = whole
    e = experiment
    last = e.checkpoints.latest()
    (params, state), _ = e.checkpoints.restore(last, e.abstract)
    adapters = acco_jax.committed_params(state, params)
    assert any(ab["b"].any() for ab in adapters.values())
    base = e.model.init(jax.random.key(e.config.seed))
    here = jax.device_put(adapters, jax.devices()[0])
    merged = lora.merge(base, here, 2.0)
    tokens = np.asarray(e.corpus.validation_tokens, np.int32)
    length, nats = e.config.length, []
    loss = jax.jit(e.model.loss)
    for at in range(0, len(tokens) - 1 - length, length):
        nats.append(
            loss(merged, {"tokens": tokens[None, at : at + length + 1]}, None)[0]
        )
    mean = float(np.sum(nats)) / (len(nats) * length)
    assert summary["loss"] == pytest.approx(mean, rel=1e-3)  # the last row apart


@pytest.mark.slow
def test_the_evaluators_program_holds_no_model(whole):
    evaluate = loop.Evaluator(whole[0])
    assert len(jax.tree.leaves(evaluate._loss_fn)) == len(
        jax.tree.leaves(whole[0].model.shapes())
    )


@pytest.fixture(scope="module")
def dense_run(train, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("dense")
    return *train(workdir, steps=4), workdir


@pytest.mark.slow
def test_adapts_the_model_of_another_run(dense_run, train, tmp_path):
    dense, summary, workdir = dense_run
    (params, state), _ = dense.checkpoints.restore(
        dense.checkpoints.latest(), dense.abstract
    )
    trained = acco_jax.committed_params(state, params)
    experiment, _ = train(tmp_path, **CHANGES, stop_after=1, base=str(workdir))
    frozen = jax.tree.leaves(experiment.loss_fn)
    for found, expected in zip(frozen, jax.tree.leaves(trained), strict=True):
        np.testing.assert_array_equal(found, expected)
    start = jax.jit(experiment.init)()
    loss, _ = loop.Evaluator(experiment)(start, None)
    assert loss == pytest.approx(summary["loss"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.slow
def test_a_base_that_was_trained_on_is_another_model(train, tmp_path):
    base, workdir = tmp_path / "base", tmp_path / "adapters"
    train(base, stop_after=1)
    train(workdir, **CHANGES, base=str(base), stop_after=1)
    load_run(workdir)
    train(base, stop_after=2)
    with pytest.raises(ValueError, match=r"frozen\.checksums=.*another workdir"):
        train(workdir, **CHANGES, base=str(base))
    with pytest.raises(ValueError, match=rf"base is {base}, whose newest checkpoint"):
        load_run(workdir)


@pytest.mark.slow
def test_goes_on_from_the_parameters_of_another_run(dense_run, train, tmp_path):
    _, summary, workdir = dense_run
    experiment, _ = train(tmp_path, base=str(workdir), method="zero1", stop_after=1)
    start, _ = loop.initial(experiment)
    loss, _ = loop.Evaluator(experiment)(start, None)
    assert loss == pytest.approx(summary["loss"], rel=1e-6)
    _, ended = train(tmp_path, base=str(workdir), method="zero1")  # resumed
    assert ended["loss"] < summary["loss"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base": "/nowhere"}, "which holds no run: "),
        ({"model.width": 32}, "which holds another model"),
        ({"model.heads": 1}, r"which holds another model \(heads=2, "),
        (
            {"data.tokenizer": "bpe", "data.vocab_size": 257},
            r"another model \(its tokenizer is bytes\)",
        ),
    ],
)
def test_a_base_that_cannot_be_is_refused_in_one_line(
    dense_run, tiny, tmp_path, change, message
):
    config = tiny(**CHANGES, **{"base": str(dense_run[2])} | change)
    with pytest.raises(ValueError, match=message) as error:
        preparation.prepare(config, tmp_path, jax.devices()[:2])
    assert "\n" not in str(error.value)


def test_sends_and_holds_what_adapters_need(whole, dense_run):
    _, summary, _ = whole
    _, dense, _ = dense_run
    assert summary["parameters"] == dense["parameters"]
    adapters = 2 * 2 * (16 + 16)  # q and v, rank 2, float32
    assert summary["bytes_sent_per_worker"] >= 9 * 4 * adapters
    # what is sent is padded to 16 rows of 128: half of all parameters of this model
    assert summary["bytes_sent_per_worker"] <= dense["bytes_sent_per_worker"] / 2
    # all but the adapters is frozen, and no optimizer state is of it
    frozen = 4 * (summary["parameters"] - adapters // 4)
    assert frozen < summary["state_bytes_per_device"]
    assert summary["state_bytes_per_device"] < dense["state_bytes_per_device"] / 2


def test_a_pattern_that_matches_nothing_is_refused(tiny, tmp_path):
    config = tiny(**{"lora.rank": 2, "lora.pattern": "conv"})
    with pytest.raises(ValueError, match="matches no parameter"):
        preparation.prepare(config, tmp_path, jax.devices()[:2])


@pytest.mark.slow
def test_a_run_takes_the_bpe_of_its_base(saved, tiny, tmp_path):
    base, texts = tmp_path / "base", tmp_path / "texts"
    changes = {"data.tokenizer": "bpe", "data.vocab_size": 290, "method": "zero1"}
    experiment, _ = saved(base, 1, **changes)
    texts.mkdir()
    for i in range(4):  # of which another BPE would be trained
        numbers = " ".join(str(k * k) for k in range(1000 * i, 1000 * i + 999))
        (texts / f"{i}.txt").write_text(numbers)
    changes |= {"data.path": str(texts), "base": str(base)}
    devices, known = jax.devices()[:1], experiment.corpus.tokenizer.fingerprint
    e = preparation.prepare(tiny(**changes), tmp_path / "new", devices)
    assert e.corpus.tokenizer.fingerprint == known
    with pytest.raises(
        ValueError, match=r"288 is not the 290 of .*/base/tokenizer\.json"
    ):
        preparation.prepare(
            tiny(**changes | {"data.vocab_size": 288}), tmp_path / "no", devices
        )
    # a run that has begun goes on; one that begins is compared
    described = json.loads((base / "config.json").read_text())
    described["model"]["heads"] = 1
    (base / "config.json").write_text(json.dumps(described))
    preparation.prepare(tiny(**changes), tmp_path / "new", devices)
    with pytest.raises(ValueError, match=r"another model \(heads=1, "):
        preparation.prepare(tiny(**changes), tmp_path / "other", devices)
