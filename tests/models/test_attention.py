"""The kernels, interpreted, against attention whose scores are in memory."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from acco_jax.core.workers import over_data
from acco_jax.models import attention, flash, placement
from acco_jax.schedule import topologies


def _arrays(B, T, N, K, H, dtype=jnp.bfloat16, documents=0):
    keys = jax.random.split(jax.random.key(T + H), 4)
    shapes = [(B, T, heads, H) for heads in (N, K, K, N)]
    q, k, v, dy = (
        jax.random.normal(key, shape, dtype)
        for key, shape in zip(keys, shapes, strict=True)
    )
    segments = None
    if documents:
        ends = np.sort(np.random.default_rng(T).integers(1, T, (B, documents - 1)))
        segments = jnp.asarray((np.arange(T) >= ends[..., None]).sum(1), jnp.int32)
    return (q, k, v), segments, dy


@functools.partial(
    jax.jit, static_argnames=("implementation", "window", "scale", "softcap")
)
def _results(arrays, segments, dy, implementation, window, scale, softcap=None):
    def run(*arrays):
        return attention.attention(
            *arrays,
            scale=scale,
            window=window,
            softcap=softcap,
            segments=segments,
            implementation=implementation,
        )

    y, pull = jax.vjp(run, *arrays)
    return y, *pull(dy.astype(y.dtype).reshape(y.shape))


def _check(name, shape, window, documents, scale, softcap=None):
    arrays, segments, dy = _arrays(*shape, documents=documents)
    wide = [x.astype(jnp.float32) for x in arrays]
    expected = _results(wide, segments, dy, "xla", window, scale, softcap)
    got = _results(arrays, segments, dy, name, window, scale, softcap)
    chex.assert_trees_all_equal_shapes(got, expected)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == jnp.bfloat16
        error = jnp.abs(a.astype(jnp.float32) - b).max() / jnp.abs(b).max()
        assert error < 1e-2, (name, error)


@pytest.mark.fast("20-3")
@pytest.mark.parametrize("documents", [0, 3])
@pytest.mark.parametrize("window", [None, 20, 2])
def test_pallas(window, documents):
    _check("pallas", (2, 160, 2, 2, 24), window, documents, 0.3)


def test_pallas_shares_keys_among_heads():
    _check("pallas", (1, 130, 4, 2, 16), 100, 0, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("T", [7, 256])
def test_pallas_of_other_lengths(T):
    _check("pallas", (2, T, 3, 1, 64), None, 2, 0.5)


@pytest.mark.fast("20-3")
@pytest.mark.parametrize(("window", "documents"), [(None, 0), (20, 3)])
def test_splash(window, documents):
    _check("splash", (1, 160, 2, 2, 64), window, documents, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"), [("pallas", (2, 70, 2, 1, 24)), ("splash", (1, 160, 2, 1, 64))]
)
def test_soft_caps(name, shape):
    _check(name, shape, 20, 3, 0.5, softcap=0.6)


def test_soft_caps_of_scores_in_memory():
    arrays, segments, _ = _arrays(2, 12, 4, 2, 8, jnp.float32, documents=2)
    q, k, v = arrays
    scores = 0.7 * jnp.einsum("BTNH,BSNH->BNTS", q, jnp.repeat(k, 2, axis=2))
    before = np.arange(12)[:, None] - np.arange(12)
    seen = (before >= 0) & (before < 5) & (segments[:, :, None] == segments[:, None])
    scores = jnp.where(seen[:, None], 0.5 * jnp.tanh(scores / 0.5), -jnp.inf)
    expected = jnp.einsum(
        "BNTS,BSNH->BTNH", jax.nn.softmax(scores), jnp.repeat(v, 2, axis=2)
    )
    y = attention.attention(
        *arrays, scale=0.7, window=5, softcap=0.5, segments=segments
    )
    np.testing.assert_allclose(y, expected.reshape(y.shape), atol=1e-6)


@pytest.mark.slow
def test_splash_shares_keys_among_heads():
    _check("splash", (2, 160, 4, 2, 128), None, 0, 1.0)


@pytest.mark.fast(slow=("gpu:a100*",))
@pytest.mark.parametrize("machine", ["gpu:a100:1x8", "gpu:h200:1x8"])
def test_pallas_fits_the_shared_memory(machine):
    """Compiled for chips that are not here, forward and backward, of usual widths."""
    devices = topologies.mesh(topologies.parse(machine)).devices
    mesh = jax.sharding.Mesh(devices.flat[:1], ("data",))
    whole = jax.sharding.NamedSharding(mesh, jax.P())
    shapes = [
        jax.ShapeDtypeStruct((1, 512, 2, width), jnp.bfloat16, sharding=whole)
        for width in (64, 128, 256)
    ]

    def loss(x):
        y = attention.attention(
            x, x, x, window=200, softcap=50.0, implementation="pallas"
        )
        return y.astype(jnp.float32).sum()

    def gradients(*arrays):
        return [jax.grad(loss)(x) for x in arrays]

    run = over_data(gradients, mesh, ("data",), jax.P(), jax.P())
    text = jax.jit(run).lower(*shapes).compile().as_text()
    assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == 9


@pytest.mark.parametrize("K", [2, 1])
def test_in_groups_each_device_has_its_rows_and_heads(K):
    """Inside a mesh that is manual over the data axis and automatic over a group's."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), 3 * (AxisType.Auto,))
    (q, k, v), segments, _ = _arrays(4, 32, 4, K, 16, documents=2)
    spec = jax.P("data")

    def run(implementation):
        def part(q, k, v, segments):
            return attention.attention(
                q, k, v, segments=segments, window=9, implementation=implementation
            )

        return jax.jit(over_data(part, mesh, ("data",), (spec,) * 4, spec))

    expected = run("xla")(q, k, v, segments).astype(jnp.float32)
    got = run("pallas").lower(q, k, v, segments).compile()
    chex.assert_trees_all_close(
        got(q, k, v, segments).astype(jnp.float32), expected, atol=2e-2
    )
    assert "all-gather" not in got.as_text(), "a kernel sees more than its own"


