"""Bytes sent are those of the collectives in the program, however it holds them."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import acco_jax
from acco_jax.schedule import footprint
from acco_jax.schedule.footprint import Transfer, bytes_sent, collectives
from tests.reference import make_mesh

PARAMS = {"b": (256,), "w": (256, 256), "x": (3, 256)}
SIZE = 256 + 256 * 256 + 3 * 256


def loss_fn(params, batch, rng):
    x = jnp.tanh(batch @ params["w"] + params["b"]) * params["x"].sum(0)
    return jnp.mean(x.astype(jnp.float32) ** 2)


@functools.cache
def step_of(method, n, form="fused", comm_dtype=None):
    """A train step and abstract arguments for it."""
    mesh = make_mesh(n)
    tx = getattr(acco_jax, method)(optax.adamw(1e-3), mesh=mesh, comm_dtype=comm_dtype)
    params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in PARAMS.items()}
    state = jax.eval_shape(tx.init, params)
    put = lambda tree, to: jax.tree.map(  # noqa: E731
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, to
    )
    step = acco_jax.make_train_step(loss_fn, tx, microbatches=2, form=form)
    rows = NamedSharding(mesh, P("data"))
    batch = jax.ShapeDtypeStruct((2 * n, 256), jnp.float32, sharding=rows)
    arrays = (
        put(params, state.layout.params_shardings),
        put(state, acco_jax.state_shardings(tx, params)),
    )
    return tx, step, (*arrays, batch)


def in_step(*args, **kwargs):
    tx, step, arrays = step_of(*args, **kwargs)
    found = [c for p in step.lowered(*arrays) for c in collectives(p)]
    return tx, [c for c in found if c.whole >= footprint.NEGLIGIBLE], arrays


@pytest.mark.parametrize("form", ["fused", "split"])
@pytest.mark.parametrize("n", [2, 4])
def test_zero1_is_one_reduce_scatter_and_one_all_gather(n, form):
    _, found, _ = in_step("zero1", n, form)
    kinds = [(c.kind, c.dtype, c.group, c.times) for c in found]
    assert kinds == [("reduce_scatter", "f32", n, 1), ("all_gather", "f32", n, 1)]
    for c in found:  # padded to whole rows for every worker
        assert 4 * SIZE <= c.whole <= 4 * (SIZE + n * 16 * 1024)
        assert c.sent == (n - 1) / n * c.whole


@pytest.mark.parametrize("form", ["fused", "split"])
def test_acco_sends_twice_per_optimizer_step_what_zero1_sends(form):
    per_step = {}
    for method in ("acco", "zero1", "dpu"):
        tx, step, arrays = step_of(method, 4, form)
        per_step[method] = tx.calls_per_step * bytes_sent(*step.lowered(*arrays))
    assert per_step["acco"] == 2 * per_step["zero1"] > 0
    assert per_step["dpu"] == per_step["zero1"]


def test_one_worker_sends_nothing():
    _, step, arrays = step_of("acco", 1)
    assert bytes_sent(*step.lowered(*arrays)) == 0


def test_the_wire_dtype_counts_not_what_the_cpu_makes_of_it():
    _, wide, _ = in_step("acco", 4)
    _, narrow, _ = in_step("acco", 4, comm_dtype=jnp.bfloat16)
    assert {c.dtype for c in narrow} == {"bf16"}
    assert sum(c.sent for c in narrow) == sum(c.sent for c in wide) / 2


def test_a_collective_inside_the_layers_loop_counts_for_every_layer():
    from acco_jax.models import transformer

    model = transformer.Config(
        vocab_size=64, max_length=8, width=32, layers=6, heads=2, window=4
    )
    mesh = make_mesh(4)
    tx = acco_jax.fused_zero1(optax.sgd(1e-3), mesh=mesh)
    params = jax.eval_shape(lambda: transformer.init_params(model, jax.random.key(0)))
    state = jax.eval_shape(tx.init, params)
    step = acco_jax.make_train_step(transformer.loss_fn(model), tx, microbatches=2)
    tokens = jax.ShapeDtypeStruct((8, 9), jnp.int32)
    lowered = step.lower(params, state, {"tokens": tokens})
    found = collectives(lowered)
    times = collections.Counter(c.times for c in found if c.kind == "reduce_scatter")
    assert times[3] >= 1  # 6 layers in 3 repetitions of (global, local)
    reduced = sum(c.times * c.whole for c in found if c.kind == "reduce_scatter")
    gathered = sum(c.times * c.whole for c in found if c.kind == "all_gather")
    assert reduced >= gathered >= 4 * transformer.count_params(model)


def lowered(local, n=4, platform="cpu"):
    mesh = make_mesh(n)
    fn = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
    )
    shapes = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    traced = jax.jit(fn).trace(shapes, jax.ShapeDtypeStruct((n,), jnp.int32))
    return traced.lower(lowering_platforms=(platform,))


RING = [(0, 1), (1, 2), (2, 3), (3, 0)]
FOUR = 64 * 32 * 4  # bytes


@pytest.mark.parametrize(
    ("local", "expected"),
    [
        (lambda x, k: lax.psum(x, "data"), 2 * 3 / 4 * FOUR),
        (lambda x, k: lax.psum(x[:4], "data"), 0),  # 512 bytes: not counted
        (lambda x, k: lax.ppermute(x, "data", RING), FOUR),
        (lambda x, k: lax.ppermute(x, "data", [(i, i) for i in range(4)]), 0),
        (lambda x, k: lax.all_to_all(x, "data", 0, 0, tiled=True), 3 / 4 * FOUR),
        (lambda x, k: lax.all_gather(x.astype(jnp.int8), "data"), 3 / 4 * FOUR),
        (lambda x, k: lax.all_gather(x.astype(jnp.int4), "data"), 3 / 8 * FOUR),
        (
            lambda x, k: lax.fori_loop(1, 6, lambda i, x: lax.pmean(x, "data"), x),
            5 * 2 * 3 / 4 * FOUR,
        ),
        (
            lambda x, k: lax.while_loop(
                lambda c: c[0] < 7,
                lambda c: (c[0] + 2, lax.ppermute(c[1], "data", RING)),
                (0, x),
            ),
            4 * FOUR,
        ),
        (
            lambda x, k: lax.switch(
                k[0], [lambda x: x, lambda x: lax.ppermute(x, "data", RING)], x
            ),
            FOUR,
        ),
    ],
)
def test_ring_costs(local, expected):
    assert bytes_sent(lowered(local)) == expected


def test_a_broadcast_is_passed_on():
    def local(x, k):
        return lax.pbroadcast(x, ("data",), 0)

    assert bytes_sent(lowered(local, platform="cuda")) == FOUR


def test_a_loop_whose_step_is_not_its_own_is_refused():
    def local(x, k):
        def body(c):
            return c[1] + 2, c[1], lax.ppermute(c[2], "data", RING)

        return lax.while_loop(lambda c: c[0] < 7, body, (0, k[0], x))

    with pytest.raises(ValueError, match="loop whose length"):
        bytes_sent(lowered(local))


def test_a_ragged_all_to_all_cannot_be_counted():
    def local(x, k):
        n = jnp.repeat(k, 4)
        return lax.ragged_all_to_all(x, x, n, n, n, n, axis_name="data")

    with pytest.raises(ValueError, match=r"ragged all-to-all .* jax\.lax\.all_to_all"):
        bytes_sent(lowered(local, platform="cuda"))


def test_groups_are_those_of_the_axis():
    mesh = make_mesh(2, 4)
    fn = jax.shard_map(
        lambda x: lax.psum(x, "data"), mesh=mesh, in_specs=P(), out_specs=P(),
        check_vma=False,
    )  # fmt: skip
    (found,) = collectives(jax.jit(fn).lower(np.zeros((64, 32), np.float32)))
    assert found == Transfer("all_reduce", "f32", (64, 32), group=2)


def test_a_loop_of_unknown_length_is_refused_in_one_line():
    def local(x, k):
        return lax.fori_loop(0, k[0], lambda i, x: lax.pmean(x, "data"), x)

    with pytest.raises(ValueError, match="loop whose length") as error:
        bytes_sent(lowered(local))
    assert "\n" not in str(error.value)


def test_bytes_held_are_one_devices_share():
    mesh = make_mesh(4)
    tree = {
        "split": jax.device_put(
            np.zeros((8, 3), np.float32), NamedSharding(mesh, P("data"))
        ),
        "whole": jax.ShapeDtypeStruct(
            (5,), jnp.bfloat16, sharding=NamedSharding(mesh, P())
        ),
        "key": jax.device_put(jax.random.key(0), NamedSharding(mesh, P())),
    }
    assert footprint.bytes_held(tree) == 2 * 3 * 4 + 5 * 2 + 8
