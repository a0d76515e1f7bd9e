"""A run small enough to be prepared hundreds of times."""

from acco_jax.run.config.fields import default_config


def get_config():
    c = default_config()
    c.steps, c.length, c.microbatch_size, c.microbatches_per_step = 6, 8, 1, 2
    c.model.width, c.model.layers, c.model.heads, c.model.window = 4, 2, 1, 8
    c.optimizer.name, c.optimizer.clip = "sgd", 0.0
    c.model.dtype = c.model.param_dtype = "float32"
    c.data.name, c.data.path, c.data.held_out = "jsonl", "records.jsonl", 0.25
    c.data.data_dir = "data"
    return c
