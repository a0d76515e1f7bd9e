"""Runs that write adapters in PEFT's format, and runs that start from them."""

import json

import chex
import jax
import numpy as np
import pytest

import acco_jax
from acco_jax.models import huggingface, transformer
from acco_jax.plan import programs
from acco_jax.run import load_run, loop, preparation
from acco_jax.run.config import field_checks
from acco_jax.run.trained import exporting
from acco_jax.run.weights import folders
from acco_jax.schedule import topologies

CONFIG = transformer.Config(
    **transformer.FAMILIES["llama"],
    vocab_size=257, max_length=48, width=16, layers=2, heads=4, kv_heads=2,
    head_width=4, mlp_width=32, dtype="float32", param_dtype="float32",
)  # fmt: skip
RANKS = (("q_proj/kernel", 3), ("down_proj/kernel", 2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hugging Face folder of a small Llama whose tokens are bytes."""
    path, draw = tmp_path_factory.mktemp("folder"), np.random.default_rng(0).normal
    shapes = transformer.shapes_of(CONFIG)
    params = jax.tree.map(lambda x: 0.1 * draw(size=x.shape).astype(x.dtype), shapes)
    (path / "config.json").write_text(json.dumps(huggingface.config_json(CONFIG)))
    folders.write_weights(path, huggingface.to_state(CONFIG, params))
    return path


@pytest.fixture(scope="module")
def written(folder, saved, tmp_path_factory):
    """The workdir of adapters of that model, the adapters, and their folder."""
    workdir = tmp_path_factory.mktemp("adapted")
    changes = {"init_from": str(folder), "lora.ranks": RANKS, "lora.scale": 0.5}
    _, theta = saved(workdir, 2, **changes)
    out = workdir / "out"
    line = exporting.export(workdir, out, adapters=True)
    assert "adapters of 384 parameters of half-round 9 in float32, in PEFT's" in line
    return workdir, theta, out


def test_the_folder_is_peft_s(written, folder):
    _, theta, out = written
    names = {"adapter_config.json", "adapter_model.safetensors"}
    names |= {"tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in out.iterdir()} == names
    said = json.loads((out / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == str(folder)
    assert said["target_modules"] == ["down_proj", "q_proj"]
    stored = folders.AdapterFolder(out)
    start = "base_model.model.model.layers.1.mlp.down_proj.lora_"
    for name, part in (("A", "a"), ("B", "b")):
        x = stored.weight(f"{start}{name}.weight")[:, :]
        expected = theta["h/0_global/mlp/down_proj/kernel"][part][1].T
        np.testing.assert_array_equal(x, expected)


@pytest.fixture(scope="module")
def prepared(tiny, folder, written):
    """prepared(workdir, **changes): a run that starts from the adapters."""

    def make(workdir, devices=2, **changes):
        fields = {"init_from": str(folder), "lora.init_from": str(written[2])}
        config = tiny(**fields | changes)
        return preparation.prepare(config, workdir, jax.devices()[:devices])

    return make


@pytest.mark.fast("acco-8")
@pytest.mark.parametrize(("method", "devices"), [("zero1", 2), ("acco", 8)])
def test_a_run_starts_from_the_adapters_to_the_bit(
    prepared, written, tmp_path, method, devices
):
    group = {"mesh.fsdp": 2, "mesh.tensor": 2} if devices == 8 else {}
    experiment = prepared(tmp_path, devices, method=method, **group)
    assert experiment.config.lora.scale == 0.5
    start, state = loop.initial(experiment)
    theta = acco_jax.committed_params(state, start)
    chex.assert_trees_all_equal(jax.device_get(theta), written[1])


@pytest.mark.slow
def test_it_learns_goes_on_and_is_loaded_without_the_adapters(
    prepared, written, tmp_path
):
    workdir, out = tmp_path / "run", tmp_path / "moved"
    experiment = prepared(workdir)
    before, _ = loop.Evaluator(experiment)(experiment.start(), None)
    start = load_run(written[0]).params
    loss = jax.jit(experiment.model.loss)
    batch = {"tokens": np.arange(64, dtype=np.int32).reshape(2, 32)}
    expected = loss(start, batch, None)[0]
    got = experiment.loss_fn(experiment.start(), batch, None)[0]
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert loop.run(experiment, stop_after=4) is None
    out.symlink_to(written[2])
    changes = {"lora.init_from": str(out)}
    summary = loop.run(prepared(workdir, **changes))
    assert summary["loss"] < before
    out.unlink()
    line = exporting.export(workdir, tmp_path / "again", adapters=True)
    assert "384 parameters" in line
    assert np.isfinite(load_run(workdir).params["ln_f"]["scale"]).all()


def test_a_run_continues_only_with_the_same_adapters(prepared, written, tmp_path):
    prepared(tmp_path / "run")
    other = tmp_path / "other"
    other.mkdir()
    for path in written[2].glob("adapter_*"):
        (other / path.name).write_bytes(path.read_bytes())
    prepared(tmp_path / "run", **{"lora.init_from": str(other)})
    said = json.loads((other / "adapter_config.json").read_text())
    said |= {"lora_alpha": 9, "alpha_pattern": {}}
    (other / "adapter_config.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match=r"a run with adapters\.scale=0\.5, not"):
        prepared(tmp_path / "run", **{"lora.init_from": str(other)})


def test_plan_reads_their_ranks(tiny, folder, written):
    changes = {"init_from": str(folder), "lora.init_from": str(written[2])}
    mesh = programs.data_mesh(topologies.parse("gpu:h200:1x8"))
    program = programs.describe(tiny(**changes), mesh)
    by_hand = programs.describe(
        tiny(**{"init_from": str(folder), "lora.ranks": RANKS}), mesh
    )
    assert jax.tree.leaves(program.arguments[0]) == jax.tree.leaves(
        by_hand.arguments[0]
    )


REFUSED = {
    "no model": ({"init_from": None}, "but init_from is not set"),
    "a rank": ({"lora.rank": 2}, "lora.rank is 2, but lora.init_from="),
    "a scale": ({"lora.scale": 2.0}, "lora.scale is 2.0, but lora.init_from="),
    "nothing": ({"lora.init_from": "/nowhere"}, "adapter_config.json cannot be read"),
}


@pytest.mark.parametrize(("changes", "match"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(prepared, tmp_path, changes, match):
    with pytest.raises(ValueError, match=match) as error:
        prepared(tmp_path, **changes)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_adapters_in_place_of_a_model_are_refused(tiny, written, folder, tmp_path):
    with pytest.raises(ValueError, match="holds adapters, not a model: give their"):
        preparation.prepare(tiny(init_from=str(written[2])), tmp_path)
    config = tiny(**{"init_from": str(folder), "lora.init_from": str(folder)})
    with pytest.raises(ValueError, match=r"adapter_config\.json cannot be read"):
        preparation.prepare(config, tmp_path)
    field_checks.check(config)


@pytest.mark.slow
def test_a_run_without_adapters_has_none_to_export(saved, tmp_path):
    saved(tmp_path / "run", 1)
    with pytest.raises(ValueError, match="has no adapters of a transformer: export"):
        exporting.export(tmp_path / "run", tmp_path / "out", adapters=True)
    assert not (tmp_path / "out").exists()
