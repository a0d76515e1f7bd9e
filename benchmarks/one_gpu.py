"""What can be measured on one borrowed GPU, in eight minutes.

    python benchmarks/one_gpu.py --out=experiments/results/one_gpu
    python benchmarks/one_gpu.py --quick --out=/tmp/one_gpu  # a rehearsal on a CPU

It writes OUT.json after each part, and OUT.md. The parts are:

    calibration  figures as `python -m acco_jax.plan --calibrate` measures them
    steps        the acco step on one device beside a loop written by hand with optax
                 (overhead.py): tokens/s, model FLOPs utilization, peak memory, seconds
                 to compile, and the interval that plan predicts for the half-round
    correctness  attention kernels and the chunked loss beside naive ones
    schedule     the step's schedule, compiled here, read by acco_jax.audit; the step
                 of 4 x 8 such devices likewise
    end_to_end   acco_jax.train: the loss falls, and a resumed run has the same bits

Each part, and each combination of `steps`, is a process of its own. One that fails or
lasts too long becomes a row with the reason. Steps run as long as there is time, the
most important first. Loops take turns within a repetition; ratios are medians over
repetitions. Peak memory is `device.memory_stats()`'s, of the process: the hand-written
loop runs first, so that "<=" marks a second loop that needed less. Program memory is
the compiler's. Compile seconds of later rows reuse earlier rows' autotuning.

On a machine without a network, carry the wheel of ml_collections, without which
calibration, predictions and acco_jax.train are rows that name it. acco_jax.train also
needs those of tensorflow-datasets and of what it requires (`pip show`):

    python3 -m pip download --no-deps -d .whl ml_collections tensorflow-datasets ...
    python3 -m pip install --no-index --no-deps --target /tmp/site .whl/*.whl
    PYTHONUNBUFFERED=1 PYTHONPATH=$PWD:/tmp/site \\
        timeout 480 python3 benchmarks/one_gpu.py --out=$OUT/one_gpu

Tolerances of the largest error, relative to the naive result's largest entry: 5e-3 in
float32 on a GPU, whose kernels multiply in TF32, and 1e-5 on a CPU; 2e-2 in bfloat16;
1e-5 for the loss, whose products are in float32.

Goals: at least 55 % model FLOPs utilization with 124M parameters, every half-round
inside its predicted interval, every error within its tolerance.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import json
import math
import os
import pickle
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

PARTS = ("calibration", "steps", "correctness", "schedule", "end_to_end")
UTILIZATION = 0.55  # wanted at 124M
MICROBATCHES = 2  # of a half-round
CALLS = 2  # half-rounds of a repetition
Report = dict[str, Any]
Keep = Callable[[Report], None]


@dataclasses.dataclass(frozen=True)
class Combination:
    """A step to time."""

    model: str
    attention: str
    remat: str
    rows: int  # of a microbatch
    layers: str = "unrolled"  # or "loop"

    def __str__(self) -> str:
        return " ".join(map(str, dataclasses.astuple(self)))


# most important first
COMBINATIONS = (
    Combination("gpt2-124m", "cudnn", "elementwise", 64),
    Combination("gpt2-124m", "cudnn", "none", 32),
    Combination("llama-1b", "cudnn", "elementwise", 4),
    Combination("llama-350m", "cudnn", "none", 8),
    Combination("gpt2-124m", "cudnn", "none", 32, "loop"),
    Combination("llama-1b", "cudnn", "elementwise", 4, "loop"),
    Combination("llama-350m", "cudnn", "none", 8, "loop"),
    Combination("gpt2-124m", "pallas", "none", 32),
    Combination("llama-1b", "pallas", "elementwise", 4),
    Combination("gpt2-124m", "cudnn", "none", 16),
    Combination("gpt2-124m", "xla", "none", 16),
    Combination("llama-1b", "cudnn", "none", 4),
    Combination("llama-350m", "cudnn", "elementwise", 16),
    Combination("llama-350m", "pallas", "none", 8),
    Combination("llama-1b", "cudnn", "elementwise", 8),
)
QUICK = (
    Combination("tiny", "xla", "none", 2),
    Combination("tiny", "cudnn", "none", 2, "loop"),
)


@dataclasses.dataclass(frozen=True)
class Job:
    """A part, or a combination of `steps`, in a process of its own."""

    part: str
    limit: float  # seconds, at most
    combination: int | None = None


def jobs(quick: bool) -> list[Job]:
    """Return all jobs, in the order in which a budget is spent."""
    steps = [Job("steps", 90, i) for i in range(len(QUICK if quick else COMBINATIONS))]
    return [
        Job("calibration", 120), *steps[:1], Job("correctness", 80), *steps[1:3],
        Job("schedule", 80), Job("end_to_end", 90), *steps[3:],
    ]  # fmt: skip


# ---- what the parts share


def line(error: BaseException) -> str:
    """Return an error as one line."""
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0]}"[:240]


def model_config(name: str) -> Any:
    """Return the transformer's configuration, in bfloat16."""
    from acco_jax.models import sizes

    types: dict[str, Any] = {"dtype": "bfloat16", "param_dtype": "bfloat16"}
    if name == "tiny":
        types = dict.fromkeys(types, "float32")
        return sizes.Config(256, 32, 64, 2, 2, pattern=("global",), **types)
    if name == "gpt2-124m":
        return sizes.size("gpt2", vocab_size=50304, **types)
    if name == "llama-1b":
        return sizes.size("llama-3.2-1b", max_length=2048, **types)
    return sizes.Config(
        vocab_size=32000, max_length=2048, width=1024, layers=24, heads=16,
        mlp_width=2816, **sizes.FAMILIES["llama"], **types,
    )  # fmt: skip


