"""docs/architecture.md: its method works everywhere."""

import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import acco_jax
from tests.reference import make_mesh

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text()
METHOD = re.findall(r"```python\n(.*?)```", TEXT, re.S)[0]
WORKERS, N, ROWS, WIDTH, HALF_ROUNDS = 2, 2, 2, 3, 6
RATE, PENALTY = 0.1, 0.5


def test_the_method_is_short():
    assert len(METHOD.strip().splitlines()) <= 40


def made(mesh):
    module = types.ModuleType("stale_sgd")
    exec(METHOD, module.__dict__)
    return module.stale_sgd(optax.sgd(RATE), mesh=mesh, penalty=PENALTY)


def loss_fn(params, batch, rng):
    return jnp.mean((batch @ params["w"] - 1) ** 2)


def by_hand(w, batches):
    """theta after every half-round; nothing of acco_jax."""
    pending, points = None, []
    for batch in batches:
        x = np.asarray(batch, np.float64)
        # microbatches are equally long: their mean gradient is that of all rows
        new = 2 * x.T @ (x @ w - 1) / (len(x) * w.shape[1])
        if pending is not None:
            w = w - RATE * pending / (1 + PENALTY)
        pending = new
        points.append(w)
    return points


@pytest.mark.parametrize("form", ["plain", "fused", "split", "adaptive"])
def test_the_method_is_what_it_says(form, x64):
    tx = made(make_mesh(WORKERS))
    rng = np.random.default_rng(0)
    w = rng.normal(size=(WIDTH, 2))
    batches = rng.normal(size=(HALF_ROUNDS, WORKERS * N * ROWS, WIDTH))
    params = {"w": jnp.asarray(w)}
    state, points = tx.init(params), []
    if form == "plain":
        rows = acco_jax.local_gradients(loss_fn, mesh=tx.mesh, microbatches=N)
    else:
        adaptive = form == "adaptive"
        step = acco_jax.make_train_step(
            loss_fn,
            tx,
            microbatches=acco_jax.Adaptive(N, N) if adaptive else N,
            form="split" if adaptive else form,
        )
    for batch in batches:
        if form == "plain":
            grads, weight, _ = rows(params, batch)
            updates, state = tx.update(grads, state, params, weight=weight)
            params = optax.apply_updates(params, updates)
        else:
            params, state, _ = step(params, state, batch)
        points.append(np.asarray(params["w"]))
    np.testing.assert_allclose(points, by_hand(w, batches), rtol=1e-12)


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """A checkout with the method's file and its name in the table, nothing else."""
    folder = tmp_path_factory.mktemp("house")
    for name in ("acco_jax", "experiments"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    (folder / "acco_jax" / "methods" / "stale_sgd.py").write_text(METHOD)
    table = folder / "acco_jax" / "methods" / "__init__.py"
    old = '    "streaming_diloco":'
    assert old in table.read_text()
    new = f'    "stale_sgd": "stale_sgd",\n{old}'
    table.write_text(table.read_text().replace(old, new))
    return folder


def command(house, name, *flags):
    env = dict(os.environ, PYTHONPATH=str(house))
    return subprocess.run(
        [sys.executable, "-m", f"acco_jax.{name}", *flags],
        cwd=house, env=env, capture_output=True, text=True, timeout=600,
    )  # fmt: skip


SMALL = (
    "--config=experiments/quickstart.py",
    "--config.devices=2",
    "--config.model.family=llama",
    "--config.model.width=16",
    "--config.model.layers=1",
    "--config.model.heads=1",
    "--config.length=16",
    "--config.microbatch_size=64",
    "--config.data.held_out=0.002",  # the last evaluation takes all of it
)


@pytest.mark.slow
def test_the_method_is_compared(house, tmp_path):
    done = command(
        house, "compare", *SMALL, "--config.steps=3", "--seeds=1",
        f"--methods=stale_sgd(penalty={PENALTY})", f"--workdir={tmp_path}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"stale_sgd(penalty={PENALTY})" in done.stdout
    (run,) = tmp_path.glob("stale_sgd*/seed-*")
    summary = json.loads((run / "summary.json").read_text())
    assert summary["method"] == "stale_sgd"
    assert np.isfinite(summary["loss"])


@pytest.mark.slow
def test_the_method_is_planned(house, tmp_path):
    done = command(
        house, "plan", *SMALL, "--topology=gpu:h200:1x8", "--methods=stale_sgd",
        "--nofit", f"--out={tmp_path}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "stale_sgd" in done.stdout
