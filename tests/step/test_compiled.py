"""What a compiled half-round sends, and what a device holds."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import acco_jax
from tests.reference import make_mesh
from tests.stablehlo import KINDS, collectives

WIDTH, LAYERS = 384, 8  # 8 x (384 x 385 + 2 x 384) = 1.19 M parameters


def shapes(dtype):
    layer = {"b": (WIDTH,), "g": (WIDTH,), "w": (WIDTH, WIDTH), "x": (WIDTH,)}
    tree = {f"layer{i}": layer for i in range(LAYERS)}
    is_shape = lambda s: isinstance(s, tuple)  # noqa: E731
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, dtype), tree, is_leaf=is_shape
    )


def loss_fn(params, batch, rng):
    x = batch
    for layer in params.values():
        x = x + jnp.tanh(x @ layer["w"] + layer["b"]) * layer["g"] + layer["x"]
    return jnp.mean(x.astype(jnp.float32) ** 2)


@functools.cache
def build(n, mixed=False, method="acco"):
    mesh = make_mesh(n)
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    tx = getattr(acco_jax, method)(inner, mesh=mesh)
    params = shapes(jnp.bfloat16)
    if mixed:
        params["layer0"] = shapes(jnp.float32)["layer0"]
    step = acco_jax.make_train_step(loss_fn, tx, microbatches=2)
    state = jax.eval_shape(tx.init, params)
    put = lambda tree, to: jax.tree.map(  # noqa: E731
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, to
    )
    arrays = (
        put(params, state.layout.params_shardings),
        put(state, acco_jax.state_shardings(tx, params)),
    )
    batch = jax.ShapeDtypeStruct((2 * n, WIDTH), jnp.bfloat16)
    return tx, params, state, step.lower(*arrays, batch)


def in_the_executable(lowered):
    """[(operation, largest result)] of the optimized program, larger than a norm."""
    found = []
    names = "|".join(op.replace("_", "-") for op in KINDS)
    pattern = rf"= (.*?) ({names})(?:-start)?\("
    for shape, op in re.findall(pattern, compiled(lowered).as_text()):
        dims = re.findall(r"\[([\d,]*)\]", shape)
        size = max(math.prod(int(x) for x in d.split(",") if x) for d in dims)
        if size > 16:
            found.append((op, size))
    return found


@functools.cache
def compiled(lowered):
    return lowered.compile()


@pytest.mark.parametrize(("method", "selects"), [("ddp", 3), ("zero1", 3), ("acco", 4)])
def test_a_leaf_is_selected_once_for_each_array_that_is_kept(method, selects):
    """Parameters and two moments; of acco, theta and where the parameters go.

    They stay where no worker has weight. A compiler's time grows with each.
    """
    tx = getattr(acco_jax, method)(optax.adamw(1e-3), mesh=make_mesh(4))
    step = acco_jax.make_train_step(
        lambda params, batch, rng: sum(jnp.sum(x * batch) for x in params),
        tx,
        microbatches=2,
    )

    def found(leaves):
        shape = jax.ShapeDtypeStruct((8, 128), jnp.float32)
        arrays = acco_jax.abstract_start(tx, [shape] * leaves)
        text = step.lower(*arrays, jax.ShapeDtypeStruct((8, 128), "f4")).as_text()
        return text.count("stablehlo.select")

    assert found(7) - found(4) == 3 * selects


def sizes(params):
    out = {}
    for x in jax.tree.leaves(params):
        out[str(x.dtype)] = out.get(str(x.dtype), 0) + x.size
    return out


@pytest.mark.fast("4-False-acco")
@pytest.mark.parametrize(
    ("n", "mixed", "method"),
    [(4, False, "acco"), (8, False, "acco"), (4, True, "acco"), (4, False, "zero1")],
)
def test_one_collective_each_way_and_dtype(n, mixed, method):
    _, params, _, lowered = build(n, mixed, method)
    short = {"bfloat16": "bf16", "float32": "f32"}
    expected = sizes(params)
    found = collectives(lowered)
    for op in ("reduce_scatter", "all_gather"):
        of = {c.dtype: c.size for c in found if c.kind == op}
        assert sum(c.kind == op for c in found) == len(expected)
        for dtype, size in expected.items():
            assert size <= of[short[dtype]] < 1.2 * size  # small: much is padding
    assert {c.kind for c in found} == {"reduce_scatter", "all_gather"}
    # and the compiler leaves it at that
    executable = in_the_executable(lowered)
    names = sorted(op for op, _ in executable)
    assert names == sorted(["all-gather", "reduce-scatter"] * len(expected)), executable


@pytest.mark.fast("4")
@pytest.mark.parametrize("n", [4, 8])
def test_bytes_per_device(n):
    """K = 12 for AdamW in float32: master copy and two moments."""
    tx, params, state, lowered = build(n)
    psi = sum(x.size for x in jax.tree.leaves(params))
    expected = (12 + 4) * psi / n + 2 * psi
    homes = acco_jax.state_shardings(tx, params)
    by_shards = sum(
        math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize
        for x, s in zip(jax.tree.leaves(state), jax.tree.leaves(homes), strict=True)
    )
    assert abs(by_shards / expected - 1) < 0.02
    # and as real arrays, and in the program's own account
    made = tx.init(jax.tree.map(lambda x: np.ones(x.shape, x.dtype), params))
    device = jax.devices()[0]
    by_arrays = sum(
        s.data.nbytes
        for x in jax.tree.leaves(made)
        for s in x.addressable_shards
        if s.device == device
    )
    assert by_arrays == by_shards
    memory = compiled(lowered).memory_analysis()
    others = 2 * psi + 2 * WIDTH * 2  # parameters, and this device's batch
    assert abs((memory.argument_size_in_bytes - others) / expected - 1) < 0.02
    # all of it is donated: nothing is held twice
    assert memory.alias_size_in_bytes > 0.98 * (expected + 2 * psi)


@pytest.mark.parametrize("method", ["acco", "zero1", "ddp"])
def test_a_cpus_program_holds_the_model_once(method):
    """There nothing overlaps: a second copy would only take time to compile."""
    gradient = jax.jit(jax.grad(functools.partial(loss_fn, rng=None)))
    batch = jax.ShapeDtypeStruct((2, WIDTH), jnp.bfloat16)
    one = gradient.lower(shapes(jnp.bfloat16), batch).as_text()
    *_, lowered = build(2, method=method)
    assert lowered.as_text().count("dot_general") == one.count("dot_general")
