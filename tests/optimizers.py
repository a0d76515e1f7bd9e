"""Optimizers by name, all of optax's and many written by hand; nothing of acco_jax.

What is optax's has its function's name as the first word of its name here, so that a
test can tell which of optax's functions are missing.
"""

import functools

import jax
import jax.numpy as jnp
import optax

from tests.handwritten import HANDWRITTEN, TREES, Case

contrib = optax.contrib
chain = optax.chain
injected = optax.inject_hyperparams
sgd = optax.sgd(0.1)
clip = optax.clip_by_global_norm(0.5)
# values that float32 holds exactly: a schedule's arithmetic is in float32
decay = optax.linear_schedule(0.125, 0.0625, 4)
to_zero = optax.linear_schedule(2.0**-10, 0.0, 2)


def matrices(tree):
    return jax.tree.map(lambda x: x.ndim > 1, tree)


def odd_sizes(tree):
    return jax.tree.map(lambda x: x.size % 2 == 1, tree)


def named(*names):
    """Whether a leaf's path ends with one of these names."""

    def mask(tree):
        last = lambda path, _: path[-1].key in names  # noqa: E731
        return jax.tree_util.tree_map_with_path(last, tree)

    return mask


def labels(tree):
    def label(path, x):
        if path[-1].key == "a":
            return "frozen"
        return "matrix" if x.ndim > 1 else "vector"

    return jax.tree_util.tree_map_with_path(label, tree)


THREE = {
    "matrix": optax.adamw(1e-2),
    "vector": optax.sgd(0.1, momentum=0.9),
    "frozen": optax.set_to_zero(),
}


def second_of_three(step):
    return step % 3 == 1


def every_second(inner, how_many=2, **kwargs):
    return optax.MultiSteps(inner, how_many, **kwargs).gradient_transformation()


ALIASES = {
    "adabelief": optax.adabelief(1e-2),
    "adadelta": optax.adadelta(1.0, weight_decay=0.1),
    "adafactor": optax.adafactor(1e-2),
    "adafactor, factored": optax.adafactor(
        1e-2, min_dim_size_to_factor=3, momentum=0.9, weight_decay_rate=0.1
    ),
    "adafactor, large": Case(optax.adafactor(1e-2), "large"),
    "adafactor, empty": Case(optax.adafactor(1e-2, min_dim_size_to_factor=3), "empty"),
    "adagrad": optax.adagrad(1e-1),
    "adam": optax.adam(1e-2),
    "adam, of 16 bits": optax.adam(1e-2, mu_dtype=jnp.bfloat16, nesterov=True),
    "adamax": optax.adamax(1e-2),
    "adamaxw": optax.adamaxw(1e-2, weight_decay=0.1),
    "adamw": optax.adamw(1e-2, weight_decay=0.1),
    "adamw, large": Case(optax.adamw(1e-2), "large"),
    "adamw, empty": Case(optax.adamw(1e-2), "empty"),
    "adamw, list": Case(optax.adamw(1e-2), "list"),
    "adamw, one": Case(optax.adamw(1e-2), "one"),
    "adan": optax.adan(1e-2),
    "amsgrad": optax.amsgrad(1e-2),
    "fromage": optax.fromage(1e-2),
    "lamb": optax.lamb(1e-2),
    "lamb, large": Case(optax.lamb(1e-2), "large"),
    "lars": optax.lars(1e-1, weight_decay=0.1),
    "lbfgs": Case(optax.lbfgs(1e-1, memory_size=3, linesearch=None), "twins"),
    "lion": optax.lion(1e-2),
    "nadam": optax.nadam(1e-2),
    "nadamw": optax.nadamw(1e-2),
    "noisy_sgd": optax.noisy_sgd(1e-1, key=7),
    "novograd": optax.novograd(1e-2),
    "optimistic_adam_v2": optax.optimistic_adam_v2(1e-2),
    "optimistic_gradient_descent": optax.optimistic_gradient_descent(1e-1),
    "radam": optax.radam(1e-2, b2=0.9, threshold=4.5),
    "rmsprop": optax.rmsprop(1e-2),
    "rmsprop, centered": optax.rmsprop(1e-2, centered=True, momentum=0.9),
    "rprop": optax.rprop(1e-2),
    "sgd": optax.sgd(1e-1),
    "sgd, nesterov": optax.sgd(decay, momentum=0.9, nesterov=True),
    "sgd, list": Case(optax.sgd(1e-1, momentum=0.9), "list"),
    "sign_sgd": optax.sign_sgd(1e-2),
    "signum": optax.signum(1e-2, beta=0.77),
    "sm3": Case(optax.sm3(1e-1), "deep"),  # it does not take scalars
    "sm3, large": Case(optax.sm3(1e-1), "large"),
    "yogi": optax.yogi(1e-2),
}

