"""What an experiment may set, and the one line that refuses the rest."""

import inspect
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

from acco_jax.methods import METHODS
from acco_jax.models import transformer
from acco_jax.run.build import models, optimizers
from acco_jax.run.build.validation import validate
from acco_jax.run.config import fields as configs
from acco_jax.run.config import identity


def set_field(config, field, value):
    config.unlock()
    *path, last = field.split(".")
    for name in path:
        config = config[name]
    config[last] = value


WRONG = [
    ("optimzer", 1, r"no field optimzer: did you mean 'optimizer'\?"),
    (
        "optimizer.learning_rat",
        1,
        r"no field optimizer.learning_rat: did you mean 'opti",
    ),
    ("data.nmae", "x", r"no field data.nmae: did you mean 'data.name'\?"),
    ("entirely_different", 1, r"no field entirely_different\."),
    ("method", "aco", r"method is 'aco': did you mean 'acco'\? Known: acco, "),
    ("method_options.warmup", 1, r"method_options of acco is 'warmup': Known: "),
    ("form", "fussed", r"form is 'fussed': did you mean 'fused'\?"),
    ("optimizer.name", "adamv", r"optax does not have: did you mean 'adam"),
    ("optimizer.name", "clip", r"'clip', which takes no learning_rate"),
    ("optimizer.options.b3", 0.1, r"optimizer.options of adamw is 'b3': Known: b1, b2"),
    ("optimizer.schedule", "cosin", r"schedule is 'cosin': did you mean 'cosine'\?"),
    ("model.dtype", "bfloat61", r"model.dtype is 'bfloat61': give a floating dtype"),
    ("model.param_dtype", "int32", r"model.param_dtype is 'int32': give a floating"),
    ("comm_dtype", "flot32", r"comm_dtype is 'flot32': give a floating dtype"),
    ("accumulate_dtype", "uint8", r"accumulate_dtype is 'uint8': give a floating"),
    ("steps", 0, r"steps is 0: it must be at least 1"),
    ("log_every", -3, r"log_every is -3: it must be at least 1"),
    ("most_dropped_in_a_row", 0, r"most_dropped_in_a_row is 0: it must be at least 1"),
    ("counts", (0, 0), r"counts is 0 for every worker"),
    ("lora.rank", -1, r"lora.rank is -1: give 0 for no adapters"),
    ("lora.ranks", (("mlp", 0.5),), r"lora.ranks has \('mlp', 0.5\): give pairs"),
    ("lora.ranks", ("mlp", 4), r"lora.ranks has 'mlp': give pairs"),
    ("data.skew", 1.5, r"data.skew is 1.5: it must be at least 0 and at most 1"),
    ("data.task", "instuct", r"data.task is 'instuct': did you mean 'instruct'\?"),
    ("data.lengths", (64, 128), r"lengths is \(64, 128\), but rows of 'pretrain' have"),
    ("lora.rnak", 1, r"no field lora.rnak: did you mean 'lora.rank'\?"),
]


@pytest.mark.parametrize(("field", "value", "message"), WRONG)
def test_refuses_in_one_line(field, value, message):
    config = configs.default_config()
    set_field(config, field, value)
    with pytest.raises(ValueError, match=message) as error:
        validate(config)
    assert "\n" not in str(error.value)


def test_a_rank_per_layer_excludes_one_for_all():
    config = configs.default_config()
    config.lora.ranks = (("attn", 8), ("mlp", 4))
    validate(config)
    config.lora.rank = 2
    with pytest.raises(ValueError, match=r"ranks is .* and lora.rank 2: give one"):
        validate(config)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("lengths", (128, 64), r"lengths is \(128, 64\): give ascending integers from"),
        ("lengths", (64, 512), r"lengths is \(64, 512\): .* from 1 to length, 256"),
        ("document_mask", True, "document_mask is of task='pretrain': .* leave it out"),
    ],
)
def test_instructions_refuse_in_one_line(field, value, message):
    config = configs.default_config()
    config.data.task, config.data.lengths = "instruct", (64, 256)
    validate(config)
    config.data[field] = value
    with pytest.raises(ValueError, match=message) as error:
        validate(config)
    assert "\n" not in str(error.value)


