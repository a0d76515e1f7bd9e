"""Records the compiled schedules that tests/schedule/test_schedules.py reads.

    export JAX_PLATFORMS=cpu
    python tests/recorded/record_schedules.py  # lists the names
    python tests/recorded/record_schedules.py gpu_hidden tpu_v6e_hidden

Needs no accelerator, but its compiler (pip install "acco-jax[plan-gpu,plan-tpu]") in
the VERSIONS below; it refuses others. What each recording must be read as stands in
the test. The program is a small decoder's half-round: 14.7M parameters, bf16, four
microbatches of 2 x 256 tokens per worker, in loops whose bounds are not constants.

Written into tests/recorded/schedules/NAME.txt.gz: the optimized module's text. Left out
are the metadata of the operations, the tables of source positions, and the TPU
compiler's backend configurations beyond 200 characters (but for those of collectives in
fusions).
"""

import functools
import gzip
import importlib.metadata
import math
import pathlib
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
from acco_jax.schedule import topologies

D, F, L, V, T, B, N = 512, 2048, 4, 4096, 256, 2, 4
LANES, TILE = 1024, 16  # the packed buffer is [rows, 1024], 16 x k rows per worker
SHAPES = {
    "embed": (V, D),
    "up": (L, D, F),
    "down": (L, F, D),
    "qkv": (L, D, 3 * D),
    "out": (L, D, D),
    "bias": (L, D),
}
SPECS = {
    "embed": P(None, "model"),
    "up": P(None, None, "model"),
    "down": P(None, "model"),
    "qkv": P(None, None, "model"),
    "out": P(None, "model"),
    "bias": P(),
}

_SPARSE = "xla_tpu_enable_sparse_core_collective_offload_"
_SPARSE_KINDS = "all_gather all_reduce reduce_scatter nd_reduce_scatter 2d_all_gather"
V5E = {
    "xla_enable_async_all_reduce": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
}
V6E = {_SPARSE + kind: True for kind in _SPARSE_KINDS.split()}
V6E["xla_tpu_offload_gather_to_sparsecore"] = False
TPU7X = {"xla_tpu_offload_gather_to_sparsecore": False}
OVERLAP_4 = {"xla_gpu_experimental_parallel_collective_overlap_limit": 4}
# as where the leaves are larger than the combiners' thresholds
APART = {
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 1,
    "xla_gpu_all_gather_combine_threshold_bytes": 1,
}

# end of the name: jax, libtpu (0.0.51 with pip install --no-deps libtpu==0.0.51)
VERSIONS = {
    "_jax0102": ("0.10.2", "0.0.42.1"),
    "_libtpu51": ("0.12.0.1", "0.0.51"),
    "": ("0.12.0.1", "0.0.50.1"),
}
# name: (topology, slices, model axis, variant, compiler options)
RECORDINGS: dict[str, tuple[str, int, int, str, dict[str, Any]]] = {
    "gpu_hidden": ("gpu:h200:2x8", 1, 1, "barriers", {}),
    "gpu_hidden_jax0102": ("gpu:h200:2x8", 1, 1, "barriers", {}),
    "gpu_cublas": (
        "gpu:h200:2x8",
        1,
        1,
        "barriers",
        {"xla_gpu_enable_triton_gemm": False},
    ),
    "gpu_no_barriers": ("gpu:h200:2x8", 1, 1, "no_barriers", {}),
    "gpu_one_loop": ("gpu:h200:2x8", 1, 1, "one_loop", {}),
    "gpu_per_leaf": ("gpu:h200:2x8", 1, 1, "per_leaf", APART),
    "gpu_synchronous": ("gpu:h200:2x8", 1, 1, "synchronous", {}),
    "gpu_model2": ("gpu:h200:1x8", 1, 2, "barriers", OVERLAP_4),
    "gpu_model2_limit1": ("gpu:h200:1x8", 1, 2, "barriers", {}),
    "tpu_v5e_hidden": ("tpu:v5e:4x4", 1, 1, "barriers", V5E),
    "tpu_v5e_synchronous": ("tpu:v5e:4x4", 1, 1, "synchronous", V5E),
    "tpu_v5e_slices": ("tpu:v5e:4x4", 2, 1, "barriers", V5E),
    # the loops' scatters (the embedding's gradient) hold the SparseCore
    "tpu_7x_scatter": ("tpu:tpu7x:2x2x2", 1, 1, "barriers", TPU7X),
    "tpu_v6e_hidden": ("tpu:v6e:4x4", 1, 1, "barriers", V6E),
    "tpu_v6e_hidden_libtpu51": ("tpu:v6e:4x4", 1, 1, "barriers", V6E),
    "tpu_v6e_hidden_jax0102": ("tpu:v6e:4x4", 1, 1, "barriers", V6E),
}


