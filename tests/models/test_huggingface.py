"""Names of Hugging Face: configurations and weights, there and back."""

import dataclasses
import json
import pathlib

import chex
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from acco_jax.models import huggingface, transformer
from acco_jax.models.transformer import Llama3Scaling

DATA = pathlib.Path(__file__).parents[1] / "recorded"
NAMES = (
    "gpt_neo", "gpt2", "llama", "llama_tied", "mistral", "qwen2", "qwen3",
    "qwen3_tied", "olmo2", "gemma2", "gemma3", "qwen3_moe",
)  # fmt: skip
# What is in the config.json of EleutherAI/gpt-neo-125m, as far as the model goes.
GPT_NEO = {
    "activation_function": "gelu_new",
    "attention_layers": ["global", "local"] * 6,
    "attention_types": [[["global", "local"], 6]],
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": None,
    "layer_norm_epsilon": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neo",
    "num_heads": 12,
    "num_layers": 12,
    "vocab_size": 50257,
    "window_size": 256,
}
TINY = {
    "vocab_size": 97, "max_position_embeddings": 24, "hidden_size": 32, "num_heads": 2,
    "num_layers": 4, "window_size": 5, "attention_types": [[["global", "local"], 2]],
    "attention_layers": ["global", "local"] * 2,
}  # fmt: skip
LLAMA = {  # meta-llama/Llama-3.2-1B
    "attention_bias": False,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN3 = {  # Qwen/Qwen3-8B
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GEMMA2 = {  # google/gemma-2-2b
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
GEMMA3 = {  # google/gemma-3-270m, without layer_types as earlier files
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 640,
    "initializer_range": 0.02,
    "intermediate_size": 2048,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "use_bidirectional_attention": False,
    "vocab_size": 262144,
}
MISTRAL = {  # mistralai/Mistral-7B-v0.1
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
QWEN3_MOE = {  # Qwen/Qwen3-30B-A3B
    **QWEN3,
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "router_aux_loss_coef": 0.001,
}
GPT2 = {  # openai-community/gpt2
    "activation_function": "gelu_new",
    "attn_pdrop": 0.1,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}


def recorded(name, **overrides):
    """The configuration and the state dict of a recorded model."""
    with np.load(DATA / f"{name}_reference.npz") as arrays:
        fields = (
            GPT_NEO | TINY if name == "gpt_neo" else json.loads(str(arrays["config"]))
        )
        weights = (k for k in arrays if k.startswith("weight:"))
        state = {k.removeprefix("weight:"): arrays[k] for k in weights}
    return huggingface.config_of(fields, **overrides), state


@pytest.mark.parametrize("name", NAMES)
def test_a_state_dict_comes_back_to_the_bit(name):
    config, state = recorded(name)
    params = huggingface.from_state(config, state.__getitem__)
    chex.assert_trees_all_equal_shapes_and_dtypes(params, transformer.shapes_of(config))
    back = dict(huggingface.to_state(config, params))
    assert back.keys() == state.keys()
    for key, value in back.items():
        assert value.flags.c_contiguous and value.dtype == state[key].dtype
        np.testing.assert_array_equal(value, state[key])


def test_one_leaf_asks_for_its_own_weights():
    config, state = recorded("gpt2")
    asked = []

    def get(name):
        asked.append(name)
        return state[name]

    key = huggingface.leaf(config, "h/0_global/attn/k_proj/kernel", get)
    assert asked == [f"transformer.h.{i}.attn.c_attn.weight" for i in range(2)]
    np.testing.assert_array_equal(key[1], state[asked[1]][:, 30:60])
    with pytest.raises(
        ValueError, match=r"no parameter h/0/wte: use a path such as h/"
    ):
        huggingface.leaf(config, "h/0/wte", get)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_names_of_a_model_without_its_head(name):
    config, state = recorded(name)
    bare = {
        k.removeprefix("model.").removeprefix("transformer."): v
        for k, v in state.items()
    }
    chex.assert_trees_all_equal(
        huggingface.from_state(config, bare.__getitem__),
        huggingface.from_state(config, state.__getitem__),
    )


def test_sixteen_bits_stay_what_they_are():
    config, state = recorded("qwen3_tied", param_dtype=jnp.bfloat16)
    state = {k: v.astype(ml_dtypes.bfloat16) for k, v in state.items()}
    params = huggingface.from_state(config, state.__getitem__)
    arrays = huggingface.to_state(config, params)
    assert all(np.array_equal(value, state[key]) for key, value in arrays)
    assert huggingface.config_json(config)["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        (GPT_NEO, "gpt-neo-125m"),
        (GPT2, "gpt2"),
        (LLAMA, "llama-3.2-1b"),
        (QWEN3, "qwen3-8b"),
        (MISTRAL, "mistral-7b"),
        (GEMMA2, "gemma-2-2b"),
        (GEMMA3, "gemma-3-270m"),
        (QWEN3_MOE, "qwen3-30b-a3b"),
    ],
)
def test_published_configurations(fields, size):
    config = huggingface.config_of(fields, remat="block")
    published = transformer.size(size, remat="block")
    scale = published.head_size**-0.5 if "query_pre_attn_scalar" in fields else None
    if scale:
        published = dataclasses.replace(published, scale=scale)
    assert dataclasses.replace(config, head_width=published.head_width) == published
    assert config.computed == transformer.size(size, max_length=9).computed
    assert config.computed != dataclasses.replace(config, eps=1e-3).computed
    said = huggingface.config_json(config)
    again = huggingface.config_of(json.loads(json.dumps(said)), remat="block")
    # widths that follow from others are said
    assert again == dataclasses.replace(config, mlp_width=config.hidden)
    filled = {k: v for k, v in fields.items() if k in said and v is not None}
    filled.pop("torch_dtype", None)
    assert {k: said[k] for k in filled} == filled


def test_both_forms_of_rope():
    rope = {**LLAMA["rope_scaling"], "rope_theta": 500000.0}
    newer = {k: v for k, v in LLAMA.items() if not k.startswith("rope")}
    config = huggingface.config_of({**newer, "rope_parameters": rope})
    assert config == huggingface.config_of(LLAMA)
    assert config.rope_scaling == Llama3Scaling(32.0, 1.0, 4.0, 8192)
    assert huggingface.config_of(newer).rope_theta == 10000.0


YARN = {"rope_type": "yarn", "factor": 4.0}
SLOW = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0}
SLOW |= {"high_freq_factor": 4.0}
LENGTH = "original_max_position_embeddings"
# The fields of RoPE beside others, and inverse frequencies of transformers 5.24.
LENGTHS = {
    "yarn, outside": ({"rope_scaling": YARN, LENGTH: 32}, [1, 0.025, 0.0025, 0.00025]),
    "yarn, both": (
        {"rope_scaling": YARN | {LENGTH: 64}, LENGTH: 32},
        [1, 0.025, 0.0025, 0.00025],
    ),
    "llama3, newer": (
        {"rope_parameters": SLOW | {LENGTH: 256, "rope_theta": 5e4}, LENGTH: 32},
        [1, 0.016719, 0.001118, 0.000075],
    ),
    "llama3, both": (
        {"rope_scaling": SLOW | {LENGTH: 256}, LENGTH: 32},
        [1, 0.025, 0.0025, 0.00025],
    ),
    "null": (
        {"rope_scaling": YARN | {LENGTH: 64}, LENGTH: None},
        [1, 0.0625, 0.0025, 0.00025],
    ),
    "two fields": (
        {
            "rope_scaling": YARN | {LENGTH: 64},
            "rope_parameters": {
                "rope_type": "linear",
                "factor": 2.0,
                "rope_theta": 5e5,
            },
        },
        [1, 0.0625, 0.0025, 0.00025],
    ),
    "of a kind of layers": (
        {"rope_parameters": {"full_attention": YARN | {LENGTH: 64}}, LENGTH: 32},
        [1, 0.0625, 0.0025, 0.00025],
    ),
}


@pytest.mark.parametrize(("rope", "frequencies"), LENGTHS.values(), ids=LENGTHS)
def test_a_length_outside_of_rope_is_read_as_by_transformers(rope, frequencies):
    plain = {k: v for k, v in LLAMA.items() if not k.startswith("rope")}
    config = huggingface.config_of({**plain, "max_position_embeddings": 128, **rope})
    exported = huggingface.config_of(huggingface.config_json(config))
    for found in (config, exported):
        radians = found.rope_theta ** (-np.arange(0, 8, 2) / 8)
        scaled = found.rope_scaling.scaled(radians)
        np.testing.assert_allclose(scaled, frequencies, atol=6e-7)


FULL = {"rope_type": "default", "rope_theta": 5e6}
SCALED = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
LOCAL = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("rope", "theta"),
    [
        ({"full_attention": FULL}, 5e6),
        ({"full_attention": FULL, "sliding_attention": LOCAL}, 5e6),
        ({"full_attention": {**FULL, "factor": None}}, 5e6),
        (FULL, 5e6),
        ({"rope_theta": 7e5}, 7e5),
        (None, 10000.0),
        ({}, 10000.0),
    ],
)
@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_rope_of_a_type_of_layers_is_read(rope, theta, name):
    newer = {k: v for k, v in QWEN3.items() if not k.startswith("rope")}
    assert huggingface.config_of({**newer, name: rope}).rope_theta == theta
    scaled = {**LLAMA["rope_scaling"], "rope_theta": 500000.0}
    newer = {k: v for k, v in LLAMA.items() if not k.startswith("rope")}
    config = huggingface.config_of({**newer, name: {"full_attention": scaled}})
    assert config == huggingface.config_of(LLAMA)


@pytest.mark.parametrize(
    "rope",
    [
        {"sliding_attention": LOCAL},
        {"rope_theta": 5e6, "full_attention": FULL},
        {"full_attention": 5e6, "sliding_attention": LOCAL},
        {"chunked_attention": {}},
        [FULL],
        "default",
    ],
)
def test_rope_that_cannot_be_read_is_refused(rope):
    newer = {k: v for k, v in QWEN3.items() if not k.startswith("rope")}
    with pytest.raises(ValueError, match=r"rope_parameters=.*full_attention") as error:
        huggingface.config_of({**newer, "rope_parameters": rope})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_weights_that_are_not_read(name):
    config, state = recorded(name)
    layer = {"gpt_neo": "transformer.h", "gpt2": "transformer.h"}.get(
        name, "model.layers"
    )
    bare = [n.partition(".")[2] for n in state if not n.startswith("lm_head")]
    assert huggingface.unread(config, [*state, *bare]) == []
    masks = {
        "gpt_neo": ["h.0.attn.attention.bias", "h.1.attn.attention.masked_bias"],
        "gpt2": ["transformer.h.0.attn.bias", "h.0.attn.masked_bias"],
    }.get(name, ["model.layers.0.self_attn.rotary_emb.inv_freq"])
    assert huggingface.unread(config, masks) == []
    other = [
        f"{layer}.{config.layers}.{next(iter(state)).rpartition('.')[2]}",
        f"{layer}.0.self_attn.o_proj.bias",
        f"{layer}.0.attn.attention.q_proj.bias",
        "score.weight",
        "lm_head.bias",
    ]
    assert huggingface.unread(config, [*state, *other]) == other


@pytest.mark.parametrize(
    ("fields", "change", "match"),
    [
        (
            GPT2,
            {"model_type": "bert"},
            "model_type='bert'.*gpt_neo, gpt2, llama.*gemma3_text",
        ),
        (GPT2, {"activation_function": "relu"}, "activation_function='relu'.*gelu_new"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx=True"),
        (GPT_NEO, {"num_layers": 24}, "num_layers=24, but 12 kinds of attention"),
        (LLAMA, {"attention_bias": True}, "attention_bias=True"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias=True"),
        (
            LLAMA,
            {"rope_scaling": {"rope_type": "dynamic"}},
            "rope_type='dynamic'.*default, linear, llama3, yarn",
        ),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn"}}, "'yarn', but no factor: add"),
        (LLAMA, {"rope_scaling": {"type": "llama3"}}, "but no factor"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config="),
        (LLAMA, {"num_key_value_heads": 5}, "kv_heads=5"),
        (QWEN3, {"use_sliding_window": True}, "use_sliding_window=True"),
        (QWEN3, {"layer_types": ["sliding_attention"]}, "sliding_attention"),
        (LLAMA, {"rope_theta": None}, "rope_theta=None: give a number above 0"),
        (QWEN3, {"rope_parameters": {"rope_theta": "x"}}, "rope_theta='x': give a num"),
        (QWEN3, {"rope_theta": 0}, "rope_theta=0: give a number above 0"),
        (LLAMA, {"rms_norm_eps": 0}, "rms_norm_eps=0: it must be above 0"),
        (LLAMA, {"rope_scaling": {"rope_type": "longrope"}}, "rope_type='longrope'"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor=0.5: giv"),
        (GEMMA2, {"use_bidirectional_attention": True}, "bidirectional_attention=True"),
        (QWEN3, {"is_causal": False}, "is_causal=False"),
        (GEMMA2, {"hidden_activation": "gelu"}, "hidden_activation='gelu'.*tanh"),
        (GEMMA2, {"layer_types": ["full_attention"]}, "layers=26, but 1 kinds of att"),
        (
            GEMMA3,
            {"layer_types": ["chunked_attention"] * 18},
            "chunked_attention.*slid",
        ),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        (
            GEMMA3,
            {"rope_parameters": {"full_attention": FULL, "sliding_attention": SCALED}},
            "sliding_attention.*rope_type default",
        ),
        (QWEN3_MOE, {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
        (QWEN3_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        (GPT2, {"layer_norm_epsilon": -1e-5}, "epsilon=-1e-05: it must be above 0"),
    ],
)
def test_what_is_not_implemented_is_refused(fields, change, match):
    with pytest.raises(ValueError, match=match) as error:
        huggingface.config_of({**fields, **change})
    assert "\n" not in str(error.value)


def test_a_mistral_without_a_window_is_a_llama():
    config = huggingface.config_of(MISTRAL | {"sliding_window": None})
    assert config.pattern == ("global",)
    assert huggingface.config_json(config)["model_type"] == "llama"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"local_rope_theta": None}, "needs a local_rope_theta"),
        ({"score_softcap": 5.0}, "score_softcap=5.0 is not of Hugging Face's gemma3"),
        ({"scale": 0.3}, r"scale=0.3 is not of gemma3: give 1 / sqrt"),
    ],
)
def test_what_a_family_has_no_field_for_is_not_exported(change, match):
    config = dataclasses.replace(huggingface.config_of(GEMMA3), **change)
    with pytest.raises(ValueError, match=match) as error:
        huggingface.config_json(config)
    assert "\n" not in str(error.value)


def test_other_errors_are_one_line():
    config, state = recorded("gpt_neo")
    get = state.__getitem__
    wide = dataclasses.replace(config, vocab_size=128)
    deep = dataclasses.replace(config, layers=6)
    untied = dataclasses.replace(config, tied=False)
    params = huggingface.from_state(config, get)
    gpt2, llama = recorded("gpt2")[0], recorded("llama")[0]
    missing = {k: v for k, v in LLAMA.items() if k != "hidden_size"}
    calls = {
        r"wte\.weight has shape \(97, 32\) in the state dict, not \(128, 32\)": (
            lambda: huggingface.from_state(wide, get)
        ),
        r"transformer\.h\.4.* is not in": lambda: huggingface.from_state(deep, get),
        "lm_head.weight is not in": lambda: huggingface.from_state(untied, get),
        r"wte/embedding has shape \(97, 32\), not \(128, 32\)": (
            lambda: dict(huggingface.to_state(wide, params))
        ),
        "hidden_size=None: it must be a number": lambda: huggingface.config_of(missing),
        "no family.*'rms'": lambda: huggingface.config_json(
            dataclasses.replace(config, norm="rms")
        ),
        "kv_heads=1.*gpt2": lambda: huggingface.config_json(
            dataclasses.replace(gpt2, kv_heads=1)
        ),
        "pattern=.*llama": lambda: huggingface.config_json(
            dataclasses.replace(llama, pattern=("local", "global"))
        ),
    }
    for match, call in calls.items():
        with pytest.raises(ValueError, match=match) as error:
            call()
        assert "\n" not in str(error.value)
