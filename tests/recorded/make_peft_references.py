"""Record what peft computes with adapters of the models recorded here.

    pip install torch==2.13.0 transformers==5.24.0 peft==0.21.2
    python tests/recorded/make_peft_references.py

The base models are those of {name}_reference.npz. Logits are computed in float64.
"""

import json
import pathlib
import tempfile

import numpy as np
import peft
import torch
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoModelForCausalLM

HERE = pathlib.Path(__file__).parent
MODELS = {
    "llama_tied": {
        "r": 3,
        "lora_alpha": 5,
        "target_modules": ["q_proj", "v_proj", "layers.1.mlp.down_proj"],
        "rank_pattern": {r"layers\.0\..*v_proj": 2},
        "alpha_pattern": {r"layers\.1\..*q_proj": 7},
    },
    "gpt2": {"r": 2, "target_modules": ["c_attn", "mlp.c_proj"], "use_rslora": True},
}


def main():
    for name, fields in MODELS.items():
        torch.manual_seed(0)
        with np.load(HERE / f"{name}_reference.npz") as arrays:
            recorded = dict(arrays)
        said = json.loads(str(recorded["config"]))
        config = AutoConfig.for_model(said.pop("model_type"), **said)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        state = {k[7:]: v for k, v in recorded.items() if k.startswith("weight:")}
        missing, unexpected = model.load_state_dict(
            {k: torch.tensor(v) for k, v in state.items()}, strict=False
        )
        assert not unexpected and set(missing) <= {"lm_head.weight"}
        model.tie_weights()
        adapted = peft.get_peft_model(
            model, peft.LoraConfig(task_type="CAUSAL_LM", **fields)
        )
        with torch.no_grad():
            for key, parameter in adapted.named_parameters():
                if "lora_" in key:
                    parameter.copy_(0.1 * torch.randn_like(parameter))
        with tempfile.TemporaryDirectory() as folder:
            adapted.save_pretrained(folder)
            path = pathlib.Path(folder)
            described = (path / "adapter_config.json").read_text()
            arrays = load_file(path / "adapter_model.safetensors")
        tokens = torch.as_tensor(recorded["tokens"][:, :-1]).long()
        with torch.no_grad():
            logits = adapted.double().eval()(tokens).logits
        np.savez_compressed(
            HERE / f"peft_{name}_reference.npz",
            config=described,
            logits=logits.numpy().astype(np.float32),
            **{f"adapter:{k}": v for k, v in arrays.items()},
        )


if __name__ == "__main__":
    main()
