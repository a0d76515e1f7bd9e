"""Thousands of broken inputs: the product takes them, or refuses them in one line.

    python benchmarks/fuzz.py [--inputs=10000] [--seed=0] [--target=NAME] [--case=N]

Each input is a mutation of a valid one in tests/recorded/fuzz/seeds, which seed, target
and number alone determine: `--target=NAME --case=N` repeats one and shows what it was.
A process beside this one calls the product's own entry with it (no compilation, no
training). It must return, or raise a ValueError or OSError of one line, which names the
file if it is about one. Anything else is a finding: another exception, several lines,
the end of the interpreter, more than 20 s of the processor, more than 2 GiB beyond the
start, an import or a process that data ask for. Inputs that once were findings are in
tests/recorded/fuzz/failed and run first; `--case=N --keep=WHY` writes one. Exits with 1
if there is a finding.
"""

import argparse
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

FAILED = ROOT / "tests" / "recorded" / "fuzz" / "failed"
SECONDS = 20.0  # of the processor that an input may take
PATIENCE = 300.0  # seconds of the clock: others may have the processor
INPUTS_EACH = 1500  # of a worker, until a fresh one takes over

Outcome = dict[str, Any]


class Worker:
    """A process that runs inputs, begun anew where one has ended it."""

    COMMAND = (sys.executable, "-m", "fuzzing.worker")

    def __init__(self, scratch: Path) -> None:
        self._scratch, self._process, self._done = scratch, None, 0
        self._selector = selectors.DefaultSelector()
        paths = (str(ROOT / "benchmarks"), str(ROOT), os.environ.get("PYTHONPATH", ""))
        self._environment = os.environ | {
            "ACCO_FUZZ": str(scratch),
            "JAX_PLATFORMS": "cpu",
            "MALLOC_ARENA_MAX": "2",  # each arena reserves addresses, which are limited
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "RAYON_RS_NUM_CPUS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "TOKENIZERS_PARALLELISM": "false",
            "XLA_FLAGS": "",
        }

    def ask(self, request: dict[str, Any]) -> list[Any]:
        """Returns the answers to a request: a shown one's case, then the outcome."""
        self._start()
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        self._done += 1
        answers = []
        for _ in range(2 if request.get("show") else 1):
            line = self._line()
            answers.append(json.loads(line) if line else self._ended())
        if self._done >= INPUTS_EACH:
            self.close()
        return answers

    def _start(self) -> None:
        if self._process is not None:
            return
        self._process = subprocess.Popen(
            self.COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._environment,
            text=True,
        )
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        self._done = 0
        if self._line() != "ready\n":
            said = (self._scratch / "messages.txt").read_text(errors="replace")
            raise RuntimeError(f"no worker starts: {said[:6000]}")

    def _line(self) -> str:
        """Returns the next line; "" if the process ends or takes too long."""
        begin, used = time.monotonic(), self._seconds()
        while not self._selector.select(1.0):
            late = time.monotonic() - begin > PATIENCE
            if late or self._seconds() - used > SECONDS:
                return ""
        return self._process.stdout.readline()

    def _seconds(self) -> float:
        """Returns how long the process has had a processor."""
        try:
            text = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return 0.0
        fields = text.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _ended(self) -> Outcome:
        """Says how the process ended, or ends it."""
        try:
            code = self._process.wait(2.0)
            problem = f"the interpreter ended with {code}"
        except subprocess.TimeoutExpired:
            problem = f"more than {SECONDS:.0f} s"
        self.close()
        said = (self._scratch / "messages.txt").read_text(errors="replace")
        return {"result": problem, "problem": problem, "trace": said[:6000],
                "memory": 0, "seconds": 0.0}  # fmt: skip

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._selector.unregister(self._process.stdout)
            self._process.kill()
            self._process.communicate()
            self._process = None


