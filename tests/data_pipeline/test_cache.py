"""Damaged tokens are refused, not trained on."""

import json
import platform

import pytest
from ml_collections import ConfigDict

from acco_jax import data
from acco_jax.data import cache
from acco_jax.runner.config import default_config


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

    corpus.folder = folder
    corpus()
    return corpus


def overwritten(folder):
    path = folder / "train.bin"
    content = bytearray(path.read_bytes())
    content[500:1950] = bytes(1450)
    path.write_bytes(content)


def halved(folder):
    path = folder / "train.bin"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty_counts(folder):
    (folder / "counts.json").write_text("")


def other_counts(folder):
    (folder / "counts.json").write_text('{"dtype": 7}')


def removed(folder):
    (folder / "validation.bin").unlink()


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (overwritten, ""),
        (halved, "/train.bin"),
        (empty_counts, "/counts.json"),
        (other_counts, "/counts.json"),
        (removed, "/validation.bin"),
    ],
)
def test_damage_is_one_line_with_the_files_name(load, damage, named):
    folder = load.folder()
    damage(folder)
    with pytest.raises(ValueError, match="is damaged: remove the folder") as error:
        load()
    assert str(error.value).startswith(f"{folder}{named} is")
    assert "\n" not in str(error.value)


def test_checksums_are_compared_once_on_each_machine(load, monkeypatch):
    folder, calls = load.folder(), []
    checksum = cache._checksum
    monkeypatch.setattr(cache, "_checksum", lambda f: calls.append(f) or checksum(f))
    load()
    assert calls == []  # the first time was when the tokens were written
    stamp = folder / f"verified.{platform.node()}.json"
    assert len(json.loads(stamp.read_text())) == 2
    (folder / "train.bin").touch()
    load()
    load()
    assert calls == [folder]
    monkeypatch.setattr(platform, "node", lambda: "another")
    load()
    assert calls == [folder] * 2
