"""experiments/: what their docstrings say, and their smoke scale from end to end."""

import json
import re
import runpy
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from acco_jax.models import transformer
from acco_jax.run.build import models
from acco_jax.run.build.validation import validate
from acco_jax.run.compare import comparison
from acco_jax.run.config import parsing
from tests import programs, stand_ins

ROOT = Path(__file__).resolve().parents[2]
NAMES = (
    "tinystories_36m", "openwebtext_125m", "alpaca_gptneo_2p7b",
    "alpaca_llama3_8b_lora", "heterogeneous",
)  # fmt: skip
PUBLISHED = {
    "alpaca_gptneo_2p7b": "gpt-neo-2.7b",
    "alpaca_llama3_8b_lora": "llama-3-8b",
}
FLOAT32 = {"dtype": "float32", "param_dtype": "float32"}
SMALL = {"max_length": 512, "width": 16, "layers": 2, "heads": 4} | FLOAT32
pytestmark = pytest.mark.filterwarnings(  # how ml_collections 1.1.0 loads a file
    r"ignore:the load_module\(\) method:DeprecationWarning"
)


def docstring(name):
    return runpy.run_path(str(ROOT / "experiments" / f"{name}.py"))["__doc__"]


def written(name):
    """The arguments of each command in a docstring, those of python first."""
    joined = docstring(name).replace("\\\n", " ")
    lines = re.findall(r"python -m acco_jax\.(?:train|compare) .*", joined)
    return [shlex.split(line.removesuffix(" &")) for line in lines]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """places(name): what DATA, MODEL and TOKENIZER stand for in its docstring."""
    root = tmp_path_factory.mktemp("stand_ins")
    gptneo = {**transformer.FAMILIES["gpt-neo"], **SMALL, "vocab_size": 300}
    llama = {**transformer.FAMILIES["llama"], **SMALL, "vocab_size": 300, "kv_heads": 2}

    def model(config):
        path = root / config["norm"]
        if not path.exists():
            stand_ins.model(path, transformer.Config(**config))
        return path

    make = {
        "tinystories_36m": lambda: {"DATA": stand_ins.tinystories(root / "stories")},
        "openwebtext_125m": lambda: {
            "DATA": stand_ins.openwebtext(root / "web"),
            "TOKENIZER": stand_ins.tokenizer(root / "tokenizer.json"),
        },
        "alpaca_gptneo_2p7b": lambda: {
            "DATA": stand_ins.alpaca(root / "alpaca"),
            "MODEL": model(gptneo),
        },
        "alpaca_llama3_8b_lora": lambda: {
            "DATA": stand_ins.alpaca_lines(root / "alpaca.jsonl"),
            "MODEL": model(llama),
        },
        "heterogeneous": dict,
    }
    return lambda name: make[name]()


def with_places(arguments, places):
    """The arguments with paths in the place of the names for them."""
    paths = [re.sub(r"=([A-Z]+)$", lambda m: f"={places[m[1]]}", a) for a in arguments]
    if any(a.endswith(".jsonl") for a in paths):
        paths.append("--config.data.name=jsonl")
    return paths


def config_of(arguments):
    """The config of a command, from its flags."""
    return parsing.config_of([a for a in arguments if a.startswith("--config")])


def whole(name, tmp_path):
    """The experiment at full size, with the description of a published model."""
    flags = [f"--config={ROOT / 'experiments' / name}.py"]
    if name in PUBLISHED:
        size = transformer.size(PUBLISHED[name])
        folder = stand_ins.described(tmp_path / "model", size)
        flags.append(f"--config.init_from={folder}")
    return parsing.config_of(flags)


def number(text):
    return int(text.replace(",", ""))


