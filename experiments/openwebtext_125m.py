"""Pre-training on OpenWebText, section 4.4 of the paper: GPT-Neo 125M.

python -m acco_jax.train --config=experiments/openwebtext_125m.py \
    --config.data.path=DATA --config.data.tokenizer=TOKENIZER --workdir=runs/openwebtext

and with --config.method=zero1 in another workdir. On several hosts it is started as
experiments/clusters says.

Parameters: 124,412,160. Tokens per step of 8 workers: 393,216; of 32: 1,572,864.

Data: DATA is a folder of train-*.parquet, column `text`, such as plain_text/ of the
data set Skylion007/openwebtext on the Hugging Face hub (8.0M documents, 24 GB); 0.05 %
of the documents are held out. TOKENIZER is GPT-2's tokenizer.json, such as that of
openai-community/gpt2 there. The tokens are written once, to ACCO_DATA_DIR (18 GB).

Hardware, the paper's: 8 H100 PCIe in one host, or 4 hosts of 8 A100.

Time, the paper's, zero1 to acco: 4 h 41 to 4 h 25 on 8 GPUs, 14 h 41 to 10 h 55 on 32;
experiments/results/plans.md has what is predicted. They are of some 6.0e9 tokens on 8
GPUs and 50.2e9 on 32: --config.tokens=6.0e9. The 50,000 steps here are 19.7e9 and
78.6e9.

The paper's halves are equal. A first half of a quarter learns better
(experiments/results/dynamics.md): --config.microbatch_size=12
--config.microbatches_per_step=4 --config.first_half=auto.

To expect, the paper's perplexities on LAMBADA and OpenWebText: on 8 GPUs 47.1 and 24.2
with acco, 47.5 and 24.3 with zero1; on 32 GPUs 45.5 and 22.5 with acco, 44.1 and 21.7
with zero1: there acco is the worse of the two. Which part of OpenWebText the paper held
out is not known here.

On a CPU, with files of the same formats, in a minute:

python -m acco_jax.train --config=experiments/openwebtext_125m.py \
    --config.scale=smoke --config.data.path=DATA --config.data.tokenizer=TOKENIZER \
    --workdir=runs/smoke
"""

from acco_jax.run.config.fields import default_config


def get_config():
    c = default_config()
    c.devices = 8  # of the CPU; an accelerator's are all that there are
    c.steps = 50_000
    c.microbatch_size = 24
    c.microbatches_per_step = 2
    c.first_half = 1  # equal halves, the paper's
    c.length = 1024
    c.model.size = "gpt-neo-125m"
    c.model.vocab_size = 50257
    c.data.name = "parquet"
    c.data.held_out = 0.0005
    c.optimizer.learning_rate = 6e-4
    c.optimizer.schedule = "cosine"
    c.optimizer.clip = 0.0
    c.optimizer.options = {"b1": 0.9, "b2": 0.95, "weight_decay": 0.1}
    c.eval_every = 1000
    c.eval_batches = 20
    c.checkpoint_every = 1000
    c.scales.smoke = {
        "devices": 2,
        "steps": 10,
        "microbatch_size": 2,
        "length": 64,
        "model": {
            "size": None,
            "vocab_size": None,
            "width": 32,
            "layers": 2,
            "heads": 2,
            "window": 32,
        },
        "data": {"held_out": 0.1},
        "log_every": 2,
        "eval_every": 5,
        "eval_batches": 4,
        "checkpoint_every": 5,
    }
    return c
