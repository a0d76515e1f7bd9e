"""Writes tests/recorded/huggingface with `datasets` (5.2.0), which no test needs.

pip install datasets && python tests/recorded/make_huggingface.py
"""

from pathlib import Path

import datasets

OUT = Path(__file__).with_name("huggingface")


def main():
    rows = [
        {
            "instruction": f"Say {i}.",
            "input": "" if i % 2 else f"politely {i}",
            "output": f"It is {i}. " * (i % 4 + 1),
            "text": f"story {i}, l'été",
        }
        for i in range(24)
    ]
    whole = datasets.Dataset.from_list(rows)
    splits = whole.train_test_split(6, seed=0)
    splits["validation"] = splits.pop("test")
    splits.save_to_disk(str(OUT / "dict"), num_shards={"train": 2, "validation": 1})
    whole.select_columns(["text"]).save_to_disk(str(OUT / "single"))


if __name__ == "__main__":
    main()
