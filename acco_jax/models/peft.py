"""PEFT's format of adapters: adapter_config.json and state dict, read and written.

    config_json = described(config, adapters, scale, base="meta-llama/Llama-3.2-1B")
    adapters = from_state(config, config_json, names, get)

PEFT computes W + lora_alpha / r * B @ A of a torch kernel W (out, in), with A (r, in)
and B (out, r). So A is the transposed a of `lora`, and B the transposed b. Nothing here
needs torch or peft: callers read and write the files.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from acco_jax.models import huggingface
from acco_jax.models.huggingface import Get, Place
from acco_jax.models.lora import Adapters
from acco_jax.models.sizes import Config

_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
_NAME = re.compile(r"(?:base_model\.model\.)?(.*)\.lora_[AB]\.weight")
# Fields that change no result here, whatever they are; `target_modules` and layers
# follow from the state dict.
_FREE = {
    "base_model_name_or_path", "exclude_modules", "fan_in_fan_out", "inference_mode",
    "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core",
    "peft_version", "qalora_group_size", "revision", "target_modules", "task_type",
    "auto_mapping",
}  # fmt: skip
_READ = {"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"}
# Fields with the values that are computed here; all others have to be unset.
_FIXED = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # others, such as 'pissa', change the base model, too
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
}


def described(
    config: Config, adapters: Adapters, scale: float, base: str | None
) -> dict[str, Any]:
    """Return the content of adapter_config.json.

    Args:
      config: of the model that is adapted.
      adapters: arrays or ShapeDtypeStructs.
      scale: of the adapters, as for `lora.merge`.
      base: the adapted model's name, or folder.

    Raises:
      ValueError: if Hugging Face has no such model, or PEFT no such adapter.
    """
    ranks = {
        module: sum(adapters[path]["a"].shape[-1] for path, _ in parts)
        for module, parts in _modules(config, adapters).items()
    }
    (common, _), *_ = Counter(ranks.values()).most_common(1)
    rank_pattern = {
        ending: rank
        for rank in sorted({*ranks.values()} - {common})
        for ending in _endings({m for m in ranks if ranks[m] == rank}, ranks)
    }
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": common,
        "lora_alpha": _alpha(scale, common),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": huggingface.is_fan_in_fan_out(config),
        "target_modules": _endings(ranks, _known(config)),
        "rank_pattern": rank_pattern,
        "alpha_pattern": {name: _alpha(scale, r) for name, r in rank_pattern.items()},
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "modules_to_save": None,
    }


def _alpha(scale: float, rank: int) -> float:
    alpha = scale * rank
    return int(alpha) if alpha == int(alpha) else alpha


def _endings(chosen: Collection[str], known: Iterable[str]) -> list[str]:
    """Return the shortest ends of dotted names that only the chosen of `known` have."""
    others = [f".{name}" for name in known if name not in chosen]
    found = set()
    for name in chosen:
        parts = name.split(".")
        ends = (".".join(parts[-n:]) for n in range(1, len(parts) + 1))
        found.add(next(e for e in ends if not any(o.endswith(f".{e}") for o in others)))
    return sorted(found)


def _modules(
    config: Config, paths: Iterable[str]
) -> dict[str, list[tuple[str, Place]]]:
    """Return each adapted module of transformers, with our kernels that it holds.

    Raises:
      ValueError: if a path is of embeddings, a router or experts.
    """
    modules: dict[str, list[tuple[str, Place]]] = {}
    for path in paths:
        for place in huggingface.places(config, path):
            if not place.linear:
                raise ValueError(
                    f"there are adapters of {path}: PEFT's format has only those of "
                    "linear layers' kernels here"
                )
            modules.setdefault(place.module, []).append((path, place))
    return modules


def _known(config: Config) -> set[str]:
    """Return the modules of transformers that hold matrices."""
    paths = huggingface.matrices(config)
    return {place.module for p in paths for place in huggingface.places(config, p)}


def to_state(config: Config, adapters: Adapters) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the names and arrays of adapter_model.safetensors, in the dtype of a and b.

    GPT-2 has queries, keys and values in one module. Its adapter has the sum of their
    ranks, and zeros in B where the rows are of another kernel.

    Args:
      config: of the model that is adapted.
      adapters: JAX's or NumPy's arrays.

    Raises:
      ValueError: as `described`.
    """
    for module, parts in _modules(config, adapters).items():
        rows, columns = [], []
        for path, place in parts:
            a, b = (np.asarray(adapters[path][n][place.at]) for n in "ab")
            own = np.zeros((place.outputs, b.shape[0]), b.dtype)
            own[place.begin : place.begin + b.shape[1]] = b.T
            rows.append(a.T)
            columns.append(own)
        yield _PREFIX + module + _A, np.ascontiguousarray(np.concatenate(rows))
        yield _PREFIX + module + _B, np.ascontiguousarray(np.hstack(columns))


def check(config_json: Mapping[str, Any]) -> None:
    """Raise a ValueError for adapters of another form than W + scale * B @ A.

    Raises:
      ValueError: with the field of adapter_config.json.
    """
    for name, values in _FIXED.items():
        if (said := config_json.get(name, values[0])) not in values:
            raise _refused(name, said, " or ".join(map(repr, values)))
    for name, said in config_json.items():
        if said and name not in {*_FREE, *_READ, *_FIXED}:
            raise _refused(name, said, "none")
    for name in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config_json.get(name) or {}, dict):
            raise _refused(name, config_json[name], "an object")
    _number("r", config_json.get("r", 8))
    _number("lora_alpha", config_json.get("lora_alpha", 8))


