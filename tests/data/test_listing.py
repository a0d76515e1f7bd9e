"""Which files are which split, and what links of a corpus lead to."""

import json
import logging
import os
import shutil
import socket
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from acco_jax.data import corpora, records
from acco_jax.run.config import fields as configs

SAVED = Path(__file__).parent.parent / "recorded" / "huggingface"
HELD_OUT = "held out by hash"


def write(root, files):
    """Write files whose documents are their own names and numbers."""
    for name in files.split():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        documents = [f"{name} {i}" for i in range(30)]
        if path.suffix == ".jsonl":
            lines = (json.dumps({"text": text}) + "\n" for text in documents)
            path.write_text("".join(lines))
        elif path.suffix == ".parquet":
            parquet.write_table(pa.table({"text": documents}), path)
        else:
            path.write_text(documents[0])


def opened(root, name="jsonl", path="", **changes):
    config = configs.default_config().data
    config.name, config.path, config.held_out = name, str(root / path), 0.3
    config.update(changes)
    data_dir = root.parent / "data_dir"
    return corpora.open_source(config, data_dir)


def files_of(documents):
    return {text.split(" ")[0] for text in documents}


def check_splits(source, train, held_out):
    """Check which files' documents each split has, all of them and no other."""
    first, second = list(source.train()), list(source.validation())
    assert not set(first) & set(second)
    if held_out == HELD_OUT:
        assert files_of(first + second) == set(train.split())
        assert 0 < len(second) < len(first)
    else:
        assert files_of(first) == set(train.split())
        assert files_of(second) == set(held_out.split())
    return len(first) + len(second)


# files, without their suffix; those for training; those held out; changes
LAYOUTS = {
    "folders": ("train/0 validation/0 test/0", "train/0", "validation/0", {}),
    "deep folders": ("en/train/0 en/dev/0 de/train/0 de/dev/0",
                     "de/train/0 en/train/0", "de/dev/0 en/dev/0", {}),
    "words of folders": ("c4_training/a x-val-1/a", "c4_training/a", "x-val-1/a", {}),
    "middle": ("c4-train.0 c4-validation.0", "c4-train.0", "c4-validation.0", {}),
    "end": ("en_0 en_1 en_validation", "en_0 en_1", "en_validation", {}),
    "capitals": ("TRAIN Validation", "TRAIN", "Validation", {}),
    "humps": ("trainSet devSet", "trainSet", "devSet", {}),
    "no train": ("part0 valid test", "part0", "valid", {}),
    "val": ("train val", "train", "val", {}),
    "dev": ("train dev", "train", "dev", {}),
    "test alone": ("train test", "train", "test", {}),
    "evaluation": ("training evaluation", "training", "evaluation", {}),
    "shards": ("data/train-00000-of-00002 data/train-00001-of-00002 data/test-00000",
               "data/train-00000-of-00002 data/train-00001-of-00002",
               "data/test-00000", {}),
    "no word": ("latest contest-1 devices invalid_0 trained évaleur",
                "latest contest-1 devices invalid_0 trained évaleur", HELD_OUT, {}),
    "train alone": ("train0 train1", "train0 train1", HELD_OUT, {}),
    "longer name": ("train train_eval", "train", "train_eval",
                    {"validation_split": "train_eval"}),
    "asked": ("train dev validation", "train", "dev", {"validation_split": "dev"}),
    "synonym asked for training": ("dev val", "dev", "val", {"train_split": "dev"}),
    "numbers": ("part1 part2 part10", "part2 part10", "part1",
                {"validation_split": "part1"}),
    "others": ("a_0 b_0 c_0", "a_0", "b_0",
               {"train_split": "a", "validation_split": "b"}),
    "all": ("train validation x_test", "train validation x_test", HELD_OUT,
            {"train_split": "all"}),
}  # fmt: skip


