"""Checks of the fields and values of an experiment's config."""

import math
import operator
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any, Union, get_args, get_origin

from ml_collections import ConfigDict

from acco_jax import methods
from acco_jax.command.paths import expanded
from acco_jax.core.names import check_name, named, suggestion
from acco_jax.methods import METHODS
from acco_jax.run.config.fields import (
    STEPS,
    default_config,
    dtype,
    profiled,
    replayed,
)
from acco_jax.step import FORMS

# Arguments of a method that are not method_options: the config has fields for them.
ARGUMENTS = ("mesh", "axis_name", "comm_dtype", "accumulate_dtype", "param_specs")

# The smallest value of numeric fields, and the remedy for a smaller one.
MINIMA = {
    **dict.fromkeys(
        ("steps", "microbatch_size", "microbatches_per_step", "length", "log_every",
         "eval_every", "eval_batches", "checkpoint_every", "keep_checkpoints",
         "most_dropped_in_a_row", "mesh.fsdp", "mesh.tensor"),
        (1, "it must be at least 1."),
    ),
    "balance.floor": (0, "give 0 for none."),
    "optimizer.clip": (0, "give 0 for none."),
    "optimizer.final_fraction": (0, "give 0 for none."),
    "optimizer.ema": (0, "give 0 for none."),
    "spike.threshold": (0, "give nats."),
    "spike.calls": (1, "it must be at least 1."),
    "spike.tokens": (1, "it must be at least 1."),
    "compare_replicas_every": (0, "give 0 for never."),
    "seed": (0, "it must be at least 0."),
    "samples": (0, "give 0 for none."),
    "sample_tokens": (1, "it must be at least 1."),
    "optimizer.warmup_steps": (0, "give 0 for none."),
    "lora.rank": (0, "give 0 for no adapters."),
}  # fmt: skip
# The largest values: of counters that are 32 bits wide, of CPU devices in one process,
# of arrays whose sizes 64 bits count. Other integers have at most 31 bits.
MAXIMA = {
    "steps": STEPS, "devices": 1024, "data.vocab_size": 2**24, "samples": 1024,
    "model.vocab_size": 2**24, "model.width": 2**20, "model.layers": 2**12,
    "model.mlp_width": 2**22, "lora.rank": 2**20,
}  # fmt: skip
INTEGERS = 2**31 - 1
UNBOUNDED = ("tokens",)  # its steps are checked instead
# Optional fields that must be at least 1 where they are given.
POSITIVE = ("devices", "domains", "data.vocab_size", "model.vocab_size")
DECAYS = ("b1", "b2", "b3", "momentum")  # options of optimizers, from 0 to below 1
AT_LEAST_0 = ("eps", "eps_root", "weight_decay")  # other options of optimizers
PATHS = ("base", "init_from", "checkpoints", "data.path", "data.data_dir")

# The names of their fields are free.
OPEN = ("options", "method_options", "schedule_options", "scales")


def check(config: ConfigDict) -> None:
    """Raise a ValueError for fields and values that no experiment can have.

    Raises:
      ValueError: with the field, its value and the remedy. Nothing is built.
    """
    _check_fields(config, default_config())
    if config.scale is not None:
        raise ValueError(
            f"scale is {config.scale!r}, but it was not applied: call "
            "acco_jax.run.config.fields.scaled, as commands do."
        )
    check_name("method", config.method, METHODS)
    _check_method_options(config)
    check_name("form", config.form, FORMS)
    check_name("batch", config.batch, ("kept", "per_worker"))
    check_name("spike.policy", config.spike.policy, ("stop", "rollback", "off"))
    dtype("comm_dtype", config.comm_dtype)
    dtype("accumulate_dtype", config.accumulate_dtype)
    for field, (least, remedy) in MINIMA.items():
        value = operator.attrgetter(field)(config)
        if not value >= least:
            raise ValueError(f"{field} is {value}: {remedy}")
    for field in PATHS:
        if value := operator.attrgetter(field)(config):
            _check_home(field, value)
    for field in POSITIVE:
        if (value := operator.attrgetter(field)(config)) is not None and value < 1:
            raise ValueError(f"{field} is {value}: it must be at least 1, or None.")
    _check_length(config)
    _check_microbatches(config)
    _check_optimizer(config.optimizer)
    given = config.tokens is None and config.epochs is None
    if given and (warmup := config.optimizer.warmup_steps) > config.steps:
        raise ValueError(
            f"optimizer.warmup_steps is {warmup}, more than the "
            f"{config.steps} steps of the run: lower it."
        )
    _check_ranks(config.lora)
    _check_data(config)
    _check_init_from(config)
    _check_samples(config)
    named("metrics_hook", config.metrics_hook)
    profiled(config.profile)


