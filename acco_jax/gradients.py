"""Microbatches to one local gradient and weight per worker, without communication."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

PyTree = Any


class Sums(NamedTuple):
    """What every worker adds up over its microbatches; row i is worker i's."""

    grads: PyTree  # (n, *param.shape), the accumulator's dtype
    loss: jax.Array  # (n,)
    weight: jax.Array  # (n,)
    aux: PyTree  # (n, ...)


def axis_names(mesh: Mesh, axis_name: str | tuple[str, ...]) -> tuple[str, ...]:
    """The data axes as a tuple.

    Raises:
      ValueError: the mesh has no such axis.
    """
    axis = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    for name in axis:
        if name not in mesh.axis_names:
            raise ValueError(
                f"axis_name {name!r} is no axis of the mesh {mesh.axis_names}: name "
                "the axis over which the batch is split."
            )
    return axis


def parts_of_loss(out: Any) -> tuple[Any, Any, PyTree]:
    """(loss, weight, aux) of what a loss function returned; aux None if it has none."""
    if not isinstance(out, tuple):
        loss, weight, aux = out, 1.0, None
    elif len(out) == 2:
        (loss, aux), weight = out, 1.0
    elif len(out) == 3:
        loss, weight, aux = out
    else:
        raise ValueError(
            f"loss_fn returned a tuple of {len(out)}: return loss, (loss, aux) or "
            "(loss, weight, aux)."
        )
    return loss, weight, aux


