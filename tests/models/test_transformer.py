"""Families against recorded Hugging Face models, and the transformer's invariants.

Where nothing else is said, the model is a GPT-Neo.
"""

import dataclasses
import functools
import itertools
import json
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from acco_jax.models import huggingface, transformer

DATA = pathlib.Path(__file__).parents[1] / "recorded"
FAMILIES = (
    "gpt2", "llama", "llama_tied", "mistral", "qwen2", "qwen3", "qwen3_tied", "olmo2",
    "gemma2", "gemma3", "qwen3_moe",
)  # fmt: skip
CONFIG = transformer.Config(
    vocab_size=97,
    max_length=24,
    width=32,
    layers=4,
    heads=2,
    window=5,
    dtype=jnp.float32,
)
RNG = jax.random.key(0)
_init = jax.jit(transformer.init_params, static_argnums=0)
_apply = jax.jit(transformer.apply, static_argnums=0)


def _reference(name):
    with np.load(DATA / f"{name}_reference.npz") as arrays:
        return dict(arrays)


def _family(name, **changes):
    """A recorded model: the reference, its configuration and parameters."""
    reference = _reference(name)
    fields = json.loads(str(reference["config"]))
    config = huggingface.config_of(fields, **{"dtype": jnp.float32, **changes})
    state = _tagged(reference, "weight")
    return reference, config, huggingface.from_state(config, state.__getitem__)


@pytest.fixture(scope="module")
def reference():
    return _reference("gpt_neo")


def _tagged(reference, tag):
    start = len(tag) + 1
    return {k[start:]: v for k, v in reference.items() if k.startswith(f"{tag}:")}


@pytest.fixture(scope="module")
def params(reference):
    state = _tagged(reference, "weight")
    return huggingface.from_state(CONFIG, state.__getitem__)


@pytest.fixture(scope="module")
def gradients(reference, params):
    """The loss and its gradients at the recorded weights and tokens."""
    return _value_and_grad(CONFIG, params, {"tokens": jnp.asarray(reference["tokens"])})


def _value_and_grad(config, params, batch):
    loss = transformer.loss_fn(config)
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
    _check_gradients(CONFIG, reference, *gradients, 1e-5)


def _check_gradients(config, reference, loss, gradients, tolerance):
    """Compare with what is recorded, through the conversion of weights.

    That is linear and names every leaf: it applies to gradients as well.
    """
    np.testing.assert_allclose(loss, reference["loss"], rtol=1e-6)
    expected = _tagged(reference, "gradient")
    names = _tagged(reference, "weight")
    missing = {k: np.full_like(v, np.nan) for k, v in names.items()}
    state = {**missing, **expected}
    converted = huggingface.from_state(config, state.__getitem__)
    compared = 0
    for got, want in zip(
        jax.tree.leaves(gradients), jax.tree.leaves(converted), strict=True
    ):
        recorded = ~np.isnan(want)
        compared += recorded.sum()
        # 1e-7: a bias of keys changes nothing, and has rounding errors for a gradient
        atol = tolerance * np.abs(want[recorded]).max(initial=0.0) + 1e-7
        np.testing.assert_allclose(
            got[recorded], want[recorded], rtol=tolerance, atol=atol
        )
    assert compared == sum(v.size for v in expected.values())


@pytest.mark.fast("gemma3", "qwen3_moe")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_that_of_transformers(name):
    reference, config, params = _family(name)
    logits = _apply(config, params, reference["tokens"][:, :-1])
    np.testing.assert_allclose(logits, reference["logits"], rtol=1e-5, atol=1e-5)
    config = dataclasses.replace(config, remat="elementwise")
    batch = {"tokens": jnp.asarray(reference["tokens"])}
    result = _value_and_grad(config, params, batch)
    _check_gradients(config, reference, *result, 1e-5)


def test_the_router_loss_is_that_of_transformers():
    reference, config, params = _family("qwen3_moe", router_loss=0.3)
    tokens = jnp.asarray(reference["tokens"])
    loss = jax.jit(transformer.loss_fn(config))(params, {"tokens": tokens}, RNG)[0]
    expected = reference["loss"] + 0.3 * 40 * reference["router"]
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


