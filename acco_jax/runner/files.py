"""Files that are there whole or not at all, however the process ends."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_whole(path: Path, text: str) -> None:
    """Writes a file under another name first, then renames it."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    os.replace(partial, path)


def write_rows(path: Path, rows: Iterable[Any]) -> None:
    """Writes one JSON value a line."""
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))
