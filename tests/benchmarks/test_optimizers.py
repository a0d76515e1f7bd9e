"""benchmarks/optimizers.py has every optimizer of optax; its result has them all."""

import inspect
import re
from pathlib import Path

import optax
import pytest

from benchmarks import optimizers

RESULT = Path(__file__).resolve().parents[2] / "experiments/results/optimizers.md"


def test_no_optimizer_of_optax_is_missing():
    named = {re.split(",", name)[0] for name in optimizers.OPTIMIZERS}
    for module in (optax, optax.contrib):
        for name, make in inspect.getmembers(module, inspect.isfunction):
            part = name.startswith(("scale_by_", "_")) or name == "schedule_free"
            if "learning_rate" in inspect.signature(make).parameters and not part:
                assert name in named | set(optimizers.NOT_RUN), name
    assert not named & set(optimizers.NOT_RUN)


def test_the_result_has_a_row_for_each():
    first = RESULT.read_text().split("With 20 seeds:")[0]
    rows = re.findall(r"^\| ([^|]+) \| [\d.]", first, re.M)
    assert rows == list(optimizers.OPTIMIZERS)


@pytest.mark.slow
def test_a_short_run_learns():
    for method in optimizers.METHODS:
        assert optimizers.trainer("schedule_free_adamw", method, steps=60)(0) < 0.7
