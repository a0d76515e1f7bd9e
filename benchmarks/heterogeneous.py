"""Four processes, one of them four times slower: what of the machines' speed is used.

    python benchmarks/heterogeneous.py [--quick] [--parts=PARTS --each=N] [--json=FILE]

Needs Linux, root, and the CPU controller of cgroups (version 1 or 2). Each process is a
worker of acco_jax.train, on the source of the standard library, and may use a part of a
core, a quota of each 10 ms: 0.45 for three of them and 0.11 for the last, together less
than the machine's two cores, so that they do not take them from each other. What waits
uses nothing. Quotas are set once all train: start and compilation run at full speed.

    adaptive         acco with microbatches='adaptive'; the mean of its counts, or
                     --each, is what a worker of the others computes, so that all have
                     equal batches
    alone            one process, zero1, at each of the two quotas; their sum, 3 fast
                     and 1 slow, is what all others are compared with
    zero1, acco      the same microbatches for all; acco's estimates, here and where
                     counts differ, go 1.3 times as far, which costs nothing
    balanced         acco with microbatches='balanced' and as many in all

Rates are tokens over seconds between rows of metrics.jsonl. Then all train on to the
end of their schedule, a cosine over as many steps, those whose counts do not depend on
speed without quotas; the losses there, of all held-out documents, are compared with
zero1's.

    follows          the balanced run again from its start: all at 0.45, then the last
                     at 0.11, then at 0.45; the half-rounds from each change of the
                     quota to counts of which no worker ends a tenth later than need be

Exits with 1 if balanced or adaptive use less than 0.75 of the sum, a loss differs from
zero1's by more than 1 %, a change is followed after more than 20 half-rounds, or probes
take more than 1 % of the time.
"""

import argparse
import contextlib
import itertools
import json
import math
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from acco_jax.command import exits  # noqa: E402
from benchmarks import common  # noqa: E402

PROCESSES, TIMES, SLOW = 4, 4, 3  # how much slower the last one is
FAST = 0.45  # of a core
PERIOD = 10_000  # microseconds
ADAPTIVE, LOSS, FOLLOWED, PROBES = 0.75, 0.01, 20, 0.01
MANY = 10**6  # steps of a run that is stopped
MOST = 128  # microbatches of an adaptive worker in a half-round
STEPS, QUICK = (60, 12), (24, 6)  # optimizer steps, and half-rounds of a rate
PARTS = ("adaptive", "alone", "zero1", "acco", "balanced", "follows")
ACCO = {"method": "acco", "method_options": {"extrapolation": 1.3}}  # dynamics.md
FIELDS: dict[str, dict[str, Any]] = {
    "alone": {"method": "zero1"},
    "adaptive": ACCO | {"microbatches": "adaptive"},
    "zero1": {"method": "zero1"},
    "acco": ACCO,
    "balanced": ACCO | {"microbatches": "balanced"},
}
ROWS, LENGTH = 4, 64
MICROBATCH = ROWS * LENGTH  # of a microbatch
EXPERIMENT: dict[str, Any] = {
    "devices": 1, "length": LENGTH, "microbatch_size": ROWS,
    "checkpoint_every": 10**6, "compare_replicas_every": 0,
    "log_every": 1, "eval_every": 8, "eval_batches": 32,
    "model": {"width": 128, "layers": 2, "heads": 4, "window": 32,
              "dtype": "float32", "param_dtype": "float32"},
    "data": {"held_out": 0.01},
    "optimizer": {"learning_rate": 1e-3, "warmup_steps": 10},
}  # fmt: skip


def fields(part: str, each: int, steps: int) -> dict[str, Any]:
    """Returns a part's configuration, of so many microbatches a worker."""
    least, most = (2, MOST) if part == "adaptive" else (2 * each, 4 * each)
    counts = {"microbatches_per_step": least, "most_microbatches": most}
    return EXPERIMENT | counts | FIELDS[part] | {"steps": steps}


CONFIG = """
from acco_jax.run.config.fields import default_config

def get_config():
    c = default_config()
    c.update({fields!r})
    return c
"""


class Quotas:
    """A cgroup for each process, whose use of the processor is bounded."""

    def __init__(self, root: pathlib.Path, version: int) -> None:
        self._new = version == 2
        self._folders = [root / f"acco-{i}" for i in range(PROCESSES)]

    def __enter__(self) -> "Quotas":
        for folder in self._folders:
            folder.mkdir(exist_ok=True)
            if not self._new:
                (folder / "cpu.cfs_period_us").write_text(str(PERIOD))
        return self

    def __exit__(self, *_: object) -> None:
        for folder in self._folders:
            with contextlib.suppress(OSError):
                folder.rmdir()

    def prefix(self, process: int) -> list[str]:
        """Returns what a command is run by, so that it and its process are bounded."""
        path = self._folders[process] / "cgroup.procs"
        return ["sh", "-c", f'echo $$ > {path}; exec "$@"', "sh"]

    def set(self, process: int, cores: float | None) -> None:
        """Bounds a process's use to so much of a core; None: not at all."""
        quota = None if cores is None else round(cores * PERIOD)
        folder = self._folders[process]
        if self._new:
            text = f"{'max' if quota is None else quota} {PERIOD}"
            (folder / "cpu.max").write_text(text)
        else:
            text = str(-1 if quota is None else quota)
            (folder / "cpu.cfs_quota_us").write_text(text)


