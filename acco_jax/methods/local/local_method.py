"""Base of the methods whose workers keep parameters of their own.

Between two exchanges every worker takes steps of an inner optimizer on its own copy of
the parameters, so the parameters of the loop are rows: each leaf (n, *param.shape), row
i on worker i. One call of the train step is so many inner steps of every worker and one
exchange, with the inner steps beside its hops if it overlaps.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from acco_jax.core.gradients import Accumulator, Sums
from acco_jax.core.half_round import Inputs, Round
from acco_jax.core.layout import Layout
from acco_jax.core.leaves import PyTree, Rng, wide, with_shardings
from acco_jax.core.microbatches import whole_number
from acco_jax.core.select import choose, masked
from acco_jax.core.state import State, StateT
from acco_jax.core.workers import from_row, over_data, place, strong, to_row
from acco_jax.methods import checks, origins
from acco_jax.methods.checks import check_dtypes, check_grads, checked_update
from acco_jax.methods.method import find_state, is_state
from acco_jax.methods.optimizer import in_worker
from acco_jax.methods.sharded import ShardedMethod


class LocalState(State, Protocol):
    """The state of a local method."""

    @property
    def inner(self) -> PyTree: ...  # rows: each worker's own optimizer state


LocalT = TypeVar("LocalT", bound=LocalState)


class LocalProgress(NamedTuple):
    """The arrays that inner steps change; every leaf is a row per worker."""

    theta: PyTree  # (n, *param.shape): the parameters, float32 or wider
    inner: PyTree  # (n, ...): the inner optimizers' states
    sums: Sums  # of this call's microbatches so far, without gradients
    norm: jax.Array  # (n,) the mean gradients' norms, summed over the steps
    steps: jax.Array  # (n,) float: steps taken; one without weight is none


@dataclasses.dataclass(frozen=True)
class InnerSteps:
    """The inner steps of one call."""

    inner: optax.GradientTransformation  # sees one worker's leaves, master dtype
    steps: int  # of a call

    def begin(
        self, theta: PyTree, inner: PyTree, layout: Layout, inputs: Inputs
    ) -> LocalProgress:
        """No step taken: zero sums, beside the workers' parameters and states."""

        def local(
            gradients: Accumulator, theta: PyTree, batch: PyTree, rng: Rng
        ) -> tuple[Sums, jax.Array]:
            total = self.steps * gradients.microbatches
            params = narrowed(layout, from_row(theta))
            sums = gradients.zeros_here(params, batch, rng, total)._replace(grads=None)
            sums = gradients.checked_here(sums, None)  # as steps return them
            return to_row((sums, jnp.zeros(())))

        gradients, batch, _, rng = inputs
        in_specs = (P(), gradients.rows, gradients.rows, P())
        run = gradients.over_data(local, in_specs, gradients.rows)
        sums, zero = run(gradients, theta, batch, rng)
        return LocalProgress(theta, inner, sums, zero, zero)

    def run(
        self,
        span: tuple[int, int],
        progress: LocalProgress,
        layout: Layout,
        inputs: Inputs,
    ) -> LocalProgress:
        """Every worker's steps span[0] to span[1] of this call, a static range.

        Batch leaves are (n * steps * microbatches * b, ...), counts are of every step.
        """
        if span[0] == span[1]:
            return progress

        def local(
            gradients: Accumulator,
            progress: LocalProgress,
            batch: PyTree,
            rng: Rng,
            counts: jax.Array | None,
        ) -> LocalProgress:
            one_step = functools.partial(self._step, gradients, layout)
            count: int | jax.Array = gradients.microbatches
            if counts is not None:
                count = jnp.clip(counts[0], 0, gradients.microbatches)
            body = functools.partial(one_step, batch, rng, count)
            return to_row(gradients.loop(*span, body, from_row(progress)))

        gradients, batch, counts, rng = inputs
        rows = gradients.rows
        run = gradients.over_data(local, (P(), rows, rows, P(), rows), rows)
        return run(gradients, progress, batch, rng, counts)

    def _step(
        self,
        gradients: Accumulator,
        layout: Layout,
        batch: PyTree,
        rng: Rng,
        count: int | jax.Array,
        h: int | jax.Array,
        progress: LocalProgress,
    ) -> LocalProgress:
        """One worker's step h on its own mean gradient; without weight, none."""
        microbatches = gradients.microbatches
        total, start = self.steps * microbatches, h * microbatches
        params = narrowed(layout, progress.theta)
        sums = gradients.zeros_here(params, batch, rng, total)
        sums = gradients.sum_here(sums, params, batch, rng, total, start, start + count)
        grads = jax.tree.map(lambda g, x: g.astype(x.dtype), sums.grads, progress.theta)
        sums = gradients.checked_here(sums._replace(grads=None), grads)
        valid = sums.weight != 0
        weight = jnp.where(valid, sums.weight, 1)
        mean = masked(valid, jax.tree.map(lambda g: g / weight.astype(g.dtype), grads))

        def update(mean: PyTree, state: PyTree, theta: PyTree) -> tuple[PyTree, PyTree]:
            return checked_update(self.inner, mean, state, theta, {}, in_loop=True)

        specs = layout.own_specs((mean, progress.inner))
        run = in_worker(update, layout, specs)
        updates, inner = run(mean, progress.inner, progress.theta)
        theta = optax.apply_updates(progress.theta, updates)
        return LocalProgress(
            choose(valid, theta, progress.theta),
            choose(valid, inner, progress.inner),
            jax.tree.map(jnp.add, progress.sums, sums),
            progress.norm + optax.tree.norm(mean).astype(progress.norm.dtype),
            progress.steps + valid.astype(progress.steps.dtype),
        )


