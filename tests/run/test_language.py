"""Texts in and out of a model: generate, evaluate, and the adapter for the harness."""

import importlib
import itertools
import json
import math
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
import tokenizers

from acco_jax import data
from acco_jax.models import huggingface, transformer
from acco_jax.models.sampling import Sampling
from acco_jax.run import samples
from acco_jax.run.config.fields import default_config
from acco_jax.run.trained import language, perplexity
from acco_jax.run.trained.language import Language, from_folder, from_run, keys_of
from acco_jax.run.weights import folders
from tests import programs

CONFIG = transformer.Config(
    258, 32, 24, 2, 3, window=8, **transformer.FAMILIES["gpt-neo"], tied=False,
    dtype=np.float32, param_dtype=np.float32,
)  # fmt: skip
# Which byte the model of `successors` finds likeliest after which; 256 ends a text.
CYCLES = [b"a bc", "zé".encode(), b"!"]
NEXT = {a: b for c in CYCLES for a, b in itertools.pairwise([*c, c[0]])} | {
    ord("!"): 256
}
TEXT = "Ein großer Wurf: " + "while you communicate, accumulate. " * 3


def _random(scale=0.5):
    draw = np.random.default_rng(0).normal
    shapes = transformer.shapes_of(CONFIG)
    return jax.tree.map(lambda x: scale * draw(size=x.shape).astype(x.dtype), shapes)


class Dropping(data.ByteTokenizer):
    """Bytes, but nothing for a space without width, as some normalizers have it."""

    def encode_batch(self, texts):
        return super().encode_batch([text.replace("\u200b", "") for text in texts])


@pytest.fixture(scope="module")
def model():
    return Language(CONFIG, _random(), data.ByteTokenizer())


@pytest.fixture(scope="module")
def params():
    """Of a model that looks at the last token alone, and knows what follows it."""
    params = _random(1.0)
    table = params["wte"]["embedding"]
    table /= np.linalg.norm(table, axis=1, keepdims=True)
    zeros = jax.tree.map(np.zeros_like, params)
    output = -table  # nothing else is likely
    for token, following in NEXT.items():
        output[following] = table[token]
    norm = {"scale": np.full(24, 5, np.float32), "bias": np.zeros(24, np.float32)}
    tables = {"wte": {"embedding": table}, "lm_head": {"embedding": output}}
    return zeros | {"ln_f": norm} | tables


@pytest.fixture(scope="module")
def successors(params):
    return Language(CONFIG, params, data.ByteTokenizer())


@pytest.fixture(scope="module")
def folder(params, tmp_path_factory):
    """The model of `successors`; its tokenizer puts a token before each text."""
    path = tmp_path_factory.mktemp("folder")
    described = huggingface.config_json(CONFIG)
    (path / "config.json").write_text(json.dumps(described))
    folders.write_weights(path, huggingface.to_state(CONFIG, params))
    own = [b for b in range(256) if chr(b).isprintable() and b != 32 and b != 173]
    others = [b for b in range(256) if b not in own]
    names = {chr(b): b for b in own} | {chr(256 + i): b for i, b in enumerate(others)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(names, []))
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|begin|>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 257)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def _cost(model, tokens, targets):
    """Nats of the last tokens, by the transformer itself."""
    padded = np.zeros((1, 33), np.int32)
    padded[0, : len(tokens)] = list(tokens)
    logits = jax.jit(transformer.apply, static_argnums=0)(
        model.config, model.params, padded[:, :-1]
    )
    nats = -jax.nn.log_softmax(logits)[0][np.arange(32), padded[0, 1:]]
    return float(nats[len(tokens) - 1 - targets : len(tokens) - 1].sum())


def test_a_folder_has_its_own_prefix_and_dtype(folder):
    model = from_folder(folder)
    assert model.prefix == (257,) and model.tokenizer.end_of_text == 256
    assert model.tokens("ab").tolist() == [257, 97, 98]
    assert model.tokens("").tolist() == [257]
    assert model.tokens("abcd", 3).tolist() == [257, 99, 100]
    assert model.pair("", "ab").tokens.tolist() == [257, 97, 98]
    assert model.config.dtype == np.float32
    low = from_folder(folder, "bfloat16")
    assert {str(x.dtype) for x in jax.tree.leaves(low.params)} == {"bfloat16"}
    (texts,) = model.write([model.tokens("ba")], 7, Sampling(), keys_of(0, 1), 7)
    assert texts == [" bca bc"]