@pytest.mark.slow
def test_experts_split_over_a_group():
    """Rows and hidden units of experts are split; loss and gradients are the same."""
    reference, config, params = _family("qwen3_moe", router_loss=0.3)
    batch = {"tokens": jnp.asarray(reference["tokens"])}
    expected = _value_and_grad(config, params, batch)
    kinds = 2 * (jax.sharding.AxisType.Auto,)
    with jax.set_mesh(jax.make_mesh((2, 2), ("fsdp", "tensor"), kinds)):
        got = _value_and_grad(config, params, batch)
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-4)


def test_module_equals_apply(reference):
    tokens = reference["tokens"][:, :-1]
    params = _init(CONFIG, RNG)

    @jax.jit
    def module(rng):
        x, w = transformer.Transformer(CONFIG, nnx.Rngs(rng))(tokens)
        return x @ w.T

    logits = _apply(CONFIG, params, tokens)
    chex.assert_trees_all_close(module(RNG), logits, rtol=1e-5, atol=1e-6)


def test_mask_selects_targets(reference, params):
    tokens = jnp.asarray(reference["tokens"])
    loss = jax.jit(transformer.loss_fn(CONFIG))
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


@pytest.mark.fast("block")
@pytest.mark.parametrize("remat", ["none", "elementwise", "block"])
@pytest.mark.parametrize("scan", [True, False])
def test_neither_remat_nor_the_loop_changes_gradients(
    reference, params, gradients, remat, scan
):
    batch = {"tokens": jnp.asarray(reference["tokens"])}
    config = dataclasses.replace(CONFIG, remat=remat, scan_layers=scan)
    chex.assert_trees_all_close(
        _value_and_grad(config, params, batch), gradients, rtol=1e-5, atol=1e-5
    )


def test_scan_equals_an_unrolled_loop(reference, params):
    tokens = jnp.asarray(reference["tokens"])[:, :-1]
    wte, wpe = params["wte"]["embedding"], params["wpe"]["embedding"]
    x = wte[tokens] + wpe[: tokens.shape[1]]
    for layer in range(CONFIG.layers):
        name = CONFIG.blocks[layer % 2]
        block = transformer.Block(CONFIG, CONFIG.pattern[layer % 2], nnx.Rngs(0))
        weights = jax.tree.map(lambda leaf, i=layer // 2: leaf[i], params["h"][name])
        x, _ = nnx.merge(nnx.graphdef(block), weights)(x)
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
        return transformer.loss_fn(CONFIG)(p, {"tokens": tokens}, RNG)[0]

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
    assert transformer.count_params(CONFIG) == count
    sizes = {name: transformer.size(name) for name in transformer.SIZES}
    # as the weights of these models on the Hugging Face Hub have them
    assert {k: transformer.count_params(c) for k, c in sizes.items()} == {
        "gpt-neo-125m": 125_198_592,
        "gpt-neo-2.7b": 2_651_307_520,
        "gpt2": 124_439_808,
        "llama-3-8b": 8_030_261_248,
        "llama-3.2-1b": 1_235_814_400,
        "mistral-7b": 7_241_732_096,
        "qwen2.5-0.5b": 494_032_768,
        "qwen3-0.6b": 596_049_920,
        "qwen3-8b": 8_190_735_360,
        "qwen3-30b-a3b": 30_532_122_624,
        "olmo-2-1b": 1_484_916_736,
        "gemma-2-2b": 2_614_341_888,
        "gemma-3-270m": 268_098_176,
    }
    assert transformer.size("gpt-neo-125m", max_length=1024).max_length == 1024


def test_flops_per_token():
    # 4 layers of 12 D^2 weights and the output; keys: 20 twice, then the window twice.
    weights = 4 * 12 * 32**2 + 97 * 32
    expected = 6 * weights + 12 * 32 * (2 * 20 + 2 * 5)
    assert transformer.flops_per_token(CONFIG, 20) == expected


@pytest.mark.parametrize("tied", [True, False])
def test_flops_per_token_of_shared_keys_and_swiglu(tied):
    sizes = {"heads": 6, "kv_heads": 2, "head_width": 10, "mlp_width": 40}
    config = transformer.Config(
        97, 64, 24, 3, **transformer.FAMILIES["qwen3"], **sizes, tied=tied
    )
    queries, keys, mlp = 24 * 60, 24 * 20, 24 * 40
    weights = 3 * (queries + 2 * keys + queries + 3 * mlp) + 97 * 24
    scores = 3 * 6 * 10 * 20  # of one product of scores or mixtures, per token
    assert transformer.flops_per_token(config, 20) == 6 * weights + 12 * scores


def test_flops_per_token_of_experts():
    sizes = {"heads": 2, "head_width": 10, "mlp_width": 40}
    parts = transformer.FAMILIES["qwen3-moe"] | {"experts": 6, "experts_per_token": 2}
    config = transformer.Config(97, 64, 24, 3, **parts, **sizes)
    weights = 3 * (4 * 24 * 20 + 2 * 3 * 24 * 40 + 24 * 6) + 97 * 24
    scores = 3 * 2 * 10 * 20
    assert transformer.flops_per_token(config, 20) == 6 * weights + 12 * scores


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
        ({"attention": "flash"}, "attention='flash'"),
        ({"norm": "batch"}, "norm='batch' must be one of layer, rms"),
        ({"experts": 4}, "experts=4, .* need mlp='moe', not 'gelu'"),
        ({"mlp": "moe", "experts": 4, "biases": ()}, "give both, at most"),
        ({"router_loss": 0.1}, "router_loss=0.1 need mlp='moe'"),
        ({"norm_placement": "after"}, "'after' must be one of pre, post, both"),
        ({"qk_norm": True}, "qk_norm=True must be one of None, head, projection"),
        ({"logit_softcap": 0}, "logit_softcap=0 must be more than 0"),
        ({"score_softcap": 5.0, "attention": "cudnn"}, "softcap=5.0 is not in atten"),
        ({"local_rope_theta": 5.0}, "local_rope_theta=5.0 needs positions='rope'"),
        ({"positions": "alibi"}, "'alibi'"),
        ({"mlp": "relu"}, "'relu'"),
        ({"biases": ("up_proj",)}, "'up_proj'"),
        ({"kv_heads": 3}, "kv_heads=3"),
        ({"positions": "rope", "head_width": 5}, "heads of 5, which is odd"),
        ({"rope_scaling": transformer.Llama3Scaling(8.0)}, "needs positions='rope'"),
        ({"eps": 0.0}, "eps=0.0"),
    ],
)
def test_config_errors_are_one_line(change, named):
    with pytest.raises(ValueError, match=named) as error:
        dataclasses.replace(CONFIG, **change)
    assert "\n" not in str(error.value)


