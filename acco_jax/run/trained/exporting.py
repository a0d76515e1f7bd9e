"""Export of a run's parameters as a Hugging Face folder."""

import contextlib
import dataclasses
import json
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from acco_jax.command.files import read_object
from acco_jax.models import huggingface, peft
from acco_jax.run.build import meshes
from acco_jax.run.trained.trained_runs import Saved, TrainedRun, load_run
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
    *,
    adapters: bool = False,
) -> str:
    """Write a run's committed parameters, tokenizer and configs.

    Args:
      workdir: of the run.
      out: the folder; it exists only whole.
      dtype: of the weights, one of DTYPES; None: that of the run's parameters.
      half_round: of the checkpoint; None: the newest.
      limit: bytes of one file of weights.
      adapters: whether to write only the adapters, in PEFT's format. The model that
        they adapt is not read.

    Returns:
      A line that describes what was written.

    Raises:
      ValueError: if there is no such run, it has no adapters, Hugging Face lacks its
        architecture, or `out` is not empty.
      OSError: if the folder cannot be written.
    """
    if dtype not in (None, *DTYPES):
        raise ValueError(f"--dtype is {dtype!r}: choose one of {', '.join(DTYPES)}.")
    _check_empty(out)
    if adapters:
        return _export_adapters(Saved(workdir, half_round), out, dtype)
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
        said = _with_tokenizer(run, folder, architecture.max_length)
        ids = {name: said[name] for name in said if name in IDS}
        _write(folder / folders.CONFIG, described | ids)
        _write(folder / folders.GENERATION, said)
        state = huggingface.to_state(run.architecture, run.params)
        folders.write_weights(folder, _cast(state, architecture.param_dtype), limit)
        files = len(list(folder.glob("*.safetensors")))
    return (
        f"{out} has {run.model.parameters():,} parameters of half-round "
        f"{run.half_round} in {jnp.dtype(architecture.param_dtype).name}, {files} "
        f"file{'s' if files > 1 else ''} of weights"
    )


def _export_adapters(run: Saved, out: Path, dtype: str | None) -> str:
    """Write a run's adapters and tokenizer; return and raise as `export`."""
    devices = jax.devices()
    found, base = run.trained(meshes.data_mesh(devices, 1, {"fsdp": len(devices)}))
    if base is None or run.architecture is None:
        raise ValueError(
            f"{run.workdir} has no adapters of a transformer: export it without "
            "--adapters."
        )
    scale, adapted = run.config.lora.scale, run.config.init_from
    described = peft.described(run.architecture, found, scale, adapted)
    cast = jnp.dtype(dtype or run.architecture.param_dtype)
    with _whole(out) as folder:
        _with_tokenizer(run, folder, run.architecture.max_length)
        _write(folder / folders.ADAPTER_CONFIG, described)
        state = dict(_cast(peft.to_state(run.architecture, found), cast))
        folders.save_arrays(folder / folders.ADAPTERS, state)
    return (
        f"{out} has adapters of {sum(x.size for x in state.values()):,} parameters of "
        f"half-round {run.half_round} in {cast.name}, in PEFT's format"
    )


def _with_tokenizer(
    run: TrainedRun | Saved, folder: Path, max_length: int
) -> dict[str, Any]:
    """Write a run's tokenizer; return generation_config.json's content."""
    said = _generation(run.workdir, run.tokenizer.end_of_text)
    special = {n: said[f"{n}_id"] for n in SPECIAL if f"{n}_id" in said}
    named = run.tokenizer.export(folder, max_length, special)
    return said | {f"{n}_id": named[n] for n in SPECIAL if n in named}


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


def _cast(
    state: Iterator[tuple[str, np.ndarray]], dtype: Any
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield a state dict in the requested dtype, an array at a time.

    Raises:
      ValueError: if a weight is not finite, or larger than float16 can hold.
    """
    for name, x in state:
        with np.errstate(over="ignore"):  # raised below
            cast = x.astype(jnp.dtype(dtype))
        if not np.isfinite(cast).all() and not np.isfinite(x).all():
            raise ValueError(
                f"{name} has a value that is not finite: export an earlier checkpoint."
            )
        if cast.dtype == np.float16 and not np.isfinite(cast).all():
            raise ValueError(
                f"{name} has a value beyond float16's 65504: give --dtype=bfloat16."
            )
        yield name, cast


def _check_empty(out: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"--out is {out}, which is there already: name a new folder.")
    if out.is_symlink() or out.is_mount():  # no folder can be renamed to it
        kind = "a link" if out.is_symlink() else "a mounted file system"
        raise ValueError(f"--out is {out}, {kind}: name a new folder in it.")


@contextlib.contextmanager
def _whole(out: Path) -> Iterator[Path]:
    """Yield a folder beside `out` to write into; rename it to `out` at the end."""
    partial = out.with_name(f".{out.name}.{secrets.token_hex(8)}.partial")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial.mkdir()
    try:
        yield partial
        partial.rename(out)  # also onto an empty folder
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
