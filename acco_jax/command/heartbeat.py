"""Messages from a training process to the command that started it.

They are signs of life, the half-rounds done, and the one line it ends with. Output of
C++ libraries goes to a file, and so do the stacks of its threads when the command
asks for them. Without such a command all of this does nothing.

What the command starts imports all that training needs, and stays: for each attempt it
forks a process that trains, so that a restart imports nothing.
"""

import ctypes
import dataclasses
import faulthandler
import gc
import json
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TextIO

from absl import logging

VARIABLE = "ACCO_JAX_ORDERS"
SECONDS = 1.0  # between signs of life
PATIENCE = 5.0  # seconds to wait for room in the pipe for the reason of an end
LONGEST = 600  # characters of at most 6 bytes: a pipe takes 4096 whole or not at all
STACKS = signal.SIGUSR2  # asks for the stacks of all threads
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)

_pipe: int | None = None
_stacks: TextIO | None = None


@dataclasses.dataclass(frozen=True)
class Orders:
    """Orders of a command for the process of an attempt: JSON, a line in a pipe."""

    attempt: int  # from 1; later ones are restarts
    given: float  # when, in seconds since 1970
    folder: str  # for messages.txt and stacks.txt
    coordinator: (
        str | None
    )  # host:port of JAX's coordination service; None: one process
    lost_after: float  # seconds
    start_within: float  # seconds
    process: int = 0  # of the attempt's, which may be fewer than the run's
    processes: int = 1

    def line(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"


def environment(orders: int, pipe: int, folder: str) -> dict[str, str]:
    """Return the variable of a process: where its orders come from, and its files.

    Args:
      orders: file descriptor to read the orders from.
      pipe: file descriptor to write to.
      folder: for messages.txt, until there are orders.
    """
    return {VARIABLE: json.dumps([orders, pipe, folder])}


def die_with_parent(number: int) -> None:
    """Make this process receive a signal when the one that started it ends.

    It does nothing except on Linux.
    """
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, number)


def follow(prepare: Callable[[], object] = lambda: None) -> Orders | None:
    """Return orders to a process forked for them; None if no command started this.

    Args:
      prepare: imports what training needs, before the first fork.
    """
    global _pipe
    text = os.environ.pop(VARIABLE, None)
    if text is None:
        return None
    die_with_parent(signal.SIGKILL)
    source, _pipe, folder = json.loads(text)
    os.set_blocking(_pipe, False)
    sys.excepthook = _unexpected
    # Python still writes to the terminal, C++ does not.
    # A path may be no Unicode.
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1, errors="backslashreplace")
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    logging.get_absl_handler().python_handler.setStream(sys.stderr)
    _write_messages(folder)
    _keep_stacks(folder)
    if interrupts := signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # to end by it, as by the others
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    prepare()
    gc.freeze()  # imported modules stay: forks need not search them for garbage
    with os.fdopen(source) as lines:
        while line := lines.readline():
            orders = Orders(**json.loads(line))
            if _forked(interrupts):
                break
        else:  # the command has ended
            os._exit(0)
    _write_messages(orders.folder)
    _keep_stacks(orders.folder)
    threading.Thread(target=_beat, daemon=True).start()
    return orders


def _forked(interrupts: bool) -> bool:
    """Fork; return True in the new process, and in this one False once that has ended.

    Until then the signals that ask to stop are the new one's: a service manager sends
    them to all. In the new one SIGINT `interrupts`, unless it is ignored.
    """
    above = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    if not (child := os.fork()):
        if interrupts:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        os.setsid()
        die_with_parent(signal.SIGKILL)
        if os.getppid() != above:  # it died before
            os._exit(0)
        return True
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOPPING}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    _tell_for_sure(pid=child)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for number, handler in before.items():
        signal.signal(number, handler)
    _tell_for_sure(ended=ended)
    return False


def _write_messages(folder: str) -> None:
    """Send what C++ libraries write, and Python's tracebacks, to a file."""
    with open(Path(folder, "messages.txt"), "w") as messages:
        os.dup2(messages.fileno(), 1)
        os.dup2(messages.fileno(), 2)


def _keep_stacks(folder: str) -> None:
    """Have the stacks of all threads written to a file after a crash or when asked."""
    global _stacks
    _stacks = open(Path(folder, "stacks.txt"), "w")  # noqa: SIM115
    faulthandler.register(STACKS, _stacks)
    keep_stacks()


def supervised() -> bool:
    """Return whether a command started this process and reads its messages."""
    return _pipe is not None


def keep_stacks() -> None:
    """Send the stacks of a crash to the file; absl would show them on the terminal."""
    if _stacks is not None:
        faulthandler.enable(_stacks)


def reached(half_round: int) -> None:
    """Send the number of half-rounds done to the command."""
    _tell(half_round=half_round)


def ends_with(code: int, line: str) -> None:
    """Send the exit code to come to the command, and the line of its reason, if any."""
    _tell_for_sure(PATIENCE, code=code, error=line[:LONGEST])


def stuck(why: str) -> None:
    """Write all stacks, and send the command why this process is about to end."""
    if _stacks is not None:
        faulthandler.dump_traceback(_stacks)
    _tell(code=1, exception=why[:LONGEST])


def _tell(**values: int | str) -> bool:
    """Send a message; return whether the pipe has room for it."""
    if _pipe is None:
        return True
    try:
        line = json.dumps(values, ensure_ascii=False) + "\n"
        os.write(_pipe, line.encode(errors="backslashreplace"))
    except BlockingIOError:  # the command is busy
        return False
    except BrokenPipeError:  # the command is gone, and another one may have begun
        os._exit(1)
    return True


def _tell_for_sure(seconds: float | None = None, **values: int | str) -> None:
    """Send a message; wait for room, for ever or some seconds."""
    while not _tell(**values):
        assert _pipe is not None  # it is full
        if not select.select([], [_pipe], [], seconds)[1]:
            return


def _beat() -> None:
    while True:
        _tell()
        threading.Event().wait(SECONDS)


def _unexpected(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    with open(2, "w", closefd=False, errors="backslashreplace") as messages:
        traceback.print_exception(kind, error, trace, file=messages)
    last = "".join(traceback.format_exception_only(error)).strip()
    _tell_for_sure(PATIENCE, code=1, exception=last.partition("\n")[0][:300])
