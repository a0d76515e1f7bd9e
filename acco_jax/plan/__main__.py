"""Plan a run on target hardware: compile its train step ahead of time and read it.

python -m acco_jax.plan --config=experiments/quickstart.py --topology=gpu:h200:2x8

Several of --topology or --network, or --tokens, make one table of all of them, with
what the run would take and cost, and a sentence that says which to take. --recommend
says which method to take on one machine, and the command; --sweep-network shows
at which network rates each is the fastest. --calibrate
measures the devices that are here, and the step on them, beside what plan predicts;
--calibration=FILE plans with what was measured.
"""

import functools
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # quiet C++ start-up messages

from absl import app, flags, logging

from acco_jax.command import devices, exits
from acco_jax.command.paths import expanded
from acco_jax.run.config import parsing, usage
from acco_jax.schedule import arguments, topologies
from acco_jax.schedule.machines import Change
from acco_jax.schedule.topologies import Topology

__doc__ = f"{(__doc__ or '').rstrip()}\n{exits.TABLE}"

_CONFIG = parsing.config_flag()
_TOPOLOGY = flags.DEFINE_multi_string(
    "topology", [], "gpu:CHIP:HOSTSxGPUS (gpu:h200:4x8) or tpu:CHIP:SHAPE; repeatable."
)
_SLICES = flags.DEFINE_integer("slices", 1, "TPU slices of that shape.", 1)
_METHODS = flags.DEFINE_list("methods", [], "Methods; default: the config's and zero1.")
_DEVICES = flags.DEFINE_list("devices", [], "Numbers of devices to predict for.")
_SET = flags.DEFINE_list(
    "set", [], "NAME=VALUE or NAME=LEAST:MOST,...: change figures, in SI units."
)
_NETWORK = flags.DEFINE_list(
    "network", [], "Gbit/s per device over the network, one or several."
)
_TOKENS = flags.DEFINE_string(
    "tokens", None, "Tokens of the whole run (10e9), for a decision."
)
_PRICE = flags.DEFINE_list(
    "price", [], "CHIP=PRICE,...: price of a device for an hour, for a decision."
)
_FAILURE = flags.DEFINE_string(
    "failure-hours", None, "Hours between failures of one device, for a decision."
)
_CHECKPOINT = flags.DEFINE_string(
    "checkpoint-seconds", "60", "Seconds for which a checkpoint stops training."
)
_RESTART = flags.DEFINE_string(
    "restart-seconds", "300", "Seconds from a failure to the next step."
)
_RECOMMEND = flags.DEFINE_bool(
    "recommend",
    False,
    "Print which method to take on the machine, and the command to copy.",
)
_SWEEP = flags.DEFINE_bool(
    "sweep-network",
    False,
    "Predict the methods at network rates of 0.1 to 1,000 Gbit/s per device.",
)
_FIT = flags.DEFINE_bool(
    "fit",
    True,
    "Search for the best and the largest microbatch; compiles a few more programs.",
)
_CALIBRATE = flags.DEFINE_bool(
    "calibrate", False, "Measure the devices of this machine, and the step on them."
)
_CALIBRATION = flags.DEFINE_string(
    "calibration", None, "A report of --calibrate whose figures to use."
)
_OUT = flags.DEFINE_string(
    "out", None, "Folder for pictures; without it none are written."
)
_JSON = flags.DEFINE_string("json", None, "File for the report as JSON.")
_DUMP_HLO = flags.DEFINE_string("dump-hlo", None, "Folder for the programs' HLO text.")
_REQUIRE_HIDDEN = arguments.DEFINE_fraction(
    "require-hidden",
    None,
    "Exit with 3 if a smaller fraction of the data axis's bytes (READ) or seconds "
    "(PREDICTED) is overlapped, or nothing is sent; 0.99 without a value.",
)


@exits.lines()
def main(argv: list[str]) -> None:
    if len(argv) > 1:
        exits.end(exits.REFUSED, f"unexpected argument {argv[1]!r}")
    if _CALIBRATE.value:
        devices.choose_platform(None, several_processes=False)
    else:
        topologies.use_cpu()
    logging.set_verbosity(logging.INFO)
    try:
        objections_to = _run()
    except (ValueError, RuntimeError, OSError) as error:
        fails = _REQUIRE_HIDDEN.value is not None and hasattr(error, "misfits")
        exits.end(exits.EXPOSED if fails else exits.REFUSED, error)
    if (fraction := _REQUIRE_HIDDEN.value) is None:
        return
    if objections := objections_to(fraction):
        reasons = "; ".join(f"{m}: {why}" for m, why in objections.items())
        print(f"--require-hidden={fraction:g}: {reasons}", file=sys.stderr)
        sys.exit(exits.EXPOSED)


