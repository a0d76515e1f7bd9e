"""The forms of a train step, and the choice of a form."""

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from acco_jax.core.compiler import compiler_options as default_options
from acco_jax.core.gradients import Accumulator
from acco_jax.core.leaves import PyTree, Rng
from acco_jax.core.loss import untraced
from acco_jax.core.microbatches import whole_numbers
from acco_jax.methods.method import Method, check_method, start
from acco_jax.step.adaptive import Adaptive, AdaptiveStep, LoggedSplitStep
from acco_jax.step.balance import Balanced
from acco_jax.step.balanced import BalancedStep
from acco_jax.step.first_half import first_halves, smallest, step_seconds
from acco_jax.step.fused import TrainStep
from acco_jax.step.halves import Halves
from acco_jax.step.replay import Replay
from acco_jax.step.split import SplitStep

FORMS = ("auto", "fused", "split")


def make_train_step(
    loss_fn: Callable[..., Any],
    tx: Method,
    *,
    microbatches: int | Adaptive | Balanced | Halves | Replay,
    form: str = "auto",
    drop_nonfinite: bool = False,
    compiler_options: dict[str, Any] | None = None,
) -> TrainStep:
    """Build the step that computes gradients while it communicates the previous ones.

    Args:
      loss_fn: as for `acco_jax.local_gradients`; it must not communicate over the data
        axis, or nothing overlaps. Where counts may differ this raises a ValueError.
        With a state that carries a model state (see `acco_jax.start`) it is (params,
        microbatch, rng, model_state) -> (loss, weight, aux, model_state).
      tx: a method of this library (acco, zero1, diloco, ...), not wrapped.
      microbatches: N, how many each worker's part of a batch holds: for a step, with
        acco for a half-round, which is half a step. Where a call is several inner steps
        of each worker (`tx.steps_per_call`, diloco's H), its batch holds that many
        times N, step after step. The alternatives:
        `Adaptive(least, most)`: each process keeps adding microbatches until its
        communication is done (form 'split'). `Balanced(total, most)`: counts follow
        the workers' measured speed, so that all end together (form 'fused').
        `Halves(first, second)`: acco's two half-rounds differ. `Replay(log)`: the
        counts that a run of one of these logged, in the same form.
      form: 'fused' (one program), 'split' (several programs from two threads), or
        'auto': split for several CPU processes and counts that adapt or are repeated,
        else fused.
      drop_nonfinite: whether a worker whose loss, weight or sum of gradients is not
        finite has no weight in that call, as if it had computed nothing; of local
        methods, in that inner step. Bad numbers then stay on the worker that made them.
        Gradients are checked before they are sent; nothing more is communicated.
      compiler_options: for the single program; None takes
        `acco_jax.compiler_options` of the mesh's devices.

    Returns:
      step(params, state, batch, counts=None, rng=None, extra=None) -> (params, state,
      metrics). params and state are donated (calls that overlap in form='split' take
      only what shards' owners hold); arrays in them that share memory are copied
      first. Give back what the last call returned: the state has a copy of the
      parameters (of gossip and streaming_diloco only of narrow ones), and edited ones
      then raise a ValueError. batch, counts and rng are as for `local_gradients`; of
      several processes each gives the same whole arrays, or its part by
      jax.make_array_from_process_local_data. With `Halves` every batch has room for the
      larger half; a call does not compute rows beyond its own count. extra: keyword
      arguments (arrays) for the optimizer; one that takes any is also given `value` [],
      the weighted mean loss of exactly the gradients that it is given.
      metrics, all of this half-round: "loss" [] (the mean of microbatch means, or of
      targets where loss_fn gives a weight; NaN without weight), "weight" [],
      "grad_norm" [] (of the mean gradient that the optimizer was given; where each
      worker has its own, the mean over workers and steps), "step" [] (steps of the
      inner optimizer so far; of local methods all, computed or not), "aux" (sums over
      the microbatches with weight), "counts" (n,) if given or found, and with
      `drop_nonfinite` "dropped" (n,), 1 where a worker was (of local methods: in how
      many inner steps). Called inside jax.jit or lax.scan it
      becomes a part of that program: donation and compiler options are the caller's,
      and methods that choose between programs by a count raise a ValueError.

    Raises:
      ValueError: tx is not a method of this library, `microbatches` or `form` is not
        one of the choices, they do not fit each other or tx, or `drop_nonfinite` is
        for a method that reduces gradients inside the backward pass.
    """
    check_method(tx)
    if form not in FORMS:
        raise ValueError(f"form is {form!r}: choose one of {', '.join(FORMS)}.")
    if drop_nonfinite and not tx.round(tx.phase(0)).drops:
        raise ValueError(
            "drop_nonfinite needs each worker's gradients before they are reduced, but "
            "tx reduces them inside the backward pass: leave it out, or use zero1."
        )
    microbatches = whole_numbers(microbatches)
    counted: Any = None if type(microbatches) is int else microbatches
    most: Any = microbatches if counted is None else getattr(counted, "most", None)
    if not isinstance(most, numbers.Integral) or most < 1:
        raise ValueError(
            f"microbatches is {microbatches!r}: give an integer of at least 1, "
            "Adaptive(least, most), Balanced(total, most), Halves(first, second) or "
            "Replay(log, most)."
        )
    most = int(most)
    form, model_axes = _form(tx, counted, form), _model_axes(tx)
    if compiler_options is None:
        kind = tx.mesh.devices.flat[0].device_kind
        compiler_options = default_options(kind, model_axis=bool(model_axes))
    gradients = Accumulator(
        untraced(loss_fn), tx.mesh, tx.axis, most, tx.accumulate_dtype, drop_nonfinite
    ).placed()
    if isinstance(counted, Balanced | Halves | Replay) and form == "fused":
        return BalancedStep(tx, gradients, compiler_options, counted)
    if isinstance(counted, Halves):
        alternating = LoggedSplitStep(tx, gradients, compiler_options)
        alternating.alternate(counted)
        return alternating
    if isinstance(counted, Adaptive | Replay):
        return AdaptiveStep(tx, gradients, compiler_options, counted)
    step = SplitStep if form == "split" else TrainStep
    return step(tx, gradients, compiler_options)


