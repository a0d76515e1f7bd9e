"""Conversations: rendered and masked as transformers does, and cut into rows."""

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from acco_jax import data
from acco_jax.data import tasks
from acco_jax.data.chat import ChatTemplate
from acco_jax.run.config import fields as configs

RECORDED = json.loads(
    (Path(__file__).parents[1] / "recorded" / "chat.json").read_text()
)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
# the same templates, which do not say what the assistant's part is
UNMARKED = {
    name: re.sub(r"\{%-? (end)?generation %\}", "", template)
    for name, template in RECORDED["templates"].items()
}


def tokenizer_of(folder, template=None, **said):
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "tokenizer.json").write_text(RECORDED["tokenizer"])
    if isinstance(template, str):
        (folder / "chat_template.jinja").write_text(template)
    said = SPECIAL | said
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return str(folder / "tokenizer.json")


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("name", RECORDED["templates"])
def test_tokens_and_masks_are_those_of_transformers(tmp_path, name, marked):
    template = (RECORDED["templates"] if marked else UNMARKED)[name]
    assert ("generation %}" in template) == marked
    chat = ChatTemplate(data.FileTokenizer(tokenizer_of(tmp_path, template)))
    cases = [case for case in RECORDED["cases"] if case["template"] == name]
    chats = [tasks.conversation(case["messages"]) for case in cases]
    assert [chat.rendered(one)[0] for one in chats] == [case["text"] for case in cases]
    for case, found in zip(cases, chat.encode_batch(chats), strict=True):
        ids, targets, size = found
        assert ids.tolist() == case["ids"]
        assert targets.tolist() == case["mask"]
        text, spans = chat.rendered(tasks.conversation(case["messages"]))
        assert size == sum(len(text[a:b].encode()) for a, b in spans)


def test_special_tokens_are_characters_for_other_tasks(tmp_path):
    path = tokenizer_of(tmp_path, UNMARKED["chatml"])
    tokenizer = data.FileTokenizer(path)
    ids = tokenizer.encode("<|im_end|>")
    ((rendered, places),) = tokenizer.encode_rendered(["a<|im_end|>"])
    assert len(ids) > 1 and len(rendered) == 2 and places.tolist() == [[0, 1], [1, 11]]
    assert tokenizer.encode("<|im_end|>").tolist() == ids.tolist()


def test_places_have_the_spaces_that_a_file_would_trim(tmp_path):
    """Of `"\\n   "` the assistant may have said the spaces."""
    path = Path(tokenizer_of(tmp_path))
    said = json.loads(path.read_text())
    trims = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    path.write_text(json.dumps(said | {"post_processor": trims}))
    tokenizer = data.FileTokenizer(str(path))
    for text in ("a  b", "  "):
        ((_, places),) = tokenizer.encode_rendered([text])
        held = {i for a, b in places for i in range(a, b)}
        assert held == set(range(len(text)))


def test_the_templates_of_one_file_and_its_copy(tmp_path):
    named = [{"name": "tool", "template": "x"}, {"name": "default", "template": "y"}]
    path = tokenizer_of(tmp_path / "a", chat_template=named)
    tokenizer = data.FileTokenizer(path)
    tokenizer.save(tmp_path / "b")
    for folder in "ab":
        copy = data.FileTokenizer(tmp_path / folder / "tokenizer.json")
        chat = ChatTemplate(copy)
        assert chat._source == "y"
        assert chat.fingerprint == ChatTemplate(tokenizer).fingerprint
    other = data.FileTokenizer(tokenizer_of(tmp_path / "c", "z"))
    assert ChatTemplate(other).fingerprint != chat.fingerprint


CHATS = [
    [
        {"role": "user", "content": f"Say {i}, l'été."},
        {"role": "assistant", "content": "Yes. " * (i % 3)},
        {"role": "user", "content": "More."},
        {"role": "assistant", "content": f"It is {i}."},
    ][: 4 if i % 2 else 2]
    for i in range(20)
]


def config_of(root, tokenizer, name="jsonl", rows=None):
    rows = [{"messages": chat, "id": 1} for chat in CHATS] if rows is None else rows
    path = root / {"jsonl": "all.jsonl", "parquet": "all.parquet"}.get(name, "all")
    root.mkdir(exist_ok=True)
    if name == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif name == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    config = configs.default_config().data
    config.name, config.path, config.task = name, str(path), "chat"
    config.tokenizer, config.held_out = tokenizer, 0.3
    config.data_dir = str(root.parent / "tokens")
    return config


