"""Adapters alone are trained, whatever the method; the model they change is frozen."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import acco_jax
from acco_jax.methods import METHODS
from acco_jax.models import lora, transformer
from tests.reference import AUTO, EXPLICIT, Unsharded, make_mesh

pytestmark = pytest.mark.usefixtures("x64")
SCALE, RANK = 0.7, 2
SHAPES = {"first": {"w": (5, 6), "b": (6,)}, "second": {"w": (3, 6, 6)}}


def base():
    rng = np.random.default_rng(0)
    is_shape = lambda s: isinstance(s, tuple)  # noqa: E731
    return jax.tree.map(lambda s: rng.normal(size=s), SHAPES, is_leaf=is_shape)


def adapters(seed=1):
    """With a b that is not zero, so that everything has a gradient."""
    rng = np.random.default_rng(seed)
    start = lora.init(base(), jax.random.key(0), RANK, "w$")
    return jax.tree.map(lambda x: rng.normal(size=x.shape), start)


def loss_fn(params, batch, rng):
    x, y = batch
    x = jnp.tanh(x @ params["first"]["w"] + params["first"]["b"])
    for w in params["second"]["w"]:
        x = jnp.tanh(x @ w)
    error = (x - y) ** 2
    return error.sum(), float(y.size), {"rows": len(x)}


def batch_of(rows, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, 5)), rng.normal(size=(rows, 6))


def numpy_forward(w, a, x, s=SCALE):
    """The adapter beside its kernel, as it is drawn in the paper."""

    def layer(x, w, ab):
        return np.tanh(x @ w + s * (x @ ab[0]) @ ab[1])

    first, second = a["first/w"], a["second/w"]
    x = np.tanh(
        x @ w["first"]["w"] + s * (x @ first["a"]) @ first["b"] + w["first"]["b"]
    )
    for i in range(3):
        x = layer(x, w["second"]["w"][i], (second["a"][i], second["b"][i]))
    return x


def test_only_what_matches_gets_adapters_in_its_own_shape():
    made = lora.init(base(), jax.random.key(0), RANK, "w$")
    shapes = jax.tree.map(jnp.shape, made)
    assert shapes == {
        "first/w": {"a": (5, 2), "b": (2, 6)},
        "second/w": {"a": (3, 6, 2), "b": (3, 2, 6)},
    }
    assert not made["first/w"]["b"].any() and made["first/w"]["a"].all()
    # every one is drawn for itself
    assert not np.isclose(made["second/w"]["a"][0], made["second/w"]["a"][1]).any()


def test_ranks_by_pattern_the_first_that_matches():
    made = lora.init(base(), jax.random.key(0), {"^first/w": 3, "w$": 1})
    assert made["first/w"]["a"].shape == (5, 3)
    assert made["second/w"]["a"].shape == (3, 6, 1)


def test_at_the_start_the_merged_model_is_the_base_bit_for_bit():
    merged = lora.merge(base(), lora.init(base(), jax.random.key(0), 3, "w$"), SCALE)
    jax.tree.map(np.testing.assert_array_equal, merged, base())


def test_the_merged_model_computes_what_the_adapters_beside_it_do():
    x, y = batch_of(4)
    out = numpy_forward(base(), adapters(), x)
    merged = lora.merge(base(), adapters(), SCALE)
    for got in (
        loss_fn(merged, (x, y), None)[0],
        lora.loss_fn(loss_fn, base(), SCALE)(adapters(), (x, y), None)[0],
    ):
        np.testing.assert_allclose(got, ((out - y) ** 2).sum(), rtol=1e-12)


def gradients_by_hand(at, batch):
    """dL/da = s dL/dW' b^T and dL/db = s a^T dL/dW', in NumPy, of the merged model."""
    merged = jax.tree.map(np.asarray, lora.merge(base(), at, SCALE))
    dense = jax.grad(lambda p: loss_fn(p, batch, None)[0])(merged)
    out = {}
    for name, ab in at.items():
        g = np.asarray(dense[name.split("/")[0]]["w"])
        out[name] = {
            "a": SCALE * g @ np.swapaxes(ab["b"], -1, -2),
            "b": SCALE * np.swapaxes(ab["a"], -1, -2) @ g,
        }
    return out


@pytest.mark.parametrize("types", [AUTO, EXPLICIT])
@pytest.mark.parametrize("N", [1, 2])
def test_gradients_are_the_merged_models_by_the_chain_rule(N, types):
    mesh = make_mesh(2, types=types)
    run = acco_jax.local_gradients(
        lora.loss_fn(loss_fn, base(), SCALE), mesh=mesh, microbatches=N
    )
    batch = batch_of(2 * N * 3)
    grads, weight, _ = run(adapters(), batch)
    for worker in range(2):
        own = tuple(x[worker * 3 * N : (worker + 1) * 3 * N] for x in batch)
        expected = gradients_by_hand(adapters(), own)
        jax.tree.map(
            lambda g, e, i=worker: np.testing.assert_allclose(
                np.asarray(g)[i], e, 1e-10
            ),
            grads,
            expected,
        )
    np.testing.assert_array_equal(weight, [N * 3 * 6] * 2)


def step_of(method, N, form="fused", types=AUTO, model=None):
    mesh = make_mesh(2, types=types)
    tx = METHODS[method](optax.adamw(1e-2), mesh=mesh)
    loss = lora.loss_fn(loss_fn, model or base(), SCALE)
    step = acco_jax.make_train_step(loss, tx, microbatches=N, form=form)
    return tx, step


@pytest.mark.fast("acco-2-*", "zero1-*")
@pytest.mark.parametrize(
    ("method", "N", "form", "types"),
    [
        ("acco", 2, "fused", AUTO),
        ("acco", 1, "fused", EXPLICIT),
        ("acco", 1, "split", AUTO),
        ("zero1", 2, "split", AUTO),
        ("fused_zero1", 2, "fused", AUTO),
    ],
)
def test_every_method_follows_the_recurrence_on_the_adapters(method, N, form, types):
    tx, step = step_of(method, N, form, types)
    params = jax.tree.map(jnp.asarray, adapters())
    state = tx.init(params)
    points, rows = [], []
    for h in range(5):
        batch = batch_of(2 * N * 3, seed=h)
        at = jax.tree.map(np.asarray, params)
        halves = [tuple(np.split(x, 2)[i] for x in batch) for i in range(2)]
        both = [gradients_by_hand(at, half) for half in halves]
        rows.append(jax.tree.map(lambda *g: np.stack(g), *both))
        params, state, _ = step(params, state, batch)
        points.append(jax.tree.map(np.asarray, params))
    weights = [[N * 3 * 6] * 2] * 5
    reference = Unsharded(optax.adamw(1e-2))
    follow = reference.acco if method == "acco" else reference.zero1
    expected = follow(adapters(), rows, weights)
    for got, (point, _) in zip(points, expected, strict=True):
        jax.tree.map(
            lambda g, e: np.testing.assert_allclose(g, e, rtol=1e-8), got, point
        )
    assert np.any(points[-1]["first/w"]["a"] != adapters()["first/w"]["a"])


def test_the_state_is_of_the_adapters_alone():
    tx, _ = step_of("acco", 2)
    size = sum(x.size for x in jax.tree.leaves(adapters()))
    state = tx.init(adapters())
    assert sum(x.size for x in jax.tree.leaves(state.inner)) < 4 * size + 4096
    assert jax.tree.structure(acco_jax.committed_params(state, adapters())) == (
        jax.tree.structure(adapters())
    )


@pytest.mark.parametrize("form", ["fused", "split"])
@pytest.mark.parametrize("N", [1, 2])
def test_the_base_is_an_argument_and_no_constant(N, form):
    """A base of 8 MB is not in the text, nor carried from forward to backward."""
    rng = np.random.default_rng(0)
    model = {
        "first": {"w": rng.normal(size=(5, 1000)), "b": np.zeros(1000)},
        "second": {"w": rng.normal(size=(1000, 1000))},
    }

    def loss(params, x, rng):
        x = jnp.tanh(x @ params["first"]["w"] + params["first"]["b"])
        return jnp.mean((x @ params["second"]["w"]) ** 2)

    mesh = make_mesh(2)
    tx = acco_jax.acco(optax.sgd(1e-2), mesh=mesh)
    step = acco_jax.make_train_step(
        lora.loss_fn(loss, model, SCALE), tx, microbatches=N, form=form
    )
    small = lora.init(model, jax.random.key(0), 2, "first/w")
    state = tx.init(small)
    programs = step.lowered(small, state, np.zeros((2 * N, 5)))
    for program in programs:
        text = program.as_text()
        assert len(text) < 400_000
        assert "tensor<2x1000x1000" not in text  # a row per worker of the kernel
    (arguments,) = re.findall(r"func public @main\((.*?)\) ->", programs[0].as_text())
    assert arguments.count("tensor<1000x1000xf64>") == 1


@pytest.mark.parametrize(
    ("rank", "pattern", "message"),
    [
        (2, "conv", "matches no parameter: they have names such as second/w"),
        (2, "(", "is not a regular expression"),
        (2, "first", r"matches first/b of shape \(6,\)"),
        (0, "w$", "is 0: it must lie between 1 and 5"),
        (6, "w$", "is 6: it must lie between 1 and 5"),
        (2, None, "give one of them"),
        ({"w$": 2}, "w$", "give one of them"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(rank, pattern, message):
    shapes = jax.eval_shape(base)
    with pytest.raises(ValueError, match=message) as error:
        lora.init(shapes, jax.random.key(0), rank, pattern)
    assert "\n" not in str(error.value)


def test_adapters_of_another_model_are_not_merged():
    with pytest.raises(ValueError, match="adapters for second/w"):
        lora.merge({"first": base()["first"]}, adapters(), SCALE)


@functools.cache
def small_gpt():
    config = transformer.Config(
        vocab_size=31, max_length=8, width=16, layers=4, heads=2, window=4,
        dtype="float32",
    )  # fmt: skip
    return config, transformer.init_params(config, jax.random.key(0))


def test_gpt_neos_stacked_kernels_get_an_adapter_for_each_layer():
    config, params = small_gpt()
    made = lora.init(params, jax.random.key(1), 3, "attn/(q|v)_proj/kernel")
    assert sorted(made) == sorted(
        f"h/{block}/attn/{name}_proj/kernel" for block in config.blocks for name in "qv"
    )
    assert {ab["a"].shape for ab in made.values()} == {(2, 16, 3)}
    rng = np.random.default_rng(0)
    made = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), made)
    tokens = np.arange(18).reshape(2, 9) % 31
    merged = lora.merge(params, made, 0.1)
    apply = jax.jit(transformer.apply, static_argnums=0)
    logits = apply(config, merged, tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    loss = jax.jit(lora.loss_fn(transformer.loss_fn(config), params, 0.1))
    got = loss(made, {"tokens": tokens}, None)[0]
    np.testing.assert_allclose(got, losses.sum(), rtol=1e-6)
    plain = apply(config, params, tokens[:, :-1])
    assert not np.allclose(plain, logits, atol=1e-3)
    by_hand = np.asarray(params["h"]["1_local"]["attn"]["q_proj"]["kernel"], np.float64)
    ab = made["h/1_local/attn/q_proj/kernel"]
    for i in range(2):
        expected = by_hand[i] + 0.1 * ab["a"][i].astype(float) @ ab["b"][i].astype(
            float
        )
        found = merged["h"]["1_local"]["attn"]["q_proj"]["kernel"][i]
        np.testing.assert_allclose(found, expected, atol=1e-5)
