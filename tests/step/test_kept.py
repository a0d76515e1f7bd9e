"""Programs that an earlier process kept: the same bits, without a trace."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import acco_jax
from acco_jax.step import kept
from tests.reference import EXPLICIT, make_mesh, parameters

SHAPES = {"w": (5, 13), "v": (13, 3)}
N = 4  # devices
OPTIONS = {  # what each method is given beside mesh
    acco_jax.acco: {},
    acco_jax.zero1: {},
    acco_jax.fused_zero1: {},
    acco_jax.diloco: {"local_steps": 3},
    acco_jax.streaming_diloco: {"local_steps": 4, "fragments": 2, "overlap_steps": 1},
}


@pytest.fixture
def uncached():
    """Programs are compiled, whatever JAX's compilation cache has."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


def program(method, form, microbatches, traced=None, scale=None):
    """The method and a train step, of a loss that notes when it is traced."""

    def loss_fn(*args):
        *carried, params, batch, _ = args
        if traced is not None:
            traced.append(1)
        out = jnp.tanh(batch @ params["w"]) @ params["v"]
        factor = carried[0] if carried else 1.0
        return jnp.mean(out**2) * factor

    if scale is not None:  # with an array, as a frozen base of adapters
        loss_fn = jax.tree_util.Partial(loss_fn, scale)
    mesh = make_mesh(N, types=EXPLICIT)
    tx = method(optax.adamw(1e-2), mesh=mesh, **OPTIONS[method])
    step = acco_jax.make_train_step(loss_fn, tx, microbatches=microbatches, form=form)
    return tx, step


def batch(step, rows=2):
    held = step._batches.capacity * N * rows
    return jax.random.normal(jax.random.key(rows), (held, 5))


def begin(tx):
    return acco_jax.start(tx, jax.tree.map(jnp.array, parameters(SHAPES)))


def trained(step, params, state, x, calls=4):
    for _ in range(calls):
        params, state, metrics = step(params, state, x)
    found = params, metrics["loss"]
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(found)]


CASES = [
    (acco_jax.acco, "fused", 2),
    (acco_jax.acco, "split", 2),
    (acco_jax.acco, "fused", acco_jax.Halves(1, 3)),
    (acco_jax.acco, "split", acco_jax.Halves(1, 3)),
    (acco_jax.zero1, "fused", 2),
    (acco_jax.fused_zero1, "fused", 2),
    (acco_jax.diloco, "fused", 2),
    (acco_jax.streaming_diloco, "fused", 2),
]


@pytest.mark.usefixtures("uncached")
@pytest.mark.fast("*-plain")
@pytest.mark.parametrize("scale", [None, 2.0], ids=["plain", "array"])
@pytest.mark.parametrize(
    ("method", "form", "microbatches"),
    CASES,
    ids=[f"{m.__name__}-{form}-{n}" for m, form, n in CASES],
)
def test_the_same_bits_without_a_trace(method, form, microbatches, scale):
    scale = None if scale is None else jnp.float32(scale)
    make = functools.partial(program, method, form, microbatches)
    tx, step = make(scale=scale)
    params, state = begin(tx)
    x = batch(step)
    step.compile(params, state, x)
    data = step.keep(state)
    expected = trained(step, params, state, x)

    traced = []
    tx, again = make(traced=traced, scale=scale)
    params, state = begin(tx)
    again.take(data, state)
    again.compile(params, state, x)
    assert trained(again, params, state, x) == expected
    assert not traced


@pytest.mark.usefixtures("uncached")
def test_other_shapes_are_compiled():
    tx, step = program(acco_jax.acco, "fused", 2)
    params, state = begin(tx)
    step.compile(params, state, batch(step))
    data = step.keep(state)
    expected = trained(step, *begin(tx), batch(step, rows=3))
    traced = []
    tx, again = program(acco_jax.acco, "fused", 2, traced)
    again.take(data, begin(tx)[1])
    assert trained(again, *begin(tx), batch(again, rows=3)) == expected
    assert traced


@pytest.mark.usefixtures("uncached")
def test_two_shapes_are_both_kept():
    tx, step = program(acco_jax.zero1, "fused", 2)
    params, state = begin(tx)
    for rows in (2, 3):
        step.compile(params, state, batch(step, rows))
    data, traced = step.keep(state), []
    tx, again = program(acco_jax.zero1, "fused", 2, traced)
    again.take(data, begin(tx)[1])
    for rows in (2, 3):
        trained(again, *begin(tx), batch(again, rows))
    assert not traced


@pytest.fixture
def cached(tmp_path):
    """JAX's compilation cache is an empty folder."""
    names = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in names}
    for values in (names, before):
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        if values is names:
            yield


@pytest.mark.usefixtures("cached")
def test_what_the_compilation_cache_had_is_not_kept():
    """XLA:CPU would write it without its code."""

    def kept():
        tx, step = program(acco_jax.zero1, "fused", 2)
        params, state = begin(tx)
        step.compile(params, state, batch(step))
        return step.keep(state)

    assert kept() and kept() is None


def test_what_cannot_be_pickled_raises():
    class Local:
        """Of a tree of the user's, which another process would not find."""

    jax.tree_util.register_static(Local)
    compiled = jax.jit(lambda x, own: x).lower(1.0, Local()).compile()
    with pytest.raises(AttributeError, match="Local"):
        kept.dumped({"one": [compiled]}, [], jax.devices())


@jax.tree_util.register_static
class Alone:
    """Equal only to itself, so that its copy fits no program."""


@pytest.mark.usefixtures("uncached")
def test_what_is_equal_only_to_itself_is_not_kept():
    compiled = jax.jit(lambda x, own: x).lower(1.0, Alone()).compile()
    with pytest.raises(ValueError, match="equal only to itself"):
        kept.dumped({"one": [compiled]}, [], jax.devices())


@pytest.mark.usefixtures("cached")
def test_what_a_call_before_has_read_is_not_kept_either():
    for _ in range(2):
        tx, step = program(acco_jax.zero1, "fused", 2)
        params, state = begin(tx)
        params, state, _ = step(params, state, batch(step))
        step.compile(params, state, batch(step))
    assert step.keep(state) is None
