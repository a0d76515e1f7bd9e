"""Compiled program of a target machine, and its memory."""

import dataclasses
import re

from acco_jax.schedule import footprint, schedules


class DoesNotFit(Exception):
    """A program does not fit into the chip's memory.

    Attributes:
      compiled: whether the compiler, or the program that it compiled, shows it.
    """

    def __init__(self, message: str = "", *, compiled: bool = True) -> None:
        super().__init__(message)
        self.compiled = compiled


def what_it_needs(message: str) -> str:
    """Shorten a compiler's out-of-memory message.

    libtpu says "Used 40.00G of 31.25G hbm", or "... for HLO temporaries (3.76T) exceeds
    available HBM (31.25G)"; of any other wording the first line remains.
    """
    for pattern in (
        r"Used ([\d.]+\w) of ([\d.]+\w) \w+",
        r"\(([\d.]+\w)\) exceeds available \w+ \(([\d.]+\w)\)",
    ):
        if match := re.search(pattern, message):
            return f"it needs {match[1]} of {match[2]} of memory"
    return message.splitlines()[0]


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device."""

    parts: dict[str, int]  # kept between half-rounds, and the batch
    total: int  # peak of the compiled program, by its memory analysis
    shards: int = 0  # bytes of the parts that more devices divide among them

    @property
    def temporaries(self) -> int:
        """Bytes of activations, gradients and packed buffers: total less parts."""
        return self.total - sum(self.parts.values())


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program and what was read from it."""

    text: str  # its optimized HLO
    schedule: schedules.Schedule
    memory: Memory
    seconds: float  # that the compiler took
    # By the compiler's own analysis of cost; None where it has none.
    bytes_accessed: float | None = None
    # The collectives of the program as written; None if one is in a loop whose
    # length the program lacks.
    source_collectives: tuple[footprint.Transfer, ...] | None = None
    cached: bool = False  # whether it was compiled before
