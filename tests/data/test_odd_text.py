"""Odd text, through every reader, tokenizer and task; what would exhaust memory."""

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import tensorflow_datasets as tfds
import tokenizers
from pyarrow import parquet

from acco_jax import data
from acco_jax.data import corpora, records, tasks
from acco_jax.run.config import fields as configs
from tests.data import test_sources

files = test_sources.files  # a fixture

# A text, which may be one that only JSON can spell, and what is trained on.
TEXTS = {
    "half of a surrogate": ("half \ud83d", "half \ufffd"),
    "its other half": ("\ude00 half, ü", "\ufffd half, ü"),
    "halves in the wrong order": ("a\ude00\ud83db", "a\ufffd\ufffdb"),
    "both halves": ("whole \U0001f600", "whole \U0001f600"),
    "byte order mark": ("\ufeffmarked", "marked"),
    "two marks": ("\ufeff\ufeffmarked", "marked"),
    "a mark inside": ("a\ufeffb", "a\ufeffb"),
    "separators of lines": ("a\u2028b\u2029c\x85d\x0be", None),
    "line ends": ("a\r\nb\rc\n", None),
    "no characters": ("a\ufffe\uffffb\U0010ffff", None),
    "combining": ("e\u0301 \u202eabc\u202c \u200d", None),
    "controls": ("a\x01\x1b\x7fb", None),
}
READERS = ("text_folder", "jsonl", "jsonl.gz", "parquet", "dictionary", "huggingface",
           "tfds")  # fmt: skip


class OddRecords(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    VERSION = tfds.core.Version("1.0.0")
    url_infos = None
    rows = ()

    def _info(self):
        names = ("text", "instruction", "input", "output")
        features = tfds.features.FeaturesDict({n: tfds.features.Text() for n in names})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {"train": enumerate(self.rows), "validation": enumerate(self.rows[-1:])}

    def _generate_examples(self):
        raise NotImplementedError


def write(root, reader, rows, monkeypatch):
    """Write rows for a reader: the fields of `data` that read them."""
    root.mkdir()
    name, path = reader, root
    if reader == "text_folder":
        for split, part in ("train", rows), ("validation", rows[-1:]):
            (root / split).mkdir()
            for i, row in enumerate(part):
                (root / split / f"{i}.txt").write_bytes(row["text"].encode())
    elif reader.startswith("jsonl"):
        name, opened = "jsonl", gzip.open if reader.endswith("gz") else open
        for split, part in ("TRAIN", rows), ("VALIDATION", rows[-1:]):
            with opened(root / f"{split}.{reader.upper()}", "wb") as file:
                file.write(b"\xef\xbb\xbf")
                file.writelines(json.dumps(row).encode() + b"\r\n" for row in part)
    elif reader == "tfds":
        monkeypatch.setattr(OddRecords, "rows", rows)
        with corpora._quiet():
            OddRecords(data_dir=root).download_and_prepare(file_format="array_record")
        name = "odd_records"
    else:
        table = pa.Table.from_pylist(rows)
        if reader == "dictionary":
            columns = [column.dictionary_encode() for column in table.columns]
            table, name = pa.table(columns, table.column_names), "parquet"
        for split, part in ("train", table), ("validation", table.slice(len(rows) - 1)):
            if name == "parquet":
                parquet.write_table(part, root / f"{split}.parquet")
                continue
            (root / split).mkdir()
            state = {"_data_files": [{"filename": "0.arrow"}]}
            (root / split / "state.json").write_text(json.dumps(state))
            splits = {"splits": ["train", "validation"]}
            (root / "dataset_dict.json").write_text(json.dumps(splits))
            shard = str(root / split / "0.arrow")
            with pa.ipc.new_stream(shard, part.schema) as stream:
                stream.write_table(part)
    return {"name": name, "path": None if reader == "tfds" else str(path)}


@pytest.mark.parametrize(
    ("reader", "task"),
    [  # texts in a folder have no columns for instructions
        (reader, task)
        for reader in READERS
        for task in ("pretrain", "instruct")
        if (reader, task) != ("text_folder", "instruct")
    ],
)
def test_odd_text(tmp_path, monkeypatch, files, reader, task):
    texts, wanted = [], []
    for text, other in TEXTS.values():
        try:
            text.encode()
        except UnicodeEncodeError:
            if not reader.startswith("jsonl"):
                continue  # it cannot be written
        texts.append(text)
        wanted.append(text if other is None else other)
    rows = [{"text": t, "instruction": t, "input": t, "output": t} for t in texts]
    config = configs.default_config().data
    config.update(write(tmp_path / "root", reader, rows, monkeypatch))
    config.task = task
    config.data_dir = str(tmp_path / ("root" if reader == "tfds" else "data"))
    if task == "instruct":
        wanted = [(tasks.alpaca_prompt(text, text), text) for text in wanted]
    source = corpora.open_source(config, Path(config.data_dir))
    found = list(source.train())
    key = str if reader in ("text_folder", "tfds") else None  # in an order of their own
    assert (sorted(found, key=key) if key else found) == (
        sorted(wanted, key=key) if key else wanted
    )
    assert list(source.validation()) == wanted[-1:]
    for tokenizer in ("bytes", str(files["json"]), str(files["model"])):
        config.tokenizer = tokenizer
        corpus = data.load_corpus(config, workdir=tmp_path / Path(tokenizer).name)
        assert corpus.train_documents == len(wanted)
        if tokenizer == "bytes":
            spelled = corpus.tokenizer.decode(corpus.train_tokens)
            assert spelled == "".join("".join(tasks.texts(d)) for d in found)


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.jsonl", '\ufeff{"text": "a"}\n\ufeff{"text": "b"}\n'.encode(), None),
        (
            "a.jsonl",
            '{"text": "a"}'.encode("utf-16"),
            r"line 1 of .*a\.jsonl is not a JSON",
        ),
        ("a.jsonl", b'{"text": null}', r"line 1 of .* has null in 'text': leave such"),
        ("a.jsonl", b'{"text": 1, "title": "b"}', r"no text in 'text': .*\['title'\]"),
        ("a.jsonl", b'{"text": 1}', r"no text in 'text', nor in another column: use"),
        ("A.NDJSON.GZ", gzip.compress(b'{"text": "a"}\n{"text": "b"}', mtime=0), None),
    ],
)
def test_odd_lines(tmp_path, name, content, line):
    (tmp_path / name).write_bytes(content)
    found = records.find("jsonl", str(tmp_path), "train", "validation")
    read = records.read(found, found.train, ("text",), ())
    if line is None:
        assert [record["text"] for record in read] == ["a", "b"]
        return
    with pytest.raises(ValueError, match=line) as error:
        list(read)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("reader", ["text_folder", "jsonl", "parquet"])
