"""What fuzz.py puts its inputs to: the entries of the product that read them.

A target makes a case, JSON that says what is changed of a valid input, from a source of
random numbers, and runs one: it returns, or raises as the product does.
"""

import contextlib
import os
import random
import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fuzzing import entries, mutations

SEEDS = entries.SEEDS
SAVED = SEEDS.parents[1] / "huggingface"

Case = dict[str, Any]
Draw = random.Random
# Files that a folder of data may hold as well.
STRANGERS = (
    "é.txt",
    "a\nb.jsonl",
    "x.parquet",
    ".hidden",
    "evil.py",
    "-rf",
    "y.json",
    "\udcff.md",
    "train-2.jsonl",
    "z.csv",
    "tokenizer_config.json",
    "features.json",
    "special_tokens_map.json",
    "1.saving",
    "7.checksums",
    "9.damaged",
    "x.npy",
)


class Files:
    """Folders of which some files are mutated, or come, or go.

    A case is {"variant": a name, "files": {path: content, or null for none}, ...}, of
    which content is bytes as latin-1; a path that ends in a slash is a folder.
    """

    def __init__(
        self,
        run: Callable[[Case], None],
        folders: dict[str, Path | Callable[[], Path]],
        only: Sequence[str] = ("**/*",),
        options: dict[str, Sequence[Any]] | None = None,
    ) -> None:
        """Takes valid folders, which files of them to mutate, and options to draw."""
        self._run, self._folders, self._only = run, folders, only
        self._options = options or {}

    def make(self, draw: Draw) -> Case:
        variant = draw.choice(sorted(self._folders))
        root = self._folder(variant)
        found = sorted(
            {p for glob in self._only for p in root.glob(glob) if p.is_file()}
        )
        files: dict[str, str | None] = {}
        for path in draw.sample(found, min(len(found), draw.choice((1, 1, 1, 2)))):
            name, before = str(path.relative_to(root)), path.read_bytes()
            files[name] = mutations.content(draw, before).decode("latin-1")
            if draw.random() < 0.03:
                files[name] = None
                if draw.random() < 0.5:
                    files[name + "/"] = ""
            if draw.random() < 0.03:
                other = str(Path(name).with_name(draw.choice(STRANGERS)))
                files[other] = draw.choice(
                    (files[name] or "", before.decode("latin-1"))
                )
        options = {name: draw.choice(values) for name, values in self._options.items()}
        return {"variant": variant, "files": files, **options}

    def valid(self) -> list[Case]:
        """Returns a case of each variant that changes nothing."""
        first = {name: values[0] for name, values in self._options.items()}
        return [{"variant": v, "files": {}, **first} for v in sorted(self._folders)]

    def _folder(self, variant: str) -> Path:
        folder = self._folders[variant]
        return folder if isinstance(folder, Path) else folder()

    def run(self, case: Case) -> None:
        """Makes the folder here, which is empty, and reads it."""
        shutil.copytree(self._folder(case["variant"]), ".", dirs_exist_ok=True)
        for name, content in case["files"].items():
            _put(name, content, case)
        self._run(case)


def _put(name: str, content: str | None, case: Case) -> None:
    path = Path(name)
    if content is None:
        path.unlink(missing_ok=True)
    elif name.endswith("/"):
        path.mkdir(parents=True)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        data = content.encode("latin-1")
        if case.get("here"):
            data = data.replace(b"elsewhere", socket.gethostname().encode())
        path.write_bytes(data)


COMMANDS = {
    "train": ["--config=config.py", "--workdir=w", "--config.steps=3",
              "--config.optimizer.options.b1=0.9", "--restarts=1", "--lost_after=9.5",
              "--coordinator=localhost:1234", "--processes=2", "--process=0",
              "--stop_after=3", "--time_gradients", "--start_within=20",
              "--config.counts=(1,)", "--config.data.lengths=(4,8)", "--v=0"],
    "compare": ["--config=config.py", "--workdir=w", "--seeds=2",
                "--methods=acco,zero1(gather_bits=8,config.seed=3),dpu",
                "--network=200mbit", "--processes=3", "--config.seed=5"],
    "plan": ["--config=config.py", "--topology=gpu:h200:2x8", "--methods=acco,zero1",
             "--devices=16,32", "--set=slow_bandwidth=5e9,compute_efficiency=0.5",
             "--network=400", "--slices=1", "--nofit", "--out=plan",
             "--json=plan.json", "--dump-hlo=hlo", "--require-hidden",
             "--config.length=16"],
}  # fmt: skip
NEEDED = 2  # of these arguments a command cannot do without
MORE = ("--config=nowhere.py", "--config=.", "--config=records.jsonl", "--config=",
        "--flagfile=nowhere", "--helpful", "--", "-", "word", "--config.x=1",
        "--config.model=3", "--config.optimizer.options=7", "--config.steps",
        "--config.data.path=a\nb", "--noconfig", "--topology=tpu:v5e:4x4",
        "--topology=gpu:h200:0x0", "--topology=tpu:v5p:" + "9" * 400 + "x1x1",
        "--methods=acco(x=1),acco(x=1)", "--methods=a(b=(c=1))", "--methods=),(",
        "--methods=../x", "--methods=acco(config.model.factory=a:b)", "--methods=",
        "--workdir=", "--workdir=gs://b/w", "--network=9e9mbit", "--network=0kbit",
        "--seeds=" + "9" * 30, "--process=" + "9" * 30, "--lost_after=nan",
        "--coordinator=:1", "--coordinator=a:99999", "--set=x", "--set==1",
        "--set=flops=nan", "--devices=", "--methods=,",
        "--tune=seed=1,2", "--tune=x=a,/b", "--tune==,", "--budget=nan", "--at_once=99",
        "--network=-1")  # fmt: skip


