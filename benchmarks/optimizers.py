"""Final losses of optax's optimizers with zero1 and with acco, on a small problem.

    python benchmarks/optimizers.py [--only="prodigy;dowg"] [--seeds=20]

A network of two layers learns another one's outputs, with noise: 300 optimizer steps of
64 rows, acco's in two halves. Learning rates are constant and were not tuned. Both
methods see the same rows in the same order. A loss is of 4,096 other rows, without
noise, at the committed parameters, as a share of the loss before training. It is the
mean over the seeds, and the ratio is the mean of theirs with its standard error. A seed
is a start and its rows. One worker computes all: how many share the rows does not
change what is computed.
"""

import argparse
import functools
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __name__ == "__main__":  # programs that run for seconds need no optimization
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "XLA_FLAGS": "--xla_cpu_use_fusion_emitters=false "
        "--xla_cpu_parallel_codegen_split_count=1",
    }

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax import lax
from jax.sharding import AxisType

import acco_jax
from acco_jax.run.build.optimizers import evaluated

STEPS, ROWS, WIDTH, NOISE = 300, 64, 16, 0.3
METHODS = {"zero1": (acco_jax.zero1, 2), "acco": (acco_jax.acco, 1)}  # microbatches
Builder = Callable[[float], optax.GradientTransformation]


def plain(name: str, **options: Any) -> Builder:
    make = getattr(optax, name, None) or getattr(optax.contrib, name)
    return functools.partial(make, **options)


def mechanized(rate: float) -> optax.GradientTransformation:
    return optax.contrib.mechanize(optax.adamw(rate))


def accumulating(rate: float) -> optax.GradientTransformation:
    return optax.MultiSteps(optax.adamw(rate), 2).gradient_transformation()


def on_plateau(rate: float) -> optax.GradientTransformation:
    plateau = optax.contrib.reduce_on_plateau(
        factor=0.5, patience=5, accumulation_size=20
    )
    return optax.chain(optax.adamw(rate), plateau)


def sharpness_aware(rate: float) -> optax.GradientTransformation:
    ascend = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    return optax.contrib.sam(optax.adamw(rate), ascend)


# Each with its learning rate; from cocob on, most find a rate of their own.
OPTIMIZERS: dict[str, tuple[Builder, float]] = {
    "adabelief": (plain("adabelief"), 1e-2),
    "adadelta": (plain("adadelta"), 3.0),
    "adafactor": (plain("adafactor"), 1e-2),
    "adagrad": (plain("adagrad"), 1e-1),
    "adam": (plain("adam"), 1e-2),
    "adamax": (plain("adamax"), 1e-2),
    "adamaxw": (plain("adamaxw"), 1e-2),
    "adamw": (plain("adamw"), 1e-2),
    "adan": (plain("adan"), 1e-2),
    "amsgrad": (plain("amsgrad"), 1e-2),
    "fromage": (plain("fromage"), 3e-3),
    "lamb": (plain("lamb"), 1e-2),
    "lars": (plain("lars"), 10.0),
    "lion": (plain("lion"), 1e-3),
    "nadam": (plain("nadam"), 1e-2),
    "nadamw": (plain("nadamw"), 1e-2),
    "noisy_sgd": (plain("noisy_sgd", eta=1e-4, key=0), 1e-1),
    "novograd": (plain("novograd"), 1e-2),
    "optimistic_adam_v2": (plain("optimistic_adam_v2"), 1e-2),
    "optimistic_gradient_descent": (plain("optimistic_gradient_descent"), 1e-1),
    "radam": (plain("radam"), 1e-2),
    "rmsprop": (plain("rmsprop"), 3e-3),
    "rprop": (plain("rprop"), 1e-3),
    "sgd": (plain("sgd"), 1e-1),
    "sgd, momentum": (plain("sgd", momentum=0.9), 3e-2),
    "sgd, Nesterov": (plain("sgd", momentum=0.9, nesterov=True), 3e-2),
    "sign_sgd": (plain("sign_sgd"), 1e-3),
    "signum": (plain("signum"), 1e-3),
    "sm3": (plain("sm3"), 1e-1),
    "yogi": (plain("yogi"), 1e-2),
    "acprop": (plain("acprop"), 3e-3),
    "ademamix": (plain("ademamix"), 3e-3),
    "adopt": (plain("adopt"), 1e-2),
    "galore": (plain("galore", rank=4, update_proj_gap=50), 1e-2),
    "madgrad": (plain("madgrad"), 1e-2),
    "muon": (plain("muon"), 1e-2),
    "schedule_free_adamw": (plain("schedule_free_adamw"), 1e-2),
    "schedule_free_sgd": (plain("schedule_free_sgd"), 3e-1),
    "schedule_free_sgd, large rate": (plain("schedule_free_sgd"), 1.0),
    "simplified_ademamix": (plain("simplified_ademamix"), 1e-4),
    "sam": (sharpness_aware, 1e-2),
    "MultiSteps": (accumulating, 1e-2),
    "reduce_on_plateau": (on_plateau, 1e-2),
    "cocob": (plain("cocob"), 1.0),
    "dadapt_adamw": (plain("dadapt_adamw"), 1.0),
    "dog": (plain("dog"), 1.0),
    "dowg": (plain("dowg"), 1.0),
    "mechanize": (mechanized, 1e-2),
    "momo": (plain("momo"), 1.0),
    "momo_adam": (plain("momo_adam"), 1e-2),
    "polyak_sgd": (lambda rate: optax.polyak_sgd(scaling=rate), 1.0),
    "prodigy": (plain("prodigy"), 1.0),
}
NOT_RUN = {
    "dpsgd": "takes per-example gradients",
    "differentially_private_aggregate": "takes per-example gradients",
    "lbfgs": "diverges under this noise without its line search",
    "sophia": "evaluates the loss again",
    "lookahead": "its parameters are pairs, its gradients are not",
    "optimistic_adam": "a deprecated name",
}


