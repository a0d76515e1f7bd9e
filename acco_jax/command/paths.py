"""Folders of a command: named, made and, after an error, removed again."""

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return a path with ~ or ~user replaced by a home folder.

    Raises:
      ValueError: if there is no such user, or no home folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(
            f"{path} begins with a home folder that is not known: give a path without "
            f"~, or ./{path} for a folder of that name."
        ) from error


def absent(folder: Path) -> list[Path]:
    """Return a folder and those of its parents that do not exist, innermost first."""
    folder = folder.absolute()
    return [path for path in (folder, *folder.parents) if not path.exists()]


def remove(made: Sequence[Path]) -> None:
    """Remove the folders that `absent` returned: the first with its content.

    Its parents are removed if they are empty.
    """
    if made:
        shutil.rmtree(made[0], ignore_errors=True)
    with contextlib.suppress(OSError):
        for parent in made[1:]:
            parent.rmdir()
