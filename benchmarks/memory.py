"""What a row of a microbatch holds, on machines that are not here.

    python benchmarks/memory.py [--machines=gpu:h100:1x8,tpu:v6e:2x2]
        [--sizes=gpt-neo-125m] [--length=1024] [--rows=16,32] [--attention=xla]
        [--remat=none,elementwise,block] [--json=FILE]

Compiles the loss of a published size and its gradients, in bfloat16, for one
device of every machine, with two numbers of rows, and runs nothing; it needs the
compilers, `pip install 'acco-jax[plan]'`.

    per row    what a row more adds to the program's temporaries, by the compiler's
               memory analysis: from the two compiles
    the rest   temporaries that do not depend on rows: gradients, chunks of logits
    saved      what of a row the forward pass leaves to the backward pass, by its shapes
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from acco_jax.core.workers import over_data  # noqa: E402
from acco_jax.models import transformer  # noqa: E402
from acco_jax.schedule import topologies  # noqa: E402

MIB = 2**20


def temporaries(config: transformer.Config, mesh: Mesh, rows: int) -> int:
    """Returns the bytes that a microbatch's gradients need beside the parameters."""
    loss, whole = transformer.loss_fn(config), NamedSharding(mesh, P())

    def gradients(params: Any, tokens: jax.Array) -> Any:
        return jax.value_and_grad(lambda p: loss(p, {"tokens": tokens}, None)[0])(
            params
        )

    run = over_data(gradients, mesh, ("data",), (P(), P("data")), P())
    arguments = _abstract(config, rows)
    placed = jax.tree.map(lambda x: x.update(sharding=whole), arguments)
    compiled = jax.jit(run).lower(*placed).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


def saved(config: transformer.Config, mesh: Mesh) -> float:
    """Returns the bytes that a row leaves to the backward pass."""
    loss = transformer.loss_fn(config)

    def pullback(params: Any, tokens: jax.Array) -> Any:
        return jax.vjp(lambda p: loss(p, {"tokens": tokens}, None)[0], params)[1]

    def held(rows: int) -> int:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            leaves = jax.tree.leaves(jax.eval_shape(pullback, *_abstract(config, rows)))
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)

    return held(2) - held(1)


def _abstract(config: transformer.Config, rows: int) -> tuple[Any, Any]:
    params = jax.eval_shape(lambda: transformer.init_params(config, jax.random.key(0)))
    return params, jax.ShapeDtypeStruct((rows, config.max_length + 1), jnp.int32)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machines", default="gpu:h100:1x8,tpu:v6e:2x2")
    parser.add_argument("--sizes", default="gpt-neo-125m")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rows", default="16,32", help="two numbers")
    parser.add_argument("--remat", default=",".join(transformer.REMAT))
    parser.add_argument("--attention", help="None: the platform's kernel")
    parser.add_argument("--layers", type=int, help="None: the published number")
    parser.add_argument("--loop", action="store_true", help="layers as a loop")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    few, many = map(int, args.rows.split(","))
    overrides = {} if args.layers is None else {"layers": args.layers}
    overrides |= {"scan_layers": True} if args.loop else {}
    results = []
    print("| machine | size | remat | MiB per row | saved | the rest, MiB |\n"
          "|---|---|---|---|---|---|")  # fmt: skip
    for machine in args.machines.split(","):
        devices = topologies.mesh(topologies.parse(machine)).devices
        mesh = Mesh(devices.flat[:1], ("data",))
        for size in args.sizes.split(","):
            for remat in args.remat.split(","):
                config = transformer.size(
                    size, max_length=args.length, param_dtype=jnp.bfloat16,
                    remat=remat, attention=args.attention, **overrides,
                )  # fmt: skip
                low, high = (temporaries(config, mesh, n) for n in (few, many))
                each = (high - low) / (many - few)
                row = {
                    "machine": machine, "size": size, "remat": remat,
                    "per_row": each, "saved": saved(config, mesh),
                    "rest": low - few * each,
                }  # fmt: skip
                results.append(row)
                numbers = (row["per_row"], row["saved"], row["rest"])
                shown = " | ".join(f"{x / MIB:,.0f}" for x in numbers)
                print(f"| {machine} | {size} | {remat} | {shown} |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
