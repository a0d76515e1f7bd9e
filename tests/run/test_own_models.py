"""Models that the runner does not know, from three libraries."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from acco_jax.run import loop, preparation
from acco_jax.run.build import models
from acco_jax.run.build.validation import validate
from acco_jax.run.observe import metrics
from acco_jax.run.state.memory import MemoryCopies

HERE = "tests.run.own_models"
CLOCKS = ("seconds", "tokens_per_second", "goodput")


def rows_of(workdir):
    return [
        {k: v for k, v in row.items() if k not in CLOCKS}
        for row in metrics.read(workdir)
    ]


@pytest.mark.fast("equinox")
@pytest.mark.parametrize("library", ["linen", "equinox"])
def test_trains(train, tmp_path, library):
    changes = {"model.factory": f"{HERE}:{library}_model",
               "optimizer.learning_rate": 1e-2}  # fmt: skip
    experiment, summary = train(tmp_path, **changes)
    rows = rows_of(tmp_path)
    assert summary["loss"] < rows[0]["loss"] - 0.05
    assert summary["parameters"] == experiment.model.parameters() > 0


@pytest.mark.fast(slow=("acco",))
@pytest.mark.parametrize("method", ["acco", "diloco"])
def test_dropout_continues_bit_for_bit(train, tmp_path, method):
    changes = {"model.factory": f"{HERE}:nnx_model", "method": method,
               "optimizer.learning_rate": 1e-2}  # fmt: skip
    if method == "diloco":
        changes["method_options"] = {"local_steps": 2}
    train(tmp_path / "whole", **changes)
    train(tmp_path / "stopped", stop_after=2, **changes)
    train(tmp_path / "stopped", **changes)
    rows = rows_of(tmp_path / "whole")
    assert rows == rows_of(tmp_path / "stopped")
    losses = [row["loss"] for row in rows]
    assert losses[-1] < losses[0] - 0.05 and len(set(losses)) == len(losses)


def test_dropout_gets_another_key_in_each_half_round(tiny, tmp_path):
    """And none in an evaluation: the same parameters give the same loss."""
    config = tiny(**{"model.factory": f"{HERE}:nnx_model"})
    experiment = preparation.prepare(config, tmp_path, jax.devices()[:2])
    run = loop._Run(experiment, MemoryCopies(None, tmp_path, {}, experiment.world))
    keys = []
    for _ in range(3):
        keys.append(np.asarray(jax.random.key_data(run._rng())).tobytes())
        run.half_round()
    assert len(set(keys)) == 3
    params = jax.tree.map(jnp.copy, run.params)
    assert run._evaluate(params, 1) == run._evaluate(params, 1)
    run.close()
    batch = {"tokens": jnp.arange(66, dtype=jnp.int32).reshape(2, 33)}
    one, other = (
        experiment.model.loss(params, batch, jax.random.key(k))[0] for k in (0, 1)
    )
    assert one != other


def test_options_reach_the_factory(tiny):
    config = tiny(**{"model.factory": f"{HERE}:nnx_model"})
    config.model.options.rate = 0.0
    model = models.model(config, 257)
    params = model.init(jax.random.key(0))
    batch = {"tokens": jnp.ones((1, 9), jnp.int32)}
    with_key = model.loss(params, batch, jax.random.key(1))[0]
    assert with_key == model.loss(params, batch, None)[0]


@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        ("own_models", {}, "give 'package.module:function'"),
        ("nowhere.at_all:f", {}, "cannot be imported: No module named 'nowhere'"),
        (f"{HERE}:nothing", {}, "cannot be imported: .*has no attribute 'nothing'"),
        (f"{HERE}:no_model", {}, "returned a dict: it must return an acco_jax"),
        (f"{HERE}:linen_model", {"depth": 3}, "does not take .*depth"),
    ],
)
def test_a_wrong_factory_is_one_line(tiny, factory, options, message):
    config = tiny(**{"model.factory": factory})
    config.model.options.update(options)
    with pytest.raises(ValueError, match=message) as error:
        validate(config)
        models.model(config, 257)
    assert "\n" not in str(error.value)


def test_another_vocabulary_than_a_published_size_is_said(tiny, caplog):
    config = tiny(**{"model.size": "gpt-neo-125m", "length": 2048})
    with caplog.at_level(logging.WARNING):
        models.warn_of_another_size(config, models.model(config, 257), 257)
    said = caplog.text
    assert "has 86,798,592 parameters instead of 125,198,592" in said
    caplog.clear()
    config.model.vocab_size = 50257
    with caplog.at_level(logging.WARNING):
        models.warn_of_another_size(config, models.model(config, 257), 257)
    assert caplog.text == ""
