"""Programs that tests start."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from acco_jax.run.compare.network import without_devices

ROOT = Path(__file__).parents[1]


def environment(**more: str) -> dict[str, str]:
    """A user's environment: it fakes no devices, and no scheduler has started it.

    Of the tests' own it keeps how programs are compiled.
    """
    left_out = ("JAX_PLATFORMS", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
    inherited = {k: v for k, v in os.environ.items() if k not in left_out}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    flags = without_devices(os.environ["XLA_FLAGS"])
    return inherited | {"PYTHONPATH": path, "XLA_FLAGS": flags} | more


def run(
    program: Path, *flags: object, timeout: float, **env: str
) -> subprocess.CompletedProcess:
    """Return what became of a program, and its `pid`, which names its namespaces."""
    process = subprocess.Popen(
        [sys.executable, program, *map(str, flags)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    )
    out, err = process.communicate(timeout=timeout)
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    done.pid = process.pid
    return done


def together(
    module: str, number: int, flags: Callable[[int, int], tuple], timeout: float = 240
) -> list[str]:
    """Return what so many processes of a module print; all of them end well.

    flags(i, port) are those of the i-th one; at the port they may meet.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", module, *map(str, flags(i, port))],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(number)
    ]
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert {x.returncode for x in started} == {0}, "\n".join(outputs)[-4000:]
    return outputs