def test_the_platform_is_the_meshs():
    assert placement.platform() == "cpu"
    here = {"gpu:h200:1x2": "pallas", "tpu:v5e:2x2": "splash"}
    for (name, kernel), dtype in itertools.product(here.items(), ("bfloat16", "f4")):
        mesh = topologies.mesh(topologies.parse(name))
        found = []

        def part(x, found=found, dtype=dtype):
            found.append((placement.platform(), attention.default(dtype, True, 64)))
            return x

        axes = mesh.axis_names
        spec = jax.P(axes)
        shape = jax.ShapeDtypeStruct((mesh.size,), jnp.float32)
        jax.eval_shape(over_data(part, mesh, axes, spec, spec), shape)
        expected = kernel if dtype == "bfloat16" else "xla"
        assert found == [(name[:3], expected)]


def test_another_axis_keeps_scores_in_memory():
    """Whoever splits heads by a name of their own lets the compiler split attention."""
    mesh = jax.sharding.AbstractMesh(
        (2,),
        ("model",),
        abstract_device=jax.sharding.AbstractDevice("H100", None, "gpu"),
    )
    with jax.sharding.use_abstract_mesh(mesh):
        assert attention.default("bfloat16", False, 64) == "xla"


def test_names_that_are_none():
    (q, k, v), segments, _ = _arrays(1, 16, 1, 1, 16, documents=2)
    with pytest.raises(ValueError, match=r"'flash'.*xla, cudnn, pallas, splash"):
        attention.attention(q, k, v, implementation="flash")
    with pytest.raises(ValueError, match="documents"):
        attention.attention(q, k, v, segments=segments, implementation="cudnn")
    if not attention._has_cudnn():
        with pytest.raises(ValueError, match="not installed here"):
            attention.attention(q, k, v, implementation="cudnn")


def test_what_a_policy_saves():
    """Queries, keys, values, the output and a number per query; no scores."""
    (q, k, v), _, _ = _arrays(1, 128, 2, 2, 64)
    policy = jax.checkpoint_policies.save_only_these_names(flash.SAVED)

    @functools.partial(jax.checkpoint, policy=policy)
    def run(q, k, v):
        return attention.attention(q, k, v, implementation="pallas")

    _, pull = jax.vjp(run, q, k, v)
    assert sum(x.size for x in jax.tree.leaves(pull)) <= 4 * q.size + 2 * 128 + 64
