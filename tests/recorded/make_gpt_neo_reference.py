"""Record what Hugging Face's GPT-Neo gives for a small random model.

    pip install torch==2.13.0 transformers==5.23.0
    python tests/recorded/make_gpt_neo_reference.py

The weights are drawn and stored in float32; logits, loss and gradients are computed in
float64 (except that transformers takes the attention scores in float32).
"""

import pathlib

import numpy as np
import torch
from transformers import GPTNeoConfig, GPTNeoForCausalLM

GRADIENTS = (
    "transformer.wte.weight",
    "transformer.wpe.weight",
    "transformer.h.0.attn.attention.q_proj.weight",
    "transformer.h.1.attn.attention.k_proj.weight",
    "transformer.h.2.mlp.c_fc.weight",
    "transformer.h.3.attn.attention.out_proj.bias",
    "transformer.h.3.ln_2.weight",
)


def main() -> None:
    torch.manual_seed(0)
    config = GPTNeoConfig(
        vocab_size=97,
        max_position_embeddings=24,
        hidden_size=32,
        num_layers=4,
        num_heads=2,
        bos_token_id=None,
        eos_token_id=None,
        window_size=5,
        attention_types=[[["global", "local"], 2]],
    )
    model = GPTNeoForCausalLM._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():  # larger than at initialization: every term must matter
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
            parameter.mul_(256).round_().div_(256)  # compresses well
    weights = {k: v.numpy().copy() for k, v in model.state_dict().items()}
    weights.pop("lm_head.weight")  # tied

    model.double()
    tokens = torch.randint(config.vocab_size, (2, 21))
    logits = model(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
    )
    loss.backward()
    gradients = {k: model.get_parameter(k).grad.numpy() for k in GRADIENTS}

    np.savez_compressed(
        pathlib.Path(__file__).with_name("gpt_neo_reference.npz"),
        tokens=tokens.numpy().astype(np.int32),
        logits=logits.detach().numpy().astype(np.float32),
        loss=loss.item(),
        **{f"weight:{k}": v for k, v in weights.items()},
        **{f"gradient:{k}": v.astype(np.float32) for k, v in gradients.items()},
    )


if __name__ == "__main__":
    main()
