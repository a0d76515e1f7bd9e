"""Whether transformers computes of exported folders what is computed here.

    python benchmarks/hub.py make DIR      # here
    python benchmarks/hub.py check DIR     # with torch and transformers instead

`make` saves a small random run of each family in float32 (Llama with the rope scaling
of Llama 3.1, from a folder that it starts from), exports it with acco_jax.export's own
function, and records tokens and logits. `check` needs nothing of acco_jax; it reads
each folder with AutoModelForCausalLM and AutoTokenizer and prints

    logits     the largest difference between logits of 2 rows of 48 tokens
    scale      the standard deviation of ours
    tokens     how many of the texts have the same tokens in both
    texts      how many have the same text again, decoded by transformers
"""

import json
import pathlib
import sys

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
TEXTS = (
    "You accumulate\n\n  gradients while you communicate .",
    "l'été: 温かい, \x00\t\U0001f600 don't",
    "  def f(x):\n    return x  # 3.14",
)
SMALL = {"model.width": 32, "model.layers": 4, "model.heads": 4}
# name -> fields of the run
RUNS = {
    "gpt-neo": {"data.tokenizer": "bpe", "data.vocab_size": 300, "model.window": 16},
    "gpt2": {"model.family": "gpt2", "lora.rank": 4},
    "llama": {"data.tokenizer": "init_from"},
    "qwen3": {"model.family": "qwen3", "model.kv_heads": 2, "lora.rank": 4},
}


def make(folder):
    """Saves, exports and records a run of each family."""
    texts = folder / "texts"
    texts.mkdir(parents=True)
    for i in range(8):
        text = " ".join(TEXTS[i % 3 :]).replace("\x00", "")  # which no text has
        (texts / f"{i}.txt").write_text(text * 80)
    for name, fields in RUNS.items():
        common = {"data.name": "text_folder", "data.path": str(texts), "length": 64}
        common |= {"model.dtype": "float32", "model.param_dtype": "float32"}
        common["data.data_dir"] = str(folder / "data")
        if name == "llama":
            begin_llama(folder / "begin")
            common["init_from"] = str(folder / "begin")
        make_run(folder / name, (SMALL if name != "llama" else {}) | common | fields)


def begin_llama(folder):
    """Writes a folder of a Llama with rope scaling, whose tokens are bytes."""
    from acco_jax import data
    from acco_jax.models import huggingface, transformer
    from acco_jax.run.weights import folders

    parts = transformer.FAMILIES["llama"] | {"width": 32, "layers": 4, "heads": 4}
    config = transformer.Config(
        **parts, kv_heads=2, head_width=16, tied=False, vocab_size=272, max_length=64,
        rope_scaling=transformer.Llama3Scaling(4.0, original_length=32),
    )  # fmt: skip
    draw = np.random.default_rng(0).normal
    shapes = transformer.shapes_of(config)
    params = map_leaves(lambda x: draw(scale=0.2, size=x.shape).astype("f"), shapes)
    folder.mkdir()
    said = huggingface.config_json(config)
    (folder / "config.json").write_text(json.dumps(said))
    folders.write_weights(folder, huggingface.to_state(config, params))
    data.ByteTokenizer().export(folder, config.max_length, {})


def make_run(folder, fields):
    """Saves a run with random numbers, exports it, and records what it computes."""
    import jax
    import jax.numpy as jnp

    from acco_jax.models import transformer
    from acco_jax.run import load_run, loop, preparation
    from acco_jax.run.config import fields as configs
    from acco_jax.run.trained import exporting

    config = configs.default_config()
    config.update_from_flattened_dict(fields)
    experiment = preparation.prepare(config, folder / "run")
    key = jax.random.key(1)

    def noisy(x):
        floating = x.ndim and jnp.issubdtype(x.dtype, jnp.floating)
        return x + 0.1 * jax.random.normal(key, x.shape, x.dtype) if floating else x

    arrays = jax.tree.map(noisy, loop.initial(experiment))
    with experiment.checkpoints as checkpoints:
        axes = dict(experiment.mesh.shape)
        checkpoints.save(1, arrays, {"identity": experiment.identity, "axes": axes})
    exporting.export(folder / "run", folder / "out", limit=100_000)
    run = load_run(folder / "run")
    tokens = np.random.default_rng(2).integers(0, 256, (2, 48)).astype(np.int32)
    logits = transformer.apply(run.architecture, run.params, tokens)
    ids = [run.tokenizer.encode(text).tolist() for text in TEXTS]
    (folder / "ids.json").write_text(json.dumps(ids))
    np.savez(folder / "expected.npz", tokens=tokens, logits=np.asarray(logits))


def map_leaves(fn, tree):
    if isinstance(tree, dict):
        return {name: map_leaves(fn, value) for name, value in tree.items()}
    return fn(tree)


def check(folder):
    """Prints how far transformers is from what was recorded."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print("| family | class | logits | scale | tokens | texts |")
    print("|---|---|---|---|---|---|")
    for name in RUNS:
        out, expected = folder / name / "out", np.load(folder / name / "expected.npz")
        model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
        with torch.no_grad():
            logits = model(torch.tensor(expected["tokens"].astype(np.int64))).logits
        difference = abs(logits.numpy() - expected["logits"]).max()
        tokenizer = AutoTokenizer.from_pretrained(out)
        ids = json.loads((folder / name / "ids.json").read_text())
        same = sum(
            tokenizer(text, add_special_tokens=False).input_ids == own
            for text, own in zip(TEXTS, ids, strict=True)
        )
        again = sum(
            tokenizer.decode(own) == text for text, own in zip(TEXTS, ids, strict=True)
        )
        assert tokenizer.eos_token_id == model.config.eos_token_id
        print(
            f"| {name} | {type(model).__name__} | {difference:.1e} | "
            f"{expected['logits'].std():.2f} | {same} of {len(TEXTS)} | "
            f"{again} of {len(TEXTS)} |"
        )


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    {"make": make, "check": check}[sys.argv[1]](pathlib.Path(sys.argv[2]))
