"""What prepare refuses, in one line and before anything is written."""

import json
import shutil
import types
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

from acco_jax.models import transformer
from acco_jax.run import preparation, prepared
from acco_jax.run.state import processes
from tests.compiling import compilations

REFUSED = [
    (
        {"microbatches_per_step": 3},
        "is 3, which does not divide into the 2 calls of a step",
    ),
    ({"counts": (1, 1, 1)}, "give one number from 0 to 2 for each of the 2 workers"),
    ({"counts": (3, 1)}, "give one number from 0 to 2 for each of the 2 workers"),
    ({"counts": (-1, 1)}, "give one number from 0 to 2 for each of the 2 workers"),
    ({"data.path": "/nowhere"}, "no folder /nowhere"),
    (
        {"data.name": "text_foldr"},
        "no data set 'text_foldr'.*did you mean 'text_folder'",
    ),
    ({"data.tokenizer": "bpe"}, "needs data.vocab_size"),
    ({"model.vocab_size": 200}, "is 200, but the tokenizer has 257 tokens"),
    ({"model.heads": 3}, "heads"),
    ({"model.size": "gpt-neo-9b"}, "'gpt-neo-9b' is unknown"),
    ({"microbatch_size": 4096}, "less than a batch of"),
    ({"length": 30000}, "less than a batch of"),
    ({"optimizer.name": "lbfgs"}, "optimizer lbfgs .* does not work here: .*value"),
    ({"optimizer.options": {"b1": "much"}}, "optimizer"),
    ({"optimizer.no_decay": "LayerNorm"}, "no_decay has 'LayerNorm', .*no parameter"),
    (
        {"optimizer.groups": (("embed_tokens", {"learning_rate": 1e-4}),)},
        "groups has 'embed_tokens', which matches no parameter: .* wte/embedding",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_prepare_refuses_in_one_line(tiny, tmp_path, changes, message):
    config = tiny()
    options = changes.pop("optimizer.options", None)
    config.update_from_flattened_dict(changes)
    config.optimizer.options.update(options or {})
    with pytest.raises(ValueError, match=message):
        preparation.prepare(config, tmp_path, jax.devices()[:2])
    # what was refused leaves the workdir to whatever comes next
    assert not (tmp_path / "config.json").exists()


def test_a_start_draws_the_parameters_once(tiny, tmp_path, monkeypatch):
    """Whoever asks for their shapes before it gets those of the same trace."""
    drawn, init = [], transformer.init_params
    monkeypatch.setattr(
        transformer, "init_params", lambda *args: drawn.append(args) or init(*args)
    )
    experiment = preparation.prepare(tiny(), tmp_path, jax.devices()[:2])
    params, _ = prepared.initial(experiment)
    assert len(drawn) == 1
    assert experiment.model.parameters() == sum(x.size for x in jax.tree.leaves(params))
    assert len(drawn) == 1


def test_text_folder_without_text(tiny, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "zeros.bin").write_bytes(b"\0" * 100)
    config = tiny(**{"data.path": str(tmp_path / "empty")})
    with pytest.raises(ValueError, match=r"zeros\.bin is not UTF-8 text: move it out"):
        preparation.prepare(config, tmp_path / "work", jax.devices()[:2])


def test_refuses_the_workdir_of_other_text(tiny, texts, tmp_path):
    moved = shutil.copytree(texts, tmp_path / "texts")
    first = tmp_path / "work"
    config = tiny(**{"data.path": str(moved)})
    preparation.prepare(config, first, jax.devices()[:2])
    for path in moved.iterdir():
        path.write_text(path.read_text() + "more")
    with pytest.raises(ValueError, match=r"not those of the run.*corpus\.documents"):
        preparation.prepare(config, first, jax.devices()[:2])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"optimizer.learning_rate": 0.5}, r"optimizer\.learning_rate=.*, not 0\.5"),
        ({"eval_every": 3}, r"eval_every=\d+, not 3"),
        ({"drop_nonfinite": False}, "drop_nonfinite=None, not False"),
        ({"spike.policy": "rollback"}, "spike.policy='stop', not 'rollback'"),
        ({"spike.threshold": 1.0}, "spike.threshold=3.0, not 1.0"),
        ({"spike.calls": 2}, "spike.calls=8, not 2"),
        ({"most_dropped_in_a_row": 1}, "most_dropped_in_a_row=10, not 1"),
        ({"mesh.fsdp": 2}, "mesh.fsdp=1, not 2"),
        ({"domains": 2}, "domains=None, not 2"),
        ({"profile": "2:3"}, "profile=None, not '2:3'"),
        ({"tolerance": 5.0}, r"tolerance=.*, not 5\.0"),
        ({"checkpoints": "/elsewhere"}, "checkpoints=False, not True"),
        ({"memory_copies": ""}, "memory_copies=True, not False"),
        ({"memory_copies": "/elsewhere"}, ""),
        ({"data.path": "/elsewhere"}, ""),  # the text may lie elsewhere
        ({"wandb_project": "mine"}, ""),
    ],
)
def test_processes_with_another_config_are_refused(tiny, monkeypatch, change, said):
    config, other = (tiny(**{"memory_copies": "/here"} | x) for x in ({}, change))
    first, mine = (json.loads(c.to_json_best_effort()) for c in (config, other))
    known = json.dumps([first, preparation.steering_of(config)]).encode()
    monkeypatch.setattr(processes, "bytes_from", lambda source, data: known)
    monkeypatch.setattr(processes, "all_bytes", lambda data: [b"", data])
    if said:
        with pytest.raises(
            ValueError, match=f"process 1 has another config than process 0.*{said}"
        ):
            preparation._check_same_config(mine, preparation.steering_of(other))
    else:
        preparation._check_same_config(mine, preparation.steering_of(other))


