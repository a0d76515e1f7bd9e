"""Accumulate until the communication is done: a half-round lasts as long as it takes.

The paper's way to use a slow network: a half-round ends when its communication does,
and until then every worker keeps adding microbatches, a fast one more than a slow one.
Only the split form can do it, where the host sees both; a program compiled whole runs a
number of microbatches that it was given.
"""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from acco_jax.gradients import Accumulator, Sums
from acco_jax.layout import Layout, Pending, PyTree
from acco_jax.step import TrainStep, pending_of, placed
from acco_jax.transforms.base import Method


class AdaptiveStep(TrainStep):
    """A split train step whose microbatch counts are found while it runs.

    Its batches hold `maximum` microbatches for each worker; those that no worker had
    the time for are not computed. Every process counts for the workers on its devices.
    The counts of a half-round are in its metrics; given as `counts=` (or read from the
    log of a run, one JSON list of n numbers a line) they are repeated, bit for bit.

    Attributes:
      minimum: microbatches of a half-round, however fast its communication.
      half_round: the line of the log to repeat next; set it when a run continues.
    """

    def __init__(
        self,
        tx: Method,
        gradients: Accumulator,
        options: dict[str, Any],
        *,
        minimum: int,
        log: Path | None,
    ) -> None:
        super().__init__(tx, gradients, "split", options)
        self.minimum, self.half_round = minimum, 0
        self._log = None
        if log is not None:
            self._log = read_counts(log)
            check_counts(self._log, log, gradients.workers, gradients.microbatches)
        # the number in one place, or the second microbatch would compile anew
        homes = (None, NamedSharding(gradients.mesh, P()))
        self._zeros = jax.jit(_none, out_shardings=homes)
        self._add = jax.jit(_one_more, donate_argnums=1, out_shardings=homes)
        self._pack = jax.jit(pending_of, static_argnums=0)

    def _compile(
        self,
        extra: dict[str, Any] | None,
        params: PyTree,
        state: Any,
        batch: PyTree,
        counts: Any,
        rng: Any,
    ) -> None:
        gradients = self._gradients
        if counts is None and self._log is not None:
            counts = gradients.counts_here([0] * gradients.workers)
        work: tuple[Any, ...] = (gradients, params, batch, rng)
        zeros = self._zeros.lower(*work).compile()
        sums, i = placed(zeros, self._zeros, *work)
        work = (gradients, sums, i, params, batch, rng, counts)
        added = self._add.lower(*work).compile()
        sums, _ = placed(added, self._add, *work)
        packed = self._pack.lower(state.layout, sums).compile()
        now, _ = placed(packed, self._pack, state.layout, sums)
        for overlaps in self._forms(state):
            moving, rest = now, state
            if overlaps:
                moving, rest = state.pending, state._replace(pending=None)
            for wire in dict.fromkeys(self._tx.wires.all):
                program = self._program(rest, overlaps, wire)
                program.lower(moving, rest, params, extra).compile()

    def _local(
        self,
        layout: Layout,
        params: PyTree,
        batch: PyTree,
        counts: jax.Array | None,
        rng: Any,
        communication: Future | None,
    ) -> tuple[Pending, Sums, jax.Array | None]:
        if counts is None and self._log is not None:
            if self.half_round >= len(self._log):
                raise ValueError(
                    f"the log of counts has {len(self._log)} half-rounds: it cannot be "
                    "repeated further."
                )
            counts = self._gradients.counts_here(self._log[self.half_round])
        self.half_round += 1
        gradients = self._gradients
        sums, i = self._zeros(gradients, params, batch, rng)
        mine = None
        if counts is not None:
            held = jax.device_get([s.data for s in counts.addressable_shards])
            mine = max(int(c[0]) for c in held)
        done = 0
        while done < self._gradients.microbatches:
            finished = communication is None or communication.done()
            if mine is None and done >= self.minimum and finished:
                break
            if mine is not None and done >= mine:
                break
            sums, i = self._add(gradients, sums, i, params, batch, rng, counts)
            jax.block_until_ready(sums.loss)
            done += 1
        if counts is None:
            counts = gradients.counts_here([done] * gradients.workers)
        pending, rest = self._pack(layout, sums)
        return jax.block_until_ready(pending), rest, counts


def _none(gradients: Accumulator, *args: Any) -> tuple[Sums, jax.Array]:
    """No microbatch, and the number of the next one: counted where it is needed."""
    return gradients.zeros(*args), jnp.int32(0)


def _one_more(
    gradients: Accumulator,
    sums: Sums,
    i: jax.Array,
    params: PyTree,
    batch: PyTree,
    rng: Any,
    counts: Any,
) -> tuple[Sums, jax.Array]:
    """Adds microbatch i, where there are counts on the workers who have that many."""

    def span(count: Any) -> tuple[Any, Any]:
        return i, i + 1 if counts is None else i + (count > i).astype(i.dtype)

    return gradients.add(sums, params, batch, rng, counts, span), i + 1


def check_counts(rows: list[list[int]], log: Path, workers: int, most: int) -> None:
    """Raises a ValueError unless every row has a count from 0 to `most` per worker."""
    for number, row in enumerate(rows, 1):
        if len(row) != workers or not 0 <= min(row) <= max(row) <= most:
            raise ValueError(
                f"line {number} of {log} is {row}: this run needs one count from 0 to "
                f"{most}, the most that a batch holds, for each of its {workers} "
                "workers."
            )


def read_counts(log: Path, first: int | None = None) -> list[list[int]]:
    """The counts of a logged run: one JSON list of n integers per half-round.

    Args:
      log: the file.
      first: read only so many lines; a killed run may have left the last one cut.

    Raises:
      ValueError: there is no such file, or a line is something else.
    """
    if first == 0:
        return []
    try:
        lines = log.read_text().splitlines()[:first]
    except OSError as error:
        raise ValueError(
            f"no log of counts at {log}: give the file that the run wrote."
        ) from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, list) or not all(type(x) is int for x in row):
            raise ValueError(f"line {number} of {log} is no JSON list of counts.")
        rows.append(row)
    return rows
