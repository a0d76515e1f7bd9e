"""Who is to blame, and commands that come again to a meeting."""

import asyncio
import contextlib
import dataclasses
import errno
import json
import random
import socket
import time

import pytest

from acco_jax.command import exits
from acco_jax.run.supervise import meeting, messages
from acco_jax.run.supervise.meeting import Limits, Member
from acco_jax.run.supervise.messages import (
    Alive,
    Beat,
    Challenge,
    End,
    Go,
    Hello,
    Idle,
    Judgment,
    Over,
    Refused,
    Welcome,
)
from tests.run import strangers


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
        (({}, {"end": End(-40), "ended": 90.0}, {}), 1),  # a signal without a name
        (({}, {"end": End(-11), "ended": 99.9}, {}), None),
        (({}, {"end": End(-9), "ended": 99.9}, {}), 1),  # nobody's fault but its own
        (({}, {"end": End(0), "ended": 50.0}, {}), None),  # process 0 writes a report
        (({}, {"end": End(75), "ended": 99.0, "half_round": None}, {}), 1),
        (({}, {"end": End(75), "ended": 50.0}, {}), None),
    ],
)
def test_judge(changes, process):
    verdict = meeting.judge(members(*changes), 100.0, Limits(lost_after=60.0), 1)
    assert (verdict and verdict.process) == process


HELLO = Hello(1, 2, "a", 0, "one")
BEAT = Beat(1, True, 0.0)


class Command:
    """A connection to a meeting, and what it has received."""

    def __init__(self, here):
        self.port, self.got = here.port, []

    async def open(self):
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.nonce = (await self.next()).nonce
        return self

    async def hello(self, hello=HELLO, token="", **changes):
        await self.open()
        hello = dataclasses.replace(hello, **changes)
        proof = messages.proof(token, "command", self.nonce, hello)
        self.say(dataclasses.replace(hello, proof=proof))
        self.answer = await self.next()
        return self

    def say(self, *what):
        for message in what:
            self.writer.write(messages.encode(message))

    async def next(self, *kinds):
        """The next message of these kinds; None at the end."""
        async with asyncio.timeout(5):
            while line := await self.reader.readline():
                message = messages.decode(line)
                if not kinds or isinstance(message, kinds):
                    return message
        return None


def together(play, processes=2, token="", limits=None):
    """Runs play(command), where command() makes a connection to a meeting."""
    made = []

    async def run():
        meets = meeting.Meeting(processes, limits or Limits(restarts=3), token)
        async with meets.at("127.0.0.1", 0) as here:

            def command():
                made.append(Command(here))
                return made[-1]

            try:
                await play(command, meets)
            finally:
                for one in made:
                    one.writer.transport.abort()
                await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(run(), 20))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(meeting, "SECONDS", 0.01)


@pytest.mark.parametrize("host", ["worker-0", "localhost", "127.0.0.1"])
def test_a_name_that_is_loopback_here_is_said(monkeypatch, caplog, host):
    """As Debian's /etc/hosts has it: process 0 alone can reach it."""
    found = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))
    monkeypatch.setattr(meeting.socket, "getaddrinfo", lambda *_, **__: [found])

    async def listen():
        async with meeting.Meeting(2, Limits()).at(host, 0):
            await asyncio.sleep(0)

    asyncio.run(listen())
    said = ["worker-0 is 127.0.0.1 on this host, which no other host reaches"]
    lines = [x.getMessage().partition(":")[0] for x in caplog.records]
    assert lines == (said if host == "worker-0" else [])


def test_a_command_comes_again_while_its_old_words_arrive():
    """When a cut link is whole, what was said before it was cut is heard at once."""

    async def play(command, meets):
        one = await command().hello()
        one.say(BEAT)
        again = await command().hello()
        again.say(BEAT)
        other = await command().hello(command="other")
        answers = [type(x.answer) for x in (one, again, other)]
        assert answers == [Welcome, Welcome, Refused]

    together(play)


def raw(**changes):
    fields = dataclasses.asdict(HELLO) | {"command": "stranger"} | changes
    return (json.dumps({"Hello": fields}) + "\n").encode("utf-8", "surrogatepass")


