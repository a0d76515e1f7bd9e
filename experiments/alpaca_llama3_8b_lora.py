"""Low-rank adapters of Llama 3 8B on Alpaca, beside the paper's instruction tuning.

python -m acco_jax.train --config=experiments/alpaca_llama3_8b_lora.py \
    --config.init_from=MODEL --config.data.path=DATA --workdir=runs/lora

and with --config.method=zero1 in another workdir.

Parameters: 8,030,261,248 frozen, 13,631,488 trained. Tokens per step of 8 workers:
65,536, in 128 rows of at most 512 targets.

Data: MODEL is a copy of meta-llama/Meta-Llama-3-8B of the Hugging Face hub, in
safetensors. DATA is as for experiments/alpaca_gptneo_2p7b.py.

Hardware: 8 GPUs of 80 GB; every device holds the frozen model, 16 GB in bfloat16.

Time: three epochs are 1,195 steps and, with blocks computed twice, 3.8e18 FLOPs in rows
of 512: about an hour on 8 A100 at 40 % of their peak, less with the shorter rows that
most batches have. experiments/results/plans.md has what is predicted.

To expect: the paper has no such run, so there is no number of it. What crosses the
network is the adapters' 27 MB instead of the model's 16 GB, and acco's gain over zero1
is what little that takes. Rank 16 on all four projections of attention, alpha 16 and
3e-4 are the usual values, those of Alpaca-LoRA.

On a CPU, with a small folder and file of the same formats, in a minute:

python -m acco_jax.train --config=experiments/alpaca_llama3_8b_lora.py \
    --config.scale=smoke --config.init_from=MODEL --config.data.path=DATA \
    --workdir=runs/smoke
"""

from acco_jax.run.config.fields import default_config


def get_config():
    c = default_config()
    c.devices = 8  # of the CPU; an accelerator's are all that there are
    c.epochs = 3.0
    c.microbatch_size = 4
    c.microbatches_per_step = 4
    c.length = 512
    c.lora.rank = 16
    c.lora.pattern = "attn/(q|k|v|out)_proj/kernel"
    c.lora.scale = 1.0  # alpha / rank
    c.model.remat = "block"
    c.data.name = "parquet"
    c.data.task = "instruct"
    c.data.lengths = (128, 256, 384, 512)
    c.data.tokenizer = "init_from"
    c.data.held_out = 0.02
    c.optimizer.learning_rate = 3e-4
    c.optimizer.schedule = "cosine"
    c.optimizer.warmup_steps = 100
    c.optimizer.options = {"b1": 0.9, "b2": 0.95, "weight_decay": 0.0}
    c.eval_every = 200
    c.checkpoint_every = 400
    c.scales.smoke = {
        "devices": 2,
        "epochs": None,
        "steps": 10,
        "microbatch_size": 2,
        "length": 256,
        "lora": {"rank": 4},
        "data": {"lengths": (128, 256), "held_out": 0.2},
        "model": {"dtype": "float32", "param_dtype": "float32"},
        "optimizer": {"warmup_steps": 2},
        "log_every": 2,
        "eval_every": 5,
    }
    return c
