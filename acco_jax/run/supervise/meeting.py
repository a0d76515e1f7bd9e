"""Meeting of the commands of a run's processes, and the judge of lost processes.

Process 0's command listens at the address that all were given. Every command, its own
too, connects to it and sends messages. An attempt begins when all are there
and none has a training process: so a process of an earlier attempt never runs beside
one of a later. Commands give a sign of life every second. Only this module decides
whether a process is lost, so that all hosts print the same line.

Where a run may go on with fewer processes, an attempt that follows another begins with
the commands that are there after a while; a late one has the others save and restart.

Whoever reaches the port can connect. A connection counts once its first message is
that of a command of this run; with a token, once it proves that it has the token.
"""

import asyncio
import contextlib
import dataclasses
import errno
import functools
import ipaddress
import resource
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from typing import Any, Self

from absl import logging

from acco_jax.command import exits
from acco_jax.run.supervise import messages
from acco_jax.run.supervise.messages import (
    Alive,
    Beat,
    Challenge,
    End,
    Go,
    Hello,
    Idle,
    Judgment,
    Message,
    Over,
    Refused,
    Save,
    Welcome,
)

SECONDS = 0.25  # between looks
GRACE = 3.0  # seconds in which the first failure may turn out to be another's fault
SURE = 1.0  # and in which one that gave a reason, or ended by a signal, may
PARTING = 5.0  # seconds in which commands that have received the end may leave
QUIET = 5.0  # seconds of silence that make a process suspect when others fail
HELLO_SECONDS = 5.0  # in which a connection must send its first message
STRANGERS = 64  # connections without one, at most
BACKLOG = 1 << 20  # bytes that a command may leave unread


@dataclasses.dataclass(frozen=True)
class Limits:
    """Waiting times, and the number of restarts."""

    lost_after: float = 20.0  # seconds without a sign of life
    start_within: float = 300.0  # seconds until all are there, or one has started
    restarts: int = 0  # of the whole run
    min_processes: int | None = None  # to begin again with; None: all
    regroup_after: float = 30.0  # seconds until it begins again without the others


@dataclasses.dataclass
class Member:
    """A command that takes part, and the state that it reports."""

    process: int
    host: str
    heard: float  # time of the command's last message, in seconds of time.monotonic
    writer: asyncio.StreamWriter | None = None
    command: str = ""  # a name that no other command has
    gone: bool = False  # whether its connection has ended
    attempt: int = 0  # the last one that it took part in
    idle: bool = True  # whether it has no process
    part: bool = False  # whether it takes part in the attempt under way
    half_round: int | None = None
    started: bool = False  # whether its process has given a sign of life
    silent: float = 0.0  # seconds since the last one
    end: End | None = None
    ended: float = 0.0  # when

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"

    def begin(self, now: float, attempt: int) -> None:
        """Forget the attempt before, and take part in this one."""
        self.heard, self.idle, self.part, self.half_round = now, False, True, None
        self.attempt = attempt
        self.started, self.silent, self.end, self.ended = False, 0.0, None, 0.0

    def quiet(self, now: float) -> float:
        """Return seconds since a sign of life of the command and of its process."""
        silent = self.silent if self.started else 0.0
        return 0.0 if self.end else max(now - self.heard, silent)


def progress(half_round: int | None) -> str:
    """Return, as text, where in its run a process was."""
    if half_round is None:
        return "before its first half-round"
    return f"after half-round {half_round}"


def listed(numbers: Iterable[int]) -> str:
    """Return numbers of processes as text, the first ten of many."""
    numbers = list(numbers)
    rest = len(numbers) - 10
    text = ", ".join(map(str, numbers[:10]))
    return f"{text} and {rest} more" if rest > 0 else text


def paused(host: str, half_round: int | None, limits: Limits, attempt: int) -> Judgment:
    """Return the verdict on process 0 when its command gave no sign of life.

    Its own command, once it goes on, and the others, long before, give the same one.
    """
    why = f"no sign of life from its command for {limits.lost_after:g} s"
    return _lost(Member(0, host, 0.0, half_round=half_round), why, limits, attempt)