CONTRIB = {
    "acprop": contrib.acprop(1e-2, eps=0.1),
    "ademamix": contrib.ademamix(1e-2),
    "adopt": contrib.adopt(1e-2),
    "cocob": contrib.cocob(),
    "dadapt_adamw": contrib.dadapt_adamw(estim_lr0=1e-2),
    "dog": contrib.dog(init_step=("heuristic", 0.1)),
    "dowg": contrib.dowg(init_estim_sq_dist=0.1),
    "galore": contrib.galore(1e-2, rank=2, update_proj_gap=2),
    "madgrad": contrib.madgrad(1e-2),
    "mechanize": contrib.mechanize(optax.adamw(1e-2), s_init=0.1),
    "muon": contrib.muon(1e-2),
    "muon, large": Case(contrib.muon(1e-2), "large"),
    "normalize": chain(contrib.normalize(), sgd),
    "prodigy": contrib.prodigy(estim_lr0=0.1),
    "sam": contrib.sam(optax.adamw(1e-2), chain(contrib.normalize(), sgd)),
    "schedule_free": contrib.schedule_free(sgd, 0.1, state_dtype=jnp.float64),
    "schedule_free_adamw": contrib.schedule_free_adamw(1e-2),
    "schedule_free_sgd": contrib.schedule_free_sgd(1e-1),
    "simplified_ademamix": contrib.simplified_ademamix(1e-2),
    "split_real_and_imaginary": contrib.split_real_and_imaginary(optax.adam(1e-2)),
}

COMPOSITIONS = {
    "adaptive_grad_clip": chain(optax.adaptive_grad_clip(0.01), sgd),
    "adaptive_grad_clip, large": Case(
        chain(optax.adaptive_grad_clip(0.01), sgd), "large"
    ),
    "add_decayed_weights": chain(optax.add_decayed_weights(0.1, named("w", "t")), sgd),
    "add_noise": chain(optax.add_noise(0.1, 0.5, 0), sgd),
    "add_noise, large": Case(chain(optax.add_noise(0.1, 0.5, 0), sgd), "large"),
    "apply_every": chain(optax.adam(1e-2), optax.apply_every(2)),
    "apply_if_finite": Case(optax.apply_if_finite(optax.adamw(1e-2), 3), "nan"),
    "centralize": chain(optax.centralize(), optax.adamw(1e-2)),
    "centralize, large": Case(chain(optax.centralize(), optax.adamw(1e-2)), "large"),
    "chain of many": chain(
        optax.zero_nans(),
        clip,
        optax.centralize(),
        optax.scale_by_adam(),
        optax.add_decayed_weights(0.1, matrices),
        optax.scale_by_trust_ratio(),
        optax.scale_by_learning_rate(decay),
        optax.keep_params_nonnegative(),
    ),
    "clip": chain(optax.clip(0.1), optax.adamw(1e-2)),
    "clip_by_block_rms": chain(optax.clip_by_block_rms(0.1), sgd),
    "clip_by_global_norm": chain(clip, optax.adamw(1e-2)),
    "clip_by_global_norm, large": Case(chain(clip, optax.adamw(1e-2)), "large"),
    "conditionally_mask": optax.conditionally_mask(optax.adamw(1e-2), second_of_three),
    "conditionally_transform": chain(
        optax.conditionally_transform(optax.scale_by_adam(), second_of_three), sgd
    ),
    "ema": chain(optax.adamw(1e-2), optax.ema(0.9)),
    "flatten": optax.flatten(chain(optax.clip_by_block_rms(0.1), optax.adamw(1e-2))),
    "flatten, large": Case(optax.flatten(optax.adamw(1e-2)), "large"),
    "freeze": Case(
        chain(optax.adamw(1e-2), optax.freeze({"a": True, "mu/a": False, "s": True})),
        "odd",
    ),
    "identity": chain(optax.identity(), sgd),
    "inject_hyperparams": injected(optax.adamw)(
        decay, b1=optax.linear_schedule(0.5, 0.75, 4)
    ),
    # 0 / 0 in whatever is added to a leaf, and a norm of it
    "inject_hyperparams, eps that reaches 0": Case(
        chain(injected(optax.scale_by_adam)(eps=to_zero), clip, sgd), "large"
    ),
    "inject_hyperparams of a clip": chain(
        injected(optax.clip_by_global_norm)(optax.linear_schedule(0.125, 0.5, 4)), sgd
    ),
    "keep_params_nonnegative": chain(optax.sgd(10.0), optax.keep_params_nonnegative()),
    "masked by rank": optax.masked(optax.adamw(1e-2), matrices),
    "masked by name": Case(chain(optax.masked(clip, named("a", "t")), sgd), "deep"),
    "masked by size": chain(optax.masked(optax.scale_by_trust_ratio(), odd_sizes), sgd),
    "masked by a tree": Case(
        optax.masked(contrib.muon(1e-2), {"a": True, "mu/a": True, "s": False}), "odd"
    ),
    "masked by a part of a tree": Case(
        optax.masked(optax.adamw(1e-2), {"a": False, "mu": True, "t": False}), "deep"
    ),
    "multi_transform by a tree": Case(
        optax.multi_transform(THREE, {"a": "vector", "mu/a": "matrix", "s": "frozen"}),
        "odd",
    ),
    "MultiSteps": every_second(optax.adamw(1e-2)),
    "MultiSteps without means": every_second(
        chain(optax.centralize(), optax.adamw(1e-2)),
        lambda step: 1 + step,
        use_grad_mean=False,
    ),
    "MultiSteps that skips NaN": Case(
        every_second(optax.adamw(1e-2), should_skip_update_fn=optax.skip_not_finite),
        "nan",
    ),
    "MultiSteps that skips what is large": every_second(
        optax.adamw(1e-2),
        should_skip_update_fn=functools.partial(
            optax.skip_large_updates, max_squared_norm=1.0
        ),
    ),
    "named_chain": optax.named_chain(("mu", optax.scale_by_adam()), ("a", sgd)),
    "normalize_by_update_norm": chain(optax.normalize_by_update_norm(), sgd),
    "partition by a function": optax.partition(THREE, labels),
    "partition with a norm in one": optax.partition(
        THREE | {"matrix": chain(clip, contrib.muon(1e-2))}, labels
    ),
    "partition of partitions": optax.partition(
        {True: optax.partition(THREE, labels), False: sgd}, odd_sizes
    ),
    "scale": chain(optax.scale_by_adam(), optax.scale(-0.1)),
    "scale_by_distance_over_gradients": chain(
        optax.scale_by_distance_over_gradients(0.1, param_dtype=jnp.float64),
        optax.scale(-1),
    ),
    "scale_by_param_block_norm": chain(optax.scale_by_param_block_norm(), sgd),
    "scale_by_param_block_rms": chain(optax.scale_by_param_block_rms(), sgd),
    "scale_by_schedule": chain(optax.scale_by_schedule(decay), optax.scale(-1)),
    "scale_by_trust_ratio": chain(optax.scale_by_trust_ratio(), sgd),
    "selective_transform": Case(
        optax.selective_transform(
            optax.adamw(1e-2), freeze_mask={"a": True, "mu": {"a": False}, "t": False}
        ),
        "deep",
    ),
    "set_to_zero": Case(
        chain(optax.adamw(1e-2), optax.masked(optax.set_to_zero(), matrices)), "odd"
    ),
    "snapshot": chain(optax.adamw(1e-2), optax.snapshot("a", lambda tree: tree)),
    "stateless": optax.stateless(
        lambda g, p: jax.tree.map(lambda g, p: -0.1 * g * p, g, p)
    ),
    "stateless_with_tree_map": optax.stateless_with_tree_map(
        lambda g, p: -0.1 * (g + p)
    ),
    "trace": chain(optax.trace(0.9, nesterov=True), sgd),
    "with_extra_args_support": optax.with_extra_args_support(sgd),
    "zero_nans": Case(chain(optax.zero_nans(), optax.adamw(1e-2)), "nan"),
}

