"""How far transformers and this library are apart, family by family, both ways.

    python -m benchmarks.families  # with torch and transformers installed here, too

Each row is a small model of transformers with random weights and unusual options, in
float32 on CPU. `save_pretrained` writes it. The columns are the largest differences of
logits of 2 rows of 40 tokens:

    import     this library reads the folder
    export     transformers reads the folder that this library writes back
    decoded    this library's decoding with a cache, token by token
    scale      the standard deviation of transformers' logits
"""

import functools
import json
import os
import pathlib
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

ROTARY = {
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
}
UNTIED, TIED = ({"tie_word_embeddings": tied} for tied in (False, True))
LINEAR = {"rope_type": "linear", "factor": 3.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MOE = {"moe_intermediate_size": 20, "num_experts": 7, "num_experts_per_tok": 3}
GEMMA2 = {"head_dim": 10, "sliding_window": 7, "query_pre_attn_scalar": 21}
KINDS = ["sliding_attention", "full_attention"]
GEMMA3 = GEMMA2 | {"layer_types": [*KINDS, KINDS[0]]}
NESTED = {
    "full_attention": {"rope_theta": 5e5, **LINEAR},
    "sliding_attention": {"rope_theta": 100.0, "rope_type": "default"},
}


def scaled(**fields):
    """Returns a RoPE with a scaling, of this theta."""
    return {"rope_parameters": {"rope_theta": 500.0, **fields}}


# what is unusual -> model_type, fields of config.json
CASES = {
    "llama": ("llama", UNTIED),
    "llama, linear": ("llama", TIED | scaled(**LINEAR)),
    "llama, llama3": ("llama", UNTIED | {"head_dim": 10} | scaled(**LLAMA3)),
    "llama, yarn": ("llama", UNTIED | scaled(**YARN)),
    "llama, yarn of other ends": (
        "llama",
        TIED
        | {"head_dim": 14}
        | scaled(**YARN, beta_fast=4.0, beta_slow=0.5, truncate=False),
    ),
    "llama, yarn, attention_factor": (
        "llama",
        UNTIED | scaled(**YARN, attention_factor=1.3),
    ),
    "llama, yarn, mscale": (
        "llama",
        UNTIED | scaled(**YARN, mscale=1.4, mscale_all_dim=0.7),
    ),
    "mistral": ("mistral", UNTIED | {"sliding_window": 7}),
    "mistral, no window, tied": ("mistral", TIED | {"sliding_window": None}),
    "mistral, wide heads, yarn": (
        "mistral",
        UNTIED | {"sliding_window": 5, "head_dim": 20} | scaled(**YARN),
    ),
    "qwen2": ("qwen2", UNTIED),
    "qwen2, tied, own heads": ("qwen2", TIED | {"num_key_value_heads": 3}),
    "qwen2, yarn": ("qwen2", TIED | scaled(**YARN)),
    "qwen3": ("qwen3", UNTIED | {"head_dim": 10}),
    "qwen3, tied, yarn": ("qwen3", TIED | {"head_dim": 6} | scaled(**YARN)),
    "qwen3-moe": ("qwen3_moe", MOE | UNTIED),
    "qwen3-moe, normalized, tied, yarn": (
        "qwen3_moe",
        MOE | TIED | {"norm_topk_prob": True, "head_dim": 14} | scaled(**YARN),
    ),
    "qwen3-moe, one expert a token": (
        "qwen3_moe",
        MOE | UNTIED | {"num_experts_per_tok": 1, "num_experts": 3},
    ),
    "olmo2": ("olmo2", UNTIED),
    "olmo2, tied, own heads": ("olmo2", TIED | {"num_key_value_heads": 3}),
    "olmo2, wide heads, yarn": ("olmo2", UNTIED | {"head_dim": 20} | scaled(**YARN)),
    "gemma2": ("gemma2", GEMMA2),
    "gemma2, low caps": (
        "gemma2",
        GEMMA2 | {"attn_logit_softcapping": 0.7, "final_logit_softcapping": 0.4},
    ),
    "gemma2, no caps, untied": (
        "gemma2",
        GEMMA2
        | UNTIED
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma2, global layers": ("gemma2", GEMMA2 | {"layer_types": KINDS[1:] * 3}),
    "gemma3": ("gemma3_text", GEMMA3),
    "gemma3, untied, cap": (
        "gemma3_text",
        GEMMA3 | UNTIED | {"final_logit_softcapping": 3.0, "num_key_value_heads": 3},
    ),
    "gemma3, two thetas, linear": ("gemma3_text", GEMMA3 | {"rope_parameters": NESTED}),
    "gemma3, six layers": (
        "gemma3_text",
        GEMMA2 | {"num_hidden_layers": 6, "rope_parameters": NESTED},
    ),
}


def made(kind, fields, folder):
    """Saves a random model of transformers; returns its tokens and logits."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = AutoConfig.for_model(kind, **{**ROTARY, **tokens, **fields})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():  # larger than at initialization: every term must matter
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokens = torch.randint(config.vocab_size, (2, 40))
    return tokens.numpy().astype(np.int32), logits_of(folder, tokens)


def logits_of(folder, tokens):
    """Returns what transformers computes of a folder."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return model(torch.as_tensor(tokens).long()).logits.numpy()


def row(kind, fields, place):
    """Returns the largest differences of one model, and the scale of its logits."""
    from acco_jax.models import decoding, huggingface, transformer
    from acco_jax.run.weights import folders, pretrained

    tokens, expected = made(kind, fields, place / "theirs")
    folder = folders.Folder(place / "theirs")
    config = huggingface.config_of(
        folder.config_json, dtype="float32", param_dtype="float32"
    )
    pretrained.check_read(config, folder, None)
    params = huggingface.from_state(config, folder.weight)
    logits = jax.jit(transformer.apply, static_argnums=0)(config, params, tokens)

    ours = place / "ours"
    ours.mkdir()
    said = json.dumps(huggingface.config_json(config))
    (ours / "config.json").write_text(said)
    folders.write_weights(ours, huggingface.to_state(config, params))
    back = logits_of(ours, tokens)

    rows, length = tokens.shape
    step = jax.jit(functools.partial(decoding.step, config))
    prefill = jax.jit(decoding.prefill, static_argnums=(0, 3))
    cache = prefill(config, params, tokens[:, :9], length)
    decoded = []
    for i in range(9, length):
        found, cache = step(params, tokens[:, i], jnp.full(rows, i), cache)
        decoded.append(found)
    decoded = np.stack(decoded, axis=1)
    return (
        abs(logits - expected).max(),
        abs(back - expected).max(),
        abs(decoded - expected[:, 9:]).max(),
        expected.std(),
    )


def main(names):
    """Prints the table."""
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    print("| model | import | export | decoded | scale |")
    print("|---|---|---|---|---|")
    most = 0.0
    for name in names or CASES:
        with tempfile.TemporaryDirectory() as place:
            *differences, scale = row(*CASES[name], pathlib.Path(place))
        shown = " | ".join(f"{x:.1e}" for x in differences)
        print(f"| {name} | {shown} | {scale:.2f} |", flush=True)
        most = max(most, *differences)
    print(f"\nThe largest difference is {most:.1e}.")


if __name__ == "__main__":
    main(sys.argv[1:])
