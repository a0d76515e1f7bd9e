"""Plans the paper's experiments for its machines, and for a TPU slice.

python benchmarks/paper_plans.py

Each of ROWS is one `python -m acco_jax.plan`, whose JSON is kept in .cache/plans and
not made again; all together write experiments/results/plans.md. A GPU's compiler takes
half a minute for a method, a TPU's up to six; nothing is run. The paper's times are
those of its tokens, which for OpenWebText are its rate of tokens times its hours.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

from acco_jax.models import huggingface, transformer
from acco_jax.schedule.verdict import percent

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "plans"
OUT = ROOT / "experiments" / "results" / "plans.md"

# NVIDIA's data sheet of the H100 PCIe: dense bf16, HBM2e, PCIe 5.0 x16 one way.
PCIE = "--set=flops=756e12,memory_bandwidth=2.0e12,fast_bandwidth=64e9"
ALPACA = round(3 * 0.98 * 52_002) * 512  # epochs x training answers, and the longest
OPENWEBTEXT_8, OPENWEBTEXT_32 = 6.0e9, 50.2e9  # 356k and 950k tokens/s of DDP, by hours


@dataclasses.dataclass(frozen=True)
class Row:
    """A plan, and what the paper measured on such machines."""

    name: str
    topology: str
    tokens: float  # of the run
    flags: tuple[str, ...] = ()
    paper: tuple[str, str] = ("-", "-")  # zero1, acco
    model: str = ""  # a size of transformer.SIZES, for init_from
    kept_as: str = ""  # the name of its file in CACHE

    @property
    def file(self) -> Path:
        name = self.kept_as or f"{self.name}-{self.topology.replace(':', '-')}"
        return CACHE / f"{name}.json"

    def command(self) -> list[str]:
        return [
            *("-m", "acco_jax.plan", f"--config=experiments/{self.name}.py"),
            *(f"--topology={self.topology}", "--nofit", *self.flags),
        ]


ROWS = (
    Row("tinystories_36m", "gpu:a100:1x8", 2000 * 655_360),
    Row("openwebtext_125m", "gpu:h100:1x8", OPENWEBTEXT_8, (PCIE,),
        ("4 h 41", "4 h 25")),
    Row("alpaca_gptneo_2p7b", "gpu:a100:1x8", ALPACA, (),
        ("43 min", "25 min"), "gpt-neo-2.7b"),
    Row("alpaca_gptneo_2p7b", "gpu:a100:2x4", ALPACA, ("--network=2.5",),
        ("3 h 46", "29 min"), "gpt-neo-2.7b"),
    Row("openwebtext_125m", "gpu:a100:4x8", OPENWEBTEXT_32, ("--network=12.5",),
        ("14 h 41", "10 h 55")),
    Row("openwebtext_125m", "tpu:v5e:4x4", OPENWEBTEXT_8,
        ("--config.microbatch_size=12",)),
    Row("alpaca_llama3_8b_lora", "gpu:a100:1x8", ALPACA, model="llama-3-8b"),
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
vendors' figures, of which a stated range is reached (`plan` prints it). Nothing was
run. A time is that of as many tokens as the experiment takes; in parentheses its
interval. The last column is what the paper measured.

{head}
|---|---|---|---|---|---|---|---|---|---|
{rows}

{findings}

**Most of the paper's times are longer** than the intervals where the network is not
what takes the time (acco's 25 minutes on one host of A100 are not): its programs reach
a smaller part of a chip's peak than the range that `plan` assumes for XLA's
([published.md](published.md) sets other published runs beside it). What `plan` says of
them is how much of a step communication takes, and how much of that is overlapped.
Overlapped bytes are READ from the schedule, overlapped seconds are PREDICTED for the
machine's network at the middle of the figures' ranges.

On 2 x 4 A100 the network is what takes the time. A step of acco sends twice what one of
zero1 does, so that with the same few microbatches it is the slower of the two: {busy}
fit into the communication of one half-round. The paper's acco adds microbatches while
the network is busy, which takes it to 29 minutes in fewer and larger steps; here
`--config.microbatches=adaptive` does so (`plan` takes it, too).

## What the predictions leave out

- Everything but steps: compiling, data, evaluations, checkpoints, restarts.
- Rows shorter than `length`: Alpaca's are padded to the longest of a batch, here to a
  step of data.lengths; the prediction has 512 targets in each. So its computation is
  too long, and its communication is not.
- Contention, in part: communication takes memory bandwidth and, on GPUs, cores from the
  computation that overlaps it; a ring through several PCIe switches shares them.
- The paper's networks: 100 Gbit/s a host, shared by its eight GPUs, stand for the 4 x 8
  A100, and 10 Gbit/s a host for the 2 x 4. The latter was chosen to come near the
  paper's 3 h 46 of zero1, so that this time tests nothing.

## Flags

{flags}
"""