@dataclasses.dataclass(frozen=True)
class Accumulator:
    """Adds up gradients of microbatches on each worker.

    Attributes:
      loss_fn: (params, microbatch, rng) -> loss | (loss, aux) | (loss, weight, aux).
      mesh: the devices.
      axis: the data axes; the others stay as they are inside `loss_fn`.
      microbatches: how many each worker's part of the batch holds.
      dtype: of the sums; None means each parameter's own.
    """

    loss_fn: Callable[..., Any]
    mesh: Mesh
    axis: tuple[str, ...]
    microbatches: int
    dtype: Any = None

    @property
    def workers(self) -> int:
        return math.prod(self.mesh.shape[a] for a in self.axis)

    @property
    def rows(self) -> P:
        return P(self.axis)

    def over_data(self, fn: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """fn on each worker's part: manual over the data axes alone.

        check_vma is off: parameters stay what they are on each worker and no psum is
        put in when a gradient is taken, and loss functions with scans of their own
        need not mark what varies.
        """
        return jax.shard_map(
            fn,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(self.axis),
            check_vma=False,
        )

    def place_batch(self, batch: PyTree) -> PyTree:
        """Splits every leaf's axis 0 over the workers.

        Raises:
          ValueError: a leaf's axis 0 does not divide by n * microbatches.
        """
        parts = self.workers * self.microbatches
        for path, x in jax.tree_util.tree_leaves_with_path(batch):
            shape = jnp.shape(x)
            if not shape or shape[0] % parts or not shape[0]:
                name = jax.tree_util.keystr(path) or "batch"
                raise ValueError(
                    f"batch leaf {name} of shape {shape} does not divide into "
                    f"{self.workers} workers x {self.microbatches} microbatches: its "
                    f"axis 0 must be a multiple of {parts}."
                )
        return jax.device_put(batch, NamedSharding(self.mesh, self.rows))

    def place_counts(self, counts: Any) -> jax.Array | None:
        """(n,) int32 microbatch counts, on their workers.

        Raises:
          ValueError: wrong shape, or a count that is negative or above `microbatches`.
        """
        if counts is None:
            return None
        if jnp.shape(counts) != (self.workers,):
            raise ValueError(
                f"counts has shape {jnp.shape(counts)}: give one count per worker, "
                f"shape ({self.workers},)."
            )
        if not isinstance(counts, jax.Array):
            counts = np.asarray(counts)
            if counts.min() < 0 or counts.max() > self.microbatches:
                raise ValueError(
                    f"counts {counts.tolist()} must lie between 0 and microbatches = "
                    f"{self.microbatches}."
                )
        return jax.device_put(
            jnp.asarray(counts, jnp.int32), NamedSharding(self.mesh, self.rows)
        )

    def zeros(self, params: PyTree, batch: PyTree, rng: Any) -> Sums:
        """The sums of no microbatch."""
        return self._run(params, batch, rng, None, None)

    def add(
        self,
        sums: Sums,
        params: PyTree,
        batch: PyTree,
        rng: Any,
        counts: jax.Array | None,
        span: Callable[[Any], tuple[Any, Any]] = lambda count: (0, count),
    ) -> Sums:
        """Adds each worker's microbatches span(count) = (first, end) to its row."""
        return self._run(params, batch, rng, sums, counts, span)

    def _run(self, params, batch, rng, sums, counts, span=None):  # type: ignore[no-untyped-def]
        def local(params, batch, rng, sums, counts):  # type: ignore[no-untyped-def]
            # batch leaves: (microbatches * b, ...) on this worker
            pick = functools.partial(_microbatch, batch, self.microbatches)
            if sums is None:
                sums = self._empty(params, pick(0), rng)
            else:
                sums = jax.tree.map(lambda x: x[0], sums)
                first = lax.axis_index(self.axis) * self.microbatches

                def body(i, sums):  # type: ignore[no-untyped-def]
                    key = None if rng is None else jax.random.fold_in(rng, first + i)
                    return _add(sums, self._gradient(params, pick(i), key))

                count = self.microbatches if counts is None else counts[0]
                first_i, end = span(count)
                sums = lax.fori_loop(first_i, end, body, sums)
            return jax.tree.map(lambda x: x[None], sums)

        in_specs = (P(), self.rows, P(), self.rows, self.rows)
        run = self.over_data(local, in_specs, self.rows)
        return run(params, batch, rng, sums, counts)

    def _gradient(self, params: PyTree, microbatch: PyTree, rng: Any) -> Sums:
        """One microbatch's contribution on one worker (no leading axis)."""

        def loss_of(params: PyTree) -> tuple[jax.Array, tuple[jax.Array, PyTree]]:
            loss, weight, aux = parts_of_loss(self.loss_fn(params, microbatch, rng))
            return loss, (jnp.asarray(weight), aux)

        (loss, (weight, aux)), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        return Sums(grads, loss, weight, aux)

    def _empty(self, params: PyTree, microbatch: PyTree, rng: Any) -> Sums:
        out = jax.eval_shape(self._gradient, params, microbatch, rng)
        at_least_32 = lambda x: jnp.promote_types(x.dtype, jnp.float32)  # noqa: E731
        zeros = lambda x: jnp.zeros(x.shape, x.dtype)  # noqa: E731
        return Sums(
            # zeros_like keeps how other mesh axes split the parameter
            jax.tree.map(lambda p: jnp.zeros_like(p, self.dtype or p.dtype), params),
            jnp.zeros((), at_least_32(out.loss)),
            jnp.zeros((), at_least_32(out.weight)),
            jax.tree.map(zeros, out.aux),
        )


def _microbatch(batch: PyTree, microbatches: int, i: Any) -> PyTree:
    def pick(x: jax.Array) -> jax.Array:
        x = x.reshape(microbatches, x.shape[0] // microbatches, *x.shape[1:])
        return lax.dynamic_index_in_dim(x, i, keepdims=False)

    return jax.tree.map(pick, batch)


def _add(sums: Sums, one: Sums) -> Sums:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, one)


def local_gradients(
    loss_fn: Callable[..., Any],
    *,
    mesh: Mesh,
    microbatches: int,
    axis_name: str | tuple[str, ...] = "data",
    accumulate_dtype: Any = None,
) -> Callable[..., tuple[PyTree, jax.Array, PyTree]]:
    """Make a function that sums each worker's microbatch gradients.

    Args:
      loss_fn: (params, microbatch, rng) -> loss, or (loss, aux), or
        (loss, weight, aux). Without a weight the loss is a mean and weighs 1; with a
        weight w it is the SUM over w targets. It must not communicate over `axis_name`.
      mesh: the devices.
      microbatches: N, how many microbatches each worker's part of the batch holds.
      axis_name: the mesh axis (or axes) over which the batch is split, n workers.
      accumulate_dtype: of the sums; None means each parameter's own.

    Returns:
      A function (params, batch, counts=None, rng=None) -> (grads, weight, aux).
      batch: leaves (n * N * b, ...), split on axis 0, worker after worker and
      microbatch after microbatch. counts: (n,) integers from 0 to N, how many
      microbatches each worker computes, read at run time; None means N. rng: a key;
      microbatch k of the whole batch gets fold_in(rng, k), whatever n is.
      grads: each leaf (n, *param.shape), row i the SUM of worker i's microbatch
      gradients and of nothing else. weight: (n,), the sums of the weights. aux: summed
      over all microbatches (the loss itself where loss_fn returns nothing else).

    Raises:
      ValueError: no such mesh axis, a batch that does not divide, counts out of range.
    """
    if microbatches < 1:
        raise ValueError(f"microbatches is {microbatches}: it must be at least 1.")
    acc = Accumulator(
        loss_fn, mesh, axis_names(mesh, axis_name), microbatches, accumulate_dtype
    )

    @jax.jit
    def run(params, batch, counts, rng):  # type: ignore[no-untyped-def]
        if counts is not None:
            counts = jnp.clip(counts, 0, microbatches)
        zeros = acc.zeros(params, batch, rng)
        sums = acc.add(zeros, params, batch, rng, counts)
        total = lambda x: x.sum(0)  # noqa: E731
        aux = total(sums.loss) if sums.aux is None else jax.tree.map(total, sums.aux)
        return sums.grads, sums.weight, aux

    def gradients(
        params: PyTree, batch: PyTree, counts: Any = None, rng: Any = None
    ) -> tuple[PyTree, jax.Array, PyTree]:
        return run(params, acc.place_batch(batch), acc.place_counts(counts), rng)

    return gradients
