"""Models whose first step `benchmarks/compile_time.py` compiles, with abstract batches.

A chain of small products, ResNet-50 in flax.linen with batch statistics, and a Llama of
24 layers and 350M parameters, each with code of its own; in float32 and bfloat16.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from acco_jax.models import sizes, transformer

SIDE, ROWS = 16, 8
BLOCKS = (3, 4, 6, 3)  # of ResNet-50's stages


@dataclasses.dataclass(frozen=True)
class Model:
    """A model to be compiled: shapes, and a loss for each of the two forms of loop."""

    params: Any  # ShapeDtypeStructs
    batch: Callable[[int], Any]  # of so many microbatches, ShapeDtypeStructs
    # (params, microbatch, model_state) -> (mean loss [], model_state), by hand
    mean: Callable[..., Any]
    loss: Callable[..., Any]  # as `acco_jax.make_train_step` takes it
    state: Any = None  # model state, ShapeDtypeStructs; None: the model has none


def chain(leaves: int) -> Model:
    """Return that many products of 16 x 16, of eight rows."""

    def loss(params: Any, batch: jax.Array, rng: None) -> jax.Array:
        x = batch
        for name in params:
            x = jnp.tanh(x @ params[name])
        return jnp.mean(x**2)

    leaf = jax.ShapeDtypeStruct((SIDE, SIDE), "f4")
    return Model(
        {f"{i:04}": leaf for i in range(leaves)},
        lambda n: jax.ShapeDtypeStruct((n * ROWS, SIDE), "f4"),
        lambda params, batch, state: (loss(params, batch, None), None),
        loss,
    )


class Block(nn.Module):
    """A bottleneck of ResNet-50, with a stride of its 3 x 3 convolution."""

    features: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = functools.partial(nn.Conv, use_bias=False)
        norm = functools.partial(nn.BatchNorm, use_running_average=False)
        y = nn.relu(norm()(conv(self.features, (1, 1))(x)))
        strides = self.stride, self.stride
        y = nn.relu(norm()(conv(self.features, (3, 3), strides)(y)))
        y = norm(scale_init=nn.initializers.zeros)(conv(4 * self.features, (1, 1))(y))
        if x.shape != y.shape:
            x = norm()(conv(4 * self.features, (1, 1), strides)(x))
        return nn.relu(x + y)


class ResNet50(nn.Module):
    """ResNet-50 (He et al., https://arxiv.org/abs/1512.03385) for 1,000 classes."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.Conv(64, (7, 7), (2, 2), use_bias=False)(images)
        x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
        x = nn.max_pool(x, (3, 3), (2, 2), padding="SAME")
        for stage, blocks in enumerate(BLOCKS):
            for block in range(blocks):
                x = Block(64 * 2**stage, 2 if stage and not block else 1)(x)
        return nn.Dense(1000)(x.mean((1, 2)))


def resnet() -> Model:
    """Return ResNet-50: 161 leaves of parameters, 106 of batch statistics."""
    model = ResNet50()

    def mean(params: Any, batch: Any, state: Any) -> Any:
        variables = {"params": params, "batch_stats": state}
        logits, new = model.apply(variables, batch["image"], mutable=["batch_stats"])
        labels = batch["label"]
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return loss.mean(), new["batch_stats"]

    def loss(params: Any, batch: Any, rng: None, state: Any) -> Any:
        value, state = mean(params, batch, state)
        return value, 1.0, None, state

    def batch(n: int) -> Any:
        images = jax.ShapeDtypeStruct((n * ROWS, 224, 224, 3), "f4")
        return {"image": images, "label": jax.ShapeDtypeStruct((n * ROWS,), "i4")}

    init = functools.partial(model.init, jax.random.key(0))
    variables = jax.eval_shape(init, batch(1)["image"])
    stats = variables["batch_stats"]
    return Model(variables["params"], batch, mean, loss, stats)


def llama() -> Model:
    """Return a Llama of 24 unrolled layers, 1,024 tokens a row, in bfloat16."""
    config = sizes.Config(
        vocab_size=32000, max_length=1024, width=1024, layers=24, heads=16,
        mlp_width=2816, scan_layers=False, attention="xla", remat="none",
        dtype="bfloat16", param_dtype="bfloat16", **sizes.FAMILIES["llama"],
    )  # fmt: skip
    loss = transformer.loss_fn(config)

    def mean(params: Any, batch: Any, state: None) -> Any:
        total, weight, _ = loss(params, batch, None)
        return total / weight, None

    def batch(n: int) -> Any:
        tokens = jax.ShapeDtypeStruct((n * ROWS, config.max_length + 1), "i4")
        return {"tokens": tokens}

    return Model(transformer.shapes_of(config), batch, mean, loss)


MODELS = {"resnet50": resnet, "llama-350m": llama}
