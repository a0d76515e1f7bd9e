"""How much of the communication acco hides: real processes, a link of chosen speed.

    python benchmarks/overlap_cpu.py [--quick] [--json=FILE] [--processes=2]

Needs Linux, root, and iproute2's `ip` and `tc`. Each process is one worker with one
CPU device, pinned to a core, in a network namespace of its own; the namespaces meet at
a bridge, and each sends at no more than a set rate (`tc tbf`; the latency is the
machine's own). Workers run `make_train_step(form="split")` on a GPT-Neo in float32,
over jax.distributed and gloo. The modes, in turn within every repetition:

    compute        the gradients of N microbatches: acco_jax.local_gradients
    communication  a half-round without microbatches: reduce-scatter, optimizer on the
                   shard, all-gather
    zero1, fused_zero1, acco
                   a half-round of N microbatches with the method of that name
    zero1 2N       a step with twice the microbatches: the tokens of two half-rounds
    adaptive       acco with Adaptive microbatches, from N/4 up; the time is that of
                   N/4 microbatches, as it is of "compute N/4" and "zero1 N/4"
    acco 8 bits    acco with gather_bits=8 and reduce_bits=8

The rate is set until communication takes as long as computation, then half of it, then
7 times that of N/4 microbatches, where acco must go on computing, then twice, where
fewer bytes count. A sample is two half-rounds, timed by the slower worker; all times
are per half-round. A ratio is the median over repetitions of the ratio within a
repetition; its spread is the middle half. The last line of a table says how busy other
programs kept the machine: where that is not about 0, measure again. What a mode takes
of its core is less disturbed; nothing can make acco / compute smaller than the ratio of
these.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import pathlib
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from acco_jax.run.compare import network  # noqa: E402
from benchmarks import common  # noqa: E402

SYNCHRONOUS = ("zero1", "ddp", "fused_zero1")
HALF_ROUNDS = 2  # of a sample: an estimate and a commit
# communication / computation -> ratio -> at most
TARGETS = {
    1.0: {"acco / max(compute, communication)": 1.10, "acco / zero1": 0.58},
    0.5: {"acco / compute": 1.06},
    7.0: {"adaptive / zero1 N/4": 1 / 6},
    2.0: {"acco 8 bits / acco": 1 / 1.5},
}
# mode that is measured beside few others -> what it is compared with
ALONE = {
    "adaptive": ("compute N/4", "zero1 N/4"),
    "acco 8 bits": ("acco", "compute"),
}
SLOW, FEW_BITS = 7.0, 2.0  # where counts adapt, and where bytes are saved
FEW_MODES = {
    SLOW: ["compute N/4", "communication", "zero1 N/4", "adaptive"],
    FEW_BITS: ["compute", "communication", "acco", "acco 8 bits"],
}


def modes_at(share: float, methods: list[str]) -> list[str]:
    """What is measured where communication takes `share` of computation."""
    twice = [f"{m} 2N" for m in methods if m in SYNCHRONOUS]
    return FEW_MODES.get(share, ["compute", "communication", *methods, *twice])


# --------------------------------------------------------------------- the workers


def work(spec: dict[str, Any]) -> None:
    """Runs the modes that the parent names on stdin; answers with seconds each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # gloo prints
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        spec["coordinator"], spec["processes"], spec["index"], initialization_timeout=60
    )
    modes = make_modes(spec)
    for line in sys.stdin:
        start = time.perf_counter()
        calls = modes[line.strip()]()
        seconds = (time.perf_counter() - start) / calls
        print(json.dumps(seconds), file=answers, flush=True)


