"""What compilers for TPUs hide where a worker is a group of chips, by option.

    python benchmarks/tpu_groups.py --topology=tpu:v5e:4x4 --group=fsdp:4
        [--option=NAME=VALUE ...] [--swap]

Compiles a half-round of acco, two layers of GPT-Neo's width 768 in bfloat16, with
`acco_jax.compiler_options` and the options given, and prints what share of the bytes is
hidden of the data axis and of the group's own collectives of at least 1 MiB, and how
long the data axis's take as predicted. `--swap` lays neighbouring chips along the data
axis instead of the group's. Nothing is run; it needs the compiler,
`pip install 'acco-jax[plan,train]'`. experiments/results/memory.md has the results.
"""

import argparse
import pathlib
import runpy
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from jax.sharding import Mesh  # noqa: E402

from acco_jax.plan import programs  # noqa: E402
from acco_jax.schedule import costs, topologies  # noqa: E402
from acco_jax.schedule.machines import Machine, figures  # noqa: E402
from acco_jax.schedule.schedules import Collective  # noqa: E402


def value(text: str) -> bool | int | str:
    """Reads an option's value."""
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.isdigit() else text


def share(found: Sequence[Collective]) -> str:
    """Says how much of the collectives' bytes is hidden."""
    whole = sum(c.bytes * c.times for c in found)
    hidden = sum(c.bytes * c.times for c in found if c.hidden)
    return f"{hidden / max(whole, 1):.0%} of {whole / 2**20:,.0f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--topology", default="tpu:v5e:4x4")
    parser.add_argument("--group", default="fsdp:4", help="AXIS:SIZE, fsdp or tensor")
    parser.add_argument("--option", action="append", default=[], help="NAME=VALUE")
    parser.add_argument("--swap", action="store_true")
    args = parser.parse_args()
    topologies.use_cpu()
    config = runpy.run_path(str(ROOT / "experiments/quickstart.py"))["get_config"]()
    config.method, config.length = "acco", 1024
    config.microbatch_size, config.microbatches_per_step = 8, 8
    config.model.width, config.model.heads = 768, 12
    config.model.dtype = config.model.param_dtype = "bfloat16"
    axis, size = args.group.split(":")
    config.mesh[axis] = int(size)
    mesh = programs.data_mesh(topologies.parse(args.topology), 1, {axis: int(size)})
    if args.swap:
        devices = mesh.devices
        mesh = Mesh(devices.reshape(devices.shape[::-1]).T, mesh.axis_names)
    program = programs.describe(config, mesh)
    for option in args.option:
        name, _, text = option.partition("=")
        program.step.compiler_options[name] = value(text)
    schedule = program.compile().schedule
    data = program.of_data(schedule)
    print(f"data axis: {share(data)} hidden")
    own = [c for c in schedule.select() if program.in_group(c)]
    print(f"the group's own: {share(own)} hidden")
    topology = topologies.parse(args.topology)
    machine = Machine(topology, figures(topology.chip))
    p = costs.predict(schedule, machine, topology.devices, program.in_group)
    print(f"PREDICTED: a half-round takes {1e3 * p.total:.1f} ms; of the data axis")
    for kind in sorted({c.kind for c in data}):
        spent = [x for c, x in zip(schedule.collectives, p.each, strict=True)
                 if c.kind == kind and not program.in_group(c)]  # fmt: skip
        print(
            f"  {len(spent)} x {kind} {1e3 * sum(x.seconds for x in spent):.2f} ms, "
            f"exposed {1e3 * sum(x.exposed for x in spent):.2f}"
        )


if __name__ == "__main__":
    main()
