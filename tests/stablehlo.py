"""The collectives of a StableHLO text, read by regular expressions alone.

The oracle for what a program asks for: nothing of acco_jax, whose `plan.footprint`
reads the same from the program's operations.
"""

import math
import re
from typing import NamedTuple

KINDS = (
    "reduce_scatter",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "collective_permute",
)
FEW = 16  # elements of a weight, a norm or a loss


class Collective(NamedTuple):
    kind: str
    dtype: str  # of what crosses: 'f32', 'bf16', 'ui32'
    operand: int  # elements
    result: int  # elements

    @property
    def size(self):
        """Elements of the whole: before a reduction, or after a gather."""
        return max(self.operand, self.result)


def collectives(lowered, few=FEW):
    """The collectives of a program, in its order, but for those of a few elements.

    Args:
      lowered: its text, or what has it.
      few: elements of the whole up to which a collective is left out.
    """
    text = lowered if isinstance(lowered, str) else lowered.as_text()
    start = rf'"stablehlo\.({"|".join(KINDS)})"'
    pattern = start + r".*?: \((tensor<[^)]*)\) -> \(?((?:tensor<[^>]*>(?:, )?)+)"
    found = []
    for kind, operands, results in re.findall(pattern, text, re.S):
        for a, b in zip(tensors(operands), tensors(results), strict=True):
            found.append(Collective(kind, a[1], a[0], b[0]))
    return [c for c in found if c.size > few]


def tensors(types):
    """[(elements, dtype)] of a list of tensor types."""
    return [
        (math.prod(int(d) for d in dims.split("x") if d), dtype)
        for dims, dtype in re.findall(r"tensor<((?:\d+x)*)(\w+)>", types)
    ]