@contextlib.contextmanager
def quotas() -> Iterator[Quotas]:
    """Yields quotas.

    Raises:
      OSError: this machine has none, or not for this user.
    """
    root, version = pathlib.Path("/sys/fs/cgroup/cpu"), 1
    if not root.is_dir():
        root, version = root.parent, 2
        (root / "cgroup.subtree_control").write_text("+cpu")
    with Quotas(root, version) as found:
        found.set(0, None)
        yield found


class Trial:
    """One run on these machines."""

    def __init__(
        self,
        place: pathlib.Path,
        limit: Quotas,
        name: str,
        chosen: dict[str, Any],
        processes: int = PROCESSES,
    ) -> None:
        config = place / f"{name}.py"
        config.write_text(CONFIG.format(fields=chosen))
        self._limit, self._processes = limit, processes
        self._run = common.Commands(
            place, place / name, config, processes, {"lost_after": 120.0}
        )

    def __enter__(self) -> "Trial":
        self._run.__enter__()
        self.bound(None)
        for process in range(self._processes):
            self._run.start(process, prefix=self._limit.prefix(process))
        self.wait(2)
        return self

    def __exit__(self, *error: object) -> None:
        self.bound(None)
        if error[0] is None and self._run.running:
            self._run.stop()
            self._run.wait(exits.STOPPED)
        self._run.__exit__()

    def bound(self, cores: float | None, slow: float | None = None) -> None:
        """Sets all processes' part of a core, and that of the last."""
        for process in range(self._processes):
            last = process == SLOW and slow is not None
            self._limit.set(process, slow if last else cores)

    def rows(self, kind: str) -> list[dict[str, Any]]:
        return [r for r in common.rows(self._run.workdir) if r["kind"] == kind]

    def half_round(self) -> int:
        return self.rows("train")[-1]["half_round"] if self.rows("train") else 0

    def wait(self, half_round: int) -> None:
        def there() -> bool:
            return self.half_round() >= half_round

        self._run.until(there, f"half-round {half_round}", 1800.0)

    def rate(self, calls: int) -> float:
        """Waits; returns tokens a second of so many half-rounds from the next on.

        Those in which an evaluation falls are left out.
        """
        self.wait(self.half_round() + 4)
        first = self.half_round()

        def measured() -> list[tuple[dict[str, Any], dict[str, Any]]]:
            rows = [r for r in self.rows("train") if r["half_round"] >= first]
            held_out = {r["half_round"] for r in self.rows("validation")}
            return [
                (a, b)
                for a, b in itertools.pairwise(rows)
                if not held_out & set(range(a["half_round"], b["half_round"] + 3))
            ]

        def there() -> bool:
            done = sum(b["half_round"] - a["half_round"] for a, b in measured())
            return done >= calls

        self._run.until(there, f"{calls} half-rounds after {first}", 1800.0)
        pairs = measured()
        seconds = sum(b["seconds"] - a["seconds"] for a, b in pairs)
        return sum(b["tokens"] - a["tokens"] for a, b in pairs) / seconds

    def finish(self) -> float:
        """Trains to the end without quotas; returns the loss of all held-out rows."""
        self.bound(None)
        self._run.wait(0)
        return self.rows("final")[-1]["loss"]

    def counts(self) -> list[list[int]]:
        text = (self._run.workdir / "counts.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines() if line.endswith("]")]