class Table:
    """What became of the inputs, by target."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, int]] = {}
        self.findings = 0

    def add(self, target: str, outcome: Outcome) -> None:
        """Counts an input."""
        row = self._rows.setdefault(
            target, dict.fromkeys(("accepted", "refused", "findings", "memory"), 0)
        )
        accepted = outcome["result"] == "accepted"
        kind = "accepted" if accepted else "refused"
        kind = "findings" if outcome["problem"] else kind
        row[kind] += 1
        self.findings += kind == "findings"
        row["memory"] = max(row["memory"], outcome["memory"])

    def __str__(self) -> str:
        head = ("target", "inputs", "accepted", "refused", "findings", "most memory")
        lines = [head, ("---",) * len(head)]
        for name, row in [*self._rows.items(), ("all", self._sum())]:
            numbers = [row[k] for k in ("accepted", "refused", "findings")]
            shown = f"{row['memory'] / 2**20:,.0f} MiB"
            lines.append((name, *map("{:,}".format, (sum(numbers), *numbers)), shown))
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def _sum(self) -> dict[str, int]:
        rows = list(self._rows.values())
        names = ("accepted", "refused", "findings")
        total = {name: sum(row[name] for row in rows) for name in names}
        return total | {"memory": max((row["memory"] for row in rows), default=0)}


def requests(shares: dict[str, int], inputs: int, seed: int) -> list[dict[str, Any]]:
    """Returns what to run: the inputs that were kept, the valid ones, the mutated."""
    kept = [json.loads(path.read_text()) for path in sorted(FAILED.glob("*.json"))]
    asked = [r | {"number": "kept"} for r in kept if r["target"] in shares]
    total = sum(shares.values())
    for name, share in shares.items():
        count = round(inputs * share / total)
        numbers = [*range(-VALID.get(name, 1), 0), *range(max(count, 1))]
        asked += [{"target": name, "seed": seed, "number": n} for n in numbers]
    return asked


# How many valid inputs the targets have that have several.
VALID = {"flags": 3, "config": 3, "tokenizers": 3, "huggingface": 2, "tokens": 2}


def repeat(worker: Worker, args: argparse.Namespace) -> bool:
    """Runs one input and shows it; returns whether it is no finding."""
    request = {"target": args.target, "seed": args.seed, "number": args.case}
    case, outcome = worker.ask(request | {"show": True})
    print(json.dumps(case)[:20_000])
    print(json.dumps(outcome, indent=2).replace("\\n", "\n"))
    if args.keep:
        FAILED.mkdir(parents=True, exist_ok=True)
        kept = {"target": args.target, "why": args.keep, "case": case}
        path = FAILED / f"{args.target}-{args.seed}-{args.case}.json"
        path.write_text(json.dumps(kept, indent=1) + "\n")
    return outcome["problem"] is None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", help="only this one")
    parser.add_argument("--case", type=int, help="only this number of the target")
    parser.add_argument("--keep", help="write that case to the corpus, and why")
    args = parser.parse_args()
    if args.target not in (None, *SHARES) or (
        args.case is not None and not args.target
    ):
        parser.error(f"--target is one of {', '.join(SHARES)}")
    shares = {k: v for k, v in SHARES.items() if args.target in (None, k)}
    table, begin = Table(), time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        worker = Worker(Path(scratch))
        try:
            if args.case is not None:
                sys.exit(0 if repeat(worker, args) else 1)
            for request in requests(shares, args.inputs, args.seed):
                (outcome,) = worker.ask(request)
                table.add(request["target"], outcome)
                if outcome["problem"]:
                    report(request, outcome)
        finally:
            worker.close()
    print(table)
    print(f"{time.monotonic() - begin:.0f} s", file=sys.stderr)
    sys.exit(1 if table.findings else 0)


def report(request: dict[str, Any], outcome: Outcome) -> None:
    """Shows a finding."""
    which = f"--seed={request.get('seed')} --target={request['target']}"
    print(f"FINDING {which} --case={request['number']}: {outcome['problem']}")
    print(f"  {outcome['result'][:500]}")
    print(
        "    " + "\n    ".join(outcome["trace"].strip().splitlines()[-8:]), flush=True
    )


# name of a target -> its share of the inputs
SHARES = {
    "flags": 14, "config": 14, "metrics": 6, "goodput": 6, "counts": 5, "worlds": 5,
    "workdir": 8, "checkpoints": 4, "tokenizers": 12, "sentencepiece": 5, "bpe": 4,
    "text_folder": 3, "jsonl": 5, "parquet": 7, "huggingface": 7, "tfds": 6,
    "tokens": 6,
}  # fmt: skip

if __name__ == "__main__":
    main()
