"""Runs that start from a Hugging Face folder."""

import dataclasses
import json

import chex
import jax
import numpy as np
import pytest
import tokenizers

import acco_jax
from acco_jax.models import huggingface, transformer
from acco_jax.plan import programs
from acco_jax.run import loop, preparation
from acco_jax.run.build import validation
from acco_jax.run.trained import language
from acco_jax.run.weights import folders, pretrained
from acco_jax.schedule import topologies

SIZES = {
    "vocab_size": 257, "max_length": 48, "width": 16, "layers": 2, "heads": 4,
    "kv_heads": 2, "head_width": 4, "mlp_width": 32,
}  # fmt: skip
FLOAT32 = {"dtype": "float32", "param_dtype": "float32"}
CONFIG = transformer.Config(**transformer.FAMILIES["llama"] | SIZES | FLOAT32)


@pytest.fixture(scope="module")
def params():
    draw = np.random.default_rng(0).normal
    shapes = transformer.shapes_of(CONFIG)
    return jax.tree.map(lambda x: 0.1 * draw(size=x.shape).astype(x.dtype), shapes)


@pytest.fixture(scope="module")
def folder(params, tmp_path_factory):
    """A folder of a small Llama whose tokens are bytes, and more than one file."""
    path = tmp_path_factory.mktemp("folder")
    said = json.dumps(huggingface.config_json(CONFIG))
    (path / "config.json").write_text(said)
    folders.write_weights(path, huggingface.to_state(CONFIG, params), 5000)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, [])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def prepared(tiny, folder):
    """prepared(workdir, devices=2, **changes): a run that starts from the folder."""

    def make(workdir, devices=2, **changes):
        config = tiny(**{"init_from": str(folder), **changes})
        return preparation.prepare(config, workdir, jax.devices()[:devices])

    return make


@pytest.mark.fast("zero1")
@pytest.mark.parametrize("method", ["zero1", "gossip"])
def test_it_starts_from_the_folder_to_the_bit(prepared, params, tmp_path, method):
    experiment = prepared(tmp_path, method=method)
    start, state = loop.initial(experiment)
    theta = acco_jax.committed_params(state, start)
    chex.assert_trees_all_equal(jax.device_get(theta), params)
    assert experiment.model.parameters() == transformer.count_params(CONFIG)


def test_groups_of_devices_hold_their_parts(prepared, params, tmp_path):
    experiment = prepared(tmp_path, 8, **{"mesh.fsdp": 2, "mesh.tensor": 2})
    start = experiment.start()
    chex.assert_trees_all_equal(jax.device_get(start), params)
    shard = start["wte"]["embedding"].addressable_shards[0].data
    assert shard.size == start["wte"]["embedding"].size // 2  # 257 is odd
    shard = start["h"]["0_global"]["attn"]["q_proj"]["kernel"].addressable_shards[0]
    assert shard.data.shape == (2, 8, 8)


