"""GPT-Neo: a decoder-only transformer with alternating global and local attention.

The architecture is EleutherAI's GPT-Neo as implemented by Hugging Face transformers
(`models/gpt_neo/modeling_gpt_neo.py`), whose weight names the modules below keep.

Shapes are spelled in suffixes: B batch, T length, D width, N heads, H width of a head,
V vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.typing import DTypeLike

from acco_jax.layout import path_names
from acco_jax.models.base import Batch, Model

Params = dict[str, Any]
Loss = Callable[[Params, Batch, jax.Array], tuple[jax.Array, jax.Array, Params]]

REMAT_POLICIES = (
    "nothing_saveable",
    "everything_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
)
ATTENTION = (None, "xla", "cudnn")  # of jax.nn.dot_product_attention


@dataclasses.dataclass(frozen=True)
class GPTNeoConfig:
    """Describe a GPT-Neo whose sizes fit together."""

    vocab_size: int
    max_length: int  # positions in the learned table
    width: int
    layers: int
    heads: int
    mlp_width: int | None = None  # None: 4 * width
    window: int = 256  # keys that a query of a local layer sees, itself included
    pattern: tuple[str, ...] = ("global", "local")  # repeated over the layers
    dtype: DTypeLike = jnp.bfloat16  # of the computation
    param_dtype: DTypeLike = jnp.float32
    remat: bool | str = False  # True, or the name of a policy: recompute each block
    attention: str | None = None  # 'xla', 'cudnn'; None: what JAX chooses
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if type(value) is int and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.width % self.heads:
            raise ValueError(
                f"width={self.width} is not divisible by heads={self.heads}: "
                "choose heads that divide the width"
            )
        kinds = set(self.pattern) if isinstance(self.pattern, tuple) else set()
        if not kinds or kinds - {"global", "local"}:
            raise ValueError(
                f"pattern={self.pattern!r} must be a tuple of 'global' and 'local'"
            )
        if self.layers % len(self.pattern):
            raise ValueError(
                f"layers={self.layers} is not a multiple of the length of "
                f"pattern={self.pattern!r}: change either"
            )
        if not isinstance(self.remat, bool) and self.remat not in REMAT_POLICIES:
            raise ValueError(
                f"remat={self.remat!r} must be a bool or one of {REMAT_POLICIES}"
            )
        if self.attention not in ATTENTION:
            raise ValueError(f"attention={self.attention!r} must be one of {ATTENTION}")

    @property
    def positions(self) -> tuple[str, ...]:
        """Name the blocks of one repetition of the pattern: '0_global', '1_local'."""
        return tuple(f"{i}_{kind}" for i, kind in enumerate(self.pattern))


_SIZES = {
    "gpt-neo-125m": {"width": 768, "layers": 12, "heads": 12},
    "gpt-neo-2.7b": {"width": 2560, "layers": 32, "heads": 20},
}


def size(name: str, **overrides: Any) -> GPTNeoConfig:
    """Return a published configuration, with fields overridden.

    Source: the EleutherAI/gpt-neo-* model cards.
    """
    if name not in _SIZES:
        raise ValueError(f"size {name!r} is unknown: use one of {', '.join(_SIZES)}")
    published = {"vocab_size": 50257, "max_length": 2048, **_SIZES[name]}
    return GPTNeoConfig(**{**published, **overrides})


def _bind(module: Any, config: GPTNeoConfig, rngs: nnx.Rngs, **options: Any) -> Any:
    """Bind a layer to the configuration's types and the given options."""
    types = {"dtype": config.dtype, "param_dtype": config.param_dtype}
    return functools.partial(module, **{**types, **options}, rngs=rngs)


def _linear(config: GPTNeoConfig, rngs: nnx.Rngs) -> Callable[..., nnx.Linear]:
    init = nnx.initializers.normal(config.init_std)
    return _bind(nnx.Linear, config, rngs, kernel_init=init)