@pytest.mark.parametrize("name", ["jsonl", "parquet"])
def test_only_the_assistant_s_turns_are_learnt(tmp_path, name):
    path = tokenizer_of(tmp_path / "t", RECORDED["templates"]["chatml"])
    config = config_of(tmp_path / "texts", path, name)
    corpus = data.load_corpus(config, workdir=tmp_path / "run")
    chat = ChatTemplate(corpus.tokenizer)
    documents = [tasks.conversation(messages) for messages in CHATS]
    wanted = {tuple(ids): t for ids, t, _ in chat.encode_batch(documents)}
    batches = data.validation_batches(corpus, length=150, batch_size=4)
    total = rows = 0
    for batch in batches:
        for tokens, mask in zip(batch["tokens"], batch["mask"], strict=True):
            if not mask.any():
                continue
            last = int(np.flatnonzero(mask)[-1]) + 1  # the last target's place
            (ids,) = [w for w in wanted if w[: last + 1] == tuple(tokens[: last + 1])]
            np.testing.assert_array_equal(mask[:last], wanted[ids][1 : last + 1])
            assert not any(wanted[ids][last + 1 :])
            total, rows = total + mask.sum(), rows + 1
    assert rows == corpus.validation_documents > 1
    assert data.bits_per_byte(1.0, corpus, targets=total) == (
        data.bits_per_byte(1.0, corpus)
    )
    assert 0 < data.bigram_bits_per_byte(corpus) < 8
    iterator = data.train_iterator(
        corpus, length=60, batch_size=2, seed=0,
        lengths=(40, 60),
    )  # fmt: skip
    for _ in range(9):
        before = iterator.targets
        assert next(iterator)["mask"].sum() == iterator.targets - before > 0


def test_other_templates_give_other_tokens_and_damage_is_found(tmp_path):
    config = config_of(tmp_path / "texts", "")
    for name in ("chatml", "turns"):
        template = RECORDED["templates"][name]
        config.tokenizer = tokenizer_of(tmp_path / name, template)
        data.load_corpus(config, workdir=tmp_path / f"run-{name}")
    folders = sorted((tmp_path / "tokens" / "tokens").iterdir())
    assert len(folders) == 2
    for folder in folders:
        with open(folder / "validation.targets.bin", "r+b") as file:
            file.write(b"\1")
    corpus = data.load_corpus(config, workdir=tmp_path / "run-turns")
    with pytest.raises(ValueError, match=r"validation\.targets\.bin is damaged"):
        data.bits_per_byte(1.0, corpus)


USER, YES = {"role": "user", "content": "Go?"}, {"role": "assistant", "content": "Y"}
ROWS = {
    "no column": ([{"text": "a"}], r"line 1 of .* has no list in 'messages': write"),
    "no list": ([{"messages": "a"}], r"line 1 of .* has no list in 'messages'"),
    "none": ([{"messages": []}], r"has no list in 'messages'"),
    "a role": (
        [{"messages": [USER, YES]}, {"messages": [{"role": "human", "content": "a"}]}],
        r"line 2 of .* has message 1 with role 'human': choose one of system",
    ),
    "no role": ([{"messages": ["a"]}], "has message 1 with role None"),
    "content": (
        [{"messages": [USER, {"role": "assistant", "content": None}]}],
        "has message 2 with content None: write a string",
    ),
    "nobody": ([{"messages": [USER]}], "without one of the assistant: leave it out"),
}


@pytest.mark.parametrize(
    ("name", "rows", "match"),
    [
        pytest.param(name, *row, id=f"{name}, {case}")
        for name in ("jsonl", "parquet")
        for case, row in ROWS.items()
        if (name, case) != ("parquet", "none")  # a column of a file has a type
    ],
)
def test_records_that_are_no_conversations_are_refused(tmp_path, name, rows, match):
    path = tokenizer_of(tmp_path / "t", RECORDED["templates"]["chatml"])
    match = match.replace("line ", "row ") if name == "parquet" else match
    config = config_of(tmp_path / "texts", path, name, rows)
    with pytest.raises(ValueError, match=match) as error:
        data.load_corpus(config, workdir=tmp_path / "run")
    assert "\n" not in str(error.value)


