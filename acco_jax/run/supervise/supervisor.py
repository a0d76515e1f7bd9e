"""Command of a run with several processes or with restarts.

It starts the training process and stays small and alive itself. So it can report in one
line what became of a process that C++ aborted, that a machine took with it, or that no
longer answers. It also restarts the process where that was asked for.
"""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from absl import logging

from acco_jax.command import exits, heartbeat, signals
from acco_jax.run.supervise import meeting, messages
from acco_jax.run.supervise.meeting import Limits, Meeting
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

ANNOUNCE_SECONDS = 30.0  # between lines that name the awaited processes
STACK_SECONDS = 0.5  # for a process to write its stacks, at most
CONNECT_SECONDS = 3.0  # to connect and be admitted, until it is tried again
LENIENT = 2.0  # seconds that process 0 may be silent beyond --lost_after: it judges
END_SECONDS = 10.0  # for a process to end that has given its reason
POLL_SECONDS = 0.25  # between looks at the training process


@dataclasses.dataclass(frozen=True)
class Job:
    """Command to run, and this process's place among the run's processes."""

    command: list[str]  # of the training process
    workdir: Path
    limits: Limits
    process: int = 0
    processes: int = 1
    coordinator: str | None = None  # host:port where the commands meet
    token: str = ""  # that the commands prove to each other to have; "": none


class _Ends(Exception):
    """The command ends; its argument is the exit code."""


class _Imported:
    """A process that has imported all that training needs, and forks what trains."""

    def __init__(self, job: Job) -> None:
        """Start the process.

        Raises:
          OSError: if it cannot be started.
        """
        self._rest = b""
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as given:
            folder = tempfile.TemporaryDirectory(prefix="acco_jax-")
            self.folder = ours.enter_context(folder)
            self._pipe, write = os.pipe()
            ours.callback(os.close, self._pipe)
            given.callback(os.close, write)
            orders, self._orders = os.pipe()
            ours.callback(os.close, self._orders)
            given.callback(os.close, orders)
            os.set_blocking(self._pipe, False)
            place = heartbeat.environment(orders, write, self.folder)
            environment = os.environ | place
            environment.pop(messages.TOKEN, None)
            self._process = subprocess.Popen(
                job.command,
                env=environment,
                pass_fds=[orders, write],
                start_new_session=True,  # a terminal's signals come through the command
            )
            self._ours = ours.pop_all()

    def poll(self) -> int | None:
        """Return its exit code, None while it lives."""
        return self._process.poll()

    def fork(self, orders: heartbeat.Orders) -> None:
        """Have it fork a process for these orders."""
        with contextlib.suppress(BrokenPipeError):  # `poll` returns why
            os.write(self._orders, orders.line())

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield the messages of this process and of the forked one, so far."""
        with contextlib.suppress(BlockingIOError):
            while said := os.read(self._pipe, 1 << 16):
                *lines, self._rest = (self._rest + said).split(b"\n")
                for line in lines:
                    with contextlib.suppress(ValueError):  # cut: the pipe was full
                        yield json.loads(line)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def close(self) -> None:
        """End it; a process that it has forked ends with it."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self._ours.close()


