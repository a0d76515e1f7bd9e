"""Seconds, tokens and bytes to one loss, of every method on links of several speeds.

    python benchmarks/network_map.py --workdir=DIR [--seeds=3] [--json=FILE] [--quick]
    python benchmarks/network_map.py --goals=FILE [--json=FILE]
    python benchmarks/network_map.py --table=FILE

Needs Linux, root, and iproute2's `ip` and `tc`. Both parts train a GPT-Neo of 0.27M
parameters (experiments/quickstart.py, narrower) on two workers, at a constant rate
after a warm-up. First `acco_jax.compare` trains each method with each seed, without a
link: no loss depends on one. The losses to reach are, for each seed, those of zero1
after PARTS of its steps. A method's steps to one are read from its evaluations, in a
straight line between two. The rates of METHODS are the best of factors of two, on a
seed that is not used again.

Then two CPU processes, each pinned to a core in a network namespace of its own, time
the steps of each method in turn, at rates at which the communication of zero1's step
takes RATIOS of its computation. The interface counts the bytes.

Seconds to the loss are the product: steps, by seed, times the median of a step's
seconds. Starting, compiling and evaluating are not counted.

The training is continued where it ended; finished runs are not repeated. --goals takes
the steps of an earlier report, and measures times alone.
"""

import argparse
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from acco_jax.command import palette  # noqa: E402
from acco_jax.run.compare import comparison, network, results  # noqa: E402
from benchmarks import common  # noqa: E402

EXPERIMENT = ROOT / "experiments" / "quickstart.py"
FLAGS = (
    "--config.model.width=96",
    "--config.devices=2",
    "--config.microbatch_size=2",
    "--config.optimizer.schedule=constant",
    "--config.optimizer.warmup_steps=30",
    "--config.checkpoint_every=100000",
    "--config.log_every=20",
    "--config.data.held_out=0.01",
)  # fmt: skip
TINY = (
    "--config.model.width=16",
    "--config.length=32",
    "--config.eval_batches=2",
    "--config.optimizer.warmup_steps=5",
)  # fmt: skip
STEPS, EVERY, PARTS = 480, 24, (0.25, 0.4)
RATIOS = (0.05, 0.3, 1.0, 5.0, 30.0)  # zero1's communication over computation
METHODS = {  # as compare has them: a learning rate and a name for each
    "zero1": (2e-3, "zero1"),
    "zero1(config.optimizer.name=muon)": (8e-3, "zero1 of muon"),
    "acco(config.first_half=2)": (1e-3, "acco, equal halves"),
    "acco": (2e-3, "acco"),
    "acco(gather_bits=8,reduce_bits=8)": (2e-3, "acco, 8 bits"),
    "acco(gather_bits=4,reduce_bits=8)": (2e-3, "acco, 4-bit gathers, 8-bit reduction"),
    "dpu(feedback=1.0)": (1e-3, "dpu with feedback"),
    "diloco(local_steps=24)": (1e-3, "diloco"),
    "diloco(local_steps=24,config.optimizer.name=muon)": (8e-3, "diloco of muon"),
    "streaming_diloco(local_steps=24,bits=8)": (1e-3, "streaming_diloco, 8 bits"),
    "streaming_diloco(local_steps=24,bits=4)": (1e-3, "streaming_diloco, 4 bits"),
    "co2(local_steps=12)": (1.25e-4, "co2"),
    "gossip": (2e-3, "gossip"),
    "cellm(local_steps=24)": (4e-3, "cellm"),
    "sparseloco(local_steps=24)": (4e-3, "sparseloco"),
}
OTHER = "config.optimizer.name"  # in a method's options: not AdamW
DASHES = "-", "--", ":", "-."  # of the variants of a method
SECONDS = 1.0  # of a measurement, at least
UNSHAPED = 1e4  # Mbit/s
SENT = pathlib.Path("/sys/class/net/eth0/statistics/tx_bytes")


# ---- the losses


def train(args: argparse.Namespace, methods: Sequence[str]) -> None:
    """Runs the comparison in the workdir."""
    command = [
        sys.executable, "-m", "acco_jax.compare", f"--config={EXPERIMENT}",
        *flags(args.quick), f"--config.steps={args.steps}",
        f"--config.eval_every={args.every}",
        f"--methods={','.join(map(at_its_rate, methods))}",
        f"--workdir={args.workdir}", f"--seeds={args.seeds}",
        f"--at_once={args.at_once}",
    ]  # fmt: skip
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu",
    }  # fmt: skip
    subprocess.run(command, env=environment, check=True)


