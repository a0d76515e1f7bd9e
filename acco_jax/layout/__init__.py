"""The split of each parameter over the workers, and its packing for the network.

    params --(shard)--> shards    worker i's part of each leaf
    grads  --(pack)---> Pending --(reduce_scatter)--> reduced --(split)--> shards
    shards --(join)---> outgoing --(all_gather)-----> gathered --(unpack)-> params

The optimizer sees every leaf in its own global shape (`view`), split over the workers
along one dimension; along two where no single one divides and the leaf is large. So it
computes what it would compute on one device, even across a whole leaf. Between the
optimizer and the network the workers' parts are packed into one buffer per dtype.
`reduce_scatter` and `all_gather` are only the collectives, so that a step can overlap
them with computation. A small leaf that no dimension splits evenly stays
whole, with its state, on every worker; its gradient is summed with the weights.

A layout is static (hashable, no arrays): it lives in the optimizer state as a pytree
node without leaves, so that any holder of the state can interpret it.
"""

from acco_jax.layout.base import Layout
from acco_jax.layout.buffers import Arrays, LeftOut, Outgoing, Pending, Totals
from acco_jax.layout.leaves import Leaf, PyTree, check_floating, path_names, wide

__all__ = [
    "Arrays",
    "Layout",
    "Leaf",
    "LeftOut",
    "Outgoing",
    "Pending",
    "PyTree",
    "Totals",
    "check_floating",
    "path_names",
    "wide",
]
