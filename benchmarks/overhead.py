"""What the acco step costs where there is nothing to hide: on one device.

    python benchmarks/overhead.py [--quick] [--json=FILE] [--attention=cudnn]

Times half-rounds of the same microbatches, in turn within every repetition:

    hand    a loop written by hand with optax: gradients summed over the microbatches,
            one inner update, one jitted program, parameters and state donated
    fused   acco_jax.make_train_step(form="fused")
    plain   acco_jax.local_gradients, tx.update and optax.apply_updates in one program

All are compiled with the options that acco_jax.compiler_options names for the device.
A ratio is the median over repetitions of the ratio to `hand` within a repetition, its
spread the middle half. A repetition is two half-rounds (an estimate and a commit) of
each and ends when their results are there. On a CPU the last column is the same ratio
of CPU seconds, all threads together, which other programs disturb less.

On a CPU the model is a GPT-Neo of 10M parameters in float32. On an accelerator it is
GPT-2 small in bfloat16 at sequence 1024 (float32 master copy, in `hand` as well), and
the table adds tokens/s and model FLOPs utilization (of the peak in
acco_jax/schedule/chips.py). On a GPU, `--schedule=8` compiles the fused step for 8
mocked processes and shows what of its communication is hidden.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import acco_jax  # noqa: E402
from acco_jax.command import devices  # noqa: E402
from acco_jax.models import transformer  # noqa: E402
from acco_jax.schedule import chips, schedules  # noqa: E402

PyTree = Any
HALF_ROUNDS = 2
# accelerator -> loop -> at most this times `hand`
TARGETS = {False: {"fused": 1.05, "plain": 1.05}, True: {"fused": 1.02}}
ON_AN_ACCELERATOR = (
    "No accelerator here. On one this program runs GPT-2 small (bfloat16, sequence "
    "1024): the same ratios (fused at most 1.02), tokens/s, model FLOPs utilization."
)


def options() -> dict[str, Any]:
    """What make_train_step compiles with, for the other loops as well."""
    return acco_jax.compiler_options(jax.devices()[0].device_kind)


def hand_written(
    loss_fn: Callable,
    inner: optax.GradientTransformation,
    microbatches: int,
    dtype: Any,
) -> Callable:
    """(master, state, batch) -> (master, state, loss), as one would write it."""

    @functools.partial(jax.jit, donate_argnums=(0, 1), compiler_options=options())
    def step(master: PyTree, state: PyTree, batch: PyTree) -> tuple[Any, Any, Any]:
        params = jax.tree.map(lambda x: x.astype(dtype), master)
        split = lambda x: x.reshape(microbatches, -1, *x.shape[1:])  # noqa: E731
        batch = jax.tree.map(split, batch)

        def total(params: PyTree, microbatch: PyTree) -> tuple[jax.Array, jax.Array]:
            return loss_fn(params, microbatch, None)[:2]

        def add(i: Any, sums: Any) -> Any:
            microbatch = jax.tree.map(lambda x: x[i], batch)
            one = jax.value_and_grad(total, has_aux=True)(params, microbatch)
            return jax.tree.map(jnp.add, sums, one)

        zeros = (jnp.float32(0), jnp.float32(0)), jax.tree.map(jnp.zeros_like, params)
        (loss, weight), grads = jax.lax.fori_loop(0, microbatches, add, zeros)
        mean = jax.tree.map(lambda g: g.astype(jnp.float32) / weight, grads)
        updates, state = inner.update(mean, state, master)
        return optax.apply_updates(master, updates), state, loss / weight

    return step


def plain(
    loss_fn: Callable, tx: acco_jax.Method, mesh: jax.sharding.Mesh, microbatches: int
) -> Callable:
    """The optax way: local gradients, update, apply_updates."""
    gradients = acco_jax.local_gradients(loss_fn, mesh=mesh, microbatches=microbatches)

    @functools.partial(jax.jit, donate_argnums=(0, 1), compiler_options=options())
    def step(params: PyTree, state: PyTree, batch: PyTree) -> tuple[Any, Any, Any]:
        grads, weight, _ = gradients(params, batch)
        updates, state = tx.update(grads, state, params, weight=weight)
        return optax.apply_updates(params, updates), state, weight

    return step


def make_loops(
    config: transformer.Config, microbatches: int, rows: int
) -> dict[str, Callable[[], None]]:
    """Name -> two half-rounds of microbatches of `rows` sequences, waited for."""
    loss_fn, inner = transformer.loss_fn(config), optax.adamw(1e-4)
    mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
    everywhere = jax.sharding.NamedSharding(mesh, jax.P())
    shape = (microbatches * rows, config.max_length + 1)
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=shape)
    batch = jax.device_put({"tokens": tokens.astype(np.int32)}, everywhere)
    init = functools.partial(transformer.init_params, config, jax.random.key(0))
    params = jax.jit(init, out_shardings=everywhere)
    acco = acco_jax.acco(inner, mesh=mesh)
    fused = acco_jax.make_train_step(
        loss_fn, acco, microbatches=microbatches, form="fused"
    )

    def looped(step: Callable, now: PyTree, state: PyTree) -> Callable[[], None]:
        held = [now, state]

        def run() -> None:
            for _ in range(HALF_ROUNDS):
                *held[:], metrics = step(*held, batch)
            jax.block_until_ready((held, metrics))

        return run

    master = jax.tree.map(lambda x: x.astype(jnp.float32), params())
    by_hand = hand_written(loss_fn, inner, microbatches, config.param_dtype)
    optax_way = plain(loss_fn, acco, mesh, microbatches)
    return {
        "hand": looped(by_hand, master, jax.jit(inner.init)(master)),
        "fused": looped(fused, now := params(), acco.init(now)),
        "plain": looped(optax_way, now := params(), acco.init(now)),
    }


def measure(
    loops: dict[str, Callable[[], None]], repetitions: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds and CPU seconds per half-round of every loop in every repetition."""
    names = list(loops)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    for name in names * 2:  # compiles, then settles
        loops[name]()
    for i in range(repetitions):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            start, used = time.perf_counter(), time.process_time()
            loops[name]()
            seconds[name].append((time.perf_counter() - start) / HALF_ROUNDS)
            cpu[name].append((time.process_time() - used) / HALF_ROUNDS)
    return seconds, cpu


