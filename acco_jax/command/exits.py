"""Exit codes of all commands, for schedulers and people."""

import contextlib
import errno
import logging as levels
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from absl import logging

from acco_jax.command import heartbeat

FINISHED = 0
FAILED = 1
REFUSED = 2
EXPOSED = 3
DIVERGED = 4
LOST = 5
STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again

TABLE = f"""
Exit codes:
  {FINISHED:2}  finished
  {FAILED:2}  any other failure
  {REFUSED:2}  error in a flag, the config, a file or the machine
  {EXPOSED:2}  plan, audit --require-hidden: communication is exposed
  {DIVERGED:2}  diverged: the loss rose too far, or it or a parameter is not finite
  {LOST:2}  a process of the run was lost, or did not start
  {STOPPED:2}  stopped and saved: the same command continues
"""


# of a file system or a network that fails now and may not the next time; errors of
# connections and of time have classes
PASSING = (errno.EIO, errno.ESTALE, errno.ENETDOWN, errno.ENETUNREACH,
           errno.EHOSTDOWN, errno.EHOSTUNREACH)  # fmt: skip
MEMORY = (
    "halve microbatch_size and double microbatches_per_step in a new workdir, or use "
    "more devices."
)
_PACKAGE = Path(__file__).parent.parent


class Stopped(Exception):
    """A run was told to stop, and has saved its state."""


class Failed(Exception):
    """A command could not do its work, for a reason that its message names."""


class Damaged(ValueError):
    """A file differs from what was written: to read it again changes nothing."""


class _Timed(levels.Formatter):
    """Format of a line of the log: the time, a warning's level, the message."""

    def formatMessage(self, record: levels.LogRecord) -> str:
        serious = record.levelno >= levels.WARNING
        level = f"{record.levelname.lower()}: " if serious else ""
        return f"{self.formatTime(record, self.datefmt)} {level}{record.message}"


@contextlib.contextmanager
def lines(memory: str = MEMORY) -> Iterator[None]:
    """End a command whose body raises with one line on stderr and a code.

    What the body logs has the time, not the place in the code. An unforeseen error
    prints its traceback before that line. In a process that a supervisor started such
    an error is raised again: the supervisor receives it, and decides whether a lost
    peer caused it.

    Args:
      memory: the remedy where memory is exhausted.
    """
    logging.get_absl_handler().setFormatter(_Timed(datefmt="%Y-%m-%d %H:%M:%S"))
    try:
        yield
    except SystemExit:
        raise
    except BaseException as error:  # a panic of a Rust library is not an Exception
        code, line = ended(error, memory)
        told = isinstance(error, KeyboardInterrupt)  # by a signal, as the supervisor
        if heartbeat.supervised() and (code is None or told):
            raise
        if code is None:
            traceback.print_exception(error)
        end(FAILED if code is None else code, line)


def ended(error: BaseException, memory: str) -> tuple[int | None, str]:
    """Return the code and the line that a command ends with.

    The code is None for an unforeseen error. `memory` is as for `lines`.
    """
    text = str(error)
    match error:
        case Stopped():
            return STOPPED, text
        case Failed():
            return FAILED, text
        case KeyboardInterrupt():
            return FAILED, text or "interrupted"
        case FloatingPointError():
            return DIVERGED, text
        case MemoryError():
            return FAILED, f"out of memory: {memory}"
        case RuntimeError() if text.startswith("RESOURCE_EXHAUSTED"):
            return FAILED, f"out of memory ({text:.200}): {memory}"
        case ConnectionError() | TimeoutError():
            return FAILED, text
        case OSError():
            return FAILED if error.errno in PASSING else REFUSED, text
        case ValueError():
            ours, where = _place(error)
            return REFUSED, text if ours else f"{text} ({where})"
    return None, f"{type(error).__name__}: {text} ({_place(error)[1]})"


def _place(error: BaseException) -> tuple[bool, str]:
    """Return whether this package raised an error, and the file and line that did.

    For an error in an installed library it is the line that called the library.
    """
    frames = traceback.extract_tb(error.__traceback__)
    ours = not frames or Path(frames[-1].filename).is_relative_to(_PACKAGE)
    own = [
        f for f in frames
        if Path(f.filename).is_relative_to(_PACKAGE)
        or not installed(f.filename)
    ]  # fmt: skip
    if not (own or frames):
        return ours, "nowhere"
    frame = (own or frames)[-1]
    return ours, f"{Path(frame.filename).name}, line {frame.lineno}"


def lost(why: str) -> NoReturn:
    """End the process from another thread than the main thread, which is stuck.

    A supervisor receives the reason, and has the stacks. Others read it on stderr.
    """
    if heartbeat.supervised():
        heartbeat.stuck(why)
    else:
        sys.stderr.write(f"error: {why}; the same command continues.\n")
        sys.stderr.flush()
    os._exit(LOST)


def installed(file: str) -> bool:
    """Return whether a file is of an installed package or of Python."""
    places = ("site-packages", "dist-packages", str(Path(traceback.__file__).parent))
    return any(part in file for part in places)


def end(code: int, message: object) -> NoReturn:
    """End the process with one line on stderr.

    Args:
      code: one of this module's.
      message: its lines become one.
    """
    line = " ".join(str(message).split())
    sys.stderr.write(f"error: {line}\n")
    heartbeat.ends_with(code, line)
    sys.exit(code)