class _Child:
    """The training process of an attempt."""

    def __init__(self, imported: _Imported, job: Job, begin: Go) -> None:
        """Have it forked, for its place in an attempt.

        Raises:
          OSError: if there is no room for its files.
        """
        self._imported, self.attempt = imported, begin.attempt
        self._pid: int | None = None
        self._told: int | None = None  # a signal before it was known
        self._ended: int | None = None  # its exit code
        self.half_round: int | None = None
        self.error = self.exception = ""
        self.code: int | None = None  # that it has announced
        self._last_word = 0.0  # time of the announcement
        self._start = time.monotonic()
        self._heard: float | None = None
        self._folder = tempfile.TemporaryDirectory(
            prefix="acco_jax-", ignore_cleanup_errors=True
        )
        imported.fork(
            heartbeat.Orders(
                self.attempt, time.time(), self._folder.name,
                begin.coordinator if begin.processes > 1 else None,
                job.limits.lost_after, job.limits.start_within,
                begin.process, begin.processes,
            )
        )  # fmt: skip

    def end(self) -> End | None:
        """Read the process's messages; return how it has ended, None if not."""
        code = self._poll()
        if self.code is not None and time.monotonic() - self._last_word > END_SECONDS:
            code = self.code  # it waits for the others, which may be gone
        done = self.code in (exits.FINISHED, exits.STOPPED)
        if done and code is not None and code < 0:
            code = self.code  # a library in C++ crashed while the interpreter ended
        if code is None:
            return None
        error, exception = map(messages.printable, (self.error, self.exception))
        return End(code, error, exception)

    def _poll(self) -> int | None:
        """Read the messages; return the process's exit code, None while it lives."""
        gone = self._imported.poll()  # first: messages precede the end
        for message in self._imported.messages():
            self._hear(message)
        if self._ended is not None:
            return self._ended
        return None if self._pid and _lives(self._pid) else gone

    def _hear(self, message: dict[str, Any]) -> None:
        if "pid" in message:
            self._pid = message["pid"]
            if self._told is not None:
                self.signal(self._told)
            return
        if "ended" in message:
            self._ended = message["ended"]
            return
        self._heard = time.monotonic()
        self.half_round = message.get("half_round", self.half_round)
        self.error = message.get("error", self.error)
        self.exception = message.get("exception", self.exception)
        if "code" in message:
            self.code, self._last_word = message["code"], self._heard

    def beat(self) -> Beat:
        silent = time.monotonic() - (self._heard or self._start)
        if self.code is not None:  # it ends, or `end` takes it for ended
            silent = 0.0
        return Beat(self.half_round, self._heard is not None, silent)

    def signal(self, number: int) -> None:
        """Send a signal: until there is a fork, to the process that imports."""
        if self._pid is None:
            self._told = number  # for the fork, if it is just being made
            self._imported.signal(number)
        elif self._ended is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)

    async def kill(self) -> bool:
        """Make the process write its stacks, then kill it; return whether it ended.

        It cannot while the kernel holds a thread of it, as in a device's driver.
        """
        if self._poll() is None and self._heard:
            before = last = size = self._stacks()
            self.signal(heartbeat.STACKS)
            deadline = time.monotonic() + STACK_SECONDS
            while time.monotonic() < deadline and not before < last == size:
                await asyncio.sleep(0.05)
                last, size = size, self._stacks()
        self.signal(signal.SIGKILL)
        deadline = time.monotonic() + END_SECONDS
        while self._poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self._poll() is None and self._pid and not _lives(self._pid):
            self._imported.signal(signal.SIGKILL)  # it should have said so
            return True
        return self._poll() is not None

    def _stacks(self) -> int:
        """Return the bytes of stacks that the process has written."""
        with contextlib.suppress(OSError):
            return os.path.getsize(os.path.join(self._folder.name, "stacks.txt"))
        return 0

    def keep(self, folder: Path) -> None:
        """Copy the files that the process has left, for later diagnosis."""
        own = self._imported.folder if self._pid is None else self._folder.name
        with contextlib.suppress(OSError):
            shutil.copytree(own, folder, dirs_exist_ok=True)

    def close(self) -> None:
        """End the process, and remove its files."""
        deadline = time.monotonic() + END_SECONDS
        self.signal(signal.SIGKILL)
        while self._poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        self._folder.cleanup()


def _lives(pid: int) -> bool:
    """Return whether there is such a process, which has not ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


class _Link:
    """Connection to the meeting."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._reader, self._writer = reader, writer
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._read())
        self.host, self.heard = "", time.monotonic()
        self.half_round: int | None = None  # of process 0
        self.over = False  # whether the connection has ended, and all of it was read
        self.lost = False  # whether nothing more will come from it

    async def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while line := await self._reader.readline():
                message = messages.decode(line)
                self.heard = time.monotonic()
                self._messages.put_nowait(message)
        self._messages.put_nowait(None)

    @property
    def silent(self) -> float:
        """Seconds since the last message."""
        return time.monotonic() - self.heard

    def say(self, message: Message) -> None:
        if not self._writer.is_closing():
            self._writer.write(messages.encode(message))

    async def next(self, seconds: float) -> Message | None:
        """Return a message; None if none comes in time, or the connection is over."""
        if self.over:
            return None
        before = time.monotonic()
        try:
            message = await asyncio.wait_for(self._messages.get(), seconds)
        except TimeoutError:
            late = time.monotonic() - before - seconds
            if late > meeting.QUIET:  # this process was delayed, and has not read yet
                self.heard += late
            return None
        self.over = message is None
        if isinstance(message, Alive):
            self.half_round = message.half_round
        return message

    def close(self) -> None:
        self._task.cancel()
        self._writer.transport.abort()  # a cut link would never take what is left


