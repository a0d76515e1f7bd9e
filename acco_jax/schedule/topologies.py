"""Topologies: named sets of devices, described to the compiler without them.

    topology = parse("gpu:h200:4x8")      # 4 hosts of 8 GPUs
    topology = parse("tpu:v5e:4x4")       # one slice of 4 x 4 chips
    devices = mesh(topology, model=2)     # ("data", "model") over described devices
    program = compiled(jax.jit(step).lower(...), topology)

A command that plans calls `use_cpu` first, so that JAX does not look for the chips
whose compilers are installed.
"""

import dataclasses
import functools
import importlib.util
import itertools
import math
import os
import re
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies as jax_topologies

from acco_jax.core.names import check_name
from acco_jax.schedule.chips import CHIPS, LARGEST_SLICE, Chip, target_config

_FORMS = "gpu:CHIP:HOSTSxGPUS (gpu:h200:4x8) or tpu:CHIP:SHAPE (tpu:v5e:4x4)"
_PLUGINS = {
    "gpu": ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"),
    "tpu": ("libtpu",),
}
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # do not look for a cloud machine's metadata server
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",  # any: without one libtpu warns
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no lock: several may plan at the same time
}
# Options of a compiler that has no device: CUB's sort asks one for its scratch memory.
_WITHOUT = {"gpu": {"xla_gpu_enable_cub_radix_sort": False}}
# JAX's compilation cache takes programs for devices that are not here, and cannot load
# them: it warns, and compiles again.
warnings.filterwarnings("ignore", r"(?s)Error reading persistent .* with a Client")


@dataclasses.dataclass(frozen=True)
class Topology:
    """A set of identical devices."""

    platform: str  # "gpu" or "tpu"
    chip: Chip
    shape: tuple[int, ...]  # (hosts, GPUs per host), or chips along each dimension
    slices: int = 1  # TPU slices of that shape, joined by the data-centre network

    @property
    def devices(self) -> int:
        """Number of JAX devices."""
        return math.prod(self.shape) * self.chip.devices_per_chip * self.slices

    @property
    def fast_domain(self) -> int:
        """Number of devices that NVLink or ICI joins: a host or a slice."""
        return self.devices // self.slices if self.platform == "tpu" else self.shape[1]

    @property
    def domain_name(self) -> str:
        """Name of such a set of devices."""
        return "slice" if self.platform == "tpu" else "host"

    @property
    def rings(self) -> tuple[bool, ...]:
        """Whether each dimension of a TPU's slice is a ring; else it has two ends."""
        found = [size % self.chip.ring == 0 for size in self.shape]
        return tuple(found) if len(found) < 3 else (all(found),) * 3

    @functools.cached_property
    def coordinates(self) -> list[tuple[int, ...]]:
        """Places in its slice of each TPU device, host after host.

        Without the compiler, which knows it, rows one after the other.
        """
        try:
            devices: Any = self.description().devices
        except (RuntimeError, ValueError):
            chips = itertools.product(*map(range, self.shape))
            each = self.chip.devices_per_chip
            return [place for place in chips for _ in range(each)] * self.slices
        return [tuple(x.coords)[: len(self.shape)] for x in devices]

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        slices = f" x {self.slices} slices" if self.slices > 1 else ""
        return f"{self.platform}:{self.chip.name}:{shape}{slices}"

    def description(self) -> jax_topologies.TopologyDescription:
        """Describe the devices to the compiler; needs its plugin, not the devices.

        Raises:
            RuntimeError: if the compiler plugin is not installed.
            ValueError: if the compiler does not support such a topology.
        """
        if not any(map(_installed, _PLUGINS[self.platform])):
            raise RuntimeError(
                f"planning for {self} needs the {self.platform.upper()} compiler: "
                f"pip install 'acco-jax[plan-{self.platform}]'"
            )
        shape = "x".join(map(str, self.shape))
        try:
            if self.platform == "gpu":  # partitions x hosts x devices: a host each
                hosts, gpus = self.shape
                return jax_topologies.get_topology_desc(
                    platform="cuda",
                    topology_name="",
                    target_config=target_config(self.chip),
                    topology=f"{hosts}x1x{gpus}",
                )
            for variable, value in _TPU_ENVIRONMENT.items():
                os.environ.setdefault(variable, value)
            options = {"num_slices": self.slices} if self.slices > 1 else {}
            return jax_topologies.get_topology_desc(
                platform="tpu", topology_name=f"{self.chip.name}:{shape}", **options
            )
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else repr(error)
            if isinstance(error, NotImplementedError):  # JAX left the plugin out
                reason += " (JAX has started without a GPU): set JAX_PLATFORMS=cpu"
            raise ValueError(f"the compiler rejects {self}: {reason}") from error


