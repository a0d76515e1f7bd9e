"""What CPU devices send through gloo: writes JSON into a file.

With jax.distributed gloo communicates between the devices of one process as well.
"""

import json
import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=16"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import acco_jax
from acco_jax.core.workers import over_data, reduce_scatter
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
        over_data(lambda x: reduce_scatter(x, "data"), mesh, axes, spec, spec)
    )
    x = np.random.default_rng(0).integers(-9, 9, (16, 2 * SIZE)).astype(np.float32)
    right = x.reshape(8, 2, -1).sum(1).reshape(-1)
    rows = jax.device_put(x.reshape(-1), NamedSharding(mesh, spec))
    return sum(bool((sums(rows) != right).any()) for _ in range(5))


def kinds(method):
    """The collectives that a train step of a method asks for."""
    tx = getattr(acco_jax, method)(optax.adam(1e-2), mesh=mesh_of(data=2))
    step = acco_jax.make_train_step(
        lambda p, x, _: jnp.mean((x @ p["w"]) ** 2), tx, microbatches=1, form="fused"
    )
    params, state = acco_jax.start(tx, {"w": jnp.ones((64, 64))})
    asked = stablehlo.collectives(step.lower(params, state, jnp.ones((2, 64))))
    return sorted({x.kind for x in asked})


def main(port, out):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 1, 0)
    asked = {method: kinds(method) for method in ("zero1", "fused_zero1", "acco")}
    Path(out).write_text(json.dumps({"wrong": wrong(), "asked": asked}))


main(*sys.argv[1:])
