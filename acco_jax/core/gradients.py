"""Local gradients: a sum over microbatches per worker, without communication."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial
from jax.typing import ArrayLike, DTypeLike

from acco_jax.core.collectives import check_constraints, naming_constraints
from acco_jax.core.groups import of_chips
from acco_jax.core.leaves import PyTree, Rng, only
from acco_jax.core.loss import (
    Evaluated,
    Sums,
    add,
    counted,
    evaluate,
    finite,
    keep,
    widened,
    with_arrays,
    with_state,
)
from acco_jax.core.microbatches import Counts, piece, place_counts
from acco_jax.core.select import masked
from acco_jax.core.workers import from_row, over_data, place, to_row

# of a loop that the compiler's `simplify-while-loops` leaves a loop if it runs once
_KEPT = "skip-simplify-while-loops_trip-count-one"
# the first of some microbatches, and their end
Span = tuple[int | jax.Array, int | jax.Array]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Pullback:
    """The structure that rebuilds a gradient function from its residuals."""

    treedef: jax.tree_util.PyTreeDef
    params: tuple[int | None, ...]  # by residual: which parameter or loss array it is


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["loss_fn"],
    meta_fields=[
        "mesh",
        "axis",
        "microbatches",
        "dtype",
        "drop_nonfinite",
        "batch_holds",
    ],
)
@dataclasses.dataclass(frozen=True)
class Accumulator:
    """The sum of microbatch gradients on each worker.

    It is a pytree of the arrays of a loss function that is a jax.tree_util.Partial.
    Programs take it as an argument, so that these arrays are not constants in the HLO
    text.
    """

    loss_fn: Callable[..., Any]  # as for `local_gradients`; becomes a Partial
    mesh: Mesh
    axis: tuple[str, ...]  # the data axes; other axes are unchanged inside `loss_fn`
    microbatches: int  # how many each worker computes, or where counts vary the most
    dtype: DTypeLike | None = None  # of the sums; None: each parameter's own
    drop_nonfinite: bool = False  # see `acco_jax.make_train_step`
    batch_holds: int | None = (
        None  # how many its part of the batch holds; None: as many
    )

    def __post_init__(self) -> None:
        if callable(self.loss_fn):  # while a tree is built it may be a placeholder
            object.__setattr__(self, "loss_fn", with_arrays(self.loss_fn))

    def frozen(self, model_state: PyTree) -> Self:
        """Return the accumulator with a fixed model state; None: there is none."""
        if model_state is None:
            return self
        loss_fn = Partial(with_state, self.loss_fn, model_state)
        return dataclasses.replace(self, loss_fn=loss_fn)

    def placed(self) -> Self:
        """Put the loss function's arrays on the mesh, whole on each worker."""

        def place(
            x: ArrayLike | jax.ShapeDtypeStruct,
        ) -> ArrayLike | jax.ShapeDtypeStruct:
            if isinstance(x, jax.ShapeDtypeStruct):
                return x
            at: Any = getattr(x, "sharding", None)
            there = getattr(at, "mesh", None) == self.mesh
            others = set(self.mesh.axis_names) - set(self.axis)  # which may split it
            spec = only(at.spec, others) if there else P()
            return jax.device_put(x, NamedSharding(self.mesh, spec))

        return jax.tree.map(place, self)

    @property
    def workers(self) -> int:
        return math.prod(self.mesh.shape[a] for a in self.axis)

    @property
    def capacity(self) -> int:
        """The number of microbatches that each worker's part of the batch holds."""
        return self.batch_holds or self.microbatches

    @property
    def rows(self) -> P:
        return P(self.axis)

    @property
    def _on_gpu(self) -> bool:
        return self.mesh.devices.flat[0].platform in ("cuda", "gpu", "rocm")

    def loop(
        self,
        first: int | jax.Array,
        end: int | jax.Array,
        body: Callable[[Any, PyTree], PyTree],
        start: PyTree,
    ) -> PyTree:
        """Return lax.fori_loop(first, end, body, start), a loop even if it runs once.

        XLA:GPU would inline a loop of one iteration. It then overlaps a collective with
        only as much of it as it estimates to be enough, and holds more of it in memory.
        """
        result = lax.fori_loop(first, end, body, start)
        once = isinstance(first, int) and isinstance(end, int) and end - first == 1
        if once and self._on_gpu:
            return set_xla_metadata(result, **{_KEPT: "true"})
        return result

    def _whole(self, fn: Callable) -> Callable:
        """Wrap fn as one piece of a GPU's program: a loop that runs once."""
        if not self._on_gpu:
            return fn

        def run(*args: Any) -> PyTree:
            shapes = jax.eval_shape(fn, *args)
            zeros = jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype, out_sharding=x.sharding), shapes
            )
            return self.loop(0, 1, lambda i, _: fn(*args), zeros)

        return run

    def over_data(self, fn: Callable, in_specs: PyTree, out_specs: PyTree) -> Callable:
        return over_data(fn, self.mesh, self.axis, in_specs, out_specs)

    def check_batch(self, batch: PyTree) -> None:
        """Check that every leaf's axis 0 is of all workers' microbatches.

        Raises:
          ValueError: axis 0 does not divide by n * microbatches, or leaves differ in
            its length.
        """
        parts = self.workers * self.capacity
        first: tuple[str, int] | None = None
        for path, x in jax.tree_util.tree_leaves_with_path(batch):
            shape, name = np.shape(x), jax.tree_util.keystr(path) or "batch"
            if not shape or shape[0] % parts or not shape[0]:
                raise ValueError(
                    f"batch leaf {name} of shape {shape} does not divide into "
                    f"{self.workers} workers x {self.capacity} microbatches: its "
                    f"axis 0 must be a multiple of {parts}."
                )
            first = first or (name, shape[0])
            if shape[0] != first[1]:
                raise ValueError(
                    f"batch leaf {first[0]} has {first[1]} rows and {name} has "
                    f"{shape[0]}: row k of every leaf must be of the same example."
                )

    def place_batch(self, batch: PyTree) -> PyTree:
        """Split every leaf's axis 0 over the workers; see `check_batch`."""
        self.check_batch(batch)
        return place(batch, NamedSharding(self.mesh, self.rows))

    def place_counts(self, counts: Counts) -> jax.Array | None:
        """Put microbatch counts on their workers: (n,) int32.

        A jax.Array is not read, since reading would block: it is clipped to 0 ...
        `microbatches`.

        Raises:
          ValueError: wrong shape or dtype, or a count that can be read is out of range.
        """
        sharding = NamedSharding(self.mesh, self.rows)
        return place_counts(counts, self.workers, self.microbatches, sharding)

    def counts_here(self, counts: Sequence[int]) -> jax.Array:
        """Return (n,) counts, of which each process gives those of its own workers."""
        x, sharding = np.asarray(counts, np.int32), NamedSharding(self.mesh, self.rows)
        with jax.transfer_guard_host_to_device("allow"):  # here it is meant
            return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])

    def abstract_counts(self) -> jax.ShapeDtypeStruct:
        """Return the result of `counts_here`, without values."""
        sharding = NamedSharding(self.mesh, self.rows)
        return jax.ShapeDtypeStruct((self.workers,), jnp.int32, sharding=sharding)

    def _on_workers(self, fn: Callable, out_specs: PyTree, *args: Any) -> PyTree:
        """Run fn(self, params, batch, rng, sums or state, counts, at) on own rows."""
        rows = self.rows
        in_specs = (P(), P(), rows, P(), rows, rows, P())[: len(args) + 1]
        return self.over_data(fn, in_specs, out_specs)(self, *args)

    def zeros(
        self, params: PyTree, batch: PyTree, rng: Rng, model_state: PyTree = None
    ) -> Sums:
        """Return the sums of no microbatch, to go on at rows of `model_state`."""

        def local(self, params, batch, rng, state):  # type: ignore[no-untyped-def]
            state = from_row(state)
            return to_row(self.zeros_here(params, batch, rng, self.capacity, state))

        return self._on_workers(local, self.rows, params, batch, rng, model_state)

    def add(
        self,
        sums: Sums | None,
        params: PyTree,
        batch: PyTree,
        rng: Rng,
        counts: jax.Array | None,
        span: Callable[..., Span] = lambda count: (0, count),
        model_state: PyTree = None,
        at: jax.Array | None = None,
    ) -> Sums:
        """Add each worker's microbatches span(count) = (first, end) to its row.

        With a number `at` they are span(count, at): a span may not close over an array.
        Without `sums` these microbatches are the first: each worker goes on at its row
        of `model_state`.
        """

        def local(self, params, batch, rng, before, counts, at):  # type: ignore[no-untyped-def]
            (sums, state), count = from_row(before), self.microbatches
            if sums is None:
                sums = self.zeros_here(params, batch, rng, self.capacity, state)
            if counts is not None:
                count = jnp.clip(counts[0], 0, count)
            first, end = span(count) if at is None else span(count, at)
            total = self.capacity
            return to_row(self.sum_here(sums, params, batch, rng, total, first, end))

        before = sums, model_state
        args = params, batch, rng, before, counts, at
        return self._on_workers(local, self.rows, *args)

    def part(
        self,
        k: int,
        parts: int,
        progress: PyTree,
        params: PyTree,
        batch: PyTree,
        rng: Rng,
        counts: jax.Array | None,
        model_state: PyTree = None,
    ) -> PyTree:
        """Run the k-th of `parts` pieces of a half-round's work, beside one collective.

        Each worker's microbatches are in equal parts, with the remainder beside the
        slowest network's collectives, in the middle. A single microbatch has its
        forward pass and its backward pass there. Pieces count from 0: the first takes
        None for `progress`, each other one the result of the piece before, and the last
        returns the `Sums`.
        """
        middle = parts // 2
        if self.microbatches == 1:
            if k == max(middle - 1, 0):
                progress = self._forward(params, batch, rng, model_state)
            if k == middle:
                return self._backward(progress, params, counts, model_state)
            return progress
        share = functools.partial(piece, k=k, parts=parts)
        return self.add(progress, params, batch, rng, counts, share, model_state)

    def _forward(
        self, params: PyTree, batch: PyTree, rng: Rng, model_state: PyTree
    ) -> PyTree:
        """Return the only microbatch's loss, the rest and its gradient's residuals."""
        pullbacks: list[_Pullback] = []

        def local(self, params, batch, rng, state):  # type: ignore[no-untyped-def]
            key = rng
            if rng is not None:
                key = jax.random.fold_in(rng, lax.axis_index(self.axis) * self.capacity)
            loss_of = self._loss_of(batch, key, from_row(state), self.capacity, 0)
            self._checked(loss_of, params)
            loss, pullback, rest = jax.vjp(loss_of, params, has_aux=True)
            leaves, treedef = jax.tree.flatten(pullback)
            own = {id(x): i for i, x in enumerate(jax.tree.leaves((params, self)))}
            # parameters among the residuals are not carried a second time
            residuals = [None if id(x) in own else x for x in leaves]
            numbers = tuple(own.get(id(x)) for x in leaves)
            pullbacks.append(_Pullback(treedef, numbers))
            return to_row((loss, rest, residuals))

        run, args = self._whole(local), (params, batch, rng, model_state)
        return self._on_workers(run, self.rows, *args), pullbacks[-1]

    def _backward(
        self,
        progress: PyTree,
        params: PyTree,
        counts: jax.Array | None,
        model_state: PyTree,
    ) -> Sums:
        arrays, pullback = progress

        def local(self, params, arrays, counts, before):  # type: ignore[no-untyped-def]
            loss, (weight, aux, state), residuals = from_row(arrays)
            values = jax.tree.leaves((params, self))
            leaves = [
                x if i is None else values[i]
                for i, x in zip(pullback.params, residuals, strict=True)
            ]
            (grads,) = jax.tree.unflatten(pullback.treedef, leaves)(jnp.ones_like(loss))
            # `pack` drops gradients without weight: here they would exist twice
            sums = counted(Sums(None, loss, weight, aux))._replace(grads=grads)
            sums = self._widened(sums, params)
            sums = sums if counts is None else masked(counts[0] > 0, sums)
            sums = sums._replace(model_state=state)
            return to_row(keep(sums, from_row(before)))

        in_specs = (P(), P(), self.rows, self.rows, self.rows)
        run = self.over_data(self._whole(local), in_specs, self.rows)
        return run(self, params, arrays, counts, model_state)

    def checked(self, sums: Sums, dtypes: PyTree, model_state: PyTree = None) -> Sums:
        """Give no weight to workers whose sums are not finite; gradients stay.

        Args:
          sums: of all of a half-round's microbatches, rows.
          dtypes: of each gradient where it must be finite: the communication dtypes.
          model_state: rows, where each worker began; a dropped worker goes back there.
        """
        if not self.drop_nonfinite:
            return sums

        def local(sums: Sums, before: PyTree) -> Sums:
            own, before = from_row((sums, before))
            sent = jax.tree.map(lambda g, dtype: g.astype(dtype), own.grads, dtypes)
            return to_row(self.checked_here(own._replace(grads=None), sent, before))

        run = self.over_data(local, (self.rows, self.rows), self.rows)
        return run(sums, model_state)._replace(grads=sums.grads)

    def checked_here(self, sums: Sums, grads: PyTree, before: PyTree = None) -> Sums:
        """Return one worker's sums, zeros unless they and its gradients are finite.

        For functions given to `over_data`. A worker without weight counts for nothing,
        and is not dropped. Where another axis of the mesh splits parameters, its
        devices agree on one bit; the data axes communicate nothing.
        """
        if not self.drop_nonfinite:
            return sums
        places = jnp.arange(self.workers, dtype=jnp.int32)
        me = places == lax.axis_index(self.axis)
        return finite(sums, grads, me, before)

    def last(
        self,
        sums: Sums | None,
        params: PyTree,
        batch: PyTree,
        rng: Rng,
        counts: jax.Array | None,
        take: Callable[..., Any],
        out_specs: PyTree,
        model_state: PyTree = None,
    ) -> tuple[Any, Sums]:
        """Add each worker's last microbatch, its gradient taken by the caller.

        Args:
          sums: of the microbatches before it; None: there are none.
          params, batch, rng, counts: as for `add`; a worker without microbatches takes
            part all the same.
          take: (loss_of, params, grads, valid) -> ((loss, rest), out) on each
            worker: loss_of is a function of the parameters, grads are those of `sums`
            or None, valid [] is false for a worker without microbatches, or None.
          out_specs: of out, over the data axes.
          model_state: rows, where each worker begins if there are no `sums`.

        Returns:
          out, and the sums without gradients.
        """

        def local(self, params, batch, rng, before, counts):  # type: ignore[no-untyped-def]
            total, i, valid, key = self.capacity, self.microbatches - 1, None, rng
            if counts is not None:
                valid = counts[0] > 0
                i = jnp.clip(counts[0] - 1, 0, i)
            if rng is not None:
                first = lax.axis_index(self.axis) * total
                key = jax.random.fold_in(rng, first + i)
            sums, start = from_row(before)
            start = start if sums is None else sums.model_state
            loss_of = self._loss_of(batch, key, start, total, i)
            if sums is None:
                self._checked(loss_of, params)
            grads = None if sums is None else sums.grads
            (loss, (weight, aux, state)), out = take(loss_of, params, grads, valid)
            one = self._widened(Sums(None, loss, weight, aux), None)
            one = counted(one if valid is None else masked(valid, one))
            one = one._replace(model_state=state)
            if sums is None:
                return out, to_row(keep(one, start))
            return out, to_row(add(sums._replace(grads=None), one))

        specs, before = (out_specs, self.rows), (sums, model_state)
        return self._on_workers(local, specs, params, batch, rng, before, counts)

    def sum_here(
        self,
        sums: Sums,
        params: PyTree,
        batch: PyTree,
        rng: Rng,
        total: int,
        first: int | jax.Array,
        end: int | jax.Array,
    ) -> Sums:
        """Add microbatches first to end of this worker's `total` in the batch.

        For functions given to `over_data`: everything is one worker's own, without a
        leading axis.
        """
        before = lax.axis_index(self.axis) * total

        def body(i: jax.Array, sums: Sums) -> Sums:
            key = None if rng is None else jax.random.fold_in(rng, before + i)
            state = sums.model_state
            # libtpu aborts on a call inside a group of chips
            grouped = of_chips(self.mesh, self.axis)
            gradient = self._gradient if grouped else self._gradient_once
            return add(sums, gradient(params, batch, key, state, total, i))

        return self.loop(first, end, body, sums)

    def zeros_here(
        self,
        params: PyTree,
        batch: PyTree,
        rng: Rng,
        total: int,
        model_state: PyTree = None,
    ) -> Sums:
        """Return the sums of no microbatch, for `sum_here`."""
        loss_of = self._loss_of(batch, rng, model_state, total, 0)
        loss, (weight, aux, _) = self._checked(loss_of, params)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (loss, weight, aux))
        # zeros_like keeps how other mesh axes split the parameter
        grads = jax.tree.map(jnp.zeros_like, params)
        sums = self._widened(Sums(grads, *zeros), params)
        return sums._replace(model_state=model_state)

    def _checked(self, fn: Callable, *args: Any) -> PyTree:
        """Return the abstract results of fn, which evaluates the loss function."""
        jaxpr, out = jax.make_jaxpr(fn, return_shape=True)(*args)
        check_constraints(jaxpr.jaxpr, self.axis)
        return out

    def _gradient(
        self,
        params: PyTree,
        batch: PyTree,
        key: Rng,
        state: PyTree,
        total: int,
        i: int | jax.Array,
    ) -> Sums:
        """Return one microbatch's contribution on one worker (no leading axis)."""
        loss_of = self._loss_of(batch, key, state, total, i)
        (loss, rest), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        weight, aux, state = rest
        return counted(Sums(grads, loss, weight, aux, model_state=state))

    # traced and lowered once, however many pieces of a half-round compute microbatches
    _gradient_once = jax.jit(_gradient, static_argnames="total")

    def _loss_of(
        self, batch: PyTree, key: Rng, state: PyTree, total: int, i: int | jax.Array
    ) -> Callable:
        """Return params -> (loss, (weight, aux, state)) of microbatch i of `total`."""

        def pick(x: jax.Array) -> jax.Array:
            x = x.reshape(total, x.shape[0] // total, *x.shape[1:])
            return lax.dynamic_index_in_dim(x, i, keepdims=False)

        def loss_of(params: PyTree) -> Evaluated:
            with naming_constraints(self.axis):
                microbatch = jax.tree.map(pick, batch)
                return evaluate(self.loss_fn, microbatch, key, state, params)

        return loss_of

    def _widened(self, sums: Sums, params: PyTree) -> Sums:
        """Return the sums in the dtypes of the accumulator."""
        cast = lambda g, p: g.astype(self.dtype or p.dtype)  # noqa: E731
        return widened(sums)._replace(grads=jax.tree.map(cast, sums.grads, params))
