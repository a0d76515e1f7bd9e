"""Meeting of the commands of a run's processes, and the judge of lost processes.

Process 0's command listens at the address that all were given. Every command, its own
too, connects to it and sends lines of JSON. An attempt begins when all are there
and none has a training process: so a process of an earlier attempt never runs beside
one of a later. Commands give a sign of life every second. Only this module decides
whether a process is lost, so that all hosts print the same line.

Where a run may go on with fewer processes, an attempt that follows another begins with
the commands that are there after a while; a late one has the others save and restart.
"""

import asyncio
import contextlib
import dataclasses
import json
import signal
import socket
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self

from acco_jax.command import exits

SECONDS = 0.25  # between looks
GRACE = 3.0  # seconds in which the first failure may turn out to be another's fault
PARTING = 5.0  # seconds in which commands that have received the end may leave
QUIET = 5.0  # seconds of silence that make a process suspect when others fail

Message = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Limits:
    """Waiting times, and the number of restarts."""

    lost_after: float = 60.0  # seconds without a sign of life
    start_within: float = 300.0  # seconds until all are there, or one has started
    restarts: int = 0  # of the whole run
    min_processes: int | None = None  # to begin again with; None: all
    regroup_after: float = 30.0  # seconds until it begins again without the others


@dataclasses.dataclass(frozen=True)
class End:
    """End of a training process."""

    code: int  # an exit code, or minus a signal's number
    error: str = ""  # the line it ended with
    exception: str = ""  # an unexpected exception

    @property
    def good(self) -> bool:
        return self.code in (exits.FINISHED, exits.STOPPED)

    @property
    def suspicion(self) -> int:
        """Rank of the likelihood that this process is at fault; 0: likeliest."""
        if self.error:
            return 0
        return 1 if self.code < 0 and self.code != -signal.SIGABRT else 2

    def __str__(self) -> str:
        if self.code < 0:
            return f"killed by {signal.Signals(-self.code).name}"
        return self.exception or f"it ended with exit code {self.code}"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Reason why an attempt is over."""

    code: int
    line: str
    process: int | None  # whose end it was; None: nobody's in particular
    again: bool  # whether another attempt follows


@dataclasses.dataclass
class Member:
    """A command that takes part, and the state that it reports."""

    process: int
    host: str
    heard: float  # time of the command's last message, in seconds of time.monotonic
    writer: asyncio.StreamWriter | None = None
    command: str = ""  # a name that no other command has
    gone: bool = False  # whether its connection has ended
    idle: bool = True  # whether it has no process
    part: bool = False  # whether it takes part in the attempt under way
    half_round: int | None = None
    started: bool = False  # whether its process has given a sign of life
    silent: float = 0.0  # seconds since the last one
    end: End | None = None
    ended: float = 0.0  # when

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"

    def begin(self, now: float) -> None:
        """Forget the attempt before, and take part in this one."""
        self.heard, self.idle, self.part, self.half_round = now, False, True, None
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


def judge(
    members: Sequence[Member], now: float, limits: Limits, attempt: int
) -> Verdict | None:
    """Decide whether an attempt is over before its end, and because of which process.

    A process that gives a reason comes first, then one that a signal killed, then one
    that is silent. The deaths of others after it was gone do not count against them.
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
        return Verdict(exits.STOPPED, line, early[0].process, False)
    if not everyone and now - min(m.ended for m, _ in ends) < GRACE:
        return None
    first, end = min(ends, key=lambda pair: (pair[1].suspicion, pair[0].ended))
    if end.error:
        again = end.code == exits.FAILED and attempt <= limits.restarts
        return Verdict(end.code, f"{first}: {end.error}", first.process, again)
    if end.suspicion == 2 and lost.quiet(now) > QUIET:
        why = f"no sign of life for {lost.quiet(now):.0f} s"
        return _lost(lost, why, limits, attempt)
    return _lost(first, str(end), limits, attempt)


def _lost(member: Member, why: str, limits: Limits, attempt: int) -> Verdict:
    line = f"{member} was lost {progress(member.half_round)} ({why})"
    return Verdict(exits.LOST, line, member.process, attempt <= limits.restarts)


