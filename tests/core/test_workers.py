"""Sums over workers."""

import json
import socket
from pathlib import Path

from tests import programs


def test_gloo_sums_large_arrays(tmp_path):
    """Its own reduce-scatter returns wrong ends of the first worker's part."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    root, out = Path(__file__).parents[2], tmp_path / "found.json"
    done = programs.run(
        Path(__file__).with_name("gloo_program.py"), port, out, timeout=200,
        PYTHONPATH=str(root),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    sends = ["all_gather", "all_to_all"]
    assert json.loads(out.read_text()) == {
        "wrong": 0,
        "asked": {"zero1": sends, "fused_zero1": sends, "acco": sends},
    }
