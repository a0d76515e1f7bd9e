"""What every method is made of whose workers keep parameters of their own.

Between two exchanges every worker takes steps of an inner optimizer on its own copy of
the parameters, so the parameters of the loop are rows: each leaf (n, *param.shape), row
i on worker i. One call of the train step is so many inner steps of every worker and one
exchange; `Round` says how a method's exchange is cut into collectives, and
`acco_jax.local.step` puts the inner steps beside them.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from acco_jax.gradients import Accumulator, Sums, over_data
from acco_jax.layout import Layout, check_floating
from acco_jax.transforms.base import Method, choose
from acco_jax.transforms.checks import checked_update

PyTree = Any


class Work(NamedTuple):
    """What inner steps change; every leaf is a row per worker."""

    theta: PyTree  # (n, *param.shape): the parameters, float32 or wider
    inner: PyTree  # (n, ...): the inner optimizers' states
    sums: Sums  # of this call's microbatches so far, without gradients
    norm: jax.Array  # (n,) the mean gradients' norms, summed over the steps
    steps: jax.Array  # (n,) float: steps taken; one without weight is none


@dataclasses.dataclass(frozen=True)
class InnerSteps:
    """The inner steps of one call.

    Attributes:
      inner: the optimizer; sees whole leaves, one worker's, in the master dtype.
      steps: of a call.
    """

    inner: optax.GradientTransformation
    steps: int

    def begin(
        self, gradients: Accumulator, theta: PyTree, inner: PyTree, *args: Any
    ) -> Work:
        """No step taken: zero sums, beside the workers' parameters and states."""
        batch, rng, like = args

        def local(
            gradients: Accumulator, theta: PyTree, batch: PyTree, rng: Any
        ) -> tuple[Sums, jax.Array]:
            held = self.steps * gradients.microbatches
            params = cast(first(theta), like)
            sums = gradients.nothing(params, batch, rng, held)._replace(grads=None)
            return jax.tree.map(lambda x: x[None], (sums, jnp.zeros(())))

        in_specs = (P(), gradients.rows, gradients.rows, P())
        run = gradients.over_data(local, in_specs, gradients.rows)
        sums, zero = run(gradients, theta, batch, rng)
        return Work(theta, inner, sums, zero, zero)

    def run(
        self,
        gradients: Accumulator,
        span: tuple[int, int],
        work: Work,
        batch: PyTree,
        rng: Any,
        counts: jax.Array | None,
        like: PyTree,
    ) -> Work:
        """Every worker's steps span[0] to span[1] of this call.

        Args:
          gradients: of one step's microbatches.
          span: which steps; static.
          work: after the steps before.
          batch: leaves (n * steps * microbatches * b, ...).
          rng: a key; microbatch k of the whole batch gets fold_in(rng, k).
          counts: (n,) microbatches of every step; a worker with 0 stays where it is.
          like: the parameters' dtypes, in which the loss sees them.
        """
        if span[0] == span[1]:
            return work

        def local(
            gradients: Accumulator, work: Work, batch: PyTree, rng: Any, counts: Any
        ) -> Work:
            one_step = functools.partial(self._step, gradients, like)
            count: Any = gradients.microbatches
            if counts is not None:
                count = jnp.clip(counts[0], 0, gradients.microbatches)
            body = functools.partial(one_step, batch, rng, count)
            start, end = span
            if end - start == 1:
                end = gradients.opaque(end)
            work = lax.fori_loop(start, end, body, first(work))
            return jax.tree.map(lambda x: x[None], work)

        rows = gradients.rows
        run = gradients.over_data(local, (P(), rows, rows, P(), rows), rows)
        return run(gradients, work, batch, rng, counts)

    def _step(
        self,
        gradients: Accumulator,
        like: PyTree,
        batch: PyTree,
        rng: Any,
        count: Any,
        h: Any,
        work: Work,
    ) -> Work:
        """One worker's step h on its own mean gradient; without weight, none."""
        microbatches = gradients.microbatches
        held, start = self.steps * microbatches, h * microbatches
        params = cast(work.theta, like)
        sums = gradients.nothing(params, batch, rng, held)
        sums = gradients.sum_here(sums, params, batch, rng, held, start, start + count)
        valid = sums.weight != 0
        weight = jnp.where(valid, sums.weight, 1)
        mean = jax.tree.map(
            lambda g, x: jnp.where(
                valid, g.astype(x.dtype) / weight.astype(x.dtype), 0
            ),
            sums.grads,
            work.theta,
        )
        updates, inner = checked_update(
            self.inner, mean, work.inner, work.theta, {}, in_loop=True
        )
        theta = optax.apply_updates(work.theta, updates)
        added = sums._replace(grads=None)
        return Work(
            choose(valid, theta, work.theta),
            choose(valid, inner, work.inner),
            jax.tree.map(jnp.add, work.sums, added),
            work.norm + optax.tree.norm(mean).astype(work.norm.dtype),
            work.steps + valid,
        )


