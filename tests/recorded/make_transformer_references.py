"""Record what Hugging Face's transformers gives for small random models.

    pip install torch==2.13.0 transformers==5.24.0
    python tests/recorded/make_transformer_references.py  # or with names

The weights are drawn and stored in float32; logits, loss and gradients are computed in
float64 (except what transformers takes in float32: rotations, RMSNorm and scores).
"""

import pathlib
import sys

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
GPT2 = {"vocab_size": 97, "n_positions": 24, "n_embd": 30, "n_layer": 2, "n_head": 3}
ROTARY = {
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LAYER = "model.layers.1"
ROTARY_GRADIENTS = (
    "model.embed_tokens.weight",
    "model.norm.weight",
    "model.layers.0.self_attn.q_proj.weight",
    f"{LAYER}.self_attn.k_proj.weight",
    f"{LAYER}.self_attn.o_proj.weight",
    f"{LAYER}.mlp.gate_proj.weight",
    f"{LAYER}.mlp.down_proj.weight",
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA = ROTARY | {"head_dim": 6, "sliding_window": 5, "query_pre_attn_scalar": 9}
POST_GRADIENTS = (
    *ROTARY_GRADIENTS,
    f"{LAYER}.post_attention_layernorm.weight",
    "model.layers.0.post_feedforward_layernorm.weight",
)
# name -> model_type, fields of config.json, weights whose gradients are recorded
MODELS = {
    "gpt2": (
        "gpt2",
        GPT2,
        (
            "transformer.wte.weight",
            "transformer.wpe.weight",
            "transformer.h.0.attn.c_attn.weight",
            "transformer.h.1.attn.c_attn.bias",
            "transformer.h.1.attn.c_proj.weight",
            "transformer.h.1.mlp.c_fc.weight",
            "transformer.ln_f.bias",
        ),
    ),
    "llama": (
        "llama",
        ROTARY | {"head_dim": 8, "rope_theta": 100.0, "rope_scaling": LLAMA3},
        (*ROTARY_GRADIENTS, "lm_head.weight"),
    ),
    "llama_tied": (
        "llama",
        ROTARY | {"tie_word_embeddings": True},
        ROTARY_GRADIENTS,
    ),
    "qwen3": (
        "qwen3",
        ROTARY | {"head_dim": 10, "rope_theta": 1000.0},
        (*ROTARY_GRADIENTS, "lm_head.weight", f"{LAYER}.self_attn.q_norm.weight"),
    ),
    "qwen3_tied": (
        "qwen3",
        ROTARY | {"head_dim": 6, "tie_word_embeddings": True},
        (*ROTARY_GRADIENTS, f"{LAYER}.self_attn.k_norm.weight"),
    ),
    "mistral": (
        "mistral",
        ROTARY | {"sliding_window": 7, "rope_scaling": YARN},
        (*ROTARY_GRADIENTS, "lm_head.weight"),
    ),
    "qwen2": (
        "qwen2",
        ROTARY | {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
        (
            *ROTARY_GRADIENTS,
            f"{LAYER}.self_attn.q_proj.bias",
            f"{LAYER}.self_attn.v_proj.bias",
        ),
    ),
    "qwen3_moe": (
        "qwen3_moe",
        ROTARY
        | {"head_dim": 10, "norm_topk_prob": True, "moe_intermediate_size": 12}
        | {"num_experts": 5, "num_experts_per_tok": 2},
        (
            *ROTARY_GRADIENTS[:-2],
            f"{LAYER}.mlp.gate.weight",
            f"{LAYER}.mlp.experts.down_proj",
        ),
    ),
    "olmo2": (
        "olmo2",
        ROTARY,
        (*POST_GRADIENTS, f"{LAYER}.self_attn.q_norm.weight"),
    ),
    "gemma2": (
        "gemma2",
        GEMMA | {"attn_logit_softcapping": 0.8, "final_logit_softcapping": 1.5},
        (*POST_GRADIENTS, f"{LAYER}.pre_feedforward_layernorm.weight"),
    ),
    "gemma3": (
        "gemma3_text",
        GEMMA
        | {"num_hidden_layers": 3, "layer_types": [SLIDING, FULL, SLIDING]}
        | {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
        (*POST_GRADIENTS, f"{LAYER}.self_attn.k_norm.weight"),
    ),
}


def record(name: str, kind: str, fields: dict, gradients: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **fields, **NO_TOKENS)
    options = {"attn_implementation": "eager"}
    if kind == "qwen3_moe":  # float64
        options["experts_implementation"] = "eager"
    model = AutoModelForCausalLM.from_config(config, **options).eval()
    with torch.no_grad():  # larger than at initialization: every term must matter
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
            parameter.mul_(256).round_().div_(256)  # compresses well
    weights = stored({k: v.numpy().copy() for k, v in model.state_dict().items()})
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight")

    model.double()
    tokens = torch.randint(config.vocab_size, (2, 21))
    logits = model(tokens[:, :-1]).logits.double()
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
    )
    loss.backward()
    recorded = stored({k: model.get_parameter(k).grad.numpy() for k in gradients})
    router = {}
    if kind == "qwen3_moe":
        router["router"] = model(tokens[:, :-1], output_router_logits=True).aux_loss
        router["router"] = router["router"].item()

    np.savez_compressed(
        pathlib.Path(__file__).with_name(f"{name}_reference.npz"),
        config=config.to_json_string(),
        tokens=tokens.numpy().astype(np.int32),
        logits=logits.detach().numpy().astype(np.float32),
        loss=loss.item(),
        **router,
        **{f"weight:{k}": v for k, v in weights.items()},
        **{f"gradient:{k}": v.astype(np.float32) for k, v in recorded.items()},
    )


def stored(arrays: dict) -> dict:
    """Return arrays by the names of files, which have each expert's on its own."""
    found = {}
    for name, x in arrays.items():
        start, _, last = name.partition(".experts.")
        parts = {last: x}
        if last == "gate_up_proj":
            parts = dict(zip(("gate_proj", "up_proj"), np.split(x, 2, 1), strict=True))
        for part, y in parts.items() if last else ():
            found |= {f"{start}.experts.{e}.{part}.weight": w for e, w in enumerate(y)}
        if not last:
            found[name] = x
    return found


if __name__ == "__main__":
    for name in sys.argv[1:] or MODELS:
        record(name, *MODELS[name])