def _layer_norm(config: GPTNeoConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return _bind(nnx.LayerNorm, config, rngs, epsilon=1e-5)(config.width)


class Attention(nnx.Module):
    """Attend causally, to all of the past or to a window, with unscaled scores."""

    def __init__(self, config: GPTNeoConfig, kind: str, rngs: nnx.Rngs) -> None:
        linear = _linear(config, rngs)
        self.heads = config.heads
        self.implementation: Any = config.attention  # JAX wants the literal
        # jax counts the keys before a query, transformers counts the query as well.
        self.window = (config.window - 1, 0) if kind == "local" else None
        self.q_proj = linear(config.width, config.width, use_bias=False)
        self.k_proj = linear(config.width, config.width, use_bias=False)
        self.v_proj = linear(config.width, config.width, use_bias=False)
        self.out_proj = linear(config.width, config.width)

    def __call__(
        self, x_BxTxD: jax.Array, mask_Bx1xTxT: jax.Array | None = None
    ) -> jax.Array:
        B, T, D = x_BxTxD.shape
        q_BxTxNxH, k_BxTxNxH, v_BxTxNxH = (
            projection(x_BxTxD).reshape(B, T, self.heads, D // self.heads)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        y_BxTxNxH = jax.nn.dot_product_attention(
            q_BxTxNxH,
            k_BxTxNxH,
            v_BxTxNxH,
            mask=mask_Bx1xTxT,
            scale=1.0,
            is_causal=True,
            local_window_size=self.window,
            implementation=self.implementation,
        )
        return self.out_proj(y_BxTxNxH.reshape(B, T, D))


class MLP(nnx.Module):
    """Widen, apply the tanh approximation of GELU ("gelu_new"), narrow."""

    def __init__(self, config: GPTNeoConfig, rngs: nnx.Rngs) -> None:
        linear = _linear(config, rngs)
        hidden = config.mlp_width or 4 * config.width
        self.c_fc = linear(config.width, hidden)
        self.c_proj = linear(hidden, config.width)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        return self.c_proj(jax.nn.gelu(self.c_fc(x_BxTxD), approximate=True))


class Block(nnx.Module):
    """Add attention, then the MLP, each of a normalized input."""

    def __init__(self, config: GPTNeoConfig, kind: str, rngs: nnx.Rngs) -> None:
        self.ln_1 = _layer_norm(config, rngs)
        self.attn = Attention(config, kind, rngs)
        self.ln_2 = _layer_norm(config, rngs)
        self.mlp = MLP(config, rngs)

    def __call__(
        self, x_BxTxD: jax.Array, mask_Bx1xTxT: jax.Array | None = None
    ) -> jax.Array:
        x_BxTxD = x_BxTxD + self.attn(self.ln_1(x_BxTxD), mask_Bx1xTxT)
        return x_BxTxD + self.mlp(self.ln_2(x_BxTxD))


class GPTNeo(nnx.Module):
    """Map tokens (B, T) int32 to next-token logits (B, T, V) float32.

    Like all products they are computed in `dtype`, and then widened. Where segments
    (B, T) int32, ascending, number the documents of each row, attention stays within a
    document, and positions count from its beginning in the row.

    Every leaf of `h` has a leading axis over the repetitions of the pattern, which
    the forward pass scans. Raises ValueError when T exceeds `max_length`.
    """

    def __init__(self, config: GPTNeoConfig, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=config.layers // len(config.pattern))
        @nnx.vmap
        def stacked_blocks(rngs: nnx.Rngs) -> nnx.Dict:
            kinds = zip(config.positions, config.pattern, strict=True)
            return nnx.Dict({name: Block(config, kind, rngs) for name, kind in kinds})

        embed = _bind(
            nnx.Embed,
            config,
            rngs,
            embedding_init=nnx.initializers.normal(config.init_std),
            # A lookup's gradient sums over a token's occurrences: never in bfloat16.
            dtype=jnp.promote_types(config.dtype, jnp.float32),
        )
        self.config = config
        self.wte = embed(config.vocab_size, config.width)
        self.wpe = embed(config.max_length, config.width)
        self.h = stacked_blocks(rngs)
        self.ln_f = _layer_norm(config, rngs)

    def __call__(
        self, tokens_BxT: jax.Array, segments_BxT: jax.Array | None = None
    ) -> jax.Array:
        config, (_, T) = self.config, tokens_BxT.shape
        if config.max_length < T:
            raise ValueError(
                f"{T} tokens exceed max_length={config.max_length}: shorten the "
                "sequences or raise max_length"
            )
        call = Block.__call__
        if config.remat:  # the scan's two loops already prevent CSE
            policy = getattr(jax.checkpoint_policies, str(config.remat), None)
            call = nnx.remat(call, policy=policy, prevent_cse=False)

        positions, mask_Bx1xTxT = jnp.arange(T), None
        if segments_BxT is not None:
            positions, mask_Bx1xTxT = _within(segments_BxT)

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def repeat(blocks: nnx.Dict, x_BxTxD: jax.Array) -> jax.Array:
            for name in config.positions:
                x_BxTxD = call(blocks[name], x_BxTxD, mask_Bx1xTxT)
            return x_BxTxD

        x_BxTxD = self.wte(tokens_BxT) + self.wpe(positions)
        x_BxTxD = self.ln_f(repeat(self.h, x_BxTxD.astype(config.dtype)))
        wte_VxD = self.wte.embedding[...].astype(config.dtype)
        return jnp.einsum("BTD,VD->BTV", x_BxTxD, wte_VxD).astype(jnp.float32)


def _within(segments_BxT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return each token's position in its document, and which keys are in it too."""
    same_BxTxT = segments_BxT[:, :, None] == segments_BxT[:, None, :]
    places = jnp.arange(segments_BxT.shape[1])
    begins_BxT = jnp.diff(segments_BxT, prepend=-1, axis=1) != 0
    first_BxT = jax.lax.cummax(jnp.where(begins_BxT, places, 0), axis=1)
    return places - first_BxT, same_BxTxT[:, None]


def init_params(config: GPTNeoConfig, rng: jax.Array) -> Params:
    """Draw parameters as a nested dict of arrays of `param_dtype`; jit-compatible.

    Kernels and embeddings are normal with `init_std`, as in transformers.
    """
    return nnx.to_pure_dict(nnx.state(GPTNeo(config, nnx.Rngs(rng))))


@functools.lru_cache
def _graphdef(config: GPTNeoConfig) -> Any:
    """Trace the module's structure, without values."""
    return nnx.graphdef(nnx.eval_shape(lambda: GPTNeo(config, nnx.Rngs(0))))


def apply(
    config: GPTNeoConfig,
    params: Params,
    tokens_BxT: jax.Array,
    segments_BxT: jax.Array | None = None,
) -> jax.Array:
    """Return the logits (B, T, V) float32 of int32 tokens under `params`.

    Segments are as of `GPTNeo`.
    """
    return nnx.merge(_graphdef(config), params)(tokens_BxT, segments_BxT)


def _shapes(config: GPTNeoConfig) -> Params:
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0)))


def loss_fn(config: GPTNeoConfig) -> Loss:
    """Return `loss(params, batch, rng) -> (loss_sum, weight, aux)` of next tokens.

    The batch holds "tokens", int32 (B, T + 1), and may hold "mask", (B, T) of 0 and 1
    over the targets, and "segments", (B, T) int32, of the inputs: see `GPTNeo`.
    `loss_sum` is the float32 sum of the cross-entropies in nats, `weight` the float32
    number of targets, `aux` is empty, `rng` is unused.
    """

    def loss(params: Params, batch: Batch, rng: Any) -> tuple[Any, Any, Params]:
        del rng
        targets_BxT = batch["tokens"][:, 1:]
        logits_BxTxV = apply(
            config, params, batch["tokens"][:, :-1], batch.get("segments")
        )
        losses_BxT = optax.softmax_cross_entropy_with_integer_labels(
            logits_BxTxV, targets_BxT
        )
        mask_BxT = batch.get("mask", jnp.ones_like(targets_BxT)).astype(jnp.float32)
        return jnp.sum(losses_BxT * mask_BxT), jnp.sum(mask_BxT), {}

    return loss


def model(config: GPTNeoConfig) -> Model:
    """Return the GPT-Neo of these sizes as the runner trains it."""
    return Model(
        init=functools.partial(init_params, config),
        loss=loss_fn(config),
        flops_per_token=functools.partial(flops_per_token, config),
        stacked=stacked,
        dtype=jnp.dtype(config.dtype).name,
    )


def stacked(params: Params) -> Params:
    """Return which leaves have a leading axis over layers: True for those of `h`.

    `params` is a model's tree, or that of its adapters (`acco_jax.models.lora`), whose
    keys are the paths of kernels. For `acco_jax.per_layer`.
    """

    return jax.tree_util.tree_map_with_path(
        lambda path, _: "/".join(path_names(path)).startswith("h/"), params
    )


def count_params(config: GPTNeoConfig) -> int:
    """Return the number of parameters; the tied embedding counts once."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(_shapes(config)))


def flops_per_token(config: GPTNeoConfig, length: int) -> float:
    """Return the forward and backward model FLOPs per token at a sequence length.

    6 P + 12 D (K_1 + ... + K_L): 2 FLOPs forward and 4 backward for each of the P
    weights in a matrix product (output embedding included, lookups, biases and norms
    not), and for each layer's scores and mixture over K_l keys. K_l is `length`, or at
    most `window` in a local layer; the causal half is not subtracted and recomputation
    is not counted. Source: PaLM (arXiv 2204.02311), appendix B.
    """
    D, hidden = config.width, config.mlp_width or 4 * config.width
    weights = config.layers * (4 * D * D + 2 * D * hidden) + config.vocab_size * D
    keys = {"global": length, "local": min(length, config.window)}
    repetitions = config.layers // len(config.pattern)
    return 6.0 * weights + 12.0 * D * repetitions * sum(keys[k] for k in config.pattern)


def from_transformers(
    config: GPTNeoConfig, state_dict: Mapping[str, np.ndarray]
) -> Params:
    """Convert a GPTNeoForCausalLM state dict of NumPy arrays to a parameter tree.

    Returns NumPy arrays of `param_dtype` in the structure of `init_params`. Raises
    ValueError for a missing weight or a shape that the configuration does not have.
    """
    weights = ("kernel", "embedding", "scale")

    def weight(keys: tuple[str, ...]) -> np.ndarray:
        *modules, leaf = keys
        last = "weight" if leaf in weights else leaf
        name = ".".join(("transformer", *modules, last))
        name = name.replace(".attn.", ".attn.attention.")
        if name not in state_dict:
            raise ValueError(f"{name} is not in the state dict: is it a GPT-Neo's?")
        return state_dict[name].T if leaf == "kernel" else state_dict[name]

    def convert(path: tuple[Any, ...], shape: jax.ShapeDtypeStruct) -> np.ndarray:
        keys = tuple(entry.key for entry in path)
        if keys[0] == "h":  # ("h", "1_local", ...) stacks layers 1, 3, 5, ...
            first, step = config.positions.index(keys[1]), len(config.pattern)
            numbers = range(first, config.layers, step)
            value = np.stack([weight(("h", str(i), *keys[2:])) for i in numbers])
        else:
            value = weight(keys)
        if value.shape != shape.shape:
            raise ValueError(
                f"{'.'.join(keys)} has shape {value.shape} in the state dict, not "
                f"{shape.shape}: match the configuration to the checkpoint"
            )
        return value.astype(shape.dtype)

    return jax.tree_util.tree_map_with_path(convert, _shapes(config))
