"""Fields of an experiment, and values that follow from them."""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict, config_dict

from acco_jax.core.names import check_name
from acco_jax.models.sizes import FAMILIES, SIZES
from acco_jax.run.config.schema import FIELDS, STEPS
from acco_jax.step import first_half
from acco_jax.step.first_half import SMALLEST

ADAPTERS = ("rank", "ranks", "init_from")  # fields of `lora` that ask for some
OF_SCHEDULES = {  # fields of `optimizer`, and the schedules that read them
    "final_fraction": ("cosine", "linear", "wsd"),
    "decay_fraction": ("wsd",),
}
FACTORY = ("factory", "options", "vocab_size")  # fields of a model of another kind


def default_config() -> ConfigDict:
    """Return the config with all fields; an experiment starts from it and changes some.

    Fields, their defaults and what they mean are in `acco_jax.run.config.schema`. The
    config is not locked, so that optimizer.options takes new keys from the command
    line; `validate` rejects fields that are not in the schema.
    """
    config = ConfigDict()
    for name, field in FIELDS.items():
        section, _, last = name.rpartition(".")
        if section and section not in config:
            config[section] = ConfigDict()
        value = field.default
        if value is None:
            value = config_dict.placeholder(field.kind)
        elif field.word:
            value = config_dict.FieldReference(value, field_type=object)
        elif field.kind is dict:
            value = ConfigDict(value, type_safe=False)
        (config[section] if section else config)[last] = value
    return config


def scaled(config: ConfigDict, kept: Collection[str] = ()) -> ConfigDict:
    """Return a config with the fields of its `scale`, and without `scales`.

    Args:
      config: of the experiment.
      kept: dotted names of fields that keep their values: fields of the command line.

    Raises:
      ValueError: if there is no such scale, or it does not fit the config.
    """
    name, scales = config.get("scale"), config.get("scales")
    if not isinstance(scales, ConfigDict):
        return config  # `validate` reports the missing field
    if name is not None and not scales:
        raise ValueError(
            f"scale is {name!r}, but the config has no scales: leave it out."
        )
    if name is not None:
        check_name("scale", name, scales)
    config = config.copy_and_resolve_references()
    config.scale, config.scales = None, ConfigDict(type_safe=False)
    for field, value in _flat(scales[name].to_dict() if name else {}):
        if any(f"{field}.".startswith(f"{known}.") for known in kept):
            continue
        try:
            config.update_from_flattened_dict({field: value})
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"scales.{name} has {field}={value!r}, which does not fit the field of "
                f"that name: {' '.join(str(error).split())}"
            ) from error
    return config


