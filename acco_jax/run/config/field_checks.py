"""Checks of the fields and values of an experiment's config."""

import math
import operator
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, Union, get_args, get_origin

import numpy as np
from ml_collections import ConfigDict

from acco_jax import methods
from acco_jax.command.paths import expanded
from acco_jax.core.names import check_name, named, suggestion
from acco_jax.run.config.fields import dtype, profiled, replayed
from acco_jax.run.config.schema import FIELDS, INTEGERS, SCHEDULES, STEPS, Field

# Arguments of a method that are not method_options: the config has fields for them.
ARGUMENTS = ("mesh", "axis_name", "comm_dtype", "accumulate_dtype", "param_specs")

# Options of optimizers, also of a group of parameters.
OPTIONS = {
    **dict.fromkeys(("b1", "b2", "b3", "momentum"), Field(0.0, "", least=0, below=1)),
    **dict.fromkeys(
        ("eps", "eps_root", "weight_decay", "learning_rate"), Field(0.0, "", least=0)
    ),
}


def check(config: ConfigDict) -> None:
    """Raise a ValueError for fields and values that no experiment can have.

    Raises:
      ValueError: with the field, its value and the remedy. Nothing is built.
    """
    _check_names(config)
    for name, field in FIELDS.items():
        _check_value(name, field, operator.attrgetter(name)(config))
    if config.scale is not None:
        raise ValueError(
            f"scale is {config.scale!r}, but it was not applied: call "
            "acco_jax.run.config.fields.scaled, as commands do."
        )
    _check_method_options(config)
    _check_length(config)
    _check_microbatches(config)
    _check_optimizer(config.optimizer)
    _check_adapters(config)
    _check_data(config)
    _check_init_from(config)
    _check_samples(config)


def _check_method_options(config: ConfigDict) -> None:
    """Raise a ValueError for options that the method lacks or of another type."""
    if config.method == "auto":
        if config.method_options:
            raise ValueError(
                f"method_options is {config.method_options.to_dict()}, but method is "
                "'auto': name the method that has them, or leave them out."
            )
        return
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
    if not given and (warmup := config.optimizer.warmup_steps) > config.steps:
        raise ValueError(
            f"optimizer.warmup_steps is {warmup}, more than the {config.steps} steps "
            "of the run: lower it."
        )
    if len(given) > 1:
        raise ValueError(
            f"tokens is {config.tokens} and epochs {config.epochs}: give one of them."
        )
    if config.model.router_loss and config.data.task != "pretrain":
        raise ValueError(
            f"model.router_loss is {config.model.router_loss}, which would count the "
            f"padding of data.task {config.data.task!r}: leave it out."
        )
    if config.tokens is not None and config.data.task != "pretrain":
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
    constant = config.microbatches == "balanced" and not config.balance.grows
    if given and config.microbatches != "fixed" and not constant:
        raise ValueError(
            f"{given[0]} is {config[given[0]]}, but microbatches="
            f"{config.microbatches!r} decides what a step takes: give steps."
        )


def _check_optimizer(c: ConfigDict) -> None:
    """Raise a ValueError for options, patterns or groups out of range."""
    _check_options("optimizer.options", c.options.to_dict())
    if c.schedule in SCHEDULES and (options := c.schedule_options.to_dict()):
        raise ValueError(
            f"optimizer.schedule_options is {options}, but {c.schedule} has fields of "
            "its own (final_fraction, decay_fraction): use these."
        )
    for group in c.groups:
        such = "fields, such as (('wte', {'learning_rate': 1e-4}),)."
        _check_pair("optimizer.groups", group, dict, such)
        _check_options(f"the group {group[0]!r} of optimizer.groups", group[1])
    for pattern in (c.no_decay, *(pattern for pattern, _ in c.groups)):
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(
                f"optimizer has the pattern {pattern!r}, which is not a regular "
                f"expression: {error}."
            ) from error


def _check_options(where: str, options: Mapping[str, Any]) -> None:
    """Raise a ValueError for options of an optimizer that are out of range."""
    for name, value in options.items():
        if name not in OPTIONS or (value is None and name != "learning_rate"):
            continue
        number = value.item() if isinstance(value, np.generic) else value
        if type(number) not in (int, float):
            raise ValueError(f"{where}.{name} is {value!r}: give a number.")
        _check_value(f"{where}.{name}", OPTIONS[name], number)


