"""Trials before a run: what is fastest on its devices."""

from collections.abc import Iterable

import jax
from absl import logging
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import multihost

from acco_jax.core.leaves import PyTree, Rng
from acco_jax.core.state import State
from acco_jax.run.preparation import (
    Experiment,
    batches,
    counts_of,
    initial,
    to_devices,
    with_first_half,
)
from acco_jax.step.first_half import smallest, step_seconds
from acco_jax.step.logged import LoggedStep

COMPILE_SECONDS = 1800  # a process may compile this much longer than another


def settled(experiment: Experiment) -> Experiment:
    """Return the experiment with one first half, chosen by timing if it has several.

    The smallest is taken that takes no longer. Nothing of the run changes: parameters
    and state are made for the trial, and its rows are read again.
    """
    e = experiment
    if not e.halves:
        return e
    chosen, said = 0, ""
    if len(e.halves) > 1 and e.workers > 1:
        params, state = initial(e)
        rows = batches(e)
        if jax.process_count() > 1:
            compile_together(e, params, state, rows.shapes())
        batch = to_devices(next(rows), e.mesh)
        found = step_seconds(
            e.step, e.halves, params, state, batch, counts_of(e), _key(e),
            calls=e.tx.calls_per_step,
        )  # fmt: skip
        chosen = smallest(found)
        times = [f"{seconds:.3g} s" for seconds in found.min(axis=0)]
        if isinstance(e.step, LoggedStep):
            e.step.alternate(e.halves[0])
        other = f"half of them {times[-1]}" if chosen == 0 else f"a quarter {times[0]}"
        said = f": {times[chosen]} a step, {other}"
    settled = with_first_half(e, chosen)
    if len(e.halves) > 1:
        first, per_step = settled.config.first_half, e.config.microbatches_per_step
        logging.info(
            "%s: first half %d of %d microbatches%s", e.config.method, first, per_step,
            said,
        )  # fmt: skip
    return settled


def compile_together(
    experiment: Experiment, params: PyTree, state: State, shapes: Iterable[PyTree]
) -> None:
    """Compile on all processes, before any of them communicates.

    A collective waits only 30 s for a late process, over gloo.
    """
    e = experiment
    for batch in shapes:
        rows = to_devices(batch, e.mesh)
        e.step.compile(params, state, rows, counts_of(e), _key(e))
    everyone = set(range(jax.process_count()))
    multihost.sync_global_processes(
        "ready to train", timeout=COMPILE_SECONDS, processes=everyone
    )


def _key(experiment: Experiment) -> Rng:
    """Return a key like those of a run's calls; None if the loss samples nothing."""
    e = experiment
    if not e.model.draws:
        return None
    replicated = NamedSharding(e.mesh, P())
    return jax.jit(lambda: jax.random.key(e.config.seed), out_shardings=replicated)()
