"""A hundred kills: wherever one falls, the run ends as if nothing had happened.

    python benchmarks/soak.py [--kills=100] [--quick] [--processes=1,3] [--json=FILE]

Needs Linux. Runs of acco_jax.train with restarts, half of them of one process with two
devices and half of three processes with one, each as if on a host of its own, with
copies in memory. Each is killed in a random order once at each of these places, the
last three for three processes, by SIGKILL to the process that gets there first:

    starting     before anything is prepared
    compiling    as a program is to be compiled, or to be read from the cache
    half-round   after any
    row          a line of metrics.jsonl is written to its half
    evaluating   between two batches of held-out documents
    saving       while a checkpoint is written, at a random time
    training on  just after that has begun
    renamed      a checkpoint has its name, and no checksums
    summed       its checksums are there, and the mark of an unfinished save still is
    removing     an older checkpoint is being removed
    copying      while a copy in memory is written, at a random time
    unmarked     a copy in memory is written, and not marked as whole
    flipped      a copy in memory is whole, and one bit of it has changed
    sending      while shards are sent to another host, at a random time
    host         a copy in memory is whole; all that is in the host's memory is lost
    hosts        likewise, with the memory of the host that holds its copy

Then the bits of the last checkpoint, and the rows of metrics.jsonl but for the clocks,
must be those of a run that nothing disturbed. Exits with 1 if they are not.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from acco_jax.command import heartbeat  # noqa: E402
from benchmarks import common  # noqa: E402

PLACES = ("starting", "compiling", "half-round", "row", "evaluating", "saving",
          "training on", "renamed", "summed", "removing", "copying", "unmarked",
          "flipped")  # fmt: skip
AMONG = ("sending", "host", "hosts")  # several processes
QUICK = ("evaluating", "saving")


@dataclasses.dataclass(frozen=True)
class Trial:
    """What a run was put through, and whether it ended as it should have."""

    processes: int
    kills: list[str]
    seconds: float
    memory: int  # restarts from copies in memory
    bits: bool
    rows: bool


def run(
    place: pathlib.Path, name: str, processes: int, aims: list[str]
) -> tuple[pathlib.Path, list[str], float]:
    """Trains to the end; returns the workdir, the kills that took place, and seconds.

    Raises:
      RuntimeError: a command did not end well.
    """
    workdir, folder = place / name, place / f"{name}-aims"
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = common.environment(place) | {"SOAK_AIMS": str(folder)}
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        commands = []
        for process in range(processes):
            arguments = common.command(
                place / f"{processes}.py", workdir, process=process,
                processes=processes, coordinator=f"localhost:{port}",
                limits={"lost_after": 30.0, "restarts": 2 * len(aims)},
            )  # fmt: skip
            log = stack.enter_context(open(place / f"{name}-{process}.log", "w"))
            command = subprocess.Popen(
                arguments, env=environment, stdout=log, stderr=log,
                preexec_fn=functools.partial(heartbeat.die_with_parent, signal.SIGKILL),
            )  # fmt: skip
            stack.callback(command.kill)
            commands.append(command)
        kills = kill(folder, list(aims), commands)
        codes = [command.wait(600) for command in commands]
    if any(codes):
        logs = [(place / f"{name}-{i}.log").read_text() for i in range(processes)]
        raise RuntimeError(f"{name} ended with {codes}: {logs[0][-3000:]}")
    return workdir, kills, time.monotonic() - start


def kill(
    folder: pathlib.Path, aims: list[str], commands: list[subprocess.Popen]
) -> list[str]:
    """Places aims one after another while the commands run; returns those that met."""
    placed: pathlib.Path | None = None
    kills: list[str] = []
    while all(command.poll() is None for command in commands):
        if placed is not None and not placed.exists():
            kills.append(placed.name)
            placed = None
            time.sleep(random.uniform(0.0, 1.0))
        if placed is None and aims:
            placed = folder / aims.pop(0)
            placed.touch()
        time.sleep(0.05)
    if placed is not None and not placed.exists():
        kills.append(placed.name)
    return kills


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="one run, two kills")
    parser.add_argument("--processes", default="1,3", help="of the runs, in turn")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    random.seed(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        sizes = [1] if args.quick else [int(n) for n in args.processes.split(",")]
        trials = experiment(pathlib.Path(folder), args.kills, sizes, quick=args.quick)
    total = sum(len(t.kills) for t in trials)
    good = all(t.bits and t.rows for t in trials)
    print(f"\n{total} kills, every end equal to the bit: {'yes' if good else 'NO'}")
    if args.json:
        report = [dataclasses.asdict(trial) for trial in trials]
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if good else 1


def experiment(
    place: pathlib.Path, kills: int, sizes: list[int], *, quick: bool
) -> list[Trial]:
    """Runs trials until there were so many kills."""
    text = common.texts(place)
    for processes in sizes:
        common.write_config(
            place / f"{processes}.py", text, devices=2 if processes == 1 else 1,
            steps=16 if quick else 80, microbatches_per_step=2 * max(processes, 2),
            eval_every=4, eval_batches=2, checkpoint_every=4,
            data={"held_out": 0.2}, model={"width": 16},
        )  # fmt: skip
    expected = {}
    for processes in sizes:
        workdir, _, _ = run(place, f"undisturbed-{processes}", processes, [])
        expected[processes] = common.bits(workdir), common.unclocked(workdir)
    print("| processes | kills | seconds | from memory | bits | rows |\n"
          "|---|---|---|---|---|---|")  # fmt: skip
    trials: list[Trial] = []
    while sum(len(t.kills) for t in trials) < (1 if quick else kills):
        processes = sizes[len(trials) % len(sizes)]
        among = AMONG if processes > 1 else ()
        aims = list(QUICK if quick else PLACES + among)
        random.shuffle(aims)
        name = f"disturbed-{len(trials)}"
        workdir, met, seconds = run(place, name, processes, aims)
        bits, lines = expected[processes]
        trial = Trial(
            processes,
            met,
            seconds,
            (place / f"{name}-0.log").read_text().count("was in memory"),
            common.bits(workdir) == bits,
            common.unclocked(workdir) == lines,
        )
        trials.append(trial)
        same = {True: "same", False: "NOT the same"}
        print(
            f"| {processes} | {len(met)}: {', '.join(met)} | {seconds:.0f} | "
            f"{trial.memory} | {same[trial.bits]} | {same[trial.rows]} |",
            flush=True,
        )
    return trials


if __name__ == "__main__":
    sys.exit(main())
