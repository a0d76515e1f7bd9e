"""Accumulate while you communicate: data parallelism with overlapped communication.

tx = acco_jax.acco(optax.adamw(1e-3), mesh=mesh)
step = acco_jax.make_train_step(loss_fn, tx, microbatches=4)
params, state = acco_jax.start(tx, params)
params, state, metrics = step(params, state, batch)
"""

import importlib
from typing import TYPE_CHECKING, Any

from acco_jax.methods import MODULES

if TYPE_CHECKING:
    from acco_jax.core.compiler import compiler_options as compiler_options
    from acco_jax.core.groups import group_specs as group_specs
    from acco_jax.core.local_sums import local_gradients as local_gradients
    from acco_jax.methods.acco import acco as acco
    from acco_jax.methods.delayed import dpu as dpu
    from acco_jax.methods.delayed import wp as wp
    from acco_jax.methods.fused_zero1 import fused_zero1 as fused_zero1
    from acco_jax.methods.local.cellm import cellm as cellm
    from acco_jax.methods.local.co2 import co2 as co2
    from acco_jax.methods.local.diloco import diloco as diloco
    from acco_jax.methods.local.gossip import gossip as gossip
    from acco_jax.methods.local.rounds import local_rounds as local_rounds
    from acco_jax.methods.local.slowmo import slowmo as slowmo
    from acco_jax.methods.local.sparseloco import sparseloco as sparseloco
    from acco_jax.methods.local.streaming import streaming_diloco as streaming_diloco
    from acco_jax.methods.method import Method as Method
    from acco_jax.methods.method import abstract_start as abstract_start
    from acco_jax.methods.method import committed_model_state as committed_model_state
    from acco_jax.methods.method import committed_params as committed_params
    from acco_jax.methods.method import start as start
    from acco_jax.methods.method import state_shardings as state_shardings
    from acco_jax.methods.per_layer import per_layer as per_layer
    from acco_jax.methods.reshard import reshard as reshard
    from acco_jax.methods.reshard import saved as saved
    from acco_jax.methods.zero1 import ddp as ddp
    from acco_jax.methods.zero1 import zero1 as zero1
    from acco_jax.saving import restore as restore
    from acco_jax.saving import save as save
    from acco_jax.step import Adaptive as Adaptive
    from acco_jax.step import Balanced as Balanced
    from acco_jax.step import Halves as Halves
    from acco_jax.step import Replay as Replay
    from acco_jax.step import TrainStep as TrainStep
    from acco_jax.step import find_halves as find_halves
    from acco_jax.step import make_train_step as make_train_step

__version__ = "0.1.0"

# Imported on first access: `acco` lists its commands without importing JAX.
# name -> module of acco_jax.
_LAZY = {name: f"methods.{module}" for name, module in MODULES.items()} | {
    "compiler_options": "core.compiler",
    "group_specs": "core.groups",
    "local_gradients": "core.local_sums",
    "Method": "methods.method",
    "committed_model_state": "methods.method",
    "committed_params": "methods.method",
    "start": "methods.method",
    "abstract_start": "methods.method",
    "state_shardings": "methods.method",
    "local_rounds": "methods.local.rounds",
    "per_layer": "methods.per_layer",
    "reshard": "methods.reshard",
    "restore": "saving",
    "save": "saving",
    "saved": "methods.reshard",
    "Adaptive": "step",
    "Balanced": "step",
    "Halves": "step",
    "Replay": "step",
    "TrainStep": "step",
    "find_halves": "step",
    "make_train_step": "step",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"acco_jax.{_LAZY[name]}")
    globals()[name] = value = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
