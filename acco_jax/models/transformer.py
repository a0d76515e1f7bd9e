"""A decoder-only transformer, whose families are choices of parts.

`sizes.py` lists the parts and the families. Each family computes what Hugging Face
transformers implements for its model_type. Modules have GPT-Neo's names in all of them,
and Llama's where GPT-Neo has no such module.

Shapes are spelled in suffixes: B batch, T length, D width, N heads of queries, K heads
of keys and values, H width of a head, V vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import checkpoint_policies as policies
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from acco_jax.core.groups import TENSOR
from acco_jax.core.leaves import path_names
from acco_jax.models import rope
from acco_jax.models.attention import attention
from acco_jax.models.embedding import lookup
from acco_jax.models.experts import Experts, Routed, balance
from acco_jax.models.flash import SAVED
from acco_jax.models.head import capped, cross_entropy
from acco_jax.models.model import Batch, Model
from acco_jax.models.placement import (
    automatic_axes,
    gathered,
    platform,
    split_rows,
)
from acco_jax.models.rope import LinearScaling as LinearScaling
from acco_jax.models.rope import Llama3Scaling as Llama3Scaling
from acco_jax.models.rope import YarnScaling as YarnScaling
from acco_jax.models.sizes import FAMILIES as FAMILIES
from acco_jax.models.sizes import PROJECTIONS
from acco_jax.models.sizes import REMAT as REMAT
from acco_jax.models.sizes import SIZES as SIZES
from acco_jax.models.sizes import Config as Config
from acco_jax.models.sizes import size as size

Params = dict[str, Any]
# (q, k, v, *, scale, window, softcap) -> (B, T, N H): `attention`, or with a cache
Attend = Callable[..., jax.Array]
Turns = dict[str, rope.Turns]  # of each kind of layers; {}: positions are learned
Loss = Callable[[Params, Batch, jax.Array], tuple[jax.Array, jax.Array, Params]]

OWN_CODE = 24  # layers that have code of their own on a GPU, at most
_PRODUCT = "product"  # name, for policies of jax.checkpoint, of a matmul's result
# Of cheap operations, only the inputs are saved for the backward pass.
_gelu = jax.checkpoint(
    functools.partial(jax.nn.gelu, approximate=True), prevent_cse=False
)
_ACTIVATIONS = {"swiglu": jax.nn.silu, "geglu": _gelu, "moe": jax.nn.silu}


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=0)
def _gate(mlp: str, gate: jax.Array, up: jax.Array) -> jax.Array:
    return _ACTIVATIONS[mlp](gate) * up


def _bind(module: Any, config: Config, rngs: nnx.Rngs, **options: Any) -> Any:
    """Bind a layer to the configuration's types and the given options."""
    types = {"dtype": config.dtype, "param_dtype": config.param_dtype}
    return functools.partial(module, **{**types, **options}, rngs=rngs)


def _normalized(layer: Any, x: jax.Array) -> jax.Array:
    return layer(x)


_norm: Any = nnx.remat(_normalized, prevent_cse=False)


def _linear(config: Config, rngs: nnx.Rngs) -> Callable[[str, int, int], nnx.Linear]:
    """Return a function that makes a named projection, from a width to another."""
    init = nnx.initializers.normal(config.init_std)
    bound = _bind(nnx.Linear, config, rngs, kernel_init=init)

    def make(name: str, inputs: int, outputs: int) -> nnx.Linear:
        return bound(inputs, outputs, use_bias=name in config.biases)

    return make


