"""The train step: one half-round of any method, its communication hidden.

A half-round is a chain, reduce-scatter -> optimizer on the shard -> all-gather, and
beside it the gradients of the next one. *Fused*, for GPU and TPU: one program with two
microbatch loops, one behind each collective; barriers pin the order, because a compiler
left to itself hides at most one of the two. *Split*, for CPU processes: XLA:CPU runs a
program's collectives and loops one after the other, so communication and computation
are two programs dispatched from two host threads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from acco_jax.compiler import compiler_options as default_options
from acco_jax.compiler import naming_unknown_options
from acco_jax.gradients import Accumulator, Sums, axis_names
from acco_jax.layout import Layout, Pending
from acco_jax.local.base import LocalMethod
from acco_jax.transforms.base import Method
from acco_jax.transforms.checks import check_params
from acco_jax.transforms.state import find_state
from acco_jax.wire import Wire

PyTree = Any
barrier = lax.optimization_barrier
FORMS = ("auto", "fused", "split")


class TrainStep:
    """One half-round: (params, state, batch, counts, rng) -> params, state, metrics.

    Attributes:
      form: 'fused' or 'split'.
      compiler_options: what the fused program is compiled with.
    """

    def __init__(
        self, tx: Method, gradients: Accumulator, form: str, options: dict[str, Any]
    ) -> None:
        self.form, self.compiler_options = form, options
        self._tx, self._gradients = tx, gradients
        self._programs: dict[tuple[Any, ...], Any] = {}
        self._parts_of_others: dict[tuple[Any, ...], Any] = {}  # inside a caller's jit
        self._warmed: jax.Array | None = None  # the step count last seen past warm-up
        self._counted: tuple[Any, int] = None, 0  # half-rounds, on devices and here
        if form == "split":
            self._thread = ThreadPoolExecutor(1, "acco-communicate")
            accumulate = tx.accumulate or _accumulate
            self._accumulate = jax.jit(accumulate)
            self._metrics = jax.jit(
                _metrics, out_shardings=NamedSharding(gradients.mesh, P())
            )

    def _overlaps(self, state: Any) -> bool:
        """Whether this half-round communicates the last one's gradients."""
        if not (self._tx.delayed and self._tx.warmup):
            return self._tx.delayed
        if state.steps is self._warmed:
            return True
        return read(state.steps, "warmup_steps") >= self._tx.warmup

    def _wire(self, state: Any) -> Wire:
        """What this half-round communicates; reads a count once, to know it from then.

        A read in every half-round would wait for the devices.
        """
        if not self._tx.wires.differ:
            return self._tx.wires.all[0]
        held = state.wire.half_rounds
        seen, count = self._counted
        if held is not seen:
            count = read(held, "gather_bits that differ, or resync_every,")
        self._counted = held, count
        return self._tx.wires.at(count)

    def _program(
        self, state: Any, overlaps: bool, wire: Wire, nested: bool = False
    ) -> Any:
        """The program that returns the state where and as it came.

        Args:
          state: of the method.
          overlaps: see `_overlaps`.
          wire: see `_wire`.
          nested: whether it becomes part of a caller's program, which compiler options
            and donation belong to.
        """
        layout, key = state.layout, (state.layout, overlaps, wire)
        programs = self._parts_of_others if nested else self._programs
        if key not in programs:
            homes = layout.state_shardings(state)
            # metrics are the same everywhere, counts too: any process can read them
            rest = layout.sharding()
            out_shardings = (layout.params_shardings, homes, rest)
            donate: tuple[int, ...] = (1, 2)
            fn: Callable[..., Any] = functools.partial(
                _overlapped if overlaps else _synchronous, self._tx, wire
            )
            if self.form == "split":
                fn, donate = functools.partial(_communicate, self._tx, wire), (1,)
            programs[key] = jax.jit(
                fn,
                donate_argnums=() if nested else donate,
                out_shardings=out_shardings,
                compiler_options=None if nested else self.compiler_options or None,
            )
        return programs[key]

    def _nested(self, state: Any) -> Any:
        """The program as a part of a caller's, inside whose jit or scan we are."""
        overlaps, wire = self._overlaps(state), self._wire(state)
        return self._program(state, overlaps, wire, nested=True)

    def __call__(
        self,
        params: PyTree,
        state: Any,
        batch: PyTree,
        counts: Any = None,
        rng: Any = None,
        extra: dict[str, Any] | None = None,
    ) -> tuple[PyTree, Any, dict[str, Any]]:
        """Runs one half-round; see `make_train_step`."""
        self._tx.check_extra(extra or {})
        args = self._place(params, state, batch, counts, rng)
        if in_trace((args, extra)):
            check_fused(self.form)
            return self._nested(state)(self._gradients, *args, extra)
        overlaps, wire = self._overlaps(state), self._wire(state)
        with naming_unknown_options():
            if self.form == "fused":
                program = self._program(state, overlaps, wire)
                out = program(self._gradients, *args, extra)
            else:
                out = self._split(overlaps, wire, extra, *args)
        params, state, metrics = out
        self._warmed = state.steps if overlaps else None
        if self._tx.wires.differ:
            self._counted = state.wire.half_rounds, self._counted[1] + 1
        return params, state, metrics

    def lower(
        self,
        params: PyTree,
        state: Any,
        batch: PyTree,
        counts: Any = None,
        rng: Any = None,
        extra: dict[str, Any] | None = None,
        *,
        half_round: int = 1,
    ) -> Any:
        """The fused program for abstract (or real) arguments, as jax.jit's `lower`.

        Half-rounds whose gathers differ in bits have programs of their own; that of an
        odd one of acco is an estimate.
        """
        if self.form != "fused":
            raise ValueError(
                "only form='fused' is one program: build the step with it."
            )
        wire = self._tx.wires.at(half_round)
        args = (params, state, batch, counts, rng, extra)
        return self.lowered(*args, wire=wire)[0]

    def turns(self) -> dict[int, int]:
        """Half-rounds whose programs are all there are: how often each kind has a turn.

        For `lowered`, in a period after which they repeat.
        """
        wires = self._tx.wires
        found: dict[Wire, list[int]] = {}
        for k in range(wires.period):
            found.setdefault(wires.at(k), []).append(k)
        return {ks[0]: len(ks) for ks in found.values()}

    def lowered(
        self,
        params: PyTree,
        state: Any,
        batch: PyTree,
        counts: Any = None,
        rng: Any = None,
        extra: dict[str, Any] | None = None,
        *,
        overlaps: bool | None = None,
        half_round: int = 1,
        wire: Wire | None = None,
    ) -> tuple[Any, ...]:
        """The programs that one half-round runs, each as jax.jit's `lower` gives it.

        Args:
          params, state, batch, counts, rng, extra: as for a call, or abstract.
          overlaps: whether past a delayed method's warm-up; None: as if it had none.
          half_round: which one, as for `lower`.
          wire: what it communicates; None: what `half_round` says.
        """
        overlaps = self._tx.delayed if overlaps is None else overlaps
        wire = self._tx.wires.at(half_round) if wire is None else wire
        if self.form == "fused":
            program = self._program(state, overlaps, wire)
            fused = (self._gradients, params, state, batch, counts, rng, extra)
            return (program.lower(*fused),)
        layout, rest = state.layout, state
        work = (self._gradients, layout, params, batch, counts, rng)
        accumulate = self._accumulate.lower(*work)
        if overlaps:
            now, rest = state.pending, state._replace(pending=None)
        else:
            # where a method of its own leaves them, only its program knows
            now = placed(accumulate.compile(), self._accumulate, *work)[0]
        communicate = self._program(rest, overlaps, wire)
        return accumulate, communicate.lower(now, rest, params, extra)

    def compile(
        self,
        params: PyTree,
        state: Any,
        batch: PyTree,
        counts: Any = None,
        rng: Any = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        """Compiles what the first calls would; nothing runs and nothing is donated.

        Several processes can then meet before they start: a collective waits only so
        long for a process that is still compiling.
        """
        self._tx.check_extra(extra or {})
        args = self._place(params, state, batch, counts, rng)
        with naming_unknown_options():
            self._compile(extra, *args)

    def _compile(
        self,
        extra: dict[str, Any] | None,
        params: PyTree,
        state: Any,
        batch: PyTree,
        counts: Any,
        rng: Any,
    ) -> None:
        args = (params, state, batch, counts, rng, extra)
        for overlaps in self._forms(state):
            for wire in dict.fromkeys(self._tx.wires.all):
                for p in self.lowered(*args, overlaps=overlaps, wire=wire):
                    p.compile()

    def _forms(self, state: Any) -> set[bool]:
        """Whether half-rounds from this one on overlap: both, while a dpu warms up."""
        return {self._overlaps(state), self._tx.delayed}

    def _place(
        self, params: PyTree, state: Any, batch: PyTree, counts: Any, rng: Any
    ) -> tuple[Any, ...]:
        layout = getattr(state, "layout", None)
        if not isinstance(layout, Layout):
            find_state(state)  # says what it is instead
            raise ValueError(
                "the state is wrapped, but make_train_step runs a method's own stages: "
                "give it the state of tx.init for the tx it was built with."
            )
        self._tx.check_state(state)
        check_params(layout, params)
        return (
            jax.device_put(params, layout.params_shardings),
            state,
            self._gradients.place_batch(batch),
            self._gradients.place_counts(counts),
            rng,
        )

    def _split(
        self,
        overlaps: bool,
        wire: Wire,
        extra: dict[str, Any] | None,
        params: PyTree,
        state: Any,
        batch: PyTree,
        counts: Any,
        rng: Any,
    ) -> tuple[PyTree, Any, dict[str, Any]]:
        def communicate(now: Pending, rest: Any) -> Any:
            run = self._program(rest, overlaps, wire)
            return jax.block_until_ready(run(now, rest, params, extra))

        work = (state.layout, params, batch, counts, rng)
        if overlaps:
            moved = self._thread.submit(
                communicate, state.pending, state._replace(pending=None)
            )
            new, sums, counts = self._local(*work, moved)
            params, state, norm = moved.result()
            state = state._replace(pending=new)
        else:
            new, sums, counts = self._local(*work, None)
            params, state, norm = communicate(new, state)
        metrics = self._metrics(sums, counts, norm, state.steps)
        # Its sums over workers must not meet the next half-round's collectives, which
        # another thread starts, in another order on another process.
        return params, state, jax.block_until_ready(metrics)

    def _local(
        self,
        layout: Layout,
        params: PyTree,
        batch: PyTree,
        counts: jax.Array | None,
        rng: Any,
        communication: Future | None,
    ) -> tuple[Pending, Sums, jax.Array | None]:
        """Computes this half-round's gradients; returns when they are there."""
        del communication  # whatever it takes: the counts are given
        work = (layout, params, batch, counts, rng)
        out = self._accumulate(self._gradients, *work)
        return *jax.block_until_ready(out), counts


def in_trace(placed: PyTree) -> bool:
    """Whether a caller's jit, scan or eval_shape traces; then all placed is traced."""
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(placed))


