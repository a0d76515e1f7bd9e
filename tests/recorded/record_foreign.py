"""Records the compiled train steps of others that tests/audit reads.

    JAX_PLATFORMS=cpu python tests/recorded/record_foreign.py plain_dp fsdp ...

Compiles the programs of benchmarks/foreign.py, foreign_tunix.py (peft_trainer, which
needs google-tunix) and foreign_levanter.py (levanter_step: marin-levanter) for 4 hosts
of 8 H100 with jax 0.10.2 (google-tunix 0.1.7, flax 0.12.8; marin-levanter 0.2.227),
needs no GPU but its compiler (pip install "acco-jax[plan-gpu]"), and writes
tests/recorded/foreign/NAME.txt.gz. Of the text nothing is left out but the paths of
this machine's folders, the names of operations in the scheduler, and what the compiler
noted on operations that are no collectives. What must be read from each stands in the
test.
"""

import gzip
import importlib
import pathlib
import re
import sys

import jax

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from acco_jax import audit
from acco_jax.schedule import topologies

ROOT = pathlib.Path(__file__).resolve().parents[2]
MACHINE, VERSION = "gpu:h100:4x8", "0.10.2"
MODULES = {"peft_trainer": "foreign_tunix", "levanter_step": "foreign_levanter"}


def shorten(text: str) -> str:
    """Leaves out what the docstring says."""
    text = re.sub(rf'"{re.escape(str(ROOT))}/', '"', text)
    text = re.sub(r'"/[^"\n]*/(site-packages/[^"\n]*")', r'"\1', text)
    text = re.sub(
        r", entry_computation_layout=.*?(?=, num_partitions=|$)", "", text, count=1
    )
    text = re.sub(r' scheduling_name="[^"]*"', "", text)
    noted = r'(?m), backend_config=\{(?!.*(?:"is_sync"|"known_trip_count"|"__cu)).*$'
    return re.sub(noted, "", text)


def record(name: str) -> None:
    """Compiles one program and writes its text."""
    if jax.__version__ != VERSION:
        raise ValueError(f"recordings are of jax {VERSION}, not {jax.__version__}")
    module = "benchmarks." + MODULES.get(name, "foreign")
    factory = getattr(importlib.import_module(module), name)
    step, arguments = factory(audit.devices(MACHINE))
    text = shorten(step.lower(*arguments).compile().as_text())
    path = ROOT / "tests" / "recorded" / "foreign" / f"{name}.txt.gz"
    path.parent.mkdir(exist_ok=True)
    data = gzip.compress(text.encode(), 9, mtime=0)
    path.write_bytes(data)
    print(f"{path.name}: {len(data)} bytes")


if __name__ == "__main__":
    topologies.use_cpu()
    for requested in sys.argv[1:]:
        record(requested)
