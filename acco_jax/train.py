"""Train: python -m acco_jax.train --config=experiments/quickstart.py --workdir=DIR

The same command continues an interrupted run. acco_jax.doctor checks the
machine first.
acco_jax.report makes a page of a run's records.
"""

import contextlib
import importlib
import logging as levels
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # quiet C++ start-up messages

from absl import app, flags, logging
from jax import process_count, process_index

from acco_jax.command import (
    devices,
    exits,
    files,
    heartbeat,
    paths,
    program_store,
    stages,
)
from acco_jax.run.config import parsing, usage
from acco_jax.run.supervise import meeting, messages, supervisor

__doc__ = f"{(__doc__ or '').rstrip()}\n{exits.TABLE}"

_CONFIG = parsing.config_flag()
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for checkpoints and metrics.")
_STOP_AFTER = flags.DEFINE_integer(
    "stop_after", None, "Stop after this many half-rounds, with a checkpoint.", 1
)
_TIME_GRADIENTS = flags.DEFINE_bool(
    "time_gradients", False, "At the end, time only the gradients (for compare)."
)
_REPLAY = flags.DEFINE_string(
    "replay", None, "Workdir of a run of this config to repeat, bitwise identically."
)
_EXTEND = flags.DEFINE_bool(
    "extend", False, "A longer run follows the schedule of its new length from here on."
)
_STRICT_HOOKS = flags.DEFINE_bool(
    "strict_hooks", False, "End the run where metrics_hook, W&B or TensorBoard fails."
)
_COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port of process 0.")
_PROCESSES = flags.DEFINE_integer("processes", None, "Number of processes.", 1)
_PROCESS = flags.DEFINE_integer(
    "process", None, "The number of this process, from 0.", 0
)
_RESTARTS = flags.DEFINE_integer(
    "restarts", 0, "Number of restarts after a process was lost or failed.", 0
)
_LOST_AFTER = flags.DEFINE_float(
    "lost_after",
    20.0,
    "Seconds without a heartbeat after which a process is lost.",
    5.0,
    parsing.DAY,
)
_STUCK_AFTER = flags.DEFINE_float(
    "stuck_after",
    600.0,
    "Seconds without a half-round after which a process is lost.",
    5.0,
    parsing.DAY,
)
_START_WITHIN = flags.DEFINE_float(
    "start_within",
    300.0,
    "Seconds within which all processes must start.",
    1.0,
    parsing.DAY,
)
_MIN_PROCESSES = flags.DEFINE_integer(
    "min_processes",
    None,
    "With --restarts, the least number of processes to continue with.",
    1,
)
_REGROUP_AFTER = flags.DEFINE_float(
    "regroup_after",
    30.0,
    "Seconds to wait for lost processes before the run continues without them.",
    0.0,
    parsing.DAY,
)

_ORDERS = heartbeat.follow(lambda: importlib.import_module("acco_jax.run.loop"))
_PACKAGE = str(Path(__file__).parent)


def _ours_or_serious(record: levels.LogRecord) -> bool:
    """Drop the messages of other libraries that log through absl."""
    return record.levelno >= levels.WARNING or record.pathname.startswith(_PACKAGE)


@exits.lines()
def main(argv: list[str]) -> None:
    del argv
    heartbeat.keep_stacks()
    if not str(_WORKDIR.value):
        raise ValueError("--workdir is empty: name a folder.")
    devices.check_together(_COORDINATOR.value, _PROCESSES.value, _PROCESS.value)
    _check_fewer()
    if _ORDERS is None and (_COORDINATOR.value or _RESTARTS.value):
        sys.exit(supervisor.supervise(_job()))
    with contextlib.ExitStack() as claim:
        _train(claim)


def _check_fewer() -> None:
    """Raise a ValueError if --min_processes does not fit the other flags."""
    if (least := _MIN_PROCESSES.value) is None:
        if _REGROUP_AFTER.present:
            raise ValueError(
                f"--regroup_after={_REGROUP_AFTER.value:g} is for --min_processes: "
                "give both, or neither."
            )
        return
    if not _RESTARTS.value or _COORDINATOR.value is None:
        raise ValueError(
            f"--min_processes={least} is for commands that begin again together: give "
            "--restarts and --coordinator, too."
        )
    if least > (processes := _PROCESSES.value or 1):
        raise ValueError(
            f"--min_processes is {least}: with --processes={processes} it is at most "
            "that."
        )


def _job() -> supervisor.Job:
    """Return the supervised job: this command itself, as the process that trains.

    Raises:
      ValueError: if a launcher has started several commands without a coordinator,
        or their token is short.
    """
    if _COORDINATOR.value is None and devices.launched_by_a_cluster():
        raise ValueError(
            "--restarts of several processes needs --coordinator, --processes and "
            "--process: the commands meet there."
        )
    return supervisor.Job(
        command=[sys.executable, "-m", "acco_jax.train", *sys.argv[1:]],
        workdir=paths.expanded(str(_WORKDIR.value)),
        limits=meeting.Limits(
            _LOST_AFTER.value,
            _START_WITHIN.value,
            _RESTARTS.value,
            _MIN_PROCESSES.value,
            _REGROUP_AFTER.value,
        ),
        process=_PROCESS.value or 0,
        processes=_PROCESSES.value or 1,
        coordinator=_COORDINATOR.value,
        token=messages.token(),
    )