def widened(layout: Layout, tree: PyTree) -> PyTree:
    """Parameters, or rows of them, in the dtypes of the master weights."""
    return layout.map(lambda leaf, x: x.astype(leaf.master), tree)


def narrowed(layout: Layout, tree: PyTree) -> PyTree:
    """Parameters, or rows of them, in their own dtypes."""
    return layout.map(lambda leaf, x: x.astype(leaf.dtype), tree)


def check_form(
    name: str, optimizer: optax.GradientTransformation
) -> Callable[[Layout, Any], None]:
    """Return what raises a ValueError for a state of another optimizer.

    Args:
      name: the field of a method's state that is the optimizer's state, and its word.
      optimizer: the one that the method has.
    """

    @functools.lru_cache(maxsize=1)
    def form(layout: Layout) -> jax.tree_util.PyTreeDef:
        seen = layout.tree(lambda x: jax.ShapeDtypeStruct(x.shape, x.master))
        return jax.tree.structure(jax.eval_shape(optimizer.init, seen))

    def check(layout: Layout, state: Any) -> None:
        if jax.tree.structure(getattr(state, name)) != form(layout):
            raise ValueError(
                f"the state is of another {name} optimizer than tx's: give the state "
                "of acco_jax.start(tx, params) for the same tx."
            )

    return check


def init_rows(
    layout: Layout, inner: optax.GradientTransformation, params: PyTree
) -> PyTree:
    """The state of `inner` on every worker, rows; each one's keys are its own.

    Raises:
      ValueError: `inner` averages the parameters in its state, as the schedule-free
        ones do, which a round would not move.
    """

    def begin(params: PyTree) -> PyTree:
        state = inner.init(params)
        kept = jax.tree.leaves(state, is_leaf=_averages)
        if any(map(_averages, kept)):
            raise ValueError(
                "inner is schedule-free: its state has an average of the parameters, "
                "which the workers of a local method do not exchange. Use another "
                "inner, or a sharded method."
            )
        return jax.tree.map(jnp.asarray, state)

    def own(x: jax.Array) -> jax.Array:
        if x.ndim or not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        return jax.random.fold_in(x, jax.lax.axis_index(layout.axis))

    def local(params: PyTree) -> PyTree:
        params = widened(layout, params)
        specs = layout.own_specs(jax.eval_shape(begin, params))
        state = in_worker(begin, layout, specs)(params)
        return to_row(jax.tree.map(own, state))

    return over_data(local, layout.mesh, layout.axis, P(), P(layout.axis))(params)


def _averages(state: object) -> bool:
    return isinstance(state, optax.contrib.ScheduleFreeState)


def master_rows(layout: Layout, params: PyTree) -> PyTree | None:
    """Rows of the parameters in the master dtype; None if that is their own."""
    if all(leaf.dtype == leaf.master for leaf in layout.leaves):
        return None
    return layout.to_rows(widened(layout, params))


def shardings(state: StateT, rows: tuple[str, ...]) -> StateT:
    """A NamedSharding for every array of a local method's state, possibly abstract.

    The fields `rows` hold a row per worker; states of sharding methods lie where their
    own layouts say, the rest everywhere.
    """
    layout = state.layout

    def of(field: str, value: PyTree) -> PyTree:
        if field in rows:
            return layout.row_shardings(value)
        home = layout.sharding()
        return jax.tree.map(
            lambda x: x.shardings() if is_state(x) else home, value, is_leaf=is_state
        )

    fields = [field for field in state._fields if field != "layout"]
    return state._replace(**{f: of(f, getattr(state, f)) for f in fields})


