"""Collectives between CPU processes."""

import json
import socket
from pathlib import Path

import pytest

from tests import programs


@pytest.mark.slow
def test_collectives_are_right_and_made_of_sums(tmp_path):
    """gloo's own reduce-scatter returns wrong ends of the first worker's part."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    root, out = Path(__file__).parents[2], tmp_path / "found.json"
    done = programs.run(
        Path(__file__).with_name("gloo_program.py"), port, out, timeout=200,
        PYTHONPATH=str(root),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    sums = ["all_reduce"]
    assert json.loads(out.read_text()) == {
        "wrong": 0,
        "asked": {"zero1": sums, "fused_zero1": sums, "acco": sums},
        "differ": [],
    }
