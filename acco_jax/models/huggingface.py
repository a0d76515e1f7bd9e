"""Hugging Face's formats: a transformer's config.json and state dict, read and written.

    config = config_of(json.load(file), dtype="bfloat16")
    params = from_state(config, get)  # get: a weight's name -> a NumPy array

Nothing here needs torch or transformers: callers read and write the files, and pass
NumPy arrays by name, one at a time. `transformer.shapes_of` gives the leaves, and
`leaf` makes one of them, or a part, for callers that place each before the next.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from acco_jax.core.leaves import path_names
from acco_jax.models.rope import RopeScaling
from acco_jax.models.sizes import FAMILIES, Config
from acco_jax.models.transformer import Params, shapes_of


class Weight(Protocol):
    """A NumPy array, or a reader of the part of an array that it is sliced to."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, index: tuple[slice, ...], /) -> np.ndarray: ...


Get = Callable[[str], Weight]  # raises KeyError for a name that is not there

# family -> model_type, and the class that has its output embedding
_MODELS = {
    "gpt-neo": ("gpt_neo", "GPTNeoForCausalLM"),
    "gpt2": ("gpt2", "GPT2LMHeadModel"),
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
# The fields that tell the families apart.
_PARTS = ("norm", "positions", "mlp", "biases", "qk_norm", "scale")

# Our field -> the field of config.json.
_ALL = {
    "vocab_size": "vocab_size",
    "init_std": "initializer_range",
    "tied": "tie_word_embeddings",
}
_GPT_NEO_FIELDS = _ALL | {
    "max_length": "max_position_embeddings",
    "width": "hidden_size",
    "layers": "num_layers",
    "heads": "num_heads",
    "mlp_width": "intermediate_size",
    "eps": "layer_norm_epsilon",
    "window": "window_size",
}
_GPT2_FIELDS = _ALL | {
    "max_length": "n_positions",
    "width": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
    "mlp_width": "n_inner",
    "eps": "layer_norm_epsilon",
}
_ROTARY_FIELDS = _ALL | {
    "max_length": "max_position_embeddings",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_width": "head_dim",
    "mlp_width": "intermediate_size",
    "eps": "rms_norm_eps",
}
_FIELDS = {
    "gpt-neo": _GPT_NEO_FIELDS,
    "gpt2": _GPT2_FIELDS,
    "llama": _ROTARY_FIELDS,
    "qwen3": _ROTARY_FIELDS,
}
# Our field -> what transformers takes where config.json leaves it out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt-neo": {"mlp_width": None, "eps": 1e-5, "window": 256, "tied": True},
    "gpt2": {"mlp_width": None, "eps": 1e-5, "tied": True},
    "llama": {"kv_heads": None, "head_width": None, "eps": 1e-6, "tied": False},
    "qwen3": {"kv_heads": None, "head_width": 128, "eps": 1e-6, "tied": False},
}
# Fields that change what is computed, with the one value that is computed here.
_FIXED: dict[str, dict[str, Any]] = {
    "gpt-neo": {"activation_function": "gelu_new"},
    "gpt2": {
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    "llama": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    "qwen3": {
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
    },
}
# RopeScaling's field -> that of rope_scaling
_SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_length": "original_max_position_embeddings",
}

# Our module -> its name in a state dict, where that differs.
_GPT_MODULES = {
    name: f"transformer.{name}" for name in ("wte", "wpe", "h", "ln_f")
}  # fmt: skip
_ROTARY_MODULES = {
    "wte": "model.embed_tokens",
    "h": "model.layers",
    "ln_f": "model.norm",
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
    "attn": "self_attn",
    "out_proj": "o_proj",
}
_BUFFERS = re.compile(
    r"(.*\.)?(attn\.(attention\.)?(masked_)?bias|rotary_emb\.inv_freq)"
)
HEAD = "lm_head.weight"  # of all families
_QKV = ("q_proj", "k_proj", "v_proj")  # side by side in GPT-2's c_attn
_MODULES = {
    "gpt-neo": _GPT_MODULES | {"attn": "attn.attention"},
    "gpt2": _GPT_MODULES | dict.fromkeys(_QKV, "c_attn") | {"out_proj": "c_proj"},
    "llama": _ROTARY_MODULES,
    "qwen3": _ROTARY_MODULES,
}


