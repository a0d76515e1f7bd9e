"""Worlds that shrink and grow at random, by kills, and a record replayed to the bit.

    python benchmarks/worlds.py [--changes=10] [--quick] [--microbatches=KIND]
        [--method=acco] [--seed=0] [--json=FILE]

Needs Linux. Four commands of acco_jax.train with restarts and --min_processes=1. Again
and again another number of them is drawn: commands are killed by SIGKILL, wherever they
are, and never come back, or those that are gone are started again, and the others save
and take them in. (Process 0, at whose command the others meet, stays; its process ends
and begins with each world.) The next change comes once that world has a checkpoint of
its own, and a moment of a random length later. At the end all are told to stop.

Then, from an empty workdir, `--replay` repeats the record: for each world in turn so
many processes are started, and end, with exit code 75, where the next one went on. The
bits of the last checkpoint, and the rows of metrics.jsonl but for the clocks, must be
those of the first run. Exits with 1 if they are not.
"""

import argparse
import json
import pathlib
import random
import sys
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from acco_jax.command import exits  # noqa: E402
from benchmarks import common  # noqa: E402

PROCESSES = 4
LIMITS = {"lost_after": 120.0, "restarts": 1000, "min_processes": 1,
          "regroup_after": 3.0}  # fmt: skip


def worlds(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the run's record so far."""
    path = workdir / "worlds.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def settled(workdir: pathlib.Path, processes: int) -> bool:
    """Whether a world of so many processes is the last, and has saved."""
    found = worlds(workdir)
    if not found or found[-1]["processes"] != processes:
        return False
    return common.last_checkpoint(workdir) > found[-1]["half_round"]


def disturbed(run: common.Commands, changes: int) -> list[str]:
    """Trains through so many changes of world, then stops; returns what was done."""
    for process in range(PROCESSES):
        run.start(process)
    run.until(lambda: settled(run.workdir, PROCESSES), "checkpoint")
    print("| after half-round | change | processes | seconds until a checkpoint |\n"
          "|---|---|---|---|", flush=True)  # fmt: skip
    done = []
    for _ in range(changes):
        time.sleep(random.uniform(0.0, 2.0))
        here, at = len(run.running), common.last_checkpoint(run.workdir)
        size = random.choice([n for n in range(1, PROCESSES + 1) if n != here])
        if size < here:
            chosen = random.sample([p for p in run.running if p], here - size)
            what = "killed"
            for process in chosen:
                run.kill(process)
        else:
            gone = [p for p in range(PROCESSES) if p not in run.running]
            chosen, what = random.sample(gone, size - here), "started"
            for process in chosen:
                run.start(process)
        began = time.monotonic()
        run.until(lambda size=size: settled(run.workdir, size), f"world of {size}")  # type: ignore[misc]
        names = ", ".join(map(str, sorted(chosen)))
        done.append(f"{what} {names}")
        print(f"| {at} | {what} {names} | {here} -> {size} | "
              f"{time.monotonic() - began:.0f} |", flush=True)  # fmt: skip
    run.stop()
    run.wait(exits.STOPPED)
    return done


def replayed(place: pathlib.Path, original: pathlib.Path, stop: int) -> pathlib.Path:
    """Repeats a run's record up to a half-round; returns the workdir."""
    workdir = place / "replayed"
    for world in worlds(original):
        processes = world["processes"]
        limits = {"lost_after": 120.0}
        config = place / "config.py"
        with common.Commands(place, workdir, config, processes, limits) as run:
            for process in range(processes):
                run.start(process, f"--replay={original}", f"--stop_after={stop}")
            run.wait(exits.STOPPED)
    return workdir


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--changes", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="three changes")
    parser.add_argument("--method", default="acco")
    parser.add_argument("--microbatches", default="fixed", help="adaptive, balanced")
    parser.add_argument("--seed", type=int, default=0, help="of the changes")
    parser.add_argument("--folder", type=pathlib.Path, help="keep everything here")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    random.seed(args.seed)
    with common.workplace(args.folder) as place:
        report = experiment(place, args)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if report["bits"] and report["rows"] else 1


def experiment(place: pathlib.Path, args: argparse.Namespace) -> dict[str, Any]:
    config, changes = place / "config.py", 3 if args.quick else args.changes
    common.write_config(
        config, common.texts(place), devices=1, steps=10**6, method=args.method,
        microbatches_per_step=8, microbatches=args.microbatches, most_microbatches=8,
        checkpoint_every=10, eval_every=10, eval_batches=1,
        optimizer={"schedule": "constant"}, data={"held_out": 0.1},
        model={"width": 32},
    )  # fmt: skip
    with common.Commands(place, place / "changed", config, PROCESSES, LIMITS) as run:
        done = disturbed(run, changes)
    original, last = run.workdir, common.last_checkpoint(run.workdir)
    record = worlds(original)
    sizes = [world["processes"] for world in record]
    again = replayed(place, original, last)
    bits = common.bits(original)
    report = {
        "changes": done,
        "worlds": record,
        "training": last,
        "bits": common.bits(again) == bits,
        "rows": common.unclocked(again) == common.unclocked(original),
    }
    same = {True: "the same", False: "NOT the same"}
    print(
        f"\n{len(sizes) - 1} changes of world in {last} half-rounds: "
        f"{' -> '.join(map(str, sizes))} processes\nreplayed: bits {bits}, "
        f"{same[report['bits']]}; rows of metrics.jsonl {same[report['rows']]}"
    )
    return report


if __name__ == "__main__":
    sys.exit(main())