def flags(quick: bool) -> tuple[str, ...]:
    """Returns those of the experiment that all methods share."""
    return (*FLAGS, *TINY) if quick else FLAGS


def at_its_rate(name: str) -> str:
    """Returns a method with its learning rate among its options."""
    rate = f"config.optimizer.learning_rate={METHODS[name][0]:g}"
    return f"{name[:-1]},{rate})" if name.endswith(")") else f"{name}({rate})"


def curves(workdir: pathlib.Path, name: str) -> dict[int, list[tuple[int, float]]]:
    """Returns a method's (step, held-out loss) by seed."""
    found = {}
    for folder in sorted((workdir / at_its_rate(name)).glob("seed-*")):
        seed = int(folder.name.removeprefix("seed-"))
        rows = results.read(folder, name, seed).evaluations
        found[seed] = [(row["step"], row["loss"]) for row in rows]
    return found


def reached(curve: Sequence[tuple[int, float]], loss: float) -> float | None:
    """Returns the steps after which a curve is at a loss; None if it never is."""
    before = None
    for step, here in curve:
        if here <= loss:
            if before is None:
                return float(step)
            first, above = before
            return first + (step - first) * (above - loss) / (above - here)
        before = step, here
    return None


def at(curve: Sequence[tuple[int, float]], part: float) -> float:
    """Returns the loss of the last evaluation within a part of a curve's steps."""
    last = part * curve[-1][0]
    return [loss for step, loss in curve if step <= last][-1]


def goals(workdir: pathlib.Path, methods: Sequence[str]) -> list[dict[str, Any]]:
    """Returns losses to reach, by seed, and each method's steps to them."""
    found = {name: curves(workdir, name) for name in methods}
    every = []
    for part in PARTS:
        losses = {seed: at(curve, part) for seed, curve in found["zero1"].items()}
        steps = {
            name: [reached(curve, losses[seed]) for seed, curve in of_seeds.items()]
            for name, of_seeds in found.items()
        }
        every.append({"part": part, "losses": [*losses.values()], "steps": steps})
    return every


# ---- the processes


def work(spec: dict[str, Any]) -> None:
    """Runs the commands that the parent gives on stdin; answers with JSON."""
    answer = common.answering()
    with tempfile.TemporaryDirectory() as place:
        process = Process(spec, pathlib.Path(place))
        answer({"computing": process.computing, "bytes": process.bytes})
        for line in sys.stdin:
            answer(process.run(*json.loads(line)))


class Process:
    """One of the processes, with all methods ready to run."""

    def __init__(self, spec: dict[str, Any], place: pathlib.Path) -> None:
        from acco_jax.command import devices, program_store

        devices.choose_platform(1, several_processes=True)
        program_store.keep_programs()
        devices.connect(spec["coordinator"], spec["processes"], spec["index"])
        import jax

        from acco_jax.run import measures, preparation, prepared, trials
        from acco_jax.run.config import fields, parsing

        self._running = dict[str, list[Any]]()
        for i, entry in enumerate(comparison.parse(",".join(spec["methods"]))):
            own = (*flags(spec["quick"]), *entry.flags, "--config.devices=1")
            config = parsing.config_of([f"--config={EXPERIMENT}", *own])
            if config.method == "acco" and config.first_half == "auto":
                config = fields.with_first_half(config, 1)  # as compare has it
            config.steps = 1200  # all methods divide it
            e = preparation.build(config, place / str(i))
            state, rows = prepared.initial(e), prepared.batches(e)
            trials.compile_together(e, *state, rows.shapes())
            batch = prepared.to_devices(next(rows), e.mesh)
            self._running[entry.name] = [e, *state, batch]
            if entry.name == "zero1":
                params = state[0]
                self.bytes = 4 * sum(x.size for x in jax.tree.leaves(params))
                self.computing = statistics.median(
                    measures.gradient_seconds(e, params, per_token=False)
                    for _ in range(5)
                )

    def run(self, name: str, turns: int) -> dict[str, float]:
        """Returns the seconds and the bytes sent of an optimizer step, of several.

        A turn are the calls after which a method's communication repeats.
        """
        import jax

        e, params, state, batch = self._running[name]
        calls = turns * e.tx.calls_per_step * e.tx.period
        sent, start = int(SENT.read_text()), time.perf_counter()
        for _ in range(calls):
            params, state, metrics = e.step(params, state, batch)
        jax.block_until_ready((params, state, metrics))
        seconds = time.perf_counter() - start
        self._running[name] = [e, params, state, batch]
        steps = calls * e.tx.steps_per_call / e.tx.calls_per_step
        bytes_sent = int(SENT.read_text()) - sent
        return {"seconds": seconds / steps, "bytes": bytes_sent / steps, "all": seconds}


