"""Compare methods with the same data order, tokens and seeds.

python -m acco_jax.compare --config=experiments/quickstart.py \\
    --methods='acco,zero1,dpu(warmup_steps=40)' --workdir=runs/methods --seeds=3

Each method and seed is a run of acco_jax.train in WORKDIR/METHOD/seed-N, with the same
microbatches per optimizer step. Finished runs are not repeated, and interrupted runs
continue. WORKDIR then holds table.md, results.csv and loss.png. A method may have its
own options in parentheses: arguments of the method, or fields of the config
(config.optimizer.learning_rate=1e-4).

    --tune='optimizer.learning_rate=5e-4,1e-3,2e-3' --budget=20e6

first finds each method's best value, on seeds that the comparison does not use. All
candidates run part of their steps, the better half continues, and so on, within the
budget of tokens. WORKDIR/tuning has the results and a picture.

The tables explain their figures. A difference from the first method may be chance,
unless it is several times its standard error (±, with two seeds or more). Bytes sent
are read from the program's collectives, without all-reduces below 1 kB. Exposed time is
measured at the end of each run in its own processes. "n/a" was not measured.
"""

import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # quiet C++ start-up messages

from absl import app, flags, logging

from acco_jax.command import exits
from acco_jax.command.paths import expanded
from acco_jax.run.compare import comparison, tuning
from acco_jax.run.config import parsing, usage

__doc__ = f"{(__doc__ or '').rstrip()}\n{exits.TABLE}"

_CONFIG = parsing.config_flag()
_METHODS = flags.DEFINE_string(
    "methods", None, "Methods, with options: 'acco,zero1,dpu(warmup_steps=40)'."
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for all runs and the results.")
_SEEDS = flags.DEFINE_integer(
    "seeds", 3, "Seeds of each method: the config's, the next, ...", 1
)
_NETWORK = flags.DEFINE_string(
    "network",
    None,
    "Join CPU processes by a link of this rate, such as 200mbit; needs root.",
)
_PROCESSES = flags.DEFINE_integer(
    "processes", 2, "Processes of each run, with --network.", 2
)
_AT_ONCE = flags.DEFINE_integer(
    "at_once", 1, "Runs at the same time; 0: one per GPU or core, as many as fit.", 0
)
_TUNE = flags.DEFINE_multi_string(
    "tune",
    [],
    "FIELD=VALUE,VALUE,...: compare each method at its own best; repeatable.",
)
_TUNE_SEEDS = flags.DEFINE_integer(
    "tune_seeds", 1, "Seeds of each value, from 1,000 after the first of --seeds on.", 1
)
_BUDGET = flags.DEFINE_float(
    "budget", None, "Most tokens of --tune; unset: every value trains to its end.", 1.0
)
_CHECK = flags.DEFINE_bool(
    "check", False, "Only check whether all methods can run, and exit."
)


@exits.lines()
def main(argv: list[str]) -> None:
    del argv
    logging.set_verbosity(logging.INFO)
    if flags.FLAGS["processes"].present and not _NETWORK.value:
        raise ValueError("--processes is for --network: give both, or neither.")
    if _NETWORK.value and _AT_ONCE.value != 1:
        raise ValueError("--at_once is for runs that share no --network: drop one.")
    if not _TUNE.value and (_BUDGET.value or flags.FLAGS["tune_seeds"].present):
        raise ValueError("--budget and --tune_seeds are for --tune: give it, too.")
    if not _WORKDIR.value:
        raise ValueError("--workdir is empty: name a folder.")
    request = comparison.ComparisonRequest(
        config=tuple(parsing.config_arguments()),
        entries=comparison.parse(str(_METHODS.value)),
        workdir=expanded(str(_WORKDIR.value)),
        seeds=_SEEDS.value,
        rate=_NETWORK.value,
        processes=_PROCESSES.value if _NETWORK.value else 1,
        at_once=_AT_ONCE.value,
        sweep=tuning.parse(_TUNE.value),
        tune_seeds=_TUNE_SEEDS.value,
        budget=None if _BUDGET.value is None else round(_BUDGET.value),
    )
    if _CHECK.value:
        print(json.dumps(comparison.check(request)))
        return
    print(comparison.compare(request, [*sys.argv[1:], "--check"]))


if __name__ == "__main__":
    needed = {usage.NEEDED: ("config", "methods", "workdir")}
    app.run(main, flags_parser=parsing.parser(_CONFIG, groups=needed))
