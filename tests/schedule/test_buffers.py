"""Blocks of packed buffers are such as TPUs reduce-scatter; compiled, nothing run."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import acco_jax
from acco_jax.core.buffers import TILE, WIDTHS, _padded
from acco_jax.plan import programs
from acco_jax.schedule import topologies

CHIPS = ["tpu:v6e:2x2", "tpu:v5p:2x2x1", "tpu:tpu7x:2x2x1"]


def kinds(machine, rows, width):
    """The collectives that become of the reduce-scatter of such blocks."""
    mesh = programs.data_mesh(topologies.parse(machine))

    def scatter(x):
        x = lax.optimization_barrier(x)
        x = lax.psum_scatter(x, "data", scatter_dimension=0, tiled=True)
        return lax.optimization_barrier(x)

    n = mesh.size
    run = jax.shard_map(
        scatter, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    x = jax.ShapeDtypeStruct(
        (n * n * rows, width), jnp.bfloat16, sharding=jax.NamedSharding(mesh, P("data"))
    )
    options = acco_jax.compiler_options(mesh.devices.flat[0].device_kind)
    text = jax.jit(run).lower(x).compile(compiler_options=options).as_text()
    return set(re.findall(r"(reduce-scatter|all-reduce|all-to-all)(?=[-.( ])", text))


@pytest.mark.fast(
    "tpu:tpu7x:*-128",
    slow=("tpu:v6e:*-1024", "tpu:v6e:*-768", "tpu:v5p:*-512", "tpu:tpu7x:*-256"),
)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("machine", CHIPS)
def test_blocks_are_scattered(machine, width):
    try:
        topologies.mesh(topologies.parse(machine))
    except ValueError as error:  # this libtpu does not know the chip
        pytest.skip(str(error))
    for size in (10_127 * 768, 15_233 * 1024, 40_561 * 512, 77 * 128):
        rows = _padded(size, width) // width
        assert rows % TILE == 0 and rows * width >= size
        assert kinds(machine, rows, width) == {"reduce-scatter"}, rows


def test_why_there_is_a_rule():
    assert "all-reduce" in kinds("tpu:v6e:2x2", TILE * 1901, 1024)
    assert "all-reduce" in kinds("tpu:v6e:2x2", TILE * 305, 768)  # 3 x 305 = 915
    assert kinds("tpu:v6e:2x2", TILE * 631, 1024) == {"reduce-scatter"}
