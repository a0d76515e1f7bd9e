"""Where a method may stand among optax's wrappers, and where it must not."""

import functools
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import acco_jax
from tests.reference import AUTO, EXPLICIT, Unsharded, draw, make_mesh, parameters

pytestmark = pytest.mark.usefixtures("x64")
SHAPES = {"b": (7,), "w": (4, 6)}
METHODS = ("acco", "zero1")


def method(name="acco", inner=None, types=AUTO, **kwargs):
    return getattr(acco_jax, name)(
        inner or optax.adamw(1e-1), mesh=make_mesh(2, types=types), **kwargs
    )


def run(tx, theta, gradients, jit=True, **extra):
    state, params, points = tx.init(theta), theta, []
    update = jax.jit(tx.update) if jit else tx.update
    for g in gradients:
        updates, state = update(g, state, params, **extra)
        params = optax.apply_updates(params, updates)
        points.append((params, acco_jax.committed_params(state, params)))
    return points, state


def check(tx, inner, jit=True, name="acco"):
    theta = parameters(SHAPES)
    gradients = draw(SHAPES, 2, 5, 0)
    expected = getattr(Unsharded(inner), name)(theta, gradients, [[1, 1]] * 5)
    points, state = run(tx, theta, gradients, jit)
    chex.assert_trees_all_close(points, expected, rtol=0, atol=1e-12)
    return state


ADAMW = optax.adamw(1e-1)


@pytest.mark.fast("acco-alone", "acco-named", "acco-extra", "zero1-nested")
@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: optax.chain(tx),
        lambda tx: optax.chain(optax.chain(tx)),
        lambda tx: optax.named_chain(("acco", tx)),
        lambda tx: optax.with_extra_args_support(tx),
    ],
    ids=["alone", "nested", "named", "extra"],
)
@pytest.mark.parametrize("name", METHODS)
def test_alone_in_a_chain(wrap, name):
    tx = wrap(method(name))
    state = check(tx, ADAMW, name=name)
    theta = parameters(SHAPES)
    # under eval_shape and jit the same
    shapes = jax.eval_shape(tx.init, theta)
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes, state)
    chex.assert_trees_all_equal_shapes_and_dtypes(jax.jit(tx.init)(theta), state)
    shardings = acco_jax.state_shardings(tx, shapes_of(theta))
    assert jax.tree.structure(shardings) == jax.tree.structure(state)
    for s, x in zip(jax.tree.leaves(shardings), jax.tree.leaves(state), strict=True):
        assert isinstance(s, NamedSharding)
        assert x.size == 1 or s.is_equivalent_to(x.sharding, x.ndim)


def shapes_of(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


noop = optax.identity()
mask = {"b": True, "w": True}
AROUND = {
    "chain": lambda tx: optax.chain(tx, optax.scale(0.5)),
    "clipped before": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "decayed before": lambda tx: optax.named_chain(
        ("decay", optax.add_decayed_weights(0.1)), ("acco", tx)
    ),
    "chain of chains": lambda tx: optax.chain(optax.chain(noop, tx), noop),
    "chain in a named chain": lambda tx: optax.named_chain(
        ("a", optax.chain(tx)), ("b", noop)
    ),
    "named_chain": lambda tx: optax.named_chain(("acco", tx), ("half", noop)),
    "masked": lambda tx: optax.masked(tx, mask),
    "masked by a function": lambda tx: optax.masked(tx, lambda p: mask),
    "partition": lambda tx: optax.partition(
        {"a": tx, "z": optax.set_to_zero()}, {"b": "z", "w": "a"}
    ),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2),
    "flatten": lambda tx: optax.flatten(tx),
    "maybe_update": lambda tx: optax.transforms.conditionally_mask(
        tx, lambda step: step > 1
    ),
    "lookahead": lambda tx: optax.lookahead(tx, 2, 0.5),
    "schedule_free": lambda tx: optax.contrib.schedule_free(tx, 0.1),
    "frozen beside it": lambda tx: optax.chain(
        tx, optax.masked(optax.set_to_zero(), mask)
    ),
    "inside a chain, masked": lambda tx: optax.chain(noop, optax.masked(tx, mask)),
}


@pytest.mark.parametrize("how", ["plain", "jit", "eval_shape"])
@pytest.mark.parametrize("name", AROUND)
def test_what_cannot_work_is_refused(name, how):
    theta = parameters(SHAPES)
    refused = AROUND[name](method()).init
    abstract = functools.partial(jax.eval_shape, refused)
    init = {"plain": refused, "jit": jax.jit(refused), "eval_shape": abstract}[how]
    with pytest.raises(ValueError, match=r"stand inside|be the only member") as error:
        init(theta)
    assert "\n" not in str(error.value)


