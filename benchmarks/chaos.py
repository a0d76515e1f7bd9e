"""Processes with a fault every few minutes: what a run loses to them.

    python benchmarks/chaos.py [--minutes=30] [--every=180] [--mbit=8] [--method=acco]
        [--options='{"local_steps": 10}'] [--lost_after=10] [--processes=4]
        [--json=FILE]

Needs Linux, root, and iproute2's `ip` and `tc`. Each process is a command of
acco_jax.train with restarts and a warm compilation cache (see aimed.py), in a network
namespace of its own; the namespaces meet at a bridge. The faults, in turn, each on the
next process but process 0:

    kill         SIGKILL to the process that trains
    stop         SIGSTOP to it, for good
    cut off      its link is down until the others say that they have lost it
    coordinator  SIGKILL to process 0's command, which this program, as a scheduler
                 would, starts again

The link is slow, so that a half-round takes about half a second, and that the same run
on a fast one, which nothing disturbs, takes little time. At the end all are told to
stop, and the undisturbed run trains as many half-rounds: both must have the same bits.

A fault costs: detection, from it to the line that names a lost process; restart, from
there to the first half-round of the next attempt; lost work, the half-rounds after the
last checkpoint, which are done again. The goodput expected of these is
1 - (detection + restart + lost work) / interval; the one measured is the time that the
half-rounds of the run take, undisturbed, over the wall time. Exits with 1 if one of
these is missed: both within 5 points, detection at most 15 s, restart at most 40 s, the
same bits.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from acco_jax.command import exits, heartbeat  # noqa: E402
from acco_jax.run.compare import network  # noqa: E402
from benchmarks import common  # noqa: E402

KINDS = ("kill", "stop", "cut off", "coordinator")
DETECTION, RESTART, POINTS = 15.0, 40.0, 5.0  # seconds, seconds, per cent: at most
FINISH = 1800  # seconds that the undisturbed run may take


@dataclasses.dataclass(frozen=True)
class Fault:
    """What a fault has cost."""

    kind: str
    process: int
    half_round: int  # the last one before it
    detection: float  # seconds
    restart: float  # seconds
    repeated: int  # half-rounds

    def __str__(self) -> str:
        return (
            f"| {self.kind} | {self.process} | {self.half_round} | "
            f"{self.detection:.1f} | {self.restart:.1f} | {self.repeated} |"
        )


class Run:
    """The commands of one run, each in its namespace."""

    def __init__(
        self,
        net: network.Network,
        place: pathlib.Path,
        name: str,
        args: argparse.Namespace,
    ) -> None:
        self.net, self.workdir, self._args = net, place / name, args
        self._place, self.processes = place, range(args.processes)
        self.logs = [place / f"{name}-{i}.log" for i in self.processes]
        self.commands: list[subprocess.Popen | None] = [None] * args.processes

    def start(self, process: int, *flags: str) -> None:
        arguments = common.command(
            self._place / "config.py", self.workdir, *flags,
            limits={"lost_after": self._args.lost_after, "restarts": 1000},
            process=process, processes=self._args.processes,
            coordinator=f"{self.net.address(0)}:9911",
        )  # fmt: skip
        environment = common.environment(self._place) | network.ENVIRONMENT
        with open(self.logs[process], "a") as log:
            self.commands[process] = subprocess.Popen(
                self.net.command(process, arguments),
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=functools.partial(heartbeat.die_with_parent, signal.SIGKILL),
            )

    def pid(self, process: int) -> int:
        """Returns the number of the command itself, which the shell became."""
        command = self.commands[process]
        assert command is not None
        return command.pid

    def child(self, process: int) -> int:
        """Returns the number of the process that trains: a fork of the command's."""
        pid, depth = self.pid(process), 0
        while depth < 2:
            numbers = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text()
            if numbers:
                pid, depth = int(numbers.split()[0]), depth + 1
            else:
                time.sleep(0.1)
        return pid

    def rows(self) -> list[dict]:
        return common.rows(self.workdir)

    def half_round(self) -> int:
        return max((r["half_round"] for r in self.rows()), default=0)

    def lost(self) -> int:
        """Returns how often a process of this run was said to be lost, at most."""
        texts = [p.read_text() for p in self.logs if p.exists()]
        return max(text.count(" was lost ") for text in texts)

    def finish(self) -> None:
        """Waits for commands that have been told to stop."""
        for process, command in enumerate(self.commands):
            assert command is not None
            if (code := command.wait(FINISH)) != exits.STOPPED:
                tail = self.logs[process].read_text()[-2000:]
                raise RuntimeError(f"process {process} ended with {code}: {tail}")

    def kill(self) -> None:
        for command in self.commands:
            if command is not None and command.poll() is None:
                command.kill()
                command.wait()


def wait_for(condition: Callable[[], bool], what: str, limit: float = 300.0) -> float:
    """Waits; returns when it came true, in seconds of time.monotonic."""
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"no {what} within {limit:.0f} s")
        time.sleep(0.1)
    return time.monotonic()


def fault(run: Run, kind: str, process: int) -> None:
    match kind:
        case "kill":
            os.kill(run.child(process), signal.SIGKILL)
        case "stop":
            os.kill(run.child(process), signal.SIGSTOP)
        case "cut off":
            run.net.set_link(process, up=False)
        case "coordinator":
            os.kill(run.pid(0), signal.SIGKILL)
            command = run.commands[0]
            assert command is not None
            command.wait()


