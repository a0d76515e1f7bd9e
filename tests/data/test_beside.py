"""Files beside a tokenizer: which token ends a text, and what else they name."""

import json
import os

import pytest
import tokenizers

from acco_jax import data
from acco_jax.data import beside
from acco_jax.data.tokenizers import copied

END, OTHER = "<|im_end|>", "<|endoftext|>"


@pytest.fixture
def folder(tmp_path):
    """A tokenizer.json with two special tokens, ids 256 and 257."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, [])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_special_tokens([OTHER, END])
    (tmp_path / "given").mkdir()
    tokenizer.save(str(tmp_path / "given" / "tokenizer.json"))
    return tmp_path / "given"


def say(folder, config=None, tokens=None):
    for name, said in ((beside.CONFIG, config), (beside._MAP, tokens)):
        if said is not None:
            text = said if isinstance(said, str) else json.dumps(said)
            (folder / name).write_text(text)


GOOD = {  # tokenizer_config.json, special_tokens_map.json -> the end of a text
    "neither": (None, None, OTHER),
    "null": ({"eos_token": None}, None, OTHER),
    "a text": ({"eos_token": END}, None, END),
    "an object": ({"eos_token": {"content": END}}, None, END),
    "the other file": ({}, {"eos_token": END}, END),
    "both": ({"eos_token": END}, {"eos_token": OTHER}, END),
}


@pytest.mark.parametrize(("config", "tokens", "end"), GOOD.values(), ids=GOOD)
def test_the_end_that_is_named_ends_a_text(folder, config, tokens, end):
    say(folder, config, tokens)
    tokenizer = data.read_tokenizer(folder / "tokenizer.json")
    assert tokenizer.end_string == end
    assert tokenizer.end_of_text == (257 if end == END else 256)


BAD = {
    "lacking": ({"eos_token": "<eot>"}, None, "has no token '<eot>': set data.end"),
    "as an object": ({"eos_token": {"content": "<eot>"}}, None, "'<eot>'"),
    "in the other": (None, {"eos_token": "<eot>"}, "has no token '<eot>'"),
    "a number": ({"eos_token": 257}, None, "eos_token=257, which is not text"),
    "a list": ({"eos_token": [END]}, None, "which is not text: restore it, or set"),
    "no content": ({"eos_token": {"id": 1}}, None, "which is not text"),
    "half a character": ('{"eos_token": "\\ud83d"}', None, "which is not text"),
    "damaged": ('{"eos_token": ', None, f"{beside.CONFIG} is damaged"),
    "a list of all": ("[]", None, f"{beside.CONFIG} is damaged"),
    "the other damaged": (None, "\x00", f"{beside._MAP} is damaged"),
}


@pytest.mark.parametrize(("config", "tokens", "match"), BAD.values(), ids=BAD)
def test_another_end_is_never_taken_in_silence(folder, config, tokens, match):
    say(folder, config, tokens)
    with pytest.raises(ValueError, match=match) as error:
        data.read_tokenizer(folder / "tokenizer.json")
    assert str(folder) in str(error.value) and "\n" not in str(error.value)
    known = data.read_tokenizer(folder / "tokenizer.json", END)  # data.end_of_text
    assert known.end_of_text == 257


EXPORTS = {  # tokenizer_config.json, the map, ids to name -> tokens and ids named
    "nothing": ({}, {}, {}, {}, {}),
    "ids": ({}, {}, {"bos_token": 0, "pad_token": 256}, {"pad_token": OTHER}, {}),
    "tokens": ({"bos_token": OTHER}, {}, {}, {"bos_token": OTHER}, {"bos_token": 256}),
    "an object": (
        {"pad_token": {"content": OTHER, "lstrip": False}},
        {},
        {"pad_token": 256},
        {"pad_token": {"content": OTHER, "lstrip": False}},
        {"pad_token": 256},
    ),
    "the map": ({}, {"pad_token": OTHER}, {}, {"pad_token": OTHER}, {"pad_token": 256}),
    "ids win": (
        {"bos_token": OTHER}, {}, {"bos_token": 257}, {"bos_token": END},
        {"bos_token": 257},
    ),
    "no token of it": ({"bos_token": OTHER}, {}, {"bos_token": 9999}, {}, {}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "tokens", "special", "named", "ids"), EXPORTS.values(), ids=EXPORTS
)
def test_exported_tokens_are_those_of_the_ids(
    folder, tmp_path, config, tokens, special, named, ids
):
    say(folder, config | {"eos_token": END, "chat_template": "{{ x }}"}, tokens)
    data.read_tokenizer(folder / "tokenizer.json").save(tmp_path / "work")
    found = copied(tmp_path / "work").export(tmp_path / "out", 64, special)
    said = json.loads((tmp_path / "out" / beside.CONFIG).read_text())
    assert said["eos_token"] == END and said["chat_template"] == "{{ x }}"
    assert {k: said[k] for k in named} == named
    exported = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert found == found | ids
    for name, number in found.items():
        assert exported.token_to_id(beside.content(said[name])) == number
        assert special.get(name, number) == number


WHY = {"sparse": "it has 3,000,000,000 bytes", "fifo": "it is not a regular file"}


@pytest.mark.parametrize(
    "name", ["tokenizer.json", beside.CONFIG, beside._MAP, "chat_template.jinja"]
)
@pytest.mark.parametrize("kind", WHY)
def test_no_file_is_read_without_bound(folder, tmp_path, name, kind):
    say(folder, {"eos_token": END} if name != beside._MAP else None)
    path = folder / name
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)  # a read of it would wait for ever
    else:
        path.touch()
        os.truncate(path, 3 * 10**9)
    why = rf"/{name} .*\({WHY[kind]}"
    if (kind, name) == ("fifo", "tokenizer.json"):
        why = f"no tokenizer .*{name}: set data.tokenizer"
    with pytest.raises(ValueError, match=why) as error:
        data.read_tokenizer(folder / "tokenizer.json").save(tmp_path / "work")
    assert "\n" not in str(error.value)
