"""The forms of a train step, and the choice among them."""

from collections.abc import Callable
from typing import Any

from acco_jax.compiler import compiler_options as default_options
from acco_jax.gradients import Accumulator
from acco_jax.methods.base import Method, check_method
from acco_jax.step.adaptive import Adaptive, AdaptiveStep, Replay
from acco_jax.step.fused import TrainStep
from acco_jax.step.split import SplitStep

FORMS = ("auto", "fused", "split")


def make_train_step(
    loss_fn: Callable[..., Any],
    tx: Method,
    *,
    microbatches: int | Adaptive | Replay,
    form: str = "auto",
    drop_nonfinite: bool = False,
    compiler_options: dict[str, Any] | None = None,
) -> TrainStep:
    """Build the step that computes gradients while it communicates the previous ones.

    Args:
      loss_fn: as for `acco_jax.local_gradients`; it must not communicate over the data
        axis, or nothing overlaps.
      tx: a method of this library (acco, zero1, diloco, ...), not wrapped.
      microbatches: N, how many each worker's part of a batch holds for a step. Where a
        call is several inner steps of each worker (`tx.steps_per_call`, diloco's H),
        its batch holds as many times N, step after step. Or `Adaptive(least, most)`:
        each process keeps adding microbatches until its communication is done (split
        form); or `Replay(log)`: as a run that was adaptive logged them.
      form: 'fused' (one program), 'split' (several programs from two threads), or
        'auto': split for several CPU processes, else fused.
      drop_nonfinite: whether a worker whose loss, weight or sum of gradients is not
        finite has no weight in that call, as if it had computed nothing; of local
        methods, in that inner step. Bad numbers then stay on the worker that made them.
        Its gradients are looked at before they are sent; nothing more is communicated.
      compiler_options: for the fused program; None takes
        `acco_jax.compiler_options` of the mesh's devices.

    Returns:
      step(params, state, batch, counts=None, rng=None, extra=None) -> (params, state,
      metrics). params and state are donated. batch, counts and rng are as for
      `local_gradients`. extra: keyword arguments (arrays) for the optimizer; one that
      takes any is also given `value` [], the weighted mean loss of exactly the
      gradients that it is given.
      metrics, all of this half-round: "loss" [] (the mean of microbatch means, or of
      targets where loss_fn gives a weight), "weight" [], "grad_norm" [] (of the mean
      gradient that the optimizer was given; where each worker has its own, the mean
      over workers and steps), "step" [] (steps of the inner optimizer so far; of local
      methods all, computed or not), "aux" (sums over the microbatches), "counts" (n,)
      if given or found, and with `drop_nonfinite` "dropped" (n,), 1 where a worker was
      (of local methods: in how many inner steps). Called inside jax.jit or lax.scan it
      becomes a part of that program: donation and compiler options are the caller's,
      and methods that choose between programs by a count refuse it.

    Raises:
      ValueError: in one line, before any device work, what does not fit.
    """
    check_method(tx)
    if form not in FORMS:
        raise ValueError(f"form is {form!r}: choose one of {', '.join(FORMS)}.")
    adaptive = microbatches if isinstance(microbatches, Adaptive | Replay) else None
    if adaptive and (not tx.delayed or tx.local or form == "fused"):
        raise ValueError(
            f"microbatches={microbatches!r} needs a method that communicates while it "
            "computes one gradient, and form='split': a synchronous step has no time "
            "to fill, a round of local steps a given length."
        )
    if drop_nonfinite and not tx.round(tx.phase(0)).drops:
        raise ValueError(
            "drop_nonfinite needs each worker's gradients before they are reduced, but "
            "tx reduces them inside the backward pass: leave it out, or use zero1."
        )
    most = adaptive.most if adaptive else microbatches
    if not isinstance(most, int) or most < 1:
        raise ValueError(
            f"microbatches is {microbatches!r}: give an integer of at least 1, "
            "Adaptive(least, most) or Replay(log, most)."
        )
    device = tx.mesh.devices.flat[0]
    model_axes = set(tx.mesh.axis_names) - set(tx.axis)
    model_axis = any(tx.mesh.shape[a] > 1 for a in model_axes)
    if form == "auto":
        several = len({d.process_index for d in tx.mesh.devices.flat}) > 1
        split = device.platform == "cpu" and several and not model_axis
        form = "split" if split else "fused"
    if form == "split" and model_axis:
        raise ValueError(
            f"form='split' sends from a thread beside the gradients, but here they "
            f"communicate, too, over {', '.join(sorted(model_axes))}, and devices "
            "might take the two in different orders: use form='fused'."
        )
    if compiler_options is None:
        compiler_options = default_options(device.device_kind, model_axis=model_axis)
    gradients = Accumulator(
        loss_fn, tx.mesh, tx.axis, most, tx.accumulate_dtype, drop_nonfinite
    ).placed()
    if adaptive:
        return AdaptiveStep(tx, gradients, compiler_options, adaptive)
    step = SplitStep if form == "split" else TrainStep
    return step(tx, gradients, compiler_options)