def suffer(run: Run, kind: str, process: int) -> Fault:
    """Has a process fail; returns what it cost."""
    lost, began = run.lost(), time.monotonic()
    fault(run, kind, process)
    detected = wait_for(lambda: run.lost() > lost, "line that names a lost process")
    before = run.half_round()
    if kind == "cut off":
        run.net.set_link(process, up=True)
    if kind == "coordinator":
        run.start(0)
    # The next attempt cuts metrics.jsonl where it begins, then goes past that.
    wait_for(lambda: run.half_round() != before, "next attempt")
    begun = min(run.half_round(), before)
    restarted = wait_for(lambda: run.half_round() > begun, "half-round")
    return Fault(
        kind, process, before, detected - began, restarted - detected, before - begun
    )


def disturbed(run: Run, args: argparse.Namespace) -> tuple[list[Fault], int, float]:
    """Trains through faults; returns them, the half-rounds done, and in what time."""
    for process in run.processes:
        run.start(process)
    wait_for(lambda: run.half_round() > 0, "first half-round")
    first, start, faults = run.half_round(), time.monotonic(), []
    turns = zip(
        itertools.cycle(args.kinds.split(",")), itertools.cycle(run.processes[1:]),
        strict=False,
    )  # fmt: skip
    for number in range(int(60 * args.minutes / args.every)):
        time.sleep(max(start + (number + 0.5) * args.every - time.monotonic(), 0))
        kind, process = next(turns)
        faults.append(suffer(run, kind, 0 if kind == "coordinator" else process))
        print(faults[-1], flush=True)
    time.sleep(max(start + len(faults) * args.every - time.monotonic(), 0))
    done, wall = run.half_round() - first, time.monotonic() - start
    for process in run.processes:
        os.kill(run.pid(process), signal.SIGTERM)
    run.finish()
    return faults, done, wall


def seconds_each(run: Run, faults: list[Fault]) -> float:
    """Returns the mean time of half-rounds that nothing has disturbed."""
    begun = {f.half_round - f.repeated for f in faults}
    rows = [r for r in run.rows() if r["kind"] == "train"]
    if len(rows) < 2:
        raise RuntimeError("there are no two half-rounds to time: let it run longer")
    gaps = [
        (b["seconds"] - a["seconds"], b["half_round"] - a["half_round"])
        for a, b in itertools.pairwise(rows)
        if not any(a["half_round"] <= at < b["half_round"] for at in begun)
    ]
    return sum(g[0] for g in gaps) / sum(g[1] for g in gaps)


@contextlib.contextmanager
def started(
    net: network.Network, place: pathlib.Path, name: str, args: argparse.Namespace
) -> Iterator[Run]:
    run = Run(net, place, name, args)
    try:
        yield run
    finally:
        run.kill()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=180.0, help="seconds")
    parser.add_argument("--mbit", type=float, default=8.0, help="of the slow link")
    parser.add_argument("--method", default="acco")
    parser.add_argument("--options", type=json.loads, default={}, help="of it, as JSON")
    parser.add_argument("--lost_after", type=float, default=10.0, help="seconds")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--checkpoint_every", type=int, default=20, help="steps")
    parser.add_argument("--kinds", default=",".join(KINDS), help="in this order")
    parser.add_argument("--folder", type=pathlib.Path, help="keep everything here")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    if reason := network.why_not():
        print(f"error: {reason}", file=sys.stderr)
        return 2
    with (
        common.workplace(args.folder) as place,
        network.joined(args.processes, args.mbit) as net,
    ):
        report = experiment(net, place, args)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(report["shown"].values()) else 1


def experiment(
    net: network.Network, place: pathlib.Path, args: argparse.Namespace
) -> dict[str, Any]:
    common.write_config(
        place / "config.py", common.texts(place), devices=1, steps=10**5,
        microbatches_per_step=8, checkpoint_every=args.checkpoint_every,
        eval_every=10**6, eval_batches=1, data={"held_out": 0.1}, model={"width": 64},
        method=args.method, method_options=args.options,
    )  # fmt: skip
    print("| fault | process | after half-round | detection, s | restart, s | "
          "half-rounds repeated |\n|---|---|---|---|---|---|", flush=True)  # fmt: skip
    with started(net, place, "disturbed", args) as run:
        faults, done, wall = disturbed(run, args)
        each, last = seconds_each(run, faults), common.last_checkpoint(run.workdir)
        bits = common.bits(run.workdir)
    net.set_rate(1e4)
    with started(net, place, "undisturbed", args) as run:
        for process in run.processes:
            run.start(process, f"--stop_after={last}")
        run.finish()
        same = bits == common.bits(run.workdir)
    cost = statistics.mean(f.detection + f.restart + f.repeated * each for f in faults)
    goodput = {"expected": 1 - cost / args.every, "measured": done * each / wall}
    report = {
        "faults": [dataclasses.asdict(f) for f in faults],
        "seconds_each": each,
        "goodput": goodput,
        "shown": {
            "same bits": same,
            "goodput": 100 * abs(goodput["measured"] - goodput["expected"]) <= POINTS,
            "detection": max(f.detection for f in faults) <= DETECTION,
            "restart": max(f.restart for f in faults) <= RESTART,
        },
    }
    print(
        f"\n{done} half-rounds of {each:.2f} s in {wall:.0f} s, one fault every "
        f"{args.every:.0f} s, which costs {cost:.1f} s: goodput "
        f"{goodput['measured']:.3f}, expected {goodput['expected']:.3f}\n"
        f"half-round {last}: bits {bits}, {'the same' if same else 'NOT the same'} "
        "undisturbed\n"
        + ", ".join(
            f"{k}: {'ok' if v else 'MISSED'}" for k, v in report["shown"].items()
        )
    )
    return report


if __name__ == "__main__":
    sys.exit(main())
