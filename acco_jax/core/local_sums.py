"""Local gradients for the user's own training loop, beside a method's `update`."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from acco_jax.core.collectives import Alone
from acco_jax.core.gradients import Accumulator
from acco_jax.core.leaves import PyTree, Rng, check_floating
from acco_jax.core.loss import counted, untraced
from acco_jax.core.microbatches import Counts, differ, whole_number
from acco_jax.core.workers import (
    axis_names,
    check_compiled,
    from_row,
    on_mesh,
    strong,
    to_row,
)


def local_gradients(
    loss_fn: Callable[..., Any],
    *,
    mesh: Mesh,
    microbatches: int,
    axis_name: str | tuple[str, ...] = "data",
    accumulate_dtype: DTypeLike | None = None,
    drop_nonfinite: bool = False,
) -> Callable[..., tuple[PyTree, jax.Array, PyTree]]:
    """Make a function that sums each worker's microbatch gradients.

    Args:
      loss_fn: (params, microbatch, rng) -> loss, or (loss, aux), or
        (loss, weight, aux). Without a weight the loss is a mean and weighs 1; with a
        weight w it is the SUM over w targets. It must not communicate over `axis_name`;
        where counts may differ this raises a ValueError.
        The arrays of a jax.tree_util.Partial are not differentiated and are arguments
        of the program, whole on every device; those in a closure are constants.
      mesh: the devices.
      microbatches: N, how many microbatches each worker's part of the batch holds.
      axis_name: the mesh axis (or axes) over which the batch is split, n workers.
      accumulate_dtype: of the sums; None means each parameter's own.
      drop_nonfinite: whether the gradients, weight and aux of a worker whose loss,
        weight or gradients are not finite become zeros.

    Returns:
      A function (params, batch, counts=None, rng=None) -> (grads, weight, aux).
      batch: leaves (n * N * b, ...), split on axis 0, worker after worker and
      microbatch after microbatch. counts: (n,) integers from 0 to N, how many
      microbatches each worker computes, read at run time; None means N. Others raise
      a ValueError. In a jax.Array, which is not read, they are clipped. rng: a key;
      microbatch k of the whole batch gets fold_in(rng, k), whatever n is.
      grads: each leaf (n, *param.shape), row i the SUM of worker i's microbatch
      gradients and of nothing else. weight: (n,), the sums of the weights. aux: summed
      over all microbatches (the loss itself where loss_fn returns nothing else).

    Raises:
      ValueError: no such mesh axis, a batch that does not divide, counts out of range.
    """
    remedy = "give an integer of at least 1."
    microbatches = whole_number("microbatches", microbatches, 1, remedy)
    check_floating("accumulate_dtype", accumulate_dtype)
    acc = Accumulator(
        untraced(loss_fn),
        mesh,
        axis_names(mesh, axis_name),
        microbatches,
        accumulate_dtype,
        drop_nonfinite,
    ).placed()

    alone = Alone(acc)

    @jax.jit
    def run(acc, params, batch, counts, rng):  # type: ignore[no-untyped-def]
        sums = acc.add(None, params, batch, rng, counts)
        if acc.drop_nonfinite:
            sums = acc.checked(sums, jax.tree.map(lambda g: g.dtype, sums.grads))
            own = lambda sums: to_row(counted(from_row(sums)))  # noqa: E731
            sums = acc.over_data(own, (acc.rows,), acc.rows)(sums)
        aux = sums.loss if sums.aux is None else sums.aux
        return sums.grads, sums.weight, jax.tree.map(lambda x: x.sum(0), aux)

    def gradients(
        params: PyTree, batch: PyTree, counts: Counts = None, rng: Rng = None
    ) -> tuple[PyTree, jax.Array, PyTree]:
        check_compiled()
        batch = acc.place_batch(batch)
        params, rng = on_mesh((strong(params), rng), mesh)
        if differ(counts):
            alone(params, batch, rng)
        return run(acc, params, batch, acc.place_counts(counts), rng)

    return gradients
