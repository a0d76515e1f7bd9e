"""Measures acco_jax's methods beside plain JAX and PyTorch, on one link, in one run.

    python benchmarks/peers.py --environment=DIR --check [--size=4M]
    python benchmarks/peers.py --environment=DIR [--size=25M] [--ratios=0.25,1,2]
    python benchmarks/peers.py --quick

Needs Linux, root, and iproute2's `ip` and `tc`. Each process is one worker with one
core, in a network namespace of its own, as in overlap_cpu.py. All methods train the
same GPT-2 in float32 with AdamW, from the same weights, on the same rows, with the same
tokens per optimizer step. DIR is a virtual environment with PyTorch; the script makes
it where it does not exist. Without --environment PyTorch's rows are left out, and the
table says so.

--check compares losses. The synchronous methods of both stacks compute what zero1
computes, and PyTorch's acco computes what acco computes. It exits with 1 if a loss
differs by more than TOLERANCE of it.

Without --check it measures time. It measures the computation and the bytes of a step of
zero1 once. For each ratio r it sets the link's rate so that zero1's bytes take r times
its computation. One launch of a method measures all ratios; methods take turns within a
repetition. --page writes the result's page and pictures.

Both append what they measure to the file --out. The same command measures only what
that file lacks, so repeat it after an interruption.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from acco_jax.command import palette  # noqa: E402
from acco_jax.run.compare import network  # noqa: E402
from benchmarks import common  # noqa: E402

TORCH = ("torch==2.13.0", "torchft==0.2.0")
OUT = ROOT / "experiments" / "results" / "peers.md"
TOLERANCE = 1e-5  # of a loss, relative
UNSHAPED = 10_000.0  # Mbit/s
HEADERS = 66  # bytes of a packet: Ethernet 14, IP 20, TCP with timestamps 32
ADAMW = {
    "learning_rate": 1e-3, "b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1
}  # fmt: skip
SIZES = {
    "tiny": {"vocab_size": 512, "max_length": 32, "width": 64, "layers": 2},
    "4M": {"vocab_size": 4096, "max_length": 128, "width": 256, "layers": 4},
    "25M": {"vocab_size": 4096, "max_length": 128, "width": 512, "layers": 7},
}
CHECKS = "{}-check.jsonl"  # the rows of --check, for each size
CHECKED = 20  # steps of a trajectory
WARM = 3  # steps that are not timed, at least


class Method(NamedTuple):
    """One row of the tables."""

    stack: str  # whose worker runs it
    # bytes that a process should send in a step: multiples of (n - 1) / n x 4 x P
    passes: float
    sharded: bool = True  # whether a process owns 1/n of the optimizer state
    acco: bool = False  # whether it overlaps; others are synchronous
    own: bool = True  # whether it is acco_jax's
    period: int = 1  # steps of which the last communicates

    @property
    def synchronous(self) -> bool:
        return not self.acco and self.period == 1

    @property
    def reference(self) -> str:
        """Returns which of REFERENCES it is compared with."""
        return "acco" if self.acco else "zero1"


METHODS = {
    "jax/jit": Method("jax", 2, sharded=False, own=False),
    "jax/shard_map": Method("jax", 2, sharded=False, own=False),
    "jax/fsdp": Method("jax", 2, own=False),
    "torch/ddp": Method("torch", 2, sharded=False, own=False),
    "torch/zero1": Method("torch", 3, own=False),
    "torch/fsdp2": Method("torch", 2, own=False),
    "torch/diloco": Method("torch", 1 / 2, sharded=False, own=False, period=4),
    "torch/acco": Method("torch", 4, acco=True, own=False),
    "ddp": Method("jax", 2, sharded=False),
    "zero1": Method("jax", 2),
    "fused_zero1": Method("jax", 2),
    "acco": Method("jax", 4, acco=True),
    "acco(recommended)": Method("jax", 4, acco=True),
    "acco(8 bits)": Method("jax", 1, acco=True),
}
REFERENCES = ("zero1", "acco")  # whose losses the others must have
# These have other trajectories by design.
UNCHECKED = ("torch/diloco", "acco(recommended)", "acco(8 bits)")
EXPLAINED = """\
- `jax/jit`: one jitted step, parameters replicated and rows split by shardings. By its
  bytes, the compiler reduces the tied embedding's two gradients separately.
