"""Configurations of a transformer: sizes and parts, four families, published sizes."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from acco_jax.models.attention import IMPLEMENTATIONS
from acco_jax.models.rope import RopeScaling

# What the backward pass computes again: norms, and GELU or SwiGLU, from their inputs;
# all except matmuls and attention; blocks from their inputs.
REMAT = ("none", "elementwise", "block")
PROJECTIONS = {
    "attention": ("q_proj", "k_proj", "v_proj", "out_proj"),
    "gelu": ("c_fc", "c_proj"),
    "swiglu": ("gate_proj", "up_proj", "down_proj"),
}


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
    mlp_width: int | None = None  # None: 4 * width with GELU, 3 * width with SwiGLU
    norm: str = "layer"  # LayerNorm, or "rms": RMSNorm
    eps: float = 1e-5  # of the norms
    positions: str = "learned"  # a table, or "rope": rotary
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    mlp: str = "gelu"  # its tanh approximation, or "swiglu"
    biases: tuple[str, ...] = (
        "out_proj",
        "c_fc",
        "c_proj",
    )  # projections that have one
    qk_norm: bool = False  # whether each head of queries and keys is normalized
    scale: float | None = 1.0  # of the scores; None: 1 / sqrt(head_width)
    tied: bool = True  # whether the output embedding is the input's
    window: int = 256  # keys that a query of a local layer sees, itself included
    pattern: tuple[str, ...] = ("global", "local")  # repeated over the layers
    dtype: DTypeLike = jnp.bfloat16  # of the computation
    param_dtype: DTypeLike = jnp.float32
    remat: str | None = None  # of REMAT; None: 'none' on CPU, else 'elementwise'
    attention: str | None = None  # of attention.IMPLEMENTATIONS; None: what is best
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            whole = field.type in (int, int | None)
            if whole and type(value) is int and value < 1:
                raise ValueError(f"{field.name}={value} must be at least 1")
        self._check_names()
        self._check_heads()
        if self.layers % len(self.pattern):
            raise ValueError(
                f"layers={self.layers} is not a multiple of {len(self.pattern)}, the "
                f"kinds of attention that take turns ({', '.join(self.pattern)}): "
                "choose a multiple"
            )
        for name in ("eps", "rope_theta"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be more than 0")

    def _check_names(self) -> None:
        choices: dict[str, tuple[str | None, ...]] = {
            "norm": ("layer", "rms"),
            "positions": ("learned", "rope"),
            "mlp": ("gelu", "swiglu"),
            "remat": (None, *REMAT),
            "attention": (None, *IMPLEMENTATIONS),
        }
        for name, names in choices.items():
            if (value := getattr(self, name)) not in names:
                raise ValueError(
                    f"{name}={value!r} must be one of {', '.join(map(str, names))}"
                )
        projections = PROJECTIONS["attention"] + PROJECTIONS[self.mlp]
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
        if self.positions != "rope" and self.rope_scaling is not None:
            raise ValueError(
                f"rope_scaling={self.rope_scaling} needs positions='rope', not "
                f"{self.positions!r}: leave it out"
            )

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
        return self.mlp_width or {"gelu": 4, "swiglu": 3}[self.mlp] * self.width

    @property
    def blocks(self) -> tuple[str, ...]:
        """The blocks' names in one repetition of the pattern: '0_global', '1_local'."""
        return tuple(f"{i}_{kind}" for i, kind in enumerate(self.pattern))


_GPT: dict[str, Any] = {
    "norm": "layer", "positions": "learned", "mlp": "gelu", "qk_norm": False
}  # fmt: skip
_ROTARY: dict[str, Any] = {
    "norm": "rms", "positions": "rope", "mlp": "swiglu", "biases": (), "scale": None,
    "pattern": ("global",),
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
    "llama": {**_ROTARY, "qk_norm": False, "eps": 1e-5, "rope_theta": 5e5},
    "qwen3": {**_ROTARY, "qk_norm": True, "eps": 1e-6, "rope_theta": 1e6},
}


def _sizes(family: str, **fields: Any) -> dict[str, Any]:
    return {**FAMILIES[family], **fields}


# Of the config.json of EleutherAI/gpt-neo-*, openai-community/gpt2, meta-llama/Meta-
# Llama-3-8B and Llama-3.2-1B, Qwen/Qwen3-*.
SIZES: dict[str, dict[str, Any]] = {
    "gpt-neo-125m": _sizes(
        "gpt-neo", vocab_size=50257, max_length=2048, width=768, layers=12, heads=12
    ),
    "gpt-neo-2.7b": _sizes(
        "gpt-neo", vocab_size=50257, max_length=2048, width=2560, layers=32, heads=20
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
        kv_heads=8, head_width=64, mlp_width=8192, rope_scaling=RopeScaling(32.0),
    ),
    "qwen3-0.6b": _sizes(
        "qwen3", vocab_size=151936, max_length=40960, width=1024, layers=28, heads=16,
        kv_heads=8, head_width=128, mlp_width=3072,
    ),
    "qwen3-8b": _sizes(
        "qwen3", vocab_size=151936, max_length=40960, width=4096, layers=36, heads=32,
        kv_heads=8, head_width=128, mlp_width=12288, tied=False,
    ),
}  # fmt: skip


def size(name: str, **overrides: Any) -> Config:
    """Return a published configuration, with fields overridden."""
    if name not in SIZES:
        raise ValueError(f"size {name!r} is unknown: use one of {', '.join(SIZES)}")
    return Config(**{**SIZES[name], **overrides})
