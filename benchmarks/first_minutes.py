"""A new user's path, timed step by step, from a fresh clone in a new environment.

    python benchmarks/first_minutes.py [--source=REPOSITORY]

Clones the repository into a new folder and runs the commands of README.md and the
site's front page, in that order. Writes docs/first-ten-minutes.md. The commands are
STEPS; one that fails ends it. Packages come from pip's configured index and its cache.
`--cold` gives pip an empty cache.
"""

import argparse
import dataclasses
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "first-ten-minutes.md"
CONFIG = "--config=experiments/quickstart.py"
QUESTIONS = (
    ("Does it work with Muon?", "howto/optimizers.md", "muon"),
    ("And a WSD schedule?", "howto/optimizers.md", "wsd"),
    ("Weights & Biases?", "howto/metrics.md", "wandb_project"),
    ("Two hosts?", "howto/clusters.md", "--coordinator"),
    ("Fewer GPUs after a restart?", "howto/devices.md", "--min_processes"),
    ("FSDP?", "howto/fsdp.md", "fsdp"),
    ("How much memory?", "memory.md", "bytes"),
    ("How many microbatches?", "microbatches.md", "microbatches"),
    ("Where does the time go?", "profiling.md", "--config.profile"),
    ("Unequal workers?", "microbatches.md", "counts"),
    ("How is it evaluated?", "howto/evaluate.md", "acco_jax.evaluate"),
    ("Can it write?", "howto/evaluate.md", "acco_jax.generate"),
    ("Which method?", "methods.md", "zero1"),
    ("LoRA?", "howto/lora.md", "lora.rank"),
    ("My own data?", "howto/data.md", "text_folder"),
)


@dataclasses.dataclass(frozen=True)
class Step:
    """Something that a newcomer does."""

    title: str
    command: str
    seen: str  # what it shows


STEPS = (
    Step("Install", "make setup", "an environment in `.venv`"),
    Step(
        "Look at the machine",
        ".venv/bin/python -m acco_jax.doctor",
        "devices, the execution that would be chosen, each problem with its remedy",
    ),
    Step(
        "Train",
        "make train",
        "falling losses, and the held-out loss beside a smoothed bigram's",
    ),
    Step(
        "Generate text",
        f"{'.venv/bin/python -m acco_jax.generate'} --workdir=runs/quickstart "
        "--prompt='def mean(' --tokens=100",
        "a hundred bytes that look like Python",
    ),
    Step(
        "Look at the run",
        ".venv/bin/python -m acco_jax.report runs/quickstart --out=report.html",
        "one page: curves, throughput, communication, faults",
    ),
    Step(
        "Compare with ZeRO-1",
        f".venv/bin/python -m acco_jax.compare {CONFIG} --methods=acco,zero1 "
        "--seeds=1 --workdir=runs/methods --config.steps=100 --config.eval_every=25",
        "losses, times and bytes of both, and what each column means",
    ),
    Step(
        "Install the compilers for target hardware",
        ".venv/bin/pip install -q -e '.[plan]' -c requirements.txt",
        "nothing",
    ),
    Step(
        "Plan for 64 H100",
        ".venv/bin/python -m acco_jax.plan --config=experiments/openwebtext_125m.py "
        "--topology=gpu:h100:8x8 --nofit",
        "how much communication a compiled schedule overlaps, and the step's time",
    ),
)

TEXT = """# The first ten minutes

    python benchmarks/first_minutes.py

times a new user's path, step by step, in a fresh clone and a new environment. It writes
this page. The machine: {machine}.

| | step | seconds | since the start | what it shows |
|---|---|---|---|---|
{rows}

The commands:

{commands}

## Fifteen questions, one click from the front page

The table on the [front page](site/index.md) links to each of these pages. The script
checked that each page has the word.

| question | page | word |
|---|---|---|
{questions}
"""


def clock(seconds: float) -> str:
    return f"{int(seconds // 60)}:{int(seconds % 60):02}"


def timed(step: Step, folder: Path, environment: dict[str, str]) -> float:
    """Runs a step in the clone; its seconds."""
    began = time.perf_counter()
    done = subprocess.run(
        ["bash", "-c", step.command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{step.title} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    seconds = time.perf_counter() - began
    print(f"{step.title}: {seconds:.0f} s", flush=True)
    print("    " + "\n    ".join(done.stdout.strip().splitlines()[-8:]), flush=True)
    return seconds


def questions() -> str:
    """Returns the table of questions; each page must be linked and have its word."""
    front = (ROOT / "docs" / "site" / "index.md").read_text()
    rows = []
    for question, page, word in QUESTIONS:
        if f"({page})" not in front:
            sys.exit(f"the front page does not link to {page}: {question}")
        if word not in (ROOT / "docs" / "site" / page).read_text():
            sys.exit(f"{page} does not say {word!r}: {question}")
        rows.append(f"| {question} | [{page}](site/{page}) | `{word}` |")
    return "\n".join(rows)


def machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{os.cpu_count()} CPU cores, {memory:.0f} GiB, no accelerator, Python "
        f"{platform.python_version()}, jax {metadata.version('jax')}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", default=str(ROOT), help="what is cloned")
    parser.add_argument("--cold", action="store_true", help="an empty cache of pip")
    args = parser.parse_args()
    asked = questions()
    with tempfile.TemporaryDirectory(prefix="first_minutes-") as parent:
        folder = Path(parent) / "acco-jax"
        clone = Step("Clone", f"git clone -q {args.source} {folder}", "the checkout")
        environment = os.environ | {"ACCO_DATA_DIR": f"{parent}/data"}
        if args.cold:
            environment["PIP_CACHE_DIR"] = f"{parent}/pip"
        total, rows = 0.0, []
        for k, step in enumerate((clone, *STEPS)):
            seconds = timed(step, folder if k else Path(parent), environment)
            total += seconds
            rows.append(
                f"| {k + 1} | {step.title} | {seconds:.0f} | {clock(total)} | "
                f"{step.seen} |"
            )
    cached = "an empty pip cache" if args.cold else "packages from pip's cache"
    OUT.write_text(
        TEXT.format(
            machine=f"{machine()}, {cached}",
            rows="\n".join(rows),
            commands="\n".join(f"    {step.command}" for step in STEPS),
            questions=asked,
        )
    )


if __name__ == "__main__":
    main()