def test_bytes_of_half_a_surrogate_are_refused_by_name(tmp_path, reader):
    """No UTF-8: only a data set of tfds may hold them, where they become U+FFFD."""
    text, root = b"half \xed\xa0\xbd", tmp_path / "root"
    root.mkdir()
    config = configs.default_config().data
    config.name, config.path = reader, str(root)
    if reader == "text_folder":
        (root / "a").write_bytes(text)
        line = r"root/a is not UTF-8 text: move it out"
    elif reader == "jsonl":
        (root / "a.jsonl").write_bytes(b'{"text": "' + text + b'"}\n')
        line = r"line 1 of .*a\.jsonl is not a JSON object: .* in UTF-8"
    else:
        column = pa.array([text], pa.binary()).view(pa.string())
        parquet.write_table(pa.table({"text": column}), root / "a.parquet")
        line = r"a\.parquet is not a complete parquet file \(.*UTF.*\): restore it"
    with pytest.raises(ValueError, match=line) as error:
        list(corpora.open_source(config, tmp_path / "data").train())
    assert "\n" not in str(error.value)


def test_bytes_that_are_not_utf8_in_tfds_are_replaced(tmp_path, monkeypatch):
    row = {"instruction": "", "input": "", "output": ""}
    rows = [row | {"text": text} for text in (b"caf\xe9 1", b"caf\xe9 2")]
    config = configs.default_config().data
    config.update(write(tmp_path / "root", "tfds", rows, monkeypatch))
    source = corpora.open_source(config, tmp_path / "root")
    assert sorted(source.train()) == ["caf\ufffd 1", "caf\ufffd 2"]


def test_a_column_of_no_text_is_named_without_an_empty_list(tmp_path):
    parquet.write_table(pa.table({"text": [1, 2]}), tmp_path / "a.parquet")
    found = records.find("parquet", str(tmp_path), "train", "validation")
    with pytest.raises(ValueError, match="no text in 'text', nor in another column"):
        list(records.read(found, found.train, ("text",), ()))
    with pytest.raises(ValueError, match=r"'output', .* are \[\]: rename them to "):
        columns = tasks.columns("instruct", "text")[::-1]
        list(records.read(found, found.train, columns, ()))