def chip_of(device: Any) -> Any:
    """Return the device's figures; an H100's stand in on a CPU, in a rehearsal."""
    from acco_jax.schedule import chips

    if device.platform == "cpu":
        return chips.CHIPS["h100"]
    chip = chips.of_kind(device.device_kind)
    if chip is None:
        raise ValueError(f"no data sheet of a {device.device_kind}")
    return chip


def one_device() -> Any:
    import jax

    kinds = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((1,), ("data",), kinds, devices=jax.devices()[:1])


def make_step(config: Any, mesh: Any) -> tuple[Any, Any, Any]:
    """Return loss function, method and train step of acco on a mesh."""
    import optax

    import acco_jax
    from acco_jax.models import transformer

    loss, tx = transformer.loss_fn(config), acco_jax.acco(optax.adamw(1e-4), mesh=mesh)
    step = acco_jax.make_train_step(loss, tx, microbatches=MICROBATCHES, form="fused")
    return loss, tx, step


def abstract_arguments(config: Any, tx: Any, rows: int) -> tuple[Any, Any, Any]:
    """Return abstract (params, state, batch) on the method's mesh."""
    import jax
    import jax.numpy as jnp

    import acco_jax
    from acco_jax.models import transformer

    shapes = transformer.shapes_of(config)
    params, state = jax.tree.map(
        lambda x, home: x.update(sharding=home),
        jax.eval_shape(functools.partial(acco_jax.start, tx), shapes),
        acco_jax.start_shardings(tx, shapes),
    )
    data = jax.sharding.NamedSharding(tx.mesh, jax.P("data"))
    shape = (tx.mesh.size * MICROBATCHES * rows, config.max_length + 1)
    return (
        params,
        state,
        {"tokens": jax.ShapeDtypeStruct(shape, jnp.int32, sharding=data)},
    )


# ---- calibration


def calibration(quick: bool, keep: Keep, **_: Any) -> Report:
    """Measure as plan's --calibrate."""
    from acco_jax.plan import calibration as plan_calibration
    from acco_jax.run.build.validation import validate
    from acco_jax.run.config.fields import default_config

    config = default_config()
    config.microbatches_per_step, config.model.family = 2, "gpt2"
    if quick:
        config.length, config.microbatch_size, config.model.width = 32, 2, 64
        config.model.layers = config.model.heads = 2
        config.model.dtype = config.model.param_dtype = "float32"
    else:
        config.length, config.microbatch_size, config.model.size = 1024, 16, "gpt2"
        config.model.vocab_size, config.model.remat = 50304, "none"
    validate(config)
    found = plan_calibration.calibrate(config)
    print(plan_calibration.text(found), flush=True)
    return dataclasses.asdict(found) | {"inside": [s.inside for s in found.steps]}


# ---- steps


class Loop:
    """A train step's half-rounds, from a fresh state."""

    def __init__(self, begin: Callable[[], Any], step: Callable[..., Any]) -> None:
        self._begin, self._step = begin, step
        self._held: list[Any] = []

    def start(self) -> None:
        """Make the state and run twice: compiles, then settles."""
        self._held = list(self._begin())
        self.seconds()
        self.seconds()

    def stop(self) -> None:
        self._held = []

    def seconds(self) -> float:
        """Return the seconds of a half-round."""
        import jax

        start = time.perf_counter()
        for _ in range(CALLS):
            *self._held, metrics = self._step(*self._held)
        jax.block_until_ready((self._held, metrics))
        return (time.perf_counter() - start) / CALLS


def peak() -> int | None:
    """Return the most bytes that this process has held on the device, if known."""
    import jax

    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")


def program_bytes(compiled: Any) -> int:
    m = compiled.memory_analysis()
    total = m.argument_size_in_bytes + m.output_size_in_bytes
    return total + m.temp_size_in_bytes - m.alias_size_in_bytes


def timed_compile(lower: Callable[[], Any]) -> tuple[Any, Report]:
    """Compile; return the program, its seconds and bytes."""
    start = time.perf_counter()
    compiled = lower().compile()
    seconds = time.perf_counter() - start
    return compiled, {
        "compile_seconds": seconds,
        "program_bytes": program_bytes(compiled),
    }


