"""What `method='auto'` takes on links of several speeds, and what it should have taken.

    python benchmarks/auto.py [--choices=3] [--repetitions=15] [--json=FILE]
    python benchmarks/auto.py --recommend=gpu:h100:2x1 --table=FILE

Needs Linux, root, and iproute2's `ip` and `tc`. Two CPU processes, each pinned to a
core in a network namespace of its own, prepare experiments/quickstart.py as
`acco_jax.train` does. The rate of the link is set until the communication of zero1's
step takes 0.1 to 4 times the computation of the step. At each rate the processes choose
by the runner's own trials, anew each time; then all methods that 'auto' may take are
timed in turn, a second of steps each. Each repetition starts all of them again: where
a start's arrays lie changes a method's seconds by up to a third. A ratio is the median
over repetitions of the ratio within one, and its spread the middle half: other load on
a machine comes and goes. Those of a choice are the tokens/s of the method chosen over
those of the best and of the worst.

With --table, the table of an earlier report; --recommend adds what `plan --recommend`
says of the same experiment on two GPUs, whose network has the rate at which zero1's
communication takes as long, of its computation there.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from acco_jax.methods import gaps  # noqa: E402
from acco_jax.run.compare import network  # noqa: E402
from benchmarks import common  # noqa: E402

RATIOS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)  # zero1's communication over computation
FIELDS = {"devices": 1, "microbatch_size": 8, "log_every": 2}
UNSHAPED = 1e4  # Mbit/s
SLOW = 1e8  # bytes/s: where latency is nothing
LEAST = 0.97  # of the best method's tokens/s
NAMES = [c.name for c in gaps.CANDIDATES]


# ---- the processes


def work(spec: dict[str, Any]) -> None:
    """Runs the commands that the parent gives on stdin; answers with JSON."""
    answer = common.answering()
    with tempfile.TemporaryDirectory() as place:
        process = Process(spec, pathlib.Path(place))
        answer({"computing": process.computing, "bytes": process.bytes})
        for line in sys.stdin:
            match json.loads(line):
                case {"choose": True}:
                    answer(process.choose())
                case {"begin": True}:
                    answer(process.begin())
                case {"run": name, "steps": steps}:
                    answer(process.seconds(name, steps))


class Process:
    """One of the processes, with all methods ready to run."""

    def __init__(self, spec: dict[str, Any], place: pathlib.Path) -> None:
        from acco_jax.command import devices, program_store

        devices.choose_platform(1, several_processes=True)
        program_store.keep_programs()
        devices.connect(spec["coordinator"], spec["processes"], spec["index"])
        import jax

        from acco_jax.run import measures, preparation, prepared, trials

        self._candidates = {
            name: preparation.build(each, place / name)
            for name, each in trials.candidates(trained(), hosts=1).items()
        }
        self._running = dict[str, Any]()
        for e in self._candidates.values():
            start = prepared.initial(e)
            trials.compile_together(e, *start, prepared.batches(e).shapes())
        zero1 = self._candidates["zero1"]
        params, _ = prepared.initial(zero1)
        self.bytes = 4 * sum(x.size for x in jax.tree.leaves(params))
        seconds = [
            measures.gradient_seconds(zero1, params, per_token=False) for _ in range(5)
        ]
        self.computing = statistics.median(seconds)

    def choose(self) -> str:
        """Returns the name of the method that a new run would take."""
        from acco_jax.run import trials

        return trials.fastest(self._candidates.items(), compiled=True)

    def begin(self) -> list[str]:
        """Starts each method again; returns their names."""
        from acco_jax.run import prepared

        for name, e in self._candidates.items():
            batch = prepared.to_devices(next(prepared.batches(e)), e.mesh)
            self._running[name] = [e, *prepared.initial(e), batch]
        return list(self._running)

    def seconds(self, name: str, steps: int) -> float:
        """Returns the seconds of an optimizer step, of so many."""
        import jax

        e, params, state, batch = self._running[name]
        start = time.perf_counter()
        for _ in range(steps * e.tx.calls_per_step):
            params, state, metrics = e.step(params, state, batch)
        jax.block_until_ready((params, state, metrics))
        self._running[name] = [e, params, state, batch]
        return (time.perf_counter() - start) / steps


def trained() -> Any:
    """Returns the config of the experiment."""
    from experiments import quickstart

    config = quickstart.get_config()
    config.update(FIELDS)
    return config


# ---- the parent


def timed(workers: common.Workers, name: str, steps: int) -> float:
    """Returns the seconds of a method's step, on the slower process."""
    return max(workers.ask(json.dumps({"run": name, "steps": steps})))


