"""How a process is prepared for its devices."""

import ctypes
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from acco_jax.command import devices

def held():
    (line,) = (x for x in open("/proc/self/status") if x.startswith("VmRSS"))
    return int(line.split()[1]) / 1024

if sys.argv[1] == "keep":
    devices.keep_memory()
before, block = held(), bytearray(2**26)
del block
print(held() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
@pytest.mark.parametrize(("how", "megabytes"), [("keep", (60, 80)), ("give", (-1, 4))])
def test_freed_memory_is_kept(how, megabytes):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True
    )
    least, most = megabytes
    assert least < float(done.stdout) < most
