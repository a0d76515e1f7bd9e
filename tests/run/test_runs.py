"""A trained run, read on the devices that there are."""

import contextlib
import dataclasses
import json
import shutil

import chex
import jax
import jax.numpy as jnp
import pytest
from optax import softmax_cross_entropy_with_integer_labels
from optax.contrib import ScheduleFreeState, schedule_free_eval_params

import acco_jax
from acco_jax.command import exits
from acco_jax.models import attention, head, lora, transformer
from acco_jax.run import load_run, loop, preparation
from acco_jax.run.observe import metrics
from acco_jax.run.state.memory import MemoryCopies

METHODS = {
    "acco": {"model.param_dtype": "bfloat16"},
    "fused_zero1": {},
    "gossip": {"model.param_dtype": "bfloat16"},
    "diloco": {"method_options.local_steps": 2},
    "streaming_diloco": {
        "method_options.local_steps": 2,
        "method_options.fragments": 2,
        "method_options.overlap_steps": 1,
    },
    "cellm": {"method_options.local_steps": 2},
}


SLOW = [pytest.param(m, marks=pytest.mark.slow) for m in ("fused_zero1", "diloco")]
FAST = [method for method in METHODS if method not in ("fused_zero1", "diloco")]


@pytest.mark.fast("acco")
@pytest.mark.parametrize("method", FAST + SLOW)
def test_theta_is_what_was_committed(saved, tmp_path, method):
    _, theta = saved(tmp_path, 2, method=method, **METHODS[method])
    run = load_run(tmp_path, jax.devices()[:1])
    chex.assert_trees_all_equal(jax.device_get(run.params), theta)
    assert run.half_round == 9
    assert run.config.method == method
    assert run.tokenizer.fingerprint == "bytes"
    assert run.architecture.width == 16


@pytest.mark.slow
def test_a_schedule_free_run_is_evaluated_and_read_at_x(train, tmp_path):
    name = {"optimizer.name": "schedule_free_adamw", "optimizer.schedule": "constant"}
    e, summary = train(tmp_path, **name, **{"optimizer.learning_rate": 0.02})
    memory = MemoryCopies(None, tmp_path, {}, e.world)
    with contextlib.closing(loop._Run(e, memory)) as trained:
        y = acco_jax.committed_params(trained.state, trained.params)
        is_free = lambda s: isinstance(s, ScheduleFreeState)  # noqa: E731
        leaves = jax.tree.leaves(trained.state.inner, is_leaf=is_free)
        (free,) = filter(is_free, leaves)
        x_state = trained.state._replace(
            master=schedule_free_eval_params(free, trained.state.master)
        )
        x = acco_jax.committed_params(x_state, trained.params)
        at_x, _ = trained._evaluate(x, None)
        at_y, _ = trained._evaluate(y, None)
    assert summary["loss"] == pytest.approx(at_x, rel=1e-6)
    assert abs(at_x - at_y) > 0.01
    run = load_run(tmp_path, jax.devices()[:1])
    chex.assert_trees_all_close(run.params, jax.device_get(x), rtol=1e-5, atol=1e-6)
    rows = [r for r in metrics.read(tmp_path) if r["kind"] == "validation"]
    host = e.checkpoints.host(e.total_calls)
    assert host["held_out_loss"] == rows[-1]["loss"]


@pytest.mark.parametrize("devices", [1, 2])
def test_a_tpu_s_run_can_be_read_on_several_chips(
    saved, tmp_path, monkeypatch, devices
):
    """No compiler splits a kernel, and one of a TPU's is the default there."""
    saved(tmp_path, 2, **{"model.dtype": "bfloat16", "model.param_dtype": "bfloat16"})
    run = load_run(tmp_path, jax.devices()[:devices])
    for module in (attention, head, transformer):
        monkeypatch.setattr(module, "platform", lambda: "tpu")
    tokens = jax.ShapeDtypeStruct((1, 32), jnp.int32)
    traced = jax.jit(run.model.apply).trace(run.params, tokens)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert ("tpu_custom_call" in text) == (devices == 1)


@pytest.mark.slow
def test_logits_are_those_of_the_loss(saved, tmp_path):
    _, theta = saved(tmp_path, 2)
    run = load_run(tmp_path, jax.devices()[:1])
    tokens = jax.random.randint(jax.random.key(0), (2, 33), 0, 257)
    logits = run.apply(tokens[:, :-1])
    assert logits.shape == (2, 32, 257)
    record = tmp_path / "config.json"  # of a GPU, whose kernel is not here
    gpu = json.loads(record.read_text())
    gpu["model"]["attention"] = "cudnn"
    record.write_text(json.dumps(gpu))
    again = load_run(tmp_path, jax.devices()[:1]).apply(tokens[:, :-1])
    chex.assert_trees_all_close(again, logits, rtol=1e-5)
    losses = softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    expected, number, _ = run.model.loss(theta, {"tokens": tokens}, None)
    assert (
        losses.sum() == pytest.approx(float(expected), rel=1e-5)
        and number == losses.size
    )
    for wrong, says in ((tokens[0], "int32"), (tokens * 0.5, "float32"),
                        (tokens, "rows of 33, but the model has 32"),
                        (tokens[:, :2] * 0 - 1, "from -1 to -1, but the model has 257"),
                        (tokens[:, :2] * 0 + 257, "model has 257: give 0 to 256"),
                        ):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            run.apply(wrong)
    bare = dataclasses.replace(run, model=dataclasses.replace(run.model, apply=None))
    with pytest.raises(ValueError, match="set its field `apply`"):
        bare.apply(tokens[:, :-1])


