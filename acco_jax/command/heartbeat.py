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
import signal
import sys
import threading
import traceback
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
    """Orders of a command to the process it starts: JSON in an environment variable."""

    pipe: int  # file descriptor to write to
    folder: str  # for messages.txt and stacks.txt
    attempt: int  # from 1; later ones are restarts
    coordinator: (
        str | None
    )  # host:port of JAX's coordination service; None: one process
    lost_after: float  # seconds
    start_within: float  # seconds
    process: int = 0  # of the attempt's, which may be fewer than the run's
    processes: int = 1

    def environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(dataclasses.asdict(self))}


def die_with_parent(number: int) -> None:
    """Make this process receive a signal when the one that started it ends.

    It does nothing except on Linux.
    """
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, number)


def follow() -> Orders | None:
    """Begin to give signs of life; return None if no command asked for them."""
    global _pipe, _stacks
    text = os.environ.pop(VARIABLE, None)
    if text is None:
        return None
    die_with_parent(signal.SIGKILL)
    orders = Orders(**json.loads(text))
    folder = Path(orders.folder)
    # Python still writes to the terminal, C++ does not.
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    with open(folder / "messages.txt", "w") as messages:
        os.dup2(messages.fileno(), 1)
        os.dup2(messages.fileno(), 2)
    logging.get_absl_handler().python_handler.setStream(sys.stderr)
    _stacks = open(folder / "stacks.txt", "w")  # noqa: SIM115
    faulthandler.register(STACKS, _stacks)
    keep_stacks()
    sys.excepthook = _unexpected
    _pipe = orders.pipe
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
    """Send the exit code to come to the command, and the line of its reason."""
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
    with open(2, "w", closefd=False) as messages:
        traceback.print_exception(kind, error, trace, file=messages)
    last = "".join(traceback.format_exception_only(error)).strip()
    _tell(code=1, exception=last.partition("\n")[0][:300])