def test_processes_with_other_flags_are_refused(tiny, monkeypatch):
    config = tiny()
    identity = json.loads(config.to_json_best_effort())
    steering = preparation.steering_of(config)
    known = json.dumps([identity, steering | {"--stop_after": None}]).encode()
    monkeypatch.setattr(processes, "bytes_from", lambda source, data: known)
    monkeypatch.setattr(processes, "all_bytes", lambda data: [b"", data])
    with pytest.raises(ValueError, match=r"--stop_after=None, not 200\)"):
        preparation._check_same_config(identity, steering | {"--stop_after": 200})


def test_other_weights_are_not_called_another_config(tiny, monkeypatch):
    """What differs is a file; all processes may have the same flags."""
    config = tiny()
    identity = json.loads(config.to_json_best_effort())
    known = json.dumps([identity, preparation.steering_of(config)]).encode()
    monkeypatch.setattr(processes, "bytes_from", lambda source, data: known)
    monkeypatch.setattr(processes, "all_bytes", lambda data: [b"", data])
    monkeypatch.setattr(processes, "gathered", lambda x: np.stack([x, x + 1]))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    corpus = types.SimpleNamespace(checksum=1)
    monkeypatch.setattr(preparation.data, "load_corpus", lambda *_, **__: corpus)
    monkeypatch.setattr(preparation.pretrained, "check_tokens", lambda *_: None)
    monkeypatch.setattr(preparation, "_check_same_text", lambda checksum: None)
    corpus.tokenizer = types.SimpleNamespace(end_of_text=0)
    other = identity | {"base_checkpoint": {"half_round": 3}}
    with pytest.raises(ValueError, match="is not the same model for all processes"):
        preparation._corpus(config, Path("work"), other, ())


def test_processes_with_other_text_are_refused(monkeypatch):
    gathered = lambda x: np.uint32([7, 7, 9, 7])  # noqa: E731
    monkeypatch.setattr(processes, "gathered", gathered)
    with pytest.raises(ValueError, match="process 2 has other text than process 0"):
        preparation._check_same_text(7)


def test_a_damaged_config_file_is_one_line(tiny, tmp_path):
    (tmp_path / "config.json").write_text('{"steps":')
    with pytest.raises(ValueError, match=r"config\.json is damaged"):
        preparation.prepare(tiny(), tmp_path, jax.devices()[:2])


def test_a_start_that_is_made_again_is_compiled_once(tiny, tmp_path):
    """`method=auto` makes it in each of its trials."""
    e = preparation.prepare(tiny(), tmp_path, jax.devices()[:2])
    first = prepared.initial(e)
    with compilations() as names:
        again = prepared.initial(e)
    assert not names
    chex.assert_trees_all_equal(first, again)
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True)
    assert not any(x is y for x, y in pairs)  # the step takes both for its own


def test_rounds_that_do_not_divide_the_steps(tiny, tmp_path):
    config = tiny(method="diloco", method_options={"local_steps": 4})
    with pytest.raises(ValueError, match="steps is 6, no multiple of the 4 inner"):
        preparation.prepare(config, tmp_path, jax.devices()[:2])


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (0, "init_from='a'"),
        (1, "base='b'"),
        (2, "base='b'"),
        (3, r"lora\.init_from='c'"),
    ],
)
def test_processes_with_other_weights_are_refused(monkeypatch, number, message):
    identity = {"init_from": "a", "base": "b", "lora": {"init_from": "c"}}
    other = np.arange(4, dtype=np.uint32) == number
    monkeypatch.setattr(
        preparation.processes, "gathered", lambda x: np.stack([x, x + other])
    )
    with pytest.raises(ValueError, match=f"{message} is not the same .* same files"):
        preparation._check_same_weights(identity)
    monkeypatch.setattr(preparation.processes, "gathered", lambda x: np.stack([x, x]))
    preparation._check_same_weights(identity)
