"""Command of a run with several processes or with restarts.

It starts the training process and stays small and alive itself. So it can report in one
line what became of a process that C++ aborted, that a machine took with it, or that no
longer answers. It also restarts the process where that was asked for.
"""

import asyncio
import contextlib
import dataclasses
import functools
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
from pathlib import Path
from typing import Any

from absl import logging

from acco_jax.command import exits, heartbeat, signals
from acco_jax.run.supervise import meeting
from acco_jax.run.supervise.meeting import End, Limits, Meeting, Message, Verdict

ANNOUNCE_SECONDS = 30.0  # between lines that name the awaited processes
STACK_SECONDS = 0.5  # for a process to write its stacks
CONNECT_SECONDS = 3.0  # until an attempt to connect is repeated
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


class _Ends(Exception):
    """The command ends; its argument is the exit code."""


class _Child:
    """A training process."""

    def __init__(self, job: Job, begin: Message) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="acco_jax-")
        self.attempt = int(begin["go"])
        self.half_round: int | None = None
        self.error = self.exception = ""
        self.code: int | None = None  # that it has announced
        self._last_word = 0.0  # time of the announcement
        self._start = time.monotonic()
        self._heard: float | None = None
        self._pipe, write = os.pipe()
        os.set_blocking(self._pipe, False)
        self._rest = b""
        process, processes = begin["process"], begin["processes"]
        orders = heartbeat.Orders(
            write, self._folder.name, self.attempt,
            begin["coordinator"] if processes > 1 else None,
            job.limits.lost_after, job.limits.start_within, process, processes,
        )  # fmt: skip
        self._process = subprocess.Popen(
            job.command,
            env=os.environ | orders.environment(),
            pass_fds=[write],
            start_new_session=True,  # a terminal's signals come through the command
        )
        os.close(write)

    def end(self) -> End | None:
        """Read the process's messages; return how it has ended, None if not."""
        code = self._process.poll()  # first: messages precede the end
        with contextlib.suppress(BlockingIOError):
            while said := os.read(self._pipe, 1 << 16):
                *lines, self._rest = (self._rest + said).split(b"\n")
                for line in lines:
                    self._hear(json.loads(line))
        if self.code is not None and time.monotonic() - self._last_word > END_SECONDS:
            code = self.code  # it waits for the others, which may be gone
        return None if code is None else End(code, self.error, self.exception)

    def _hear(self, message: Message) -> None:
        self._heard = time.monotonic()
        self.half_round = message.get("half_round", self.half_round)
        self.error = message.get("error", self.error)
        self.exception = message.get("exception", self.exception)
        if "code" in message:
            self.code, self._last_word = message["code"], self._heard

    def beat(self) -> Message:
        silent = time.monotonic() - (self._heard or self._start)
        started = self._heard is not None
        return {"half_round": self.half_round, "started": started, "silent": silent}

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    async def kill(self) -> None:
        """Make the process write its stacks, then kill it."""
        if self._process.poll() is None and self._heard:
            self.signal(heartbeat.STACKS)
            await asyncio.sleep(STACK_SECONDS)
        self._process.kill()
        self._process.wait()

    def keep(self, folder: Path) -> None:
        """Copy the files that the process has left, for later diagnosis."""
        with contextlib.suppress(OSError):
            shutil.copytree(self._folder.name, folder, dirs_exist_ok=True)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._pipe)
        self._folder.cleanup()