def test_adapters_change_the_model_of_the_folder(prepared, params, tmp_path):
    experiment = prepared(tmp_path, **{"lora.rank": 2})
    frozen = jax.tree.leaves(experiment.loss_fn)
    for found, expected in zip(frozen, jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_a_run_learns_and_goes_on(prepared, folder, tmp_path):
    changes = {"data.tokenizer": "init_from", "eval_every": 6}
    experiment = prepared(tmp_path, **changes)
    assert experiment.corpus.tokenizer.fingerprint.startswith("file-")
    before, _ = loop.Evaluator(experiment)(experiment.start(), None)
    assert loop.run(experiment, stop_after=4) is None
    summary = loop.run(prepared(tmp_path, **changes))
    assert summary["loss"] < before


def test_a_folder_may_move_but_not_change(prepared, folder, params, tmp_path):
    prepared(tmp_path / "run")
    moved = tmp_path / "moved"
    moved.mkdir()
    state = dict(huggingface.to_state(CONFIG, params))
    folders.write_weights(moved, state.items())  # in one file
    said = json.loads((folder / "config.json").read_text()) | {"use_cache": True}
    (moved / "config.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match=r"run with init_from='/.*', not None"):
        prepared(tmp_path / "run", init_from=None)
    again = prepared(tmp_path / "run", init_from=str(moved))
    chex.assert_trees_all_equal(jax.device_get(again.start()), params)
    said["rope_theta"] = 1e4
    (moved / "config.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match=r"run with pretrained\.model\.rope_theta=5"):
        prepared(tmp_path / "run", init_from=str(moved))
    (moved / "config.json").write_text((folder / "config.json").read_text())
    state["model.layers.1.self_attn.o_proj.weight"] = 2 * np.ones((16, 16), "f")
    folders.write_weights(moved, state.items())
    with pytest.raises(ValueError, match=r"run with pretrained\.weights="):
        prepared(tmp_path / "run", init_from=str(moved))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"base": "/elsewhere"}, "base is '/elsewhere', but init_from="),
        ({"model.size": "gpt2"}, "model.size is 'gpt2', but init_from="),
        ({"model.vocab_size": 300}, "model.vocab_size is 300, but init_from="),
        ({"model.experts": 4}, "model.experts is 4, but init_from="),
        ({"data.tokenizer": "bpe"}, "data.tokenizer is 'bpe', which makes other"),
        ({"length": 49}, "length is 49, but .* has 48 positions: lower it"),
        ({"init_from": "/nowhere"}, "/nowhere/config.json cannot be read"),
        ({"init_from": None, "data.tokenizer": "init_from"}, "init_from is not set"),
    ],
)
def test_what_does_not_fit_is_refused(prepared, tmp_path, changes, match):
    with pytest.raises(ValueError, match=match) as error:
        prepared(tmp_path, **changes)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_bytes_and_weights_of_another_model_are_refused(
    prepared, params, folder, tmp_path
):
    other = transformer.Config(
        **transformer.FAMILIES["llama"] | SIZES | FLOAT32 | {"vocab_size": 300}
    )
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(huggingface.config_json(other)))
    with pytest.raises(ValueError, match=r"is 'bytes', but the model of .* knows 300"):
        prepared(tmp_path / "run", init_from=str(tmp_path))
    changes = {"init_from": str(tmp_path), "data.tokenizer": "init_from"}
    with pytest.raises(ValueError, match=r"has shape \(257, 16\).*not \(300, 16\)"):
        prepared(tmp_path / "other", **changes)
    said = huggingface.config_json(CONFIG)
    (tmp_path / "config.json").write_text(json.dumps(said | {"eos_token_id": [2, 3]}))
    with pytest.raises(
        ValueError, match=r"ends a text with token 256, but .* \[2, 3\]"
    ):
        prepared(tmp_path / "third", **changes)
    end = {"data.end_of_text": "<|endoftext|>"}
    prepared(tmp_path / "fourth", **changes, **end)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer\.json or"):
        prepared(tmp_path / "fifth", **changes)