def check_overruled(config: ConfigDict, given: Collection[str]) -> None:
    """Raise a ValueError for fields that are given beside one that decides instead.

    Args:
      config: of the experiment.
      given: dotted names of fields of the command line.
    """
    for field in ("epochs", "tokens") if "steps" in given else ():
        if (value := config.get(field)) is not None:
            raise ValueError(
                f"steps is {config.steps}, but {field}={value} determines them: give "
                f"--config.{field} instead, or remove it from the config's file."
            )
    if "first_half" in given:
        for field, plain in (("counts", ()), ("microbatches", "fixed")):
            if (value := config.get(field, plain)) != plain:
                raise ValueError(
                    f"first_half is {config.first_half}, but {field}={value} "
                    "determines what a half-round computes: leave one of them out."
                )
    lora = config.get("lora", {})
    for field, kinds in (("pattern", ["rank"]), ("scale", ADAPTERS)):
        if f"lora.{field}" in given and not any(map(lora.get, kinds)):
            raise ValueError(
                f"lora.{field} is {lora[field]!r}, but {' or '.join(kinds)} of lora is "
                "not given: give lora.rank, too."
            )
    kind = config.get("microbatches", "fixed")
    others = {
        "balance.": (kind == "balanced", "microbatches='balanced'"),
        "most_microbatches": (kind != "fixed", "microbatches that vary"),
        "ignore_weights": (config.get("init_from"), "init_from"),
        "sample_": (config.get("samples"), "samples"),
        "model.options.": (config.get("model", {}).get("factory"), "model.factory"),
        "most_dropped_in_a_row": (
            config.get("drop_nonfinite") is not False,
            "drop_nonfinite",
        ),
    }
    if config.get("spike", {}).get("policy") == "off":
        watching = False, "a spike.policy other than 'off'"
        others |= {
            f"spike.{name}": watching for name in ("threshold", "calls", "tokens")
        }
    for start, (has, what) in others.items():
        for field in given if not has else ():
            if f"{field}.".startswith(start):
                raise ValueError(f"{field} is of {what}, which is not set: drop it.")
    optimizer = config.get("optimizer", {})
    for field, schedules in OF_SCHEDULES.items():
        schedule = optimizer.get("schedule")
        if f"optimizer.{field}" in given and schedule not in schedules:
            raise ValueError(
                f"optimizer.{field} is {optimizer[field]!r}, but optimizer.schedule "
                f"{schedule!r} has none: it is of {', '.join(schedules)}."
            )
    if not isinstance(model := config.get("model"), ConfigDict):
        return  # `validate` reports the missing field
    own = ["family", "width", "layers", "heads"]
    if folder := config.get("init_from"):
        whole = f"the model of init_from {folder!r}"
        own.append("window")
    elif size := model.get("size"):
        whole = f"model.size {size!r}"
        own += [name for name in SIZES.get(size, ()) if name == "window"]
    elif factory := model.get("factory"):
        whole = f"the model of model.factory {factory!r}"
        own = [x[6:] for x in given if x.startswith("model.")]
        own = [x for x in own if x.partition(".")[0] not in FACTORY]
    else:
        own = []
    if "model.window" in given and not _has_windows(model):
        raise ValueError(
            f"model.window is {model.window}, but the model has no local layers, whose "
            "it is: drop it, or use another family or size."
        )
    for name in own:
        if (field := f"model.{name}") in given:
            value = model.get(name)
            raise ValueError(f"{field} is {value}, but {whole} has its own: drop one.")


def _has_windows(model: ConfigDict) -> bool:
    """Return whether some layers see a window; True if that is not known here."""
    kinds = ("local",)
    if model.get("size") in SIZES:
        kinds = SIZES[model.size].get("pattern", kinds)
    elif not model.get("size") and model.get("family") in FAMILIES:
        kinds = FAMILIES[model.family].get("pattern", kinds)
    return "local" in kinds