- `jax/shard_map`: gradients of the microbatches summed in a scan, then one `psum`.
- `jax/fsdp`: parameters, gradients and optimizer split by shardings. The parameters are
  gathered once per step. By its bytes, XLA on CPU reduces gradients by all-reduce.
- `torch/ddp`: DistributedDataParallel, `no_sync` for all microbatches except the last.
- `torch/zero1`: the same with ZeroRedundancyOptimizer.
- `torch/fsdp2`: `fully_shard` that gathers and reduces once per step. PyTorch's
  reduce-scatter over gloo sends as many bytes as an all-reduce.
- `torch/diloco`: torchft's DiLoCo. It communicates in each fourth step and does not
  compute a synchronous step, so it is no best peer.
- `torch/acco`: ACCO rewritten from the paper in `benchmarks/peers_torch.py`.
- `acco`: the paper's equal halves.
- `acco(recommended)`: a first half of a quarter of the step where a step takes no
  longer with it, else equal halves; extrapolation 1.15.
- `acco(8 bits)`: equal halves, both collectives in 8 bits."""

Row = dict[str, Any]
Samples = dict[tuple[float, str], list[Row]]


def first_half(microbatches: int, ratio: float) -> int:
    """Returns the recommended first half: a quarter, if a step takes no longer.

    A half-round of acco takes the longer of its computation and of its communication,
    which is `ratio` times the computation of a step.
    """

    def step(first: int) -> float:
        halves = first / microbatches, 1 - first / microbatches
        return sum(max(half, ratio) for half in halves)

    quarter, half = -(-microbatches // 4), microbatches // 2
    return quarter if step(quarter) <= 1.03 * step(half) else half


# ---- processes


class Bench:
    """Launches methods on one network."""

    def __init__(self, args: argparse.Namespace, net: network.Network, place: Path):
        self.args, self.net, self.place = args, net, place
        self.model = {**SIZES[args.size], "heads": SIZES[args.size]["width"] // 64}
        self.ports = itertools.count(9911)
        self.file = place / "arrays.npz"
        self.parameters = self._write_arrays()

    def _write_arrays(self) -> int:
        """Writes initial weights and token rows; returns the number of parameters."""
        import numpy as np

        from benchmarks import peers_jax

        model, draw = self.model, np.random.default_rng(1)
        weights = peers_jax.initial(model)
        shape = (
            CHECKED, self.args.processes, self.args.microbatches, self.args.rows,
            model["max_length"] + 1,
        )  # fmt: skip
        # Zipf's law: there is something to learn.
        ranks = 1 / np.arange(1, model["vocab_size"] + 1)
        tokens = draw.choice(model["vocab_size"], shape, p=ranks / ranks.sum())
        np.savez(self.file, tokens=tokens.astype(np.int32), **weights)
        return sum(x.size for x in weights.values())

    @contextmanager
    def launched(self, name: str) -> Iterator[common.Workers]:
        """Yields a method's processes, ready to run, on an unshaped network."""
        method, args = METHODS[name], self.args
        spec = {
            "stack": method.stack, "method": name, "processes": args.processes,
            "model": self.model, "microbatches": args.microbatches,
            "file": str(self.file), "cache": str(self.place / "cache"),
            "adamw": ADAMW, "sharded": method.sharded,
            "updates": 2 if method.acco else 1, "period": method.period,
        }  # fmt: skip
        python = sys.executable if method.stack == "jax" else _python(args.environment)
        program = [python, "-m", "benchmarks.peers_worker"]
        self.net.set_rate(UNSHAPED)
        port = next(self.ports)
        with common.Workers(program, spec, self.net, self.place, port) as workers:
            workers.answers(f"the start of {name}")
            yield workers


