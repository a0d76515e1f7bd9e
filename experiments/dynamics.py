"""Training dynamics of the methods, section 4.3 of the paper on a small scale.

python -m acco_jax.compare --config=experiments/dynamics.py --seeds=3 \
    --methods=acco,zero1,dpu,wp --workdir=runs/dynamics

1.1M parameters, 8 workers, 2,048 tokens per optimizer step, 2M tokens in all; the batch
and the learning rate are zero1's best. Figures: experiments/results/dynamics.md.
"""

from acco_jax.run.config.fields import default_config


def get_config():
    c = default_config()
    c.devices = 8
    c.steps = 1000
    c.microbatch_size = 1
    c.microbatches_per_step = 2
    c.first_half = 1  # equal halves, the paper's
    c.length = 128
    c.model.width = 208
    c.model.layers = 2
    c.model.heads = 4
    c.model.window = 64
    c.model.dtype = "float32"
    c.model.param_dtype = "float32"
    c.optimizer.learning_rate = 1e-3
    c.optimizer.warmup_steps = 100
    c.optimizer.no_decay = ""  # everything decays, as when the figures were measured
    c.eval_every = 100
    c.eval_batches = 8
    c.checkpoint_every = 500
    c.keep_checkpoints = 1
    return c
