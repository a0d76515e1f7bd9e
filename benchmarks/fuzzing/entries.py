"""The product's own entries, called in process, without compilation or training."""

import contextlib
import dataclasses
import functools
import importlib
import io
import json
import os
import shutil
import sys
import time
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from array_record.python import array_record_data_source  # noqa: F401 - defines flags
from fuzzing import mutations
from ml_collections import ConfigDict

import acco_jax
from acco_jax import data
from acco_jax.data import cache, stored
from acco_jax.run import continuing, preparation, prepared
from acco_jax.run.build.validation import validate
from acco_jax.run.compare import comparison, results
from acco_jax.run.config import fields as configs
from acco_jax.run.config import parsing
from acco_jax.run.observe import goodput as record
from acco_jax.run.observe import metrics as rows
from acco_jax.run.observe import run_summary
from acco_jax.run.state import checkpoints as saves
from acco_jax.run.state import counts as logs
from acco_jax.run.state import workdir as workdirs
from acco_jax.run.state import worlds as record_of_worlds
from acco_jax.run.state.drops import Drops
from acco_jax.step.replay import read_counts

Case = dict[str, Any]
SEEDS = Path(__file__).resolve().parents[2] / "tests" / "recorded" / "fuzz" / "seeds"
_ABSL = frozenset(flags.FLAGS)


class Planned(ValueError):
    """Everything was right so far: the next thing would be to compile."""


@functools.cache
def fields() -> list[str]:
    """Returns every field of a config, by its dotted name, and some that are none."""
    found = []

    def visit(config: ConfigDict, prefix: str) -> None:
        for name in config:
            found.append(prefix + name)
            if isinstance(config[name], ConfigDict):
                visit(config[name], f"{prefix}{name}.")

    visit(configs.default_config(), "")
    return [*found, "stepz", "optimizer.nmae", "__class__", "", "."]


# Flags


def command(name: str, argv: list[str]) -> None:
    """Parses a command's flags and checks what they say, as the command itself does.

    Raises:
      ValueError: the line that the command ends with.
    """
    flags.FLAGS.unparse_flags()
    module = "acco_jax.plan.__main__" if name == "plan" else f"acco_jax.{name}"
    loaded = sys.modules.get(module)
    loaded = importlib.reload(loaded) if loaded else importlib.import_module(module)
    needed = {"train": ["workdir"], "compare": ["methods", "workdir"]}
    flags.mark_flags_as_required(["config", *needed.get(name, ["topology"])])
    sys.argv, before = ["command", *argv], sys.argv
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), _no_work(name, loaded):
            loaded.main(parsing.parser(loaded._CONFIG)(sys.argv))
    except SystemExit as end:
        lines = said.getvalue().splitlines()
        if end.code == 2 and len(lines) == 1 and lines[0].startswith("error: "):
            raise ValueError(lines[0]) from None
        if end.code:
            raise RuntimeError(f"exit code {end.code}, {lines}") from end
    finally:
        sys.argv = before
        for flag in set(flags.FLAGS) - _ABSL:
            delattr(flags.FLAGS, flag)
        flags.FLAGS.unparse_flags()
        flags.FLAGS(["command"])  # other targets' libraries look at them


@contextlib.contextmanager
def _no_work(name: str, module: Any):
    """Lets a command check all that it can, and stop where it would begin to work."""
    patches: list[tuple[Any, str, Any]] = [
        (comparison.devices, "choose_platform", lambda *_, **__: None),
        (preparation, "build", lambda config, folder: types.SimpleNamespace(workers=1)),
        (comparison, "_length", lambda experiment: {}),
        (comparison, "compare", lambda request, argv: comparison.check(request) or ""),
    ]
    if name == "train":
        patches = [
            (module.supervisor, "supervise", lambda job: 0),
            (module, "_train", lambda claim: validate(module._CONFIG.value)),
        ]
    if name == "plan":
        from acco_jax.plan import planner

        patches = [(planner.programs, "vocab_size", _planned)]
    saved = [
        (owner, attribute, getattr(owner, attribute)) for owner, attribute, _ in patches
    ]
    try:
        for patch in patches:
            setattr(*patch)
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    except Planned:
        pass
    finally:
        for patch in saved:
            setattr(*patch)


def _planned(config: ConfigDict) -> int:
    raise SystemExit(0)


# Configs


