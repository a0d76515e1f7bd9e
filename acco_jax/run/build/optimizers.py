"""Optimizer of an experiment: schedule, weight decay, groups, averages."""

import functools
import inspect
import math
import re
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from absl import logging
from jax.sharding import AbstractMesh, Mesh
from jax.tree_util import KeyPath
from ml_collections import ConfigDict

from acco_jax import methods
from acco_jax.core.leaves import path_names
from acco_jax.core.names import check_name, suggestion
from acco_jax.core.state import ShardedState
from acco_jax.methods import METHODS
from acco_jax.methods.method import Method
from acco_jax.methods.per_layer import checked_before, per_layer
from acco_jax.models.model import Stacked
from acco_jax.run.config.fields import dtype, first_halves
from acco_jax.run.config.schema import SCHEDULES

PyTree = Any

# An optimizer's keyword arguments, unless optimizer.options replaces them.
DEFAULT_OPTIONS = {"adamw": {"b2": 0.95, "weight_decay": 0.1}}

# Optimizers that look across leaves or sample noise, and are elementwise otherwise:
# they are right on leaves that stack layers, and must not be run layer by layer.
ACROSS_LEAVES = frozenset({"dadapt_adamw", "dog", "dowg", "noisy_sgd", "prodigy"})

# How far acco's estimate goes where the first half is the smaller one, unless
# method_options says so: experiments/results/dynamics.md.
LOOK_AHEAD = 1.15

# Optimizers' names for the mask of their weight decay.
DECAY_MASKS = ("mask", "weight_decay_mask")
NOT_DECAYED = ("bias", "scale")  # last names of paths; and all of one dimension

SAMPLES = 65  # steps at which an optax schedule is checked

# Optimizers that train at one point and are evaluated at another.
SCHEDULE_FREE = ("schedule_free_adamw", "schedule_free_sgd")


def learning_rate(config: ConfigDict, peak: float | None = None) -> optax.Schedule:
    """Return the schedule, counted in optimizer steps.

    The warm-up is linear. 'cosine' and 'linear' then decay to `final_fraction` of the
    peak at the last step; 'wsd' (warm-up, stable, decay: MiniCPM, arXiv 2404.06395)
    stays at the peak and decays linearly over the last `decay_fraction` of all steps.
    Any other name is a schedule of optax, with `schedule_options`. Before the steps in
    `extended` it is the schedule of a shorter run.

    Args:
      config: of the experiment.
      peak: of the learning rate; None: optimizer.learning_rate.

    Raises:
      ValueError: if optax has no such schedule, or it does not take the options.
    """
    c = config.optimizer
    peak = c.learning_rate if peak is None else peak
    rate = _rate(c, peak, config.steps)
    if not config.extended:
        return rate
    earlier = [(until, _rate(c, peak, steps)) for until, steps in config.extended]

    def extended(step: Any) -> Any:
        value = rate(step)
        for until, shorter in reversed(earlier):
            value = jnp.where(step < until, shorter(step), value)
        return value

    return extended


def _rate(c: ConfigDict, peak: float, total: int) -> optax.Schedule:
    """Return the schedule of a run of `total` steps; `c` is config.optimizer."""
    warmup, final = c.warmup_steps, c.final_fraction * peak
    steps = max(total - warmup, 1)
    if c.schedule == "cosine":
        decay = optax.cosine_decay_schedule(peak, steps, c.final_fraction)
    elif c.schedule == "linear":
        decay = optax.linear_schedule(peak, final, steps)
    elif c.schedule == "wsd":
        begin = decay_begin(c, total) - warmup
        decay = optax.linear_schedule(peak, final, steps - begin, begin)
    elif c.schedule == "constant":
        decay = optax.constant_schedule(peak)
    else:
        decay = _by_name(c.schedule, peak, c.schedule_options.to_dict())
    ramp = optax.linear_schedule(peak / (warmup + 1), peak, max(warmup, 1))
    return optax.join_schedules([ramp, decay], [warmup]) if warmup else decay


def decay_begin(c: ConfigDict, total: int) -> int:
    """Return the step after which the learning rate follows from the steps in all.

    It is `total` for schedules that do not depend on it.

    Args:
      c: config.optimizer.
      total: steps of the run.
    """
    if c.schedule in ("cosine", "linear"):
        return c.warmup_steps
    if c.schedule == "wsd":
        steps = max(total - c.warmup_steps, 1)
        length = min(max(round(c.decay_fraction * total), 1), steps)
        return c.warmup_steps + steps - length
    return total


