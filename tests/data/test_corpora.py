"""Documents: what is read, how it is split, what is refused."""

import os
import shutil
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds

from acco_jax import data
from acco_jax.data import corpora
from acco_jax.run.config import fields as configs


def source_config(**changes):
    config = configs.default_config().data
    config.name, config.held_out = "text_folder", 0.2
    config.update(changes)
    return config


def write_folder(folder, documents):
    for path, content in documents.items():
        path = folder / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(folder)


@pytest.fixture
def folder(tmp_path):
    return write_folder(
        tmp_path / "text",
        {f"{i % 3}/document {i}.md": f"text {i}\r\nÉté\n" for i in range(40)},
    )


@pytest.fixture
def data_dir(tmp_path):
    return tmp_path / "data"


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """Fail on any use of the network or of a TensorFlow that is installed."""

    def refuse(*args):
        raise AssertionError(f"the network was touched: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    write_folder(tmp_path / "packages", {"tensorflow/__init__.py": "raise TabError"})
    monkeypatch.syspath_prepend(tmp_path / "packages")


def refusal(config, data_dir):
    with pytest.raises(ValueError, match=r": |no |needs ") as raised:
        corpora.open_source(config, data_dir)
    message = str(raised.value)
    assert "\n" not in message
    return message


class TinyStoriesOfOurs(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    VERSION = tfds.core.Version("1.2.3")
    url_infos = None
    stories = tuple(f"story {i}" for i in range(100))

    def _info(self):
        features = {"story": tfds.features.Text(), "i": np.int32}
        features = tfds.features.FeaturesDict(features)
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {"train": self._examples(), "test": self._examples("test ")}

    def _examples(self, prefix=""):
        for i, story in enumerate(self.stories):
            yield i, {"story": prefix + story, "i": i}

    _generate_examples = _examples


@pytest.fixture
def prepared(data_dir):
    """A data set that somebody prepared, whose builder tfds does not know."""
    with corpora._quiet():
        builder = TinyStoriesOfOurs(data_dir=data_dir)
        builder.download_and_prepare(file_format="array_record")
    return source_config(name="tiny_stories_of_ours", text_feature="story")


def test_stdlib_needs_neither_network_nor_tensorflow_and_is_silent(
    data_dir, offline, capfd
):
    source = corpora.open_source(source_config(name="stdlib", held_out=0.05), data_dir)
    train, validation = list(source.train()), list(source.validation())
    assert 5e6 < sum(map(len, train)) < 1e8
    assert 0.02 < len(validation) / (len(train) + len(validation)) < 0.08
    inspect_source = Path(os.__file__).with_name("inspect.py").read_bytes().decode()
    assert inspect_source in train + validation
    assert capfd.readouterr() == ("", "")


def test_stdlib_has_no_installed_packages():
    config = corpora.stdlib_config()
    assert "argparse.py" in config.train
    assert not any("site-packages" in path for path in config.train)
    assert "{}.{}.{}".format(*sys.version_info) in config.name


def test_stdlib_without_sources_is_refused(tmp_path, monkeypatch, data_dir):
    monkeypatch.setattr(
        corpora.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)}
    )
    message = refusal(source_config(name="stdlib"), data_dir)
    assert str(tmp_path) in message
    assert "text_folder" in message


def test_folder_is_split_by_document(folder, data_dir, offline, capfd):
    source = corpora.open_source(source_config(path=folder), data_dir)
    train, validation = list(source.train()), list(source.validation())
    assert sorted(train + validation) == sorted(f"text {i}\r\nÉté\n" for i in range(40))
    assert 1 <= len(validation) <= 20
    again = corpora.open_source(source_config(path=folder), data_dir)
    assert again.fingerprint == source.fingerprint
    assert list(again.train()) == train
    assert list(again.validation()) == validation
    assert capfd.readouterr() == ("", "")


def test_split_does_not_depend_on_other_documents_or_place(folder, tmp_path, data_dir):
    first = corpora.open_source(source_config(path=folder), data_dir)
    held_out = set(first.validation())
    copy = write_folder(
        tmp_path / "elsewhere",
        {f"{i % 3}/document {i}.md": f"text {i}\r\nÉté\n" for i in range(30)},
    )
    second = corpora.open_source(source_config(path=copy), data_dir)
    assert second.fingerprint != first.fingerprint
    assert set(second.validation()) == held_out - set(first.train()) - {
        f"text {i}\r\nÉté\n" for i in range(30, 40)
    }


@pytest.mark.parametrize("held_out", [1e-9, 1 - 1e-9])
def test_each_split_has_a_document(folder, data_dir, held_out):
    source = corpora.open_source(
        source_config(path=folder, held_out=held_out), data_dir
    )
    sizes = [len(list(source.train())), len(list(source.validation()))]
    assert sorted(sizes) == [1, 39]