def _run() -> Callable[[float], Mapping[str, str]]:
    """Make the plan or the decision that the flags ask for.

    Returns what tells, for a fraction, which methods overlap less, and why.
    """
    folder, json_file, programs = map(arguments.path, (_OUT, _JSON, _DUMP_HLO))
    for path in filter(None, (folder, programs)):
        arguments.check_writable(path)  # before anything is compiled
    if json_file is not None:
        arguments.check_file("json", json_file)
    gate = _REQUIRE_HIDDEN.value is not None
    if _CALIBRATE.value:
        if gate:
            raise ValueError("--require-hidden judges a plan: leave out --calibrate.")
        of_plans = (_TOPOLOGY, _METHODS, _DEVICES, _SET, _NETWORK, _TOKENS, _PRICE,
                    _FAILURE, _RECOMMEND, _SWEEP, _CALIBRATION, _OUT,
                    _DUMP_HLO)  # fmt: skip
        if given := next((f.name for f in of_plans if f.value), None):
            raise ValueError(
                f"--{given} is of a plan, --calibrate measures this machine: leave out "
                "one of them."
            )
        seconds = (_SLICES, _CHECKPOINT, _RESTART)
        if given := next((f.name for f in seconds if f.present), None):
            raise ValueError(
                f"--{given} is of a plan, --calibrate measures this machine: leave out "
                "one of them."
            )
        _calibrate(json_file)
        return _nothing
    if not _TOPOLOGY.value:
        raise ValueError("--topology is missing: for example --topology=gpu:h100:4x8.")
    places = [topologies.parse(text, _SLICES.value) for text in _TOPOLOGY.value]
    changes = arguments.numbers(_SET.value)
    networks = [
        arguments.positive("--network", text) * 1e9 / 8 for text in _NETWORK.value
    ]
    several = len(places) > 1 or len(networks) > 1
    if networks and "slow_bandwidth" in changes:
        raise ValueError(
            "--network and --set=slow_bandwidth both give the network's rate: leave "
            "out one of them."
        )
    if networks and not several:
        changes["slow_bandwidth"] = networks[0]
    sizes = tuple(arguments.whole("--devices", text) for text in _DEVICES.value)
    decides = _TOKENS.value or _PRICE.value or _FAILURE.value
    if _SWEEP.value and (len(places) > 1 or sizes or decides or _RECOMMEND.value):
        raise ValueError(
            "--sweep-network is of one machine: leave out --devices, --tokens, "
            "--price, --failure-hours, --recommend, and all but one --topology."
        )
    if _SWEEP.value:
        far = places[0].devices > places[0].fast_domain
        varied = "slow_bandwidth" if far else "fast_bandwidth"
        if networks or varied in changes:
            raise ValueError(
                "--sweep-network varies the network's rate: leave out --network and "
                f"--set={varied}."
            )
    if _RECOMMEND.value and (several or sizes or decides or _METHODS.value):
        raise ValueError(
            "--recommend is for one machine and network: leave out --methods, "
            "--devices, --tokens, --price, --failure-hours, and all but one --topology "
            "and --network."
        )
    if several and sizes:
        raise ValueError(
            "--devices is of one plan: leave it out, or give one --topology and one "
            "--network."
        )
    if _SWEEP.value and gate:
        raise ValueError(
            "--require-hidden judges one rate of the network: leave out "
            "--sweep-network, and give --network."
        )
    terms = _terms(places, networks, several)
    whole = _RECOMMEND.value or terms is not None  # not of one plan
    if (terms is not None and sizes) or (whole and (programs or folder)):
        raise ValueError(
            "--devices, --out and --dump-hlo are of one plan: leave out --tokens and "
            "--recommend, and give one --topology and one --network."
        )
    if _SWEEP.value and programs:
        raise ValueError("--dump-hlo is of one plan: leave out --sweep-network.")
    # slow: after the flags' check
    from acco_jax.plan import (
        decision,
        exports,
        plan_text,
        planner,
        recommendation,
        sweep,
    )

    # a gate judges what is recommended, of the microbatch that was asked for
    fit = _FIT.value and not (gate and whole)
    request = planner.PlanRequest(
        tuple(_METHODS.value), sizes, changes, _measured(places), fit
    )
    if _RECOMMEND.value:
        own = parsing.config_arguments()
        best = recommendation.make(_CONFIG.value, places[0], request, own)
        print(recommendation.text(best))
        _write(json_file, lambda: recommendation.as_dict(best))
        return best.objections
    if _SWEEP.value:
        found = sweep.make(_CONFIG.value, places[0], request)
        print(sweep.text(found))
        if folder:
            sweep.picture(found, folder / "sweep.png")
            print(f"picture  {folder / 'sweep.png'}")
        _write(json_file, lambda: sweep.as_dict(found))
        return _nothing
    if terms is None:
        plan = planner.make(_CONFIG.value, places[0], request)
        print(plan_text.text(plan))
        for line in exports.write(plan, folder, json_file, programs):
            print(line)
        return functools.partial(planner.objections, [plan])
    chosen = decision.make(_CONFIG.value, places, request, decision.Terms(**terms))
    print(decision.text(chosen))
    _write(json_file, lambda: decision.as_dict(chosen))
    return chosen.objections


