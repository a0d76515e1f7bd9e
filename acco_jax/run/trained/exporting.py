"""Export of a run's parameters as a Hugging Face folder."""

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from acco_jax.command.files import read_object
from acco_jax.models import huggingface, transformer
from acco_jax.run.trained.trained_runs import TrainedRun, load_run
from acco_jax.run.weights import folders

SPECIAL = ("bos_token", "pad_token")
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
DTYPES = ("float32", "bfloat16", "float16")


def export(
    workdir: Path,
    out: Path,
    dtype: str | None = None,
    half_round: int | None = None,
    limit: int = folders.SHARD_BYTES,
) -> str:
    """Write a run's committed parameters, tokenizer and configs.

    Args:
      workdir: of the run.
      out: the folder; it exists only whole.
      dtype: of the weights, one of DTYPES; None: that of the run's parameters.
      half_round: of the checkpoint; None: the newest.
      limit: bytes of one file of weights.

    Returns:
      A line that describes what was written.

    Raises:
      ValueError: if there is no such run, Hugging Face lacks its architecture,
        or `out` is not empty.
      OSError: if the folder cannot be written.
    """
    if dtype not in (None, *DTYPES):
        raise ValueError(f"--dtype is {dtype!r}: choose one of {', '.join(DTYPES)}.")
    _check_empty(out)
    run = load_run(workdir, half_round=half_round)
    if run.architecture is None:
        raise ValueError(
            f"{workdir} has a model of model.factory={run.config.model.factory!r}, of "
            "which Hugging Face knows nothing: save its load_run(...).params yourself."
        )
    architecture = dataclasses.replace(
        run.architecture, param_dtype=dtype or run.architecture.param_dtype
    )
    described = huggingface.config_json(architecture)  # raises now if there is none
    with _whole(out) as folder:
        said = _generation(workdir, run.tokenizer.end_of_text)
        special = {n: said[f"{n}_id"] for n in SPECIAL if f"{n}_id" in said}
        named = run.tokenizer.export(folder, architecture.max_length, special)
        said |= {f"{n}_id": named[n] for n in SPECIAL if n in named}
        ids = {name: said[name] for name in said if name in IDS}
        _write(folder / folders.CONFIG, described | ids)
        _write(folder / folders.GENERATION, said)
        folders.write_weights(folder, _weights(run, architecture), limit)
        files = len(list(folder.glob("*.safetensors")))
    return (
        f"{out} has {run.model.parameters():,} parameters of half-round "
        f"{run.half_round} in {jnp.dtype(architecture.param_dtype).name}, {files} "
        f"file{'s' if files > 1 else ''} of weights"
    )


def _generation(workdir: Path, end_of_text: int) -> dict[str, Any]:
    """Return generation_config.json's content: the base model's, with the run's end.

    A model that was trained from scratch has seen the end of text before every text.
    """
    described = read_object(workdir / "config.json")
    if described.get("init_from") is None and not described.get("generation"):
        return {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
    said = dict(described.get("generation") or {})
    ends = said.get("eos_token_id")
    ends = list(dict.fromkeys([*(ends if isinstance(ends, list) else ()), end_of_text]))
    return said | {"eos_token_id": ends if len(ends) > 1 else ends[0]}


def _weights(
    run: TrainedRun, architecture: transformer.Config
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the state dict in the requested dtype, an array at a time.

    Raises:
      ValueError: if a weight is larger than float16 can hold.
    """
    if run.architecture is None:
        return
    for name, x in huggingface.to_state(run.architecture, run.params):
        with np.errstate(over="ignore"):  # raised below
            cast = x.astype(jnp.dtype(architecture.param_dtype))
        if cast.dtype == np.float16 and not np.isfinite(cast).all():
            raise ValueError(
                f"{name} has a value beyond float16's 65504: give --dtype=bfloat16."
            )
        yield name, cast


def _check_empty(out: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"--out is {out}, which is there already: name a new folder.")


@contextlib.contextmanager
def _whole(out: Path) -> Iterator[Path]:
    """Yield a folder beside `out` to write into; rename it to `out` at the end."""
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial.mkdir()
    try:
        yield partial
        partial.rename(out)  # also onto an empty folder
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