def find_halves(
    loss_fn: Callable[..., Any],
    tx: Method,
    params: PyTree,
    batch: PyTree,
    *,
    microbatches: int,
    rng: Rng = None,
    extra: dict[str, Any] | None = None,
    model_state: PyTree = None,
) -> Halves:
    """Return the smallest first half of acco's step that covers the communication.

    It times steps on the devices of `tx`, with copies of the parameters. All processes
    must call it, and get the same halves. Where nothing is sent beside computation (one
    worker, or the CPU devices of a process) the smaller one costs no time, and nothing
    is timed.

    Args:
      loss_fn: as for `acco_jax.make_train_step`.
      tx: `acco_jax.acco(...)`.
      params: as for `acco_jax.start`.
      batch: leaves (n * microbatches * b, ...): the rows of a whole step, as every call
        of a step with `microbatches` would take them.
      microbatches: of each worker in a step, both halves together; at least 2.
      rng: a key, if the loss samples.
      extra: arguments of the optimizer, as for a call of the step.
      model_state: as for `acco_jax.start`.

    Returns:
      The halves: a quarter of the microbatches first, or half of them.

    Raises:
      ValueError: `microbatches` is less than 2, `tx` has no two half-rounds, or the
        batch does not divide into the workers' microbatches.

    Example:
      halves = acco_jax.find_halves(loss_fn, tx, params, batch, microbatches=4)
      step = acco_jax.make_train_step(loss_fn, tx, microbatches=halves)
      rows = n * halves.most * b  # of each call's batch, for n workers
    """
    microbatches = whole_numbers(microbatches)
    if type(microbatches) is not int or microbatches < 2:
        raise ValueError(
            f"microbatches is {microbatches!r}: a step of two halves needs an integer "
            "of at least 2."
        )
    check_method(tx)
    if tx.calls_per_step != 2 or tx.warmup:
        raise ValueError(
            "find_halves is for acco, whose steps have two half-rounds: build another "
            "method's step with a number of microbatches."
        )
    found = [Halves(x, microbatches - x) for x in first_halves(microbatches)]
    step = make_train_step(loss_fn, tx, microbatches=found[0])
    whole = dataclasses.replace(step._gradients, microbatches=microbatches)
    whole.check_batch(batch)
    if len(found) == 1 or not step.overlaps:
        return found[0]
    workers = math.prod(tx.mesh.shape[a] for a in tx.axis)

    def part(x: jax.Array) -> jax.Array:  # the rows that the step's batches hold
        rows = x.reshape(workers, microbatches, -1, *x.shape[1:])[:, : found[0].most]
        return rows.reshape(-1, *x.shape[1:])

    copies = jax.tree.map(jnp.copy, (params, model_state))
    rows = jax.tree.map(part, batch)
    begun = start(tx, *copies)
    return found[smallest(step_seconds(step, found, *begun, rows, None, rng, extra))]


def _model_axes(tx: Method) -> list[str]:
    """Return the axes over which the devices of a group compute together."""
    names = set(tx.mesh.axis_names) - set(tx.axis)
    return sorted(a for a in names if tx.mesh.shape[a] > 1)


def _form(
    tx: Method, counted: Adaptive | Balanced | Halves | Replay | None, form: str
) -> str:
    """Return 'fused' or 'split'; raise a ValueError if it does not fit the counts."""
    axes, devices = _model_axes(tx), tx.mesh.devices.flat
    if isinstance(counted, Replay) and form == "auto" and (tx.local or not tx.delayed):
        form = "fused"  # the log of balanced counts: they have no adaptive ones
    finds = isinstance(counted, Adaptive) or (
        isinstance(counted, Replay) and form != "fused"
    )
    if isinstance(counted, Adaptive) and axes:
        raise ValueError(
            f"microbatches={counted!r} needs workers that communicate only in between, "
            f"but devices of one do, too, over {', '.join(axes)}: give a number, and "
            "counts=."
        )
    if finds and (not tx.delayed or tx.local or form == "fused"):
        raise ValueError(
            f"microbatches={counted!r} needs a method that communicates while it "
            "computes one gradient, and form='split': a synchronous step has no time "
            "to fill, a round of local steps a given length."
        )
    if isinstance(counted, Balanced) and (form == "split" or axes):
        raise ValueError(
            f"microbatches={counted!r} needs form='fused' and workers of one device "
            "each, which time a microbatch by themselves: give counts= instead."
        )
    if isinstance(counted, Halves) and (tx.calls_per_step != 2 or tx.warmup):
        raise ValueError(
            f"microbatches={counted!r} is for acco, whose steps have two half-rounds: "
            "give a number."
        )
    if form == "auto" and isinstance(counted, Adaptive | Balanced | Replay):
        form = "split" if finds else "fused"
    if form == "auto":
        several = len({d.process_index for d in devices}) > 1
        split = devices[0].platform == "cpu" and several and not axes
        form = "split" if split else "fused"
    if form == "split" and axes:
        raise ValueError(
            f"form='split' sends from a thread beside the gradients, but here they "
            f"communicate, too, over {', '.join(axes)}, and devices "
            "might take the two in different orders: use form='fused'."
        )
    return form