def test_a_column_that_may_be_there_is_text_if_it_is(tmp_path):
    columns, optional = tasks.columns("instruct", "text"), ("input",)
    rows = {"instruction": ["a"], "output": ["b"]}
    for i, (value, type) in enumerate({None: pa.null(), "c": pa.string()}.items()):
        folder = tmp_path / str(i)
        folder.mkdir()
        table = pa.table(rows | {"input": pa.array([value], type)})
        parquet.write_table(table, folder / "a.parquet")
        found = records.find("parquet", str(folder), "train", "validation")
        (record,) = records.read(found, found.train, columns, optional)
        assert record.get("input") == value
    table = pa.table(rows | {"input": [["c"]]})
    parquet.write_table(table, tmp_path / "a.parquet")
    found = records.find("parquet", str(tmp_path / "a.parquet"), "train", "validation")
    with pytest.raises(ValueError, match=r"'input' of type list<.*, which is not text"):
        list(records.read(found, found.train, columns, optional))


# What would exhaust memory


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_line_has_a_limit(tmp_path, monkeypatch, name):
    """A small file may hold a line of any length."""
    assert records.LONGEST_LINE == 2**28
    monkeypatch.setattr(records, "LONGEST_LINE", 2**12)
    lines = b'{"text": "a"}\n' + b" " * 2**12 + b"\n" + b"x" * 2**20
    if name.endswith("gz"):
        lines = gzip.compress(lines)
    (tmp_path / name).write_bytes(lines)
    found = records.find("jsonl", str(tmp_path), "train", "validation")
    read = records.read(found, found.train, ("text",), ())
    assert next(read) == {"text": "a"}
    with pytest.raises(ValueError, match=r"line 2 of .*a\.jsonl.* has more than 4,096"):
        next(read)


def test_a_text_has_a_limit(tmp_path):
    for name in "ab":
        with open(tmp_path / name, "wb") as file:
            file.truncate(2**30 + 1)  # sparse
    config = configs.default_config().data
    config.name, config.path = "text_folder", str(tmp_path)
    with pytest.raises(
        ValueError, match=r"/a has more than 1,073,741,824 bytes.*split"
    ):
        corpora.open_source(config, tmp_path.parent / "data")


def tokenizer(path, **parts):
    model = tokenizers.models.BPE({"a": 0, "b": 1, "</s>": 2}, [])
    made = tokenizers.Tokenizer(model)
    for name, part in parts.items():
        setattr(made, name, part)
    made.save(str(path))
    return path


def test_a_panic_of_a_tokenizer_is_a_line(tmp_path):
    regex = tokenizers.Regex("(a+)+$")
    split = tokenizers.pre_tokenizers.Split(regex, "isolated")
    path = tokenizer(tmp_path / "tokenizer.json", pre_tokenizer=split)
    made = data.read_tokenizer(path)
    assert made.encode("ab").tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"tokenizer\.json fails at a text \(.*retry"):
        made.encode("a" * 40 + "b")


def test_other_errors_are_not_taken_for_a_panic(tmp_path, monkeypatch):
    made = data.read_tokenizer(tokenizer(tmp_path / "tokenizer.json"))
    with pytest.raises(KeyboardInterrupt), data.tokenizers._no_panic("it"):
        raise KeyboardInterrupt
    assert np.array_equal(made.encode("ab"), [0, 1])


REPLACE = tokenizers.normalizers.Replace


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        ({"normalizer": tokenizers.normalizers.Sequence([REPLACE("a", "aa")] * 27)},
         r"a normalizer that makes 1\.34e\+08 characters of one"),
        ({"normalizer": REPLACE("a", "b" * 1001)}, r"normalizer that makes 1e\+03"),
        ({"normalizer": tokenizers.normalizers.Prepend("b" * 2000)}, "makes 2e"),
        ({"decoder": tokenizers.decoders.Replace("a", "b" * 5000)}, "decoder .* 5e"),
        ({"normalizer": tokenizers.normalizers.Sequence(
            [tokenizers.normalizers.NFKC(), REPLACE(" ", "\u2581"), REPLACE("``", '"'),
             tokenizers.normalizers.Prepend("\u2581")])}, None),
    ],
)  # fmt: skip
def test_a_tokenizer_that_makes_long_texts_is_refused(tmp_path, parts, line):
    path = tokenizer(tmp_path / "tokenizer.json", **parts)
    if line is None:
        data.read_tokenizer(path)
        return
    with pytest.raises(ValueError, match=line + ".*: give a tokenizer without"):
        data.read_tokenizer(path)