def _refused(name: str, value: object, known: str) -> ValueError:
    return ValueError(
        f"adapter_config.json has {name}={value!r:.200}, which is not implemented "
        f"here: use adapters with {name} {known}"
    )


def _number(name: str, value: Any) -> Any:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(
            f"adapter_config.json has {name}={value!r:.200}: give a number above 0"
        )
    return value


def scale_of(config_json: Mapping[str, Any]) -> float:
    """Return the scale of adapters with the rank and alpha of most modules."""
    return _scale(config_json, config_json.get("r", 8), None)


def _scale(config_json: Mapping[str, Any], rank: int, module: str | None) -> float:
    alpha = _matching(config_json, "alpha_pattern", module, "lora_alpha")
    return alpha / (math.sqrt(rank) if config_json.get("use_rslora") else rank)


def _matching(
    config_json: Mapping[str, Any], patterns: str, module: str | None, default: str
) -> Any:
    """Return the number of a module: the first of its pattern, or the common one."""
    for pattern, value in (config_json.get(patterns) or {}).items():
        try:
            if module and re.match(rf"(.*\.)?({pattern})$", module):
                return _number(patterns, value)
        except re.error as error:
            raise ValueError(
                f"adapter_config.json has {pattern!r:.200} in {patterns}, which is no "
                f"regular expression: {error}"
            ) from error
    return _number(default, config_json.get(default, 8))


def from_state(
    config: Config, config_json: Mapping[str, Any], names: Iterable[str], get: Get
) -> Adapters:
    """Convert a state dict of PEFT's to adapters with the scale `scale_of`.

    Stacked layers share a rank, the largest of theirs; the others' a and b end with
    zeros, which no gradient changes. Where a module has another scale, b is multiplied
    by the ratio. An adapter of GPT-2's fused module becomes one of queries, of keys and
    of values, with its rank.

    Args:
      config: of the model that is adapted.
      config_json: the content of adapter_config.json.
      names: of all arrays of the state dict.
      get: the name of an array -> a NumPy array.

    Returns:
      Adapters as `lora.init` returns them, NumPy arrays in `param_dtype`.

    Raises:
      ValueError: if `check` raises it, an array is unknown or missing, or has a shape
        that does not fit the others or the rank.
    """
    check(config_json)
    names = set(names)
    found: dict[str, str] = {}  # module -> its beginning in the state dict
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(
                f"the adapters have {name}, which is not a lora_A or lora_B of a "
                "linear layer: use adapters of linear layers"
            )
        found[match[1]] = name.removesuffix(_A).removesuffix(_B)
    if unknown := sorted(found.keys() - _known(config)):
        raise ValueError(
            f"the adapters have {unknown[0]}, which the model does not have: give the "
            "model that they were trained on"
        )
    if not found:
        raise ValueError("there are no adapters in it: restore the file")
    adapters: dict[str, Any] = {}
    common = scale_of(config_json)
    dtype = jnp.dtype(config.param_dtype)
    for path, shape in huggingface.matrices(config).items():
        parts = {}
        for place in huggingface.places(config, path):
            if place.module not in found:
                continue
            _modules(config, [path])  # raises if it is not a linear layer
            rank, a, b = _pair(config_json, place, found[place.module], get)
            b = b[:, place.begin : place.begin + place.columns]
            b = b * (_scale(config_json, rank, place.module) / common)
            parts[place.at] = a, b
        if parts:
            adapters[path] = _stacked(shape, parts, dtype)
    return adapters


def _pair(
    config_json: Mapping[str, Any], place: Place, start: str, get: Get
) -> tuple[int, np.ndarray, np.ndarray]:
    """Return rank, a and b of a module, in float32 or wider.

    Raises:
      ValueError: if one is missing, or has another shape.
    """
    arrays = []
    for name in (start + _A, start + _B):
        try:
            stored = get(name)
        except KeyError:
            raise ValueError(f"the adapters lack {name}: restore them") from None
        whole = stored[(slice(None),) * len(stored.shape)]
        arrays.append(whole.astype(np.promote_types(whole.dtype, np.float32)).T)
    rank = _matching(config_json, "rank_pattern", place.module, "r")
    a, b = arrays
    inputs, outputs = place.inputs, place.outputs
    if a.shape != (inputs, rank) or b.shape != (rank, outputs):
        raise ValueError(
            f"{start} has a lora_A of shape {a.shape[::-1]} and a lora_B of "
            f"{b.shape[::-1]}, not {(rank, inputs)} and {(outputs, rank)}: give the "
            "model that they were trained on, with their adapter_config.json"
        )
    return rank, a, b


def _stacked(
    shape: tuple[int, ...],
    parts: Mapping[tuple[int, ...], tuple[np.ndarray, np.ndarray]],
    dtype: Any,
) -> dict[str, np.ndarray]:
    """Return a and b of all layers of a kernel, zeros where a layer has none."""
    *lead, inputs, outputs = shape
    rank = max(a.shape[1] for a, _ in parts.values())
    whole_a = np.zeros((*lead, inputs, rank), dtype)
    whole_b = np.zeros((*lead, rank, outputs), dtype)
    for at, (a, b) in parts.items():
        whole_a[at][:, : a.shape[1]] = a
        whole_b[at][: b.shape[0]] = b
    return {"a": whole_a, "b": whole_b}
