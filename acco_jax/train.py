"""Train: python -m acco_jax.train --config=experiments/quickstart.py --workdir=DIR"""

import logging as levels
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # quiet C++ start-up messages

from absl import app, flags, logging

from acco_jax.runner import commands, devices

_CONFIG = commands.config_flag()
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for checkpoints and metrics.")
_STOP_AFTER = flags.DEFINE_integer(
    "stop_after", None, "Stop after so many half-rounds, with a checkpoint.", 1
)
_TIME_GRADIENTS = flags.DEFINE_bool(
    "time_gradients", False, "At the end, time the gradients alone (for compare)."
)
_COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port of process 0.")
_PROCESSES = flags.DEFINE_integer("processes", None, "How many processes there are.", 1)
_PROCESS = flags.DEFINE_integer("process", None, "Which of them this one is.", 0)

_PACKAGE = str(Path(__file__).parent)


def _ours_or_serious(record: levels.LogRecord) -> bool:
    """Drops the chatter of other libraries that log through absl."""
    return record.levelno >= levels.WARNING or record.pathname.startswith(_PACKAGE)


def main(argv: list[str]) -> None:
    del argv
    logging.get_absl_handler().addFilter(_ours_or_serious)
    logging.set_verbosity(logging.INFO)
    config, workdir = _CONFIG.value, Path(str(_WORKDIR.value)).expanduser()
    try:
        clustered = devices.launched_by_a_cluster() or (_PROCESSES.value or 1) > 1
        devices.choose_platform(config.get("devices"), several_processes=clustered)
        devices.connect(_COORDINATOR.value, _PROCESSES.value, _PROCESS.value)
        # slow, and only now may anything touch devices
        from acco_jax.runner import loop, preparation

        experiment = preparation.prepare(config, workdir)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
    try:
        loop.run(
            experiment,
            stop_after=_STOP_AFTER.value,
            time_gradients=_TIME_GRADIENTS.value,
        )
    except FloatingPointError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("error: interrupted: the same command continues from its checkpoint.")


if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "workdir"])
    app.run(main, flags_parser=commands.parser(_CONFIG))