def test_templates_see_what_transformers_gives_them(tmp_path):
    """All special tokens that the files name, and tojson with its arguments."""
    template = (
        "{{ bos_token }}{{ sep_token }}{{ cls_token }}{{ mask_token }}"
        "{{ additional_special_tokens | join('+') }}"
        "{{ messages[0].content | tojson(ensure_ascii=True) }}"
        "{{ [1, 2] | tojson(false, none, (',', ':')) }}"
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    said = {"sep_token": {"content": "<sep>"}, "cls_token": "<cls>"}
    path = tokenizer_of(tmp_path / "t", template, **said)
    tokens = {"mask_token": "<mask>", "additional_special_tokens": ["<a>", "<b>"]}
    (tmp_path / "t" / "special_tokens_map.json").write_text(json.dumps(tokens))
    tokenizer = data.read_tokenizer(path, None)
    chat = tasks.Chat((("user", "h\xe9"), ("assistant", "yes")))
    ((ids, mask, _),) = ChatTemplate(tokenizer).encode_batch([chat])
    text = "<s><sep><cls><mask><a>+<b>"
    assert tokenizer.decode(ids) == text + '"h\\u00e9"[1,2]yes'
    assert mask.sum() > 0


UNSTABLE = """\
{% for m in messages %}{{ m.role + ':' }}{% if m.role == 'user' or loop.last %}\
{{ m.content }}{% endif %};{% endfor %}{% if add_generation_prompt %}assistant:\
{% endif %}"""
TEMPLATES = {
    "none": (None, "has no chat template: add chat_template.jinja beside it"),
    "none by default": ([{"name": "tool", "template": "x"}], "has no chat template"),
    "no template": ("{% if %}", r"chat template that cannot be read \(.*\): correct"),
    "it raises": (
        "{{ raise_exception('No,\nnever') }}",
        r"fails at a conversation with the user's .Say 0, l'.* \(No, never\)",
    ),
    "no such name": ("{{ messages[0].nothing.at }}", "that fails at a conversation"),
    "unsafe": ("{{ messages.__class__.__mro__ }}", "that fails at a conversation"),
    "a date": ("{{ strftime_now('%Y') }}", "'strftime_now' is undefined"),
    "unstable": (UNSTABLE, r"renders message 2 in another way before later ones"),
    "nothing": ("{{ messages[0].content }}", "renders nothing of the assistant"),
}


@pytest.mark.parametrize(("template", "match"), TEMPLATES.values(), ids=TEMPLATES)
def test_templates_that_cannot_be_used_are_refused(tmp_path, template, match):
    said = {"chat_template": template} if isinstance(template, list) else {}
    path = tokenizer_of(tmp_path / "t", template, **said)
    config = config_of(tmp_path / "texts", path)
    with pytest.raises(ValueError, match=match) as error:
        data.load_corpus(config, workdir=tmp_path / "run")
    assert "\n" not in str(error.value)


def test_what_has_no_conversations_or_no_template_is_refused(tmp_path):
    config = config_of(tmp_path / "texts", "bytes")
    with pytest.raises(ValueError, match=r"needs a tokenizer\.json with a chat"):
        data.load_corpus(config, workdir=tmp_path / "run")
    config.tokenizer, config.vocab_size = "bpe", 270  # before one is trained
    with pytest.raises(ValueError, match=r"needs a tokenizer\.json with a chat"):
        data.load_corpus(config, workdir=tmp_path / "run")
    config.tokenizer, config.vocab_size = "tokenizer.json", None
    config.name, config.path = "text_folder", str(tmp_path / "texts")
    with pytest.raises(ValueError, match=r"has no columns of data\.task='chat'"):
        data.load_corpus(config, workdir=tmp_path / "run")


def test_csv(tmp_path):
    rows = [f'{i},"a ""b"", l\'été\n{i}",c\r\n\r\n' for i in range(12)]
    header = "\ufeffid,text,output\r\n"
    text = header + "".join(rows)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "train.csv").write_bytes(text.encode())
    with gzip.open(tmp_path / "a" / "test.csv.gz", "wb") as file:
        file.write("".join([header, *rows[:2]]).encode())
    config = config_of(tmp_path / "texts", "bytes")
    config.update({"task": "pretrain", "name": "csv", "path": str(tmp_path / "a")})
    corpus = data.load_corpus(config, workdir=tmp_path / "run")
    assert (corpus.train_documents, corpus.validation_documents) == (12, 2)
    spelled = corpus.tokenizer.decode(corpus.train_tokens)
    assert spelled == "".join(f'a "b", l\'été\n{i}' for i in range(12))


CSV = {
    "no column": (b"id,other\n1,2\n", "pretrain", r"set data\.text_feature to one of"),
    "columns": (b"text\n1\n", "instruct", "has no text in 'instruction', its columns"),
    "twice": (b"text,text\n1,2\n", "pretrain", "line 1 of .* has 'text' twice"),
    "a field more": (b"text,a\n1,2,3\n", "pretrain", "line 2 .* 3 fields, not the 2"),
    "quotes": (b'text\n"a"b\n', "pretrain", "line 2 of .* is not CSV"),
    "no end": (b'text\n"a\n', "pretrain", "line 2 of .* is not CSV .unexpected end"),
    "no UTF-8": (b"text\n\xff\n", "pretrain", "is not CSV .no UTF-8."),
    "chat": (b"messages\n[]\n", "chat", "has no list in 'messages'"),
}


@pytest.mark.parametrize(("content", "task", "match"), CSV.values(), ids=CSV)
def test_csv_that_cannot_be_read_is_refused(tmp_path, content, task, match):
    (tmp_path / "a.csv").write_bytes(content)
    path = tokenizer_of(tmp_path / "t", RECORDED["templates"]["chatml"])
    config = config_of(tmp_path / "texts", path)
    config.update({"task": task, "name": "csv", "path": str(tmp_path / "a.csv")})
    with pytest.raises(ValueError, match=match) as error:
        data.load_corpus(config, workdir=tmp_path / "run")
    assert "\n" not in str(error.value)
