"""Stacked layers: every update is that of the same optimizer with a leaf per layer."""

import functools
import importlib
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import acco_jax
from acco_jax.methods.dependence import dependence
from acco_jax.models import lora, transformer
from acco_jax.run.build import optimizers
from acco_jax.run.config import fields as configs
from tests.examples import examples
from tests.reference import Unsharded, draw, make_mesh, parameters

pytestmark = pytest.mark.usefixtures("x64")
STACKED = {"h": True, "ln": False, "wte": False}
STEPS = 4
# Programs that run a few times need not be fast.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def by_dimensions(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


OPTIMIZERS = {
    "muon": optax.contrib.muon(1e-2, weight_decay=0.1),
    "lamb": optax.lamb(1e-2, weight_decay=0.1, mask=by_dimensions),
    "lars": optax.lars(1e-1, weight_decay=0.1, weight_decay_mask=by_dimensions),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4, momentum=0.9),
    "novograd": optax.novograd(1e-2, weight_decay=0.1),
    "adamw": optax.adamw(1e-2, weight_decay=0.1, mask=by_dimensions),
    "galore": optax.contrib.galore(1e-2, rank=2, update_proj_gap=2),
}


def shapes(layers=3):
    attention = {"bias": (layers, 8), "kernel": (layers, 6, 8)}
    return {"h": {"attn": attention}, "ln": (6,), "wte": (11, 6)}


def marks_of(stacked, tree):
    marks = stacked(tree) if callable(stacked) else stacked
    return jax.tree.broadcast(marks, tree)


def apart(marks, tree):
    """A list of layers in place of every stacked leaf."""
    split = lambda mark, x: list(np.asarray(x)) if mark else x  # noqa: E731
    return jax.tree.map(split, marks, tree)


def together(marks, tree):
    join = lambda mark, x: np.stack(x) if mark else x  # noqa: E731
    return jax.tree.map(join, marks, tree)


def train(tx, params, gradients, **extra):
    """The parameters after each update, and the last state."""

    @jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    state, points = jit(tx.init)(params), []
    for grads in gradients:
        params, state = step(params, state, grads)
        points.append(params)
    return points, state


def check(tx, unstacked, stacked, params, **extra):
    """`tx` on stacked layers against `unstacked` on a leaf for each of them."""
    marks, rng = marks_of(stacked, params), np.random.default_rng(1)
    draw_like = lambda x: rng.normal(size=x.shape)  # noqa: E731
    gradients = [jax.tree.map(draw_like, params) for _ in range(STEPS)]
    found, state = train(tx, params, gradients, **extra)
    split = [apart(marks, g) for g in gradients]
    expected, _ = train(unstacked, apart(marks, params), split, **extra)
    for here, there in zip(found, expected, strict=True):
        chex.assert_trees_all_close(here, together(marks, there), rtol=0, atol=1e-9)
    return state


@pytest.mark.fast("muon", "adafactor", "novograd", "adamw")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_a_leaf_per_layer(name):
    inner, params = OPTIMIZERS[name], parameters(shapes())
    check(acco_jax.per_layer(inner, STACKED), inner, STACKED, params)


def test_the_tree_would_tell_a_stack_from_its_layers():
    inner = OPTIMIZERS["lamb"]
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check(inner, inner, STACKED, parameters(shapes()))


@examples(8)
@given(data=st.data())
def test_equals_a_leaf_per_layer_whatever_is_stacked(data):
    name = data.draw(st.sampled_from(["lamb", "adafactor", "novograd", "adamw"]))
    size = st.integers(1, 6)
    tree, marks = {}, {}
    for key in data.draw(st.lists(st.sampled_from("abcd"), min_size=1, unique=True)):
        marks[key] = data.draw(st.booleans())
        dimensions = st.lists(size, min_size=int(marks[key]), max_size=3).map(tuple)
        shape = st.one_of(dimensions, st.fixed_dictionaries({"x": dimensions}))
        tree[key] = data.draw(shape)
    inner = OPTIMIZERS[name]
    check(acco_jax.per_layer(inner, marks), inner, marks, parameters(tree))


