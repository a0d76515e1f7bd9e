"""The command itself: what it prints, what it refuses, and several real processes."""

import contextlib
import fcntl
import json
import os
import pty
import re
import runpy
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from acco_jax.command import exits
from acco_jax.run import preparation
from acco_jax.run.state.checkpoints import Checkpoints
from tests import programs

ROOT = Path(__file__).parent.parent
CONFIG = """
from acco_jax.run.config.fields import default_config

def get_config():
    c = default_config()
    c.devices, c.steps, c.length, c.microbatch_size = 2, 6, 32, 2
    c.microbatches_per_step, c.first_half, c.log_every = 4, 2, 1
    c.eval_every, c.eval_batches, c.checkpoint_every = 2, 2, 2
    c.model.family, c.model.width, c.model.layers, c.model.heads = "llama", 16, 1, 2
    c.model.dtype = c.model.param_dtype = "float32"
    c.data.name, c.data.path, c.data.held_out = "text_folder", {texts!r}, 0.2
    return c
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with texts/, tiny.py and the data sets' cache."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "texts").mkdir()
    for i in range(12):
        text = "".join(f"{j} squared is {j * j}, said {i}.\n" for j in range(i, 250))
        (folder / "texts" / f"{i}.txt").write_text(text)
    (folder / "tiny.py").write_text(CONFIG.format(texts=str(folder / "texts")))
    return folder


@pytest.fixture(scope="module")
def environment(place):
    return programs.environment(ACCO_DATA_DIR=str(place / "data"))


@pytest.fixture(scope="module")
def start(place, environment):
    """start(workdir, *flags): the command, started."""

    def popen(workdir, *args, config="tiny.py", **options):
        flags = [f"--config={place / config}", f"--workdir={workdir}", *args]
        return subprocess.Popen(
            [sys.executable, "-m", "acco_jax.train", *flags],
            env=environment,
            cwd=place,
            text=True,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options,
        )

    return popen


@pytest.fixture(scope="module")
def start_two(start):
    """start_two(workdir, *flags): the command in two processes of one device each.

    `workdirs` gives each process a folder of its own instead; `only` are flags of the
    second alone.
    """

    def popen(workdir, *args, workdirs=None, only=()):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        together = (
            "--config.devices=1",
            "--processes=2",
            f"--coordinator=localhost:{port}",
        )
        workdirs = workdirs or [workdir] * 2
        return [
            start(workdirs[i], *together, f"--process={i}", *args, *only * i)
            for i in range(2)
        ]

    return popen


def finish(*processes, code=exits.FINISHED):
    """The (stdout, stderr) of processes that must end so."""
    outputs = [process.communicate(timeout=500) for process in processes]
    codes = [process.returncode for process in processes]
    assert codes == [code] * len(processes), outputs
    return outputs


def rows_of(workdir):
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    clocks = ("seconds", "tokens_per_second", "goodput")
    return [{k: v for k, v in row.items() if k not in clocks} for row in rows]


def wait_for_rows(process, workdir, count):
    path, deadline = workdir / "metrics.jsonl", time.monotonic() + 500
    while not (path.exists() and path.read_text().count("\n") >= count):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_trains_with_local_steps(start, tmp_path):
    flags = ("--config.method=diloco", "--config.method_options.local_steps=3",
             "--config.method_options.outer_momentum=0.5")  # fmt: skip
    ((_, err),) = finish(start(tmp_path, *flags))
    assert "diloco on 2 cpu devices: 7,488 parameters, 512 tokens a step" in err
    rows = [r for r in rows_of(tmp_path) if r["kind"] == "validation"]
    assert [r["step"] for r in rows] == [3, 6]
    assert rows[1]["loss"] < rows[0]["loss"]


# ---- what it prints


@pytest.fixture(scope="module")
def finished(start, place):
    """(stdout, stderr, workdir) of one real run."""
    workdir = place / "finished"
    ((out, err),) = finish(start(workdir))
    return out, err, workdir


def test_prints_a_start_the_evaluations_and_a_summary(finished):
    out, err, workdir = finished
    assert out == ""
    lines = [re.sub(r"^[\d-]{10} [\d:]{8} ", "", x) for x in err.splitlines()]
    patterns = [
        r"acco on 2 cpu devices: 7,488 parameters, 512 tokens a step; text_folder: .*",
        r"started: imports .*, state .*",
        r"step 1 of 6: loss \d\.\d{3}, gradient norm [\d.]+, .*\? left, "
        r"goodput \d+\.\d%",
        r"step 2: held-out loss \d\.\d{4}, \d\.\d{4} bits per byte",
        r"step 4: held-out loss .*",
        r"step 6 of 6: loss \d\.\d{3}, gradient norm [\d.]+, .*goodput \d+\.\d%",
        r"step 6: held-out loss \d.*",
        r"step 6: held-out loss of all documents \d\.\d{4}, \d\.\d{4} bits per byte",
        r"finished",
        r"acco on 2 devices: 7,488 parameters, 6 steps, 3,328 tokens in \d+ s .*",
        r"held-out loss  .*",
        r"smoothed bigram .*",
        r"each worker sent [\d,]+ bytes; a device holds [\d,]+ of parameters and state",
        r"goodput        \d+\.\d% of \d+ s on half-rounds; .*",
        rf"picture        {re.escape(str(workdir))}/loss.png",
    ]
    if lines[0].startswith("Preparing data set text_folder/"):  # the first time
        lines = lines[1:]
    assert len(lines) == len(patterns), err
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(pattern, line), (line, pattern)


@pytest.mark.slow
def test_draws_a_progress_bar_on_a_terminal(finished, start, place):
    ours, theirs = pty.openpty()
    size = struct.pack("4H", 24, 120, 0, 0)  # else it is of no width
    fcntl.ioctl(ours, termios.TIOCSWINSZ, size)
    process = start(place / "terminal", "--stop_after=9", stderr=theirs, stdout=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the other side is closed
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    assert process.wait() == exits.STOPPED, shown
    text = shown.decode()
    assert re.search(r"step 4/6 .*loss \d\.\d{3}, [\d,]+ tokens/s", text), text
    assert re.search(r"\d\d:\d\d left", text)
    assert re.search(r"step 0/6 .*compiling", text), text
    assert re.search(r"step 4/6 .*evaluating", text), text
    assert re.search(r"step 4/6 .*saving", text), text
    assert "\x1b[" not in text  # no colour
    # what is logged starts where a line does
    logged = re.findall(r"(?:[\r\n]|^)[\d-]{10} [\d:]{8} (\w+)", text)
    assert logged == ["acco", "started", "step", "step", "stopped"], text
    assert len(re.findall(r"[\d-]{10} [\d:]{8} ", text)) == len(logged), text


@pytest.mark.slow
def test_a_command_that_reads_a_run_prints_its_answer_only(finished, environment):
    flags = f"--workdir={finished[2]}", "--prompt=4", "--tokens=3"
    done = subprocess.run(
        [sys.executable, "-m", "acco_jax.generate", *flags],
        env=environment, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done
    assert done.stdout.startswith("4")


# ---- what it refuses (flags: tests/run/test_flags.py)


@pytest.mark.slow
def test_damaged_checkpoints(start, finished, place, tmp_path):
    """The previous one is used, saying so; with none left it is refused in a line."""
    workdir = tmp_path / "work"
    subprocess.run(["cp", "-r", finished[2], workdir], check=True)

    def flip(step):
        files = [p for p in (workdir / "checkpoints" / step).rglob("*") if p.is_file()]
        largest = max(files, key=lambda p: p.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 255
        largest.write_bytes(content)

    flip("13")
    ((_, err),) = finish(start(workdir))
    assert "checkpoints/13 is damaged" in err and "after half-round 9 of 13" in err
    assert rows_of(workdir) == rows_of(finished[2])
    flip("13")
    flip("9")
    process = start(workdir)
    _, err = process.communicate(timeout=500)
    assert process.returncode == exits.REFUSED
    assert re.fullmatch(r"error: every checkpoint in .*", err.splitlines()[-1]), err
    assert "Traceback" not in err


# ---- told to stop, and several processes

LONG = ("--config.steps=20000", "--config.log_every=10", "--config.eval_every=100000",
        "--config.checkpoint_every=100000")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGHUP, marks=pytest.mark.long),
        signal.SIGUSR1,
    ],
)
def test_a_signal_leaves_a_checkpoint_and_an_exit_code(start, tmp_path, number):
    process = start(tmp_path, *LONG)
    wait_for_rows(process, tmp_path, 3)
    process.send_signal(number)
    ((_, err),) = finish(process, code=exits.STOPPED)
    (done,) = re.findall(r"stopped after half-round (\d+) of 40001", err)
    if number != signal.SIGTERM:
        return
    more = f"--stop_after={int(done) + 20}"
    ((_, err),) = finish(start(tmp_path, *LONG, more), code=exits.STOPPED)
    assert f"continuing after half-round {done} of 40001" in err
    numbers = [row["half_round"] for row in rows_of(tmp_path)]
    assert numbers == list(range(21, int(done) + 21, 20))  # every 10 steps


@pytest.mark.slow
def test_a_folder_of_checkpoints_is_of_one_run(start, tmp_path):
    checkpoints = f"--config.checkpoints={tmp_path / 'checkpoints'}"
    first, second = tmp_path / "first", tmp_path / "second"
    process = start(first, *LONG, checkpoints)
    wait_for_rows(process, first, 3)
    other = (second, *LONG, checkpoints, "--config.seed=1")
    ((_, err),) = finish(start(*other), code=exits.REFUSED)
    (line,) = (x for x in err.splitlines() if x.startswith("error: "))
    assert f"another run works in {tmp_path / 'checkpoints'} (" in line
    process.send_signal(signal.SIGTERM)
    ((_, err),) = finish(process, code=exits.STOPPED)
    (done,) = re.findall(r"stopped after half-round (\d+) of 40001", err)
    ((_, err),) = finish(start(*other), code=exits.REFUSED)  # nor when it rests
    (line,) = (x for x in err.splitlines() if x.startswith("error: "))
    assert "seed=0, not 1" in line
    more = f"--stop_after={int(done) + 5}"
    finish(start(first, *LONG, checkpoints, more), code=exits.STOPPED)
    rows = (first / "metrics.jsonl").read_bytes()
    (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")  # as if not mounted
    ((_, err),) = finish(start(first, *LONG, checkpoints), code=exits.REFUSED)
    (line,) = (x for x in err.splitlines() if x.startswith("error: "))
    assert f"its folder {tmp_path / 'checkpoints'} is gone: restore it" in line
    assert not (tmp_path / "checkpoints").exists()
    assert (first / "metrics.jsonl").read_bytes() == rows


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_a_signal_to_one_of_two_processes_stops_both(start_two, tmp_path, number):
    processes = start_two(tmp_path, *LONG)
    wait_for_rows(processes[0], tmp_path, 2)
    processes[1].send_signal(number)  # only one of them is told
    (_, err), _ = finish(*processes, code=exits.STOPPED)
    (done,) = re.findall(r"stopped after half-round (\d+) of 40001", err)
    saved = {p.name for p in (tmp_path / "checkpoints").iterdir()}
    assert saved == {done, f"{done}.checksums"}


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("--config.base={}/base", "base=None, not '"),
        ("--config.checkpoints={}/elsewhere", "checkpoints=False, not True"),
        ("--extend", "--extend=False, not True"),
    ],
)
def test_two_processes_with_different_flags_say_so(start_two, tmp_path, flag, named):
    """Before one of them opens what the other does not know of."""
    processes = start_two(tmp_path / "run", only=(flag.format(tmp_path),))
    for process in processes:
        _, err = process.communicate(timeout=300)
        (line,) = (x for x in err.splitlines() if x.startswith("error: "))
        assert "process 1 has another config than process 0" in line
        assert named in line and process.returncode == exits.REFUSED


STUCK = """
import pathlib, queue

