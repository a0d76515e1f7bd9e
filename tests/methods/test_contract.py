"""What does not fit is refused in one line, and what callers expect of optax works."""

import contextlib
import copy
import pickle
import re
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import acco_jax
from tests.reference import AUTO, EXPLICIT, make_mesh, parameters

LOCAL = (
    "diloco", "slowmo", "co2", "streaming_diloco", "gossip", "cellm", "sparseloco",
)  # fmt: skip


@contextlib.contextmanager
def refused(words, kind=ValueError):
    """The error is of this kind, has these words and is one line."""
    with pytest.raises(kind, match=words) as error:
        yield
    assert "\n" not in str(error.value)


def loss_fn(params, batch, rng):
    return jnp.mean((batch @ params["w"]) ** 2)


def theta(dtype=jnp.float32):
    return {"w": jnp.ones((3, 2), dtype)}


def method(name="acco", inner=None, n=2, types=AUTO, **options):
    if name in LOCAL:
        options = {"local_steps": 2} | options
    if name == "streaming_diloco":
        options = {"fragments": 1, "overlap_steps": 1} | options
    make = getattr(acco_jax, name)
    return make(inner or optax.adam(0.1), mesh=make_mesh(n, types=types), **options)


def step_of(tx, loss=loss_fn, **options):
    options = {"microbatches": 1} | options
    return acco_jax.make_train_step(loss, tx, **options)


def batch_for(tx, seed=0, microbatches=1):
    rows = 2 * tx.mesh.shape["data"] * tx.steps_per_call * microbatches
    return np.random.default_rng(seed).normal(size=(rows, 3)).astype(np.float32)


@pytest.mark.parametrize("name", ["acco", "diloco"])
def test_leaves_of_different_numbers_of_rows_are_refused(name):
    tx = method(name)

    def loss(params, batch, rng):
        return jnp.mean((batch["x"] @ params["w"]) ** 2) + jnp.mean(batch["y"])

    batch = {"x": np.ones((16, 3)), "y": np.ones(8)}
    words = r"leaf \['x'\] has 16 rows and \['y'\] has 8"
    params, state = acco_jax.start(tx, theta())
    with refused(words):
        step_of(tx, loss)(params, state, batch)
    with refused(words):
        acco_jax.local_gradients(loss, mesh=tx.mesh, microbatches=2)(theta(), batch)


@pytest.mark.parametrize("name", ["zero1", "acco", "ddp", "fused_zero1", "gossip"])
def test_params_of_another_dtype_than_at_init_are_refused(name):
    tx = method(name)
    params, state = acco_jax.start(tx, theta())
    words = "params w is bfloat16, but init saw float32"
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    with refused(words):
        step_of(tx)(narrow, state, batch_for(tx))
    if name not in LOCAL:
        grads = {"w": np.ones((2, 3, 2), np.float32)}
        with refused(words):
            tx.update(grads, state, narrow)
        with refused("params w is float32, but init saw bfloat16"):
            tx.update(grads, tx.init(theta(jnp.bfloat16)), params)
        # NumPy's float64 is float32 to jax
        tx.update(grads, state, {"w": np.ones((3, 2))})
    step_of(tx)(params, state, batch_for(tx))


@pytest.mark.parametrize("name", ["acco", "fused_zero1", "diloco", "gossip"])
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_parameters_of_8_bits_are_refused(name, dtype):
    with refused(f"w is {np.dtype(dtype)}, which optimizers cannot add to: keep it in"):
        acco_jax.start(method(name), theta(dtype))


@pytest.mark.fast("*-acco", "key-*")
@pytest.mark.parametrize("whole", ["local_gradients", "acco", "diloco"])
@pytest.mark.parametrize(
    ("out", "words"),
    [
        (
            lambda loss: (loss, {"k": jax.random.key(0)}),
            r"key<fry> at \[1\]\['k'\]: re",
        ),
        (
            lambda loss: (loss, {"s": "text"}),
            r"'text' at \[1\]\['s'\]: return only numbers",
        ),
        (
            lambda loss: (loss, 1.0, np.array(["text"])),
            r"<U4 at \[2\]: return only numbers",
        ),
        (lambda loss: "text", "returned 'text': return only numbers"),
        (lambda loss: None, "returned NoneType as loss: return loss"),
        (lambda loss: {"loss": loss}, "returned dict as loss: return loss"),
        (lambda loss: (loss, None, {}), "returned NoneType as weight: return loss"),
    ],
    ids=["key", "string", "strings", "loss", "nothing", "dict", "weight"],
)
def test_what_cannot_be_summed_is_refused(out, words, whole):
    def loss(params, batch, rng):
        return out(loss_fn(params, batch, rng))

    tx = method("acco" if whole == "local_gradients" else whole)
    with refused(words):
        if whole == "local_gradients":
            run = acco_jax.local_gradients(loss, mesh=tx.mesh, microbatches=2)
            run(theta(), batch_for(tx))
        else:
            step_of(tx, loss)(*acco_jax.start(tx, theta()), batch_for(tx))


