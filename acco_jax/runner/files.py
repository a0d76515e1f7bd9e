"""Files that are there whole or not at all, and what is said of those that are not."""

import json
import os
import re
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeGuard

from etils import epath

from acco_jax import smallfiles


def is_remote(path: Path | epath.Path | str) -> bool:
    """Whether a path is that of an object store, as gs://bucket/run.

    A Path has lost one of its slashes.
    """
    return re.match(r"\w+:/", os.fspath(path)) is not None


def write_whole(path: Path | epath.Path, text: str) -> None:
    """Writes a file under a fresh name first, then renames it.

    Nobody foresees that name, and it follows no symbolic link.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        if is_remote(path):
            partial.write_text(text)
        else:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with open(os.open(partial, flags, 0o666), "w", encoding="utf-8") as file:
                file.write(text)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_rows(path: Path, rows: Iterable[Any]) -> None:
    """Writes one JSON value a line."""
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))


def append_row(path: Path, row: Any) -> None:
    """Appends one JSON value as a line; it is there once this returns."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def read_rows(path: Path, fields: set[str]) -> list[dict[str, Any]]:
    """Reads JSON objects, one a line, but a line that a killed process left cut.

    Returns nothing where there is no file.

    Raises:
      ValueError: in one line, the file holds something else than objects with `fields`.
    """
    lines = read_text(path).splitlines() if path.exists() else []
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines):
                break
            raise ValueError(
                f"{path} is damaged in line {number}: restore it."
            ) from None
        if not isinstance(row, dict) or not fields <= row.keys():
            raise ValueError(f"{path} is damaged in line {number}: it is no row.")
        rows.append(row)
    return rows


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number of a size that counters, clocks and losses have."""
    return type(value) in (int, float) and abs(value) < 2**63  # type: ignore[arg-type]


def read_text(path: Path | epath.Path, *, small: bool = False) -> str:
    """Returns a file's text.

    Args:
      path: of the file.
      small: whether it must be a regular file of a size that descriptions have.

    Raises:
      ValueError: in one line with the file's name, it is a folder, no UTF-8, or not to
        be read.
    """
    try:
        if small and not is_remote(path):
            smallfiles.check(path)
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = smallfiles.reason(error)
        raise ValueError(f"{path} cannot be read: {reason}.") from error


def read_object(path: Path | epath.Path) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises:
      ValueError: in one line with the file's name, there is none.
    """
    text = read_text(path, small=True)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}.") from error
    if not isinstance(value, dict):
        raise ValueError(
            f"{path} is damaged: it holds a {type(value).__name__}, no object."
        )
    return value
