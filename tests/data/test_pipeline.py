"""From documents to tokens: packing, caching, and what is refused."""

import itertools
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from acco_jax import data
from acco_jax.data import cache
from acco_jax.run.config import fields as configs
from tests.data.test_batches import END, iterate, take
from tests.examples import examples


@pytest.fixture
def config(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i}.txt").write_text(f"document {i}: the cat sat, l'été {i**5}\n")
    config = configs.default_config().data
    config.name, config.path, config.held_out = "text_folder", str(folder), 0.25
    config.data_dir = str(tmp_path / "data")
    return config


@given(st.lists(st.text(max_size=20), max_size=600))
@examples(30)
def test_packing_keeps_every_document(tmp_path_factory, texts):
    texts = [text.encode(errors="replace").decode() for text in texts]
    path = tmp_path_factory.mktemp("pack") / "tokens"
    with open(path, "wb") as file:
        *counts, spans = cache._pack(texts, data.ByteTokenizer(), np.dtype("u2"), file)
    tokens = np.fromfile(path, "u2")
    assert counts == [len(texts), sum(len(text.encode()) for text in texts)]
    assert spans == []
    assert tokens[0] == END
    assert tokens[-1] == END
    assert len(tokens) == 1 + sum(counts)
    ends = np.flatnonzero(tokens == END)
    between = [tokens[a + 1 : b] for a, b in itertools.pairwise(ends)]
    assert [data.ByteTokenizer().decode(ids) for ids in between] == texts


@pytest.mark.parametrize(("tokenizer", "vocab_size"), [("bytes", None), ("bpe", 280)])
def test_load_corpus(config, tmp_path, tokenizer, vocab_size):
    config.update(tokenizer=tokenizer, vocab_size=vocab_size)
    corpus = data.load_corpus(config, workdir=tmp_path / "work")
    assert corpus.train_documents + corpus.validation_documents == 40
    assert corpus.tokenizer.vocab_size == (vocab_size or 257)
    assert (tmp_path / "work" / "tokenizer.json").exists() == (tokenizer == "bpe")
    end = corpus.tokenizer.end_of_text
    for tokens, documents, size in (
        (corpus.train_tokens, corpus.train_documents, corpus.train_bytes),
        (
            corpus.validation_tokens,
            corpus.validation_documents,
            corpus.validation_bytes,
        ),
    ):
        tokens = np.asarray(tokens)
        assert isinstance(tokens.base, np.memmap)
        assert tokens.dtype == np.uint16
        assert np.sum(tokens == end) == documents + 1
        assert len(corpus.tokenizer.decode(tokens).encode()) == size


def test_our_own_files_are_no_text(config, tmp_path):
    folder = config.path
    for field, workdir in ((None, f"{folder}/runs/x"), ("data_dir", tmp_path / "work")):
        with config.unlocked():
            if field:
                config[field] = f"{folder}/cache"
        with pytest.raises(ValueError, match="which training writes to") as error:
            data.load_corpus(config, workdir=workdir)
        assert "\n" not in str(error.value)


def test_a_checksum_tells_texts_of_one_size_apart(config, tmp_path):
    before = data.load_corpus(config, workdir=tmp_path / "work")
    assert (
        data.load_corpus(config, workdir=tmp_path / "work").checksum == before.checksum
    )
    path = pathlib.Path(config.path) / "7.txt"
    path.write_text(path.read_text().replace("cat", "dog"))
    after = data.load_corpus(config, workdir=tmp_path / "work")
    assert after.train_bytes + after.validation_bytes == (
        before.train_bytes + before.validation_bytes
    )
    assert after.checksum != before.checksum


def test_second_start_reads_the_cache(config, tmp_path, monkeypatch):
    config.update(tokenizer="bpe", vocab_size=280)
    first = data.load_corpus(config, workdir=tmp_path / "work")
    monkeypatch.setattr(data.BpeTokenizer, "encode_batch", None)
    monkeypatch.setattr(data.BpeTokenizer, "train", None)
    for work in ("work", "another"):
        again = data.load_corpus(config, workdir=tmp_path / work)
        assert again.tokenizer.fingerprint == first.tokenizer.fingerprint
        np.testing.assert_array_equal(again.train_tokens, first.train_tokens)


def test_an_interrupted_start_leaves_no_cache(config, tmp_path, monkeypatch):
    encode_batch = data.ByteTokenizer.encode_batch

    def stop(self, texts):
        raise KeyboardInterrupt

    monkeypatch.setattr(data.ByteTokenizer, "encode_batch", stop)
    with pytest.raises(KeyboardInterrupt):
        data.load_corpus(config, workdir=tmp_path)
    monkeypatch.setattr(data.ByteTokenizer, "encode_batch", encode_batch)
    corpus = data.load_corpus(config, workdir=tmp_path)
    assert corpus.train_documents + corpus.validation_documents == 40
    assert len(list((tmp_path / "data" / "tokens").iterdir())) == 1


