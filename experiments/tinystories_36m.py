"""Training dynamics on TinyStories, section 4.3 of the paper: GPT-Neo style, 36.4M.

python -m acco_jax.compare --config=experiments/tinystories_36m.py --seeds=3 \
    --config.data.path=DATA --workdir=runs/tinystories \
    --methods='acco,zero1,dpu,dpu(warmup_steps=40),dpu(warmup_steps=500),wp'

Parameters: 36,417,024. Tokens per step of 8 workers: 655,360.

Data: DATA is a folder with train-*.parquet and validation-*.parquet, column `text`,
such as data/ of the data set roneneldan/TinyStories on the Hugging Face hub (2.1M
stories, 1 GB). The BPE of 10,000 tokens is trained on the training files.

Hardware: 8 GPUs of 40 GB or more in one host, or 8 TPUs. With another number of devices
change microbatches_per_step, so that a step still has the release's 80 x 16 rows.

Time: 1.3e9 tokens are 3.0e17 FLOPs, some 5 minutes a run on 8 A100 at 40 % of their
peak, 18 runs in all; experiments/results/plans.md has what is predicted.

The paper's halves are equal. A first half of a quarter learns better
(experiments/results/dynamics.md): --config.microbatch_size=40
--config.microbatches_per_step=4 --config.first_half=auto.

To expect: the curves of acco and zero1 coincide; dpu and wp are visibly worse, dpu most
without a warm-up. The paper shows that as curves (36M, 8 workers) and gives no number;
nor does it give the number of steps. 2,000 of them, about three epochs, are our choice.

On a CPU, with a folder of the same format, in a minute:

python -m acco_jax.train --config=experiments/tinystories_36m.py \
    --config.scale=smoke --config.data.path=DATA --workdir=runs/smoke
"""

from acco_jax.run.config.fields import default_config


def get_config():
    c = default_config()
    c.devices = 8  # of the CPU; an accelerator's are all that there are
    c.steps = 2000
    c.microbatch_size = 80
    c.microbatches_per_step = 2
    c.first_half = 1  # equal halves, the paper's
    c.length = 512
    c.model.family = "gpt-neo"
    c.model.width = 768
    c.model.layers = 4
    c.model.heads = 16
    c.data.name = "parquet"
    c.data.tokenizer = "bpe"
    c.data.vocab_size = 10_000
    c.optimizer.learning_rate = 5e-4
    c.optimizer.schedule = "constant"
    c.optimizer.options = {"b1": 0.9, "b2": 0.95, "weight_decay": 0.1}
    c.checkpoint_every = 1000
    c.keep_checkpoints = 1
    c.scales.smoke = {
        "devices": 2,
        "steps": 10,
        "microbatch_size": 2,
        "length": 64,
        "model": {"width": 32, "layers": 2, "heads": 2, "window": 32},
        "data": {"vocab_size": 300},
        "log_every": 2,
        "eval_every": 5,
    }
    return c
