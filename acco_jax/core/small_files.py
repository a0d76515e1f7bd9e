"""Bounded reads of files that ought to be small: descriptions, not data."""

import errno
import os
import stat

LARGEST = 2**26  # bytes of a file of JSON
TOKENIZER = 2**28  # bytes of a tokenizer's file


def check(path: str | os.PathLike, limit: int = LARGEST) -> None:
    """Raise an OSError, without opening it, unless it is a regular file within `limit`.

    Raises:
      OSError: it is not such a file, or it does not exist.
    """
    found = os.stat(path)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder", os.fspath(path))
    if not stat.S_ISREG(found.st_mode):
        reason = "it is not a regular file"
        raise OSError(errno.EINVAL, reason, os.fspath(path))
    if found.st_size > limit:
        reason = f"it has {found.st_size:,} bytes, more than {limit:,}"
        raise OSError(errno.EFBIG, reason, os.fspath(path))


def content(path: str | os.PathLike, limit: int = LARGEST) -> bytes:
    """Return the content of a regular file within `limit` bytes; raise as `check`."""
    check(path, limit)
    with open(path, "rb") as file:  # a read of `limit` would take so much memory
        return file.read(min(limit, os.fstat(file.fileno()).st_size))


def text(path: str | os.PathLike, limit: int = LARGEST) -> str:
    """Return the UTF-8 text of a file.

    Raises:
      OSError: as `check`.
      UnicodeDecodeError: the file is not UTF-8.
    """
    return content(path, limit).decode()


def reason(error: Exception) -> str:
    """Return the reason why a file could not be read, without its name."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    return getattr(error, "strerror", None) or str(error)
