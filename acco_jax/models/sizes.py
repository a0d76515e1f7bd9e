"""Configurations of a transformer: sizes and parts, families, published sizes."""

import dataclasses
import math
import numbers
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from acco_jax.models.attention import CUDNN, IMPLEMENTATIONS
from acco_jax.models.rope import Llama3Scaling, RopeScaling

# What the backward pass computes again: norms and activations from their inputs;
# all except matmuls and attention; blocks from their inputs.
REMAT = ("none", "elementwise", "block")
PROJECTIONS = {
    "attention": ("q_proj", "k_proj", "v_proj", "out_proj"),
    "gelu": ("c_fc", "c_proj"),
    "swiglu": ("gate_proj", "up_proj", "down_proj"),
    "geglu": ("gate_proj", "up_proj", "down_proj"),
    "moe": ("gate_proj", "up_proj", "down_proj"),  # of each expert
}
# Fields of how something is computed, which no config.json describes.
HOW = {"dtype", "param_dtype", "remat", "attention", "scan_layers", "router_loss"}
NORMS = ("layer", "rms", "zero_centered_rms")


@dataclasses.dataclass(frozen=True)
class Config:
    """A decoder-only transformer's configuration, whose sizes and parts fit together.

    Defaults are GPT-Neo's; `FAMILIES` has the parts of other families.
    """

    vocab_size: int
    max_length: int  # positions in the learned table, or that RoPE is meant for
    width: int
    layers: int
    heads: int  # of queries
    kv_heads: int | None = None  # of keys and values; None: heads
    head_width: int | None = None  # None: width / heads
    mlp_width: int | None = None  # None: 4 * width with GELU, 3 * width if gated
    # LayerNorm; "rms": RMSNorm; "zero_centered_rms": RMSNorm that scales by 1 + weight
    norm: str = "layer"
    # of the inputs of attention and MLP; "post": of their results; "both"
    norm_placement: str = "pre"
    eps: float = 1e-5  # of the norms
    positions: str = "learned"  # a table, or "rope": rotary
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None  # of local layers, unscaled; None: as others
    # its tanh approximation; gated: "swiglu", "geglu"; "moe": SwiGLU experts
    mlp: str = "gelu"
    experts: int | None = None  # of each layer
    experts_per_token: int | None = None
    normalized_routing: bool = False  # whether weights of a token's experts sum to 1
    router_loss: float = 0.0  # factor of the load-balancing loss that training adds
    biases: tuple[str, ...] = (
        "out_proj",
        "c_fc",
        "c_proj",
    )  # projections that have one
    # of queries and keys: of each "head", or of the whole "projection"; None: none
    qk_norm: str | None = None
    scale: float | None = 1.0  # of the scores; None: 1 / sqrt(head_width)
    score_softcap: float | None = None  # c: scores become c tanh(score / c)
    logit_softcap: float | None = None  # the same of the logits
    scale_embedding: bool = False  # whether embeddings are multiplied by sqrt(width)
    tied: bool = True  # whether the output embedding is the input's
    window: int = 256  # keys that a query of a local layer sees, itself included
    pattern: tuple[str, ...] = ("global", "local")  # repeated over the layers
    dtype: DTypeLike = jnp.bfloat16  # of the computation
    param_dtype: DTypeLike = jnp.float32
    remat: str | None = None  # of REMAT; None: 'none' on CPU, else 'elementwise'
    attention: str | None = None  # of attention.IMPLEMENTATIONS; None: what is best
    # Whether the layers are a loop, else each has its own code. None: a loop, but own
    # code on a GPU if there are at most 24, and not in a group of devices.
    scan_layers: bool | None = None
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type not in (int, int | None) or value is None:
                continue
            if not isinstance(value, numbers.Integral):
                raise ValueError(f"{field.name}={value!r} must be a whole number")
            if value < 1:
                raise ValueError(f"{field.name}={value} must be at least 1")
        self._check_names()
        self._check_heads()
        self._check_experts()
        if self.layers % len(self.pattern):
            raise ValueError(
                f"layers={self.layers} is not a multiple of {len(self.pattern)}, the "
                f"kinds of attention that take turns ({', '.join(self.pattern)}): "
                "choose a multiple"
            )
        above_0 = (
            "eps", "rope_theta", "local_rope_theta", "scale", "score_softcap",
            "logit_softcap",
        )  # fmt: skip
        for name in above_0:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}={value} must be more than 0")

    def _check_names(self) -> None:
        choices: dict[str, tuple[str | None, ...]] = {
            "norm": NORMS,
            "norm_placement": ("pre", "post", "both"),
            "positions": ("learned", "rope"),
            "mlp": ("gelu", "swiglu", "geglu", "moe"),
            "qk_norm": (None, "head", "projection"),
            "remat": (None, *REMAT),
            "attention": (None, *IMPLEMENTATIONS),
        }
        for name, names in choices.items():
            if (value := getattr(self, name)) not in names:
                raise ValueError(
                    f"{name}={value!r} must be one of {', '.join(map(str, names))}"
                )
        projections = PROJECTIONS["attention"]
        if self.mlp != "moe":
            projections += PROJECTIONS[self.mlp]
        for name, known, least in (
            ("pattern", ("global", "local"), 1),
            ("biases", projections, 0),
        ):
            value = getattr(self, name)
            fits = isinstance(value, tuple) and len(value) >= least
            if not fits or set(value) - set(known):
                raise ValueError(
                    f"{name}={value!r} must be a tuple of {', '.join(known)}"
                )

    def _check_heads(self) -> None:
        if self.head_width is None and self.width % self.heads:
            raise ValueError(
                f"width={self.width} is not divisible by heads={self.heads}: "
                "choose heads that divide the width"
            )
        if self.heads % self.key_heads:
            raise ValueError(
                f"heads={self.heads} is not divisible by kv_heads={self.key_heads}: "
                "choose kv_heads that divide the heads"
            )
        if self.positions == "rope" and self.head_size % 2:
            raise ValueError(
                f"width={self.width} with heads={self.heads} makes heads of "
                f"{self.head_size}, which is odd, but RoPE turns pairs of dimensions: "
                "choose heads of an even width"
            )
        for name in ("rope_scaling", "local_rope_theta"):
            value = getattr(self, name)
            if self.positions != "rope" and value is not None:
                raise ValueError(
                    f"{name}={value} needs positions='rope', not {self.positions!r}: "
                    "leave it out"
                )
        if self.score_softcap is not None and self.attention == CUDNN:
            raise ValueError(
                f"score_softcap={self.score_softcap} is not in attention='cudnn': "
                "leave attention unset"
            )

    def _check_experts(self) -> None:
        experts, per_token = self.experts, self.experts_per_token
        if self.mlp != "moe":
            if experts or per_token or self.router_loss:
                raise ValueError(
                    f"experts={self.experts}, experts_per_token="
                    f"{self.experts_per_token} and router_loss={self.router_loss} need "
                    f"mlp='moe', not {self.mlp!r}: leave them out"
                )
        elif not experts or not per_token or per_token > experts:
            raise ValueError(
                f"mlp='moe' has experts={self.experts} and experts_per_token="
                f"{self.experts_per_token}: give both, at most `experts` per token"
            )
        if not 0 <= self.router_loss < math.inf:
            raise ValueError(f"router_loss={self.router_loss} must be at least 0")

    @property
    def head_size(self) -> int:
        """The width of a head."""
        return self.head_width or self.width // self.heads

    @property
    def key_heads(self) -> int:
        """The number of heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def hidden(self) -> int:
        """The width of the MLP."""
        return self.mlp_width or (4 if self.mlp == "gelu" else 3) * self.width

    @property
    def blocks(self) -> tuple[str, ...]:
        """The blocks' names in one repetition of the pattern: '0_global', '1_local'."""
        return tuple(f"{i}_{kind}" for i, kind in enumerate(self.pattern))

    @property
    def computed(self) -> dict[str, Any]:
        """The fields that decide which logits follow from parameters, all resolved."""
        left_out = {*HOW, "init_std", "max_length"}
        left_out |= set() if "local" in self.pattern else {"window"}
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields["kv_heads"], fields["head_width"] = self.key_heads, self.head_size
        fields["mlp_width"] = self.hidden
        fields["scale"] = self.scale or self.head_size**-0.5
        return {name: x for name, x in fields.items() if name not in left_out}


