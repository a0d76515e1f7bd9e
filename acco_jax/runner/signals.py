"""Handlers of SIGINT (a person's) and SIGTERM (a scheduler's)."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def handler(handle: Callable[[int, Any], None]) -> Iterator[None]:
    """Handles both signals; outside of the main thread there are none to handle."""
    previous = {}
    with contextlib.suppress(ValueError):  # not in the main thread
        for number in (signal.SIGTERM, signal.SIGINT):
            previous[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
