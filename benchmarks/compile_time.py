"""How long the step of a model compiles, by its number of layers.

python benchmarks/compile_time.py [--layers=12,48] [--families=gpt-neo,llama]

The fused step of acco on two CPU devices, traced and compiled anew each time; layers
are one loop of the program, so that more of them should not take longer. Prints, for
each family, the median seconds and the ratio of the largest to the smallest model.
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax

import acco_jax
from acco_jax.models import transformer
from acco_jax.runner import models
from acco_jax.runner.config import default_config

WIDTH, LENGTH, VOCABULARY = 64, 64, 256


def seconds(family: str, layers: int) -> float:
    """Returns how long tracing and compiling take."""
    jax.clear_caches()
    config = default_config()
    config.model.family, config.model.layers = family, layers
    config.model.width, config.model.heads, config.length = WIDTH, 4, LENGTH
    c = models.transformer_config(config, VOCABULARY)
    model = transformer.model(c)
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))
    tx = acco_jax.acco(optax.adamw(1e-3), mesh=mesh)
    params, state = acco_jax.start(tx, model.init(jax.random.key(0)))
    step = acco_jax.make_train_step(model.loss, tx, microbatches=2, form="fused")
    tokens = jax.ShapeDtypeStruct((8, LENGTH + 1), jnp.int32)
    start = time.perf_counter()
    step.lower(params, state, {"tokens": tokens}).compile()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", default="12,48")
    parser.add_argument("--families", default="gpt-neo,llama")
    parser.add_argument("--repeat", type=int, default=3)
    flags = parser.parse_args()
    numbers = [int(n) for n in flags.layers.split(",")]
    print("| family | " + " | ".join(f"{n} layers, s" for n in numbers) + " | ratio |")
    print("|---|" + "---|" * (len(numbers) + 1))
    for family in flags.families.split(","):
        taken: dict[int, list[float]] = {n: [] for n in numbers}
        for _ in range(flags.repeat):
            for n in numbers:  # interleaved: machines are noisy
                taken[n].append(seconds(family, n))
        medians = [statistics.median(taken[n]) for n in numbers]
        shown = " | ".join(f"{m:.2f}" for m in medians)
        print(f"| {family} | {shown} | {medians[-1] / medians[0]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