_GPT: dict[str, Any] = {"norm": "layer", "positions": "learned", "mlp": "gelu"}
_ROTARY: dict[str, Any] = {
    "norm": "rms", "positions": "rope", "mlp": "swiglu", "biases": (), "scale": None,
    "pattern": ("global",),
}  # fmt: skip
_GEMMA: dict[str, Any] = {
    **_ROTARY, "norm": "zero_centered_rms", "norm_placement": "both", "mlp": "geglu",
    "scale_embedding": True, "eps": 1e-6,
}  # fmt: skip
# The parts that make a family, whatever the sizes.
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt-neo": {
        **_GPT,
        "biases": ("out_proj", *PROJECTIONS["gelu"]),
        "scale": 1.0,
        "pattern": ("global", "local"),
    },
    "gpt2": {
        **_GPT,
        "biases": PROJECTIONS["attention"] + PROJECTIONS["gelu"],
        "scale": None,
        "pattern": ("global",),
    },
    "llama": {**_ROTARY, "eps": 1e-5, "rope_theta": 5e5},
    "mistral": {**_ROTARY, "eps": 1e-5, "pattern": ("local",)},
    "qwen2": {
        **_ROTARY,
        "biases": ("q_proj", "k_proj", "v_proj"),
        "eps": 1e-6,
        "rope_theta": 1e6,
    },
    "qwen3": {**_ROTARY, "qk_norm": "head", "eps": 1e-6, "rope_theta": 1e6},
    "qwen3-moe": {
        **_ROTARY,
        "mlp": "moe",
        "experts": 128,
        "experts_per_token": 8,
        "normalized_routing": True,
        "qk_norm": "head",
        "eps": 1e-6,
        "rope_theta": 1e6,
        "tied": False,
    },
    "olmo2": {
        **_ROTARY,
        "norm_placement": "post",
        "qk_norm": "projection",
        "eps": 1e-6,
        "rope_theta": 5e5,
        "tied": False,
    },
    "gemma2": {
        **_GEMMA,
        "score_softcap": 50.0,
        "logit_softcap": 30.0,
        "pattern": ("local", "global"),
    },
    "gemma3": {
        **_GEMMA,
        "qk_norm": "head",
        "rope_theta": 1e6,
        "local_rope_theta": 1e4,
        "pattern": (*["local"] * 5, "global"),
    },
}