def steps(quick: bool, keep: Keep, combination: int, figures: Report) -> Report:
    """Time a combination's loops in turns."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    import overhead

    import acco_jax
    from acco_jax.models import transformer

    chosen = (QUICK if quick else COMBINATIONS)[combination]
    config = dataclasses.replace(
        model_config(chosen.model), attention=chosen.attention, remat=chosen.remat,
        scan_layers=chosen.layers == "loop",
    )  # fmt: skip
    device, mesh = jax.devices()[0], one_device()
    tokens = MICROBATCHES * chosen.rows * config.max_length
    flops = transformer.flops_per_token(config, config.max_length) * tokens
    row: Report = dataclasses.asdict(chosen) | {
        "parameters": transformer.count_params(config),
        "length": config.max_length,
        "tokens": tokens,
        "loops": {"hand": {}, "acco": {}},
    }
    keep(row)
    shape = (MICROBATCHES * chosen.rows, config.max_length + 1)
    drawn = np.random.default_rng(0).integers(config.vocab_size, size=shape)
    home = jax.sharding.NamedSharding(mesh, jax.P())
    batch = jax.device_put({"tokens": drawn.astype(np.int32)}, home)
    init = functools.partial(transformer.init_params, config, jax.random.key(0))
    params = jax.jit(init, out_shardings=home)
    loss, tx, step = make_step(config, mesh)
    inner = optax.adamw(1e-4)
    wide = jax.jit(lambda: jax.tree.map(lambda x: x.astype(jnp.float32), init()))
    by_hand = overhead.hand_written(loss, inner, MICROBATCHES, config.param_dtype)

    def hand_begins() -> tuple[Any, Any]:
        master = jax.device_put(wide(), home)
        return master, jax.device_put(jax.jit(inner.init)(master), home)

    loops, texts = {}, {}
    begins = {"hand": hand_begins, "acco": lambda: acco_jax.start(tx, params())}
    runs = {"hand": by_hand, "acco": step}
    for name, run in runs.items():
        found = row["loops"][name]
        try:
            if name == "acco":
                arguments = abstract_arguments(config, tx, chosen.rows)
            else:
                shapes = jax.eval_shape(begins[name])
                at_home = jax.tree.map(lambda x: x.update(sharding=home), shapes)
                arguments = *at_home, batch
            lower = functools.partial(run.lower, *arguments)
            compiled, about = timed_compile(lower)
            found |= about
            texts[name] = compiled.as_text()
            loop = Loop(begins[name], lambda *held, run=run: run(*held, batch))
            before = peak()
            loop.start()
            found["peak_bytes"], found["peak_is_bound"] = peak(), peak() == before
            loops[name] = loop
        except Exception as error:
            found["error"] = line(error)
            print(f"{chosen}, {name}: {found['error']}", flush=True)
        finally:
            if name in loops:
                loops[name].stop()
        keep(row)
    if not loops:
        return row | {"error": row["loops"]["acco"]["error"]}
    try:
        for loop in loops.values():
            loop.start()
    except jax.errors.JaxRuntimeError as error:  # both at once take too much memory
        row["error"] = f"alone, as both together do not fit: {line(error)}"
        for loop in loops.values():
            loop.stop()
        loops = {name: loop for name, loop in loops.items() if name == "acco"}
        for loop in loops.values():
            loop.start()
    names, times = list(loops), {name: [] for name in loops}
    for i in range(3 if quick else 8):
        for name in names if i % 2 else names[::-1]:
            times[name].append(loops[name].seconds())
    for name, each in times.items():
        middle, found = statistics.median(each), row["loops"][name]
        found |= {"seconds": each, "tokens_per_second": tokens / middle}
        if device.platform != "cpu":
            found["utilization"] = flops / middle / chip_of(device).flops
    if len(times) == 2:
        each = [a / b for a, b in zip(times["acco"], times["hand"], strict=True)]
        ends = statistics.quantiles(each, method="inclusive")
        row["ratio"] = dict(zip(("low", "median", "high"), ends, strict=True))
    keep(row)
    if "acco" in times:
        measured = statistics.median(times["acco"])
        text, shapes = texts["acco"], (loss, tx, config, chosen.rows)
        row["predicted"] = predicted(text, shapes, {}, measured)
        if figures:
            row["calibrated"] = predicted(text, shapes, figures, measured)
    print(f"{chosen}: {step_text(row)}", flush=True)
    return row


def predicted(text: str, of: Any, changes: Report, measured: float) -> Report:
    """Return plan's interval of a half-round, from its compiled text."""
    import jax

    try:
        from acco_jax.models import transformer
        from acco_jax.plan import programs
        from acco_jax.schedule import costs, machines
        from acco_jax.schedule.topologies import Topology

        (loss, tx, config, rows), chip = of, chip_of(jax.devices()[0])
        program = programs.assemble(
            "acco", tx, loss, transformer.shapes_of(config),
            microbatches=MICROBATCHES, microbatch=(rows, config.max_length + 1),
        )  # fmt: skip
        schedule, topology = program.read(text), Topology("gpu", chip, (1, 1))
        machine = machines.Machine(topology, machines.figures(chip, changes))
        likely = costs.predict(schedule, machine, 1)
        ends = [costs.predict(schedule, m, 1).total for m in machine.corners()]
    except Exception as error:
        return {"error": f"n/a: {line(error)}"}
    low, high = min(ends), max(ends)
    return {
        "seconds": likely.total,
        "matmul": likely.matmul,
        "memory": likely.memory,
        "interval": [low, high],
        "inside": low <= measured <= high,
    }


