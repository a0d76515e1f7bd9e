"""The program `acco`, which starts each command by its name.

acco train --config=experiments/quickstart.py --workdir=DIR
"""

import difflib
import importlib.util
import os
import runpy
import sys
from pathlib import Path

# Each is a module of acco_jax, which is imported only when it is started.
COMMANDS = {
    "train": "train a model, or continue an interrupted run",
    "compare": "train methods and seeds side by side",
    "plan": "predict a run on target hardware by ahead-of-time compilation",
    "audit": "measure how much communication a JAX program overlaps",
    "doctor": "check a machine before it trains",
    "runs": "list runs with their state, loss and speed",
    "report": "write an HTML page of runs",
    "generate": "continue a prompt with a model",
    "evaluate": "compute loss, perplexity and bits per byte",
    "export": "write a run's model as a Hugging Face folder",
}
USAGE_ERROR = 2  # exits.REFUSED, whose module needs absl

prefix = "python -m acco_jax."  # what the name of a command follows in its help


def main() -> None:
    """Start the command that the command line names."""
    global prefix
    by_module = Path(sys.argv[0]).name == "__main__.py"
    program = "python -m acco_jax" if by_module else "acco"
    name, *arguments = sys.argv[1:] or ["help"]
    if name in ("help", "--help", "-h"):
        lines = [f"  {command:<10}{what}" for command, what in COMMANDS.items()]
        print(f"Usage: {program} COMMAND [FLAGS]", "", "Commands:", *lines, "",
              f"Flags of a command: {program} COMMAND --help", sep="\n")  # fmt: skip
        return
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        meant = f" Did you mean {close[0]!r}?" if close else ""
        _fail(f"{name!r} is not a command.{meant} `{program} help` lists them.")
    if importlib.util.find_spec("absl") is None:
        _fail("absl is not installed: pip install 'acco-jax[train]' for commands.")
    if not by_module and not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())  # as python -m does
    prefix = f"{program} "
    sys.argv[1:] = arguments
    runpy.run_module(f"acco_jax.{name}", run_name="__main__", alter_sys=True)


def _fail(message: str) -> None:
    sys.stderr.write(f"error: {message}\n")
    sys.exit(USAGE_ERROR)
