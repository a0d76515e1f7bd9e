"""Audit of a program: compiled if needed, its schedule read, each axis judged."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from acco_jax.audit import axes
from acco_jax.audit.result import Audit
from acco_jax.command.devices import choose_platform
from acco_jax.schedule import costs, schedules, topologies, verdict
from acco_jax.schedule.machines import Change, Machine
from acco_jax.schedule.machines import figures as machine_figures
from acco_jax.schedule.topologies import Topology
from acco_jax.schedule.verdict import Verdict


def devices(topology: str | Topology) -> list[Any]:
    """Return described devices, to make a mesh of and compile for.

    On a machine without an accelerator JAX takes the CPU from here on.

    Args:
      topology: as `python -m acco_jax.plan` takes it ("gpu:h100:4x8", "tpu:v5e:4x4").

    Raises:
      RuntimeError: if the compiler is not installed, with how to install it.
      ValueError: if the topology does not exist.
    """
    choose_platform(None, several_processes=False)
    return list(_topology(topology).description().devices)


def audit(
    program: Any,
    *arguments: Any,
    topology: str | Topology,
    mesh: Mapping[str, int] | Mesh | None = None,
    trip_counts: Mapping[str, int] | int | None = None,
    figures: Mapping[str, Change] | None = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> Audit:
    """Read how much of a program's communication is overlapped.

    Args:
      program: a jitted function, its compiled form, or the text of that form.
      *arguments: of a jitted function, abstract or not, on a mesh of `devices`.
      topology: the machine that it is compiled for.
      mesh: its axes and their sizes, outermost first; by default the arguments' mesh.
      trip_counts: iterations of loops that the compiler does not report, by the loop's
        name or one number for all; None counts one iteration.
      figures: of the machine, to use instead, as plan's --set.
      compiler_options: for the compiler, if a jitted function is given.

    Raises:
      ValueError: if the program cannot be read or compiled so.
    """
    place, own = _topology(topology), None
    machine = Machine(place, machine_figures(place.chip, figures))
    if not isinstance(program, str | jax.stages.Compiled) and not hasattr(
        program, "as_text"
    ):
        program = _compile(program, arguments, place, compiler_options)
        own = axes.mesh_of(arguments)
    elif arguments or compiler_options:
        raise ValueError(
            "the program is compiled already: arguments and compiler_options are for a "
            "jitted function."
        )
    if own is None and hasattr(program, "input_shardings"):
        own = axes.mesh_of(program.input_shardings)
        if own is not None:
            _check_platform(own, place)
    mesh = mesh or own
    text = program if isinstance(program, str) else program.as_text()
    schedule = schedules.read(text, trip_counts=trip_counts)
    if schedule.platform not in ("", place.platform):
        raise ValueError(
            f"the program is compiled for {schedule.platform.upper()}s, not for "
            f"{place}: give the topology that it was compiled for."
        )
    _check_devices(schedule, place)
    sizes = dict(mesh.shape) if isinstance(mesh, Mesh) else dict(mesh or {})
    check_mesh(sizes, place)
    placed, where = schedule, mesh if isinstance(mesh, Mesh) else own
    if where is not None and where.size == place.devices and place.slices == 1:
        placed = schedule.placed(topologies.places(where))
    prediction = costs.predict(placed, machine, place.devices)
    return Audit(
        schedule,
        machine,
        prediction,
        sizes,
        _axes(schedule, placed, prediction, machine, sizes),
    )


def assert_hidden(
    step: Any,
    args: Sequence[Any],
    topology: str | Topology,
    axis: str | None = None,
    fraction: float = verdict.REQUIRED,
    **options: Any,
) -> Audit:
    """Assert that a program's communication is overlapped, for a test suite.

    Args:
      step: a jitted function, its compiled form, or the text of that form.
      args: its arguments, as for `audit`; () for a compiled program.
      topology: the machine that it is compiled for.
      axis: of the mesh; None for all that is communicated.
      fraction: that must be overlapped, of the bytes (READ) and of the predicted
        seconds; exposure of at most 0.1 % of the program's time does not count.
      **options: of `audit`.

    Raises:
      AssertionError: if less is overlapped, or nothing is communicated; with the table.
      ValueError: as `audit`, and if `fraction` is not from 0 to 1.
    """
    verdict.check_fraction(fraction)
    result = audit(step, *args, topology=topology, **options)
    if why := result.verdict(axis).objection(fraction):
        raise AssertionError(f"{axis or 'all axes'}: {why}\n{result}")
    return result


def _topology(topology: str | Topology) -> Topology:
    return topologies.parse(topology) if isinstance(topology, str) else topology


def _compile(
    step: Any,
    arguments: Sequence[Any],
    topology: Topology,
    options: Mapping[str, Any] | None,
) -> Any:
    if not hasattr(step, "lower"):
        raise ValueError(
            f"cannot audit a {type(step).__name__}: give a jitted function with its "
            "arguments, what it compiled to, or the text of that."
        )
    _check_platform(axes.mesh_of(arguments), topology)
    return topologies.compiled(step.lower(*arguments), topology, options)


def _check_platform(mesh: Mesh | None, topology: Topology) -> None:
    """Raise a ValueError if a program's mesh is of other devices than the topology."""
    places = set() if mesh is None else {d.platform for d in mesh.devices.flat}
    wanted = {"gpu": {"gpu", "cuda"}, "tpu": {"tpu"}}[topology.platform]
    if not places <= wanted or not places:
        found = f"on {min(places)} devices" if places else "on no mesh"
        name = f"'{topology}'"
        if topology.slices > 1:
            own, slices = str(topology).split()[0], topology.slices
            name = f"acco_jax.schedule.topologies.parse('{own}', {slices})"
        raise ValueError(
            f"the arguments lie {found}: make their mesh of acco_jax.audit.devices"
            f"({name})."
        )


def _check_devices(schedule: schedules.Schedule, topology: Topology) -> None:
    if schedule.devices != topology.devices:
        raise ValueError(
            f"the program is for {schedule.devices} devices, {topology} has "
            f"{topology.devices}: give the topology that it was compiled for."
        )


def check_mesh(sizes: Mapping[str, int], topology: Topology) -> None:
    """Raise a ValueError if a mesh has another number of devices than the topology.

    Raises:
      ValueError: if their numbers of devices differ.
    """
    total = math.prod(sizes.values())
    if sizes and total != topology.devices:
        shape = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise ValueError(
            f"the mesh {shape} has {total} devices, {topology} has "
            f"{topology.devices}: give the mesh that the program was compiled for."
        )


def _axes(
    schedule: schedules.Schedule,
    placed: schedules.Schedule,
    prediction: costs.Prediction,
    machine: Machine,
    sizes: Mapping[str, int],
) -> dict[str, Verdict]:
    """Return the verdict of each axis; `placed` has the devices where they are."""
    chosen: dict[str, list[int]] = {}
    for i, c in enumerate(schedule.collectives):
        name = axes.label(c.groups, sizes, schedule.devices)
        chosen.setdefault(name, []).append(i)
    judged = {
        name: verdict.judge(placed, prediction, machine, own)
        for name, own in chosen.items()
    }
    return dict(sorted(judged.items(), key=lambda item: -item[1].bytes))
