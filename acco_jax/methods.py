"""Methods by name: each is one file, and the loop knows none of them."""

from collections.abc import Callable
from typing import Any

from acco_jax.local.cellm import cellm
from acco_jax.local.co2 import co2
from acco_jax.local.diloco import diloco
from acco_jax.local.gossip import gossip
from acco_jax.local.slowmo import slowmo
from acco_jax.local.streaming import streaming_diloco
from acco_jax.transforms.acco import acco
from acco_jax.transforms.delayed import dpu, wp
from acco_jax.transforms.fused_zero1 import fused_zero1
from acco_jax.transforms.zero1 import ddp, zero1

METHODS: dict[str, Callable[..., Any]] = {
    "acco": acco,
    "cellm": cellm,
    "co2": co2,
    "ddp": ddp,
    "diloco": diloco,
    "dpu": dpu,
    "fused_zero1": fused_zero1,
    "gossip": gossip,
    "slowmo": slowmo,
    "streaming_diloco": streaming_diloco,
    "wp": wp,
    "zero1": zero1,
}
