"""Methods with a sharded optimizer state: reduce gradients, advance, gather parameters.

A method defines how its state starts, how it advances on reduced gradients, and whether
a half-round communicates the gradients of the half-round before (`delayed`) or its own.
`ShardedMethod` makes an optax transformation and a train step's rounds from that.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh
from jax.typing import ArrayLike, DTypeLike

from acco_jax.core.buffers import InFlight, Reduced, Totals
from acco_jax.core.codec import Codec, Codecs, codecs
from acco_jax.core.exchange import Advanced, Exchange, ExchangeRound, Point, Received
from acco_jax.core.gradients import Sums
from acco_jax.core.half_round import Inputs, Round, run
from acco_jax.core.layout import Layout
from acco_jax.core.leaves import PyTree, wide, with_shardings
from acco_jax.core.model_state import check_state
from acco_jax.core.select import choose, difference, masked
from acco_jax.core.state import ShardedState, is_delayed
from acco_jax.core.workers import check_compiled, place, strong
from acco_jax.methods import checks, method, optimizer, origins

StateType = TypeVar("StateType", bound=type)
Step = Callable[..., tuple[PyTree, PyTree]]
Start = Callable[[Layout, PyTree, PyTree], Any]  # -> a `ShardedState`
Accumulate = Callable[[Any, Reduced, Totals], tuple[Any, Reduced, Totals]]
Advance = Callable[[Any, PyTree, Totals, Step], tuple[Any, PyTree]]


class ShardedOptions(method.CommonOptions, total=False):
    """Keyword arguments of the sharded methods, beside the common ones.

    Attributes:
      gather_bits: 8 or 4 gathers differences to what the workers hold, in 8 or 4 bits
        with a scale per row, not values; of acco also a pair for (estimate, commit).
        The master weights stay exact. Adds a shard of the parameters.
      reduce_bits: 8 sends gradients in 8 bits to the shards' owners, which add them in
        float32, with error feedback: the rounding error is added to each worker's next
        gradient. Adds a buffer as large as what is rounded, with one data axis all of
        a worker's gradients. With several axes only the first named, the slowest, is
        crossed in 8 bits. On hosts of GPUs, where an all-to-all of all workers crosses
        the network more often than a ring does, name one axis for the hosts and one
        for a host's GPUs. It is not overlapped within a TPU slice, whose all-to-all is
        synchronous.
      resync_every: with gather_bits, one half-round in this many, the first, gathers
        values.
    """

    gather_bits: int | tuple[int | None, int | None] | None
    reduce_bits: int | None
    resync_every: int


def with_shards(state_type: StateType) -> StateType:
    """Give a NamedTuple with a sharded `master` the methods of a `State`."""
    made: Any = state_type
    made.shardings = lambda self: self.layout.state_shardings(self)
    made.committed = lambda self, params: method.gather_exact(self.layout, self.master)
    made.theta = lambda self, params: method.assembled(self.layout, self.master)
    return state_type


# ----------------------------------------------------------------------- the round


class Rest(NamedTuple):
    """The state that a half-round computes with, beside parameters and inputs."""

    layout: Layout
    model_state: PyTree  # rows: where each worker begins; None: there is none


@dataclasses.dataclass(frozen=True)
class ShardedRound(ExchangeRound[ShardedState]):
    """A half-round that computes microbatch gradients and exchanges gradients."""

    exchange: Exchange
    overlaps: bool

    def open(
        self, params: PyTree, state: ShardedState
    ) -> tuple[InFlight | None, ShardedState, Rest]:
        rest = Rest(state.layout, _own_states(state))
        if not self.overlaps:
            return None, state, rest
        assert is_delayed(state)
        return state.in_flight, state._replace(in_flight=None), rest

    def compute(
        self,
        k: int,
        parts: int,
        progress: PyTree,
        params: PyTree,
        rest: Rest,
        inputs: Inputs,
    ) -> PyTree:
        gradients, batch, counts, rng = inputs
        args = params, batch, rng, counts, rest.model_state
        return gradients.part(k, parts, progress, *args)

    def close(
        self, progress: Sums, rest: Rest, inputs: Inputs
    ) -> tuple[InFlight, Sums]:
        # several microbatches were added up without those of weight 0; a single
        # microbatch's gradients are as they came (`Accumulator.part`), and so are the
        # gradients of a worker that is dropped
        gradients, layout = inputs.gradients, rest.layout
        check = gradients.microbatches == 1 or gradients.drop_nonfinite
        dtypes = layout.tree(lambda leaf: leaf.comm_dtype)
        progress = gradients.checked(progress, dtypes, rest.model_state)
        in_flight = layout.pack(
            progress.grads, progress.weight, progress.loss, check=check
        )
        in_flight = in_flight._replace(model_state=progress.model_state)
        return in_flight, progress._replace(grads=None, model_state=None)

    def outgoing(
        self, params: PyTree, rest: Rest, progress: tuple[InFlight, Sums]
    ) -> InFlight:
        return progress[0]

    def finish(
        self,
        params: PyTree,
        rest: Rest,
        inputs: Inputs,
        progress: tuple[InFlight, Sums],
        received: Received,
    ) -> tuple[PyTree, ShardedState, Sums, jax.Array]:
        in_flight, sums = progress
        state = received.state
        if self.overlaps:
            state = state._replace(in_flight=in_flight)
        elif is_delayed(state) and state.model_state is not None:
            # warming up: nothing is left to be sent, and the workers go on at the mean
            rows = _compiled_rows(state.layout, state.model_state)
            own = state.in_flight._replace(model_state=rows)
            state = state._replace(in_flight=own)
        return received.params, state, sums, received.grad_norm


def _own_states(state: ShardedState) -> PyTree:
    """Return the model state from which each worker goes on: rows.

    A delayed method goes on from each worker's own state of the last half-round, whose
    mean is not communicated yet. Other methods, and a warm-up, go on from the mean.
    """
    if is_delayed(state):
        return state.in_flight.model_state
    return state.layout.to_rows(state.model_state)


# compiled: a train step of several programs ends a call outside of them
_compiled_rows = jax.jit(Layout.to_rows, static_argnums=0)


# ---------------------------------------------------------------------- the method


class ShardedPhase(NamedTuple):
    """The phase of a half-round: whether it overlaps, and its codec."""

    overlaps: bool
    codec: Codec


@jax.tree_util.register_static
class ShardedMethod(optax.GradientTransformationExtraArgs):
    """An optax transformation whose optimizer state is sharded; a `Method`."""

    inner: optax.GradientTransformation
    mesh: Mesh
    axis: tuple[str, ...]
    comm_dtype: DTypeLike | None
    accumulate_dtype: DTypeLike | None
    param_specs: PyTree | None
    codecs: Codecs  # how each half-round communicates
    state_type: type  # the NamedTuple that is the method's state
    layout_type: type[Layout]
    round_type: Callable[[Exchange, bool], Round]
    delayed: bool
    calls_per_step: int
    warmup: int
    _start: Start
    _accumulate: Accumulate | None
    _advance: Advance

    local = False
    steps_per_call = 1

    def __new__(cls, **attributes: Any) -> Self:
        def init(params: PyTree) -> ShardedState:
            return self._init(params)

        def update(
            grads: PyTree,
            state: ShardedState,
            params: PyTree | None = None,
            *,
            weight: ArrayLike | None = None,
            **extra: Any,
        ) -> tuple[PyTree, ShardedState]:
            return self._update(grads, state, params, weight, extra)

        self = super().__new__(cls, init, update)
        self.__dict__.update(attributes)
        return self

    def __copy__(self, _: Any = None) -> Self:
        return self  # a NamedTuple's copy would be made of init and update alone

    __deepcopy__ = __copy__

    # ---- as a `Method`

    def on(
        self, mesh: Mesh | AbstractMesh, axis: tuple[str, ...], specs: PyTree | None
    ) -> Self:
        found = ("_updated", "_form", "_starts", "_optimizer")
        attributes = {k: v for k, v in vars(self).items() if k not in found}
        places = {"mesh": mesh, "axis": axis, "param_specs": specs}
        return type(self)(**attributes | places)

    def start(
        self, params: PyTree, model_state: PyTree = None
    ) -> tuple[PyTree, ShardedState]:
        state = self.init(params)
        if model_state is None:
            return params, state
        check_state(model_state)
        layout = state.layout
        copies = jax.tree.map(lambda x: jnp.array(x, copy=True), model_state)
        model_state = jax.device_put(copies, layout.sharding())
        state = state._replace(model_state=model_state)
        if is_delayed(state):
            rows = jax.jit(
                layout.to_rows,
                out_shardings=layout.sharding(layout.axis),
            )(model_state)
            state = state._replace(in_flight=state.in_flight._replace(model_state=rows))
        return params, state

    def abstract_start(
        self, params: PyTree, model_state: PyTree = None
    ) -> tuple[PyTree, ShardedState]:
        params, state = jax.eval_shape(self.start, params, model_state)
        homes = state.layout.params_shardings, state.shardings()
        return with_shardings((params, state), homes)

    @property
    def period(self) -> int:
        return self.codecs.period

    @property
    def changes(self) -> str:
        if self.warmup:
            return "warmup_steps"
        return "gather_bits that differ, or resync_every," * self.codecs.differ

    def phase(self, call: int) -> ShardedPhase:
        overlaps = self.delayed and call >= self.warmup
        return ShardedPhase(overlaps, self.codecs.at(call))

    def exchange(self, codec: Codec) -> Exchange:
        return Exchange(self.axis, self.advance, codec)

    def round(self, phase: ShardedPhase) -> Round:
        return self.round_type(self.exchange(phase.codec), phase.overlaps)

    def calls(self, steps: int) -> int:
        """Return the half-rounds of `steps` steps, pipeline fill included."""
        return int(self.delayed and steps > self.warmup) + steps * self.calls_per_step

    def steps_done(self, calls: int) -> int | None:
        done = calls - int(self.delayed and calls > self.warmup)
        return None if done % self.calls_per_step else done // self.calls_per_step

    def place(self, params: PyTree, state: ShardedState) -> PyTree:
        if not method.is_state(state):
            method.find_state(state)  # says what it is instead
            raise ValueError(
                "the state is wrapped, but make_train_step runs a method's own stages: "
                "give it the state of tx.init for the tx it was built with."
            )
        self.check_state(state)
        checks.check_params(state.layout, params)
        return place(strong(params), state.layout.params_shardings)

    def check_state(self, state: object) -> None:
        """Raise a ValueError for a state of another method."""
        layout = type(getattr(state, "layout", None))
        ours: Any = state
        if type(state) is not self.state_type or layout is not self.layout_type:
            raise ValueError(
                f"the state is {type(state).__name__} in {layout.__name__}, of another "
                "method than tx: give the state of tx.init for the same tx."
            )
        layout = ours.layout
        checks.check_layout(layout, self.mesh, self.axis, self.comm_dtype)
        self.codecs.check(ours.residual)
        if jax.tree.structure(ours.inner) != self._inner_form(layout):
            raise ValueError(
                "the state is of another inner optimizer than tx's: give the state of "
                "tx.init for the same tx."
            )

    def _inner_form(self, layout: Layout) -> Any:
        """Return the structure of the inner optimizer's state, found once a layout."""
        known = self.__dict__.get("_form")
        if known is None or known[0] is not layout:
            seen = layout.tree(lambda x: jax.ShapeDtypeStruct(x.shape, x.master))
            form = jax.tree.structure(jax.eval_shape(self.inner.init, seen))
            known = self.__dict__["_form"] = layout, form
        return known[1]

    def arguments(self, extra: dict[str, Any]) -> dict[str, Any]:
        checks.check_extra(self.inner, extra)
        if checks.takes(self.inner, "value"):
            return {"value": optimizer.MEAN_LOSS} | extra
        return extra

    def check(self, params: PyTree) -> None:
        _, state = self.abstract_start(params)  # placed, as the step's is
        layout = state.layout
        number: Any = jax.ShapeDtypeStruct(
            (), layout.scalar, sharding=layout.sharding()
        )
        totals, extra = Totals(number, number), self.arguments({})
        gradient = jax.eval_shape(layout.reduced_zeros)
        jax.eval_shape(self.advance, state, gradient, totals, extra)

    # ---- what it does

    def _init(self, params: PyTree) -> ShardedState:
        checks.refuse_wrappers()
        params = checks.as_updated(params)
        check_compiled()
        layout = method.layout_of(params, vars(self), self.layout_type)
        placed = jax.device_put(params, layout.params_shardings)
        state = self._starts(layout)(placed)
        origins.remember(params, state)
        return state

    @functools.cached_property
    def _starts(self) -> Callable[[Layout], Callable[[PyTree], ShardedState]]:
        """The starts that are compiled, by layout: a trial makes one many times."""
        return functools.cache(self._compiled_start)

    def _compiled_start(self, whole: Layout) -> Callable[[PyTree], ShardedState]:
        """Return what makes the state of parameters that lie so, compiled once."""
        whole = whole.overlapping() if self.delayed else whole
        seen = whole.tree(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.master))
        like = jax.eval_shape(self.inner.init, seen)
        layout = whole.mirroring(self.inner, like)

        def begin(master: PyTree) -> PyTree:
            return layout.store_state(self.inner.init(layout.view(master)))

        def make(params: PyTree) -> ShardedState:
            master = layout.shard(params)
            run = optimizer.in_auto(begin, layout, layout.inner_shardings(like))
            state = self._start(layout, master, run(master))
            return state._replace(residual=self.codecs.start(layout, params))

        return method.compiled_state(make, layout)

    @functools.cached_property
    def _optimizer(self) -> jax.stages.Wrapped:
        """The optimizer's update, jitted: traced once for `check` and the run."""
        update = functools.partial(checks.checked_update, self.inner)
        return jax.jit(update, inline=True)

    def advance(
        self,
        state: ShardedState,
        gradient: Reduced | PyTree,
        totals: Totals,
        extra: dict[str, Any],
    ) -> tuple[ShardedState, Point]:
        """Take the optimizer's step on what `Codec.decode` returns.

        MEAN_LOSS among the extra arguments of the optimizer stands for the mean loss of
        exactly these gradients.
        """
        layout = state.layout
        state = state._replace(calls_done=state.calls_done + 1)
        if self._accumulate is not None:
            state, gradient, totals = self._accumulate(state, gradient, totals)
        # Divided by W only in the optimizer's region: XLA slices the result of a manual
        # region wrongly where an optimizer takes a part of it
        shards = gradient
        if isinstance(gradient, Reduced):
            shards = layout.split(*gradient)
        # the devices of a model axis may have copies of the same leaf
        norm = optax.tree.norm(shards if layout.model_axes else gradient)
        norm = norm / jnp.where(totals.weight != 0, totals.weight, 1).astype(norm.dtype)
        # the optimizer's region need not carry through what it does not read
        fields = {"in_flight", "residual", "model_state", "carry"} & set(state._fields)
        aside = {field: getattr(state, field) for field in fields}

        def step(state, gradient, totals, extra):  # type: ignore[no-untyped-def]
            step = functools.partial(
                optimizer.guarded_step, self._optimizer, layout, extra
            )
            return self._advance(state, gradient, totals, step)

        state = state._replace(**dict.fromkeys(aside))
        point = jax.tree.map(lambda s: s.sharding, layout.shards)
        out_shardings = (layout.state_shardings(state), point)
        run = optimizer.in_auto(step, layout, out_shardings)
        state, point = run(state, shards, totals, extra)
        return state._replace(**aside), Point(point, norm)

    def _update(
        self,
        grads: PyTree,
        state: ShardedState,
        params: PyTree | None,
        weight: ArrayLike | None,
        extra: dict[str, Any],
    ) -> tuple[PyTree, ShardedState]:
        check_compiled()
        self.check_state(state)
        layout = state.layout
        if state.model_state is not None:
            raise ValueError(
                "the state carries a model state, which update cannot advance: use "
                "make_train_step, or start without model_state."
            )
        checks.check_params(layout, params)
        checks.check_grads(layout, grads)
        checks.check_extra(self.inner, extra)
        grads = jax.device_put(grads, layout.grads_shardings)
        params = jax.device_put(params, layout.params_shardings)
        weight = checks.place_weight(layout, weight)
        return self._updated(grads, state, params, weight, extra)

    @functools.cached_property
    def _updated(self) -> Callable[..., tuple[PyTree, ShardedState]]:
        return jax.jit(functools.partial(_plain_update, self))