def _check_method_options(config: ConfigDict) -> None:
    """Raise a ValueError for options that the method lacks or of another type."""
    known = methods.options(config.method)
    names = [name for name in known if name not in ARGUMENTS]
    for name, value in config.method_options.items():
        check_name(f"method_options of {config.method}", name, names)
        if not _suits(known[name], value):
            kind = getattr(known[name], "__name__", "") or str(known[name])
            kind = str(known[name]) if get_args(known[name]) else kind
            raise ValueError(
                f"method_options.{name} is {value!r}: give a finite value of type "
                f"{kind}."
            )


def _suits(kind: Any, value: Any) -> bool:
    """Return whether a value is of an annotated type, numbers up to INTEGERS."""
    if isinstance(kind, types.UnionType) or get_origin(kind) is Union:
        return any(_suits(one, value) for one in get_args(kind))
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        fits = isinstance(value, tuple | list) and len(value) == len(kinds)
        return fits and all(map(_suits, kinds, value))
    if get_origin(kind) is not None:  # a Callable
        return callable(value)
    if kind in (int, float):
        number = type(value) is int or (kind is float and type(value) is float)
        return number and abs(value) <= INTEGERS
    return kind is Any or isinstance(value, kind)


def _check_home(field: str, path: str) -> None:
    """Raise a ValueError for a path in the home folder of an unknown user."""
    try:
        expanded(path)
    except ValueError as error:
        raise ValueError(f"{field} is {path}, but {error}") from error


def _check_length(config: ConfigDict) -> None:
    """Raise a ValueError for a length given twice, or not countable in steps."""
    given = [f for f in ("tokens", "epochs") if config[f] is not None]
    for field in given:
        if not 0 < config[field] < math.inf:
            raise ValueError(f"{field} is {config[field]}: it must be more than 0.")
    if len(given) > 1:
        raise ValueError(
            f"tokens is {config.tokens} and epochs {config.epochs}: give one of them."
        )
    if config.tokens is not None and config.data.task == "instruct":
        raise ValueError(
            f"tokens is {config.tokens}, but answers differ in length: give epochs or "
            "steps."
        )
    for pair in config.extended:
        ints = _is_a(tuple, pair) and list(map(type, pair)) == [int, int]
        if not ints or not 0 <= pair[0] <= pair[1] <= STEPS:
            raise ValueError(
                f"extended has {pair!r}: give pairs of a step and the steps of a run, "
                "such as ((500, 1000),)."
            )
    constant = config.microbatches == "halves" or (
        config.microbatches == "balanced" and not config.balance.grows
    )
    if given and config.microbatches != "fixed" and not constant:
        raise ValueError(
            f"{given[0]} is {config[given[0]]}, but microbatches="
            f"{config.microbatches!r} decides what a step takes: give steps."
        )


