"""Commands and the processes they start: who is lost, who says so, and what follows.

The processes here train nothing; tests/test_train.py and benchmarks/chaos.py have real
ones. A process is a plan of what it does when it reaches a half-round.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from acco_jax.runner import exits, heartbeat, meeting, supervisor
from acco_jax.runner.meeting import End, Limits, Member

# heartbeat.py alone: the package around it would import jax, which takes seconds.
PROCESS = f"""
import importlib.util, os, signal, sys, time
spec = importlib.util.spec_from_file_location("heartbeat", {heartbeat.__file__!r})
heartbeat = sys.modules["heartbeat"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(heartbeat)
orders = heartbeat.follow()
fault, at, faulty_attempts = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
place = "/".join(map(str, (orders.process, orders.processes)))
print(orders.attempt, orders.coordinator, os.getpid(), place, flush=True)
os.write(2, b"a message of a library in C++\\n")
for half_round in range(1, 6):
    if half_round == at and orders.attempt <= faulty_attempts:
        if fault == "raise":
            raise RuntimeError("nobody expected this\\nand more")
        if fault == "refuse":
            print("error: no such file", file=sys.stderr)
            heartbeat.ends_with(2, "no such file")
            sys.exit(2)
        if fault == "wait":  # as in a collective whose peer is gone
            while not told:
                time.sleep(0.05)
        if fault == "save":  # once it is told to
            while not told:
                time.sleep(0.05)
        if fault == "slow":  # and alive
            time.sleep(6)
        if fault == "stay":
            while True:
                time.sleep(1)
        if fault.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, fault))
    heartbeat.reached(half_round)
    time.sleep(0.02)
    if told:
        sys.exit(75)
