"""Train: python -m acco_jax.train --config=experiments/quickstart.py --workdir=DIR"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # quiet C++ start-up messages

from absl import app, flags, logging
from ml_collections import config_flags

from acco_jax.training import devices

_CONFIG = config_flags.DEFINE_config_file("config", None, "Experiment to run.")
_WORKDIR = flags.DEFINE_string("workdir", None, "For checkpoints and metrics.")
_STOP_AFTER = flags.DEFINE_integer(
    "stop_after", None, "Stop after so many half-rounds, with a checkpoint.", 1
)
_COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port of process 0.")
_PROCESSES = flags.DEFINE_integer("processes", None, "How many processes there are.", 1)
_PROCESS = flags.DEFINE_integer("process", None, "Which of them this one is.", 0)


def _ours_or_serious(record: Any) -> bool:
    """Drops the chatter of other libraries that log through absl."""
    return record.levelno >= logging.WARNING or "acco_jax" in record.pathname


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    logging.set_verbosity(logging.INFO)
    logging.get_absl_handler().addFilter(_ours_or_serious)
    config, workdir = _CONFIG.value, Path(str(_WORKDIR.value))
    try:
        clustered = devices.launched_by_a_cluster() or (_PROCESSES.value or 1) > 1
        devices.choose_platform(config.get("devices"), several_processes=clustered)
        devices.connect(_COORDINATOR.value, _PROCESSES.value, _PROCESS.value)
        from acco_jax.training import loop  # what it imports may touch devices

        experiment = loop.prepare(config, workdir)
    except ValueError as error:
        sys.exit(f"error: {error}")
    try:
        loop.run(experiment, stop_after=_STOP_AFTER.value)
    except FloatingPointError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "workdir"])
    app.run(main)