def test_processes_that_start_together(config, tmp_path):
    program = (
        "import json, sys, ml_collections; from acco_jax import data;"
        "config = ml_collections.ConfigDict(json.loads(sys.argv[1]));"
        "corpus = data.load_corpus(config, workdir=sys.argv[2]);"
        "print(sum(corpus.train_tokens[:].tolist()), corpus.tokenizer.fingerprint)"
    )
    config.update(tokenizer="bpe", vocab_size=280)
    command = [sys.executable, "-c", program, config.to_json(), str(tmp_path / "work")]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    outputs = [process.communicate()[0] for process in processes]
    assert outputs[0]
    assert outputs[0] == outputs[1]
    assert [process.returncode for process in processes] == [0, 0]


def test_data_dir_comes_from_the_environment(config, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCO_DATA_DIR", str(tmp_path / "environment"))
    with config.unlocked():
        config.data_dir = None
    data.load_corpus(config, workdir=tmp_path)
    assert (tmp_path / "environment" / "tokens").is_dir()


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"tokenizer": "words"}, "'words'"),
        ({"tokenizer": "bpe"}, "vocab_size"),
        ({"tokenizer": "bpe", "vocab_size": 100}, "100.*257"),
        ({"vocab_size": 100}, "100.*257"),
        ({"held_out": 0.0}, "0.0"),
        ({"path": "/no/such/folder"}, "/no/such/folder"),
    ],
)
def test_bad_settings_are_refused_in_one_line(config, tmp_path, changes, hint):
    config.update(changes)
    with pytest.raises(ValueError, match=hint) as raised:
        data.load_corpus(config, workdir=tmp_path)
    assert "\n" not in str(raised.value)


def test_a_workdir_keeps_its_vocabulary(config, tmp_path):
    config.update(tokenizer="bpe", vocab_size=280)
    data.load_corpus(config, workdir=tmp_path / "work")
    (tmp_path / "work" / "config.json").touch()  # a run has begun
    config.vocab_size = 270
    with pytest.raises(ValueError, match="270 is not the 280"):
        data.load_corpus(config, workdir=tmp_path / "work")


@pytest.mark.parametrize("begun", [False, True])
def test_only_a_run_keeps_the_bpe_of_other_documents(
    config, tmp_path, monkeypatch, begun
):
    def stop(*args):
        raise KeyboardInterrupt

    work, other = tmp_path / "work", tmp_path / "other"
    other.mkdir()
    for i in range(40):
        (other / f"{i}.txt").write_text(f"{i} dogs run, {i**5} ran\n")
    config.update(tokenizer="bpe", vocab_size=280)
    with monkeypatch.context() as patch:
        patch.setattr(data.BpeTokenizer, "encode_batch", stop)
        with pytest.raises(KeyboardInterrupt):
            data.load_corpus(config, workdir=work)
    left = data.BpeTokenizer.load(work / "tokenizer.json").fingerprint
    if begun:
        (work / "config.json").write_text("{}")
    config.path = str(other)
    found = data.load_corpus(config, workdir=work).tokenizer.fingerprint
    own = data.load_corpus(config, workdir=tmp_path / "new").tokenizer.fingerprint
    assert own != left
    assert found == (left if begun else own)
    assert data.BpeTokenizer.load(work / "tokenizer.json").fingerprint == found


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_tokenizer_that_was_there_before_is_kept(config, tmp_path, kind):
    """It may be the user's own, as the workdir is none of a run."""
    config.update(tokenizer=kind, vocab_size=280 if kind == "bpe" else None)
    for name in ("tokenizer.json", "tokenizer.model"):
        (tmp_path / name).write_text("mine")
    for _ in range(2):
        data.load_corpus(config, workdir=tmp_path)
        for name in ("tokenizer.json", "tokenizer.model"):
            assert (tmp_path / f"{name}.before").read_text() == "mine"
    assert (tmp_path / "tokenizer.json").exists() == (kind == "bpe")


def test_standard_library(config, tmp_path, capfd):
    with config.unlocked():
        config.update(name="stdlib", path=None, held_out=0.05)
    corpus = data.load_corpus(config, workdir=tmp_path)
    start = time.perf_counter()
    data.load_corpus(config, workdir=tmp_path)
    assert time.perf_counter() - start < 2
    assert 10e6 < corpus.train_bytes < 100e6
    assert len(corpus.train_tokens) == corpus.train_bytes + corpus.train_documents + 1
    start = time.perf_counter()
    assert 3.2 < data.bigram_bits_per_byte(corpus) < 3.8
    assert time.perf_counter() - start < 5
    take(iterate(corpus, batch_size=16, length=256), 3)
    assert capfd.readouterr() == ("", "")


def test_no_device_is_touched():
    program = (
        "from acco_jax import data; from jax._src import xla_bridge;"
        "import sys; assert not xla_bridge._backends; assert 'tensorflow' not in "
        "sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