@pytest.mark.fast("muon")
@pytest.mark.parametrize("name", ["muon", "adafactor", "novograd"])
def test_several_numbers_of_layers_and_none_unstacked(name):
    tree = {"decoder": shapes(3)["h"], "encoder": {"w": (2, 4, 5), "v": (2, 4)}}
    inner = OPTIMIZERS[name]
    state = check(acco_jax.per_layer(inner, True), inner, True, parameters(tree))
    counts = optax.tree.get_all_with_path(state, "count")
    assert all(np.shape(count) == () for _, count in counts)


def test_a_function_says_what_is_stacked():
    def stacked(params):
        return {name: name == "h" for name in params}

    inner, params = OPTIMIZERS["lamb"], parameters(shapes())
    check(acco_jax.per_layer(inner, stacked), inner, stacked, params)


def test_state_lies_where_its_parameter_does():
    params = parameters(shapes(3))
    tx = acco_jax.per_layer(optax.novograd(1e-2), STACKED)
    state = jax.jit(tx.init)(params)
    moments = state.inner_state[0]
    chex.assert_trees_all_equal_shapes(moments.mu, params)
    assert moments.nu["h"]["attn"]["kernel"].shape == (3,)
    assert moments.count.shape == moments.nu["ln"].shape == ()
    plain = optax.novograd(1e-2).init(params)
    assert jax.tree.structure(state.inner_state) == jax.tree.structure(plain)
    names = jax.tree.map(lambda x: f"like {x.shape}", params)
    named = optax.tree_map_params(
        tx, lambda _, name: name, state, names, transform_non_params=lambda _: "count"
    )
    assert named.inner_state[0] == moments._replace(mu=names, nu=names, count="count")


def test_masks_in_inner_see_the_whole_tree():
    decayed = {"h": {"attn": {"bias": False, "kernel": True}}, "ln": False, "wte": True}
    inner = optax.adamw(1e-2, weight_decay=0.1, mask=decayed)
    params = parameters(shapes())
    check(acco_jax.per_layer(inner, STACKED), inner, STACKED, params)
    sides = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)
    numbers = {"h": {"attn": {"bias": None, "kernel": sides}}, "ln": None, "wte": sides}
    muon = optax.contrib.muon(1e-2, muon_weight_dimension_numbers=numbers)
    check(acco_jax.per_layer(muon, STACKED), muon, STACKED, params)


def test_without_parameters():
    inner = optax.chain(optax.centralize(), optax.scale_by_adam())
    params, marks = parameters(shapes()), marks_of(STACKED, parameters(shapes()))
    tx, split = acco_jax.per_layer(inner, STACKED), apart(marks, params)
    found, _ = tx.update(params, tx.init(params))
    expected, _ = inner.update(split, inner.init(split))
    chex.assert_trees_all_close(found, together(marks, expected), rtol=0, atol=1e-9)


def test_hyperparameters_inside_and_outside():
    schedule = optax.linear_schedule(1e-1, 1e-3, STEPS)
    params = parameters(shapes())
    inside = optax.inject_hyperparams(optax.lamb)(schedule, weight_decay=0.1)
    state = check(acco_jax.per_layer(inside, STACKED), inside, STACKED, params)
    assert state.inner_state.hyperparams["learning_rate"].shape == ()

    @optax.inject_hyperparams
    def outside(learning_rate):
        return acco_jax.per_layer(optax.lamb(learning_rate, weight_decay=0.1), STACKED)

    check(outside(schedule), inside, STACKED, params)


def wants(value):
    """Scales by the norm of each leaf and by an extra argument that it insists on."""

    def update(updates, state, params=None, *, value, **extra):
        del params, extra
        return jax.tree.map(lambda g: g / optax.safe_norm(g, 0) * value, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: value, update)


