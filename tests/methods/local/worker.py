# ruff: noqa: E402 (the environment first)
"""A process of test_processes.py: python -m tests.methods.local.worker I PROCESSES P"""

import json
import os
import sys

index, processes, port = map(int, sys.argv[1:4])
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=1"

import jax

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(
    f"localhost:{port}", processes, index, initialization_timeout=60
)

import numpy as np
from jax.experimental import multihost_utils

from tests.methods.local import test_processes as shared

mesh = jax.make_mesh((processes,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
rows = jax.NamedSharding(mesh, jax.P("data"))


def place(x):
    """This process's part of x, as a global array."""
    mine = np.split(np.asarray(x), processes)[index]
    return jax.make_array_from_process_local_data(rows, mine)


out = {name: shared.train(name, mesh, place, compile=True) for name in shared.METHODS}
multihost_utils.sync_global_devices("done")
if index == 0:
    print("RESULT" + json.dumps(out))