def once(row):
    here = pathlib.Path(__file__).with_name("stuck")
    if row["half_round"] == 5 and not here.exists():
        here.touch()
        queue.Queue().get()  # as of a thread that has died
"""


@pytest.mark.long
@pytest.mark.parametrize("strict", [True, False])
def test_a_main_thread_that_is_stuck(two, start_two, place, tmp_path, strict):
    """Strict hooks run in it: the run is begun again. Others do not stop the loop."""
    (place / "stuck_hook.py").write_text(STUCK)
    (place / "stuck").unlink(missing_ok=True)
    hook = ("--config.metrics_hook=stuck_hook:once", f"--strict_hooks={strict}")
    started = start_two(tmp_path, *hook, "--stuck_after=12", "--restarts=1")
    said = [err for _, err in finish(*started)]
    if strict:
        line = r"process 0 on \S+ was lost after half-round \d+ \(no half-round after "
        line += r"half-round \d+ for \d+ s: its main thread is in once, stuck_hook.py"
        for err in said:
            assert re.search(line, err), [x for x in err.splitlines() if "lost" in x]
        stacks = tmp_path / "failures" / "attempt-1" / "process-0" / "stacks.txt"
        assert "stuck_hook.py" in stacks.read_text()
    else:
        assert "has not taken all rows" in said[0] and "lost" not in said[0]
    assert rows_of(tmp_path) == rows_of(two[0])


@pytest.fixture(scope="module")
def two(start_two, place):
    """The workdir of an uninterrupted run of two processes, and what they printed."""
    workdir = place / "two"
    return workdir, finish(*start_two(workdir))


@pytest.mark.slow
def test_two_processes_train_as_one_with_two_devices(finished, two):
    """The same rows in the same batches: the same losses, to float32 rounding."""
    one, several = rows_of(finished[2]), rows_of(two[0])
    assert len(one) == len(several)
    for a, b in zip(one, several, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-6)
        assert {**a, "loss": 0, "grad_norm": 0} | {"bits_per_byte": 0} == (
            {**b, "loss": 0, "grad_norm": 0} | {"bits_per_byte": 0}
        )


@pytest.mark.slow
def test_only_the_first_process_speaks(two):
    (_, first), (_, second) = two[1]
    assert "acco on 2 cpu devices" in first and "finished" in first
    assert second == "", second


def arrays_of(workdir, place, reader):
    """Parameters and state after the last half-round, read on two devices here."""
    config = runpy.run_path(str(place / "tiny.py"))["get_config"]()
    config.data.data_dir = str(place / "data")
    like = preparation.prepare(config, reader, jax.devices()[:2]).abstract
    found, _ = Checkpoints(workdir / "checkpoints", 2).restore(13, like)
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(found)]


def child_of(process):
    """The process that trains, of a command that supervises it."""
    pid = process.pid
    for _ in range(2):  # what has imported all, and what it has forked
        pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
    return pid


@pytest.mark.slow
def test_two_processes_continue_bit_for_bit(two, start_two, place, tmp_path):
    workdir = tmp_path / "work"
    # after an estimate
    processes = start_two(workdir, "--stop_after=6", "--restarts=1")
    while not (workdir / "lock.json").exists():
        time.sleep(0.05)
    os.kill(child_of(processes[1]), signal.SIGKILL)
    outputs = finish(*processes, code=exits.STOPPED)
    for _, err in outputs:
        assert "process 1 on" in err and "(killed by SIGKILL)" in err
        assert "attempt 2 of 2 begins" in err and "Traceback" not in err
    finish(*start_two(workdir))
    assert rows_of(workdir) == rows_of(two[0])
    reader = tmp_path / "reader"
    whole, resumed = (arrays_of(w, place, reader) for w in (two[0], workdir))
    assert whole == resumed and len(whole) > 50


@pytest.mark.long
def test_zero1_in_two_processes_as_in_one(start, start_two, tmp_path):
    flags = ("--config.method=zero1", "--config.counts=(4,2)")
    finish(start(tmp_path / "one", *flags))
    finish(*start_two(tmp_path / "two", *flags))
    one, several = rows_of(tmp_path / "one"), rows_of(tmp_path / "two")
    for a, b in zip(one, several, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-6)


@pytest.mark.slow
def test_hosts_that_share_no_folder_are_refused_in_one_line(start_two, tmp_path):
    processes = start_two(None, workdirs=[tmp_path / "one", tmp_path / "two"])
    for _, err in finish(*processes, code=exits.REFUSED):
        (line,) = [x for x in err.splitlines() if x.startswith("error: ")]
        assert "is not one folder for all processes: process 1 does not see" in line
        assert "Traceback" not in err


# ---- what training gives


@pytest.mark.long
def test_acco_ends_within_a_percent_of_zero1(start, tmp_path):
    """At equal tokens per optimizer step: the quickstart's, on the standard library."""
    flags = ("--config.devices=2", "--config.microbatch_size=8",
             "--config.optimizer.learning_rate=1e-3")  # fmt: skip
    ends = {}
    for method in ("acco", "zero1"):
        quickstart = ROOT / "experiments" / "quickstart.py"
        workdir, which = tmp_path / method, f"--config.method={method}"
        finish(start(workdir, which, *flags, config=quickstart))
        ends[method] = json.loads((tmp_path / method / "summary.json").read_text())
    # acco's priming half-round communicates nothing and is not part of a step
    assert ends["acco"]["steps"] == ends["zero1"]["steps"]
    ratio = ends["acco"]["loss"] / ends["zero1"]["loss"]
    assert 0.97 < ratio < 1.01, ends
    for summary in ends.values():
        assert summary["bits_per_byte"] < summary["bigram_bits_per_byte"], summary
