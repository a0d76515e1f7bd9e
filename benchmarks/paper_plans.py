"""Plans the paper's experiments for its machines, and for a TPU slice.

python benchmarks/paper_plans.py

Each of ROWS is one `python -m acco_jax.plan`, whose JSON is kept in .cache/plans and
not made again; all together write experiments/results/plans.md. A GPU's compiler takes
half a minute for a method, a TPU's up to six; nothing is run.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

from acco_jax.models import huggingface, transformer

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "plans"
OUT = ROOT / "experiments" / "results" / "plans.md"

# NVIDIA's data sheet of the H100 PCIe: dense bf16, HBM2e, PCIe 5.0 x16 one way.
PCIE = "--set=flops=756e12,memory_bandwidth=2.0e12,fast_bandwidth=64e9"
ALPACA_STEPS = round(3 * 0.98 * 52_002 / 128)  # epochs x training answers / rows


@dataclasses.dataclass(frozen=True)
class Row:
    """A plan, and what the paper measured on such machines."""

    name: str
    topology: str
    steps: int
    flags: tuple[str, ...] = ()
    paper: tuple[str, str] = ("-", "-")  # zero1, acco
    model: str = ""  # a size of transformer.SIZES, for init_from

    @property
    def file(self) -> Path:
        return CACHE / f"{self.name}-{self.topology.replace(':', '-')}.json"

    def command(self) -> list[str]:
        return [
            *("-m", "acco_jax.plan", f"--config=experiments/{self.name}.py"),
            *(f"--topology={self.topology}", "--nofit", *self.flags),
        ]


ROWS = (
    Row("tinystories_36m", "gpu:a100:1x8", 2000),
    Row("openwebtext_125m", "gpu:h100:1x8", 50_000, (PCIE,), ("4 h 41", "4 h 25")),
    Row(
        "alpaca_gptneo_2p7b", "gpu:a100:1x8", ALPACA_STEPS, (),
        ("43 min", "25 min"), "gpt-neo-2.7b",
    ),
    Row(
        "alpaca_gptneo_2p7b", "gpu:a100:2x4", ALPACA_STEPS, ("--network=2.5",),
        ("3 h 46", "29 min"), "gpt-neo-2.7b",
    ),
    Row("openwebtext_125m", "gpu:a100:4x8", 50_000, (), ("14 h 41", "10 h 55")),
    Row(
        "openwebtext_125m", "tpu:v5e:4x4", 50_000, ("--config.microbatch_size=12",)
    ),
    Row("alpaca_llama3_8b_lora", "gpu:a100:1x8", ALPACA_STEPS, model="llama-3-8b"),
)  # fmt: skip


def planned(row: Row) -> dict:
    """Returns a plan's JSON, compiled now if it was not."""
    if not row.file.exists():
        flags = [f"--json={row.file}", f"--out={CACHE / row.file.stem}"]
        if row.model:
            flags.append(f"--config.init_from={described(row.model)}")
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
        command = [sys.executable, *row.command(), *flags]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return json.loads(row.file.read_text())


def described(size: str) -> Path:
    """Returns a folder with a published model's config.json: a plan needs no more."""
    folder = CACHE / size
    folder.mkdir(parents=True, exist_ok=True)
    said = huggingface.config_json(transformer.size(size))
    (folder / "config.json").write_text(json.dumps(said))
    return folder


