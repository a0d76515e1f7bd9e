"""Audit a JAX program for target hardware: how much communication is overlapped.

python -m acco_jax.audit step.hlo --topology=gpu:h100:4x8 --mesh=data:4,fsdp:8
python -m acco_jax.audit --factory=package.module:function --topology=gpu:h100:4x8

FILE holds compiled.as_text(), which may be compressed (.gz). A factory takes devices,
as jax.devices() gives them, and returns a jitted step and the tuple of its abstract
arguments, on a mesh of these devices.
"""

import contextlib
import gzip
import importlib.util
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # quiet C++ start-up messages

from absl import flags

from acco_jax.audit import auditing, axes
from acco_jax.command import exits
from acco_jax.command.paths import expanded
from acco_jax.core.names import named
from acco_jax.run.config import usage
from acco_jax.schedule import arguments, topologies
from acco_jax.schedule.topologies import Topology

__doc__ = f"{(__doc__ or '').rstrip()}\n{exits.TABLE}"

# of its own: plan has flags of the same names
_FLAGS = flags.FlagValues()
_FACTORY = flags.DEFINE_string(
    "factory",
    None,
    "package.module:function that makes a step to compile.",
    flag_values=_FLAGS,
)
_TOPOLOGY = flags.DEFINE_string(
    "topology",
    None,
    "gpu:CHIP:HOSTSxGPUS (gpu:h200:4x8) or tpu:CHIP:SHAPE.",
    flag_values=_FLAGS,
)
_SLICES = flags.DEFINE_integer(
    "slices", 1, "TPU slices of that shape.", flag_values=_FLAGS
)
_MESH = flags.DEFINE_string(
    "mesh",
    None,
    "AXIS:SIZE,..., outermost first, if the program does not name its axes.",
    flag_values=_FLAGS,
)
_AXIS = flags.DEFINE_string(
    "axis", None, "The axis that --require-hidden judges.", flag_values=_FLAGS
)
_TRIPS = flags.DEFINE_integer(
    "trips",
    None,
    "Iterations of loops that the compiler does not report.",
    flag_values=_FLAGS,
)
_SET = flags.DEFINE_list(
    "set", [], "NAME=VALUE,...: change figures, in SI units.", flag_values=_FLAGS
)
_JSON = flags.DEFINE_string(
    "json", None, "File for the report as JSON.", flag_values=_FLAGS
)
_PICTURE = flags.DEFINE_string(
    "picture", None, "File for a timeline, a PNG.", flag_values=_FLAGS
)
_REQUIRE_HIDDEN = arguments.DEFINE_fraction(
    "require-hidden",
    None,
    "Exit with 3 if a smaller fraction of the bytes (READ) or seconds "
    "(PREDICTED) is overlapped, or nothing is sent; 0.99 without a value.",
    flag_values=_FLAGS,
)


@exits.lines()
def main(argv: list[str]) -> None:
    topologies.use_cpu()
    try:
        files = argv[1:]
        factory = _FACTORY.value
        if len(files) + (factory is not None) != 1:
            raise ValueError(_which(files))
        topology, mesh = _place()
        changes = arguments.numbers(_SET.value)
        if _TRIPS.value is not None and _TRIPS.value < 0:
            raise ValueError(f"--trips is {_TRIPS.value}: it must be at least 0.")
        written = [arguments.path(flag) for flag in (_JSON, _PICTURE)]
        for flag, file in zip(("json", "picture"), written, strict=True):
            if file is not None:
                arguments.check_file(flag, file)
        if written[1]:
            _check_picture(written[1])
        program = _read(Path(files[0])) if factory is None else _make(factory, topology)
        with _naming(factory):
            result = auditing.audit(
                *program, topology=topology, mesh=mesh, trip_counts=_TRIPS.value,
                figures=changes,
            )  # fmt: skip
        verdict = result.verdict(_AXIS.value)
    except (ValueError, RuntimeError, OSError) as error:
        exits.end(exits.REFUSED, error)
    print(result)
    for file in filter(None, written):
        file.parent.mkdir(parents=True, exist_ok=True)
    if json := written[0]:
        json.write_text(result.to_json() + "\n")
    if picture := written[1]:
        result.picture(picture)
    fraction = _REQUIRE_HIDDEN.value
    if fraction is not None and (why := verdict.objection(fraction)):
        over = _AXIS.value or "all axes"
        print(f"--require-hidden={fraction:g}: {over}: {why}", file=sys.stderr)
        sys.exit(exits.EXPOSED)


def _place() -> tuple[Topology, dict[str, int] | None]:
    if _TOPOLOGY.value is None:
        raise ValueError("--topology is missing: for example --topology=gpu:h100:4x8.")
    topology = topologies.parse(_TOPOLOGY.value, _SLICES.value)
    mesh = None if _MESH.value is None else axes.parse_mesh(_MESH.value)
    if mesh:
        auditing.check_mesh(mesh, topology)
        if not set((_AXIS.value or "").split("+")) <= {"", *mesh}:
            raise ValueError(
                f"--axis is {_AXIS.value!r}, but --mesh has {', '.join(mesh)}: give "
                "one of these."
            )
    return topology, mesh


def _which(files: list[str]) -> str:
    """Say what is missing, or too much, of the programs to read."""
    numbers = [x for x in files if x.replace(".", "", 1).isdigit()]
    if numbers and _REQUIRE_HIDDEN.value is not None:
        return f"a flag takes its value with =: --require-hidden={numbers[0]}."
    return "give one file, or --factory=package.module:function."


def _check_picture(file: Path) -> None:
    """Raise a ValueError unless a timeline can be drawn to the file."""
    if file.suffix != ".png":
        raise ValueError(f"--picture={file}: name a .png file.")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "--picture needs matplotlib: pip install 'acco-jax[train]', or leave "
            "it out."
        )


def _read(file: Path) -> tuple[str]:
    data = expanded(file).read_bytes()
    try:
        if file.suffix == ".gz":
            data = gzip.decompress(data)
        return (data.decode(),)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(
            f"{file} cannot be read: {error}. Give the text of compiled.as_text()."
        ) from error


def _make(name: str, topology: Topology) -> tuple[Any, ...]:
    factory, devices = named("--factory", name), auditing.devices(topology)
    try:
        step, step_arguments = factory(devices)
        return step, *step_arguments
    except Exception as error:  # another's program: it may raise anything
        raise ValueError(
            f"--factory={name} raised {type(error).__name__}: {error}. It is "
            "called with a list of devices, and returns a jitted step and a tuple of "
            "its arguments."
        ) from error


@contextlib.contextmanager
def _naming(factory: str | None) -> Iterator[None]:
    """Turn what a factory's step raises while it is traced into one line."""
    try:
        yield
    except (ValueError, RuntimeError, OSError):
        raise
    except Exception as error:
        if factory is None:
            raise
        first = str(error).strip().splitlines() or [""]
        raise ValueError(
            f"the step of --factory={factory} cannot be traced: "
            f"{type(error).__name__}: {first[0]}"
        ) from error


def parse(argv: list[str]) -> list[str]:
    """Parse the command line; return it without flags."""
    if usage.asked(argv):
        sys.stdout.write(usage.text(__doc__, {}, _FLAGS))
        sys.exit(exits.FINISHED)
    try:
        return _FLAGS(usage.spelled(argv, _FLAGS))
    except flags.Error as error:
        exits.end(exits.REFUSED, error)


if __name__ == "__main__":
    main(parse(sys.argv))
