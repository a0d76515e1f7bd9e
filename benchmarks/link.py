"""What a shaped link costs: two processes send each other bytes, and do nothing else.

    python benchmarks/link.py [--rates=44,154,307,614,1229] [--seconds=2]

Needs Linux, root, and iproute2's `ip` and `tc`. Each process has one core and a network
namespace of its own, as in peers.py and auto.py. Both send for `--seconds` at each rate
in Mbit/s. A row has the seconds that it took, headers included, and how many cores were
busy: what the link takes from programs that compute beside it.
"""

import argparse
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from acco_jax.run.compare import network  # noqa: E402

PORT, PIECE = 9900, 1 << 20


def busy() -> float:
    """Returns the CPU seconds of the machine so far, the kernel's own among them."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    user, nice, system, _, _, irq, softirq = map(int, words[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def work(process: int, size: int, server: str) -> None:
    """Sends and receives `size` bytes; prints the seconds."""
    if process == 0:
        peer, _ = socket.create_server((server, PORT)).accept()
    else:
        time.sleep(0.5)
        peer = socket.create_connection((server, PORT))
    buffer = bytearray(PIECE)

    def send() -> None:
        peer.sendall(bytes(size))

    def meet() -> None:
        peer.sendall(b"x")
        peer.recv(1)

    meet()
    sender, start = threading.Thread(target=send), time.perf_counter()
    sender.start()
    left = size
    while left:
        left -= peer.recv_into(buffer, min(left, PIECE))
    sender.join()
    meet()
    print(time.perf_counter() - start)


def measured(mbit: float, seconds: float) -> tuple[float, float]:
    """Returns (seconds, busy cores) of a link of this rate."""
    size = str(int(mbit * 1e6 / 8 * seconds))
    with network.joined(2, mbit) as net:
        before, start = busy(), time.perf_counter()
        started = [
            subprocess.Popen(
                net.command(
                    i,
                    [sys.executable, __file__, "--work", str(i), size, net.address(0)],
                ),
                stdout=subprocess.PIPE,
                text=True,
            )
            for i in range(2)
        ]
        took = [float(process.communicate()[0]) for process in started]
        cores = (busy() - before) / (time.perf_counter() - start)
    return max(took), cores


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        return work(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", default="44,154,307,614,1229", help="Mbit/s")
    parser.add_argument("--seconds", type=float, default=2.0, help="of sending")
    args = parser.parse_args()
    if reason := network.why_not():
        raise SystemExit(f"link.py cannot shape a link: {reason}")
    print("| Mbit/s | seconds | busy cores |\n|---|---|---|")
    for mbit in map(float, args.rates.split(",")):
        took, cores = measured(mbit, args.seconds)
        print(f"| {mbit:g} | {took:.2f} | {cores:.2f} |", flush=True)
    return None


if __name__ == "__main__":
    main()