STRANGE = {
    **{f"process {x!r}": raw(process=x) for x in (-1, 2, 10**9, True, 1.0, "1", None)},
    **{f"attempt {x!r}": raw(attempt=x) for x in (-1, 4, 10**9, 2**70, float("nan"))},
    **{f"processes {x!r}": raw(processes=x) for x in (-1, 0, 1, 3, float("inf"))},
    **{
        f"host {x[:3]!r}": raw(host=x)
        for x in ("\x1b[2J", "\ud800", "a\nb", "h" * 5000)
    },
    "without a name": b'{"Hello": {"process": 1, "processes": 2}}\n',
    "a list": b"[]\n",
    "deep": b"[" * 60000 + b"\n",
    "zeros": b"\0" * 10**6,
    "a long line": b"x" * 10**6 + b"\n",
    "no UTF-8": b"\xff\xfe\n",
    "another kind": messages.encode(End(-9)),
    "as before there were kinds": b'{"process": 1, "processes": 2, "attempt": 0}\n',
}


@pytest.mark.parametrize("line", STRANGE.values(), ids=STRANGE)
def test_a_strange_hello_has_no_effect(line):
    """Neither before all are there nor after."""

    async def strange(command):
        one = await command().open()
        with contextlib.suppress(OSError):
            one.writer.write(line)
            assert not isinstance(await one.next(), Welcome)

    async def play(command, meets):
        zero = await command().hello(process=0, command="zero")
        await strange(command)
        one = await command().hello()
        for i, each in enumerate((zero, one)):
            go = await each.next(Go)
            assert (go.attempt, go.process, go.processes, go.absent) == (1, i, 2, "")
            each.say(BEAT)
        await strange(command)
        for each in (zero, one):
            each.say(BEAT, End(0))
        assert [await x.next(Over, Judgment) for x in (zero, one)] == [Over(0)] * 2

    together(play)


def test_another_attempt_follows_those_of_a_lost_process_0():
    """Its command has come again, and the others say how many there were."""

    async def play(command, meets):
        zero = await command().hello(process=0, command="zero")
        one = await command().hello(attempt=2)
        assert {(await x.next(Go)).attempt for x in (zero, one)} == {3}
        # from now on it knows: nobody's word spends the rest
        one.writer.transport.abort()
        assert (await zero.next(Judgment)).again
        one = await command().hello(attempt=1)
        one.say(Idle(1))
        zero.say(Idle(3))
        assert {(await x.next(Go)).attempt for x in (zero, one)} == {4}

    together(play)


async def without_one(command):
    """Returns process 0's command, which goes on without the other process."""
    zero = await command().hello(process=0, command="zero")
    one = await command().hello()
    for each in (zero, one):
        await each.next(Go)
    one.writer.transport.abort()
    assert (await zero.next(Judgment)).again
    zero.say(Idle(1))
    go = await zero.next(Go)
    assert (go.processes, go.absent) == (1, "1")
    return zero


FEWER = Limits(restarts=3, min_processes=1, regroup_after=0.05)


def test_what_ends_fewer_that_have_trained_is_not_their_mesh():
    """Such as a device's wrong bits."""

    async def play(command, meets):
        zero = await without_one(command)
        zero.say(BEAT, End(exits.REFUSED, "silent corruption"))
        assert not (await zero.next(Judgment)).again

    together(play, limits=FEWER)


def test_fewer_that_cannot_form_the_mesh_wait_for_all():
    """Their own rejection does not end the run; a second one of all does."""

    async def play(command, meets):
        zero = await without_one(command)
        early = Beat(None, True, 0.0)
        zero.say(early, End(exits.REFUSED, "mesh.fsdp is 2: use another."))
        verdict = await zero.next(Judgment)
        assert verdict.again and verdict.code == exits.REFUSED
        assert verdict.line.endswith("use another. All processes are awaited")
        zero.say(Idle(2))
        await asyncio.sleep(0.2)
        assert not meets._running
        one = await command().hello()
        for each in (zero, one):
            assert (await each.next(Go)).attempt == 3
        one.say(BEAT, End(exits.REFUSED, "no such file"))
        zero.say(BEAT, End(exits.REFUSED, "no such file"))
        assert not (await zero.next(Judgment)).again

    together(play, limits=FEWER)


