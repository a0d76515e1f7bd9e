"""The bytes that a half-round moves, on machines that are not here.

    python benchmarks/half_round_bytes.py [--machines=gpu:h200:1x8,tpu:v6e:4x4]
        [--method=zero1] [--optimizer=muon] [--top=12] [--json=FILE] [--quick]

Compiles the fused half-round of GPT-2-small's sizes in bfloat16 for every machine, as
tests/schedule/test_hidden.py does, and runs nothing: it needs the compilers, `pip
install 'acco-jax[plan]'`, and about a minute a machine. All figures are of one device
and one half-round:

    hidden     fraction of the bytes of the data axis's collectives of at least 1 MiB
               behind which matrix products run; the collectives are listed below
    memory     peak of the program, by the compiler
    accessed   bytes read and written, by the compiler's own count (none on GPU), in
               which a loop's body counts once
    ENTRY      bytes read and written by ENTRY's operations outside its loops that hold
               no matrix product and are no collective: the optimizer, packing,
               unpacking, casts and copies. Of a slice only the slice counts.
    on-chip    those of TPU copies into on-chip memory and back (S(1) in a shape), not
               in ENTRY, which leaves out what is on the chip already

`--top=N` lists the N largest operations of ENTRY. MB and GB are 1e6 and 1e9 bytes.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import re
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

from acco_jax.methods import METHODS  # noqa: E402
from acco_jax.models import transformer  # noqa: E402
from acco_jax.plan import programs  # noqa: E402
from acco_jax.schedule import hlo, schedules, topologies  # noqa: E402

MACHINES = (
    "gpu:h200:2x8",
    "gpu:h200:1x8",
    "tpu:v6e:4x4",
    "tpu:v5e:4x4",
    "tpu:v5p:2x2x2",
    "tpu:tpu7x:2x2x2",
)
OPTIMIZERS = {
    "adamw": optax.adamw,
    "muon": optax.contrib.muon,
    "adafactor": optax.adafactor,
    "lamb": optax.lamb,
}


def model(quick: bool) -> transformer.Config:
    """GPT-2 small, or a tiny model; layers are a loop, their number costs no time."""
    sizes = (512, 64, 128, 2, 2) if quick else (50304, 1024, 768, 12, 12)
    types = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    return transformer.Config(*sizes, pattern=("global",), scan_layers=True, **types)


def half_round(machine: str, args: argparse.Namespace) -> programs.Program:
    """The described half-round of one machine.

    Raises:
      ValueError: the installed compiler does not know the machine.
      RuntimeError: it is not installed.
    """
    config = model(args.quick)
    inner = OPTIMIZERS[args.optimizer](1e-3)
    mesh = programs.data_mesh(topologies.parse(machine), domains=1)
    init = functools.partial(transformer.init_params, config, jax.random.key(0))
    return programs.assemble(
        args.method,
        METHODS[args.method](
            optax.chain(optax.clip_by_global_norm(1.0), inner), mesh=mesh
        ),
        transformer.loss_fn(config),
        jax.eval_shape(init),
        microbatches=args.microbatches,
        microbatch=(args.rows, config.max_length + 1),
    )


def entry_operations(text: str) -> tuple[list[dict[str, Any]], int]:
    """ENTRY's operations beside loops, matrix products and collectives.

    Args:
      text: a scheduled module's HLO.

    Returns:
      Name, opcode, shape and bytes of each, the largest first, and the bytes of copies
      into on-chip memory and back, which are not among them.
    """
    schedule, (computations, entry) = schedules.read(text), hlo.parse(text)
    here = [c for c in schedule.collectives if c.where == "ENTRY"]
    names = {c.name for c in here}
    positions = {p for c in here for p in (c.start, c.done)}
    found, on_chip = [], 0
    for o in schedule.operations:
        x = computations[entry].by_name[o.name]
        collective = o.name in names or o.position in positions
        if o.flops or not o.bytes or o.kind == "while" or collective:
            continue
        if re.fullmatch("(copy|slice)-start", o.kind) and "S(1)" in x.shape:
            on_chip += o.bytes
            continue
        shape = re.sub(r"/\*.*?\*/|\{[^}]*\}", "", x.shape)
        found.append({"name": o.name, "opcode": o.kind, "shape": shape})
        found[-1]["bytes"] = o.bytes
    return sorted(found, key=lambda row: -row["bytes"]), on_chip


def measure(machine: str, args: argparse.Namespace) -> dict[str, Any]:
    """Compiles the half-round of one machine; all that is reported of it."""
    program = half_round(machine, args)
    compiled = program.compile()
    chosen = program.of_data(compiled.schedule, 1 << 20)
    total = sum(c.bytes * c.times for c in chosen)
    hidden = sum(c.bytes * c.times for c in chosen if c.hidden)
    operations, on_chip = entry_operations(compiled.text)
    return {
        "machine": machine,
        "seconds_to_compile": compiled.seconds,
        "collectives": [
            {
                "kind": c.kind,
                "bytes": c.bytes,
                "dtype": c.dtype,
                "times": c.times,
                "hidden": c.hidden,
            }
            for c in chosen
        ],
        "hidden_fraction": hidden / total if total else None,
        "memory_bytes": compiled.memory.total,
        "bytes_accessed": compiled.bytes_accessed,
        "entry_bytes": sum(row["bytes"] for row in operations),
        "on_chip_bytes": on_chip,
        "entry_operations": operations,
    }


def show(row: dict[str, Any], top: int) -> None:
    hidden, accessed = row["hidden_fraction"], row["bytes_accessed"]
    print(
        f"{row['machine']:<16}{'none' if hidden is None else f'{hidden:.1%}':>8}"
        f"{row['memory_bytes'] / 2**20:>12,.0f} MiB"
        f"{'none' if accessed is None else f'{accessed / 1e9:.3f} GB':>13}"
        f"{row['entry_bytes'] / 1e6:>10,.1f} MB{row['on_chip_bytes'] / 1e6:>10,.1f} MB"
    )
    for c in row["collectives"]:
        times = f" x {c['times']}" if c["times"] > 1 else ""
        print(
            f"    {c['kind']} {c['bytes'] / 2**20:.1f} MiB {c['dtype']}{times}, "
            + ("hidden" if c["hidden"] else "exposed")
        )
    for o in row["entry_operations"][:top]:
        line = f"    {o['bytes'] / 1e6:>9,.1f} MB  {o['opcode']:<12} {o['name']}"
        print(f"{line}  {o['shape'][:100]}")
    sys.stdout.flush()


def parse(args: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flag, names = parser.add_argument, lambda text: text.split(",")
    flag("--machines", type=names, default=MACHINES, help="with commas between")
    flag("--method", choices=METHODS, default="acco")
    flag("--optimizer", choices=OPTIMIZERS, default="adamw")
    flag("--rows", type=int, default=2, metavar="B", help="of a microbatch; default 2")
    flag("--microbatches", type=int, default=4, metavar="N", help="default 4")
    flag("--top", type=int, default=0, metavar="N", help="list ENTRY's N largest")
    flag("--quick", action="store_true", help="a tiny model")
    flag("--json", metavar="FILE", help="also write everything there")
    return parser.parse_args(args)


def main() -> None:
    args = parse()
    topologies.use_cpu()
    rows = []
    print(f"{'machine':<16}{'hidden':>8}{'memory':>16}{'accessed':>13}"
          f"{'ENTRY':>13}{'on-chip':>13}")  # fmt: skip
    for machine in args.machines:
        try:
            rows.append(measure(machine, args))
        except (ValueError, RuntimeError, programs.DoesNotFit) as error:
            print(f"{machine:<16}  left out: {error}")
        else:
            show(rows[-1], args.top)
    if args.json:
        report = {"command": " ".join(sys.argv), "machines": rows}
        pathlib.Path(args.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
