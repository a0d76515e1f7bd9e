"""CPU processes joined by a link of chosen speed: Linux, root, iproute2's ip and tc.

Each process runs in a network namespace of its own; the namespaces meet at a bridge,
and each sends at no more than a set rate (`tc tbf`; the latency is the machine's own).
"""

import contextlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Of the rate that an idle link may send at once. TCP hands over a millisecond's bytes,
# and somewhat more. tbf cuts what is larger than a burst into single frames, which at
# 300 Mbit/s takes a whole core.
BURST_SECONDS = 0.0015
LEAST_BURST = 16_000  # bytes: several packets, also at slow rates
ENVIRONMENT = {
    # A process pinned to one core would get one thread, and nothing would overlap.
    "PJRT_NPROC": "2",
    # as `acco_jax.command.devices.keep_memory`, for programs of any stack
    "GLIBC_TUNABLES": "glibc.malloc.mmap_max=0:glibc.malloc.arena_max=1"
    ":glibc.malloc.trim_threshold=1099511627776",
    "JAX_PLATFORMS": "cpu",
}
# On a link of short delay TCP hands over 64 kB at any rate unless this is 0. Linux has
# it since 5.19; a container may not let it be written.
_BY_DELAY = "/proc/sys/net/ipv4/tcp_tso_rtt_log"
_MBIT = {"kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}


def parse(text: str) -> float:
    """Read '500kbit', '200mbit' or '1.5gbit' as Mbit/s.

    Raises:
      ValueError: if the text is not such a rate.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.lower())
    rate = float(match[1]) * _MBIT[match[2]] if match else 0.0
    if rate <= 0:
        raise ValueError(
            f"the network's rate is {text!r}: give kbit, mbit or gbit a second, for "
            "example 200mbit."
        )
    return rate


def why_not() -> str | None:
    """Return what this machine lacks, in one line; None if links can be shaped here."""
    if missing := [tool for tool in ("ip", "tc") if not shutil.which(tool)]:
        return f"no {' and '.join(missing)} here: apt-get install -y iproute2."
    if os.geteuid() != 0:
        return "only root can make network namespaces: run as root."
    try:
        _run(f"ip netns add {_name('probe')}")
        _run(f"ip netns del {_name('probe')}")
    except OSError as error:
        return f"this machine has no network namespaces: {error}"
    return None


def environment() -> dict[str, str]:
    """Return the environment of the processes, of one device each."""
    flags = without_devices(os.environ.get("XLA_FLAGS", ""))
    return {**os.environ, **ENVIRONMENT, "XLA_FLAGS": flags}


def without_devices(flags: str) -> str:
    """Return XLA_FLAGS without the number of devices that a CPU is to show."""
    return re.sub(r"--xla_force_host_platform_device_count=\S*", "", flags).strip()


class Network:
    """Namespaces joined at a bridge; see `joined`."""

    def __init__(self, processes: int, hosts: Path) -> None:
        self._hosts, self._processes = hosts, processes
        hub = _name("hub")
        _run(f"ip netns add {hub}")
        _run(f"ip -n {hub} link add bridge up type bridge")
        for i in range(processes):
            own, port = _name(i), f"port{i}"
            _run(f"ip netns add {own}")
            _run(f"ip -n {hub} link add {port} type veth peer name eth0 netns {own}")
            _run(f"ip -n {hub} link set {port} up master bridge")
            _run(f"ip -n {own} addr add {self.address(i)}/24 dev eth0")
            _run(f"ip -n {own} link set eth0 up")
            _run(f"ip -n {own} link set lo up")
            by_rate = f"{{ echo 0 >{_BY_DELAY}; }} 2>/dev/null || true"
            _run(f"ip netns exec {own} sh -c", by_rate)

    def address(self, process: int) -> str:
        return f"10.77.0.{process + 1}"

    def set_rate(self, mbit: float) -> None:
        burst = max(mbit * 1e6 / 8 * BURST_SECONDS, LEAST_BURST)
        limits = f"burst {burst:.0f} latency 400ms"
        shape = f"tbf rate {mbit * 1e6:.0f}bit {limits}"
        for i in range(self._processes):
            _run(f"tc -n {_name(i)} qdisc replace dev eth0 root {shape}")

    def set_link(self, process: int, *, up: bool) -> None:
        """Cut a process off from the others, or join it again."""
        _run(f"ip -n {_name('hub')} link set port{process} {'up' if up else 'down'}")

    def command(self, process: int, arguments: list[str]) -> list[str]:
        """Return a command that runs `arguments` as one process on its own core."""
        # gloo asks for the address of the machine's own name
        hosts = self._hosts / f"{process}.hosts"
        names = f"{self.address(process)} {platform.node()}\n127.0.0.1 localhost\n"
        hosts.write_text(names)
        mount = f'mount --bind {hosts} /etc/hosts; exec "$@"'
        cores = sorted(os.sched_getaffinity(0))
        core = cores[process % len(cores)]
        prefix = f"ip netns exec {_name(process)} sh -ec".split()
        return [*prefix, mount, *f"sh taskset -c {core}".split(), *arguments]


@contextlib.contextmanager
def joined(processes: int, mbit: float) -> Iterator[Network]:
    """Yield a network for `processes` processes, and remove it at the end."""
    with tempfile.TemporaryDirectory() as hosts:
        _remove()
        try:
            network = Network(processes, Path(hosts))
            network.set_rate(mbit)
            yield network
        finally:
            _remove()


def _remove() -> None:
    """Remove this process's namespaces, and those of killed processes."""
    for line in _run("ip netns list").splitlines():
        match line.split()[0].split("-"):
            case ["acco", pid, _] if (
                pid == str(os.getpid()) or not Path("/proc", pid).exists()
            ):
                with contextlib.suppress(OSError):
                    _run(f"ip netns del {line.split()[0]}")


def _name(part: object) -> str:
    return f"acco-{os.getpid()}-{part}"


def _run(command: str, *more: str) -> str:
    done = subprocess.run([*command.split(), *more], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{command}: {done.stderr.strip()}")
    return done.stdout
