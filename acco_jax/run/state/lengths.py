"""Length of a run, which may grow: what of it a workdir has recorded.

The learning rate at a step may follow from the number of steps in all. A run becomes
longer without a trace where all steps so far had the same learning rate in a run of the
new length. Otherwise `--extend` records in `config.extended`, and so in config.json,
until which step the schedule is that of the shorter run. Resuming and replaying then
compute the same.
"""

from pathlib import Path
from typing import Any

from absl import logging
from ml_collections import ConfigDict

from acco_jax.command.files import read_object
from acco_jax.methods.method import Method
from acco_jax.run.build import optimizers

GIVEN = ("steps", "tokens", "epochs")  # fields that determine the length
FIELDS = (*GIVEN, "extended")


def recorded(config: ConfigDict, workdir: Path) -> tuple[ConfigDict, dict[str, Any]]:
    """Return the config with the workdir's `extended`, and the workdir's config.json.

    Without a run in the workdir that is {}.

    Raises:
      ValueError: if config.json is damaged, or the config has another `extended`.
    """
    path = workdir / "config.json"
    if not path.exists():
        return config, {}
    old = read_object(path)
    try:
        kept = tuple(map(tuple, old.get("extended", ())))
    except TypeError as error:
        raise ValueError(f"{path} is damaged: restore it.") from error
    if config.extended and tuple(map(tuple, config.extended)) != kept:
        raise ValueError(
            f"extended is {config.extended}, but the run in workdir {workdir} has "
            f"{kept}: leave it out, or use another workdir."
        )
    config = config.copy_and_resolve_references()
    config.extended = kept
    return config, old


def lengthened(
    config: ConfigDict,
    given: dict[str, Any],
    old: dict[str, Any],
    tx: Method,
    done: int,
    *,
    extend: bool,
) -> ConfigDict:
    """Return the config of a run that may have become longer.

    Args:
      config: of the experiment, with all its steps.
      given: its fields, before steps followed from tokens or epochs.
      old: content of the workdir's config.json; {}: there is none.
      tx: the method.
      done: calls so far.
      extend: whether the schedule may change.

    Raises:
      ValueError: if the run would become shorter, or its schedule would change.
    """
    if not old or all(old.get(field) == given[field] for field in GIVEN):
        return config
    before, now = old.get("total_steps"), config.steps
    if type(before) is not int:
        raise ValueError(
            "the workdir's config.json does not say how many steps its run has, so "
            "they cannot change: use another workdir."
        )
    ahead = config.method == "wp" and done > 0  # it predicts the next step
    begun = _steps_begun(tx, done) + ahead
    if now < before:
        raise ValueError(
            f"the run in the workdir has {before} steps, and {now} are fewer: it can "
            f"only become longer. Give {_asked(old, before)}, or another workdir."
        )
    if now == before:
        return config
    since = config.extended[-1][0] if config.extended else 0
    if begun <= max(optimizers.decay_begin(config.optimizer, before), since):
        logging.info("the run has %d steps now, before %d", now, before)
        return config
    if not extend:
        raise ValueError(
            f"a run of {now} steps has another learning rate than the first {begun} "
            f"steps of {before} had, as optimizer.schedule is "
            f"{config.optimizer.schedule!r}: give --extend, to follow the schedule of "
            f"{now} steps from here on."
        )
    logging.warning(
        "extended from %d to %d steps: from step %d on the learning rate is that of a "
        "run of %d steps", before, now, begun, now,
    )  # fmt: skip
    config = config.copy_and_resolve_references()
    config.extended = (*config.extended, (begun, before))
    return config


def _steps_begun(tx: Method, done: int) -> int:
    """Return how many steps have begun after this number of calls."""
    while (steps := tx.steps_done(done)) is None:
        done += 1
    return max(steps, 0)


def _asked(old: dict[str, Any], steps: int) -> str:
    """Return the flag that gives the run's length."""
    for field in ("epochs", "tokens"):  # they decide, in this order
        if (value := old.get(field)) is not None:
            return f"--config.{field}={value}"
    return f"--config.steps={steps}"
