"""Commands and the processes they start: who is lost, who says so, and what follows.

The processes here train nothing (supervised.py); tests/test_train.py and
benchmarks/chaos.py have real ones.
"""

import asyncio
import contextlib
import dataclasses
import os
import re
import signal
import socket
import sys
import time
from unittest import mock

import pytest

from acco_jax.command import exits
from acco_jax.run.supervise import meeting, messages, supervisor
from acco_jax.run.supervise.messages import Challenge, End, Go, Judgment, Over, Welcome
from tests.run.supervised import GOOD, WAIT, alive


def run(*jobs):
    """The exit codes of all commands; here each is a task instead of a process."""

    async def together():
        return await asyncio.gather(*map(supervisor._supervise, jobs))

    return asyncio.run(asyncio.wait_for(together(), 60))


def errors(capfd):
    return [x for x in capfd.readouterr().err.splitlines() if x.startswith("error: ")]


HOST = re.escape(socket.gethostname())


def test_all_good(jobs, capfd):
    assert run(*jobs(GOOD, GOOD, GOOD)) == [exits.FINISHED] * 3
    out, err = capfd.readouterr()
    attempts, coordinators, pids, places = zip(
        *(x.split() for x in out.splitlines() if "imported" not in x), strict=True
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


@pytest.mark.parametrize("fault", ["SIGKILL", "stuck"])
def test_a_process_killed_comes_before_those_that_abort(jobs, capfd, fault):
    """The others may end first, or their commands look first."""
    run(*jobs(("SIGABRT", 2), (fault, 3), ("raise", 2)))
    assert {"process 1 on" in line for line in errors(capfd)} == {True}


@pytest.mark.slow
def test_slow_is_not_lost(jobs):
    assert run(*jobs(("slow", 2), GOOD)) == [exits.FINISHED] * 2


@pytest.mark.fast("breaks")
@pytest.mark.parametrize("fault", ["frees", "breaks"])
def test_a_process_whose_work_is_done_is_not_lost(jobs, capfd, fault):
    # while it frees its memory no thread of Python's runs
    assert run(*jobs((fault, 5), (fault, 5))) == [exits.STOPPED] * 2
    assert errors(capfd) == []


def test_begins_again(jobs, capfd, caplog):
    todo = jobs(("wait", 4, 2), ("SIGKILL", 3, 2), ("SIGSTOP", 3, 1), restarts=2)
    assert run(*todo) == [exits.FINISHED] * 3
    out = [x for x in capfd.readouterr().out.splitlines() if "imported" not in x]
    assert sorted(x[0] for x in out) == ["1"] * 3 + ["2"] * 3 + ["3"] * 3
    assert len({x.split()[1] for x in out}) == 3  # each attempt has its own port
    assert "attempt 2 of 3 begins" in caplog.text
    assert "attempt 3 of 3 begins" in caplog.text


def test_what_an_earlier_command_s_process_left_is_kept(jobs, capfd):
    todo = jobs(("raise", 3))
    for attempt in (1, 2):
        assert run(*todo) == [exits.LOST]
        assert f"failures/attempt-{attempt}" in errors(capfd)[-1]


@pytest.mark.slow
def test_not_more_often_than_it_may(jobs, capfd):
    assert run(*jobs(("wait", 4, 9), ("SIGKILL", 3, 9), restarts=1)) == [exits.LOST] * 2
    assert "failures/attempt-2" in errors(capfd)[0]


@pytest.mark.fast("SIGKILL")
@pytest.mark.parametrize("fault", ["SIGKILL", "raise", "SIGSTOP"])
def test_one_process_begins_again(jobs, fault):
    assert run(*jobs((fault, 3), restarts=1)) == [exits.FINISHED]


def started(capfd):
    """The processes that have imported all, and those forked from them."""
    lines = [line.split() for line in capfd.readouterr().out.splitlines()]
    imported = [pid for word, pid, *_ in lines if word == "imported"]
    return imported, [line[2] for line in lines if line[0] != "imported"]


@pytest.mark.parametrize(("fault", "imports"), [("SIGKILL", 1), ("above", 3)])
def test_all_attempts_are_forks_of_one_process(jobs, capfd, fault, imports):
    """If it dies there is another one; all end with their command."""
    assert run(*jobs((fault, 3, 2), restarts=2)) == [exits.FINISHED]
    imported, pids = started(capfd)
    assert len(imported) == imports and len(set(imported + pids)) == imports + 3
    time.sleep(0.1)
    assert not any(map(alive, imported + pids))


def test_a_service_manager_s_signal_to_all_leaves_time_to_save(jobs, capfd):
    assert run(*jobs(("manager", 3, 9))) == [exits.STOPPED]
    assert errors(capfd) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_while_it_imports(jobs, capfd, number):
    (job,) = jobs(("slow import", 3))

    async def both():
        (task,) = begun([job])
        await said(capfd, "imported", [""])
        await asyncio.sleep(0.3)  # until it has its orders
        os.kill(os.getpid(), number)
        return await task

    assert asyncio.run(asyncio.wait_for(both(), 30)) == exits.STOPPED


def test_told_to_stop_before_the_first_half_round(jobs, capfd):
    """It is no fault, and the others do not begin again without this host."""
    todo, seen = jobs(("unready", 1, 9), restarts=3), [""]

    async def both():
        (task,) = begun(todo)
        await said(capfd, "0/1", seen)
        os.kill(os.getpid(), signal.SIGTERM)
        return await task

    assert asyncio.run(asyncio.wait_for(both(), 30)) == exits.STOPPED
    assert errors(capfd) == []


def test_a_signal_before_the_pid_is_known_is_sent_then(monkeypatch):
    """What is to fork drops one that comes while it does."""
    sent = []
    monkeypatch.setattr(supervisor.os, "kill", lambda *what: sent.append(what))
    child = object.__new__(supervisor._Child)
    child._imported, child._pid, child._ended = mock.Mock(), None, None
    child.signal(signal.SIGTERM)
    child._imported.signal.assert_called_once_with(signal.SIGTERM)
    child._hear({"pid": 7})
    assert sent == [(7, signal.SIGTERM)]
    child._hear({"ended": 0})
    child.signal(signal.SIGKILL)  # the number may be another's by now
    assert len(sent) == 1


def test_what_cannot_be_imported_is_said(jobs, capfd, tmp_path):
    assert run(*jobs(("no import", 3))) == [exits.LOST]
    (line,) = errors(capfd)
    assert "ModuleNotFoundError: No module named 'nothing_of_this_name'" in line
    (kept,) = tmp_path.rglob("messages.txt")
    assert "Traceback" in kept.read_text()


def test_a_process_that_cannot_start_is_a_failure(jobs, capfd):
    (job,) = jobs(GOOD, restarts=1)
    job = dataclasses.replace(job, command=["/nowhere/python"])
    assert run(job) == [exits.FAILED]
    (line,) = errors(capfd)
    assert line.startswith("error: its process cannot start ([Errno 2]")
    open_files = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError):
        supervisor._Imported(job)
    assert os.listdir("/proc/self/fd") == open_files