# ---- the parent


def timed(
    methods: Sequence[str], args: argparse.Namespace, place: pathlib.Path
) -> dict[str, Any]:
    """Returns a step's seconds at each rate, by repetition, and its bytes."""
    rows: list[dict[str, Any]] = []
    with network.joined(2, UNSHAPED) as net:
        program = [sys.executable, "-m", "benchmarks.network_map", "--work"]
        spec = {"processes": 2, "methods": list(methods), "quick": args.quick}
        with common.Workers(program, spec, net, place) as workers:
            found = workers.answers("the start")
            computing = max(x["computing"] for x in found)
            size = found[0]["bytes"]  # each process sends half of them twice
            sent: dict[str, float] = {}
            for ratio in map(float, args.ratios.split(",")):
                mbit = 8e-6 * size / (ratio * computing)
                net.set_rate(mbit)
                seconds: dict[str, list[float]] = {name: [] for name in methods}
                turns = {}
                for name in methods:
                    first = workers.ask(json.dumps([name, 1]))[0]["all"]
                    turns[name] = max(1, round(SECONDS / first))
                for number in range(args.repetitions):
                    for name in methods[::-1] if number % 2 else methods:
                        line = json.dumps([name, turns[name]])
                        answers = workers.ask(line)
                        seconds[name].append(max(x["seconds"] for x in answers))
                        sent[name] = statistics.fmean(x["bytes"] for x in answers)
                row = {"ratio": ratio, "mbit": mbit, "seconds": seconds}
                rows.append(row)
                print(f"{ratio:g}: {row}", file=sys.stderr, flush=True)
    return {"computing": computing, "bytes": sent, "links": rows}


def to_loss(goal: dict[str, Any], name: str, row: dict[str, Any]) -> list[float]:
    """Returns a method's seconds to the loss at a rate, of the seeds that reach it."""
    step = statistics.median(row["seconds"][name])
    return [steps * step for steps in goal["steps"][name] if steps is not None]


def whole(goal: dict[str, Any], name: str) -> bool:
    """Returns whether a method reaches the loss with every seed."""
    return None not in goal["steps"][name]


def ranked(goal: dict[str, Any], row: dict[str, Any]) -> list[str]:
    """Returns the methods that reach the loss, by their mean seconds to it at a rate.

    Those of another optimizer are not among them.
    """
    names = [name for name in goal["steps"] if whole(goal, name) and OTHER not in name]
    return sorted(names, key=lambda name: statistics.fmean(to_loss(goal, name, row)))


