"""The doctor names what is wrong, with a remedy, and says what it saw."""

import re
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from acco_jax.command import exits
from acco_jax.run.observe import diagnosis
from tests import programs

FITTING = {"jax": "0.10.2", "jaxlib": "0.10.2"}


def problems(findings):
    return [f for f in findings if f.remedy]


def test_versions():
    assert not problems(diagnosis.versions())  # of the tests' own environment
    assert not problems(diagnosis.versions(FITTING | {"jax-cuda13-plugin": "0.10.2"}))
    (found,) = problems(diagnosis.versions(FITTING | {"jax-cuda13-plugin": "0.9.0"}))
    assert found.seen == "jax-cuda13-plugin 0.9.0 beside jaxlib 0.10.2"
    assert "pip install 'jax-cuda13-plugin==0.10.2'" in found.remedy


def device(kind="NVIDIA H100 80GB HBM3", platform="gpu", process=0):
    return types.SimpleNamespace(
        device_kind=kind, platform=platform, process_index=process
    )


@pytest.mark.parametrize(
    ("devices", "accelerator", "said", "wrong"),
    [
        ([device()] * 8, True, "8 x NVIDIA H100 80GB HBM3 in 1 process", False),
        ([device("cpu", "cpu")], True, "although the machine has an acc", True),
        ([device("cpu", "cpu")], False, "one process has nothing to wait for", False),
        ([device("cpu", "cpu", i) for i in (0, 1)], False, "split, unless", False),
        ([device("some new chip")], True, "figures are unknown to plan", False),
    ],
)
def test_devices_and_form(devices, accelerator, said, wrong):
    found = list(diagnosis.backend(devices, accelerator))
    assert any(said in f.seen for f in found) and bool(problems(found)) == wrong


@pytest.mark.parametrize(
    ("available", "nproc", "platform", "wrong"),
    [(1, None, "cpu", True), (1, "2", "cpu", False), (4, "1", "cpu", True),
     (4, None, "cpu", False), (1, None, "gpu", False)],
)  # fmt: skip
def test_cores(available, nproc, platform, wrong):
    found = diagnosis.cores(available, nproc, platform)
    assert bool(problems(found)) == wrong


def test_a_slow_pair_is_named():
    rates = {(i, j): 10e9 for i in range(4) for j in range(i)}
    assert not problems(diagnosis.network(rates))
    (found,) = problems(diagnosis.network(rates | {(2, 3): 1e9}))
    assert found.seen == "devices 2 and 3: 1.00 GB/s" and "domains" in found.remedy
    assert not problems(diagnosis.network({}))


def test_every_pair_is_measured():
    mesh = Mesh(np.array(jax.devices()[:3]), ("device",), (AxisType.Auto,))
    rates = diagnosis.bandwidths(mesh)
    assert set(rates) == {(0, 1), (0, 2), (1, 2)}
    assert all(1e6 < rate < 1e13 for rate in rates.values())


def test_a_pair_is_as_fast_as_the_process_that_waits_longest(monkeypatch):
    """One that holds neither device returns at once."""
    monkeypatch.setattr(
        diagnosis.processes, "gathered", lambda x: np.stack([x, x + 1, 0 * x])
    )
    mesh = Mesh(np.array(jax.devices()[:2]), ("device",), (AxisType.Auto,))
    (rate,) = diagnosis.bandwidths(mesh).values()
    assert 1e6 < rate < diagnosis.MEBIBYTES * 2**20


def test_folders(tmp_path, monkeypatch):
    assert not problems(diagnosis.folder(tmp_path / "new" / "er"))
    (tmp_path / "file").touch()
    for place in ("file", "file/in/it"):
        (found,) = problems(diagnosis.folder(tmp_path / place))
        assert "file" in found.seen and found.remedy
    (found,) = problems(diagnosis.folder(Path("gs://bucket/run")))
    assert "is remote" in found.seen
    usage = types.SimpleNamespace(free=2**30)
    monkeypatch.setattr(diagnosis.shutil, "disk_usage", lambda path: usage)
    (found,) = problems(diagnosis.folder(tmp_path))
    assert "1 GiB free" in found.seen and "the optimizer's state" in found.remedy
    monkeypatch.setattr(diagnosis.os, "access", lambda path, how: False)
    (found,) = problems(diagnosis.folder(tmp_path))
    assert "is not to be written" in found.seen


def test_every_process_says_its_problems():
    good, bad = (diagnosis.Finding("cores", "1", x) for x in ("", "give it two"))
    assert diagnosis.said(good, 0) == str(good) and not diagnosis.said(good, 1)
    assert diagnosis.said(bad, 0) == str(bad)
    assert diagnosis.said(bad, 1) == f"process 1: {bad}"


def test_the_command(tmp_path):
    root = Path(__file__).resolve().parents[2]
    environment = programs.environment(JAX_PLATFORMS="cpu", PJRT_NPROC="2")
    command = [sys.executable, "-m", "acco_jax.doctor", f"--workdir={tmp_path}"]
    done = subprocess.run(
        [*command, "--devices=2"], env=environment, cwd=root, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    seen = [line.split()[1] for line in done.stdout.splitlines() if line[0] != " "]
    assert list(dict.fromkeys(seen)) == [
        "versions", "devices", "form", "cores", "network", "workdir"
    ]  # fmt: skip
    few = "GiB free\n" in done.stdout and "problem" in done.stdout
    assert done.returncode == (exits.FAILED if few else exits.FINISHED), done
    assert re.search(r"1 pair exchange 16 MiB at [\d.]+ GB/s", done.stdout)
    wrong = subprocess.run(
        [*command, "--process=1"], env=environment, cwd=root, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert wrong.returncode == exits.REFUSED and wrong.stderr.count("\n") == 1
