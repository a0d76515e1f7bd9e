"""Train steps as others write them: nothing of acco_jax is in them.

    python -m acco_jax.audit --factory=benchmarks.foreign:fsdp --topology=gpu:h100:4x8

Each takes devices, as `jax.devices()` gives them, and returns a jitted step and the
abstract arguments to lower it with. The model is a decoder of 470M parameters in
bfloat16 whose layers are scanned; a device has 4 rows of 2,048 tokens. What is
communicated is the compiler's choice, by the shardings alone.

    plain_dp             parameters replicated, rows split over "data"
    dp_accumulation      the same, gradients summed over 4 microbatches in a scan
    fsdp                 parameters and optimizer state split over "fsdp" (8 devices),
                         rows over "data" and "fsdp"; each block rematerialized
    fsdp_accumulation    the same with 4 microbatches
    fsdp_fine_remat      as fsdp, where the backward pass recomputes all but what three
                         named products gave (openxla/xla#14397)
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

WIDTH, HIDDEN, LAYERS, HEAD, VOCABULARY = 2048, 8192, 8, 128, 32_000
ROWS, LENGTH, MICROBATCHES, GROUP = 4, 2048, 4, 8
SHAPES = {
    "embed": (VOCABULARY, WIDTH),
    "qkv": (LAYERS, WIDTH, 3 * WIDTH),
    "out": (LAYERS, WIDTH, WIDTH),
    "up": (LAYERS, WIDTH, HIDDEN),
    "down": (LAYERS, HIDDEN, WIDTH),
}
SPLIT = {
    "embed": P(None, "fsdp"),
    "qkv": P(None, "fsdp", None),
    "out": P(None, None, "fsdp"),
    "up": P(None, "fsdp", None),
    "down": P(None, None, "fsdp"),
}
SAVED = ("qkv", "out", "up")  # what fine rematerialization keeps

Program = tuple[Callable[..., Any], tuple[Any, ...]]


def plain_dp(devices: Sequence[Any]) -> Program:
    return _step(_mesh(devices, 1), 1)


def dp_accumulation(devices: Sequence[Any]) -> Program:
    return _step(_mesh(devices, 1), MICROBATCHES)


def fsdp(devices: Sequence[Any]) -> Program:
    return _step(_mesh(devices, GROUP), 1)


def fsdp_accumulation(devices: Sequence[Any]) -> Program:
    return _step(_mesh(devices, GROUP), MICROBATCHES)


def fsdp_fine_remat(devices: Sequence[Any]) -> Program:
    keep = jax.checkpoint_policies.save_only_these_names(*SAVED)
    return _step(_mesh(devices, GROUP), 1, keep)


def _mesh(devices: Sequence[Any], group: int) -> Mesh:
    grid = np.array(devices).reshape(-1, group)
    return Mesh(grid, ("data", "fsdp")) if group > 1 else Mesh(grid[:, 0], ("data",))


def _loss(params: Any, tokens: jax.Array, rows: NamedSharding, policy: Any) -> Any:
    """Returns the mean cross entropy of tokens [rows, LENGTH + 1]."""

    def norm(x: jax.Array) -> jax.Array:
        scale = jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True) + 1e-6
        return x * lax.rsqrt(scale).astype(x.dtype)

    def block(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        x = lax.with_sharding_constraint(x, rows)
        qkv = checkpoint_name(norm(x) @ layer["qkv"], "qkv")
        heads = [a.reshape(*a.shape[:2], -1, HEAD) for a in jnp.split(qkv, 3, -1)]
        mixed = jax.nn.dot_product_attention(*heads, is_causal=True).reshape(x.shape)
        x = x + checkpoint_name(mixed @ layer["out"], "out")
        up = checkpoint_name(norm(x) @ layer["up"], "up")
        return x + jax.nn.gelu(up) @ layer["down"], None

    whole = NamedSharding(rows.mesh, P())
    embed = lax.with_sharding_constraint(params["embed"], whole)  # else rows travel
    x = lax.with_sharding_constraint(embed[tokens[:, :-1]], rows)
    layers = {name: value for name, value in params.items() if name != "embed"}
    x, _ = lax.scan(jax.checkpoint(block, policy=policy), x, layers)
    logits = lax.with_sharding_constraint(norm(x) @ embed.T, rows)
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), tokens[:, 1:]
    )
    return losses.mean()


def _step(mesh: Mesh, microbatches: int, policy: Any = None) -> Program:
    axes = mesh.axis_names
    rows = NamedSharding(mesh, P(axes))
    split = SPLIT if "fsdp" in axes else dict.fromkeys(SPLIT, P())
    shardings = {name: NamedSharding(mesh, spec) for name, spec in split.items()}
    optimizer = optax.adamw(3e-4)

    def gradients(params: Any, tokens: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(_loss)(params, tokens, rows, policy)
        return loss, lax.with_sharding_constraint(grads, shardings)

    def train_step(params: Any, state: Any, tokens: jax.Array) -> Any:
        if microbatches == 1:
            loss, grads = gradients(params, tokens[0])
        else:

            def add(total: Any, microbatch: jax.Array) -> tuple[Any, None]:
                found = gradients(params, microbatch)
                return jax.tree.map(jnp.add, total, found), None

            zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
            (loss, grads), _ = lax.scan(add, zeros, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=shardings[name])
        for name, shape in SHAPES.items()
    }
    state = optax.tree.map_params(
        optimizer,
        lambda x, like: x.update(sharding=like.sharding),
        jax.eval_shape(optimizer.init, params),
        params,
        transform_non_params=lambda x: x.update(sharding=NamedSharding(mesh, P())),
    )
    tokens = jax.ShapeDtypeStruct(
        (microbatches, mesh.size * ROWS, LENGTH + 1),
        jnp.int32,
        sharding=NamedSharding(mesh, P(None, axes)),
    )
    step = jax.jit(train_step, donate_argnums=(0, 1))
    return step, (params, state, tokens)
