"""What can be measured on one borrowed GPU, in eight minutes.

    python benchmarks/one_gpu.py --out=experiments/results/one_gpu
    python benchmarks/one_gpu.py --quick --out=/tmp/one_gpu  # a rehearsal on a CPU

It writes OUT.json after each part, and OUT.md. The parts are:

    calibration  figures as `python -m acco_jax.plan --calibrate` measures them
    steps        the acco step on one device beside a loop written by hand with optax
                 (overhead.py): tokens/s, model FLOPs utilization, peak memory, seconds
                 to compile, and the interval that plan predicts for the half-round
    correctness  attention kernels and the chunked loss beside naive ones
    schedule     the step's schedule, compiled here, read by acco_jax.audit; the step
                 of 4 x 8 such devices likewise
    end_to_end   acco_jax.train: the loss falls, and a resumed run has the same bits

Each part, and each combination of `steps`, is a process of its own. One that fails or
lasts too long becomes a row with the reason. Steps run as long as there is time, the
most important first. Loops take turns within a repetition; ratios are medians over
repetitions. Peak memory is `device.memory_stats()`'s, of the process: the hand-written
loop runs first, so that "<=" marks a second loop that needed less. Program memory is
the compiler's. Compile seconds of later rows reuse earlier rows' autotuning.

On a machine without a network, carry the wheel of ml_collections, without which
calibration, predictions and acco_jax.train are rows that name it. acco_jax.train also
needs those of tensorflow-datasets and of what it requires (`pip show`):

    python3 -m pip download --no-deps -d .whl ml_collections tensorflow-datasets ...
    python3 -m pip install --no-index --no-deps --target /tmp/site .whl/*.whl
    PYTHONUNBUFFERED=1 PYTHONPATH=$PWD:/tmp/site \\
        timeout 480 python3 benchmarks/one_gpu.py --out=$OUT/one_gpu

Tolerances of the largest error, relative to the naive result's largest entry: 5e-3 in
float32 on a GPU, whose kernels multiply in TF32, and 1e-5 on a CPU; 2e-2 in bfloat16;
1e-5 for the loss, whose products are in float32.

Goals: at least 55 % model FLOPs utilization with 124M parameters, every half-round
inside its predicted interval, every error within its tolerance.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
from benchmarks import one_gpu_parts  # noqa: E402
from benchmarks.one_gpu_parts import COMBINATIONS, QUICK, line  # noqa: E402
from benchmarks.one_gpu_table import Report, goals, table  # noqa: E402

PARTS = ("calibration", "steps", "correctness", "schedule", "end_to_end")


@dataclasses.dataclass(frozen=True)
class Job:
    """A part, or a combination of `steps`, in a process of its own."""

    part: str
    limit: float  # seconds, at most
    combination: int | None = None


def jobs(quick: bool) -> list[Job]:
    """Return all jobs, in the order in which a budget is spent."""
    steps = [Job("steps", 90, i) for i in range(len(QUICK if quick else COMBINATIONS))]
    return [
        Job("calibration", 120), *steps[:1], Job("correctness", 80), *steps[1:3],
        Job("schedule", 80), Job("end_to_end", 90), *steps[3:],
    ]  # fmt: skip


# ---- processes


def child(args: argparse.Namespace) -> None:
    """Run one job; its result goes to a file."""
    import jax

    result: Report = {}

    def keep(found: Report) -> None:
        result["found"] = found
        write(args.result, result)

    try:
        if args.fail == args.job:
            raise RuntimeError("forced to fail")
        device = jax.devices()[0]
        kind, stats = device.device_kind, device.memory_stats() or {}
        result["device"] = {"kind": kind, "jax": jax.__version__}
        result["device"]["bytes_limit"] = stats.get("bytes_limit")
        options: Report = {}
        if args.job == "steps":
            options = {"combination": args.combination, "figures": figures(args.out)}
        keep(getattr(one_gpu_parts, args.job)(args.quick, keep, **options))
    except Exception as error:
        result["error"] = line(error)
        write(args.result, result)


def figures(out: Path) -> Report:
    """Return the calibrated figures that are measured already; ranges are pairs."""
    try:
        report = json.loads(out.with_suffix(".json").read_text())
        found = report["parts"]["calibration"]["figures"]
    except (OSError, KeyError):
        return {}
    return {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}


def write(file: Path, report: Report) -> None:
    """Write JSON to a file, whole or not at all."""
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(report, indent=1, default=str) + "\n")
    part.replace(file)


def run_job(job: Job, args: argparse.Namespace, folder: Path, seconds: float) -> Report:
    """Run a job in a process of its own; return what it found, and why no more."""
    result, log = folder / "result.json", folder / "stderr"
    result.unlink(missing_ok=True)
    command = [sys.executable, __file__, f"--job={job.part}", f"--result={result}"]
    command += [f"--out={args.out}", f"--fail={args.fail}"]
    command += ["--quick"] if args.quick else []
    if job.combination is not None:
        command.append(f"--combination={job.combination}")
    environment = {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    } | os.environ
    if job.part == "end_to_end":  # atomics would add in any order
        flags = environment.get("XLA_FLAGS", "")
        environment["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true".strip()
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    why = None
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, env=environment, stderr=errors, start_new_session=True
        )
        try:
            if code := process.wait(seconds):
                said = log.read_text().strip().splitlines() or [""]
                why = f"ended with {code}: {said[-1][:200]}"
        except subprocess.TimeoutExpired:
            why = f"stopped after {seconds:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found = json.loads(result.read_text()) if result.exists() else {}
    return found | ({"error": why} if why else {})


def measured(args: argparse.Namespace) -> Iterator[Report]:
    """Yield the report after each job."""
    start = time.monotonic()
    report: Report = {
        "command": f"python benchmarks/one_gpu.py{' --quick' if args.quick else ''}",
        "python": platform.python_version(),
        "device": {},
        "quick": args.quick,
        "seconds": 0.0,
        "goals": {},
        "parts": {},
        "jobs": [],
    }
    parts = report["parts"]
    with tempfile.TemporaryDirectory() as folder:
        for job in jobs(args.quick):
            if job.part not in args.parts.split(","):
                continue
            began = time.monotonic()
            left = args.seconds - (began - start)
            if left < 10:
                found: Report = {"error": "not run: no time was left"}
            else:
                limit = left if args.quick else min(left, job.limit)
                found = run_job(job, args, Path(folder), limit)
            result = found.get("found", {})
            if "error" in found:
                result = result | {"error": found["error"]}
                name = (
                    job.part if job.combination is None else f"steps {job.combination}"
                )
                print(f"{name}: {found['error']}", flush=True)
            if job.combination is None:
                parts[job.part] = result
            else:
                chosen = (QUICK if args.quick else COMBINATIONS)[job.combination]
                parts.setdefault("steps", []).append(
                    dataclasses.asdict(chosen) | result
                )
            report["device"] = found.get("device") or report["device"]
            now = time.monotonic()
            taken = {"part": job.part, "combination": job.combination}
            report["jobs"].append(taken | {"seconds": now - began})
            report["seconds"], report["goals"] = now - start, goals(parts)
            yield report


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flag = parser.add_argument
    out = ROOT / "experiments" / "results" / "one_gpu"
    flag("--out", type=Path, default=out, help="of .json and .md")
    flag("--seconds", type=float, default=450.0, help="for all of it; default 450")
    flag("--quick", action="store_true", help="a tiny model, a rehearsal")
    flag("--parts", default=",".join(PARTS), help="to run, and no others")
    flag("--fail", choices=("", *PARTS), default="", help="a part that is to fail")
    flag("--job", choices=PARTS, help=argparse.SUPPRESS)
    flag("--combination", type=int, help=argparse.SUPPRESS)
    flag("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.job:
        child(args)
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the job, too
    for report in measured(args):
        write(args.out.with_suffix(".json"), report)
        args.out.with_suffix(".md").write_text(table(report))
    for goal, reached in report["goals"].items():
        print(f"{goal}: {reached}")
    print(f"{args.out.with_suffix('.json')}, {report['seconds']:.0f} s")


if __name__ == "__main__":
    main()