def check_fused(form: str) -> None:
    """Raises a ValueError unless the step is one program, which may be part of one."""
    if form != "fused":
        raise ValueError(
            f"a step of form={form!r} runs several programs, which cannot be done "
            "inside jit or scan: use make_train_step(form='fused'), or a Python loop."
        )


def read(count: jax.Array, because: str) -> int:
    """A count, off the devices.

    Raises:
      ValueError: it is traced and has no value yet.
    """
    if isinstance(count, jax.core.Tracer):
        raise ValueError(
            f"with {because} a step reads off the devices which one is next, which "
            "cannot be done inside jit or scan: leave it out, or use a Python loop."
        )
    return int(jax.device_get(count))


def _overlapped(
    tx: Method,
    wire: Wire,
    gradients: Accumulator,
    params: PyTree,
    state: Any,
    batch: PyTree,
    counts: jax.Array | None,
    rng: Any,
    extra: dict[str, Any] | None,
) -> tuple[PyTree, Any, dict[str, Any]]:
    """A half-round whose every collective runs beside a part of the computation.

    Over several data axes (chips of a slice, slices) each has a reduce-scatter and an
    all-gather of its own, and the computation is split into as many parts.
    """
    layout = state.layout
    places = 2 * len(layout.order)

    def compute(k: int, begun: PyTree, params: PyTree) -> PyTree:
        return gradients.part(k, places, begun, params, batch, rng, counts)

    # What is small first: an all-reduce later would take the one asynchronous slot.
    totals, whole = layout.sum_small(state.pending)
    totals, whole, reduced, params = barrier(
        (totals, whole, state.pending.buffers, params)
    )

    work: Any = None
    for k, axis in enumerate(layout.order):
        state, reduced = wire.send(layout, state, reduced, axis, totals.weight)
        reduced = wire.reduce(layout, reduced, axis)
        work = compute(k, work, params)
        reduced, work, params = barrier((reduced, work, params))

    state = state._replace(pending=None)
    gradient = wire.receive(layout, reduced, whole)
    state, point = tx.advance(state, gradient, totals, extra or {}, losses=True)
    state, full = wire.join(layout, state, point.shards)
    # the norm too, which is a small all-reduce where only the metrics ask for it
    norm = point.grad_norm
    state, full, norm, work, params = barrier((state, full, norm, work, params))

    for k, axis in enumerate(reversed(layout.order), len(layout.order)):
        full = wire.gather(layout, full, axis)
        work = compute(k, work, params)
        # the last one too, or the gather is waited for before the loop
        full, work, params = barrier((full, work, params))

    params = wire.unpack(layout, state, full, params)
    pending, sums = pending_of(layout, work, gradients.microbatches == 1)
    state = state._replace(pending=pending)
    return params, state, _metrics(sums, counts, norm, state.steps)


