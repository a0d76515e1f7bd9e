"""The overhead benchmark at a tiny size: its loops agree, and it reports."""

import json
import pathlib
import subprocess
import sys

import pytest

PROGRAM = pathlib.Path(__file__).parents[2] / "benchmarks" / "overhead.py"


def run(*flags: str) -> str:
    done = subprocess.run(
        [sys.executable, PROGRAM, *flags], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_quick(tmp_path):
    out = tmp_path / "out.json"
    text = run("--quick", f"--json={out}")
    report = json.loads(out.read_text())
    assert report["seconds"].keys() == {"hand", "fused", "plain"}
    assert all(len(seconds) == 3 for seconds in report["seconds"].values())
    assert report["ratios"].keys() == report["cpu_ratios"].keys() == {"fused", "plain"}
    assert report["peak_flops"] is None or "of peak" in text
    if report["device"].startswith("cpu"):
        assert "GPT-2 small (bfloat16, sequence 1024)" in text


@pytest.mark.long
def test_schedule_of_several_devices():
    assert "loop while" in run("--quick", "--schedule=2")
