"""What CPU devices send through gloo: writes JSON into a file.

With jax.distributed gloo communicates between the devices of one process as well.
"""

import itertools
import json
import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=16"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import acco_jax
from acco_jax.core import gloo
from acco_jax.core.workers import over_data, to_row
from tests import stablehlo

SIZE = 2**22  # elements of a part: 16 MB


def mesh_of(**sizes):
    kinds = (AxisType.Auto,) * len(sizes)
    devices = jax.devices()[: np.prod(list(sizes.values()))]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), kinds, devices=devices)


def wrong():
    """How many of five sums of large arrays are wrong."""
    axes = "pair", "data"
    mesh, spec = mesh_of(pair=8, data=2), P(axes)
    sums = jax.jit(
        over_data(lambda x: gloo.reduce_scatter(x, "data"), mesh, axes, spec, spec)
    )
    digits = np.random.default_rng(0).integers(-9, 9, (16, 2 * SIZE), np.int8)
    x = digits.astype(np.float32)
    right = x.reshape(8, 2, -1).sum(1).reshape(-1)
    rows = jax.device_put(x.reshape(-1), NamedSharding(mesh, spec))
    return sum(bool((sums(rows) != right).any()) for _ in range(5))


def unlike(n, dtype):
    """What differs from NumPy's result among n devices, bit for bit."""
    mesh, draw = mesh_of(data=n), np.random.default_rng(n)
    x = draw.integers(0, 16, (n, n * 3, 2 * n)).astype(dtype)

    def each(x):
        found = {
            "scatter 0": gloo.reduce_scatter(x[0], "data"),
            "scatter 1": gloo.reduce_scatter(x[0], "data", 1),
            "gather": gloo.all_gather(x[0], "data"),
            "to all": gloo.all_to_all(x[0], "data"),
        }
        return jax.tree.map(to_row, found)

    total, spec = x.sum(0, dtype=x.dtype), P("data")
    expected = {
        "scatter 0": total.reshape(n, 3, -1),
        "scatter 1": np.stack(np.split(total, n, 1)),
        "gather": np.stack([x.reshape(-1, 2 * n)] * n),
        "to all": x.reshape(n, n, 3, -1).swapaxes(0, 1).reshape(x.shape),
    }
    run = jax.jit(over_data(each, mesh, ("data",), spec, spec))
    got = jax.device_get(run(jax.device_put(x, NamedSharding(mesh, spec))))
    return [
        f"{name}, {n} x {dtype}"
        for name, right in expected.items()
        if got[name].dtype != right.dtype or (got[name] != right).any()
    ]


def kinds(method):
    """The collectives that a train step of a method asks for."""
    tx = getattr(acco_jax, method)(optax.adam(1e-2), mesh=mesh_of(data=2))
    step = acco_jax.make_train_step(
        lambda p, x, _: jnp.mean((x @ p["w"]) ** 2), tx, microbatches=1, form="fused"
    )
    params, state = acco_jax.start(tx, {"w": jnp.ones((64, 64), jnp.float32)})
    asked = stablehlo.collectives(
        step.lower(params, state, jnp.ones((2, 64), jnp.float32))
    )
    return sorted({x.kind for x in asked})


def main(port, out):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 1, 0)
    asked = {method: kinds(method) for method in ("zero1", "fused_zero1", "acco")}
    cases = itertools.product((2, 3, 4, 8), ("float32", "bfloat16", "float64", "uint8"))
    differ = [line for n, dtype in cases for line in unlike(n, jnp.dtype(dtype))]
    found = {"wrong": wrong(), "asked": asked, "differ": differ}
    Path(out).write_text(json.dumps(found))


main(*sys.argv[1:])
