"""What all workers have copies of: one bit that differs is seen, and whose it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from acco_jax.run import preparation
from acco_jax.run.state import replicas

MESH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("domain", "data"))


def everywhere(value, mesh=MESH):
    return jax.device_put(value, NamedSharding(mesh, P()))


def with_copies(x, change, workers):
    """An array of which some workers hold `change` of its bits."""
    copies = []
    for worker, device in enumerate(x.sharding.mesh.devices.flat):
        copy = np.array(x.addressable_shards[0].data)
        if worker in workers:
            change(copy.reshape(-1).view(f"u{x.dtype.itemsize}"))
        copies.append(jax.device_put(copy, device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, copies)


def flip(bit=0, at=5):
    def change(bits):
        bits[at] ^= bits.dtype.type(1 << bit)

    return change


def swap(bits):
    bits[[1, 4]] = bits[[4, 1]]


def tree(**changes):
    draw = np.random.default_rng(0).normal(size=(6, 7)).astype(np.float32)
    arrays = {"half": jnp.bfloat16(draw), "odd": np.float32([np.nan, -0.0, 1e-42]),
              "step": np.int32(3), "w": draw}  # fmt: skip
    return {k: everywhere(v) for k, v in arrays.items()} | changes


@pytest.fixture(scope="module")
def comparison():
    return replicas.Comparison(MESH)


def negated_zero(bits):
    bits[1] = 0


def other_nan(bits):
    bits[0] ^= 1


@pytest.mark.parametrize(
    ("name", "change"),
    [("w", flip()), ("w", flip(31)), ("half", flip(15, 41)), ("step", flip(0, 0)),
     ("w", swap), ("odd", negated_zero), ("odd", other_nan), ("odd", flip(0, 2))],
)  # fmt: skip
def test_one_workers_bit_is_named(comparison, name, change):
    comparison.check(7, tree())
    spoiled = with_copies(tree()[name], change, {2})
    with pytest.raises(replicas.ReplicasDiffer) as error:
        comparison.check(8, tree(**{name: spoiled}))
    line, device = str(error.value), MESH.devices.flat[2]
    assert f"by half-round 8: worker 2 (process 0 on {replicas._hosts()[0]}" in line
    assert f"{device}) holds other bits of {name} than most" in line
    assert "\n" not in line


def test_it_is_judged_late_unless_the_step_waits(comparison):
    spoiled = tree(w=with_copies(tree()["w"], flip(3), {0}))
    comparison.send(1, spoiled)
    with pytest.raises(replicas.ReplicasDiffer, match=r"half-round 1: worker 0"):
        comparison.send(2, tree())
    comparison.judge()
    with pytest.raises(replicas.ReplicasDiffer):
        replicas.Comparison(MESH, late=False).send(1, spoiled)
    replicas.Comparison(MESH, enabled=False).check(1, spoiled)


def test_without_a_majority_nobody_is_accused(comparison):
    w = with_copies(tree()["w"], flip(3), {0, 1})
    odd = with_copies(tree()["odd"], flip(3, 0), {0, 1})
    with pytest.raises(replicas.ReplicasDiffer, match="no majority") as error:
        comparison.check(1, tree(w=w, odd=odd))
    assert "worker 0" in str(error.value) and "worker 3" in str(error.value)
    assert "different bits of odd and 1 other arrays" in str(error.value)


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([1, 1, 1], ([], True)),
        ([1, 2, 1], ([1], True)),
        ([3, 1, 2, 1, 1], ([0, 2], True)),
        ([1, 2], ([0, 1], False)),
    ],
)
def test_majority(rows, found):
    assert replicas.differing(np.array(rows)[:, None]) == found


@pytest.mark.parametrize(
    "dtype", ["bool", "int4", "float8_e4m3fn", "uint16", "float32", "complex64"]
)
def test_every_dtype_has_a_checksum(dtype):
    ones = (np.zeros((3, 5)), np.eye(3, 5), np.eye(3, 5, 1))
    sums = [int(replicas.checksum(jnp.asarray(x, dtype))) for x in ones]
    assert len(set(sums)) == 3


def test_64_bits_and_keys_have_checksums():
    keys = [replicas.checksum(jax.random.key(seed)) for seed in (0, 1)]
    assert keys[0] != keys[1]
    with jax.enable_x64(True):
        x = jnp.ones((2, 3), jnp.float64)
        assert replicas.checksum(x) != replicas.checksum(x.at[1, 2].add(1e-16 * 3))


def test_what_is_compared():
    halves = jax.device_put(np.ones(4), NamedSharding(MESH, P("data")))
    rows = jax.device_put(np.ones(4), NamedSharding(MESH, P(("domain", "data"))))
    here = jnp.ones(3)
    found = replicas.replicated(
        {"a": everywhere(1.0), "b": [halves, rows, here, np.ones(2), None]}, MESH
    )
    assert list(found) == ["a"]


def test_less_than_never_is_refused(tiny, tmp_path):
    with pytest.raises(ValueError, match="compare_replicas_every is -1: give 0 for"):
        preparation.prepare(tiny(compare_replicas_every=-1), tmp_path)
