"""JAX's settings that refuse what NumPy allows: every method runs under them."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import acco_jax
from acco_jax.methods import origins
from tests.methods.test_contract import (
    LOCAL,
    batch_for,
    loss_fn,
    method,
    refused,
    step_of,
    theta,
)
from tests.optimizers import OPTIMIZERS
from tests.reference import AUTO, EXPLICIT

SHARDED = ("acco", "zero1", "fused_zero1", "ddp", "dpu", "wp")
VARIANTS = {  # each code path that computes with dtypes or shapes of its own, once
    "acco": ("acco", {}),
    "acco in few bits": ("acco", {"gather_bits": 8, "resync_every": 4}),
    "fused_zero1": ("fused_zero1", {}),
    "ddp": ("ddp", {}),
    "dpu": ("dpu", {"warmup_steps": 1, "reduce_bits": 8}),
    "wp in 16 bits": ("wp", {"comm_dtype": jnp.bfloat16}),
    "zero1": ("zero1", {}),
    "diloco": ("diloco", {}),
    "slowmo": ("slowmo", {"inner_learning_rate": optax.linear_schedule(0.1, 0.0, 9)}),
    "co2": ("co2", {}),
    "streaming_diloco": ("streaming_diloco", {"bits": 8}),
    "streaming_diloco at once": ("streaming_diloco", {"overlap_steps": 0}),
    "gossip": ("gossip", {"topology": "random"}),
    "cellm": ("cellm", {"weighted": False}),
    "sparseloco": ("sparseloco", {}),
}


@contextlib.contextmanager
def set_to(name, value):
    before = getattr(jax.config, name)
    jax.config.update(name, value)  # the split form's thread sees it, too
    try:
        yield
    finally:
        jax.config.update(name, before)


def loss_in_sums(params, batch, rng):
    """Of parameters of the rank 0, 1 and 2; its weight and aux are integers."""
    wide = {k: x.astype(jnp.float32) for k, x in params.items()}
    y = batch @ wide["w"] + wide["b"][None, :] + wide["c"]
    return jnp.sum(y**2), jnp.int32(y.shape[0]), {"rows": jnp.int32(y.shape[0])}


def program(tx, dtype=jnp.float32, **options):
    """The text of every program of a call, not compiled."""
    theta = {"w": jnp.ones((3, 2), dtype), "b": jnp.ones(2, dtype), "c": dtype(1)}
    params, state = jax.eval_shape(lambda x: acco_jax.start(tx, x), theta)
    step = step_of(tx, loss_in_sums, microbatches=2, **options)
    batch, counts = batch_for(tx, microbatches=2), np.array([1, 2])
    return step.lower(params, state, batch, counts).as_text()


@pytest.mark.fast(
    "acco in few bits",
    "fused_zero1",
    "diloco",
    "gossip",
    "streaming_diloco",
    "wp in 16 bits",
    "zero1",
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_strict_promotion(variant):
    """No dtype and no rank is promoted by itself, and the program is the same."""
    name, options = VARIANTS[variant]
    drop = {"drop_nonfinite": name != "fused_zero1"}
    tx = method(name, optax.sgd(0.01, 0.9), **options)
    for dtype in (jnp.float32, jnp.bfloat16):
        expected = program(tx, dtype, **drop)
        with (
            set_to("jax_numpy_dtype_promotion", "strict"),
            set_to("jax_numpy_rank_promotion", "raise"),
        ):
            assert program(tx, dtype, **drop) == expected


@pytest.mark.parametrize("name", ["acco", "streaming_diloco"])
def test_strict_promotion_with_64_bits(name):
    """A mean's weight is then float64, and its loss float32."""
    theta = {"w": jnp.ones(3, jnp.float32)}
    with set_to("jax_enable_x64", True), set_to("jax_numpy_dtype_promotion", "strict"):
        tx = method(name, optax.sgd(0.01))
        step = step_of(
            tx,
            lambda params, batch, rng: jnp.sum(params["w"] * batch),
            microbatches=2,
            drop_nonfinite=True,
        )
        args = acco_jax.abstract_start(tx, theta)
        batch, counts = batch_for(tx, microbatches=2), np.array([1, 2])
        step.lower(*args, batch.astype(np.float32), counts)