TEXT = """# The paper's experiments as `plan` predicts them

    python benchmarks/paper_plans.py

runs `python -m acco_jax.plan` with the flags below, and writes this file. Schedules are
read from programs that were compiled for these machines; times are predicted from
vendors' figures at 80 % of their peaks, for all steps of an experiment. Nothing was
run. The last column is what the paper measured.

| experiment | machine | | step | hidden | all steps | the paper |
|---|---|---|---|---|---|---|
{rows}

Computation alone, all communication left out, of as many microbatches: {alone}.

{findings}

Where the network is as fast as assumed, communication is a few percent of a step, and
hiding it wins no more than that. The paper's 14 h 41 and 10 h 55 differ by 0.27 s a
step, in which zero1 sends 0.48 GB through each link of a ring: some 14 Gbit/s a host,
far below the 8 x 200 assumed, if that was all.

On 2 x 4 A100 the network is what takes the time. A step of acco sends twice what one of
zero1 does, so that with the same few microbatches it is the slower of the two: {busy}
fit into the communication of one half-round. The paper's acco adds microbatches while
the network is busy, which takes it to 29 minutes in fewer and larger steps; here
`--config.microbatches=adaptive` does so, and computation alone is the least that
remains. What `plan` compiles has a fixed number of them.

On TPU v5e both collectives of acco are hidden, and its step has as many FLOPs as that
of zero1.

## What the predictions leave out

- Everything but steps: compiling, data, evaluations, checkpoints, restarts.
- Rows shorter than `length`: Alpaca's are padded to the longest of a batch, here to a
  step of data.lengths; the prediction has 512 targets in each. So its computation is
  too long, and its communication is not.
- Kernels slower than 80 % of a peak, the paper's in PyTorch and XLA's on the machine.
  Attention is compiled as this library's own kernel where cuDNN is not installed.
- Contention: communication takes memory bandwidth and, on GPUs, cores from the
  computation that hides it; a ring through several PCIe switches shares them.
- The paper's networks, of which it gives no figures: 200 Gbit/s per GPU, a DGX A100's,
  stand for the 4 x 8 A100, and 10 Gbit/s per host for the 2 x 4. The latter was chosen
  to come near the paper's 3 h 46 of zero1, so that this time tests nothing.

## Flags

{flags}
"""


def clock(seconds: float) -> str:
    """Returns a time as the paper writes it: '4 h 41', '43 min'."""
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02}" if minutes >= 60 else f"{minutes} min"


def machine(row: Row) -> str:
    pcie = ", PCIe" if PCIE in row.flags else ""
    slow = ", 10 Gbit/s a host" if "--network=2.5" in row.flags else ""
    return f"`{row.topology}`{pcie}{slow}"


def lines(row: Row, plan: dict) -> list[str]:
    """Returns a line of the table for each method."""
    predicted = {r["method"]: r for r in plan["predicted"]}
    return [
        f"| {row.name} | {machine(row)} | {method} | {p['step'] * 1e3:,.0f} ms | "
        f"{p['hidden']:.0%} | {clock(row.steps * p['step'])} | {paper} |"
        for method, paper in zip(("zero1", "acco"), row.paper, strict=True)
        for p in [predicted[method]]
    ]


def alone(row: Row, plan: dict) -> str:
    step = next(r for r in plan["predicted"] if r["method"] == "zero1")
    return f"{row.name} on {machine(row)} {clock(row.steps * step['computation'])}"


def findings(plans: dict[Row, dict]) -> str:
    """Returns a line per row: acco's gain, predicted and the paper's, and memory."""
    said = []
    for row, plan in plans.items():
        gain = {r["method"]: r["speedup"] for r in plan["predicted"]}
        memory = plan["methods"]["acco"]["memory"]
        needs = f"{memory['total'] / 2**30:.1f} of {memory['of'] / 2**30:.0f} GiB"
        said.append(
            f"- {row.name} on {machine(row)}: acco is {gain['acco']:.2f} times as fast "
            f"as zero1, and needs {needs} a device."
        )
    return "\n".join(said)


def busy(row: Row, plan: dict) -> int:
    """Returns how many microbatches take as long as a half-round communicates."""
    acco, zero1 = plan["methods"]["acco"], plan["methods"]["zero1"]
    step = {r["method"]: r for r in plan["predicted"]}
    communication = step["acco"]["communication"] / acco["half_rounds_per_step"]
    return round(communication / (step["zero1"]["computation"] / zero1["microbatches"]))


def main() -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    plans = {row: planned(row) for row in ROWS}
    flags = "\n".join(f"    {' '.join(['python', *row.command()])}" for row in ROWS)
    OUT.write_text(
        TEXT.format(
            rows="\n".join(x for row in ROWS for x in lines(row, plans[row])),
            busy=next(
                busy(r, p) for r, p in plans.items() if r.topology.endswith("2x4")
            ),
            alone="; ".join(alone(row, plans[row]) for row in ROWS),
            flags=flags,
            findings=findings(plans),
        )
    )


if __name__ == "__main__":
    main()
