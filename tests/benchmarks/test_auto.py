"""The benchmark of what `method=auto` takes: its page, its ratios, a small run."""

import functools
import importlib.util
import json
import pathlib
import sys

import pytest

from tests import programs

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = ROOT / "benchmarks" / "auto.py"
RESULTS = ROOT / "experiments" / "results"
run = functools.partial(programs.run, PROGRAM, timeout=1500)


@pytest.fixture(scope="module")
def auto():
    spec = importlib.util.spec_from_file_location("auto", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    sys.modules["auto"] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_table_of_its_figures(auto):
    report = json.loads((RESULTS / "auto.json").read_text())
    page = (RESULTS / "auto.md").read_text()
    head, _, *lines = auto.table(report).splitlines()
    assert len(lines) == len(auto.RATIOS)
    for line in (head, *lines):
        assert any(row.startswith(line) for row in page.splitlines()), line


def test_a_choice_is_compared_within_a_repetition(auto):
    zero1, acco, *eight = auto.NAMES
    seconds = {name: [9.0, 9.0, 9.0] for name in eight}
    seconds |= {zero1: [2.0, 4.0, 1.0], acco: [1.0, 2.5, 1.5]}
    row = {"ratio": 0.5, "mbit": 80.0, "chosen": [acco, zero1, acco]}
    row["seconds"] = seconds
    assert auto.by_speed(row)[:2] == [acco, zero1]
    assert auto.over(row, acco, zero1)["median"] == pytest.approx(1.6)
    report = {"tokens_per_step": 10, "rows": [row]}
    line = auto.table(report, ["zero1, at 7"]).splitlines()[-1]
    assert f"{acco}, 2 of 3; {zero1}, 1 of 3" in line
    assert line.startswith("| 0.5 | 80 | 5 | **7** | 1 ")
    assert line.endswith(" zero1, at 7 |")


@pytest.mark.long
def test_a_small_run(auto, tmp_path):
    """A real run at one rate, or the one line that says what this machine lacks."""
    out = tmp_path / "out.json"
    done = run("--choices=1", "--repetitions=2", "--ratios=1", f"--json={out}")
    if reason := auto.network.why_not():
        assert (done.returncode, done.stderr) == (2, f"error: {reason}\n")
        return
    (row,) = json.loads(out.read_text())["rows"]
    assert row["mbit"] > 0 and set(row["chosen"]) <= set(auto.NAMES)
    assert {len(x) for x in row["seconds"].values()} == {2}
    taken = auto.over(row, row["chosen"][0], auto.by_speed(row)[0])
    assert done.returncode == int(taken["median"] < auto.LEAST), done.stderr
    assert auto.table(json.loads(out.read_text())) in done.stdout