def test_changed_folder_is_prepared_anew(folder, data_dir):
    before = corpora.open_source(source_config(path=folder), data_dir)
    Path(folder, "new.txt").write_text("something new")
    after = corpora.open_source(source_config(path=folder), data_dir)
    assert after.fingerprint != before.fingerprint
    assert "something new" in [*after.train(), *after.validation()]
    Path(folder, "new.txt").write_text("something old")  # of the same size
    later = corpora.open_source(source_config(path=folder), data_dir)
    assert "something old" in [*later.train(), *later.validation()]


def test_only_text_is_read(tmp_path, data_dir):
    folder = write_folder(
        tmp_path / "mixed",
        {
            "a.txt": "first",
            "b": "second",
            "c.py": "third",
            "blank.txt": " \n",
            ".git/config": "hidden",
            ".hidden": "hidden",
            "site-packages/x.py": "installed",
        },
    )
    source = corpora.open_source(source_config(path=folder), data_dir)
    texts = sorted([*source.train(), *source.validation()])
    assert texts == ["first", "second", "third"]


def test_names_that_are_not_utf8(tmp_path, data_dir):
    folder = tmp_path / "names"
    folder.mkdir()
    for i in range(4):
        with open(os.path.join(os.fsencode(folder), b"\xff%d" % i), "w") as file:
            file.write(f"text {i}")
    source = corpora.open_source(source_config(path=str(folder)), data_dir)
    texts = sorted([*source.train(), *source.validation()])
    assert texts == [f"text {i}" for i in range(4)]


def test_bad_folders_are_refused(tmp_path, data_dir):
    assert "path" in refusal(source_config(), data_dir)
    missing = str(tmp_path / "missing")
    assert missing in refusal(source_config(path=missing), data_dir)
    file = tmp_path / "file"
    file.write_text("text")
    assert str(file) in refusal(source_config(path=str(file)), data_dir)
    empty = write_folder(tmp_path / "empty", {"b": ""})
    message = refusal(source_config(path=empty), data_dir)
    assert empty in message
    assert "0 files" in message
    single = write_folder(tmp_path / "single", {"a.txt": "alone"})
    assert "1 files" in refusal(source_config(path=single), data_dir)
    write_folder(tmp_path / "single", {"b.txt": "no longer"})
    corpora.open_source(source_config(path=single), data_dir)  # no half-made cache


def test_data_set_that_is_not_there(data_dir, offline):
    message = refusal(source_config(name="tiny_shakespear"), data_dir)
    assert "'tiny_shakespear'" in message
    assert "'tiny_shakespeare'" in message
    message = refusal(source_config(name="mnist/no_such_config"), data_dir)
    assert "mnist/no_such_config" in message


def test_data_set_that_cannot_be_prepared(data_dir, monkeypatch):
    def fail(self, **kwargs):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(TinyStoriesOfOurs, "download_and_prepare", fail)
    with pytest.raises(ValueError, match=r"no route.*array_record") as raised:
        corpora._prepare(TinyStoriesOfOurs(data_dir=data_dir), "ours")
    assert "\n" not in str(raised.value)


def test_a_disk_that_is_full_of_rows_is_one_line(data_dir):
    class Full:
        def download_and_prepare(self, **_):
            raise RuntimeError("write() failed: No space left on device\nat byte 7")

    with pytest.raises(OSError, match=r"'stdlib'.*No space left.*data_dir") as error:
        corpora._prepare(Full(), "stdlib")
    assert "\n" not in str(error.value)


def test_named_data_set_without_held_out_split_holds_out_documents(
    data_dir, monkeypatch
):
    examples = {"train": TinyStoriesOfOurs._examples}
    monkeypatch.setattr(
        TinyStoriesOfOurs,
        "_split_generators",
        lambda self, _: {split: f(self) for split, f in examples.items()},
    )
    with corpora._quiet():
        builder = TinyStoriesOfOurs(data_dir=data_dir)
        builder.download_and_prepare(file_format="array_record")
    config = source_config(name="tiny_stories_of_ours", text_feature="story")
    source = corpora.open_source(config, data_dir)
    train, validation = list(source.train()), list(source.validation())
    assert sorted(train + validation) == sorted(TinyStoriesOfOurs.stories)
    assert 5 < len(validation) < 40
    config.held_out = 0.5
    more = corpora.open_source(config, data_dir)
    assert more.fingerprint != source.fingerprint
    assert set(more.validation()) > set(validation)


