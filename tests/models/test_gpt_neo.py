"""GPT-Neo against a recorded Hugging Face model, and its own invariants."""

import dataclasses
import functools
import itertools
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from acco_jax.models import gpt_neo

REFERENCE = pathlib.Path(__file__).parents[1] / "data" / "gpt_neo_reference.npz"
CONFIG = gpt_neo.GPTNeoConfig(
    vocab_size=97,
    max_length=24,
    width=32,
    layers=4,
    heads=2,
    window=5,
    dtype=jnp.float32,
)
RNG = jax.random.key(0)
_init = jax.jit(gpt_neo.init_params, static_argnums=0)
_apply = jax.jit(gpt_neo.apply, static_argnums=0)


@pytest.fixture(scope="module")
def reference():
    with np.load(REFERENCE) as arrays:
        return dict(arrays)


def _tagged(reference, tag):
    start = len(tag) + 1
    return {k[start:]: v for k, v in reference.items() if k.startswith(f"{tag}:")}


@pytest.fixture(scope="module")
def params(reference):
    return gpt_neo.from_transformers(CONFIG, _tagged(reference, "weight"))


@pytest.fixture(scope="module")
def gradients(reference, params):
    """The loss and its gradients at the recorded weights and tokens."""
    return _value_and_grad(CONFIG, params, {"tokens": jnp.asarray(reference["tokens"])})


def _value_and_grad(config, params, batch):
    loss = gpt_neo.loss_fn(config)
    return jax.jit(jax.value_and_grad(lambda p: loss(p, batch, RNG)[0]))(params)


def test_params_have_the_structure_of_init_params(params):
    drawn = _init(CONFIG, RNG)
    chex.assert_trees_all_equal_shapes_and_dtypes(params, drawn)
    chex.assert_tree_all_finite(drawn)
    assert abs(np.std(drawn["h"]["1_local"]["mlp"]["c_fc"]["kernel"]) - 0.02) < 1e-3
    layers = drawn["h"]["0_global"]["attn"]["q_proj"]["kernel"]
    assert not np.array_equal(layers[0], layers[1])


def test_logits_match_transformers(reference, params):
    logits = _apply(CONFIG, params, reference["tokens"][:, :-1])
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, reference["logits"], rtol=1e-5, atol=1e-5)


def test_loss_and_gradients_match_transformers(reference, gradients):
    loss, gradients = gradients
    np.testing.assert_allclose(loss, reference["loss"], rtol=1e-6)

    # Conversion is linear and names every leaf: it applies to gradients as well.
    expected = _tagged(reference, "gradient")
    names = _tagged(reference, "weight")
    missing = {k: np.full_like(v, np.nan) for k, v in names.items()}
    converted = gpt_neo.from_transformers(CONFIG, {**missing, **expected})
    compared = 0
    for got, want in zip(
        jax.tree.leaves(gradients), jax.tree.leaves(converted), strict=True
    ):
        recorded = ~np.isnan(want)
        compared += recorded.sum()
        atol = 1e-5 * np.abs(want[recorded]).max(initial=0.0)
        np.testing.assert_allclose(got[recorded], want[recorded], rtol=1e-5, atol=atol)
    assert compared == sum(v.size for v in expected.values())


def test_module_equals_apply(reference):
    tokens = reference["tokens"][:, :-1]
    params = _init(CONFIG, RNG)
    module = jax.jit(lambda rng: gpt_neo.GPTNeo(CONFIG, nnx.Rngs(rng))(tokens))
    logits = _apply(CONFIG, params, tokens)
    chex.assert_trees_all_close(module(RNG), logits, rtol=1e-5, atol=1e-6)


def test_mask_selects_targets(reference, params):
    tokens = jnp.asarray(reference["tokens"])
    loss = jax.jit(gpt_neo.loss_fn(CONFIG))
    short, weight, aux = loss(params, {"tokens": tokens[:, :11]}, RNG)
    mask = jnp.broadcast_to(jnp.arange(20) < 10, (2, 20)).astype(jnp.int32)
    masked, masked_weight, _ = loss(params, {"tokens": tokens, "mask": mask}, RNG)
    np.testing.assert_allclose(masked, short, rtol=1e-6)
    assert weight == masked_weight == 20 and weight.dtype == jnp.float32 and aux == {}


