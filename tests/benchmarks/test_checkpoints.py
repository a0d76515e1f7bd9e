"""The benchmark of checkpoints at a tiny size: it trains, saves and reports."""

import json
import pathlib
import subprocess
import sys

import pytest

PROGRAM = pathlib.Path(__file__).parents[2] / "benchmarks" / "checkpoints.py"


@pytest.mark.long
def test_quick(tmp_path):
    out = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, PROGRAM, "--quick", f"--json={out}"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    assert len(figures["ratios"]) == len(figures["save_seconds"]) == 3
    assert all(ratio > 0 for ratio in figures["ratios"])
    waits = zip(figures["save_seconds"], figures["write_seconds"], strict=True)
    assert all(save < write for save, write in waits)
    assert "a checkpoint every 4 half-rounds / without" in done.stdout