def test_a_text_ends_with_each_of_the_folder_s_ends(folder, harness, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    ends = {"eos_token_id": [256, ord("c"), 2**40]}
    (tmp_path / "generation_config.json").write_text(json.dumps(ends))
    model = from_folder(tmp_path)
    assert model.ends == (256, ord("c"))
    prompts = [model.tokens("ba"), model.tokens("zc")]  # in a prompt it ends nothing
    seen = [*model.write(prompts, 3, Sampling(), keys_of(0, 2), 1)]
    assert seen == [[" ", "a"], [" b", "a "], [" b", "a b"]]
    options = {"until": ["!"], "max_gen_toks": 9, "do_sample": False}
    asked = types.SimpleNamespace(args=("ba", options))
    assert harness.AccoLM(model=str(tmp_path)).generate_until([asked]) == [" b"]


def test_special_tokens_of_a_prompt_are_not_those_of_a_text(folder, tmp_path):
    model, text = from_folder(folder), "<|begin|>ab<|endoftext|>"
    assert model.tokens(text).tolist() == [257, 97, 98, 256]
    assert model.tokens("a<|begin|>", 2).tolist() == [257, 257]
    assert model.tokens("<|begin|>").tolist() == [257]
    assert bytes(model.encode(text).tolist()) == text.encode()
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<image>"])  # of which the model has no row
    (tmp_path / "tokenizer.json").unlink()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model = from_folder(tmp_path)
    assert bytes(model.encode("<image>").tolist()) == b"<image>"
    with pytest.raises(ValueError, match=r"token 258, '<image>', but .* 258 tokens"):
        model.tokens("a<image>")
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="tokenizer of 260 tokens, but its model"):
        from_folder(tmp_path)


BEGUN = "{{ '<|begin|>' }}{% for m in messages %}{{ m.content }}{% endfor %}"
CHATS = {
    "a beginning": ("chat", BEGUN, (257,)),
    "none": ("chat", BEGUN.removeprefix("{{ '<|begin|>' }}"), ()),
    "other roles": ("chat", "{{ raise_exception('no') }}", ()),
    "texts": ("pretrain", BEGUN, ()),
}


@pytest.mark.parametrize(("task", "template", "prefix"), CHATS.values(), ids=CHATS)
def test_a_run_s_texts_begin_as_its_conversations_did(
    folder, params, tmp_path, monkeypatch, task, template, prefix
):
    text = (folder / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text)
    (tmp_path / "chat_template.jinja").write_text(template)
    (tmp_path / "config.json").write_text("{}")
    config = default_config()
    config.data.task, config.samples, config.sample_tokens = task, 1, 8
    corpus = types.SimpleNamespace(
        tokenizer=data.FileTokenizer(tmp_path / "tokenizer.json")
    )
    run = types.SimpleNamespace(
        workdir=tmp_path, config=config, architecture=CONFIG, params=params,
        tokenizer=corpus.tokenizer, corpus=corpus, loss_fn=None, identity={},
        mesh=jax.sharding.Mesh(jax.devices()[:1], "data"),
    )  # fmt: skip
    monkeypatch.setattr(language, "load_run", lambda *_: run)
    assert from_run(tmp_path).prefix == prefix
    assert from_run(tmp_path).tokens("<|begin|>a").tolist() == [257, 97]
    config.sample_prompt = "a"

    def written(self, prompts, *_):
        yield [str(prompts[0].tolist())]

    monkeypatch.setattr(Language, "write", written)
    monkeypatch.setattr(samples.models, "transformer_config", lambda *_: CONFIG)
    assert samples.written(run, params) == [f"a{[*prefix, 97]}"]


def test_a_text_without_a_prefix(model):
    assert model.tokens("ab").tolist() == [97, 98]
    assert model.tokens("").tolist() == [256]
    assert model.pair("a ", "b").tokens.tolist() == [97, 32, 98]
    assert model.pair("a ", "b").targets == 2  # the space is encoded with the word
    assert len(model.pair("a" * 50, " b").tokens) == 33
    # a context that the tokenizer drops is none
    drops = Language(CONFIG, model.params, Dropping())
    assert drops.pair("\u200b", "ab").tokens.tolist() == [256, 97, 98]
    with pytest.raises(ValueError, match=r"33 tokens, but .* the model's 32 positions"):
        model.pair("a", "b" * 33)
    with pytest.raises(ValueError, match="has 0 tokens"):
        model.pair("a", "")
    with pytest.raises(ValueError, match="not Unicode"):
        model.tokens("\ud800")


def test_what_is_written_is_shown_in_whole_characters(successors):
    prompts = [successors.tokens("z"), successors.tokens("ab!")]
    seen = [*successors.write(prompts, 5, Sampling(), keys_of(0, 2), 1)]
    assert [z for z, _ in seen] == ["", "é", "éz", "éz", "ézé"]
    assert [text for _, text in seen] == [""] * 5  # the text has ended
    (last,) = successors.write(prompts[:1], 4, Sampling(), keys_of(0, 1), 9)
    assert last == ["éz\ufffd"]  # nothing more comes


