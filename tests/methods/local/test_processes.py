"""Two real processes over gloo, two threads each, take one process's steps."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import acco_jax
from tests import programs
from tests.methods.local import problem
from tests.reference import make_mesh

pytestmark = pytest.mark.usefixtures("x64")
HELD, CALLS = 2, 3
METHODS = {
    "diloco": {"local_steps": 2},
    "co2": {"local_steps": 2},
    "gossip": {"topology": "ring"},
    "streaming_diloco": {"local_steps": 4, "fragments": 2, "overlap_steps": 1},
}


def train(name, mesh, place=jnp.asarray, *, compile=False):
    """Committed parameters after each call, in a list; the form is the default."""
    tx = getattr(acco_jax, name)(problem.adamw(), mesh=mesh, **METHODS[name])
    workers, steps = mesh.size, tx.steps_per_call
    theta, batches, counts = problem.draw(workers, steps, HELD, CALLS)
    replicated = jax.NamedSharding(mesh, jax.P())
    params, state = acco_jax.start(tx, jax.device_put(theta, replicated))
    step = acco_jax.make_train_step(problem.loss_fn, tx, microbatches=HELD)
    several = len({d.process_index for d in mesh.devices.flat}) > 1
    assert step.form == ("split" if several else "fused")
    points = []
    for batch, count in zip(batches, counts, strict=True):
        batch, count = tuple(map(place, batch)), place(count.astype(np.int32))
        if compile and not points:
            step.compile(params, state, batch, count)
        params, state, _ = step(params, state, batch, count)
        held = acco_jax.committed_params(state, params)
        flat = [np.ravel(x.addressable_data(0)) for x in jax.tree.leaves(held)]
        points.append(np.concatenate(flat).tolist())
    return points


@pytest.mark.slow
def test_two_processes():
    outputs = programs.together(
        "tests.methods.local.worker", 2, lambda i, port: (i, 2, port)
    )
    (line,) = [x for x in outputs[0].splitlines() if x.startswith("RESULT")]
    result = json.loads(line.removeprefix("RESULT"))
    for name in METHODS:
        expected = train(name, make_mesh(2))
        assert expected[0] != expected[-1]
        np.testing.assert_allclose(result[name], expected, rtol=0, atol=1e-12)