def _by_name(name: str, peak: float, options: dict[str, Any]) -> optax.Schedule:
    """Return a schedule of optax whose value starts at, or rises to, `peak`."""
    peak_name = _peak_of(name)
    if not peak_name:
        known = [*SCHEDULES, *filter(_peak_of, dir(optax.schedules))]
        raise ValueError(
            f"optimizer.schedule is {name!r}:{suggestion(name, known)} Known: "
            f"{', '.join(SCHEDULES)}, and the schedules of optax with one peak or "
            "initial value."
        )
    make = getattr(optax.schedules, name)
    names = list(inspect.signature(make).parameters)
    for option in options:
        check_name(f"optimizer.schedule_options of {name}", option, names)
    if peak_name in options:
        raise ValueError(
            f"optimizer.schedule_options has {peak_name}, which is "
            "optimizer.learning_rate: give that."
        )
    try:
        schedule: optax.Schedule = make(**{peak_name: peak} | options)
    except Exception as error:
        raise ValueError(
            f"optimizer.schedule_options {options} do not suit {name}: {error}"
        ) from error
    return schedule


def _peak_of(name: str) -> str:
    """Return an optax schedule's name for its peak or first value, '' for others."""
    make = getattr(optax.schedules, name, None)
    names = inspect.signature(make).parameters if inspect.isfunction(make) else {}
    values = (n for n in ("peak_value", "init_value", "value") if n in names)
    return next(values, "")


def checked_rate(config: ConfigDict) -> optax.Schedule:
    """Return the learning rate's schedule, with checked values.

    Raises:
      ValueError: with the step at which it is negative or not finite.
    """
    schedule, c = learning_rate(config), config.optimizer
    if c.schedule in SCHEDULES:
        return schedule
    for step in np.unique(np.linspace(0, config.steps, SAMPLES).astype(int)).tolist():
        rounding = 1e-6 * c.learning_rate
        if not -rounding <= (rate := float(schedule(step))) < np.inf:
            raise ValueError(
                f"optimizer.schedule is {c.schedule!r}, whose learning rate is "
                f"{rate:g} at step {step}: change optimizer.schedule_options "
                f"{c.schedule_options.to_dict()} so that it is never negative."
            )
    return schedule


def optimizer(
    config: ConfigDict, stacked: Stacked | None = None, checked: bool = False
) -> optax.GradientTransformation:
    """Return the inner optimizer: clipping, an optax optimizer by name, averages.

    On a model that stacks its layers it acts as on a model with a leaf for each
    layer; so too on adapters of the model.

    Args:
      config: of the experiment.
      stacked: from parameters to their leaves that stack layers on axis 0; None:
        no leaf does.
      checked: whether `per_layer` has accepted it before, in another process.

    Raises:
      ValueError: if optax has no such optimizer, or it does not take the options.
    """
    c = config.optimizer
    rules = [_rule(config, fields) for _, fields in c.groups]
    inner = _rule(config, {})
    if rules:
        labels = functools.partial(_labels, [pattern for pattern, _ in c.groups])
        inner = optax.partition(dict(enumerate([*rules, inner])), labels)
    if stacked is not None and c.name not in ACROSS_LEAVES:
        inner = (checked_before if checked else per_layer)(inner, stacked)
    clip = [optax.clip_by_global_norm(c.clip)] if c.clip else []
    average = [average_parameters(c.ema)] if c.ema else []
    chain = [*clip, inner, *average]
    return optax.chain(*chain) if len(chain) > 1 else inner


def _rule(config: ConfigDict, fields: dict[str, Any]) -> optax.GradientTransformation:
    """Return the named optimizer; a group's fields replace the options."""
    c, fields = config.optimizer, dict(fields)
    make = getattr(optax, c.name, None) or getattr(optax.contrib, c.name, None)
    if not callable(make):
        close = suggestion(c.name, [*dir(optax), *dir(optax.contrib)])
        raise ValueError(
            f"optimizer.name is {c.name!r}, which optax does not have"
            + (f":{close}" if close else ".")
        )
    names = list(inspect.signature(make).parameters)
    if "learning_rate" not in names:
        raise ValueError(
            f"optimizer.name is {c.name!r}, which takes no learning_rate: name an "
            "optax optimizer, such as adamw, lion or sgd."
        )
    names.remove("learning_rate")
    if c.name in SCHEDULE_FREE and not fields.get("b1", c.options.get("b1", 0.9)):
        raise ValueError(
            f"optimizer.options.b1 is 0: {c.name} divides by it, give more than 0."
        )
    rate = learning_rate(config, fields.pop("learning_rate", None))
    for field in c.options:
        check_name(f"optimizer.options of {c.name}", field, names)
    for field in fields:
        check_name("a field of optimizer.groups", field, ["learning_rate", *names])
    options = DEFAULT_OPTIONS.get(c.name, {}) | c.options.to_dict() | fields
    if options.get("weight_decay") and "weight_decay" in names:
        _check_masked(c, names)
    for name in DECAY_MASKS:
        if name in names and name not in options and c.no_decay != "":
            options[name] = functools.partial(_decayed, c.no_decay)
    try:
        tx: optax.GradientTransformation = make(rate, **options)
    except Exception as error:
        shown = {k: v for k, v in options.items() if k not in DECAY_MASKS}
        raise ValueError(
            f"optimizer.options {shown} do not suit {c.name}: {error}"
        ) from error
    return tx