def test_the_idle_of_an_earlier_attempt_does_not_count(monkeypatch):
    monkeypatch.setattr(meeting, "GRACE", 0.0)

    async def play(command, meets):
        zero = await command().hello(process=0, command="zero")
        one = await command().hello()
        await one.next(Go)
        one.say(Idle(0), Idle(1), End(-9), End(0), Idle(1))
        assert (await zero.next(Judgment)).line.endswith("(killed by SIGKILL)")
        one.say(Idle(0))
        zero.say(Idle(1))
        await asyncio.sleep(0.1)
        assert not meets._running
        one.say(Idle(1))
        assert (await one.next(Go)).attempt == 2

    together(play)


def test_silent_connections_are_left(monkeypatch):
    monkeypatch.setattr(meeting, "HELLO_SECONDS", 0.3)

    async def play(command, meets):
        assert meets._room == meeting.STRANGERS
        meets._room = 8
        silent = [await command().open() for _ in range(40)]
        assert len(meets._strangers) == 8 == len(meets._talks)
        assert isinstance((await command().hello()).answer, Welcome)
        for one in silent:
            assert await one.next() is None
        assert len(meets._talks) == 1 and not meets._strangers

    together(play)


def test_no_more_files_may_be_open(monkeypatch):
    accept, failed = socket.socket.accept, []

    def failing(listener):
        if len(failed) < 3:
            failed.append(1)
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", failing)

    async def play(command, meets):
        assert isinstance((await command().hello()).answer, Welcome)

    together(play)
    assert len(failed) == 3


def test_a_limit_of_open_files_leaves_room_for_the_run(monkeypatch):
    def limit(files):
        monkeypatch.setattr(meeting.resource, "getrlimit", lambda _: (files, files))
        return meeting.Meeting(2, Limits())._room

    assert list(map(limit, (64, 1024, -1))) == [16, 64, 64]


def test_a_second_command_does_not_replace_one_that_waits():
    async def play(command, meets):
        one = await command().hello()
        meets._members[1].heard -= 2 * meeting.QUIET
        heard = meets._members[1].heard
        one.say(Idle(0))
        while meets._members[1].heard == heard:
            await asyncio.sleep(0.01)
        assert isinstance((await command().hello(command="other")).answer, Refused)
        meets._members[1].heard -= 2 * meeting.QUIET
        assert isinstance((await command().hello(command="other")).answer, Welcome)
        assert await one.next(Go) is None

    together(play)


def test_a_command_that_waits_and_is_silent_is_not_there():
    async def play(command, meets):
        one = await command().hello(processes=3)
        zero = await command().hello(process=0, command="zero", processes=3)
        assert (await zero.next(Alive)).awaited == "2"
        meets._members[1].heard -= 9
        assert await one.next(Go) is None
        assert (await zero.next(Alive)).awaited == "1, 2"

    together(play, processes=3, limits=Limits(lost_after=5.0))


def test_the_judge_is_lost_by_all_when_it_pauses(monkeypatch):
    """Not the others, which it could not hear."""
    monkeypatch.setattr(meeting, "QUIET", 0.1)
    limits = Limits(lost_after=0.3, restarts=3)

    async def play(command, meets):
        zero = await command().hello(process=0, command="zero")
        one = await command().hello()
        for each in (zero, one):
            await each.next(Go)
            each.say(Beat(7, True, 0.0))
        while (await one.next(Alive)).half_round != 7:
            pass
        one.writer.transport.abort()  # it has waited long enough
        again = command()
        opened = asyncio.create_task(again.hello())
        time.sleep(0.6)  # this meeting's process is stopped
        verdict = await zero.next(Judgment)
        await opened
        host = socket.gethostname()
        assert verdict == meeting.paused(host, 7, limits, 1)
        assert verdict.process == 0 and verdict.again
        assert verdict.line.endswith(
            "was lost after half-round 7 (no sign of life from its command for 0.3 s)"
        )
        zero.say(Idle(1))
        assert (await again.next(Go)).attempt == 2

    together(play, limits=limits)