def first(tree: PyTree) -> PyTree:
    """One worker's (1, ...) rows without the leading axis."""
    return jax.tree.map(lambda x: x[0], tree)


def cast(tree: PyTree, dtypes: PyTree) -> PyTree:
    return jax.tree.map(lambda x, d: x.astype(d), tree, dtypes)


def dtypes_of(layout: Layout) -> PyTree:
    return layout.tree(lambda leaf: leaf.dtype)


def masters_of(layout: Layout) -> PyTree:
    return layout.tree(lambda leaf: leaf.master)


def to_rows(layout: Layout, tree: PyTree) -> PyTree:
    """What is replicated -> rows: every worker's own copy. No communication."""
    run = over_data(
        lambda t: jax.tree.map(lambda x: x[None], t),
        layout.mesh,
        layout.axis,
        P(),
        P(layout.axis),
    )
    return run(tree)


def zeros(layout: Layout, shape: tuple[int, ...], dtype: Any, *spec: Any) -> jax.Array:
    """An array that every process makes its part of."""
    make = jax.jit(
        lambda: jnp.zeros(shape, dtype), out_shardings=layout.sharding(*spec)
    )
    return make()


def init_rows(
    layout: Layout, inner: optax.GradientTransformation, params: PyTree
) -> PyTree:
    """The state of `inner` on every worker, rows."""

    def local(params: PyTree) -> PyTree:
        state = inner.init(cast(params, masters_of(layout)))
        return jax.tree.map(lambda x: jnp.asarray(x)[None], state)

    return over_data(local, layout.mesh, layout.axis, P(), P(layout.axis))(params)


def shardings(state: Any, rows: tuple[str, ...]) -> Any:
    """A NamedSharding for every array of a local method's state.

    Args:
      state: a NamedTuple with `layout` and `steps`, possibly abstract.
      rows: its fields that hold a row per worker. States of sharding methods lie where
        their own layouts say, the rest everywhere.
    """
    layout = state.layout

    def of(field: str, value: Any) -> Any:
        if field in rows:
            return layout.row_shardings(value)
        home = layout.sharding()
        is_method = lambda x: isinstance(getattr(x, "layout", None), Layout)  # noqa: E731
        return jax.tree.map(
            lambda x: x.layout.state_shardings(x) if is_method(x) else home,
            value,
            is_leaf=is_method,
        )

    fields = zip(state._fields, state, strict=True)
    return type(state)(*(v if f == "layout" else of(f, v) for f, v in fields))