@pytest.mark.parametrize("mesh", [None, "data"])
@pytest.mark.parametrize(
    "name", ["acco", "zero1", "ddp", "dpu", "wp", "fused_zero1", *LOCAL]
)
def test_no_mesh_is_refused(name, mesh):
    words = f"mesh is {mesh!r}: give the devices as a jax.sharding.Mesh"
    with refused(words):
        getattr(acco_jax, name)(optax.adam(0.1), mesh=mesh)
    with refused(words):
        acco_jax.local_gradients(loss_fn, mesh=mesh, microbatches=1)


@pytest.mark.parametrize("name", LOCAL)
def test_a_local_method_has_no_update(name):
    tx = method(name)
    assert not isinstance(tx, optax.GradientTransformation)
    for attribute in ("init", "update"):
        assert not hasattr(tx, attribute)
        words = f"a local method has no {attribute}, because .*: use acco_jax.start and"
        with refused(words, AttributeError):
            getattr(tx, attribute)


def changing(how):
    """Gradient descent whose state is another after the first update."""

    def update(updates, state, params=None):
        return jax.tree.map(lambda g: -g, updates), how(state)

    start = {"count": jnp.zeros(2, jnp.int32)}
    return optax.GradientTransformation(lambda params: start, update)


class Counted(NamedTuple):
    count: jax.Array


CHANGES = {
    "structure": (lambda s: (s["count"],), "count was int32[2] and is absent"),
    "more": (
        lambda s: s | {"m": jnp.zeros(())}, "m was absent and is float32[] after an"
    ),
    "node": (lambda s: {"count": [s["count"]]}, "count was int32[2] and is absent"),
    "kind": (lambda s: Counted(s["count"]), "its leaves are in another kind"),
    "shape": (
        lambda s: {"count": s["count"].sum()}, "count was int32[2] and is int32[]"
    ),
    "dtype": (
        lambda s: {"count": s["count"] + 0.5}, "count was int32[2] and is float32[2]"
    ),
}  # fmt: skip


@pytest.mark.fast("*-acco", "structure-*", "dtype-diloco")
@pytest.mark.parametrize("name", ["ddp", "acco", "diloco"])
@pytest.mark.parametrize("change", CHANGES)
def test_an_optimizer_whose_state_changes_is_refused(name, change):
    how, words = CHANGES[change]
    if change == "more" and name == "acco":
        name = "fused_zero1"
    tx = method(name, inner=changing(how))
    params, state = acco_jax.start(tx, theta())
    if change == "dtype" and name != "diloco":  # as without sharding
        _, state, _ = step_of(tx)(params, state, batch_for(tx))
        assert state.inner["count"].dtype == np.float32
        return
    words = "inner changes its state: " + re.escape(words)
    with refused(words):
        step_of(tx)(params, state, batch_for(tx))
    if name != "diloco":
        with refused(words):
            tx.update({"w": np.ones((2, 3, 2), np.float32)}, state, params)
    if name == "diloco" and change != "dtype":
        outer = method("cellm", outer=changing(how))
        with refused(words):
            step_of(outer)(*acco_jax.start(outer, theta()), batch_for(outer))


COUNTED = [
    ("dpu", {"warmup_steps": 2}, "with warmup_steps a step reads off"),
    ("acco", {"gather_bits": (8, 4)}, "with gather_bits that differ, or resync_every"),
    ("zero1", {"gather_bits": 8, "resync_every": 3}, "or resync_every, a step reads"),
    ("gossip", {"n": 4}, "with fragments or an exponential graph a step reads"),
    ("streaming_diloco", {"fragments": 2}, "with fragments or an exponential graph"),
]


