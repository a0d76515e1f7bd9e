"""What communication costs the computation beside it, on one GPU.

    python benchmarks/contention.py --out=experiments/results/contention

Needs torch and triton on a machine with an NVIDIA GPU; takes a minute. A collective
that is overlapped still takes cores and memory bandwidth from the work beside it. One
GPU has nobody to talk to, but what its part of a ring does can be run by itself:

    add N      out = a + b by N thread blocks of 512 threads, each on a core of its own
               for as long as it runs: a step of a ring's reduce-scatter
    copy N     out = a by N such blocks: a step of a ring's all-gather
    to host, from host
               copies by the GPU's copy engines to and from pinned memory, as a network
               adapter reads and writes the GPU's memory, at about its rate

Each runs on a stream of high priority, as XLA's collectives do, from before the work
begins until after it has ended; the work is matrix products in bfloat16 of the shapes
of a model's multilayer perceptron, or an addition as large as memory allows. The times
are of CUDA events. `slower` is the work's time with it over the time without, turn by
turn: median and quartiles. Rates count what is sent: a byte of `out`, once. The median
and the ends of the rows that send as much as a network of 400 Gbit/s are `CONTENTION`
of acco_jax/schedule/machines.py.
"""

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BLOCKS = (1, 2, 4, 8, 16, 32)
LENGTH = 1 << 26  # elements of a buffer, in bfloat16
NETWORK = 50e9  # bytes/s
BLOCK = 8192  # elements that a thread block takes at once
# (tokens, width, hidden width) of products
SHAPES = {"products 768": (32768, 768, 3072), "products 4096": (8192, 4096, 14336)}


@dataclasses.dataclass(frozen=True)
class Row:
    """What one background costs one kind of work."""

    work: str
    beside: str
    rate: float  # bytes/s of the background, by itself
    rate_beside: float  # bytes/s of it, beside the work
    slower: tuple[float, float, float]  # quartiles
    seconds: float  # of the work by itself


def add_kernel() -> Any:
    global tl  # where the kernel looks for it
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(out, a, b, n, two: tl.constexpr, block: tl.constexpr):
        step = tl.num_programs(0) * block
        for first in range(tl.program_id(0) * block, n, step):
            at = first + tl.arange(0, block)
            x = tl.load(a + at)
            if two:
                x += tl.load(b + at)
            tl.store(out + at, x)

    return kernel


def works() -> dict[str, Callable[[], None]]:
    """Return kinds of work of some 20 ms each."""
    import torch

    found: dict[str, Callable[[], None]] = {}
    make: Any = {"dtype": torch.bfloat16, "device": "cuda"}
    for name, (tokens, width, hidden) in SHAPES.items():
        x = torch.randn(tokens, width, **make)
        up, down = (
            torch.randn(width, hidden, **make),
            torch.randn(hidden, width, **make),
        )
        h, y = torch.empty(tokens, hidden, **make), torch.empty(tokens, width, **make)
        times = max(1, round(20e-3 * 600e12 / (4 * tokens * width * hidden)))

        def products(x=x, up=up, down=down, h=h, y=y, times=times) -> None:
            for _ in range(times):
                torch.matmul(x, up, out=h)
                torch.matmul(h, down, out=y)

        found[name] = products
    a, b, c = (torch.randn(1 << 28, **make) for _ in range(3))

    def addition() -> None:
        for _ in range(30):
            torch.add(a, b, out=c)

    return found | {"addition": addition}


@dataclasses.dataclass(frozen=True)
class Background:
    """A part of communication, in pieces."""

    launch: Callable[[], None]  # a piece
    bytes: int  # that a piece sends


def backgrounds() -> dict[str, Background]:
    import torch

    kernel = add_kernel()
    make: Any = {"dtype": torch.bfloat16, "device": "cuda"}
    out, a, b = (torch.randn(LENGTH, **make) for _ in range(3))
    host = torch.empty(LENGTH, dtype=torch.bfloat16, pin_memory=True)
    found: dict[str, Background] = {}
    for name, two in (("add", True), ("copy", False)):
        for blocks in BLOCKS:
            n = LENGTH * min(blocks, 8) // 8  # pieces of similar seconds

            def launch(blocks=blocks, n=n, two=two) -> None:
                kernel[(blocks,)](out, a, b, n, two, BLOCK, num_warps=16)

            found[f"{name} {blocks}"] = Background(launch, 2 * n)

    def to_host() -> None:
        host.copy_(a, non_blocking=True)

    def from_host() -> None:
        out.copy_(host, non_blocking=True)

    found["to host"] = Background(to_host, 2 * LENGTH)
    found["from host"] = Background(from_host, 2 * LENGTH)
    return found