def table(report: dict[str, Any], goal: dict[str, Any]) -> str:
    """Returns Markdown: a line for each method, the fastest of a rate in bold."""
    links = report["links"]
    best = [ranked(goal, row)[0] for row in links]
    heads = [f"{row['ratio']:g}, {row['mbit']:.3g} Mbit/s" for row in links]
    lines = [
        f"| method | learning rate | steps | kB sent per step | MB sent | "
        f"{' | '.join(heads)} |",
        "|" + "---|" * (5 + len(links)),
    ]
    for name, steps in goal["steps"].items():
        known = [x for x in steps if x is not None]
        size = report["bytes"][name]
        cells = [METHODS[name][1], f"{METHODS[name][0]:g}"]
        if whole(goal, name):
            mean = statistics.fmean(known)
            cells.append(f"{mean:.0f} ({min(known):.0f} to {max(known):.0f})")
            cells += [f"{size / 1e3:.3g}", f"{size * mean / 1e6:.3g}"]
            for row, first in zip(links, best, strict=True):
                found = to_loss(goal, name, row)
                text = f"{statistics.fmean(found):.0f}"
                text = f"**{text}**" if name == first else text
                cells.append(f"{text} ({min(found):.0f} to {max(found):.0f})")
        else:
            cells.append(f"reached by {len(known)} of {len(steps)}")
            cells += [f"{size / 1e3:.3g}", "-", *["-"] * len(links)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(report: dict[str, Any]) -> None:
    """Draws seconds to each loss against the network, light and dark."""
    from acco_jax.command.charts import legend_below, subplots
    from benchmarks import pictures

    ratios = [row["ratio"] for row in report["links"]]
    middles = [(a * b) ** 0.5 for a, b in itertools.pairwise(ratios)]
    edges = [ratios[0] ** 2 / middles[0], *middles, ratios[-1] ** 2 / middles[-1]]
    for ending in pictures.styled():
        size = 5 * len(report["goals"]), 6.2
        figure, axes = subplots(*size, 1, len(report["goals"]), sharey=True)
        for ax, goal in zip(axes, report["goals"], strict=True):
            _draw_one(ax, report["links"], goal, edges)
            mean = statistics.fmean(goal["losses"])
            ax.set_title(f"to a loss of {mean:.2f}", fontsize=10)
        axes[0].set_ylabel("seconds")
        legend_below(figure)
        pictures.save(figure, f"map{ending}.svg")


def _draw_one(ax: Any, links: Any, goal: dict[str, Any], edges: list[float]) -> None:
    ratios = [row["ratio"] for row in links]
    kinds = [name.partition("(")[0] for name in goal["steps"]]
    for i, (name, kind) in enumerate(zip(goal["steps"], kinds, strict=True)):
        style = {"color": palette.METHODS[kind], "ls": DASHES[kinds[:i].count(kind)]}
        style["label"] = METHODS[name][1]
        if whole(goal, name):
            ends = [to_loss(goal, name, row) for row in links]
            ax.plot(ratios, [statistics.fmean(x) for x in ends], **style)
            sides = [min(x) for x in ends], [max(x) for x in ends]
            ax.fill_between(ratios, *sides, color=style["color"], alpha=0.1, lw=0)
        else:
            ax.plot([], [], **style)  # in the legend all the same
    for row, band in zip(links, itertools.pairwise(edges), strict=True):
        best = ranked(goal, row)[0]
        color = palette.METHODS[best.partition("(")[0]]
        ax.axvspan(*band, color=color, alpha=0.14, lw=0)
        mean = statistics.fmean(to_loss(goal, best, row))
        ax.plot(row["ratio"], mean, "o", color=color, ms=7)
    ax.set(xscale="log", yscale="log", xlim=(edges[0], edges[-1]),
           xlabel="zero1's communication of a step over its computation")  # fmt: skip


def printed(report: dict[str, Any]) -> str:
    """Returns Markdown: a table for each loss."""
    return "\n\n".join(table(report, goal) for goal in report["goals"])


def main() -> int:
    if sys.argv[1:2] == ["--work"]:
        work(json.loads(sys.argv[2]))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workdir", type=pathlib.Path, help="of the training")
    parser.add_argument("--methods", default=",".join(METHODS), help="of METHODS")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--every", type=int, default=EVERY, help="between evaluations")
    parser.add_argument("--at_once", type=int, default=2, help="runs of the training")
    parser.add_argument("--ratios", default=",".join(map(str, RATIOS)))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    parser.add_argument("--goals", type=pathlib.Path, help="a report: do not train")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--table", type=pathlib.Path, help="print the table of this")
    args = parser.parse_args()
    if args.table:
        report = json.loads(args.table.read_text())
        draw(report)
        print(printed(report))
        return 0
    if not args.workdir and not args.goals:
        parser.error("--workdir is needed to train")
    if reason := network.why_not():
        print(f"error: {reason}", file=sys.stderr)
        return 2
    if args.goals:
        report = {"goals": json.loads(args.goals.read_text())["goals"]}
        methods = [*report["goals"][0]["steps"]]
    else:
        methods = [entry.name for entry in comparison.parse(args.methods)]
        if "zero1" not in methods or not METHODS.keys() >= {*methods}:
            parser.error(f"--methods are zero1 and any of {', '.join(METHODS)}")
        train(args, methods)
        report = {"goals": goals(args.workdir, methods)}
    with tempfile.TemporaryDirectory() as place:
        report |= timed(methods, args, pathlib.Path(place))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    print(printed(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