def test_a_terminal_that_closes_tells_to_stop_once(jobs):
    """Its shell sends SIGHUP to its jobs, and when the shell ends the kernel does."""
    command = supervisor._Command(jobs(GOOD)[0], "127.0.0.1", 1)
    command._child, task = mock.Mock(), mock.Mock()
    for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGHUP):
        command._stop(task, number)
    command._child.signal.assert_called_once_with(signal.SIGHUP)
    task.cancel.assert_not_called()
    command._stop(task, signal.SIGTERM)
    task.cancel.assert_called_once()


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
def test_enough_go_on_though_a_start_may_take_less_long(jobs, capfd, caplog):
    limits = {"restarts": 1, "min_processes": 1, "regroup_after": 7.0}
    todo, seen = jobs(GOOD, ("stay", 3, 9), start_within=5.0, **limits), [""]
    caplog.set_level("INFO", logger="absl")

    async def both():
        tasks = begun(todo)
        await said(capfd, "1/2", seen)
        tasks[1].cancel()
        return await tasks[0]

    assert asyncio.run(asyncio.wait_for(both(), 60)) == exits.FINISHED
    assert "going on with 1 of 2 processes: without process 1" in caplog.text


def test_a_process_that_cannot_be_killed_is_not_waited_for(monkeypatch):
    """The kernel may hold it; its command goes on and says so."""
    monkeypatch.setattr(supervisor, "END_SECONDS", 0.1)
    held = object.__new__(supervisor._Child)
    held._imported, held._heard = mock.Mock(), None
    held._pid = held._ended = None
    held._imported.poll.return_value, held._imported.messages.return_value = None, []
    assert asyncio.run(held.kill()) is False
    held._imported.messages.return_value = [{"ended": -9}]
    assert asyncio.run(held.kill()) is True


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


