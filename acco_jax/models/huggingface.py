"""Hugging Face's formats: a transformer's config.json and state dict, read and written.

    config = config_of(json.load(file), dtype="bfloat16")
    params = from_state(config, get)  # get: a weight's name -> a NumPy array

Nothing here needs torch or transformers: callers read and write the files, and pass
NumPy arrays by name, one at a time. `transformer.shapes_of` gives the leaves, and
`leaf` makes one of them, or a part, for callers that place each before the next.
"""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from acco_jax.core.leaves import path_names
from acco_jax.models.rope import (
    LinearScaling,
    Llama3Scaling,
    YarnScaling,
    yarn_magnitude,
)
from acco_jax.models.sizes import FAMILIES, HOW, PROJECTIONS, Config
from acco_jax.models.transformer import Params, shapes_of


class Weight(Protocol):
    """A NumPy array, or a reader of the part of an array that it is sliced to."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, index: tuple[slice, ...], /) -> np.ndarray: ...


Get = Callable[[str], Weight]  # raises KeyError for a name that is not there

_QKV = ("q_proj", "k_proj", "v_proj")  # side by side in GPT-2's c_attn
_KINDS = {"sliding_attention": "local", "full_attention": "global"}


@dataclasses.dataclass(frozen=True)
class _Family:
    """The form of a family's config.json and state dict."""

    model_type: str
    architecture: str  # the class that has its output embedding
    fields: Mapping[str, str]  # our field -> that of config.json
    # our field -> what transformers takes where config.json leaves it out
    defaults: Mapping[str, Any]
    # fields that change what is computed, with the one value that is computed here
    fixed: Mapping[str, Any]
    modules: Mapping[str, str]  # ours -> its name in a state dict, where that differs
    # the field that has the kinds of layers; None: all are of the family's only kind
    kinds: str | None = None
    nullable: tuple[str, ...] = ()  # fields of which null is not the default
    period: int = 1  # where `layer_types` is left out, the last of this many is global
    local_theta: str | None = None  # the field that has local_rope_theta

    @property
    def described(self) -> set[str]:
        """The fields of Config that config.json describes."""
        patterned = {"pattern"} if self.kinds else set()
        local = {"local_rope_theta"} if self.local_theta else set()
        return {*self.fields, "rope_theta", "rope_scaling", *patterned, *local}


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
_ALSO = {"num_experts": "num_local_experts"}  # field -> its name in transformers 5
_WINDOW = {"window": "sliding_window"}
_GEMMA_FIELDS = _ROTARY_FIELDS | _WINDOW | {"scale": "query_pre_attn_scalar"}
_SOFTCAPS = {
    "score_softcap": "attn_logit_softcapping",
    "logit_softcap": "final_logit_softcapping",
}
_ROTARY_DEFAULTS = {"kv_heads": None, "head_width": None, "eps": 1e-6, "tied": False}
_GEMMA_DEFAULTS = {
    "kv_heads": 4, "head_width": 256, "eps": 1e-6, "tied": True, "scale": 256,
    "window": 4096, "max_length": 8192,
}  # fmt: skip
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
    "router": "gate",
}
_POST_MODULES = _ROTARY_MODULES | {
    "post_ln_1": "post_attention_layernorm",
    "ln_2": "pre_feedforward_layernorm",
    "post_ln_2": "post_feedforward_layernorm",
}
_SILU = {"hidden_act": "silu", "attention_bias": False}
_NO_WINDOW = {"use_sliding_window": False}
_GEMMA_FIXED = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "use_bidirectional_attention": False,
}
_FAMILIES = {
    "gpt-neo": _Family(
        "gpt_neo", "GPTNeoForCausalLM", _GPT_NEO_FIELDS,
        {"mlp_width": None, "eps": 1e-5, "window": 256, "tied": True},
        {"activation_function": "gelu_new"},
        _GPT_MODULES | {"attn": "attn.attention"}, kinds="attention_types",
    ),
    "gpt2": _Family(
        "gpt2", "GPT2LMHeadModel", _GPT2_FIELDS,
        {"mlp_width": None, "eps": 1e-5, "tied": True},
        {
            "activation_function": "gelu_new",
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        _GPT_MODULES | dict.fromkeys(_QKV, "c_attn") | {"out_proj": "c_proj"},
    ),
    "llama": _Family(
        "llama", "LlamaForCausalLM", _ROTARY_FIELDS, _ROTARY_DEFAULTS,
        _SILU | {"mlp_bias": False}, _ROTARY_MODULES,
    ),
    "mistral": _Family(
        "mistral", "MistralForCausalLM", _ROTARY_FIELDS | _WINDOW,
        _ROTARY_DEFAULTS | {"kv_heads": 8, "window": 4096}, {"hidden_act": "silu"},
        _ROTARY_MODULES, nullable=("kv_heads", "window"),
    ),
    "qwen2": _Family(
        "qwen2", "Qwen2ForCausalLM", _ROTARY_FIELDS, _ROTARY_DEFAULTS,
        {"hidden_act": "silu"} | _NO_WINDOW, _ROTARY_MODULES,
    ),
    "qwen3": _Family(
        "qwen3", "Qwen3ForCausalLM", _ROTARY_FIELDS,
        _ROTARY_DEFAULTS | {"head_width": 128}, _SILU | _NO_WINDOW, _ROTARY_MODULES,
    ),
    "qwen3-moe": _Family(
        "qwen3_moe", "Qwen3MoeForCausalLM",
        _ROTARY_FIELDS
        | {
            "mlp_width": "moe_intermediate_size",
            "experts": "num_experts",
            "experts_per_token": "num_experts_per_tok",
            "normalized_routing": "norm_topk_prob",
        },
        _ROTARY_DEFAULTS
        | {
            "kv_heads": 4, "mlp_width": 768, "experts": 128, "experts_per_token": 8,
            "normalized_routing": False,
        },
        _SILU | _NO_WINDOW | {"decoder_sparse_step": 1, "mlp_only_layers": []},
        _ROTARY_MODULES,
    ),
    "olmo2": _Family(
        "olmo2", "Olmo2ForCausalLM", _ROTARY_FIELDS, _ROTARY_DEFAULTS | {"eps": 1e-5},
        _SILU, _POST_MODULES,
    ),
    "gemma2": _Family(
        "gemma2", "Gemma2ForCausalLM", _GEMMA_FIELDS | _SOFTCAPS,
        _GEMMA_DEFAULTS | {"score_softcap": 50.0, "logit_softcap": 30.0},
        _GEMMA_FIXED, _POST_MODULES, kinds="layer_types", period=2,
        nullable=(*_SOFTCAPS,),
    ),
    "gemma3": _Family(
        "gemma3_text", "Gemma3ForCausalLM",
        _GEMMA_FIELDS | {"logit_softcap": _SOFTCAPS["logit_softcap"]},
        _GEMMA_DEFAULTS | {"max_length": 131072, "logit_softcap": None},
        _GEMMA_FIXED | {"attn_logit_softcapping": None},
        _POST_MODULES, kinds="layer_types", period=6,
        nullable=(*_SOFTCAPS,),
        local_theta="rope_local_base_freq",
    ),
}  # fmt: skip
# The fields that tell the families apart, before all others.
_PARTS = (
    "norm", "norm_placement", "positions", "mlp", "biases", "qk_norm",
    "scale_embedding",
)  # fmt: skip
# rope_type -> its class, and our field -> that of rope_scaling
_FACTOR = {"factor": "factor"}
_ORIGINAL = "original_max_position_embeddings"
_LENGTH = {"original_length": _ORIGINAL}
_SCALINGS: dict[str, tuple[type, dict[str, str]]] = {
    "linear": (LinearScaling, _FACTOR),
    "llama3": (
        Llama3Scaling,
        _FACTOR | {n: n for n in ("low_freq_factor", "high_freq_factor")} | _LENGTH,
    ),
    "yarn": (
        YarnScaling,
        _FACTOR
        | _LENGTH
        | {n: n for n in ("beta_fast", "beta_slow", "attention_factor", "truncate")},
    ),
}
# field of Config that has one -> its default
_DEFAULTS = {
    field.name: field.default
    for field in dataclasses.fields(Config)
    if field.default is not dataclasses.MISSING
}
_BUFFERS = re.compile(
    r"(.*\.)?(attn\.(attention\.)?(masked_)?bias|rotary_emb\.inv_freq)"
)
HEAD = "lm_head.weight"  # of all families


def config_of(config_json: Mapping[str, Any], **overrides: Any) -> Config:
    """Return the configuration that a config.json describes.

    Dropout is left out: the model is the one that is evaluated.

    Args:
      config_json: its content, of a model_type that `_FAMILIES` has, as transformers 4
        or 5 writes it.
      **overrides: fields of `Config`, such as dtype, that replace the file's.

    Raises:
      ValueError: it lacks a field, or describes what `Config` cannot.
    """
    kinds = {row.model_type: family for family, row in _FAMILIES.items()}
    family = kinds.get(config_json.get("model_type", ""))
    if family is None:
        raise _refused("model_type", config_json.get("model_type"), ", ".join(kinds))
    row = _FAMILIES[family]
    fixed = {**row.fixed, "is_causal": True, "quantization_config": None}
    for name, value in fixed.items():
        if (said := config_json.get(name)) is not None and said != value:
            raise _refused(name, said, value)
    fields = {**FAMILIES[family], **_numbers(config_json, row)}
    if pattern := _pattern(config_json, row):
        fields["pattern"] = pattern
    if fields.get("window", 0) is None:
        fields |= {"window": _DEFAULTS["window"], "pattern": ("global",)}
    if fields["positions"] == "rope":
        fields |= _rope(config_json, row)
    return Config(**(fields | overrides))


def _numbers(config_json: Mapping[str, Any], row: _Family) -> dict[str, Any]:
    """Return the numbers of config.json, with transformers' defaults."""
    defaults, fields = {"init_std": 0.02, **row.defaults}, dict[str, Any]()
    for field, name in row.fields.items():
        value: Any = config_json.get(_ALSO.get(name, name), defaults.get(field))
        value = config_json.get(name, value)
        nullable = field in row.nullable or defaults.get(field, 0) is None
        if nullable and value is None:
            fields[field] = None
            continue
        if not isinstance(value, int | float):
            raise ValueError(
                f"config.json has {name}={value!r}: it must be a number, or true or "
                "false"
            )
        if field in ("eps", "scale") and not value > 0:
            raise ValueError(f"config.json has {name}={value!r}: it must be above 0")
        fields[field] = value**-0.5 if field == "scale" else value
    return fields


def _refused(name: str, value: Any, known: Any) -> ValueError:
    return ValueError(
        f"config.json has {name}={value!r}, which is not implemented here: use a model "
        f"with {known}"
    )


def _pattern(config_json: Mapping[str, Any], row: _Family) -> tuple[str, ...]:
    """Return the shortest sequence of kinds that repeats over the layers.

    It is () where the family has one kind.
    """
    if row.kinds is None:
        if set(config_json.get("layer_types") or ()) - {"full_attention"}:
            raise _refused("layer_types", config_json["layer_types"], "full_attention")
        return ()
    number = config_json[row.fields["layers"]]
    if row.kinds == "attention_types":
        types = config_json.get("attention_types") or ()
        kinds = [kind for part, count in types for kind in list(part) * count]
        kinds = kinds or list(config_json.get("attention_layers") or ())
    elif types := config_json.get("layer_types"):
        if set(types) - set(_KINDS):
            raise _refused("layer_types", types, " and ".join(_KINDS))
        kinds = [_KINDS[kind] for kind in types]
    else:
        period = config_json.get("sliding_window_pattern", row.period)
        kinds = ["local" if i % period else "global" for i in range(1, number + 1)]
    if not kinds or len(kinds) != number:
        raise ValueError(
            f"config.json has {row.fields['layers']}={number}, but {len(kinds)} kinds "
            f"of attention: mend {row.kinds}"
        )
    lengths = (n for n in range(1, len(kinds) + 1) if len(kinds) % n == 0)
    length = next(n for n in lengths if kinds == kinds[:n] * (len(kinds) // n))
    return tuple(kinds[:length])


def _rope(config_json: Mapping[str, Any], row: _Family) -> dict[str, Any]:
    """Return the fields of RoPE, which transformers 5 has in one field.

    As there, `rope_scaling` replaces `rope_parameters` (in Gemma 3 it updates them). An
    original length outside of them comes first, unless they are of a kind of layers.
    """
    theta = 1e4 if row.local_theta is None else 1e6
    given = {"rope_theta": config_json.get("rope_theta", theta)}
    local = {"rope_theta": config_json.get(row.local_theta or "", 1e4)}
    alike, length = row.local_theta is None, config_json.get(_ORIGINAL)
    names = ["rope_parameters", "rope_scaling"]
    if alike and config_json.get("rope_scaling"):
        names.remove("rope_parameters")
    for name in names:
        said = config_json.get(name) or {}
        given |= (chosen := _of_layers(name, said))
        if alike and said and chosen is said and length is not None:
            given[_ORIGINAL] = length
        if row.local_theta and isinstance(said.get("sliding_attention"), dict):
            local |= said["sliding_attention"]
    part = given.get("partial_rotary_factor", config_json.get("partial_rotary_factor"))
    if part not in (None, 1):
        raise _refused("partial_rotary_factor", part, 1)
    fields = {
        "rope_theta": _theta(given),
        "rope_scaling": _scaling(given, config_json),
    }
    if row.local_theta:
        if _scaling(local, config_json) is not None:
            raise _refused("sliding_attention", local, "rope_type default there")
        fields["local_rope_theta"] = _theta(local)
    return fields


def _theta(given: Mapping[str, Any]) -> float:
    theta = given["rope_theta"]
    if type(theta) not in (int, float) or not theta > 0:
        raise ValueError(f"config.json has rope_theta={theta!r}: give a number above 0")
    return theta


def _scaling(given: Mapping[str, Any], config_json: Mapping[str, Any]) -> Any:
    """Return the `RopeScaling` of fields of RoPE, None without one."""
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return None
    if kind not in _SCALINGS:
        raise _refused("rope_type", kind, f"default, {', '.join(_SCALINGS)}")
    made, names = _SCALINGS[kind]
    said = {ours: given[name] for ours, name in names.items() if name in given}
    if kind == "yarn":
        said = {ours: value for ours, value in said.items() if value is not None}
        said.setdefault("original_length", config_json["max_position_embeddings"])
        slopes: list[Any] = [given.get(n) for n in ("mscale", "mscale_all_dim")]
        if "attention_factor" not in said and "factor" in said and all(slopes):
            above, below = (yarn_magnitude(said["factor"], slope) for slope in slopes)
            said["attention_factor"] = above / below
    needed = names.values() if kind == "llama3" else ("factor",)
    if missing := [name for name in needed if given.get(name) is None]:
        raise ValueError(
            f"config.json has rope_type={kind!r}, but no {missing[0]}: add it"
        )
    return made(**said)


def _of_layers(name: str, said: Any) -> Mapping[str, Any]:
    """Return the RoPE fields of layers that see all of the past."""
    kinds = (type(said), *map(type, said.values())) if isinstance(said, dict) else ()
    if kinds and dict not in kinds[1:]:
        return said
    if set(kinds) == {dict} and "full_attention" in said:
        return said["full_attention"]
    raise _refused(name, said, "one for all layers, or for full_attention")


def config_json(config: Config) -> dict[str, Any]:
    """Return the content of a configuration's config.json, for AutoModelForCausalLM.

    It names no tokens: bos_token_id and eos_token_id are None, for the caller to set.

    Raises:
      ValueError: no family of transformers' has these parts.
    """
    row = _FAMILIES[_family(config)]
    resolved = {
        "kv_heads": config.key_heads,
        "head_width": config.head_size,
        "mlp_width": config.hidden,
        "scale": _inverse_square(config),
    }
    said: dict[str, Any] = {
        "architectures": [row.architecture],
        "model_type": row.model_type,
        **{n: resolved.get(f, getattr(config, f)) for f, n in row.fields.items()},
        **row.fixed,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": jnp.dtype(config.param_dtype).name,
    }
    repetitions = config.layers // len(config.pattern)
    if row.kinds == "attention_types":
        said["attention_types"] = [[list(config.pattern), repetitions]]
    elif row.kinds:
        names = {ours: name for name, ours in _KINDS.items()}
        said["layer_types"] = [names[kind] for kind in config.pattern] * repetitions
    if config.positions == "rope":
        said["rope_theta"], said["rope_scaling"] = config.rope_theta, None
        for kind, (made, names) in _SCALINGS.items():
            if isinstance(config.rope_scaling, made):
                values = {n: getattr(config.rope_scaling, f) for f, n in names.items()}
                values = {n: value for n, value in values.items() if value is not None}
                said["rope_scaling"] = {"rope_type": kind, **values}
    if row.local_theta:
        said[row.local_theta] = config.local_rope_theta
    return said


def _inverse_square(config: Config) -> int:
    """Return Gemma's query_pre_attn_scalar, the inverse square of the scale."""
    if config.scale is None:
        return config.head_size
    return round(config.scale**-2)


@functools.lru_cache
def _family(config: Config) -> str:
    """Return the family of a configuration; raise if transformers has none."""
    parts = {part: getattr(config, part) for part in _PARTS}
    misfits = {}
    for family, fields in FAMILIES.items():
        if all(value == fields.get(p, _DEFAULTS[p]) for p, value in parts.items()):
            misfits[family] = _misfit(config, family)
    if not misfits:
        raise ValueError(
            f"no family of Hugging Face's has {parts}: use the parts of one of "
            f"{', '.join(FAMILIES)}"
        )
    for family, misfit in misfits.items():
        if misfit is None:
            return family
    raise ValueError("; or ".join(filter(None, misfits.values())))


def _misfit(config: Config, family: str) -> str | None:
    """Return what config.json of a family cannot describe of a configuration."""
    row, plain = _FAMILIES[family], config.width // config.heads
    given = {name: getattr(config, name) for name in _DEFAULTS}
    given |= {"kv_heads": config.key_heads, "head_width": config.head_size}
    expected = {**_DEFAULTS, **FAMILIES[family]}
    expected |= {"kv_heads": config.heads, "head_width": plain}
    if set(given["pattern"]) == set(expected["pattern"]):
        expected["pattern"] = given["pattern"]
    described = row.described | HOW
    if "local" not in config.pattern:
        described.add("window")
    for name in sorted(given.keys() - described):
        if given[name] != expected[name]:
            return (
                f"{name}={given[name]!r} is not of Hugging Face's {family}, which has "
                f"{name}={expected[name]!r}"
            )
    if row.local_theta and config.local_rope_theta is None:
        return f"{family} of Hugging Face's needs a local_rope_theta: give a number"
    scale = config.scale
    if "scale" in row.fields and scale and _inverse_square(config) ** -0.5 != scale:
        return f"scale={scale} is not of {family}: give 1 / sqrt(a whole number)"
    return None


@functools.lru_cache
def _leaves(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    return _by_path(shapes_of(config))


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
        lambda path, _: leaf(config, "/".join(path_names(path)), get), shapes_of(config)
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
    value = np.empty([s.stop - s.start for s in part], dtype)
    for at, keys in _entries(config, path):
        lead, rest = part[: len(at)], part[len(at) :]
        if all(s.start <= i < s.stop for i, s in zip(at, lead, strict=True)):
            to = tuple(i - s.start for i, s in zip(at, lead, strict=True))
            value[to] = _Stored(config, keys, shape[len(at) :]).read(get, rest)
    return value


def _entries(config: Config, path: str) -> Iterator[tuple[tuple[int, ...], list[str]]]:
    """Yield the leading indices of a leaf's parts in the state dict, and their keys.

    A leaf of layers has a part for each layer, and for each expert of it.
    """
    first, *modules = path.split("/")
    if first != "h":
        yield (), [first, *modules]
        return
    block, *modules = modules
    layers = range(config.blocks.index(block), config.layers, len(config.blocks))
    for i, layer in enumerate(layers):
        if config.experts is None or modules[1] not in PROJECTIONS["moe"]:
            yield (i,), [first, str(layer), *modules]
            continue
        for expert in range(config.experts):
            keys = [first, str(layer), modules[0], "experts", str(expert), *modules[1:]]
            yield (i, expert), keys


class Place(NamedTuple):
    """The place of one of our matrices among the modules of transformers."""

    at: tuple[int, ...]  # its leading indices in the leaf
    module: str
    linear: bool  # whether it is the kernel of torch's Linear or of Conv1D
    inputs: int  # of the module
    outputs: int  # of the module; GPT-2's c_attn has those of three matrices
    begin: int  # of its own among these
    columns: int  # their number


def places(config: Config, path: str) -> list[Place]:
    """Return the places of a leaf's matrices, in each layer that it stacks."""
    shape, found = _leaves(config)[path].shape, []
    for at, keys in _entries(config, path):
        stored = _Stored(config, keys, shape[len(at) :])
        inputs, columns = shape[-2:]
        outputs = stored.shape[0 if stored.transposed else -1]
        linear = keys[-1] == "kernel" and keys[-2] != "router" and "experts" not in keys
        module = stored.name.removesuffix(".weight")
        place = at, module, linear, inputs, outputs, stored.begin, columns
        found.append(Place(*place))
    return found


def matrices(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all leaves of matrices, by their paths."""
    leaves = _leaves(config)
    named = {p: p.rpartition("/")[2] for p in leaves}
    return {p: leaves[p].shape for p in leaves if named[p] in ("kernel", "embedding")}


def is_fan_in_fan_out(config: Config) -> bool:
    """Return whether transformers stores matrices as (in, out), as GPT-2's Conv1D."""
    return _family(config) == "gpt2"


class _Stored:
    """The place of one of our arrays in the state dict, and its form there."""

    def __init__(self, config: Config, keys: list[str], shape: tuple[int, ...]) -> None:
        family, (*modules, last) = _family(config), keys
        theirs = _FAMILIES[family].modules
        names = [theirs.get(module, module) for module in modules]
        self.name = ".".join((*names, "bias" if last == "bias" else "weight"))
        self.prefix = theirs["wte"].partition(".")[0] + "."
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
        for at, keys in _entries(config, path):
            read.add(_Stored(config, keys, x.shape[len(at) :]).name)
    prefix = _FAMILIES[_family(config)].modules["wte"].partition(".")[0] + "."
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
    layers: dict[str, dict[str, Any]] = {}  # "": outside of layers
    for path in leaves:
        for at, keys in _entries(config, path):
            layer = keys[1] if keys[0] == "h" else ""
            layers.setdefault(layer, {})["/".join(keys)] = path, at
    for layer in sorted(layers, key=lambda layer: int(layer or -1)):
        parts = layers[layer].items()
        yield from _written(config, {k: leaves[path][at] for k, (path, at) in parts})


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