@pytest.mark.parametrize(
    ("stride", "window"), [(None, None), (17, None), (None, 12), (5, 12)]
)
def test_each_token_of_a_text_counts_once(model, stride, window):
    found = perplexity.of_text(model, TEXT, stride, window)
    tokens, most = [256, *TEXT.encode()], window or 32
    expected, done, size = 0.0, 0, len(tokens) - 1
    while done < size:
        end = min(max(done + (stride or most), most), size)
        expected += _cost(model, tokens[max(end - most, 0) : end + 1], end - done)
        done = end
    words = len(TEXT.split())
    assert (found["tokens"], found["bytes"], found["words"]) == (size, size, words)
    assert found["loss"] == pytest.approx(expected / size, rel=1e-5)
    assert math.log(found["perplexity"]) == pytest.approx(found["loss"])
    per_word = math.log(found["perplexity_per_word"])
    assert per_word == pytest.approx(expected / words, rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))


def test_lambada_is_of_last_words(successors, tmp_path):
    path = tmp_path / "texts.jsonl"
    texts = ["cab ba bca", "ba bcb", "a bc a b"]
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    found = perplexity.of_lambada(successors, path)
    assert (found["accuracy"], found["texts"]) == (pytest.approx(2 / 3), 3)
    words = [
        _cost(successors, t.encode(), k) for t, k in zip(texts, (4, 4, 2), strict=True)
    ]
    assert math.log(found["perplexity"]) == pytest.approx(sum(words) / 3, rel=1e-5)
    whole = [_cost(successors, [256, *t.encode()], len(t)) for t in texts]
    assert found["whole_text"]["loss"] == pytest.approx(sum(whole) / 24, rel=1e-5)


def test_only_a_new_line_ends_a_line_of_lambada(successors, tmp_path):
    texts = ["cab\u2028ba bca", "ba\x85 bcb", "a\x0b bc a b"]
    lines = [json.dumps({"text": t}, ensure_ascii=False) for t in texts]
    path = tmp_path / "texts.jsonl"
    path.write_bytes("\r\n".join([*lines, "", ""]).encode())
    found = perplexity.of_lambada(successors, path)
    assert found["texts"] == 3
    assert found["whole_text"]["bytes"] == sum(len(t.encode()) for t in texts)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("", "has no texts"),
        ('{"text": "one"}\n', "has no last word in line 1"),
        ('{"text": "a b"}\n{"text": "a "}\n', "has no last word in line 2"),
        ('{"text": "a b"}\n{"txt": "a b"}\n', "damaged in line 2"),
        ('{"text": "a b"}\n{"text": "a b', "damaged in line 2"),
    ],
)
def test_what_is_no_lambada_is_refused(successors, tmp_path, content, match):
    (tmp_path / "texts.jsonl").write_text(content)
    with pytest.raises(ValueError, match=match):
        perplexity.of_lambada(successors, tmp_path / "texts.jsonl")
    with pytest.raises(ValueError, match=r"typo\.jsonl does not exist"):
        perplexity.of_lambada(successors, tmp_path / "typo.jsonl")


def test_texts_that_cannot_be_scored_are_refused(model):
    with pytest.raises(ValueError, match="the text is empty"):
        perplexity.of_text(model, "")
    with pytest.raises(
        ValueError, match="window is 33, but the model has 32 positions"
    ):
        perplexity.of_text(model, "a", window=33)
    for window in None, 32:
        with pytest.raises(ValueError, match="stride is 33, but a window has 32 tok"):
            perplexity.of_text(model, "a", 33, window)
    with pytest.raises(FloatingPointError, match="the loss is nan"):
        perplexity.figures(math.nan, 1, 1, 1)
    assert perplexity.figures(1e6, 10, 1, 10)["perplexity_per_word"] is None


@pytest.fixture
def harness(monkeypatch):
    """The adapter, on stand-ins for the parts of lm_eval that it uses."""
    api = types.ModuleType("lm_eval.api.model")
    api.LM = type("LM", (), {"__init__": lambda self: None})
    registry = types.ModuleType("lm_eval.api.registry")
    registry.register_model = lambda name: lambda cls: cls
    for module in (types.ModuleType("lm_eval"), types.ModuleType("lm_eval.api")):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for module in (api, registry):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    yield importlib.import_module("acco_jax.lm_eval")
    del sys.modules["acco_jax.lm_eval"]


