"""Commands whose processes train nothing: what each does at a half-round is planned."""

import dataclasses
import socket
import sys

from acco_jax.command import heartbeat
from acco_jax.run.supervise import supervisor
from acco_jax.run.supervise.meeting import Limits

# heartbeat.py alone: the package around it would import jax, which takes seconds.
PROCESS = f"""
import importlib.util, os, signal, sys, time
spec = importlib.util.spec_from_file_location("heartbeat", {heartbeat.__file__!r})
heartbeat = sys.modules["heartbeat"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(heartbeat)
fault, at, faulty_attempts = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
def imported():
    print("imported", os.getpid(), flush=True)
    if fault == "slow import":
        time.sleep(60)
    if fault == "no import":
        import nothing_of_this_name
orders = heartbeat.follow(imported)
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
place = "/".join(map(str, (orders.process, orders.processes)))
print(orders.attempt, orders.coordinator, os.getpid(), place, flush=True)
os.write(2, b"a message of a library in C++\\n")
for half_round in range(1, 6):
    if half_round == at and orders.attempt <= faulty_attempts:
        if fault == "raise":
            raise RuntimeError("nobody expected this\\nand more")
        if fault == "refuse":
            print("error: no such file", file=sys.stderr)
            heartbeat.ends_with(2, "no such file")
            sys.exit(2)
        if fault == "stuck":  # its watchdog ends it
            heartbeat.stuck("its main thread is stuck")
            os._exit(5)
        if fault == "wait":  # as in a collective whose peer is gone
            while not told:
                time.sleep(0.05)
        if fault == "die":  # as of too little memory, while it saves
            while not told:
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "unready":  # as what a signal interrupts before training begins
            while not told:
                time.sleep(0.05)
            heartbeat.ends_with(1, "interrupted")
            sys.exit(1)
        if fault == "save":  # once it is told to
            while not told:
                time.sleep(0.05)
        if fault in ("frees", "breaks"):  # its interpreter ends, without its threads
            heartbeat.ends_with(75, "")
            heartbeat._tell = lambda **_: None
            time.sleep(6)
            os.kill(os.getpid(), signal.SIGSEGV if fault == "breaks" else 0)
            os._exit(75)
        if fault == "slow":  # and alive
            time.sleep(6)
        if fault == "above":  # what has forked it goes
            os.kill(os.getppid(), signal.SIGKILL)
        if fault == "manager":  # a service manager's word to all
            os.kill(os.getppid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        if fault == "stay":
            while True:
                time.sleep(1)
        if fault.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, fault))
    heartbeat.reached(half_round)
    time.sleep(0.02)
    if told:
        sys.exit(75)
"""


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


LIMITS = Limits(lost_after=4.0, start_within=30.0)


def commands(folder):
    """jobs(*plans, **limits): one for each (fault, half-round[, attempts])."""
    script, workdir = folder / "process.py", folder / "work"
    script.write_text(PROCESS)
    workdir.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def make(*plans, **limits):
        return [
            supervisor.Job(
                command=[sys.executable, str(script), *map(str, (*plan, 1)[:3])],
                workdir=workdir,
                limits=dataclasses.replace(LIMITS, **limits),
                process=i,
                processes=len(plans),
                coordinator=f"127.0.0.1:{port}" if len(plans) > 1 else None,
            )
            for i, plan in enumerate(plans)
        ]

    return make


GOOD, WAIT = ("none", 0), ("wait", 4)