def test_who_has_ended_may_come_again_while_the_others_go_on():
    async def play(command, meets):
        zero = await command().hello(process=0, command="zero")
        one = await command().hello()
        for each in (zero, one):
            await each.next(Go)
        one.say(End(exits.FINISHED))
        while not meets._members[1].end:
            await asyncio.sleep(0.01)
        again = await command().hello()
        assert isinstance(again.answer, Welcome) and meets._running
        zero.say(End(exits.FINISHED))
        for each in (zero, again):
            assert await each.next(Over, Judgment) == Over(exits.FINISHED)

    together(play)


def test_who_comes_when_the_run_is_over_is_told():
    async def play(command, meets):
        meets._end(Judgment(exits.FAILED, "over", None, False))
        one = await command().hello()
        assert await one.next() == Judgment(exits.FAILED, "over", None, False)

    together(play)


TOKEN = "a token of some length"


@pytest.mark.parametrize(
    ("given", "answer"),
    [(TOKEN, Welcome), ("another of some length", Refused), ("", Refused)],
)
def test_a_token_is_proved(given, answer):
    async def play(command, meets):
        assert isinstance((await command().hello(token=given)).answer, answer)
        assert len(meets._members) == (answer is Welcome)

    together(play, token=TOKEN)


def test_a_proof_serves_once_and_one_side():
    async def play(command, meets):
        one, two = await command().open(), await command().open()
        proof = messages.proof(TOKEN, "command", one.nonce, HELLO)
        other = dataclasses.replace(HELLO, process=0)
        for wrong in (
            proof,  # of another challenge
            messages.proof(TOKEN, "meeting", two.nonce, HELLO),
            messages.proof(TOKEN, "command", two.nonce, other),
            proof[:-1],
            "é",
        ):  # fmt: skip
            two = two if wrong is proof else await command().open()
            two.say(dataclasses.replace(HELLO, proof=wrong))
            assert isinstance(await two.next(), Refused)
        one.say(dataclasses.replace(HELLO, proof=proof))
        welcome = await one.next()
        assert welcome.proof == messages.proof(TOKEN, "meeting", one.nonce, HELLO)
        assert TOKEN not in str(welcome) and len({one.nonce, two.nonce, proof}) == 3

    together(play, token=TOKEN)


MESSAGES = [
    Challenge("n", True), HELLO, Welcome("h", 1), Refused("no"), Alive(None, "1, 2"),
    Go(1, "h:1", 0, 2, ""), messages.Save(), Judgment(5, "line", None, True), Over(75),
    Beat(None, False, 0.5), Beat(3, True, 1), Idle(0), End(-9, "é", "x"),
]  # fmt: skip


def test_messages():
    for message in MESSAGES:
        assert messages.decode(messages.encode(message)) == message
    assert {type(m) for m in MESSAGES} == set(messages._KINDS.values())


def test_other_values_are_not_messages():
    """A value is taken if it has its field's type and range, and then unchanged."""
    for message in MESSAGES:
        fields, kind = dataclasses.asdict(message), type(message).__name__
        for name in fields:
            for value in strangers.VALUES:
                line = strangers.line(kind, fields | {name: value})
                try:
                    read = messages.decode(line)
                except ValueError:
                    continue
                got = getattr(read, name)
                assert got is value or (got == value and type(got) is type(value))
                assert type(value) in (bool, int, float, str, type(None))
                if isinstance(value, str):
                    assert len(value) <= messages.LONGEST and value.isprintable()
                elif value is not None:
                    assert -64 <= value < 2**53 or name == "silent"
                    assert value >= 0 or name == "code"


def test_damaged_lines_are_messages_or_a_value_error():
    draw, read = random.Random(0), 0
    for _ in range(3000):
        line = strangers.damaged(draw, messages.encode(draw.choice(MESSAGES)))
        with contextlib.suppress(ValueError):
            messages.decode(line)
            read += 1
    assert read < 1000