def parse(text: str, slices: int = 1) -> Topology:
    """Parse "gpu:CHIP:HOSTSxGPUS" or "tpu:CHIP:SHAPE".

    Args:
        text: for example "gpu:h200:4x8", "gpu:h100:8" (one host), "tpu:v5p:4x4x4".
        slices: number of such TPU slices.

    Raises:
        ValueError: on any other form, an unknown chip, or a shape that it cannot have.
    """
    match = re.fullmatch(r"(\w+):(\w+):(\d+(?:x\d+)*)", text)
    if match is None:
        raise ValueError(f"topology {text!r} is not of the form {_FORMS}")
    platform, name, dimensions = match.groups()
    check_name(f"topology {text!r}: the platform", platform, ("gpu", "tpu"))
    names = [c.name for c in CHIPS.values() if c.platform == platform]
    check_name(f"topology {text!r}: the {platform} chip", name, names)
    chip = CHIPS[name]
    shape = tuple(map(int, dimensions.split("x")))
    if platform == "gpu" and len(shape) == 1:
        shape = (1, *shape)
    if len(shape) != chip.dimensions or 0 in shape:
        form = "HOSTSxGPUS" if platform == "gpu" else "x".join("XYZ"[: chip.dimensions])
        raise ValueError(
            f"topology {text!r}: shape {dimensions!r} is not of the form {form}, "
            "with sizes of at least 1"
        )
    if slices < 1 or (platform == "gpu" and slices != 1):
        allowed = "1 for GPUs" if platform == "gpu" else "at least 1"
        raise ValueError(
            f"topology {text!r}: slices is {slices}, but must be {allowed}"
        )
    chips, most = math.prod(shape), LARGEST_SLICE.get(name, 0) // chip.devices_per_chip
    if platform == "tpu" and chips > most:  # beyond it the compiler aborts
        raise ValueError(
            f"topology {text!r}: {chips} chips, but a slice of {chip.title} has at "
            f"most {most}: take several with --slices."
        )
    return Topology(platform, chip, shape, slices)


def mesh(topology: Topology, model: int = 1) -> jax.sharding.Mesh:
    """Make a mesh of described devices, the model axis over neighbouring ones.

    Its axes are ("data", "model"); with several slices ("slice", "data", "model"). The
    model axis has size `model`.

    Raises:
        ValueError: if `model` does not divide the devices of a host or slice.
    """
    if model < 1 or topology.fast_domain % model:
        raise ValueError(
            f"model axis of size {model} does not divide the {topology.fast_domain} "
            f"devices of a {topology.domain_name} of {topology}"
        )
    devices: np.ndarray = np.array(topology.description().devices)
    if topology.slices == 1:
        return jax.sharding.Mesh(devices.reshape(-1, model), ("data", "model"))
    shape = (topology.slices, -1, model)
    return jax.sharding.Mesh(devices.reshape(shape), ("slice", "data", "model"))


def places(mesh: jax.sharding.Mesh) -> list[int]:
    """Number a mesh's devices host after host, and so slice after slice.

    A program numbers them in its mesh's order, which `jax.make_mesh` takes from a TPU's
    torus.
    """
    found = [(d.process_index, d.id) for d in mesh.devices.flat]
    numbers = {device: i for i, device in enumerate(sorted(found))}
    return [numbers[device] for device in found]


def compiled(
    lowered: jax.stages.Lowered,
    topology: Topology,
    options: Mapping[str, Any] | None = None,
) -> jax.stages.Compiled:
    """Compile a program for devices that are not here, with further options."""
    options = _WITHOUT.get(topology.platform, {}) | dict(options or {})
    return lowered.compile(compiler_options=options or None)


def use_cpu() -> None:
    """Make JAX's own backend the CPU; call it before any backend has started."""
    jax.config.update("jax_platforms", "cpu")


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False