class _Link:
    """Connection to the meeting."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._reader, self._writer = reader, writer
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._read())
        self.host, self.heard = "", time.monotonic()
        self.lost = False  # whether nothing more will come from it

    async def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while line := await self._reader.readline():
                self.heard = time.monotonic()
                self._messages.put_nowait(json.loads(line))
        self._messages.put_nowait(None)

    @property
    def silent(self) -> float:
        """Seconds since the last message."""
        return time.monotonic() - self.heard

    def say(self, **message: Any) -> None:
        if not self._writer.is_closing():
            self._writer.write((json.dumps(message) + "\n").encode())

    async def next(self, seconds: float) -> Message | None:
        """Return a message, {} if none comes in time, None after the connection."""
        try:
            message = await asyncio.wait_for(self._messages.get(), seconds)
        except TimeoutError:
            return {}
        if message is None:
            self._messages.put_nowait(None)  # and so it stays
        return message

    def close(self) -> None:
        self._task.cancel()
        self._writer.transport.abort()  # a cut link would never take what is left


class _Command:
    """One command of a run, from its start to its exit code."""

    def __init__(self, job: Job, host: str, port: int) -> None:
        self._job, self._host, self._port = job, host, port
        self._attempt = 0
        self._child: _Child | None = None
        self._told = 0  # signals received
        self._name = secrets.token_hex(8)

    async def run(self) -> int:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        stop = functools.partial(self._stop, task)
        for number in signals.STOPPING:
            loop.add_signal_handler(number, stop, number)
        try:
            while True:  # once, except when process 0's command has gone and come again
                link = await self._connect()
                with contextlib.closing(link):
                    while await self._one_attempt(link):
                        link.say(idle=True)
        except _Ends as end:
            return int(end.args[0])
        except asyncio.CancelledError:
            if self._told == 1:
                return _say(exits.STOPPED, "stopped while waiting for other processes.")
            line = "interrupted: the same command continues from its checkpoint."
            return _say(exits.FAILED, line)
        finally:
            if self._child:
                self._child.close()

    def _stop(self, task: asyncio.Task, number: int) -> None:
        """Pass the first signal on; a second one, or one without a child, ends."""
        self._told += 1
        if self._told == 1 and self._child is not None:
            self._child.signal(number)
        else:
            task.cancel()

    async def _connect(self) -> _Link:
        """Wait for process 0's command, and introduce this one."""
        job, announced = self._job, _Announcement(self._job.processes)
        while True:
            try:
                there = asyncio.open_connection(self._host, self._port)
                link = _Link(*await asyncio.wait_for(there, CONNECT_SECONDS))
                break
            except (OSError, TimeoutError):
                announced.awaiting([0])
            if announced.seconds > job.limits.start_within:
                line = (
                    f"process 0 of {job.processes} did not answer at "
                    f"{job.coordinator} within {job.limits.start_within:.0f} s."
                )
                raise _Ends(_say(exits.LOST, line))
            await asyncio.sleep(0.5)
        link.say(
            process=job.process,
            processes=job.processes,
            host=socket.gethostname(),
            attempt=self._attempt,
            command=self._name,
        )
        return link

    async def _one_attempt(self, link: _Link) -> bool:
        """Wait for an attempt to begin, and for its end.

        Returns whether to wait for another one on this connection.

        Raises:
          _Ends: if the run is over.
        """
        begin = await self._begin(link)
        if begin is None:
            return False
        self._attempt = begin["go"]
        self._child = child = _Child(self._job, begin)
        try:
            verdict = await self._watch(link, child)
            await self._carry_out(verdict, child)
        finally:
            child.close()
            self._child = None
        return not link.lost

    async def _begin(self, link: _Link) -> Message | None:
        """Return the message that begins an attempt, None if the link is lost."""
        announced = _Announcement(self._job.processes)
        while True:
            match await link.next(self._job.limits.start_within):
                case {"go": _, "processes": here, "absent": absent} as begin:
                    if absent:
                        logging.warning(
                            "going on with %d of %d processes: without process %s",
                            here, self._job.processes, ", ".join(map(str, absent)),
                        )  # fmt: skip
                    return begin
                case {"welcome": host, "training": others}:
                    link.host = host
                    if others:
                        logging.info("%d others train: waiting until they save", others)
                case {"awaited": absent}:
                    announced.awaiting(absent)
                case {"refused": line}:
                    raise _Ends(_say(exits.REFUSED, line))
                case {"verdict": verdict}:
                    raise _Ends(_say(verdict["code"], verdict["line"] + "."))
                case {"over": _, "code": code}:
                    raise _Ends(code)
                case None:
                    return None

    async def _watch(self, link: _Link, child: _Child) -> Verdict:
        """Pass on the process's messages until the attempt is over."""
        said, end = 0.0, None
        while True:
            if end is None and (end := child.end()):
                if self._told and end.code < 0:  # before it could look for signals
                    end = End(exits.STOPPED)
                link.say(beat=child.beat())
                link.say(end=dataclasses.asdict(end))
            if end is None and time.monotonic() - said > heartbeat.SECONDS:
                link.say(beat=child.beat())
                said = time.monotonic()
            message = await link.next(POLL_SECONDS)
            gone = message is None or link.silent > self._job.limits.lost_after
            match message:
                case {"verdict": verdict}:
                    return Verdict(**verdict)
                case {"over": _} if end:
                    raise _Ends(end.code)
                case {"save": _}:
                    child.signal(signal.SIGTERM)
            if gone:
                if end and (end.good or end.error):
                    raise _Ends(end.code)
                return self._lost_meeting(link, child)

    def _lost_meeting(self, link: _Link, child: _Child) -> Verdict:
        link.lost = True
        why = f"no word from its command for {link.silent:.0f} s"
        if link.silent < self._job.limits.lost_after:
            why = "its command is gone"
        done = child.half_round
        line = f"process 0 on {link.host} was lost {meeting.progress(done)} ({why})"
        again = self._attempt <= self._job.limits.restarts
        return Verdict(exits.LOST, line, 0, again)

    async def _carry_out(self, verdict: Verdict, child: _Child) -> None:
        """End this command's process according to the verdict.

        Raises:
          _Ends: if no other attempt follows.
        """
        job, line = self._job, verdict.line
        await child.kill()
        if job.workdir.is_dir() and verdict.code in (exits.LOST, exits.FAILED):
            folder = job.workdir / "failures" / f"attempt-{child.attempt}"
            child.keep(folder / f"process-{job.process}")
            line += f": messages and stacks are in {folder}"
        if verdict.again and not self._told:
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

    def awaiting(self, absent: list[int]) -> None:
        if time.monotonic() - self._last < ANNOUNCE_SECONDS:
            return
        self._last = time.monotonic()
        logging.warning(
            "waiting for process %s of %d since %.0f s",
            ", ".join(map(str, absent)), self._processes, self.seconds,
        )  # fmt: skip


def _say(code: int, line: str) -> int:
    sys.stderr.write(f"error: {' '.join(line.split())}\n")
    return code


def supervise(job: Job) -> int:
    """Run the training process, again if restarts allow; return the exit code.

    Raises:
      OSError: if process 0's command cannot listen at the coordinator's address.
    """
    return asyncio.run(_supervise(job))


async def _supervise(job: Job) -> int:
    host, _, port = (job.coordinator or "127.0.0.1:0").rpartition(":")
    host = host.strip("[]")  # of an IPv6 address, as in [::1]:12355
    if job.process:
        code = await _Command(job, host, int(port)).run()
        await asyncio.sleep(0)  # its connection closes
        return code
    async with Meeting(job.processes, job.limits).at(host, int(port)) as here:
        return await _Command(job, host, here.port).run()