def followed(counts: list[list[int]], start: int, slow: int) -> int | None:
    """Returns how many half-rounds after `start` counts fit workers of these speeds."""
    seconds = [1] * SLOW + [slow]
    total = sum(counts[start])
    best = min(e for e in range(1, total + 1) if sum(e // s for s in seconds) >= total)
    for number, row in enumerate(counts[start:]):
        if max(c * s for c, s in zip(row, seconds, strict=True)) <= 1.1 * best:
            return number
    return None


def follow(trial: Trial, calls: int) -> dict[str, Any]:
    """Has the last worker become slow, then fast again, while it trains."""
    trial.bound(FAST)
    trial.wait(trial.half_round() + calls)
    changes = []
    for slow in (TIMES, 1):
        trial.bound(FAST, FAST / slow)
        # metrics are written a half-round or two late: those done already do not count
        at = len(trial.counts())
        trial.wait(at + calls)
        found = followed(trial.counts(), at, slow)
        changes.append({"half_round": at, "times": slow, "followed": found})
        print(f"| {at} | {slow} | {found} | {trial.counts()[-1]} |", flush=True)
    return {"changes": changes, "stragglers": trial.rows("train")[-1]["stragglers"]}


def alone(
    place: pathlib.Path, limit: Quotas, calls: int, config: dict[str, Any]
) -> dict[str, float]:
    """Returns tokens a second of a fast machine and of a slow one, by themselves."""
    found = {}
    with Trial(place, limit, "alone", config, processes=1) as trial:
        for name, cores in (("fast", FAST), ("slow", FAST / TIMES)):
            trial.bound(cores)
            found[name] = trial.rate(calls // 2)
            print(f"| one {name} machine | {found[name]:.0f} | | |", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few half-rounds")
    parser.add_argument("--parts", default=",".join(PARTS), help="of these")
    parser.add_argument(
        "--each", type=int, default=60, help="where adaptive is no part"
    )
    parser.add_argument("--folder", type=pathlib.Path, help="keep everything here")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    try:
        with common.workplace(args.folder) as place, quotas() as limit:
            report = experiment(place, limit, args.parts.split(","), args)
    except OSError as error:
        print(f"error: no quotas of CPUs here: {error}", file=sys.stderr)
        return 2
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(report["shown"].values()) else 1


def experiment(
    place: pathlib.Path, limit: Quotas, parts: list[str], args: argparse.Namespace
) -> dict[str, Any]:
    steps, calls = QUICK if args.quick else STEPS
    each = args.each
    report: dict[str, Any] = {"rates": {}, "losses": {}, "tokens": {}, "shown": {}}
    print("| | tokens a second | held-out loss | after tokens |\n|---|---|---|---|")
    for part in (p for p in PARTS if p in parts and p != "follows"):
        if part == "alone":
            report["alone"] = alone(place, limit, calls, fields("alone", each, MANY))
            continue
        with Trial(place, limit, part, fields(part, each, steps)) as trial:
            trial.bound(FAST, FAST / TIMES)
            if part == "balanced":  # until it knows
                trial.wait(trial.half_round() + 2 * FOLLOWED)
            rate = trial.rate(calls // 2 if part == "zero1" else calls)
            if part in ("adaptive", "balanced"):  # whose counts depend on speed
                trial.wait(2 * (steps - 1))
            if part == "adaptive":
                row = trial.rows("train")[-1]
                each = round(row["tokens"] / row["half_round"] / PROCESSES / MICROBATCH)
                print(f"| {each} a half-round on average | | | |", flush=True)
            loss = trial.finish()
            tokens = trial.rows("train")[-1]["tokens"]
            if part == "balanced":
                report["probes"] = trial.rows("train")[-1]["probes"]
        report["rates"][part], report["losses"][part] = rate, loss
        report["tokens"][part] = tokens
        print(f"| {part} | {rate:.0f} | {loss:.4f} | {tokens} |", flush=True)
    report["each"] = each
    if "alone" in report:
        total = (PROCESSES - 1) * report["alone"]["fast"] + report["alone"]["slow"]
        report["shares"] = {k: v / total for k, v in report["rates"].items()}
        shares = ", ".join(f"{k} {v:.2f}" for k, v in report["shares"].items())
        print(f"\nOf the sum, {total:.0f} tokens a second: {shares}")
        for part in {"balanced", "adaptive"} & report["shares"].keys():
            report["shown"][part] = report["shares"][part] >= ADAPTIVE
    if "probes" in report:
        print(f"Probes took {report['probes']:.2%} of the time.")
        report["shown"]["probes"] = report["probes"] <= PROBES
    if "zero1" in report["losses"]:
        base = report["losses"]["zero1"]
        ends = [abs(math.log(x / base)) for x in report["losses"].values()]
        report["shown"]["losses"] = max(ends) <= LOSS
    if "follows" in parts:
        print("\n| after half-round | times slower | followed after | counts |\n"
              "|---|---|---|---|")  # fmt: skip
        with Trial(place, limit, "follows", fields("balanced", each, MANY)) as trial:
            report["follows"] = follow(trial, 2 * FOLLOWED)
        ends = [c["followed"] for c in report["follows"]["changes"]]
        report["shown"]["followed"] = None not in ends and max(ends) <= FOLLOWED
    shown = report["shown"].items()
    print("\n" + ", ".join(f"{k}: {'ok' if v else 'MISSED'}" for k, v in shown))
    return report


if __name__ == "__main__":
    sys.exit(main())