def clock(seconds: float) -> str:
    """Returns a time as the paper writes it: '4 h 41', '43 min'."""
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02}" if minutes >= 60 else f"{minutes} min"


def machine(row: Row) -> str:
    pcie = ", PCIe" if PCIE in row.flags else ""
    hosts = {"--network=2.5": 10, "--network=12.5": 100}
    slow = "".join(f", {hosts[f]} Gbit/s a host" for f in row.flags if f in hosts)
    return f"`{row.topology}`{pcie}{slow}"


def thousands(rate: float) -> str:
    return f"{rate / 1e3:,.0f}k"


def lines(row: Row, plan: dict) -> list[str]:
    """Returns a line of the table for each method."""
    predicted = {r["method"]: r for r in plan["predicted"]}
    found = []
    for method, paper in zip(("zero1", "acco"), row.paper, strict=True):
        p = predicted[method]
        m = plan["methods"][method]
        shares = (m["hidden_bytes_fraction"], m["hidden_seconds_fraction"])
        low, high = p["tokens_per_second_range"]
        times = [row.tokens / rate for rate in (p["tokens_per_second"], high, low)]
        found.append(
            f"| {row.name} | {machine(row)} | {method} | "
            f"{m['exposed_seconds'] * 1e3:,.1f} ms | "
            f"{' | '.join(map(percent, shares))} | {p['step'] * 1e3:,.0f} ms | "
            f"{thousands(p['tokens_per_second'])} "
            f"({thousands(low)} - {thousands(high)}) | {clock(times[0])} "
            f"({clock(times[1])} - {clock(times[2])}) | {paper} |"
        )
    return found


def findings(plans: dict[Row, dict]) -> str:
    """Returns a line per row: acco's gain, and memory."""
    said = []
    for row, plan in plans.items():
        acco = next(r for r in plan["predicted"] if r["method"] == "acco")
        low, high = acco["speedup_range"]
        memory = plan["methods"]["acco"]["memory"]
        needs = f"{memory['total'] / 2**30:.1f} of {memory['of'] / 2**30:.0f} GiB"
        said.append(
            f"- {row.name} on {machine(row)}: acco is {acco['speedup']:.2f} "
            f"({low:.2f} - {high:.2f}) times as fast as zero1 at equal tokens, and "
            f"needs {needs} a device."
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
    head = (
        "| experiment | machine | | exposed, a step | bytes overlapped (READ) | "
        "seconds overlapped (PREDICTED) | step | tokens/s | time | the paper |"
    )
    flags = "\n".join(f"    {' '.join(['python', *row.command()])}" for row in ROWS)
    OUT.write_text(
        TEXT.format(
            head=head,
            rows="\n".join(x for row in ROWS for x in lines(row, plans[row])),
            busy=next(
                busy(r, p) for r, p in plans.items() if r.topology.endswith("2x4")
            ),
            flags=flags,
            findings=findings(plans),
        )
    )


if __name__ == "__main__":
    main()
