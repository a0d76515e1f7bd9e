"""What works on a mesh of jax.set_mesh's style, Explicit, as on one of Auto axes."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial

import acco_jax
from acco_jax.audit import devices
from tests.reference import AUTO, EXPLICIT, make_mesh

KINDS = pytest.mark.parametrize("types", [AUTO, EXPLICIT], ids=["auto", "explicit"])
SPEC = P(None, "model")


def draw(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def loss_fn(params, batch, rng):
    return jnp.mean((batch @ params["w"]) ** 2)


def split(mesh):
    """Parameters that the model axis splits."""
    return {"w": jax.device_put(draw(4, 4), NamedSharding(mesh, SPEC))}


def method(name, mesh, inner=None, **options):
    if "model" in mesh.axis_names and mesh.axis_types[0] == AUTO:
        options["param_specs"] = {"w": SPEC}
    return getattr(acco_jax, name)(inner or optax.adam(0.1), mesh=mesh, **options)


def trained(tx, params, loss=loss_fn, calls=2, **options):
    step = acco_jax.make_train_step(loss, tx, **{"microbatches": 1} | options)
    params, state = acco_jax.start(tx, params)
    rows = options.get("microbatches", 1)
    rows = getattr(rows, "most", rows) * 4 * tx.steps_per_call
    for _ in range(calls):
        params, state, _ = step(params, state, draw(rows, 4))
    return params, state


def same_on_both(compute, exact=True):
    auto, explicit = (jax.device_get(compute(types)) for types in (AUTO, EXPLICIT))
    if exact:
        chex.assert_trees_all_equal(auto, explicit)
    else:
        chex.assert_trees_all_close(auto, explicit, rtol=1e-5, atol=1e-6)
    return explicit


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("acco", (4, 4), {"reduce_bits": 8}),
        ("acco", (257, 257), {}),  # blocks that nothing divides
        ("fused_zero1", (3,), {}),
        ("zero1", (4, 4), {}),
    ],
)
def test_more_workers_or_fewer(name, shape, options):
    def moved(types):
        before, after = (make_mesh(n, types=types) for n in (4, 2))
        made = acco_jax.start(method(name, before, **options), {"w": draw(*shape)})
        params, state = acco_jax.reshard(made, method(name, after, **options))
        return params, jax.tree.leaves(state)

    same_on_both(moved)


@pytest.mark.parametrize("how", ["reshard", "restore"])
def test_the_model_axis_splits_them_there_too(how, tmp_path):
    def moved(types):
        before, after = (make_mesh(n, 2, types=types) for n in (2, 1))
        made = trained(method("acco", before), split(before))
        if how == "reshard":
            params, state = acco_jax.reshard(made, method("acco", after))
        else:
            acco_jax.save(tmp_path / types.name, *reversed(made))
            params, state, _ = acco_jax.restore(
                tmp_path / types.name, method("acco", after), split(after)
            )
        assert params["w"].sharding.spec == SPEC == state.layout.leaves[0].spec
        return params, jax.tree.leaves(state)

    same_on_both(moved, exact=False)


@KINDS
def test_restored_inside_set_mesh(types, tmp_path):
    made = trained(method("acco", make_mesh(4, types=types)), {"w": draw(4, 4)})
    acco_jax.save(tmp_path / "saved", *reversed(made))
    mesh = make_mesh(2, types=types)
    with jax.set_mesh(mesh):
        tx = method("acco", mesh)
        found = acco_jax.restore(tmp_path / "saved", tx, {"w": draw(4, 4)})[:2]
    wanted = acco_jax.reshard(made, tx)
    chex.assert_trees_all_equal(jax.tree.leaves(found), jax.tree.leaves(wanted))


@KINDS
def test_param_specs_of_parameters_that_are_not_placed(types):
    mesh = make_mesh(2, 2, types=types)
    tx = acco_jax.acco(optax.adam(0.1), mesh=mesh, param_specs={"w": SPEC})
    _, state = acco_jax.start(tx, {"w": draw(4, 4)})
    placed = split(mesh)
    wanted = acco_jax.start(tx, placed)[1]
    assert state.layout.params_shardings["w"].spec == SPEC
    chex.assert_trees_all_equal(jax.tree.leaves(state), jax.tree.leaves(wanted))


INNERS = {
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "muon": lambda: optax.contrib.muon(0.1),
}


@pytest.mark.fast("adafactor-*", "muon-diloco")
@pytest.mark.parametrize("name", ["diloco", "cellm", "gossip"])
@pytest.mark.parametrize("inner", INNERS)
def test_local_methods_whose_optimizer_looks_at_whole_arrays(name, inner):
    options = {"diloco": {"local_steps": 1}, "cellm": {"local_steps": 1}}.get(name, {})

    def run(types):
        mesh = make_mesh(2, 2, types=types)
        tx = method(name, mesh, INNERS[inner](), **options)
        return trained(tx, split(mesh))[0]

    same_on_both(run, exact=False)


@pytest.mark.fast("1")
@pytest.mark.parametrize("microbatches", [1, 2, acco_jax.Halves(1, 3)], ids=str)
def test_programs_for_gpus(microbatches):
    """Their first collective waits for a loop's end, whose type has a sharding."""
    kinds = (AxisType.Explicit,) * 2
    grid = np.array(devices("gpu:h100:1x4")).reshape(2, 2)
    mesh = Mesh(grid, ("data", "model"), axis_types=kinds)
    tx = method("acco", mesh)
    at = NamedSharding(mesh, SPEC)
    params = {"w": jax.ShapeDtypeStruct((4, 4), np.float32, sharding=at)}
    step = acco_jax.make_train_step(loss_fn, tx, microbatches=microbatches)
    params, state = jax.eval_shape(functools.partial(acco_jax.start, tx), params)
    rows = getattr(microbatches, "most", microbatches)
    text = step.lower(params, state, draw(4 * rows, 4)).as_text()
    assert "reduce_scatter" in text