def ratios(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Loop -> median and quartiles of its ratio to `hand`."""
    found = {}
    for name in ("fused", "plain"):
        each = [a / b for a, b in zip(seconds[name], seconds["hand"], strict=True)]
        low, middle, high = statistics.quantiles(each, method="inclusive")
        found[name] = {"median": middle, "low": low, "high": high}
    return found


def schedule(config: transformer.Config, microbatches: int, rows: int) -> str:
    """What of the fused step's communication all devices together would hide."""
    n = jax.device_count()
    mesh = jax.make_mesh((n,), ("data",), (jax.sharding.AxisType.Auto,))
    tx = acco_jax.acco(optax.adamw(1e-4), mesh=mesh)
    step = acco_jax.make_train_step(
        transformer.loss_fn(config), tx, microbatches=microbatches, form="fused"
    )
    init = functools.partial(transformer.init_params, config, jax.random.key(0))
    params = jax.eval_shape(init)
    state = jax.eval_shape(tx.init, params)

    def place(x: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    params = jax.tree.map(place, params, state.layout.params_shardings)
    state = jax.tree.map(place, state, acco_jax.state_shardings(tx, params))
    data = jax.sharding.NamedSharding(mesh, jax.P("data"))
    shape = (n * microbatches * rows, config.max_length + 1)
    batch = {"tokens": jax.ShapeDtypeStruct(shape, jnp.int32, sharding=data)}
    text = step.lower(params, state, batch).compile().as_text()
    return schedules.read(text).summary()


def show(report: dict[str, Any]) -> None:
    print(f"{report['device']}: {report['parameters'] / 1e6:.1f}M parameters, "
          f"{report['tokens']} tokens per half-round")  # fmt: skip
    for name, values in report["seconds"].items():
        middle = statistics.median(values)
        line = f"  {name:<7}{middle * 1000:9.1f} ms {report['tokens'] / middle:11.0f}"
        line += " tokens/s"
        if report["peak_flops"]:
            used = report["flops_per_token"] * report["tokens"] / middle
            line += f"  {used / report['peak_flops']:6.1%} of peak"
        if found := report["ratios"].get(name):
            line += f"   {found['median']:.3f}x ({found['low']:.3f}-{found['high']:.3f}"
            line += (
                f", at most {limit})" if (limit := report["at_most"].get(name)) else ")"
            )
            if report["device"].startswith("cpu"):
                line += f"  {report['cpu_ratios'][name]['median']:.3f}x"
        print(line)
    print(f"  load {' '.join(f'{x:.1f}' for x in report['load'])}")


def parse(args: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flag = parser.add_argument
    flag("--quick", action="store_true", help="a tiny model, 3 repetitions")
    flag("--json", metavar="FILE", help="also write every sample there")
    flag("--repetitions", type=int, metavar="R", help="default 15, quick 3")
    flag("--microbatches", type=int, default=4, metavar="N", help="default 4")
    flag("--rows", type=int, metavar="B", help="sequences of a microbatch")
    flag("--attention", choices=("xla", "cudnn"), help="default: what JAX chooses")
    flag("--schedule", type=int, metavar="N", help="of N mocked processes; no timing")
    found = parser.parse_args(args)
    if found.repetitions is not None and found.repetitions < 2:
        parser.error("--repetitions: quartiles need at least 2")
    return found


def model(accelerator: bool, quick: bool) -> tuple[transformer.Config, int]:
    """The model and the sequences of a microbatch."""
    if quick:
        return transformer.Config(256, 32, 64, 2, 2, window=16, dtype="float32"), 1
    if accelerator:
        types = {"dtype": "bfloat16", "param_dtype": "bfloat16"}
        small = {"vocab_size": 50304, "max_length": 1024, "pattern": ("global",)}
        return transformer.size("gpt-neo-125m", **small, **types), 16
    return transformer.Config(8192, 256, 384, 4, 6, dtype="float32"), 4


def main() -> None:
    args = parse()
    devices.choose_platform(args.schedule, several_processes=False)
    if args.schedule and jax.config.jax_platforms != "cpu":
        jax.config.update("jax_mock_gpu_topology", f"1x{args.schedule}x1")
    device = jax.devices()[0]
    accelerator, chip = device.platform != "cpu", chips.of_kind(device.device_kind)
    config, rows = model(accelerator, args.quick)
    rows = args.rows or rows
    config = dataclasses.replace(config, attention=args.attention)
    if args.schedule:
        print(schedule(config, args.microbatches, rows))
        return
    loops = make_loops(config, args.microbatches, rows)
    seconds, cpu = measure(loops, args.repetitions or (3 if args.quick else 15))
    report = {
        "command": " ".join(sys.argv),
        "device": f"{device.device_kind}, {os.cpu_count()} cores",
        "parameters": transformer.count_params(config),
        "tokens": args.microbatches * rows * config.max_length,
        "flops_per_token": transformer.flops_per_token(config, config.max_length),
        "peak_flops": chip and chip.flops,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "ratios": ratios(seconds),
        "cpu_ratios": ratios(cpu),
        "at_most": {} if args.quick else TARGETS[accelerator],
        "load": os.getloadavg(),
    }
    show(report)
    if not accelerator:
        print(ON_AN_ACCELERATOR)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