def _nothing(fraction: float) -> Mapping[str, str]:
    """Return the objections where no gate is allowed: none."""
    return {}


def _calibrate(json_file: Path | None) -> None:
    if _TOPOLOGY.value or _CALIBRATION.value:
        raise ValueError(
            "--calibrate measures the devices that are here: leave out --topology and "
            "--calibration."
        )
    from acco_jax.plan import calibration  # slow, and touches devices
    from acco_jax.run.build.validation import validate

    validate(_CONFIG.value)
    plan_text = calibration.calibrate(_CONFIG.value)
    print(calibration.text(plan_text))
    if json_file:
        calibration.save(plan_text, json_file)
        print(f"JSON     {json_file}")


def _measured(places: Sequence[Topology]) -> dict[str, Change]:
    """Return the figures of --calibration, which must be of the planned chip."""
    if _CALIBRATION.value is None:
        return {}
    from acco_jax.plan import calibration  # slow

    chip, figures = calibration.read(expanded(_CALIBRATION.value))
    if others := {place.chip.name for place in places} - {chip}:
        raise ValueError(
            f"--calibration={_CALIBRATION.value} is of {chip}, but --topology of "
            f"{min(others)}: measure that chip."
        )
    return figures


def _terms(
    places: Sequence[Topology], networks: Sequence[float], several: bool
) -> dict[str, Any] | None:
    """Return the terms of a decision, None where one plan is asked for."""
    prices = dict[str, float]()
    known = {place.chip.name for place in places}
    for text in _PRICE.value:
        name, _, price = text.partition("=")
        try:
            prices[name] = float(price)
        except ValueError:
            prices[name] = math.nan
        if name not in known or not 0 <= prices[name] < 1e9:
            raise ValueError(
                f"--price={text}: give CHIP=PRICE of an hour, for a chip of --topology "
                f"({', '.join(sorted(known))})."
            )
    numbers = {
        "failure_hours": _FAILURE,
        "checkpoint_seconds": _CHECKPOINT,
        "restart_seconds": _RESTART,
        "tokens": _TOKENS,
    }
    values = {
        name: arguments.positive(f"--{flag.name}", flag.value)
        for name, flag in numbers.items()
        if flag.value is not None
    }
    for flag in (_CHECKPOINT, _RESTART):
        if flag.present and _FAILURE.value is None:
            raise ValueError(
                f"--{flag.name} counts with --failure-hours only: give that, or leave "
                "it out."
            )
    if "tokens" not in values:
        if several or prices or "failure_hours" in values:
            raise ValueError(
                "--tokens is missing: a decision needs the length of the run, for "
                "example --tokens=10e9."
            )
        return None
    return {
        **values,
        "prices": prices,
        "networks": tuple(networks) if several and networks else (None,),
    }


def _write(file: Path | None, values: Callable[[], Any]) -> None:
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values(), indent=2) + "\n")
        print(f"JSON     {file}")


if __name__ == "__main__":
    needed = {usage.NEEDED: ("config",)}
    app.run(main, flags_parser=parsing.parser(_CONFIG, groups=needed))