def test_other_errors_are_one_line():
    shapes = jax.eval_shape(functools.partial(transformer.init_params, CONFIG), RNG)
    for match, call in {
        "gpt-neo-3b": lambda: transformer.size("gpt-neo-3b"),
        "low < high": lambda: transformer.Llama3Scaling(8.0, 4.0, 1.0),
        "factor=0.5": lambda: transformer.Llama3Scaling(0.5),
        "factor=0.25": lambda: transformer.LinearScaling(0.25),
        "slow < fast": lambda: transformer.YarnScaling(4.0, 16, beta_slow=32.0),
        "25 tokens exceed max_length=24": lambda: jax.eval_shape(
            functools.partial(transformer.apply, CONFIG),
            shapes,
            jax.ShapeDtypeStruct((1, 25), jnp.int32),
        ),
    }.items():
        with pytest.raises(ValueError, match=match) as error:
            call()
        assert "\n" not in str(error.value)


def _saved(platform, config=CONFIG, **changes):
    """Values per token that the backward pass of a block finds, but its parameters."""
    changes |= {"vocab_size": 8, "dtype": jnp.bfloat16, "scan_layers": True}
    config = dataclasses.replace(config, **changes)
    loss, kind = (
        transformer.loss_fn(config),
        jax.sharding.AbstractDevice("x", None, platform),
    )
    mesh = jax.sharding.AbstractMesh((1,), ("data",), abstract_device=kind)
    params = jax.eval_shape(lambda: transformer.init_params(config, jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((2, 17), jnp.int32)

    def pullback(params, tokens):
        return jax.vjp(lambda p: loss(p, {"tokens": tokens}, None)[0], params)[1]

    with jax.sharding.use_abstract_mesh(mesh):
        saved = jax.tree.leaves(jax.eval_shape(pullback, params, tokens))
    kinds = (2, 16), (2, config.heads)
    rows = [x for x in saved if x.shape[:1] == (2,) and x.shape[1:3] in kinds]
    return sum(x.size for x in rows) / (2 * 16 * config.layers)


def test_what_is_saved_for_the_backward_pass():
    D, H = CONFIG.width, CONFIG.heads
    attention = 4 * D + H  # queries, keys, values, output, and a number for each query
    block = _saved("gpu", remat="block")
    elementwise = _saved("gpu")
    none = _saved("gpu", remat="none")
    assert block == D, "the block's input"
    # and the sum of both after attention, and what the GELU is of
    assert elementwise == 2 * D + attention + 4 * D
    # and the outputs of norms and GELU
    assert none == elementwise + 2 * D + 4 * D


@pytest.mark.parametrize(
    ("scan", "platform", "layers", "groups", "expected"),
    [
        (True, "gpu", 2, 1, True),
        (False, "cpu", 2, 1, False),
        (None, "cpu", 2, 1, True),
        (None, "tpu", 2, 1, True),
        (None, "gpu", 24, 1, False),
        (None, "gpu", 26, 1, True),
        (None, "gpu", 2, 2, True),
    ],
)
def test_layers_are_a_loop_or_have_code_of_their_own(
    scan, platform, layers, groups, expected
):
    config = dataclasses.replace(CONFIG, scan_layers=scan, layers=layers)
    kind = jax.sharding.AbstractDevice("x", None, platform)
    mesh = jax.sharding.AbstractMesh((groups,), ("fsdp",), abstract_device=kind)
    params = transformer.shapes_of(config)
    tokens = jax.ShapeDtypeStruct((2, 17), jnp.int32)
    loss = transformer.loss_fn(config)

    def gradient(params, tokens):
        return jax.grad(lambda p: loss(p, {"tokens": tokens}, None)[0])(params)

    with jax.sharding.use_abstract_mesh(mesh):
        text = str(jax.make_jaxpr(gradient)(params, tokens))
    assert (f"length={layers // 2}\n" in text) == expected


def test_what_is_saved_of_shared_keys_rotations_and_swiglu():
    sizes = {"heads": 6, "kv_heads": 2, "head_width": 16, "mlp_width": 40}
    parts = transformer.FAMILIES["qwen3"] | {"pattern": ("global", "global")}
    config = transformer.Config(97, 24, 24, 4, **parts, **sizes)
    D, queries, keys, mlp = 24, 96, 32, 40
    assert _saved("gpu", config, remat="block") == D
    # products before they are normalized and turned, the output, a number per query
    attention = queries + 2 * keys + queries + 6
    assert _saved("gpu", config) == 2 * D + attention + 2 * mlp


@pytest.mark.fast("qwen3-*")
@pytest.mark.parametrize(
    ("family", "remat"), [("gpt_neo", "none"), ("gpt_neo", "block"), ("qwen3", None)]
)
def test_segments_are_documents_computed_alone(family, remat):
    """The loss and the gradients of a packed row are the sums over its documents."""
    config = dataclasses.replace(CONFIG, layers=2, remat=remat)
    if family == "gpt_neo":
        params = _init(config, RNG)
    else:
        _, config, params = _family(family)
    draw = np.random.default_rng(0)
    sizes = [[5, 1, 14], [20], [12, 8]]
    tokens = draw.integers(1, config.vocab_size, (3, 21))
    segments = np.stack([np.repeat(np.arange(len(s)), s) for s in sizes]) + 7
    loss = transformer.loss_fn(config)
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
    whole = jax.jit(loss)(params, {"tokens": batch["tokens"]}, RNG)[0]
    assert abs(packed[0] - whole) > 1e-3


def test_shapes_are_traced_once_and_may_be_changed():
    made = transformer.model(CONFIG)
    draws = []
    counted = dataclasses.replace(
        made, init=lambda key: draws.append(key) or made.init(key)
    )
    shapes = counted.shapes()
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes, transformer.shapes_of(CONFIG))
    shapes.clear()
    assert counted.shapes() == transformer.shapes_of(CONFIG) != {}
    assert counted.parameters() == transformer.count_params(CONFIG)
    assert len(draws) == 1
    transformer.shapes_of(CONFIG).clear()
    assert transformer.shapes_of(CONFIG) == counted.shapes()
