"""Microbatches to one local gradient and weight per worker, without communication."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial

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
      ValueError: the mesh is none, or has no such axis.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(
            f"mesh is {mesh!r}: give the devices as a jax.sharding.Mesh, such as "
            "jax.make_mesh((jax.device_count(),), ('data',))."
        )
    axis = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    for name in axis:
        if name not in mesh.axis_names:
            raise ValueError(
                f"axis_name {name!r} is no axis of the mesh {mesh.axis_names}: name "
                "the axis over which the batch is split."
            )
    return axis


def over_data(
    fn: Callable, mesh: Mesh, axis: tuple[str, ...], in_specs: Any, out_specs: Any
) -> Callable:
    """fn on each worker's part: manual over the data axes alone.

    check_vma is off: parameters stay what they are on each worker and no psum is put in
    when a gradient is taken, and loss functions with scans of their own need not mark
    what varies.
    """
    return jax.shard_map(
        fn,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(axis),
        check_vma=False,
    )


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
    if loss is None:
        raise ValueError(
            "loss_fn returned None for a loss: return loss, (loss, aux) or "
            "(loss, weight, aux)."
        )
    return loss, weight, aux


def check_numbers(out: PyTree) -> None:
    """Raises a ValueError unless a loss function returned numbers, which add up."""
    for path, x in jax.tree_util.tree_leaves_with_path(out):
        dtype = getattr(x, "dtype", None)
        kinds = np.number, np.bool_
        if dtype is None and isinstance(x, int | float | complex):
            continue
        if dtype is None or not any(jnp.issubdtype(dtype, kind) for kind in kinds):
            place = jax.tree_util.keystr(path)
            raise ValueError(
                f"loss_fn returned {repr(x) if dtype is None else dtype}"
                f"{place and ' at ' + place}: return numbers alone, because they are "
                "summed over the microbatches."
            )


def with_arrays(fn: Callable[..., Any]) -> Partial:
    """A function as a pytree of the arrays that it carries; a Partial as it is."""
    return fn if isinstance(fn, Partial) else Partial(fn)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Pullback:
    """How to put a gradient function together again from its residuals."""

    treedef: Any
    # which residuals are parameters (or of the loss function), by leaf number
    params: tuple[int | None, ...]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["loss_fn"],
    meta_fields=["mesh", "axis", "microbatches", "dtype"],
)
@dataclasses.dataclass(frozen=True)
class Accumulator:
    """Adds up gradients of microbatches on each worker.

    A pytree: of the arrays of a loss function that is a jax.tree_util.Partial. Programs
    take it as an argument, so that those arrays are no constants in their text.

    Attributes:
      loss_fn: (params, microbatch, rng) -> loss | (loss, aux) | (loss, weight, aux); a
        Partial, also if it was given as a function.
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

    def __post_init__(self) -> None:
        if callable(self.loss_fn):  # while a tree is built it may be a placeholder
            object.__setattr__(self, "loss_fn", with_arrays(self.loss_fn))

    def placed(self) -> Accumulator:
        """With the loss function's arrays on the mesh's devices, whole on each."""
        everywhere = NamedSharding(self.mesh, P())

        def place(x: Any) -> Any:
            there = getattr(getattr(x, "sharding", None), "mesh", None) == self.mesh
            abstract = isinstance(x, jax.ShapeDtypeStruct)
            return x if there or abstract else jax.device_put(x, everywhere)

        return jax.tree.map(place, self)

    @property
    def workers(self) -> int:
        return math.prod(self.mesh.shape[a] for a in self.axis)

    @property
    def rows(self) -> P:
        return P(self.axis)

    def opaque(self, end: Any) -> Any:
        """A loop's end, on GPU as a number that the compiler cannot know.

        XLA:GPU inlines a loop of one trip, then puts only as much of it behind a
        collective as it thinks enough, and holds more of it in memory.
        """
        on_gpu = self.mesh.devices.flat[0].platform in ("cuda", "gpu", "rocm")
        return lax.optimization_barrier(jnp.int32(end)) if on_gpu else end

    def _whole(self, fn: Callable) -> Callable:
        """fn as one piece of a GPU's program: a loop that runs once."""

        def run(*args):  # type: ignore[no-untyped-def]
            end = self.opaque(1)
            if isinstance(end, int):
                return fn(*args)
            shapes = jax.eval_shape(fn, *args)
            none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            return lax.fori_loop(0, end, lambda i, _: fn(*args), none)

        return run

    def over_data(self, fn: Callable, in_specs: Any, out_specs: Any) -> Callable:
        return over_data(fn, self.mesh, self.axis, in_specs, out_specs)

    def place_batch(self, batch: PyTree) -> PyTree:
        """Splits every leaf's axis 0 over the workers.

        Raises:
          ValueError: a leaf's axis 0 does not divide by n * microbatches, or two
            leaves have different numbers of rows.
        """
        parts = self.workers * self.microbatches
        first: tuple[str, int] | None = None
        for path, x in jax.tree_util.tree_leaves_with_path(batch):
            shape = jnp.shape(x)
            name = jax.tree_util.keystr(path) or "batch"
            if not shape or shape[0] % parts or not shape[0]:
                raise ValueError(
                    f"batch leaf {name} of shape {shape} does not divide into "
                    f"{self.workers} workers x {self.microbatches} microbatches: its "
                    f"axis 0 must be a multiple of {parts}."
                )
            first = first or (name, shape[0])
            if shape[0] != first[1]:
                raise ValueError(
                    f"batch leaf {first[0]} has {first[1]} rows and {name} has "
                    f"{shape[0]}: row k of every leaf must be of the same example."
                )
        return jax.device_put(batch, NamedSharding(self.mesh, self.rows))

    def place_counts(self, counts: Any) -> jax.Array | None:
        """(n,) int32 microbatch counts, on their workers.

        Those of a jax.Array would have to be waited for: they are not read, but clipped
        to 0 ... `microbatches`.

        Raises:
          ValueError: wrong shape or dtype, or a count that can be read and is negative
            or above `microbatches`.
        """
        if counts is None:
            return None
        if np.shape(counts) != (self.workers,):
            raise ValueError(
                f"counts has shape {np.shape(counts)}: give one count per worker, "
                f"shape ({self.workers},)."
            )
        known = None if isinstance(counts, jax.Array) else np.asarray(counts)
        held = counts if known is None else known
        if not jnp.issubdtype(held.dtype, jnp.integer):
            raise ValueError(f"counts are {held.dtype}: they must be integers.")
        if known is None:
            held = _clipped(counts, self.microbatches)
        elif known.min() < 0 or known.max() > self.microbatches:
            raise ValueError(
                f"counts {known.tolist()} must lie between 0 and microbatches = "
                f"{self.microbatches}."
            )
        return jax.device_put(
            jnp.asarray(held, jnp.int32), NamedSharding(self.mesh, self.rows)
        )

    def counts_here(self, counts: Sequence[int]) -> jax.Array:
        """(n,) counts, of which each process gives those of its own workers."""
        held = np.asarray(counts, np.int32)
        sharding = NamedSharding(self.mesh, self.rows)
        with jax.transfer_guard_host_to_device("allow"):  # here it is meant
            return jax.make_array_from_callback(held.shape, sharding, lambda i: held[i])

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

    def part(
        self,
        k: int,
        parts: int,
        begun: PyTree,
        params: PyTree,
        batch: PyTree,
        rng: Any,
        counts: jax.Array | None,
    ) -> PyTree:
        """The k-th of `parts` pieces of a half-round's work, beside one collective.

        Each worker's microbatches in equal parts, those left over beside the slowest
        network's collectives, which are in the middle; if there is but one, its forward
        pass and its backward pass are there.

        Args:
          k: which piece, from 0.
          parts: how many, at least 2.
          begun: what the piece before returned, None for the first.
          params, batch, rng, counts: as for `add`.

        Returns:
          What the next piece goes on from; the `Sums` after the last.
        """
        middle = parts // 2
        if self.microbatches == 1:
            if k == middle - 1:
                return self._forward(params, batch, rng)
            return self._backward(begun, params, counts) if k == middle else begun
        sums = self.zeros(params, batch, rng) if k == 0 else begun
        share = functools.partial(piece, k=k, parts=parts)
        return self.add(sums, params, batch, rng, counts, share)

    def _forward(self, params: PyTree, batch: PyTree, rng: Any) -> PyTree:
        """The only microbatch's loss, weight, aux and what its gradient will need."""

        def local(self, params, batch, rng):  # type: ignore[no-untyped-def]
            key = None
            if rng is not None:
                key = jax.random.fold_in(rng, lax.axis_index(self.axis))
            loss_of = functools.partial(self._loss, _microbatch(batch, 1, 0), key)
            loss, pullback, rest = jax.vjp(loss_of, params, has_aux=True)
            leaves, treedef = jax.tree.flatten(pullback)
            own = {id(x): i for i, x in enumerate(jax.tree.leaves((params, self)))}
            # parameters among the residuals are not carried a second time
            residuals = [None if id(x) in own else x for x in leaves]
            pull.append(_Pullback(treedef, tuple(own.get(id(x)) for x in leaves)))
            return jax.tree.map(lambda x: x[None], (loss, rest, residuals))

        pull: list[_Pullback] = []
        in_specs = (P(), P(), self.rows, P())
        run = self.over_data(self._whole(local), in_specs, self.rows)
        begun = run(self, params, batch, rng)
        return begun, pull[-1]

    def _backward(
        self, begun: PyTree, params: PyTree, counts: jax.Array | None
    ) -> Sums:
        (loss, rest, residuals), pull = begun

        def local(self, params, loss, rest, residuals, counts):  # type: ignore[no-untyped-def]
            first = lambda tree: jax.tree.map(lambda x: x[0], tree)  # noqa: E731
            loss, (weight, aux) = first((loss, rest))
            held = jax.tree.leaves((params, self))
            leaves = [
                held[i] if i is not None else x[0]
                for i, x in zip(pull.params, residuals, strict=True)
            ]
            (grads,) = jax.tree.unflatten(pull.treedef, leaves)(jnp.ones_like(loss))
            # `pack` drops gradients without weight: here they would be held twice
            loss = _counted(Sums(None, loss, weight, None)).loss
            sums = self._widened(Sums(grads, loss, weight, aux), params)
            if counts is not None:
                zero = lambda x: jnp.where(counts[0] > 0, x, jnp.zeros_like(x))  # noqa: E731
                sums = jax.tree.map(zero, sums)
            return jax.tree.map(lambda x: x[None], sums)

        in_specs = (P(), P(), *4 * (self.rows,))
        run = self.over_data(self._whole(local), in_specs, self.rows)
        return run(self, params, loss, rest, residuals, counts)

    def last(
        self,
        sums: Sums | None,
        params: PyTree,
        batch: PyTree,
        rng: Any,
        counts: jax.Array | None,
        take: Callable[..., Any],
        out_specs: Any,
    ) -> tuple[Any, Sums]:
        """Adds each worker's last microbatch, its gradient taken by the caller.

        Args:
          sums: of the microbatches before it; None: there are none.
          params: whole.
          batch: as for `add`.
          rng: as for `add`.
          counts: as for `add`; a worker without microbatches takes part all the same.
          take: (loss_of, params, grads, valid) -> ((loss, (weight, aux)), out) on each
            worker: loss_of is a function of the parameters, grads are those of `sums`
            or None, valid [] is false for a worker without microbatches, or None.
          out_specs: of out, over the data axes.

        Returns:
          out, and the sums without gradients.
        """

        def local(self, params, batch, rng, sums, counts):  # type: ignore[no-untyped-def]
            i: Any = self.microbatches - 1
            valid = None
            if counts is not None:
                valid = counts[0] > 0
                i = jnp.clip(counts[0] - 1, 0, i)
            key = rng
            if rng is not None:
                first = lax.axis_index(self.axis) * self.microbatches
                key = jax.random.fold_in(rng, first + i)
            microbatch = _microbatch(batch, self.microbatches, i)
            loss_of = functools.partial(self._loss, microbatch, key)
            sums = jax.tree.map(lambda x: x[0], sums)
            grads = None if sums is None else sums.grads
            (loss, (weight, aux)), out = take(loss_of, params, grads, valid)
            one = self._widened(Sums(None, loss, weight, aux), None)
            if valid is not None:
                zero = lambda x: jnp.where(valid, x, jnp.zeros_like(x))  # noqa: E731
                one = jax.tree.map(zero, one)
            one = _counted(one)
            one = one if sums is None else _add(sums._replace(grads=None), one)
            return out, jax.tree.map(lambda x: x[None], one)

        in_specs = (P(), P(), self.rows, P(), self.rows, self.rows)
        run = self.over_data(local, in_specs, (out_specs, self.rows))
        return run(self, params, batch, rng, sums, counts)

    def _run(self, params, batch, rng, sums, counts, span=None):  # type: ignore[no-untyped-def]
        def local(self, params, batch, rng, sums, counts):  # type: ignore[no-untyped-def]
            # batch leaves: (microbatches * b, ...) on this worker
            held = self.microbatches
            if sums is None:
                sums = self.nothing(params, batch, rng, held)
            else:
                sums = jax.tree.map(lambda x: x[0], sums)
                count: Any = held
                if counts is not None:
                    count = jnp.clip(counts[0], 0, held)
                start, end = span(count)
                if isinstance(end, int) and end - start == 1:
                    end = self.opaque(end)
                sums = self.sum_here(sums, params, batch, rng, held, start, end)
            return jax.tree.map(lambda x: x[None], sums)

        in_specs = (P(), P(), self.rows, P(), self.rows, self.rows)
        run = self.over_data(local, in_specs, self.rows)
        return run(self, params, batch, rng, sums, counts)

    def sum_here(
        self,
        sums: Sums,
        params: PyTree,
        batch: PyTree,
        rng: Any,
        held: int,
        first: Any,
        end: Any,
    ) -> Sums:
        """Adds microbatches first to end of the `held` that this worker's batch holds.

        For functions given to `over_data`: everything is one worker's own, without a
        leading axis.
        """
        before = lax.axis_index(self.axis) * held

        def body(i: Any, sums: Sums) -> Sums:
            key = None if rng is None else jax.random.fold_in(rng, before + i)
            return _add(sums, self._gradient(params, _microbatch(batch, held, i), key))

        return lax.fori_loop(first, end, body, sums)

    def nothing(self, params: PyTree, batch: PyTree, rng: Any, held: int) -> Sums:
        """The sums of no microbatch, for `sum_here`."""
        return self._empty(params, _microbatch(batch, held, 0), rng)

    def _gradient(self, params: PyTree, microbatch: PyTree, rng: Any) -> Sums:
        """One microbatch's contribution on one worker (no leading axis)."""

        loss_of = functools.partial(self._loss, microbatch, rng)
        (loss, (weight, aux)), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        return Sums(grads, loss, weight, aux)

    def _loss(
        self, microbatch: PyTree, rng: Any, params: PyTree
    ) -> tuple[jax.Array, tuple[jax.Array, PyTree]]:
        out = self.loss_fn(params, microbatch, rng)
        check_numbers(out)
        loss, weight, aux = parts_of_loss(out)
        loss, weight = jnp.asarray(loss), jnp.asarray(weight)
        if loss.shape or not jnp.issubdtype(loss.dtype, jnp.floating):
            raise ValueError(
                f"loss_fn returned a loss of shape {loss.shape} and dtype {loss.dtype}:"
                " return a floating-point scalar, the mean or the sum over the rows."
            )
        if weight.shape:
            raise ValueError(
                f"loss_fn returned a weight of shape {weight.shape}: return a scalar, "
                "the number of targets."
            )
        return loss, (weight, jax.tree.map(jnp.asarray, aux))

    def _empty(self, params: PyTree, microbatch: PyTree, rng: Any) -> Sums:
        out = jax.eval_shape(self._gradient, params, microbatch, rng)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out)
        # zeros_like keeps how other mesh axes split the parameter
        return self._widened(
            zeros._replace(grads=jax.tree.map(jnp.zeros_like, params)), params
        )

    def _widened(self, sums: Sums, params: PyTree) -> Sums:
        """In the dtypes of the accumulator."""
        at_least_32 = lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32))  # noqa: E731
        return Sums(
            jax.tree.map(
                lambda g, p: g.astype(self.dtype or p.dtype), sums.grads, params
            ),
            at_least_32(sums.loss),
            at_least_32(sums.weight),
            jax.tree.map(_summable, sums.aux),
        )