def config(case: Case) -> None:
    """Validates a config: of flags, of values in Python, or up to its compilation."""
    changes = case["changes"]
    if case["how"] == "flags":
        given = [f"--config.{f}={v}".replace("\0", "") for f, v in changes.items()]
        validate(parsing.config_of(["--config=config.py", *given]))
        return
    changed = ConfigDict(
        parsing.config_of(["--config=config.py"]).to_dict(), type_safe=False
    )
    for field, text in changes.items():
        *path, last = field.split(".")
        try:
            node = changed
            for name in path:
                node = node[name]
            node[last] = mutations.literal(text)
        except Exception:  # ml_collections refuses it in the config's own program
            return
    validate(changed)
    if case["how"] == "prepared":
        preparation.prepare(changed, Path("work"), jax.devices()[:1])


# Files of a run


def metrics(case: Case) -> None:
    """Reads, continues and draws metrics.jsonl."""
    workdir = Path()
    continuing.check_whole(workdir, Path("checkpoints"))
    found = rows.read(workdir)
    rows.Recorder(workdir, done=2, tokens=16, seconds=1.0).close()
    _results(workdir)
    if any("bits_per_byte" in row for row in found):
        run_summary.draw(found, 2.0, Path("loss.png"), "fuzzed")


def goodput(case: Case) -> None:
    """Reads and continues goodput.jsonl."""
    record.spent(record.read(Path()))
    continuing.check_whole(Path(), Path("checkpoints"))
    made = record.Record(Path(), time.time(), over=False)
    made.mark("start_up", 2)
    made.trained(3)
    made.summary()
    made.close()


def counts(case: Case) -> None:
    """Reads, continues and replays counts.jsonl."""
    path = Path(logs.FILE)
    read_counts(path)
    made = logs.CountsLog(Path(), 4)
    made.add([1])
    made.close()
    logs.check_log(path, 4, 1, 16)
    acco_jax.Replay(str(path), 16)


def worlds(case: Case) -> None:
    """Reads, continues and replays worlds.jsonl."""
    found = record_of_worlds.recorded(Path())
    replay = record_of_worlds.WorldsReplay(Path())
    identity = json.loads(Path("config.json").read_text())
    for half_round, world in found[:9]:
        replay.check(identity, half_round, world)
        replay.end(half_round)
    for half_round, world in found[:9]:
        record_of_worlds.record(Path("."), half_round, world)


def workdir(case: Case) -> None:
    """Takes a workdir with its lock and config, and reads its results."""
    with workdirs.claimed(Path()):
        workdirs.check_held(Path())
        continuing.check_workdir(Path(), _experiment().identity)
    comparison._check_folder(Path(), _experiment().config)
    _results(Path())


def _results(folder: Path) -> None:
    if results.finished(folder):
        found = [results.read(folder, "acco", seed) for seed in (0, 1)]
        results.table(found)
        results.curve(found)


@functools.cache
def _experiment() -> prepared.Experiment:
    """Prepares the run whose checkpoints are mutated, once."""
    folder = _scratch("prepared")
    with contextlib.chdir(folder):
        for name in ("config.py", "records.jsonl"):
            shutil.copy(SEEDS / name, name)
        made = parsing.config_of(["--config=config.py"])
        return preparation.prepare(made, Path("work"), jax.devices()[:1])


def fresh_workdir() -> Path:
    """Returns the valid workdir, as a run of today's config would have written it."""
    folder = _scratch("workdir")
    if not (folder / "checkpoints").exists():
        shutil.copytree(SEEDS / "workdir", folder, dirs_exist_ok=True)
        identity = _experiment().identity
        (folder / "config.json").write_text(json.dumps(identity))
        for step in (2, 4):
            path = folder / "checkpoints" / str(step) / "host" / "metadata"
            host = json.loads(path.read_text()) | {"identity": identity}
            path.write_text(json.dumps(host))
            _sum_files(folder / "checkpoints" / str(step))
    os.utime(folder / "lock.json", (0, 0))  # gone for long, whenever it was checked out
    return folder


def _sum_files(checkpoint: Path) -> None:
    sums = saves._checksums(saves.epath.Path(checkpoint), remote=False)
    checkpoint.with_suffix(".checksums").write_text(json.dumps(sums))


def _scratch(name: str) -> Path:
    folder = Path(os.environ["ACCO_FUZZ"]) / name
    folder.mkdir(exist_ok=True)
    return folder


def checkpoints(case: Case) -> None:
    """Continues from the newest checkpoint, as the loop does up to the first batch."""
    made = dataclasses.replace(_experiment(), workdir=Path())
    folder = Path("checkpoints/4")
    if case["sums"] != "kept" and folder.is_dir():
        _sum_files(folder)
    continuing.check_whole(made.workdir, made.checkpoint_folder)
    continuing.check_checkpoint(made, prepared.batches(made), ())
    try:
        _restored(made)
    except saves.Damaged:
        raise
    except ValueError as error:
        raise RuntimeError("the loop does not expect this error") from error
    finally:
        made.checkpoints.close()


