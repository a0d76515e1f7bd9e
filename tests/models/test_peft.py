"""Adapters in PEFT's format; benchmarks/families.py has peft read and write some."""

import json
import re
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from acco_jax.models import huggingface, lora, peft, transformer

DATA = Path(__file__).parents[1] / "recorded"
FLOAT32 = {"dtype": jnp.float32, "param_dtype": jnp.float32}


def arrays_of(name, tag):
    with np.load(DATA / f"{name}_reference.npz") as arrays:
        start = len(tag) + 1
        found = {k[start:]: v for k, v in arrays.items() if k.startswith(f"{tag}:")}
        return json.loads(str(arrays["config"])), found, dict(arrays)


def model_of(name):
    """A recorded model: its configuration, parameters, and what is recorded."""
    fields, state, recorded = arrays_of(name, "weight")
    config = huggingface.config_of(fields, **FLOAT32)
    return config, huggingface.from_state(config, state.__getitem__), recorded


def neo():
    """A GPT-Neo, whose layers are of two kinds."""
    config = transformer.Config(
        vocab_size=31, max_length=8, width=16, layers=4, heads=2, window=4, **FLOAT32
    )
    draw, shapes = np.random.default_rng(1).normal, transformer.shapes_of(config)
    return config, jax.tree.map(lambda x: draw(size=x.shape).astype("f"), shapes), {}


@pytest.mark.parametrize("name", ["llama_tied", "gpt2"])
def test_the_adapted_model_computes_what_peft_computes(name):
    config, params, recorded = model_of(name)
    said, arrays, expected = arrays_of(f"peft_{name}", "adapter")
    adapters = peft.from_state(config, said, arrays, arrays.__getitem__)
    merged = lora.merge(params, adapters, peft.scale_of(said))
    logits = jax.jit(transformer.apply, static_argnums=0)(
        config, merged, recorded["tokens"][:, :-1]
    )
    np.testing.assert_allclose(logits, expected["logits"], rtol=1e-5, atol=1e-5)
    shapes = jax.eval_shape(
        lambda: lora.init(params, jax.random.key(0), {
            f"^{re.escape(path)}$": ab["a"].shape[-1] for path, ab in adapters.items()
        })
    )  # fmt: skip
    chex.assert_trees_all_equal_shapes_and_dtypes(adapters, shapes)


def scaling_of(said, module):
    """The factor of a module's B @ A, by peft's rules; None: it is not adapted."""
    names = said["target_modules"]
    if not any(module == n or module.endswith(f".{n}") for n in names):
        return None

    def number(patterns, default):
        matching = (
            value
            for key, value in said[patterns].items()
            if re.match(rf"(.*\.)?({key})$", module)
        )
        return next(matching, said[default])

    return number("alpha_pattern", "lora_alpha") / number("rank_pattern", "r")


