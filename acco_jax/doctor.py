"""Check a machine before it trains: python -m acco_jax.doctor [--workdir=DIR]

It checks versions, devices, the form of a train step, cores, the bandwidth between
pairs of devices, the folder and its disk, and prints a remedy for each problem. Start
several processes as for training, each with the same flags.

  python -m acco_jax.doctor --devices=4        # CPU devices of this process
  srun python -m acco_jax.doctor --workdir=RUNS/one
"""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # quiet C++ start-up messages

import jax
from absl import app, flags

from acco_jax.command import devices, exits
from acco_jax.command.files import is_remote
from acco_jax.command.paths import expanded
from acco_jax.run.config import parsing

__doc__ = f"{(__doc__ or '').rstrip()}\n{exits.TABLE}"

_WORKDIR = flags.DEFINE_string("workdir", ".", "Folder that a run would write to.")
_DEVICES = flags.DEFINE_integer("devices", None, "CPU devices of this process.", 1)
_COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port of process 0.")
_PROCESSES = flags.DEFINE_integer("processes", None, "Number of processes.", 1)
_PROCESS = flags.DEFINE_integer(
    "process", None, "The number of this process, from 0.", 0
)


@exits.lines()
def main(argv: list[str]) -> None:
    del argv
    together = _COORDINATOR.value, _PROCESSES.value, _PROCESS.value
    devices.check_together(*together)
    several = devices.are_several(_COORDINATOR.value, _PROCESSES.value)
    devices.choose_platform(_DEVICES.value, several_processes=several)
    devices.connect(*together)
    # slow, and only now may anything touch devices
    from acco_jax.run.observe import diagnosis

    workdir = expanded(_WORKDIR.value)
    if not is_remote(workdir):
        workdir = workdir.absolute()
    problems = 0
    for finding in diagnosis.examined(workdir):
        problems += bool(finding.remedy)
        if line := diagnosis.said(finding, jax.process_index()):
            print(line, flush=True)
    if problems:
        number = f"{problems} problems" if problems > 1 else "a problem"
        exits.end(exits.FAILED, f"{number}: see above")
    sys.exit(exits.FINISHED)


if __name__ == "__main__":
    app.run(main, flags_parser=parsing.parser())