def test_a_refusal_names_the_wrapper():
    theta = parameters(SHAPES)
    with pytest.raises(ValueError, match=r"optax\.apply_if_finite"):
        AROUND["apply_if_finite"](method()).init(theta)
    with pytest.raises(ValueError, match=r"optax\.named_chain"):
        AROUND["named_chain"](method()).init(theta)


@pytest.mark.fast("acco-explicit", "zero1-auto")
@pytest.mark.parametrize("types", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", METHODS)
def test_inject_hyperparams_around_a_factory(name, types):
    """Its counts are half-rounds, and its values may be changed on the way."""
    mesh = make_mesh(2, types=types)

    @optax.inject_hyperparams
    def factory(learning_rate):
        return getattr(acco_jax, name)(optax.adamw(learning_rate), mesh=mesh)

    tx = factory(learning_rate=lambda count: 0.1 / (1 + count // 100))
    state = check(tx, ADAMW, name=name)
    assert int(state.count) == 5
    theta = parameters(SHAPES)
    # the layout is part of the state, not of a closure that every trace rebuilds
    chex.assert_trees_all_equal_shapes_and_dtypes(jax.eval_shape(tx.init, theta), state)
    shardings = acco_jax.state_shardings(tx, shapes_of(theta))
    assert jax.tree.structure(shardings) == jax.tree.structure(state)
    chex.assert_trees_all_equal_shapes_and_dtypes(jax.jit(tx.init)(theta), state)
    check(factory(learning_rate=0.1), ADAMW, jit=False, name=name)


def test_injected_values_can_be_set():
    mesh = make_mesh(2)
    tx = optax.inject_hyperparams(
        lambda learning_rate: acco_jax.acco(optax.sgd(learning_rate), mesh=mesh)
    )(learning_rate=0.1)
    theta, (g,) = parameters(SHAPES), draw(SHAPES, 2, 1, 0)
    state, update = tx.init(theta), jax.jit(tx.update)
    _, state = update(g, state, theta)
    small, _ = update(g, state, theta)
    state.hyperparams["learning_rate"] = jnp.asarray(0.2)
    large, _ = update(g, state, theta)
    double = jax.tree.map(lambda u: 2 * u, small)
    chex.assert_trees_all_close(large, double, rtol=1e-9)


@pytest.mark.parametrize("types", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_inside_everything_counts_commits(types):
    inner = optax.apply_if_finite(
        optax.inject_hyperparams(optax.adamw)(learning_rate=0.1), 3
    )
    state = check(method(inner=inner, types=types), inner)
    assert int(state.inner.inner_state.count) == 2


def test_apply_if_finite_inside_skips_a_nan_commit():
    inner = optax.apply_if_finite(ADAMW, 3)
    tx, theta = method(inner=inner), parameters(SHAPES)
    gradients = draw(SHAPES, 2, 5, 0)
    gradients[1]["b"][0, 0] = np.nan  # it reaches the commit of half-round 2
    expected = Unsharded(inner).acco(theta, gradients, [[1, 1]] * 5)
    points, state = run(tx, theta, gradients)
    chex.assert_trees_all_close(points, expected, rtol=0, atol=1e-12)
    assert int(state.inner.total_notfinite) == 1


def test_extra_arguments_through_a_chain():
    inner = optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, factor=0.5)
    )
    theta, gradients = parameters(SHAPES), draw(SHAPES, 2, 7, 0)
    extra = {"value": jnp.asarray(1.0)}
    expected = Unsharded(inner).acco(theta, gradients, [[1, 1]] * 7, extra)
    tx = optax.chain(method(inner=inner))
    points, state = run(tx, theta, gradients, **extra)
    chex.assert_trees_all_close(points, expected, rtol=0, atol=1e-12)
    assert float(state[-1].inner[-1].scale) < 1


def test_an_optax_transformation_is_no_method():
    tx, params = optax.adamw(1e-3), {"w": jnp.ones(4)}
    for use in (
        lambda: acco_jax.start(tx, params),
        lambda: acco_jax.abstract_start(tx, params),
        lambda: acco_jax.reshard(tx.init(params), tx),
    ):
        with pytest.raises(ValueError, match="not a method of this library: pass acco"):
            use()


def test_a_step_on_a_wrapped_method_is_refused():

    def loss(p, batch, rng):
        return jnp.mean(batch @ p["w"]) + p["b"].sum()

    make = acco_jax.make_train_step
    with pytest.raises(ValueError, match="pass acco_jax"):
        make(loss, optax.chain(method()), microbatches=1)
    with pytest.raises(ValueError, match="pass acco_jax"):
        make(loss, optax.adamw(1e-3), microbatches=1)
    step = make(loss, method(), microbatches=1)
    theta = parameters(SHAPES)
    batch = np.zeros((2, 4))
    with pytest.raises(ValueError, match="the state is wrapped"):
        step(theta, optax.chain(method()).init(theta), batch)
    with pytest.raises(ValueError, match="holds 0 states"):
        step(theta, ADAMW.init(theta), batch)
    with pytest.raises(ValueError, match="of another method"):
        step(theta, method("zero1").init(theta), batch)


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        *(("dpu", "acco"), ("acco", "dpu"), ("zero1", "ddp"), ("ddp", "zero1")),
        *(("dpu", "wp"), ("wp", "dpu")),
    ],
)
def test_an_update_of_another_methods_state_is_refused(mine, other):
    theta, gradients = parameters(SHAPES), draw(SHAPES, 2, 1, 0)
    state = method(other).init(theta)
    with pytest.raises(ValueError, match="of another method than tx"):
        method(mine).update(gradients[0], state, theta)