def test_the_harness_gets_its_answers(harness, folder):
    lm = harness.AccoLM(model=str(folder), batch_size="2", device="cpu")
    model = from_folder(folder)

    def asked(*args):
        return types.SimpleNamespace(args=args)

    found = lm.loglikelihood([asked("ba", " bca"), asked("ba", " bcb"), asked("", "b")])
    assert [greedy for _, greedy in found] == [True, False, False]
    costs = [_cost(model, [257, *b"ba bca"], 4), _cost(model, [257, *b"ba bcb"], 4)]
    np.testing.assert_allclose([-x for x, _ in found[:2]], costs, rtol=1e-4, atol=1e-5)
    assert found[2][0] == pytest.approx(-_cost(model, [257, *b"b"], 1), rel=1e-4)
    rolling = lm.loglikelihood_rolling([asked(TEXT), asked("ab"), asked("")])
    per_token = perplexity.of_text(model, TEXT)
    expected = -per_token["loss"] * per_token["tokens"]
    assert rolling[0] == pytest.approx(expected) and rolling[2] == 0
    assert rolling[1] == pytest.approx(-_cost(model, [257, *b"ab"], 2), rel=1e-4)
    greedy = {"until": ["a b", "!"], "max_gen_toks": 12, "temperature": 0.0}
    short = {"until": [], "max_gen_toks": 3, "do_sample": False}
    requests = [asked("ca", greedy), asked("b", short), asked("z" * 60, greedy)]
    assert lm.generate_until(requests) == [" bc", "ca ", "ézézézéz"]
    plain, many = {"until": ["c"]}, {"until": [], "max_gen_toks": 20}
    requests = [asked("ba", plain), asked("z" * 30 + "ba", plain)]
    assert lm.generate_until(requests) == [" b"] * 2
    kept, cut = lm.generate_until([asked("ba", many), asked("z" * 30, many)])
    assert kept == " bca" * 5 and cut.startswith("éz" * 5)
    with pytest.raises(ValueError, match="max_gen_toks is 32, but the model has 32"):
        lm.generate_until([asked("ba", {"max_gen_toks": 32})])
    drawn = {"do_sample": True, "temperature": 50.0, "max_gen_toks": 8, "until": []}
    answers = lm.generate_until([asked("ba", drawn)] * 8)  # repeats of a request
    assert len(set(answers)) > 2 and lm.generate_until([asked("ba", drawn)] * 8) == (
        answers
    )
    drawn = {"do_sample": True, "temperature": 0.1, "top_p": 0.9, "top_k": 0}
    assert harness._sampling(drawn) == Sampling(0.1, None, 0.9)
    with pytest.raises(ValueError, match=r"dtype is 'float32' .* a run has its own"):
        harness.AccoLM(workdir="runs/a", dtype="float32")
    with pytest.raises(ValueError, match="give one of them"):
        harness.AccoLM()
    with pytest.raises(ValueError, match="half_round is not an argument of AccoLM"):
        harness.AccoLM(workdir="runs/a", half_round=5, max_batch_size=4)


def test_an_instruction_follows_an_end_of_text(successors):
    """As in the rows that the run was trained on."""
    config = default_config()
    config.data.task = "instruct"
    tokenizer = successors.tokenizer
    prefix = language.prefix_of(config, tokenizer)
    assert prefix == (tokenizer.end_of_text,)
    model = Language(CONFIG, successors.params, tokenizer, prefix)
    assert model.tokens("ab").tolist() == [*prefix, 97, 98]
    assert model.pair("ab", "c").tokens.tolist() == [*prefix, 97, 98, 99]
    (texts,) = model.write([model.tokens("ba")], 3, Sampling(), keys_of(0, 1), 3)
    (without,) = successors.write(
        [successors.tokens("ba")], 3, Sampling(), keys_of(0, 1), 3
    )
    assert texts == without == [" bc"]


def _command(name, *flags):
    return subprocess.run(
        [sys.executable, "-m", f"acco_jax.{name}", *flags],
        env=programs.environment(JAX_PLATFORMS="cpu"),
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip


def test_generate_shows_prompt_and_what_follows(folder):
    flags = f"--model={folder}", "--prompt=ba", "--tokens=7"
    drawn = "--samples=2", "--seed=3", "--temperature=0.01"
    done = _command("generate", *flags, *drawn)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ba bca bc\n--- 2 of 2\nba bca bc\n"


def test_evaluate_prints_figures(folder, tmp_path):
    text = TEXT.replace(" ", "\r\n", 3).replace(" ", "\r", 1)
    (tmp_path / "text.txt").write_bytes(text.encode())
    flags = f"--model={folder}", f"--file={tmp_path / 'text.txt'}", "--stride=16"
    done = _command("evaluate", *flags, "--json")
    assert done.returncode == 0, done.stderr
    expected = perplexity.of_text(from_folder(folder), text, 16)
    assert expected["bytes"] == len(TEXT.encode()) + 3
    assert json.loads(done.stdout) == pytest.approx(expected, rel=1e-5)
