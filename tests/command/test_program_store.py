"""Compiled programs are kept on disk, within a bound, and give the same bits."""

import importlib
import json
import os
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from acco_jax.command import program_store


@pytest.fixture
def unset(monkeypatch, tmp_path):
    """No folder of JAX's own, and a home for ours."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("ACCO_COMPILATION_CACHE", raising=False)
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


def test_the_folder_is_of_this_kind_of_processor(unset, monkeypatch):
    here = program_store.folder()
    assert here.parent == unset / "acco_jax" / "xla"
    monkeypatch.setattr(program_store, "_processor", lambda: "another")
    assert program_store.folder() not in (here, None)


def test_a_folder_of_the_users_is_theirs(unset, monkeypatch):
    monkeypatch.setenv("ACCO_COMPILATION_CACHE", "off")
    assert program_store.folder() is None
    monkeypatch.delenv("ACCO_COMPILATION_CACHE")
    jax.config.update("jax_compilation_cache_dir", str(unset / "own"))
    assert program_store.folder() is None


def test_a_folder_that_cannot_be_written_is_a_warning(unset, caplog):
    (unset / "acco_jax").write_text("a file")
    program_store.keep_programs()
    assert "not kept" in caplog.text
    assert jax.config.jax_compilation_cache_dir is None


def test_no_home_is_a_warning(unset, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", "~no-such-user/cache")
    program_store.keep_programs()
    assert "not kept: Could not determine home" in caplog.text


def test_what_was_not_used_for_longest_goes(tmp_path):
    for age, name in enumerate(("new", "used", "old")):
        (tmp_path / name).write_bytes(bytes(10))
        os.utime(tmp_path / name, (1e9 - age, 1e9 - 10 * age))
    os.utime(tmp_path / "used", (1e9 + 1, 1e9 - 50))
    (tmp_path / "folder").mkdir()
    os.utime(tmp_path / "folder", (1e9 - 9, 1e9 - 99))
    program_store._shrink(tmp_path, 20)
    assert {path.name for path in tmp_path.iterdir()} == {"new", "used", "folder"}


def test_programs_depend_on_code_flags_and_settings(tmp_path, monkeypatch):
    def module(text):
        path.write_text(text)
        os.utime(path, (1e9 + len(text), 1e9 + len(text)))  # before this process

    # other tests' modules may be newer than this process
    monkeypatch.setattr(program_store, "_BEGAN", time.time_ns())
    path = tmp_path / "a_model_of_ones_own.py"
    before = program_store.environment()
    assert program_store.environment() == before
    monkeypatch.syspath_prepend(tmp_path)
    module("SIZE = 3\n")
    importlib.import_module("a_model_of_ones_own")
    imported = program_store.environment()
    module("SIZE = 30\n")
    edited = program_store.environment()
    monkeypatch.setenv("XLA_FLAGS", "--xla_of_another_kind")
    flagged = program_store.environment()
    with jax.default_matmul_precision("float32"):
        inside = program_store.environment()
    assert len({before, imported, edited, flagged, inside}) == 5
    path.write_text("SIZE = 3\n")  # which of the two this process runs is unknown
    with pytest.raises(RuntimeError, match=r"own\.py has changed since this process"):
        program_store.environment()
    sys.modules.pop("a_model_of_ones_own")


PROGRAM = """
import json, sys
import jax, optax
from acco_jax.command import program_store
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
program_store.SECONDS = 0.0
program_store.keep_programs()
import numpy as np, acco_jax, jax.numpy as jnp
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
def loss_fn(params, batch, rng):
    def layer(x, w):
        return jnp.tanh(x @ w), None
    return jnp.mean(jax.lax.scan(layer, batch, params)[0] ** 2)
mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
tx = getattr(acco_jax, sys.argv[1])(optax.adamw(1e-2), mesh=mesh)
step = acco_jax.make_train_step(loss_fn, tx, microbatches=2)
params, state = acco_jax.start(tx, jnp.full((3, 16, 16), 0.1))
batch = np.random.default_rng(0).normal(size=(32, 16)).astype(np.float32)
for _ in range(60):
    params, state, metrics = step(params, state, batch)
bits = np.asarray(acco_jax.committed_params(state, params)).view(np.int32)
names = [name.rsplit("/", 1)[-1] for name in hits]
print(json.dumps({"bits": bits.ravel().tolist(), "misses": names.count("cache_misses"),
                  "hits": names.count("cache_hits")}))
"""


@pytest.mark.fast(slow=("acco",))
@pytest.mark.parametrize("method", ["fused_zero1", "acco"])
def test_programs_of_the_store_train_to_the_same_bits(method, tmp_path):
    """Loaded programs of fused_zero1 have once waited for each other for ever."""
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("JAX_")},
        "XDG_CACHE_HOME": str(tmp_path),
    }
    runs = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, method],
            env=environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        runs.append(json.loads(done.stdout))
    first, *later = runs
    assert first["misses"] and not first["hits"]
    for run in later:
        assert run["hits"] and not run["misses"]
        np.testing.assert_array_equal(run["bits"], first["bits"])
