"""Two paths of a new user, timed step by step, from a fresh clone in a new environment.

    python benchmarks/first_minutes.py [--source=REPOSITORY]

Clones the repository into a new folder and installs it. The first path has the commands
of README.md and the site's front page, in that order; the second one the user's own
texts, tokenizer and model, tuned with adapters. Writes docs/first-ten-minutes.md. The
commands are FIRST and OWN; one that fails ends it. Packages come from pip's configured
index and its cache. `--cold` gives pip an empty cache.
"""

import argparse
import dataclasses
import os
import platform
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
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


INSTALL = Step("Install", "make setup", "an environment in `.venv`")
FIRST = (
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
TRAIN = f".venv/bin/python -m acco_jax.train {CONFIG}"
OWN_DATA = "--config.data.name=jsonl --config.data.path=texts.jsonl"
WRITE_TEXTS = """.venv/bin/python - <<'END'
import json, pathlib
texts = [p.read_text() for p in sorted(pathlib.Path("docs/site").rglob("*.md"))]
parts = [part for text in texts for part in text.split("\\n\\n")]
lines = [json.dumps({"text": part}) for part in parts]
pathlib.Path("texts.jsonl").write_text("\\n".join(lines))
END"""
OWN = (
    Step("Write texts as JSON lines", WRITE_TEXTS, "a document a line"),
    Step(
        "Train a Llama and a tokenizer on them",
        f"{TRAIN} {OWN_DATA} --config.data.tokenizer=bpe --config.data.vocab_size=1024 "
        "--config.model.family=llama --config.steps=150 --workdir=runs/base",
        "held-out loss beside a bigram's",
    ),
    Step(
        "Export it",
        ".venv/bin/python -m acco_jax.export --workdir=runs/base --out=base",
        "a Hugging Face folder",
    ),
    Step(
        "Tune that folder with adapters",
        f"{TRAIN} {OWN_DATA} --config.init_from=base --config.data.tokenizer=init_from "
        "--config.lora.rank=8 --config.steps=50 --workdir=runs/adapters",
        "only adapters are trained and sent",
    ),
    Step(
        "Export the tuned model",
        ".venv/bin/python -m acco_jax.export --workdir=runs/adapters --out=tuned",
        "a Hugging Face folder, adapters merged",
    ),
    Step(
        "Read it back",
        ".venv/bin/python -m acco_jax.evaluate --model=tuned --file=README.md > folder "
        "&& .venv/bin/python -m acco_jax.evaluate --workdir=runs/adapters "
        "--file=README.md > run && cat folder && diff folder run",
        "the folder and the run have the same loss",
    ),
)

TEXT = """# The first ten minutes

    python benchmarks/first_minutes.py

times two paths of a new user, step by step, in a fresh clone and a new environment. It
writes this page. The machine: {machine}.

## The commands of the front page

{first}

## Texts, tokenizer and model of one's own

The texts are the pages of this site, a paragraph a document.

{own}

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


def path(
    steps: Sequence[Step], before: Sequence[tuple[Step, float]], folder: Path, env: dict
) -> str:
    """Runs the steps in the clone; returns the path's table and its commands."""
    taken = [*before, *((step, timed(step, folder, env)) for step in steps)]
    lines = ["| | step | seconds | since the start | what it shows |"]
    lines.append("|---|---|---|---|---|")
    total = 0.0
    for k, (step, seconds) in enumerate(taken, 1):
        total += seconds
        lines.append(
            f"| {k} | {step.title} | {seconds:.0f} | {clock(total)} | {step.seen} |"
        )
    commands = "\n".join(step.command for step, _ in taken[1:])
    return "\n".join([*lines, "", textwrap.indent(commands, "    ")])


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
        env = os.environ | {"ACCO_DATA_DIR": f"{parent}/data"}
        if args.cold:
            env["PIP_CACHE_DIR"] = f"{parent}/pip"
        before = [(clone, timed(clone, Path(parent), env))]
        before.append((INSTALL, timed(INSTALL, folder, env)))
        first, own = (path(steps, before, folder, env) for steps in (FIRST, OWN))
    cached = "an empty pip cache" if args.cold else "packages from pip's cache"
    OUT.write_text(
        TEXT.format(
            machine=f"{machine()}, {cached}",
            first=first,
            own=own,
            questions=asked,
        )
    )


if __name__ == "__main__":
    main()