CHANGED = {
    "llama_tied": {"attn/q_proj": 2, "down_proj": 3, "v_proj": 2},
    "gpt2": {"attn/(q|v)_proj": 2, "attn/out_proj": 1, "mlp/c_fc": 3},
    "gpt_neo": {"0_global/attn/q_proj": 2, "c_(fc|proj)": 1},
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_is_written_changes_the_weights_as_the_adapters_do(name):
    config, params, _ = neo() if name == "gpt_neo" else model_of(name)
    draw = np.random.default_rng(0).normal
    ranks = {f"{pattern}/kernel": r for pattern, r in CHANGED[name].items()}
    adapters = jax.tree.map(
        lambda x: draw(size=x.shape).astype(np.float32),
        jax.eval_shape(lambda: lora.init(params, jax.random.key(0), ranks)),
    )
    said = json.loads(json.dumps(peft.described(config, adapters, 0.7, "base")))
    arrays = dict(peft.to_state(config, adapters))
    assert said["fan_in_fan_out"] == (name == "gpt2")
    merged = dict(huggingface.to_state(config, lora.merge(params, adapters, 0.7)))
    for weight, before in huggingface.to_state(config, params):
        module = weight.removesuffix(".weight")
        scaling = scaling_of(said, module) if before.ndim == 2 else None
        start = f"base_model.model.{module}.lora_"
        if scaling is None:
            np.testing.assert_array_equal(merged[weight], before)
            assert f"{start}A.weight" not in arrays
            continue
        a, b = arrays.pop(f"{start}A.weight"), arrays.pop(f"{start}B.weight")
        change = scaling * b @ a
        change = change.T if said["fan_in_fan_out"] else change
        assert abs(change).max() > 0.1
        np.testing.assert_allclose(merged[weight], before + change, atol=1e-5)
    assert not arrays


def test_names_are_short_where_all_layers_are_adapted():
    config, params, _ = model_of("gpt2")

    def said_of(**ranks):
        ranks = {f"{name}/kernel": rank for name, rank in ranks.items()}
        adapters = jax.eval_shape(lambda: lora.init(params, jax.random.key(0), ranks))
        return peft.described(config, adapters, 2.0, None)

    said = said_of(out_proj=2, q_proj=3)
    assert said["target_modules"] == ["attn.c_proj", "c_attn"]
    assert {said["r"], *said["rank_pattern"].values()} == {2, 3}
    assert said["lora_alpha"] == 2 * said["r"]
    assert said_of(q_proj=1, k_proj=1, v_proj=1)["r"] == 3
    assert said_of(c_proj=2, c_fc=2, out_proj=2)["target_modules"] == ["c_fc", "c_proj"]


def test_a_round_trip():
    config, params, _ = neo()
    draw = np.random.default_rng(0).normal
    ranks = {"q_proj/kernel": 2, "c_fc/kernel": 3}
    start = jax.eval_shape(lambda: lora.init(params, jax.random.key(0), ranks))
    adapters = jax.tree.map(lambda x: draw(size=x.shape).astype(x.dtype), start)
    said = peft.described(config, adapters, 0.75, None)
    arrays = dict(peft.to_state(config, adapters))
    assert peft.scale_of(said) == 0.75
    again = peft.from_state(config, said, arrays, arrays.__getitem__)
    chex.assert_trees_all_equal(again, adapters)


NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
WRONG = {
    "DoRA": ({"use_dora": True}, {}, "use_dora=True, which is not implemented"),
    "another kind": ({"peft_type": "IA3"}, {}, "peft_type='IA3'"),
    "biases": ({"bias": "all"}, {}, "bias='all'"),
    "the base changes": ({"init_lora_weights": "pissa"}, {}, "weights='pissa'"),
    "of a later peft": ({"use_new": [1]}, {}, r"use_new=\[1\]"),
    "patterns": ({"rank_pattern": 3}, {}, "rank_pattern=3"),
    "no number": ({"alpha_pattern": {"q_proj": "x"}}, {}, "alpha_pattern='x': give"),
    "no pattern": ({"alpha_pattern": {"(": 1}}, {}, "no regular expression"),
    "alpha": ({"lora_alpha": 0}, {}, "lora_alpha=0: give a number above 0"),
    "another rank": ({"r": 4}, {}, r"of shape \(3, 24\) .* not \(4, 24\)"),
    "an embedding": (
        {}, {"base_model.model.model.embed_tokens.lora_embedding_A": (2, 3)},
        "embedding_A, which is not a lora_A",
    ),
    "an embedding's kernel": (
        {}, {"base_model.model.model.embed_tokens.lora_A.weight": (2, 3)},
        "adapters of wte/embedding: PEFT's format has only",
    ),
    "another model": (
        {}, {NAME.replace(".0.", ".7."): (3, 24)}, "which the model does not have"
    ),
    "half": ({}, {NAME: None}, "lack .*q_proj.lora_A.weight"),
    "another width": ({}, {NAME: (3, 25)}, r"lora_A of shape \(3, 25\)"),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "changed", "match"), WRONG.values(), ids=WRONG)
def test_other_adapters_are_refused_in_one_line(fields, changed, match):
    config, _, _ = model_of("llama_tied")
    said, arrays, _ = arrays_of("peft_llama_tied", "adapter")
    for name, shape in changed.items():
        arrays[name] = None if shape is None else np.zeros(shape, "f")
    arrays = {name: x for name, x in arrays.items() if x is not None}
    with pytest.raises(ValueError, match=match) as error:
        peft.from_state(config, said | fields, arrays, arrays.__getitem__)
    assert "\n" not in str(error.value)


def test_adapters_that_peft_has_no_place_for_are_refused():
    config, _, _ = model_of("qwen3_moe")
    shapes = transformer.shapes_of(config)
    for pattern in ("wte", "router", "up_proj"):
        found = jax.eval_shape(
            lambda p=pattern: lora.init(shapes, jax.random.key(0), 1, p)
        )
        with pytest.raises(ValueError, match="only those of linear layers"):
            peft.described(config, found, 1.0, None)
    with pytest.raises(ValueError, match="there are no adapters in it"):
        peft.from_state(config, {}, [], {}.__getitem__)
