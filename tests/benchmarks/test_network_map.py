"""The benchmark of which method reaches a loss first: its page, its steps, a run."""

import functools
import importlib.util
import json
import pathlib
import sys

import pytest

from tests import programs

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = ROOT / "benchmarks" / "network_map.py"
RESULTS = ROOT / "experiments" / "results"
ACCO = "acco(config.first_half=2)"
run = functools.partial(programs.run, PROGRAM, timeout=1500)


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("network_map", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    sys.modules["network_map"] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_table_of_its_figures(program):
    report = json.loads((RESULTS / "map.json").read_text())
    page = (RESULTS / "map.md").read_text()
    assert [goal["part"] for goal in report["goals"]] == [*program.PARTS]
    for goal in report["goals"]:
        assert [*goal["steps"]] == [*program.METHODS]
        assert program.table(report, goal) in page


def test_steps_to_a_loss_lie_between_two_evaluations(program):
    curve = [(10, 4.0), (20, 3.0), (30, 3.5), (40, 2.0)]
    assert program.reached(curve, 3.25) == 17.5
    assert program.reached(curve, 3.0) == 20
    assert program.reached(curve, 2.5) == pytest.approx(30 + 20 / 3)
    assert program.reached(curve, 4.5) == 10
    assert program.reached(curve, 1.9) is None
    assert program.at(curve, 0.6) == 3.0 and program.at(curve, 1.0) == 2.0


def test_the_fastest_method_reaches_the_loss_with_every_seed(program):
    """However short the steps of one are that a seed never brings there."""
    steps = {"zero1": [100.0, 120.0], ACCO: [110.0, 130.0], "gossip": [9.0, None]}
    muon = "zero1(config.optimizer.name=muon)"
    goal = {"part": 0.5, "losses": [3.0, 3.1], "steps": steps}
    report = {
        "bytes": {"zero1": 2e6, ACCO: 4e6, "gossip": 1e6},
        "links": [
            {"ratio": 1, "mbit": 80.0, "seconds": {
                "zero1": [2.0, 1.0, 2.0], ACCO: [1.5, 9.0, 1.0], "gossip": [0.1] * 3,
            }},
            {"ratio": 0.1, "mbit": 800.0, "seconds": {
                "zero1": [1.0] * 3, ACCO: [1.0] * 3, "gossip": [0.1] * 3,
            }},
        ],
    }  # fmt: skip
    orders = [program.ranked(goal, row) for row in report["links"]]
    assert orders == [[ACCO, "zero1"], ["zero1", ACCO]]
    for row in report["links"]:  # another optimizer is another question
        row["seconds"][muon] = [0.01] * 3
    other = goal | {"steps": steps | {muon: [50.0, 50.0]}}
    assert [program.ranked(other, row) for row in report["links"]] == orders
    _, _, zero1, acco, gossip = program.table(report, goal).splitlines()
    assert zero1.startswith("| zero1 | 0.002 | 110 (100 to 120) | 2e+03 | 220 | 220 (")
    assert zero1.endswith("| **110** (100 to 120) |")
    assert acco.split(" | ")[-2:] == ["**180** (165 to 195)", "120 (110 to 130) |"]
    assert gossip.endswith("| reached by 1 of 2 | 1e+03 | - | - | - |")


def test_a_rate_is_one_of_a_method_s_options(program):
    assert program.at_its_rate("zero1") == "zero1(config.optimizer.learning_rate=0.002)"
    name = program.at_its_rate(ACCO)
    assert name == "acco(config.first_half=2,config.optimizer.learning_rate=0.001)"


@pytest.mark.fast(slow=("tiny",))
@pytest.mark.parametrize(
    ("other", "share", "size"),
    [
        ("gossip", 1.1, ("--quick", "--steps=32", "--every=8")),
        ("sparseloco(local_steps=24)", 0.02, ("--steps=96", "--every=24")),
    ],
    ids=["tiny", "the page's"],
)
def test_a_run(program, tmp_path, other, share, size):
    """A real run at one rate, or the one line that says what this machine lacks."""
    out = tmp_path / "out.json"
    few = *size, "--seeds=1", "--ratios=1", "--repetitions=1"
    names = f"--methods=zero1,{other}"
    done = run(f"--workdir={tmp_path / 'runs'}", f"--json={out}", names, *few)
    if reason := program.network.why_not():
        assert (done.returncode, done.stderr) == (2, f"error: {reason}\n")
        return
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    steps = [x["steps"]["zero1"] for x in report["goals"]]
    assert steps == [[int(size[-1].partition("=")[2])]] * 2
    assert 0 < report["bytes"][other] < share * report["bytes"]["zero1"]
    assert program.printed(report) in done.stdout
    if "--quick" in size:
        again = run(f"--goals={out}", f"--json={tmp_path / 'again.json'}", *few)
        assert again.returncode == 0, again.stderr
        second = json.loads((tmp_path / "again.json").read_text())
        assert second["goals"] == report["goals"]
        assert second["links"] != report["links"]