def ask(workers: common.Workers, **command: Any) -> list[Any]:
    return workers.ask(json.dumps(command))


def slowest(answers: Sequence[Row]) -> float:
    """Returns the seconds of the slowest process."""
    return max(x["seconds"] for x in answers)


def payload(answers: Sequence[Row]) -> float:
    """Returns the bytes that a process has sent, without headers, at most."""
    return max(x["bytes"] - HEADERS * x["packets"] for x in answers)


def _python(environment: Path) -> str:
    return str(environment / "bin" / "python")


def make_environment(folder: Path) -> None:
    """Makes a virtual environment with PyTorch, unless it is there."""
    found = [_python(folder), "-c", "import torch, torchft, numpy"]
    if Path(found[0]).exists() and not subprocess.run(found).returncode:
        return
    import numpy as np

    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [_python(folder), "-m", "pip", "install", "-q"]
    subprocess.run([*pip, *TORCH, f"numpy=={np.__version__}"], check=True)


# ---- rows


class Log:
    """The rows that are measured, in a file of JSON lines."""

    def __init__(self, path: Path, settings: Row) -> None:
        """Reads the file.

        Raises:
          SystemExit: it has rows of other settings.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.rows = path, read(path)
        if not self.rows:
            self.add({"kind": "settings", **settings})
        known = {**self.rows[0], "command": "", "machine": ""}
        if known != {"kind": "settings", **settings, "command": "", "machine": ""}:
            raise SystemExit(f"{path} has rows of other settings: give another --out.")

    def add(self, row: Row) -> None:
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def of(self, kind: str) -> list[Row]:
        return [row for row in self.rows if row["kind"] == kind]


def failure(log: Log, name: str, error: Exception) -> None:
    """Notes and prints why a method did not run."""
    reason = str(error).strip().splitlines()[-1]
    log.add({"kind": "failure", "method": name, "reason": reason})
    print(f"{name}: {error}", file=sys.stderr, flush=True)


def read(path: Path) -> list[Row]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


# ---- trajectories


def check(bench: Bench, log: Log, names: Sequence[str]) -> bool:
    """Computes the losses that the log lacks; returns whether all are equal enough."""
    first = first_half(bench.args.microbatches, 1.0)
    for name in sorted({*names, *REFERENCES}, key=[*REFERENCES, *METHODS].index):
        if any(row["method"] == name for row in log.of("losses")):
            continue
        try:
            with bench.launched(name) as workers:
                answers = ask(workers, steps=CHECKED, first=first)
        except common.WorkerEnded as error:
            failure(log, name, error)
            continue
        of_processes = zip(*(answer["losses"] for answer in answers), strict=True)
        log.add({
            "kind": "losses", "method": name, "parameters": bench.parameters,
            "losses": list(map(statistics.fmean, of_processes)),
        })  # fmt: skip
        print(f"{name}: {log.rows[-1]['losses'][-1]:.5f}", flush=True)
    if {*names, *REFERENCES} - {row["method"] for row in log.of("losses")}:
        return False
    print(losses_table(log.rows))
    return all(x <= TOLERANCE for x in differences(log.rows).values())


def difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Returns the largest relative difference of two trajectories."""
    return max(abs(a / b - 1) for a, b in zip(losses, reference, strict=True))


def differences(rows: Sequence[Row]) -> dict[str, float]:
    """Returns each method's largest difference from its reference."""
    losses = {row["method"]: row["losses"] for row in rows if row["kind"] == "losses"}
    return {
        name: difference(losses[name], losses[METHODS[name].reference])
        for name in METHODS
        if name in losses and name not in (*UNCHECKED, *REFERENCES)
    }


