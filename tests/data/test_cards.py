"""Folders of Parquet files as on the Hub: what a card declares, and what it cannot."""

import pytest

from acco_jax.data import cards, records
from benchmarks import hub_folders
from tests.data.test_listing import HELD_OUT, check_splits, opened, write


@pytest.mark.parametrize("name", hub_folders.LAYOUTS)
def test_what_datasets_finds(tmp_path, name):
    layout, root = hub_folders.LAYOUTS[name], tmp_path / "root"
    hub_folders.write(root, layout)
    if not layout.splits:
        with pytest.raises(
            ValueError, match=r"the subsets main, socratic: set|gone\.p"
        ):
            opened(root, "parquet")
        return
    train, held_out = layout.splits["train"], [*layout.splits.values()][1:]
    source = opened(root, "parquet")
    check_splits(source, train, held_out[0] if held_out else HELD_OUT)
    if held_out:  # in order
        expected = [d for n in train.split() for d in hub_folders.documents(n)]
        assert list(source.train()) == expected


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("configs: [", r"README\.md's header is not YAML \(.*\): mend it"),
        ("configs: 3", "README.md has odd configs: write it as"),
        ("configs: [{config_name: [a]}]", "README.md has odd configs: write it as"),
        ("configs: [{data_files: 3}]", "odd data_files: write it as"),
        ("configs: [{data_files: {train: a.parquet}}]", "odd data_files: write it as"),
        (
            "configs: [{data_files: [{split: train, path: {a.parquet: 1}}]}]",
            "odd data_files: write it as",
        ),
        (
            "configs: [{data_files: [{split: [a], path: a.parquet}]}]",
            "odd data_files: write it as",
        ),
        ("configs: [{data_files: [{split: train}]}]", "odd data_files: write it as"),
        ("configs: [{data_dir: [a]}]", "odd data_files: write it as"),
        ("configs: [{data_files: /a.parquet}]", "names '/a.parquet', which is not in"),
        ("configs: [{data_dir: ../b}]", r"names '\.\./b', which is not in its folder"),
        ("configs: [{data_files: 'hf://datasets/b/*'}]", "names 'hf:.*set data.path"),
        (
            "configs: [{data_files: [{split: en, path: a.parquet}]}]",
            r"no split 'train': set data.train_split .* to some of \['en'\]",
        ),
        (
            "configs: [{data_files: [{split: train, path: a.parquet},"
            " {split: test, path: '*.parquet'}]}]",
            r"a\.parquet is in two splits: remove one of them",
        ),
    ],
)
def test_cards_that_cannot_be_followed(tmp_path, header, said):
    root = tmp_path / "root"
    write(root, "a.parquet")
    (root / "README.md").write_text(f"---\n{header}\n---\n")
    with pytest.raises(ValueError, match=said):
        records.find("parquet", str(root), "train", "validation")


def test_a_card_with_two_defaults_is_refused(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (root / "README.md").write_text(
        "---\nconfigs: [{config_name: default, data_files: a.jsonl}, "
        "{config_name: en, default: true, data_files: b.jsonl}]\n---\n"
    )
    with pytest.raises(ValueError, match="declares the subsets default, en: set data"):
        cards.default(root)


def test_all_files_are_taken_where_names_are_ignored(tmp_path):
    root = tmp_path / "root"
    hub_folders.write(root, hub_folders.LAYOUTS["two and no default"])
    found = records.find("parquet", str(root), "all", "validation")
    assert len(found.train) == 2


def test_a_rule_at_the_top_of_a_page_is_no_header(tmp_path):
    root = tmp_path / "root"
    write(root, "a.parquet")
    (root / "README.md").write_text("---\n\nSee configs: below.\n\n---\n")
    assert records.find("parquet", str(root), "train", "validation").train