def make_modes(spec: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Mode -> what runs it, waits, and returns the number of half-rounds.

    Of an adaptive one, as many as would have computed its microbatches by N/4 each.
    """
    import jax
    import numpy as np
    import optax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P
    from orbax.checkpoint import multihost

    import acco_jax
    from acco_jax.methods import METHODS
    from acco_jax.models import transformer

    model = transformer.Config(**spec["model"], dtype="float32")
    loss = transformer.loss_fn(model)
    n, N, most = spec["processes"], spec["microbatches"], spec["most"]
    few = max(N // 4, 1)
    mesh = jax.make_mesh((n,), ("data",), (jax.sharding.AxisType.Auto,))
    rows = NamedSharding(mesh, P("data"))
    shape = (most * n * spec["rows"], model.max_length + 1)
    tokens = np.random.default_rng(0).integers(model.vocab_size, size=shape)
    tokens = tokens.astype(np.int32)

    def split(x: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(x.shape, rows, lambda index: x[index])

    def batch(microbatches: int) -> dict[str, jax.Array]:
        return {"tokens": split(tokens[: microbatches * n * spec["rows"]])}

    none = split(np.zeros(n, np.int32))

    def params() -> Any:
        init = functools.partial(transformer.init_params, model, jax.random.key(0))
        return jax.jit(init, out_shardings=NamedSharding(mesh, P()))()

    def stepper(
        method: str,
        microbatches: int | acco_jax.Adaptive,
        counts: Any = None,
        times: int = 2,
        **options: Any,
    ) -> Callable[[], float]:
        tx = METHODS[method](optax.adamw(1e-4), mesh=mesh, **options)
        step = acco_jax.make_train_step(
            loss, tx, microbatches=microbatches, form="split"
        )
        now = params()
        held = [now, tx.init(now)]
        adaptive = isinstance(microbatches, acco_jax.Adaptive)
        data = batch(microbatches.most if adaptive else microbatches)
        if not adaptive:
            step.compile(*held, data, counts)

        def run() -> float:
            computed = 0
            for _ in range(times):
                *held[:], metrics = step(*held, data, counts)
                if adaptive:
                    computed += int(metrics["counts"].sum())
            jax.block_until_ready((held, metrics))
            return computed / (n * few) if adaptive else HALF_ROUNDS

        return run

    def compute(microbatches: int) -> Callable[[], float]:
        at, data = params(), batch(microbatches)
        gradients = acco_jax.local_gradients(loss, mesh=mesh, microbatches=microbatches)

        def run() -> float:
            for _ in range(HALF_ROUNDS):
                jax.block_until_ready(gradients(at, data)[:2])
            return HALF_ROUNDS

        return run

    make: dict[str, Callable[[], Callable[[], float]]] = {
        "compute": lambda: compute(N),
        "compute N/4": lambda: compute(few),
        "communication": lambda: stepper("acco", N, none),
        "zero1 N/4": lambda: stepper("zero1", few),
        "adaptive": lambda: stepper("acco", acco_jax.Adaptive(few, most)),
        "acco 8 bits": lambda: stepper("acco", N, gather_bits=8, reduce_bits=8),
    }
    for method in METHODS:
        make[method] = functools.partial(stepper, method, N)
        make[method + " 2N"] = functools.partial(stepper, method, 2 * N, times=1)
    modes = {name: make[name]() for name in spec["modes"]}
    # A collective over gloo waits 30 s for a process that still compiles.
    multihost.sync_global_processes("compiled", timeout=600, processes=set(range(n)))
    return modes


# ---------------------------------------------------------------------- the parent


class Workers(common.Workers):
    """The processes: `workers("acco")` runs a mode on all, returns the longest time."""

    def __call__(self, mode: str) -> float:
        try:
            return max(self.ask(mode))
        except common.WorkerEnded as error:
            raise SystemExit(str(error)) from error


@contextlib.contextmanager
def running(spec: dict[str, Any]) -> Iterator[Workers]:
    """Workers on their network; both are gone afterwards, however it ends."""
    common.end_on_signals()
    program = [sys.executable, __file__, "--worker"]
    joined = network.joined(spec["processes"], 1000.0)
    with (
        tempfile.TemporaryDirectory() as logs,
        joined as net,
        Workers(program, spec, net, pathlib.Path(logs)) as workers,
    ):
        yield workers


def calibrate(workers: Workers, share: float, mbit: float) -> float:
    """The rate at which communication takes `share` of the time of computation."""
    mode = "compute N/4" if share == SLOW else "compute"
    for _ in range(8):
        workers.set_rate(mbit)
        compute = statistics.median(workers(mode) for _ in range(5))
        took = statistics.median(workers("communication") for _ in range(3))
        if abs(took / (share * compute) - 1) < 0.02:
            break
        mbit *= took / (share * compute)
    else:
        print(f"no rate gave communication = {share:g} x computation within 2 %")
    workers.set_rate(mbit)
    return mbit


def measure(workers: Workers, modes: list[str], repetitions: int) -> dict[str, Any]:
    """Seconds of every mode in every repetition, and how busy the rest was."""
    seconds: dict[str, list[float]] = {mode: [] for mode in modes}
    cpu: dict[str, list[float]] = {mode: [] for mode in modes}
    count = HALF_ROUNDS * len(workers.processes)
    others, start = common.busy_seconds() - workers.cpu_seconds(), time.perf_counter()
    for i in range(repetitions):
        for mode in modes[i % len(modes) :] + modes[: i % len(modes)]:
            used = workers.cpu_seconds()
            seconds[mode].append(workers(mode))
            cpu[mode].append((workers.cpu_seconds() - used) / count)
    others = common.busy_seconds() - workers.cpu_seconds() - others
    return {
        "seconds": seconds,
        "cpu_seconds": cpu,  # of a worker
        "other_programs_cores": others / (time.perf_counter() - start),
        "load": os.getloadavg(),
    }


def ratios(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Ratio -> its median and quartiles over the repetitions."""
    pairs: dict[str, tuple[list[float], list[float]]] = {}
    for mode, others in ALONE.items():
        if mode in seconds:
            for other in others:
                pairs[f"{mode} / {other}"] = seconds[mode], seconds[other]
            return {title: common.quotients(*pair) for title, pair in pairs.items()}
    synchronous = [mode for mode in seconds if mode + " 2N" in seconds]
    plain = {"compute", "communication", *synchronous}
    plain |= {mode + " 2N" for mode in synchronous}
    parts = list(zip(seconds["compute"], seconds["communication"], strict=True))
    larger, both = list(map(max, parts)), list(map(sum, parts))
    for mode in synchronous:
        pairs[f"{mode} / (compute + communication)"] = seconds[mode], both
    for mode in seconds.keys() - plain:
        pairs[f"{mode} / max(compute, communication)"] = seconds[mode], larger
        for other in ("compute", *synchronous, *(m + " 2N" for m in synchronous)):
            pairs[f"{mode} / {other}"] = seconds[mode], seconds[other]
    return {title: common.quotients(*pair) for title, pair in pairs.items()}


def show(share: float, point: dict[str, Any]) -> None:
    print(f"\ncommunication = {share:g} x computation, {point['rate_mbit']:.0f} Mbit/s")
    for mode, values in point["seconds"].items():
        cpu = statistics.median(point["cpu_seconds"][mode])
        wall = statistics.median(values)
        print(f"  {mode:<36}{wall * 1000:7.0f} ms   {cpu * 1000:.0f} ms of the core")
    for title, found in point["ratios"].items():
        limit = TARGETS[share].get(title)
        print(
            f"  {title:<36}{found['median']:7.3f}   {found['low']:.3f}-"
            f"{found['high']:.3f}" + (f"   at most {limit:.3g}" if limit else "")
        )
    load = " ".join(f"{x:.1f}" for x in point["load"])
    print(
        f"  other programs kept {point['other_programs_cores']:.2f} cores busy", end=""
    )
    print(f" (load {load})")


def parse(args: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flag = parser.add_argument
    flag("--quick", action="store_true", help="small model, 3 repetitions: minutes")
    flag("--json", metavar="FILE", help="also write every sample there")
    flag("--processes", type=int, default=2, metavar="N")
    flag("--methods", default="zero1,fused_zero1,acco", help="names of METHODS")
    flag("--repetitions", type=int, metavar="R", help="default 10")
    flag("--microbatches", type=int, metavar="N", help="default 16, quick 8")
    flag(
        "--shares", default="1,0.5,7,2", help="communication / computation; of TARGETS"
    )
    flag("--timeout", type=int, metavar="S", help="default 3600, quick 300")
    flag("--worker", type=json.loads, help=argparse.SUPPRESS)
    found = parser.parse_args(args)
    if found.repetitions is not None and found.repetitions < 2:
        parser.error("--repetitions: quartiles need at least 2")
    return found


def main() -> None:
    args = parse()
    if args.worker:
        return work(args.worker)
    shares = [float(share) for share in args.shares.split(",")]
    methods = args.methods.split(",")
    if unknown := [share for share in shares if share not in TARGETS]:
        raise SystemExit(f"--shares: {unknown[0]:g} is none of {list(TARGETS)}.")
    if reason := network.why_not():
        raise SystemExit(f"overlap_cpu.py cannot shape a link: {reason}")
    microbatches = args.microbatches or (8 if args.quick else 16)
    width, layers, vocabulary, length, rows = (
        (128, 4, 2048, 128, 1) if args.quick else (256, 4, 4096, 256, 2)
    )
    spec = {
        "model": {"width": width, "layers": layers, "vocab_size": vocabulary,
                  "max_length": length, "heads": width // 64, "window": length},
        "microbatches": microbatches,
        "most": 4 * microbatches,  # that a batch holds
        "rows": rows,  # sequences of a microbatch
        "processes": args.processes,
        "modes": list(dict.fromkeys(m for s in shares for m in modes_at(s, methods))),
    }  # fmt: skip
    report: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "machine": f"{os.cpu_count()} cores, {platform.platform()}",
        **spec,
        "points": {},
    }
    with running(spec) as workers:
        signal.alarm(args.timeout or (300 if args.quick else 3600))
        for mode in spec["modes"]:
            workers(mode)  # compiles
        mbit = 1000.0
        for share in shares:
            mbit = calibrate(workers, share, mbit)
            repetitions = args.repetitions or (3 if args.quick else 10)
            point = measure(workers, modes_at(share, methods), repetitions)
            point |= {"rate_mbit": mbit, "ratios": ratios(point["seconds"])}
            report["points"][str(share)] = point
            show(share, point)
        signal.alarm(0)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
