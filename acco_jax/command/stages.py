"""Stages of a command's start, with the seconds of each."""

import time

_last: float | None = None
_seconds: dict[str, float] = {}


def begin(before: float = 0.0) -> None:
    """Begin to measure, `before` seconds ago."""
    global _last
    _last = time.monotonic() - before
    _seconds.clear()


def ended(name: str) -> None:
    """Record that a stage has ended; the time since the one before is its, too."""
    global _last
    if _last is not None:
        now = time.monotonic()
        _seconds[name], _last = _seconds.get(name, 0.0) + now - _last, now


def text() -> str:
    """Return the stages so far, as "a 1.2 s, b 0.3 s"; nothing is measured after it."""
    global _last
    _last = None
    return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in _seconds.items())