def test_logits_do_not_see_the_future(reference, params):
    tokens = jnp.asarray(reference["tokens"])
    changed = tokens.at[:, 12].add(1) % CONFIG.vocab_size
    before, after = (_apply(CONFIG, params, t) for t in (tokens, changed))
    chex.assert_trees_all_equal(before[:, :12], after[:, :12])
    assert jnp.all(jnp.any(before[:, 12:] != after[:, 12:], axis=-1))


def test_local_layer_sees_a_window_that_includes_itself(reference):
    config = dataclasses.replace(CONFIG, layers=1, pattern=("local",))
    params = _init(config, RNG)
    tokens = jnp.asarray(reference["tokens"])
    changed = tokens.at[:, 8].add(1) % config.vocab_size
    before, after = (_apply(config, params, t) for t in (tokens, changed))
    differs = np.any(before != after, axis=(0, 2))
    np.testing.assert_array_equal(np.flatnonzero(differs), range(8, 8 + config.window))


@pytest.mark.parametrize("remat", [True, "dots_saveable"])
def test_remat_changes_nothing(reference, params, gradients, remat):
    batch = {"tokens": jnp.asarray(reference["tokens"])}
    config = dataclasses.replace(CONFIG, remat=remat)
    chex.assert_trees_all_close(
        _value_and_grad(config, params, batch), gradients, rtol=1e-5, atol=1e-5
    )
    loss = gpt_neo.loss_fn(config)
    jaxpr = jax.make_jaxpr(jax.grad(lambda p: loss(p, batch, RNG)[0]))(params)
    assert "checkpoint" in str(jaxpr) or "remat" in str(jaxpr)


def test_scan_equals_an_unrolled_loop(reference, params):
    tokens = jnp.asarray(reference["tokens"])[:, :-1]
    wte, wpe = params["wte"]["embedding"], params["wpe"]["embedding"]
    x = wte[tokens] + wpe[: tokens.shape[1]]
    for layer in range(CONFIG.layers):
        name = CONFIG.positions[layer % 2]
        block = gpt_neo.Block(CONFIG, CONFIG.pattern[layer % 2], nnx.Rngs(0))
        weights = jax.tree.map(lambda leaf, i=layer // 2: leaf[i], params["h"][name])
        x = nnx.merge(nnx.graphdef(block), weights)(x)
    norm = nnx.LayerNorm(CONFIG.width, epsilon=1e-5, rngs=nnx.Rngs(0))
    logits = nnx.merge(nnx.graphdef(norm), params["ln_f"])(x) @ wte.T
    chex.assert_trees_all_close(
        _apply(CONFIG, params, tokens), logits, rtol=1e-5, atol=1e-5
    )


def test_bfloat16_is_finite_and_near_float32(reference, params):
    config = dataclasses.replace(CONFIG, dtype=jnp.bfloat16)
    batch = {"tokens": jnp.asarray(reference["tokens"])}
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    loss, gradients = _value_and_grad(config, low, batch)
    chex.assert_tree_all_finite((loss, gradients))
    chex.assert_trees_all_equal_shapes_and_dtypes(gradients, low)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, reference["loss"], rtol=1e-2)


def test_gradients_in_a_loop_inside_shard_map(reference, params, gradients):

    def loss(p, tokens):
        return gpt_neo.loss_fn(CONFIG)(p, {"tokens": tokens}, RNG)[0]

    gradient = jax.value_and_grad(loss)

    def local(params, tokens_MxBxT):
        def add(i, total):
            return jax.tree.map(jnp.add, total, gradient(params, tokens_MxBxT[i])[1])

        zeros = jax.tree.map(jnp.zeros_like, params)
        return jax.lax.fori_loop(0, tokens_MxBxT.shape[0], add, zeros)

    replicated = PartitionSpec()
    sharded = jax.shard_map(
        local,
        mesh=Mesh(np.array(jax.devices()[:1]), ("data",)),
        in_specs=(replicated, PartitionSpec(None, "data")),
        out_specs=replicated,
        axis_names={"data"},
        check_vma=False,
    )
    tokens_MxBxT = reference["tokens"][:, None]  # two microbatches of one sequence
    chex.assert_trees_all_close(
        jax.jit(sharded)(params, tokens_MxBxT), gradients[1], rtol=1e-4, atol=1e-5
    )


