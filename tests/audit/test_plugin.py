"""The pytest plugin: a fixture, and what the audits found in pytest's summary."""

import os
import subprocess
import sys

import pytest

from tests.audit.test_audit import PLACE, text_of

SUITE = f"""
import pathlib
import sys

ALREADY = "jax" in sys.modules
TEXT = pathlib.Path(__file__).with_name("step.hlo").read_text()
OTHER = TEXT.replace("all-reduce-start(", "collective-reduce-start(")


def test_overlapped(assert_hidden):
    import jax

    assert not ALREADY  # a conftest.py can set JAX's variables before
    assert not jax.config.values["jax_disable_most_optimizations"]
    assert_hidden(TEXT, (), "{PLACE}", "data", 0.9, mesh={{"data": 32}})
    assert_hidden(TEXT, (), "{PLACE}", fraction=0.5, mesh={{"data": 32}})


def test_unknown(assert_hidden):
    assert_hidden(OTHER, (), "{PLACE}", mesh={{"data": 32}})


def test_the_option_is_as_before():
    import jax

    assert jax.config.values["jax_disable_most_optimizations"]
"""


@pytest.mark.slow
def test_a_suite_with_the_fixture(tmp_path):
    (tmp_path / "step.hlo").write_text(text_of("foreign/plain_dp"))
    (tmp_path / "test_step.py").write_text(SUITE)
    environment = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-n1", "--junitxml=found.xml"]
    found = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert found.returncode == 1 and "1 failed, 2 passed" in found.stdout
    assert "AssertionError: all axes: " in found.stdout
    _, summary = found.stdout.split("= overlapped communication =")
    rows = [row for row in summary.splitlines() if row.startswith("test_step.py")]
    start = f"test_step.py::test_overlapped: {PLACE}, "
    assert [row.removeprefix(start).split(":")[0] for row in rows] == [
        "all axes",
        "axis data",
    ]
    assert all("overlapped: 87.7% of the bytes (READ), " in row for row in rows)
    assert f"{PLACE}, axis data: " in (tmp_path / "found.xml").read_text()