def config_of(config_json: Mapping[str, Any], **overrides: Any) -> Config:
    """Return the configuration that a config.json describes.

    Dropout is left out: the model is the one that is evaluated.

    Args:
      config_json: its content, of model_type gpt_neo, gpt2, llama or qwen3, as
        transformers 4 or 5 writes it.
      **overrides: fields of `Config`, such as dtype, that replace the file's.

    Raises:
      ValueError: it lacks a field, or describes what `Config` cannot.
    """
    kinds = {kind: family for family, (kind, _) in _MODELS.items()}
    family = kinds.get(config_json.get("model_type", ""))
    if family is None:
        raise _refused("model_type", config_json.get("model_type"), ", ".join(kinds))
    for name, value in {**_FIXED[family], "quantization_config": None}.items():
        if config_json.get(name, value) != value:
            raise _refused(name, config_json[name], value)
    fields = {**FAMILIES[family], **_numbers(config_json, family)}
    if family == "gpt-neo":
        fields["pattern"] = _pattern(config_json)
    elif set(config_json.get("layer_types") or ()) - {"full_attention"}:
        raise _refused("layer_types", config_json["layer_types"], "full_attention")
    if FAMILIES[family]["positions"] == "rope":
        fields |= _rope(config_json)
    return Config(**(fields | overrides))