def _summable(x: jax.Array) -> jax.Array:
    """In at least 32 bits, where booleans are counted and small floats do not stick."""
    if jnp.issubdtype(x.dtype, jnp.bool_) or jnp.issubdtype(x.dtype, jnp.integer):
        return x.astype(jnp.promote_types(x.dtype, jnp.int32))
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def piece(count: Any, k: int, parts: int) -> tuple[Any, Any]:
    """(first, end) of the microbatches that the k-th of `parts` pieces computes.

    Half of `count`, rounded down, comes before the middle; what does not divide further
    goes to the pieces there.
    """
    middle, before = parts // 2, count // 2

    def bound(k: int) -> Any:
        if k <= middle:
            return before * k // middle
        return count - (count - before) * (parts - k) // middle

    return bound(k), bound(k + 1)


@functools.partial(jax.jit, static_argnums=1)
def _clipped(counts: jax.Array, most: int) -> jax.Array:
    return jnp.clip(counts.astype(jnp.int32), 0, most)


def _microbatch(batch: PyTree, microbatches: int, i: Any) -> PyTree:
    def pick(x: jax.Array) -> jax.Array:
        x = x.reshape(microbatches, x.shape[0] // microbatches, *x.shape[1:])
        return lax.dynamic_index_in_dim(x, i, keepdims=False)

    return jax.tree.map(pick, batch)


def _add(sums: Sums, one: Sums) -> Sums:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, _counted(one))


