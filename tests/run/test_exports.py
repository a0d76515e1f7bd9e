"""A run as a Hugging Face folder; benchmarks/hub.py has transformers read some."""

import json
import os
import subprocess
import sys
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
import tokenizers

from acco_jax import data
from acco_jax.command import exits
from acco_jax.models import huggingface
from acco_jax.run import load_run
from acco_jax.run.trained import exporting, language
from acco_jax.run.weights import folders, pretrained

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ("You accumulate\n\n  gradients", "l'été: 温かい, \x00\U0001f600", "")


def read(out, dtype):
    """The parameters in an exported folder, and its config."""
    folder = folders.Folder(out)
    config = pretrained.model_config(out, folder.config_json, param_dtype=dtype)
    return huggingface.from_state(config, folder.weight), config


def check_tokens(out, tokenizer):
    """The folder's tokenizer.json makes the same tokens of texts, and texts of them."""
    exported = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert exported.encode(text, add_special_tokens=False).ids == ids.tolist()
        assert exported.decode(ids.tolist()) == tokenizer.decode(ids) == text
    said = json.loads((out / "tokenizer_config.json").read_text())
    assert exported.token_to_id(said["eos_token"]) == tokenizer.end_of_text
    return said


def check_generation(out, generation, tokens):
    """The three files name the same special tokens."""
    said = json.loads((out / "generation_config.json").read_text())
    assert said == generation
    described = json.loads((out / "config.json").read_text())
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        assert described.get(name) == said.get(name)
    named = json.loads((out / "tokenizer_config.json").read_text())
    exported = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    for name in ("bos_token", "pad_token"):
        token = named.get(name)
        number = None if token is None else exported.token_to_id(token)
        assert number == tokens.get(name) == said.get(f"{name}_id")
    ends = said["eos_token_id"]
    assert exported.token_to_id(named["eos_token"]) in (
        ends if isinstance(ends, list) else [ends]
    )


ADAPTED = {"lora.rank": 2, "data.tokenizer": "bpe", "data.vocab_size": 300,
           "model.param_dtype": "bfloat16"}  # fmt: skip


@pytest.fixture(scope="module")
def adapted(saved, tmp_path_factory):
    """The workdir of adapters of a small Llama with a BPE."""
    workdir = tmp_path_factory.mktemp("adapted")
    saved(workdir, 2, **ADAPTED)
    return workdir


@pytest.mark.slow
def test_merged_adapters_in_several_files(saved, tmp_path):
    adapted, out = tmp_path / "run", tmp_path / "new" / "out"
    saved(adapted, 2, **ADAPTED, **{"model.family": "gpt-neo", "model.layers": 2})
    line = exporting.export(adapted, out, limit=5000)
    run, (params, config) = load_run(adapted), read(out, "bfloat16")
    chex.assert_trees_all_equal(params, jax.device_get(run.params))
    assert config.pattern == ("global", "local") and config.vocab_size == 300
    files = len(list(out.glob("*.safetensors")))
    assert files > 3 and (out / folders.INDEX).exists()
    assert f"half-round 9 in bfloat16, {files} files" in line
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    check_tokens(out, run.tokenizer)
    said = json.loads((out / "config.json").read_text())
    ends = {"eos_token_id": 299, "bos_token_id": 299}
    check_generation(out, ends, {"bos_token": 299})
    assert said["torch_dtype"] == "bfloat16"


@pytest.mark.slow
def test_bytes_in_another_dtype_from_which_a_run_starts(saved, tiny, tmp_path):
    workdir, out = tmp_path / "run", tmp_path / "out"
    _, theta = saved(workdir, 1, **{"model.family": "llama", "model.kv_heads": 1})
    out.mkdir()  # an empty one is no obstacle
    exporting.export(workdir, out, "float16")
    params, _ = read(out, "float32")
    chex.assert_trees_all_close(params, theta, rtol=1e-3, atol=1e-7)
    assert (out / folders.WEIGHTS).exists()
    said = check_tokens(out, data.ByteTokenizer())
    # a run that starts there keeps what is said of the tokenizer, and exports it again
    said |= {"chat_template": "{{ messages }}", "auto_map": {"AutoTokenizer": "x.py"}}
    (out / "tokenizer_config.json").write_text(json.dumps(said))
    described = json.loads((out / "config.json").read_text())
    described |= {"eos_token_id": [1, 2, 256], "bos_token_id": 5, "temperature": 0.5}
    (out / "config.json").write_text(json.dumps(described))
    generation = {"eos_token_id": [2, 3], "bos_token_id": 0, "pad_token_id": 2,
                  "do_sample": True, "top_p": 0.9, "stop": {"a": [1]}}  # fmt: skip
    (out / "generation_config.json").write_text(json.dumps(generation))
    changes = {"init_from": str(out), "data.tokenizer": "init_from"}
    saved(tmp_path / "tuned", 1, **changes)
    os.rename(out, tmp_path / "elsewhere")  # needed no more
    exporting.export(tmp_path / "tuned", tmp_path / "again")
    run = load_run(tmp_path / "tuned")
    again = check_tokens(tmp_path / "again", run.tokenizer)
    assert again["chat_template"] == "{{ messages }}" and "auto_map" not in again
    generation |= {"eos_token_id": [2, 3, 1, 256], "temperature": 0.5}
    check_generation(tmp_path / "again", generation, {"bos_token": 0, "pad_token": 2})
    assert language.from_run(tmp_path / "tuned").ends == (2, 3, 1, 256)
    chex.assert_trees_all_equal(
        read(tmp_path / "again", "float32")[0], jax.device_get(run.params)
    )


@pytest.mark.slow
def test_a_folder_is_whole_or_not_there(adapted, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr(folders, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        exporting.export(adapted, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_exported_is_refused(adapted, saved, tmp_path):
    def refused(match, *arguments):
        with pytest.raises(ValueError, match=match) as error:
            exporting.export(*arguments)
        assert "\n" not in str(error.value)

    refused("--out is .*, which is there already", adapted, adapted)
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    refused("--out is .*, a link: name a new folder in it", adapted, tmp_path / "link")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting.Path, "is_mount", lambda path: path.name == "empty")
        refused("a mounted file system", adapted, tmp_path / "empty")
    refused("--dtype is 'int8': choose one of", adapted, tmp_path / "out", "int8")
    refused(r"config\.json cannot be read", tmp_path / "no", tmp_path / "out")
    factory = "tests.run.own_models:linen_model"
    saved(tmp_path / "own", 1, **{"model.factory": factory})
    refused("Hugging Face knows nothing", tmp_path / "own", tmp_path / "out")
    run = load_run(adapted)
    run.params["ln_f"]["scale"] += np.float32(1e6)
    folders_before = sorted(tmp_path.iterdir())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "load_run", lambda *_, **__: run)
        refused("has a value beyond float16", adapted, tmp_path / "out", "float16")
        run.params["ln_f"]["scale"] *= np.float32(np.nan)
        refused("not finite: export an earlier", adapted, tmp_path / "out", "float16")
    assert sorted(tmp_path.iterdir()) == folders_before


def test_the_command(adapted, tmp_path):
    """What it refuses is in tests/test_commands.py."""
    flags = f"--workdir={adapted}", f"--out={tmp_path / 'out'}", "--dtype=float32"
    done = subprocess.run(
        [sys.executable, "-m", "acco_jax.export", *flags],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == exits.FINISHED, done
    assert "half-round 9 in float32, 1 file of" in done.stdout