@pytest.mark.slow
def test_a_connection_that_falls_silent_is_left(jobs):
    """A cut link ends no connection: when it is whole again, old words arrive."""
    (_, job), connections = jobs(GOOD, ("stay", 3), restarts=1), []
    host, port = job.coordinator.split(":")

    async def meet(reader, writer):
        hello = await admit(reader, writer)
        connections.append(hello)
        say(writer, Go(len(connections), "b:1", 1, 2, ""))
        if len(connections) == 1:
            await asyncio.sleep(7)  # until nobody listens any more
            say(writer, Judgment(5, "old", 1, False))
        else:
            while line := await reader.readline():
                if isinstance(messages.decode(line), End):
                    say(writer, Over(0))
        writer.transport.abort()

    async def both():
        async with await asyncio.start_server(meet, host, int(port)):
            code = await supervisor._supervise(job)
            await asyncio.sleep(1)  # until both connections are closed
            return code

    assert asyncio.run(asyncio.wait_for(both(), 60)) == exits.FINISHED
    assert [hello.attempt for hello in connections] == [0, 1]


def say(writer, message):
    writer.write(messages.encode(message))


async def admit(reader, writer, token=""):
    """Welcomes a command, as a meeting does; its first message."""
    say(writer, Challenge("nonce", bool(token)))
    hello = messages.decode(await reader.readline())
    say(writer, Welcome("b", 0, messages.proof(token, "meeting", "nonce", hello)))
    return hello


def met(job, meet):
    """What a command returns whose meeting is a function of (reader, writer)."""
    talks = []

    async def talk(reader, writer):
        talks.append(asyncio.current_task())
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await meet(reader, writer)
        writer.transport.abort()

    async def both():
        host, port = job.coordinator.split(":")
        async with await asyncio.start_server(talk, host, int(port)):
            code = await supervisor._supervise(job)
        for task in talks:
            task.cancel()
        await asyncio.gather(*talks)
        await asyncio.sleep(0)
        return code

    return asyncio.run(asyncio.wait_for(both(), 20))


def test_who_wakes_up_late_takes_the_word_of_the_judge(jobs, capfd, monkeypatch):
    """It has not read yet what process 0 has sent in the meantime."""
    monkeypatch.setattr(meeting, "QUIET", 0.1)
    monkeypatch.setattr(supervisor, "LENIENT", 0.0)
    (_, job) = jobs(GOOD, ("stay", 1), lost_after=0.3)

    async def meet(reader, writer):
        await admit(reader, writer)
        say(writer, Go(1, "b:1", 1, 2, ""))
        await asyncio.sleep(0.1)
        time.sleep(0.8)  # both, here, are one process
        say(writer, Judgment(5, "process 1 on a was lost", 1, False))
        await reader.read()

    assert met(job, meet) == exits.LOST
    (line,) = errors(capfd)
    assert line.startswith("error: process 1 on a was lost")


@pytest.mark.parametrize("others", ["nothing", "zeros", "HTTP", "old"])
def test_another_server_at_the_address_is_not_a_meeting(
    jobs, capfd, monkeypatch, others
):
    monkeypatch.setattr(supervisor, "CONNECT_SECONDS", 0.3)
    (_, job), said = jobs(GOOD, GOOD, start_within=1.0), {
        "nothing": b"",
        "zeros": b"\0" * 10**6,
        "HTTP": b"HTTP/1.1 400 Bad Request\r\n\r\n",
        "old": b'{"go": 1, "coordinator": "b:1", "process": 1, "processes": 2}\n',
    }  # fmt: skip

    async def meet(reader, writer):
        writer.write(said[others])
        await reader.read()

    assert met(job, meet) == exits.LOST
    (line,) = errors(capfd)
    assert line.startswith("error: process 0 of 2 did not answer at")


def test_a_token_is_asked_of_both(jobs, capfd):
    """A command does not follow a meeting that cannot prove the token."""
    (_, job) = jobs(GOOD, GOOD, start_within=1.0)
    job = dataclasses.replace(job, token="a token of some length")

    async def thief(reader, writer):
        await admit(reader, writer, token="what it would like to know")
        say(writer, Go(1, "b:1", 1, 2, ""))
        await reader.read()

    assert met(job, thief) == exits.LOST
    assert "did not answer" in errors(capfd)[0]
    assert met(job, admit) == exits.REFUSED  # it asks for none
    assert "ACCO_TOKEN is set here and not set at 127.0.0.1" in errors(capfd)[0]


