"""Commands as processes of their own: killed, frozen, told to stop, and taken in again.

Their own processes train nothing (supervised.py).
"""

import contextlib
import dataclasses
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time

import pytest

from acco_jax.command import exits, signals
from tests.run.supervised import GOOD, alive


@pytest.fixture
def start():
    """start(job): its command, a process of its own."""
    code = (
        "import json, sys; from pathlib import Path\n"
        "from acco_jax.run.supervise import supervisor, meeting\n"
        "job = json.loads(sys.argv[1]); job['workdir'] = Path(job['workdir'])\n"
        "job['limits'] = meeting.Limits(**job['limits'])\n"
        "sys.exit(supervisor.supervise(supervisor.Job(**job)))"
    )
    with contextlib.ExitStack() as stack:

        def popen(job):
            text = json.dumps(dataclasses.asdict(job), default=str)
            started = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", code, text],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(started.kill)
            return started

        yield popen


def begun(started):
    """The words of the process that a command has started: the attempt comes first."""
    said = ["imported"]
    while said[0] == "imported":
        said = started.stdout.readline().split()
    return said


def child_of(started):
    """The number of the process that a command has started."""
    return int(begun(started)[2])


def place_of(started):
    """(attempt, "number/how many") of the process that a command has started."""
    attempt, _, _, place = begun(started)
    return int(attempt), place


@pytest.mark.fast("0")
@pytest.mark.parametrize("killed", [0, 1])
def test_a_command_that_is_killed_takes_its_process_along(jobs, start, killed):
    todo = jobs(("stay", 3), ("stay", 3), restarts=1)
    started = [start(job) for job in todo]
    children = [child_of(one) for one in started]
    started[killed].kill()
    again = start(todo[killed])  # and takes part in the second attempt
    out, err = again.communicate(timeout=60)
    assert again.returncode == 0, err
    assert "\n2 " in "\n" + out
    left = started[1 - killed]
    _, err = left.communicate(timeout=60)
    assert left.returncode == 0, err
    assert f"process {killed} on" in err and "its command is gone" in err
    assert not any(map(alive, children))


@pytest.mark.slow
def test_fewer_go_on_and_whoever_comes_again_is_taken_in(jobs, start):
    """Four commands, of which the second and then the last are gone for a while."""
    limits = {"restarts": 9, "min_processes": 2, "regroup_after": 1.0}
    todo = jobs(*[("save", 5, 9)] * 4, **limits)
    started = [start(job) for job in todo]
    assert [place_of(one) for one in started] == [(1, f"{i}/4") for i in range(4)]
    started[1].kill()
    left = [started[i] for i in (0, 2, 3)]
    assert [place_of(one) for one in left] == [(2, f"{i}/3") for i in range(3)]
    started[3].kill()
    assert [place_of(started[i]) for i in (0, 2)] == [(3, "0/2"), (3, "1/2")]
    started[1] = start(todo[1])
    assert [place_of(started[i]) for i in (0, 1, 2)] == [
        (4, f"{i}/3") for i in range(3)
    ]
    for i in (0, 1, 2):
        started[i].send_signal(signal.SIGTERM)
    said = [started[i].communicate(timeout=30)[1] for i in (0, 1, 2)]
    assert [started[i].returncode for i in (0, 1, 2)] == [exits.STOPPED] * 3, said
    assert "going on with 3 of 4 processes: without process 1" in said[0]
    assert "going on with 2 of 4 processes: without process 1, 3" in said[0]
    assert "process 1 on" in said[0] and "came, for whom the others have sav" in said[0]


