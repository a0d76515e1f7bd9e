"""The train step as one program, each collective beside a part of the computation."""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from acco_jax.core.codec import Codecs, Residual
from acco_jax.core.collectives import Alone
from acco_jax.core.compiler import naming_unknown_options
from acco_jax.core.gradients import Accumulator
from acco_jax.core.half_round import Inputs, asynchronous, run_call
from acco_jax.core.layout import Layout
from acco_jax.core.leaves import PyTree, Rng
from acco_jax.core.microbatches import Counts, differ
from acco_jax.core.state import State
from acco_jax.core.workers import check_compiled, check_same, on_mesh, place
from acco_jax.methods import origins
from acco_jax.methods.method import Method, is_state
from acco_jax.methods.optimizer import pinned
from acco_jax.step import kept


class Arguments(NamedTuple):
    """The arguments of a call, as its programs take them."""

    params: PyTree
    state: State
    inputs: Inputs
    extra: dict[str, Any]


class TrainStep:
    """One call of a method: (params, state, batch, ...) -> params, state, metrics."""

    form = "fused"  # or 'split'
    compiler_options: dict[str, Any]  # of the program that communicates

    def __init__(
        self, tx: Method, gradients: Accumulator, compiler_options: dict[str, Any]
    ) -> None:
        self.compiler_options = compiler_options
        self._tx, self._gradients = tx, gradients
        microbatches = gradients.microbatches * tx.steps_per_call
        self._batches = dataclasses.replace(gradients, microbatches=microbatches)
        self._programs: dict[tuple[Any, ...], Any] = {}
        # by name: those that `compile` has made, and those of an earlier process
        self._compiled: dict[str, list[jax.stages.Compiled]] = {}
        self._kept: kept.Programs = {}
        self._reads = kept.reads()
        self._alone = Alone(self._batches, tx.local)
        self._compared = False  # whether processes have given one batch
        # the parameters and the state that were returned last
        self._returned: list[weakref.ref[Any]] = []
        self._numbers_calls = bool(tx.changes)  # whether they differ by their number
        # the counter of the state that was returned last, and its value
        self._counted: tuple[jax.Array | None, int] = None, 0

    @property
    def overlaps(self) -> bool:
        """Whether a delayed method's call computes while it communicates."""
        return asynchronous(self._gradients)

    def __call__(
        self,
        params: PyTree,
        state: State,
        batch: PyTree,
        counts: Counts = None,
        rng: Rng = None,
        extra: dict[str, Any] | None = None,
    ) -> tuple[PyTree, State, dict[str, Any]]:
        """Run one call; see `acco_jax.make_train_step`."""
        check_compiled()
        given = self._arguments(params, state, batch, counts, rng, extra)
        args = self._donated(given)
        fresh = args is given  # as the last call returned them
        if not self._compared:
            check_same("batch", batch, self._tx.mesh)
            self._compared = True
        args = self._placed(args)
        traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args))
        if traced:
            self._refuse_trace()
        elif not fresh and self._begins(params, state):
            origins.check(args.params, args.state)
        call = self._call(state)
        phase = self._tx.phase(call)
        if traced:
            return self._program(phase, state, nested=True)(*self._followed(args))
        args = args if fresh else self._followed(args)
        self._returned = []  # a call that fails may have taken their memory
        with naming_unknown_options():
            params, state, metrics = self._run(phase, args)
        self._counted = state.calls_done, call + 1
        self._returned = [weakref.ref(x) for x in jax.tree.leaves((params, state))]
        return params, state, metrics

    def lower(
        self, *args: Any, call: int | None = None, **named: Any
    ) -> jax.stages.Lowered:
        """Return the program for abstract or real arguments, as jax.jit's `lower`.

        Args:
          *args: of a call; `named` are its keyword arguments.
          call: its number, counted from the end of a warm-up: calls that
            communicate differently have programs of their own. An odd one of acco is
            an estimate. None: of acco an estimate, of others any.
        """
        if self.form != "fused":
            raise ValueError(
                "only form='fused' is one program: build the step with it."
            )
        return self.lowered(*args, call=call, **named)[0]

    def lowered(
        self, *args: Any, call: int | None = None, **named: Any
    ) -> tuple[jax.stages.Lowered, ...]:
        """Return the programs that one call runs; arguments are as for `lower`."""
        if call is None:
            call = self._tx.calls_per_step - 1
        number = self._tx.warmup + call
        args = self._placed(self._described(self._arguments(*args, **named)))
        args = args._replace(state=place(args.state, args.state.shardings()))
        args = self._expected(number, args)
        return tuple(self._lowered(self._tx.phase(number), args).values())

    def turns(self) -> dict[int, int]:
        """Map each distinct half-round to how often it occurs in one period.

        The half-rounds are numbers for `lower` and `lowered`.
        """
        tx, times = self._tx, dict[int, int]()
        numbers: dict[Hashable, int] = {}
        for k in range(tx.period):
            first = numbers.setdefault(tx.phase(tx.warmup + k), k)
            times[first] = times.get(first, 0) + 1
        return times

    def compile(self, *given: Any, **named: Any) -> None:
        """Compile the next calls' programs; nothing runs and nothing is donated.

        Several processes can then meet before they start: a collective times out if a
        process compiles too long. Arguments are those of a call. After `take` this
        does nothing.
        """
        if self._kept:
            return
        placed = self._placed(self._arguments(*given, **named))
        tx, call = self._tx, self._call(placed.state)
        warming = range(call, min(tx.warmup, call + tx.period))
        steady = (tx.warmup + k for k in self.turns())
        with naming_unknown_options():
            for phase in {tx.phase(k) for k in (*warming, *steady)}:
                for args in self._variants(placed):
                    for name, program in self._lowered(phase, args).items():
                        compiled = program.compile()
                        found = self._compiled.setdefault(name, [])
                        if kept.form(compiled) not in map(kept.form, found):
                            found.append(compiled)

    def keep(self, state: State) -> bytes | None:
        """Return the programs that `compile` has made, for a later process's `take`.

        That process must have the same code, devices and arguments. None on CPU, if one
        of them may come from JAX's compilation cache: XLA cannot write it again.

        Raises:
          Exception: of any kind, if the backend or a tree of the user's cannot be kept.
        """
        devices = list(self._tx.mesh.devices.flat)
        if devices[0].platform == "cpu" and kept.reads() > self._reads:
            return None
        return kept.dumped(self._compiled, self._shared(state), devices)

    def take(self, programs: bytes, state: State) -> None:
        """Run the programs that an earlier process kept, instead of compiling."""
        devices = self._tx.mesh.devices.flat
        self._kept = kept.loaded(programs, self._shared(state), list(devices))

    def forget(self) -> None:
        """Compile after all: undo `take`."""
        self._kept = {}

    def _shared(self, state: State) -> list[object]:
        """Return what programs' arguments hold that belongs to this process."""
        return [*kept.layouts(state), *kept.functions(self._gradients.loss_fn)]

    def _expected(self, call: int, args: Arguments) -> Arguments:
        """Return the arguments in the form that this call gives to its programs."""
        return args

    def _variants(self, args: Arguments) -> list[Arguments]:
        """Return all forms that arguments may take in the calls of one phase."""
        return [args]

    def _arguments(
        self,
        params: PyTree,
        state: State,
        batch: PyTree,
        counts: Any = None,
        rng: Rng = None,
        extra: dict[str, Any] | None = None,
    ) -> Arguments:
        inputs = Inputs(self._gradients, batch, counts, rng)
        return Arguments(params, state, inputs, self._tx.arguments(extra or {}))

    def _placed(self, args: Arguments) -> Arguments:
        """Return the arguments, checked and on their devices."""
        inputs, params = args.inputs, self._tx.place(args.params, args.state)
        batch, counts = self._batches.place_batch(inputs.batch), inputs.counts
        if self._may_differ(counts) and not self._kept:
            self._alone(params, batch, inputs.rng, model_state(args.state))
        if not isinstance(counts, jax.ShapeDtypeStruct):
            counts = self._gradients.place_counts(counts)
        rng, extra = on_mesh((inputs.rng, args.extra), self._tx.mesh)
        inputs = inputs._replace(batch=batch, counts=counts, rng=rng)
        return args._replace(params=params, inputs=inputs, extra=extra)

    def _may_differ(self, counts: Counts) -> bool:
        """Return whether workers may compute different numbers of microbatches."""
        return differ(counts)

    def _described(self, args: Arguments) -> Arguments:
        """Return the arguments without the values of parameters, state and batch."""
        mesh = self._tx.mesh

        def one(x: ArrayLike | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            if isinstance(x, jax.ShapeDtypeStruct):
                return x
            at = getattr(x, "sharding", None)
            at = at if getattr(at, "mesh", None) == mesh else None
            dtype = x.dtype if isinstance(x, jax.Array) else jnp.result_type(x)
            return jax.ShapeDtypeStruct(np.shape(x), dtype, sharding=at)

        params, state, batch = jax.tree.map(one, (*args[:2], args.inputs.batch))
        inputs = args.inputs._replace(batch=batch)
        return args._replace(params=params, state=state, inputs=inputs)

    def _donated(self, args: Arguments) -> Arguments:
        """Return the arguments, parameters and state copied where they share memory.

        Arrays that the last call returned share none, and are not compared.

        Raises:
          ValueError: if an earlier call has taken the memory of one, or the parameters
            are not those that were returned with the state.
        """
        given, treedef = jax.tree.flatten((args.params, args.state))
        others = jax.tree.leaves((args.inputs, args.extra))
        ours = {id(x): x for ref in self._returned if (x := ref()) is not None}
        ids = set(map(id, given))
        fresh = ids <= ours.keys() and ours.keys().isdisjoint(map(id, others))
        fresh = fresh and not any(x.is_deleted() for x in given)
        if len(ids) == len(given) and fresh:
            return args
        _check_kept(params=args.params, state=args.state)
        held, own = (
            set(map(id, jax.tree.leaves(x)))
            for x in (_parameters_of(args.state), args.params)
        )
        if held and held <= ours.keys() and not own <= ours.keys():
            raise ValueError(
                "the last call returned this state, but not these parameters, and the "
                "state holds them, too: give both as they were returned, put "
                "projections into the inner optimizer, or begin from other parameters "
                "with acco_jax.start."
            )
        seen = {where for x in others for where in _memory(x)}
        for i, x in enumerate(given):
            here = _memory(x)
            if not seen.isdisjoint(here):
                given[i] = jnp.copy(x)
            seen |= here
        params, state = jax.tree.unflatten(treedef, given)
        return args._replace(params=params, state=state)

    def _begins(self, params: PyTree, state: State) -> bool:
        """Return whether the state may have been begun from other parameters."""
        if _parameters_of(state) is None:
            return False
        same = origins.begun_from(params, state)
        return self._counted[0] is None if same is None else not same

    def _followed(self, args: Arguments) -> Arguments:
        """Return the arguments, the state's copy of the parameters being these ones.

        Few bits of differences to it are gathered, so that an edit would stay.
        """
        residual = getattr(args.state, "residual", None)
        if residual is None or residual.replica is None:
            return args
        codecs: Codecs = getattr(self._tx, "codecs")  # noqa: B009, a sharded method's
        residual = _follow(codecs, args.state.layout, residual, args.params)
        return args._replace(state=args.state._replace(residual=residual))

    def _refuse_trace(self) -> None:
        """Raise a ValueError unless the step may be part of a caller's program."""

    def _call(self, state: State) -> int:
        """Return the number of the next call; block only after a restore."""
        counter, call = self._counted
        if not self._numbers_calls or state.calls_done is counter:
            return call
        if isinstance(state.calls_done, jax.core.Tracer):
            raise ValueError(
                f"with {self._tx.changes} a step reads off the devices which one is "
                "next, which cannot be done inside jit or scan: leave it out, or use a "
                "Python loop."
            )
        return int(jax.device_get(state.calls_done))

    def _run(
        self, phase: Hashable, args: Arguments
    ) -> tuple[PyTree, State, dict[str, Any]]:
        return self._program(phase, args.state)(*args)

    def _lowered(
        self, phase: Hashable, args: Arguments
    ) -> dict[str, jax.stages.Lowered]:
        """Return the programs of a call by name."""
        return {str(phase): self._program(phase, args.state).lower(*args)}

    def _jit(self, name: str, function: Callable[..., Any], **options: Any) -> Any:
        """Return a function compiled by jax.jit, or by the process that kept it."""
        program = jax.jit(function, **options)
        return kept.Kept(program, self._kept[name]) if name in self._kept else program

    def _program(
        self, phase: Hashable, state: State, nested: bool = False
    ) -> jax.stages.Wrapped:
        """Return the program of a phase, which leaves the state where it came from.

        If it is `nested` in a caller's program, compiler options and donation are the
        caller's.
        """
        key = self._key(phase, state, nested)
        if key not in self._programs:
            # metrics are replicated: any process can read them
            out_shardings = (*self._out_shardings(state), state.layout.sharding())
            self._programs[key] = self._jit(
                "nested" if nested else str(phase),
                functools.partial(run_call, self._tx.round(phase)),
                donate_argnums=() if nested else (0, 1),
                out_shardings=out_shardings,
                compiler_options=None if nested else self.compiler_options or None,
            )
        return self._programs[key]

    def _key(
        self, phase: Hashable, state: State, nested: bool = False
    ) -> tuple[Any, ...]:
        like = state.layout, jax.tree.structure(model_state(state))
        return like, phase, nested

    def _out_shardings(self, state: State) -> tuple[PyTree, State]:
        """Return the shardings of the parameters of the loop and of the state."""
        layout = state.layout
        rows = layout.grads_shardings if self._tx.local else layout.params_shardings
        return rows, state.shardings()


@functools.partial(jax.jit, static_argnums=(0, 1))
def _follow(
    codecs: Codecs, layout: Layout, residual: Residual, params: PyTree
) -> Residual:
    found: Any = codecs.follow(layout, residual, params)
    homes = jax.tree.map(lambda x: x.sharding, layout.shards)
    return found._replace(replica=pinned(found.replica, homes))


def model_state(state: State) -> PyTree:
    return getattr(state, "model_state", None)


def _parameters_of(state: State) -> PyTree:
    """Return the parameters that a state has, from which the next ones follow."""
    outer = getattr(state, "outer", None)  # of a round, which steps from its own
    return getattr(outer if is_state(outer) else state, "master", None)


def _check_kept(**trees: PyTree) -> None:
    """Raise a ValueError if an array was donated: on several devices JAX may crash."""
    for path, x in jax.tree_util.tree_leaves_with_path(trees):
        concrete = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
        if concrete and x.is_deleted():
            (root, *inner) = path
            raise ValueError(
                f"{root.key}{jax.tree_util.keystr(tuple(inner))} was given to an "
                "earlier call, which has used its memory: params, state, metrics = "
                "step(params, state, batch) returns the arrays to give next."
            )


def _memory(x: object) -> set[Hashable]:
    """Return where an array lies on this process's devices, or which object it is."""
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
        return {id(x)}
    if x.is_deleted():
        return {id(x)}
    try:
        shards = x.addressable_shards
        return {(s.device, s.data.unsafe_buffer_pointer()) for s in shards}
    except jax.errors.JaxRuntimeError:  # a backend that has no pointers
        return {id(x)}
