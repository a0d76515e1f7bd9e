"""The model in colab/small_python, which writes text in colab/how_acco_works.ipynb.

python -m acco_jax.train --config=experiments/small_python.py --workdir=runs/python
python -m acco_jax.export --workdir=runs/python --out=colab/small_python \
    --dtype=bfloat16

Parameters: 486,480; 1.0 MB with the tokenizer.
Data: the source of Python's standard library.
Result: 1.850 bits per byte of held-out text; a smoothed bigram of the same tokens has
2.320. Time: 15 minutes on two CPU cores that other programs used too.
"""

from acco_jax.run.config.fields import default_config


def get_config():
    c = default_config()
    c.steps = 2200
    c.first_half = 1
    c.length = 128
    c.model.width = 120
    c.model.layers = 2
    c.model.heads = 4
    c.model.window = 128
    c.model.dtype = "float32"
    c.model.param_dtype = "float32"
    c.optimizer.name = "muon"
    c.optimizer.learning_rate = 1e-2
    c.optimizer.warmup_steps = 50
    c.data.tokenizer = "bpe"
    c.data.vocab_size = 1024
    c.data.held_out = 0.01
    c.eval_every = 200
    c.eval_batches = 4
    c.checkpoint_every = 2200
    return c
