"""Whether `datasets` finds in folders of Parquet files what acco_jax finds there.

    python benchmarks/hub_folders.py  # with datasets instead of acco_jax

streams each folder of `LAYOUTS` (`datasets.load_dataset(folder, streaming=True)`) and
compares the documents of each split, in order, with the table;
tests/data/test_cards.py does so with acco_jax. With either of the two,

    python benchmarks/hub_folders.py --memory

reads four files of 64 MB and prints how much memory that takes.
"""

import argparse
import dataclasses
import resource
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

DOCUMENTS = 30  # of a file


@dataclasses.dataclass(frozen=True)
class Layout:
    """A folder: the configs of its card, its files, and the files of each split.

    Without splits the folder is rejected: its card leaves a choice.
    """

    card: str | None
    files: str
    splits: Mapping[str, str]


_SHARDS = "data/train-00000-of-00002.parquet data/train-00001-of-00002.parquet"
_HELD = "validation/c.parquet"
LAYOUTS = {
    "shards": Layout(
        None,
        f"{_SHARDS} data/test-00000-of-00001.parquet",
        {"train": _SHARDS, "test": "data/test-00000-of-00001.parquet"},
    ),
    "folders": Layout(
        None,
        f"train/a.parquet train/b.parquet {_HELD}",
        {
            "train": "train/a.parquet train/b.parquet",
            "validation": "validation/c.parquet",
        },
    ),
    "no words": Layout(None, "a.parquet b.parquet", {"train": "a.parquet b.parquet"}),
    "a header without configs": Layout(
        "license: mit", "a.parquet", {"train": "a.parquet"}
    ),
    "declared": Layout(
        """
        configs:
        - config_name: default
          data_files:
          - {split: train, path: "x/*.parquet"}
          - {split: validation, path: y/held.parquet}
        """,
        "x/b.parquet x/a.parquet y/held.parquet z/other.parquet",
        {"train": "x/a.parquet x/b.parquet", "validation": "y/held.parquet"},
    ),
    "declared against the names": Layout(
        """
        configs:
        - config_name: default
          data_files:
          - {split: train, path: test.parquet}
          - {split: test, path: train.parquet}
        """,
        "train.parquet test.parquet",
        {"train": "test.parquet", "test": "train.parquet"},
    ),
    "several patterns": Layout(
        """
        configs:
        - config_name: default
          data_files:
          - split: train
            path: [b/*.parquet, a/*.parquet]
        """,
        "a/1.parquet b/2.parquet",
        {"train": "b/2.parquet a/1.parquet"},
    ),
    "a string": Layout(
        """
        configs:
        - config_name: default
          data_files: "part/**/*.parquet"
        """,
        "part/one/a.parquet part/two/b.parquet other.parquet",
        {"train": "part/one/a.parquet part/two/b.parquet"},
    ),
    "a list": Layout(
        """
        configs:
        - config_name: default
          data_files: [b.parquet, a.parquet]
        """,
        "a.parquet b.parquet c.parquet",
        {"train": "b.parquet a.parquet"},
    ),
    "a folder of the one subset": Layout(
        """
        configs:
        - config_name: main
          data_dir: main
        """,
        "main/train.parquet main/test.parquet old/train.parquet",
        {"train": "main/train.parquet", "test": "main/test.parquet"},
    ),
    "files in a subset's folder": Layout(
        """
        configs:
        - config_name: main
          data_dir: main
          data_files: "*.parquet"
        """,
        "main/a.parquet main/b.parquet c.parquet",
        {"train": "main/a.parquet main/b.parquet"},
    ),
    "the default of two": Layout(
        """
        configs:
        - config_name: en
          data_dir: en
          default: true
        - config_name: fr
          data_dir: fr
        """,
        "en/train.parquet en/validation.parquet fr/train.parquet",
        {"train": "en/train.parquet", "validation": "en/validation.parquet"},
    ),
    "the one named default": Layout(
        """
        configs:
        - config_name: all
          data_files: "*.parquet"
        - config_name: default
          data_files: a.parquet
        """,
        "a.parquet b.parquet",
        {"train": "a.parquet"},
    ),
    "two and no default": Layout(
        """
        configs:
        - config_name: main
          data_dir: main
        - config_name: socratic
          data_dir: socratic
        """,
        "main/train.parquet socratic/train.parquet",
        {},
    ),
    "a file that is not there": Layout(
        """
        configs:
        - config_name: default
          data_files:
          - {split: train, path: a.parquet}
          - {split: validation, path: gone.parquet}
        """,
        "a.parquet",
        {},
    ),
}


def documents(name: str) -> list[str]:
    """Return the documents of a file."""
    return [f"{name} {i}" for i in range(DOCUMENTS)]


def write(root: Path, layout: Layout) -> None:
    """Write a folder; each document is its file's name and its number there."""
    if layout.card is not None:
        lines = [line.removeprefix(" " * 8) for line in layout.card.splitlines()]
        root.mkdir(parents=True, exist_ok=True)
        header = "\n".join(line for line in lines if line.strip())
        (root / "README.md").write_text(f"---\n{header}\n---\n\n# A data set\n")
    for name in layout.files.split():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.table({"text": documents(name)}), root / name)


def _streamed(root: Path) -> dict[str, list[str]]:
    import datasets

    try:
        splits = datasets.load_dataset(str(root), streaming=True)
        return {name: [row["text"] for row in rows] for name, rows in splits.items()}
    except (ValueError, FileNotFoundError):  # a choice, or a missing file
        return {}


def _memory(root: Path) -> None:
    """Print the peak memory of a reader above that before it, in MB."""
    try:
        import datasets

        def read() -> int:
            rows = datasets.load_dataset(str(root), streaming=True)["train"]
            return sum(len(row["text"]) for row in rows)
    except ImportError:
        from acco_jax.data import records

        def read() -> int:
            files = records.find("parquet", str(root), "train", "validation")
            found = records.read(files, files.train, ["text"], [])
            return sum(len(record["text"]) for record in found)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    size = read()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{size / 1e6:.0f} MB of text read with {(after - before) / 1e3:.0f} MB more")


def _write_large(root: Path) -> None:
    text = "It communicates the previous half-batch's gradients. " * 20
    for shard in range(4):
        rows = [f"{shard} {i} {text}" for i in range(60_000)]
        name = root / f"train-{shard:05}-of-00004.parquet"
        parquet.write_table(
            pa.table({"text": rows}), name, compression="none", use_dictionary=False,
            row_group_size=1000,
        )  # fmt: skip


def main() -> None:
    """Compare each folder, or measure memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        if arguments.memory:
            _write_large(Path(made))
            _memory(Path(made))
            return
        wrong = 0
        for number, (name, layout) in enumerate(LAYOUTS.items()):
            root = Path(made, str(number))
            write(root, layout)
            found = _streamed(root)
            expected = {
                split: [text for file in files.split() for text in documents(file)]
                for split, files in layout.splits.items()
            }
            wrong += found != expected
            said = ", ".join(f"{k} {len(v)}" for k, v in found.items()) or "rejected"
            print(f"{name}: {said}{'' if found == expected else '  DIFFERENT'}")
        print(f"{len(LAYOUTS) - wrong} of {len(LAYOUTS)} folders as in the table")


if __name__ == "__main__":
    main()