@pytest.mark.parametrize(("name", "options", "words"), COUNTED)
def test_a_step_that_must_read_a_count_is_refused_inside_jit(name, options, words):
    tx = method(name, **options)
    params, state = acco_jax.start(tx, theta() | {"b": jnp.ones(2)})
    with refused(words):
        jax.jit(step_of(tx))(params, state, batch_for(tx))


@pytest.mark.parametrize("name", ["acco", "diloco"])
def test_a_split_step_is_refused_inside_jit(name):
    tx = method(name)
    args = *acco_jax.start(tx, theta()), batch_for(tx)
    with refused("form='split' runs several programs, .*make_train_step.form='fused'"):
        jax.jit(step_of(tx, form="split"))(*args)


SPLIT = {"b": P(), "s": P(), "v": P(None, "model"), "w": P("model")}
SHAPES = {"b": (6,), "s": (), "v": (6, 4), "w": (4, 6)}
MIXED = {"explicit model": (AUTO, EXPLICIT), "explicit data": (EXPLICIT, AUTO)}


def split_problem(name, types):
    """A method on 2 workers by 2 parts of the model, and the parameters there."""
    axes = {"axis_types": types, "devices": jax.devices()[:4]}
    mesh = jax.make_mesh((2, 2), ("data", "model"), **axes)
    inner = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.1))
    specs = SPLIT if types[1] == AUTO else None
    options = {"local_steps": 1} if name in LOCAL else {}
    tx = getattr(acco_jax, name)(inner, mesh=mesh, param_specs=specs, **options)
    values = parameters(SHAPES, dtypes=dict.fromkeys(SHAPES, np.float32))
    put = {
        k: jax.device_put(x, NamedSharding(mesh, SPLIT[k])) for k, x in values.items()
    }
    return tx, put