def predicted(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["w"] + params["b"]) @ params["v"]


def loss_fn(params: Any, microbatch: Any, rng: Any) -> jax.Array:
    x, y = microbatch
    return jnp.mean((predicted(params, x) - y) ** 2)


def network(key: jax.Array) -> Any:
    w, b, v = jax.random.split(key, 3)
    return {
        "w": jax.random.normal(w, (WIDTH, WIDTH)) / 4,
        "b": jax.random.normal(b, (WIDTH,)) / 4,
        "v": jax.random.normal(v, (WIDTH, 1)) / 4,
    }


def rows(key: jax.Array, *shape: int, noise: float = 0.0) -> tuple[Any, Any]:
    """Returns inputs, and what the network to be learned makes of them."""
    x_key, noise_key = jax.random.split(key)
    x = jax.random.normal(x_key, (*shape, WIDTH))
    y = 3 * predicted(network(jax.random.key(10**6)), x)
    return x, y + noise * jax.random.normal(noise_key, y.shape)


def trainer(name: str, method: str, steps: int = STEPS) -> Callable[[int], float]:
    """Returns a function from a seed to the final loss; it is compiled once."""
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])
    build, rate = OPTIMIZERS[name]
    make, microbatches = METHODS[method]
    tx = make(build(rate), mesh=mesh)
    step = acco_jax.make_train_step(loss_fn, tx, microbatches=microbatches)
    calls, held_out = tx.calls(steps), rows(jax.random.key(10**6 + 1), 4096)

    @jax.jit
    def scan(params: Any, state: Any, batches: Any) -> Any:
        def one(carry: Any, batch: Any) -> tuple[Any, None]:
            return step(*carry, batch)[:2], None

        return lax.scan(one, (params, state), batches)[0]

    @jax.jit
    def loss(params: Any) -> jax.Array:
        return loss_fn(params, held_out, None)

    def train(seed: int) -> float:
        start, data = jax.random.split(jax.random.key(seed))
        # one half more than zero1 reads, which acco's last call computes in vain
        x, y = rows(data, 2 * steps + 1, ROWS // 2, noise=NOISE)
        x, y = (
            a[: calls * microbatches].reshape(calls, -1, a.shape[-1]) for a in (x, y)
        )
        params, state = acco_jax.start(tx, network(start))
        before = float(loss(params))
        params, state = scan(params, state, (x, y))
        theta = acco_jax.committed_params(evaluated(state), params)
        return float(loss(theta)) / before

    return train


def row(name: str, seeds: int) -> str:
    """Returns a line of the table: both losses, and the mean of the seeds' ratios."""
    losses = []
    for method in METHODS:
        train = trainer(name, method)
        losses.append(np.array([train(seed) for seed in range(seeds)]))
    zero1, acco = losses
    ratios = acco / zero1
    error = ratios.std(ddof=1) / seeds**0.5
    numbers = (f"{x:.4f}" for x in (zero1.mean(), acco.mean()))
    ratio = f"{ratios.mean():.2f} ± {error:.2f}"
    return f"| {' | '.join([name, f'{OPTIMIZERS[name][1]:g}', *numbers, ratio])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="names, separated by semicolons")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    names = args.only.split(";") if args.only else list(OPTIMIZERS)
    versions = (f"{x} {importlib.metadata.version(x)}" for x in ("jax", "optax"))
    print(f"{', '.join(versions)}, {platform.machine()} CPU, {args.seeds} seeds\n")
    print("| optimizer | learning rate | loss, zero1 | loss, acco | acco / zero1 |")
    print("|---|---|---|---|---|")
    for name in names:
        print(row(name, args.seeds), flush=True)


if __name__ == "__main__":
    main()
