"""CPU processes joined by a link of chosen speed: Linux, root, iproute2's ip and tc.

Each process runs in a network namespace of its own; the namespaces meet at a bridge,
and each sends at no more than a set rate (`tc tbf`; the latency is the machine's own).
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

BURST = "256kb"  # what may be sent at once
ENVIRONMENT = {
    # A process pinned to one core would get one thread, and nothing would overlap.
    "PJRT_NPROC": "2",
    # Buffers beyond 32 MB are new memory in every half-round: in 4 KB pages their
    # page faults are half of what communication costs the core.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "XLA_FLAGS": "",  # one device each, whatever the caller's own processes have
    "JAX_PLATFORMS": "cpu",
}
_MBIT = {"kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}


def parse(text: str) -> float:
    """Mbit/s of '500kbit', '200mbit' or '1.5gbit'.

    Raises:
      ValueError: it is no such rate.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.lower())
    rate = float(found[1]) * _MBIT[found[2]] if found else 0.0
    if rate <= 0:
        raise ValueError(
            f"the network's rate is {text!r}: give kbit, mbit or gbit a second, for "
            "example 200mbit."
        )
    return rate


def why_not() -> str | None:
    """What this machine lacks, in one line; None if links can be shaped here."""
    if missing := [tool for tool in ("ip", "tc") if not shutil.which(tool)]:
        return f"no {' and '.join(missing)} here: apt-get install -y iproute2."
    if os.geteuid() != 0:
        return "network namespaces are made by root: run as root."
    probe = subprocess.run(["ip", "netns", "add", _name("probe")], capture_output=True)
    subprocess.run(["ip", "netns", "del", _name("probe")], capture_output=True)
    if probe.returncode:
        return f"no network namespaces here: {probe.stderr.decode().strip()}"
    return None


def environment() -> dict[str, str]:
    """For the processes."""
    return {**os.environ, **ENVIRONMENT}


class Network:
    """Namespaces joined at a bridge; see `joined`."""

    def __init__(self, processes: int, hosts: Path) -> None:
        self._hosts, self._processes = hosts, processes
        hub = _name("hub")
        _sh("ip", "netns", "add", hub)
        _sh("ip", "-n", hub, "link", "add", "bridge", "up", "type", "bridge")
        for i in range(processes):
            _sh("ip", "netns", "add", _name(i))
            port = f"port{i}"
            _sh("ip", "-n", hub, "link", "add", port, "type", "veth",
                "peer", "name", "eth0", "netns", _name(i))  # fmt: skip
            _sh("ip", "-n", hub, "link", "set", port, "up", "master", "bridge")
            own = f"{self.address(i)}/24"
            _sh("ip", "-n", _name(i), "addr", "add", own, "dev", "eth0")
            _sh("ip", "-n", _name(i), "link", "set", "eth0", "up")
            _sh("ip", "-n", _name(i), "link", "set", "lo", "up")

    def address(self, process: int) -> str:
        return f"10.77.0.{process + 1}"

    def set_rate(self, mbit: float) -> None:
        for i in range(self._processes):
            _sh("tc", "-n", _name(i), "qdisc", "replace", "dev", "eth0", "root", "tbf",
                "rate", f"{mbit * 1000:.0f}kbit", "burst", BURST,
                "latency", "400ms")  # fmt: skip

    def command(self, process: int, arguments: list[str]) -> list[str]:
        """These arguments, run as one of the processes, on a core of its own."""
        # gloo asks for the address of the machine's own name
        hosts = self._hosts / f"{process}.hosts"
        names = f"{self.address(process)} {platform.node()}\n127.0.0.1 localhost\n"
        hosts.write_text(names)
        mount = f'mount --bind {hosts} /etc/hosts; exec "$@"'
        cores = sorted(os.sched_getaffinity(0))
        core = str(cores[process % len(cores)])
        return ["ip", "netns", "exec", _name(process), "sh", "-ec", mount, "sh",
                "taskset", "-c", core, *arguments]  # fmt: skip


@contextlib.contextmanager
def joined(processes: int, mbit: float) -> Iterator[Network]:
    """A network for so many processes, gone afterwards, however it ends."""
    with tempfile.TemporaryDirectory() as hosts:
        _remove()
        try:
            network = Network(processes, Path(hosts))
            network.set_rate(mbit)
            yield network
        finally:
            _remove()


def _remove() -> None:
    """Removes this process's namespaces, and those of others that were killed."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True)
    for line in listed.stdout.splitlines():
        match line.split()[0].split("-"):
            case ["acco", pid, _] if (
                pid == str(os.getpid()) or not Path("/proc", pid).exists()
            ):
                subprocess.run(["ip", "netns", "del", line.split()[0]], check=False)


def _name(part: object) -> str:
    return f"acco-{os.getpid()}-{part}"


def _sh(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
