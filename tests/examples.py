"""Examples of a property: few in `make test`, ten times as many in test-long."""

import os

import hypothesis

TIMES = int(os.environ.get("EXAMPLES", "1"))


def examples(n: int) -> hypothesis.settings:
    """`@examples(20)`: the same 20 each time; with EXAMPLES=10 set, 200 new ones."""
    return hypothesis.settings(max_examples=n * TIMES)