def at(workers: common.Workers, choices: int, repetitions: int) -> dict[str, Any]:
    """Returns what is chosen at the rate that is set, and what steps take."""
    chosen = []
    for _ in range(choices):
        chosen.append(workers.ask(json.dumps({"choose": True}))[0])
        print(f"chosen: {chosen[-1]}", file=sys.stderr, flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    for number in range(repetitions):
        assert workers.ask(json.dumps({"begin": True}))[0] == NAMES
        for name in NAMES[::-1] if number % 2 else NAMES:
            steps = max(1, round(1 / timed(workers, name, 1)))
            seconds[name].append(timed(workers, name, steps))
    return {"chosen": chosen, "seconds": seconds}


def by_speed(row: dict[str, Any]) -> list[str]:
    """Returns the methods, the fastest first."""
    return sorted(NAMES, key=lambda name: statistics.median(row["seconds"][name]))


def over(row: dict[str, Any], name: str, other: str) -> dict[str, float]:
    """Returns a method's tokens/s over another's: median and quartiles."""
    return common.quotients(row["seconds"][other], row["seconds"][name])


def table(report: dict[str, Any], recommended: Sequence[str] = ()) -> str:
    """Returns Markdown."""
    tokens, last = report["tokens_per_step"], bool(recommended)
    lines = [
        "| communication / computation | Mbit/s | "
        + " | ".join(f"{name}, tokens/s" for name in NAMES)
        + " | taken | of the best | of the worst |"
        + " `plan --recommend` |" * last,
        "|" + "---|" * (len(NAMES) + 5 + last),
    ]
    for row, said in itertools.zip_longest(report["rows"], recommended, fillvalue=""):
        speeds = [tokens / statistics.median(row["seconds"][name]) for name in NAMES]
        ranked = by_speed(row)
        best = NAMES.index(ranked[0])
        shown = [f"{x:,.0f}" for x in speeds]
        shown[best] = f"**{shown[best]}**"
        chosen = {x: row["chosen"].count(x) for x in dict.fromkeys(row["chosen"])}
        taken = "; ".join(f"{name}, {n} of {sum(chosen.values())}" for name, n in
                          chosen.items())  # fmt: skip
        ratios = " | ".join(
            "; ".join(
                "{median:.2f} ({low:.2f} to {high:.2f})".format(**over(row, x, other))
                for x in chosen
            )
            for other in (ranked[0], ranked[-1])
        )
        lines.append(
            f"| {row['ratio']:g} | {row['mbit']:.0f} | {' | '.join(shown)} | {taken} | "
            f"{ratios} |" + f" {said} |" * last
        )
    return "\n".join(lines)


def recommend(ratios: Sequence[float], place: str) -> list[str]:
    """Returns what `plan --recommend` says where communication takes so long."""
    import jax

    from acco_jax.plan import planner, recommendation
    from acco_jax.schedule import topologies

    jax.config.update("jax_platforms", "cpu")  # which compiles for GPUs, too
    config, topology = trained(), topologies.parse(place)
    config.devices = None
    request = planner.PlanRequest(changes={"slow_bandwidth": SLOW}, fit=False)
    alone = dataclasses.replace(request, methods=("zero1",))
    row = planner.make(config, topology, alone).row("zero1")
    found = row["exposed"] / (row["step"] - row["exposed"])
    said = []
    for ratio in ratios:
        rate = SLOW * found / ratio
        asked = dataclasses.replace(request, changes={"slow_bandwidth": rate})
        made = recommendation.make(config, topology, asked, ())
        said.append(f"{made.chosen.candidate.name}, at {8e-9 * rate:.3g} Gbit/s")
        print(f"{ratio:g}: {said[-1]}", file=sys.stderr, flush=True)
    return said


def experiment(args: argparse.Namespace, place: pathlib.Path) -> dict[str, Any]:
    rows = []
    with network.joined(2, UNSHAPED) as net:
        program = [sys.executable, "-m", "benchmarks.auto", "--work"]
        with common.Workers(program, {"processes": 2}, net, place) as workers:
            found = workers.answers("the start")
            computing = max(x["computing"] for x in found)
            size = found[0]["bytes"]  # each process sends half of them twice
            for ratio in (float(x) for x in args.ratios.split(",")):
                mbit = 8e-6 * size / (ratio * computing)
                net.set_rate(mbit)
                row = {"ratio": ratio, "mbit": mbit}
                row |= at(workers, args.choices, args.repetitions)
                rows.append(row)
                print(f"{ratio:g}: {row}", file=sys.stderr, flush=True)
    config = trained()
    tokens = 2 * config.microbatch_size * config.microbatches_per_step * config.length
    return {"computing": computing, "tokens_per_step": tokens, "rows": rows}


def main() -> int:
    if sys.argv[1:2] == ["--work"]:
        work(json.loads(sys.argv[2]))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--choices", type=int, default=3, help="at each rate")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--ratios", default=",".join(map(str, RATIOS)))
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--table", type=pathlib.Path, help="print the table of this")
    parser.add_argument("--recommend", help="two GPUs, for --table: gpu:h100:2x1")
    args = parser.parse_args()
    if args.table:
        report = json.loads(args.table.read_text())
        ratios = [row["ratio"] for row in report["rows"]]
        said = recommend(ratios, args.recommend) if args.recommend else []
        print(table(report, said))
        return 0
    if args.repetitions < 2:
        parser.error("--repetitions are at least 2: the table has quartiles")
    if reason := network.why_not():
        print(f"error: {reason}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as place:
        report = experiment(args, pathlib.Path(place))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    print(table(report))
    chosen = [(row, name) for row in report["rows"] for name in row["chosen"]]
    found = [over(row, name, by_speed(row)[0]) for row, name in chosen]
    return 0 if all(x["median"] >= LEAST for x in found) else 1


if __name__ == "__main__":
    sys.exit(main())