@pytest.mark.parametrize("name", ["acco", "diloco"])
def test_ranks_are_not_promoted_where_parameters_are_compared(name):
    """They are at the first call of a state that was restored, or of edited ones."""
    tx = method(name, optax.sgd(0.01))
    params, state = acco_jax.start(tx, theta())
    with set_to("jax_numpy_rank_promotion", "raise"):
        origins.check(params, state)
        others = jax.tree.map(lambda x: x + 1, params)
        with pytest.raises(ValueError, match="has other values than those"):
            origins.check(others, state)


def test_strict_promotion_of_a_plain_update():
    """Also where the codec is chosen at run time."""
    inner, grads = optax.sgd(0.1), {"w": np.ones((2, 3, 2))}
    tx = method(inner=inner, gather_bits=8, resync_every=4)
    with set_to("jax_numpy_dtype_promotion", "strict"):
        state = jax.eval_shape(tx.init, theta())
        tx._updated.eval_shape(grads, state, theta(), jnp.ones(2), {})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero1", "diloco"])
def test_strict_promotion_of_optimizers(name):
    """An optimizer that strict promotion lets run by itself runs in a method."""
    params = {"w": jnp.ones((4, 2)), "a": jnp.ones(2)}

    def alone(inner):
        updates, state = inner.update(params, inner.init(params), params)
        return optax.apply_updates(params, updates), state

    ran = []
    with set_to("jax_numpy_dtype_promotion", "strict"):
        for key, case in OPTIMIZERS.items():
            with contextlib.suppress(Exception):
                jax.eval_shape(functools.partial(alone, case.inner))
                ran.append(key)
        for key in ran:
            if name == "zero1" or "schedule_free" not in key:  # diloco refuses them
                method(name, OPTIMIZERS[key].inner).check(params)
    assert {"sgd", "lion", "adafactor", "lars", "rmsprop"} < set(ran)


@pytest.mark.parametrize("name", [*SHARDED, *LOCAL])
def test_disable_jit_is_refused(name):
    """Its collectives take minutes, or do not run at all on Explicit axes."""
    tx = method(name)
    params, state = jax.eval_shape(lambda x: acco_jax.start(tx, x), theta())
    gradients = acco_jax.local_gradients(loss_fn, mesh=tx.mesh, microbatches=1)
    with jax.disable_jit():
        with refused("jax.disable_jit is on, .* turn it off"):
            acco_jax.start(tx, theta())
        with refused("jax.disable_jit is on, .* turn it off"):
            step_of(tx)(params, state, batch_for(tx))
        with refused("jax.disable_jit is on, .* turn it off"):
            gradients(theta(), batch_for(tx))
        if name in SHARDED:
            with refused("jax.disable_jit is on, .* turn it off"):
                tx.update({"w": np.ones((2, 3, 2))}, state, theta())


@pytest.mark.parametrize("name", [*SHARDED, *LOCAL])
@pytest.mark.parametrize("types", [AUTO, EXPLICIT])
def test_lower_takes_what_a_call_takes(name, types):
    """Arrays of NumPy, and what is refused of a call is refused here, too."""
    tx = method(name, types=types)
    params, state = jax.eval_shape(lambda x: acco_jax.start(tx, x), theta())
    step, batch = step_of(tx), batch_for(tx)
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), params)
    lowered = step.lower(zeros, state, batch)
    placed = step._batches.place_batch(batch)
    like, _ = acco_jax.abstract_start(tx, theta())
    homes = jax.tree.map(lambda x: x.sharding, like)
    expected = step.lower(jax.device_put(zeros, homes), state, placed)
    assert lowered.as_text() == expected.as_text()
    with refused(r"batch leaf batch of shape .* multiple of"):
        step.lower(zeros, state, batch[:-1])
    with refused("params .*(dtype|is float16|rows)"):
        step.lower(jax.tree.map(np.float16, zeros), state, batch)


@pytest.mark.parametrize("name", [*SHARDED, *LOCAL])
def test_a_typed_key_among_the_parameters_is_refused_by_name(name):
    params, tx = {"w": jnp.ones((3, 2)), "rng": {"a": jax.random.key(0)}}, method(name)
    for entry in (tx.start, tx.abstract_start, tx.check):
        with refused(r"rng/a is key<fry>: only floating-point .* outside of params"):
            entry(params)
