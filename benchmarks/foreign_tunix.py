"""The train step of google-tunix's PeftTrainer, as it is, on its Llama 3.2 model.

    pip install google-tunix  # in an environment of its own, beside acco-jax[plan]
    python -m acco_jax.audit --factory=benchmarks.foreign_tunix:peft_trainer
        --topology=gpu:h100:4x8

Two of the 1B model's layers (they are not scanned: more would be more text of the
same), fully fine-tuned in float32 and split over "fsdp" by Tunix's own rules, each
layer rematerialized; a device has 4 rows of 1,024 tokens.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tunix.models.llama3.model import Llama3, ModelConfig, RematConfig
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

LAYERS, ROWS, LENGTH = 2, 4, 1024


def peft_trainer(devices: Sequence[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    mesh = Mesh(np.array(devices).reshape(-1, 1), ("fsdp", "tp"))
    config = dataclasses.replace(
        ModelConfig.llama3p2_1b(), num_layers=LAYERS, remat_config=RematConfig.DECODER
    )
    trainers = []

    def make() -> Any:
        model = Llama3(config, rngs=nnx.Rngs(params=0))
        training = TrainingConfig(eval_every_n_steps=1, max_steps=1)
        trainers.append(PeftTrainer(model, optax.adamw(1e-4), training))
        return model, trainers[0].optimizer

    graph, state = nnx.split(nnx.eval_shape(make))
    shardings = nnx.get_named_sharding(state, mesh)
    train_step = trainers[0].create_train_step_fn()

    def step(state: Any, inputs: Any) -> Any:
        model, optimizer = nnx.merge(graph, state)
        # Tunix says how activations are split only under a mesh of no CPUs
        here = mock.patch.object(jax, "devices", return_value=[*mesh.devices.flat])
        with mesh, here:
            loss, _, norm = train_step(model, optimizer, inputs)
        return nnx.state((model, optimizer)), loss, norm

    def rows(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, P("fsdp"))
        return jax.ShapeDtypeStruct(
            (mesh.size * ROWS, *shape), dtype, sharding=sharding
        )

    state = jax.tree.map(lambda x, s: x.update(sharding=s), state, shardings)
    inputs = {
        "input_tokens": rows((LENGTH,), jnp.int32),
        "input_mask": rows((LENGTH,), jnp.bool_),
        "positions": rows((LENGTH,), jnp.int32),
        "attention_mask": rows((LENGTH, LENGTH), jnp.bool_),
    }
    return jax.jit(step, donate_argnums=0), (state, inputs)