def named(names, suffix):
    return " ".join(name + suffix for name in names.split())


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_splits_of_records(tmp_path, caplog, layout, kind):
    files, train, held_out, changes = LAYOUTS[layout]
    suffix, root = f".{kind}", tmp_path / "test" / "train"  # these words do not count
    write(root, named(files, suffix))
    with caplog.at_level(logging.INFO, "absl"):
        source = opened(root, kind, **changes)
    hashed = held_out == HELD_OUT
    held_out = held_out if hashed else named(held_out, suffix)
    count = check_splits(source, named(train, suffix), held_out)
    assert count == 30 * len((train + ("" if hashed else f" {held_out}")).split())
    (line,) = [line for line in caplog.messages if line.startswith("Splits of")]
    first, second, *third = line.split(": ", 1)[1].split("; ")
    assert first.startswith(f"training: {len(train.split())} (")
    if hashed:
        assert second == "held out: 0.3 of the training documents."
        return
    assert second.startswith(
        f"held out: {len(held_out.split())} ({held_out.split()[0]}"
    )
    left = len(files.split()) - len(train.split()) - len(held_out.split())
    assert [part.split(" (")[0] for part in third] == [f"not used: {left}"] * (left > 0)


SPLITS = "train/0 train/1 validation/0 test/0"
TEXTS = {
    "folders": (SPLITS, "train/0 train/1", "validation/0", {}),
    "files": ("wiki.train.txt wiki.valid.txt wiki.test.txt", "wiki.train.txt",
              "wiki.valid.txt", {}),
    "words of documents": ("train/test-drive train/dev dev/training valid/0",
                           "train/test-drive train/dev", "dev/training valid/0", {}),
    "deep": ("a/test/0 b/test/1 c/dev.py d/train.py e/0 f/1 g/2 h/3 i/4 j/5 k/6",
             "a/test/0 b/test/1 c/dev.py d/train.py e/0 f/1 g/2 h/3 i/4 j/5 k/6",
             HELD_OUT, {}),
    "asked": ("books/0 web/0 held/0", "books/0 web/0", "held/0",
              {"validation_split": "held"}),
    "all": (SPLITS, SPLITS, HELD_OUT, {"train_split": "all"}),
    "train alone": ("train/0 train/1 train/2", "train/0 train/1 train/2", HELD_OUT, {}),
}  # fmt: skip


@pytest.mark.parametrize("layout", TEXTS)
def test_splits_of_texts(tmp_path, layout):
    files, train, held_out, changes = TEXTS[layout]
    write(tmp_path / "root", files)
    check_splits(opened(tmp_path / "root", "text_folder", **changes), train, held_out)


# files; changes; the line
AMBIGUOUS = {
    "train_eval": ("train.jsonl train_eval.jsonl", {},
                   r"several splits .*: train_eval\.jsonl: rename them"),
    "folder and name": ("train/validation.jsonl train/0.jsonl", {},
                        r"several splits .*: train/validation\.jsonl: rename"),
    "others beside train": ("train.jsonl a.jsonl b.jsonl", {},
                            r"others of no split: a\.jsonl, b\.jsonl: put a split"),
    "held out alone": ("dev.jsonl test/0.jsonl", {},
                       r"only .* splits: dev\.jsonl, test/0\.jsonl: .*='all'"),
    "one split twice": ("train.jsonl val.jsonl", {"validation_split": "train"},
                        r"are both 'train': .*; name two splits"),
    "of all": ("train.jsonl val.jsonl",
               {"train_split": "all", "validation_split": "val"},
               r"='all' leaves no split 'val': set data\.validation_split"),
    "not there": ("train.jsonl validation.jsonl", {"validation_split": "dev"},
                  r"no file .* has 'dev' in its name: set data\.validation_split"),
    "no train there": ("a.jsonl", {"train_split": "b"},
                       r"no file .* has 'b' in its name: set data\.train_split"),
    "empty": ("a.jsonl", {"train_split": ""}, r"train_split is '': set it to 'train'"),
    "many": (" ".join(f"{i}-train-dev.jsonl" for i in range(9)), {},
             r"3-train-dev\.jsonl and 5 more: rename"),
    "text": ("books/0.txt test/0.txt", {"name": "text_folder"},
             r"named as splits are, test, .*train_split='all'"),
    "text's files": ("a.txt b.txt valid.txt", {"name": "text_folder"},
                     r"named as splits are, valid\.txt, .*train_split='all'"),
    "text not there": ("a.txt b.txt", {"name": "text_folder", "train_split": "x"},
                       r"no file .* has 'x' in its name: set data\.train_split"),
}  # fmt: skip


