"""Both layouts: round trips, padding, meshes of several axes and kinds."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import acco_jax
from acco_jax import layout as layouts
from acco_jax.layout import LeafLayout, PackedLayout
from tests.reference import AUTO, EXPLICIT, Unsharded, draw, make_mesh, parameters

pytestmark = pytest.mark.usefixtures("x64")
SHAPES = {"b": (13,), "big": (8, 2048), "s": (), "t": (3, 4, 5), "w": (6, 16)}
SPECS = {
    "b": P(),
    "big": P(None, "model"),
    "s": P(),
    "t": P(None, "model"),
    "w": P("model"),
}
KINDS = {"auto": AUTO, "explicit": EXPLICIT}
INNER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-1))


def gpt2():
    block = {
        "ln1_scale": (768,), "ln1_bias": (768,),
        "qkv": (768, 2304), "qkv_bias": (2304,),
        "out": (768, 768), "out_bias": (768,), "ln2_scale": (768,), "ln2_bias": (768,),
        "up": (768, 3072), "up_bias": (3072,), "down": (3072, 768), "down_bias": (768,),
    }  # fmt: skip
    tree = {"wte": (50257, 768), "wpe": (1024, 768), "scale": (768,), "bias": (768,)}
    return tree | {f"h{i}": block for i in range(12)}


@pytest.mark.parametrize("n", [1, 8, 64, 512])
def test_padding_stays_below_one_percent(n):
    params = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.bfloat16),
        gpt2(),
        is_leaf=lambda s: isinstance(s, tuple),
    )
    mesh = AbstractMesh((n,), ("data",), axis_types=(AUTO,))
    described = layouts.describe(params, mesh=mesh, axis=("data",))
    assert len(described[1]) == 148
    (group,) = layouts.packed_layout(*described, mesh, ("data",)).groups
    size = sum(leaf.size for leaf in described[1])
    assert 124_000_000 < size < 125_000_000
    assert size <= n * group.block < 1.01 * size
    assert group.rows % 16 == 0 and group.width % 128 == 0
    slots = sorted(group.slots, key=lambda s: s.start)
    for a, b in itertools.pairwise(slots):
        assert a.start + a.size <= b.start
    for s in slots:
        assert s.size * n >= described[1][s.leaf].size
        assert not s.aligned or s.start % group.width == s.size % group.width == 0


@functools.cache
def method(kind, layout, sizes=(4, 2), specs=True, names=("data", "model")):
    mesh = make_mesh(*sizes, names=names, types=KINDS[kind])
    return acco_jax.acco(
        INNER,
        mesh=mesh,
        layout=layout,
        axis_name=("slice", "chip") if "slice" in names else "data",
        param_specs=SPECS if specs else None,
    )


def placed(mesh, tree=None):
    tree = tree or parameters(SHAPES)
    return {
        k: jax.device_put(x, NamedSharding(mesh, SPECS[k])) for k, x in tree.items()
    }


@pytest.mark.parametrize("layout", ["packed", "leaf"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_axis_beside_the_data_axis(kind, layout):
    """Clipping must count a leaf once, whether the model axis splits it or not."""
    tx = method(kind, layout, specs=kind == "auto")
    theta = parameters(SHAPES)
    params = placed(tx.mesh)
    state, update = tx.init(params), jax.jit(tx.update)
    gradients = draw(SHAPES, 4, 5, 0)
    expected = Unsharded(INNER).acco(theta, gradients, [[1, 1, 0, 2]] * 5)
    for g, (here, committed) in zip(gradients, expected, strict=True):
        updates, state = update(g, state, params, weight=np.array([1, 1, 0, 2]))
        params = jax.jit(optax.apply_updates)(params, updates)
        chex.assert_trees_all_close(params, here, rtol=0, atol=1e-12)
        held = acco_jax.committed_params(state, params)
        chex.assert_trees_all_close(held, committed, rtol=0, atol=1e-12)
    for k, spec in SPECS.items():  # they stay where the model axis put them
        home = NamedSharding(tx.mesh, spec)
        assert held[k].sharding.is_equivalent_to(home, held[k].ndim)
        assert updates[k].sharding.is_equivalent_to(home, held[k].ndim)
    eighth = {"big", "w"} if layout == "leaf" else {"big", "t", "w"}
    for k, x in state.master.items():
        (shape,) = {s.data.shape for s in x.addressable_shards}
        if k in eighth:
            assert np.prod(shape) * 8 <= x.size
        elif layout == "packed":
            assert np.prod(shape) * 4 == x.size
    chex.assert_trees_all_equal_shapes(state.master, state.inner[1][0].mu)


@pytest.mark.parametrize("kind", KINDS)
def test_the_step_with_a_model_axis(kind):
    tx = method(kind, "packed", specs=kind == "auto")

    def loss(p, batch, rng):
        out = jnp.tanh(batch @ p["w"]).sum() * p["s"] + (p["b"] ** 2).sum()
        return out + (p["big"] ** 2).mean() + (p["t"] ** 2).sum()

    step = acco_jax.make_train_step(loss, tx, mesh=tx.mesh, microbatches=2)
    theta, params = parameters(SHAPES), placed(tx.mesh)
    state = tx.init(params)
    gradient = jax.jit(jax.grad(loss))
    reference, points, at = Unsharded(INNER), [], theta
    batches = [np.random.default_rng(h).normal(size=(8, 6)) for h in range(4)]
    gradients = []
    for h, batch in enumerate(batches):
        rows = [
            jax.tree.map(
                lambda a, b: np.asarray(a + b)[None],
                gradient(at, batch[2 * i : 2 * i + 1], None),
                gradient(at, batch[2 * i + 1 : 2 * i + 2], None),
            )
            for i in range(4)
        ]
        gradients.append(jax.tree.map(lambda *x: np.concatenate(x), *rows))
        points = reference.acco(theta, gradients, [[2] * 4] * (h + 1))
        at = points[-1][0]
        params, state, _ = step(params, state, batch)
        chex.assert_trees_all_close(params, at, rtol=1e-9, atol=1e-11)


def test_specs_are_needed_where_they_cannot_be_seen():
    tx = method("auto", "auto", specs=False)
    with pytest.raises(ValueError, match=r"'model' is Auto.*pass param_specs") as error:
        tx.init(placed(tx.mesh))
    assert "\n" not in str(error.value)
    for specs, words in (
        (SPECS | {"w": P("data")}, "is the data axis"),
        (SPECS | {"w": P("pipe")}, "no axis of the mesh"),
        (SPECS | {"b": P("model")}, "does not divide b"),
        (SPECS | {"s": P("model")}, "does not divide s"),
    ):
        tx = acco_jax.acco(INNER, mesh=make_mesh(4, 2), param_specs=specs)
        with pytest.raises(ValueError, match=words) as error:
            tx.init(parameters(SHAPES))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("layout", ["packed", "leaf"])
def test_two_data_axes(layout):
    tx = method("auto", layout, (2, 2), False, ("slice", "chip"))
    theta = parameters(SHAPES)
    params, state, update = theta, tx.init(theta), jax.jit(tx.update)
    gradients = draw(SHAPES, 4, 5, 1)
    expected = Unsharded(INNER).acco(theta, gradients, [[1, 2, 3, 4]] * 5)
    for g, (here, _) in zip(gradients, expected, strict=True):
        updates, state = update(g, state, params, weight=np.array([1, 2, 3, 4]))
        params = optax.apply_updates(params, updates)
        chex.assert_trees_all_close(params, here, rtol=0, atol=1e-12)

    def loss(p, batch, rng):
        return jnp.sum(batch) * p["s"]

    run = acco_jax.local_gradients(
        loss, mesh=tx.mesh, microbatches=1, axis_name=("slice", "chip")
    )
    grads, _, _ = run(theta, np.arange(4.0)[:, None])
    np.testing.assert_array_equal(grads["s"], np.arange(4.0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["packed", "leaf"])
def test_inputs_are_put_where_they_belong(kind, layout):
    """NumPy, unplaced, on one device, replicated: eager and jitted, all the same."""
    mesh = make_mesh(2, types=KINDS[kind])
    tx = acco_jax.acco(INNER, mesh=mesh, layout=layout)
    theta = parameters({"b": (7,), "w": (4, 6)})
    (g,) = draw({"b": (7,), "w": (4, 6)}, 2, 1, 0)
    everywhere = NamedSharding(mesh, P())
    ways = [
        lambda t: t,
        lambda t: jax.tree.map(jnp.asarray, t),
        lambda t: jax.device_put(t, jax.devices()[0]),
        lambda t: jax.device_put(t, everywhere),
    ]
    outs = []
    jitted = jax.jit(tx.update)
    for i, put in enumerate(ways):
        for init in (tx.init, jax.jit(tx.init)):
            if i == 2 and init is not tx.init:
                continue  # jax itself refuses other devices than the mesh's
            state = init(put(theta))
            sizes = {
                x.size // s.data.size
                for x in jax.tree.leaves(state.master)
                for s in x.addressable_shards
            }
            assert 2 in sizes  # sharded from the start
        for update in (tx.update, jitted):
            if i == 2 and update is jitted:
                continue
            _, held = update(put(g), state, put(theta))
            updates, held = update(put(g), held, put(theta))
            outs.append(jax.tree.map(np.asarray, (updates, held.master)))
    for out in outs[1:]:
        chex.assert_trees_all_close(out, outs[0], rtol=1e-14)


def test_state_is_never_whole_on_one_device():
    shapes = {"p": (257, 259), "w": (64, 128)}
    theta = parameters(shapes)
    for layout, kind in (("packed", PackedLayout), ("leaf", LeafLayout)):
        tx = acco_jax.acco(INNER, mesh=make_mesh(4), layout=layout)
        for state in (tx.init(theta), jax.jit(tx.init)(theta)):
            assert isinstance(state.layout, kind)
            for tree in (state.master, state.inner[1][0].mu, state.carry):
                for k, x in tree.items():
                    biggest = max(s.data.size for s in x.addressable_shards)
                    assert biggest <= 1.02 * np.prod(shapes[k]) / 4 + 300


@pytest.mark.parametrize("kind", ["packed", "leaf"])
@pytest.mark.parametrize("sizes", [(1,), (4,), (4, 2)])
def test_round_trips(kind, sizes):
    mesh = make_mesh(*sizes)
    theta = parameters(SHAPES | {"p": (257, 259)})
    specs = SPECS | {"p": P()} if len(sizes) > 1 else None
    args = layouts.describe(theta, mesh=mesh, axis=("data",), param_specs=specs)
    make = layouts.packed_layout if kind == "packed" else layouts.leaf_layout
    layout = make(*args, mesh, ("data",))
    params = jax.device_put(theta, layout.params_shardings)

    @jax.jit
    def around(params):
        shards = layout.shard(params)
        full = layout.unpack(layout.all_gather(layout.join(shards), "data"))
        return shards, layout.gather_exact(shards), full

    shards, exact, full = around(params)
    chex.assert_trees_all_equal(exact, theta)
    chex.assert_trees_all_equal(full, theta)
    chex.assert_trees_all_equal_shapes(shards, layout.shards)
    n = sizes[0]
    (rows,) = draw(SHAPES | {"p": (257, 259)}, n, 1, 0)
    rows = jax.device_put(rows, layout.grads_shardings)

    @jax.jit
    def summed(grads):
        raw = layout.reduce_scatter(layout.pack(grads), "data")
        return layout.gather_exact(layout.split(raw))

    total = summed(rows)
    chex.assert_trees_all_equal(
        total, jax.tree.map(lambda g: np.asarray(g).sum(0), rows)
    )
    assert not any(np.asarray(b).any() for b in jax.jit(layout.zeros)())
