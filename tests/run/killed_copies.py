"""Processes killed while they keep copies: python -m tests.run.killed_copies DIR

Each continues from the newest copy that is whole, and is killed at a random time; once
a bit of the newest copy changes meanwhile. It prints the number of kills, those during
a copy, the steps that were repeated, and whether the last process ended with the bits
of one that nothing disturbed.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from acco_jax.run.state import memory, worlds

KILLS, STEPS, FLIPPED = 25, 500, 12


def train(folder: Path, *, copied: bool) -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    memory.FIRST, memory.SHARE = 1, 1e9  # a copy every two steps
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, P("data"))
    step = jax.jit(lambda x, n: jnp.sin(x * 1.37 + n), donate_argnums=0)
    x = jax.device_put(np.arange(1 << 18, dtype=np.float32), sharding)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    place = folder / "shm" if copied else None
    world = worlds.World({"data": 2}, 1, [], "fused")
    with memory.MemoryCopies(place, folder, {}, world) as copies:
        done = 0
        if found := copies.restore_newest(lambda axes: [like], 0):
            done, (x,), host = found
            assert host == {"axes": world.axes, "done": done}
        note(folder / "reached", done)
        note(folder / "began", done)
        while done < STEPS:
            x = step(x, done)
            done += 1
            note(folder / "reached", done)
            if copies.due(done):
                jax.block_until_ready(x)
                host = {"axes": world.axes, "done": done}
                copies.keep(done, [x], lambda: host)  # noqa: B023
        np.save(folder / f"{copied}.npy", x)


def begin(folder: Path, *, copied: bool = True) -> int:
    child = os.fork()  # no device has been touched
    if not child:
        train(folder, copied=copied)
        os._exit(0)
    return child


def note(path: Path, number: int) -> None:
    path.with_suffix(".partial").write_text(str(number))
    path.with_suffix(".partial").replace(path)


def number(path: Path) -> int:
    return int(path.read_text()) if path.exists() else 0


def flip(folder: Path) -> None:
    newest = max(folder.rglob("*.json"), key=lambda p: int(p.stem))
    path = newest.with_suffix(".data")
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 4
    path.write_bytes(data)


def main(folder: Path) -> None:
    (folder / "shm").mkdir()
    random.seed(0)
    meanwhile, repeated, reached, flipped = 0, list[int](), 0, False
    for kill in range(KILLS):
        (folder / "began").unlink(missing_ok=True)
        child = begin(folder)
        while not (folder / "began").exists():
            time.sleep(0.01)
        goal = number(folder / "began") + 4
        while number(folder / "reached") < goal:
            time.sleep(0.001)
        if reached:
            repeated.append(reached - number(folder / "began"))
        time.sleep(random.uniform(0.0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        reached = number(folder / "reached")
        marked = {path.stem for path in (folder / "shm").rglob("*.json")}
        data = {path.stem for path in (folder / "shm").rglob("*.data")}
        meanwhile += data > marked
        if kill >= FLIPPED and not flipped and len(marked) == 2:
            flip(folder)
            flipped = True
    assert reached < STEPS, "it was done before it was killed so often"
    for copied in (True, False):
        assert os.waitpid(begin(folder, copied=copied), 0)[1] == 0
    same = (folder / "True.npy").read_bytes() == (folder / "False.npy").read_bytes()
    left = len(list(folder.rglob("*.data")))
    found = {"kills": KILLS, "meanwhile": meanwhile, "repeated": repeated}
    print(json.dumps(found | {"bits": same, "left": left}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