def _numbers(config_json: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Return the fields of `_FIELDS`, with transformers' defaults."""
    defaults = {"init_std": 0.02, **_DEFAULTS[family]}
    fields = {}
    for field, name in _FIELDS[family].items():
        value = config_json.get(name, defaults.get(field))
        absent = value is None and field in defaults and defaults[field] is None
        if not absent and not isinstance(value, int | float):
            raise ValueError(
                f"config.json has {name}={value!r}: it must be a number, or true or "
                "false"
            )
        if field == "eps" and not value > 0:
            raise ValueError(f"config.json has {name}={value!r}: it must be above 0")
        fields[field] = value
    return fields


def _refused(name: str, value: Any, known: Any) -> ValueError:
    return ValueError(
        f"config.json has {name}={value!r}, which is not implemented here: use a model "
        f"with {known}"
    )


def _pattern(config_json: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the shortest sequence of kinds that repeats over a GPT-Neo's layers."""
    types = config_json.get("attention_types") or ()
    kinds = [kind for part, count in types for kind in list(part) * count]
    kinds = kinds or list(config_json.get("attention_layers") or ())
    if not kinds or len(kinds) != config_json["num_layers"]:
        raise ValueError(
            f"config.json has num_layers={config_json['num_layers']}, but "
            f"{len(kinds)} kinds of attention: mend attention_types"
        )
    lengths = (n for n in range(1, len(kinds) + 1) if len(kinds) % n == 0)
    length = next(n for n in lengths if kinds == kinds[:n] * (len(kinds) // n))
    return tuple(kinds[:length])


def _rope(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """Return rope_theta and rope_scaling, which transformers 5 has in one field."""
    given = {"rope_theta": config_json.get("rope_theta", 10000.0)}
    for name in ("rope_scaling", "rope_parameters"):
        given |= _of_all_layers(name, config_json.get(name) or {})
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise _refused("rope_type", kind, "default or llama3")
    part = given.get("partial_rotary_factor", config_json.get("partial_rotary_factor"))
    if part not in (None, 1):
        raise _refused("partial_rotary_factor", part, 1)
    theta, scaling = given["rope_theta"], None
    if type(theta) not in (int, float) or not theta > 0:
        raise ValueError(f"config.json has rope_theta={theta!r}: give a number above 0")
    if kind == "llama3":
        if missing := [name for name in _SCALING.values() if name not in given]:
            raise ValueError(
                f"config.json has rope_type='llama3', but no {missing[0]}: add it"
            )
        scaling = RopeScaling(**{ours: given[name] for ours, name in _SCALING.items()})
    return {"rope_theta": theta, "rope_scaling": scaling}


def _of_all_layers(name: str, said: Any) -> Mapping[str, Any]:
    """Return the RoPE fields, also where they are given for a type of layers."""
    kinds = (type(said), *map(type, said.values())) if isinstance(said, dict) else ()
    if kinds and dict not in kinds[1:]:
        return said
    # every layer is of this type: others are refused before
    if set(kinds) == {dict} and "full_attention" in said:
        return said["full_attention"]
    raise _refused(name, said, "one for all layers, or for full_attention")


def config_json(config: Config) -> dict[str, Any]:
    """Return the content of a configuration's config.json, for AutoModelForCausalLM.

    It names no tokens: bos_token_id and eos_token_id are None, for the caller to set.

    Raises:
      ValueError: no family of transformers' has these parts.
    """
    family = _family(config)
    kind, architecture = _MODELS[family]
    resolved = {
        "kv_heads": config.key_heads,
        "head_width": config.head_size,
        "mlp_width": config.hidden,
    }
    said: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": kind,
        **{n: resolved.get(f, getattr(config, f)) for f, n in _FIELDS[family].items()},
        **_FIXED[family],
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": jnp.dtype(config.param_dtype).name,
    }
    if family == "gpt-neo":
        repetitions = config.layers // len(config.pattern)
        said["attention_types"] = [[list(config.pattern), repetitions]]
    if config.positions == "rope":
        said["rope_theta"], said["rope_scaling"] = config.rope_theta, None
        if (scaling := config.rope_scaling) is not None:
            values = {name: getattr(scaling, f) for f, name in _SCALING.items()}
            said["rope_scaling"] = {"rope_type": "llama3", **values}
    return said


@functools.lru_cache
def _family(config: Config) -> str:
    """Return the family of a configuration; raise if transformers has none."""
    parts = {part: getattr(config, part) for part in _PARTS}
    known = {name: {p: fields[p] for p in _PARTS} for name, fields in FAMILIES.items()}
    family = next((name for name in known if known[name] == parts), None)
    if family is None:
        raise ValueError(
            f"no family of Hugging Face's has {parts}: use the parts of one of "
            f"{', '.join(FAMILIES)}"
        )
    plain = config.heads, config.width // config.heads
    given = config.key_heads, config.head_size
    if "kv_heads" not in _FIELDS[family] and given != plain:
        raise ValueError(
            f"kv_heads={config.kv_heads} and head_width={config.head_width} are not of "
            f"Hugging Face's {family}: leave both out"
        )
    if family != "gpt-neo" and "local" in config.pattern:
        raise ValueError(
            f"pattern={config.pattern!r} is not of Hugging Face's {family}: use "
            "('global',)"
        )
    return family


_shapes = functools.lru_cache(shapes_of)  # which traces the whole model


@functools.lru_cache
def _leaves(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    return _by_path(_shapes(config))


def _by_path(params: Params) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {"/".join(path_names(path)): x for path, x in leaves}


def from_state(config: Config, get: Get) -> Params:
    """Convert a state dict to parameters: NumPy arrays in the tree of `init_params`.

    Args:
      config: of the model that the state dict is of.
      get: the name of a weight -> a NumPy array, or KeyError; each is asked for at
        least once. Names may lack the prefix of the model without its head.

    Raises:
      ValueError: a weight is missing, or has a shape that the configuration does not.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: leaf(config, "/".join(path_names(path)), get), _shapes(config)
    )


def leaf(
    config: Config, path: str, get: Get, index: tuple[slice, ...] = ()
) -> np.ndarray:
    """Return one leaf of the parameters, in `param_dtype`, of a state dict.

    Args:
      config: of the model that the state dict is of.
      path: of the leaf, such as 'h/0_global/attn/q_proj/kernel'.
      get: as for `from_state`; it is called only for the leaf's own weights, and the
        weights of one layer are copied before the next layer's are requested.
      index: the part of the leaf, contiguous in each dimension; only this part of
        `get`'s result is read. (): all.

    Raises:
      ValueError: as `from_state`, or there is no such leaf.
    """
    leaves = _leaves(config)
    if path not in leaves:
        raise ValueError(
            f"there is no parameter {path}: use a path such as {next(iter(leaves))}"
        )
    shape, dtype = leaves[path].shape, leaves[path].dtype
    index = (*index, *[slice(None)] * (len(shape) - len(index)))
    part = tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, shape, strict=True))
    first, *modules = path.split("/")
    if first != "h":
        found = _Stored(config, path.split("/"), shape).read(get, part)
        return found.astype(dtype, copy=False)
    value = np.empty([s.stop - s.start for s in part], dtype)
    layers = range(config.blocks.index(modules[0]), config.layers, len(config.blocks))
    for i, layer in enumerate(layers[part[0]]):
        keys = [first, str(layer), *modules[1:]]
        value[i] = _Stored(config, keys, shape[1:]).read(get, part[1:])
    return value


class _Stored:
    """The place of one of our arrays in the state dict, and its form there."""

    def __init__(self, config: Config, keys: list[str], shape: tuple[int, ...]) -> None:
        family, (*modules, last) = _family(config), keys
        names = [_MODULES[family].get(module, module) for module in modules]
        self.name = ".".join((*names, "bias" if last == "bias" else "weight"))
        self.prefix = _MODULES[family]["wte"].partition(".")[0] + "."
        # Linear of torch has (out, in), GPT-2's Conv1D has (in, out) as we have
        self.transposed = last == "kernel" and family != "gpt2"
        self.shape = shape[::-1] if self.transposed else shape
        self.begin = 0  # along the last dimension
        if family == "gpt2" and modules[-1] in _QKV:
            self.begin = _QKV.index(modules[-1]) * shape[-1]
            self.shape = (*shape[:-1], len(_QKV) * shape[-1])

    def read(self, get: Get, part: tuple[slice, ...]) -> np.ndarray:
        """Return a part of the array in our form; raise as `from_state`."""
        value = None
        for name in (self.name, self.name.removeprefix(self.prefix)):
            with contextlib.suppress(KeyError):
                value = get(name)
                break
        if value is None:
            raise ValueError(
                f"{self.name} is not in the state dict: match the configuration to it"
            )
        if value.shape != self.shape:
            raise ValueError(
                f"{name} has shape {value.shape} in the state dict, not {self.shape}: "
                "match the configuration to it"
            )
        *rows, last = part[::-1] if self.transposed else part
        last = slice(self.begin + last.start, self.begin + last.stop)
        found = value[(*rows, last)]
        return found.T if self.transposed else found


def unread(config: Config, names: Iterable[str]) -> list[str]:
    """Return the names in a state dict that `from_state` does not read.

    It leaves out attention masks and frequencies, which earlier versions of
    transformers saved and which follow from the configuration.
    """
    read = set()
    for path, x in _leaves(config).items():
        first, *modules = path.split("/")
        if first != "h":
            read.add(_Stored(config, [first, *modules], x.shape).name)
            continue
        begin = config.blocks.index(modules[0])
        for layer in range(begin, config.layers, len(config.blocks)):
            keys = [first, str(layer), *modules[1:]]
            read.add(_Stored(config, keys, x.shape[1:]).name)
    prefix = _MODULES[_family(config)]["wte"].partition(".")[0] + "."
    read |= {name.removeprefix(prefix) for name in read}
    return [n for n in names if n not in read and not _BUFFERS.fullmatch(n)]


def to_state(config: Config, params: Params) -> Iterator[tuple[str, np.ndarray]]:
    """Yield a state dict's names and arrays, layer by layer: inverts `from_state`.

    Args:
      config: of the model.
      params: in the tree of `init_params`; JAX's or NumPy's arrays.

    Yields:
      The name of a weight and its array, in the dtype that it has in `params`. A tied
      output embedding is left out.

    Raises:
      ValueError: `params` are not of this configuration.
    """
    leaves, shapes = _by_path(params), _leaves(config)
    if differing := [
        p for p in shapes | leaves if _shape(leaves, p) != _shape(shapes, p)
    ]:
        raise ValueError(
            f"{differing[0]} has shape {_shape(leaves, differing[0])}, not "
            f"{_shape(shapes, differing[0])}: give the parameters of this configuration"
        )
    for path, x in leaves.items():
        if not path.startswith("h/"):
            yield from _written(config, {path: x})
    for layer in range(config.layers):
        i, position = divmod(layer, len(config.blocks))
        begin = f"h/{config.blocks[position]}/"
        parts = {p.removeprefix(begin): p for p in leaves if p.startswith(begin)}
        yield from _written(
            config, {f"h/{layer}/{rest}": leaves[p][i] for rest, p in parts.items()}
        )


def _shape(leaves: dict[str, Any], path: str) -> tuple[int, ...] | None:
    return leaves[path].shape if path in leaves else None


def _written(
    config: Config, arrays: dict[str, Any]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield arrays of one layer in the form of the state dict."""
    named: dict[str, list[tuple[int, np.ndarray]]] = {}
    for path, x in arrays.items():
        stored, value = _Stored(config, path.split("/"), x.shape), np.asarray(x)
        value = value.T if stored.transposed else value
        named.setdefault(stored.name, []).append((stored.begin, value))
    for name, parts in named.items():
        parts.sort(key=lambda part: part[0])
        whole = np.concatenate([value for _, value in parts], axis=-1)
        yield name, np.ascontiguousarray(whole)