def rate(background: Background, stream: Any, pieces: int = 5) -> float:
    """Return the bytes/s of a background by itself."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
    with torch.cuda.stream(stream):
        background.launch()
        begin.record()
        for _ in range(pieces):
            background.launch()
        end.record()
    torch.cuda.synchronize()
    return pieces * background.bytes / (begin.elapsed_time(end) / 1e3)


def timed(
    work: Callable[[], None], background: Background | None, stream: Any, pieces: int
) -> tuple[float, float]:
    """Return the seconds of the work, and the bytes/s of what ran beside it.

    Raises:
      RuntimeError: the background ended before the work did.
    """
    import torch

    event = lambda: torch.cuda.Event(enable_timing=True)  # noqa: E731
    begin, end, ends = event(), event(), [event() for _ in range(pieces)]
    torch.cuda.synchronize()
    if background is not None:
        with torch.cuda.stream(stream):
            background.launch()
            started = event()
            started.record()
            for done in ends:
                background.launch()
                done.record()
        torch.cuda.current_stream().wait_event(started)
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    seconds = begin.elapsed_time(end) / 1e3
    if background is None:
        return seconds, 0.0
    after = [begin.elapsed_time(done) / 1e3 for done in ends]
    if after[-1] < seconds:
        raise RuntimeError(
            f"the background ended {seconds - after[-1]:.2g} s before the work."
        )
    full = [x for x in after if x <= seconds]
    if len(full) < 2:
        return seconds, background.bytes / (after[1] - after[0])
    return seconds, (len(full) - 1) * background.bytes / (full[-1] - full[0])


def measured(repetitions: int) -> list[Row]:
    import torch

    stream = torch.cuda.Stream(priority=-1)
    rows, found = [], backgrounds()
    for work_name, work in works().items():
        for _ in range(3):
            timed(work, None, stream, 0)
        for name, background in found.items():
            speed = rate(background, stream)
            seconds = timed(work, None, stream, 0)[0]
            pieces = 4 + int(4 * seconds * speed / background.bytes)
            ratios, speeds, times = [], [], []
            for _ in range(repetitions):
                bare = timed(work, None, stream, 0)[0]
                try:
                    beside, moved = timed(work, background, stream, pieces)
                except RuntimeError as error:
                    print(f"{work_name} beside {name}: {error}", flush=True)
                    pieces *= 2
                    continue
                ratios.append(beside / bare)
                speeds.append(moved)
                times.append(bare)
            if len(ratios) < 2:
                continue
            low, middle, high = statistics.quantiles(ratios, method="inclusive")
            rows.append(
                Row(
                    work_name, name, speed, statistics.median(speeds),
                    (low, middle, high), statistics.median(times),
                )
            )  # fmt: skip
            print(cells(rows[-1]), flush=True)
    return rows


def cells(row: Row) -> str:
    low, middle, high = row.slower
    return (
        f"| {row.work} | {row.beside} | {row.rate / 1e9:.0f} | "
        f"{row.rate_beside / 1e9:.0f} | {middle:.3f} ({low:.3f}-{high:.3f}) |"
    )


def table(rows: Sequence[Row], device: str, command: str) -> str:
    """Return the rows as markdown."""
    blocks = [r for r in rows if not r.beside.endswith("host")]
    enough = [r for r in blocks if r.rate_beside >= NETWORK]
    by = [r.slower[1] for r in enough]
    engines = [r.slower[1] for r in rows if r.beside.endswith("host")]
    kept = [r.rate_beside / r.rate for r in enough]
    out = ["# What communication costs the computation beside it", ""]
    out += [f"    {command}", "", f"One {device}. Rates are GB/s of bytes sent.", ""]
    out += [
        "Thread blocks that send at least 50 GB/s beside the work, as much as a",
        f"network of 400 Gbit/s takes, make it {min(by):.2f} to {max(by):.2f} times as "
        f"long, {statistics.median(by):.2f} in the median.",
        f"They keep {min(kept):.0%} to {max(kept):.0%} of the rate that they have by "
        "themselves, so that a collective needs more of them.",
        f"Copy engines cost the work at most {max(engines) - 1:.0%}.",
        "",
        "| work | beside it | rate by itself | beside the work | slower |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*out, *map(cells, rows), ""])


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out = ROOT / "experiments" / "results" / "contention"
    parser.add_argument("--out", type=Path, default=out, help="of .json and .md")
    parser.add_argument("--repetitions", type=int, default=9)
    args = parser.parse_args()
    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    rows = measured(args.repetitions)
    report = {"device": device, "rows": [dataclasses.asdict(row) for row in rows]}
    args.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    text = table(rows, device, "python benchmarks/contention.py")
    args.out.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