class ZeroCenteredRMSNorm(nnx.Module):
    """RMSNorm that multiplies by 1 + scale, computed in at least float32."""

    def __init__(
        self, width: int, *, epsilon: float, dtype: Any, param_dtype: Any, rngs: Any
    ) -> None:
        del rngs
        self.epsilon, self.dtype = epsilon, dtype
        self.scale = nnx.Param(jnp.zeros((width,), param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = jnp.promote_types(x.dtype, jnp.float32)
        square = jnp.mean(jnp.square(x.astype(wide)), axis=-1, keepdims=True)
        y = x * jax.lax.rsqrt(square + self.epsilon)
        return (y * (1.0 + self.scale[...].astype(wide))).astype(self.dtype)


_NORMS = {
    "layer": nnx.LayerNorm,
    "rms": nnx.RMSNorm,
    "zero_centered_rms": ZeroCenteredRMSNorm,
}


def _norm_layer(config: Config, width: int, rngs: nnx.Rngs) -> Any:
    return _bind(_NORMS[config.norm], config, rngs, epsilon=config.eps)(width)


class Attention(nnx.Module):
    """Causal attention, to all of the past or to a window.

    Heads of queries may share heads of keys and values. Queries and keys may be
    normalized, each head or all together, before they are turned by their positions.
    """

    def __init__(self, config: Config, kind: str, rngs: nnx.Rngs) -> None:
        linear = _linear(config, rngs)
        N, K, H = config.heads, config.key_heads, config.head_size
        self.head_width = H
        self.scale = H**-0.5 if config.scale is None else config.scale
        self.window = config.window if kind == "local" else None
        self.softcap = config.score_softcap
        self.kind = kind
        self.q_proj = linear("q_proj", config.width, N * H)
        self.k_proj = linear("k_proj", config.width, K * H)
        self.v_proj = linear("v_proj", config.width, K * H)
        self.out_proj = linear("out_proj", N * H, config.width)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            heads = config.qk_norm == "projection"
            self.q_norm = _norm_layer(config, N * H if heads else H, rngs)
            self.k_norm = _norm_layer(config, K * H if heads else H, rngs)

    def __call__(
        self, x_BxTxD: jax.Array, turns: Turns, attend: Attend = attention
    ) -> jax.Array:
        q, k, v = (
            checkpoint_name(projection(x_BxTxD), _PRODUCT)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.qk_norm == "projection":
            q, k = _norm(self.q_norm, q), _norm(self.k_norm, k)
        q_BxTxNxH, k_BxTxKxH, v_BxTxKxH = (
            x.reshape(*x.shape[:2], -1, self.head_width) for x in (q, k, v)
        )
        if self.qk_norm == "head":
            q_BxTxNxH = _norm(self.q_norm, q_BxTxNxH)
            k_BxTxKxH = _norm(self.k_norm, k_BxTxKxH)
        if turns:
            q_BxTxNxH = rope.rotate(q_BxTxNxH, turns[self.kind])
            k_BxTxKxH = rope.rotate(k_BxTxKxH, turns[self.kind])
        y_BxTxNH = attend(
            q_BxTxNxH, k_BxTxKxH, v_BxTxKxH, scale=self.scale, window=self.window,
            softcap=self.softcap,
        )  # fmt: skip
        return self.out_proj(y_BxTxNH)


class MLP(nnx.Module):
    """An MLP: widen, apply the tanh approximation of GELU ("gelu_new"), narrow."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        linear = _linear(config, rngs)
        self.c_fc = linear("c_fc", config.width, config.hidden)
        self.c_proj = linear("c_proj", config.hidden, config.width)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        return self.c_proj(_gelu(checkpoint_name(self.c_fc(x_BxTxD), _PRODUCT)))


class GatedMLP(nnx.Module):
    """A gated MLP: widen twice, multiply one by the activation of the other, narrow.

    Source: Shazeer, GLU Variants Improve Transformer (arXiv 2002.05202).
    """

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        linear = _linear(config, rngs)
        self.kind = config.mlp
        self.gate_proj = linear("gate_proj", config.width, config.hidden)
        self.up_proj = linear("up_proj", config.width, config.hidden)
        self.down_proj = linear("down_proj", config.hidden, config.width)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        gate = checkpoint_name(self.gate_proj(x_BxTxD), _PRODUCT)
        up = checkpoint_name(self.up_proj(x_BxTxD), _PRODUCT)
        return self.down_proj(_gate(self.kind, gate, up))


class Mixture(nnx.Module):
    """A mixture of experts, each a gated MLP: a router weights a few for each token."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        E = int(config.experts or 0)
        self.per_token = int(config.experts_per_token or 0)
        self.normalized = config.normalized_routing
        self.router = _linear(config, rngs)("router", config.width, E)
        stack = _bind(Kernels, config, rngs, init_std=config.init_std)
        self.gate_proj = stack(E, config.width, config.hidden)
        self.up_proj = stack(E, config.width, config.hidden)
        self.down_proj = stack(E, config.hidden, config.width)

    def __call__(self, x_BxTxD: jax.Array) -> tuple[jax.Array, Routed]:
        logits_BxTxE = checkpoint_name(self.router(x_BxTxD), _PRODUCT)
        kernels = self.gate_proj(), self.up_proj(), self.down_proj()
        compute = Experts(
            self.per_token,
            self.normalized,
            functools.partial(_gate, "moe"),
            functools.partial(checkpoint_name, name=_PRODUCT),
        )
        return compute(x_BxTxD, logits_BxTxE, *kernels)


class Kernels(nnx.Module):
    """The kernels of one projection of all experts, (E, in, out)."""

    def __init__(
        self,
        experts: int,
        inputs: int,
        outputs: int,
        *,
        init_std: float,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ) -> None:
        init, shape = nnx.initializers.normal(init_std), (experts, inputs, outputs)
        self.dtype = dtype
        self.kernel = nnx.Param(init(rngs.params(), shape, param_dtype))

    def __call__(self) -> jax.Array:
        return self.kernel[...].astype(self.dtype)


_MLPS = {"gelu": MLP, "swiglu": GatedMLP, "geglu": GatedMLP, "moe": Mixture}


def _step_back(layers: Any, x_BxTxD: jax.Array) -> Any:
    """Return both in their used, gathered form; their gradients wait for each other.

    Otherwise compilers delay the matmuls for gradients of weights, and hold their
    inputs of all the layers that a loop's body has.
    """
    graphdef, state = nnx.split(layers)
    state, x_BxTxD = _together((state, split_rows(x_BxTxD)))
    state = jax.tree_util.tree_map_with_path(
        lambda path, w: gathered(w, _tensor_spec(path, w.ndim)), state
    )
    return nnx.merge(graphdef, state), x_BxTxD


@jax.custom_vjp
def _together(values: Any) -> Any:
    return values


_together.defvjp(
    lambda values: (values, None),
    lambda _, gradients: (jax.lax.optimization_barrier(gradients),),
)


class Block(nnx.Module):
    """A block: attention, then the MLP, each added to its input.

    Norms are of the inputs of both ("pre"), of their results ("post"), or of "both".
    It returns its result, and what experts were chosen: None without experts.
    """

    def __init__(self, config: Config, kind: str, rngs: nnx.Rngs) -> None:
        pre = config.norm_placement in ("pre", "both")
        post = config.norm_placement in ("post", "both")
        if pre:
            self.ln_1 = _norm_layer(config, config.width, rngs)
        self.attn = Attention(config, kind, rngs)
        if post:
            self.post_ln_1 = _norm_layer(config, config.width, rngs)
        if pre:
            self.ln_2 = _norm_layer(config, config.width, rngs)
        self.mlp = _MLPS[config.mlp](config, rngs)
        if post:
            self.post_ln_2 = _norm_layer(config, config.width, rngs)

    def __call__(
        self,
        x_BxTxD: jax.Array,
        turns: Turns | None = None,
        attend: Attend = attention,
    ) -> tuple[jax.Array, Routed | None]:
        y_BxTxD, _ = self._residual(1, self.attn, x_BxTxD, turns or {}, attend)
        x_BxTxD = checkpoint_name(x_BxTxD + y_BxTxD, _PRODUCT)
        y_BxTxD, routed = self._residual(2, self.mlp, x_BxTxD)
        return x_BxTxD + y_BxTxD, routed

    def _residual(self, i: int, layer: Any, x_BxTxD: jax.Array, *args: Any) -> Any:
        """Return what a layer, between its norms, adds to its input, and routing."""
        names = f"ln_{i}", f"post_ln_{i}"
        norms = {name: getattr(self, name) for name in names if hasattr(self, name)}
        (norms, layer), x_BxTxD = _step_back((norms, layer), x_BxTxD)
        pre, post = map(norms.get, names)
        y_BxTxD = layer(_norm(pre, x_BxTxD) if pre else x_BxTxD, *args)
        y_BxTxD, routed = y_BxTxD if isinstance(y_BxTxD, tuple) else (y_BxTxD, None)
        if post:
            y_BxTxD = _norm(post, checkpoint_name(y_BxTxD, _PRODUCT))
        return y_BxTxD, routed


class Transformer(nnx.Module):
    """A map from tokens (B, T) int32 to the two factors of their next tokens' logits.

    The factors are (B, T, D) in `dtype`, and the output embedding (V, D). Where
    segments (B, T) int32, ascending, number the documents of each row, attention stays
    within a document, and positions count from its beginning in the row.

    Every leaf of `h` has a leading axis over the repetitions of the pattern, which
    the forward pass scans. Raises ValueError when T exceeds `max_length`.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=config.layers // len(config.pattern))
        @nnx.vmap
        def stacked_blocks(rngs: nnx.Rngs) -> nnx.Dict:
            kinds = zip(config.blocks, config.pattern, strict=True)
            return nnx.Dict({name: Block(config, kind, rngs) for name, kind in kinds})

        embed = _bind(
            nnx.Embed,
            config,
            rngs,
            embedding_init=nnx.initializers.normal(config.init_std),
        )
        self.config = config
        self.wte = embed(config.vocab_size, config.width)
        if config.positions == "learned":
            self.wpe = embed(config.max_length, config.width)
        self.h = stacked_blocks(rngs)
        self.ln_f = _norm_layer(config, config.width, rngs)
        if not config.tied:
            self.lm_head = embed(config.vocab_size, config.width)

    def __call__(
        self, tokens_BxT: jax.Array, segments_BxT: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        return self.with_routing(tokens_BxT, segments_BxT)[0]

    def with_routing(
        self, tokens_BxT: jax.Array, segments_BxT: jax.Array | None = None
    ) -> tuple[tuple[jax.Array, jax.Array], Any]:
        """Return the two factors, and `Routed` summed over the layers, if any."""
        config, (_, T) = self.config, tokens_BxT.shape
        if config.max_length < T:
            raise ValueError(
                f"{T} tokens exceed max_length={config.max_length}: shorten the "
                "sequences or raise max_length"
            )
        positions = jnp.arange(T)[None]
        if segments_BxT is not None:
            positions = _places(segments_BxT)
        x_BxTxD, turns = self.begin(tokens_BxT, positions)
        attend = functools.partial(
            attention, segments=segments_BxT, implementation=config.attention
        )
        call = _rematerialized(config, attend)

        def repeat(blocks: nnx.Dict, x_BxTxD: jax.Array) -> Any:
            routed = {}
            for name in config.blocks:
                x_BxTxD, routed[name] = call(blocks[name], x_BxTxD, turns)
            return x_BxTxD, routed

        scan = nnx.scan(in_axes=(0, nnx.Carry), out_axes=(nnx.Carry, 0))
        over_layers = scan(repeat) if _scans(config) else _one_by_one(repeat)
        x_BxTxD, routed = over_layers(self.h, x_BxTxD)
        return self.end(x_BxTxD), routed

    def begin(
        self, tokens_BxT: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, Turns]:
        """Return the first block's inputs: embeddings (B, T, D), and RoPE's turns.

        Positions are int32, (B, T) or (1, T); learned ones lie below `max_length`.
        """
        config = self.config
        x_BxTxD = lookup(self.wte.embedding[...], tokens_BxT)
        if config.positions == "learned":
            x_BxTxD += lookup(self.wpe.embedding[...], positions)
        x_BxTxD = x_BxTxD.astype(config.dtype)
        if config.scale_embedding:
            x_BxTxD *= jnp.asarray(config.width**0.5, config.dtype)
        return x_BxTxD, self._turns(positions)

    def _turns(self, positions: jax.Array) -> Turns:
        config, width = self.config, self.config.head_size
        if config.positions == "learned":
            return {}
        turns = rope.turns(positions, width, config.rope_theta, config.rope_scaling)
        if config.local_rope_theta is None:
            return dict.fromkeys(config.pattern, turns)
        local = rope.turns(positions, width, config.local_rope_theta)
        return {"global": turns, "local": local}

    def end(self, x_BxTxD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the two factors of logits, from the last block's result."""
        output = self.wte if self.config.tied else self.lm_head
        embedding_VxD = output.embedding[...].astype(self.config.dtype)
        return _norm(self.ln_f, x_BxTxD), embedding_VxD


def _scans(config: Config) -> bool:
    """Return whether the layers are a loop.

    On a GPU code of its own makes a layer faster: GPT-2 124M 1.20 times. More layers
    than `OWN_CODE`, which would compile longer, and groups were not measured.
    """
    if config.scan_layers is not None:
        return config.scan_layers
    alone = platform() == "gpu" and not automatic_axes()
    return not alone or config.layers > OWN_CODE


def _one_by_one(repeat: Callable[..., Any]) -> Callable[..., Any]:
    """Return `repeat` over stacked blocks as a scan would call it, without a loop.

    A scan that is unrolled would stack what the backward pass needs.
    """

    def run(stacked: nnx.Dict, x: jax.Array) -> Any:
        graphdef, state = nnx.split(stacked)
        leaves, tree = jax.tree.flatten(state)
        parts = [jax.lax.split(leaf, (1,) * len(leaf), axis=0) for leaf in leaves]
        results = []
        for each in zip(*parts, strict=True):
            own = jax.tree.unflatten(tree, [leaf.squeeze(0) for leaf in each])
            x, result = repeat(nnx.merge(graphdef, own), x)
            results.append(result)
        return x, jax.tree.map(lambda *each: jnp.stack(each), *results)

    return run


def _rematerialized(config: Config, attend: Attend) -> Callable[..., jax.Array]:
    """Return Block's forward pass with the rematerialization that `remat` names."""
    if (remat := config.remat) is None:
        remat = "none" if platform() == "cpu" else "elementwise"

    def forward(block: Block, x_BxTxD: jax.Array, turns: Any) -> Any:
        return block(x_BxTxD, turns, attend)

    if remat == "none":
        return forward
    policy = policies.save_only_these_names(_PRODUCT, SAVED)
    policy = policies.save_from_both_policies(policy, _is_cudnn)
    policy = policies.nothing_saveable if remat == "block" else policy
    # a scan's two loops already prevent CSE
    return nnx.remat(forward, policy=policy, prevent_cse=not _scans(config))


def _is_cudnn(primitive: Any, *_: Any, **__: Any) -> bool:
    return "dot_product_attention_fwd" in primitive.name


def _places(segments_BxT: jax.Array) -> jax.Array:
    """Return each token's position in its document, (B, T)."""
    places = jnp.arange(segments_BxT.shape[1])
    begins_BxT = jnp.diff(segments_BxT, prepend=-1, axis=1) != 0
    return places - jax.lax.cummax(jnp.where(begins_BxT, places, 0), axis=1)


def init_params(config: Config, rng: jax.Array) -> Params:
    """Sample parameters as a nested dict of arrays of `param_dtype`; jit-compatible.

    Kernels and embeddings are normal with `init_std`.
    """
    return nnx.to_pure_dict(nnx.state(Transformer(config, nnx.Rngs(rng))))


@functools.lru_cache
def _abstract(config: Config) -> tuple[Any, Params]:
    """Trace the module once: its structure, and its parameters' shapes and dtypes."""
    module = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0)))
    graphdef, state = nnx.split(module)
    return graphdef, nnx.to_pure_dict(state)