def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
    """Mean cross entropy of a pre-norm decoder on tokens [B, T + 1]."""
    x_BxTxD = params["embed"][tokens[:, :-1]]

    def norm(x: jax.Array) -> jax.Array:
        scale = jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True) + 1e-6
        return x * lax.rsqrt(scale).astype(x.dtype)

    def block(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        qkv = norm(x) @ layer["qkv"]
        heads = [a.reshape(*a.shape[:2], -1, 128) for a in jnp.split(qkv, 3, -1)]
        mixed = jax.nn.dot_product_attention(*heads, is_causal=True)
        x = x + mixed.reshape(x.shape) @ layer["out"] + layer["bias"]
        return x + jax.nn.gelu(norm(x) @ layer["up"]) @ layer["down"], None

    layers = {k: v for k, v in params.items() if k != "embed"}
    x_BxTxD, _ = lax.scan(jax.checkpoint(block), x_BxTxD, layers)
    logits = (x_BxTxD @ params["embed"].T).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


def program(
    mesh: jax.sharding.Mesh, variant: str
) -> tuple[Callable[..., Any], Sequence[Any]]:
    """Makes a half-round and its arguments' shapes on (slice?, data, model).

    Variants:
        barriers: a part of the microbatches behind each collective, order pinned.
        no_barriers: the same without barriers.
        one_loop: one loop over all microbatches beside the chain, no barriers.
        per_leaf: as one_loop, with a reduce-scatter and an all-gather per leaf.
        synchronous: the collectives of this half-round's own gradient.
    """
    m = mesh.shape["model"]
    axes = [a for a in ("data", "slice") if a in mesh.shape]  # innermost first
    outer = tuple(reversed(axes))
    n = math.prod(mesh.shape[a] for a in axes)
    everything = P((*outer, "model"))
    shard_specs = {
        k: everything if "model" in s else P(outer) for k, s in SPECS.items()
    }
    local = {
        k: tuple(d // m if s == "model" else d for d, s in _pairs(SHAPES[k], SPECS[k]))
        for k in SHAPES
    }
    rows = {k: -(-math.prod(s) // (n * LANES)) for k, s in local.items()}
    padding = -sum(rows.values()) % TILE
    total = sum(rows.values()) + padding
    parts = 1 if variant in ("one_loop", "per_leaf", "synchronous") else 2 * len(axes)
    pin = lax.optimization_barrier if variant == "barriers" else lambda x: x
    everywhere = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def block(x: jax.Array, k: str) -> jax.Array:  # leaf -> [n, rows, 1024]
        missing = n * rows[k] * LANES - x.size
        x = jnp.pad(x.reshape(-1), (0, missing)) if missing else x
        return x.reshape(n, rows[k], LANES)

    def pack(tree: Any) -> jax.Array:  # leaves [1, ...] -> [n * total, 1024]
        blocks = [block(tree[k][0], k) for k in SHAPES]
        blocks.append(jnp.zeros((n, padding, LANES), jnp.bfloat16))
        return jnp.concatenate(blocks, 1).reshape(-1, LANES)

    def unpack(buffer: jax.Array) -> Any:
        blocks, tree, start = buffer.reshape(n, total, LANES), {}, 0
        for k, shape in local.items():
            leaf = blocks[:, start : start + rows[k]].reshape(-1)
            tree[k] = leaf[: math.prod(shape)].reshape(shape)
            start += rows[k]
        return tree

    def split(shard: jax.Array) -> Any:
        tree, start = {}, 0
        for k in SHAPES:
            tree[k], start = shard[start : start + rows[k]], start + rows[k]
        return tree

    def join(tree: Any) -> jax.Array:
        zeros = jnp.zeros((padding, LANES), jnp.bfloat16)
        return jnp.concatenate([*(tree[k] for k in SHAPES), zeros])

    rows_of_worker = P(outer)
    stacked = {k: P(outer, *s) for k, s in SPECS.items()}

    def accumulate(params: Any, acc: Any, tokens: Any, counts: Any, part: int) -> Any:
        @functools.partial(
            everywhere,
            in_specs=(P(), *3 * (rows_of_worker,)),
            out_specs=rows_of_worker,
            axis_names=set(axes),
        )
        def run(params: Any, acc: Any, tokens: Any, counts: Any) -> Any:
            def body(i: Any, acc: Any) -> Any:
                batch = lax.dynamic_index_in_dim(tokens[0], i, keepdims=False)
                return jax.tree.map(jnp.add, acc, jax.grad(loss_fn)(params, batch))

            bounds = [counts[0] * part // parts, counts[0] * (part + 1) // parts]
            acc = lax.fori_loop(*bounds, body, jax.tree.map(lambda x: x[0], acc))
            return jax.tree.map(lambda x: x[None], acc)

        return run(params, acc, tokens, counts)

    def scatter(axis: str, spec: Any = everything) -> Callable[..., jax.Array]:
        def run(x: jax.Array) -> jax.Array:
            return lax.psum_scatter(x, axis, scatter_dimension=0, tiled=True)

        return everywhere(run, in_specs=spec, out_specs=spec)

    def gather(axis: str, spec: Any, out: Any) -> Callable[..., jax.Array]:
        def run(x: jax.Array) -> jax.Array:
            return lax.all_gather(x, axis, axis=0, tiled=True)

        return everywhere(run, in_specs=spec, out_specs=out)

    def optimizer(reduced: Any, weight: Any, master: Any, opt: Any) -> Any:
        grads = jax.tree.map(lambda x: x.astype(jnp.float32) / weight, reduced)
        updates, opt = inner.update(grads, opt, master)
        master = optax.apply_updates(master, updates)
        return master, opt, jax.tree.map(lambda x: x.astype(jnp.bfloat16), master)

    split_all = everywhere(split, in_specs=everything, out_specs=shard_specs)
    join_all = everywhere(join, in_specs=(shard_specs,), out_specs=everything)
    pack_all = everywhere(pack, in_specs=(stacked,), out_specs=everything)
    replicated = P("model")
    unpack_all = everywhere(unpack, in_specs=replicated, out_specs=SPECS)

    def zeros() -> Any:
        return {
            k: lax.with_sharding_constraint(
                jnp.zeros((n, *s), jnp.bfloat16), NamedSharding(mesh, stacked[k])
            )
            for k, s in SHAPES.items()
        }

    def hidden(params, master, opt, pending, weights, tokens, counts):  # type: ignore
        weight, pending, params = pin((weights.sum(), pending, params))
        raw, acc, part = pending, zeros(), 0
        for axis in axes:
            raw = scatter(axis)(raw)
            if part < parts:
                acc = accumulate(params, acc, tokens, counts, part)
            raw, acc, params = pin((raw, acc, params))
            part += 1
        master, opt, low = optimizer(split_all(raw), weight, master, opt)
        full = join_all(low)
        master, opt, full, acc, params = pin((master, opt, full, acc, params))
        for i, axis in enumerate(reversed(axes)):
            left = (*outer[i + 1 :], "model")
            full = gather(axis, P((*outer[i:], "model")), P(left))(full)
            if part < parts:
                acc = accumulate(params, acc, tokens, counts, part)
            full, acc, params = pin((full, acc, params))
            part += 1
        return unpack_all(full), master, opt, pack_all(acc), counts * 1.0

    def synchronous(params, master, opt, pending, weights, tokens, counts):  # type: ignore
        acc = accumulate(params, zeros(), tokens, counts, 0)
        raw = scatter("data")(pack_all(acc))
        master, opt, low = optimizer(split_all(raw), weights.sum(), master, opt)
        full = gather("data", everything, replicated)(join_all(low))
        return unpack_all(full), master, opt, pending * 0, counts * 1.0

    def per_leaf(params, master, opt, pending, weights, tokens, counts):  # type: ignore
        acc = accumulate(params, zeros(), tokens, counts, 0)
        raw = {k: scatter("data", shard_specs[k])(x) for k, x in pending.items()}
        master, opt, low = optimizer(raw, weights.sum(), master, opt)
        params = {
            k: everywhere(
                lambda x, k=k: (
                    lax.all_gather(x, "data", axis=0, tiled=True)
                    .reshape(-1)[: math.prod(local[k])]
                    .reshape(local[k])
                ),
                in_specs=shard_specs[k],
                out_specs=SPECS[k],
            )(x)
            for k, x in low.items()
        }
        pending = {
            k: everywhere(
                lambda x, k=k: block(x[0], k).reshape(-1, LANES),
                in_specs=stacked[k],
                out_specs=shard_specs[k],
            )(x)
            for k, x in acc.items()
        }
        return params, master, opt, pending, counts * 1.0

    def spec(shape: tuple[int, ...], dtype: Any, p: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, p))

    def by_name(path: Any, x: Any) -> jax.ShapeDtypeStruct:
        keys = [getattr(e, "key", None) for e in path]
        known = [k for k in keys if k in SPECS]
        return spec(x.shape, x.dtype, shard_specs[known[0]] if known else P())

    shards = {
        k: jax.ShapeDtypeStruct(
            (n * rows[k] * (m if "model" in SPECS[k] else 1), LANES), jnp.float32
        )
        for k in SHAPES
    }
    sharded = functools.partial(jax.tree_util.tree_map_with_path, by_name)
    pending: Any = spec((n * n * m * total, LANES), jnp.bfloat16, everything)
    if variant == "per_leaf":
        pending = {
            k: spec((n * x.shape[0], LANES), jnp.bfloat16, shard_specs[k])
            for k, x in shards.items()
        }
    arguments = (
        {k: spec(s, jnp.bfloat16, SPECS[k]) for k, s in SHAPES.items()},
        sharded(shards),
        sharded(jax.eval_shape(inner.init, shards)),
        pending,
        spec((n,), jnp.float32, rows_of_worker),
        spec((n, N, B, T + 1), jnp.int32, rows_of_worker),
        spec((n,), jnp.int32, rows_of_worker),
    )
    functions = {"synchronous": synchronous, "per_leaf": per_leaf}
    return functions.get(variant, hidden), arguments


def _pairs(shape: Sequence[int], spec: Sequence[Any]) -> list[tuple[int, Any]]:
    return [(d, spec[i] if i < len(spec) else None) for i, d in enumerate(shape)]


def shorten(text: str) -> str:
    """Leaves out what no reader of a schedule needs (see the module's docstring)."""
    text = re.sub(r", metadata=\{[^}]*\}", "", text)
    text = re.sub(r"(?ms)^(FileNames|FunctionNames|FileLocations|StackFrames)\n.*?\n\n",
                  "", text)  # fmt: skip
    text = re.sub(r", entry_computation_layout=.*", "", text, count=1)
    return re.sub(
        r', backend_config=\{"flag_configs"(?!.*"async_collective_fusion).{200,}$',
        "",
        text,
        flags=re.MULTILINE,
    )


def record(name: str) -> None:
    """Compiles one program and writes its schedule."""
    wanted = next(v for end, v in VERSIONS.items() if name.endswith(end))
    found = (jax.__version__, importlib.metadata.version("libtpu"))
    if found != wanted:
        raise ValueError(f"{name} is made with jax, libtpu {wanted}, not {found}")
    text, slices, model, variant, options = RECORDINGS[name]
    mesh = topologies.mesh(topologies.parse(text, slices), model=model)
    function, arguments = program(mesh, variant)
    start = time.monotonic()
    lowered = jax.jit(function, donate_argnums=(0, 1, 2, 3)).lower(*arguments)
    compiled = lowered.compile(compiler_options=options)
    seconds = time.monotonic() - start
    path = pathlib.Path(__file__).parent / "schedules" / f"{name}.txt.gz"
    data = gzip.compress(shorten(compiled.as_text()).encode(), 9, mtime=0)
    path.write_bytes(data)
    print(f"{path.name}: compiled in {seconds:.1f} s, {len(data)} bytes")


if __name__ == "__main__":
    topologies.use_cpu()
    if len(sys.argv) == 1:
        print("\n".join(RECORDINGS))
    for requested in sys.argv[1:]:
        record(requested)
