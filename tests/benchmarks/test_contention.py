"""What communication costs: plan's figure is the one that was measured."""

import json

from acco_jax.schedule import machines
from benchmarks import contention

PLACE = contention.ROOT / "experiments" / "results" / "contention.json"


def test_the_figure_of_plan_is_the_measured_one():
    report = json.loads(PLACE.read_text())
    rows = [contention.Row(**row) for row in report["rows"]]
    text = contention.table(rows, report["device"], "python benchmarks/contention.py")
    assert text == PLACE.with_suffix(".md").read_text()
    share, source = machines.CONTENTION["gpu"]
    low, likely, high = (f"{1 + x:.2f}" for x in share)
    assert f"{low} to {high} times as long, {likely} in the median" in " ".join(
        text.split()
    )
    assert source.startswith("experiments/results/contention.md")