def _synchronous(
    tx: Method,
    wire: Wire,
    gradients: Accumulator,
    params: PyTree,
    state: Any,
    batch: PyTree,
    counts: jax.Array | None,
    rng: Any,
    extra: dict[str, Any] | None,
) -> tuple[PyTree, Any, dict[str, Any]]:
    """A step that communicates the gradients it has just computed."""
    accumulate = tx.accumulate or _accumulate
    new, sums = accumulate(gradients, state.layout, params, batch, counts, rng)
    new = barrier(new)
    params, state, norm = _communicate(tx, wire, new, state, params, extra)
    return params, state, _metrics(sums, counts, norm, state.steps)


def _accumulate(
    gradients: Accumulator,
    layout: Layout,
    params: PyTree,
    batch: PyTree,
    counts: jax.Array | None,
    rng: Any,
) -> tuple[Pending, Sums]:
    """Local gradients, ready to be communicated. No collective."""
    places = 2 * len(layout.order)
    work: Any = None
    for k in range(places):  # as in the overlapped form: the same sums, bit for bit
        work = gradients.part(k, places, work, params, batch, rng, counts)
    return pending_of(layout, work, gradients.microbatches == 1)


def _communicate(
    tx: Method,
    wire: Wire,
    now: Pending,
    state: Any,
    params: PyTree,
    extra: dict[str, Any] | None,
) -> tuple[PyTree, Any, jax.Array]:
    """Reduce, advance, gather: the parameters of the next half-round."""
    layout = state.layout
    totals, whole = layout.sum_small(now)
    totals, whole, reduced = barrier((totals, whole, now.buffers))
    for axis in layout.order:
        state, reduced = wire.send(layout, state, reduced, axis, totals.weight)
        reduced = barrier(wire.reduce(layout, reduced, axis))
    gradient = wire.receive(layout, reduced, whole)
    state, point = tx.advance(state, gradient, totals, extra or {}, losses=True)
    state, full = wire.join(layout, state, point.shards)
    full = barrier(full)
    for axis in reversed(layout.order):
        full = barrier(wire.gather(layout, full, axis))
    return wire.unpack(layout, state, full, params), state, point.grad_norm


