"""How leaves are split: round trips, padding, meshes of several axes and kinds."""

import functools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import acco_jax
from acco_jax.core.buffers import Outgoing
from acco_jax.core.layout import Layout
from acco_jax.core.leaves import Leaf
from tests.examples import examples
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


def decoder(layers, width, hidden, vocabulary, length, kv=None, gated=False):
    """Shapes of a decoder's parameters, stacked over layers."""
    kv = kv or width
    block = {
        "ln1": (width,), "ln2": (width,), "q": (width, width), "k": (width, kv),
        "v": (width, kv), "out": (width, width), "up": (width, hidden),
        "down": (hidden, width),
    }  # fmt: skip
    if gated:
        block["gate"] = (width, hidden)
    else:
        block |= {"ln1b": (width,), "ln2b": (width,), "outb": (width,)}
        block |= {"upb": (hidden,), "downb": (width,)}
    tree = {"wte": (vocabulary, width), "ln": (width,)}
    tree |= {"head": (width, vocabulary)} if gated else {"wpe": (length, width)}
    return tree | {f"h/{k}": (layers, *s) for k, s in block.items()}


MODELS = {
    "GPT-2 small": decoder(12, 768, 3072, 50257, 1024),
    "GPT-Neo 2.7B": decoder(32, 2560, 10240, 50257, 2048),
    "Llama 3 8B": decoder(32, 4096, 14336, 128256, 0, kv=1024, gated=True),
}
SIZES = [(n,) for n in (8, 12, 16, 24, 48, 64, 96, 128, 192, 256, 384, 504, 512)]
SIZES += [(2, 8), (8, 8), (16, 8), (64, 8), (128, 4), (48, 8), (3, 8)]


def abstract(shapes, dtype=jnp.bfloat16):
    is_shape = lambda s: isinstance(s, tuple)  # noqa: E731
    make = lambda s: jax.ShapeDtypeStruct(s, dtype)  # noqa: E731
    return jax.tree.map(make, shapes, is_leaf=is_shape)


def layout_for(shapes, sizes, dtype=jnp.bfloat16):
    names = ("slice", "chip")[-len(sizes) :]
    mesh = AbstractMesh(sizes, names, axis_types=(AUTO,) * len(sizes))
    return Layout.of(abstract(shapes, dtype), mesh=mesh, axis=names)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_bytes_on_the_wire(model, sizes):
    """At most 1.02 times the parameters' cross the network, each way."""
    layout = layout_for(MODELS[model], sizes)
    psi = sum(math.prod(leaf.shape) for leaf in layout.leaves)
    (group,) = layout.groups
    packed = layout.workers * group.rows * group.width
    # an all-reduce in float32 crosses the network twice, where two ways of bf16 would
    whole = 2 * sum(leaf.size for leaf in layout.leaves if leaf.whole)
    assert psi <= packed + whole <= 1.02 * psi
    assert group.rows % 16 == 0 and group.width % 128 == 0
    elements = group.rows * group.width
    assert elements // (elements & -elements) <= 512


f32, bf16, f16 = map(jnp.dtype, ("float32", "bfloat16", "float16"))


@pytest.mark.parametrize(
    ("wire", "parameter"),
    [(f32, f32), (f32, bf16), (bf16, f32), (f32, f16), (bf16, f16)],
)
@pytest.mark.parametrize("scale", [1.0, 2e-5, 3e-8])  # float16 has no smaller numbers
def test_what_the_wire_carries_has_the_digits_of_both_dtypes(wire, parameter, scale):
    leaf = Leaf(("x",), (64,), parameter, wire, P(), (64,))
    x = scale * np.random.default_rng(0).normal(size=64).astype("f4")
    expected = x.astype(wire).astype("f4").astype(parameter).astype("f4")
    np.testing.assert_array_equal(jax.jit(leaf.on_wire)(x), expected)


