"""A Hugging Face folder: what is read of it, written into it, and refused."""

import dataclasses
import json
import os
import struct
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

from acco_jax.models import huggingface, transformer
from acco_jax.run.weights import folders

MAPS = Path("/proc/self/maps")
SIZES = {"vocab_size": 257, "max_length": 64, "width": 16, "layers": 2, "heads": 4}


def config_of(family, **changes):
    parts = transformer.FAMILIES[family] | SIZES | {"dtype": "float32"}
    if len(parts["pattern"]) > 2:
        parts["pattern"] = parts["pattern"][-2:]
    if parts["positions"] == "rope":
        parts |= {"kv_heads": 2, "head_width": 8, "tied": False}
    if parts["mlp"] == "moe":
        parts |= {"experts": 3, "experts_per_token": 2}
    return transformer.Config(**parts | changes)


def drawn(config):
    """Parameters of a configuration, no two arrays alike."""
    draw = np.random.default_rng(0).normal
    shapes = transformer.shapes_of(config)
    return jax.tree.map(lambda x: draw(size=x.shape).astype(x.dtype), shapes)


def saved(folder, config, params, limit=folders.SHARD_BYTES):
    """A folder with these parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    said = json.dumps(huggingface.config_json(config))
    (folder / "config.json").write_text(said)
    folders.write_weights(folder, huggingface.to_state(config, params), limit)
    return folder


@pytest.mark.fast(
    "5000000000-*-gpt-neo",
    "3000-float32-llama",
    "3000-float32-gpt2",
    "5000000000-*-qwen3",
    slow=("3000-*",),
)
@pytest.mark.parametrize("family", transformer.FAMILIES)
@pytest.mark.parametrize(
    ("limit", "dtype"), [(folders.SHARD_BYTES, "bfloat16"), (3000, "float32")]
)
def test_parameters_come_back_to_the_bit(tmp_path, family, limit, dtype):
    config = config_of(family, param_dtype=dtype)
    params = jax.jit(lambda key: transformer.init_params(config, key))(
        jax.random.key(0)
    )
    folder = folders.Folder(saved(tmp_path, config, params, limit))
    files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert (len(files) > 3) == (limit == 3000)
    back = huggingface.from_state(config, folder.weight)
    chex.assert_trees_all_equal(back, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(back, params)
    if limit == 3000:
        assert all(p.stat().st_size < 20000 for p in tmp_path.glob("*.safetensors"))
        index = json.loads((tmp_path / folders.INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(
            x.nbytes for x in jax.tree.leaves(params)
        )


@pytest.mark.parametrize("family", transformer.FAMILIES)
def test_a_part_of_a_leaf_is_all_that_is_read(tmp_path, family):
    config = config_of(family)
    config = dataclasses.replace(config, layers=2 * config.layers)
    params = drawn(config)
    weight = folders.Folder(saved(tmp_path, config, params)).weight
    read = []

    class Counted:
        def __init__(self, name):
            self.inner = weight(name)
            self.shape = self.inner.shape

        def __getitem__(self, index):
            read.append(self.inner[index].size)
            return self.inner[index]

    block = next(iter(config.blocks))
    norm = "post_ln_1" if config.norm_placement == "post" else "ln_1"
    for path, index in {
        f"h/{block}/attn/k_proj/kernel": (slice(1, 2), slice(4, 8), slice(2, 6)),
        f"h/{block}/{norm}/scale": (slice(None), slice(8, 16)),
        "wte/embedding": (slice(100, 200),),
        **(
            {f"h/{block}/mlp/up_proj/kernel": (slice(1, 2), slice(1, 3), slice(2, 6))}
            if config.experts
            else {}
        ),
    }.items():
        part = huggingface.leaf(config, path, Counted, index)
        whole = params
        for key in path.split("/"):
            whole = whole[key]
        np.testing.assert_array_equal(part, whole[index])
        assert sum(read) == part.size
        read.clear()


@pytest.mark.skipif(not MAPS.exists(), reason="Linux says what is mapped")
def test_no_file_stays_mapped(tmp_path):
    config = config_of("gpt2")
    folder = folders.Folder(saved(tmp_path, config, drawn(config), 3000))
    weight = folder.weight("transformer.wte.weight")
    assert str(tmp_path) in MAPS.read_text()
    del weight
    huggingface.from_state(config, folder.weight)
    assert str(tmp_path) not in MAPS.read_text()


def header(**arrays):
    text = json.dumps(arrays).encode()
    return struct.pack("<Q", len(text)) + text


def entry(dtype, shape, *offsets):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


TWICE = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
TWICE += TWICE[1:-1] + b"}"
DAMAGED = {
    "empty": b"",
    "longer than the file": struct.pack("<Q", 2**40) + b"{}",
    "no JSON": struct.pack("<Q", 4) + b"{{{{",
    "beyond its end": header(a=entry("F32", [4], 0, 16)),
    "other than its shape": header(a=entry("F32", [4], 0, 8)) + bytes(8),
    "negative": header(a=entry("F32", [-1], 0, 4)) + bytes(4),
    "twice": struct.pack("<Q", len(TWICE)) + TWICE + bytes(4),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / folders.WEIGHTS).write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged") as error:
        folders.Folder(tmp_path).weight("a")
    assert "\n" not in str(error.value)


def test_what_is_no_weight(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    content = header(a=entry("F8_E4M3", [4], 0, 4)) + bytes(4)
    (tmp_path / folders.WEIGHTS).write_bytes(content)
    folder = folders.Folder(tmp_path)
    with pytest.raises(ValueError, match=r"has a in F8_E4M3"):
        folder.weight("a")
    with pytest.raises(KeyError):
        folder.weight("b")


@pytest.mark.parametrize(
    ("index", "match"),
    [
        ('{"weight_map": {"a": "../x.safetensors"}}', r"'\.\./x\.safetensors', which"),
        (
            '{"weight_map": {"a": "/etc/passwd"}}',
            "'/etc/passwd', which is not a file of",
        ),
        ('{"weight_map": {"a": ".."}}', r"names '?\.\.'?, which"),
        ('{"weight_map": {"a": 3}}', "names 3, which"),
        ('{"weight_map": {"a": "b.safetensors"}}', "b.safetensors, which is missing"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y"}}', "has 'a' twice"),
        ('{"weight_map": {"b": "x.safetensors"}}', "does not have b, which"),
        ('{"weight_map": []}', "has no weight_map"),
        ("[]", "holds a list"),
    ],
)
def test_a_bad_index_is_named(tmp_path, index, match):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "x.safetensors").write_bytes(
        header(a=entry("F32", [1], 0, 4)) + bytes(4)
    )
    (tmp_path / folders.INDEX).write_text(index)
    folder = folders.Folder(tmp_path)
    with pytest.raises(ValueError, match=match) as error:
        folder.weight("b")
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", lambda folder: folders.Folder(folder)),
        ("generation_config.json", lambda folder: folders.Folder(folder).generation),
        (folders.INDEX, lambda folder: folders.Folder(folder).names),
        (folders.WEIGHTS, lambda folder: folders.Folder(folder).names),
    ],
)
@pytest.mark.parametrize("kind", ["sparse", "fifo", "folder", "broken link"])
def test_what_is_no_small_file_is_never_read(tmp_path, name, read, kind):
    """A read of a sparse file takes its size in memory, that of a FIFO never ends."""
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / name
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "broken link":
        path.symlink_to("nowhere")
    else:
        path.touch()
        os.truncate(path, 3 * 10**9)
    with pytest.raises(ValueError, match=str(tmp_path)) as error:
        read(tmp_path)
    line = str(error.value)
    assert "\n" not in line
    if kind == "sparse" and name != folders.WEIGHTS:
        assert f"{name} cannot be read: it has 3,000,000,000 bytes, more than" in line


def test_folders_that_lack_a_file(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        folders.Folder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    folder = folders.Folder(tmp_path)
    with pytest.raises(ValueError, match="has neither model"):
        folder.weight("a")
    with pytest.raises(ValueError, match=r"no tokenizer\.json or tokenizer\.model"):
        _ = folder.tokenizer
