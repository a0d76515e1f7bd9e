"""Processes that are killed while they save: python -m tests.run.killed_saves DIR

One for each stage of a save, which saves half-round 1, and dies in the save of 2; keep
is 1.
"""

import os
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
from etils import epath

from acco_jax.run.state import checkpoints, shards

CODE = 7
Checkpoints = checkpoints.Checkpoints


def value(half_round):
    return np.arange(4096, dtype=np.float32) * half_round


def die(*arguments):
    time.sleep(0.1)  # whatever is written meanwhile gets further
    os._exit(CODE)


def write_and_die(path, text):
    path.write_text(text)
    die()


# stage -> (what does it, what does it instead, the checkpoint that counts then)
STAGES = {
    "arrays": (shards, "crc", die, 1),
    "renamed": (checkpoints, "_checksums", die, 1),
    "summing": (checkpoints, "write_whole", die, 1),
    "summed": (checkpoints, "write_whole", write_and_die, 2),
    "before the old one goes": (Checkpoints, "_remove", die, 2),
    "while the old one goes": (type(epath.Path("/")), "rmtree", die, 2),
}


def save_twice(folder, stage):
    import jax.numpy as jnp

    saver = Checkpoints(folder, keep=1)
    saver.save(1, {"x": jnp.asarray(value(1))}, {})
    saver.wait()
    where, name, instead, _ = STAGES[stage]
    mock.patch.object(where, name, instead).start()
    saver.save(2, {"x": jnp.asarray(value(2))}, {})
    saver.wait()


if __name__ == "__main__":
    for stage in STAGES:
        if not (child := os.fork()):  # no device has been touched
            save_twice(Path(sys.argv[1]) / stage, stage)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == CODE, (stage, status)