@pytest.mark.parametrize("what", AMBIGUOUS)
def test_ambiguous_splits_are_refused(tmp_path, what):
    files, changes, line = AMBIGUOUS[what]
    write(tmp_path / "root", files)
    with pytest.raises(ValueError, match=line) as error:
        opened(tmp_path / "root", **changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("splits", "held_out"),
    [
        (["train", "validation", "test"], "validation"),
        (["train", "test"], "test"),
        (["train", "val"], "val"),
        (["train", "dev", "test"], "dev"),
        (["train"], None),
        (["train", "val", "dev"], "set data.validation_split to one of them"),
    ],
)
def test_splits_of_a_saved_data_set(tmp_path, splits, held_out):
    root = tmp_path / "root"
    for split in splits:
        of = "train" if split == "train" else "validation"
        shutil.copytree(SAVED / "dict" / of, root / split)
    (root / "dataset_dict.json").write_text(json.dumps({"splits": splits}))
    if held_out and " " in held_out:
        with pytest.raises(ValueError, match=held_out):
            opened(root, "huggingface")
        return
    files = records.find("huggingface", str(root), "train", "validation")
    assert {path.parent.name for path in files.train} == {"train"}
    assert {path.parent.name for path in files.validation} == {held_out} - {None}
    with pytest.raises(ValueError, match="are both 'train'"):
        opened(root, "huggingface", validation_split="train")


# Links


def link(path, target):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def folder(root, suffix):
    write(root.parent / "elsewhere", f"book{suffix}")
    link(root / "books", "../elsewhere")
    return f"books/book{suffix}"


def file(root, suffix):
    write(root.parent / "elsewhere", f"book{suffix}")
    link(root / f"linked{suffix}", f"../elsewhere/book{suffix}")
    return f"linked{suffix}"


def chain(root, suffix):
    write(root.parent / "elsewhere", f"a/book{suffix}")
    link(root.parent / "middle", "elsewhere")
    link(root / "books", "../middle")
    return f"books/a/book{suffix}"


def loop(root, suffix):
    link(root / "a" / "up", "..")
    link(root / "self", ".")
    return ""


def loop_elsewhere(root, suffix):
    write(root.parent / "elsewhere", f"x/book{suffix}")
    link(root.parent / "elsewhere" / "x" / "back", "../../root")
    link(root / "books", "../elsewhere")
    return f"books/x/book{suffix}"


def twice(root, suffix):
    write(root, f"b/book{suffix}")
    link(root / "again", "b")
    link(root / "b" / f"again{suffix}", f"book{suffix}")
    return f"b/book{suffix}"


def many_loops(root, suffix):
    write(root, " ".join(f"{i}/book{suffix}" for i in range(6)))
    for i in range(6):
        for j in range(6):
            link(root / str(i) / f"to{j}", f"../{j}")
    return " ".join(f"{i}/book{suffix}" for i in range(6))


LINKS = (folder, file, chain, loop, loop_elsewhere, twice, many_loops)


