"""Two devices, a folder of text and a tiny model: what the runner's tests train on."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import acco_jax
from acco_jax.run import loop, preparation
from acco_jax.run.config import fields as configs
from tests.run import supervised


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """A folder of 12 documents, some 60 kB, that a model can learn something of."""
    folder, draw = tmp_path_factory.mktemp("texts"), random.Random(0)
    words = ["while", "you", "accumulate", "gradients", "communicate", "them", "\n"]
    for i in range(12):
        text = " ".join(draw.choices(words, k=800))
        (folder / f"{i}.txt").write_text(text)
    return folder


@pytest.fixture(scope="session")
def tiny(texts, tmp_path_factory):
    """tiny(field=value, ...): a config of 6 steps; fields by their dotted names."""
    data_dir = tmp_path_factory.mktemp("data")

    def make(**changes):
        c = configs.default_config()
        c.steps, c.length, c.microbatch_size, c.microbatches_per_step = 6, 32, 2, 4
        c.first_half = 2
        # a third of GPT-Neo's leaves, which is what compiling takes
        c.model.family, c.model.width, c.model.layers, c.model.heads = "llama", 16, 1, 2
        c.model.dtype = c.model.param_dtype = "float32"
        c.data.name, c.data.path, c.data.held_out = "text_folder", str(texts), 0.2
        c.data.data_dir = str(data_dir)
        c.log_every, c.eval_every, c.eval_batches, c.checkpoint_every = 1, 2, 2, 2
        c.update_from_flattened_dict(changes)
        return c

    return make


@pytest.fixture(scope="session")
def train(tiny):
    """train(workdir, stop_after=None, **changes): a run on two devices."""

    def run(workdir, stop_after=None, strict_hooks=False, **changes):
        experiment = preparation.prepare(tiny(**changes), workdir, jax.devices()[:2])
        summary = loop.run(experiment, stop_after=stop_after, strict_hooks=strict_hooks)
        return experiment, summary

    return run


@pytest.fixture(scope="session")
def train_quickly(train):
    """As `train`, a model without attention: it takes half the time to compile."""
    factory = "tests.run.own_models:linen_model"
    return functools.partial(train, **{"model.factory": factory})


@pytest.fixture(scope="session")
def saved(tiny):
    """saved(workdir, devices, **changes): a run's checkpoint, and its parameters."""

    def save(workdir, devices, calls=(9,), **changes):
        config = tiny(**changes)
        e = preparation.prepare(config, workdir, jax.devices()[:devices])
        params, state = jax.tree.map(_trained, loop.initial(e))
        with e.checkpoints as checkpoints:
            for half_round in calls:
                host = {"identity": e.identity, "axes": dict(e.mesh.shape)}
                checkpoints.save(half_round, (params, state), host)
        return e, jax.device_get(acco_jax.committed_params(state, params))

    return save


@pytest.fixture
def jobs(tmp_path):
    """jobs(*plans, **limits): commands of processes that train nothing."""
    return supervised.commands(tmp_path)


def _trained(x):
    """Numbers that differ from worker to worker, and have more bits than bfloat16."""
    if not x.ndim or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    change = 0.01 * np.random.default_rng(0).normal(size=x.shape)
    return jax.device_put((np.asarray(x) + change).astype(x.dtype), x.sharding)
