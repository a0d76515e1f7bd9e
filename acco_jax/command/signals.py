"""Signals that ask a run to stop: a person's, a scheduler's, a terminal's end."""

import contextlib
import os
import signal
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import multihost_utils

from acco_jax.command import heartbeat

AGAIN = 1.0  # seconds within which a command may pass on what its process has had
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


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
    received: list[tuple[int, float]] = []
    several, calls, told = jax.process_count() > 1, 0, False

    def handle(number: int, frame: types.FrameType | None) -> None:
        now = time.monotonic()
        if received:
            first, at = received[0]
            # a service manager sends it to the command, too; a shell as the kernel does
            twice = heartbeat.supervised() or number == signal.SIGHUP
            if twice and number == first and now - at < AGAIN:
                return
            raise KeyboardInterrupt
        received.append((number, now))
        if several:
            os.kill(os.getpid(), signal.SIGTERM)

    def stopped() -> bool:
        nonlocal calls, told
        calls += 1
        if not several:
            return bool(received)
        if not told:  # JAX says so once
            told = bool(multihost_utils.reached_preemption_sync_point(calls))
        return told

    ours = tuple(n for n in STOPPING if not several or n != signal.SIGTERM)
    with handler(handle, ours):
        yield stopped
