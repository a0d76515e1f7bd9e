# ruff: noqa: E402 (the environment first)
"""A process of several on hosts of their own: copies, losses, and what is found.

python -m tests.run.neighbours_program PROCESS HOSTS PORT MEMORY WORKDIRS

HOSTS has a digit for each process. With 012 it makes copies and loses some of them;
with others it looks for those that were left.
"""

import contextlib
import json
import os
import shutil
import socket
import sys
from pathlib import Path

process, hosts, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
place, workdirs = map(Path, sys.argv[4:6])
own = f"host{hosts[process]}"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=2"

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(
    f"localhost:{port}", len(hosts), process, initialization_timeout=60
)
socket.gethostname = lambda: own

from acco_jax.core import leaf_names
from acco_jax.run.state import processes, worlds
from acco_jax.run.state.memory import MemoryCopies

UNSENT = ", after a copy that was not sent"
PARTS = {  # of an array of 12 x 4
    "data": P("data"),
    "both": P("data", "chip"),
    "joint": P(("data", "chip")),
    "chip": P("chip"),
    "nothing": P(),
}


def arrays(half_round, kind, specs=PARTS):
    """Values that differ in each shard; bits that a sum would change among them."""
    axes = {"data": len(hosts), "chip": 2}
    mesh = jax.make_mesh((*axes.values(),), (*axes,), axis_types=(kind, kind))
    x = np.arange(48, dtype=np.float32).reshape(12, 4) * half_round
    x[::2, 1] = -0.0
    made = {}
    for name, spec in specs.items():
        values = x.astype(np.float32 if name != "joint" else jax.numpy.bfloat16)
        at = NamedSharding(mesh, spec)
        made[name] = jax.make_array_from_callback(x.shape, at, values.__getitem__)
    data = np.arange(2, dtype=np.uint32) * half_round
    whole = NamedSharding(mesh, P())
    data = jax.make_array_from_callback(data.shape, whole, data.__getitem__)
    return made | {"key": jax.random.wrap_key_data(data)}


def like(kind, specs=PARTS):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        arrays(1, kind, specs),
    )


def bits(tree):
    named = leaf_names.named(tree)
    own = {k: [s.data for s in x.addressable_shards] for k, x in named.items()}
    return {k: [np.asarray(s).tobytes() for s in x] for k, x in own.items()}


def opened(name):
    (place / own / name).mkdir(parents=True, exist_ok=True)
    (workdirs / name).mkdir(exist_ok=True)
    processes.meet(name)
    world = worlds.World({"data": len(hosts), "chip": 2}, len(hosts), [], "fused")
    return MemoryCopies(place / own / name, workdirs / name, {"a": 1}, world)


def kept(name, kind):
    """Copies of two half-rounds, which are sent, and of one that is not."""
    copies = opened(name)
    copies.begin(0)
    for half_round in (4, 8, *[10] * name.endswith(UNSENT)):
        host = {"axes": {"data": len(hosts), "chip": 2}, "at": half_round}
        copies.keep(half_round, arrays(half_round, kind), lambda h=host: h)
    copies._writing.result()
    processes.meet("kept")
    return copies._folder


def restored(name, kind, specs=PARTS, leave=False):
    """The half-round that is found; its bits are those that it had."""
    with contextlib.ExitStack() as stack:
        again = opened(name)
        if not leave:  # as a run that has ended well does not
            stack.enter_context(again)
        found = again.restore_newest(lambda axes: like(kind, specs), 0)
    at = None
    if found:
        at, tree, host = found
        assert host["at"] == at, host
        assert bits(tree) == bits(arrays(at, kind, specs)), name
    print("RESULT", json.dumps([name, at]), flush=True)


def flip(path):
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)


def lose(mine, *lost):
    """This process's host is another one now, if it is among the lost."""
    if process in lost:
        shutil.rmtree(mine)


FAULTS = {
    "nothing is lost": lambda mine: None,
    "a host is lost": lambda mine: lose(mine, 1),
    "the first host is lost": lambda mine: lose(mine, 0),
    "a host and its neighbour are lost": lambda mine: lose(mine, 1, 2),
    "all are lost": lambda mine: lose(mine, 0, 1, 2),
    "a bit has changed": lambda mine: process or flip(mine / "8.data"),
    "a host is lost, and a bit of its copy": lambda mine: (
        lose(mine, 1),
        process == 2 and flip(mine / "held" / "8.data"),
    ),
    "a copy was not ended": lambda mine: process or (mine / "8.json").unlink(),
    f"nothing is lost{UNSENT}": lambda mine: None,
    f"a host is lost{UNSENT}": lambda mine: lose(mine, 1),
}

CASES = [(AxisType.Auto, name) for name in FAULTS]
if hosts == "012":
    for kind, name in [*CASES, (AxisType.Explicit, "a host is lost")]:
        folder = kept(f"{kind.name}: {name}", kind)
        FAULTS[name](folder)
        processes.meet("lost")
        restored(f"{kind.name}: {name}", kind)
    # what was sent outlives a restart that took what was not
    name = f"Auto: twice{UNSENT}"
    folder = kept(name, AxisType.Auto)
    restored(name, AxisType.Auto, leave=True)
    lose(folder, 1)
    processes.meet("lost again")
    restored(name, AxisType.Auto)
    kept("Auto: left", AxisType.Auto)
    kept("Auto: left without one", AxisType.Auto)
else:  # other devices: shards lie otherwise
    specs = {name: P(("data", "chip")) for name in PARTS} | {"chip": P(None, "chip")}
    if own == "host2":
        shutil.rmtree(place / own / "Auto: left without one")
    restored("Auto: left", AxisType.Auto, specs)
    restored("Auto: left without one", AxisType.Auto, specs)