def test_refuses_a_value_of_another_type_and_a_missing_field():
    config = ConfigDict(configs.default_config().to_dict(), type_safe=False)
    config.steps = "many"
    with pytest.raises(ValueError, match="steps is 'many': give a value of type int"):
        validate(config)
    config = configs.default_config()
    del config.model["heads"]
    with pytest.raises(ValueError, match=r"lacks the field model\.heads"):
        validate(config)


def with_scales():
    config = configs.default_config()
    config.scales.smoke = {
        "steps": 3,
        "tokens": None,
        "model": {"width": 16, "size": None},
        "optimizer": {"options": {"b2": 0.9}},
    }
    config.scales.large = {"steps": 5000}
    return config


def test_a_scale_changes_its_fields_but_those_of_the_command_line():
    config = with_scales()
    config.scale, config.model.size, config.model.layers = "smoke", "gpt2", 6
    small = configs.scaled(config)
    validate(small)
    assert (small.steps, small.model.width, small.model.layers) == (3, 16, 6)
    assert small.model.size is None and small.optimizer.options.b2 == 0.9
    assert small.scale is None and not small.scales
    assert config.steps == 1000 and "smoke" in config.scales
    kept = configs.scaled(config, ["steps", "optimizer.options"])
    assert kept.steps == 1000 and not kept.optimizer.options
    plain = configs.scaled(with_scales())
    assert plain.to_dict() == configs.default_config().to_dict()


@pytest.mark.parametrize(
    ("scale", "changes", "message"),
    [
        ("smok", {}, r"scale is 'smok': did you mean 'smoke'\? Known: large, smoke\."),
        (
            "smoke",
            {"steps": "few"},
            r"scales.smoke has steps='few', which does not fit",
        ),
        (
            "smoke",
            {"modle": {"width": 8}},
            r"scales.smoke has modle.width=8, which does",
        ),
        ("smoke", {"stpes": 8}, r"config has no field stpes: did you mean 'steps'\?"),
    ],
)
def test_a_scale_that_cannot_be_is_refused_in_one_line(scale, changes, message):
    config = with_scales()
    config.scales.smoke = changes
    config.scale = scale
    with pytest.raises(ValueError, match=message) as error:
        validate(configs.scaled(config))
    assert "\n" not in str(error.value)


def test_a_scale_that_was_not_applied_is_refused():
    config = with_scales()
    validate(config)
    config.scale = "smoke"
    with pytest.raises(ValueError, match="scale is 'smoke', but it was not applied"):
        validate(config)


def test_a_config_without_scales_says_so():
    config = configs.default_config()
    config.scale = "smoke"
    with pytest.raises(ValueError, match=r"scale is 'smoke', but the config has no"):
        configs.scaled(config)


@pytest.mark.parametrize("field", ["clip", "warmup_steps"])
def test_refuses_a_negative_field_of_the_optimizer(field):
    config = configs.default_config()
    config.optimizer[field] = -1
    with pytest.raises(ValueError, match=f"optimizer.{field} is -1.*: give 0 for none"):
        validate(config)


def test_what_the_config_has_fields_for_is_no_method_option():
    config = configs.default_config()
    config.method_options.comm_dtype = "bfloat16"
    with pytest.raises(ValueError, match="method_options of acco is 'comm_dtype'"):
        validate(config)