@pytest.mark.parametrize("name", NAMES)
def test_parameters_and_tokens_are_as_said(name, tmp_path):
    text, config = " ".join(docstring(name).split()), whole(name, tmp_path)
    validate(config)
    vocab_size = config.data.vocab_size or 257
    model = models.model(config, vocab_size)
    count, trained = re.search(
        r"Parameters: ([\d,]+)(?: frozen, ([\d,]+) trained)?\.", text
    ).groups()
    assert model.parameters() == number(count)
    if trained:
        _, init = models.trained(config, model, jax.eval_shape)
        leaves = jax.tree.leaves(jax.eval_shape(init))
        assert sum(leaf.size for leaf in leaves) == number(trained)
    per_worker = config.microbatch_size * config.microbatches_per_step * config.length
    said = re.search(r"Tokens per step (.*?[\d,]+)[.,;] ?(?!of)", text)[1]
    pairs = re.findall(r"of (\d+)(?: workers)?: ([\d,]+\d)", said)
    assert pairs
    for workers, tokens in pairs:
        assert int(workers) * per_worker == number(tokens)


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_can_be_given(name, places, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert len(written(name)) > (name != "heterogeneous")
    for arguments in written(name):
        arguments = with_places(arguments[3:], places(name))
        validate(config_of(arguments))
        methods = [a for a in arguments if a.startswith("--methods=")]
        for entry in comparison.parse(methods[0][10:]) if methods else ():
            validate(config_of([*arguments, *entry.flags]))


def test_flags_win_over_a_scale():
    config = [f"--config={ROOT / 'experiments' / 'tinystories_36m.py'}"]
    config += ["--config.scale=smoke", "--config.steps=7", "--config.model.layers=4"]
    small = parsing.config_of(config)
    assert (small.steps, small.model.layers, small.model.width) == (7, 4, 32)
    with pytest.raises(ValueError, match=r"scale is 'smoky': did you mean 'smoke'\?"):
        parsing.config_of([*config, "--config.scale=smoky"])


def test_the_batch_of_tinystories_is_the_releases(tmp_path):
    config = whole("tinystories_36m", tmp_path)
    rows = config.microbatch_size * config.microbatches_per_step * 8
    assert rows == 80 * 16
    warmups = re.findall(r"warmup_steps=(\d+)", docstring("tinystories_36m"))
    assert warmups == ["40", "500"] and config.steps > 500


def command(arguments, cwd, tmp_path):
    env = programs.environment(ACCO_DATA_DIR=str(tmp_path / "data"))
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=cwd, env=env,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finished(workdir, *processes):
    """The summary of a run of these processes, that have ended well."""
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), (
        outputs
    )
    return json.loads((workdir / "summary.json").read_text())


def long(name):
    return pytest.param(name, marks=pytest.mark.long)


SLOW = pytest.param("tinystories_36m", marks=pytest.mark.slow)


@pytest.mark.parametrize("name", [SLOW, *map(long, NAMES[1:4])])
def test_smoke(name, places, tmp_path):
    (smoke,) = (a for a in written(name) if "--config.scale=smoke" in a)
    arguments = with_places(smoke[1:], places(name))
    workdir = tmp_path / "runs" / "smoke"
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    summary = finished(workdir, command(arguments, tmp_path, tmp_path))
    assert summary["steps"] == 10
    first = config_of([*with_places(smoke, places(name))])
    rows = [json.loads(x) for x in (workdir / "metrics.jsonl").read_text().splitlines()]
    losses = [r["loss"] for r in rows if r["kind"] == "validation"]
    assert losses[-1] < losses[0]
    said = json.loads((workdir / "config.json").read_text())
    assert said["scale"] is None and said["scales"] == {}
    assert said["microbatch_size"] == first.microbatch_size == 2


@pytest.mark.long
def test_smoke_of_unequal_workers(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    workdir = tmp_path / "run"
    flags = [
        *("-m", "acco_jax.train", "--config=experiments/heterogeneous.py"),
        *("--config.scale=smoke", f"--workdir={workdir}"),
        *(f"--coordinator=localhost:{port}", "--processes=4"),
    ]
    processes = [command([*flags, f"--process={i}"], ROOT, tmp_path) for i in range(4)]
    summary = finished(workdir, *processes)
    assert summary["steps"] == 10
    counts = [
        json.loads(x) for x in (workdir / "counts.jsonl").read_text().splitlines()
    ]
    assert all(len(row) == 4 and 1 <= min(row) <= max(row) <= 4 for row in counts)
