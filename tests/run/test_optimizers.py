"""Schedules, weight decay, groups and averages, against NumPy and optax by hand."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import acco_jax
from acco_jax.models import transformer
from acco_jax.run.build import optimizers
from acco_jax.run.build.validation import validate
from acco_jax.run.config import fields as configs


def config_of(steps=10, **optimizer):
    config = configs.default_config()
    config.steps = steps
    config.optimizer.update(optimizer)
    return config


def rates(steps=10, **optimizer):
    """The learning rate of each step, and of the one after the last."""
    config = config_of(steps, learning_rate=2.0, **optimizer)
    validate(config)
    rate = optimizers.learning_rate(config)
    return np.asarray([rate(t) for t in range(steps + 1)])


def test_cosine_and_linear_end_at_their_floor():
    t = np.arange(11) / 10
    cosine = 0.2 + 1.8 * (1 + np.cos(math.pi * t)) / 2
    np.testing.assert_allclose(rates(final_fraction=0.1), cosine, rtol=1e-6)
    linear = rates(schedule="linear", final_fraction=0.1)
    np.testing.assert_allclose(linear, 2 - 1.8 * t, rtol=1e-6)


def test_wsd_warms_up_stays_and_decays():
    expected = [0.5, 1.0, 1.5, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2,
                1.5, 1.0, 0.5, 0]  # fmt: skip
    found = rates(20, schedule="wsd", warmup_steps=3, decay_fraction=0.2)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        (
            "exponential_decay",
            {"transition_steps": 2, "decay_rate": 0.5},
            optax.exponential_decay(2.0, 2, 0.5),
        ),
        (
            "warmup_cosine_decay_schedule",
            {"init_value": 0.0, "warmup_steps": 2, "decay_steps": 10},
            optax.warmup_cosine_decay_schedule(0.0, 2.0, 2, 10),
        ),
        (
            "piecewise_constant_schedule",
            {"boundaries_and_scales": {3: 0.1}},
            optax.piecewise_constant_schedule(2.0, {3: 0.1}),
        ),
    ],
)
def test_a_schedule_of_optax_by_name(name, options, expected):
    found = rates(schedule=name, schedule_options=options)
    np.testing.assert_allclose(found, [expected(t) for t in range(11)], rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "exponential_decai"}, "did you mean 'exponential_decay'"),
        ({"schedule": "join_schedules"}, "Known: cosine, linear, wsd"),
        (
            {"schedule": "exponential_decay", "schedule_options": {"rate": 1}},
            "schedule_options of exponential_decay is 'rate'",
        ),
        ({"schedule": "exponential_decay"}, "schedule_options {} do not suit"),
        ({"final_fraction": 1.5}, "final_fraction is 1.5: it must be at least 0 and"),
        ({"ema": 1.0}, "ema is 1.0: it must be at least 0 and below 1"),
        ({"no_decay": "("}, r"pattern '\(', which is not a regular expression"),
        ({"groups": (("wte", 1),)}, r"groups has \('wte', 1\): give pairs"),
        ({"groups": (("wte", {"rate": 1}),)}, "field of optimizer.groups is 'rate'"),
    ],
)
def test_refused_in_one_line(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        validate(config_of(**changes))
    assert "\n" not in str(error.value)


def decaying():
    """Optimizers of optax that take a learning rate and a mask of weight decay."""
    found = []
    for module in (optax, optax.contrib):
        for name in dir(module):
            try:
                names = optimizers.inspect.signature(getattr(module, name)).parameters
            except (TypeError, ValueError):
                continue
            masks = set(names) & set(optimizers.DECAY_MASKS)
            if masks and {"learning_rate", "weight_decay"} <= set(names):
                found.append(name)
    return sorted(set(found) - {"sophia"})  # which asks for a function of the loss


@pytest.mark.fast("adamw", "muon", "lamb", "lion", "adafactor")
@pytest.mark.parametrize("name", decaying())
def test_norms_and_biases_do_not_decay(name):
    """Without a gradient only weight decay moves anything, in every optimizer."""
    options = {"weight_decay": 0.1}
    config = config_of(name=name, learning_rate=1.0, clip=0.0, options=options)
    params = {
        "dense": {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)},
        "h": {"ln": {"scale": jnp.ones((2, 3))}, "kernel": jnp.ones((2, 4, 3))},
        "gain": jnp.ones(3),
    }
    stacked = {"dense": False, "h": True, "gain": False}
    inner = optimizers.optimizer(config, lambda p: stacked)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = inner.update(zeros, inner.init(params), params)
    moved = jax.tree.map(lambda u: bool(jnp.abs(u).max() > 0), updates)
    kernel = {"kernel": True}
    assert moved == {
        "dense": kernel | {"bias": False},
        "h": kernel | {"ln": {"scale": False}},
        "gain": False,
    }


def test_what_does_not_decay_can_be_named():
    params = {"a": jnp.ones((2, 2)), "b": jnp.ones((2, 2)), "bias": jnp.ones(2)}

    def moved(**changes):
        config = config_of(clip=0.0, **changes)
        inner = optimizers.optimizer(config)
        zeros = jax.tree.map(jnp.zeros_like, params)
        updates, _ = inner.update(zeros, inner.init(params), params)
        return [bool(jnp.abs(u).max() > 0) for u in updates.values()]

    assert moved() == [True, True, False]
    assert moved(no_decay="^a") == [False, True, True]
    assert moved(no_decay="") == [True, True, True]


def test_the_gpt_neo_decays_its_matrices_alone():
    sizes = transformer.Config(13, 8, width=6, layers=2, heads=2)
    params = jax.eval_shape(lambda: transformer.init_params(sizes, jax.random.key(0)))
    kept = {
        "/".join(k.key for k in path): decayed
        for path, decayed in jax.tree_util.tree_leaves_with_path(
            optimizers._decayed(None, params)
        )
    }
    assert {k for k, v in kept.items() if v} == {
        k for k in kept if k.endswith(("kernel", "embedding"))
    }
    assert len(kept) > sum(kept.values()) > 0


def test_groups_have_rates_and_options_of_their_own():
    """The first pattern that matches counts; what none matches has the defaults."""
    groups = (
        ("wte", {"learning_rate": 5e-4, "weight_decay": 0.0}),
        ("w", {"b2": 0.9}),
    )
    config = config_of(groups=groups, clip=0.5, learning_rate=1e-3)
    validate(config)
    params = {name: jnp.full((2, 3), 0.5) for name in ("wte", "w", "x")}
    grads = jax.tree.map(lambda p: p + 1, params)
    cosine = optax.cosine_decay_schedule

    def by_hand(peak, b2, decay):
        return optax.adamw(cosine(peak, 10), b2=b2, weight_decay=decay)

    rules = {"wte": by_hand(5e-4, 0.95, 0.0), "w": by_hand(1e-3, 0.9, 0.1),
             "x": by_hand(1e-3, 0.95, 0.1)}  # fmt: skip
    expected = optax.chain(
        optax.clip_by_global_norm(0.5), optax.partition(rules, {k: k for k in params})
    )
    found = optimizers.optimizer(config)
    states = [tx.init(params) for tx in (found, expected)]
    for _ in range(3):
        a, states[0] = found.update(grads, states[0], params)
        b, states[1] = expected.update(grads, states[1], params)
        chex.assert_trees_all_close(a, b, rtol=1e-6)


@pytest.mark.fast("acco")
@pytest.mark.parametrize("name", ["zero1", "acco", "dpu"])
def test_the_average_is_of_the_committed_parameters(name):
    """Against NumPy, over the points that the method itself commits."""
    decay, n = 0.8, 2
    mesh = jax.make_mesh((n,), ("data",), devices=jax.devices()[:n])
    config = config_of(20, ema=decay, learning_rate=0.1)
    tx = optimizers.method(config, name, mesh, "data")
    params = {"w": jnp.linspace(0.0, 1.0, 12).reshape(4, 3), "b": jnp.ones(3)}
    state, average, steps = tx.init(params), None, 0
    key = jax.random.key(0)
    unaveraged = optimizers.averaged(state, decay)
    chex.assert_trees_all_equal(acco_jax.committed_params(unaveraged, params), params)
    for t in range(8):
        grads = jax.tree.map(
            lambda p, t=t: jax.random.normal(jax.random.fold_in(key, t), (n, *p.shape)),
            params,
        )
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        if int(state.steps) == steps:
            continue
        steps = int(state.steps)
        now = jax.tree.map(np.float64, acco_jax.committed_params(state, params))
        old = average or jax.tree.map(np.zeros_like, now)
        average = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, old, now)
        expected = jax.tree.map(lambda a: a / (1 - decay**steps), average)  # noqa: B023
        with jax.transfer_guard("disallow"):  # as in the loop
            at = optimizers.averaged(state, decay)
        found = acco_jax.committed_params(at, params)
        chex.assert_trees_all_close(found, expected, rtol=1e-5)
    assert steps >= 3


FREE = {
    "adamw": {"name": "schedule_free_adamw"},
    "sgd": {"name": "schedule_free_sgd", "clip": 0.0, "options": {"b1": 0.7}},
    "narrow z": {
        "name": "schedule_free_sgd",
        "clip": 0.0,
        "options": {"b1": 0.7, "state_dtype": "bfloat16"},
    },
    "groups": {
        "name": "schedule_free_adamw",
        "groups": (("b", {"learning_rate": 0.2, "b1": 0.6}),),
    },
}


@pytest.mark.fast("acco-adamw", "acco-groups")
@pytest.mark.parametrize("changes", FREE.values(), ids=list(FREE))
@pytest.mark.parametrize("name", ["zero1", "acco"])
def test_schedule_free_optimizers_are_evaluated_at_x(name, changes):
    """x is the mean of all z where the learning rate is constant."""
    n = 2
    mesh = jax.make_mesh((n,), ("data",), devices=jax.devices()[:n])
    config = config_of(20, learning_rate=0.5, schedule="constant", **changes)
    tx = optimizers.method(config, name, mesh, "data")
    params = {"w": jnp.linspace(0.0, 1.0, 12).reshape(4, 3), "b": jnp.ones(3)}
    state, every_z, steps = tx.init(params), [], 0
    key, update = jax.random.key(0), jax.jit(tx.update)
    for t in range(8):
        grads = jax.tree.map(
            lambda p, t=t: jax.random.normal(jax.random.fold_in(key, t), (n, *p.shape)),
            params,
        )
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        if int(state.steps) == steps:
            continue
        steps = int(state.steps)
        every_z.append(_z(state, params))
        x = jax.tree.map(lambda *z: np.mean(z, axis=0), *every_z)
        with jax.transfer_guard("disallow"):
            at = optimizers.evaluated(state)
        found = acco_jax.committed_params(at, params)
        rtol = 0.005 if "state_dtype" in changes.get("options", {}) else 1e-5
        chex.assert_trees_all_close(found, x, rtol=rtol, atol=rtol)
    assert steps >= 3
    y = acco_jax.committed_params(state, params)
    for name in params:
        assert abs(y[name] - found[name]).max() > max(2 * rtol, 0.002)


def _z(state, params):
    """The iterates of all groups, as one tree."""
    is_free = lambda s: isinstance(s, optax.contrib.ScheduleFreeState)  # noqa: E731
    leaves = jax.tree.leaves(state.inner, is_leaf=is_free)
    zs = [s.z for s in leaves if is_free(s)]
    merged = {
        name: next(z[name] for z in zs if not isinstance(z[name], optax.MaskedNode))
        for name in params
    }
    at = jax.tree.map(lambda z, y: z.astype(y.dtype), merged, state.master)
    return jax.device_get(acco_jax.committed_params(state._replace(master=at), params))


def test_other_optimizers_are_evaluated_where_they_commit():
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    for name in ("zero1", "diloco"):
        tx = optimizers.method(config_of(), name, mesh, "data")
        _, state = jax.eval_shape(tx.start, {"w": jnp.ones(3)})
        assert optimizers.evaluated(state) is state


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ema": 0.9}, "ema is 0.9, but each worker of diloco has parameters of its"),
        (
            {"name": "schedule_free_adamw"},
            "'schedule_free_adamw', .* each worker of diloco has .*: leave it out",
        ),
        (
            {"name": "schedule_free_sgd", "ema": 0.9},
            "ema is 0.9, but schedule_free_sgd averages .*: leave it out",
        ),
        ({"name": "schedule_free_sgd", "options": {"b1": 0}}, r"options\.b1 is 0: "),
        (
            {"name": "schedule_free_sgd", "groups": (("w", {"b1": 0.0}),)},
            r"options\.b1 is 0: .* more than 0",
        ),
    ],
)
def test_averages_that_cannot_be_evaluated_are_refused(changes, message):
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    with pytest.raises(ValueError, match=message):
        optimizers.method(config_of(**changes), "diloco", mesh, "data")


def test_schedule_free_optimizers_have_no_schedule():
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    config = config_of(name="schedule_free_adamw", schedule="cosine")
    with pytest.raises(
        ValueError, match=r"'cosine', .* set optimizer\.schedule='const"
    ):
        optimizers.method(config, "zero1", mesh, "data")


def test_the_weight_of_a_long_average_keeps_its_digits():
    """1 - 0.99999**10 in float32 would be off by a thousandth."""
    decay, params = 0.99999, {"w": jnp.ones(4)}
    average = optimizers.average_parameters(decay)
    state = average.init(params)
    for _ in range(10):
        _, state = average.update({"w": jnp.zeros(4)}, state, params)
    found = optimizers._average(state, params, decay)
    np.testing.assert_allclose(found["w"], 1, rtol=2e-6)


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"tokens": 10_000}, 20),  # 16 rows of 32: 512 tokens a step
        ({"tokens": 10_240}, 20),
        ({"epochs": 1.5}, 10),  # 100 rows an epoch
        ({"epochs": 0.01}, 1),
        ({}, 1000),
    ],
)
def test_length_in_tokens_or_epochs(changes, steps):
    config = configs.default_config()
    config.length = 32
    config.update(changes)
    validate(config)
    found = configs.with_steps(config, 16, 100, steps_per_call=1)
    assert found.steps == steps
    assert configs.with_steps(config, 16, 100, steps_per_call=7).steps % 7 == (
        0 if changes else 1000 % 7
    )
    assert config.steps == 1000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 0}, "tokens is 0: it must be more than 0"),
        ({"epochs": float("nan")}, "epochs is nan: it must be"),
        ({"tokens": 5, "epochs": 1.0}, "tokens is 5 and epochs 1.0: give one of them"),
        ({"tokens": 5, "microbatches": "adaptive"}, "tokens is 5, but .*: give steps"),
    ],
)
def test_a_length_that_is_none_is_refused(changes, message):
    config = configs.default_config()
    config.update(changes)
    with pytest.raises(ValueError, match=message):
        validate(config)
