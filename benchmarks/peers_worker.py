"""Runs one process of one of peers.py's methods: commands on stdin, answers on stdout.

    python -m benchmarks.peers_worker JSON

The module peers_jax or peers_torch trains. Only the standard library is imported here:
each stack has an environment of its own. A command is a line of JSON:

    {"steps": 2, "first": 1}    two optimizer steps; acco's first half is 1 microbatch
    {"compute": 1}              the same work of this process without communication
    {"peak": true}              the bytes of memory that the process has held at most
"""

import functools
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

INTERFACE = Path("/sys/class/net/eth0/statistics")


class Program(NamedTuple):
    """A method that is ready to run."""

    steps: Callable[[int, int], list[float]]  # (steps, first half) -> losses of calls
    make_compute: Callable[[], Callable[[], None]]  # -> one step's own work


def sent() -> tuple[int, int]:
    """Returns the bytes and the packets that this process has sent."""
    names = "tx_bytes", "tx_packets"
    return tuple(int((INTERFACE / name).read_text()) for name in names)  # type: ignore


def peak_bytes() -> int:
    """Returns the most memory that was resident."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def measured(work: Callable[[], Any]) -> dict[str, Any]:
    """Runs work; returns its seconds, CPU seconds, what it sent, and its result."""
    before, cpu, start = sent(), time.process_time(), time.perf_counter()
    result = work()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    size, packets = (b - a for a, b in zip(before, sent(), strict=True))
    return {
        "seconds": seconds, "cpu": cpu, "bytes": size, "packets": packets,
        "losses": result,
    }  # fmt: skip


def main() -> None:
    spec = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # gloo prints

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    stack = importlib.import_module(f"benchmarks.peers_{spec['stack']}")
    program: Program = stack.build(spec)
    compute = functools.cache(program.make_compute)

    def computes(steps: int) -> None:
        for _ in range(steps):
            compute()()

    answer("ready")
    for line in sys.stdin:
        match json.loads(line):
            case {"steps": steps, "first": first}:
                answer(measured(functools.partial(program.steps, steps, first)))
            case {"compute": steps}:
                answer(measured(functools.partial(computes, steps)))
            case {"peak": True}:
                answer(peak_bytes())


if __name__ == "__main__":
    main()
