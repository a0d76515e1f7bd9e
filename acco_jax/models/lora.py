"""LoRA: train a low-rank change of chosen kernels and leave the model as it is.

    W' = W + scale * a @ b,   a (..., in, r),  b (..., r, out),  b = 0 at the start

adapters = lora.init(params, key, rank=8, pattern="attn/(q|v)_proj/kernel")
step = acco_jax.make_train_step(lora.loss_fn(loss_fn, params, scale), tx, ...)
state = tx.init(adapters)  # of any method: the adapters are its parameters
params = lora.merge(params, adapters, scale)

Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models (arXiv
2106.09685).
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath, Partial

from acco_jax.core.leaves import path_names

PyTree = Any
Adapters = dict[str, dict[str, jax.Array]]  # path of a kernel -> its a and b


def init(
    params: PyTree,
    key: jax.Array,
    rank: int | Mapping[str, int],
    pattern: str | None = None,
) -> Adapters:
    """Sample adapters for the leaves whose path matches; jit-compatible.

    Args:
      params: the model's, arrays or ShapeDtypeStructs; kernels (..., in, out), with
        leading dimensions (of stacked layers) that get an adapter each.
      key: for a, normal with standard deviation 1 / sqrt(in).
      rank: r, at most min(in, out); or a mapping from patterns to ranks, of which the
        first that matches counts.
      pattern: a regular expression that is searched in paths such as
        'h/0_global/attn/q_proj/kernel'; None where `rank` is a mapping.

    Returns:
      {path: {"a": (..., in, r), "b": (..., r, out)}} in the kernels' dtypes.

    Raises:
      ValueError: a pattern matches nothing or is not a regular expression, a leaf is no
        kernel, or a rank is out of range.
    """
    leaves = _by_name(params)
    ranks = _ranks(leaves, rank, pattern)
    names = [name for name in leaves if name in ranks]
    adapters = {}
    for k, name in zip(jax.random.split(key, len(names)), names, strict=True):
        w, r = leaves[name], ranks[name]
        *lead, rows, columns = w.shape
        a = jax.random.normal(k, (*lead, rows, r), jnp.float32) / rows**0.5
        b = jnp.zeros((*lead, r, columns), w.dtype)
        adapters[name] = {"a": a.astype(w.dtype), "b": b}
    return adapters


def merge(params: PyTree, adapters: Adapters, scale: float) -> PyTree:
    """Return the model with its adapters: W + scale * a @ b, in each kernel's dtype.

    Raises:
      ValueError: an adapter's path is not in `params`.
    """
    if unknown := sorted(adapters.keys() - _by_name(params).keys()):
        raise ValueError(
            f"there are adapters for {unknown[0]}, which the parameters do not have: "
            "give the parameters that lora.init was given."
        )

    def merged(path: KeyPath, w: jax.Array) -> jax.Array:
        name = _name(path)
        if name not in adapters:
            return w
        a, b = adapters[name]["a"], adapters[name]["b"]
        wide = jnp.promote_types(w.dtype, jnp.float32)
        change = jnp.matmul(a, b, preferred_element_type=wide)
        return (w + scale * change).astype(w.dtype)

    return jax.tree_util.tree_map_with_path(merged, params)


def loss_fn(loss_fn: Callable[..., Any], base: PyTree, scale: float) -> Partial:
    """Return the loss of the merged model, as a function of only the adapters.

    Kernels are merged in float32 and rounded to the base's dtype. With a base in
    bfloat16 the loss does not see a change below half of a weight's last place.

    Args:
      loss_fn: (params, microbatch, rng) -> loss, (loss, aux) or (loss, weight, aux).
      base: the model's parameters, frozen: neither differentiated nor in any state.
      scale: as for `merge`.

    Returns:
      A function (adapters, microbatch, rng) that carries `base` as a Partial does: for
      `make_train_step` and `local_gradients` an argument of the compiled program, not a
      constant in its HLO text.
    """

    def loss(
        base: PyTree, adapters: Adapters, microbatch: PyTree, rng: jax.Array | None
    ) -> PyTree:
        return loss_fn(merge(base, adapters, scale), microbatch, rng)

    return Partial(loss, base)


def _ranks(
    leaves: Mapping[str, Any], rank: int | Mapping[str, int], pattern: str | None
) -> dict[str, int]:
    """Return path -> rank of every leaf that gets an adapter; raise as `init`."""
    if isinstance(rank, Mapping) == (pattern is not None):
        raise ValueError(
            "LoRA needs a rank with a pattern, or a mapping from patterns to ranks "
            "without: give one of them."
        )
    ranks: dict[str, int] = {}
    patterns = rank if isinstance(rank, Mapping) else {str(pattern): rank}
    for expression, r in patterns.items():
        try:
            names = [name for name in leaves if re.search(expression, name)]
        except re.error as error:
            raise ValueError(
                f"LoRA's pattern {expression!r} is not a regular expression: {error}."
            ) from None
        if not names:
            raise ValueError(
                f"LoRA's pattern {expression!r} matches no parameter: they have names "
                f"such as {max(leaves, key=lambda n: leaves[n].size)}."
            )
        for name in names:
            shape = leaves[name].shape
            if len(shape) < 2 or name.rpartition("/")[2] in ("bias", "scale"):
                raise ValueError(
                    f"LoRA's pattern {expression!r} matches {name} of shape {shape}: "
                    "an adapter needs a kernel of two dimensions or more."
                )
            if not 1 <= r <= min(shape[-2:]):
                raise ValueError(
                    f"LoRA's rank for {name} of shape {shape} is {r}: it must lie "
                    f"between 1 and {min(shape[-2:])}."
                )
            ranks.setdefault(name, r)
    return ranks


def _by_name(params: PyTree) -> dict[str, Any]:
    return {_name(p): x for p, x in jax.tree_util.tree_leaves_with_path(params)}


def _name(path: KeyPath) -> str:
    return "/".join(path_names(path))