def test_inner_is_read_once_for_a_tree_and_its_arguments(monkeypatch):
    module = importlib.import_module("acco_jax.methods.per_layer")
    read = mock.Mock(side_effect=module._dependences)
    monkeypatch.setattr(module, "_dependences", read)
    tx, params = acco_jax.per_layer(optax.adamw(1e-2), STACKED), parameters(shapes())
    state = jax.eval_shape(tx.init, params)
    assert read.call_count == 2  # of one layer, and of two

    def update(names, state, x):
        return tx.update(params, state, params, **dict.fromkeys(names, x))

    for names, times in ("v", 4), ("v", 4), ("vw", 6), ("v", 6):
        jax.eval_shape(functools.partial(update, names), state, 1.0)
        assert read.call_count == times


def test_extra_arguments_reach_inner_whole():
    plateau = optax.contrib.reduce_on_plateau(patience=1, accumulation_size=1)
    inner = optax.chain(wants(()), optax.lamb(1e-2), plateau)
    params = parameters(shapes())
    tx = acco_jax.per_layer(inner, STACKED)
    state = check(tx, inner, STACKED, params, value=jnp.asarray(2.0))
    assert 0 < state.inner_state[2].scale < 1
    assert state.inner_state[2].scale.shape == ()


def equations(jaxpr):
    total = 0
    for eqn in jaxpr.eqns:
        total += 1
        for param in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inside = getattr(param, "jaxpr", param)
            total += equations(inside) if hasattr(inside, "eqns") else 0
    return total


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_program_does_not_grow_with_the_layers(name):
    tx = acco_jax.per_layer(OPTIMIZERS[name], STACKED)

    def size(layers):
        params = parameters(shapes(layers))
        state = jax.eval_shape(tx.init, params)
        update = jax.make_jaxpr(tx.update)(params, state, params)
        return equations(jax.make_jaxpr(tx.init)(params)), equations(update)

    assert size(2) == size(8)