def test_commands_with_a_token(jobs, capfd, monkeypatch):
    monkeypatch.setenv("ACCO_TOKEN", "a token of some length")
    todo = [dataclasses.replace(j, token=messages.token()) for j in jobs(GOOD, GOOD)]
    wrong = dataclasses.replace(todo[1], token="another of some length")
    none = dataclasses.replace(todo[1], token="")

    async def three():
        first = asyncio.create_task(supervisor._supervise(todo[0]))
        codes = [await supervisor._supervise(job) for job in (wrong, none, todo[1])]
        return [await first, *codes]

    codes = [exits.FINISHED, exits.REFUSED, exits.REFUSED, exits.FINISHED]
    assert asyncio.run(asyncio.wait_for(three(), 20)) == codes
    one, two = errors(capfd)
    assert one.startswith("error: ACCO_TOKEN here is not that on")
    assert one.endswith("give all the same.")
    assert "ACCO_TOKEN is not set here and set at" in two


@pytest.mark.parametrize("token", ["short", "x" * 15])
def test_a_short_token_is_refused(monkeypatch, token):
    monkeypatch.setenv("ACCO_TOKEN", token)
    with pytest.raises(ValueError, match=r"ACCO_TOKEN has \d+ characters: give at"):
        messages.token()


def test_the_process_that_trains_does_not_have_the_token(jobs, monkeypatch, tmp_path):
    monkeypatch.setenv("ACCO_TOKEN", "a token of some length")
    seen = tmp_path / "seen"
    code = (
        f"import os; open({str(seen)!r}, 'w').write(repr('ACCO_TOKEN' in os.environ))"
    )
    (job,) = jobs(GOOD)
    assert run(dataclasses.replace(job, command=[sys.executable, "-c", code])) == [0]
    assert seen.read_text() == "False"


def test_many_processes_that_never_come(jobs, capfd):
    (job, _) = jobs(GOOD, GOOD, start_within=1.0)
    assert run(dataclasses.replace(job, processes=30000)) == [exits.LOST]
    (line,) = errors(capfd)
    numbers = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10"
    assert line == (
        f"error: process {numbers} and 29989 more of 30000 did not come within 1 s."
    )


def test_an_address_of_the_other_family(jobs, capfd):
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    todo = jobs(GOOD, GOOD)
    port = todo[0].coordinator.split(":")[1]
    todo = [dataclasses.replace(job, coordinator=f"[::1]:{port}") for job in todo]
    assert run(*todo) == [exits.FINISHED] * 2
    lines = [x.split() for x in capfd.readouterr().out.splitlines()]
    coordinators = {x[1] for x in lines if x[0] != "imported"}
    assert [x.rpartition(":")[0] for x in coordinators] == ["[::1]"]


def test_a_name_whose_address_is_of_the_other_family(jobs, monkeypatch):
    """As that of a host in a network of IPv6 alone."""
    real = socket.getaddrinfo

    def six(host, *rest, **more):
        return real("::1" if host == "six" else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", six)
    todo = jobs(GOOD, GOOD)
    port = todo[0].coordinator.split(":")[1]
    todo = [dataclasses.replace(job, coordinator=f"six:{port}") for job in todo]
    assert run(*todo) == [exits.FINISHED] * 2


@pytest.mark.parametrize("part", ["_gather", "_meet", "_begin"])
def test_a_meeting_that_fails_ends_the_run_with_a_line(jobs, capfd, monkeypatch, part):
    def fail(*_):
        raise RuntimeError("nobody expected this")

    monkeypatch.setattr(meeting.Meeting, part, fail)
    codes = run(*jobs(GOOD, GOOD, start_within=1.0))
    lines = errors(capfd)
    if part == "_meet":  # a connection: the others do not suffer
        assert codes == [exits.LOST] * 2
    else:
        assert codes == [exits.FAILED] * 2
        why = r"the meeting on .* failed \(RuntimeError: nobody expected this\)\."
        assert all(re.fullmatch(f"error: {why}", line) for line in lines)
    assert len(lines) == 2


@pytest.mark.parametrize("shown", ["0.0.0.0", "127.0.0.1"])
def test_without_a_token_one_line_warns(jobs, caplog, shown):
    todo = jobs(GOOD, GOOD)
    port = todo[0].coordinator.split(":")[1]
    todo = [dataclasses.replace(job, coordinator=f"{shown}:{port}") for job in todo]
    assert run(*todo) == [exits.FINISHED] * 2
    warned = [x for x in caplog.messages if "can take part in this run" in x]
    expected = (
        f"whoever reaches {shown} port {port} can take part in this run: set "
        "ACCO_TOKEN, the same for all processes"
    )
    assert warned == ([] if shown == "127.0.0.1" else [expected])
