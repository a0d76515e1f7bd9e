"""Some of the broken inputs of the fuzzer, and all that were findings once."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "benchmarks" / "fuzz.py"
FAILED = ROOT / "tests" / "recorded" / "fuzz" / "failed"


def fuzz(*flags):
    command = [sys.executable, PROGRAM, *flags]
    environment = os.environ | {"COLUMNS": "80"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment
    )


@pytest.fixture(scope="module")
def short():
    """A run of 200 inputs, beside the valid ones and those that were kept."""
    return fuzz("--inputs=200", "--seed=7")


@pytest.mark.slow
def test_nothing_but_one_line(short):
    assert short.returncode == 0, short.stdout + short.stderr
    assert "FINDING" not in short.stdout


@pytest.mark.slow
def test_every_target_accepts_what_is_valid_and_refuses_something(short):
    lines = short.stdout.splitlines()
    rows = [re.findall(r"[^| ][^|]*[^| ]|[^| ]", line) for line in lines]
    table = {row[0]: [int(x.replace(",", "")) for x in row[1:5]] for row in rows[2:]}
    assert len(table) == 18
    total = table.pop("all")
    for target, (inputs, accepted, refused, findings) in table.items():
        assert inputs == accepted + refused and accepted and not findings
        assert refused or target == "checkpoints"  # goes on from the one before
    kept = len(list(FAILED.glob("*.json")))
    assert total[0] == sum(row[0] for row in table.values()) >= 200 + kept


@pytest.mark.slow
def test_a_case_is_the_same_again(monkeypatch, tmp_path):
    """Seed, target and number determine it, not the process or the clock."""
    monkeypatch.syspath_prepend(PROGRAM.parent)
    monkeypatch.setenv("ACCO_FUZZ", str(tmp_path))
    shown = fuzz("--target=jsonl", "--case=3").stdout.splitlines()[0]
    assert json.loads(shown) == importlib.import_module("fuzzing.targets").make(
        "jsonl", 0, 3
    )


STUB = """
import os, sys
print("ready", flush=True)
for line in sys.stdin:
    if "abort" in line:
        os.abort()
    while "loop" in line:
        pass
    print('{"result": "accepted", "problem": null}', flush=True)
"""


@pytest.mark.slow
def test_an_input_that_ends_the_interpreter_is_named(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(PROGRAM.parent)
    program = importlib.import_module("fuzz")
    monkeypatch.setattr(program, "SECONDS", 0.5)
    monkeypatch.setattr(program.Worker, "COMMAND", (sys.executable, "-c", STUB))
    (tmp_path / "messages.txt").write_text("last words")
    worker = program.Worker(tmp_path)
    found = [worker.ask({"target": x})[0] for x in ("fine", "abort", "fine", "loop")]
    worker.close()
    problems = [outcome["problem"] for outcome in found]
    assert problems == [None, "the interpreter ended with -6", None, "more than 0 s"]
    assert found[1]["trace"] == "last words"


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (ValueError("a.json is damaged: restore it"), None),
        (OSError(2, "no such file", "a.json"), None),
        (ValueError("something else"), "names no file"),
        (ValueError("a.json:\nis damaged"), "has 2 lines"),
        (ValueError(""), "has 0 lines"),
        (ValueError("a.json" * 2000), "12000 characters"),
        (KeyError("a.json"), "KeyError is no ValueError"),
        (MemoryError(), "MemoryError is no ValueError"),
        (UnicodeDecodeError("utf-8", b"", 0, 1, "a.json"), "another library's"),
    ],
)
def test_what_is_no_refusal(monkeypatch, error, problem):
    monkeypatch.syspath_prepend(PROGRAM.parent)
    judge = importlib.import_module("fuzzing.worker").judge
    found = judge(error, {"a.json"})
    assert found == problem if problem is None else problem in found


def test_what_data_ask_python_for_is_seen(monkeypatch):
    """In a process of its own: an audit hook stays."""
    script = """
import contextlib, importlib, os
from fuzzing import worker
watch = worker.Watch()
watch.on = True
with contextlib.suppress(ImportError):
    importlib.import_module("evil.module")
os.system("true")
importlib.import_module("wave")
watch.on = False
seen = [what.partition("(")[0] for what in watch.seen]
assert seen == ["import of 'evil'", "os.system"], watch.seen
"""
    environment = os.environ | {"PYTHONPATH": str(PROGRAM.parent)}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)