def losses_table(rows: Sequence[Row]) -> str:
    """Returns the trajectories' differences in Markdown."""
    of = {row["method"]: row for row in rows if row["kind"] == "losses"}
    found = differences(rows)
    parameters = next(iter(of.values()))["parameters"]
    lines = [
        f"{CHECKED} steps of a model of {parameters:,} parameters, learning rate "
        f"{ADAMW['learning_rate']:g}. The difference is",
        "the largest relative difference of a loss from the reference's. The tolerance "
        f"is {TOLERANCE:g}.",
        "",
        "| method | reference | difference | first loss | last loss |",
        "|---|---|---|---|---|",
    ]
    for name in (name for name in METHODS if name in of):
        reference = METHODS[name].reference if name in found else ""
        shown = f"{found[name]:.1e}" if name in found else ""
        first, *_, last = of[name]["losses"]
        lines.append(f"| {name} | {reference} | {shown} | {first:.5f} | {last:.5f} |")
    return "\n".join(lines)


# ---- time


def calibrate(bench: Bench, log: Log) -> Row:
    """Returns zero1's computation and bytes of a step, measured once."""
    if not log.of("calibration"):
        half, repetitions = bench.args.microbatches // 2, 3
        with bench.launched("zero1") as workers:
            ask(workers, steps=1, first=half)
            ask(workers, compute=1)
            found = [ask(workers, steps=1, first=half) for _ in range(repetitions)]
            compute = [ask(workers, compute=1) for _ in range(repetitions)]
        log.add({
            "kind": "calibration",
            "compute": statistics.median(map(slowest, compute)),
            "step": statistics.median(map(slowest, found)),
            "bytes": statistics.median(map(payload, found)),
            "parameters": bench.parameters,
        })  # fmt: skip
    return log.of("calibration")[0]


def rate(calibration: Row, ratio: float) -> float:
    """Returns the Mbit/s at which zero1's bytes take `ratio` times its computation."""
    return calibration["bytes"] * 8 / (ratio * calibration["compute"]) / 1e6