# ---- correctness


def correctness(quick: bool, keep: Keep, **_: Any) -> Report:
    """Compare kernels with naive attention and loss, values and gradients."""
    import jax

    cpu = jax.default_backend() == "cpu"
    tolerances = {"float32": 1e-5 if cpu else 5e-3, "bfloat16": 2e-2}
    cases: dict[str, Report] = {
        "causal": {},
        "window": {"window": 24 if quick else 256},
        "shared keys": {"kv_heads": 1},
        "soft cap": {"softcap": 20.0},
        "documents": {"documents": True},
    }
    tried = [("pallas", "float32", case) for case in cases]
    tried += [("pallas", "bfloat16", "causal"), ("cudnn", "bfloat16", "causal")]
    tried += [("cudnn", "bfloat16", "window"), ("cudnn", "bfloat16", "shared keys")]
    rows: list[Report] = []
    for softcap in (None, 30.0):
        what = "loss" if softcap is None else "loss, soft cap"
        pair = functools.partial(loss_pair, quick, softcap)
        with jax.default_matmul_precision("highest"):
            rows.append({"what": what, "dtype": "float32"} | compared(pair, 1e-5))
        keep({"rows": rows})
    for kernel, dtype, case in tried[:1] + tried[-1:] if quick else tried:
        row = {"what": f"{kernel} {case}", "dtype": dtype}
        pair = functools.partial(attention_pair, kernel, dtype, quick, **cases[case])
        rows.append(row | compared(pair, tolerances[dtype]))
        keep({"rows": rows})
    for row in rows:
        print(f"{row['what']}, {row['dtype']}: {error_text(row)}", flush=True)
    return {"rows": rows}


def compared(pair: Callable[[], tuple[Any, Any, Any]], tolerance: float) -> Report:
    """Return the largest errors of values and gradients of two functions."""
    import jax
    import jax.numpy as jnp

    def largest(a: Any, b: Any) -> float:
        a, b = (x.astype(jnp.float32) for x in (a, b))
        return float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)))

    def both(f: Any) -> Any:
        # a gradient of every output at once, each with a weight of its own
        def weighted(*x: Any) -> tuple[Any, Any]:
            y = f(*x)
            w = jax.random.normal(jax.random.key(9), y.shape)
            return jnp.sum(w * y.astype(jnp.float32)), y

        grad = jax.grad(weighted, argnums=tuple(range(len(arguments))), has_aux=True)
        gradients, value = jax.jit(grad)(*arguments)
        return value, *gradients

    try:
        ours, naive, arguments = pair()
        found = both(ours)
        with jax.default_matmul_precision("highest"):
            expected = both(naive)
        errors = list(map(largest, found, expected))
    except Exception as error:
        return {"error": line(error)}
    return {
        "tolerance": tolerance,
        "value": errors[0],
        "gradients": max(errors[1:]),
        "within": all(e <= tolerance for e in errors),  # false for nan, too
    }