def _restored(made: prepared.Experiment) -> None:
    """Restores the newest checkpoint, as the loop does."""
    found = made.checkpoints.restore_newest(made.abstract)
    if found is None:
        return
    step, _, host = found
    batches = prepared.batches(made)
    batches.set_state(host["batches"])
    next(batches)
    time.perf_counter() - host["seconds"]
    Drops(True, made.mesh, 3, batches.first_row, host.get("dropped")).state()
    made.checkpoints._held_out_loss(step)


# Data


def _data(**changes: Any) -> ConfigDict:
    config = configs.default_config().data
    config.name, config.path, config.held_out = "jsonl", "records.jsonl", 0.25
    config.data_dir = "data"
    config.update(changes)
    return config


def _consume(config: ConfigDict, *, known: bool = True) -> None:
    """Loads a corpus and reads batches of it, whose tokens are `known` to be some."""
    corpus = data.load_corpus(config, workdir="work")
    shape = {"length": 400 if config.task == "instruct" else 8, "batch_size": 1}
    batches = data.train_iterator(corpus, seed=0, prefetch=False, **shape)
    for batch in (
        next(batches),
        next(batches),
        next(data.validation_batches(corpus, **shape)),
    ):
        tokens = np.asarray(batch["tokens"])
        if (
            known
            and not 0 <= tokens.min() <= tokens.max() < corpus.tokenizer.vocab_size
        ):
            raise AssertionError(
                f"token {tokens.max()} of {corpus.tokenizer.vocab_size}"
            )
        corpus.tokenizer.decode(tokens[0])


def source(name: str, case: Case) -> None:
    """Reads a data set of one kind."""
    folder = Path("set")
    names = [p for p in Path().iterdir() if p != folder]
    folder.mkdir()
    for path in names:
        path.rename(folder / path.name)
    if name == "tfds":
        _consume(
            _data(
                name="our_records", path=None, data_dir=str(folder), task=case["task"]
            )
        )
    else:
        task = case.get("task", "pretrain")
        _consume(_data(name=name, path=str(folder), task=task))


def _records() -> None:
    """Puts records here."""
    shutil.copy(SEEDS / "records.jsonl", "records.jsonl")


def tokenizer(case: Case) -> None:
    """Encodes records with a tokenizer of others, given or kept in the workdir."""
    _records()
    suffix = ".model" if case["variant"] == "sentencepiece" else ".json"
    path = "pieces.model" if suffix == ".model" else "tokenizer.json"
    if case["where"] == "kept":
        Path("work").mkdir()
        for name in (path, "tokenizer_config.json", "special_tokens_map.json"):
            if Path(name).exists():
                Path(name).rename(f"work/{name}")
        with contextlib.suppress(OSError):
            Path("work/pieces.model").rename("work/tokenizer.model")
            Path("work/tokenizer_config.json").write_text('{"eos_token": "</s>"}')
        path = f"gone{suffix}"
    _consume(_data(tokenizer=path))


def bpe(case: Case) -> None:
    """Encodes records with a BPE that a run has trained."""
    _records()
    seed = Path("tokenizer.json")
    config = _data(tokenizer="bpe", vocab_size=291)
    if case["where"] == "kept":
        Path("work").mkdir()
        Path("work/config.json").write_text("{}")
        Path("tokenizer_config.json").unlink(missing_ok=True)
        if seed.exists():
            seed.rename("work/tokenizer.json")
    else:
        opened = data.corpora.open_source(config, Path("data").absolute())
        Path("data/tokenizers").mkdir(parents=True)
        if seed.exists():
            seed.rename(f"data/tokenizers/{opened.fingerprint}-291.json")
    _consume(config)


def tokens(case: Case) -> None:
    """Reads tokens that were written before."""
    names = list(Path().iterdir())
    _records()
    config = _data(task=case["variant"])
    data.load_corpus(config, workdir="work")
    (folder,) = Path("data/tokens").iterdir()
    shutil.rmtree(folder)
    folder.mkdir()
    for path in names:
        path.rename(folder / path.name)
    if case["sums"] != "kept":
        _sum_up(folder)
    _consume(config, known=case["sums"] == "kept")


def _sum_up(folder: Path) -> None:
    """Makes the sums of damaged tokens right: what is behind them is reached."""
    nothing = (ValueError, TypeError, KeyError, OSError, RecursionError)
    with contextlib.suppress(*nothing):
        counted = json.loads((folder / "counts.json").read_text())["counts"]
        for path in folder.glob("*.bin"):
            np.save(path.with_suffix(".sums.npy"), stored.block_sums(path))
        counted["checksum"] = cache._checksum(folder)
        counted["sizes"] = {p.name: p.stat().st_size for p in cache._files(folder)}
        cache.write_counts(folder, counted)
