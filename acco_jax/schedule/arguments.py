"""Flags of the commands that plan and audit."""

import math
import os
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from acco_jax.command.paths import expanded
from acco_jax.schedule.machines import Change
from acco_jax.schedule.verdict import REQUIRED, check_fraction


class _Fraction(flags.ArgumentParser):
    """Parser of a fraction; a flag without a value means REQUIRED."""

    syntactic_help = "a fraction from 0 to 1"

    def parse(self, argument: str | float | None) -> float | None:
        if argument in (None, "false"):  # absl's word for --noNAME
            return None
        if argument == "true":  # and for NAME without a value
            return REQUIRED
        try:
            fraction = float(argument)
        except ValueError:
            raise ValueError(f"{argument!r} is not a number from 0 to 1.") from None
        check_fraction(fraction)
        return fraction


def DEFINE_fraction(  # named as absl names its own
    name: str,
    default: float | None,
    help: str,
    flag_values: flags.FlagValues = flags.FLAGS,
) -> flags.FlagHolder[float | None]:
    """Define a flag from 0 to 1 whose value is optional."""
    return flags.DEFINE(
        _Fraction(), name, default, help, flag_values=flag_values, boolean=True
    )


def check_writable(folder: Path) -> None:
    """Raise a ValueError if a folder cannot be made or written; make no folder.

    Raises:
      ValueError: if its nearest existing path is not a writable directory.
    """
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ValueError(f"{folder} cannot be written to: name another folder.")


def check_file(flag: str, file: Path) -> None:
    """Raise a ValueError if a file cannot be written; make nothing.

    Raises:
      ValueError: if it is a directory, or its folder cannot be written.
    """
    if file.is_dir():
        raise ValueError(f"--{flag}={file} is a directory: name a file in it.")
    check_writable(file.parent)


def path(flag: flags.FlagHolder) -> Path | None:
    """Return the path that a flag names, None if it was not given."""
    return None if flag.value is None else expanded(flag.value)


def number(text: str) -> tuple[str, Change]:
    """Read a figure, NAME=NUMBER, or its range, NAME=LEAST:MOST.

    Raises:
      ValueError: if the text has another form.
    """
    name, _, value = text.partition("=")
    try:
        ends = [float(end) for end in value.split(":")]
    except ValueError:
        ends = []
    if len(ends) not in (1, 2):
        raise ValueError(
            f"--set={text}: give NAME=NUMBER or NAME=LEAST:MOST, for example "
            "slow_bandwidth=50e9 or compute_efficiency=0.4:0.6."
        )
    return name, ends[0] if len(ends) == 1 else (ends[0], ends[1])


def numbers(texts: Sequence[str]) -> dict[str, Change]:
    """Read several figures, each given once.

    Raises:
      ValueError: if a text has another form, or a figure is given twice.
    """
    found: dict[str, Change] = {}
    for name, value in map(number, texts):
        if name in found:
            raise ValueError(f"--set={name} is given twice: leave out one of them.")
        found[name] = value
    return found


def positive(flag: str, text: str) -> float:
    """Parse a positive number.

    Raises:
      ValueError: if the text is not a positive finite number.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{flag}: {text!r} is not a positive number.")
    return value


def whole(flag: str, text: str) -> int:
    """Parse a whole number.

    Raises:
      ValueError: if the text is not a whole number.
    """
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{flag}: {text!r} is not a whole number.") from None
