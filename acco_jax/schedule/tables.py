"""Tables and quantities as text."""

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from acco_jax.schedule.machines import Constant

WIDTH = 110  # of a paragraph
_LARGE = {"P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0}
_SMALL = {"": 1.0, "m": 1e-3, "µ": 1e-6, "n": 1e-9}

# A table's columns: a heading, and the function that fills it from a row.
Columns = Mapping[str, Callable[[Any], str]]


def table(columns: Columns, rows: Iterable[Mapping[str, Any]], align: str) -> str:
    cells = ([cell(row) for cell in columns.values()] for row in rows)
    return aligned([list(columns), *cells], align)


def aligned(rows: Sequence[Sequence[str]], align: str, indent: int = 2) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (
            f"{cell:>{w}}" if a == "r" else f"{cell:<{w}}"
            for cell, w, a in zip(row, widths, align, strict=True)
        )
        lines.append((" " * indent + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def seconds(value: float) -> str:
    if 0 < value < 1e-9:  # of a fusion over few numbers: its launch takes longer
        return "under 1 ns"
    return quantity(Constant(value, "s", ""))


def quantity(figure: Constant) -> str:
    """Format a figure with a prefix: 989.4 TFLOP/s."""
    if not figure.unit:
        return f"{figure.value:g}"
    for prefix, scale in (_SMALL if figure.unit == "s" else _LARGE).items():
        if figure.value >= scale:
            return f"{figure.value / scale:.4g} {prefix}{figure.unit}"
    return f"{figure.value:.4g} {figure.unit}"


def paragraph(text: str, indent: int) -> str:
    """Break a text into indented lines."""
    own, rest = " " * indent, " " * (indent + 2)
    return "\n".join(
        textwrap.wrap(
            text,
            WIDTH,
            initial_indent=own,
            subsequent_indent=rest,
            break_long_words=False,
            break_on_hyphens=False,
        )
    )


def in_bytes(number: int) -> str:
    """Format a number of bytes: 28.5 MiB."""
    if number < 1000:
        return f"{number} bytes"
    return f"{number / 2**20:,.1f} MiB" if number >= 1e5 else f"{number / 1e3:.1f} kB"


def many(number: int, noun: str, ending: str = "s") -> str:
    """Format a number of things: 3 microbatches."""
    return f"{number} {noun}{ending if number != 1 else ''}"
