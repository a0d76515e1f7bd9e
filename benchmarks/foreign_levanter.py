"""The train step of Levanter's Trainer, as it is, on its Llama model.

    pip install marin-levanter  # in an environment of its own, beside acco-jax[plan]
    python -m acco_jax.audit --factory=benchmarks.foreign_levanter:levanter_step
        --topology=gpu:h100:4x8

Needs Python 3.12. The model has the sizes of Llama 3.2 1B, all 16 layers, which are
scanned, each rematerialized: parameters in float32, computation in bfloat16, Adam,
gradients clipped. Levanter's own rules split parameters and optimizer state over
"data", all devices; a device has 4 rows of 2,048 tokens. On GPUs attention is
Levanter's own loop over blocks unless transformer_engine is installed; how often it
runs is not in the program's text. One kind of machine a process: Levanter remembers
which kernel the loss takes.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jmp
from haliax.partitioning import infer_resource_partitions
from levanter.layers.rotary import Llama3RotaryEmbeddingsConfig
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmExample
from levanter.optim.config import AdamConfig
from levanter.tracker import NoopTracker, current_tracker
from levanter.trainer import Trainer, TrainerConfig

VOCABULARY, ROWS, LENGTH = 128_256, 4, 2048


@dataclasses.dataclass(frozen=True)
class Step:
    """A jitted function that is lowered where `here` says."""

    jitted: Any
    here: Callable[[], contextlib.AbstractContextManager[None]]

    def lower(self, *arguments: Any) -> Any:
        with self.here():
            return self.jitted.lower(*arguments)


def levanter_step(devices: Sequence[Any]) -> tuple[Step, tuple[Any, ...]]:
    model = LlamaConfig(
        max_seq_len=LENGTH,
        hidden_dim=2048,
        intermediate_dim=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        tie_word_embeddings=True,
        rope=Llama3RotaryEmbeddingsConfig(),
    )
    config = TrainerConfig(
        id="audit",
        mp=jmp.get_policy("p=f32,c=bfloat16"),
        train_batch_size=len(devices) * ROWS,
        per_device_parallelism=ROWS,
        load_checkpoint=False,
    )

    def loss(model: Any, example: Any, *, key: Any = None) -> Any:
        return model.compute_next_token_loss(example, key=key)

    with current_tracker(NoopTracker()):
        optimizer = AdamConfig().build(config.num_train_steps)
        trainer = Trainer(config, optimizer, loss, add_default_hooks=False)

    @contextlib.contextmanager
    def here() -> Iterator[None]:
        def abstract(mesh: Any) -> Any:
            return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)

        # Levanter asks jax for the devices, and computes constants while it traces:
        # under a mesh of these devices jax would run that on them
        answers = {
            "devices": [*devices],
            "local_devices": [*devices],
            "device_count": len(devices),
            "default_backend": devices[0].platform,
        }
        with contextlib.ExitStack() as stack:
            for name, answer in answers.items():
                stack.enter_context(mock.patch.object(jax, name, return_value=answer))
            stack.enter_context(mock.patch.object(jax, "set_mesh", abstract))
            stack.enter_context(trainer)
            yield

    def make(key: Any) -> tuple[Any, Any]:
        vocabulary, rows = hax.Axis("vocab", VOCABULARY), trainer.TrainBatch
        state = trainer.initial_state(
            key, model_init=lambda: model.build(vocabulary, key=key)
        )
        tokens = hax.zeros((rows, model.max_Pos), jnp.int32)
        return state, hax.vmap(LmExample.causal, rows)(tokens, eos_id=0)

    with here():
        key = jax.eval_shape(lambda: jax.random.PRNGKey(0))
        made = eqx.filter_eval_shape(make, key)
        mesh = trainer.device_mesh
    arrays, rest = eqx.partition(made, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def described(tree: Any, mapping: Any) -> Any:
        return jax.tree.map(
            lambda sharding, part: jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
                part,
            ),
            infer_resource_partitions(tree, mapping, mesh),
            tree,
        )

    def step(*arrays: Any) -> Any:
        state, example = eqx.combine(arrays, rest)
        # what Trainer.train_step calls
        result = trainer._jit_train_step_fn_no_hook(state, (example,), {})
        return eqx.filter(result, eqx.is_array)

    arguments = (
        described(arrays[0], trainer.parameter_axis_mapping),
        described(arrays[1], trainer.compute_axis_mapping),
    )
    return Step(jax.jit(step, donate_argnums=0), here), arguments
