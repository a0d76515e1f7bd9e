"""Small files in the formats of published data sets and models."""

import json
import random

import jax
import numpy as np
import pyarrow
import pyarrow.parquet
import tokenizers

from acco_jax.models import huggingface, transformer
from acco_jax.run.weights import folders

TEXT = "a little dog saw the big red ball and ran to his friend in the park"
WORDS = TEXT.split()
END = "<|endoftext|>"


def sentences(number, seed=0):
    """So many texts of some 40 words each."""
    draw = random.Random(seed)
    return [
        " ".join(draw.choices(WORDS, k=40)).capitalize() + "." for _ in range(number)
    ]


def parquet(path, **columns):
    """A Parquet file of these columns of text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def tinystories(folder):
    """Files named as those of roneneldan/TinyStories."""
    for i in range(2):
        name = f"train-{i:05}-of-00002-2d5a1467fff1081b.parquet"
        parquet(folder / name, text=sentences(200, i))
    name = "validation-00000-of-00001-869c898b519ad725.parquet"
    parquet(folder / name, text=sentences(50, 2))
    return folder


def openwebtext(folder):
    """Files named as those of Skylion007/openwebtext: no validation split."""
    for i in range(2):
        parquet(folder / f"train-{i:05}-of-00002.parquet", text=sentences(150, i))
    return folder


def alpaca_rows(number=120):
    """Records with the columns of tatsu-lab/alpaca."""
    return [
        {
            "instruction": f"Say {i} words.",
            "input": "" if i % 3 else "politely",
            "output": " ".join(WORDS[: i % 12 + 1]),
            "text": "the three of them, and more",
        }
        for i in range(number)
    ]


def alpaca(folder):
    """A file named as that of tatsu-lab/alpaca."""
    rows = alpaca_rows()
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    parquet(folder / "train-00000-of-00001-a09b74b3ef9c3b56.parquet", **columns)
    return folder


def alpaca_lines(path):
    """The same as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in alpaca_rows()))
    return path


def tokenizer(path, size=300):
    """A tokenizer.json of GPT-2's kind: a byte-level BPE with its end of text."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    level = tokenizers.pre_tokenizers.ByteLevel
    made.pre_tokenizer = level(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(level.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END], initial_alphabet=alphabet
    )
    made.train_from_iterator(sentences(50), trainer)
    made.save(str(path))
    return path


def model(folder, config: transformer.Config):
    """A Hugging Face folder of a model with random weights, and a tokenizer."""
    draw = np.random.default_rng(0).normal
    params = jax.tree.map(
        lambda x: (0.1 * draw(size=x.shape)).astype(x.dtype),
        transformer.shapes_of(config),
    )
    described(folder, config)
    folders.write_weights(folder, huggingface.to_state(config, params), 20_000)
    tokenizer(folder / "tokenizer.json", config.vocab_size)
    return folder


def described(folder, config: transformer.Config):
    """A folder with the config.json of a model, and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    said = json.dumps(huggingface.config_json(config))
    (folder / "config.json").write_text(said)
    return folder
