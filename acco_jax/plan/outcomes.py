"""Results of planning one method: its programs, schedules and predictions."""

import collections
import dataclasses
from typing import NamedTuple

from acco_jax.plan.fitting import Fit
from acco_jax.plan.programs import Program
from acco_jax.schedule import costs, verdict
from acco_jax.schedule.compiled import Compiled
from acco_jax.schedule.schedules import Collective, Schedule
from acco_jax.schedule.verdict import Verdict


class Part(NamedTuple):
    """A half-round of a method: program, compiled form and verdicts."""

    program: Program
    compiled: Compiled
    verdict: Verdict  # on the data axis's collectives, of whatever size
    in_groups: Verdict  # on the collectives within a model-parallel group

    @property
    def collectives(self) -> list[Collective]:
        """Collectives of the data axis of at least 1 MiB: gradients and parameters.

        Permutes of equal size are parts of one, and count together.
        """
        found = self.program.of_data(self.compiled.schedule)
        sent = collections.Counter[tuple[str, int]]()
        for c in found:
            if c.kind == "collective-permute":
                sent[c.where, c.bytes] += c.bytes
        return [c for c in found if max(c.bytes, sent[c.where, c.bytes]) >= 1 << 20]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One method's program, its compiled parts and its predicted cost."""

    program: Program
    parts: tuple[Part, ...]  # its half-round, or each half that differs
    prediction: costs.Prediction  # of all parts, one after the other
    fit: Fit | None  # None: not looked for
    own: list[tuple[Collective, int]] | None = None  # as `optimizers_own` returns

    @property
    def method(self) -> str:
        return self.program.method

    @property
    def schedules(self) -> list[Schedule]:
        return [part.compiled.schedule for part in self.parts]

    @property
    def compiled(self) -> Compiled:
        """Compiled part that needs the most memory."""
        return max((p.compiled for p in self.parts), key=lambda c: c.memory.total)

    @property
    def verdict(self) -> Verdict:
        """Verdict on the data axis's collectives of all parts."""
        return verdict.merged([part.verdict for part in self.parts])

    @property
    def in_groups(self) -> Verdict:
        return verdict.merged([part.in_groups for part in self.parts])

    @property
    def collectives(self) -> list[Collective]:
        """Collectives of the data axis of at least 1 MiB: gradients and parameters."""
        return [c for part in self.parts for c in part.collectives]
