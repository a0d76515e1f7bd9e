"""Writes tests/recorded/fuzz/seeds, the valid inputs that benchmarks/fuzz.py mutates.

python tests/recorded/make_fuzz.py
"""

import gzip
import json
import os
import shutil
import zlib
from pathlib import Path

import jax
import pyarrow as pa
import sentencepiece
import tensorflow_datasets as tfds
import tokenizers
from pyarrow import parquet

from acco_jax import data
from acco_jax.data import corpora
from acco_jax.run import preparation, prepared
from acco_jax.run.config import fields as configs
from acco_jax.run.config import parsing
from acco_jax.run.observe import goodput
from acco_jax.run.state import worlds

ROOT = Path(__file__).resolve().parents[2]
OUT = Path(__file__).parent / "fuzz" / "seeds"
RECORDS = [
    {
        "instruction": f"Say {i}.",
        "input": "" if i % 2 else f"politely {i}",
        "output": f"It is {i}. " * (i % 4 + 1),
        "text": f"story {i}, l'été",
    }
    for i in range(12)
]
CONFIG = '''"""A run small enough to be prepared hundreds of times."""

from acco_jax.run.config.fields import default_config


def get_config():
    c = default_config()
    c.steps, c.length, c.microbatch_size, c.microbatches_per_step = 6, 8, 1, 2
    c.model.width, c.model.layers, c.model.heads, c.model.window = 4, 2, 1, 8
    c.optimizer.name, c.optimizer.clip = "sgd", 0.0
    c.model.dtype = c.model.param_dtype = "float32"
    c.data.name, c.data.path, c.data.held_out = "jsonl", "records.jsonl", 0.25
    c.data.data_dir = "data"
    return c
'''