def _check_masked(config: ConfigDict, names: Collection[str]) -> None:
    """Say, or raise a ValueError if it was asked for, that all weights decay."""
    if config.no_decay == "" or set(DECAY_MASKS) & set(names):
        return
    what = f"{config.name} has no mask, so its weight_decay acts on all parameters"
    if config.no_decay:
        raise ValueError(
            f"optimizer.no_decay is {config.no_decay!r}, but {what}: leave it out, or "
            "use another optimizer."
        )
    logging.warning("%s, biases and norms included", what)


def _decayed(no_decay: str | None, params: PyTree) -> PyTree:
    """Return a tree of bools: whether weight decay acts on a leaf."""

    def decayed(path: KeyPath, leaf: jax.Array | jax.ShapeDtypeStruct) -> bool:
        names = path_names(path)
        if no_decay is not None:
            return re.search(no_decay, "/".join(names)) is None
        return leaf.ndim > 1 and names[-1] not in NOT_DECAYED

    return jax.tree_util.tree_map_with_path(decayed, params)


def check_patterns(config: ConfigDict, params: PyTree) -> None:
    """Raise a ValueError for a pattern of `optimizer` that matches no parameter."""
    c = config.optimizer
    paths = jax.tree_util.tree_leaves_with_path(params)
    names = ["/".join(path_names(path)) for path, _ in paths]
    patterns = [("no_decay", c.no_decay)] if c.no_decay else []
    patterns += [("groups", pattern) for pattern, _ in c.groups]
    for field, pattern in patterns:
        if not any(re.search(pattern, name) for name in names):
            shown = ", ".join(names[:: max(len(names) // 8, 1)])
            raise ValueError(
                f"optimizer.{field} has {pattern!r}, which matches no parameter: they "
                f"have names such as {shown}."
            )


def _labels(patterns: list[str], params: PyTree) -> PyTree:
    """Return each leaf's group: the number of the first pattern found in its path.

    A leaf without a pattern has the number after the last.
    """

    def label(path: KeyPath, leaf: object) -> int:
        name = "/".join(path_names(path))
        matches = (i for i, p in enumerate(patterns) if re.search(p, name))
        return next(matches, len(patterns))

    return jax.tree_util.tree_map_with_path(label, params)


class AverageState(NamedTuple):
    """State of `average_parameters`."""

    steps: jax.Array  # int32 []: updates so far
    sum: PyTree  # (1 - decay) sum_t decay^(steps - t) theta(t): as the parameters


def average_parameters(decay: float) -> optax.GradientTransformation:
    """Keep an exponential moving average of the parameters; pass updates on.

    It must be last in a chain, so that parameters plus updates are the next parameters.
    The average starts from zero and is divided by its missing weight, as Adam's moments
    are (Kingma and Ba, arXiv 1412.6980, section 3): `averaged` returns it.

    Args:
      decay: of the average, from 0 to 1.
    """

    def init(params: PyTree) -> AverageState:
        return AverageState(jnp.int32(0), jax.tree.map(jnp.zeros_like, params))

    def update(
        updates: PyTree, state: AverageState, params: PyTree = None
    ) -> tuple[PyTree, AverageState]:
        new = optax.apply_updates(params, updates)
        average = optax.incremental_update(new, state.sum, 1 - decay)
        return updates, AverageState(state.steps + 1, average)

    return optax.GradientTransformation(init, update)


def averaged(state: ShardedState, decay: float) -> ShardedState:
    """Return a sharded method's state whose committed parameters are the average.

    Args:
      state: of a method whose inner optimizer has `average_parameters(decay)`.
      decay: of the average.
    """
    (average,) = _states(state, AverageState)
    return state._replace(master=_average(average, state.master, decay))


@functools.partial(jax.jit, static_argnums=2)
def _average(average: AverageState, theta: PyTree, decay: float) -> PyTree:
    # 1 - decay**steps, of which float32 would lose the digits
    share = -jnp.expm1(average.steps.astype(jnp.float32) * math.log(decay))
    return jax.tree.map(
        lambda total, now: jnp.where(share > 0, total / share, now), average.sum, theta
    )


def evaluated(state: Any) -> Any:
    """Return a method's state whose committed parameters are the ones to evaluate.

    Schedule-free optimizers commit y, at which gradients are computed, and are
    evaluated at x (Defazio et al., arXiv 2405.15682). All others are evaluated at
    their committed parameters; their state is returned unchanged.

    Args:
      state: of a method, with any inner optimizer.
    """
    for found in _states(state, optax.contrib.ScheduleFreeState):  # one per group
        state = state._replace(master=_schedule_free_x(found.b1, found.z, state.master))
    return state


@jax.jit
def _schedule_free_x(b1: jax.Array, z: PyTree, y: PyTree) -> PyTree:
    """Return x of y = (1 - b1) z + b1 x, and y where z is of another group."""

    def x(z: jax.Array | optax.MaskedNode, y: jax.Array) -> jax.Array:
        return y if masked(z) else ((y - (1 - b1) * z) / b1).astype(y.dtype)

    masked = lambda z: isinstance(z, optax.MaskedNode)  # noqa: E731
    return jax.tree.map(x, z, y, is_leaf=masked)


def _states(state: PyTree, kind: type) -> list[Any]:
    """Return the optimizer states of one kind, wherever they are in a state."""
    is_kind = lambda x: isinstance(x, kind)  # noqa: E731
    return list(filter(is_kind, jax.tree.leaves(state, is_leaf=is_kind)))


def method(
    config: ConfigDict,
    name: str,
    mesh: Mesh | AbstractMesh,
    axis_name: str | tuple[str, ...],
    stacked: Stacked | None = None,
    specs: PyTree | None = None,
    checked: bool = False,
) -> Method:
    """Build a method around the config's optimizer.

    A method with an `inner_learning_rate` gets the optimizer's schedule, unless
    method_options has another.

    Args:
      config: of the experiment.
      name: a key of METHODS.
      mesh: the devices.
      axis_name: the mesh's data axis or axes.
      stacked: as for `optimizer`.
      specs: `param_specs` of the method; needed where the mesh has other axes.
      checked: as for `optimizer`.

    Raises:
      ValueError: if the method rejects its options, or they conflict with averages.
    """
    make, options = METHODS[name], config.method_options.to_dict()
    known = methods.options(name)
    if "extrapolation" in known and uneven(config):
        options = {"extrapolation": LOOK_AHEAD} | options
    if "inner_learning_rate" in known:
        options = {"inner_learning_rate": learning_rate(config)} | options
    fields = {
        "comm_dtype": dtype("comm_dtype", config.comm_dtype),
        "accumulate_dtype": dtype("accumulate_dtype", config.accumulate_dtype),
    }
    places = {"mesh": mesh, "axis_name": axis_name, "param_specs": specs}
    inner = optimizer(config, stacked, checked)
    try:
        tx = make(inner, **places, **fields, **options)
    except TypeError as error:
        raise ValueError(
            f"method_options {config.method_options.to_dict()} do not suit {name}: "
            f"{error}"
        ) from error
    c = config.optimizer
    average = f"optimizer.ema is {c.ema}" if c.ema else ""
    if c.name in SCHEDULE_FREE:
        if average:
            raise ValueError(
                f"{average}, but {c.name} averages the parameters itself: leave it out."
            )
        average = f"optimizer.name is {c.name!r}, which averages parameters"
    if average and tx.local:
        raise ValueError(
            f"{average}, but each worker of {name} has parameters of its own: leave it "
            "out, or use a sharded method."
        )
    if c.name in SCHEDULE_FREE and c.schedule != "constant":
        raise ValueError(
            f"optimizer.schedule is {c.schedule!r}, but {c.name} replaces a schedule: "
            "set optimizer.schedule='constant'."
        )
    return tx


def uneven(config: ConfigDict) -> bool:
    """Return whether the first half of acco's steps is the smaller one."""
    first = next(iter(first_halves(config, 2)), 0)
    return 0 < 2 * first < config.microbatches_per_step


def drops_nonfinite(config: ConfigDict, tx: Method) -> bool:
    """Return whether workers with numbers that are not finite are dropped."""
    if config.drop_nonfinite is None:
        return tx.round(tx.phase(0)).drops
    return bool(config.drop_nonfinite)
