"""Every source with every tokenizer for every task, and what is refused in one line."""

import csv
import gzip
import itertools
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import sentencepiece
import tensorflow_datasets as tfds
import tokenizers
from pyarrow import parquet

from acco_jax import data
from acco_jax.data import corpora, tasks
from acco_jax.run.config import fields as configs

SAVED = Path(__file__).parent.parent / "recorded" / "huggingface"
RECORDS = [
    {
        "instruction": f"Say {i}.",
        "input": "" if i % 2 else f"politely {i}",
        "output": f"It is {i}. " * (i % 4 + 1),
        "text": f"story {i}, l'été",
    }
    for i in range(24)
]


class OurRecords(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    VERSION = tfds.core.Version("1.0.0")
    url_infos = None

    def _info(self):
        features = {name: tfds.features.Text() for name in RECORDS[0]}
        features = tfds.features.FeaturesDict(features)
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {"train": enumerate(RECORDS)}

    def _generate_examples(self):
        raise NotImplementedError


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The same records as every kind of source: (name, path)."""
    root = tmp_path_factory.mktemp("sources")
    (root / "texts").mkdir()
    for i, record in enumerate(RECORDS):
        (root / "texts" / f"{i}.md").write_text(record["text"])
    lines = "".join(json.dumps(record) + "\n" for record in RECORDS)
    (root / "all.jsonl").write_text(lines)
    with open(root / "all.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, RECORDS[0])
        writer.writeheader()
        writer.writerows(RECORDS)
    (root / "zipped").mkdir()
    with gzip.open(root / "zipped" / "all.jsonl.gz", "wt") as file:
        file.write(lines)
    (root / "split").mkdir()
    for split, part in ("train", RECORDS[:18]), ("validation", RECORDS[18:]):
        table = pa.Table.from_pylist(part)
        parquet.write_table(table, root / "split" / f"{split}-00000.parquet")
    with corpora._quiet():
        OurRecords(data_dir=root / "tfds").download_and_prepare(
            file_format="array_record"
        )
    return root, {
        "text_folder": ("text_folder", root / "texts"),
        "jsonl": ("jsonl", root / "all.jsonl"),
        "jsonl.gz": ("jsonl", root / "zipped"),
        "csv": ("csv", root / "all.csv"),
        "parquet": ("parquet", root / "split" / "*.parquet"),
        "huggingface": ("huggingface", SAVED / "dict"),
        "tfds": ("our_records", None),
    }


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The files of tokenizers that others made."""
    root = tmp_path_factory.mktemp("tokenizers")
    texts = [json.dumps(record) for record in RECORDS] + list(map(chr, range(32, 127)))
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=alphabet,
        show_progress=False,
        special_tokens=["<pad>", "<|endoftext|>"],
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.enable_truncation(4)
    bpe.enable_padding(length=9)
    bpe.post_processor = tokenizers.processors.TemplateProcessing(
        single="<pad> $A", special_tokens=[("<pad>", bpe.token_to_id("<pad>"))]
    )
    bpe.save(str(root / "tokenizer.json"))
    with open(root / "pieces.model", "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=file,
            vocab_size=400,
            byte_fallback=True,
            minloglevel=2,
        )
    return {"json": root / "tokenizer.json", "model": root / "pieces.model"}


def config_of(sources, name="jsonl", **changes):
    root, known = sources
    config = configs.default_config().data
    config.name, path = known[name]
    config.path = None if path is None else str(path)
    config.held_out, config.data_dir = 0.25, str(root / "tfds")
    config.update(changes)
    return config


def with_tokenizer(config, kind, files):
    config.tokenizer = str(files.get(kind, kind))
    config.vocab_size = 280 if kind == "bpe" else None
    return config


SOURCES = ("text_folder", "jsonl", "jsonl.gz", "csv", "parquet", "huggingface", "tfds")
TOKENIZERS = ("bytes", "bpe", "json", "model")


@pytest.mark.parametrize("task", ["pretrain", "instruct"])
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("source", SOURCES)
def test_every_source_tokenizer_and_task(
    sources, files, tmp_path, source, tokenizer, task
):
    config = with_tokenizer(config_of(sources, source, task=task), tokenizer, files)
    if source == "text_folder" and task == "instruct":
        with pytest.raises(ValueError, match="'text_folder' has no columns"):
            data.load_corpus(config, workdir=tmp_path)
        return
    corpus = data.load_corpus(config, workdir=tmp_path)
    assert corpus.train_documents + corpus.validation_documents == len(RECORDS)
    # sentencepiece makes spaces of new lines
    spelled = " ".join(corpus.tokenizer.decode(corpus.train_tokens).split())
    field = {"pretrain": "text", "instruct": "instruction"}[task]
    found = [record for record in RECORDS if record[field] in spelled]
    assert len(found) == corpus.train_documents
    length = 8 if task == "pretrain" else 400
    iterator = data.train_iterator(corpus, length=length, batch_size=2, seed=0)
    batch = next(iterator)
    if task == "pretrain":
        assert set(batch) == {"tokens"} and batch["tokens"].shape == (2, 9)
        assert batch["tokens"].max() < corpus.tokenizer.vocab_size
        return
    end = corpus.tokenizer.end_of_text
    for tokens, mask in zip(batch["tokens"], batch["mask"], strict=True):
        learnt = tokens[1:][mask == 1]
        assert tokens[0] == learnt[-1] == end
        answer = corpus.tokenizer.decode(learnt[:-1])
        prompt = corpus.tokenizer.decode(tokens[1:][: int(np.argmax(mask))])
        record = next(r for r in RECORDS if r["instruction"] in prompt)
        assert answer.split() == record["output"].split()
        given = tasks.alpaca_prompt(record["instruction"], record["input"])
        assert prompt.split() == given.split()


def test_the_prompts_are_alpacas():
    assert tasks.alpaca_prompt("Do it.", "This.") == (
        "Below is an instruction that describes a task, paired with an input that "
        "provides further context. Write a response that appropriately completes the "
        "request.\n\n### Instruction:\nDo it.\n\n### Input:\nThis.\n\n### Response:\n"
    )
    assert tasks.alpaca_prompt("Do it.") == (
        "Below is an instruction that describes a task. Write a response that "
        "appropriately completes the request.\n\n### Instruction:\nDo it.\n\n"
        "### Response:\n"
    )


def test_splits_are_those_of_the_files(sources):
    for source in ("parquet", "huggingface"):
        config = config_of(sources, source)
        opened = corpora.open_source(config, Path(config.data_dir))
        texts = [list(opened.train()), list(opened.validation())]
        assert [len(part) for part in texts] == [18, 6]
        if source == "parquet":
            assert texts[0] == [r["text"] for r in RECORDS[:18]]
    config = config_of(sources, "huggingface", path=str(SAVED / "single"))
    opened = corpora.open_source(config, Path(config.data_dir))
    held_out = list(opened.validation())
    assert 0 < len(held_out) < 12 and not set(held_out) & set(opened.train())


def test_changed_records_are_read_anew(sources, tmp_path):
    path = tmp_path / "records" / "all.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(r) + "\n" for r in RECORDS))
    config = config_of(sources, path=str(path), data_dir=str(tmp_path / "data"))
    before = data.load_corpus(config, workdir=tmp_path / "work")
    path.write_text(path.read_text().replace("story", "storm"))
    after = data.load_corpus(config, workdir=tmp_path / "work")
    assert after.checksum != before.checksum
    assert after.train_bytes + after.validation_bytes == (
        before.train_bytes + before.validation_bytes
    )


# What is refused


def truncated(path):
    path.write_bytes(path.read_bytes()[:100])


def spoil(folder, what):
    """Make a wrong source in a folder: what must be set to read it."""
    folder.mkdir()
    lines = "".join(json.dumps(record) + "\n" for record in RECORDS)
    table = pa.Table.from_pylist(RECORDS)
    for i in range(3):
        (folder / f"{i}.txt").write_text(f"text {i}")
    path = {"path": str(folder)}
    match what:
        case "jsonl among text" | "csv among text" | "parquet among text":
            suffix = what.split()[0]
            (folder / f"a.{suffix}").write_text(lines)
            return path | {"name": "text_folder"}
        case "saved among text":
            shutil.copy(SAVED / "single" / "state.json", folder)
            return path | {"name": "text_folder"}
        case "not UTF-8":
            (folder / "a.txt").write_bytes("été".encode("latin-1"))
            return path | {"name": "text_folder"}
        case "list":
            (folder / "alpaca.json").write_text(json.dumps(RECORDS))
            return {"name": "jsonl", "path": str(folder / "alpaca.json")}
        case "no object":
            (folder / "a.jsonl").write_text(lines + "[1]\n")
            return path | {"name": "jsonl"}
        case "no column":
            (folder / "a.jsonl").write_text(lines)
            return path | {"name": "jsonl", "text_feature": "story"}
        case "no instructions":
            parquet.write_table(table.select(["text"]), folder / "a.parquet")
            return path | {"name": "parquet", "task": "instruct"}
        case "cut":
            parquet.write_table(table, folder / "a.parquet")
            truncated(folder / "a.parquet")
            return path | {"name": "parquet"}
        case "null":
            table = pa.Table.from_pylist([*RECORDS, {**RECORDS[0], "text": None}])
            parquet.write_table(table, folder / "a.parquet")
            return path | {"name": "parquet"}
        case "not saved":
            return path | {"name": "huggingface"}
        case "shard missing" | "shard cut":
            shutil.copytree(SAVED / "single", folder / "saved")
            shard = next((folder / "saved").glob("*.arrow"))
            shard.unlink() if what == "shard missing" else truncated(shard)
            return {"name": "huggingface", "path": str(folder / "saved")}
        case "no split":
            return {"name": "huggingface", "path": str(SAVED / "dict"),
                    "train_split": "test"}  # fmt: skip
        case "trained on without splits" | "held out without splits":
            split = "train_split" if "trained" in what else "validation_split"
            return {"name": "huggingface", "path": str(SAVED / "single"),
                    split: "test"}  # fmt: skip
        case "no such files":
            (folder / "a.jsonl").write_text(lines)
            return path | {"name": "jsonl", "validation_split": "dev"}
        case "nothing":
            return {"name": "jsonl", "path": str(folder / "*.jsonl")}
        case "no path":
            return {"name": "parquet"}


REFUSED = {
    "jsonl among text": r"a\.jsonl is not text but data: set data\.name='jsonl'",
    "csv among text": r"a\.csv is not text but data: set data\.name='csv'",
    "parquet among text": r"a\.parquet is not text but data: set data\.name='parquet'",
    "saved among text": r"state\.json is not text but data: .*name to 'huggingface'",
    "not UTF-8": r"a\.txt is not UTF-8 text: move it out",
    "list": r"alpaca\.json is not \.jsonl .*: if it has one .*, name it \.jsonl, ",
    "no object": r"line 25 of .*a\.jsonl is not a JSON object: write one a line",
    "no column": r"line 1 of .*a\.jsonl has no text in 'story': set .*'text'\]",
    "no instructions": r"a\.parquet has no text in 'instruction', .*\['text'\]: rename",
    "cut": r"a\.parquet is not a complete parquet file \(.*\): restore it",
    "null": r"row 25 of .*a\.parquet has null in 'text': leave such records",
    "not saved": r"is not a folder that datasets' save_to_disk wrote .*: save it so",
    "shard missing": r"\.arrow is missing: restore it",
    "shard cut": r"\.arrow is not a complete huggingface file \(.*\): restore it",
    "no split": r"has no split 'test': set data\.train_split .*\['train', 'valid",
    "trained on without splits": r"single is a Dataset without splits, but "
    r"data\.train_split is 'test' and .* 'validation': set them to 'train' and",
    "held out without splits": r"single is a Dataset without splits, but .* is 'train' "
    r"and data\.validation_split 'test': set them to 'train' and 'validation'",
    "no such files": r"no file of .* has 'dev' in its name: set data\.validation_split",
    "nothing": r"no \.jsonl files at .*: set data\.path to a file, a folder",
    "no path": r"data\.name='parquet' needs a path: set data\.path",
}


@pytest.mark.parametrize("what", REFUSED)
def test_wrong_sources_are_refused_in_one_line(sources, tmp_path, what):
    config = configs.default_config().data
    config.data_dir, config.held_out = str(tmp_path / "data"), 0.25
    config.update(spoil(tmp_path / "folder", what))
    with pytest.raises(ValueError, match=REFUSED[what]) as error:
        data.load_corpus(config, workdir=tmp_path / "work")
    assert "\n" not in str(error.value)


def test_no_code_of_a_data_set_is_run(sources, tmp_path, monkeypatch):
    root, _ = sources
    shutil.copytree(root / "tfds" / "our_records", tmp_path / "data" / "our_records")
    path = next((tmp_path / "data").rglob("features.json"))
    text = path.read_text()
    name = "tensorflow_datasets.core.features.text_feature.Text"
    assert name in text
    path.write_text(text.replace(name, "evil.Text"))
    (tmp_path / "evil.py").write_text("raise SystemExit('code was run')")
    monkeypatch.syspath_prepend(tmp_path)
    config = config_of(sources, "tfds", data_dir=str(tmp_path / "data"))
    with pytest.raises(ValueError, match=r"features.json asks for 'evil\.Text'"):
        data.load_corpus(config, workdir=tmp_path / "work")
    assert "evil" not in sys.modules


# Tokenizers of others


@pytest.mark.parametrize("kind", ["json", "model"])
def test_no_text_makes_the_end_of_text(files, kind):
    tokenizer = data.read_tokenizer(files[kind])
    end = {"json": "<|endoftext|>", "model": "</s>"}[kind]
    text = f"one{end}two {end}{end}"
    ids = tokenizer.encode(text)
    assert tokenizer.end_of_text not in ids and len(ids) > 4
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.end_of_text]) == text
    assert tokenizer.vocab_size == {"json": 300, "model": 400}[kind]