def test_sizes_and_counts():
    drawn = _init(CONFIG, RNG)
    count = sum(leaf.size for leaf in jax.tree.leaves(drawn))
    assert gpt_neo.count_params(CONFIG) == count
    # The number of parameters of EleutherAI/gpt-neo-125m.
    assert gpt_neo.count_params(gpt_neo.size("gpt-neo-125m")) == 125_198_592
    assert 2.6e9 < gpt_neo.count_params(gpt_neo.size("gpt-neo-2.7b")) < 2.7e9
    assert gpt_neo.size("gpt-neo-125m", max_length=1024).max_length == 1024


def test_flops_per_token():
    # 4 layers of 12 D^2 weights and the output; keys: 20 twice, then the window twice.
    weights = 4 * 12 * 32**2 + 97 * 32
    expected = 6 * weights + 12 * 32 * (2 * 20 + 2 * 5)
    assert gpt_neo.flops_per_token(CONFIG, 20) == expected


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"heads": 3}, "heads=3"),
        ({"layers": 3}, "layers=3"),
        ({"window": 0}, "window=0"),
        ({"mlp_width": 0}, "mlp_width=0"),
        ({"pattern": ("global", "sliding")}, "sliding"),
        ({"pattern": ["local"]}, "must be a tuple"),
        ({"pattern": ()}, "must be a tuple"),
        ({"remat": "everything"}, "'everything'"),
    ],
)
def test_config_errors_are_one_line(change, named):
    with pytest.raises(ValueError, match=named) as error:
        dataclasses.replace(CONFIG, **change)
    assert "\n" not in str(error.value)


def test_other_errors_are_one_line(reference):
    weights = _tagged(reference, "weight")
    wide = dataclasses.replace(CONFIG, vocab_size=128)
    deep = dataclasses.replace(CONFIG, layers=6)
    shapes = jax.eval_shape(functools.partial(gpt_neo.init_params, CONFIG), RNG)
    for match, call in {
        "gpt-neo-3b": lambda: gpt_neo.size("gpt-neo-3b"),
        r"wte.embedding has shape \(97, 32\)": lambda: gpt_neo.from_transformers(
            wide, weights
        ),
        r"transformer\.h\.4": lambda: gpt_neo.from_transformers(deep, weights),
        "25 tokens exceed max_length=24": lambda: jax.eval_shape(
            functools.partial(gpt_neo.apply, CONFIG),
            shapes,
            jax.ShapeDtypeStruct((1, 25), jnp.int32),
        ),
    }.items():
        with pytest.raises(ValueError, match=match) as error:
            call()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("remat", [False, True])
def test_segments_are_documents_computed_alone(remat):
    """The loss and the gradients of a packed row are the sums over its documents."""
    config = dataclasses.replace(CONFIG, layers=2, remat=remat)
    params, draw = _init(config, RNG), np.random.default_rng(0)
    sizes = [[5, 1, 14], [20], [12, 8]]
    tokens = draw.integers(1, config.vocab_size, (3, 21))
    segments = np.stack([np.repeat(np.arange(len(s)), s) for s in sizes]) + 7
    loss = gpt_neo.loss_fn(config)
    batch = {"tokens": jnp.asarray(tokens), "segments": jnp.asarray(segments)}
    ends = [np.cumsum([0, *s]) for s in sizes]
    spans = [(i, *span) for i, e in enumerate(ends) for span in itertools.pairwise(e)]
    rows, mask = np.zeros((len(spans), 21), int), np.zeros((len(spans), 20))
    for row, kept, (i, a, b) in zip(rows, mask, spans, strict=True):
        row[: b - a + 1], kept[: b - a] = tokens[i, a : b + 1], 1
    alone = {"tokens": jnp.asarray(rows), "mask": jnp.asarray(mask)}

    packed = _value_and_grad(config, params, batch)
    chex.assert_trees_all_close(
        packed, _value_and_grad(config, params, alone), rtol=1e-4, atol=1e-4
    )
    whole = loss(params, {"tokens": batch["tokens"]}, RNG)[0]
    assert abs(packed[0] - whole) > 1e-3