def pending_of(layout: Layout, sums: Sums, check: bool = False) -> tuple[Pending, Sums]:
    """Local gradients as they will be communicated, and the rest of the sums.

    Args:
      layout: of the shards.
      sums: over a half-round.
      check: whether gradients without weight may be other than zeros: of one microbatch
        (`Accumulator.part`); those of several were added up without them.
    """
    pending = layout.pack(sums.grads, sums.weight, sums.loss, check=check)
    return pending, sums._replace(grads=None)


def _metrics(
    sums: Sums, counts: jax.Array | None, norm: jax.Array, steps: jax.Array
) -> dict[str, Any]:
    """Means over the microbatches of this half-round; see `make_train_step`."""
    weight = sums.weight.sum()
    metrics = {
        "loss": sums.loss.sum() / jnp.where(weight != 0, weight, 1),
        "weight": weight,
        "grad_norm": norm,
        "step": steps,
        "aux": jax.tree.map(lambda x: x.sum(0), sums.aux),
    }
    return metrics if counts is None else metrics | {"counts": counts}


def make_train_step(
    loss_fn: Callable[..., Any],
    tx: Method | LocalMethod,
    *,
    mesh: Mesh,
    axis_name: str | tuple[str, ...] = "data",
    microbatches: int | str,
    form: str = "auto",
    compiler_options: dict[str, Any] | None = None,
    bounds: tuple[int, int] = (1, 16),
) -> TrainStep:
    """Build the step that computes gradients while it communicates the previous ones.

    Args:
      loss_fn: as for `acco_jax.local_gradients`; it must not communicate over
        `axis_name`, or nothing overlaps.
      tx: a method of this library (acco, zero1, diloco, ...), not wrapped.
      mesh: the devices, as given to `tx`.
      axis_name: the data axis or axes, as given to `tx`.
      microbatches: N, how many each worker's part of a batch holds for a step. Where a
        call is several inner steps of each worker (`tx.steps_per_call`, diloco's H),
        its batch holds as many times N, step after step. Or "adaptive": each
        process keeps adding microbatches until its communication is done (split form);
        or "replay:FILE": as a run that was adaptive logged them.
      form: 'fused' (one program), 'split' (two programs from two threads), or 'auto':
        split for several CPU processes, else fused.
      compiler_options: for the fused program; None takes
        `acco_jax.compiler_options` of the mesh's devices.
      bounds: of the adaptive counts, smallest and largest; batches hold the largest
        number of microbatches for each worker.

    Returns:
      step(params, state, batch, counts=None, rng=None, extra=None) -> (params, state,
      metrics). params and state are donated. batch, counts and rng are as for
      `local_gradients`. extra: keyword arguments (arrays) for the optimizer; one that
      takes any is also given `value` [], the weighted mean loss of exactly the
      gradients that it is given.
      metrics, all of this half-round: "loss" [] (the mean of microbatch means, or of
      targets where loss_fn gives a weight), "weight" [],
      "grad_norm" [] (of the mean gradient that the optimizer was given; where each
      worker has its own, the mean over workers and steps), "step" [] (steps of the
      inner optimizer so far; of local methods all, computed or not), "aux" (sums),
      and "counts" (n,) if given or found. Called inside jax.jit or lax.scan it becomes
      a part of that program: donation and compiler options are the caller's, and
      methods that choose between programs by a count refuse it.

    Raises:
      ValueError: in one line, before any device work, what does not fit.
    """
    if not isinstance(tx, Method | LocalMethod):
        raise ValueError(
            f"make_train_step needs a method's own stages, but tx is a "
            f"{type(tx).__name__}: pass acco_jax.acco(inner, ...) itself and put "
            "wrappers inside, around inner."
        )
    axis = axis_names(mesh, axis_name)
    if mesh != tx.mesh or axis != tx.axis:
        raise ValueError(
            f"the step is for axes {axis} of {mesh}, but tx was made for {tx.axis} of "
            f"{tx.mesh}: give both the same mesh and axis_name."
        )
    if form not in FORMS:
        raise ValueError(f"form is {form!r}: choose one of {', '.join(FORMS)}.")
    adaptive, log = _adaptive(microbatches)
    if adaptive:
        if not tx.delayed or form == "fused" or isinstance(tx, LocalMethod):
            raise ValueError(
                f"microbatches={microbatches!r} needs a method that communicates while "
                "it computes one gradient, and form='split': a synchronous step has no "
                "time to fill, a round of local steps a given length."
            )
        if not 1 <= bounds[0] <= bounds[1]:
            raise ValueError(
                f"bounds is {bounds}: give the smallest count, at least 1, then the "
                "largest."
            )
        microbatches, form = bounds[1], "split"
    if not isinstance(microbatches, int) or microbatches < 1:
        raise ValueError(
            f"microbatches is {microbatches!r}: it must be at least 1, or 'adaptive', "
            "or 'replay:FILE'."
        )
    device = mesh.devices.flat[0]
    if form == "auto":
        several = len({d.process_index for d in mesh.devices.flat}) > 1
        form = "split" if device.platform == "cpu" and several else "fused"
    if compiler_options is None:
        others = set(mesh.axis_names) - set(axis)
        compiler_options = default_options(
            device.device_kind, model_axis=any(mesh.shape[a] > 1 for a in others)
        )
    gradients = Accumulator(
        loss_fn, mesh, axis, microbatches, tx.accumulate_dtype
    ).placed()
    if isinstance(tx, LocalMethod):
        from acco_jax.local.step import LocalStep  # it builds on this module

        return LocalStep(tx, gradients, form, compiler_options)
    if adaptive:
        from acco_jax.adaptive import AdaptiveStep  # so does it

        return AdaptiveStep(tx, gradients, compiler_options, minimum=bounds[0], log=log)
    return TrainStep(tx, gradients, form, compiler_options)


def _adaptive(microbatches: int | str) -> tuple[bool, Path | None]:
    """Whether counts are found or repeated while running, and the log to repeat."""
    if isinstance(microbatches, str) and microbatches.startswith("replay:"):
        return True, Path(microbatches.removeprefix("replay:"))
    return microbatches == "adaptive", None


def placed(compiled: Any, program: Any, *args: Any) -> Any:
    """The abstract result of a compiled program, where it leaves it."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(program, *args),
        compiled.output_shardings,
    )
