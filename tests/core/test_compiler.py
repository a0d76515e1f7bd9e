"""Compiler options by device kind and topology, and what is said of an unknown one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import acco_jax
from acco_jax.core.compiler import OPTIONS
from tests.reference import make_mesh


@pytest.mark.parametrize(
    ("name", "generation"),
    [
        ("NVIDIA H200", "gpu"),
        ("NVIDIA A100-SXM4-80GB", "gpu"),
        ("gpu:h100:4x8", "gpu"),
        ("TPU v5 lite", "v5e"),
        ("tpu:v5e:16x16", "v5e"),
        ("TPU v5p", "v5p"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("tpu:v6e:4x4", "v6e"),
        ("TPU7x", "tpu7x"),
        ("tpu:tpu7x:2x2x2", "tpu7x"),
        ("cpu", "cpu"),
    ],
)
def test_options_by_kind_and_by_topology(name, generation):
    assert acco_jax.compiler_options(name) == OPTIONS[generation]


def test_nothing_is_assumed_of_an_unknown_device():
    assert acco_jax.compiler_options("Abacus 3000") == {}
    assert acco_jax.compiler_options("tpu:v99:4x4") == {}


def test_a_model_axis_gets_a_place_beside_the_data_axis():
    limit = "xla_gpu_experimental_parallel_collective_overlap_limit"
    assert acco_jax.compiler_options("NVIDIA H200")[limit] == 1
    assert acco_jax.compiler_options("NVIDIA H200", model_axis=True)[limit] == 16
    assert acco_jax.compiler_options("cpu", model_axis=True) == OPTIONS["cpu"]


def test_options_are_not_shared_between_calls():
    acco_jax.compiler_options("NVIDIA H200")["mine"] = True
    assert "mine" not in acco_jax.compiler_options("NVIDIA H200")


@pytest.mark.parametrize("form", ["fused", "split"])
def test_an_unknown_option_is_named_and_nothing_is_lost(form):
    mesh = make_mesh(2)
    tx = acco_jax.acco(optax.sgd(0.1), mesh=mesh)

    def loss_fn(params, microbatch, rng):
        return jnp.mean((microbatch @ params) ** 2)

    def make(**options):
        return acco_jax.make_train_step(
            loss_fn, tx, microbatches=1, form=form, **options
        )

    params = jnp.ones((3, 2))
    state = tx.init(params)
    batch = np.ones((4, 3), np.float32)
    with pytest.raises(ValueError, match="does not know the option 'xla_nonsense'"):
        make(compiler_options={"xla_nonsense": True})(params, state, batch)
    params, state, _ = make()(params, state, batch)  # neither was donated
    assert all(jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(params))