def _plain_update(
    tx: ShardedMethod,
    grads: PyTree,
    state: ShardedState,
    params: PyTree,
    weight: jax.Array,
    extra: dict[str, Any],
) -> tuple[PyTree, ShardedState]:
    """Run a half-round on given gradients, with nothing beside the exchange."""
    layout, call = state.layout, state.calls_done
    # an edit of the parameters is undone, in few bits, too
    residual = tx.codecs.follow(layout, state.residual, params)
    state = state._replace(residual=residual)
    loss, value = None, extra.get("value")
    if tx.delayed and value is not None and jnp.ndim(value) == 0:
        # the optimizer gets it with the gradients that it is of
        loss = masked(weight != 0, jnp.asarray(value, layout.scalar) * weight)
        extra = extra | {"value": optimizer.MEAN_LOSS}
    sent = computed = layout.pack(grads, weight, loss, check=True)
    if tx.delayed:
        warming = call < tx.warmup
        assert is_delayed(state)
        sent, in_flight = state.in_flight, computed
        if tx.warmup:
            sent = choose(warming, computed, sent)
            in_flight = choose(warming, state.in_flight, in_flight)
        state = state._replace(in_flight=None)
    exchange = tx.exchange(tx.codecs.all[0])
    message = exchange.send(sent, state, extra)
    if tx.codecs.differ:  # only in how their parameters travel
        advanced = exchange.act(run(exchange.reduces, message)[0])
        ways = [functools.partial(_gathered, tx, c, params) for c in tx.codecs.all]
        received = jax.lax.switch(tx.codecs.turn(call), ways, advanced)
    else:
        received = exchange.decode(run(exchange.hops, message)[0], params)
    state = received.state
    if tx.delayed:
        state = state._replace(in_flight=in_flight)

    updates = jax.tree.map(
        lambda x, y: difference(wide(x), wide(y)), received.params, params
    )
    return updates, optimizer.in_place(layout, state)


