"""Kills at some places of a run, and the end that it would have had without them."""

import json
import pathlib
import subprocess
import sys

import pytest

PROGRAM = pathlib.Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.mark.long
def test_quick(tmp_path):
    done = subprocess.run(
        [sys.executable, PROGRAM, "--quick", f"--json={tmp_path / 'out.json'}"],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (trial,) = json.loads((tmp_path / "out.json").read_text())
    assert sorted(trial["kills"]) == ["evaluating", "saving"]
    assert trial["bits"] and trial["rows"]


@pytest.mark.long
def test_at_every_place_twice(tmp_path):
    """Copies in memory among them: written, not marked, with a flipped bit."""
    out = tmp_path / "out.json"
    flags = ("--kills=20", "--processes=1", f"--json={out}")
    done = subprocess.run([sys.executable, PROGRAM, *flags], timeout=7200)
    assert done.returncode == 0
    trials = json.loads(out.read_text())
    kills = [place for trial in trials for place in trial["kills"]]
    assert len(kills) >= 20 and {"copying", "unmarked", "flipped"} <= set(kills)
    assert all(t["bits"] and t["rows"] and t["memory"] for t in trials)