def attention_pair(
    kernel: str,
    dtype: str,
    quick: bool,
    *,
    window: int | None = None,
    softcap: float | None = None,
    kv_heads: int = 4,
    documents: bool = False,
) -> tuple[Any, Any, Any]:
    """Return attention by a kernel, naive attention, and their arguments."""
    import jax
    import jax.numpy as jnp

    from acco_jax.models import attention

    B, T, N, H = (1, 64, 4, 16) if quick else (2, 1024, 4, 64)
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, (B, T, heads, H)).astype(dtype)
        for key, heads in zip(keys, (N, kv_heads, kv_heads), strict=True)
    )
    scale = 1 / math.sqrt(H)
    segments = None
    if documents:
        segments = jnp.broadcast_to(jnp.arange(T) // (T // 3), (B, T)).astype(jnp.int32)

    def ours(q: Any, k: Any, v: Any) -> Any:
        return attention.attention(
            q, k, v, scale=scale, window=window, softcap=softcap, segments=segments,
            implementation=kernel,
        )  # fmt: skip

    def naive(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        k, v = (jnp.repeat(x, N // kv_heads, axis=2) for x in (k, v))
        s = scale * jnp.einsum("btnh,bsnh->bnts", q, k)
        s = s if softcap is None else softcap * jnp.tanh(s / softcap)
        before = jnp.arange(T)[:, None] - jnp.arange(T)
        seen = (before >= 0) & (before < (window or T))
        if segments is not None:
            seen = seen & (segments[:, None, :, None] == segments[:, None, None, :])
        p = jax.nn.softmax(jnp.where(seen, s, -jnp.inf), axis=-1)
        return jnp.einsum("bnts,bsnh->btnh", p, v).reshape(B, T, -1)

    return ours, naive, (q, k, v)


def loss_pair(quick: bool, softcap: float | None) -> tuple[Any, Any, Any]:
    """Return the chunked loss, a naive one, and their arguments."""
    import jax
    import jax.numpy as jnp

    from acco_jax.models import head

    B, T, D, V = (2, 24, 16, 96) if quick else (4, 1024, 256, 8192)
    keys = jax.random.split(jax.random.key(1), 3)
    x, w = jax.random.normal(keys[0], (B, T, D)), jax.random.normal(keys[1], (V, D))
    w = w / math.sqrt(D)
    targets = jax.random.randint(keys[2], (B, T), 0, V)
    weights = (jnp.arange(B * T).reshape(B, T) % 3 > 0).astype(jnp.float32)

    def ours(x: Any, w: Any) -> Any:
        chunks = B * T * V // 4
        return head.cross_entropy(
            x, w, targets, weights, softcap=softcap, logits=chunks
        )

    def naive(x: Any, w: Any) -> Any:
        logits = jnp.einsum("btd,vd->btv", x, w)
        logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
        logs = jax.nn.log_softmax(logits, axis=-1)
        picked = jnp.take_along_axis(logs, targets[..., None], axis=-1)[..., 0]
        return -jnp.sum(weights * picked)

    return ours, naive, (x, w)


# ---- schedule


def schedule(quick: bool, keep: Keep, **_: Any) -> Report:
    """Read the step that this machine compiles, for itself and for more devices."""
    import jax

    from acco_jax import audit

    chosen = QUICK[0] if quick else COMBINATIONS[0]
    config = dataclasses.replace(model_config(chosen.model), remat=chosen.remat)
    chip, report = chip_of(jax.devices()[0]), {}

    def one() -> Any:
        _, tx, step = make_step(config, one_device())
        arguments = abstract_arguments(config, tx, chosen.rows)
        return step.lower(*arguments).compile().as_text(), {"data": 1}

    def several() -> Any:
        devices = audit.devices(places["several"])
        mesh = jax.sharding.Mesh(devices, ("data",))
        _, tx, step = make_step(config, mesh)
        arguments = abstract_arguments(config, tx, chosen.rows)
        lowered = step.lower(*arguments)
        return lowered.compile().as_text(), {"data": len(devices)}

    places = {"one": f"gpu:{chip.name}:1x1", "several": f"gpu:{chip.name}:4x8"}
    makes = {"one": one} if quick else {"one": one, "several": several}
    for name, make in makes.items():
        try:
            start = time.perf_counter()
            text, mesh = make()
            taken = time.perf_counter() - start
            found = audit.audit(text, topology=places[name], mesh=mesh)
            read = found.schedule
            report[name] = {
                "topology": places[name],
                "compile_seconds": taken,
                "operations": len(read.operations),
                "loops": [dataclasses.asdict(x) for x in read.loops],
                "matmul_flops": read.flops,
                "unknown": list(read.unknown),
                "collectives": len(read.collectives),
                "bytes": found.verdict().bytes,
                "overlapped": found.verdict().hidden_share,
                "text": str(found).replace(f"{ROOT}/", ""),
            }
        except Exception as error:
            report[name] = {"topology": places[name], "error": line(error)}
        print(f"schedule of {places[name]}: {schedule_text(report[name])}", flush=True)
        keep(report)
    return report


# ---- end to end


def end_to_end(quick: bool, keep: Keep, **_: Any) -> Report:
    """Train, stop, resume and compare bits: by the command if its packages are here."""
    needed = ("absl", "ml_collections", "orbax.checkpoint", "etils", "flax")
    missing = [name for name in needed if not importable(name)]
    report: Report = {"missing": missing}
    if not missing:
        try:
            report |= by_command(quick)
        except Exception as error:
            report["error_of_the_command"] = line(error)
    if "bitwise" not in report:
        report |= by_hand(quick, orbax=not {"orbax.checkpoint", "etils"} & {*missing})
    print(f"end to end: {end_text(report)}", flush=True)
    return report


def importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def by_command(quick: bool) -> Report:
    """Run acco_jax.train to its end, and again with a stop between."""
    import common

    from acco_jax.command import exits

    steps, middle = (8, 8) if quick else (200, 200)  # half-rounds are twice as many
    with common.workplace(None) as place:
        config = place / "config.py"
        common.write_config(
            config, common.texts(place), steps=steps, checkpoint_every=steps,
            eval_every=steps, eval_batches=2, data={"held_out": 0.2},
            model={"width": 16 if quick else 128},
        )  # fmt: skip
        environment = common.environment(place) | {
            "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", ""),
            "PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT)),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        }

        def train(workdir: str, *flags: str, code: int = 0) -> None:
            command = [sys.executable, "-m", "acco_jax.train", f"--config={config}"]
            command += [f"--workdir={place / workdir}", *flags]
            done = subprocess.run(
                command, env=environment, cwd=ROOT, capture_output=True, text=True
            )
            if done.returncode != code:
                said = done.stderr.strip().splitlines() or [""]
                raise RuntimeError(f"acco_jax.train: {done.returncode}, {said[-1]}")

        train("whole")
        train("resumed", f"--stop_after={middle}", code=exits.STOPPED)
        train("resumed")
        rows = common.rows(place / "whole")
        losses = [r["loss"] for r in rows if r["kind"] == "train"]
        same = common.bits(place / "whole") == common.bits(place / "resumed")
    return outcome("acco_jax.train", losses, same)


def outcome(how: str, losses: list[float], same: bool) -> Report:
    few = max(1, len(losses) // 10)
    first, last = statistics.mean(losses[:few]), statistics.mean(losses[-few:])
    return {
        "how": how, "losses": losses, "first": first, "last": last,
        "falls": last < first, "bitwise": same,
    }  # fmt: skip


def by_hand(quick: bool, orbax: bool) -> Report:
    """Do the same in a loop of its own, through acco_jax.save or pickled arrays."""
    import jax
    import numpy as np

    import acco_jax
    from acco_jax.models import transformer

    config, rows = model_config("tiny"), 4
    _, tx, step = make_step(config, one_device())
    init = functools.partial(transformer.init_params, config, jax.random.key(0))
    shape = (MICROBATCHES * rows, config.max_length + 1)
    calls = 8 if quick else 100

    def batch(i: int) -> Report:  # rows that count on, from any token
        first = np.random.default_rng(i).integers(config.vocab_size, size=(shape[0], 1))
        tokens = (first + np.arange(shape[1])) % config.vocab_size
        return {"tokens": tokens.astype(np.int32)}

    def go(params: Any, state: Any, begin: int, end: int) -> tuple[Any, Any, list]:
        losses = []
        for i in range(begin, end):
            params, state, metrics = step(params, state, batch(i))
            losses.append(float(metrics["loss"]))
        return params, state, losses

    def arrays(tree: Any) -> list[Any]:
        return list(map(np.asarray, jax.tree.leaves(tree)))

    with tempfile.TemporaryDirectory() as folder:
        params, state, losses = go(*acco_jax.start(tx, init()), 0, calls // 2)
        if orbax:
            acco_jax.save(f"{folder}/saved", state, params)
        else:
            Path(folder, "saved").write_bytes(pickle.dumps(arrays((params, state))))
            like = jax.tree.map(lambda x: x.sharding, (params, state))
        *whole, rest = go(params, state, calls // 2, calls)
        if orbax:
            params, state, _ = acco_jax.restore(f"{folder}/saved", tx, init())
        else:
            leaves = pickle.loads(Path(folder, "saved").read_bytes())
            restored = jax.tree.unflatten(jax.tree.structure(like), leaves)
            params, state = jax.device_put(restored, like)
        *resumed, _ = go(params, state, calls // 2, calls)
    pairs = zip(arrays(whole), arrays(resumed), strict=True)
    same = all(a.tobytes() == b.tobytes() for a, b in pairs)
    how = "acco_jax.save and restore" if orbax else "pickled arrays"
    return outcome(how, losses + rest, same)


# ---- the table


def share(x: float | None) -> str:
    return "n/a" if x is None else f"{x:.1%}"


def gib(loop: Report) -> str:
    if loop.get("peak_bytes") is None:
        return "n/a"
    return f"{'<=' if loop['peak_is_bound'] else ''}{loop['peak_bytes'] / 2**30:.1f}"


def interval_text(found: Report | None) -> str:
    if found is None:
        return "n/a"
    if "error" in found:
        return found["error"]
    low, high = (1e3 * x for x in found["interval"])
    return f"{low:.1f} - {high:.1f}, {'inside' if found['inside'] else 'OUTSIDE'}"


def step_text(row: Report) -> str:
    acco, text = row["loops"]["acco"], []
    if "seconds" in acco:
        text.append(f"{1e3 * statistics.median(acco['seconds']):.1f} ms")
        text.append(f"{acco['tokens_per_second']:,.0f} tokens/s")
        text.append(f"{share(acco.get('utilization'))} of the peak")
        text.append(f"{gib(acco)} GiB, compiled in {acco['compile_seconds']:.1f} s")
    if "ratio" in row:
        text.append(f"{row['ratio']['median']:.3f} of the time by hand")
    text += [interval_text(row["predicted"])] if "predicted" in row else []
    return "; ".join([*text, *([row["error"]] if "error" in row else [])])


def error_text(row: Report) -> str:
    if "error" in row:
        return row["error"]
    verdict = "within" if row["within"] else "BEYOND"
    errors = f"value {row['value']:.1e}, gradients {row['gradients']:.1e}"
    return f"{errors}, {verdict} {row['tolerance']:.0e}"


def schedule_text(found: Report) -> str:
    if "error" in found:
        return found["error"]
    text = f"{found['operations']} operations, {len(found['loops'])} loops, "
    text += f"{found['collectives']} collectives"
    if found["overlapped"] is not None:
        text += f", {found['overlapped']:.1%} of their bytes overlapped"
    return f"{text}; compiled in {found['compile_seconds']:.1f} s"


def end_text(found: Report) -> str:
    if "error" in found:
        return found["error"]
    text = f"{found['how']}: loss {found['first']:.3f} to {found['last']:.3f}, resumed "
    text += f"{'bitwise identical' if found['bitwise'] else 'with OTHER BITS'}"
    why = found.get("error_of_the_command")
    if found["missing"] or why:
        text += f" (acco_jax.train: {why or 'missing ' + ', '.join(found['missing'])})"
    return text


def table(report: Report) -> str:
    """Return the report as markdown."""
    device, parts = report["device"], report["parts"]
    out = ["# One GPU", "", f"    {report['command']}", ""]
    what = f"{device.get('kind', 'unknown')}, jax {device.get('jax', '?')}"
    out += [f"{what}, Python {report['python']}, {report['seconds']:.0f} s.", ""]
    out += ["| goal | |", "|---|---|"]
    out += [f"| {goal} | {reached} |" for goal, reached in report["goals"].items()]
    out += ["", "## Steps", ""]
    out += [
        f"A half-round of {MICROBATCHES} microbatches. Ratios are acco's time to that "
        "of the loop written by hand; intervals are plan's, in ms.",
        "",
        "| model | attention | remat | rows | layers | ms | tokens/s | MFU | GiB | "
        "compile, s | ratio | by hand: MFU | GiB | compile, s | predicted | "
        "calibrated |",
        "|" + "---|" * 16,
    ]
    for row in parts.get("steps", []):
        out.append(f"| {' | '.join(cells(row))} |")
    found = parts.get("calibration", {"error": "not run"})
    out += ["", "## Calibration", ""]
    if "error" in found:
        out += [found["error"]]
    else:
        out += ["| kernel | size | rate |", "|---|---|---|"]
        for k in found["kernels"]:
            out.append(f"| {k['name']} | {k['size']:,} | {k['rate']:.4g} {k['unit']} |")
        out += ["", "| figure | value |", "|---|---|"]
        for name, x in found["figures"].items():
            ends = x if isinstance(x, (list, tuple)) else [x]
            out.append(f"| {name} | {' - '.join(f'{e:.4g}' for e in ends)} |")
    out += [
        "",
        "## Correctness",
        "",
        "| what | dtype | largest error |",
        "|---|---|---|",
    ]
    found = parts.get("correctness", {"error": "not run"})
    if "error" in found:
        out.append(f"| all | | {found['error']} |")
    for row in found.get("rows", []):
        out.append(f"| {row['what']} | {row['dtype']} | {error_text(row)} |")
    out += ["", "## Schedule", ""]
    found = parts.get("schedule", {"error": "not run"})
    if "error" in found:
        out.append(f"- {found['error']}")
    for name in ("one", "several"):
        if name in found:
            of = found[name]
            out.append(f"- {of['topology']}: {schedule_text(of)}")
    found = parts.get("end_to_end", {"error": "not run"})
    out += ["", "## End to end", "", end_text(found), ""]
    return "\n".join(out)


def cells(row: Report) -> list[str]:
    loops = row.get("loops", {})
    acco, hand = loops.get("acco", {}), loops.get("hand", {})
    taken = acco.get("seconds")
    ratio = row.get("ratio")
    why = row.get("error") or acco.get("error") or ""
    seconds = lambda x: f"{x['compile_seconds']:.1f}" if "compile_seconds" in x else "-"  # noqa: E731
    return [
        *(str(row[k]) for k in ("model", "attention", "remat", "rows", "layers")),
        f"{1e3 * statistics.median(taken):.1f}" if taken else why or "-",
        f"{acco['tokens_per_second']:,.0f}" if taken else "-",
        share(acco.get("utilization")),
        gib(acco),
        seconds(acco),
        f"{ratio['median']:.3f} ({ratio['low']:.3f}-{ratio['high']:.3f})" if ratio
        else hand.get("error", "-"),
        share(hand.get("utilization")),
        gib(hand),
        seconds(hand),
        interval_text(row.get("predicted")),
        interval_text(row.get("calibrated")),
    ]  # fmt: skip


def goals(parts: Report) -> dict[str, str]:
    """Return each goal and what was reached."""
    rows = parts.get("steps", [])
    used = [
        loop["utilization"]
        for row in rows
        if row["model"] == "gpt2-124m"
        for loop in [row.get("loops", {}).get("acco", {})]
        if "utilization" in loop
    ]
    kinds = ("predicted", "calibrated")
    inside = [
        row[kind]["inside"]
        for row in rows
        for kind in kinds
        if "inside" in row.get(kind, {})
    ]
    errors = [
        row["within"]
        for row in parts.get("correctness", {}).get("rows", [])
        if "within" in row
    ]
    most = (
        f"{max(used):.1%}: {'yes' if max(used) >= UTILIZATION else 'NO'}"
        if used
        else "n/a"
    )
    count = lambda found: f"{sum(found)} of {len(found)}" if found else "n/a"  # noqa: E731
    return {
        f"at least {UTILIZATION:.0%} model FLOPs utilization with 124M": most,
        "half-rounds inside their intervals": count(inside),
        "errors within their tolerances": count(errors),
    }


# ---- processes


def child(args: argparse.Namespace) -> None:
    """Run one job; its result goes to a file."""
    import jax

    result: Report = {}

    def keep(found: Report) -> None:
        result["found"] = found
        write(args.result, result)

    try:
        if args.fail == args.job:
            raise RuntimeError("forced to fail")
        device = jax.devices()[0]
        kind, stats = device.device_kind, device.memory_stats() or {}
        result["device"] = {"kind": kind, "jax": jax.__version__}
        result["device"]["bytes_limit"] = stats.get("bytes_limit")
        options: Report = {}
        if args.job == "steps":
            options = {"combination": args.combination, "figures": figures(args.out)}
        run = {
            f.__name__: f
            for f in (calibration, steps, correctness, schedule, end_to_end)
        }
        keep(run[args.job](args.quick, keep, **options))
    except Exception as error:
        result["error"] = line(error)
        write(args.result, result)


def figures(out: Path) -> Report:
    """Return the calibrated figures that are measured already; ranges are pairs."""
    try:
        report = json.loads(out.with_suffix(".json").read_text())
        found = report["parts"]["calibration"]["figures"]
    except (OSError, KeyError):
        return {}
    return {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}


def write(file: Path, report: Report) -> None:
    """Write JSON to a file, whole or not at all."""
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(report, indent=1, default=str) + "\n")
    part.replace(file)


def run_job(job: Job, args: argparse.Namespace, folder: Path, seconds: float) -> Report:
    """Run a job in a process of its own; return what it found, and why no more."""
    result, log = folder / "result.json", folder / "stderr"
    result.unlink(missing_ok=True)
    command = [sys.executable, __file__, f"--job={job.part}", f"--result={result}"]
    command += [f"--out={args.out}", f"--fail={args.fail}"]
    command += ["--quick"] if args.quick else []
    if job.combination is not None:
        command.append(f"--combination={job.combination}")
    environment = {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    } | os.environ
    if job.part == "end_to_end":  # atomics would add in any order
        flags = environment.get("XLA_FLAGS", "")
        environment["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true".strip()
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    why = None
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, env=environment, stderr=errors, start_new_session=True
        )
        try:
            if code := process.wait(seconds):
                said = log.read_text().strip().splitlines() or [""]
                why = f"ended with {code}: {said[-1][:200]}"
        except subprocess.TimeoutExpired:
            why = f"stopped after {seconds:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found = json.loads(result.read_text()) if result.exists() else {}
    return found | ({"error": why} if why else {})


def measured(args: argparse.Namespace) -> Iterator[Report]:
    """Yield the report after each job."""
    start = time.monotonic()
    report: Report = {
        "command": f"python benchmarks/one_gpu.py{' --quick' if args.quick else ''}",
        "python": platform.python_version(),
        "device": {},
        "quick": args.quick,
        "seconds": 0.0,
        "goals": {},
        "parts": {},
        "jobs": [],
    }
    parts = report["parts"]
    with tempfile.TemporaryDirectory() as folder:
        for job in jobs(args.quick):
            if job.part not in args.parts.split(","):
                continue
            began = time.monotonic()
            left = args.seconds - (began - start)
            if left < 10:
                found: Report = {"error": "not run: no time was left"}
            else:
                limit = left if args.quick else min(left, job.limit)
                found = run_job(job, args, Path(folder), limit)
            result = found.get("found", {})
            if "error" in found:
                result = result | {"error": found["error"]}
                name = (
                    job.part if job.combination is None else f"steps {job.combination}"
                )
                print(f"{name}: {found['error']}", flush=True)
            if job.combination is None:
                parts[job.part] = result
            else:
                chosen = (QUICK if args.quick else COMBINATIONS)[job.combination]
                parts.setdefault("steps", []).append(
                    dataclasses.asdict(chosen) | result
                )
            report["device"] = found.get("device") or report["device"]
            now = time.monotonic()
            taken = {"part": job.part, "combination": job.combination}
            report["jobs"].append(taken | {"seconds": now - began})
            report["seconds"], report["goals"] = now - start, goals(parts)
            yield report


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flag = parser.add_argument
    out = ROOT / "experiments" / "results" / "one_gpu"
    flag("--out", type=Path, default=out, help="of .json and .md")
    flag("--seconds", type=float, default=450.0, help="for all of it; default 450")
    flag("--quick", action="store_true", help="a tiny model, a rehearsal")
    flag("--parts", default=",".join(PARTS), help="to run, and no others")
    flag("--fail", choices=("", *PARTS), default="", help="a part that is to fail")
    flag("--job", choices=PARTS, help=argparse.SUPPRESS)
    flag("--combination", type=int, help=argparse.SUPPRESS)
    flag("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.job:
        child(args)
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the job, too
    for report in measured(args):
        write(args.out.with_suffix(".json"), report)
        args.out.with_suffix(".md").write_text(table(report))
    for goal, reached in report["goals"].items():
        print(f"{goal}: {reached}")
    print(f"{args.out.with_suffix('.json')}, {report['seconds']:.0f} s")


if __name__ == "__main__":
    main()