def apply(
    config: Config,
    params: Params,
    tokens_BxT: jax.Array,
    segments_BxT: jax.Array | None = None,
) -> jax.Array:
    """Return the logits (B, T, V) float32 of int32 tokens under `params`.

    Segments are as of `Transformer`.
    """
    x_BxTxD, w_VxD = bound(config, params)(tokens_BxT, segments_BxT)
    logits_BxTxV = jnp.einsum(
        "BTD,VD->BTV", x_BxTxD, w_VxD, preferred_element_type=jnp.float32
    )
    return capped(logits_BxTxV, config.logit_softcap)


def bound(config: Config, params: Params) -> Transformer:
    """Return the module with these parameters."""
    graphdef, _ = _abstract(config)
    return nnx.merge(graphdef, params)


def shapes_of(config: Config) -> Params:
    """Return shapes and dtypes of the parameters of `init_params`."""
    _, shapes = _abstract(config)
    return jax.tree.map(lambda x: x, shapes)  # new dicts, which a caller may change


def loss_fn(config: Config) -> Loss:
    """Return `loss(params, batch, rng) -> (loss_sum, weight, aux)` of next tokens.

    The batch holds "tokens", int32 (B, T + 1), and may hold "mask", (B, T) of 0 and 1
    over the targets, and "segments", (B, T) int32, of the inputs: see `Transformer`.
    `loss_sum` is the float32 sum of the cross-entropies in nats, `weight` the float32
    number of targets, `aux` is empty, `rng` is unused. With `router_loss`, the sum has
    that factor of `experts.balance` for each target as well.
    """

    def loss(params: Params, batch: Batch, rng: Any) -> tuple[Any, Any, Params]:
        del rng
        targets_BxT = batch["tokens"][:, 1:]
        (x_BxTxD, w_VxD), routed = bound(config, params).with_routing(
            batch["tokens"][:, :-1], batch.get("segments")
        )
        mask_BxT = batch.get("mask", jnp.ones_like(targets_BxT)).astype(jnp.float32)
        losses = cross_entropy(
            x_BxTxD, w_VxD, targets_BxT, mask_BxT, softcap=config.logit_softcap
        )
        weight = jnp.sum(mask_BxT)
        if config.router_loss:
            losses += config.router_loss * weight * balance(list(routed.values()))
        return losses, weight, {}

    return loss