def judge(
    members: Sequence[Member], now: float, limits: Limits, attempt: int
) -> Judgment | None:
    """Decide whether an attempt is over before its end, and because of which process.

    A process that gives a reason comes first, then one that a signal or its watchdog
    killed, then one that is silent. The deaths of others after it was gone do not count
    against them.
    """
    for m in members:
        if m.gone and not m.end:
            return _lost(m, "its command is gone", limits, attempt)
    lost = max(members, key=lambda m: m.quiet(now))
    late = [m for m in members if not m.started and m.silent > limits.start_within]
    if late or lost.quiet(now) > limits.lost_after:
        lost = late[0] if late else lost
        seconds = lost.silent if late else lost.quiet(now)
        return _lost(lost, f"no sign of life for {seconds:.0f} s", limits, attempt)
    ends = [(m, m.end) for m in members if m.end and not m.end.good]
    everyone = all(m.end for m in members)
    if not ends:
        early = [m for m in members if m.end and m.end.code == exits.STOPPED
                 and m.half_round is None]  # fmt: skip
        if not early or everyone:
            return None
        line = f"{early[0]} was told to stop"
        return Judgment(exits.STOPPED, line, early[0].process, False)
    first, end = min(ends, key=lambda pair: (pair[1].suspicion, pair[0].ended))
    grace = GRACE if end.suspicion == 2 else SURE
    if end.code == -signal.SIGKILL:  # which no other process's end has caused
        grace = 0.0
    if not everyone and now - min(m.ended for m, _ in ends) < grace:
        return None
    if end.error:
        again = end.code == exits.FAILED and attempt <= limits.restarts
        line = messages.printable(f"{first}: {end.error}")
        return Judgment(end.code, line, first.process, again)
    if end.suspicion == 2 and lost.quiet(now) > QUIET:
        why = f"no sign of life for {lost.quiet(now):.0f} s"
        return _lost(lost, why, limits, attempt)
    return _lost(first, str(end), limits, attempt)


def _lost(member: Member, why: str, limits: Limits, attempt: int) -> Judgment:
    line = f"{member} was lost {progress(member.half_round)} ({why})"
    again = attempt <= limits.restarts
    return Judgment(exits.LOST, messages.printable(line), member.process, again)


