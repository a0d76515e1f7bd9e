"""What methods cost in loss, as measured: the tables that `method='auto'` relies on."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

TOLERANCE = 0.1  # per cent of zero1's loss


class Gap(NamedTuple):
    """A difference of the final loss to zero1's, at equal tokens."""

    percent: float  # of zero1's loss
    error: float  # standard error of `percent`
    pairs: int  # of seeds, each method at its own best learning rate

    def __str__(self) -> str:
        return f"{self.percent:+.2f} ± {self.error:.2f} %, {self.pairs} pairs"


class Candidate(NamedTuple):
    """A method with options, and what it costs by optimizer.

    acco's are for a first half of a quarter. Where a loss is not known, the method is
    not taken.
    """

    name: str
    method: str
    options: Mapping[str, Any]
    gaps: Mapping[str, Gap] | None  # None: it computes what the optimizer does

    @property
    def divides(self) -> bool:
        """Whether it reduces within hosts first, where they have several devices."""
        return "reduce_bits" in self.options

    def gap(self, optimizer: str) -> str:
        """Return the gap with an optimizer of optax, for a person."""
        if self.gaps is None:
            return "exact"
        return str(self.gaps.get(optimizer, "not measured"))

    def within(self, tolerance: float, optimizer: str) -> bool:
        """Return whether the mean gap is known, and at most `tolerance` per cent."""
        if self.gaps is None:
            return True
        gap = self.gaps.get(optimizer)
        return gap is not None and gap.percent <= tolerance


# experiments/results/dynamics.md: GPTs of 0.45M parameters (adamw) and 0.27M (others),
# 300 steps. The parts of 8 bits were measured with equal halves and 1.1M parameters,
# one way at a time, and are added here.
CANDIDATES = (
    Candidate("zero1", "zero1", {}, None),
    Candidate(
        "acco", "acco", {},
        {
            "adamw": Gap(-0.62, 0.13, 34), "nadamw": Gap(2.77, 0.39, 20),
            "muon": Gap(1.39, 0.23, 20), "lion": Gap(2.05, 0.51, 5),
        },
    ),
    Candidate(
        "acco with gathers in 8 bits", "acco", {"gather_bits": 8},
        {"adamw": Gap(-0.59, 0.13, 34)},
    ),
    Candidate(
        "acco with 8 bits both ways", "acco", {"gather_bits": 8, "reduce_bits": 8},
        {"adamw": Gap(-0.78, 0.18, 3)},
    ),
)  # fmt: skip

# experiments/results/map.md: the seconds until two losses that zero1 has early in
# training, over zero1's own, where its communication takes so many times its
# computation. Two workers, 0.27M parameters, AdamW.
EARLY_LOSSES: Mapping[float, Mapping[str, tuple[float, float]]] = {
    1: {
        "acco in 8 bits": (0.95, 1.01),
        "streaming_diloco (bits=8, local_steps=24)": (0.57, 0.68),
    },
    5: {
        "acco in 8 bits": (0.51, 0.54),
        "streaming_diloco (bits=8, local_steps=24)": (0.25, 0.30),
    },
    30: {
        "acco in 8 bits": (0.41, 0.43),
        "streaming_diloco (bits=8, local_steps=24)": (0.04, 0.05),
    },
}


def where_exposed(ratio: float) -> str:
    """Say what helps where communication is exposed, and what was measured.

    Args:
      ratio: zero1's communication over its computation.
    """
    ratio = max(ratio, min(EARLY_LOSSES))
    near = min(EARLY_LOSSES, key=lambda x: abs(math.log(x / ratio)))
    times = " and ".join(
        f"in {least:.2f} to {most:.2f} of its time with {name}"
        for name, (least, most) in EARLY_LOSSES[near].items()
    )
    return (
        "twice the microbatches_per_step halve the communication per token. Where "
        f"zero1's takes {near:g} times its computation, two workers with 0.27M "
        f"parameters and AdamW reached early losses of zero1's {times}; later losses "
        "differ (experiments/results/map.md)."
    )


def allowed(
    optimizer: str, tolerance: float = TOLERANCE, *, uneven: bool = True
) -> tuple[list[Candidate], list[str]]:
    """Return the candidates within a tolerance, and why each other one is not.

    Args:
      optimizer: name in optax.
      tolerance: per cent of zero1's loss, at most.
      uneven: whether acco's first half is the smaller one, of which the losses are.
    """
    if not uneven:
        exact = [c for c in CANDIDATES if c.gaps is None]
        return exact, [
            "acco: its losses are of a first half smaller than the second: leave "
            "first_half at 'auto', with four microbatches or rows for them"
        ]
    found = [c for c in CANDIDATES if c.within(tolerance, optimizer)]
    return found, [
        f"{c.name}: {c.gap(optimizer)}" for c in CANDIDATES if c not in found
    ]
