"""How long the first call of a step takes to trace and compile, by the model's size.

python benchmarks/compile_time.py [--layers=12,48] [--families=gpt-neo,llama]
python benchmarks/compile_time.py --leaves=50,100,200,400 [--methods=zero1,acco]
    [--topology=gpu:h100:1x8]
python benchmarks/compile_time.py --models=resnet50,llama-350m
    --topology=gpu:h100:1x8 [--methods=zero1,acco]

With layers: the fused step of acco on two CPU devices; layers are one loop of the
program, so that more of them should not take longer.

With leaves: a chain of that many 16 x 16 products, unrolled, under adamw on four CPU
devices, or for those of a topology, two microbatches of eight rows; beside each method
`plain`, data parallel as jax.jit makes it of optax's own update in a scan over
microbatches. The method `by_hand` is that with what each method here does, too: sums of
gradients in shard_map, arrays donated, the gradient's norm, the mean over weights, and
a step that moves nothing where there is no weight. With models: the same of a
flax.linen ResNet-50 with batch statistics, and of a Llama of 24 layers and 350M
parameters, each layer with code of its own.

Each size is traced and compiled again, sizes and methods in turn, because machines are
noisy: seconds are medians, ratios medians of those within a repetition.
"""

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax

import acco_jax
from acco_jax import audit
from acco_jax.methods import METHODS
from acco_jax.models import transformer
from acco_jax.run.build import models
from acco_jax.run.config.fields import default_config
from benchmarks.compile_models import MODELS, Model, chain

WIDTH, LENGTH, VOCABULARY = 64, 64, 256
MICROBATCHES = 2


def mesh_of(devices: int) -> jax.sharding.Mesh:
    kinds = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((devices,), ("data",), kinds, devices=jax.devices()[:devices])


def scanned(family: str, layers: int) -> float:
    """Return the seconds to trace and compile a model whose layers are one loop."""
    config = default_config()
    config.model.family, config.model.layers = family, layers
    config.model.width, config.model.heads, config.length = WIDTH, 4, LENGTH
    c = models.transformer_config(config, VOCABULARY)
    model = transformer.model(c)
    tx = acco_jax.acco(optax.adamw(1e-3), mesh=mesh_of(2))
    params, state = acco_jax.start(tx, model.init(jax.random.key(0)))
    step = acco_jax.make_train_step(model.loss, tx, microbatches=2, form="fused")
    tokens = jax.ShapeDtypeStruct((8, LENGTH + 1), jnp.int32)
    start = time.perf_counter()
    step.lower(params, state, {"tokens": tokens}).compile()
    return time.perf_counter() - start


def unrolled(
    topology: str | None, model_of: Callable[[Any], Model], method: str, which: Any
) -> float:
    """Return the seconds where each layer has code of its own."""
    if topology:
        mesh = jax.sharding.Mesh(audit.devices(topology), ("data",))
    else:
        mesh = mesh_of(4)
    model, optimizer = model_of(which), optax.adamw(1e-3)
    rows = jax.NamedSharding(mesh, jax.P("data"))
    batch = jax.tree.map(
        lambda x: x.update(sharding=rows), model.batch(mesh.size * MICROBATCHES)
    )
    args: tuple[Any, ...]
    step: Any
    if method in ("plain", "by_hand"):
        whole = jax.NamedSharding(mesh, jax.P())
        inner = jax.eval_shape(optimizer.init, model.params)
        step = jax.jit(functools.partial(plain, model.mean, optimizer))
        if method == "by_hand":
            run = functools.partial(guarded, model.mean, optimizer, mesh)
            step = jax.jit(run, donate_argnums=(0, 1, 2))
        args = jax.tree.map(
            lambda x: x.update(sharding=whole), (model.params, inner, model.state)
        )
    else:
        tx = METHODS[method](optimizer, mesh=mesh)
        args = acco_jax.abstract_start(tx, model.params, model.state)
        step = acco_jax.make_train_step(
            model.loss, tx, microbatches=MICROBATCHES, form="fused"
        )
    start = time.perf_counter()
    step.lower(*args, batch).compile()
    return time.perf_counter() - start