def test_the_default_is_valid_and_starts_no_backend():
    """In a process of its own: this one has a backend already."""
    script = """
import jax
from jax._src import xla_bridge
from acco_jax.run.config import fields as configs
from acco_jax.run.build.validation import validate
validate(configs.default_config())
assert not xla_bridge.backends_are_initialized()
jax.devices()
assert xla_bridge.backends_are_initialized()
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def updates_of(**optimizer):
    config = configs.default_config()
    config.optimizer.update(optimizer)
    config.steps = 10
    inner = optimizers.optimizer(config)
    params = {"w": jnp.full((2, 3), 0.5)}
    state = inner.init(params)
    updates, _ = inner.update({"w": jnp.ones((2, 3))}, state, params)
    return np.asarray(updates["w"])


def test_optimizers_by_name_with_their_options():
    grads, params = {"w": jnp.ones((2, 3))}, {"w": jnp.full((2, 3), 0.5)}

    def expected(inner):
        return np.asarray(inner.update(grads, inner.init(params), params)[0]["w"])

    none = {"clip": 0.0}
    adamw = optax.adamw(1e-3, b2=0.95, weight_decay=0.1)
    np.testing.assert_array_equal(updates_of(**none), expected(adamw))
    options = {"b2": 0.9, "weight_decay": 0.0}
    plain = optax.adamw(1e-3, b2=0.9, weight_decay=0)
    np.testing.assert_array_equal(updates_of(options=options, **none), expected(plain))
    np.testing.assert_array_equal(
        updates_of(name="lion", **none), expected(optax.lion(1e-3))
    )
    sgd = optax.sgd(1e-3, momentum=0.9)
    np.testing.assert_array_equal(
        updates_of(name="sgd", options={"momentum": 0.9}, **none), expected(sgd)
    )
    clipped = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1e-3))
    np.testing.assert_array_equal(updates_of(name="sgd", clip=0.1), expected(clipped))
    muon = optax.contrib.muon(1e-3)
    np.testing.assert_array_equal(updates_of(name="muon", **none), expected(muon))


def test_learning_rate_warms_up_and_ends_at_zero():
    config = configs.default_config()
    config.steps, config.optimizer.learning_rate = 20, 1.0
    config.optimizer.warmup_steps = 4
    rate = optimizers.learning_rate(config)
    rates = np.asarray([rate(t) for t in range(21)])
    np.testing.assert_allclose(rates[:5], [0.2, 0.4, 0.6, 0.8, 1.0], rtol=1e-6)
    assert np.all(np.diff(rates[4:]) < 0) and abs(rates[20]) < 1e-6
    config.optimizer.schedule, config.optimizer.warmup_steps = "constant", 0
    assert [float(optimizers.learning_rate(config)(t)) for t in (0, 20)] == [1, 1]


def test_model_sizes_and_vocabulary():
    config = configs.default_config()
    model = models.transformer_config(config, 257)
    assert (model.width, model.layers, model.vocab_size) == (128, 4, 257)
    assert model.max_length == config.length and model.dtype == jnp.bfloat16
    assert model.scan_layers is None
    config.method = "fused_zero1"  # what it reduces is what a loop takes apart
    assert models.transformer_config(config, 257).scan_layers is True
    config.model.scan_layers = False
    assert models.transformer_config(config, 257).scan_layers is False
    config.model.size = "gpt-neo-125m"
    config.model.window = 64  # of a smaller model's experiment
    found = models.transformer_config(config, 257)
    assert (found.width, found.window) == (768, 256)
    config.model.size = "gpt-neo-1m"
    with pytest.raises(ValueError, match="'gpt-neo-1m' is unknown: use one of gpt-neo"):
        models.transformer_config(config, 257)
    config.model.size, config.model.vocab_size = None, 100
    with pytest.raises(
        ValueError, match="vocab_size is 100, but the tokenizer has 257"
    ):
        models.transformer_config(config, 257)
    config.model.vocab_size = 512
    assert models.transformer_config(config, 257).vocab_size == 512
    config.model.heads = 3
    with pytest.raises(ValueError, match="not divisible by heads=3"):
        models.transformer_config(config, 257)
    with pytest.raises(ValueError, match=r"layers=2\.0 must be a whole number"):
        transformer.size("gpt2", layers=2.0)


def test_families_of_models():
    config = configs.default_config()
    neo = models.transformer_config(config, 257)
    assert (neo.norm, neo.positions, neo.mlp, neo.scale) == (
        "layer", "learned", "gelu", 1.0
    )  # fmt: skip
    config.model.update(family="qwen3", kv_heads=2, mlp_width=300)
    qwen = models.transformer_config(config, 257)
    assert (qwen.norm, qwen.positions, qwen.mlp, qwen.qk_norm) == (
        "rms", "rope", "swiglu", "head"
    )  # fmt: skip
    assert (qwen.heads, qwen.kv_heads, qwen.mlp_width) == (4, 2, 300)
    config.model.update(kv_heads=3)
    with pytest.raises(ValueError, match="not divisible by kv_heads=3"):
        models.transformer_config(config, 257)
    config.model.update(size="llama-3-8b", kv_heads=None)
    with pytest.raises(ValueError, match=r"mlp_width is 300, but model\.size 'llama"):
        models.transformer_config(config, 257)
    config.model.update(mlp_width=None)
    assert models.transformer_config(config, 257).kv_heads == 8
    config.model.update(size=None, family="llama3")
    with pytest.raises(ValueError, match="did you mean 'llama'"):
        models.transformer_config(config, 257)


def test_differing_field_names_what_matters():
    old = {"steps": 3, "log_every": 1, "model": {"width": 8}}
    assert identity.differing_field(old, old | {"log_every": 7}) == ""
    new = old | {"model": {"width": 16}}
    assert identity.differing_field(old, new) == "model.width=8, not 16"
    assert identity.differing_field(old, {**old, "seed": 1}) == "seed=0, not 1"


def test_dtype_names_the_field():
    assert configs.dtype("x", "float32") == jnp.float32
    assert jax.dtypes.issubdtype(configs.dtype("x", "bfloat16"), jnp.floating)


@pytest.mark.parametrize("method", ["acco", "zero1", "dpu", "wp"])
def test_few_bits_are_an_option_of_every_method_that_has_them(method):
    config = configs.default_config()
    config.method, config.method_options.gather_bits = method, 8
    validate(config)
    tx = optimizers.method(config, method, jax.make_mesh((1,), ("data",)), "data")
    assert tx.codecs.gather_quantized
    config.method_options.bits = 8
    with pytest.raises(ValueError, match=f"method_options of {method} is 'bits'"):
        validate(config)


@pytest.mark.parametrize(
    ("name", "options", "step"),
    [
        ("polynomial_schedule", {"end_value": -1, "power": 1, "transition_steps": 10},
         "at step 1"),
        ("exponential_decay", {"transition_steps": 5, "decay_rate": -1}, "nan at step"),
        ("linear_schedule", {"end_value": -2e-3, "transition_steps": 3},
         "-0.001 at step 2"),
    ],
)  # fmt: skip
def test_a_schedule_with_a_negative_rate_is_refused(name, options, step):
    config = configs.default_config()
    config.steps, config.optimizer.schedule = 10, name
    config.optimizer.schedule_options.update(options)
    message = (
        rf"schedule is '{name}', whose learning rate is .*{step}.*schedule_options"
    )
    with pytest.raises(ValueError, match=message):
        optimizers.checked_rate(config)


def test_a_schedule_that_falls_to_0_is_taken():
    config = configs.default_config()
    config.steps, config.optimizer.schedule = 10, "polynomial_schedule"
    options = {"end_value": 0.0, "power": 1, "transition_steps": 10}
    config.optimizer.schedule_options.update(options)
    rate = optimizers.checked_rate(config)
    assert float(rate(5)) == pytest.approx(5e-4) and float(rate(10)) == 0


@pytest.mark.parametrize("method", list(METHODS))
def test_the_defaults_of_every_method_suit_its_types(method):
    config = configs.default_config()
    config.method = method
    for parameter in inspect.signature(METHODS[method]).parameters.values():
        given = parameter.default is not parameter.empty
        if given and parameter.name != "outer":
            config.method_options[parameter.name] = parameter.default
    validate(config)


def test_sizes_name_fields_that_the_config_has():
    config = configs.default_config()
    config.model.heads = 3
    with pytest.raises(ValueError, match=r"choose heads that divide the width$"):
        models.transformer_config(config, 257)
    config.model.update(heads=4, layers=3)
    with pytest.raises(
        ValueError, match=r"layers=3 is not a multiple of 2, .*choose a"
    ):
        models.transformer_config(config, 257)
    config.model.update(family="llama", width=36)
    with pytest.raises(
        ValueError, match=r"width=36 with heads=4 makes heads of 9, whic"
    ):
        models.transformer_config(config, 257)