@examples(10)
@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    parts=st.lists(st.integers(1, 4), min_size=3, max_size=3),
    split=st.lists(st.integers(1, 3), min_size=3, max_size=3),
)
def test_parts_are_slices(shape, parts, split):
    """Block i of a stored shard is slice i of the padded leaf, in each piece."""
    rank = len(shape)
    parts, split = tuple(parts[:rank]), tuple(split[:rank])
    whole = tuple(s * k for s, k in zip(shape, split, strict=True))
    spec = P(*("model" if k > 1 else None for k in split))
    leaf = Leaf(("x",), whole, f32, f32, spec, tuple(shape), parts)
    x = np.arange(1.0, math.prod(whole) + 1, dtype="f4").reshape(whole)
    stored = np.asarray(leaf.store(jnp.asarray(x)))
    assert stored.shape == leaf.stored
    np.testing.assert_array_equal(leaf.view(jnp.asarray(stored)), x)
    # as every device has it: piece m of the model's split, part i of the workers'
    part = leaf.part
    for m in np.ndindex(*split):
        piece = x[
            tuple(slice(j * s, (j + 1) * s) for j, s in zip(m, shape, strict=True))
        ]
        pads = [(0, p * k - s) for p, k, s in zip(part, parts, shape, strict=True)]
        padded = np.pad(piece, pads)
        blocks = np.asarray(leaf.cut(jnp.asarray(piece)))
        assert blocks.shape == (math.prod(parts), *part)
        np.testing.assert_array_equal(leaf.assemble(jnp.asarray(blocks)), piece)
        for i, at in enumerate(np.ndindex(*parts)):
            where = tuple(
                slice(j * p, (j + 1) * p) for j, p in zip(at, part, strict=True)
            )
            np.testing.assert_array_equal(blocks[i], padded[where])
            if leaf.in_blocks:
                mine = tuple(
                    slice(j * p, (j + 1) * p) for j, p in zip(m, part, strict=True)
                )
                np.testing.assert_array_equal(stored[(i, *mine)], padded[where])


@pytest.mark.parametrize(
    ("parts", "shape", "operations"),
    [
        ((4, 1), (8, 6), {"reshape"}),
        ((1, 4), (1, 8), {"reshape"}),
        ((1, 2), (3, 8), {"reshape", "transpose"}),
    ],
)
def test_a_leaf_is_cut_in_few_operations(parts, shape, operations):
    leaf = Leaf(("x",), shape, f32, f32, P(), shape, parts)
    x = jax.ShapeDtypeStruct(shape, f32)
    blocks = jax.eval_shape(leaf.cut, x)
    for fn, argument in ((leaf.cut, x), (leaf.assemble, blocks)):
        eqns = jax.make_jaxpr(fn)(argument).eqns
        assert {eqn.primitive.name for eqn in eqns} == operations
        assert len(eqns) == len(operations)


def test_which_dimensions_are_split():
    parts = {
        str(leaf): leaf.parts
        for leaf in layout_for(
            {
                "first": (8, 6), "second": (6, 16), "small": (7, 9), "scalar": (),
                "padded": (2001, 259), "two": (12, 110, 110), "empty": (0, 8),
            },
            (8,),
        ).leaves
    }  # fmt: skip
    assert parts == {
        "first": (8, 1), "second": (1, 8), "small": None, "scalar": None,
        "padded": (8, 1), "two": (4, 2, 1), "empty": None,
    }  # fmt: skip


def test_names_that_end_alike_are_not_confused():
    """A moment of `a` lies at `mu/a`, which is also the name of a parameter."""
    shapes = {"a": (8, 3), "mu": {"a": (8, 3)}, "nu": {"a": (6, 8)}}
    tx, theta = acco_jax.zero1(optax.adam(0.1), mesh=make_mesh(4)), parameters(shapes)
    (g,) = draw(shapes, 4, 1, 0)
    layout = tx.init(theta).layout
    names = [None if i is None else str(layout.leaves[i]) for i in layout.mirrors]
    assert names == [None, "a", "mu/a", "nu/a", "a", "mu/a", "nu/a"]
    updates, _ = jax.jit(tx.update)(g, tx.init(theta), theta)
    ((expected, _),) = Unsharded(optax.adam(0.1)).zero1(theta, [g], [[1] * 4])
    after = optax.apply_updates(theta, updates)
    chex.assert_trees_all_close(after, expected, rtol=0, atol=1e-12)


OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "adamw, masked": optax.adamw(
        1e-3, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
    ),
    "lion": optax.lion(1e-3),
    "lamb": optax.lamb(1e-3),
    "novograd": optax.novograd(1e-3),
    "adafactor": optax.adafactor(1e-3),
    "sm3": optax.sm3(1e-3),
    "muon": optax.contrib.muon(1e-3),
    "schedule free": optax.contrib.schedule_free_adamw(1e-3),
    "prodigy": optax.contrib.prodigy(),
    "MultiSteps": optax.MultiSteps(optax.adamw(1e-3), 2).gradient_transformation(),
    "injected": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
    "partition": optax.partition(
        {"a": optax.adamw(1e-3), "b": optax.sgd(0.1, momentum=0.9)},
        lambda params: {k: "a" if k < "h/q" else "b" for k in params},
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_next_to_no_optimizer_state_is_replicated(name):
    tx = acco_jax.zero1(OPTIMIZERS[name], mesh=make_mesh(8))
    shapes = {k: (s[0] // 3, *s[1:]) if "h/" in k else s
              for k, s in decoder(12, 256, 1024, 8192, 256).items()}  # fmt: skip
    params = abstract(shapes)
    state = jax.eval_shape(tx.init, params).inner
    homes = acco_jax.state_shardings(tx, params).inner
    size = lambda x: x.size * x.dtype.itemsize  # noqa: E731
    both = zip(jax.tree.leaves(state), jax.tree.leaves(homes), strict=True)
    both = [(size(x), s.is_fully_replicated) for x, s in both]
    replicated = sum(x for x, everywhere in both if everywhere)
    assert replicated <= 0.01 * sum(x for x, _ in both)


@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
def test_an_optimizer_of_elements_communicates_nothing(sizes):
    """Padded, split along two dimensions, or neither: no collective but the two."""
    shapes = {"pad": (257, 259), "two": (6, 130, 134), "w": (8, 64)}
    names = ("slice", "chip")[: len(sizes)]
    mesh = make_mesh(*sizes, names=names)
    tx = acco_jax.zero1(optax.adamw(1e-3), mesh=mesh, axis_name=names)
    params = abstract(shapes, jnp.float32)
    homes = acco_jax.state_shardings(tx, params)
    place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)  # noqa: E731
    state = jax.tree.map(place, jax.eval_shape(tx.init, params), homes)
    grads = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct((4, *x.shape), x.dtype, sharding=s),
        params,
        state.layout.grads_shardings,
    )
    text = jax.jit(tx.update).lower(grads, state, params).compile().as_text()
    kinds = re.findall(
        r" (all-\w+|reduce-scatter|collective-permute)(?:-start)?\(", text
    )
    ways = len(sizes)
    # one small one sums weights, one the global norm that metrics may ask for
    assert kinds.count("reduce-scatter") == kinds.count("all-gather") == ways
    assert set(kinds) <= {"reduce-scatter", "all-gather", "all-reduce"}
    assert all(
        math.prod(map(int, filter(None, dims.split(",")))) <= 4
        for dims in re.findall(r"\[([\d,]*)\]\S* all-reduce", text)
    )


@functools.cache
def method(kind, sizes=(4, 2), specs=True, names=("data", "model")):
    mesh = make_mesh(*sizes, names=names, types=KINDS[kind])
    return acco_jax.acco(
        INNER,
        mesh=mesh,
        axis_name=("slice", "chip") if "slice" in names else "data",
        param_specs=SPECS if specs else None,
    )


