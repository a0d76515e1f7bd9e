"""Accumulate while you communicate: data-parallel training with hidden communication.

tx = acco_jax.acco(optax.adamw(1e-3), mesh=mesh)
step = acco_jax.make_train_step(loss_fn, tx, mesh=mesh, microbatches=4)
params, state, metrics = step(params, state, batch)
"""

import importlib
from typing import TYPE_CHECKING, Any

from acco_jax.compiler import compiler_options as compiler_options
from acco_jax.gradients import local_gradients as local_gradients
from acco_jax.step import TrainStep as TrainStep
from acco_jax.step import make_train_step as make_train_step
from acco_jax.transforms.acco import acco as acco
from acco_jax.transforms.base import Method as Method
from acco_jax.transforms.delayed import dpu as dpu
from acco_jax.transforms.delayed import wp as wp
from acco_jax.transforms.fused_zero1 import fused_zero1 as fused_zero1
from acco_jax.transforms.per_layer import per_layer as per_layer
from acco_jax.transforms.state import committed_params as committed_params
from acco_jax.transforms.state import start as start
from acco_jax.transforms.state import start_shardings as start_shardings
from acco_jax.transforms.state import state_shardings as state_shardings
from acco_jax.transforms.zero1 import ddp as ddp
from acco_jax.transforms.zero1 import zero1 as zero1

if TYPE_CHECKING:
    from acco_jax.local.base import LocalMethod as LocalMethod
    from acco_jax.local.cellm import cellm as cellm
    from acco_jax.local.co2 import co2 as co2
    from acco_jax.local.diloco import diloco as diloco
    from acco_jax.local.gossip import gossip as gossip
    from acco_jax.local.rounds import local_rounds as local_rounds
    from acco_jax.local.slowmo import slowmo as slowmo
    from acco_jax.local.streaming import streaming_diloco as streaming_diloco

__version__ = "0.1.0"

# Imported when they are asked for: name -> module of acco_jax.local.
_LOCAL = {
    "LocalMethod": "base",
    "cellm": "cellm",
    "co2": "co2",
    "diloco": "diloco",
    "gossip": "gossip",
    "local_rounds": "rounds",
    "slowmo": "slowmo",
    "streaming_diloco": "streaming",
}


def __getattr__(name: str) -> Any:
    if name not in _LOCAL:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"acco_jax.local.{_LOCAL[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LOCAL})
