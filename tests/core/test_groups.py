"""Groups of devices as workers, in the library: as many single devices, exactly."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import acco_jax
from acco_jax.models import transformer
from acco_jax.models.placement import split_rows
from acco_jax.schedule import hlo, schedules
from tests.reference import make_mesh

pytestmark = pytest.mark.usefixtures("x64", "compiled_here")

CONFIG = transformer.Config(
    vocab_size=34, max_length=8, width=8, layers=2, heads=2, window=4,
    dtype=jnp.float64, param_dtype=jnp.float64,
)  # fmt: skip
MODEL = transformer.model(CONFIG)
LOCAL = {"local_steps": 2}
METHODS = {"acco": {}, "diloco": LOCAL}
MORE = {"zero1": {}, "dpu": {}, "wp": {}, "fused_zero1": {}, "gossip": LOCAL,
        "slowmo": LOCAL, "co2": LOCAL}  # fmt: skip


def test_a_split_over_two_axes_is_kept_or_none():
    sizes = {"data": 2, "a": 2, "b": 2, "fsdp": 2}
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    shapes = {name: jax.ShapeDtypeStruct((n, 6), "f4") for name, n in
              {"fits": 8, "odd": 6, "unknown": 8}.items()}  # fmt: skip
    specs = {"fits": P(("a", "b")), "odd": P(("a", "b")), "unknown": P(("a", "c"))}
    assert acco_jax.group_specs(shapes, mesh, specs=specs) == {
        "fits": P(("a", "b"), "fsdp"), "odd": P("fsdp", None),
        "unknown": P("fsdp", None),
    }  # fmt: skip


def test_a_spec_longer_than_its_array_is_refused():
    mesh = AbstractMesh((2, 2), ("data", "tensor"))
    shape = {"b": jax.ShapeDtypeStruct((4,), "f4")}
    with pytest.raises(ValueError, match=r"has more dimensions than .* shape \(4,\)"):
        acco_jax.group_specs(shape, mesh, specs={"b": P(None, "tensor")})


def started(sizes, method="acco", **options):
    """(tx, step, params, state) on a mesh of these axes."""
    n = int(np.prod(list(sizes.values())))
    kinds = (AxisType.Auto,) * len(sizes)
    mesh = jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), kinds, devices=jax.devices()[:n]
    )
    params = MODEL.init(jax.random.key(0))
    specs = acco_jax.group_specs(
        params,
        mesh,
        specs=MODEL.tensor(params, sizes.get("tensor", 1)),
        stacked=MODEL.stacked(params),
    )
    placed = jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), params, specs
    )
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-3))
    tx = getattr(acco_jax, method)(inner, mesh=mesh, param_specs=specs, **options)
    loss = lambda p, batch, rng: MODEL.loss(p, split_rows(batch), rng)  # noqa: E731
    step = acco_jax.make_train_step(loss, tx, microbatches=2)
    return tx, step, *acco_jax.start(tx, placed)


def trained(sizes, method="acco", **options):
    """(losses, committed parameters, parameters) after four calls."""
    tx, step, params, state = started(sizes, method, **options)
    draw, losses = np.random.default_rng(0), []
    for _ in range(4):
        rows = 2 * 2 * 2 * tx.steps_per_call
        tokens = draw.integers(0, 34, (rows, 9)).astype(np.int32)
        params, state, metrics = step(params, state, {"tokens": tokens})
        losses.append(metrics["loss"])
    return losses, acco_jax.committed_params(state, params), params


@pytest.mark.fast(slow=("acco",))
@pytest.mark.parametrize("method", [*METHODS, *MORE])
def test_a_group_is_as_exact_as_a_device(method):
    """A run of acco in groups is in the fast tier: tests/run/test_groups.py."""
    options = (METHODS | MORE)[method]
    losses, theta, _ = trained({"data": 2}, method, **options)
    sizes = {"data": 2, "fsdp": 2, "tensor": 2}
    found, grouped, params = trained(sizes, method, **options)
    chex.assert_trees_all_close(found, losses, rtol=1e-9)
    chex.assert_trees_all_close(grouped, theta, rtol=1e-9, atol=1e-11)
    kernel = params["h"]["0_global"]["mlp"]["c_fc"]["kernel"]
    (shape,) = {s.data.shape for s in kernel.addressable_shards}
    assert np.prod(kernel.shape[-2:]) == 4 * np.prod(shape[-2:])


def test_no_thread_sends_beside_gradients_that_communicate():
    tx, *_ = started({"data": 2, "fsdp": 2})
    with pytest.raises(ValueError, match="over fsdp, and devices might") as error:
        acco_jax.make_train_step(MODEL.loss, tx, microbatches=2, form="split")
    assert "\n" not in str(error.value) and "form='fused'" in str(error.value)


def test_what_a_group_splits():
    mesh = AbstractMesh((2, 4, 2), ("data", "fsdp", "tensor"))
    shapes = {
        "stack": (4, 8, 16),  # of four layers
        "columns": (12, 16),
        "odd": (7, 9),
        "bias": (16,),
        "table": (6, 64),
        "cut": (3, 8),  # its spec does not divide
    }
    params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
    given = dict.fromkeys(params, P()) | {
        "columns": P(None, "tensor"), "bias": P("tensor"), "cut": P("tensor")
    }  # fmt: skip
    stacked = {k: k == "stack" for k in params}
    assert acco_jax.group_specs(params, mesh, specs=given, stacked=stacked) == {
        "stack": P(None, None, "fsdp"),
        "columns": P("fsdp", "tensor"),
        "odd": P(None, None),
        "bias": P("tensor"),
        "table": P(None, "fsdp"),
        "cut": P(None, "fsdp"),
    }
    alone = AbstractMesh((2,), ("data",))
    assert set(acco_jax.group_specs(params, alone).values()) == {
        P(*[None] * n) for n in (1, 2, 3)
    }


@pytest.mark.slow
def test_weights_are_gathered_over_rows_alone():
    """A layer's heads and hidden units stay on their devices."""
    tx, step, params, state = started({"data": 1, "fsdp": 2, "tensor": 2})
    batch = {"tokens": np.zeros((4, 9), np.int32)}
    text = step.lower(params, state, batch).compile().as_text()
    found = schedules.read(text).collectives
    over = [
        {c.kind for c in found if c.groups == hlo.axis_groups(tx.mesh.shape, axis)}
        for axis in ("fsdp", "tensor")
    ]
    assert "all-gather" in over[0]
    assert over[1] and "all-gather" not in over[1]


def test_the_norm_counts_what_a_group_has_copies_of_once():
    mesh = make_mesh(2, 2, names=("data", "model"))
    specs = {"copied": P(), "split": P(None, "model")}
    tx = acco_jax.zero1(optax.sgd(0.1), mesh=mesh, param_specs=specs)
    start = {"copied": jnp.ones(64), "split": jnp.ones((64, 8))}
    step = acco_jax.make_train_step(
        lambda p, x, rng: (3 * p["copied"].sum() + 4 * p["split"].sum()) * x.mean(),
        tx,
        microbatches=1,
    )
    *_, metrics = step(*acco_jax.start(tx, start), np.ones((2, 1)))
    wanted = np.sqrt(9 * 64 + 16 * 64 * 8)
    np.testing.assert_allclose(metrics["grad_norm"], wanted, rtol=1e-6)
