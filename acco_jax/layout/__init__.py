"""How each parameter is split over the data axis, and what crosses the network.

Two layouts, one interface:

    params --(shard)--> shards       worker i's 1/n of each leaf: the optimizer's view
    grads  --(pack)---> buffers --(reduce_scatter)--> raw --(split)--> shards
    shards --(join)---> low     --(all_gather)------> full --(unpack)-> params

`reduce_scatter` and `all_gather` are the collectives and nothing else, so that a step
can put computation beside them. `PackedLayout` moves one buffer per dtype: worker i's
block of it holds 1/n of every leaf. `LeafLayout` keeps whole leaf shapes, split along
one dimension, for optimizers that look at shapes (adafactor, muon, centralize).

A layout is static (hashable, no arrays): it lives in the optimizer state as a pytree
node without leaves, so that whoever holds the state can interpret it.
"""

from acco_jax.layout.base import Layout, LeftOut, Pending
from acco_jax.layout.leaf import SMALL, LeafLayout, leaf_layout
from acco_jax.layout.leaves import Leaf, PyTree, check_floating, describe, path_names
from acco_jax.layout.packed import ROW_MULTIPLE, WIDTHS, PackedLayout, packed_layout

__all__ = [
    "ROW_MULTIPLE",
    "SMALL",
    "WIDTHS",
    "Layout",
    "Leaf",
    "LeafLayout",
    "LeftOut",
    "PackedLayout",
    "Pending",
    "PyTree",
    "check_floating",
    "describe",
    "leaf_layout",
    "packed_layout",
    "path_names",
]