@pytest.mark.fast("acco-explicit model", "zero1-explicit data")
@pytest.mark.parametrize("types", MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("name", ["acco", "zero1"])
def test_an_update_where_the_axes_are_of_two_kinds(name, types):
    runs = []
    for kinds in ((AUTO, AUTO), types):
        tx, params = split_problem(name, kinds)
        state, update = tx.init(params), jax.jit(tx.update)
        for h in range(3):
            grads = {k: np.full((2, *s), h + 1.0) for k, s in SHAPES.items()}
            updates, state = update(grads, state, params)
            params = jax.jit(optax.apply_updates)(params, updates)
        committed = acco_jax.committed_params(state, params)
        runs.append(jax.tree.map(np.asarray, (params, committed)))
    chex.assert_trees_all_close(*runs, rtol=1e-6)
    for k, spec in SPLIT.items():
        home = NamedSharding(tx.mesh, spec)
        assert params[k].sharding.is_equivalent_to(home, params[k].ndim)
    for tree in (state.master, state.inner[1][0].mu):
        for k in ("v", "w"):  # over both axes
            assert tree[k].sharding.shard_shape(tree[k].shape) != tree[k].shape
            assert tree[k].size == 4 * tree[k].addressable_shards[0].data.size


@pytest.mark.fast("acco-explicit data", "cellm-*")
@pytest.mark.parametrize(
    ("name", "kinds"),
    [("acco", kind) for kind in MIXED]
    + [(name, "explicit model") for name in ("gossip", "cellm")],
)
def test_a_step_where_the_axes_are_of_two_kinds(name, kinds):
    def loss(p, batch, rng):
        return (jnp.tanh(batch @ p["w"] + p["b"]) @ p["v"]).mean() * p["s"]

    runs = []
    for types in ((AUTO, AUTO), MIXED[kinds]):
        tx, params = split_problem(name, types)
        step = step_of(tx, loss)
        params, state = acco_jax.start(tx, params)
        for h in range(3):
            batch = np.random.default_rng(h).normal(size=(4, 4)).astype(np.float32)
            params, state, metrics = step(params, state, batch)
        committed = acco_jax.committed_params(state, params)
        runs.append(jax.tree.map(np.asarray, (params, committed, metrics["loss"])))
    chex.assert_trees_all_close(*runs, rtol=1e-5)


def trained(tx, rows, params, batches):
    """The parameters after a loop of updates."""
    state, update = tx.init(params), jax.jit(tx.update)
    for batch in batches:
        grads, weight, _ = rows(params, batch)
        updates, state = update(grads, state, params, weight=weight)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_an_nnx_optimizer(jitted):
    from flax import nnx

    tx, model = method(), nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    graph, params = nnx.split(model, nnx.Param)

    def loss(params, batch, rng):
        return jnp.mean(nnx.merge(graph, params)(batch) ** 2)

    rows = acco_jax.local_gradients(loss, mesh=tx.mesh, microbatches=2)
    batches = [batch_for(tx, seed, 2) for seed in range(4)]
    expected = trained(tx, rows, nnx.as_pure(params), batches)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def step(model, optimizer, batch):
        grads, weight, _ = rows(nnx.state(model, nnx.Param), batch)
        optimizer.update(model, grads, weight=weight)

    step = nnx.jit(step) if jitted else step
    for batch in batches:
        step(model, optimizer, batch)
    found = nnx.as_pure(nnx.state(model, nnx.Param))
    chex.assert_trees_all_close(found, expected, rtol=1e-6)
    # a loop of one's own may keep its Variables
    chex.assert_trees_all_equal_structs(tx.init(params).master, params)


def test_a_train_state():
    from flax.training.train_state import TrainState

    tx = method()
    rows = acco_jax.local_gradients(loss_fn, mesh=tx.mesh, microbatches=2)
    batches = [batch_for(tx, seed, 2) for seed in range(4)]

    @jax.jit
    def step(state, batch):
        return state.apply_gradients(grads=rows(state.params, batch)[0])

    state = TrainState.create(apply_fn=None, params=theta(), tx=tx)
    for batch in batches:
        state = step(state, batch)
    # it gives no weight: every worker's row counts for one gradient
    expected = trained(tx, lambda *args: (rows(*args)[0], None, None), theta(), batches)
    chex.assert_trees_all_close(state.params, expected, rtol=1e-6)
    with refused("grads w has shape .* give one row per worker"):
        state.apply_gradients(grads=theta())
    with refused("a local method has no init", AttributeError):
        TrainState.create(apply_fn=None, params=theta(), tx=method("diloco"))


def test_the_mean_loss_goes_to_optimizers_that_take_it():
    """optax's type of optimizers with extra arguments has some that take none."""
    sam = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1))
    assert method("acco", inner=sam).arguments({}) == {}
    assert method("acco", inner=optax.scale(-0.1)).arguments({}) == {}
    for inner in (optax.contrib.momo(0.1), optax.chain(optax.sgd(0.1))):
        assert method("acco", inner=inner).arguments({}).keys() == {"value"}
    tx = method("zero1", inner=sam)
    params, state = acco_jax.start(tx, theta())
    assert step_of(tx)(params, state, batch_for(tx))[2]["step"] == 1


def test_multi_steps():
    """Around a method it is refused; inside, its gradient_transformation() works."""
    many = optax.MultiSteps(optax.sgd(0.1), 2)
    with refused("inside optax.MultiSteps: put MultiSteps inside, .* microbatches"):
        optax.MultiSteps(method(), 2).init(theta())
    for name in ("acco", "fused_zero1", "diloco", "cellm"):
        with refused(r"is a MultiSteps: give its gradient_transformation\(\),"):
            method(name, inner=many)
    tx = method("zero1", inner=many.gradient_transformation())
    params, state = theta(), tx.init(theta())
    for moved in (False, True):
        updates, state = tx.update({"w": np.ones((2, 3, 2))}, state, params)
        assert bool(np.any(updates["w"] != 0)) == moved


@pytest.mark.parametrize("name", ["zero1", "acco"])
def test_multi_steps_inside_count_optimizer_steps(name):
    """Of zero1 the numbers are optax's; an estimate of acco is none of the k."""
    many = optax.MultiSteps(optax.adamw(0.1), 2)
    tx, calls = method(name, inner=many.gradient_transformation()), 6
    step = step_of(tx)
    params, state = acco_jax.start(tx, theta())
    expected, optimizer = theta(), many.init(theta())
    for seed in range(calls):
        batch = batch_for(tx, seed)
        params, state, _ = step(params, state, batch)
        grads = jax.grad(loss_fn)(expected, batch, None)
        updates, optimizer = many.update(grads, optimizer, expected)
        expected = optax.apply_updates(expected, updates)
    if name == "zero1":
        chex.assert_trees_all_close(params, expected, rtol=1e-6)
        chex.assert_trees_all_close(state.inner, optimizer, rtol=1e-5)
    done = tx.steps_done(calls) if name == "zero1" else 2  # calls: primes, 2 and a half
    assert int(state.steps) == done
    assert int(state.inner.gradient_step) == done // 2