class _Command:
    """One command of a run, from its start to its exit code."""

    def __init__(self, job: Job, host: str, port: int) -> None:
        self._job, self._host, self._port = job, host, port
        self._attempt = 0
        self._imported: _Imported | None = None
        self._child: _Child | None = None
        self._received = signals.Received()
        self._name = secrets.token_hex(8)

    async def run(self) -> int:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        stop = functools.partial(self._stop, task)
        for number in signals.heeded():
            loop.add_signal_handler(number, stop, number)
        try:
            await asyncio.sleep(0)  # the meeting, if it is here, has begun
            self._import()
            while True:  # once, except when process 0's command has gone and come again
                link = await self._connect()
                with contextlib.closing(link):
                    while await self._one_attempt(link):
                        pass
        except _Ends as end:
            return int(end.args[0])
        except asyncio.CancelledError:
            if len(self._received.numbers) == 1:
                return _say(exits.STOPPED, "stopped while waiting for other processes.")
            line = "interrupted: the same command continues from its checkpoint."
            return _say(exits.FAILED, line)
        finally:
            for open_one in (self._child, self._imported):
                if open_one:
                    open_one.close()

    def _import(self) -> _Imported:
        """Return the process that has imported all, another one if it has died.

        Raises:
          _Ends: if it cannot be started.
        """
        if self._imported and self._imported.poll() is not None:
            self._imported.close()
            self._imported = None
        if self._imported is None:
            try:
                self._imported = _Imported(self._job)
            except OSError as error:
                raise _cannot_start(error) from error
        return self._imported

    def _stop(self, task: asyncio.Task, number: int) -> None:
        """Pass the first signal on; a second one, or one without a child, ends."""
        if not self._received.add(number):
            return
        if len(self._received.numbers) == 1 and self._child is not None:
            self._child.signal(number)
        else:
            task.cancel()

    async def _connect(self) -> _Link:
        """Wait for process 0's command, and be admitted by it."""
        job, announced = self._job, _Announcement(self._job.processes)
        while True:
            link = None
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    there = await asyncio.open_connection(self._host, self._port)
                    link = _Link(*there)
                    await self._introduce(link)
                return link
            except BaseException as error:
                if link:
                    link.close()
                if not isinstance(error, OSError | ValueError):
                    raise
            announced.awaiting("0")
            if announced.seconds > job.limits.start_within:
                line = (
                    f"process 0 of {job.processes} did not answer at "
                    f"{job.coordinator} within {job.limits.start_within:.0f} s."
                )
                raise _Ends(_say(exits.LOST, line))
            await asyncio.sleep(0.5)

    async def _introduce(self, link: _Link) -> None:
        """Exchange the first messages, and the proofs of a token.

        Raises:
          ValueError: if the answer is not that of the run's meeting.
          _Ends: if the meeting refuses this command.
        """
        job, host, token = self._job, socket.gethostname(), self._job.token
        challenge = await link.next(CONNECT_SECONDS)
        if not isinstance(challenge, Challenge):
            raise ValueError("not a meeting of commands")
        if challenge.token != bool(token):
            here, there = ("set", "not set") if token else ("not set", "set")
            line = (
                f"{messages.TOKEN} is {here} here and {there} at {job.coordinator}: "
                "give all processes the same."
            )
            raise _Ends(_say(exits.REFUSED, line))
        hello = Hello(job.process, job.processes, host, self._attempt, self._name)
        nonce = challenge.nonce
        shown = messages.proof(token, "command", nonce, hello) if token else ""
        link.say(dataclasses.replace(hello, proof=shown))
        match await link.next(CONNECT_SECONDS):
            case Refused() as refused:
                raise _Ends(_say(exits.REFUSED, refused.line))
            case Welcome() as welcome:
                expected = messages.proof(token, "meeting", nonce, hello)
                if token and not messages.proves(welcome.proof, expected):
                    raise ValueError("a meeting without the token")
                link.host = welcome.host
                if others := welcome.training:
                    logging.info("%d others train: waiting until they save", others)
            case _:
                raise ValueError("not a meeting of commands")

    async def _one_attempt(self, link: _Link) -> bool:
        """Wait for an attempt to begin, and for its end.

        Returns whether to wait for another one on this connection.

        Raises:
          _Ends: if the run is over.
        """
        begin = await self._begin(link)
        if begin is None:
            return False
        self._attempt = begin.attempt
        try:
            self._child = child = _Child(self._import(), self._job, begin)
        except OSError as error:
            raise _cannot_start(error) from error
        try:
            verdict = await self._watch(link, child)
            await self._carry_out(verdict, child)
        finally:
            child.close()
            self._child = None
        return not link.lost

    async def _begin(self, link: _Link) -> Go | None:
        """Return the message that begins an attempt, None if the link is lost."""
        announced = _Announcement(self._job.processes)
        said = 0.0
        while not link.over:
            if time.monotonic() - said > heartbeat.SECONDS:
                link.say(Idle(self._attempt))
                said = time.monotonic()
            match await link.next(heartbeat.SECONDS):
                case Go() as begin:
                    if begin.absent:
                        logging.warning(
                            "going on with %d of %d processes: without process %s",
                            begin.processes, self._job.processes, begin.absent,
                        )  # fmt: skip
                    return begin
                case Alive(awaited=absent) if absent:
                    announced.awaiting(absent)
                case Judgment() as verdict:
                    raise _Ends(_say(verdict.code, verdict.line + "."))
                case Over(code):
                    raise _Ends(code)
                case None if self._unheard(link):
                    return None
        return None

    async def _watch(self, link: _Link, child: _Child) -> Judgment:
        """Pass on the process's messages until the attempt is over."""
        said, end = 0.0, None
        while True:
            if end is None and (end := child.end()):
                # before it could look for signals, or no longer
                early = child.half_round is None and end.code == exits.FAILED
                told = early or -end.code in signals.STOPPING
                if self._received.numbers and told:
                    end = End(exits.STOPPED)
                link.say(child.beat())
                link.say(end)
            if time.monotonic() - said > heartbeat.SECONDS:
                link.say(child.beat())
                said = time.monotonic()
            message = await link.next(POLL_SECONDS)
            match message:
                case Judgment() as verdict:
                    return verdict
                case Over() if end:
                    raise _Ends(end.code)
                case Save():
                    child.signal(signal.SIGTERM)
            if link.over or (message is None and self._unheard(link)):
                if end and (end.good or end.error):
                    raise _Ends(end.code)
                return self._lost_meeting(link)

    def _unheard(self, link: _Link) -> bool:
        """Return whether process 0's command has been silent too long.

        To its own command its meeting is not silent: both pause together.
        """
        return bool(
            self._job.process and link.silent > self._job.limits.lost_after + LENIENT
        )

    def _lost_meeting(self, link: _Link) -> Judgment:
        link.lost = True
        limits, attempt = self._job.limits, self._attempt
        if not link.over:
            return meeting.paused(link.host, link.half_round, limits, attempt)
        done = meeting.progress(link.half_round)
        line = f"process 0 on {link.host} was lost {done} (its command is gone)"
        return Judgment(exits.LOST, line, 0, attempt <= limits.restarts)

    async def _carry_out(self, verdict: Judgment, child: _Child) -> None:
        """End this command's process according to the verdict.

        Raises:
          _Ends: if no other attempt follows.
        """
        job, line = self._job, verdict.line
        ended = await child.kill()
        if job.workdir.is_dir() and verdict.code in (exits.LOST, exits.FAILED):
            own, folders = f"process-{job.process}", job.workdir / "failures"
            numbers = itertools.count(child.attempt)  # earlier commands' are kept
            each = (folders / f"attempt-{n}" for n in numbers)
            folder = next(x for x in each if not (x / own).exists())
            child.keep(folder / own)
            line += f": messages and stacks are in {folder}"
        if not ended:
            raise _Ends(_say(exits.LOST, f"{line}; its process cannot be killed."))
        if verdict.again and not self._received.numbers:
            logging.warning(
                "%s; attempt %d of %d begins",
                line, child.attempt + 1, job.limits.restarts + 1,
            )  # fmt: skip
            return
        if child.error:  # the process has printed its line itself
            raise _Ends(child.code)
        if verdict.code in (exits.LOST, exits.FAILED):
            line += "; the same command continues from the last checkpoint."
        raise _Ends(_say(verdict.code, line))