def test_only_conversations_may_not_have_tokens_beyond_the_model_s(
    prepared, folder, tmp_path
):
    model = tmp_path / "model"
    model.mkdir()
    for file in folder.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(model / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    changes = {"init_from": str(model), "data.tokenizer": "init_from"}
    assert prepared(tmp_path / "texts", **changes).model.shapes()
    changes |= {"data.name": "jsonl", "data.task": "chat", "data.held_out": 0.3}
    changes["data.path"] = str(path := tmp_path / "chats.jsonl")
    turns = '{"messages": [{"role": "user", "content": "%s"}, %s]}\n'
    answer = '{"role": "assistant", "content": "yes, %d"}'
    rows = [turns % ("<imag>", answer % i) for i in range(99)]
    path.write_text("".join(rows))
    prepared(tmp_path / "chats", **changes)
    path.write_text("".join(rows).replace("imag", "image"))
    match = r"has token 257, '<image>', but .* knows 257 tokens: leave the conv"
    with pytest.raises(ValueError, match=match) as error:
        prepared(tmp_path / "images", **changes)
    assert "\n" not in str(error.value)
    tokenizer.add_tokens(["<tool>"])  # which texts have
    tokenizer.save(str(model / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"has 259 tokens, but .* knows 257: restore"):
        prepared(tmp_path / "tools", **changes)


def with_weights(folder, path, state, **files):
    """A copy of the folder, with other weights and other files of JSON."""
    path.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (path / name).write_bytes((folder / name).read_bytes())
    folders.write_weights(path, state.items())
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return str(path)


HEAD = "lm_head.weight"
UNREAD = {
    "a bias": ("model.layers.1.self_attn.q_proj.bias", (16,)),
    "a further layer": ("model.layers.2.mlp.up_proj.weight", (32, 16)),
    "another head": ("score.weight", (2, 16)),
    "a norm of queries": ("model.layers.0.self_attn.q_norm.weight", (4,)),
}


@pytest.mark.parametrize(("name", "shape"), UNREAD.values(), ids=UNREAD)
def test_weights_that_are_not_read_are_refused(
    prepared, folder, params, tmp_path, name, shape
):
    state = dict(huggingface.to_state(CONFIG, params))
    state |= {name: np.ones(shape, "f")}
    changes = {"init_from": with_weights(folder, tmp_path / "it", state)}
    with pytest.raises(ValueError, match=f"does not read: {name}; mend") as error:
        prepared(tmp_path / "run", **changes)
    assert "ignore_weights" in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="does not read"):
        language.from_folder(changes["init_from"])
    with pytest.raises(ValueError, match=r"ignore_weights is '\(', not a regular"):
        pretrained.identity(changes["init_from"], "(")
    allowed = name.replace(".", r"\.")
    assert pretrained.identity(changes["init_from"], allowed) == (
        pretrained.identity(str(folder))
    )
    with pytest.raises(ValueError, match="does not read"):
        pretrained.identity(changes["init_from"], allowed[1:])


def test_a_file_of_weights_that_is_not_read(folder, params, tmp_path):
    state = dict(huggingface.to_state(CONFIG, params))
    path = with_weights(folder, tmp_path / "it", state)
    folders.save_file(state, tmp_path / "it" / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"not read: adapter_model\.safetensors"):
        pretrained.identity(path)
    assert pretrained.identity(path, r"adapter_.*")


def test_an_output_embedding_beside_a_tied_one(folder, params, tmp_path):
    config = dataclasses.replace(CONFIG, tied=True)
    tied = {k: v for k, v in params.items() if k != "lm_head"}
    state = dict(huggingface.to_state(config, tied))
    assert HEAD not in state
    wte, said = state["model.embed_tokens.weight"], huggingface.config_json(config)
    same = with_weights(folder, tmp_path / "a", state | {HEAD: wte}, config=said)
    assert pretrained.identity(same)["model"] == said
    other = with_weights(folder, tmp_path / "b", state | {HEAD: 2 * wte}, config=said)
    with pytest.raises(ValueError, match=f"does not read: {HEAD}"):
        pretrained.identity(other)


ENDS = {  # config.json, generation_config.json -> what is kept
    "a list": ({"eos_token_id": [1, 2, 3]}, None, {"eos_token_id": [1, 2, 3]}),
    "one": ({"eos_token_id": 3}, None, {"eos_token_id": [3]}),
    "both": ({"eos_token_id": 3}, {"eos_token_id": [2, 3]}, {"eos_token_id": [2, 3]}),
    "apart": ({"eos_token_id": 3}, {"eos_token_id": 2}, {"eos_token_id": [2, 3]}),
    "0 begins": ({"bos_token_id": 0}, {}, {"bos_token_id": 0}),
    "the second wins": (
        {"bos_token_id": 1, "pad_token_id": 5},
        {"bos_token_id": 0},
        {"bos_token_id": 0, "pad_token_id": 5},
    ),
    "none": ({"bos_token_id": None, "pad_token_id": -1}, {"eos_token_id": None}, {}),
    "sampling": (
        {"temperature": 0.7, "top_k": 50, "use_cache": True},
        {"temperature": 0.6, "do_sample": True, "transformers_version": "4"},
        {"temperature": 0.6, "top_k": 50, "do_sample": True},
    ),
}


@pytest.mark.parametrize(("config", "generation", "kept"), ENDS.values(), ids=ENDS)
def test_what_a_folder_says_of_texts_is_kept(tmp_path, config, generation, kept):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert pretrained.generation(str(tmp_path)) == kept


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("eos_token_id", "3"),
        ("eos_token_id", [1, True]),
        ("eos_token_id", [[1]]),
        ("bos_token_id", [0, 1]),
        ("pad_token_id", 0.5),
    ],
)
def test_ids_that_are_none_are_refused(tmp_path, name, value):
    (tmp_path / "config.json").write_text(json.dumps({name: value}))
    with pytest.raises(ValueError, match=f"{name}=.*: give an integer") as error:
        pretrained.generation(str(tmp_path))
    assert "\n" not in str(error.value)


def test_a_plan_needs_no_more_than_config_json(folder, tiny, tmp_path):
    said = (folder / "config.json").read_text()
    (tmp_path / "config.json").write_text(said)
    config = tiny(**{"init_from": str(tmp_path), "data.tokenizer": "init_from"})
    validation.validate(config)
    mesh = programs.data_mesh(topologies.parse("gpu:h200:1x8"))
    program = programs.describe(config, mesh)
    assert program.parameters == transformer.count_params(CONFIG)