def test_named_data_set_without_validation_holds_out_its_test_split(prepared, data_dir):
    source = corpora.open_source(prepared, data_dir)
    assert set(source.train()) == set(TinyStoriesOfOurs.stories)
    assert set(source.validation()) == {f"test {s}" for s in TinyStoriesOfOurs.stories}


def test_a_named_split_that_is_trained_on_is_not_held_out(prepared, data_dir):
    prepared.train_split = "test"
    source = corpora.open_source(prepared, data_dir)
    train, validation = {*source.train()}, {*source.validation()}
    assert train | validation == {f"test {s}" for s in TinyStoriesOfOurs.stories}
    assert validation and not train & validation


@pytest.mark.parametrize("train", ["train+test", "train + test[:50%]"])
def test_splits_that_are_trained_on_together_are_not_held_out(
    prepared, data_dir, train
):
    prepared.train_split = train
    source = corpora.open_source(prepared, data_dir)
    train, validation = {*source.train()}, {*source.validation()}
    assert validation and not train & validation


def test_a_data_set_without_a_path_is_not_given_one(prepared, data_dir, tmp_path):
    prepared.path = str(tmp_path)
    for name in (prepared.name, "stdlib"):
        prepared.name = name
        with pytest.raises(ValueError, match=r"but data.name='\w+' does not read it"):
            corpora.open_source(prepared, data_dir)


def test_a_named_data_set_that_is_prepared_again_is_read_again(
    prepared, data_dir, tmp_path, monkeypatch
):
    prepared.data_dir = str(data_dir)
    before = data.load_corpus(prepared, workdir=tmp_path / "work")
    first = corpora.open_source(prepared, data_dir).fingerprint
    assert corpora.open_source(prepared, data_dir).fingerprint == first
    moved = tmp_path / "moved"
    shutil.copytree(data_dir, moved, copy_function=shutil.copyfile)  # with other times
    prepared.data_dir = str(moved)
    copied = data.load_corpus(prepared, workdir=tmp_path / "work")
    assert copied.documents == before.documents  # by which a run knows them
    shutil.rmtree(moved / "tiny_stories_of_ours")
    stories = tuple(s.replace("story", "storm") for s in TinyStoriesOfOurs.stories)
    monkeypatch.setattr(TinyStoriesOfOurs, "stories", stories)
    with corpora._quiet():
        builder = TinyStoriesOfOurs(data_dir=moved)
        builder.download_and_prepare(file_format="array_record")
    after = data.load_corpus(prepared, workdir=tmp_path / "work")
    assert after.documents != before.documents and after.train_bytes == (
        before.train_bytes
    )


@pytest.mark.parametrize(
    ("train", "held_out", "common"),
    [
        ("train[:90%]", "train[90%:]", False),
        ("train[10:20]+test", "train[:10]+train[20:]", False),
        ("train[:90%]", "train[80%:]", True),
        ("train", "train[:1]", True),
        ("test+train[:5]", "train[4:]", True),
    ],
)
def test_parts_of_splits_do_not_overlap(prepared, data_dir, train, held_out, common):
    prepared.train_split, prepared.validation_split = train, held_out
    if common:
        assert "have examples in common: choose parts" in refusal(prepared, data_dir)
        return
    source = corpora.open_source(prepared, data_dir)
    assert not {*source.train()} & {*source.validation()}


def test_named_splits(prepared, data_dir):
    prepared.validation_split = "test[:10%]+test[90%:]"
    prepared.train_split = "train[50%:]"
    source = corpora.open_source(prepared, data_dir)
    train, validation = list(source.train()), list(source.validation())
    assert len(train) == 50
    assert len(validation) == 20
    assert all(text.startswith("test story") for text in validation)


def test_wrong_splits_and_features_are_refused(prepared, data_dir):
    prepared.validation_split = "dev"
    assert "'dev'" in refusal(prepared, data_dir)
    prepared.validation_split = "validation"
    prepared.train_split = "training"
    assert "'training'" in refusal(prepared, data_dir)
    prepared.train_split = "train[:999]"
    assert "has no part 'train[:999]' (" in (said := refusal(prepared, data_dir))
    assert "set data.train_split and data.validation_split to parts" in said
    prepared.train_split = "train"
    for feature in ("text", "i"):
        prepared.text_feature = feature
        assert "['story']" in refusal(prepared, data_dir)


def test_other_file_formats_are_refused(prepared, data_dir):
    for info in data_dir.rglob("dataset_info.json"):
        info.write_text(info.read_text().replace("array_record", "tfrecord"))
    assert "array_record" in refusal(prepared, data_dir)


def test_quiet_leaves_logging_as_it_was():
    verbosity = corpora.logging.get_verbosity()
    with pytest.raises(KeyError), corpora._quiet():
        raise KeyError
    assert corpora.logging.get_verbosity() == verbosity
