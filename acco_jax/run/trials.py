"""Trials before a run: what is fastest on its devices."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict
from orbax.checkpoint import multihost

from acco_jax.command.files import read_object
from acco_jax.core.leaves import PyTree, Rng
from acco_jax.core.state import State
from acco_jax.methods import METHODS, gaps
from acco_jax.run import measures, preparation
from acco_jax.run.build import optimizers
from acco_jax.run.config import fields as configs
from acco_jax.run.preparation import with_first_half
from acco_jax.run.prepared import Experiment, batches, counts_of, initial, to_devices
from acco_jax.run.state.memory import MemoryCopies
from acco_jax.step.first_half import (
    LONGER,
    ratios,
    smallest,
    step_seconds,
)
from acco_jax.step.halves import Halves
from acco_jax.step.logged import LoggedStep

NEAR = 1.5  # times the fastest, at most: those that are timed again in turns,
TURNS = 5  # at least; until one is left that takes
CLOSE = 1.1  # times the fastest, at most, or after
MOST_TURNS = 15  # then the first that takes at most `LONGER` times as long
COMPILE_SECONDS = 1800  # a process may compile this much longer than another


def with_method(
    config: ConfigDict, workdir: Path, devices: Sequence[jax.Device] | None = None
) -> ConfigDict:
    """Return the config with a method in place of 'auto'.

    It is that of the run in the workdir, or else the fastest of those whose loss is
    within the tolerance: a few steps of each are timed on the devices, and those
    that are nearly as fast in turns.

    Args:
      config: of the experiment, checked.
      workdir: as for `acco_jax.run.preparation.prepare`.
      devices: likewise.
    """
    if config.method != "auto":
        return config
    hosts = jax.process_count() if jax.local_device_count() > 1 else 1
    if (path := workdir / "config.json").exists():
        old = read_object(path)
        method, options = old.get("method"), old.get("method_options")
        if isinstance(method, str) and method in METHODS and isinstance(options, dict):
            divides = "reduce_bits" in options  # among the hosts that are there now
            asked = config.first_half
            if method == "acco" and asked == "auto":
                config = configs.with_quarters(config)
            config = _of_method(config, method, options, hosts if divides else None)
            if asked != "auto":
                return config
            return configs.with_first_half(config, old.get("first_half", "auto"))
        raise ValueError(f"{path} is damaged: restore it, or use another workdir.")
    found = candidates(config, hosts)
    if len(found) == 1:
        [(name, only)] = found.items()
        logging.info("method auto: %s, the only one", name)
        return only
    built = (
        (name, preparation.build(each, workdir, devices))
        for name, each in found.items()
    )
    return found[fastest(built)]


def candidates(config: ConfigDict, hosts: int) -> dict[str, ConfigDict]:
    """Return the configs, by name, whose loss is within the tolerance.

    Those of acco have a first half of a quarter unless the config says another, as
    their losses are of a quarter: with less than four microbatches smaller ones.

    Args:
      config: of the experiment, checked.
      hosts: that have several devices, or 1.
    """
    name, divided = config.optimizer.name, config
    if config.first_half == "auto":
        divided = configs.with_quarters(config)
    per_step = divided.microbatches_per_step
    divides = per_step % 2 == 0  # into the calls of a step of acco
    found, others = gaps.allowed(
        name, config.tolerance, uneven=divides and optimizers.uneven(divided)
    )
    if not divides:
        others = [f"acco: microbatches_per_step={per_step} is odd"]
    for why in others:
        logging.info("method auto, with %s: not %s", name, why)
    return {
        c.name: _of_method(
            config if c.gaps is None else divided,
            c.method,
            c.options,
            hosts if c.divides else None,
        )
        for c in found
    }


def fastest(built: Iterable[tuple[str, Experiment]], *, compiled: bool = False) -> str:
    """Return the name of the experiment whose steps take least, by timing some of each.

    Where several take as long it is the first, and the last that is asked for leaves no
    communication to overlap. Those that are nearly as fast are compared in turns, more
    of them where they are close.

    Args:
      built: with their names; the first is zero1.
      compiled: whether the steps are, for what they are given here.
    """
    kept, seconds = dict[str, Experiment](), dict[str, float]()
    computing = 0.0
    for name, e in built:
        if e.workers == 1:
            logging.info("method auto: %s, one worker", name)
            return name
        if not (e.config.lora.rank or e.config.lora.ranks):
            kept[name] = e  # of a frozen model the devices hold one at a time
        if not computing:
            computing = measures.gradient_seconds(e, initial(e)[0], per_token=False)
            logging.info("method auto: gradients take %.3g s a step", computing)
        seconds[name] = float(np.median(_timed(e, [None], compiled=compiled)))
        logging.info("method auto: %s takes %.3g s", name, seconds[name])
        if seconds[name] <= LONGER * computing:
            break
    near = [name for name in kept if seconds[name] <= NEAR * min(seconds.values())]
    if len(near) > 1:
        chosen, again = _in_turns({name: kept[name] for name in near})
        seconds |= again
    else:
        least = LONGER * min(seconds.values())
        chosen = next(name for name, s in seconds.items() if s <= least)
    logging.info("method auto: %s", chosen)
    if (exposed := 1 - computing / seconds[chosen]) > 1 / 3:
        zero1 = next(iter(seconds.values()))
        logging.warning(
            "%.0f %% of a step is not its gradients: %s",
            100 * exposed, gaps.where_exposed(zero1 / computing - 1),
        )  # fmt: skip
    return chosen


def _in_turns(near: dict[str, Experiment]) -> tuple[str, dict[str, float]]:
    """Return the name of the fastest of several, and the seconds of each one's step.

    They are timed in turns, and after each turn from `TURNS` on only those are left
    that are close to the fastest.
    """
    left, turns, seconds = list(near), np.empty((0, len(near))), dict[str, float]()
    while len(left) > 1 and len(turns) < MOST_TURNS:
        timed = [_timed(near[name], [None], compiled=True) for name in left]
        turns = np.vstack([turns, [np.median(x) for x in timed]])
        if len(turns) < TURNS:
            continue
        seconds |= dict(zip(left, np.median(turns, axis=0).tolist(), strict=True))
        close = ratios(turns) <= CLOSE
        left = [name for name, kept in zip(left, close, strict=True) if kept]
        turns = turns[:, close]
    for name, typical in seconds.items():
        logging.info("method auto: %s takes %.3g s again", name, typical)
    return left[smallest(turns)], seconds


def _of_method(
    config: ConfigDict, method: str, options: Mapping[str, Any], domains: int | None
) -> ConfigDict:
    config = config.copy_and_resolve_references()
    config.method = method
    config.method_options = ConfigDict(dict(options), type_safe=False)
    if config.domains is None and domains is not None and domains > 1:
        config.domains = domains
    return config


def _timed(
    experiment: Experiment, halves: Sequence[Halves | None], *, compiled: bool = False
) -> np.ndarray:
    """Time steps of a run that has not begun; see `step_seconds`."""
    e = experiment
    params, state = initial(e)
    rows = batches(e)
    if not compiled:
        compile_together(e, params, state, rows.shapes())
    batch = to_devices(next(rows), e.mesh)
    return step_seconds(
        e.step, halves, params, state, batch, counts_of(e), _key(e),
        calls=e.tx.calls_per_step,
    )  # fmt: skip


def settled(experiment: Experiment, *, compiled: bool = False) -> Experiment:
    """Return the experiment with one first half, chosen by timing if it has several.

    The smallest is taken that takes no longer; where nothing is sent beside computation
    that is the smallest, untimed. Nothing of the run changes: parameters and state are
    made for the trial, and its rows are read again. `compiled`: as for `fastest`.
    """
    e = experiment
    if not e.halves:
        return e
    chosen, said = 0, ""
    if not e.step.overlaps:
        said = ", as nothing is sent beside computation here"
    elif len(e.halves) > 1:
        logging.info("timing two sizes of the first half; each is compiled first")
        found = _timed(e, e.halves, compiled=compiled)
        chosen = smallest(found)
        times = [f"{seconds:.3g} s" for seconds in np.median(found, axis=0)]
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
    experiment: Experiment,
    params: PyTree,
    state: State,
    shapes: Iterable[PyTree],
    memory: MemoryCopies | None = None,
) -> None:
    """Compile on all processes, before any of them communicates.

    The others wait here for one that compiles longer, not in a collective. A process
    that is restarted takes the programs that it finds in memory.
    """
    e = experiment
    take, forget = functools.partial(e.step.take, state=state), e.step.forget
    taken = memory and memory.take_programs(take, forget)
    for batch in shapes:
        rows = to_devices(batch, e.mesh)
        e.step.compile(params, state, rows, counts_of(e), _key(e))
    everyone = set(range(jax.process_count()))
    if len(everyone) > 1:
        multihost.sync_global_processes(
            "ready to train", timeout=COMPILE_SECONDS, processes=everyone
        )
    if memory and not taken:
        memory.keep_programs(lambda: e.step.keep(state))


def _key(experiment: Experiment) -> Rng:
    """Return a key like those of a run's calls; None if the loss samples nothing."""
    e = experiment
    if not e.model.draws:
        return None
    replicated = NamedSharding(e.mesh, P())
    return jax.jit(lambda: jax.random.key(e.config.seed), out_shardings=replicated)()