def summed(
    mean: Callable[..., Any], params: Any, state: Any, batch: Any
) -> tuple[Any, Any]:
    """Return the sum of the microbatches' gradients, and the last model state."""

    def add(carried: Any, part: Any) -> Any:
        sums, state = carried
        grads, state = jax.grad(mean, has_aux=True)(params, part, state)
        return (jax.tree.map(jnp.add, sums, grads), state), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    parts = jax.tree.map(lambda x: x.reshape(MICROBATCHES, -1, *x.shape[1:]), batch)
    return jax.lax.scan(add, (zeros, state), parts)[0]


def plain(
    mean: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    params: Any,
    inner: Any,
    state: Any,
    batch: Any,
) -> tuple[Any, Any, Any]:
    """Run a step of data parallelism as a user of optax writes it."""
    grads, state = summed(mean, params, state, batch)
    updates, inner = optimizer.update(grads, inner, params)
    return optax.apply_updates(params, updates), inner, state


def guarded(
    mean: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    params: Any,
    inner: Any,
    state: Any,
    batch: Any,
) -> tuple[Any, Any, Any, jax.Array]:
    """Run it with shard_map, a mean over weights, its norm, and a guard."""

    def local(params: Any, state: Any, batch: Any) -> Any:
        grads, state = summed(mean, params, state, batch)
        weight = jnp.isfinite(batch_sum(batch)).astype(jnp.float32)
        grads, weight = jax.lax.psum((grads, weight), "data")
        return grads, jax.lax.pmean(state, "data"), weight

    whole, rows = jax.P(), jax.P("data")
    grads, new_state, weight = jax.shard_map(
        local, mesh=mesh, in_specs=(whole, whole, rows), out_specs=whole,
        check_vma=False,
    )(params, state, batch)  # fmt: skip
    valid = weight != 0
    grads = jax.tree.map(
        lambda g: g / jnp.where(valid, weight, 1).astype(g.dtype), grads
    )
    updates, new_inner = optimizer.update(grads, inner, params)
    new = optax.apply_updates(params, updates), new_inner, new_state
    old = params, inner, state
    kept = jax.tree.map(lambda a, b: jax.lax.select(valid, a, b), new, old)
    return *kept, optax.tree.norm(grads)


def batch_sum(batch: Any) -> jax.Array:
    """Return a number that the compiler does not know, for a weight."""
    return sum((jnp.sum(x).astype(jnp.float32) for x in jax.tree.leaves(batch)), 0.0)


def table(measure, names: list[str], sizes: list[Any], repeat: int, of: str) -> None:
    """Prints seconds, and ratios to the smallest size or to the first name."""
    taken: dict[tuple[str, int], list[float]] = {}
    for _ in range(repeat):
        for size in sizes:
            for name in names:
                jax.clear_caches()
                taken.setdefault((name, size), []).append(measure(name, size))
    print("| | " + " | ".join(f"{size} {of}, s" for size in sizes) + " | ratio |")
    print("|---|" + "---|" * (len(sizes) + 1))
    for name in names:
        base = [names[0]] * len(sizes) if of != "layers" else [name]
        first = [(b, s) for b, s in zip(base, sizes, strict=False)]
        shown = " | ".join(f"{statistics.median(taken[name, s]):.1f}" for s in sizes)
        tops = [(name, s) for s in sizes[-len(first) :]]
        ratios = [
            statistics.median(
                a / b for a, b in zip(taken[top], taken[low], strict=True)
            )
            for top, low in zip(tops, first, strict=True)
        ]
        print(f"| {name} | {shown} | {', '.join(f'{r:.2f}' for r in ratios)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", default="12,48")
    parser.add_argument("--families", default="gpt-neo,llama")
    parser.add_argument("--leaves")
    parser.add_argument("--models")
    parser.add_argument("--topology")
    parser.add_argument("--methods", default="ddp,zero1,acco")
    parser.add_argument("--repeat", type=int, default=3)
    flags = parser.parse_args()
    if flags.leaves:
        names = ["plain", *flags.methods.split(",")]
        sizes = [int(n) for n in flags.leaves.split(",")]
        measure = functools.partial(unrolled, flags.topology, chain)
        table(measure, names, sizes, flags.repeat, "leaves")
    elif flags.models:
        names, models = ["plain", *flags.methods.split(",")], flags.models.split(",")
        measure = functools.partial(unrolled, flags.topology, lambda m: MODELS[m]())
        table(measure, names, models, flags.repeat, "first step")
    else:
        sizes = [int(n) for n in flags.layers.split(",")]
        table(scanned, flags.families.split(","), sizes, flags.repeat, "layers")


if __name__ == "__main__":
    main()
