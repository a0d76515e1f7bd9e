"""experiments/trainers: each equals the trainer as it was, and acco is overlapped."""

import ast
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

import acco_jax
from experiments.trainers import __main__ as trainers
from tests.reference import make_mesh

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "experiments" / "trainers"
HERE = ("train_state", "nnx_optimizer", "equinox_loop")  # of installed libraries
TUNIX = "google-tunix==0.1.7"


def agree(before, zero1, acco):
    np.testing.assert_allclose(zero1, before, rtol=1e-5)
    assert len(before) >= 20 and not np.allclose(acco, before, rtol=1e-5)
    np.testing.assert_allclose(acco, before, rtol=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("name", HERE)
def test_losses_are_those_of_the_trainer_as_it_was(name):
    recipe, mesh = trainers.load(name), make_mesh(4)
    agree(*(trainers.losses(recipe, mesh, m) for m in trainers.METHODS.values()))


@pytest.mark.fast(slow=("train_state",))
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("name", HERE)
def test_acco_is_overlapped(name):
    found = trainers.audited(trainers.load(name), "gpu:h100:4x8")
    assert found.verdict("data").share == 1
    waits = trainers.audited(trainers.load(name), "gpu:h100:4x8", acco_jax.zero1)
    assert waits.verdict("data").share < 0.5


def test_every_trainer_is_tested_and_has_a_page():
    names = {path.stem for path in FOLDER.glob("*.py")} - {"__main__"}
    assert names == {*HERE, "tunix_trainer"}
    for name in names:
        text = (FOLDER / f"{name}.py").read_text()
        (page,) = re.findall(r"docs/site/migrate/\w+\.md", text)
        assert f"experiments/trainers/{name}.py" in (ROOT / page).read_text()


def test_the_page_of_tunix_shows_the_file():
    source = (FOLDER / "tunix_trainer.py").read_text()
    page = (ROOT / "docs/site/migrate/tunix.md").read_text()
    for node in ast.parse(source).body:
        if getattr(node, "name", "") in ("AccoTrainer", "arguments"):
            assert ast.get_source_segment(source, node) in page
    assert TUNIX.replace("==", " ") in page


@pytest.mark.long
def test_tunix(tmp_path):
    """In an environment of its own, which an index fills."""
    python = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    same = [f"{name}=={metadata.version(name)}" for name in ("jax", "flax", "optax")]
    run(python, "-m", "pip", "install", "-q", TUNIX, f"{ROOT}[plan-gpu]", *same)
    command = python, "-m", "experiments.trainers", "tunix_trainer"
    rows = [line.split() for line in run(*command).splitlines()]
    agree(*np.array(rows[-22:], float).T[1:])  # two are of evaluation
    audited = run(*command, "--audit=gpu:h100:4x8")
    (share,) = re.findall(r"^verdict: ([\d.]+)%", audited, re.M)
    assert float(share) == 100


def run(*command):
    cpus = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4", "XLA_FLAGS": ""}
    optimized = cpus | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    done = subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        env=os.environ | optimized,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
