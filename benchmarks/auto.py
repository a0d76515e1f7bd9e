"""What `method='auto'` takes on links of several speeds, and what it should have taken.

    python benchmarks/auto.py --out=experiments/results/auto.jsonl [--repeats=3]
    python benchmarks/auto.py --table=experiments/results/auto.jsonl

For each rate `compare --network` trains experiments/quickstart.py in two CPU processes
(root, Linux) with zero1, acco, acco in 8 bits both ways, and auto. A line of OUT is one
method at one rate in one repetition, with its tokens/s, the seconds that its gradients
take, and auto's choice. What OUT has is not run again. The table has medians of ratios
within a repetition.
"""

import argparse
import csv
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
METHODS = ("zero1", "acco", "acco(gather_bits=8,reduce_bits=8)", "auto")
RATES = (800, 320, 160, 80, 40, 20)  # Mbit/s
FIELDS = {"steps": 30, "eval_every": 30, "eval_batches": 1, "log_every": 2,
          "devices": 1, "microbatch_size": 8, "checkpoint_every": 1000,
          "compare_replicas_every": 0, "data.held_out": 0.001}  # fmt: skip
BYTES = 4 * 445_312  # of zero1's step, which each of two processes sends and receives


def compared(rate: int, seed: int) -> list[dict]:
    """Returns a row for each method, trained on a link of `rate` Mbit/s."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "acco_jax.compare", f"--workdir={folder}",
            f"--config={ROOT / 'experiments' / 'quickstart.py'}", "--seeds=1",
            f"--methods={','.join(METHODS)}", f"--network={rate}mbit",
            *(f"--config.{name}={value}" for name, value in FIELDS.items()),
            f"--config.seed={seed}",
        ]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr[-2000:])
        text = pathlib.Path(folder, "results.csv").read_text()
        results = csv.DictReader(text.splitlines())
        tokens_per_second = {
            row["method"]: float(row["tokens_per_second"]) for row in results
        }
        rows = []
        for name, speed in tokens_per_second.items():
            (path,) = pathlib.Path(folder).glob(f"{re.sub(r'[(),=]', '*', name)}/seed*")
            config = json.loads((path / "config.json").read_text())
            summary = json.loads((path / "summary.json").read_text())
            world = json.loads((path / "worlds.jsonl").read_text().splitlines()[-1])
            rows.append({
                "rate": rate, "seed": seed, "name": name, "tokens_per_second": speed,
                "method": config["method"], "options": config["method_options"],
                "first_half": world["first_half"],
                "gradient_seconds_per_token": summary["gradient_seconds_per_token"],
            })  # fmt: skip
        return rows


def table(rows: list[dict]) -> str:
    """Returns Markdown: at each rate auto's tokens/s over the best and the worst."""
    lines = [
        "| Mbit/s | zero1's communication / computation | tokens/s of zero1 | acco | "
        "acco, 8 bits | auto | of the best | of the worst | auto took |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for rate in sorted({r["rate"] for r in rows}, reverse=True):
        here = [r for r in rows if r["rate"] == rate]
        runs: dict[int, dict[str, dict]] = {}
        for r in here:
            runs.setdefault(r["seed"], {})[r["name"]] = r
        speeds = [{n: r["tokens_per_second"] for n, r in x.items()} for x in
                  runs.values()]  # fmt: skip
        median = {n: statistics.median(s[n] for s in speeds) for n in METHODS}
        found = [[s[n] for n in METHODS[:-1]] for s in speeds]
        auto = [s["auto"] for s in speeds]
        best = statistics.median(a / max(x) for a, x in zip(auto, found, strict=True))
        worst = statistics.median(a / min(x) for a, x in zip(auto, found, strict=True))
        seconds = statistics.median(
            r["gradient_seconds_per_token"] for r in here if r["name"] == "zero1"
        )
        computing = seconds * FIELDS["microbatch_size"] * 4 * 2 * 128
        took = {
            f"{r['method']}{', 8 bits' * bool(r['options'])}"
            f"{', first half ' + str(r['first_half']) if r['first_half'] else ''}"
            for r in here if r["name"] == "auto"
        }  # fmt: skip
        lines.append(
            f"| {rate} | {BYTES * 8 / rate / 1e6 / computing:.2f} | "
            + " | ".join(f"{median[n]:,.0f}" for n in METHODS)
            + f" | {best:.2f} | {worst:.2f} | {'; '.join(sorted(took))} |"
        )
    return "\n".join(lines)


def done(out: pathlib.Path) -> list[dict]:
    if not out.exists():
        return []
    return [json.loads(line) for line in out.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("auto.jsonl"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--table", type=pathlib.Path, help="print the table of this")
    args = parser.parse_args()
    if args.table:
        print(table(done(args.table)))
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    known = {(r["rate"], r["seed"]) for r in done(args.out)}
    for seed in range(args.repeats):
        for rate in RATES:
            if (rate, seed) in known:
                continue
            rows = compared(rate, seed)
            with args.out.open("a") as lines:
                lines.writelines(json.dumps(row) + "\n" for row in rows)
            print(f"{rate} Mbit/s, seed {seed}: {rows[-1]}", flush=True)


if __name__ == "__main__":
    main()
