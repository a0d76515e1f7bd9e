"""Damaged tokens are refused, not trained on."""

import json
import os
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_collections import ConfigDict

from acco_jax import data
from acco_jax.data import cache, stored
from acco_jax.run.config.fields import default_config


@pytest.fixture
def load(tmp_path):
    """load(): the corpus of a folder of text; its tokens are in load.folder()."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(20):
        (texts / f"{i}.txt").write_text(f"document {i} " * 200)
    config = ConfigDict(default_config().data)
    config.name, config.path = "text_folder", str(texts)
    config.data_dir = str(tmp_path / "data")

    def corpus():
        return data.load_corpus(config, workdir=tmp_path / "work")

    def folder():
        (found,) = (tmp_path / "data" / "tokens").iterdir()
        return found

    corpus.folder, corpus.config = folder, config
    corpus()
    return corpus


def halved(folder):
    path = folder / "train.bin"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty_counts(folder):
    (folder / "counts.json").write_text("")


def other_counts(folder):
    (folder / "counts.json").write_text('{"dtype": 7}')


def one_digit(folder):
    path = folder / "counts.json"
    size = str(json.loads(path.read_text())["counts"]["validation_bytes"])
    path.write_text(path.read_text().replace(size, size[:-1] + "7"))
    assert size[-1] != "7"


def removed(folder):
    (folder / "validation.bin").unlink()


def flip(path, place, bit=0):
    """Changes one bit of a file, and keeps its time."""
    stat = path.stat()
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    with path.open("r+b") as file:  # in place
        file.write(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def other_sums(folder):
    flip(folder / "train.sums.npy", -1)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (halved, "/train.bin"),
        (empty_counts, "/counts.json"),
        (other_counts, "/counts.json"),
        (one_digit, "/counts.json"),
        (removed, "/validation.bin"),
        (other_sums, ""),
    ],
)
def test_damage_is_one_line_with_the_files_name(load, damage, named):
    folder = load.folder()
    damage(folder)
    with pytest.raises(ValueError, match="is damaged: remove the folder") as error:
        load()
    assert str(error.value).startswith(f"{folder}{named} is")
    assert "\n" not in str(error.value)


def test_each_bit_of_the_counts_is_known(load):
    """A changed bit is seen, or changes nothing that is read."""
    folder, path = load.folder(), load.folder() / "counts.json"
    whole, content = cache.read_counts(folder), path.read_bytes()
    lines = []
    for place in range(len(content)):
        for bit in (0, 3, 6):
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            path.write_bytes(changed)
            try:
                assert cache.read_counts(folder) == whole
            except ValueError as error:
                lines.append(str(error))
    assert len(lines) > 2 * len(content)
    assert all(line.startswith(f"{path} is damaged") for line in lines)


def train(corpus, **options):
    return data.train_iterator(
        corpus, length=64, batch_size=32, seed=0,
        prefetch=False, **options,
    )  # fmt: skip


def everything(corpus):
    """Reads each training row once, and the held-out ones."""
    batches = train(corpus)
    for _ in range(data.rows_per_epoch(corpus, 64) // 32 + 1):
        next(batches)
    for _ in data.validation_batches(corpus, length=64, batch_size=4):
        pass


READS = {
    "rows": everything,
    "rows of workers' own": lambda corpus: train(corpus, skew=0.5, workers=2),
    "the bigram": data.bigram_bits_per_byte,
    "an array": lambda corpus: [
        np.asarray(x) for x in (corpus.train_tokens, corpus.validation_tokens)
    ],
}


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize(("place", "bit"), [(0, 7), (4096, 0), (-1, 7)])
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_bit_that_changes_in_place_is_never_read(load, read, split, place, bit):
    """The time of the file stays; ids may lie beyond the vocabulary then."""
    if read is READS["rows of workers' own"] and split == "validation":
        split = "train"
    corpus, path = load(), load.folder() / f"{split}.bin"
    if place == 4096 and split == "validation":
        place = 2048
    read(corpus)
    flip(path, place, bit)
    for again in (corpus, load()):  # while it is open, and before
        with pytest.raises(ValueError, match=f"{split}.bin is damaged: remove"):
            read(again)
    flip(path, place, bit)
    read(load())


def test_a_file_that_was_cut_while_it_is_open(load):
    corpus, path = load(), load.folder() / "train.bin"
    os.truncate(path, 5000)
    with pytest.raises(ValueError, match=r"train\.bin is damaged"):
        everything(corpus)


@given(
    size=st.sampled_from([1, 7, 1023, 1024, 1025, 2048, 5000]),
    span=st.tuples(*[st.none() | st.integers(-5100, 5100)] * 2),
    step=st.sampled_from([None, 1, 3, -1]),
    dtype=st.sampled_from(["uint16", "uint32"]),
)
def test_slices_are_those_of_an_array(tmp_path_factory, size, span, step, dtype):
    path = tmp_path_factory.mktemp("stored") / "tokens"
    tokens = np.random.default_rng(size).integers(0, 2**16, size).astype(dtype)
    tokens.tofile(path)
    kept = stored.Tokens(path, dtype, stored.block_sums(path))
    assert len(kept) == size and kept[-1] == tokens[-1]
    part = slice(*span, step)
    assert kept[part].dtype == dtype
    np.testing.assert_array_equal(kept[part], tokens[part])
    np.testing.assert_array_equal(kept, tokens)


INFO = {
    "a bit of a name": (b'"train"', b'"trbin"'),
    "no UTF-8": (b'"train"', b'"tr\xffin"'),
    "fewer documents": (b'"shardLengths": [', b'"shardLengths": ["1", '),
    "no JSON": (b"{", b"["),
    "another type": (b'"splits": [', b'"splits": [7, '),
    "nothing": (None, b""),
}


@pytest.mark.parametrize("kept", [True, False], ids=["tokens kept", "tokens removed"])
@pytest.mark.parametrize(("old", "new"), INFO.values(), ids=INFO)
def test_damage_to_what_tfds_says_is_one_line(load, tmp_path, old, new, kept):
    (path,) = (tmp_path / "data" / "text_folder").rglob("dataset_info.json")
    content = path.read_bytes()
    assert old is None or old in content
    path.write_bytes(new if old is None else content.replace(old, new, 1))
    if not kept:
        shutil.rmtree(load.folder())
    line = r"dataset_info\.json or .*: remove that folder, and"
    with pytest.raises(ValueError, match=line) as error:
        load()
    assert str(error.value).startswith(str(path.parent))
    assert "\n" not in str(error.value) and "codec" not in str(error.value)
    shutil.rmtree(path.parent)  # what the line says
    load()


def test_documents_have_a_digest_wherever_they_lie(load, tmp_path):
    before = load()
    (tmp_path / "texts").rename(tmp_path / "moved")
    load.config.path = str(tmp_path / "moved")
    assert load().documents == before.documents != ""
    text = tmp_path / "moved" / "7.txt"
    text.write_text(text.read_text().replace("document", "documenT", 1))
    assert load().documents != before.documents