def model(config: Config) -> Model:
    """Return the transformer of this configuration as a `Model` for the runner."""
    plain = dataclasses.replace(config, router_loss=0.0)
    return Model(
        init=functools.partial(init_params, config),
        loss=loss_fn(config),
        evaluation_loss=loss_fn(plain) if config.router_loss else None,
        flops_per_token=functools.partial(flops_per_token, config),
        stacked=stacked,
        tensor=functools.partial(tensor_specs, config),
        apply=functools.partial(apply, config),
        dtype=jnp.dtype(config.dtype).name,
    )


def tensor_specs(config: Config, params: Params, size: int) -> Params:
    """Return how a mesh axis "tensor" splits the parameters: heads and hidden units.

    Of two matmuls in a row it splits the columns of the first and the rows of the
    second; of the embedding the vocabulary. For `acco_jax.group_specs`.

    Raises:
      ValueError: the heads do not divide by the axis's size.
    """
    if config.heads % size:
        raise ValueError(
            f"mesh.tensor is {size}, which does not divide the model's {config.heads} "
            "heads: use a number that does."
        )
    return jax.tree_util.tree_map_with_path(
        lambda path, x: _tensor_spec(path, x.ndim), params
    )


def _tensor_spec(path: Any, rank: int) -> P:
    """Return how "tensor" splits a parameter with this path, stacked or not."""
    names = [name for name in path_names(path) if name != "value"]  # an nnx State's
    *_, module, leaf = ("", *names)
    lead = [None] * (rank - 1)
    if module in ("wte", "lm_head"):
        return P(TENSOR)
    if module in ("q_proj", "k_proj", "v_proj", "c_fc", "gate_proj", "up_proj"):
        return P(*lead, TENSOR)
    if module in ("out_proj", "c_proj", "down_proj") and leaf == "kernel":
        return P(*lead[1:], TENSOR)
    return P()