class Round(abc.ABC):
    """One call of a local method: inner steps, and an exchange in so many hops.

    Attributes:
      overlaps: whether what the call before left is sent while this call's first steps
        run, or what this call's steps made is sent after them.
      beside: how many steps run beside the hops; the rest after they are done.
      steps: the inner steps of a call.
    """

    overlaps: bool
    beside: int
    steps: InnerSteps

    @property
    @abc.abstractmethod
    def hops(self) -> tuple[Callable[[Any], Any], ...]:
        """What is moving -> what is moving, each the way of one collective."""

    @abc.abstractmethod
    def theta(self, rows: PyTree, state: Any) -> PyTree:
        """Where the workers start, rows in the master dtype."""

    @abc.abstractmethod
    def send(self, rows: PyTree, state: Any, work: Work | None) -> Any:
        """What is moving before the first hop; work is None where it overlaps."""

    def merge(self, rows: PyTree, state: Any, work: Work, moved: Any) -> Work:
        """Lets what has arrived into the workers' parameters, before the last steps."""
        return work

    @abc.abstractmethod
    def finish(self, rows: PyTree, state: Any, work: Work, moved: Any) -> Any:
        """The rows and the state that the call returns; no large collective."""

    def part(
        self,
        k: int,
        begun: Work | None,
        gradients: Accumulator,
        rows: PyTree,
        state: Any,
        batch: PyTree,
        counts: jax.Array | None,
        rng: Any,
    ) -> Work:
        """The k-th piece of the steps beside the hops; the steps after them at last."""
        parts, like = len(self.hops), dtypes_of(state.layout)
        if begun is None:
            theta = self.theta(rows, state)
            begun = self.steps.begin(gradients, theta, state.inner, batch, rng, like)
        span = (self.beside * k // parts, self.beside * (k + 1) // parts)
        if k == parts:
            span = (self.beside, self.steps.steps)
        return self.steps.run(gradients, span, begun, batch, rng, counts, like)


@dataclasses.dataclass(frozen=True, eq=False)
class LocalMethod:
    """A method for `acco_jax.make_train_step` whose workers go their own ways.

    Attributes:
      mesh: the devices.
      axis: the data axes.
      inner: each worker's optimizer.
      steps_per_call: inner steps of one call of the train step.
      accumulate_dtype: of the gradient accumulator; None: each parameter's own.
      init: parameters -> state.
      round: phase -> what a call does.
      check_state: raises a ValueError for a state of another method.
      phases: how many kinds of calls take turns.
      delayed: whether communication runs beside inner steps.
    """

    mesh: Mesh
    axis: tuple[str, ...]
    inner: optax.GradientTransformation
    steps_per_call: int
    accumulate_dtype: Any
    init: Callable[[PyTree], Any]
    round: Callable[[int], Round]
    check_state: Callable[[Any], None]
    phases: int
    delayed: bool
    half_rounds: int = 1  # calls that share the microbatches of a step

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses what other optimizers do: there is no update of one gradient.

        Raises:
          ValueError: always.
        """
        raise ValueError(
            "a local method has no update, because its workers take several steps on "
            "gradients of their own between two exchanges: use make_train_step."
        )

    def start(self, params: PyTree) -> tuple[PyTree, Any]:
        """The rows of the loop, all equal, and the initial state."""
        state = self.init(params)
        layout = state.layout
        params = jax.device_put(params, layout.params_shardings)
        make = jax.jit(
            functools.partial(to_rows, layout), out_shardings=layout.grads_shardings
        )
        return make(params), state

    def start_shardings(self, params: PyTree) -> tuple[PyTree, Any]:
        """NamedShardings of what `start` returns."""
        state = jax.eval_shape(self.init, params)
        return state.layout.grads_shardings, state.shardings()

    def calls(self, steps: int) -> int:
        """Calls that make so many inner steps.

        Raises:
          ValueError: steps is no multiple of a call's.
        """
        if steps % self.steps_per_call:
            raise ValueError(
                f"steps is {steps}, no multiple of the {self.steps_per_call} inner "
                "steps between two exchanges: use a multiple."
            )
        return steps // self.steps_per_call

    def steps_done(self, calls: int) -> int:
        """Inner steps after so many calls."""
        return calls * self.steps_per_call

    def check_extra(self, extra: dict[str, Any]) -> None:
        """Raises a ValueError if there are any."""
        if extra:
            raise ValueError(
                f"extra holds {', '.join(sorted(extra))}, but optimizers of a local "
                "method are given gradients alone: leave it out."
            )

    def check(self, params: PyTree) -> None:
        """Raises whatever the optimizers raise, without computing anything."""

        def step(params: PyTree) -> PyTree:
            wide = lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32))  # noqa: E731
            theta = jax.tree.map(wide, params)
            state = self.inner.init(theta)
            return checked_update(self.inner, theta, state, theta, {}, in_loop=True)

        jax.eval_shape(step, params)
        jax.eval_shape(self.init, params)


def local_method(
    inner: optax.GradientTransformation,
    *,
    mesh: Mesh,
    axis: tuple[str, ...],
    steps_per_call: int,
    accumulate_dtype: Any,
    init: Callable[[PyTree], Any],
    round: Callable[[int], Round],
    state: type,
    delayed: bool,
    phases: int = 1,
    check_parts: Callable[[Any], None] = lambda state: None,
) -> LocalMethod:
    """A LocalMethod, its common arguments checked.

    Args:
      inner, mesh, axis, steps_per_call, accumulate_dtype, init, round, delayed, phases:
        see `LocalMethod`.
      state: the NamedTuple that is the method's state.
      check_parts: raises a ValueError for one whose parts are another method's.

    Raises:
      ValueError: `inner` is no optax transformation, or is itself sharded, or
        accumulate_dtype is no floating type.
    """
    check_floating("accumulate_dtype", accumulate_dtype)
    kind = state
    if isinstance(inner, Method) or not isinstance(inner, optax.GradientTransformation):
        raise ValueError(
            f"inner is a {type(inner).__name__}: give a plain optax optimizer, because "
            "workers that go their own ways cannot share shards of a state."
        )

    def check_state(state: Any) -> None:
        if type(state) is not kind:
            raise ValueError(
                f"the state is {type(state).__name__}, of another method than tx: give "
                "the state of acco_jax.start(tx, params) for the same tx."
            )
        check_parts(state)

    return LocalMethod(
        mesh,
        axis,
        inner,
        steps_per_call,
        accumulate_dtype,
        init,
        round,
        check_state,
        phases,
        delayed,
    )


def nesterov(learning_rate: float, momentum: float) -> optax.GradientTransformation:
    """The outer optimizer of the papers: eta (Delta + mu m), m = mu m + Delta."""
    # with mu = 0 no m is kept
    return optax.sgd(learning_rate, momentum or None, nesterov=bool(momentum))


def check_wire(layout: Layout, weighted: bool) -> None:
    """Raises a ValueError where weighted differences would not fit into the wire.

    A weight is a number of targets: times a difference it passes float16's 65,504.
    """
    if weighted and any(leaf.wire == jnp.float16 for leaf in layout.leaves):
        raise ValueError(
            "what is sent is float16, in which weighted differences overflow: use "
            "comm_dtype='bfloat16' or weighted=False."
        )


def check_steps(name: str, value: Any) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}: it must be an integer of at least 1.")
    return value


def workers_of(mesh: Mesh, axis: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[a] for a in axis)
