"""How far transformers and this library are apart, family by family, both ways.

    python -m benchmarks.families  # with torch, transformers and peft here, too

Each row is a small model of transformers with random weights and unusual options, in
float32 on CPU. `save_pretrained` writes it. The columns are the largest differences of
logits of 2 rows of 40 tokens:

    import     this library reads the folder
    export     transformers reads the folder that this library writes back
    decoded    this library's decoding with a cache, token by token
    scale      the standard deviation of transformers' logits

The rows of a second table are adapters, random too, that peft has saved:

    import     this library merges them into the model
    export     peft reads the folder that this library writes of them
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

GPT2 = {"n_positions": 64, "n_embd": 36, "n_layer": 3, "n_head": 3}
GPT_NEO = {
    "max_position_embeddings": 64,
    "hidden_size": 36,
    "num_heads": 3,
    "num_layers": 4,
    "attention_types": [[["global", "local"], 2]],
    "window_size": 7,
}
# what is unusual -> a model, fields of LoraConfig
ADAPTED = {
    "llama, queries and values": (
        ("llama", UNTIED),
        {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj"]},
    ),
    "llama, patterns": (
        ("llama", TIED),
        {
            "r": 4,
            "target_modules": "all-linear",
            "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 6},
            "alpha_pattern": {"down_proj": 3, r"layers\.[02]\..*_proj": 20},
        },
    ),
    "llama, one layer, rsLoRA": (
        ("llama", UNTIED),
        {
            "r": 9,
            "target_modules": ["o_proj", "gate_proj"],
            "layers_to_transform": [1],
            "use_rslora": True,
        },
    ),
    "gemma3, keys and gates": (
        ("gemma3_text", GEMMA3),
        {"r": 2, "target_modules": ["k_proj", "gate_proj"]},
    ),
    "qwen3-moe, attention": (
        ("qwen3_moe", MOE | UNTIED),
        {"r": 2, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    ),
    "gpt-neo, three kernels": (
        ("gpt_neo", GPT_NEO),
        {"r": 4, "target_modules": ["q_proj", "out_proj", "c_fc"]},
    ),
    "gpt2, every kernel": (
        ("gpt2", GPT2),
        {"r": 4, "lora_alpha": 12, "target_modules": ["c_attn", "c_proj", "c_fc"]},
    ),
    "gpt2, only attention's": (
        ("gpt2", GPT2),
        {"r": 4, "target_modules": ["attn.c_proj", "h.1.attn.c_attn"]},
    ),
}


def made(kind, fields, folder):
    """Saves a random model of transformers; returns its tokens and logits."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    sizes = {"vocab_size": 97} if kind in ("gpt2", "gpt_neo") else ROTARY
    config = AutoConfig.for_model(kind, **{**sizes, **tokens, **fields})
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


def adapted_row(model, fields, place):
    """Returns the largest differences of adapters, and the scale of the logits."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    from acco_jax.models import huggingface, lora, transformer
    from acco_jax.models import peft as adapters
    from acco_jax.run.weights import folders

    tokens, plain = made(*model, place / "base")

    def base():
        return AutoModelForCausalLM.from_pretrained(
            place / "base", dtype=torch.float32, attn_implementation="eager"
        )

    def logits(model):
        with torch.no_grad():
            return model.eval()(torch.as_tensor(tokens).long()).logits.numpy()

    config = peft.LoraConfig(task_type="CAUSAL_LM", **fields)
    theirs = peft.get_peft_model(base(), config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(place / "theirs")
    expected = logits(theirs)
    assert abs(expected - plain).max() > 0.03

    folder = folders.Folder(place / "base")
    config = huggingface.config_of(
        folder.config_json, dtype="float32", param_dtype="float32"
    )
    stored = folders.AdapterFolder(place / "theirs")
    said = stored.config_json
    found = adapters.from_state(config, said, stored.names, stored.weight)
    scale = adapters.scale_of(said)
    merged = lora.merge(huggingface.from_state(config, folder.weight), found, scale)
    imported = jax.jit(transformer.apply, static_argnums=0)(config, merged, tokens)

    ours = place / "ours"
    ours.mkdir()
    said = adapters.described(config, found, scale, str(place / "base"))
    (ours / folders.ADAPTER_CONFIG).write_text(json.dumps(said))
    state = dict(adapters.to_state(config, found))
    folders.save_arrays(ours / folders.ADAPTERS, state)
    back = logits(peft.PeftModel.from_pretrained(base(), ours))
    return (
        abs(imported - expected).max(),
        abs(back - expected).max(),
        expected.std(),
    )


def table(names, columns, cases, row):
    """Prints a table, and its largest difference."""
    print(f"| model | {columns} | scale |")
    print("|---" * (columns.count("|") + 3) + "|")
    most = 0.0
    for name in names or cases:
        with tempfile.TemporaryDirectory() as place:
            *differences, scale = row(*cases[name], pathlib.Path(place))
        shown = " | ".join(f"{x:.1e}" for x in differences)
        print(f"| {name} | {shown} | {scale:.2f} |", flush=True)
        most = max(most, *differences)
    print(f"\nThe largest difference is {most:.1e}.\n")


def main(names):
    """Prints the tables, or those rows."""
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    own, adapted = ([n for n in names if n in cases] for cases in (CASES, ADAPTED))
    if own or not names:
        table(own, "import | export | decoded", CASES, row)
    if adapted or not names:
        table(adapted, "import | export", ADAPTED, adapted_row)


if __name__ == "__main__":
    main(sys.argv[1:])
