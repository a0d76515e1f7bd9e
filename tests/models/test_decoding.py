"""What the transformer writes, with a cache, is what the transformer computes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from acco_jax.models import decoding, sampling, scoring, transformer
from acco_jax.models.sampling import Sampling

END = 60
SIZES = {"vocab_size": 61, "max_length": 23, "layers": 2, "dtype": jnp.float32}
ROTARY = {"width": 20, "heads": 6, "kv_heads": 2, "head_width": 6, "mlp_width": 28}
CONFIGS = {
    "gpt-neo": {"width": 21, "heads": 3, "layers": 4, "window": 5},
    "gpt2": {"width": 21, "heads": 3},
    "llama": ROTARY
    | {"rope_scaling": transformer.Llama3Scaling(4.0, original_length=8)},
    "mistral": ROTARY | {"window": 5, "rope_scaling": transformer.YarnScaling(4.0, 8)},
    "qwen2": ROTARY | {"rope_scaling": transformer.LinearScaling(4.0)},
    "qwen3": ROTARY | {"tied": False},
    "qwen3-moe": ROTARY | {"experts": 5, "experts_per_token": 2},
    "olmo2": ROTARY,
    "gemma2": ROTARY | {"window": 5, "score_softcap": 0.7, "logit_softcap": 2.0},
    "gemma3": ROTARY | {"window": 5, "pattern": ("local", "global")},
}


def _model(family):
    config = transformer.Config(
        **{**transformer.FAMILIES[family], **SIZES, **CONFIGS[family]}
    )
    draw = np.random.default_rng(0).normal
    # far from the initialization: every term must matter
    return config, jax.tree.map(
        lambda x: np.float32(draw(x.ndim < 2, 0.3, x.shape)),
        transformer.shapes_of(config),
    )


@pytest.fixture(scope="module")
def neo():
    return _model("gpt-neo")


@pytest.mark.fast("gpt-neo", "qwen3")
@pytest.mark.parametrize("family", CONFIGS)
def test_cached_logits_are_those_of_the_transformer(family):
    """Rows of different lengths, padded at the end, then a token of each at a time."""
    config, params = _model(family)
    rows, size = 3, 23
    tokens = np.random.default_rng(1).integers(0, 61, (rows, size)).astype(np.int32)
    logits = jax.jit(functools.partial(transformer.apply, config))(params, tokens)
    given = np.array([1, 7, 11])
    step = jax.jit(functools.partial(decoding.step, config))
    prompts = np.where(np.arange(11) < given[:, None], tokens[:, :11], 60)
    prefill = jax.jit(decoding.prefill, static_argnums=(0, 3))
    cache = prefill(config, params, prompts, size)
    assert cache[config.blocks[0]][0].shape[1:3] == (rows, size)
    for i in range(size - 11):
        places = given + i
        last = tokens[np.arange(rows), places]
        found, cache = step(params, last, places, cache)
        assert found.dtype == jnp.float32
        expected = np.asarray(logits)[np.arange(rows), places]
        assert np.ptp(expected, axis=-1).min() > 1
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_prompt_may_come_token_by_token(neo):
    config, params = neo
    tokens = np.random.default_rng(1).integers(0, 61, (2, 23)).astype(np.int32)
    logits = jax.jit(functools.partial(transformer.apply, config))(params, tokens)
    step = jax.jit(functools.partial(decoding.step, config))
    cache = decoding.empty_cache(config, 2, 23)
    for i in range(23):
        found, cache = step(params, tokens[:, i], np.full(2, i), cache)
        np.testing.assert_allclose(found, logits[:, i], atol=1e-5)


def test_a_cache_beyond_the_positions_is_refused():
    config, _ = _model("gpt2")
    with pytest.raises(ValueError, match="24 tokens exceed max_length=23"):
        decoding.empty_cache(config, 1, 24)


def _written(config, params, prompts, tokens, how=None, seeds=(0, 1, 2), chunk=None):
    """Texts of prompts: their tokens, written `chunk` at a time."""
    keys = jax.vmap(jax.random.key)(jnp.array(seeds[: len(prompts)]))
    prompts = [np.asarray(p, np.int32) for p in prompts]
    texts = sampling.begin(config, params, prompts, tokens, keys)
    while not texts.ended.all():
        chunk = chunk or tokens
        texts = sampling.write(config, how or Sampling(), params, END, texts, chunk)
    return [t[:n].tolist() for t, n in zip(*map(np.asarray, texts[:2]), strict=True)]


PROMPTS = [[3], [1, 4, 1, 5, 9, 2, 6], [60, 2, 7]]


def test_greedy_texts_are_what_the_transformer_finds_likeliest(neo):
    config, params = neo
    apply = jax.jit(functools.partial(transformer.apply, config))
    texts = _written(config, params, PROMPTS, 12, chunk=5)
    for text, prompt in zip(texts, PROMPTS, strict=True):
        assert text[: len(prompt)] == prompt
        padded = np.zeros((1, 23), np.int32)
        padded[0, : len(text)] = text
        likeliest = np.argmax(apply(params, padded)[0], -1)
        written = text[len(prompt) :]
        assert written == likeliest[len(prompt) - 1 : len(text) - 1].tolist()
        assert len(written) == 12 or written.index(END) == len(written) - 1


def test_a_drawn_text_depends_on_its_own_key_alone(neo):
    config, params = neo
    how = Sampling(temperature=3.0)
    together = _written(config, params, PROMPTS, 8, how)
    alone = _written(config, params, PROMPTS[1:2], 8, how, seeds=(1,), chunk=3)
    assert alone == together[1:2]
    assert _written(config, params, PROMPTS, 8, how, seeds=(3, 4, 5)) != together


def test_a_text_ends_with_the_end_of_text(neo):
    config, params = neo
    table = params["wte"]["embedding"]
    ended = params | {"ln_f": jax.tree.map(jnp.zeros_like, params["ln_f"])}
    ended["ln_f"]["bias"] = table[END] * 10  # always the likeliest
    assert _written(config, ended, PROMPTS, 5) == [[*p, END] for p in PROMPTS]


@pytest.mark.parametrize(
    ("how", "allowed"),
    [
        (Sampling(temperature=1e-38), {1}),
        (Sampling(temperature=1.0, top_k=2), {1, 3}),
        (Sampling(temperature=1.0, top_p=0.5), {1}),
        (Sampling(temperature=1.0, top_p=0.75), {1, 3}),
        (Sampling(temperature=1.0, top_k=9), {0, 1, 2, 3}),
        (Sampling(temperature=0.01), {1}),
        (Sampling(temperature=0.0, top_p=0.1), {1}),
    ],
)
def test_what_is_drawn(how, allowed):
    logits = jnp.log(jnp.array([0.06, 0.6, 0.04, 0.3]))
    keys = jax.random.split(jax.random.key(0), 400)
    drawn = np.asarray(sampling.choose(how, jnp.tile(logits, (400, 1)), keys))
    assert set(drawn.tolist()) == allowed
    if how == Sampling(temperature=1.0, top_k=2):
        assert abs(np.mean(drawn == 1) - 2 / 3) < 0.08


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: Sampling(temperature=-1.0), "temperature is -1.0: give 0 or more"),
        (lambda: Sampling(top_k=0), "top_k is 0: give 1 or more"),
        (lambda: Sampling(top_p=1.5), "top_p is 1.5: give more than 0 and at most 1"),
        (lambda: _written(*_model("gpt2"), [[]], 3), "a prompt has no token"),
        (lambda: _written(*_model("gpt2"), [[1]], 0), "0 tokens are to follow a"),
        (
            lambda: _written(*_model("gpt2"), [[1] * 20], 4),
            "20 tokens and 4 more are 24",
        ),
    ],
)
def test_what_cannot_be_written_is_refused(call, match):
    with pytest.raises(ValueError, match=match) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("tokens", "length", "stride"), [(2, 5, 5), (6, 5, 1), (23, 5, 5), (24, 6, 4)]
)
def test_windows_have_every_target_once(tokens, length, stride):
    tokens = np.arange(tokens)
    rows = list(scoring.windows(tokens, length, stride))
    assert [t for row in rows for t in row.tokens[-row.targets :]] == [*tokens[1:]]
    assert {len(row.tokens) for row in rows} == {min(length, len(tokens) - 1) + 1}
    assert all(row.targets <= stride for row in rows[1:])


@pytest.mark.slow
def test_few_tokens_are_scored_at_once(neo, monkeypatch):
    config, params = neo
    shapes, scores = [], scoring._scores

    def seen(config, params, tokens, mask):
        shapes.append(tokens[:, :-1].shape)
        return scores(config, params, tokens, mask)

    monkeypatch.setattr(scoring, "_scores", seen)
    rows = [scoring.ScoredRow(np.arange(n) % 61, 1) for n in (20, 12, 12, 12, 12)]
    T = config.max_length
    scoring.score(config, params, rows[:1])
    together = scoring.score(config, params, rows)
    assert shapes == [(1, T), (8, T)]
    for tokens, expected in (2 * T, [(2, T), (2, 16), (1, 16)]), (1, [(1, T), (1, 16)]):
        monkeypatch.setattr(scoring, "TOKENS", tokens)
        shapes.clear()
        parts = scoring.score(config, params, rows)
        assert [*dict.fromkeys(shapes)] == expected
        for a, b in zip(parts, together, strict=True):
            np.testing.assert_allclose(a.nats, b.nats, rtol=1e-5)


def test_scores_are_those_of_the_transformer(neo):
    config, params = neo
    draw = np.random.default_rng(2)
    likeliest = np.array(_written(config, params, PROMPTS, 12)[1])
    rows = [
        scoring.ScoredRow(draw.integers(0, 61, n), k)
        for n, k in [(2, 1), (24, 23), (9, 3)]
    ] * 4 + [scoring.ScoredRow(likeliest, len(likeliest) - 7)]
    scores = scoring.score(config, params, rows)
    padded = np.zeros((len(rows), 24), np.int32)
    for row, tokens in zip(rows, padded, strict=True):
        tokens[: len(row.tokens)] = row.tokens
    logits = jax.jit(functools.partial(transformer.apply, config))(
        params, padded[:, :-1]
    )
    p_BxTxV = np.asarray(jax.nn.log_softmax(logits))
    for p_TxV, row, score in zip(p_BxTxV, rows, scores, strict=True):
        targets = row.tokens[1:]
        nats = -p_TxV[np.arange(len(targets)), targets]
        np.testing.assert_allclose(score.nats, nats[-row.targets :].sum(), rtol=1e-5)
    assert [score.likeliest for score in scores] == [False] * 12 + [True]
