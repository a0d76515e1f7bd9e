"""Measurements of a run at its end: bytes sent and held, the gradients' time."""

from typing import Any

import jax
from absl import logging

from acco_jax.core.leaves import PyTree
from acco_jax.core.loss import with_arrays
from acco_jax.core.state import State
from acco_jax.run.config import fields as configs
from acco_jax.run.observe import timing
from acco_jax.run.prepared import Experiment, batches, counts_of, to_devices
from acco_jax.run.state import worlds
from acco_jax.schedule import footprint as footprints


def footprint(experiment: Experiment, params: PyTree, state: State) -> dict[str, Any]:
    """Return a worker's bytes sent in the whole run, and a device's bytes held."""
    e = experiment
    arrays = (params, state, to_devices(next(batches(e)), e.mesh), counts_of(e))
    turns, sent = e.step.turns(), None
    try:
        if len({str(world.axes) for _, world in worlds.recorded(e.workdir)}) > 1:
            raise ValueError("the run has had other numbers of devices")
        period_bytes = sum(
            times * footprints.bytes_sent(*programs, mesh=e.mesh)
            for k, times in turns.items()
            for programs in [e.step.lowered(*arrays, call=k)]
        )
        sent = round(e.total_calls * period_bytes / sum(turns.values()))
    except ValueError as error:  # a finished run must not fail for it
        logging.warning("bytes_sent_per_worker is not known: %s", error)
    carried = jax.tree.leaves(with_arrays(e.loss_fn))
    frozen = [x for x in carried if isinstance(x, jax.Array)]
    return {
        "bytes_sent_per_worker": sent,
        "state_bytes_per_device": footprints.bytes_held((params, state, frozen)),
    }


def padded(experiment: Experiment) -> bool:
    """Return whether rows are padded examples, of instructions or conversations.

    Their prompts and padding are computed but are not targets. Batches differ in width
    and in targets, so the time of one batch per target is not that of another.
    """
    return experiment.corpus.train_spans is not None


def gradient_seconds(
    experiment: Experiment, params: PyTree, *, per_token: bool = True
) -> float:
    """Time local gradients by themselves: seconds of all workers, per token or call.

    One batch is timed. Do not ask for seconds per token where `padded`.
    """
    e, counts = experiment, counts_of(experiment)
    steps, found = e.tx.steps_per_call, batches(e)
    batch = to_devices(next(found), e.mesh)
    found.computed([e.capacity] * e.workers)
    seconds = timing.gradient_seconds(
        e.loss_fn,
        e.mesh,
        params,
        batch,
        None if counts is None else counts * steps,
        microbatches=e.capacity * steps,
        accumulate_dtype=configs.dtype("accumulate_dtype", e.config.accumulate_dtype),
    )
    return seconds / found.targets if per_token else seconds
