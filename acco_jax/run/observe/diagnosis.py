"""Diagnosis of a machine for a run, and of its problems: acco_jax.doctor.

Every check yields findings: what was seen, and a problem's remedy.
"""

import dataclasses
import functools
import itertools
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from acco_jax.command import devices as here
from acco_jax.run.state import processes
from acco_jax.run.state import workdir as workdirs
from acco_jax.schedule import chips

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")  # of jaxlib's own version
PAIRS = 120  # measured at most: all pairs of sixteen devices
MEBIBYTES = 16  # that a pair exchanges
TIMES = 5
SLOW = 0.25  # share of the median pair's bandwidth
FREE_GIB = 10  # of a disk that is to have checkpoints


@dataclasses.dataclass(frozen=True)
class Finding:
    """An observation; a problem if it has a remedy."""

    about: str
    seen: str
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{'problem' if self.remedy else 'ok':8} {self.about:12} {self.seen}"
        return f"{text}\n{'':21} -> {self.remedy}" if self.remedy else text


def said(finding: Finding, process: int) -> str:
    """Return what a process prints: process 0 all, others their problems."""
    if process == 0:
        return str(finding)
    return f"process {process}: {finding}" if finding.remedy else ""


def versions(installed: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """Check versions that must fit together.

    Args:
      installed: package -> version; None: what is installed.
    """
    if installed is None:
        installed = {p: v for p in (*PACKAGES, *PLUGINS) if (v := _version(p))}
    python = ".".join(map(str, sys.version_info[:3]))
    shown = ", ".join(f"{p} {installed[p]}" for p in PACKAGES if p in installed)
    yield Finding("versions", f"Python {python}, {shown}")
    for package in PLUGINS:
        version, needed = installed.get(package), installed["jaxlib"]
        if version and version != needed:
            yield Finding(
                "versions",
                f"{package} {version} beside jaxlib {needed}",
                f"pip install '{package}=={needed}', or jax[cuda13] again",
            )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def backend(found: Sequence[jax.Device], accelerator: bool) -> Iterator[Finding]:
    """Check that JAX uses the machine's accelerator.

    Args:
      found: JAX's devices, of all processes.
      accelerator: whether the machine has a GPU's or a TPU's device file.
    """
    kind, platform = found[0].device_kind, found[0].platform
    processes = len({d.process_index for d in found})
    several = "es" * (processes > 1)
    seen = f"{len(found)} x {kind} in {processes} process{several}"
    remedy = ""
    if accelerator and platform == "cpu":
        seen += ", although the machine has an accelerator"
        remedy = (
            "install jax's plugin for it (pip install 'jax[cuda13]' or 'jax[tpu]'), "
            "and unset JAX_PLATFORMS"
        )
    yield Finding("devices", seen, remedy)
    if platform != "cpu" and chips.of_kind(kind) is None:
        yield Finding("devices", f"{kind}: its figures are unknown to plan, and no MFU "
                      "is shown; it trains all the same")  # fmt: skip
    form = "split" if platform == "cpu" and processes > 1 else "fused"
    why = {
        "split": "CPU processes communicate in a second thread",
        "fused": "the compiler puts communication beside computation",
    }[form]
    if platform == "cpu" and processes == 1:
        why = "one process has nothing to wait for"
    yield Finding("form", f"{form}, unless the config says otherwise: {why}")


def cores(available: int, nproc: str | None, platform: str) -> Iterator[Finding]:
    """Check that a CPU process has a thread to communicate in.

    Args:
      available: cores that this process may use.
      nproc: PJRT_NPROC, None if it is not set.
      platform: of the devices.
    """
    seen = f"{available} cores for this process"
    if nproc is not None:
        seen += f", PJRT_NPROC={nproc}"
    threads = int(nproc) if nproc and nproc.isdecimal() else available
    remedy = ""
    if platform == "cpu" and threads < 2:
        remedy = "set PJRT_NPROC=2: with one thread nothing overlaps on CPUs"
    yield Finding("cores", seen, remedy)


def bandwidths(mesh: Mesh) -> dict[tuple[int, int], float]:
    """Measure pairs of devices, both ways at once, in bytes a second each way.

    All processes of the mesh call it together. With more than sixteen devices only
    some pairs are measured.
    """
    n, length = mesh.size, MEBIBYTES * 2**20 // 4
    rows = NamedSharding(mesh, P("device"))
    x = jax.jit(lambda: jnp.zeros((n, length), jnp.float32), out_shardings=rows)()
    pairs = list(itertools.combinations(range(n), 2))
    found = {}
    for i, j in pairs[:: max(1, -(-len(pairs) // PAIRS))]:
        swap = _swap(mesh, ((i, j), (j, i)))
        jax.block_until_ready(swap(x))  # compiles, connects
        seconds = []
        for _ in range(TIMES):
            start = time.perf_counter()
            jax.block_until_ready(swap(x))
            seconds.append(time.perf_counter() - start)
        # a process that holds neither device has nothing to wait for
        slowest = processes.gathered(np.asarray(seconds)).max(axis=0)
        found[i, j] = length * 4 / slowest.min()  # the slower ones met other work
    return found


def _swap(mesh: Mesh, pairs: tuple[tuple[int, int], ...]) -> jax.stages.Wrapped:
    send = functools.partial(lax.ppermute, axis_name="device", perm=pairs)
    spec = P("device")
    return jax.jit(jax.shard_map(send, mesh=mesh, in_specs=spec, out_specs=spec))


def network(rates: Mapping[tuple[int, int], float]) -> Iterator[Finding]:
    """Yield how fast pairs of devices are, and which are much slower than most."""
    if not rates:
        yield Finding("network", "one device: nothing to communicate with")
        return
    middle = statistics.median(rates.values())
    low, high = min(rates.values()), max(rates.values())
    several = "s" * (len(rates) > 1)
    yield Finding(
        "network",
        f"{len(rates)} pair{several} exchange {MEBIBYTES} MiB at {_rate(middle)} in "
        f"the median, {_rate(low)} to {_rate(high)}",
    )
    slow = sorted((rate, pair) for pair, rate in rates.items() if rate < SLOW * middle)
    for rate, (i, j) in slow[:3]:
        yield Finding(
            "network",
            f"devices {i} and {j}: {_rate(rate)}",
            "look at their link; if it joins two hosts or slices, give their number as "
            "config.domains",
        )


def _rate(bytes_a_second: float) -> str:
    return f"{bytes_a_second / 1e9:.2f} GB/s"


def folder(workdir: Path) -> Iterator[Finding]:
    """Check a run's workdir: that all processes share it, and its disk."""
    try:
        workdirs.check_shared(workdir)
        there = next(p for p in (workdir, *workdir.parents) if p.exists())
        if not there.is_dir():
            raise ValueError(f"{there} is a file")
        if not os.access(there, os.W_OK):
            raise ValueError(f"{there} is not to be written by this user")
    except (ValueError, OSError) as error:
        yield Finding("workdir", str(error), "name another folder with --workdir")
        return
    free = shutil.disk_usage(there).free / 2**30
    remedy = ""
    if free < FREE_GIB:
        remedy = (
            "a checkpoint holds all parameters and the optimizer's state, and two or "
            "three are kept: use another disk, or a bucket (--config.checkpoints)"
        )
    shared = "shared by all processes, " * (jax.process_count() > 1)
    yield Finding("workdir", f"{workdir}: {shared}{free:,.0f} GiB free", remedy)


def examined(workdir: Path) -> Iterator[Finding]:
    """Yield all findings of this machine, and of the others that take part."""
    found = jax.devices()
    yield from versions()
    yield from backend(found, here.has_accelerator())
    nproc = os.environ.get("PJRT_NPROC")
    yield from cores(here.usable_cores(), nproc, found[0].platform)
    mesh = Mesh(np.array(found), ("device",), (AxisType.Auto,))
    yield from network(bandwidths(mesh) if len(found) > 1 else {})
    yield from folder(workdir)
