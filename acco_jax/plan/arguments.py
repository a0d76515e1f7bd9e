"""Flags of the commands that plan and audit."""

import os
from pathlib import Path

from absl import flags


def check_writable(folder: Path) -> None:
    """Refuses a folder that is none, or could not be made; makes none.

    Raises:
      ValueError: in one line, which folder.
    """
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ValueError(f"{folder} cannot be written to: name another folder.")


def path(flag: flags.FlagHolder) -> Path | None:
    """Returns the path that a flag names, None if it was not given."""
    return None if flag.value is None else Path(flag.value).expanduser()


def number(text: str) -> tuple[str, float]:
    """Reads a figure, NAME=NUMBER.

    Raises:
      ValueError: in one line, another form.
    """
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise ValueError(
            f"--set={text}: give NAME=NUMBER, for example slow_bandwidth=50e9."
        ) from None