def _check_optimizer(c: ConfigDict) -> None:
    """Raise a ValueError for fractions, options, patterns or groups out of range."""
    for field in ("final_fraction", "decay_fraction", "ema"):
        if not 0 <= c[field] <= 1 or (field == "ema" and c.ema == 1):
            most = "below 1" if field == "ema" else "at most 1"
            raise ValueError(
                f"optimizer.{field} is {c[field]}: it must be at least 0 and {most}."
            )
    if not 0 < c.learning_rate < math.inf:
        raise ValueError(
            f"optimizer.learning_rate is {c.learning_rate}: it must be more than 0 and "
            "finite."
        )
    _check_options("optimizer.options", c.options.to_dict())
    for group in c.groups:
        if not _is_a(tuple, group) or list(map(type, group)) != [str, dict]:
            raise ValueError(
                f"optimizer.groups has {group!r}: give pairs of a pattern and fields, "
                "such as (('wte', {'learning_rate': 1e-4}),)."
            )
        _check_options(f"the group {group[0]!r} of optimizer.groups", group[1])
    for pattern in (c.no_decay, *(pattern for pattern, _ in c.groups)):
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(
                f"optimizer has the pattern {pattern!r}, which is no regular "
                f"expression: {error}."
            ) from error


def _check_options(where: str, options: Mapping[str, Any]) -> None:
    """Raise a ValueError for options of an optimizer that are out of range."""
    for name, value in options.items():
        if type(value) not in (int, float):
            continue
        if name in DECAYS and not 0 <= value < 1:
            raise ValueError(
                f"{where}.{name} is {value}: it must be at least 0 and below 1."
            )
        if name in AT_LEAST_0 and not 0 <= value < math.inf:
            raise ValueError(f"{where}.{name} is {value}: it must be at least 0.")
        if name == "learning_rate" and not 0 <= value < math.inf:
            raise ValueError(f"{where}.{name} is {value}: it must be at least 0.")


def _check_microbatches(config: ConfigDict) -> None:
    """Raise a ValueError for `microbatches`, `counts` and groups in conflict."""
    if config.microbatch_size % config.mesh.fsdp:
        raise ValueError(
            f"microbatch_size is {config.microbatch_size}, which mesh.fsdp="
            f"{config.mesh.fsdp} does not divide: use a multiple."
        )
    kinds = ("fixed", "adaptive", "balanced", "halves")
    if config.microbatches not in kinds and not replayed(config):
        raise ValueError(
            f"microbatches is {config.microbatches!r}: choose 'fixed', 'adaptive', "
            "'balanced', 'halves' or 'replay:FILE'."
        )
    if config.microbatches != "fixed" and len(config.counts):
        raise ValueError(
            f"counts is {tuple(config.counts)}, but microbatches="
            f"{config.microbatches!r} determines them: leave one out."
        )
    if len(config.counts) and not any(config.counts):
        raise ValueError(
            "counts is 0 for every worker, so nothing would ever be computed: give at "
            "least one worker a microbatch."
        )


def _check_data(config: ConfigDict) -> None:
    """Raise a ValueError for fields of `data` in conflict or out of range."""
    c, lengths = config.data, tuple(config.data.lengths)
    check_name("data.task", c.task, ("pretrain", "instruct"))
    if not 0 <= c.skew <= 1:
        raise ValueError(f"data.skew is {c.skew}: it must lie from 0 to 1.")
    if c.document_mask and c.task != "pretrain":
        raise ValueError(
            f"data.document_mask is of task='pretrain': of {c.task!r} every row is one "
            "document; leave it out."
        )
    if lengths and c.task != "instruct":
        raise ValueError(
            f"data.lengths is {lengths}, but rows of {c.task!r} have one length: set "
            "`length`."
        )
    within = all(type(x) is int and 1 <= x <= config.length for x in lengths)
    if not within or list(lengths) != sorted(set(lengths)):
        raise ValueError(
            f"data.lengths is {lengths}: give ascending integers from 1 to length, "
            f"{config.length}."
        )


def _check_samples(config: ConfigDict) -> None:
    """Raise a ValueError for samples that the model cannot write."""
    if not config.samples:
        return
    if (factory := config.model.factory) is not None:
        raise ValueError(
            f"samples is {config.samples}, but only the loss of model.factory "
            f"{factory} is known: give 0."
        )
    if config.sample_tokens >= config.length:
        raise ValueError(
            f"sample_tokens is {config.sample_tokens}, but with a prompt there is only "
            f"room for length={config.length}: lower it."
        )


