"""The bytes of a half-round: of a recorded schedule, and of a tiny model's program."""

import gzip
import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).parents[1]
PROGRAM = TESTS.parent / "benchmarks" / "half_round_bytes.py"
BUFFER = 14592 * 1024 * 2  # bytes of the recordings' packed buffer


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("half_round_bytes", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["gpu_hidden", "tpu_v5e_hidden", "tpu_v6e_hidden"])
def test_entry_of_a_recorded_schedule(program, name):
    recording = TESTS / "recorded" / "schedules" / f"{name}.txt.gz"
    text = gzip.decompress(recording.read_bytes()).decode()
    operations, on_chip = program.entry_operations(text)
    assert (on_chip > 0) == name.startswith("tpu")
    opcodes = {x["opcode"] for x in operations}
    assert not opcodes & {"while", "dot", "parameter", "tuple", "bitcast"}
    assert not [x for x in operations if "all-gather" in x["name"]]
    sizes = [x["bytes"] for x in operations]
    assert sizes == sorted(sizes, reverse=True)
    # at least gradients packed and parameters unpacked, each read and written (what a
    # TPU keeps on the chip is copied there instead), and no array many times
    assert 4 * BUFFER < sum(sizes) + on_chip < 20 * BUFFER


@pytest.mark.long
def test_a_tiny_model(tmp_path):
    out = tmp_path / "out.json"
    machines = "--machines=gpu:h200:1x8,gpu:abacus:1x8"
    flags = ["--quick", "--top=2", machines, f"--json={out}"]
    done = subprocess.run(
        [sys.executable, PROGRAM, *flags], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "gpu:abacus:1x8    left out: topology 'gpu:abacus:1x8'" in done.stdout
    (row,) = json.loads(out.read_text())["machines"]
    assert row["machine"] == "gpu:h200:1x8"
    assert row["entry_bytes"] == sum(x["bytes"] for x in row["entry_operations"]) > 0
    assert row["memory_bytes"] > 0
    assert row["collectives"] == []  # all below 1 MiB
    assert all(x["name"] in done.stdout for x in row["entry_operations"][:2])