@pytest.mark.parametrize("name", ["acco", "ddp", "fused_zero1", "diloco", "cellm"])
def test_copies_of_a_state(name):
    """deepcopy and flax's bytes are the state again; a pickle is refused."""
    from flax import serialization

    tx = method(name)
    params, state = acco_jax.start(tx, theta())
    copied = copy.deepcopy(state)
    target = jax.tree.map(jnp.zeros_like, state)
    written = serialization.to_bytes(state)
    restored = serialization.from_bytes(target, written)
    homes = acco_jax.state_shardings(tx, theta())
    ends = []
    with refused("cannot be pickled, .*: save it with acco_jax.save", TypeError):
        pickle.dumps(state)
    step = step_of(tx)
    for begin in (state, copied, jax.device_put(restored, homes)):
        assert jax.tree.structure(begin) == jax.tree.structure(state)
        here = jax.tree.map(jnp.copy, params)
        ends.append(step(here, begin, batch_for(tx))[:2])
    chex.assert_trees_all_equal(*ends)


@pytest.mark.parametrize("name", ["acco", "zero1", "dpu", "ddp"])
def test_a_negative_weight_in_an_array_counts_for_nothing(name):
    tx = method(name)
    grads = [{"w": np.ones((2, 3, 2), np.float32)} for _ in range(3)]
    weight = np.array([[1.0, 2.0], [1.0, -3.0], [2.0, 1.0]], np.float32)
    for g, w in zip(grads, weight, strict=True):
        g["w"][w < 0] = np.nan
    counted = [{"w": np.nan_to_num(g["w"])} for g in grads]
    ends = []
    for rows, weights in (
        (grads, jnp.asarray(weight)), (counted, np.maximum(weight, 0))
    ):  # fmt: skip
        params, state, update = theta(), tx.init(theta()), jax.jit(tx.update)
        for g, w in zip(rows, weights, strict=True):
            updates, state = update(g, state, params, weight=w)
            params = optax.apply_updates(params, updates)
        ends.append((params, state))
    chex.assert_trees_all_equal(*ends)
    assert np.isfinite(params["w"]).all()
    with refused(r"weight \[1.0, -3.0\] has one below 0"):
        tx.update(grads[0], state, params, weight=weight[1])


def backtracking():
    search = optax.scale_by_backtracking_linesearch(max_backtracking_steps=5)
    return optax.chain(optax.sgd(0.1), search)


@pytest.mark.parametrize("name", ["acco", "ddp", "diloco"])
@pytest.mark.parametrize("inner", [optax.lbfgs, backtracking])
def test_a_line_search_is_refused(inner, name):
    tx = method(name, inner=inner())
    words = (
        "inner needs value_fn, as line searches do, but works on shards, .* linesearch="
    )
    params, state = acco_jax.start(tx, theta())
    with refused(words):
        step_of(tx)(params, state, batch_for(tx))
    with refused(words):
        tx.check(theta())
    if name == "diloco":
        return
    grads = {"w": np.ones((2, 3, 2), np.float32)}
    with refused(words):
        tx.update(grads, state, params, value=jnp.float32(1))
    with refused("update got value_fn, a function: inner works on shards"):
        tx.update(grads, state, params, value_fn=lambda p: 0.0)


def test_what_an_optimizer_needs_is_named():
    tx = method("zero1", inner=optax.polyak_sgd())
    words = r"inner needs 'value', which it was not given: pass it to tx.update.*extra="
    with refused(words):
        tx.update({"w": np.ones((2, 3, 2), np.float32)}, tx.init(theta()), theta())


