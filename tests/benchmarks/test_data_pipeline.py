"""The benchmark of the data pipeline, on little data."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "data_pipeline.py"


def test_reads_more_than_five_times_what_the_quickstart_consumes():
    command = [sys.executable, BENCHMARK, "--tokens=300000", "--rows=320"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["pipeline"] for row in rows] == ["packed", "document_mask", "skew"]
    for row in rows:
        assert row["tokens_per_second"] > 127 * row["rows_per_second"] > 0
        assert row["times_what_the_quickstart_consumes"] >= 5
    assert done.returncode == 0, done.stderr
