"""What checkpoints cost: training with one every 100 half-rounds, and with none.

    python benchmarks/checkpoints.py [--quick] [--json=FILE]

One run of the quickstart's model takes turns: so many half-rounds with a checkpoint at
their start, written while they go on, and as many without. A turn is timed from when
the devices have nothing to do to when they have nothing to do again; the two of a pair
are in either order, pair by pair, and what the first one of all compiles is left out.
The ratio is of the throughput with checkpoints to that without, the median over pairs,
its spread the middle half; at least 0.97 is wanted. Beside it the same ratio of CPU
seconds, all threads together, which other programs disturb less, for how long a save
keeps the run from its next half-round, and how long it is under way.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
from ml_collections import ConfigDict  # noqa: E402

from acco_jax.command import devices  # noqa: E402
from acco_jax.run import loop, preparation, prepared  # noqa: E402
from experiments import quickstart  # noqa: E402

WANTED = 0.97


def experiment(quick: bool, workdir: pathlib.Path) -> prepared.Experiment:
    """Prepares the quickstart, or a model of 20 thousand parameters on little text."""
    config = quickstart.get_config()
    config.eval_every = config.checkpoint_every = 10**6  # rows are logged as ever
    config.steps, config.spike.policy = 10**6, "off"
    if quick:
        texts = workdir / "texts"
        texts.mkdir()
        for i in range(8):
            (texts / f"{i}.txt").write_text(f"while you wait for {i} " * 400)
        _make_tiny(config, texts)
    return preparation.prepare(config, workdir)


def _make_tiny(config: ConfigDict, texts: pathlib.Path) -> None:
    config.data.name, config.data.path, config.data.held_out = (
        "text_folder", str(texts), 0.2
    )  # fmt: skip
    config.model.width, config.model.heads, config.model.window = 16, 2, 16
    config.length, config.microbatch_size = 32, 2
    config.data.data_dir = str(texts.parent)


class Turns:
    """Half-rounds of one run, timed with a checkpoint at their start and without."""

    def __init__(self, e: prepared.Experiment, calls: int) -> None:
        self._e, self.calls, self._start = e, calls, 0.0
        self._run, self._finish = loop._Run(e), e.checkpoints._finish
        e.checkpoints._finish = self._timed  # type: ignore[method-assign]
        self.saves: list[float] = []  # seconds for which one keeps the run waiting
        self.writes: list[float] = []  # seconds until one is finished

    def _timed(self, half_round: int, surplus: list[int]) -> None:
        self._finish(half_round, surplus)
        self.writes.append(time.perf_counter() - self._start)

    def seconds(self, *, saves: bool) -> tuple[float, float]:
        """Returns the seconds of a turn by the clock, and of all its threads."""
        run = self._run
        jax.block_until_ready((run.params, run.state))
        self._start, cpu = time.perf_counter(), time.process_time()
        if saves:
            run.save()
            self.saves.append(time.perf_counter() - self._start)
        for _ in range(self.calls):
            run.half_round()
        jax.block_until_ready((run.params, run.state))
        self._e.checkpoints.wait()  # what took longer than the turn counts too
        return time.perf_counter() - self._start, time.process_time() - cpu

    def pair(self, number: int) -> tuple[float, float]:
        """Returns the throughput with checkpoints over that without, by both clocks."""
        order = (True, False) if number % 2 else (False, True)
        taken = {saves: self.seconds(saves=saves) for saves in order}
        return taken[False][0] / taken[True][0], taken[False][1] / taken[True][1]


def measure(turns: Turns, pairs: int) -> list[tuple[float, float]]:
    calls, turns.calls = turns.calls, 2
    turns.pair(0)  # compiles
    turns.calls = calls
    turns.saves.clear()
    turns.writes.clear()
    ratios = []
    for number in range(pairs):
        ratios.append(turns.pair(number))
        clock, cpu = ratios[-1]
        print(f"pair {number + 1}: {clock:.3f}, CPU {cpu:.3f}", flush=True)
    return ratios


def spread(values: list[float]) -> str:
    """Writes the median, and where the middle half begins and ends."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="tiny, to see that it runs"
    )
    parser.add_argument("--pairs", type=int, help="of turns (default: 8, quick: 3)")
    parser.add_argument("--half-rounds", type=int, help="per turn (100, quick: 4)")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures here")
    args = parser.parse_args()
    devices.choose_platform(2 if args.quick else 4, several_processes=False)
    calls = args.calls or (4 if args.quick else 100)
    with tempfile.TemporaryDirectory() as folder:
        e = experiment(args.quick, pathlib.Path(folder))
        turns = Turns(e, calls)
        pairs = args.pairs or (3 if args.quick else 8)
        ratios = measure(turns, pairs)
        report(turns, ratios, calls, e, args.json)


def report(
    turns: Turns,
    ratios: list[tuple[float, float]],
    calls: int,
    e: prepared.Experiment,
    path: pathlib.Path | None,
) -> None:
    clock, cpu = (list(values) for values in zip(*ratios, strict=True))
    figures = {
        "training": calls,
        "parameters": e.model.parameters(),
        "ratios": clock,
        "cpu_ratios": cpu,
        "save_seconds": turns.saves,
        "write_seconds": turns.writes,
    }
    print(
        f"{e.model.parameters():,} parameters, {e.workers} devices: throughput with a "
        f"checkpoint every {calls} half-rounds / without: {spread(clock)}, by "
        f"CPU seconds {spread(cpu)}; {len(ratios)} pairs, at least {WANTED} is wanted"
    )
    print(
        f"a save keeps the run waiting for {statistics.median(turns.saves):.3f} s and "
        f"is finished after {statistics.median(turns.writes):.3f} s"
    )
    if path is not None:
        path.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