@pytest.mark.parametrize("kind", ["text_folder", "jsonl", "parquet", "pattern"])
@pytest.mark.parametrize("make", LINKS)
def test_links_are_followed(tmp_path, kind, make):
    name = {"pattern": "jsonl"}.get(kind, kind)
    suffix = {"text_folder": ".txt"}.get(kind, f".{name}")
    root = tmp_path / "root"
    write(root, f"a/0{suffix} a/1{suffix}")
    more = make(root, suffix)
    source = opened(root, name, f"**/*{suffix}" if kind == "pattern" else "")
    texts = [*source.train(), *source.validation()]
    names = {Path(path).name for path in f"0{suffix} 1{suffix} {more}".split()}
    found = {Path(name).name for name in files_of(texts)}
    assert found == {n.replace("linked", "book") for n in names}
    assert len(set(texts)) == len(texts)  # none is read twice


REFUSED_LINKS = {
    "broken folder": (lambda root: link(root / "books", "/gone"),
                      r"root/books is a broken link, to /gone: restore"),
    "broken file": (lambda root: link(root / "a" / "b.jsonl", "gone.jsonl"),
                    r"root/a/b\.jsonl is a broken link, to gone\.jsonl: restore"),
    "its own": (lambda root: link(root / "a" / "c", "c"), r"a/c is a broken link"),
    "pipe": (lambda root: os.mkfifo(root / "a" / "p.jsonl"),
             r"p\.jsonl is a pipe, .*: write its content to a file"),
    "one file in two splits": (
        lambda root: link(root / "validation" / "2.jsonl", "../train/0.jsonl"),
        r"0\.jsonl and .*2\.jsonl are one file, by a link, in two splits: remove"),
    "one folder in two splits": (
        lambda root: link(root / "validation", "train"),
        r"train/0\.jsonl and .*validation/0\.jsonl are one file"),
    "loop between splits": (
        lambda root: (link(root / "train" / "more", "../validation"),
                      write(root, "validation/0.jsonl")),
        r"more/0\.jsonl and .*validation/0\.jsonl are one file"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["folder", "pattern"])
@pytest.mark.parametrize("what", REFUSED_LINKS)
def test_wrong_links_are_refused_by_name(tmp_path, kind, what):
    make, line = REFUSED_LINKS[what]
    root = tmp_path / "root"
    write(root, "train/0.jsonl train/1.jsonl")
    (root / "a").mkdir()
    make(root)
    with pytest.raises(ValueError, match=line) as error:
        opened(root, path="**/*.jsonl" if kind == "pattern" else "")
    assert "\n" not in str(error.value)


def test_broken_links_of_a_saved_data_set_and_of_texts(tmp_path):
    saved = tmp_path / "saved"
    shutil.copytree(SAVED / "single", saved)
    (shard,) = saved.glob("*.arrow")
    link(tmp_path / "linked", saved)
    assert len([*opened(tmp_path / "linked", "huggingface").train()]) > 0
    shard.unlink()
    shard.symlink_to("/gone")
    with pytest.raises(ValueError, match=rf"{shard.name} is missing: restore"):
        opened(tmp_path / "linked", "huggingface")
    write(tmp_path / "texts", "a b")
    link(tmp_path / "texts" / "c", "gone")
    with pytest.raises(ValueError, match=r"texts/c is a broken link, to gone"):
        opened(tmp_path / "texts", "text_folder")
    link(tmp_path / "dead.jsonl", "gone")
    with pytest.raises(ValueError, match=r"dead\.jsonl is a broken link, to gone"):
        opened(tmp_path, path="dead.jsonl")


@pytest.mark.parametrize(
    ("splits", "train", "held_out"),
    [
        ("train test", "test", HELD_OUT),
        ("test", "test", HELD_OUT),
        ("train test dev", "test", "dev"),
        ("valid test", "valid", "test"),
    ],
)
@pytest.mark.parametrize("kind", ["huggingface", "card"])
def test_a_declared_split_that_is_trained_on_is_not_held_out(
    tmp_path, kind, splits, train, held_out
):
    root, names = tmp_path / "root", splits.split()
    if kind == "card":
        files = {name: f"{i}.jsonl" for i, name in enumerate(names)}
        write(root, " ".join(files.values()))
        entries = [{"split": name, "path": path} for name, path in files.items()]
        subsets = json.dumps([{"data_files": entries}])
        (root / "README.md").write_text(f"---\nconfigs: {subsets}\n---\n")
        source = opened(root, train_split=train)
        check_splits(source, files[train], files.get(held_out, HELD_OUT))
        return
    for name in names:
        (root / name).mkdir(parents=True)
        state = json.dumps({"_data_files": [{"filename": "0.arrow"}]})
        (root / name / "state.json").write_text(state)
        table = pa.table({"text": [f"{name} {i}" for i in range(30)]})
        with pa.ipc.new_stream(str(root / name / "0.arrow"), table.schema) as file:
            file.write_table(table)
    (root / "dataset_dict.json").write_text(json.dumps({"splits": names}))
    check_splits(opened(root, "huggingface", train_split=train), train, held_out)


def test_what_is_no_file_is_refused(tmp_path, monkeypatch):
    root = tmp_path / "root"
    write(root, "a.jsonl b.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(ValueError, match=r"pipe\.jsonl is a pipe, .*: write its"):
        opened(tmp_path, path="pipe.jsonl")
    monkeypatch.chdir(root)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as found:
        found.bind("c")
        with pytest.raises(ValueError, match=r"root/c is a pipe, a socket"):
            opened(root, "text_folder")


def test_a_folder_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    """As root reads any folder, scandir fails in its place."""
    root, scandir = tmp_path / "root", os.scandir
    write(root, "a/0.jsonl b/0.jsonl")

    def fail(path):
        if str(path).endswith("/b"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(ValueError, match=r"root/b cannot be read \(Perm.*: give acc"):
        opened(root)


def test_a_linked_folder_of_ours_does_not_become_data(tmp_path):
    root, workdir = tmp_path / "root", tmp_path / "runs" / "workdir"
    write(root, "a.jsonl")
    (tmp_path / "runs").mkdir()
    link(root / "runs", tmp_path / "runs")
    for path in (root, root / "**" / "*.jsonl"):
        with pytest.raises(ValueError, match=r"root holds .*workdir, which training"):
            records.outside(path, workdir)
    records.outside(tmp_path / "wrong" / "**" / "*.jsonl", workdir)  # is refused later
    (root / "runs").unlink()
    records.outside(root, workdir)


# Names of files


@pytest.mark.parametrize("name", ["corpus [v2].jsonl", "what?.jsonl", "*.jsonl", "[a]"])
def test_glob_characters_in_names(tmp_path, name):
    root = tmp_path / "[root]"
    inside = name if name.endswith(".jsonl") else f"{name}/0.jsonl"
    path = root / inside
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f'{{"text": "mine {i}"}}\n' for i in range(30)))
    write(root, "b/other.jsonl")
    for asked in {name, inside, f"{name}/*.jsonl" if "/" in inside else name}:
        source = opened(root, path=asked)
        assert files_of([*source.train(), *source.validation()]) == {"mine"}


def test_patterns(tmp_path):
    root = tmp_path / "root"
    write(root, "a/0.jsonl a/b/1.jsonl a/.c/2.jsonl d/0.jsonl d/3.parquet")
    wanted = {
        "a/*.jsonl": "a/0.jsonl",
        "*/0.jsonl": "a/0.jsonl d/0.jsonl",
        "**/*.jsonl": "a/0.jsonl a/b/1.jsonl d/0.jsonl",
        "a/**": "a/0.jsonl a/b/1.jsonl",
        "**/b/**/*.jsonl": "a/b/1.jsonl",
        "[ab]/**/[01].jsonl": "a/0.jsonl a/b/1.jsonl",
    }
    for pattern, files in wanted.items():
        source = opened(root, path=pattern)
        found = files_of([*source.train(), *source.validation()])
        assert found == set(files.split()), pattern
    for pattern in ("wrong/**/*.jsonl", "wrong/*.jsonl", "wrong"):
        with pytest.raises(ValueError, match=rf"no .jsonl files at .*{pattern[:5]}"):
            opened(root, path=pattern)
