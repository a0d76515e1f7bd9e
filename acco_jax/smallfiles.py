"""Bounded reads of files that ought to be small: descriptions, not data."""

import errno
import os
import stat

LARGEST = 2**26  # bytes of a file of JSON
TOKENIZER = 2**28  # bytes of a tokenizer's file


def check(path: str | os.PathLike, limit: int = LARGEST) -> None:
    """Refuse what is not a regular file of at most `limit` bytes, without opening it.

    Raises:
      OSError: it is not, or there is no such file.
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
    """Return what is in a regular file of at most `limit` bytes; raises as `check`."""
    check(path, limit)
    with open(path, "rb") as file:
        return file.read(limit)


def text(path: str | os.PathLike, limit: int = LARGEST) -> str:
    """Return the UTF-8 text of a file.

    Raises:
      OSError: as `check`.
      UnicodeDecodeError: it has none.
    """
    return content(path, limit).decode()


def reason(error: Exception) -> str:
    """Return why a file could not be read, without its name."""
    if isinstance(error, UnicodeDecodeError):
        return "it is no UTF-8 text"
    return getattr(error, "strerror", None) or str(error)