def placed(mesh, tree=None):
    tree = tree or parameters(SHAPES)
    return {
        k: jax.device_put(x, NamedSharding(mesh, SPECS[k])) for k, x in tree.items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_axis_beside_the_data_axis(kind):
    """Clipping must count a leaf once, whether the model axis splits it or not."""
    tx = method(kind, specs=kind == "auto")
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
    (shape,) = {s.data.shape for s in state.master["big"].addressable_shards}
    assert np.prod(shape) * 8 == state.master["big"].size
    chex.assert_trees_all_equal_shapes(state.master, state.inner[1][0].mu)


@pytest.mark.parametrize("kind", KINDS)
def test_the_step_with_a_model_axis(kind):
    tx = method(kind, specs=kind == "auto")

    def loss(p, batch, rng):
        out = jnp.tanh(batch @ p["w"]).sum() * p["s"] + (p["b"] ** 2).sum()
        return out + (p["big"] ** 2).mean() + (p["t"] ** 2).sum()

    step = acco_jax.make_train_step(loss, tx, microbatches=2)
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
    tx = method("auto", specs=False)
    with pytest.raises(ValueError, match=r"'model' is Auto.*pass param_specs") as error:
        tx.init(placed(tx.mesh))
    assert "\n" not in str(error.value)
    for specs, words in (
        (SPECS | {"w": P("data")}, "is the data axis"),
        (SPECS | {"w": P("pipe")}, "not an axis of the mesh"),
        (SPECS | {"b": P("model")}, "does not divide b"),
        (SPECS | {"s": P("model")}, "does not divide s"),
    ):
        tx = acco_jax.acco(INNER, mesh=make_mesh(4, 2), param_specs=specs)
        with pytest.raises(ValueError, match=words) as error:
            tx.init(parameters(SHAPES))
        assert "\n" not in str(error.value)


def test_specs_of_parameters_with_none():
    params = parameters({"a": (4, 3), "b": (4,)}) | {"nothing": None}
    for specs in (P(), {"a": P(None, "model"), "b": P(), "nothing": None}):
        mesh = make_mesh(2, 3)
        tx = acco_jax.zero1(optax.sgd(1.0), mesh=mesh, param_specs=specs)
        leaves = tx.init(params).layout.leaves
        assert [str(leaf) for leaf in leaves] == ["a", "b"]
        assert leaves[0].spec == (P() if specs == P() else specs["a"])


def test_two_data_axes():
    tx = method("auto", (2, 2), False, ("slice", "chip"))
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
def test_inputs_are_put_where_they_belong(kind):
    """NumPy, unplaced, on one device, replicated: eager and jitted, all the same."""
    mesh = make_mesh(2, types=KINDS[kind])
    tx = acco_jax.acco(INNER, mesh=mesh)
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
    tx = acco_jax.acco(INNER, mesh=make_mesh(4))
    for state in (tx.init(theta), jax.jit(tx.init)(theta)):
        for tree in (state.master, state.inner[1][0].mu):
            for k, x in tree.items():
                biggest = max(s.data.size for s in x.addressable_shards)
                assert biggest <= 1.02 * np.prod(shapes[k]) / 4
        (carry,) = state.carry.buffers
        biggest = max(s.data.size for s in carry.addressable_shards)
        assert biggest == carry.size / 4


@pytest.mark.parametrize("sizes", [(1,), (4,), (4, 2)])
def test_round_trips(sizes):
    mesh = make_mesh(*sizes)
    shapes = SHAPES | {"p": (257, 259), "q": (6, 130, 134), "z": (0, 3)}
    specs = SPECS | {"p": P(), "q": P(None, None, "model"), "z": P()}
    theta = parameters(shapes)
    layout = Layout.of(
        theta,
        mesh=mesh,
        axis=("data",),
        param_specs=specs if len(sizes) > 1 else None,
    )
    params = jax.device_put(theta, layout.params_shardings)

    @jax.jit
    def around(params):
        shards = layout.shard(params)
        out = Outgoing(layout.join(shards), layout.whole(shards))
        return (
            shards,
            layout.gather_exact(shards),
            layout.view(shards),
            (layout.unpack(layout.all_gather(out, "data"))),
        )

    shards, *full = around(params)
    for tree in full:
        chex.assert_trees_all_equal(tree, theta)
    chex.assert_trees_all_equal_shapes(shards, layout.shards)
    n = sizes[0]
    (rows,) = draw(shapes, n, 1, 0)
    weight = np.arange(n) % 2 * 1.0 if n > 1 else np.ones(1)
    rows = jax.device_put(rows, layout.grads_shardings)
    spoilt = jax.tree.map(
        lambda g: g.at[weight == 0].set(np.nan), jax.tree.map(jnp.asarray, rows)
    )

    @jax.jit
    def summed(grads, weight):
        in_flight = layout.pack(grads, weight, check=True)
        totals, whole, carried = layout.sum_small(in_flight)
        assert carried == ()
        reduced = layout.reduce_scatter(in_flight.buffers, "data")
        return totals, layout.gather_exact(layout.split(reduced, whole))

    weight = jax.device_put(weight, layout.sharding("data"))
    totals, total = summed(spoilt, weight)
    counted = np.asarray(weight) != 0
    chex.assert_trees_all_equal(
        total, jax.tree.map(lambda g: np.asarray(g)[counted].sum(0), rows)
    )
    assert totals == (weight.sum(), 0)
    zeros = jax.tree.leaves(jax.jit(layout.zeros)())
    assert not any(np.asarray(x).any() for x in zeros)


def kernels(program):
    """The fused computations of a program's text, equal ones once, without names."""
    found = set()
    for text in re.split(r"\n\n(?=%)", program):
        head, _, body = text.partition("\n")
        if "fused" in head:
            body = re.sub(r", metadata=\{[^}]*\}", "", body)
            names = {}
            found.add(
                re.sub(
                    r"%[\w.-]+",
                    lambda m, names=names: names.setdefault(m[0], f"%{len(names)}"),
                    body,
                )
            )
    return found


def test_equal_leaves_have_few_kernels_of_their_own():
    """XLA:CPU compiles equal kernels once: n leaves need 2 sqrt(n) to be unpacked."""
    mesh = make_mesh(4)
    few, many = (
        Layout.of(
            {f"{i:03}": jax.ShapeDtypeStruct((8, 8), np.float32) for i in range(n)},
            mesh=mesh,
            axis=("data",),
        )
        for n in (4, 100)
    )

    def count(layout):
        rows = jax.eval_shape(layout.zeros).buffers

        def run(buffers):
            shards = layout.split(layout.reduce_scatter(buffers, "data"))
            return jax.tree.map(lambda x: jnp.tanh(x) * x, shards)

        return len(kernels(jax.jit(run).lower(rows).compile().as_text()))

    assert count(many) <= count(few) + 20
