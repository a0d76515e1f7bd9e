"""Messages from a training process to the command that started it.

They are signs of life, the half-rounds done, and the one line it ends with. Output of
C++ libraries goes to a file, and so do the stacks of its threads when the command
asks for them. Without such a command all of this does nothing.
"""

import contextlib
import ctypes
import dataclasses
import faulthandler
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
LONGEST = 600  # characters of a line: a pipe takes 4096 bytes whole or not at all
STACKS = signal.SIGUSR2  # asks for the stacks of all threads

_pipe: int | None = None
_stacks: TextIO | None = None


@dataclasses.dataclass(frozen=True)
class Orders:
    """Orders of a command to the process it starts: JSON, a line in a pipe.

    They may come long after the start, to a process that is a spare until then.
    """

    attempt: int  # from 1; later ones are restarts
    given: float  # when, in seconds since 1970
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
      folder: for messages.txt and stacks.txt.
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
    """Wait for orders, and give signs of life; return None if no command started this.

    Args:
      prepare: what a spare does before it waits.
    """
    global _pipe, _stacks
    text = os.environ.pop(VARIABLE, None)
    if text is None:
        return None
    die_with_parent(signal.SIGKILL)
    source, pipe, place = json.loads(text)
    folder = Path(place)
    # Python still writes to the terminal, C++ does not.
    # A path may be no Unicode.
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1, errors="backslashreplace")
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    with open(folder / "messages.txt", "w") as messages:
        os.dup2(messages.fileno(), 1)
        os.dup2(messages.fileno(), 2)
    logging.get_absl_handler().python_handler.setStream(sys.stderr)
    _stacks = open(folder / "stacks.txt", "w")  # noqa: SIM115
    faulthandler.register(STACKS, _stacks)
    keep_stacks()
    if not select.select([source], [], [], 0)[0]:
        prepare()
    with os.fdopen(source) as lines:
        line = lines.readline()
    if not line:  # the command has ended
        os._exit(0)
    orders = Orders(**json.loads(line))
    sys.excepthook = _unexpected
    _pipe = pipe
    os.set_blocking(_pipe, False)
    threading.Thread(target=_beat, daemon=True).start()
    return orders


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
    _tell(code=code, error=line[:LONGEST])


def stuck(why: str) -> None:
    """Write all stacks, and send the command why this process is about to end."""
    if _stacks is not None:
        faulthandler.dump_traceback(_stacks)
    _tell(code=1, exception=why[:LONGEST])


def _tell(**values: int | str) -> None:
    if _pipe is None:
        return
    try:
        with contextlib.suppress(BlockingIOError):  # the command is busy: one is lost
            os.write(_pipe, (json.dumps(values) + "\n").encode())
    except BrokenPipeError:  # the command is gone, and another one may have begun
        os._exit(1)


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
    _tell(code=1, exception=last.partition("\n")[0][:300])
