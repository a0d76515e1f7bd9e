"""The rehearsal of the one-GPU benchmark: every part leaves its rows."""

import json
import pathlib
import subprocess
import sys

import pytest

from tests import programs

PROGRAM = pathlib.Path(__file__).parents[2] / "benchmarks" / "one_gpu.py"


@pytest.mark.long
def test_quick_with_a_part_that_fails(tmp_path):
    out = tmp_path / "one_gpu"
    command = [sys.executable, PROGRAM, "--quick", "--fail=schedule", f"--out={out}"]
    environment = programs.environment(JAX_PLATFORMS="cpu")
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(out.with_suffix(".json").read_text())
    parts = report["parts"]
    assert parts["schedule"] == {"error": "RuntimeError: forced to fail"}

    assert parts["calibration"]["figures"].keys() >= {"flops", "call_seconds"}
    first, unsupported = parts["steps"]
    assert first["loops"].keys() == {"hand", "acco"}
    for loop in first["loops"].values():
        assert loop["tokens_per_second"] > 0 and loop["compile_seconds"] > 0
        assert loop["program_bytes"] > 0
    assert first["ratio"]["low"] <= first["ratio"]["median"] <= first["ratio"]["high"]
    for kind in ("predicted", "calibrated"):
        low, high = first[kind]["interval"]
        assert 0 < low <= first[kind]["seconds"] <= high
    assert "cudnn" in unsupported["error"] and "ratio" not in unsupported
    compared = {row["what"]: row.get("within") for row in parts["correctness"]["rows"]}
    assert compared["pallas causal"] and compared["loss"]
    assert parts["end_to_end"]["bitwise"] and parts["end_to_end"]["falls"]

    table = out.with_suffix(".md").read_text()
    assert "forced to fail" in table and "| tiny | cudnn |" in table
    assert not list(tmp_path.glob("*.part"))
