"""Files that are written whole or not at all, and errors about damaged ones."""

import errno
import json
import os
import re
import secrets
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeGuard

from etils import epath

from acco_jax.command import exits
from acco_jax.core import small_files

ROWS = 2**32  # bytes of a file of rows
MISSING = FileNotFoundError, NotADirectoryError, IsADirectoryError


def is_remote(path: Path | epath.Path | str) -> bool:
    """Return whether a path is in an object store, as gs://bucket/run.

    A Path has lost one of its slashes.
    """
    return re.match(r"\w+:/", os.fspath(path)) is not None


def write_whole(path: Path | epath.Path, content: str | bytes) -> None:
    """Write a file under a fresh name first, then rename it.

    The name is unpredictable, and no symbolic link is followed. The content is on disk
    before the file has its name.
    """
    content = content.encode() if isinstance(content, str) else content
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        if is_remote(path):
            partial.write_bytes(content)
        else:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with open(os.open(partial, flags, 0o666), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_rows(path: Path, rows: Iterable[Any]) -> None:
    """Write one JSON value per line."""
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))


def append_row(path: Path, row: object) -> None:
    """Append one JSON value as a line; it is in the file once this returns."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def sealed(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the CRC-32 of its JSON."""
    return row | {"crc32": zlib.crc32(json.dumps(row).encode())}


def read_rows(
    path: Path, fields: set[str], *, whole: bool = False, seals: bool = False
) -> list[dict[str, Any]]:
    """Read JSON objects, one a line.

    Args:
      path: of the file; a missing file has no rows.
      fields: that each object must have.
      whole: whether the file was written whole. Otherwise a process that was killed may
        have cut the last line, which is left out.
      seals: whether it was written whole, of rows that are `sealed`.

    Raises:
      ValueError: if the file holds something else.
    """
    text = read_text(path, limit=ROWS).rstrip("\r\n") if path.exists() else ""
    lines = text.split("\n") if text else []  # other ends of lines may be in a text
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines) and not (whole or seals):
                break
            raise ValueError(
                f"{path} is damaged in line {number}: restore it."
            ) from None
        if not isinstance(row, dict) or not fields <= row.keys():
            raise ValueError(f"{path} is damaged in line {number}: it is not a row.")
        if seals and row != sealed({k: v for k, v in row.items() if k != "crc32"}):
            raise ValueError(
                f"{path} is damaged in line {number}: its checksum is of another row; "
                "restore it."
            )
        rows.append(row)
    return rows


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a number that a counter, clock or loss may have."""
    return type(value) in (int, float) and abs(value) < 2**63  # type: ignore[arg-type]


def read_text(path: Path | epath.Path, *, limit: int | None = None) -> str:
    """Return a file's text, with the ends of lines that it has.

    Args:
      path: of the file.
      limit: bytes of a regular file, which it then must be; None: anything is read.

    Raises:
      ValueError: with the file's name, if it is a folder, not UTF-8, or not
        readable.
      OSError: if the file system fails, as `exits.PASSING` has it.
    """
    try:
        if limit is not None and not is_remote(path):
            small_files.check(path, limit)
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno in exits.PASSING:
            raise
        reason = small_files.reason(error)
        raise ValueError(f"{path} cannot be read: {reason}.") from error


def read_object(path: Path | epath.Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
      ValueError: with the file's name, if it holds no JSON object.
    """
    text = read_text(path, limit=small_files.LARGEST)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}.") from error
    if not isinstance(value, dict):
        raise ValueError(
            f"{path} is damaged: it holds a {type(value).__name__}, no object."
        )
    return value


def read_written(path: Path | epath.Path) -> dict[str, Any]:
    """Return the JSON object in a file that was written whole.

    Raises:
      ValueError: if it is missing, or holds something else.
      OSError: if it cannot be read for another reason.
    """
    try:
        return read_object(path)
    except ValueError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and not (
            isinstance(cause, MISSING) or cause.errno in (errno.EINVAL, errno.EFBIG)
        ):
            raise cause from None
        raise