@KINDS
def test_a_loss_that_closes_over_an_array_of_the_mesh(types):
    mesh = make_mesh(2, types=types)
    tx = method("zero1", mesh)
    with jax.set_mesh(mesh):
        scale = jnp.arange(8.0)
        of = lambda scale, p, b, r: jnp.mean((b * scale[:4] @ p["w"]) ** 2)  # noqa: E731
        with pytest.raises(ValueError, match=r"closes over an array .* by jax\.tree"):
            trained(tx, {"w": draw(4, 4)}, functools.partial(of, scale))
        passed, _ = trained(tx, {"w": draw(4, 4)}, Partial(of, scale))
        known, _ = trained(tx, {"w": draw(4, 4)}, functools.partial(of, np.arange(8.0)))
    chex.assert_trees_all_close(passed, known, rtol=1e-6)


def test_an_array_of_the_loss_that_the_data_axis_splits():
    """Every worker gets it whole."""

    def run(types):
        mesh = make_mesh(2, types=types)
        scale = jax.device_put(draw(4), NamedSharding(mesh, P("data")))
        of = Partial(lambda scale, p, b, r: jnp.mean((b * scale @ p["w"]) ** 2), scale)
        return trained(method("zero1", mesh), {"w": draw(4, 4)}, of)[0]

    same_on_both(run)


@KINDS
def test_balanced_counts_inside_set_mesh(types):
    mesh = make_mesh(2, types=types)
    tx, counts = method("zero1", mesh), acco_jax.Balanced(4, 2)
    wanted, _ = trained(tx, {"w": draw(4, 4)}, microbatches=2)
    with jax.set_mesh(mesh):
        params, _ = trained(tx, {"w": draw(4, 4)}, microbatches=counts)
    chex.assert_trees_all_close(params, wanted, rtol=1e-6)