def stacked(params: Params) -> Params:
    """Return which leaves have a leading axis over layers: True for those of `h`.

    `params` is a model's tree, or that of its adapters (`acco_jax.models.lora`), whose
    keys are the paths of kernels. For `acco_jax.per_layer`.
    """

    return jax.tree_util.tree_map_with_path(
        lambda path, _: "/".join(path_names(path)).startswith("h/"), params
    )


def count_params(config: Config) -> int:
    """Return the number of parameters; a tied embedding counts once."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes_of(config)))


def flops_per_token(config: Config, length: int) -> float:
    """Return the forward and backward model FLOPs per token at a sequence length.

    6 P + 12 N H (K_1 + ... + K_L): 2 FLOPs forward and 4 backward for each of the P
    weights in a matrix product (output embedding included, lookups, biases and norms
    not, nor experts that a token does not choose), and for each layer's scores and
    mixture over K_l keys. K_l is `length`, or at most `window` in a local layer; the
    causal half is not subtracted and recomputation is not counted. Source: PaLM
    (arXiv 2204.02311), appendix B.
    """
    D, N, K, H = config.width, config.heads, config.key_heads, config.head_size
    mlp = len(PROJECTIONS[config.mlp]) * D * config.hidden
    if config.experts and config.experts_per_token:
        mlp = config.experts_per_token * mlp + D * config.experts
    layer = 2 * D * (N + K) * H + mlp
    weights = config.layers * layer + config.vocab_size * D
    keys = {"global": length, "local": min(length, config.window)}
    seen = config.layers // len(config.pattern) * sum(keys[k] for k in config.pattern)
    return 6.0 * weights + 12.0 * N * H * seen