ADAM = optax.adam(1e-2)
ACROSS = {
    "clip": optax.chain(optax.clip_by_global_norm(1.0), ADAM),
    "finite": optax.apply_if_finite(ADAM, 3),
    "skip": optax.MultiSteps(
        ADAM, 2, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation(),
    "prodigy": optax.contrib.prodigy(),
}


@pytest.mark.parametrize("name", ACROSS)
def test_what_looks_across_leaves_is_refused_before_any_device_work(name):
    words = r"update of h/attn/bias depends on .*h/attn/kernel.*, but.* put .* outside"
    params = parameters(shapes())
    abstract = jax.eval_shape(lambda: params)
    with pytest.raises(ValueError, match=words) as error:
        acco_jax.per_layer(ACROSS[name], STACKED).init(abstract)
    assert "\n" not in str(error.value)
    assert "optax.chain(optax.clip_by_global_norm(1.0), acco" in str(error.value)
    # where nothing is stacked, it is as well inside
    check(acco_jax.per_layer(ACROSS[name], False), ACROSS[name], False, params)


def test_what_looks_across_layers_or_from_an_unstacked_leaf_is_refused():
    clip = optax.clip_by_global_norm(1.0)
    with pytest.raises(ValueError, match="update of w depends on its other layers, "):
        acco_jax.per_layer(clip, True).init({"w": jnp.ones((3, 4))})

    def add_the_mean_of_h(updates, params=None):
        mean = updates["h"]["attn"]["kernel"].mean()
        return updates | {"ln": updates["ln"] + mean}

    with pytest.raises(ValueError, match="update of ln depends on h/attn/kernel, but"):
        acco_jax.per_layer(optax.stateless(add_the_mean_of_h), STACKED).init(
            parameters(shapes())
        )


def test_clipping_leaves_that_are_not_stacked_is_as_well_inside():
    clip = optax.masked(
        optax.clip_by_global_norm(0.1), {"h": False, "ln": True, "wte": True}
    )
    inner, params = optax.chain(clip, OPTIMIZERS["lamb"]), parameters(shapes())
    check(acco_jax.per_layer(inner, STACKED), inner, STACKED, params)


def test_a_state_that_mixes_leaves_is_refused():
    def update(updates, state, params=None):
        return updates, 0.9 * state + optax.tree.norm(updates)

    norms = optax.GradientTransformation(lambda params: jnp.zeros(()), update)
    with pytest.raises(ValueError, match=r"of inner's state depends on h/attn/bias"):
        acco_jax.per_layer(norms, STACKED).init(parameters(shapes()))


def test_what_extra_arguments_do_across_leaves_is_refused_by_update():
    def update(updates, state, params=None, *, total, **extra):
        del params, extra, total
        norm = optax.tree.norm(updates)
        return jax.tree.map(lambda g: g / norm, updates), state

    inner = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    params = parameters(shapes())
    tx = acco_jax.per_layer(inner, STACKED)
    with pytest.raises(ValueError, match="update of h/attn/bias depends on h/attn/ker"):
        tx.update(params, tx.init(params), params, total=1.0)


def test_a_leaf_without_an_axis_is_refused():
    with pytest.raises(ValueError, match=r"h/s is marked as stacked, but its shape is"):
        acco_jax.per_layer(ADAM, True).init({"h": {"s": jnp.ones(())}})


def test_accumulating_steps_leaf_by_leaf_is_accepted():
    inner = optax.MultiSteps(OPTIMIZERS["lamb"], 2).gradient_transformation()
    params = parameters(shapes())
    check(acco_jax.per_layer(inner, STACKED), inner, STACKED, params)


def test_dependence_is_followed_through_control_flow():
    @jax.custom_jvp
    def pair(x, y):
        return x, y

    pair.defjvp(lambda primals, tangents: (pair(*primals), tangents))

    @jax.custom_vjp
    def same(x, y):
        return x, y

    same.defvjp(lambda x, y: ((x, y), None), lambda _, g: g)

    def found(fn):
        """The results' inputs, as strings of x, y and z."""
        sets = dependence(jax.make_jaxpr(fn)(1.0, 2.0, 3.0), [1, 2, 4])
        return ["".join(n for i, n in enumerate("xyz") if s >> i & 1) for s in sets]

    steps = jnp.arange(2.0)
    swap = lambda c, i: ((c[1], c[0]), c[0] + i)  # noqa: E731
    assert found(lambda x, y, z: (x * y, z, 1.0)) == ["xy", "z", ""]
    assert found(lambda x, y, z: pair(x, y)) == ["x", "y"]
    assert found(lambda x, y, z: same(x, y)) == ["x", "y"]
    assert found(jax.jit(lambda x, y, z: (x + 1, y - z))) == ["x", "yz"]
    assert found(jax.checkpoint(lambda x, y, z: (x + 1, y - z))) == ["x", "yz"]
    assert found(lambda x, y, z: lax.optimization_barrier((x, y))) == ["x", "y"]
    assert found(
        lambda x, y, z: lax.cond(z > 0, lambda: (x, y), lambda: (-x, 2.0))
    ) == ["xz", "yz"]
    assert found(
        lambda x, y, z: lax.while_loop(
            lambda c: c[0] < z, lambda c: (c[0] + 1, 2 * c[1]), (x, y)
        )
    ) == ["xz", "xyz"]
    assert found(lambda x, y, z: lax.scan(swap, (x, y), steps)) == ["xy", "xy", "xy"]
    assert found(
        lambda x, y, z: lax.fori_loop(0, 3, lambda i, c: (c[0] + z, c[1]), (x, y))
    ) == ["xz", "y"]


# ------------------------------------------------------------ methods and the runner


def inner_of(name, marks=STACKED):
    return optax.chain(
        optax.clip_by_global_norm(0.5), acco_jax.per_layer(OPTIMIZERS[name], marks)
    )


@pytest.mark.fast("zero1-*")
@pytest.mark.parametrize(("method", "name"), [("acco", "muon"), ("zero1", "adafactor")])
def test_sharded_methods_around_it(method, name):
    inner, tree = inner_of(name), shapes(4)
    tx = getattr(acco_jax, method)(inner, mesh=make_mesh(4))
    theta, gradients = parameters(tree), draw(tree, 4, 5, 0)
    expected = getattr(Unsharded(inner), method)(theta, gradients, np.ones((5, 4)))
    params, state, update = theta, tx.init(theta), jax.jit(tx.update)
    for grads, (here, _) in zip(gradients, expected, strict=True):
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        chex.assert_trees_all_close(params, here, rtol=0, atol=1e-9)
    if name == "muon":  # a moment is split as its parameter is
        mu = state.inner[1].inner_state.inner_states["muon"].inner_state[0].mu
        mu = mu["h"]["attn"]["kernel"]
        assert mu.sharding.shard_shape(mu.shape) == (1, 6, 8)


@pytest.mark.slow
def test_local_steps_with_it():
    """The rows of local methods, against the same method with a leaf per layer."""
    tree, mesh = shapes(2), make_mesh(2)
    theta = parameters(tree)
    marks = marks_of(STACKED, theta)
    targets = parameters(tree, seed=1)

    def loss(params, batch, rng):
        del rng
        error = jax.tree.map(
            lambda p, t: jnp.sum((p - t * batch.mean()) ** 2), params, targets
        )
        return sum(jax.tree.leaves(error))

    def run(inner, theta, loss):
        tx = acco_jax.diloco(inner, mesh=mesh, local_steps=2)
        step = acco_jax.make_train_step(loss, tx, microbatches=1)
        params, state = acco_jax.start(tx, theta)
        for seed in range(2):
            batch = np.random.default_rng(seed).normal(size=(4, 3))
            params, state, _ = step(params, state, batch)
        return acco_jax.committed_params(state, params)

    found = run(inner_of("lamb"), theta, loss)
    unstacked = optax.chain(optax.clip_by_global_norm(0.5), OPTIMIZERS["lamb"])
    expected = run(
        unstacked,
        apart(marks, theta),
        lambda params, *rest: loss(
            jax.tree.map(lambda m, x: jnp.stack(x) if m else x, marks, params), *rest
        ),
    )
    chex.assert_trees_all_close(found, together(marks, expected), rtol=0, atol=1e-9)


def settings_of(name, **options):
    config = configs.default_config()
    config.optimizer.name, config.optimizer.clip = name, 0.5
    config.optimizer.no_decay = ""  # as the optimizers themselves
    config.optimizer.options.update(options)
    config.optimizer.learning_rate, config.steps = 1e-2, 2 * STEPS
    return config


RUNNER = {
    "adamw": {"b2": 0.9, "weight_decay": 0.2},
    "muon": {"weight_decay": 0.1},
    "adafactor": {"min_dim_size_to_factor": 4},
    "prodigy": {},
}


def shapes_of_model():
    sizes = transformer.Config(
        13, 8, width=6, layers=2, heads=2, mlp_width=10, pattern=("global",)
    )
    return jax.eval_shape(lambda: transformer.init_params(sizes, jax.random.key(0)))


def in_blocks(params):
    """What is stacked, said another way than the model does."""
    return {name: name.startswith("h") for name in params}


@pytest.mark.fast("adamw-False", "muon-True")
@pytest.mark.parametrize(
    ("name", "adapters"),
    [*((name, False) for name in RUNNER), ("muon", True)],
)
def test_the_runners_optimizer_is_that_of_unstacked_layers(name, adapters):
    params = shapes_of_model()
    if adapters:
        ranks = {"q_proj/kernel": 4, "mlp/.*kernel": 2}
        params = jax.eval_shape(lambda: lora.init(params, jax.random.key(0), ranks))
    params = parameters(jax.tree.map(lambda x: x.shape, params))
    config = settings_of(name, **RUNNER[name])
    make = getattr(optax, name, None) or getattr(optax.contrib, name)
    unstacked = optax.chain(
        optax.clip_by_global_norm(0.5),
        make(optimizers.learning_rate(config), **RUNNER[name]),
    )
    check(
        optimizers.optimizer(config, transformer.stacked), unstacked, in_blocks, params
    )


def test_noise_of_the_runners_optimizer_differs_between_layers():
    tx = optimizers.optimizer(settings_of("noisy_sgd", key=0), transformer.stacked)
    params = {"h": {"w": jnp.ones((2, 3))}}
    updates, _ = tx.update(params, tx.init(params), params)
    first, second = updates["h"]["w"]
    assert np.abs(np.asarray(first) - np.asarray(second)).min() > 0
