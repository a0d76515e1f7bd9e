"""The overlap benchmark runs where it can, says why where it cannot, and tidies up."""

import functools
import importlib.util
import json
import pathlib
import subprocess

import pytest

from tests import programs

PROGRAM = pathlib.Path(__file__).parents[2] / "benchmarks" / "overlap_cpu.py"
run = functools.partial(programs.run, PROGRAM, timeout=540)


@pytest.fixture(scope="module")
def overlap_cpu():
    spec = importlib.util.spec_from_file_location("overlap_cpu", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def namespaces() -> str:
    return subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout


def test_ratios_are_taken_within_a_repetition(overlap_cpu):
    seconds = {
        "compute": [1.0, 2.0, 4.0],
        "communication": [2.0, 2.0, 2.0],
        "zero1": [3.0, 4.0, 6.0],
        "acco": [2.0, 3.0, 4.0],
        "zero1 2N": [2.0, 3.0, 5.0],
    }
    found = overlap_cpu.ratios(seconds)
    assert found["acco / max(compute, communication)"]["median"] == 1
    assert found["acco / compute"] == {"median": 1.5, "low": 1.25, "high": 1.75}
    assert found["acco / zero1"]["median"] == pytest.approx(2 / 3)
    assert found["acco / zero1 2N"]["median"] == 1
    assert found["zero1 / (compute + communication)"]["median"] == 1
    limits = {
        title
        for share, point in overlap_cpu.TARGETS.items()
        for title in point
        if share not in (overlap_cpu.SLOW, overlap_cpu.FEW_BITS)
    }
    assert limits <= found.keys()


def test_adaptive_is_compared_at_equal_tokens(overlap_cpu):
    seconds = {
        "compute N/4": [1.0, 1.0, 1.0],
        "communication": [7.0, 7.0, 7.0],
        "zero1 N/4": [8.0, 8.0, 9.0],
        "adaptive": [1.0, 2.0, 1.5],
    }
    found = overlap_cpu.ratios(seconds)
    assert found["adaptive / compute N/4"]["median"] == 1.5
    assert found["adaptive / zero1 N/4"]["median"] == pytest.approx(1 / 6)
    assert overlap_cpu.TARGETS[overlap_cpu.SLOW].keys() <= found.keys()


def test_few_bits_are_compared_with_all_of_them(overlap_cpu):
    seconds = {
        "compute": [1.0, 1.0, 1.0],
        "communication": [2.0, 2.0, 2.0],
        "acco": [2.0, 2.0, 2.1],
        "acco 8 bits": [1.2, 1.0, 1.4],
    }
    found = overlap_cpu.ratios(seconds)
    assert found["acco 8 bits / acco"]["median"] == pytest.approx(0.6)
    assert overlap_cpu.TARGETS[overlap_cpu.FEW_BITS].keys() <= found.keys()


def test_without_the_tools_says_so_in_one_line():
    done = run("--quick", PATH="/nonexistent")
    assert done.returncode == 1
    assert done.stderr == (
        "overlap_cpu.py cannot shape a link: no ip and tc here: "
        "apt-get install -y iproute2.\n"
    )


@pytest.mark.long
def test_quick(overlap_cpu, tmp_path):
    """A real run, or the one line that says what this machine lacks."""
    out = tmp_path / "out.json"
    done = run("--quick", "--repetitions=2", "--timeout=480", f"--json={out}")
    if reason := overlap_cpu.network.why_not():
        assert done.returncode == 1
        assert done.stderr == f"overlap_cpu.py cannot shape a link: {reason}\n"
        return
    assert done.returncode == 0, done.stderr
    points = json.loads(out.read_text())["points"]
    assert set(points) == {"1.0", "0.5", "7.0", "2.0"}
    slow, bits = points.pop("7.0"), points.pop("2.0")
    assert bits["ratios"]["acco 8 bits / acco"]["median"] < 1
    assert {"compute N/4", "zero1 N/4", "adaptive"} <= slow["seconds"].keys()
    assert slow["ratios"]["adaptive / zero1 N/4"]["median"] < 0.5
    for point in points.values():
        assert point["rate_mbit"] > 0
        for mode in ("compute", "communication", "zero1", "acco", "zero1 2N"):
            assert len(point["seconds"][mode]) == 2
        assert point["ratios"].keys() >= {"acco / zero1", "acco / zero1 2N"}
    assert f"at most {overlap_cpu.TARGETS[1.0]['acco / zero1']}" in done.stdout
    assert f"acco-{done.pid}-" not in namespaces()


@pytest.mark.slow
def test_ends_in_time_and_leaves_nothing_behind(overlap_cpu):
    done = run("--quick", "--timeout=5")
    if reason := overlap_cpu.network.why_not():
        assert done.stderr == f"overlap_cpu.py cannot shape a link: {reason}\n"
        return
    assert done.returncode == 1
    assert done.stderr == "ended by SIGALRM\n"
    assert f"acco-{done.pid}-" not in namespaces()