@pytest.mark.parametrize(
    ("workers", "options", "words"),
    [
        (2, {"comm_dtype": jnp.bfloat16}, r"communicates float\d\d, tx bfloat16"),
        (4, {}, "the state's workers are not tx's: move it with acco_jax.reshard"),
    ],
)
def test_an_update_of_a_state_with_other_options_is_refused(workers, options, words):
    theta, gradients = parameters(SHAPES), draw(SHAPES, 2, 1, 0)
    state = acco_jax.acco(ADAMW, mesh=make_mesh(2)).init(theta)
    tx = acco_jax.acco(ADAMW, mesh=make_mesh(workers), **options)
    with pytest.raises(ValueError, match=words):
        tx.update(gradients[0], state, theta)


@pytest.mark.parametrize(
    ("workers", "options", "words"),
    [
        (2, {"comm_dtype": jnp.bfloat16}, r"communicates float\d\d, tx bfloat16"),
        (1, {}, "the state's workers are not tx's: move it with acco_jax.reshard"),
    ],
)
@pytest.mark.parametrize("name", ["gossip", "cellm", "sparseloco", "diloco"])
def test_a_local_state_with_other_options_is_refused(name, workers, options, words):
    make = functools.partial(getattr(acco_jax, name), ADAMW, local_steps=1)
    params, state = acco_jax.start(make(mesh=make_mesh(2)), parameters(SHAPES))
    tx = make(mesh=make_mesh(workers), **options)
    step = acco_jax.make_train_step(lambda p, x, rng: p["w"].sum(), tx, microbatches=1)
    with pytest.raises(ValueError, match=words):
        step(params, state, np.zeros((2, 4)))


@pytest.mark.parametrize("name", ["diloco", "streaming_diloco", "cellm", "sparseloco"])
def test_an_outer_optimizer_and_the_rate_that_it_replaces_are_refused(name):
    options = {"mesh": make_mesh(2), "outer": optax.sgd(1.0)}
    make = functools.partial(getattr(acco_jax, name), ADAMW, **options)
    make()
    for given in ({"outer_learning_rate": 0.1}, {"outer_momentum": 0.5}):
        with pytest.raises(ValueError, match="that outer replaces: leave them out"):
            make(**given)


@pytest.mark.parametrize("form", ["auto", "fused"])
def test_adaptive_counts_of_groups_of_devices_are_refused_once(form):
    mesh = make_mesh(2, 2, names=("data", "model"))
    tx = acco_jax.acco(ADAMW, mesh=mesh, param_specs=P())
    with pytest.raises(ValueError, match="over model: give a number, and") as error:
        acco_jax.make_train_step(
            lambda p, x, rng: p.sum(), tx, microbatches=acco_jax.Adaptive(1, 4),
            form=form,
        )  # fmt: skip
    assert "form=" not in str(error.value)


def test_numbers_of_numpy_count_microbatches():
    tx, four = acco_jax.zero1(ADAMW, mesh=make_mesh(2)), np.int64(4)
    for counted in (four, acco_jax.Balanced(8, four)):
        acco_jax.make_train_step(lambda p, x, rng: p.sum(), tx, microbatches=counted)
    with pytest.raises(ValueError, match=r"microbatches is 2\.0: give an integer"):
        acco_jax.local_gradients(
            lambda p, x, rng: p.sum(), mesh=make_mesh(2), microbatches=2.0
        )