class LocalRound(Round[LocalT]):
    """One call of a local method: inner steps, and an exchange."""

    steps: InnerSteps
    late = True

    @property
    def beside(self) -> int:
        """Return how many steps overlap the hops; the rest follow them."""
        return self.steps.steps

    def theta(self, rows: PyTree, rest: LocalT) -> PyTree:
        """Return the point from which the workers start: rows in the master dtype."""
        master = getattr(rest, "master", None)
        return widened(rest.layout, rows) if master is None else master

    def compute(
        self,
        k: int,
        parts: int,
        progress: LocalProgress | None,
        params: PyTree,
        rest: LocalT,
        inputs: Inputs,
    ) -> LocalProgress:
        """The k-th piece of the steps beside the hops; `finish` takes the others."""
        layout = rest.layout
        if progress is None:
            theta = self.theta(params, rest)
            progress = self.steps.begin(theta, rest.inner, layout, inputs)
        span = (self.beside * k // parts, self.beside * (k + 1) // parts)
        return self.steps.run(span, progress, layout, inputs)

    def merge(
        self, rest: LocalT, progress: LocalProgress, received: PyTree
    ) -> LocalProgress:
        """Merge what was received into workers' parameters, before the last steps."""
        return progress

    @abc.abstractmethod
    def conclude(
        self, rows: PyTree, rest: LocalT, progress: LocalProgress, received: PyTree
    ) -> tuple[PyTree, LocalT]:
        """The rows and the state that the call returns, but for its counters."""

    def finish(
        self,
        params: PyTree,
        rest: LocalT,
        inputs: Inputs,
        progress: LocalProgress,
        received: PyTree,
    ) -> tuple[PyTree, LocalT, Sums, jax.Array]:
        progress = self.merge(rest, progress, received)
        others = self.beside, self.steps.steps
        progress = self.steps.run(others, progress, rest.layout, inputs)
        rows, state = self.conclude(params, rest, progress, received)
        state = state._replace(
            calls_done=state.calls_done + 1, steps=state.steps + self.steps.steps
        )
        norm = progress.norm.sum() / jnp.maximum(progress.steps.sum(), 1)
        return rows, state, progress.sums, norm


@dataclasses.dataclass(frozen=True, eq=False)
class LocalMethod:
    """A `Method` whose workers take steps of their own; it has no `update`."""

    mesh: Mesh
    axis: tuple[str, ...]
    comm_dtype: DTypeLike | None
    accumulate_dtype: DTypeLike | None
    inner: optax.GradientTransformation  # each worker's
    steps_per_call: int
    state_type: type  # the NamedTuple that is the method's state
    make_state: Callable[[PyTree], Any]  # parameters -> initial state
    round: Callable[[int], Round]
    on: Callable[[Any, tuple[str, ...], PyTree], Any]  # see `Method`
    delayed: bool
    period: int = 1
    # raises a ValueError for a state whose parts are another method's
    check_parts: Callable[[Any], None] = lambda state: None

    local = True
    calls_per_step = 1
    warmup = 0

    def __copy__(self, _: Any = None) -> Self:
        return self  # it never changes

    __deepcopy__ = __copy__

    def __getattr__(self, name: str) -> Any:
        why = f"{type(self).__name__!r} object has no attribute {name!r}"
        if name in ("init", "update"):
            why = (
                f"a local method has no {name}, because its workers take several steps "
                "on gradients of their own between two exchanges: use acco_jax.start "
                "and make_train_step."
            )
        raise AttributeError(why)

    def start(self, params: PyTree, model_state: PyTree = None) -> tuple[PyTree, State]:
        _refuse(model_state)
        state = self.make_state(params)
        layout = state.layout
        params = jax.device_put(params, layout.params_shardings)
        make = jax.jit(layout.to_rows, out_shardings=layout.grads_shardings)
        rows = make(params)
        origins.remember(rows, state)
        return rows, state

    def abstract_start(
        self, params: PyTree, model_state: PyTree = None
    ) -> tuple[PyTree, State]:
        params, state = jax.eval_shape(self.start, params, model_state)
        homes = state.layout.grads_shardings, state.shardings()
        return with_shardings((params, state), homes)

    @property
    def changes(self) -> str:
        return "fragments or an exponential graph" * (self.period > 1)

    def phase(self, call: int) -> int:
        return call % self.period

    def calls(self, steps: int) -> int:
        if steps % self.steps_per_call:
            raise ValueError(
                f"steps is {steps}, no multiple of the {self.steps_per_call} inner "
                "steps between two exchanges: use a multiple."
            )
        return steps // self.steps_per_call

    def steps_done(self, calls: int) -> int:
        return calls * self.steps_per_call

    @functools.cached_property
    def _check_inner(self) -> Callable[[Layout, Any], None]:
        return check_form("inner", self.inner)

    def place(self, params: PyTree, state: State) -> PyTree:
        if type(state) is not self.state_type:
            raise ValueError(
                f"the state is {type(find_state(state)).__name__}, wrapped or of "
                "another method than tx: give the state of acco_jax.start(tx, params) "
                "for the tx the step was built with."
            )
        self.check_parts(state)
        layout = state.layout
        checks.check_layout(layout, self.mesh, self.axis, self.comm_dtype)
        self._check_inner(layout, state)
        check_rows(layout, params)
        check_dtypes(layout, params)
        return place(strong(params), layout.grads_shardings)

    def arguments(self, extra: dict[str, Any]) -> dict[str, Any]:
        if extra:
            raise ValueError(
                f"extra holds {', '.join(sorted(extra))}, but optimizers of a local "
                "method are given only gradients: leave it out."
            )
        return extra

    def check(self, params: PyTree) -> None:
        def step(params: PyTree) -> PyTree:
            theta = jax.tree.map(wide, params)
            state = self.inner.init(theta)
            return checked_update(self.inner, theta, state, theta, {}, in_loop=True)

        jax.eval_shape(self.make_state, params)
        jax.eval_shape(step, params)


def check_rows(layout: Layout, params: PyTree) -> None:
    """Raise a ValueError unless params are rows of what `layout` was made for."""
    try:
        check_grads(layout, params)
    except ValueError:
        raise ValueError(
            "params are not the rows of this method, a copy for every worker: "
            "give those of acco_jax.start(tx, params)."
        ) from None


def _refuse(model_state: PyTree) -> None:
    if model_state is not None:
        raise ValueError(
            "model_state is given, but the workers of a local method have models of "
            "their own, of which a mean of statistics fits none: use acco, dpu, wp, "
            "zero1, fused_zero1 or ddp, or norms without state."
        )


def check_optimizer(name: str, optimizer: object, why: str) -> None:
    """Raises a ValueError unless an argument is a plain optax transformation."""
    give = f"a plain optax optimizer, because {why}"
    checks.check_optimizer(name, optimizer, give)
    if isinstance(optimizer, ShardedMethod):
        raise ValueError(f"{name} is a {type(optimizer).__name__}: give {give}.")


def local_method(
    inner: optax.GradientTransformation, common: Mapping[str, Any], **attributes: Any
) -> LocalMethod:
    """A `LocalMethod` of these attributes and those of `common_attributes`.

    Raises:
      ValueError: `inner` is not an optax transformation, or is itself sharded.
    """
    check_optimizer(
        "inner", inner, "workers that go their own ways cannot share shards of a state"
    )
    names = ("mesh", "axis", "comm_dtype", "accumulate_dtype")
    return LocalMethod(inner=inner, **{k: common[k] for k in names}, **attributes)


def outer_step(
    outer: optax.GradientTransformation | None,
    learning_rate: float,
    momentum: float,
    defaults: tuple[float, float],
) -> optax.GradientTransformation:
    """Return `outer`, or that of the papers: eta (Delta + mu m), m = mu m + Delta.

    Raises:
      ValueError: an outer optimizer is given and a value that it replaces, too.
    """
    if outer is not None:
        if (learning_rate, momentum) != defaults:
            raise ValueError(
                f"outer_learning_rate={learning_rate} and outer_momentum={momentum} "
                "are of the step that outer replaces: leave them out."
            )
        return outer
    # with mu = 0 no m is kept
    return optax.sgd(learning_rate, momentum or None, nesterov=bool(momentum))


def check_wire(layout: Layout, weighted: bool) -> None:
    """Raises a ValueError where weighted differences overflow the communication dtype.

    A weight is a number of targets: times a difference it passes float16's 65,504.
    """
    if weighted and any(leaf.comm_dtype == jnp.float16 for leaf in layout.leaves):
        raise ValueError(
            "what is sent is float16, in which weighted differences overflow: use "
            "comm_dtype='bfloat16' or weighted=False."
        )


def checked_steps(name: str, value: object) -> int:
    return whole_number(name, value, 1, "it must be an integer of at least 1.")
