# ruff: noqa: E402 (the environment first)
"""One process of tests/test_multiprocess.py: python -m tests.multiprocess_worker ..."""

import json
import os
import sys
from unittest import mock

index, processes, devices, port = map(int, sys.argv[1:5])
folder = sys.argv[5]
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={devices}"

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(
    f"localhost:{port}", processes, index, initialization_timeout=60
)

import acco_jax
from tests import multiprocess_problem as problem

n = processes * devices
mesh = jax.make_mesh((n,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
rows = jax.NamedSharding(mesh, jax.P("data"))


def place(x):
    """This process's part of x, as a global array."""
    mine = x[index * len(x) // processes : (index + 1) * len(x) // processes]
    return jax.make_array_from_process_local_data(rows, mine)


out = {}
for name in ("acco", "zero1"):
    for form in ("split", "fused", "plain"):
        tx = getattr(acco_jax, name)(problem.inner(), mesh=mesh)
        params = jax.device_put(problem.theta(), jax.NamedSharding(mesh, jax.P()))
        state, points = jax.jit(tx.init)(params), []
        gradients = acco_jax.local_gradients(
            problem.loss, mesh=mesh, microbatches=problem.N
        )
        update = jax.jit(tx.update)
        if form != "plain":
            step = acco_jax.make_train_step(
                problem.loss, tx, microbatches=problem.N, form=form
            )
        for h in range(problem.HALF_ROUNDS):
            if form == "fused" and h == 2:  # goes on from a checkpoint
                path = f"{folder}/{name}"
                acco_jax.save(path, state, params, {"h": h})
                given = problem.theta()
                params, state, extra = acco_jax.restore(path, tx, given)
                assert extra == {"h": h}
            batch, counts = problem.batch(n, h), problem.counts(n, h)
            if form != "split":  # that of each process is whole: it is not compared
                batch, counts = jax.tree.map(place, batch), place(counts)
            if form == "plain":
                grads, weight, _ = gradients(params, batch, counts)
                updates, state = update(grads, state, params, weight=weight)
                params = jax.jit(optax.apply_updates)(params, updates)
            else:
                with mock.patch.object(multihost_utils, "assert_equal", None):
                    params, state, _ = step(params, state, batch, counts)
            held = acco_jax.committed_params(state, params)
            flat = [
                np.ravel(x.addressable_data(0)) for x in jax.tree.leaves((params, held))
            ]
            points.append(np.concatenate(flat).tolist())
        out[f"{name}-{form}"] = points
given = jax.tree.map(jax.numpy.asarray, problem.theta())  # on this process's device
params, state = acco_jax.start(tx, given)
acco_jax.save(f"{folder}/start", state, params)
params, state, _ = acco_jax.restore(f"{folder}/start", tx, given)
jax.tree.map(
    lambda x, y: np.testing.assert_array_equal(*jax.device_get((x, y))), params, given
)
auto = acco_jax.make_train_step(problem.loss, tx, microbatches=1)
out["auto"] = auto.form
try:
    auto(params, state, problem.batch(n, index))  # each process its own rows
except ValueError as error:
    out["own rows"] = str(error)
multihost_utils.sync_global_devices("done")
if index == 0:
    print("RESULT" + json.dumps(out))