@pytest.mark.parametrize("types", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_a_leaf_that_nothing_divides_under_an_optimizer_without_state(types):
    """It is stored in blocks, which an Explicit mesh does not reshape by itself."""
    tx = method("zero1", optax.sgd(0.1), n=4, types=types)
    params = {"w": jnp.ones((257, 257))}
    step = step_of(tx, lambda p, batch, rng: jnp.sum(p["w"] * batch[0, 0]))
    params, state = acco_jax.start(tx, params)
    params, state, _ = step(params, state, np.ones((4, 1), np.float32))
    np.testing.assert_allclose(params["w"], 0.9, rtol=1e-6)


INFINITE = {
    "looks ahead": ("acco", {"extrapolation": 1.15}),
    "feedback": ("dpu", {"feedback": 1.0}),
    "predicted": ("wp", {"feedback": 0.5}),
    "few bits": ("acco", {"gather_bits": 8}),
    "outer": ("diloco", {}),
    "fragments": ("streaming_diloco", {"bits": 8}),
    "neighbours": ("gossip", {}),
    "sparse": ("sparseloco", {}),
    "delayed outer": ("co2", {}),
}


def masked_problem():
    """(parameters, an optimizer that leaves their additive mask, a loss)."""
    w = jnp.arange(9.0).reshape(3, 3) / 9
    params = {"w": w, "mask": jnp.array([0, 0, -jnp.inf])}

    def loss_fn(params, batch, rng):
        return jnp.mean(jax.nn.softmax(batch @ params["w"] + params["mask"]) ** 2)

    parts = {"train": optax.adam(0.1), "keep": optax.set_to_zero()}
    labels = {"w": "train", "mask": "keep"}
    return params, optax.multi_transform(parts, labels), loss_fn


@pytest.mark.parametrize("name", INFINITE)
def test_an_entry_that_is_infinite_stays(name):
    params, inner, loss = masked_problem()
    name, options = INFINITE[name]
    tx = method(name, inner, **options)
    step, mask = step_of(tx, loss), np.asarray(params["mask"])
    params, state = acco_jax.start(tx, params)
    for seed in range(5):
        params, state, metrics = step(params, state, batch_for(tx, seed))
        assert seed == 0 or np.isfinite(metrics["loss"])
    held = acco_jax.committed_params(state, params)
    np.testing.assert_array_equal(held["mask"], mask)
    assert np.isfinite(held["w"]).all()


@pytest.mark.parametrize("name", ["acco", "zero1"])
def test_an_update_leaves_an_infinite_entry(name):
    params, inner, loss = masked_problem()
    tx = method(name, inner)
    gradients = acco_jax.local_gradients(loss, mesh=tx.mesh, microbatches=1)
    state, begun = tx.init(params), params
    for seed in range(3):
        grads, weight, _ = gradients(params, batch_for(tx, seed))
        updates, state = tx.update(grads, state, params, weight=weight)
        params = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(params["mask"], begun["mask"])
    assert np.isfinite(params["w"]).all()
    assert not np.array_equal(params["w"], begun["w"])


@pytest.mark.parametrize("name", ["acco", "fused_zero1", "diloco"])
def test_a_method_is_its_own_copy(name):
    from flax.training import train_state

    tx = method(name)
    assert copy.copy(tx) is copy.deepcopy(tx) is tx
    held = {"tx": tx, "x": 1}
    assert jax.tree.map(lambda x: x, held) == held
    if name != "diloco":  # which is no optax transformation
        made = train_state.TrainState.create(apply_fn=None, params=theta(), tx=tx)
        assert copy.deepcopy(made).tx is tx


@pytest.mark.parametrize("kind", ["arrays", "keys"])
def test_what_lies_on_one_device_is_moved(kind):
    """As a checkpoint's arrays do that were restored without shardings."""
    tx = method("acco", optax.adam(0.1))
    here = jax.devices()[0]

    def loss(params, batch, rng):
        return loss_fn(params, batch, rng) * (1 + jax.random.uniform(rng))

    params, rng = jax.device_put((theta(), jax.random.key(1)), here)
    if kind == "keys":
        step = step_of(tx, loss)
        ends = [
            step(*acco_jax.start(tx, theta()), batch_for(tx), rng=key)[:2]
            for key in (jax.random.key(1), rng)
        ]
    else:
        run = acco_jax.local_gradients(loss, mesh=tx.mesh, microbatches=1)
        given = (theta(), jax.random.key(1)), (params, rng)
        ends = [run(x, batch_for(tx), rng=key) for x, key in given]
    chex.assert_trees_all_equal(*ends)