def test_an_end_of_text_that_is_a_word_is_taken_apart(tmp_path):
    vocabulary = [("<unk>", 0.0), ("</s>", 0.0), *((c, -1.0) for c in "</s>abc")]
    model = tokenizers.Tokenizer(tokenizers.models.Unigram(vocabulary, 0, False))
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = data.read_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.end_of_text == 1
    ids = tokenizer.encode("a</s>b</s></s>")
    assert "".join(map(model.id_to_token, ids)) == "a</s>b</s></s>"
    assert 1 not in ids


@pytest.mark.parametrize(
    ("kind", "end"),
    [
        ("json", "e"),
        ("json", "\u00c3"),  # the first byte of many characters
        ("model", "e"),
        ("model", "<0xC3>"),
        ("model", "st"),
    ],
)
def test_an_end_of_text_that_texts_are_made_of_is_refused(files, kind, end):
    """A line break as the end would take all of them out of the texts."""
    with pytest.raises(ValueError, match=r"of texts' own characters.*set data\.end_of"):
        data.read_tokenizer(files[kind], end)


def test_the_end_of_text_is_named_beside_the_file_or_by_hand(files, tmp_path):
    shutil.copy(files["json"], tmp_path / "tokenizer.json")
    path = tmp_path / "tokenizer.json"
    known = data.read_tokenizer(path).end_of_text
    beside = tmp_path / "special_tokens_map.json"
    beside.write_text(json.dumps({"eos_token": {"content": "<pad>"}}))
    other = data.read_tokenizer(path)
    assert other.end_of_text == 0 != known
    named = data.read_tokenizer(path, "<|endoftext|>")
    assert named.end_of_text == known
    assert other.fingerprint != named.fingerprint
    with pytest.raises(ValueError, match=r"no token '<end>': set data\.end_of_text"):
        data.read_tokenizer(path, "<end>")


