"""Real processes: a run that loses commands and takes them in again, and its replay."""

import json
import pathlib
import subprocess
import sys

import pytest

PROGRAM = pathlib.Path(__file__).parents[2] / "benchmarks" / "worlds.py"


@pytest.mark.long
def test_quick(tmp_path):
    done = subprocess.run(
        [sys.executable, PROGRAM, "--quick", f"--json={tmp_path / 'out.json'}"],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    sizes = [world["processes"] for world in report["worlds"]]
    assert len(sizes) >= 4 and sizes[0] == 4
    assert report["bits"] and report["rows"]