def _check_microbatches(config: ConfigDict) -> None:
    """Raise a ValueError for `microbatches`, `counts` and groups in conflict."""
    if config.microbatch_size % config.mesh.fsdp:
        raise ValueError(
            f"microbatch_size is {config.microbatch_size}, which mesh.fsdp="
            f"{config.mesh.fsdp} does not divide: use a multiple."
        )
    kinds = ("fixed", "adaptive", "balanced")
    if config.microbatches not in kinds and not replayed(config):
        raise ValueError(
            f"microbatches is {config.microbatches!r}: choose 'fixed', 'adaptive', "
            "'balanced' or 'replay:FILE'."
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
    if c.task != "pretrain" and c.text_feature != FIELDS["data.text_feature"].default:
        raise ValueError(
            f"data.text_feature is {c.text_feature!r}, but data.task={c.task!r} has "
            "columns of its own: leave it out, and rename the data's columns."
        )
    if c.document_mask and c.task != "pretrain":
        raise ValueError(
            f"data.document_mask is of task='pretrain': of {c.task!r} every row is one "
            "document; leave it out."
        )
    if lengths and c.task == "pretrain":
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
    names = "factory size vocab_size kv_heads mlp_width experts experts_per_token"
    for field in ("base", *(f"model.{name}" for name in names.split())):
        if (value := operator.attrgetter(field)(config)) is not None:
            raise ValueError(
                f"{field} is {value!r}, but init_from={folder!r} has its own model: "
                "give one of them."
            )
    if tokenizer == "bpe":
        raise ValueError(
            "data.tokenizer is 'bpe', which makes other tokens than those that "
            f"init_from={folder!r} knows: set data.tokenizer='init_from'."
        )


def _check_adapters(config: ConfigDict) -> None:
    """Raise a ValueError for fields of `lora` in conflict, or of another form."""
    c = config.lora
    for pair in c.ranks:
        such = "a rank, such as (('q_proj/kernel', 8), ('mlp/.*kernel', 4))."
        _check_pair("lora.ranks", pair, int, such)
    if c.ranks and c.rank:
        raise ValueError(
            f"lora.ranks is {tuple(c.ranks)} and lora.rank {c.rank}: give one of them."
        )
    if c.init_from is None:
        return
    if config.init_from is None:
        raise ValueError(
            f"lora.init_from is {c.init_from!r}, but init_from is not set: give the "
            "folder of the model that was adapted."
        )
    for name in ("rank", "ranks", "scale"):
        if c[name] != FIELDS[f"lora.{name}"].default:
            raise ValueError(
                f"lora.{name} is {c[name]}, but lora.init_from={c.init_from!r} has its "
                "own: give one of them."
            )


def _check_pair(field: str, pair: Any, kind: type, such: str) -> None:
    """Raise a ValueError for what is not a pair of a pattern and another value."""
    if not _is_a(tuple, pair) or list(map(type, pair)) != [str, kind]:
        raise ValueError(f"{field} has {pair!r}: give pairs of a pattern and {such}")


def _check_names(config: ConfigDict) -> None:
    """Raise a ValueError for unknown or missing fields."""
    sections = sorted({name.rpartition(".")[0] for name in FIELDS} - {""})
    full = [name for name in sections if isinstance(config.get(name), ConfigDict)]
    given = [*config, *(f"{name}.{field}" for name in full for field in config[name])]
    for name in given:
        if name not in sections and name not in FIELDS:
            close = _meant(name, [*FIELDS, *sections])
            said = f":{close}" if close else "."
            raise ValueError(f"config has no field {repr(name)[1:-1]}{said}")
    for name in FIELDS:
        if name not in given:
            raise ValueError(
                f"config lacks the field {name}: build it from "
                "acco_jax.run.config.fields.default_config()."
            )


def _check_value(name: str, field: Field, value: Any) -> None:
    """Raise a ValueError for a value of another type, out of bounds, or unknown."""
    if value is None and field.default is None:
        return
    if field.word and value == field.default:
        return
    if not _is_a(field.kind, value):
        shown = value.to_dict() if isinstance(value, ConfigDict) else value
        raise ValueError(
            f"{name} is {shown!r}: give a value of type {field.kind.__name__}"
            f"{f', or {field.default!r}' * field.word}."
        )
    if type(value) is float and not math.isfinite(value):
        raise ValueError(f"{name} is {value}: it must be finite.")
    if type(value) is int and field.most is None and value > INTEGERS:
        raise ValueError(f"{name} is {value}: it must be at most {INTEGERS}.")
    if remedy := field.broken(value):
        raise ValueError(f"{name} is {value}: {remedy}")
    if field.choices:
        check_name(name, value, field.choices)
    if field.form:
        CHECKS[field.form](name, value)


def _meant(name: str, names: list[str]) -> str:
    """Return " did you mean ...?" for a field of that name elsewhere, or like it."""
    last = name.rpartition(".")[2]
    elsewhere = [one for one in names if one.rpartition(".")[2] == last]
    return f" did you mean {elsewhere[0]!r}?" if elsewhere else suggestion(name, names)


def _is_a(kind: type, value: object) -> bool:
    wider = {float: (float, int), tuple: (tuple, list), dict: ConfigDict}
    return isinstance(value, wider.get(kind, kind))


# What a str has to be, by the schema's name for it.
CHECKS: dict[str, Callable[[str, str], object]] = {
    "path": _check_home,
    "dtype": dtype,
    "package.module:function": named,
    "START:STOP": lambda name, value: profiled(value),
}