def _check_init_from(config: ConfigDict) -> None:
    """Raise a ValueError for fields in conflict with the model of init_from."""
    folder, tokenizer = config.init_from, config.data.tokenizer
    if folder is None:
        if tokenizer == "init_from":
            raise ValueError(
                "data.tokenizer is 'init_from', but init_from is not set: give both."
            )
        return
    others = {"base": config.base} | {
        f"model.{name}": config.model[name]
        for name in ("factory", "size", "vocab_size", "kv_heads", "mlp_width")
    }
    for field, value in others.items():
        if value is not None:
            raise ValueError(
                f"{field} is {value!r}, but init_from={folder!r} has its own model: "
                "give one of them."
            )
    if tokenizer == "bpe":
        raise ValueError(
            "data.tokenizer is 'bpe', which makes other tokens than those that "
            f"init_from={folder!r} knows: set data.tokenizer='init_from'."
        )


def _check_ranks(c: ConfigDict) -> None:
    """Raise a ValueError for lora.ranks that are not pairs, or beside lora.rank."""
    for pair in c.ranks:
        if not _is_a(tuple, pair) or list(map(type, pair)) != [str, int]:
            raise ValueError(
                f"lora.ranks has {pair!r}: give pairs of a pattern and a rank, such as "
                "(('q_proj/kernel', 8), ('mlp/.*kernel', 4))."
            )
    if c.ranks and c.rank:
        raise ValueError(
            f"lora.ranks is {tuple(c.ranks)} and lora.rank {c.rank}: give one of them."
        )


def _check_fields(config: ConfigDict, default: ConfigDict, prefix: str = "") -> None:
    """Raise a ValueError for unknown, missing or wrongly typed fields."""
    for field in config:
        if field not in default:
            name = repr(f"{prefix}{field}")[1:-1]
            close = _meant(name, [prefix + known for known in default])
            raise ValueError(
                f"config has no field {name}" + (f":{close}" if close else ".")
            )
        kind, value = default.get_type(field), config.get(field)
        if not _is_a(kind, value) and not (value is None and default[field] is None):
            shown = value.to_dict() if isinstance(value, ConfigDict) else value
            raise ValueError(
                f"{prefix}{field} is {shown!r}: give a value of type {kind.__name__}."
            )
        if type(value) is float and not math.isfinite(value):
            raise ValueError(f"{prefix}{field} is {value}: it must be finite.")
        bounded = type(value) is int and f"{prefix}{field}" not in UNBOUNDED
        most = MAXIMA.get(f"{prefix}{field}", INTEGERS)
        if bounded and value > most:
            raise ValueError(f"{prefix}{field} is {value}: it must be at most {most}.")
        if kind is ConfigDict and field not in OPEN:
            _check_fields(value, default[field], f"{prefix}{field}.")
    missing = next((f for f in default if f not in config), None)
    if missing is not None:
        raise ValueError(
            f"config lacks the field {prefix}{missing}: build it from "
            "acco_jax.run.config.fields.default_config()."
        )


def _meant(name: str, siblings: list[str]) -> str:
    """Return " did you mean ...?" for a field of that name elsewhere, or like it."""
    last = name.rpartition(".")[2]
    for field in _dotted(default_config()):
        if field.rpartition(".")[2] == last:
            return f" did you mean {field!r}?"
    return suggestion(name, siblings)


def _dotted(config: ConfigDict, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all fields."""
    for field, value in config.items():
        yield prefix + field
        if isinstance(value, ConfigDict):
            yield from _dotted(value, f"{prefix}{field}.")


def _is_a(kind: type, value: Any) -> bool:
    wider = {float: (float, int), tuple: (tuple, list)}
    return isinstance(value, wider.get(kind, kind))