class _Announcement:
    """Log line, now and then, that names the awaited processes."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._start = self._last = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def awaiting(self, absent: str) -> None:
        if time.monotonic() - self._last < ANNOUNCE_SECONDS:
            return
        self._last = time.monotonic()
        logging.warning(
            "waiting for process %s of %d since %.0f s",
            absent, self._processes, self.seconds,
        )  # fmt: skip


def _cannot_start(error: OSError) -> _Ends:
    line = f"its process cannot start ({error}): the same command continues."
    return _Ends(_say(exits.FAILED, line))


def _say(code: int, line: str) -> int:
    sys.stderr.write(f"error: {messages.printable(line)}\n")
    return code


def supervise(job: Job) -> int:
    """Run the training process, again if restarts allow; return the exit code.

    Raises:
      OSError: if process 0's command cannot listen at the coordinator's address.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would hide how one ends
    return asyncio.run(_supervise(job))


async def _supervise(job: Job) -> int:
    host, _, port = (job.coordinator or "127.0.0.1:0").rpartition(":")
    host = host.strip("[]")  # of an IPv6 address, as in [::1]:12355
    if job.process:
        code = await _Command(job, host, int(port)).run()
        await asyncio.sleep(0)  # its connection closes
        return code
    meets = Meeting(job.processes, job.limits, job.token)
    async with meets.at(host, int(port)) as here:
        return await _Command(job, host, here.port).run()
