"""Plan a run without its machine: compile its train step ahead of time and read it.

python -m acco_jax.plan --config=experiments/quickstart.py --topology=gpu:h200:2x8
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # quiet C++ start-up messages

from absl import app, flags, logging

from acco_jax.plan import arguments, topologies
from acco_jax.runner import commands, exits

__doc__ = f"{(__doc__ or '').rstrip()}\n{exits.TABLE}"

_CONFIG = commands.config_flag()
_TOPOLOGY = flags.DEFINE_string(
    "topology", None, "gpu:CHIP:HOSTSxGPUS (gpu:h200:4x8) or tpu:CHIP:SHAPE."
)
_SLICES = flags.DEFINE_integer("slices", 1, "TPU slices of that shape.", 1)
_METHOD = flags.DEFINE_list("method", [], "Methods; default: the config's and zero1.")
_DEVICES = flags.DEFINE_list("devices", [], "Numbers of devices to predict for.")
_SET = flags.DEFINE_list("set", [], "NAME=VALUE,...: other figures, in SI units.")
_GBPS = flags.DEFINE_float(
    "network-gbps", None, "Gbit/s per device over the network: sets slow_bandwidth."
)
_FIT = flags.DEFINE_bool(
    "fit", True, "Look for the largest microbatch: one more compile."
)
_OUT = flags.DEFINE_string("out", "plan", "Folder for the pictures.")
_JSON = flags.DEFINE_string("json", None, "File for the same as JSON.")
_DUMP_HLO = flags.DEFINE_string("dump-hlo", None, "Folder for the programs' text.")
_REQUIRE_HIDDEN = flags.DEFINE_bool(
    "require-hidden",
    False,
    "Exit with 3 if --method (or the config's) exposes communication of the data axis "
    "for more than a hundredth of its time, or has none.",
)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        exits.end(exits.REFUSED, f"unexpected argument {argv[1]!r}")
    topologies.use_cpu()
    logging.set_verbosity(logging.INFO)
    try:
        topology = topologies.parse(str(_TOPOLOGY.value), _SLICES.value)
        changes = dict(map(arguments.number, _SET.value))
        if _GBPS.value is not None:
            changes["slow_bandwidth"] = _GBPS.value * 1e9 / 8
        folder = Path(_OUT.value).expanduser()
        json, programs = map(arguments.path, (_JSON, _DUMP_HLO))
        for path in filter(None, (folder, json and json.parent, programs)):
            arguments.check_writable(path)  # before anything is compiled
        from acco_jax.plan import planner, report  # slow: after the flags' check

        devices = tuple(_whole(text) for text in _DEVICES.value)
        methods = tuple(_METHOD.value)
        request = planner.Request(methods, devices, changes, _FIT.value)
        plan = planner.make(_CONFIG.value, topology, request)
    except (ValueError, RuntimeError, OSError) as error:
        exits.end(exits.REFUSED, error)
    print(report.text(plan))
    for line in report.write(plan, folder, json, programs):
        print(line)
    if _REQUIRE_HIDDEN.value and plan.objections:
        reasons = "; ".join(f"{m}: {why}" for m, why in plan.objections.items())
        print(f"--require-hidden: {reasons}", file=sys.stderr)
        sys.exit(exits.EXPOSED)


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"--devices: {text!r} is no whole number.") from None


if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "topology"])
    app.run(main, flags_parser=commands.parser(_CONFIG))