def _gathered(
    tx: ShardedMethod, codec: Codec, params: PyTree, advanced: Advanced
) -> Received:
    exchange = tx.exchange(codec)
    return exchange.decode(run(exchange.gathers, advanced)[0], params)


def sharded(
    inner: optax.GradientTransformation,
    mesh: Mesh,
    options: ShardedOptions | method.CommonOptions,
    *,
    state: type,
    start: Start,
    advance: Advance,
    accumulate: Accumulate | None = None,
    delayed: bool,
    calls_per_step: int = 1,
    warmup: int = 0,
    layout: type[Layout] = Layout,
    round: Callable[[Exchange, bool], Round] = ShardedRound,
    known: type = ShardedOptions,
) -> ShardedMethod:
    """Build a method from how its state starts and how it advances.

    Args:
      inner: the optimizer that runs on the shards.
      mesh: the devices.
      options: further arguments of the user.
      state: the NamedTuple that is the method's state: a `State` with the fields
        `master`, `inner`, `residual` and, where the method is delayed, `in_flight`.
      start: (layout, master, inner_state) -> the initial state, without `residual`.
      advance: (state, gradient, totals, step) -> (state, point), shards of the sums and
        of where the parameters go. step(gradient, totals, inner_state, master,
        commit=True) -> (master, inner_state) is a guarded optimizer step on the mean;
        without `commit` inner_state stays. `calls_done` counts this call.
      accumulate: (state, gradient, totals) -> (state, gradient, totals): what the step
        is on, packed; None: what was reduced.
      delayed: whether a half-round communicates the gradients of the one before.
      calls_per_step: calls that make one step of the inner optimizer.
      warmup: how many first half-rounds of a delayed method send their own gradients.
      layout: how the shards lie.
      round: what a half-round does, from its exchange and whether it overlaps.
      known: the TypedDict of the options that exist.

    Raises:
      ValueError: the mesh lacks the axis, or an option is not one of its choices.
    """
    give = "an optax.GradientTransformation that is not sharded itself"
    checks.check_optimizer("the optimizer", inner, give)
    if isinstance(inner, ShardedMethod):
        raise ValueError(f"the optimizer is a {type(inner).__name__}: give {give}.")
    choices: Any = options
    bits = choices.get("gather_bits"), choices.get("reduce_bits")
    return ShardedMethod(
        inner=inner,
        **method.common_attributes(mesh, options, known),
        codecs=codecs(
            *bits, choices.get("resync_every", 0), calls_per_step=calls_per_step
        ),
        state_type=state,
        layout_type=layout,
        round_type=round,
        delayed=delayed,
        calls_per_step=calls_per_step,
        warmup=warmup,
        _start=start,
        _accumulate=accumulate,
        _advance=advance,
    )
