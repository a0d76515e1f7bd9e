"""Flags of the commands, with one-line errors."""

import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from absl import flags, logging

from acco_jax.command import exits

try:
    from ml_collections import ConfigDict, config_flags

    from acco_jax.run.config import fields as configs
    from acco_jax.run.config import usage
except ModuleNotFoundError as error:
    exits.end(exits.REFUSED, f"{error}: pip install 'acco-jax[train]' for commands.")

DAY = 86400.0  # seconds: the longest wait that a flag may set


def config_flag(
    flag_values: flags.FlagValues = flags.FLAGS, argv: Sequence[str] = ()
) -> flags.FlagHolder:
    """Define --config, with a flag for each field that argv (the command line) has."""
    # Unknown fields are accepted here and rejected by config.validate, in one line.
    return config_flags.DEFINE_config_file(
        "config",
        None,
        "Experiment to run.",
        flag_values=flag_values,
        lock_config=False,
        accept_new_attributes=True,
        sys_argv=list(argv) or None,
    )


class ModelFlags:
    """Flags that name a model: a run's workdir, or a Hugging Face folder."""

    def __init__(self) -> None:
        """Define the flags."""
        self._workdir = flags.DEFINE_string("workdir", None, "Workdir of a run.")
        self._model = flags.DEFINE_string("model", None, "A Hugging Face folder.")
        self._dtype = flags.DEFINE_string(
            "dtype", None, "Dtype of --model, such as bfloat16; its own if unset."
        )
        self._ignore = flags.DEFINE_string(
            "ignore_weights", None, "Pattern of weights of --model to leave out."
        )

    @property
    def workdir(self) -> str | None:
        """Workdir of the run; None if a folder is named.

        Raises:
          ValueError: if not exactly one of the two is given, or a flag does not fit.
        """
        workdir, model = self._workdir.value, self._model.value
        if bool(workdir) == bool(model):
            given = f"--workdir={workdir} and --model={model}" if model else "neither"
            raise ValueError(f"{given}: give --workdir of a run, or --model, a folder.")
        for flag in (self._dtype, self._ignore):
            if workdir and flag.value is not None:
                raise ValueError(
                    f"--{flag.name}={flag.value} is for --model: a run has its own."
                )
        return workdir or None

    @property
    def folder(self) -> tuple[str, str | None, str | None]:
        """Hugging Face folder, and `dtype` and `ignored` of `from_folder`."""
        return str(self._model.value), self._dtype.value, self._ignore.value


def parser(
    config: flags.FlagHolder | None = None,
    *,
    names: bool = False,
    groups: Mapping[str, Sequence[str]] | None = None,
) -> Callable[[list[str]], list[str]]:
    """Return the parser for absl.app; it also loads the config of a flag.

    A command without that flag has no `config`: it reads what a run has left, and logs
    only warnings, so that its answer stands alone.

    Args:
      config: The flag that `config_flag` returned, if the command has it.
      names: Whether the command takes arguments that are not flags.
      groups: Titles, each with names of flags, for --help. Flags of `usage.NEEDED`
        must be given.
    """
    groups = groups or {}
    flags.mark_flags_as_required(groups.get(usage.NEEDED, ()))

    def parse(argv: list[str]) -> list[str]:
        if usage.asked(argv):
            sys.stdout.write(usage.text(sys.modules["__main__"].__doc__ or "", groups))
            if usage.asked(argv, usage.FULL):
                sys.stdout.write(f"\n{flags.FLAGS.get_help()}\n")
            sys.exit(exits.FINISHED)
        try:
            rest = flags.FLAGS(usage.spelled(argv, flags.FLAGS))
            if config is None and not flags.FLAGS["verbosity"].present:
                logging.set_verbosity(logging.WARNING)
            _check_numbers()
            if config is not None and not isinstance(config.value, ConfigDict):
                # ml_collections' stand-in
                problem = f"get_config() returned {config.value!r}, no ConfigDict"
                raise ValueError(getattr(config.value, "_error", problem))
            if config is not None:  # its factory and hooks may lie beside it
                file = config_flags.get_config_filename(flags.FLAGS[config.name])
                sys.path.append(str(Path(file).absolute().parent))
            if len(rest) > 1 and not names:
                raise flags.Error(f"unexpected argument {rest[1]!r}")
        except flags.Error as error:
            exits.end(exits.REFUSED, _line(error))
        except Exception as error:  # a config file is a program: it may raise anything
            exits.end(exits.REFUSED, f"the config cannot be loaded: {_line(error)}")
        try:
            if config is not None:
                _scale(flags.FLAGS[config.name])
        except ValueError as error:
            exits.end(exits.REFUSED, error)
        return rest

    return parse


def _check_numbers() -> None:
    """Raise an error for numbers that are not finite: absl's bounds accept NaN.

    Raises:
      flags.Error: with the flag's name and value.
    """
    for name in flags.FLAGS:
        flag = flags.FLAGS[name]
        if isinstance(flag.value, float) and not math.isfinite(flag.value):
            raise flags.Error(f"--{name} is {flag.value}: it must be finite.")


def config_arguments(values: flags.FlagValues = flags.FLAGS) -> list[str]:
    """Return the flags that give another process the config of these."""
    flag = values["config"]
    fields = config_flags.get_override_values(flag)
    return [
        f"--config={config_flags.get_config_filename(flag)}",
        *(
            f"--config.{name}={_written(values[f'config.{name}'], value)}"
            for name, value in fields.items()
        ),
    ]


def _written(flag: flags.Flag, value: object) -> object:
    """Return a field's value as its flag takes it: most take a Python literal."""
    if type(flag.parser) is flags.ArgumentParser:  # of what is a text in the file
        return value
    return repr(value.to_dict() if isinstance(value, ConfigDict) else value)


def config_of(arguments: list[str]) -> ConfigDict:
    """Return the config of a process with these flags.

    Raises:
      ValueError: if a field or a value is invalid.
    """
    values = flags.FlagValues()
    argv = ["", *arguments]
    holder = config_flag(values, argv)
    try:
        values(argv)
        _scale(values[holder.name])
        return holder.value
    except Exception as error:
        raise ValueError(_line(error)) from error


def _scale(flag: flags.Flag) -> None:
    """Apply the config's scale; a field with a flag of its own keeps its value.

    Raises:
      ValueError: if a field has a flag, but another field's value overrules it.
    """
    given = config_flags.get_override_values(flag)
    flag.value = configs.scaled(flag.value, given)
    configs.check_overruled(flag.value, given)


def _line(error: BaseException) -> str:
    """Return an error as one line, without ml_collections' traceback before it."""
    while error.args and isinstance(error.args[0], BaseException):
        error = error.args[0]
    while "Traceback (most recent call last)" in str(error) and error.__context__:
        error = error.__context__
    text = " ".join(str(error).split())
    if not isinstance(error, KeyError):
        return text or type(error).__name__
    raised = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1:]
    if any(f.f_globals["__name__"].startswith("ml_collections") for f in raised):
        said = str(error.args[0])  # 'field'\nDid you mean ...?
        return f"no such field: {' '.join(said.split())}"
    return f"KeyError: {text}".rstrip(": ")
