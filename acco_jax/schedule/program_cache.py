"""Cache of compiled programs on disk: repeated plans skip the compiler.

JAX's own cache keeps executables, which a compiler without its devices cannot load
again; a plan needs only the text and the memory. An entry belongs to the program's
StableHLO, the compiler's options, flags and version, and the devices that it is
compiled for.
$ACCO_PLAN_CACHE names the folder; 'off' keeps nothing.
"""

import contextlib
import gzip
import hashlib
import json
import os
import secrets
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from acco_jax.schedule.chips import of_kind

# What also changes programs: options of XLA for any process, and of the TPU's compiler.
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_SETTINGS = (  # and of JAX
    "disable_most_optimizations",
    "optimization_level",
    "memory_fitting_level",
    "exec_time_optimization_effort",
    "memory_fitting_effort",
)
_OF_THE_CPU = ("--xla_cpu_", "--xla_force_host_platform_device_count=")
ENTRIES = 200  # the newest are kept
_FORM = 1  # of an entry: raise it when the content changes


def folder() -> Path | None:
    """Return the folder of entries, None if the cache is off."""
    said = os.environ.get("ACCO_PLAN_CACHE")
    if said == "off":
        return None
    if said:
        return Path(said).expanduser()
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "acco_jax" / "plan"


def key(
    lowered: jax.stages.Lowered, options: Mapping[str, Any], devices: np.ndarray
) -> str:
    """Return the name of an entry.

    Args:
      lowered: what `jax.jit(f).lower(...)` returns.
      options: of the compiler.
      devices: of the mesh, in its shape; described ones.
    """
    first = devices.flat[0]
    parts = (
        *(jax.config.values.get(f"jax_{name}") for name in _SETTINGS),
        *(_FORM, jax.__version__, first.client.platform_version, first.device_kind),
        repr(of_kind(first.device_kind)),
        (devices.shape, [str(d) for d in devices.flat]),
        sorted(options.items()),
        lowered.as_text(),
        *_environment(),
    )
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:32]


def _environment() -> list[str]:
    """Return the compilers' flags of this process's environment, sorted."""
    words = (word for x in _VARIABLES for word in os.environ.get(x, "").split())
    return sorted(word for word in words if not word.startswith(_OF_THE_CPU))


def load(name: str) -> dict[str, Any] | None:
    """Return the entry of a name, None if there is none or it cannot be read."""
    place = folder()
    if place is None:
        return None
    file = place / f"{name}.json.gz"
    try:
        found = json.loads(gzip.decompress(file.read_bytes()))
    except (OSError, EOFError, ValueError, zlib.error):
        return None
    with contextlib.suppress(OSError):  # a folder that others fill
        file.touch()
    return found if isinstance(found, dict) else None


def keep(name: str, entry: Mapping[str, Any]) -> None:
    """Write an entry and keep only the newest ENTRIES; ignore errors of the disk."""
    place = folder()
    if place is None:
        return
    file = place / f"{name}.json.gz"
    part = file.with_suffix(f".{secrets.token_hex(8)}")
    try:
        place.mkdir(parents=True, exist_ok=True)
        part.write_bytes(gzip.compress(json.dumps(entry).encode(), 5))
        part.replace(file)
        entries = sorted(place.glob("*.json.gz"), key=lambda f: f.stat().st_mtime)
        for old in entries[:-ENTRIES]:
            old.unlink(missing_ok=True)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