@pytest.mark.parametrize("name", ["acco", "zero1", "dpu", "wp"])
def test_a_weight_that_is_no_number_is_not_taken_for_none(name):
    """A skipped step could go unnoticed for a whole run; parameters of NaN cannot."""
    theta, gradients = parameters(SHAPES), draw(SHAPES, 2, 2, 0)
    tx, params = method(name), theta
    state = tx.init(theta)
    for g in gradients:
        weight = jnp.array([jnp.nan, 1.0])
        updates, state = tx.update(g, state, params, weight=weight)
        params = optax.apply_updates(params, updates)
    assert not any(jnp.isfinite(x).any() for x in jax.tree.leaves(params))
    with pytest.raises(ValueError, match=r"weight \[-1.0, 2.0\] has one below 0"):
        tx.update(gradients[0], tx.init(theta), theta, weight=[-1.0, 2.0])


def test_dtypes_that_cannot_hold_gradients_are_refused():
    make = acco_jax.acco
    for name in ("comm_dtype", "accumulate_dtype"):
        with pytest.raises(ValueError, match=f"{name} is int8: give a floating-point"):
            make(ADAMW, mesh=make_mesh(2), **{name: jnp.int8})
        with pytest.raises(ValueError, match=f"{name} is float8_e5m2: .*at least 16"):
            make(ADAMW, mesh=make_mesh(2), **{name: jnp.float8_e5m2})


@pytest.mark.parametrize(("mine", "other"), [("sgd", "adam"), ("adam", "sgd")])
def test_a_state_of_another_inner_optimizer_is_refused(mine, other):
    theta, gradients = parameters(SHAPES), draw(SHAPES, 2, 1, 0)
    mine, other = (
        acco_jax.zero1(getattr(optax, name)(0.1), mesh=make_mesh(2))
        for name in (mine, other)
    )
    state = other.init(theta)
    with pytest.raises(ValueError, match="of another inner optimizer than tx's"):
        mine.update(gradients[0], state, theta)
    with pytest.raises(ValueError, match="of another inner optimizer or other options"):
        acco_jax.reshard(state, mine)


def test_a_warm_up_is_a_whole_number():
    for steps in (2.5, None, -1):
        with pytest.raises(
            ValueError, match=r"warmup_steps is .*: give a whole number"
        ):
            acco_jax.dpu(ADAMW, mesh=make_mesh(2), warmup_steps=steps)


def test_steps_of_a_method_that_warms_up():
    tx = acco_jax.dpu(ADAMW, mesh=make_mesh(2), warmup_steps=3)
    assert [tx.steps_done(calls) for calls in range(7)] == [0, 1, 2, 3, 3, 4, 5]
    assert [tx.calls(steps) for steps in (2, 3, 4, 10)] == [2, 3, 5, 11]


def test_nothing_depends_on_who_built_the_transformation():
    """A state made by one acco(...) is continued by another of the same arguments."""
    theta, gradients = parameters(SHAPES), draw(SHAPES, 2, 4, 0)
    expected = Unsharded(ADAMW).acco(theta, gradients, [[1, 1]] * 4)
    state, params = method().init(theta), theta
    for g, (here, _) in zip(gradients, expected, strict=True):
        updates, state = method().update(g, state, params)
        params = optax.apply_updates(params, updates)
        chex.assert_trees_all_close(params, here, rtol=0, atol=1e-12)


OTHER_OPTAX = """
def chain(*args):
    {members} = [one.init for one in args]
    def init_fn(params):
        return tuple({member}(params) for {member} in {members})
    return init_fn

def named_chain(*args):
    {members} = dict(args)
    def init_fn(params):
        states = {{}}
        for name, {member} in {members}.items():
            states[name] = {member}.init(params)
        return states
    return init_fn
"""


@pytest.mark.parametrize("members", ["inits", "init_fns", "transforms"])
@pytest.mark.parametrize("member", ["one", "fn", "tx"])
def test_an_optax_with_other_names_inside_is_not_refused(member, members):
    """Not every chain, only because its local variables cannot be read."""
    module = types.ModuleType("optax.something")
    exec(OTHER_OPTAX.format(member=member, members=members), module.__dict__)
    shapes = shapes_of(parameters(SHAPES))
    assert len(jax.eval_shape(module.chain(method()), shapes)) == 1
    assert len(jax.eval_shape(module.named_chain(("a", method())), shapes)) == 1
    # what needs no names to be known stays refused
    with pytest.raises(ValueError, match=r"stand inside optax\.MultiSteps"):
        module.chain(optax.identity(), optax.MultiSteps(method(), 2))(shapes)
