"""Tunix's PeftTrainer, as it was and with acco_jax.

    pip install google-tunix 'acco-jax[plan-gpu]'  # in an environment of its own
    JAX_NUM_CPU_DEVICES=4 python -m experiments.trainers tunix_trainer

See docs/site/migrate/tunix.md.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from tunix.models.llama3.model import Llama3, ModelConfig
from tunix.sft import utils
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig, TrainingInput

import acco_jax

AUDITED = 2048, 256  # width and rows of a microbatch


class AccoTrainer(PeftTrainer):
    """A PeftTrainer whose optimizer is a method; call train(..., skip_jit=True)."""

    microbatches = 1

    def create_train_step_fn(self):
        graph, optimizer = nnx.graphdef(self.model), self.optimizer

        def loss_fn(params, microbatch, rng):
            inputs = self.gen_model_input_fn(microbatch)
            targets = jnp.sum(inputs["input_mask"][:, 1:])
            loss = self.loss_fn(nnx.merge(graph, params), **inputs)
            return loss * targets, targets, {}

        self.step = acco_jax.make_train_step(
            loss_fn, optimizer.tx, microbatches=self.microbatches
        )

        def train_step(batch):
            params, opt_state, metrics = self.step(*arguments(self), batch)
            nnx.update(self.model, params)
            nnx.update(optimizer.opt_state, nnx.state(opt_state))
            return metrics["loss"], None, metrics["grad_norm"]

        return train_step

    def create_eval_step_fn(self):
        graph = nnx.graphdef(self.model)
        evaluate = nnx.jit(super().create_eval_step_fn())

        def eval_step(batch):
            params, opt_state = arguments(self)
            theta = acco_jax.committed_params(opt_state, params)
            return evaluate(nnx.merge(graph, theta), batch)

        return eval_step


def arguments(trainer):
    params = nnx.as_pure(nnx.state(trainer.model, nnx.Param))
    return params, nnx.as_pure(trainer.optimizer.opt_state)


def start(width, trainer_type, optimizer):
    config = ModelConfig(
        num_layers=2,
        vocab_size=4 * width,
        embed_dim=width,
        hidden_dim=4 * width,
        num_heads=4,
        head_dim=width // 4,
        num_kv_heads=4,
        rope_theta=10_000,
        norm_eps=1e-5,
    )
    model = Llama3(config, rngs=nnx.Rngs(0))
    training = TrainingConfig(eval_every_n_steps=20)
    return trainer_type(model, optimizer, training).with_gen_model_input_fn(inputs_of)


def inputs_of(batch):
    return {
        "input_tokens": batch.input_tokens,
        "input_mask": batch.input_mask,
        "positions": utils.build_positions_from_mask(batch.input_mask),
        "attention_mask": utils.make_causal_attn_mask(batch.input_mask),
    }


def before(width):
    trainer = start(width, PeftTrainer, optax.adamw(1e-3))
    return trainer, trainer.train


def after(width, method, mesh, microbatches):
    tx = method(optax.adamw(1e-3), mesh=mesh)  # 1: wrap the optimizer
    trainer = start(width, AccoTrainer, tx)  # 2: the trainer above
    trainer.microbatches = microbatches
    trainer.create_train_step_fn()  # only for its `step`, to audit it
    train = functools.partial(trainer.train, skip_jit=True)  # 3
    return trainer, train, trainer.step


def losses_of(trainer, train, batches):
    """Returns the losses of training, and of evaluation before and after."""
    train(batches, batches[:1])
    history = trainer.metrics_logger.get_metric_history
    return [*history("", "loss", "train"), *history("", "loss", "eval")]


def batch_of(key, rows, width, length=32):
    """Returns tokens, of which the first row has fewer targets than others."""
    tokens = jax.random.randint(key, (rows, length), 0, 4 * width)
    mask = jnp.ones((rows, length), bool).at[0, length // 2 :].set(False)
    return TrainingInput(input_tokens=tokens, input_mask=mask)