class Meeting:
    """Meeting of a run's commands, as process 0's command sees it."""

    def __init__(self, processes: int, limits: Limits, token: str = "") -> None:
        self._processes, self._limits, self._token = processes, limits, token
        self._members: dict[int, Member] = {}
        self._attempt = 0
        self._running = False
        self._comes: Member | None = None  # the others save and begin again for it
        self._since = time.monotonic()  # when this attempt, or the wait for it, began
        self._looked = self._since  # when this process last ran
        self._told: int | None = None  # half-round of process 0 that all know of
        self._last: Judgment | Over | None = None  # of the run
        self._talks: set[asyncio.Task[None]] = set()
        self._strangers: dict[asyncio.Task[None], None] = {}  # the oldest first
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # -1: no limit
        self._room = min(STRANGERS, files // 4 if files > 0 else STRANGERS)

    @contextlib.asynccontextmanager
    async def at(self, host: str, port: int) -> AsyncIterator[Self]:
        """Listen at an address until the context ends.

        Raises:
          OSError: if it cannot listen.
        """
        self._host = host
        with contextlib.ExitStack() as stack:
            listeners = [stack.enter_context(x) for x in _listeners(host, port)]
            self._family = listeners[0].family
            self._address = listeners[0].getsockname()
            self.port = self._address[1]
            addresses = {x.getsockname()[0].partition("%")[0] for x in listeners}
            here = all(ipaddress.ip_address(x).is_loopback for x in addresses)
            if here and host != "localhost" and host not in addresses:
                logging.warning(
                    "%s is %s on this host, which no other host reaches: processes "
                    "there need its address in the network", host, min(addresses),
                )  # fmt: skip
            if not self._token and not here:
                logging.warning(
                    "whoever reaches %s port %d can take part in this run: set %s, the "
                    "same for all processes", host, self.port, messages.TOKEN,
                )  # fmt: skip
            looks = asyncio.create_task(self._kept(self._look()))
            for listener in listeners:
                self._listen(listener)
            try:
                yield self
            finally:
                for listener in listeners:
                    asyncio.get_running_loop().remove_reader(listener)
                    listener.close()
                for task in (looks, *self._strangers):
                    task.cancel()
                if self._last and self._talks:  # the last messages must not be lost
                    await asyncio.wait(self._talks, timeout=PARTING)
                for talk in self._talks:
                    talk.cancel()
                await asyncio.gather(looks, *self._talks, return_exceptions=True)
                await asyncio.sleep(0)  # their connections close

    async def _kept(self, work: Coroutine[Any, Any, None]) -> None:
        """End the run, with a line, if a part of the meeting fails."""
        try:
            await work
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            line = f"the meeting on {socket.gethostname()} failed ({why})"
            self._end(Judgment(exits.FAILED, messages.printable(line), None, False))

    def _listen(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            loop = asyncio.get_running_loop()
            loop.add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        """Begin to talk with one who has connected."""
        try:
            connection, _ = listener.accept()
        except OSError:  # no more files may be open, or who came has gone
            self._leave_oldest(len(self._strangers) // 2)
            loop = asyncio.get_running_loop()
            loop.remove_reader(listener)
            loop.call_later(SECONDS, self._listen, listener)
            return
        connection.setblocking(False)
        self._leave_oldest(self._room - 1)
        talk = asyncio.create_task(self._talk(connection))
        self._talks.add(talk)
        self._strangers[talk] = None
        talk.add_done_callback(functools.partial(self._forget, connection))

    def _leave_oldest(self, room: int) -> None:
        """End the connections that have been silent longest, except `room` of them."""
        while len(self._strangers) > room:
            talk = next(iter(self._strangers))
            del self._strangers[talk]
            talk.cancel()

    def _forget(self, connection: socket.socket, talk: asyncio.Task[None]) -> None:
        connection.close()
        self._talks.discard(talk)
        self._strangers.pop(talk, None)

    async def _talk(self, connection: socket.socket) -> None:
        """Serve one command, from its first message to the end of its connection."""
        member, writer, talk = None, None, asyncio.current_task()
        assert talk is not None
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                reader, writer = await asyncio.open_connection(sock=connection)
                member = await self._meet(reader, writer)
            if member:
                self._strangers.pop(talk, None)
            while member and (line := await reader.readline()):
                self._hear(member, messages.decode(line))
        except (ValueError, OSError, asyncio.CancelledError):
            pass  # any other message ends the connection
        except Exception as error:  # and must not end the run
            why = f"{type(error).__name__}: {error}"
            logging.warning("a connection to the meeting has failed: %s", why)
        if member and self._members.get(member.process) is member:
            member.gone, member.writer = True, None
            if not self._running or not member.part:
                del self._members[member.process]
        if writer:
            writer.transport.abort()

    async def _meet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Member | None:
        nonce = secrets.token_hex(16)
        writer.write(messages.encode(Challenge(nonce, bool(self._token))))
        hello = messages.decode(await reader.readline())
        if not isinstance(hello, Hello):
            return None
        if why := self._objection(hello, nonce):
            writer.write(messages.encode(Refused(messages.printable(why))))
            return None
        shown = messages.proof(self._token, "meeting", nonce, hello)
        return self._admit(hello, writer, shown if self._token else "")

    def _objection(self, hello: Hello, nonce: str) -> str:
        """Return why a command is not admitted, "" if it is."""
        host = socket.gethostname()
        expected = messages.proof(self._token, "command", nonce, hello)
        if self._token and not messages.proves(hello.proof, expected):
            name = messages.TOKEN
            return f"{name} here is not that on {host}: give all the same."
        if hello.processes != self._processes:
            return (
                f"--processes is {hello.processes} here and {self._processes} on "
                f"{host}: give all the same."
            )
        if hello.process >= self._processes:
            return f"--process is {hello.process} of {self._processes}: give a smaller."
        # a command that has taken part in the last attempt does not come again
        if hello.attempt > self._limits.restarts:
            return (
                f"this command took part in attempt {hello.attempt}, and --restarts is "
                f"{self._limits.restarts} on {host}: give all the same."
            )
        other = self._members.get(hello.process)
        # The same command comes again when its link was cut; old messages may have
        # arrived just now.
        another = other and other.command != hello.command
        self._notice_pause()
        if other and another and other.writer and other.quiet(self._looked) < QUIET:
            return f"{other} is there already: give each its own --process."
        return ""

    def _admit(self, hello: Hello, writer: asyncio.StreamWriter, proof: str) -> Member:
        other = self._members.get(hello.process)
        member = Member(
            hello.process, hello.host, time.monotonic(), writer, hello.command,
            attempt=hello.attempt,
        )  # fmt: skip
        if self._running and other and other.part and not other.end:
            self._end(_lost(other, "it came again", self._limits, self._attempt))
        if other and other.writer:
            other.writer.transport.abort()
        self._members[hello.process] = member
        training = [m for m in self._members.values() if m.part]
        waits = len(training) if self._running else 0
        _say(member, Welcome(socket.gethostname(), waits, proof))
        if self._last:
            _say(member, self._last)
        return member

    def _hear(self, member: Member, message: Message) -> None:
        member.heard = time.monotonic()
        trains = self._running and member.part
        match message:
            case Beat() if trains:
                member.half_round, member.started = message.half_round, message.started
                member.silent = message.silent
            case End() if trains and not member.end:
                member.end, member.ended = message, member.heard
            case Idle() if not trains and message.attempt == member.attempt:
                member.idle = True

    async def _look(self) -> None:
        spoke = time.monotonic()
        while not self._last:
            await asyncio.sleep(SECONDS)
            self._notice_pause()
            now = self._looked
            (self._watch if self._running else self._gather)(now)
            if now - spoke > 4 * SECONDS:
                zero = self._members.get(0)
                self._told = zero.half_round if zero else None
                absent = "" if self._running else listed(self._absent())
                self._tell(Alive(self._told, absent))
                spoke = now

    def _notice_pause(self) -> None:
        """Forgive silence if this process was delayed: it could hear nobody."""
        now = time.monotonic()
        pause, self._looked = now - self._looked, now
        if pause < QUIET:
            return
        self._since += pause
        for member in self._members.values():
            member.heard += pause
        if self._running and pause > self._limits.lost_after:
            host = socket.gethostname()
            self._end(paused(host, self._told, self._limits, self._attempt))

    def _gather(self, now: float) -> None:
        """Begin an attempt once all, or enough, are there and idle."""
        for member in list(self._members.values()):
            if member.writer and now - member.heard > self._limits.lost_after:
                member.writer.transport.abort()
                del self._members[member.process]
        here, absent = self._waiting(), self._absent()
        least = self._limits.min_processes or self._processes
        late = now - self._since > self._limits.regroup_after
        # if this command has come again, the others know how many there were
        known = self._attempt or max((m.attempt for m in here), default=0)
        enough = bool(known) and len(here) >= least and 0 not in absent
        if not absent or (enough and late):
            self._begin(here, absent, known + 1, now)
        elif not enough and now - self._since > self._limits.start_within:
            line = (
                f"process {listed(absent)} of {self._processes} did not "
                f"come within {self._limits.start_within:.0f} s"
            )
            self._end(Judgment(exits.LOST, line, None, False))

    def _waiting(self) -> list[Member]:
        """Return the members without a process, in their order."""
        here = [m for m in self._members.values() if m.writer and m.idle]
        return sorted(here, key=lambda m: m.process)

    def _absent(self) -> list[int]:
        here = {m.process for m in self._waiting()}
        return [i for i in range(self._processes) if i not in here]

    def _begin(
        self, here: list[Member], absent: list[int], attempt: int, now: float
    ) -> None:
        """Begin an attempt: JAX numbers its processes from 0 without a gap."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        with socket.socket(self._family) as free:
            free.bind((self._address[0], 0, *self._address[2:]))
            port = free.getsockname()[1]
        self._attempt, self._told = attempt, None
        self._running, self._since, self._comes = True, now, None
        for m in self._members.values():
            m.part = False
        for number, m in enumerate(here):
            m.begin(now, attempt)
            _say(m, Go(attempt, f"{host}:{port}", number, len(here), listed(absent)))

    def _watch(self, now: float) -> None:
        members = [m for m in self._members.values() if m.part]
        ends = [m.end for m in members if m.end]
        verdict = judge(members, now, self._limits, self._attempt)
        if verdict:
            self._end(self._reconsidered(verdict, members))
        elif len(ends) == len(members):
            if self._comes and {end.code for end in ends} == {exits.STOPPED}:
                line = f"{self._comes} came, for whom the others have saved"
                number = self._comes.process
                self._end(Judgment(exits.STOPPED, line, number, True))
                return
            self._last = Over(ends[0].code)
            self._tell(self._last)
        elif not ends and not self._comes and self._attempt <= self._limits.restarts:
            self._take_in(members)

    def _reconsidered(self, verdict: Judgment, members: list[Member]) -> Judgment:
        """Return another verdict where fewer processes reject what all have accepted.

        Before they train: their devices may not divide into the mesh. From then on all
        are required.
        """
        fewer, restarts = len(members) < self._processes, self._limits.restarts
        fewer = fewer and all(m.half_round is None for m in members)
        if verdict.code != exits.REFUSED or not fewer or self._attempt > restarts:
            return verdict
        self._limits = dataclasses.replace(self._limits, min_processes=None)
        line = messages.printable(f"{verdict.line} All processes are awaited")
        return dataclasses.replace(verdict, line=line, again=True)

    def _take_in(self, members: list[Member]) -> None:
        """Tell an attempt under way to save and end if a new command waits."""
        waiting = self._waiting()
        if waiting and all(m.half_round is not None for m in members):
            self._comes = waiting[0]
            for m in members:
                _say(m, Save())

    def _end(self, verdict: Judgment) -> None:
        for member in self._members.values():
            if member.part or not verdict.again:
                _say(member, verdict)
        self._running, self._since = False, time.monotonic()
        self._last = None if verdict.again else verdict
        for process, member in list(self._members.items()):
            if member.gone:
                del self._members[process]

    def _tell(self, message: Message) -> None:
        for member in self._members.values():
            _say(member, message)


def _say(member: Member, message: Message) -> None:
    if member.writer and not member.writer.is_closing():
        member.writer.write(messages.encode(message))
        if member.writer.transport.get_write_buffer_size() > BACKLOG:
            member.writer.transport.abort()


def _listeners(host: str, port: int) -> list[socket.socket]:
    """Return sockets that listen at all addresses of a host.

    Raises:
      OSError: if none can.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        line = f"{host!r} of --coordinator has no address: {error.strerror}"
        raise OSError(line) from error
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            try:
                listener = socket.create_server(address, family=family)
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                missing = error  # a host's name may have addresses that are not in use
                continue
            listener.setblocking(False)
            sockets.append(listener)
    except OSError:
        for listener in sockets:
            listener.close()
        raise
    if not sockets:
        raise missing or OSError(f"{host} has no address")
    return sockets