"""
LIMITS = Limits(lost_after=4.0, start_within=30.0)


@pytest.fixture
def jobs(tmp_path):
    """jobs(*plans, **limits): one for each (fault, half-round[, attempts])."""
    script, workdir = tmp_path / "process.py", tmp_path / "work"
    script.write_text(PROCESS)
    workdir.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def make(*plans, **limits):
        return [
            supervisor.Job(
                command=[sys.executable, str(script), *map(str, (*plan, 1)[:3])],
                workdir=workdir,
                limits=dataclasses.replace(LIMITS, **limits),
                process=i,
                processes=len(plans),
                coordinator=f"127.0.0.1:{port}" if len(plans) > 1 else None,
            )
            for i, plan in enumerate(plans)
        ]

    return make


def run(*jobs):
    """The exit codes of all commands; here each is a task instead of a process."""

    async def together():
        return await asyncio.gather(*map(supervisor._supervise, jobs))

    return asyncio.run(asyncio.wait_for(together(), 60))


def errors(capfd):
    return [x for x in capfd.readouterr().err.splitlines() if x.startswith("error: ")]


HOST = re.escape(socket.gethostname())
GOOD, WAIT = ("none", 0), ("wait", 4)


def test_all_good(jobs, capfd):
    assert run(*jobs(GOOD, GOOD, GOOD)) == [exits.FINISHED] * 3
    out, err = capfd.readouterr()
    attempts, coordinators, pids, places = zip(
        *(x.split() for x in out.splitlines()), strict=True
    )
    assert sorted(places) == ["0/3", "1/3", "2/3"]
    assert attempts == ("1",) * 3 and len(set(pids)) == 3
    (coordinator,) = set(coordinators)  # the same for all, and not the meeting's own
    assert coordinator != jobs(GOOD, GOOD)[0].coordinator
    assert err == ""  # C++ speaks to a file


@pytest.mark.fast("SIGKILL-*", "raise-*")
@pytest.mark.parametrize(
    ("fault", "code", "why"),
    [
        ("SIGKILL", exits.LOST, "killed by SIGKILL"),
        ("SIGSEGV", exits.LOST, "killed by SIGSEGV"),
        ("SIGSTOP", exits.LOST, r"no sign of life for [45] s"),
        ("raise", exits.LOST, "RuntimeError: nobody expected this"),
    ],
)
def test_a_lost_process_is_one_line_on_every_host(jobs, capfd, fault, code, why):
    start = time.monotonic()
    todo = jobs(WAIT, (fault, 3), WAIT)
    assert run(*todo) == [code] * 3
    assert time.monotonic() - start < 15
    lines = errors(capfd)
    assert len(lines) == 3 and len(set(lines)) == 1
    folder = todo[0].workdir / "failures" / "attempt-1"
    assert re.fullmatch(
        rf"error: process 1 on {HOST} was lost after half-round 2 \({why}\): messages "
        rf"and stacks are in {re.escape(str(folder))}; the same command continues from "
        r"the last checkpoint\.",
        lines[0],
    )
    for waiting in ("process-0", "process-2"):
        assert "process.py" in (folder / waiting / "stacks.txt").read_text()
    messages = (folder / "process-1" / "messages.txt").read_text()
    assert "a message of a library in C++" in messages
    assert ("nobody expected this" in messages) == (fault == "raise")


def test_a_process_that_says_why_it_ends_is_believed(jobs, capfd):
    # what the others die of when it is gone is not held against them
    todo = jobs(("SIGABRT", 3), ("refuse", 2), ("raise", 3))
    assert run(*todo) == [exits.REFUSED] * 3
    own, *others = errors(capfd)
    assert own == "error: no such file"
    assert set(others) == {f"error: process 1 on {socket.gethostname()}: no such file"}


def test_a_process_killed_comes_before_those_that_abort(jobs, capfd):
    run(*jobs(("SIGABRT", 2), ("SIGKILL", 3), ("raise", 2)))
    assert {"process 1 on" in line for line in errors(capfd)} == {True}


@pytest.mark.slow
def test_slow_is_not_lost(jobs):
    assert run(*jobs(("slow", 2), GOOD)) == [exits.FINISHED] * 2


def test_begins_again(jobs, capfd, caplog):
    todo = jobs(("wait", 4, 2), ("SIGKILL", 3, 2), ("SIGSTOP", 3, 1), restarts=2)
    assert run(*todo) == [exits.FINISHED] * 3
    out = capfd.readouterr().out.split("\n")[:-1]
    assert sorted(x[0] for x in out) == ["1"] * 3 + ["2"] * 3 + ["3"] * 3
    assert len({x.split()[1] for x in out}) == 3  # each attempt has its own port
    assert "attempt 2 of 3 begins" in caplog.text
    assert "attempt 3 of 3 begins" in caplog.text


@pytest.mark.slow
def test_not_more_often_than_it_may(jobs, capfd):
    assert run(*jobs(("wait", 4, 9), ("SIGKILL", 3, 9), restarts=1)) == [exits.LOST] * 2
    assert "failures/attempt-2" in errors(capfd)[0]


@pytest.mark.fast("SIGKILL")
@pytest.mark.parametrize("fault", ["SIGKILL", "raise", "SIGSTOP"])
def test_one_process_begins_again(jobs, fault):
    assert run(*jobs((fault, 3), restarts=1)) == [exits.FINISHED]


def test_a_refusal_is_not_repeated(jobs, capfd):
    assert run(*jobs(("refuse", 3), restarts=5)) == [exits.REFUSED]
    assert errors(capfd) == ["error: no such file"]


async def said(capfd, text, seen):
    """Waits until a process has said this on stdout; the words before the text."""
    while text not in seen[0]:
        await asyncio.sleep(0.1)
        seen[0] += capfd.readouterr().out
    return seen[0][: seen[0].index(text)].split()


def begun(jobs):
    return [asyncio.create_task(supervisor._supervise(job)) for job in jobs]


@pytest.mark.slow
def test_too_few_wait_for_the_others(jobs, capfd):
    limits = {"restarts": 9, "min_processes": 2, "regroup_after": 0.5}
    todo, seen = jobs(("save", 5, 9), ("save", 5, 9), start_within=5.0, **limits), [""]

    async def both():
        tasks = begun(todo)
        await said(capfd, "1/2", seen)
        tasks[1].cancel()  # its machine is gone
        return await tasks[0]

    assert asyncio.run(asyncio.wait_for(both(), 60)) == exits.LOST
    assert "error: process 1 of 2 did not come within 5 s." in errors(capfd)


@pytest.mark.slow
def test_who_comes_to_the_last_attempt_ends_with_it(jobs, capfd, caplog):
    limits = {"restarts": 1, "min_processes": 1, "regroup_after": 0.5}
    todo, seen = jobs(("save", 5, 9), ("stay", 3, 9), **limits), [""]
    caplog.set_level("INFO", logger="absl")

    async def both():
        tasks = begun(todo)
        await said(capfd, "1/2", seen)
        tasks[1].cancel()
        *_, child = await said(capfd, "0/1", seen)
        again = begun(todo[1:])
        while "1 others train: waiting until they save" not in caplog.text:
            await asyncio.sleep(0.1)
        await asyncio.sleep(1)  # and is not taken in
        os.kill(int(child), signal.SIGTERM)
        return [await tasks[0], await again[0]]

    codes = asyncio.run(asyncio.wait_for(both(), 60))
    assert codes == [exits.STOPPED] * 2
    assert "going on with 1 of 2 processes: without process 1" in caplog.text


def test_processes_that_never_come_are_named(jobs, capfd, monkeypatch, caplog):
    monkeypatch.setattr(supervisor, "ANNOUNCE_SECONDS", 0.5)
    todo = jobs(GOOD, GOOD, GOOD, GOOD, start_within=2.0)
    assert run(todo[0], todo[2]) == [exits.LOST] * 2
    assert "waiting for process 1, 3 of 4" in caplog.text
    assert set(errors(capfd)) == {"error: process 1, 3 of 4 did not come within 2 s."}


def test_without_process_0(jobs, capfd, monkeypatch, caplog):
    monkeypatch.setattr(supervisor, "ANNOUNCE_SECONDS", 0.5)
    todo = jobs(GOOD, GOOD, start_within=2.0)
    assert run(todo[1]) == [exits.LOST]
    assert "waiting for process 0 of 2" in caplog.text
    (line,) = errors(capfd)
    assert re.fullmatch(
        r"error: process 0 of 2 did not answer at 127\.0\.0\.1:\d+ within 2 s\.", line
    )


def test_commands_that_do_not_fit(jobs, capfd):
    two, three = jobs(GOOD, GOOD, start_within=3.0), jobs(GOOD, GOOD, GOOD)
    assert run(two[0], three[2])[1] == exits.REFUSED
    assert any("--processes is 3 here and 2 on" in line for line in errors(capfd))
    assert run(two[0], dataclasses.replace(two[0], process=1), two[1]).count(2) == 1
    assert any("is there already" in line for line in errors(capfd))


def test_a_command_comes_again_while_its_old_words_arrive():
    """When a cut link is whole, what was said before it was cut is heard at once."""
    lines = []

    async def say(port, command, *more):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        hello = {"process": 1, "processes": 2, "host": "a", "attempt": 0}
        for message in (hello | {"command": command}, *more):
            writer.write((json.dumps(message) + "\n").encode())
        lines.append(next(iter(json.loads(await reader.readline()))))
        return writer

    async def commands():
        async with meeting.Meeting(2, Limits()).at("127.0.0.1", 0) as here:
            beat = {"beat": {"half_round": 1, "started": True, "silent": 0.0}}
            commands = "one", "one", "other"
            writers = [await say(here.port, name, beat) for name in commands]
            for writer in writers:
                writer.transport.abort()
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(commands(), 20))
    assert lines == ["welcome", "welcome", "refused"]


@pytest.mark.slow
def test_a_connection_that_falls_silent_is_left(jobs):
    """A cut link ends no connection: when it is whole again, old words arrive."""
    (_, job), connections = jobs(GOOD, ("stay", 3), restarts=1), []
    host, port = job.coordinator.split(":")

    def say(writer, **message):
        writer.write((json.dumps(message) + "\n").encode())

    async def meet(reader, writer):
        connections.append(json.loads(await reader.readline()))
        go = {"process": 1, "processes": 2, "absent": []}
        say(writer, go=len(connections), coordinator="b:1", **go)
        if len(connections) == 1:
            await asyncio.sleep(5)  # until nobody listens any more
            old = {"code": 5, "line": "old", "process": 1, "again": False}
            say(writer, verdict=old)
        else:
            while line := await reader.readline():
                if "end" in json.loads(line):
                    say(writer, over=True)
        writer.transport.abort()

    async def both():
        async with await asyncio.start_server(meet, host, int(port)):
            code = await supervisor._supervise(job)
            await asyncio.sleep(1)  # until both connections are closed
            return code

    assert asyncio.run(asyncio.wait_for(both(), 60)) == exits.FINISHED
    assert [hello["attempt"] for hello in connections] == [0, 1]


# ---- commands as processes of their own


@pytest.fixture
def start():
    """start(job): its command, a process of its own."""
    code = (
        "import json, sys; from pathlib import Path\n"
        "from acco_jax.runner import supervisor, meeting\n"
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


def child_of(started):
    """The number of the process that a command has started, from its first line."""
    return int(started.stdout.readline().split()[2])


def place_of(started):
    """(attempt, "number/how many") of the process that a command has started."""
    attempt, _, _, place = started.stdout.readline().split()
    return int(attempt), place


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


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
    assert out.startswith("2 ")
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
    for frozen in (started[1].pid, children[1]):
        os.kill(frozen, signal.SIGCONT)
    _, err = started[1].communicate(timeout=30)
    assert started[1].returncode == exits.LOST
    assert "error: process " in err
    assert not any(map(alive, children))


@pytest.mark.parametrize("waits", ["wait", "stay"])
def test_signals_are_passed_on_and_a_second_one_is_obeyed_at_once(jobs, start, waits):
    (job,) = jobs((waits, 3), restarts=1)
    started = start(job)
    child = child_of(started)
    time.sleep(0.5)
    started.send_signal(signal.SIGTERM)
    if waits == "stay":
        time.sleep(0.5)
        assert started.poll() is None
        started.send_signal(signal.SIGTERM)
    _, err = started.communicate(timeout=20)
    assert started.returncode == (exits.STOPPED if waits == "wait" else exits.FAILED)
    assert err.startswith("error: interrupted") == (waits == "stay"), err
    assert not alive(child)


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


# ---- who is to blame


def members(*changes):
    base = {
        "host": "a",
        "heard": 100.0,
        "idle": False,
        "half_round": 7,
        "started": True,
    }
    return [Member(**(base | {"process": i} | c)) for i, c in enumerate(changes)]


@pytest.mark.parametrize(
    ("changes", "process"),
    [
        (({}, {}, {}), None),
        (({}, {"silent": 61.0}, {}), 1),
        (({}, {"silent": 59.0}, {}), None),
        (({}, {"heard": 39.0}, {}), 1),
        (({"silent": 61.0}, {"gone": True}, {}), 1),
        (({}, {"started": False, "silent": 299.0}, {}), None),
        (({}, {"started": False, "silent": 301.0}, {}), 1),
        # one that aborts while another is silent was waiting for it
        (({}, {"end": End(-6), "ended": 90.0}, {"silent": 30.0}), 2),
        (({}, {"end": End(-6), "ended": 90.0}, {}), 1),
        (({}, {"end": End(-6), "ended": 99.0}, {}), None),  # it may be another's fault
        (({}, {"end": End(-6), "ended": 90.0}, {"end": End(-9), "ended": 91.0}), 2),
        (({}, {"end": End(0), "ended": 50.0}, {}), None),  # process 0 writes a report
        (({}, {"end": End(75), "ended": 99.0, "half_round": None}, {}), 1),
        (({}, {"end": End(75), "ended": 50.0}, {}), None),
    ],
)
def test_judge(changes, process):
    verdict = meeting.judge(members(*changes), 100.0, Limits(), 1)
    assert (verdict and verdict.process) == process
