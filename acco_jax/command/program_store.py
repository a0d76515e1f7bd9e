"""Compiled programs on disk, so that the next start of a run need not compile them.

This is JAX's persistent compilation cache in a folder of our own, which is bounded.
$JAX_COMPILATION_CACHE_DIR names another folder, which is then JAX's matter;
$ACCO_COMPILATION_CACHE=off keeps nothing.
"""

import contextlib
import hashlib
import os
import platform
import site
import sys
import sysconfig
import time
from pathlib import Path

import jax
from absl import logging

BYTES = 2**32  # of the folder; at the start the entries not read for longest go
_BEGAN = time.time_ns()  # this process; what is imported later is not older
SECONDS = 0.5  # a program that compiles faster is not kept


def folder() -> Path | None:
    """Return the folder for this kind of machine; None: it is not this package's.

    A program for CPUs runs only where the processor has the same features, and a home
    may be shared by different ones.
    """
    if os.environ.get("ACCO_COMPILATION_CACHE") == "off":
        return None
    values = jax.config.values
    if values["jax_compilation_cache_dir"]:
        return None
    if not values["jax_enable_compilation_cache"]:
        return None
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    kind = hashlib.sha256(_processor().encode()).hexdigest()[:12]
    return Path(home).expanduser() / "acco_jax" / "xla" / kind


def keep_programs() -> None:
    """Have JAX keep compiled programs in `folder`; call it before anything compiles.

    A folder that cannot be written costs a warning.
    """
    try:
        place = folder()
        if place is None:
            return
        place.mkdir(parents=True, exist_ok=True)
        _shrink(place, BYTES)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        logging.warning("compiled programs are not kept: %s", error)
        return
    jax.config.update("jax_compilation_cache_dir", str(place))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", SECONDS)


def environment() -> str:
    """Return what this process's programs depend on, beside their own arguments.

    It is the code, that of the installed packages by their lists of files, the settings
    of JAX and XLA, the processor and the devices.

    Raises:
      RuntimeError: code has changed since this process began: which it runs is unknown.
    """
    names = ("stdlib", "purelib", "platlib")
    installed = {sysconfig.get_path(name) for name in names}
    installed.add(site.getusersitepackages())
    files = set(Path(__file__).parents[1].rglob("*.py"))
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        if name and not name.startswith(tuple(installed)):
            files.add(Path(name))
    for place in installed:
        files |= set(Path(place).glob("*.dist-info/RECORD"))
    stamps = []
    for path in sorted(files):
        with contextlib.suppress(OSError):
            stat = path.stat()
            if stat.st_mtime_ns > _BEGAN:
                raise RuntimeError(f"{path} has changed since this process began")
            stamps.append((str(path), stat.st_mtime_ns, stat.st_size))
    flags = {name: os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}
    devices = [(d.id, d.device_kind, d.process_index) for d in jax.devices()]
    here = sys.version, _processor(), jax.process_index(), devices
    return repr((stamps, flags, sorted(jax.config.values.items()), here))


def _shrink(place: Path, limit: int) -> None:
    """Delete the files not used for longest until at most `limit` bytes are left."""
    found = []
    for path in place.iterdir():
        if path.is_dir():  # not JAX's
            continue
        try:
            stat = path.stat()
        except FileNotFoundError:  # another process deletes, too
            continue
        found.append((max(stat.st_atime, stat.st_mtime), stat.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= limit:
            return
        path.unlink(missing_ok=True)
        total -= size


def _processor() -> str:
    """Return what tells apart processors that do not run each other's programs."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = ("model name", "flags", "Features", "CPU part")
    first = {name: next((x for x in lines if x.startswith(name)), "") for name in names}
    return "\n".join((platform.machine(), platform.processor(), *first.values()))
