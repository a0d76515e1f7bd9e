"""Signals that ask a run to stop: a person's, a scheduler's, a terminal's end."""

import contextlib
import math
import os
import signal
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import multihost_utils

from acco_jax.command import heartbeat
from acco_jax.command.heartbeat import STOPPING

AGAIN = 1.0  # seconds within which the same signal may come by two ways


class Received:
    """The signals that a process has had, each way of the same one counted once.

    A terminal that closes sends SIGHUP by its shell and by the kernel; a service
    manager sends SIGTERM to a process and to its parent, which passes it on. SIGINT is
    a person's, who means each, unless a supervising parent is there to pass it on.
    """

    def __init__(self) -> None:
        """Start without any."""
        self.numbers: list[int] = []
        self._times: dict[int, float] = {}  # of the last of each, repetitions too

    def add(self, number: int) -> bool:
        """Return whether a signal that has come now is another one."""
        now = time.monotonic()
        before = self._times.get(number, -math.inf)
        self._times[number] = now
        meant = number == signal.SIGINT and not heartbeat.supervised()
        if now - before < AGAIN and not meant:
            return False
        self.numbers.append(number)
        return True


def heeded(numbers: tuple[int, ...] = STOPPING) -> list[int]:
    """Return the signals that are not ignored."""
    return [n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN]


@contextlib.contextmanager
def handler(
    handle: Callable[[int, Any], None], numbers: tuple[int, ...] = STOPPING
) -> Iterator[None]:
    """Handle signals inside the context; outside of the main thread do nothing.

    What was ignored, as nohup has SIGHUP ignored, stays so.
    """
    previous = {}
    with contextlib.suppress(ValueError):  # not in the main thread
        for number in heeded(numbers):
            previous[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


@contextlib.contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
    """Yield stopped(): whether this run has been told to stop.

    The first signal asks for a stop with a checkpoint, a second one ends the process at
    once, as a KeyboardInterrupt. While the main thread compiles, signals are recorded.
    Several processes agree through JAX's preemption service, which sees SIGTERM: they
    must call stopped() equally often, and the other signals are sent on as SIGTERM.
    """
    received = Received()
    several, calls, told = jax.process_count() > 1, 0, False

    def handle(number: int, frame: types.FrameType | None) -> None:
        if not received.add(number):
            return
        if len(received.numbers) > 1:
            raise KeyboardInterrupt
        if several:
            os.kill(os.getpid(), signal.SIGTERM)

    def stopped() -> bool:
        nonlocal calls, told
        calls += 1
        if not several:
            return bool(received.numbers)
        if not told:  # JAX says so once
            told = bool(multihost_utils.reached_preemption_sync_point(calls))
        return told

    ours = tuple(n for n in STOPPING if not several or n != signal.SIGTERM)
    with handler(handle, ours):
        yield stopped