def _flat(fields: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def from_json(fields: Mapping[str, Any]) -> ConfigDict:
    """Return the config that a run's config.json describes.

    Missing fields, as in a config.json of an earlier version, have their defaults.

    Raises:
      TypeError: if a field has a value of another type.
    """

    def frozen(value: Any) -> Any:  # JSON makes lists of tuples
        if isinstance(value, dict):
            return {k: frozen(v) for k, v in value.items()}
        return tuple(map(frozen, value)) if isinstance(value, list) else value

    config = default_config()
    config.update({k: frozen(v) for k, v in fields.items() if k in config})
    return config


def with_steps(
    config: ConfigDict, rows_per_step: int, rows_per_epoch: int, steps_per_call: int
) -> ConfigDict:
    """Return the config with the `steps` that `tokens` or `epochs` ask for.

    Args:
      config: of the experiment.
      rows_per_step: of all workers together.
      rows_per_epoch: rows of the training documents.
      steps_per_call: of the method, a multiple of which steps are rounded up to.

    Raises:
      ValueError: if there are more steps.
    """
    if config.tokens is None and config.epochs is None:
        return config
    if config.epochs is None:
        rows = Fraction(config.tokens, config.length)
    else:
        rows = Fraction(str(config.epochs)) * rows_per_epoch
    calls = math.ceil(rows / (rows_per_step * steps_per_call))
    steps = max(calls, 1) * steps_per_call
    if steps > STEPS:
        field = "tokens" if config.epochs is None else "epochs"
        raise ValueError(
            f"{field} is {config[field]}, which takes more than {STEPS} steps: lower "
            "it, or give steps."
        )
    if (warmup := config.optimizer.warmup_steps) > steps:
        raise ValueError(
            f"optimizer.warmup_steps is {warmup}, more than the {steps} steps of the "
            "run: lower it."
        )
    config = config.copy_and_resolve_references()
    config.steps = steps
    return config


def call_microbatches(config: ConfigDict, calls_per_step: int, workers: int) -> int:
    """Return the microbatches of each worker in one of a step's half-rounds.

    Raises:
      ValueError: if the step does not divide into half-rounds, or counts do not fit.
    """
    per_step, counts = config.microbatches_per_step, tuple(config.counts)
    if per_step % calls_per_step:
        raise ValueError(
            f"microbatches_per_step is {per_step}, which does not divide into the "
            f"{calls_per_step} calls of a step of {config.method}: use a multiple."
        )
    microbatches = per_step // calls_per_step
    whole = all(type(c) is int and 0 <= c <= microbatches for c in counts)
    fits = len(counts) == workers and whole
    if counts and not fits:
        raise ValueError(
            f"counts is {counts}: give one number from 0 to {microbatches} for each of "
            f"the {workers} workers, or none."
        )
    return microbatches


def first_halves(config: ConfigDict, calls_per_step: int) -> tuple[int, ...]:
    """Return the first halves that a step of the config may have, ascending.

    A step of one call has none, nor one of given or varying counts.

    Raises:
      ValueError: if the config gives one that its steps cannot have.
    """
    per_step, first = config.microbatches_per_step, config.first_half
    if calls_per_step != 2 or config.microbatches != "fixed" or config.counts:
        return ()
    if first == "auto":
        return first_half.first_halves(per_step)
    if first >= per_step:
        raise ValueError(
            f"first_half is {first} of microbatches_per_step={per_step}: give 1 to "
            "one less than these, or 'auto'."
        )
    return (first,)


def with_first_half(config: ConfigDict, first: int | str) -> ConfigDict:
    """Return the config with a first half of `first` microbatches, or 'auto'."""
    config = config.copy_and_resolve_references()
    with config.ignore_type():
        config.first_half = first
    return config


def with_quarters(config: ConfigDict) -> ConfigDict:
    """Return the config with a first half of a quarter, if its rows can be divided so.

    A step of less than four microbatches gets more, smaller ones, of as many rows, and
    an evaluation more, smaller batches.
    """
    config = config.copy_and_resolve_references()
    least = 2 * config.mesh.fsdp  # rows that can be halved
    while (
        (config.microbatches_per_step < SMALLEST or config.microbatches_per_step % 2)
        and not config.microbatch_size % least
        and not config.counts  # which count microbatches
    ):
        config.microbatches_per_step *= 2
        config.microbatch_size //= 2
        config.eval_batches *= 2
    per_step = config.microbatches_per_step
    first = first_half.first_halves(per_step)[0]
    return with_first_half(config, first if first < per_step else "auto")


def replayed(config: ConfigDict) -> str:
    """Return the path of the log that a run repeats; '' if it repeats none."""
    kind, _, file = config.microbatches.partition(":")
    return file if kind == "replay" else ""


def dtype(field: str, name: str | None) -> jnp.dtype | None:
    """Return a floating dtype by name, None for None; an error names the field."""
    if name is None:
        return None
    try:
        value = jnp.dtype(name)
    except TypeError:
        value = None
    if value is None or not jnp.issubdtype(value, jnp.floating):
        raise ValueError(f"{field} is {name!r}: give a floating dtype, e.g. bfloat16.")
    if value == jnp.float64 and not jax.config.values["jax_enable_x64"]:
        raise ValueError(
            f"{field} is {name!r}, which JAX makes float32 of: set JAX_ENABLE_X64=1, "
            "or give float32."
        )
    return value


def profiled(text: str | None, total_calls: int | None = None) -> range:
    """Return the half-rounds that a config's `profile` names, counted from 1.

    Args:
      text: 'START:STOP', both included; None: none.
      total_calls: of the run, if that is known.

    Raises:
      ValueError: if it has another form, or goes beyond the run.
    """
    if text is None:
        return range(0)
    match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text)
    first, last = map(int, match.groups()) if match else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(
            f"profile is {text!r}: give START:STOP, the first and the last half-round "
            "to trace, counted from 1, such as 20:23."
        )
    if total_calls is not None and last > total_calls:
        raise ValueError(
            f"profile is {text!r}, but the run has {total_calls} half-rounds: lower it."
        )
    return range(first, last + 1)