EXCLUDED = {  # name: why it is not in the table
    "differentially_private_aggregate": "it takes per-example gradients",
    "dpsgd": "it takes per-example gradients",
    "hutchinson_estimator_diag_hessian": "it needs the loss function",
    "inject_stateful_hyperparams": "a deprecated name of inject_hyperparams",
    "lookahead": "its parameters are pairs and its gradients are not",
    "measure_with_ema": "it makes measurements, not updates",
    "momo": "it needs the loss",
    "momo_adam": "it needs the loss",
    "monitor": "its state has another structure after the first update",
    "optimistic_adam": "deprecated; optimistic_adam_v2 is in the table",
    "polyak_sgd": "it needs the loss",
    "reduce_on_plateau": "it needs the loss",
    "scale_by_backtracking_linesearch": "a line search: it needs the loss function",
    "scale_by_polyak": "it needs the loss",
    "scale_by_zoom_linesearch": "a line search: it needs the loss function",
    "sophia": "it needs the loss function",
    # functions that do not say what they return
    "matrix_inverse_pth_root": "no transformation",
    "schedule_free_eval_params": "no transformation",
    "sigmoid_binary_cross_entropy": "no transformation",
    "update_infinity_moment": "no transformation",
    "update_moment": "no transformation",
    "update_moment_per_elem_norm": "no transformation",
}


def table():
    """Every optimizer with its tree; those that take any share three of them."""
    cases, trees = {}, ("odd", "wide", "deep")
    for group in (ALIASES, CONTRIB, COMPOSITIONS, HANDWRITTEN):
        for name, inner in group.items():
            assert name not in cases, name
            case = inner if isinstance(inner, Case) else Case(inner)
            tree = case.tree or trees[len(cases) % len(trees)]
            assert tree in TREES, name
            cases[name] = case._replace(tree=tree)
    return cases


OPTIMIZERS = table()
