"""Recorded schedules, machines by their names, and the command that plans for them."""

import functools
import gzip
import pathlib
import sys
import warnings
from unittest import mock

from absl import flags
from absl.testing import flagsaver

from acco_jax.plan import __main__ as command
from acco_jax.schedule import machines, schedules, topologies

ROOT = pathlib.Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "recorded" / "schedules"
QUICKSTART = ROOT / "experiments" / "quickstart.py"
BUFFER = 14592 * 1024 * 2  # bytes of the recordings' packed buffer
AS_RECORDED = ("--config.microbatch_size=4", "--config.microbatches_per_step=2")
SCHEDULES = {"acco": "gpu_hidden", "zero1": "gpu_synchronous"}  # of the stand-in


@functools.cache
def text_of(name):
    return gzip.decompress((RECORDED / f"{name}.txt.gz").read_bytes()).decode()


@functools.cache
def recorded(name, iterations=2):
    return schedules.read(text_of(name), trip_counts=iterations)


def machine(name, slices=1, **changes):
    topology = topologies.parse(name, slices)
    return machines.Machine(topology, machines.figures(topology.chip, changes))


def run(*arguments, config=QUICKSTART, topology="gpu:h200:1x8"):
    """Runs the command in this process."""
    with flagsaver.flagsaver():
        line = ["plan", f"--config={config}", *AS_RECORDED, *arguments]
        if not any(x.startswith("--topology") for x in arguments):
            line.append(f"--topology={topology}")
        with warnings.catch_warnings(), mock.patch.object(sys, "argv", line):
            # how ml_collections 1.1.0 loads a file
            warnings.filterwarnings("ignore", r"the load_module\(\) method")
            flags.FLAGS(line)
        command.main(["plan"])


def reduced(devices, groups):
    """Text of a program that is one all-reduce, over groups of a size or as written."""
    if isinstance(groups, int):
        groups = f"[{devices // groups},{groups}]<=[{devices}]"
    return f"""HloModule m, is_scheduled=true, num_partitions={devices}

%sum (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}}

ENTRY %main (p: f32[1024,1024]) -> f32[1024,1024] {{
  %p = f32[1024,1024]{{1,0}} parameter(0)
  ROOT %r = f32[1024,1024]{{1,0}} all-reduce(%p), replica_groups={groups}, to_apply=%sum
}}
"""
