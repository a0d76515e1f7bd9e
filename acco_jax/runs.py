"""List the runs in a folder, and in all folders below it.

python -m acco_jax.runs FOLDER

Each line has a run's method, model, optimizer steps, last held-out loss, tokens per
second, goodput and state: running, finished, stopped (and saved), failed, or unknown
before anything is recorded. A damaged folder has a line that says so. The command reads
the files that runs leave, and needs no device.

  python -m acco_jax.runs runs
  python -m acco_jax.runs runs --json
"""

import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # quiet C++ start-up messages

from absl import app, flags

from acco_jax.command import exits
from acco_jax.command.paths import expanded
from acco_jax.run.config import parsing

__doc__ = f"{(__doc__ or '').rstrip()}\n{exits.TABLE}"

_JSON = flags.DEFINE_bool("json", False, "Print one JSON list.")


@exits.lines()
def main(argv: list[str]) -> None:
    if len(argv) != 2:
        given = ", ".join(argv[1:]) or "none"
        raise ValueError(f"one folder is needed, but {given} was given: name it.")
    from acco_jax.run.pages import run_table  # slow

    rows = run_table.rows_of(expanded(argv[1]))
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print(json.dumps(rows) if _JSON.value else run_table.text(rows, colour=colour))


if __name__ == "__main__":
    app.run(main, flags_parser=parsing.parser(names=True))
