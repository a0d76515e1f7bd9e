"""Which optimizers may work on packed shards: adversaries must not."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from acco_jax import layout as layouts
from acco_jax.packable import why_not_packed
from tests.reference import make_mesh

SHAPES = {"b": (77,), "big": (8, 2048), "s": (), "t": (2, 3, 5), "w": (5, 13)}


@functools.cache
def packed(n=4, shapes=None):
    shapes = shapes or SHAPES.items()
    params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes}
    mesh = make_mesh(n)
    args = layouts.describe(params, mesh=mesh, axis=("data",))
    return layouts.packed_layout(*args, mesh, ("data",))


def stateless(fn):
    """fn(gradient, parameter) on every leaf."""
    return optax.stateless(lambda g, p: jax.tree.map(fn, g, p))


def elementwise_state(init, fn):
    """A state array per leaf: fn(gradient, state) -> (update, state)."""

    def update(g, state, params=None):
        del params
        both = jax.tree.map(fn, g, state)
        pick = lambda i: jax.tree.map(lambda _, b: b[i], g, both)  # noqa: E731
        return pick(0), pick(1)

    return optax.GradientTransformation(lambda p: jax.tree.map(init, p), update)


def like(params, value):
    return jax.tree.map(lambda _: value, params)


ndim_mask = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)  # noqa: E731
name_mask = {"b": False, "big": True, "s": False, "t": True, "w": True}
labels = {"b": "frozen", "big": "fast", "s": "slow", "t": "fast", "w": "slow"}
injected = optax.inject_hyperparams(optax.adamw)
ACCEPTED = {
    "adamw": optax.adamw(1e-3),
    "nadamw": optax.nadamw(1e-3),
    "lion": optax.lion(1e-3),
    "sgd": optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "rmsprop": optax.rmsprop(1e-3, centered=True),
    "adagrad": optax.adagrad(1e-2),
    "radam": optax.radam(1e-3),
    "amsgrad": optax.amsgrad(1e-3),
    "novograd": optax.novograd(1e-3),
    "global norm": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "value clip": optax.chain(optax.clip(1.0), optax.sgd(1e-2)),
    "schedule": optax.adamw(optax.warmup_cosine_decay_schedule(0, 1e-3, 10, 100)),
    "table": optax.sgd(
        optax.piecewise_interpolate_schedule("linear", 0.1, {5: 0.5, 9: 0.1})
    ),
    "mask by name": optax.adamw(1e-3, mask=name_mask),
    "mask by rank": optax.adamw(1e-3, mask=ndim_mask),
    "partition": optax.partition(
        {
            "fast": optax.adam(1e-2),
            "slow": optax.sgd(0.1),
            "frozen": optax.set_to_zero(),
        },
        labels,
    ),
    "apply_if_finite": optax.apply_if_finite(optax.adamw(1e-3), 3),
    "MultiSteps": optax.MultiSteps(optax.adamw(1e-3), 2).gradient_transformation(),
    "inject": injected(learning_rate=1e-3),
    "inject schedule": injected(learning_rate=optax.linear_schedule(1e-3, 0, 9)),
    "ema": optax.chain(optax.adam(1e-3), optax.ema(0.9)),
    "set_to_zero": optax.set_to_zero(),
    "max of abs": stateless(lambda g, p: g / (jnp.max(jnp.abs(g)) + 1)),
    "sum of squares": stateless(lambda g, p: g * lax.rsqrt(jnp.sum(g * g) + 1)),
    "how many": stateless(lambda g, p: g / (1 + jnp.sum(g != 0))),
    "all finite": stateless(lambda g, p: jnp.where(jnp.all(jnp.isfinite(g)), g, 0)),
    "where": stateless(lambda g, p: jnp.where(p > 0, g, 0)),
    "rates by path": optax.GradientTransformation(
        lambda p: optax.EmptyState(),
        lambda g, s, p=None: (
            jax.tree_util.tree_map_with_path(lambda k, x: x * len(str(k)), g),
            s,
        ),
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepts(name):
    assert why_not_packed(ACCEPTED[name], packed()) is None


def sized(fn):
    """Scales by what fn makes of a leaf."""
    return stateless(lambda g, p: g * fn(g))


def noise(g, key):
    return jax.random.normal(key, g.shape)


def multisteps_over(inner):
    return optax.MultiSteps(inner, 2).gradient_transformation()


def swap(g, state, params=None):
    del params
    return {**g, "u": g["v"], "v": g["u"]}, state


def swap_sometimes(g, state, params=None):
    yes = jnp.sum(g["u"]) > 0
    return {**g, "u": lax.cond(yes, lambda: g["u"], lambda: g["v"])}, state


def peek(g, state, params=None):
    """Keeps one leaf in a place of its own and its sum of places as the update."""
    flat = state["old"].reshape(-1)
    scale = jnp.sum(jnp.cumsum(flat))
    return jax.tree.map(lambda x: x * scale, g), {"old": g["u"]}


size = lambda g: 1 / jnp.asarray(g.size, jnp.float32)  # noqa: E731
REFUSED = {
    # what a norm would count in the padding
    "constant before a norm": stateless(lambda g, p: g / jnp.sum((g + 1) ** 2)),
    "cosine before a sum": stateless(lambda g, p: g * jnp.sum(jnp.cos(g))),
    "max of negatives": stateless(lambda g, p: g / (2 + jnp.max(-(g**2) - 1))),
    "max without abs": stateless(lambda g, p: g * jnp.max(g)),
    "min": stateless(lambda g, p: g * jnp.min(jnp.abs(g))),
    "product": stateless(lambda g, p: g * jnp.prod(g)),
    "how many zeros": stateless(lambda g, p: g / (1 + jnp.sum(g == 0))),
    # what would be written into the padding
    "adds a constant": stateless(lambda g, p: g + 1e-3),
    "rms without eps": optax.scale_by_rms(eps=0.0),
    "adam without eps": optax.adam(1e-3, eps=0.0),
    "adam without eps, injected": (
        optax.inject_hyperparams(optax.adam)(1e-3, eps=0.0)),
    "rms that decays to nothing": (
        elementwise_state(
            jnp.ones_like,
            lambda g, v: (g / jnp.sqrt(v), 0.9 * v + g**2),
        )),
    "yogi, whose moments start at 1e-6": optax.yogi(1e-2),
    "one over": stateless(lambda g, p: 1 / g),
    "log": stateless(lambda g, p: g * jnp.log(jnp.abs(g))),
    "barrier": (
        stateless(lambda g, p: lax.optimization_barrier((g, g + 1))[1])),
    "state that grows": (
        elementwise_state(jnp.zeros_like, lambda g, v: (g * 0 + v, v + 1))),
    "state that grows late": (
        optax.chain(*(
            elementwise_state(jnp.zeros_like, lambda g, v: (g + v, 0.5 * v))
            for _ in range(12)),
            elementwise_state(jnp.zeros_like, lambda g, v: (g + v, v + 1)),
            elementwise_state(jnp.zeros_like, lambda g, v: (v, g)))),
    # what depends on a size or a shape
    "mean": stateless(lambda g, p: g / (jnp.mean(g**2) + 1)),
    "block rms": optax.clip_by_block_rms(1.0),
    "size": sized(size),
    "size of ones": sized(lambda g: jnp.vdot(jnp.ones_like(g), jnp.ones_like(g))),
    "sum of ones": sized(lambda g: jnp.sum(jnp.ones_like(g))),
    "sum of reshaped ones": (
        sized(lambda g: jnp.sum(jnp.ones_like(g).reshape(-1, 1)))),
    "sum of iota": sized(lambda g: jnp.arange(g.size).sum() * 1.0),
    "sum of iota and more": (
        sized(lambda g: jnp.sum(jnp.arange(g.size) + jnp.sum(g)))),
    "sum of noise": sized(lambda g: jnp.sum(noise(g, jax.random.key(0)))),
    "last of ones": (
        sized(lambda g: jnp.cumsum(jnp.ones(g.size, jnp.float32))[-1])),
    "size in a branch": (
        sized(lambda g: lax.cond(g.sum() > 0, lambda: size(g), lambda: 2 * size(g)))),
    "loop as long as the leaf": (
        sized(lambda g: lax.fori_loop(0, g.size, lambda i, x: x + 1.0, 0.0))),
    "first dimension": sized(lambda g: (*g.shape, 1)[0]),
    "mask by shape": (
        optax.adam(1e-3), optax.masked(
            optax.sgd(1.), lambda p: jax.tree.map(lambda x: x.shape == (5, 13), p)))[1],
    "mask by rank 0": (
        optax.adamw(1e-3, mask=lambda p: jax.tree.map(lambda x: x.ndim > 0, p))),
    # what depends on places
    "cumsum": stateless(lambda g, p: jnp.cumsum(g.reshape(-1)).reshape(g.shape)),
    "flip": stateless(lambda g, p: jnp.flip(g)),
    "row norms": (
        stateless(lambda g, p: g / (1 + jnp.sum(g**2, -1, keepdims=True))
                  if g.ndim > 1 else g)),
    "outer dims": (
        stateless(lambda g, p: g / (1 + jnp.sum(
            g**2, tuple(i for i, d in enumerate(g.shape) if d > 1))))),
    "centralize": optax.centralize(),
    "adaptive clip": optax.adaptive_grad_clip(0.1),
    "muon": optax.contrib.muon(1e-3),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=4),
    "noise": optax.add_noise(0.1, 0.5, 0),
    "noise alone": (
        stateless(lambda g, p: noise(g, jax.random.key(0)))),
    "iota as state": (
        elementwise_state(
            lambda p: jnp.arange(p.size, dtype=p.dtype).reshape(p.shape),
            lambda g, v: (g * v, v))),
    "noise as state": (
        elementwise_state(
            lambda p: noise(p, jax.random.key(1)), lambda g, v: (g * v, v))),
    "shape closed over": (
        stateless(lambda g, p: g * np.arange(g.size).reshape(g.shape))),
    "cumsum inside MultiSteps": (
        multisteps_over(stateless(lambda g, p: jnp.cumsum(g, -1) if g.ndim else g))),
    "mean inside MultiSteps": (
        multisteps_over(stateless(lambda g, p: g / (1 + jnp.mean(g**2))))),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name):
    reason = why_not_packed(REFUSED[name], packed())
    assert reason is not None
    assert "\n" not in reason
    if "traced" not in reason:
        assert re.search(r"[ /](b|big|s|t|w)\b", reason), reason


def test_several_leaves_of_one_shape_keep_apart():
    layout = packed(4, (("u", (12,)), ("v", (12,))))
    empty = lambda p: optax.EmptyState()  # noqa: E731
    for init, update in (
        (empty, swap),
        (empty, swap_sometimes),
        (lambda p: {"old": p["v"]}, peek),
        (lambda p: {"u": p["v"]}, lambda g, s, p=None: (g, s)),
    ):
        assert why_not_packed(optax.GradientTransformation(init, update), layout)


def test_names_that_look_alike_keep_apart():
    """Leaf a/b and leaf b of a: one has padding, the other has none."""
    params = {
        "a": {"b": jax.ShapeDtypeStruct((77,), jnp.float32)},
        "a/b": jax.ShapeDtypeStruct((80,), jnp.float32),
    }
    mesh = make_mesh(4)
    args = layouts.describe(params, mesh=mesh, axis=("data",))
    layout = layouts.packed_layout(*args, mesh, ("data",))
    assert why_not_packed(stateless(lambda g, p: g * jnp.sum(jnp.cos(g))), layout)


@pytest.mark.parametrize("inner", [optax.lamb(1e-3), optax.lars(1e-3)])
def test_trust_ratios_need_leaves_without_padding(inner):
    # their safe norm is that of ones where the norm is zero
    assert why_not_packed(inner, packed(4, (("v", (80,)), ("w", (16, 8))))) is None
    assert "reduce_sum of b" in why_not_packed(inner, packed())


def test_without_padding_a_mean_is_a_mean():
    exact = packed(4, (("v", (80,)), ("w", (16, 8))))
    assert why_not_packed(optax.clip_by_block_rms(1.0), exact) is None
    assert why_not_packed(stateless(lambda g, p: g * jnp.max(g)), exact) is None
    assert why_not_packed(stateless(lambda g, p: g + 1), exact) is None
    assert why_not_packed(stateless(lambda g, p: jnp.cumsum(g, -1)), exact)
    noisy = stateless(lambda g, p: jnp.arange(80.0) + 0 * g if g.ndim == 1 else g)
    assert why_not_packed(noisy, exact)


def test_inner_that_cannot_be_traced_is_refused_by_its_own_words():
    reason = why_not_packed(optax.contrib.reduce_on_plateau(), packed())
    assert "cannot be traced" in reason
    reason = why_not_packed(
        optax.contrib.reduce_on_plateau(), packed(), {"value": jnp.float32(1)}
    )
    assert reason is None


def test_extra_arguments_are_looked_at():
    def update(g, state, params=None, *, scales=None, **extra):
        if scales is not None:
            g = jax.tree.map(jnp.multiply, g, scales)
        return g, state

    inner = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)
    scales = {k: jnp.ones(s) for k, s in SHAPES.items()}
    assert why_not_packed(inner, packed()) is None
    assert why_not_packed(inner, packed(), {"scales": scales})