def test_a_tokenizer_without_a_known_end_is_refused(tmp_path):
    words = tokenizers.models.WordLevel({"a": 0, "END": 1}, "a")
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(words).save(str(path))
    with pytest.raises(ValueError, match="no end of text that is known: set") as error:
        data.read_tokenizer(path)
    assert "\n" not in str(error.value)
    assert data.read_tokenizer(path, "END").end_of_text == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", r"is not a tokenizer\.json \(.*\): give"),
        ("a.model", "nothing", "is not a SentencePiece model: give"),
        ("b.model", None, "no tokenizer .*b.model: set data.tokenizer"),
    ],
)
def test_wrong_tokenizers_are_refused_in_one_line(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        data.read_tokenizer(tmp_path / name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["json", "model"])
def test_a_workdir_keeps_its_tokenizer(sources, files, tmp_path, kind):
    path = tmp_path / files[kind].name
    shutil.copy(files[kind], path)
    config = config_of(sources, tokenizer=str(path))
    first = data.load_corpus(config, workdir=tmp_path / "work")
    (tmp_path / "work" / "config.json").touch()  # a run has begun
    path.unlink()  # the copy is enough
    again = data.load_corpus(config, workdir=tmp_path / "work")
    assert again.tokenizer.fingerprint == first.tokenizer.fingerprint
    other = files["model" if kind == "json" else "json"]
    changes = [{"tokenizer": "bytes"}, {"tokenizer": "bpe", "vocab_size": 300},
               {"tokenizer": str(other)}]  # fmt: skip
    for change in changes:
        config = config_of(sources, **change)
        with pytest.raises(ValueError, match=r"is not the one that .* keeps a copy"):
            data.load_corpus(config, workdir=tmp_path / "work")


def test_a_start_that_was_refused_leaves_no_tokenizer(sources, files, tmp_path):
    """Each kind after each other one, until a run has begun."""
    kinds = [
        *({"tokenizer": str(files[kind])} for kind in ("json", "model")),
        *({"tokenizer": "bpe", "vocab_size": size} for size in (280, 270)),
        {"tokenizer": "bytes"},
    ]
    work = tmp_path / "work"
    for one, other in itertools.permutations(kinds, 2):
        for change in (one, other):
            config = config_of(sources, **change)
            corpus = data.load_corpus(config, workdir=work)
            kept = data.kept_tokenizer(config, work)
            assert kept.fingerprint == corpus.tokenizer.fingerprint
        (work / "config.json").touch()
        again = data.load_corpus(config, workdir=work)
        assert again.tokenizer.fingerprint == kept.fingerprint
        (work / "config.json").unlink()


def test_a_trained_tokenizer_is_not_taken_for_a_file(sources, files, tmp_path):
    config = config_of(sources, tokenizer="bpe", vocab_size=280)
    data.load_corpus(config, workdir=tmp_path)
    (tmp_path / "config.json").touch()
    config = config_of(sources, tokenizer=str(files["json"]))
    with pytest.raises(ValueError, match=r"is not the 'bpe' of .*tokenizer\.json"):
        data.load_corpus(config, workdir=tmp_path)
