"""What the benchmarks of disturbed runs share: texts, an environment, a run's bits."""

import json
import os
import pathlib
import random
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]

CONFIG = """
from acco_jax.runner.config import default_config

def get_config():
    c = default_config()
    c.update({fields!r})
    c.length, c.microbatch_size, c.log_every = 32, 2, 1
    c.model.layers, c.model.heads, c.model.window = 2, 2, 16
    c.model.dtype = c.model.param_dtype = "float32"
    c.data.name, c.data.path = "text_folder", {texts!r}
    return c
"""

# In a process of its own; as NumPy arrays, whatever devices have saved them.
_HASH = """
import hashlib, pathlib, sys
import numpy as np, orbax.checkpoint as ocp
reader, folder = ocp.PyTreeCheckpointer(), pathlib.Path(sys.argv[1], "arrays")
names = reader.metadata(folder).item_metadata.tree
whole = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
arrays = reader.restore(folder, args=ocp.args.PyTreeRestore(restore_args=whole))
sha = hashlib.sha256()
for name in sorted(arrays):
    sha.update(name.encode() + np.asarray(arrays[name]).tobytes())
print(len(arrays), sha.hexdigest())
"""


def texts(place: pathlib.Path) -> pathlib.Path:
    """Writes a folder of 60 documents, some 800 kB; returns it."""
    folder, draw = place / "texts", random.Random(0)
    folder.mkdir()
    words = ["while", "you", "accumulate", "gradients", "communicate", "them", "\n"]
    for i in range(60):
        (folder / f"{i}.txt").write_text(" ".join(draw.choices(words, k=2000)))
    return folder


def write_config(path: pathlib.Path, texts: pathlib.Path, **fields: Any) -> None:
    """Writes an experiment of a small model, with these fields, on a folder of texts.

    `fields` have the forms of a config's: {"model": {"width": 16}} is model.width.
    """
    path.write_text(CONFIG.format(fields=fields, texts=str(texts)))


def environment(place: pathlib.Path) -> dict[str, str]:
    """Returns that of runs: on CPU, with data and compiled programs in `place`."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",
        "PYTHONPATH": str(ROOT),
        "ACCO_DATA_DIR": str(place / "data"),
        "JAX_COMPILATION_CACHE_DIR": str(place / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }


def command(
    config: pathlib.Path,
    workdir: pathlib.Path,
    *flags: str,
    limits: dict[str, float],
    process: int = 0,
    processes: int = 1,
    coordinator: str | None = None,
) -> list[str]:
    """Returns a command of a run under supervision, with these limits: see aimed.py."""
    program = [sys.executable, str(ROOT / "benchmarks" / "aimed.py")]
    job: dict[str, Any] = {"workdir": str(workdir), "limits": limits}
    trains = [*program, f"--config={config}", f"--workdir={workdir}", *flags]
    if processes > 1:
        among = {
            "process": process,
            "processes": processes,
            "coordinator": coordinator,
        }
        trains += [f"--{name}={value}" for name, value in among.items()]
        job |= among
    return [*program, "--supervise", json.dumps(job | {"command": trains})]


def last_checkpoint(workdir: pathlib.Path) -> int:
    """Returns the half-round of a run's last checkpoint."""
    names = [path.name for path in (workdir / "checkpoints").iterdir()]
    return max(int(name) for name in names if name.isdigit())


def bits(workdir: pathlib.Path) -> str:
    """Returns the SHA-256 of all arrays in the last checkpoint, and how many there are.

    Raises:
      RuntimeError: they cannot be read.
    """
    folder = workdir / "checkpoints" / str(last_checkpoint(workdir))
    done = subprocess.run(
        [sys.executable, "-c", _HASH, folder],
        env=environment(workdir),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return done.stdout.strip()