class Flags:
    """Command lines: {"command": a name, "argv": [...]}."""

    def make(self, draw: Draw) -> Case:
        command = draw.choice(sorted(COMMANDS))
        needed = COMMANDS[command][:NEEDED]
        others = COMMANDS[command][NEEDED:]
        argv = needed + draw.sample(others, draw.randrange(4))
        for _ in range(draw.choice((1, 1, 2, 3))):
            match draw.randrange(5):
                case 0:
                    argv.append(draw.choice(MORE))
                case 1:
                    argv.append(mutations.argument(draw, draw.choice(others)))
                case 2:
                    field = draw.choice(entries.fields())
                    text = f"--config.{field}={draw.choice(mutations.LITERALS)}"
                    argv.append(text.replace("\0", ""))
                case _:
                    number = draw.randrange(len(argv))
                    argv[number] = mutations.argument(draw, argv[number])
        return {"command": command, "argv": argv}

    def valid(self) -> list[Case]:
        """Returns the whole command lines."""
        return [{"command": c, "argv": argv} for c, argv in COMMANDS.items()]

    def run(self, case: Case) -> None:
        for name in ("config.py", "records.jsonl"):
            shutil.copy(SEEDS / name, name)
        entries.command(case["command"], case["argv"])


class Configs:
    """Configs: {"changes": {field: a Python literal}, "how": of `entries.config`}."""

    def make(self, draw: Draw) -> Case:
        fields = entries.fields()
        changes = {}
        for _ in range(draw.choice((1, 1, 2, 3))):
            field = draw.choice(fields)
            if draw.random() < 0.1:
                field = f"{field}.{draw.choice(('options', 'b1', 'x', 'name'))}"
            changes[field] = draw.choice(mutations.LITERALS)
        how = draw.choice(("flags", "values", "values", "values", "prepared"))
        return {"changes": changes, "how": how}

    def valid(self) -> list[Case]:
        """Returns a case of each kind that changes little."""
        kinds = ("flags", "values", "prepared")
        return [{"changes": {"seed": "1"}, "how": how} for how in kinds]

    def run(self, case: Case) -> None:
        for name in ("config.py", "records.jsonl"):
            shutil.copy(SEEDS / name, name)
        entries.config(case)


def _source(name: str, **options: Sequence[Any]) -> Files:
    """Returns the target of a kind of data set."""
    folders = {"folder": SEEDS / name}
    if name == "huggingface":
        folders = {"dict": SAVED / "dict", "single": SAVED / "single"}
    run = lambda case: entries.source(name, case)  # noqa: E731
    return Files(run, folders, options=options)


_KINDS = ("bpe", "unigram", "wordpiece")
_TASKS = ("pretrain", "pretrain", "instruct")
_WORKDIR = {"workdir": entries.fresh_workdir}
_TOKENS = {task: SEEDS / "tokens" / task for task in set(_TASKS)}
_VOCABULARIES = {kind: SEEDS / "tokenizers" / kind for kind in _KINDS}
_PIECES = {"sentencepiece": SEEDS / "tokenizers" / "sentencepiece"}
_PLACES = {"where": ("given", "given", "kept")}
_BPE = {"bpe": SEEDS / "tokenizers" / "bpe"}
_TRAINED = {"where": ("kept", "trained")}
_SUMS = {"sums": ("kept", "made anew", "made anew", "made anew")}
_CHECKPOINTS = (
    "checkpoints/4/**/*",
    "checkpoints/4/[hs]*/[0m]*",
    "checkpoints/*.checksums",
)
_SMALL = ("config.json", "lock.json", "summary.json", "metrics.jsonl")

TARGETS: dict[str, Any] = {
    "flags": Flags(),
    "config": Configs(),
    "metrics": Files(entries.metrics, _WORKDIR, ["metrics.jsonl"]),
    "goodput": Files(entries.goodput, _WORKDIR, ["goodput.jsonl"]),
    "counts": Files(entries.counts, _WORKDIR, ["counts.jsonl"]),
    "worlds": Files(entries.worlds, _WORKDIR, ["worlds.jsonl"]),
    "workdir": Files(entries.workdir, _WORKDIR, _SMALL, {"here": (True, False)}),
    "checkpoints": Files(entries.checkpoints, _WORKDIR, _CHECKPOINTS, _SUMS),
    "tokenizers": Files(entries.tokenizer, _VOCABULARIES, options=_PLACES),
    "sentencepiece": Files(entries.tokenizer, _PIECES, options=_PLACES),
    "bpe": Files(entries.bpe, _BPE, ["tokenizer.json"], _TRAINED),
    "text_folder": _source("text_folder"),
    "jsonl": _source("jsonl", task=_TASKS),
    "parquet": _source("parquet", task=_TASKS),
    "huggingface": _source("huggingface", task=_TASKS),
    "tfds": _source("tfds", task=_TASKS),
    "tokens": Files(entries.tokens, _TOKENS, options=_SUMS),
}
DATA = ("tokenizers", "sentencepiece", "bpe", "text_folder", "jsonl", "parquet",
        "huggingface", "tfds", "tokens", "checkpoints")  # fmt: skip


@contextlib.contextmanager
def emptied(folder: Path):
    """Works in a folder that is empty, and empties it again."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir("/")
        shutil.rmtree(folder, ignore_errors=True)


def make(name: str, seed: int, number: int) -> Case:
    """Returns a case, which these alone determine; negative ones are the valid ones."""
    target = TARGETS[name]
    if number < 0:
        return target.valid()[-number - 1]
    return target.make(random.Random(f"{seed}/{name}/{number}"))
