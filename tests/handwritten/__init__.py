"""Optimizers that nobody would write, each with something of its own; see OPTIMIZERS.

What makes arrays is a function, so that importing this makes none.
"""

from tests.handwritten.algebra import ALGEBRA, BETWEEN
from tests.handwritten.captured import CAPTURED
from tests.handwritten.cases import TREES, Case
from tests.handwritten.control import CONTROL, KEYS
from tests.handwritten.reductions import ELEMENTS, PLACES, REDUCTIONS
from tests.handwritten.state import STATE

__all__ = ["CAPTURED", "HANDWRITTEN", "TREES", "Case"]

HANDWRITTEN = {
    **REDUCTIONS,
    **ELEMENTS,
    **PLACES,
    **ALGEBRA,
    **BETWEEN,
    **STATE,
    **CONTROL,
    **KEYS,
    **{name: Case(make, "one") for name, make in CAPTURED.items()},
}
