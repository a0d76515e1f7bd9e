"""Names of topologies, their shapes and meshes, and programs compiled for them."""

import importlib.util
import os
import re
import subprocess
import sys

import jax
import pytest

from acco_jax.schedule import topologies


@pytest.mark.parametrize(
    ("text", "slices", "shape", "devices", "fast_domain"),
    [
        ("gpu:h200:4x8", 1, (4, 8), 32, 8),
        ("gpu:a100:8", 1, (1, 8), 8, 8),
        ("gpu:h100:1x8", 1, (1, 8), 8, 8),
        ("tpu:v5e:4x4", 1, (4, 4), 16, 16),
        ("tpu:v6e:16x16", 2, (16, 16), 512, 256),
        ("tpu:v5p:2x2x2", 1, (2, 2, 2), 8, 8),
        ("tpu:tpu7x:2x2x2", 3, (2, 2, 2), 48, 16),  # two devices per chip
    ],
)
def test_parse(text, slices, shape, devices, fast_domain):
    topology = topologies.parse(text, slices)
    assert (topology.platform, topology.chip.name) == tuple(text.split(":")[:2])
    assert (topology.shape, topology.slices) == (shape, slices)
    assert topology.devices == devices
    assert topology.fast_domain == fast_domain
    if slices == 1:
        assert topologies.parse(str(topology)) == topology


@pytest.mark.parametrize(
    ("text", "slices", "message"),
    [
        ("h200", 1, "'h200' is not of the form gpu:CHIP:HOSTSxGPUS"),
        ("gpu:h200:", 1, "'gpu:h200:' is not of the form"),
        ("gpu:h200:4x", 1, "is not of the form"),
        (
            "gpu:h30:4x8",
            1,
            "the gpu chip is 'h30': did you mean 'h20'? Known: a100,",
        ),
        ("tpu:v5:4x4", 1, "the tpu chip is 'v5': did you mean 'v5"),
        ("tpu:h200:4x4", 1, "the tpu chip is 'h200': Known: v5e,"),
        (
            "tpus:v5e:4x4",
            1,
            "the platform is 'tpus': did you mean 'tpu'? Known: gpu, tpu.",
        ),
        ("tpu:v5e:4x4x4", 1, "shape '4x4x4' is not of the form XxY"),
        ("tpu:v5p:4x4", 1, "shape '4x4' is not of the form XxYxZ"),
        ("gpu:h200:1x2x8", 1, "shape '1x2x8' is not of the form HOSTSxGPUS"),
        ("gpu:h200:0x8", 1, "with sizes of at least 1"),
        ("gpu:h200:2x8", 2, "slices is 2, but must be 1 for GPUs"),
        ("tpu:v5e:4x4", 0, "slices is 0, but must be at least 1"),
    ],
)
def test_parse_refuses(text, slices, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        topologies.parse(text, slices)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["gpu:h200:2x8", "tpu:v6e:4x4"])
def test_missing_compiler_is_one_line_with_the_remedy(name, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    extra = f"pip install 'acco-jax[plan-{name[:3]}]'"
    for use in (topologies.Topology.description, topologies.mesh):
        with pytest.raises(RuntimeError, match=re.escape(extra)) as error:
            use(topologies.parse(name))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("model", [0, 3, 16])
def test_model_axis_stays_within_a_host(model):
    message = f"model axis of size {model} does not divide the 8 devices of a host"
    with pytest.raises(ValueError, match=message):
        topologies.mesh(topologies.parse("gpu:h200:4x8"), model=model)


def test_a_large_sort_compiles_without_a_gpu():
    """CUB's, which XLA takes for it, asks a GPU. Experts' rows are sorted so."""
    topology = topologies.parse("gpu:h100:1x8")
    rows = jax.NamedSharding(topologies.mesh(topology), jax.P("data"))
    keys = jax.ShapeDtypeStruct((8, 2**18), "int32", sharding=rows)
    program = topologies.compiled(jax.jit(jax.numpy.argsort).lower(keys), topology)
    assert " sort(" in program.as_text()


@pytest.mark.slow
def test_programs_that_the_cache_cannot_load_are_compiled_without_a_word(tmp_path):
    program = (
        "import jax\n"
        "from acco_jax.schedule import topologies\n"
        "topologies.use_cpu()\n"
        "topology = topologies.parse('gpu:h200:1x8')\n"
        "home = jax.sharding.NamedSharding(topologies.mesh(topology), jax.P())\n"
        "x = jax.ShapeDtypeStruct((8, 8), 'float32', sharding=home)\n"
        "topologies.compiled(jax.jit(lambda x: x @ x).lower(x), topology)\n"
    )
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    for _ in range(2):
        command = [sys.executable, "-W", "error", "-c", program]
        subprocess.run(command, env=environment, check=True)
        assert list(tmp_path.iterdir())
