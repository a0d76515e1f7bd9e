"""Runs finish undisturbed while strangers.py attacks their meeting's port."""

import asyncio
import collections
import dataclasses
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from acco_jax.command import exits
from acco_jax.run.supervise import supervisor
from tests.run import strangers

SECONDS = float(os.environ.get("ACCO_FUZZ_SECONDS", "150"))  # with and without a token


@pytest.mark.long
@pytest.mark.parametrize("token", ["", "a token of some length"])
def test_strangers_do_not_disturb_runs(jobs, capfd, caplog, token):
    plan = ("none", 0)
    todo = [dataclasses.replace(j, token=token) for j in jobs(plan, plan, plan)]
    port = todo[0].coordinator.split(":")[1]
    script = str(Path(strangers.__file__))
    # without a token a stranger can take the place of a process: that is left out
    flags = ["--seats"] if token else []
    attackers = [
        subprocess.Popen(
            [
                sys.executable,
                script,
                port,
                f"--seconds={SECONDS}",
                f"--seed={i}",
                *flags,
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    until, runs, files = time.monotonic() + SECONDS, 0, 0
    memory = []

    async def together():
        nonlocal files
        tasks = [asyncio.create_task(supervisor._supervise(job)) for job in todo]
        while not all(task.done() for task in tasks):
            files = max(files, len(os.listdir("/proc/self/fd")))
            await asyncio.sleep(0.1)
        return [task.result() for task in tasks]

    while time.monotonic() < until:
        codes = asyncio.run(asyncio.wait_for(together(), 60))
        out, err = capfd.readouterr()
        assert codes == [exits.FINISHED] * 3, err
        lines = [x.split() for x in out.splitlines() if "imported" not in x]
        assert sorted(x[3] for x in lines) == ["0/3", "1/3", "2/3"]
        assert {x[0] for x in lines} == {"1"}  # no restart
        runs += 1
        memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    made = collections.Counter()
    for attacker in attackers:
        made.update(json.loads(attacker.communicate(timeout=60)[0]))
    with capfd.disabled():
        print(f"\n{runs} runs, connections: {dict(made)}, files: at most {files}, "
              f"KiB: {memory[0]} to {memory[-1]}")  # fmt: skip
    assert runs > 3 and made.total() - made["refused"] > 1000
    assert files < 250
    assert memory[-1] - memory[0] < 64 * 1024
    assert "has failed" not in caplog.text and "Traceback" not in caplog.text