def _sizes(family: str, **fields: Any) -> dict[str, Any]:
    return {**FAMILIES[family], **fields}


# Of the config.json of EleutherAI/gpt-neo-*, openai-community/gpt2, meta-llama/Meta-
# Llama-3-8B and Llama-3.2-1B, mistralai/Mistral-7B-v0.1, Qwen/Qwen2.5-0.5B and Qwen3-*,
# allenai/OLMo-2-0425-1B, google/gemma-2-2b and gemma-3-270m.
SIZES: dict[str, dict[str, Any]] = {
    "gpt-neo-125m": _sizes(
        "gpt-neo", vocab_size=50257, max_length=2048, width=768, layers=12, heads=12,
        window=256,
    ),
    "gpt-neo-2.7b": _sizes(
        "gpt-neo", vocab_size=50257, max_length=2048, width=2560, layers=32, heads=20,
        window=256,
    ),
    "gpt2": _sizes(
        "gpt2", vocab_size=50257, max_length=1024, width=768, layers=12, heads=12
    ),
    "llama-3-8b": _sizes(
        "llama", vocab_size=128256, max_length=8192, width=4096, layers=32, heads=32,
        kv_heads=8, mlp_width=14336, tied=False,
    ),
    "llama-3.2-1b": _sizes(
        "llama", vocab_size=128256, max_length=131072, width=2048, layers=16, heads=32,
        kv_heads=8, head_width=64, mlp_width=8192, rope_scaling=Llama3Scaling(32.0),
    ),
    "mistral-7b": _sizes(
        "mistral", vocab_size=32000, max_length=32768, width=4096, layers=32, heads=32,
        kv_heads=8, mlp_width=14336, window=4096, tied=False,
    ),
    "qwen2.5-0.5b": _sizes(
        "qwen2", vocab_size=151936, max_length=32768, width=896, layers=24, heads=14,
        kv_heads=2, mlp_width=4864,
    ),
    "qwen3-0.6b": _sizes(
        "qwen3", vocab_size=151936, max_length=40960, width=1024, layers=28, heads=16,
        kv_heads=8, head_width=128, mlp_width=3072,
    ),
    "qwen3-8b": _sizes(
        "qwen3", vocab_size=151936, max_length=40960, width=4096, layers=36, heads=32,
        kv_heads=8, head_width=128, mlp_width=12288, tied=False,
    ),
    "qwen3-30b-a3b": _sizes(
        "qwen3-moe", vocab_size=151936, max_length=40960, width=2048, layers=48,
        heads=32, kv_heads=4, head_width=128, mlp_width=768,
    ),
    "olmo-2-1b": _sizes(
        "olmo2", vocab_size=100352, max_length=4096, width=2048, layers=16, heads=16,
        mlp_width=8192,
    ),
    "gemma-2-2b": _sizes(
        "gemma2", vocab_size=256000, max_length=8192, width=2304, layers=26, heads=8,
        kv_heads=4, head_width=256, mlp_width=9216, window=4096,
    ),
    "gemma-3-270m": _sizes(
        "gemma3", vocab_size=262144, max_length=32768, width=640, layers=18, heads=4,
        kv_heads=1, head_width=256, mlp_width=2048, window=512,
    ),
}  # fmt: skip


def size(name: str, **overrides: Any) -> Config:
    """Return a published configuration, with fields overridden."""
    if name not in SIZES:
        raise ValueError(f"size {name!r} is unknown: use one of {', '.join(SIZES)}")
    return Config(**{**SIZES[name], **overrides})