@pytest.mark.slow
def test_a_machine_that_wakes_up_late(jobs, start):
    started = [start(job) for job in jobs(("stay", 3), ("stay", 3))]
    children = [child_of(one) for one in started]
    time.sleep(3)  # until process 0's command has heard of its half-rounds
    for frozen in (started[1].pid, children[1]):
        os.kill(frozen, signal.SIGSTOP)
    _, err = started[0].communicate(timeout=30)
    assert started[0].returncode == exits.LOST
    assert re.search(r"process 1 on .* after half-round 2 \(no sign of life for", err)
    line = err
    for frozen in (started[1].pid, children[1]):
        os.kill(frozen, signal.SIGCONT)
    _, err = started[1].communicate(timeout=30)
    assert started[1].returncode == exits.LOST
    assert err == line
    assert not any(map(alive, children))


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [0, 1])
def test_when_the_judge_pauses_all_say_so(jobs, start, restarts):
    plans = ("stay", 3), ("stay", 3), ("stay", 3)
    started = [start(job) for job in jobs(*plans, restarts=restarts)]
    children = [child_of(one) for one in started]
    time.sleep(3)  # until all have heard of its half-rounds
    os.kill(started[0].pid, signal.SIGSTOP)
    time.sleep(8)
    os.kill(started[0].pid, signal.SIGCONT)
    said = [one.communicate(timeout=40)[1] for one in started]
    assert [one.returncode for one in started] == [0 if restarts else exits.LOST] * 3
    lines = {re.search(r"process .*? was lost [^:]*", text)[0] for text in said}
    (line,) = lines
    assert line == (
        f"process 0 on {socket.gethostname()} was lost after half-round 2 (no sign of "
        "life from its command for 4 s)"
    )
    assert not any(map(alive, children))


@pytest.mark.slow
def test_silent_connections_under_a_low_limit_of_open_files(jobs, start):
    todo = jobs(("none", 0), ("SIGKILL", 3), restarts=1)
    first = start(todo[0])
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.prlimit(first.pid, resource.RLIMIT_NOFILE, (64, most))
    address = todo[0].coordinator.split(":")
    silent = []
    with contextlib.ExitStack() as stack:
        while len(silent) < 200:
            with contextlib.suppress(OSError):
                there = socket.create_connection(address, timeout=1)
                silent.append(stack.enter_context(there))
        second = start(todo[1])
        said = [x.communicate(timeout=60)[1] for x in (first, second)]
    assert all("attempt 2 of 2 begins" in text for text in said), said
    assert [first.returncode, second.returncode] == [0, 0]


@pytest.mark.parametrize("waits", ["wait", "stay"])
def test_signals_are_passed_on_and_a_second_one_is_obeyed_at_once(jobs, start, waits):
    (job,) = jobs((waits, 3), restarts=1)
    started = start(job)
    child = child_of(started)
    time.sleep(0.5)
    started.send_signal(signal.SIGTERM)
    if waits == "stay":
        time.sleep(signals.AGAIN + 0.2)
        assert started.poll() is None
        started.send_signal(signal.SIGTERM)
    _, err = started.communicate(timeout=20)
    assert started.returncode == (exits.STOPPED if waits == "wait" else exits.FAILED)
    assert err.startswith("error: interrupted") == (waits == "stay"), err
    assert not alive(child)


def test_a_process_killed_after_it_was_told_to_stop_is_lost(jobs, start):
    """So that nobody takes what it has not saved for saved."""
    (job,) = jobs(("die", 3), restarts=1)
    started = start(job)
    child_of(started)
    time.sleep(0.5)
    started.send_signal(signal.SIGTERM)
    _, err = started.communicate(timeout=20)
    assert started.returncode == exits.LOST and "killed by SIGKILL" in err, err


def test_told_to_stop_while_it_waits(jobs, start):
    job = jobs(GOOD, GOOD)[0]
    started, address = start(job), job.coordinator.split(":")
    while True:
        with contextlib.suppress(OSError), socket.create_connection(address):
            break
        time.sleep(0.1)
    time.sleep(0.5)
    started.send_signal(signal.SIGINT)
    _, err = started.communicate(timeout=20)
    assert started.returncode == exits.STOPPED
    assert err == "error: stopped while waiting for other processes.\n"
