"""How a command ends: one line and one code, whatever was raised."""

import errno
import json
import logging as levels
import os
import re
from pathlib import Path

import pytest
from absl import logging

import acco_jax
from acco_jax.command import exits, files, heartbeat
from acco_jax.run.compare import pool
from acco_jax.run.observe import spikes
from acco_jax.run.state import replicas
from tests import programs

PACKAGE = Path(acco_jax.__file__).parent
COMMANDS = ("train", "compare", "evaluate", "generate", "export", "runs", "report",
            "doctor")  # fmt: skip


class Panic(BaseException):
    """As of a library in Rust."""


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (
            exits.Damaged("every one"),
            exits.REFUSED,
            r"every one \(test_exits.py, line .*",
        ),
        (OSError(28, "No space left"), exits.REFUSED, r"\[Errno 28\] No space left"),
        (FileNotFoundError(2, "none"), exits.REFUSED, r"\[Errno 2\] none"),
        # not the user's: a command with restarts begins again
        (OSError(5, "Input/output"), exits.FAILED, r"\[Errno 5\] Input/output"),
        (OSError(116, "Stale"), exits.FAILED, r"\[Errno 116\] Stale"),
        (ConnectionResetError(104, "x"), exits.FAILED, r"\[Errno 104\] x"),
        (TimeoutError(110, "x"), exits.FAILED, r"\[Errno 110\] x"),
        (spikes.LossSpike("the loss"), exits.DIVERGED, "the loss"),
        (FloatingPointError("nan"), exits.DIVERGED, "nan"),
        (KeyboardInterrupt(), exits.FAILED, "interrupted"),
        (pool.RunFailed("no result"), exits.FAILED, "no result"),
        (replicas.ReplicasDiffer("worker 1"), exits.REFUSED, "worker 1"),
        (exits.Stopped("told to"), exits.STOPPED, "told to"),
        (MemoryError(), exits.FAILED, "out of memory: halve micro.*"),
        (
            RuntimeError("RESOURCE_EXHAUSTED: 4 GiB"),
            exits.FAILED,
            r"out of memory \(RESOURCE_EXHAUSTED: 4 GiB\): halve micro.*",
        ),
        (ValueError("two\nlines"), exits.REFUSED, r"two lines \(test_exits.py, .*"),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, BaseException) else "",
)
def test_what_is_foreseen_is_one_line(capsys, error, code, line):
    with pytest.raises(SystemExit) as end, exits.lines():
        raise error
    out, err = capsys.readouterr()
    assert end.value.code == code and out == ""
    assert re.fullmatch(f"error: {line}\n", err), err


def test_a_command_has_its_own_remedy_for_memory(capsys):
    with pytest.raises(SystemExit), exits.lines("lower --tokens."):
        raise MemoryError
    assert capsys.readouterr().err == "error: out of memory: lower --tokens.\n"
    for name, flag in ("generate", "--tokens"), ("evaluate", "--window"):
        text = (PACKAGE / f"{name}.py").read_text()
        assert re.search(rf'^@exits\.lines\(".*{flag}', text, re.M)


@pytest.mark.parametrize(
    ("level", "said"), [(levels.INFO, ""), (levels.WARNING, "warning: ")]
)
def test_a_line_of_the_log_has_the_time_and_no_place_in_the_code(level, said):
    with exits.lines():
        pass
    record = levels.LogRecord("absl", level, "loop.py", 5, "step %d", (3,), None)
    line = logging.get_absl_handler().format(record)
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d {said}step 3", line), line


@pytest.mark.parametrize(
    "error", [TypeError("an int"), RuntimeError("INTERNAL"), Panic("stack")]
)
def test_other_errors_end_with_a_line_after_their_traceback(capsys, error):
    @exits.lines()
    def main():
        raise error

    with pytest.raises(SystemExit) as end:
        main()
    lines = capsys.readouterr().err.splitlines()
    assert end.value.code == exits.FAILED and lines[0].startswith("Traceback")
    name = type(error).__name__
    last = rf"error: {name}: {error} \(test_exits.py, line \d+\)"
    assert re.fullmatch(last, lines[-1])


def test_a_library_is_said_to_fail_where_it_was_called(capsys):
    with pytest.raises(SystemExit), exits.lines():
        json.loads("{")
    assert re.search(r"\(test_exits.py, line \d+\)\n", capsys.readouterr().err)


def test_a_supervisor_judges_what_nothing_has_foreseen(monkeypatch, capsys):
    """The error may come of a peer that is gone: the process must not blame itself."""
    reader, writer = os.pipe()
    monkeypatch.setattr(heartbeat, "_pipe", writer)
    with pytest.raises(RuntimeError, match="Gloo"), exits.lines():
        raise RuntimeError("Gloo AllGather failed")
    with pytest.raises(KeyboardInterrupt), exits.lines():
        raise KeyboardInterrupt
    with pytest.raises(SystemExit), exits.lines():
        raise exits.Failed("a full disk")
    told = json.loads(os.read(reader, 4096))
    assert told == {"code": exits.FAILED, "error": "a full disk"}
    for end in (reader, writer):
        os.close(end)


@pytest.mark.parametrize("name", [*COMMANDS, "plan/__main__", "audit/__main__"])
def test_every_command_ends_so(name):
    text = (PACKAGE / f"{name}.py").read_text()
    assert re.search(r"^@exits\.lines\(.*\)\ndef main\(", text, re.M)


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        ("replicas.ReplicasDiffer('worker 1 differs')", exits.REFUSED, ""),
        ("OSError(5, 'Input/output error')", exits.FAILED, "the same command contin"),
        ("stored.damaged(Path('train.bin'))", exits.REFUSED, "remove the folder of to"),
    ],
)
def test_what_ends_training_is_told_apart(tmp_path, error, code, says):
    """A device's wrong bits and a damaged file would only come again."""
    program = f"""
from pathlib import Path
from absl import app
from acco_jax import train
from acco_jax.data import stored
from acco_jax.run import loop
from acco_jax.run.state import replicas

def run(*args, **options):
    raise {error}

loop.run = run
parser = train.parsing.parser(train._CONFIG, groups=train.GROUPS)
app.run(train.main, flags_parser=parser)
"""
    (tmp_path / "program.py").write_text(program)
    flags = "--config.steps=2", f"--config.data.data_dir={tmp_path / 'data'}"
    config = f"--config={programs.ROOT / 'experiments' / 'quickstart.py'}"
    workdir = f"--workdir={tmp_path / 'run'}"
    program = tmp_path / "program.py"
    done = programs.run(program, config, workdir, *flags, timeout=240)
    assert done.returncode == code, done.stderr[-2000:]
    line = done.stderr.splitlines()[-1]
    assert line.startswith("error: ") and says in line
    assert bool(says) or "the same command" not in line


def test_a_file_system_that_fails_is_not_a_file_that_cannot_be_read(monkeypatch):
    def read(path):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "read_bytes", read)
    number = errno.EACCES
    with pytest.raises(ValueError, match=r"config\.json cannot be read: "):
        files.read_text(Path("config.json"))
    number = errno.ESTALE
    with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
        files.read_text(Path("config.json"))
