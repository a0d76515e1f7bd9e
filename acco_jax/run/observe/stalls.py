"""Watchdog of the main thread: a process whose half-rounds no longer end is lost.

The sign of life that a supervisor hears comes from another thread, which goes on when
the main thread waits for ever: for a queue that nobody fills, a device that hangs, a
file system that does not answer. So a third thread watches the half-rounds.
"""

import collections
import contextlib
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from acco_jax.command import exits

SECONDS = 1.0  # between looks
PAUSE = 5.0  # seconds between two looks that show that this process was stopped
FACTOR = 20  # multiple of the longest call so far that a call may last
ASIDE = 10  # times as long again: compiling, a batch of an evaluation, a save


class Watchdog:
    """Thread that ends the process when no half-round ends for too long."""

    def __init__(self, least: float, lost: Callable[[str], None] = exits.lost):
        """Prepare to watch, from the first call on.

        Args:
          least: seconds without a half-round that are never too long; inf: no watch.
          lost: ends the process, for the reason that it is given.
        """
        self._least, self._lost = least, lost
        self._moved: float | None = None  # when something last went on
        self._ended = time.monotonic()  # when a call was computed
        self._longest = 0.0  # seconds between two calls that were computed
        self._done = 0  # half-rounds that were dispatched
        self._aside = 0  # how many `aside` are open
        self._calls: collections.deque[Any] = collections.deque()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def called(self, half_round: int, result: Any) -> None:
        """Take a result of a half-round, possibly not computed yet."""
        if self._least == math.inf:
            return
        self._calls.append(result)
        self._done = half_round
        self.alive()
        if self._thread.ident is None:
            self._thread.start()

    def alive(self) -> None:
        """Record that the main thread goes on."""
        self._moved = time.monotonic()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Be patient inside: something may last much longer than a half-round."""
        self._aside += 1
        self.alive()
        try:
            yield
        finally:
            self._ended = self._moved = time.monotonic()
            self._aside -= 1

    @property
    def most(self) -> float:
        """Seconds after which the process is lost."""
        seconds = max(self._least, FACTOR * self._longest)
        return seconds * (ASIDE if self._aside else 1)

    def close(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._over.wait(SECONDS):
            now = time.monotonic()
            if self._moved is not None and now - looked > PAUSE:
                self._moved += now - looked
            looked = now
            if self._calls and self._calls[0].is_ready():
                while self._calls and self._calls[0].is_ready():
                    self._calls.popleft()
                if not self._aside:
                    self._longest = max(self._longest, now - self._ended)
                self._ended = self._moved = now
            if self._moved is not None and now - self._moved > self.most:
                self._lost(
                    f"no half-round after half-round {self._done} for "
                    f"{now - self._moved:.0f} s: its main thread is in {_place()}"
                )
                return


def _place() -> str:
    """Return the function, file and line that the main thread is in.

    In an installed library it is the line that called the library.
    """
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    frames = traceback.extract_stack(frame)
    own = [f for f in frames if not exits.installed(f.filename)]
    last = (own or frames)[-1]
    return f"{last.name}, {last.filename.rpartition('/')[2]}, line {last.lineno}"
