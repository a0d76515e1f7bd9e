"""Exit codes of all commands: what a scheduler, or a person, reads off them."""

import sys
from typing import NoReturn

from acco_jax.runner import heartbeat

FINISHED = 0
FAILED = 1
REFUSED = 2
EXPOSED = 3
DIVERGED = 4
LOST = 5
STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again

TABLE = f"""
Exit codes:
  {FINISHED:2}  finished
  {FAILED:2}  something else went wrong
  {REFUSED:2}  refused: a flag, the config, a file or the machine
  {EXPOSED:2}  plan, audit --require-hidden: communication is not hidden
  {DIVERGED:2}  diverged: the loss or a parameter is not finite
  {LOST:2}  lost a process of the run, or one never came
  {STOPPED:2}  stopped and saved: the same command continues
"""


class Stopped(Exception):
    """A run was told to stop, and has saved what it had."""


def end(code: int, message: object) -> NoReturn:
    """Ends the process with one line on stderr.

    Args:
      code: one of this module's.
      message: its lines become one.
    """
    line = " ".join(str(message).split())
    sys.stderr.write(f"error: {line}\n")
    heartbeat.ends_with(code, line)
    sys.exit(code)