def _counted(one: Sums) -> Sums:
    """What has no weight counts for nothing, not even a NaN."""
    counts = one.weight != 0
    grads, loss = jax.tree.map(
        lambda x: jnp.where(counts, x, jnp.zeros_like(x)), (one.grads, one.loss)
    )
    return one._replace(grads=grads, loss=loss)


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
        The arrays of a jax.tree_util.Partial are not differentiated and are arguments
        of the program, whole on every device (those that a function closes over are
        constants in its text).
      mesh: the devices.
      microbatches: N, how many microbatches each worker's part of the batch holds.
      axis_name: the mesh axis (or axes) over which the batch is split, n workers.
      accumulate_dtype: of the sums; None means each parameter's own.

    Returns:
      A function (params, batch, counts=None, rng=None) -> (grads, weight, aux).
      batch: leaves (n * N * b, ...), split on axis 0, worker after worker and
      microbatch after microbatch. counts: (n,) integers from 0 to N, how many
      microbatches each worker computes, read at run time; None means N. Others are
      refused; in a jax.Array, which is not read, they are clipped. rng: a key;
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
    ).placed()

    @jax.jit
    def run(acc, params, batch, counts, rng):  # type: ignore[no-untyped-def]
        zeros = acc.zeros(params, batch, rng)
        sums = acc.add(zeros, params, batch, rng, counts)
        total = lambda x: x.sum(0)  # noqa: E731
        aux = total(sums.loss) if sums.aux is None else jax.tree.map(total, sums.aux)
        return sums.grads, sums.weight, aux

    def gradients(
        params: PyTree, batch: PyTree, counts: Any = None, rng: Any = None
    ) -> tuple[PyTree, jax.Array, PyTree]:
        return run(acc, params, acc.place_batch(batch), acc.place_counts(counts), rng)

    return gradients
