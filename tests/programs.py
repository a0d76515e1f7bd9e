"""Programs that tests start."""

import os
import subprocess
import sys
from pathlib import Path


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
