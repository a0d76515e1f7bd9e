"""Worlds of a run: the devices of its half-rounds, in worlds.jsonl.

A run may go on with other devices than it had. Each line of the file is a world. It
goes on after `half_round` half-rounds, as far as those of the next line.
`--replay=WORKDIR` repeats a run's worlds, and with them the run, bitwise.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, TypeGuard

import jax
from jax.sharding import Mesh

from acco_jax.command.files import read_object, read_rows, sealed, write_rows
from acco_jax.core.groups import ROWS, TENSOR
from acco_jax.run.config.identity import differing_field

FILE = "worlds.jsonl"
AXES = ("domain", "data", ROWS, TENSOR)  # of a mesh, in this order
MOST = 2**20  # devices: more is not valid


@dataclasses.dataclass(frozen=True)
class World:
    """Devices that compute, and each worker's part of a half-round."""

    axes: dict[str, int]  # of the mesh: sizes, in its order
    processes: int
    counts: list[int]  # microbatches of each worker; [] where they adapt
    form: str  # of the train step
    first_half: int = 0  # of acco: microbatches of its first half; 0: counts determine

    @classmethod
    def of(
        cls, mesh: Mesh, counts: Sequence[int], form: str, first_half: int = 0
    ) -> Self:
        axes = dict(mesh.shape)
        return cls(axes, jax.process_count(), list(counts), form, first_half)

    @property
    def text(self) -> str:
        """Description of what to start, for a person."""
        axes = ", ".join(f"{axis} {size}" for axis, size in self.axes.items())
        counts = f"microbatches {self.counts}" if self.counts else "adaptive counts"
        return (
            f"{workers_of(self.axes)} workers in {self.processes} processes ({axes}; "
            f"{counts}; form={self.form!r})"
        )


def workers_of(axes: dict[str, int]) -> int:
    """Return the number of workers on a mesh of these axes."""
    return math.prod(size for axis, size in axes.items() if axis in AXES[:2])


def is_axes(axes: object) -> TypeGuard[dict[str, int]]:
    """Return whether a value of a file is a mesh's axes."""
    if not isinstance(axes, dict) or "data" not in axes:
        return False
    if list(axes) != [axis for axis in AXES if axis in axes]:
        return False
    sizes = axes.values()
    return all(type(x) is int and 0 < x <= MOST for x in sizes)


def dealt(microbatches: int, workers: int) -> list[int]:
    """Return microbatches per worker: equal shares, one more for the first ones."""
    each, more = divmod(microbatches, workers)
    return [each + (i < more) for i in range(workers)]


def record(workdir: Path, half_round: int, world: World) -> None:
    """Record in the workdir that a world goes on after `half_round` half-rounds."""
    worlds = [(h, w) for h, w in recorded(workdir) if h < half_round]
    if not worlds or worlds[-1][1] != world:
        worlds.append((half_round, world))
    rows = [sealed({"half_round": h} | dataclasses.asdict(w)) for h, w in worlds]
    write_rows(workdir / FILE, rows)


def recorded(workdir: Path) -> list[tuple[int, World]]:
    """Return the worlds of a run, each with the half-rounds done before it; or none.

    Raises:
      ValueError: if the record is damaged.
    """
    path = workdir / FILE
    fields = {field.name for field in dataclasses.fields(World)}
    worlds = []
    for row in read_rows(path, fields | {"half_round"}, seals=True):
        half_round, axes = row["half_round"], row["axes"]
        numbers = half_round, row["first_half"]
        if not is_axes(axes) or any(type(x) is not int or x < 0 for x in numbers):
            raise ValueError(f"{path} is damaged: restore it, or use another workdir.")
        worlds.append((half_round, World(**{name: row[name] for name in fields})))
    return worlds


@dataclasses.dataclass(frozen=True)
class WorldsReplay:
    """Record of a run, for another run that repeats it."""

    folder: Path

    def check(self, identity: dict[str, Any], done: int, world: World) -> None:
        """Raise a ValueError for another run's record, or another world than it has.

        Args:
          identity: the fields that distinguish a run.
          done: half-rounds so far.
          world: the present one.

        Raises:
          ValueError: with the difference.
        """
        old = read_object(self.folder / "config.json")
        if field := differing_field(old, old | identity):
            remedy = "use the same config"
            if field.startswith("base_checkpoint"):
                remedy = "base has another newest checkpoint now: restore that one"
            raise ValueError(
                f"--replay={self.folder} is of a run with {field}: {remedy}."
            )
        if not (found := recorded(self.folder)):
            raise ValueError(f"--replay={self.folder} has no {FILE}: name a run's.")
        then = [w for h, w in found if h <= done][-1:] or [found[0][1]]
        if then != [world]:
            raise ValueError(
                f"--replay={self.folder} goes on after half-round {done} with "
                f"{then[0].text}, but here are {world.text}: start those."
            )

    def end(self, done: int) -> int | None:
        """Return the half-round after which other devices went on, None if none did."""
        return next((h for h, _ in recorded(self.folder) if h > done), None)
