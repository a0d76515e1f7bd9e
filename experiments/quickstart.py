"""A small GPT-Neo on the Python standard library's own source, with ACCO.

make train
python -m acco_jax.train --config=experiments/quickstart.py --workdir=runs/quickstart
"""

from acco_jax.run.config.fields import default_config


def get_config():
    c = default_config()
    c.devices = 4
    c.steps = 400
    c.microbatch_size = 2
    c.microbatches_per_step = 4
    c.length = 128
    c.model.width = 128
    c.model.layers = 2
    c.model.heads = 4
    c.model.window = 64
    c.model.dtype = "float32"
    c.model.param_dtype = "float32"
    c.optimizer.learning_rate = 1e-3
    c.eval_every = 50
    c.data.held_out = 0.01  # its last evaluation, of all of them, takes seconds
    c.checkpoint_every = 200
    return c