class OurRecords(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """The records as a data set of tfds."""

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


def sources():
    """A text folder, JSON Lines, Parquet and a data set of tfds."""
    for name in ("text_folder", "jsonl", "parquet"):
        (OUT / name).mkdir()
    for i, record in enumerate(RECORDS[:4]):
        (OUT / "text_folder" / f"{i}.md").write_text(record["text"])
    lines = "".join(json.dumps(record) + "\n" for record in RECORDS)
    (OUT / "jsonl" / "validation.jsonl").write_text(lines)
    zipped = gzip.compress(lines.encode(), mtime=0)
    (OUT / "jsonl" / "train.jsonl.gz").write_bytes(zipped)
    table = pa.Table.from_pylist(RECORDS)
    parquet.write_table(table, OUT / "parquet" / "train.parquet", compression="none")
    parquet.write_table(table, OUT / "parquet" / "validation.parquet")
    with corpora._quiet():  # tfds draws bars and logs
        OurRecords(data_dir=OUT / "tfds").download_and_prepare(
            file_format="array_record"
        )


def vocabularies():
    """A byte-level BPE, a Unigram, a WordPiece and a SentencePiece model."""
    folder = OUT / "tokenizers"
    folder.mkdir()
    texts = [json.dumps(record) for record in RECORDS] + list(map(chr, range(32, 127)))
    models, trainers = tokenizers.models, tokenizers.trainers
    special = ["<pad>", "<|endoftext|>"]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    kinds = {
        "bpe": (models.BPE(), trainers.BpeTrainer(
            vocab_size=290, initial_alphabet=alphabet, show_progress=False,
            special_tokens=special)),
        "unigram": (models.Unigram(), trainers.UnigramTrainer(
            vocab_size=120, show_progress=False, special_tokens=["<unk>", *special],
            unk_token="<unk>")),
        "wordpiece": (models.WordPiece(unk_token="<unk>"), trainers.WordPieceTrainer(
            vocab_size=120, show_progress=False, special_tokens=["<unk>", *special])),
    }  # fmt: skip
    for name, (model, trainer) in kinds.items():
        made = tokenizers.Tokenizer(model)
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        if name != "bpe":
            made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
            made.decoder = tokenizers.decoders.Metaspace()
            made.normalizer = tokenizers.normalizers.NFKC()
        made.train_from_iterator(texts, trainer)
        made.enable_truncation(4)
        made.enable_padding(length=9)
        place = folder / name
        place.mkdir()
        made.save(str(place / "tokenizer.json"), pretty=False)
        eos = {"content": "<|endoftext|>"} if name == "unigram" else "<|endoftext|>"
        (place / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    (folder / "sentencepiece").mkdir()
    with open(folder / "sentencepiece" / "pieces.model", "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=file,
            vocab_size=370,
            byte_fallback=True,
            normalization_rule_name="identity",
            minloglevel=2,
        )


def run():
    """The workdir of a run with a checkpoint, and the rows that it would write."""
    (OUT / "config.py").write_text(CONFIG)
    shutil.copy(OUT / "jsonl" / "validation.jsonl", OUT / "records.jsonl")
    os.chdir(OUT)
    workdir = OUT / "workdir"
    config = parsing.config_of(["--config=config.py"])
    experiment = preparation.prepare(config, workdir, jax.devices()[:1])
    host = {
        "batches": prepared.batches(experiment).get_state(),
        "seconds": 1.5,
        "identity": experiment.identity,
        "axes": dict(experiment.mesh.shape),
        "held_out_loss": 5.25,
        "dropped": {"in_a_row": [0], "nobody": 0, "since": 0},
    }
    for half_round in (2, 4):
        experiment.checkpoints.save(half_round, prepared.initial(experiment), host)
    experiment.checkpoints.close()
    for half_round in (2, 4):
        nameless(workdir / "checkpoints", str(half_round))
    at = {"half_round": 2, "tokens": 16, "seconds": 1.5}
    rows = [{"kind": "train", "loss": 5.5, "tokens_per_second": 10.5, **at},
            {"kind": "train", "loss": 5.4, "tokens_per_second": 11.5, **at},
            {"kind": "validation", "loss": 5.3, "step": 1, **at},
            {"kind": "final", "loss": 5.2, "step": 1, **at}]  # fmt: skip
    write(workdir / "metrics.jsonl", rows)
    spent = [{"time": 1e9 + i, "cause": cause, "half_round": i, "waiting": 0.25}
             for i, cause in enumerate(goodput.CAUSES)]  # fmt: skip
    write(workdir / "goodput.jsonl", spent)
    write(workdir / "counts.jsonl", [[2], [1], [2], [3]])
    for half_round, axes in ((0, {"data": 2}), (3, {"data": 1})):
        worlds.record(workdir, half_round, worlds.World(axes, 1, [2], "fused"))
    summary = {"loss": 5.2, "tokens": 16, "steps": 1, "seconds": 1.5,
               "bytes_sent_per_worker": 100, "state_bytes_per_device": 200,
               "gradient_seconds_per_token": 1e-3}  # fmt: skip
    (workdir / "summary.json").write_text(json.dumps(summary))
    lock = {"host": "elsewhere", "pid": 4000000, "started": "123"}
    (workdir / "lock.json").write_text(json.dumps(lock))
    shutil.rmtree(OUT / "data")


def nameless(checkpoints, name):
    """Takes the place where it was written out of what a checkpoint says of itself."""
    path = checkpoints / f"{name}.checksums"
    sums = json.loads(path.read_text())
    for file in (checkpoints / name).rglob("commit_success.txt"):
        file.write_text(file.read_text().replace(f"{ROOT}/", ""))
        sums[str(file.relative_to(checkpoints / name))] = zlib.crc32(file.read_bytes())
    path.write_text(json.dumps(sums))


def tokens():
    """The tokens that each task makes of the records."""
    for task in ("pretrain", "instruct"):
        config = configs.default_config().data
        config.name, config.path, config.task = "jsonl", "records.jsonl", task
        config.data_dir, config.held_out = "data", 0.25
        data.load_corpus(config, workdir="work")
        (folder,) = (OUT / "data" / "tokens").iterdir()
        shutil.copytree(folder, OUT / "tokens" / task)
        shutil.rmtree(OUT / "data")


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    sources()
    shutil.rmtree(OUT / "tfds" / "downloads")
    vocabularies()
    run()
    tokens()


if __name__ == "__main__":
    main()