def measure(
    bench: Bench, log: Log, name: str, repetition: int, ratios: Sequence[float]
) -> None:
    """Launches a method, and adds a row for each ratio."""
    args, calibration = bench.args, log.of("calibration")[0]
    rows = args.processes * args.microbatches * args.rows
    tokens = rows * bench.model["max_length"]
    period = METHODS[name].period
    steps = -(-args.steps // period) * period
    found: list[Row] = []
    with bench.launched(name) as workers:
        # the first steps ask for memory, acco's for the most
        ask(workers, steps=-(-WARM // period) * period, first=args.microbatches // 2)
        for ratio in ratios:
            mbit = rate(calibration, ratio)
            workers.set_rate(mbit)
            first = first_half(args.microbatches, ratio)
            others = common.busy_seconds() - workers.cpu_seconds()
            begin = time.perf_counter()
            answers = ask(workers, steps=steps, first=first)
            others = common.busy_seconds() - workers.cpu_seconds() - others
            found.append({
                "kind": "sample", "ratio": ratio, "method": name,
                "repetition": repetition, "rate_mbit": mbit, "tokens": tokens,
                "seconds": slowest(answers) / steps,
                "bytes": payload(answers) / steps,
                "cpu": sum(x["cpu"] for x in answers) / steps, "first": first,
                "others": others / (time.perf_counter() - begin),
                "load": os.getloadavg()[0],
            })  # fmt: skip
        peak = max(ask(workers, peak=True))
        ask(workers, compute=1)  # asks for memory, too
        compute = statistics.fmean(slowest(ask(workers, compute=1)) for _ in range(2))
    for row in found:
        log.add(row | {"compute": compute, "peak": peak})


def run(bench: Bench, log: Log, names: Sequence[str]) -> bool:
    """Measures what the log lacks; returns whether all methods ran."""
    calibrate(bench, log)
    done = {(x["ratio"], x["method"], x["repetition"]) for x in log.of("sample")}
    launches = []
    for repetition in range(bench.args.repetitions):
        turn = repetition % len(names)
        for name in (*names[turn:], *names[:turn]):
            ratios = bench.args.ratios
            left = [r for r in ratios if (r, name, repetition) not in done]
            launches += [(name, repetition, left)] * bool(left)
    failed, start = set[str](), time.perf_counter()
    for i, (name, repetition, ratios) in enumerate(launches, 1):
        if name in failed:
            continue
        try:
            measure(bench, log, name, repetition, ratios)
        except common.WorkerEnded as error:
            failed.add(name)
            failure(log, name, error)
        minutes = (time.perf_counter() - start) / 60
        print(f"repetition {repetition + 1}, {name}: {i} of {len(launches)} launches, "
              f"{minutes:.1f} min; {minutes / i * (len(launches) - i):.1f} min left",
              flush=True)  # fmt: skip
    return not failed


# ---- the page


def samples(rows: Sequence[Row]) -> Samples:
    """Returns the samples by ratio and method, one for each repetition, in order."""
    found: Samples = {}
    for row in rows:
        if row["kind"] == "sample":
            found.setdefault((row["ratio"], row["method"]), []).append(row)
    for each in found.values():
        each.sort(key=lambda row: row["repetition"])
    return found


def communication(row: Row) -> float:
    """Returns the seconds that a step's bytes take at the link's rate."""
    return row["bytes"] * 8 / (row["rate_mbit"] * 1e6)


def multiples(rows: Sequence[Row]) -> dict[int, float]:
    """Returns a step's seconds by those of its own computation, by repetition."""
    return {row["repetition"]: row["seconds"] / row["compute"] for row in rows}


def best_peer(found: Samples, ratio: float) -> str | None:
    """Returns the synchronous peer whose step is the least multiple of its compute.

    None: no peer was measured.
    """
    peers = [
        name
        for name, method in METHODS.items()
        if method.synchronous and not method.own and (ratio, name) in found
    ]
    return min(
        peers,
        key=lambda name: statistics.median(multiples(found[ratio, name]).values()),
        default=None,
    )


def summary(found: Samples, processes: int, parameters: int) -> list[Row]:
    """Returns the figures of each ratio and method: medians and quartiles."""
    result = []
    for ratio in sorted({ratio for ratio, _ in found}):
        peer = best_peer(found, ratio)
        for name in (name for name in METHODS if (ratio, name) in found):
            rows, method = found[ratio, name], METHODS[name]
            seconds = [row["seconds"] for row in rows]
            compute = [row["compute"] for row in rows]
            link = [communication(row) for row in rows]
            own = multiples(rows)
            other = multiples(found[ratio, peer]) if peer else {}
            shared = [i for i in own if i in other]
            both = [a + b for a, b in zip(compute, link, strict=True)]
            tokens = rows[0]["tokens"]
            unit = (processes - 1) / processes * 4 * parameters  # bytes of one pass
            result.append({
                "ratio": ratio, "method": name, "best_peer": peer,
                "repetitions": len(rows),
                "tokens_per_second": quartiles([tokens / x for x in seconds]),
                "step": quartiles(seconds), "compute": quartiles(compute),
                "communication": quartiles(link),
                "of_compute": quartiles(list(own.values())),
                "of_limit": common.quotients(seconds, list(map(max, compute, link))),
                "of_sum": None if method.acco else common.quotients(seconds, both),
                "of_best_peer": common.quotients(
                    [own[i] for i in shared], [other[i] for i in shared]
                ) if shared else None,
                "bytes": statistics.median(row["bytes"] for row in rows),
                "should_send": method.passes * unit,
                "cpu_per_token": statistics.median(row["cpu"] / tokens for row in rows),
                "peak": max(row["peak"] for row in rows),
                "others": quartiles([row["others"] for row in rows]),
                "load": quartiles([row["load"] for row in rows]),
            })  # fmt: skip
    return result


def quartiles(values: Sequence[float]) -> dict[str, float]:
    return common.quotients(values, [1.0] * len(values))


def _spread(x: dict[str, float] | None) -> str:
    return f"{x['median']:.2f} ({x['low']:.2f}-{x['high']:.2f})" if x else ""


PAGE = """# acco beside plain JAX and PyTorch

    {command}

{short}

A GPT-2 of {parameters:,} parameters in float32, AdamW, {processes} CPU processes on
{machine}. Each process has one core and a network namespace of its own. A link of a set
rate joins them. A step of every method has {tokens:,} tokens, in {microbatches}
microbatches per process.

The ratio r is zero1's communication by its computation: {bytes:.1f} MB at the link's
rate, and {compute:.2f} s. Its step takes {step:.2f} s on the unshaped link. The slowest
process times a sample of at least {steps} step(s). Ratios are medians of ratios within
a repetition, with quartiles, of {repetitions} repetitions.

- **own compute**: the same gradients and AdamW steps in each process, without
  communication, in the same launch. Kernels differ between the stacks, so times are
  compared as multiples of it.
- **own limit**: the longer of own compute and of the bytes sent at the link's rate. For
  synchronous methods also the sum of both. A process's one core also copies what is
  sent, which the limit does not count.
- **best peer**: the synchronous method of others whose step is the shortest multiple of
  its own compute.
- **sent**: bytes of a process per step at the interface, without headers, beside what
  the method should send.

{explained}

{pictures}

{tables}

## Losses

    {command_of_check}

{losses}
"""
SHORT = """Steps by their own computation, and acco's by the best peer's:

| r | best peer | its step | acco(recommended) | by the peer's | acco(8 bits) by it |
|---|---|---|---|---|---|
"""
HEAD = """## r = {ratio:g}: {rate:.0f} Mbit/s

Best peer: {peer}. Other programs kept {others:.2f} cores busy. The load was
{load:.1f}.

| method | tokens/s | step, s | own compute, s | step / compute | step / limit | \
step / sum | against best peer | sent, MB | should send | CPU ms/token | peak, MB |
|---|---|---|---|---|---|---|---|---|---|---|---|
"""


def table(rows: Sequence[Row], calibration: Row) -> str:
    """Returns a ratio's heading and its table."""
    ratio = rows[0]["ratio"]
    lines = [
        HEAD.format(
            ratio=ratio, rate=rate(calibration, ratio),
            peer=f"`{peer}`" if (peer := rows[0]["best_peer"]) else "none",
            others=statistics.median(x["others"]["median"] for x in rows),
            load=statistics.median(x["load"]["median"] for x in rows),
        ).rstrip("\n")
    ]  # fmt: skip
    for x in rows:
        cells = (
            x["method"],
            f"{x['tokens_per_second']['median']:,.0f}",
            f"{x['step']['median']:.2f}",
            f"{x['compute']['median']:.2f}",
            *(_spread(x[key]) for key in ("of_compute", "of_limit", "of_sum")),
            _spread(x["of_best_peer"]),
            f"{x['bytes'] / 1e6:.1f}",
            f"{x['should_send'] / 1e6:.1f}",
            f"{x['cpu_per_token'] * 1e3:.2f}",
            f"{x['peak'] / 1e6:,.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def short(figures: Sequence[Row]) -> str:
    """Returns acco's steps beside the best peer's, a line for each ratio."""
    of = {(x["ratio"], x["method"]): x for x in figures}

    def cell(ratio: float, method: str | None, key: str) -> str:
        return _spread(of[ratio, method][key]) if (ratio, method) in of else ""

    lines = []
    for ratio in sorted({ratio for ratio, _ in of}):
        peer = next(x["best_peer"] for x in figures if x["ratio"] == ratio)
        cells = (
            f"{ratio:g}",
            f"`{peer}`" if peer else "none",
            cell(ratio, peer, "of_compute"),
            cell(ratio, "acco(recommended)", "of_compute"),
            cell(ratio, "acco(recommended)", "of_best_peer"),
            cell(ratio, "acco(8 bits)", "of_best_peer"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return SHORT + "\n".join(lines)


def page(rows: Sequence[Row], checks: Sequence[Sequence[Row]], pictures: str) -> str:
    """Returns the result's page, with the losses of `checks`."""
    settings = rows[0]
    (calibration,) = (row for row in rows if row["kind"] == "calibration")
    figures = figures_of(rows)
    tables = [
        table(list(group), calibration)
        for _, group in itertools.groupby(figures, key=lambda x: x["ratio"])
    ]
    failures = {x["method"]: x["reason"] for x in rows if x["kind"] == "failure"}
    measured = {x["method"] for x in figures}
    missing = [
        f"- `{name}` is not measured: {failures.get(name, settings['left_out'])}."
        for name in METHODS
        if name not in measured
    ]
    return PAGE.format(
        **{key: settings[key] for key in (
            "command", "machine", "processes", "microbatches", "steps", "repetitions",
        )},
        command_of_check="python benchmarks/peers.py --check --environment=DIR",
        parameters=calibration["parameters"], bytes=calibration["bytes"] / 1e6,
        compute=calibration["compute"], step=calibration["step"],
        tokens=next(row["tokens"] for row in rows if row["kind"] == "sample"),
        short=short(figures), explained="\n".join((EXPLAINED, *missing)),
        losses="\n\n".join(map(losses_table, checks)) or "Not computed.",
        tables="\n\n".join(tables), pictures=pictures,
    )  # fmt: skip


def figures_of(rows: Sequence[Row]) -> list[Row]:
    """Returns `summary` of the rows of a log."""
    (calibration,) = (row for row in rows if row["kind"] == "calibration")
    return summary(samples(rows), rows[0]["processes"], calibration["parameters"])


def draw(figures: Sequence[Row], picture: str, ending: str) -> None:
    """Draws each method's step, as a multiple of its own computation, against r."""
    from acco_jax.command.charts import legend_below, subplots
    from benchmarks import pictures

    figure, (ax,) = subplots(7.2, 4.4, 1)
    names = [name for name in METHODS if any(x["method"] == name for x in figures)]
    colors, ink = palette.of_methods(names), pictures.STYLES[ending].ink
    for name in names:
        points = [x for x in figures if x["method"] == name]
        style = "-" if METHODS[name].own else ":" if "torch" in name else "--"
        ax.plot([x["ratio"] for x in points],
                [x["of_compute"]["median"] for x in points],
                style, marker="o", ms=4, color=colors[name], label=name)  # fmt: skip
    ratios = sorted({x["ratio"] for x in figures})
    ax.axhline(1, color=ink, lw=0.8, ls=":")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xticks(ratios, [f"{x:g}" for x in ratios])
    ax.minorticks_off()
    ax.set_yticks(ticks := (1, 2, 4, 8), [f"{x:g}" for x in ticks])
    ax.set_xlabel("zero1's communication / computation")
    ax.set_ylabel("step / own compute")
    legend_below(figure, 5)
    pictures.save(figure, f"{picture}{ending}.svg")


def write_page(rows: Sequence[Row], out: Path, folder: Path) -> None:
    """Writes page, figures and pictures; the losses of all sizes are in a folder."""
    from benchmarks import pictures

    checks = [read(folder / CHECKS.format(size)) for size in ("4M", "25M")]
    figures = figures_of(rows)
    for ending in pictures.styled():
        draw(figures, out.stem, ending)
    shown = pictures.both(out.stem, "Each method's step by its own computation")
    out.write_text(page(rows, list(filter(None, checks)), shown))
    out.with_suffix(".json").write_text(json.dumps({
        "command": rows[0]["command"], "settings": rows[0], "figures": figures,
        "rows": rows[1:], "losses": [row for check in checks for row in check],
    }, indent=1) + "\n")  # fmt: skip


# ---- the command


def parse(args: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flag = parser.add_argument
    flag("--check", action="store_true", help="compare losses instead of times")
    flag("--quick", action="store_true", help="tiny model, one ratio, two repetitions")
    flag("--environment", type=Path, metavar="DIR", help="with PyTorch, made if absent")
    flag("--size", choices=SIZES, help="default 4M to check, 25M to measure")
    flag("--processes", type=int, default=2, metavar="N")
    flag("--ratios", default="0.1,0.25,0.5,1,2,7", help="communication / computation")
    flag("--methods", default=",".join(METHODS), help="default all")
    flag("--repetitions", type=int, default=3, metavar="R")
    flag("--steps", type=int, default=1, metavar="S", help="of a sample")
    flag(
        "--microbatches", type=int, default=4, metavar="M", help="per process and step"
    )
    flag("--rows", type=int, default=1, metavar="B", help="of a microbatch")
    flag(
        "--out", type=Path, metavar="FILE", help="rows; default build/peers/SIZE.jsonl"
    )
    flag("--page", type=Path, nargs="?", const=OUT, metavar="FILE",
         help="also write the page and pictures")  # fmt: skip
    flag("--timeout", type=int, default=3600, metavar="S")
    found = parser.parse_args(args)
    try:
        found.ratios = [float(x) for x in found.ratios.split(",")]
    except ValueError:
        parser.error(f"--ratios: {found.ratios!r} is not a list of numbers")
    if min(found.ratios) <= 0:
        parser.error(f"--ratios: {min(found.ratios):g} is not above 0")
    found.methods = found.methods.split(",")
    if unknown := [name for name in found.methods if name not in METHODS]:
        parser.error(f"--methods: {unknown[0]!r} is none of {', '.join(METHODS)}")
    if found.microbatches % 2:
        parser.error(f"--microbatches: {found.microbatches} has no equal halves")
    if found.repetitions < 2:
        parser.error("--repetitions: quartiles need at least 2")
    if found.quick:
        found.size, found.ratios, found.repetitions = "tiny", found.ratios[:1], 2
    found.size = found.size or ("4M" if found.check else "25M")
    name = CHECKS.format(found.size) if found.check else f"{found.size}.jsonl"
    found.out = found.out or ROOT / "build" / "peers" / name
    return found


def settings(args: argparse.Namespace) -> Row:
    """Returns what all rows of a log have in common."""
    keys = ("size", "processes", "steps", "microbatches", "rows", "repetitions")
    command = shlex.join(["python", "benchmarks/peers.py", *sys.argv[1:]])
    for path, name in ((args.environment, "DIR"), (args.out, "FILE")):
        command = command.replace(str(path), name)  # paths are this machine's
    return {
        "command": command,
        "machine": f"{os.cpu_count()} cores, {platform.platform()}",
        "left_out": "it was left out of --methods" if args.environment
        else "--environment was not given",
        **{key: getattr(args, key) for key in keys},
    }  # fmt: skip


def main() -> None:
    args = parse()
    if reason := network.why_not():
        raise SystemExit(f"peers.py cannot shape a link: {reason}")
    common.end_on_signals()
    signal.alarm(args.timeout)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before the parent imports JAX
    names = args.methods
    if args.environment:
        make_environment(args.environment)
    elif left := [name for name in names if METHODS[name].stack == "torch"]:
        print(f"without --environment, not measured: {', '.join(left)}")
        names = [name for name in names if name not in left]
    log = Log(args.out, settings(args))
    joined = network.joined(args.processes, UNSHAPED)
    with tempfile.TemporaryDirectory() as place, joined as net:
        bench = Bench(args, net, Path(place))
        good = (check if args.check else run)(bench, log, names)
    if args.page and not args.check:
        write_page(log.rows, args.page, args.out.parent)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
