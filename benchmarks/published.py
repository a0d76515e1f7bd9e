"""Published training runs beside what `plan` predicts for their machines.

    python benchmarks/published.py

Each of ROWS is a run whose model, batch, machine and rate were published; a run of the
same sizes goes through `python -m acco_jax.plan`, whose JSON is kept in .cache/plans,
and all of it is written to experiments/results/published.md. The programs are other
ones than ours: this is context and no bar. Nothing is run.
"""

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import paper_plans

OUT = paper_plans.ROOT / "experiments" / "results" / "published.md"
PAPER = "[Nabli et al.](https://arxiv.org/abs/2406.02613), section 4.4"
LLM_C = "[llm.c](https://github.com/karpathy/llm.c/discussions/481)"
GPT2 = (
    "--config.model.size=gpt2",
    "--config.microbatch_size=64",
    "--config.microbatches_per_step=1",
    "--methods=zero1",
)
H100_PCIE, A100_32 = (
    next(
        row
        for row in paper_plans.ROWS
        if (row.name, row.topology) == ("openwebtext_125m", topology)
    )
    for topology in ("gpu:h100:1x8", "gpu:a100:4x8")
)
A100_8 = paper_plans.Row("openwebtext_125m", "gpu:a100:1x8", 0, GPT2)
H100_8 = paper_plans.Row(
    "openwebtext_125m", "gpu:h100:1x8", 0, GPT2, kept_as="gpt2-gpu-h100-1x8"
)


@dataclasses.dataclass(frozen=True)
class Published:
    """A published run."""

    what: str
    source: str
    plan: paper_plans.Row  # of the same sizes
    method: str  # of the plan
    rate: float  # tokens/s


ROWS = (
    Published("GPT-Neo 125M, DDP", PAPER, H100_PCIE, "zero1", 356e3),
    Published("GPT-Neo 125M, ACCO", PAPER, H100_PCIE, "acco", 377e3),
    Published("GPT-Neo 125M, DDP", PAPER, A100_32, "zero1", 0.95e6),
    Published("GPT-Neo 125M, ACCO", PAPER, A100_32, "acco", 1.27e6),
    Published("GPT-2 124M, ZeRO-1", LLM_C, A100_8, "zero1", 1.75e6),
    Published("GPT-2 124M, ZeRO-1", LLM_C, H100_8, "zero1", 3.7e6),
)

TEXT = """# Published runs beside `plan`

    python benchmarks/published.py

The rates are their authors', of other programs than ours; `plan` predicts ours, of the
same model, batch and machine, from compiled schedules and data sheets. So this table is
context: it shows which part of a chip's peak programs for such models reach, and that
the intervals of `plan` are neither of a dream nor of the slowest. "Model FLOPs" is the
part of the peak that the tokens' model FLOPs come to.

| run | machine | tokens/s | model FLOPs | `plan` | model FLOPs | ratio |
|---|---|---|---|---|---|---|
{rows}

The ratio is the published rate to the predicted one, whose interval is in parentheses.

**The paper's runs are {paper}.** Its program is PyTorch without fused attention or a
compiler, whose computation alone takes most of the difference: the prediction exposes
{exposed} of a zero1 step on 8 H100, and its acco gains 6 % over DDP there. On 4 x 8
A100 the paper's acco is 1.34 times as fast as its DDP; `plan` says {gain} with 100
Gbit/s a host, at the computation's own, higher speed. What its network gave, the paper
does not say.

**llm.c's are {llm_c}**: CUDA written by hand, on SXM GPUs with NVLink, a step of one
microbatch. Of the predicted step of ours {memory} is memory access that nothing runs
beside: XLA's fusions read and write activations between products that llm.c keeps
together, and attention is this library's kernel (cuDNN's, as llm.c's, with the extra
plan-cudnn). So a rate above the interval is no contradiction: it is another program.

**MaxText, JAX on TPU v5e**: 16B parameters, 6 rows of 2,048 tokens a chip, everything
recomputed, FSDP over 256 chips reach 61 % of the peak in model FLOPs (MaxText's
[configs for v5e](https://github.com/AI-Hypercomputer/maxtext/tree/main/MaxText/configs)),
which with the recomputed third is 81 % of it in products; over 8,192 chips 55 %. `plan`
takes products to reach {range} of a peak. It is not planned here: FSDP over all chips
leaves no data axis.

## Flags

{flags}
"""


def row_text(row: Published, plan: dict) -> str:
    p = predicted(row, plan)
    low, high = p["tokens_per_second_range"]
    utilization = p["model_flops_utilization"]
    theirs = utilization * row.rate / p["tokens_per_second"]
    rate = paper_plans.thousands
    ours = f"{rate(p['tokens_per_second'])} ({rate(low)} - {rate(high)})"
    return (
        f"| {row.what} ({row.source}) | {paper_plans.machine(row.plan)} | "
        f"{rate(row.rate)} | {theirs:.0%} | {ours} | {utilization:.0%} | "
        f"{row.rate / p['tokens_per_second']:.2f} |"
    )


def predicted(row: Published, plan: dict) -> dict:
    return next(r for r in plan["predicted"] if r["method"] == row.method)


def ratios(rows: list[tuple[Published, dict]]) -> str:
    found = [r.rate / predicted(r, plan)["tokens_per_second"] for r, plan in rows]
    return f"{min(found):.2f} to {max(found):.2f} of what is predicted"


def main() -> None:
    paper_plans.CACHE.mkdir(parents=True, exist_ok=True)
    plans = {row.plan: paper_plans.planned(row.plan) for row in ROWS}
    found = [(row, plans[row.plan]) for row in ROWS]
    zero1 = predicted(ROWS[0], plans[H100_PCIE])
    low, high = plans[H100_PCIE]["figures"]["compute_efficiency"]["range"]
    OUT.write_text(
        TEXT.format(
            rows="\n".join(row_text(row, plan) for row, plan in found),
            paper=ratios([x for x in found if x[0].source == PAPER]),
            llm_c=ratios([x for x in found if x[0].source == LLM_C]),
            exposed=f"{zero1['exposed'] / zero1['step']:.0%}",
            memory=" and ".join(
                f"{p['memory_access'] / p['step']:.0%} on "
                f"{row.plan.topology.split(':')[1].upper()}"
                for row in ROWS[4:]
                for p in [predicted(row, plans[row.plan])]
            ),
            gain=f"{predicted(ROWS[3], plans[A100_32])['speedup']:.2f}",
            range=f"{low:.0%} to {high:.0%}",
            flags="\n".join(f"    python {' '.join(row.command())}" for row in plans),
        )
    )


if __name__ == "__main__":
    main()