def _train(claim: contextlib.ExitStack) -> None:
    """Train; the workdir is locked to this run until `claim` ends."""
    began = time.time() - time.process_time()  # imports have kept the processor busy
    if _ORDERS is not None:
        began = _ORDERS.given
    stages.begin(time.time() - began)
    stages.ended("imports")
    logging.get_absl_handler().addFilter(_ours_or_serious)
    logging.set_verbosity(logging.INFO)
    config, processes, process = _CONFIG.value, _PROCESSES.value, _PROCESS.value
    new: list[list[Path]] = []  # folders that this process makes
    if _ORDERS is not None:  # of the attempt, which may have fewer than the run
        processes, process = _ORDERS.processes, _ORDERS.process
    try:
        workdir = paths.expanded(str(_WORKDIR.value))
        several = devices.are_several(_COORDINATOR.value, processes)
        devices.choose_platform(config.get("devices"), several_processes=several)
        program_store.keep_programs()
        devices.connect(
            _ORDERS.coordinator if _ORDERS else None,
            processes,
            process,
            _START_WITHIN.value,
            _LOST_AFTER.value,
            supervised=_ORDERS is not None,
        )
        stages.ended("meeting")
        # slow, and only now may anything touch devices
        from acco_jax.run import continuing, loop, preparation, trials
        from acco_jax.run.config import fields
        from acco_jax.run.state import replicas
        from acco_jax.run.state import workdir as workdirs
        from acco_jax.run.trained import trained_runs

        stages.ended("more imports")
        preparation.check(config)
        workdirs.check_shared(workdir)
        repeated = paths.expanded(_REPLAY.value) if _REPLAY.value else None
        checkpoint_folder = trained_runs.checkpoint_folder(config, workdir)
        folders = workdirs.own(workdir, checkpoint_folder)
        preparation.check_same(
            config,
            {
                "--stop_after": _STOP_AFTER.value,
                "--replay": bool(repeated),
                "--time_gradients": _TIME_GRADIENTS.value,
                "--extend": _EXTEND.value,
                "checkpoints outside the workdir": len(folders) > 1,
            },
        )
        # a scheduler may have restarted this run on another host, as a supervisor does
        again = devices.launched() or several
        again = again or (_ORDERS is not None and _ORDERS.attempt > 1)
        patience = workdirs.STALE_SECONDS + workdirs.BEAT_SECONDS if again else 0.0
        continuing.check_present(workdir, checkpoint_folder)  # a claim makes it
        for folder in folders:
            missing = paths.absent(folder)
            claim.enter_context(workdirs.claimed(folder, patience))
            # while it waited, another run may have begun there
            mine = process_index() == 0 and workdirs.is_new(folder)
            new += [missing] if mine else []
        stages.ended("locks")
        if repeated:
            files.read_object(repeated / "config.json")  # or a line, before trials
        config = trials.with_method(config, repeated or workdir)
        stages.ended("trials")
        experiment = preparation.build(
            config, workdir, began=began, extend=_EXTEND.value, replay=repeated,
            again=_ORDERS is not None and _ORDERS.attempt > 1,
        )  # fmt: skip
        for folder in folders[1:]:
            workdirs.check_shared(folder, "--config.checkpoints")
        fields.profiled(config.profile, experiment.total_calls)
        replay = None
        if repeated:
            replay = continuing.repeating(experiment, repeated)
        preparation.record(experiment)
    except (ValueError, OSError):
        for made in new:
            paths.remove(made)
        raise
    try:
        summary = loop.run(
            experiment,
            stop_after=_STOP_AFTER.value,
            time_gradients=_TIME_GRADIENTS.value,
            replay=replay,
            strict_hooks=_STRICT_HOOKS.value,
            stuck_after=_STUCK_AFTER.value,
        )
    except replicas.ReplicasDiffer:
        raise  # of a device: it would compute wrong bits again
    except (OSError, KeyboardInterrupt) as error:
        what = str(error) or "interrupted"
        raise exits.Failed(
            f"{what}: the same command continues from its checkpoint."
        ) from error
    except ValueError as error:
        if process_count() == 1 or isinstance(error, exits.Damaged):
            raise
        # a collective whose peer is gone may raise one: the input was not rejected
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    code = exits.STOPPED if summary is None else exits.FINISHED
    heartbeat.ends_with(code, "")  # an interpreter that ends gives no signs of life
    if code:
        sys.exit(code)


GROUPS = {
    usage.NEEDED: ("config", "workdir"),
    "One start of a run": (
        "stop_after", "time_gradients", "replay", "extend", "strict_hooks",
    ),
    "Several processes, where no launcher says it (SLURM, MPI, Kubernetes, TPU)": (
        "coordinator", "processes", "process",
    ),
    "When a process is lost": (
        "restarts", "lost_after", "stuck_after", "start_within", "min_processes",
        "regroup_after",
    ),
}  # fmt: skip


if __name__ == "__main__":
    app.run(main, flags_parser=parsing.parser(_CONFIG, groups=GROUPS))
