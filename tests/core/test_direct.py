"""Collectives made of permutes, beside NumPy's sums and concatenations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from acco_jax.core import direct


@pytest.mark.parametrize("n", [2, 3, 8])
def test_permutes_are_the_collectives(n):
    mesh = Mesh(np.array(jax.devices()[:n]), ("data",))
    whole = np.random.default_rng(n).integers(-9, 9, (n, 2 * n, 3)).astype(np.float32)

    def both(x):
        return direct.reduce_scatter(x[0], "data"), direct.all_gather(x[0, :2], "data")

    spec = P("data")
    run = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=spec, out_specs=spec))
    text = run.lower(jnp.asarray(whole)).as_text()
    assert text.count("stablehlo.collective_permute") == 2 * (n - 1)
    for name in ("reduce_scatter", "all_gather", "all_reduce", "all_to_all"):
        assert f"stablehlo.{name}" not in text
    scattered, gathered = run(whole)
    np.testing.assert_array_equal(scattered, whole.sum(0))
    first = whole[:, :2].reshape(-1, 3)
    np.testing.assert_array_equal(gathered, np.tile(first, (n, 1)))
