"""The runner trains adapters with any method, and continues them bit for bit."""

import jax
import numpy as np
import pytest

import acco_jax
from acco_jax.models import gpt_neo, lora
from acco_jax.training import loop, metrics

CHANGES = {"lora.rank": 2, "lora.scale": 2.0, "steps": 4}
CLOCKS = ("seconds", "tokens_per_second")


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


def test_a_stopped_run_continues_bit_for_bit(whole, train, tmp_path):
    train(tmp_path, stop_after=4, **CHANGES)
    _, summary = train(tmp_path, **CHANGES)
    assert rows_of(tmp_path) == rows_of(whole[2])
    assert summary["loss"] == whole[1]["loss"]


def test_evaluates_the_merged_model(whole):
    experiment, summary, _ = whole
    e = experiment
    last = e.checkpoints.latest()
    (params, state), _ = e.checkpoints.restore(last, loop._abstract(e))
    adapters = acco_jax.committed_params(state, params)
    assert any(ab["b"].any() for ab in adapters.values())
    base = gpt_neo.init_params(e.model, jax.random.key(e.config.seed))
    here = jax.device_put(adapters, jax.devices()[0])
    merged = lora.merge(base, here, 2.0)
    tokens = np.asarray(e.corpus.validation_tokens, np.int32)
    length, nats = e.config.length, []
    loss = jax.jit(gpt_neo.loss_fn(e.model))
    for at in range(0, len(tokens) - 1 - length, length):
        nats.append(
            loss(merged, {"tokens": tokens[None, at : at + length + 1]}, None)[0]
        )
    mean = float(np.sum(nats)) / (len(nats) * length)
    assert summary["loss"] == pytest.approx(mean, rel=1e-3)  # the last row apart


def test_the_evaluators_program_holds_no_model(whole):
    evaluate = loop.Evaluator(whole[0])
    assert len(jax.tree.leaves(evaluate._loss_fn)) == len(
        jax.tree.leaves(gpt_neo.init_params(whole[0].model, jax.random.key(0)))
    )


def test_sends_and_holds_what_adapters_need(whole, train, tmp_path):
    _, summary, _ = whole
    _, dense = train(tmp_path, steps=4)
    assert summary["parameters"] == dense["parameters"]
    adapters = 2 * 2 * 2 * (16 + 16)  # q and v, 2 layers, rank 2, float32
    assert summary["bytes_sent_per_worker"] >= 9 * 4 * adapters
    for key in ("bytes_sent_per_worker", "state_bytes_per_device"):
        assert summary[key] < dense[key] / 2


def test_a_pattern_that_matches_nothing_is_refused(tiny, tmp_path):
    config = tiny(**{"lora.rank": 2, "lora.pattern": "conv"})
    with pytest.raises(ValueError, match="matches no parameter"):
        loop.prepare(config, tmp_path, jax.devices()[:2])
