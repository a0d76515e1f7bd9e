"""What is overlapped in train steps of others and of this library, not run.

    python benchmarks/audit_matrix.py --texts=DIR [--programs=plain_dp,fsdp,acco]
        [--machines=gpu:h100:4x8,tpu:v5e:4x4] [--seconds=300] [--out=FILE.md]

Compiles each program of benchmarks/foreign.py and this library's acco, zero1 and
fused_zero1 (the same sizes: a decoder of 8 layers of width 2,048, 4 rows of 2,048
tokens, 4 microbatches an optimizer step) for each machine, one process at a time, and
audits the texts, which it keeps in DIR, in a folder named by JAX's version: what is
there already is not compiled again. Nothing is run; it needs the compilers, `pip
install 'acco-jax[plan,train]'`. Call it from an environment with another JAX, or with
another library, with the same DIR: peft_trainer needs google-tunix 0.1.7; levanter_step
needs marin-levanter, which goes with `acco-jax[plan]`, flax and ml-collections alone.
Several calls at once, for different machines, do not disturb each other. --seconds=0
compiles nothing more. The page holds GPUs with two versions of JAX and TPUs with the
newest.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

from acco_jax import audit  # noqa: E402
from acco_jax.methods import METHODS  # noqa: E402
from acco_jax.models import transformer  # noqa: E402
from acco_jax.plan import programs  # noqa: E402
from acco_jax.schedule import schedules, topologies  # noqa: E402
from acco_jax.schedule.verdict import percent  # noqa: E402
from benchmarks import foreign  # noqa: E402

FOREIGN = {
    "plain_dp": "benchmarks.foreign",
    "dp_accumulation": "benchmarks.foreign",
    "fsdp": "benchmarks.foreign",
    "fsdp_accumulation": "benchmarks.foreign",
    "fsdp_fine_remat": "benchmarks.foreign",
    "peft_trainer": "benchmarks.foreign_tunix",
    "levanter_step": "benchmarks.foreign_levanter",
}
OWN = ("acco", "zero1", "fused_zero1")
MACHINES = ("gpu:h100:4x8", "gpu:h200:4x8", "tpu:v5e:4x4", "tpu:v6e:4x4")
MODEL = transformer.Config(
    vocab_size=foreign.VOCABULARY,
    max_length=foreign.LENGTH,
    width=foreign.WIDTH,
    layers=foreign.LAYERS,
    scan_layers=True,
    heads=foreign.WIDTH // foreign.HEAD,
    pattern=("global",),
    dtype=jnp.bfloat16,
    param_dtype=jnp.bfloat16,
)


HEAD = """# What is overlapped in train steps of others, and in this library's

    python benchmarks/audit_matrix.py --texts=DIR --out=experiments/results/audit.md

Nothing here was run: every row is a program compiled for machines that are not here;
there is a table for each version of JAX. `MiB` are the bytes of the full buffers, all
collectives of an optimizer step: acco's half-round counts twice. `bytes overlapped` is
READ from the schedule: the share with matrix products between launch and end.
Milliseconds and `seconds overlapped` are PREDICTED, at the middle of the figures'
ranges (`acco_jax/schedule/chips.py`), for the network that the table names. The lesser
of both shares is the verdict of `--require-hidden`. It proves the schedule. It does not
prove that the network keeps up beside computation.

