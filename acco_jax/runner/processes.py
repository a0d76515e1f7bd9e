"""Processes that do not outlive the one that started them."""

import ctypes
import sys
from collections.abc import Callable


def dies_with_parent(number: int) -> Callable[[], None]:
    """Returns what subprocess.Popen runs in a child: its parent's end is this signal.

    On Linux; elsewhere it does nothing.
    """

    def ask() -> None:
        if sys.platform == "linux":
            set_parent_death_signal = 1
            ctypes.CDLL(None).prctl(set_parent_death_signal, number)

    return ask
