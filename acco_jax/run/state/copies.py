"""Copies of states in a folder: N.data has the bytes after half-round N, N.json the
checksums. N.json is written last, so that a copy with it is whole.
"""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np

from acco_jax.command.files import read_rows, sealed, write_rows
from acco_jax.run.config.identity import differing_field
from acco_jax.run.state import shards


class Copies:
    """The copies in a folder, of the states of a run."""

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        """Open the copies.

        Args:
          folder: which exists, or is made for the first copy.
          identity: JSON; where a field that matters is another one (`identity.py`),
            a copy is not found.
        """
        self._folder, self._identity = folder, identity

    def write(
        self, half_round: int, copied: shards.Shards, about: dict[str, Any]
    ) -> None:
        """Write a copy; `about` is JSON.

        Raises:
          OSError: it cannot be written.
        """
        self._folder.mkdir(mode=0o700, exist_ok=True)
        with open(self._folder / f"{half_round}.data", "wb") as file:
            sums = shards.written(file, copied)
        row = {"identity": self._identity, "about": about, "shards": sums}
        write_rows(self._folder / f"{half_round}.json", [sealed(row)])

    def found(self, least: int) -> dict[int, dict[str, Any]]:
        """Return what whole copies of `least` or more half-rounds are about."""
        return {
            half_round: row["about"]
            for half_round in self._half_rounds()
            if half_round >= least and (row := self._row(half_round))
        }

    def read(
        self, half_round: int, dtypes: dict[str, np.dtype]
    ) -> tuple[shards.Shards, str | None]:
        """Return the shards of a copy that `found` has, and what is damaged, or None.

        A copy is sound as a whole, or nothing is returned of it.
        """
        try:
            with open(self._folder / f"{half_round}.data", "rb") as file:
                if (row := self._row(half_round)) is None:
                    raise ValueError("it has changed")
                return shards.read_back(file, dtypes, row["shards"]), None
        except (OSError, ValueError, KeyError) as error:
            return {}, str(error)

    def remove_but(self, *kept: int | None) -> None:
        """Remove all copies but those of some half-rounds."""
        for path in self._folder.glob("[0-9]*.*"):
            if path.stem not in map(str, kept):
                path.unlink(missing_ok=True)

    def remove_but_newest(self, kept: int | None = None) -> None:
        """Remove all copies but the newest whole one, and that of one half-round."""
        self.remove_but(max(self._half_rounds(), default=None), kept)

    def any(self, least: int) -> bool:
        """Return whether there are copies of so many half-rounds, of whatever run."""
        return any(half_round >= least for half_round in self._half_rounds())

    def _half_rounds(self) -> list[int]:
        return [int(path.stem) for path in self._folder.glob("[0-9]*.json")]

    def _row(self, half_round: int) -> dict[str, Any] | None:
        fields = {"identity", "about", "shards"}
        with contextlib.suppress(ValueError):
            (row,) = read_rows(self._folder / f"{half_round}.json", fields, seals=True)
            return row if not differing_field(row["identity"], self._identity) else None
        return None