The programs are those of benchmarks/foreign.py (a decoder of 470M parameters in
bfloat16, 8 scanned layers, 4 rows of 2,048 tokens a device; the accumulating ones, and
this library's methods, 4 microbatches of them an optimizer step),
benchmarks/foreign_tunix.py (google-tunix's PeftTrainer, unmodified, on two layers of
Llama 3.2 1B), benchmarks/foreign_levanter.py (Levanter's Trainer, unmodified, on its
Llama model with the sizes of Llama 3.2 1B), and a model of the same sizes as the first
with this library's methods. Others' are compiled with the compiler's own settings, this
library's with `acco_jax.compiler_options`. GPU rows are of two versions of JAX, TPU
rows of the newer one. Levanter asks for jax below 0.12. Compile times are those of a
busy machine.

"""
NOTES = """## Known issues, from the schedules alone

- Fine-grained rematerialization exposes collectives (openxla/xla#14397):
  `fsdp_fine_remat` sends the same bytes as `fsdp` and overlaps fewer of them; its
  reductions over "data" have nothing beside them any more, and one of the backward
  pass's all-gathers.
- Gradients are reduced in every microbatch (AI-Hypercomputer/maxtext#5099): the
  accumulating programs send about four times the bytes of the others. This library
  reduces once an optimizer step, acco once a half-round, whatever the number of
  microbatches.
"""


def own(method: str, devices: Sequence[Any]) -> programs.Program:
    """Describes a half-round of a method; every step has the same tokens."""
    tx = METHODS[method](optax.adamw(3e-4), mesh=Mesh(np.array(devices), ("data",)))
    return programs.assemble(
        method,
        tx,
        transformer.loss_fn(MODEL),
        jax.eval_shape(lambda: transformer.init_params(MODEL, jax.random.key(0))),
        microbatches=foreign.MICROBATCHES // tx.calls_per_step,
        microbatch=(foreign.ROWS, foreign.LENGTH + 1),
    )


Cell = tuple[str, str, pathlib.Path]  # program, machine, file of its text


def cells_of(folder: pathlib.Path, options: argparse.Namespace) -> list[Cell]:
    """Returns the cells that are asked for, whose texts one folder has or will have."""
    return [
        (program, machine, folder / f"{program}@{machine.replace(':', '_')}.gz")
        for machine in options.machines.split(",")
        for program in options.programs.split(",")
    ]


def known(file: pathlib.Path) -> bool:
    """Whether a cell was compiled, or tried."""
    return file.exists() or file.with_suffix(".error").exists()


def compile_cell(program: str, machine: str, file: pathlib.Path) -> None:
    """Compiles a program and writes its text, its mesh and its loops' trips."""
    devices = audit.devices(machine)
    start, iterations = time.perf_counter(), {}
    if program in OWN:
        described = own(program, devices)
        compiled = described.compile()
        text, mesh = compiled.text, described.mesh
        known = {x.name: x.iterations for x in compiled.schedule.loops}
        open_ends = (x for x in schedules.read(text).loops if x.iterations is None)
        iterations = {x.name: known[x.name] for x in open_ends}
    else:
        module = importlib.import_module(FOREIGN[program])
        step, arguments = getattr(module, program)(devices)
        text = step.lower(*arguments).compile().as_text()
        mesh = audit.axes.mesh_of(arguments)
    seconds = time.perf_counter() - start
    facts = {"mesh": dict(mesh.shape), "iterations": iterations, "seconds": seconds}
    file.with_suffix(".json").write_text(json.dumps(facts))
    file.write_bytes(gzip.compress(text.encode(), 6, mtime=0))


def read_cell(machine: str, file: pathlib.Path) -> tuple[audit.Audit, float]:
    facts = json.loads(file.with_suffix(".json").read_text())
    text = gzip.decompress(file.read_bytes()).decode()
    found = audit.audit(
        text,
        topology=machine,
        mesh=facts["mesh"],
        trip_counts=facts["iterations"] or None,
    )
    return found, facts["seconds"]


def row(program: str, machine: str, file: pathlib.Path) -> str:
    if not file.exists():
        why = file.with_suffix(".error")
        return f"| {program} | {machine} | {why.read_text().strip()} | | | | | | | |"
    result, seconds = read_cell(machine, file)
    whole, p = result.verdict(), result.prediction
    calls = 2 if program == "acco" else 1  # half-rounds of an optimizer step
    worst = whole.objections[:1]
    cause = f"{worst[0].collective.kind}: {worst[0].cause.text}" if worst else ""
    return (
        f"| {program} | {machine}, {whole.network} | "
        f"{calls * whole.exposed * 1e3:,.1f} | {percent(whole.hidden_share)} | "
        f"{percent(whole.covered_share)} | {calls * p.total * 1e3:,.1f} | "
        f"{calls * whole.seconds * 1e3:,.1f} | {calls * whole.bytes / 2**20:,.0f} | "
        f"{seconds:.0f} | {cause} |"
    )


def table(cells: Sequence[Cell]) -> str:
    head = (
        "| program | machine | exposed, ms a step | bytes overlapped (READ) | "
        "seconds overlapped (PREDICTED) | step, ms | communication, ms | MiB | "
        "compiled in, s | likely cause of the most exposed |\n"
        "|---|---|---|---|---|---|---|---|---|---|"
    )
    return "\n".join([head, *(row(*cell) for cell in cells)])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--texts", type=pathlib.Path, required=True)
    parser.add_argument("--programs", default=",".join([*FOREIGN, *OWN]))
    parser.add_argument("--machines", default=",".join(MACHINES))
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--cell", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    topologies.use_cpu()
    folder = options.texts / jax.__version__
    folder.mkdir(parents=True, exist_ok=True)
    cells = cells_of(folder, options)
    if options.cell:
        compile_cell(*cells[0])
        return
    for program, machine, file in cells:
        if known(file) or not options.seconds:
            continue
        arguments = [f"--programs={program}", f"--machines={machine}", "--cell"]
        print(f"compiling {program} for {machine}", flush=True)
        try:
            ended = subprocess.run(
                [sys.executable, __file__, f"--texts={options.texts}", *arguments],
                timeout=options.seconds, capture_output=True, text=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            reason = f"not compiled in {options.seconds} s"
            file.with_suffix(".error").write_text(reason)
            continue
        if ended.returncode:
            lines = ended.stderr.strip().splitlines()
            file.with_suffix(".error").write_text(programs.what_it_needs(lines[-1]))
    text = ""
    for place in sorted(options.texts.iterdir()):
        done = [c for c in cells_of(place, options) if known(c[2])]
        if done:
            text += f"## jax {place.name}\n\n{table(done)}\n\n"
    print(text)
    if options.out:
        options.out.write_text(f"{HEAD}{text}{NOTES}")


if __name__ == "__main__":
    main()