class Meeting:
    """Meeting of a run's commands, as process 0's command sees it."""

    def __init__(self, processes: int, limits: Limits) -> None:
        self._processes, self._limits = processes, limits
        self._members: dict[int, Member] = {}
        self._attempt = 0
        self._running = False
        self._comes: Member | None = None  # the others save and begin again for it
        self._since = time.monotonic()  # when this attempt, or the wait for it, began
        self._over = False
        self._talks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def at(self, host: str, port: int) -> AsyncIterator[Self]:
        """Listen at an address until the context ends.

        Raises:
          OSError: if it cannot listen.
        """
        self._host = host
        server = await asyncio.start_server(self._talk, host, port)
        self.port = server.sockets[0].getsockname()[1]
        looks = asyncio.create_task(self._look())
        try:
            yield self
        finally:
            looks.cancel()
            server.close()
            if self._over and self._talks:  # the last messages must not be lost
                await asyncio.wait(self._talks, timeout=PARTING)
            for talk in self._talks:
                talk.cancel()
            await asyncio.gather(looks, *self._talks, return_exceptions=True)
            await asyncio.sleep(0)  # their connections close

    async def _talk(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve one command, from its first message to the end of its connection."""
        member, talk = None, asyncio.current_task()
        assert talk is not None
        self._talks.add(talk)
        talk.add_done_callback(self._talks.discard)
        known = (ValueError, KeyError, TypeError, OSError, asyncio.CancelledError)
        with contextlib.suppress(*known):  # any other message ends the connection
            member = self._admit(json.loads(await reader.readline()), writer)
            while member and (line := await reader.readline()):
                self._hear(member, json.loads(line))
        if member and self._members.get(member.process) is member:
            member.gone, member.writer = True, None
            if not self._running or not member.part:
                del self._members[member.process]
        writer.transport.abort()

    def _admit(self, hello: Message, writer: asyncio.StreamWriter) -> Member | None:
        process, host = int(hello["process"]), str(hello["host"])
        command, now = str(hello["command"]), time.monotonic()
        other = self._members.get(process)
        # The same command comes again when its link was cut; old messages may have
        # arrived just now.
        another = None if other and other.command == command else other
        if hello["processes"] != self._processes or process >= self._processes:
            reason = (
                f"--processes is {hello['processes']} here and {self._processes} on "
                f"{socket.gethostname()}: give all the same."
            )
        elif another and another.writer and another.quiet(now) < QUIET:
            reason = f"{another} is there already: give each its own --process."
        else:
            member = Member(process, host, now, writer, command)
            self._attempt = max(self._attempt, int(hello["attempt"]))
            if self._running and other and other.part and not other.end:
                self._end(_lost(other, "it came again", self._limits, self._attempt))
            if other and other.writer:
                other.writer.transport.abort()
            self._members[process] = member
            training = [m for m in self._members.values() if m.part]
            waits = len(training) if self._running else 0
            _say(member, welcome=socket.gethostname(), training=waits)
            return member
        _say(Member(process, host, 0.0, writer), refused=reason)
        return None

    def _hear(self, member: Member, message: Message) -> None:
        member.heard = time.monotonic()
        match message:
            case {"beat": {"half_round": half_round, "started": started, "silent": s}}:
                member.half_round, member.started = half_round, started
                member.silent = float(s)
            case {"end": end}:
                member.end, member.ended = End(**end), member.heard
            case {"idle": _}:
                member.idle = True

    async def _look(self) -> None:
        before = spoke = time.monotonic()
        while not self._over:
            await asyncio.sleep(SECONDS)
            now = time.monotonic()
            if now - before > QUIET:  # this process itself was delayed
                for member in self._members.values():
                    member.heard += now - before
            before = now
            (self._watch if self._running else self._gather)(now)
            if now - spoke > 4 * SECONDS:
                self._tell(beat=self._attempt)
                spoke = now

    def _gather(self, now: float) -> None:
        """Begin an attempt once all, or enough, are there and idle."""
        here = self._waiting()
        absent = sorted(set(range(self._processes)) - {m.process for m in here})
        least = self._limits.min_processes or self._processes
        late = now - self._since > self._limits.regroup_after
        if not absent or (
            self._attempt and late and len(here) >= least and 0 not in absent
        ):
            self._begin(here, absent, now)
        elif now - self._since > self._limits.start_within:
            line = (
                f"process {', '.join(map(str, absent))} of {self._processes} did not "
                f"come within {self._limits.start_within:.0f} s"
            )
            self._end(Verdict(exits.LOST, line, None, False))
        else:
            self._tell(awaited=absent)

    def _waiting(self) -> list[Member]:
        """Return the members without a process, in their order."""
        here = [m for m in self._members.values() if m.writer and m.idle]
        return sorted(here, key=lambda m: m.process)

    def _begin(self, here: list[Member], absent: list[int], now: float) -> None:
        """Begin an attempt: JAX numbers its processes from 0 without a gap."""
        self._attempt += 1
        self._running, self._since, self._comes = True, now, None
        six = ":" in self._host
        host = f"[{self._host}]" if six else self._host
        with socket.socket(socket.AF_INET6 if six else socket.AF_INET) as free:
            free.bind((self._host, 0))
            port = free.getsockname()[1]
        for m in self._members.values():
            m.part = False
        for number, m in enumerate(here):
            m.begin(now)
            _say(m, go=self._attempt, coordinator=f"{host}:{port}",
                 process=number, processes=len(here), absent=absent)  # fmt: skip

    def _watch(self, now: float) -> None:
        members = [m for m in self._members.values() if m.part]
        ends = [m.end for m in members if m.end]
        verdict = judge(members, now, self._limits, self._attempt)
        if verdict:
            self._end(verdict)
        elif len(ends) == len(members):
            if self._comes and {end.code for end in ends} == {exits.STOPPED}:
                line = f"{self._comes} came, for whom the others have saved"
                number = self._comes.process
                self._end(Verdict(exits.STOPPED, line, number, True))
                return
            self._tell(over=True, code=ends[0].code)
            self._over = True
        elif not ends and not self._comes and self._attempt <= self._limits.restarts:
            self._take_in(members)

    def _take_in(self, members: list[Member]) -> None:
        """Tell an attempt under way to save and end if a new command waits."""
        waiting = self._waiting()
        if waiting and all(m.half_round is not None for m in members):
            self._comes = waiting[0]
            for m in members:
                _say(m, save=True)

    def _end(self, verdict: Verdict) -> None:
        for member in self._members.values():
            if member.part or not verdict.again:
                _say(member, verdict=dataclasses.asdict(verdict))
        self._running, self._since = False, time.monotonic()
        self._over = not verdict.again
        for process, member in list(self._members.items()):
            if member.gone:
                del self._members[process]

    def _tell(self, **message: Any) -> None:
        for member in self._members.values():
            _say(member, **message)


def _say(member: Member, **message: Any) -> None:
    if member.writer and not member.writer.is_closing():
        member.writer.write((json.dumps(message) + "\n").encode())