@pytest.mark.slow
def test_groups_are_left_and_formed(saved, tmp_path):
    group = {"mesh.fsdp": 2, "mesh.tensor": 2}
    _, theta = saved(tmp_path, 8, **group)
    logits = load_run(tmp_path, jax.devices()[:1]).apply([[1, 2, 3]])
    for devices, split in ((3, None), (8, None), (2, {"tensor": 2})):
        run = load_run(tmp_path, jax.devices()[:devices], split)
        chex.assert_trees_all_equal(jax.device_get(run.params), theta)
        found = jax.device_get((run.apply([[1, 2, 3]]), logits))
        chex.assert_trees_all_close(*found, rtol=1e-5, atol=1e-5)
    kernel = run.params["h"]["0_global"]["attn"]["q_proj"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // 2


@pytest.mark.slow
def test_adapters_are_merged(saved, tmp_path):
    changes = {"lora.rank": 2, "lora.scale": 2.0, "data.tokenizer": "bpe"}
    changes |= {"data.vocab_size": 300}
    e, adapters = saved(tmp_path, 2, **changes)
    run = load_run(str(tmp_path))
    assert run.tokenizer.fingerprint == e.corpus.tokenizer.fingerprint
    base = jax.jit(e.model.init)(jax.random.key(0))
    merged = lora.merge(base, adapters, 2.0)
    chex.assert_trees_all_close(run.params, jax.device_get(merged), rtol=1e-6)


@pytest.mark.slow
def test_a_base_may_have_had_other_devices(saved, tiny, tmp_path):
    _, theta = saved(tmp_path / "base", 3)
    config = tiny(base=str(tmp_path / "base"))
    e = preparation.prepare(config, tmp_path / "run", jax.devices()[:2])
    chex.assert_trees_all_equal(jax.device_get(e.start()), theta)


def test_a_run_knows_at_which_checkpoint_of_its_base_it_begins(saved, tiny, tmp_path):
    base, workdir = tmp_path / "base", tmp_path / "run"
    saved(base, 1, (2, 4), method="zero1")
    config = tiny(base=str(base))

    def prepared():
        return preparation.prepare(config, workdir, jax.devices()[:1])

    first = prepared()
    known = first.identity["base_checkpoint"]
    assert known["half_round"] == 4
    first.start()
    for path in (base / "checkpoints").glob("4*"):  # meanwhile
        path.rename(tmp_path / path.name)
    with pytest.raises(exits.Damaged, match="is not the one that this run began at"):
        first.start()
    for path in tmp_path.glob("4*"):
        path.rename(base / "checkpoints" / path.name)
    preparation.record(first)
    for path in (base / "checkpoints").glob("4*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    again = prepared()
    assert again.identity["base_checkpoint"] == known
    with pytest.raises(ValueError, match="is not the one that this run began at"):
        again.start()
    fresh = preparation.prepare(config, tmp_path / "other", jax.devices()[:1])
    assert fresh.identity["base_checkpoint"]["half_round"] == 2
    shutil.rmtree(base)
    with pytest.raises(exits.Damaged, match="holds no run"):
        again.start()
    # a run that has begun needs it no more
    assert prepared().identity["base_checkpoint"] == known


def test_what_is_not_there_is_refused(saved, tmp_path):
    def refused(match, *arguments):
        with pytest.raises(ValueError, match=match) as error:
            load_run(*arguments)
        assert "\n" not in str(error.value)

    refused(r"config\.json cannot be read", tmp_path / "nowhere")
    workdir = tmp_path / "run"
    saved(workdir, 1, (2, 4), method="zero1")
    refused(
        r"no checkpoint of half-round 3: choose one of 2, 4\.", workdir, None, None, 3
    )
    assert load_run(workdir, half_round=2).half_round == 2
    newest = workdir / "checkpoints" / "4" / "arrays" / "manifest.ocdbt"
    newest.write_bytes(newest.read_bytes()[:-1])
    refused(r"a damaged checkpoint 4 \(.* differs\): restore it", workdir)
    said = json.loads((workdir / "config.json").read_text())
    (workdir / "config.json").write_text(json.dumps(said | {"steps": "many"}))
    refused(r"config\.json is not a run's", workdir)
    (workdir / "config.json").write_text(json.dumps(said | {"checkpoints": "/nowhere"}))
    refused("has no checkpoint: train it", workdir)
