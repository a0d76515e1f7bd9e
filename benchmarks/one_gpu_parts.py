"""What one_gpu.py measures: a function for each part."""

import dataclasses
import functools
import importlib.util
import math
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.one_gpu_table import (
    MICROBATCHES,
    Report,
    end_text,
    error_text,
    schedule_text,
    step_text,
)

ROOT = Path(__file__).resolve().parents[1]

CALLS = 2  # half-rounds of a repetition
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
    data = jax.sharding.NamedSharding(tx.mesh, jax.P("data"))
    shape = (tx.mesh.size * MICROBATCHES * rows, config.max_length + 1)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=data)
    return *acco_jax.abstract_start(tx, shapes), {"tokens": tokens}


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
