"""Instruction tuning on Alpaca, section 4.5 of the paper: GPT-Neo 2.7B, all of it.

python -m acco_jax.train --config=experiments/alpaca_gptneo_2p7b.py \
    --config.init_from=MODEL --config.data.path=DATA --workdir=runs/alpaca

and with --config.method=zero1 or dpu in another workdir. On several hosts it is started
as experiments/clusters says.

Parameters: 2,651,307,520. Tokens per step of 8 workers: 65,536, in 128 rows of at most
512 targets.

Data: MODEL is a copy of EleutherAI/gpt-neo-2.7B of the Hugging Face hub (config.json,
safetensors, and tokenizer.json: GPT-2's where the copy has none). DATA is a folder of
train-*.parquet with the columns instruction, input and output, such as data/ of
tatsu-lab/alpaca there (52,002 answers); for JSON lines add --config.data.name=jsonl.
2 % of the answers are held out.

Hardware, the paper's: 8 A100 of 80 GB in one host, or two hosts of 4.

Time, the paper's, zero1 to acco: 43 to 25 minutes in one host; 3 h 46 to 29 minutes on
two, whose network is slow: there a half-round lasts as long as it communicates, and
workers keep adding microbatches, which makes steps larger and fewer. Here that is
--config.microbatches=adaptive --config.most_microbatches=40, with steps instead of
epochs (experiments/heterogeneous.py is such a run); it has not been tried on GPUs.
experiments/results/plans.md has what is predicted.

The paper's halves are equal. --config.first_half=auto makes the first one a quarter
where that covers the communication, which learns better
(experiments/results/dynamics.md).

To expect: acco and zero1 end with about the same held-out loss; the paper gives no
number of it that could be compared, and 3 epochs are our choice. Rows are padded to the
smallest of data.lengths that fits a whole batch, where the paper pads to its longest
row; each length is a program to compile.

On a CPU, with a small folder and file of the same formats, in a minute:

python -m acco_jax.train --config=experiments/alpaca_gptneo_2p7b.py \
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
    c.first_half = 2  # equal halves, the paper's
    c.length = 512
    c.data.name = "parquet"
    c.data.task = "instruct"
    c.data.lengths = (128, 256, 384, 512)
    c.data.tokenizer = "init_from"
    c.data.held_out = 0.02
    c.optimizer.learning_rate = 2e-5
    c.optimizer.schedule = "cosine"
    c.optimizer.options = {"b1": 0.9, "b2": 0.95, "weight_decay": 0.0}
    c.eval_every = 200
    c.checkpoint_every = 400
    c.keep_checkpoints = 1
    c.scales.smoke = {
        "devices": 2,
        "epochs": None,
        "steps": 10,
        "microbatch_size": 2,
        "length": 256,
        "data": {"lengths": (128, 256), "held_out": 0.2},
        "model": {"dtype": "float32", "param_dtype": "float32"},
        "log_every": 2,
        "eval_every": 5,
    }
    return c
