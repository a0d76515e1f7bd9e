"""What preparation makes: an experiment, its batches, its parameters and states."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from etils import epath
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

import acco_jax
from acco_jax import data
from acco_jax.core.groups import data_axes, members
from acco_jax.core.leaves import with_shardings
from acco_jax.methods.reshard import moved
from acco_jax.models.model import Model
from acco_jax.run.build import meshes
from acco_jax.run.state import counts, worlds
from acco_jax.run.state.checkpoints import Checkpoints
from acco_jax.run.state.workdir import check_held, own
from acco_jax.run.trained import trained_runs
from acco_jax.run.trained.trained_runs import checkpoint_folder

PyTree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """Checked parts of a run, before any training."""

    config: ConfigDict
    workdir: Path
    mesh: Mesh
    corpus: data.Corpus
    model: Model
    tx: acco_jax.Method
    step: acco_jax.TrainStep
    schedule: optax.Schedule
    microbatches: int  # as of `Amounts`
    varying: counts.Varying | None
    halves: list[acco_jax.Halves]
    capacity: int
    identity: dict[str, Any]  # fields that distinguish it from other runs
    loss_fn: Callable[..., Any]  # as of `Trainable`
    init: Callable[[], PyTree]
    start: Callable[[], PyTree]
    specs: PyTree
    began: float  # when its process or its preparation began, in seconds since 1970

    @functools.cached_property
    def checkpoints(self) -> Checkpoints:
        """Checkpoints, opened on first access: a rejected run leaves no folder."""
        folder, keep = self.checkpoint_folder, self.config.keep_checkpoints
        fence = functools.partial(check_held, *own(self.workdir, folder))
        return Checkpoints(folder, keep, fence=fence)

    @functools.cached_property
    def abstract(self) -> tuple[PyTree, Any]:
        """Shapes, dtypes and shardings of the result of `initial`."""
        return acco_jax.abstract_start(self.tx, abstract_params(self))

    @property
    def checkpoint_folder(self) -> epath.Path:
        """Folder of the checkpoints: in the workdir, or the config's."""
        return checkpoint_folder(self.config, self.workdir)

    @property
    def workers(self) -> int:
        return len(members(self.mesh))

    @property
    def own_workers(self) -> tuple[int, ...]:
        """Workers of which this process has devices, in the order of the mesh.

        Processes that share a worker, a group of their devices, have the same ones.
        """
        return own_workers(self.mesh)[jax.process_index()]

    @property
    def world(self) -> worlds.World:
        """The devices that compute here, as the run's record has them."""
        counts, varying = self.config.counts, self.varying
        counts = counts or [self.microbatches] * self.workers
        if isinstance(varying, acco_jax.Halves) and varying.first == varying.second:
            counts = varying.first  # divided among other workers than at first
        elif varying:
            counts = ()
        first = self.config.first_half if self.halves else 0
        return worlds.World.of(self.mesh, counts, self.step.form, first)

    @property
    def logged(self) -> bool:
        """Whether counts.jsonl has the microbatches of each call."""
        return self.varying is not None or self.tx.calls_per_step == 2

    @property
    def total_calls(self) -> int:
        """Calls of the train step in the whole run."""
        return self.tx.calls(self.config.steps)

    @property
    def rows(self) -> int:
        """Rows of a half-round's global batch."""
        microbatches = self.workers * self.capacity * self.tx.steps_per_call
        return microbatches * self.config.microbatch_size

    @property
    def tokens(self) -> int:
        """Targets of a half-round of full rows, where their number is constant."""
        same = isinstance(self.varying, acco_jax.Balanced | acco_jax.Halves)
        kept = same and self.config.batch == "kept"
        workers = self.identity["workers"] if kept else self.workers
        computed = self.config.counts or [self.microbatches] * workers
        rows = sum(computed) * self.tx.steps_per_call * self.config.microbatch_size
        return rows * self.config.length


def own_workers(mesh: Mesh) -> dict[int, tuple[int, ...]]:
    """Return the workers of which each process has devices, by the process's index.

    Some meshes follow the wires of a TPU slice: a process's workers are not neighbours.

    Raises:
      ValueError: processes share some of their workers, and not all.
    """
    own = collections.defaultdict[int, list[int]](list)
    for worker, group in enumerate(members(mesh)):
        for process in {device.process_index for device in group}:
            own[process].append(worker)
    parts = {tuple(workers) for workers in own.values()}
    sizes = {len(part) for part in parts}
    if len(sizes) > 1 or sum(map(len, parts)) > len(members(mesh)):
        raise ValueError(
            f"there are {len(members(mesh))} workers for {len(own)} processes: use "
            "sizes of mesh with which either number divides the other, and as many "
            "devices in each process."
        )
    return {process: tuple(workers) for process, workers in own.items()}


def batches(experiment: Experiment) -> data.Batches:
    """Return this process's part of the training batches, from the first one on."""
    e, c = experiment, experiment.config.data
    return data.train_iterator(
        e.corpus,
        length=e.config.length,
        batch_size=e.rows,
        seed=e.config.seed,
        workers=e.workers,
        own=e.own_workers,
        steps=e.tx.steps_per_call,
        microbatches=e.capacity,
        counts=() if e.varying else tuple(e.config.counts) or None,
        skew=c.skew,
        lengths=c.lengths,
        document_mask=c.document_mask,
    )


def held_out_batches(
    experiment: Experiment, limit: int | None
) -> Iterator[dict[str, np.ndarray]]:
    """Return this process's part of `limit` validation batches, or of all."""
    e, c = experiment, experiment.config.data
    return data.validation_batches(
        e.corpus,
        length=e.config.length,
        batch_size=e.workers * e.config.microbatch_size,
        workers=e.workers,
        own=e.own_workers,
        limit=limit,  # of the batches when the run began
        block=e.identity["workers"] * e.config.microbatch_size,
        lengths=c.lengths,
        document_mask=c.document_mask,
    )


def counts_of(experiment: Experiment) -> jax.Array | None:
    """Return how many microbatches each worker computes; None: all."""
    if not experiment.config.counts:
        return None
    counts = np.asarray(experiment.config.counts, np.int32)
    return to_devices(counts[list(experiment.own_workers)], experiment.mesh)


def to_devices(batch: PyTree, mesh: Mesh) -> PyTree:
    """Return global arrays, split over the data axes, from this process's rows."""
    sharding = NamedSharding(mesh, P(data_axes(mesh)))
    with jax.transfer_guard_host_to_device("allow"):  # intended here
        return jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(sharding, x), batch
        )


def initial(experiment: Experiment) -> tuple[PyTree, Any]:
    """Return parameters as the train step takes them, and sharded optimizer state."""
    return acco_jax.start(experiment.tx, experiment.start())


def abstract_params(experiment: Experiment) -> PyTree:
    """Return shapes, dtypes and shardings of the trained parameters."""
    homes = trained_runs.shardings(experiment.specs, experiment.mesh)
    return with_shardings(jax.eval_shape(experiment.init), homes)


def as_saved(experiment: Experiment, half_round: int) -> tuple[PyTree, Any]:
    """Return `as_stored` for a checkpoint."""
    return as_stored(experiment, experiment.checkpoints.host(half_round)["axes"])


def as_stored(experiment: Experiment, axes: dict[str, int]) -> tuple[PyTree, Any]:
    """Return `Experiment.abstract`, for a state of a mesh of these axes.

    For another mesh than today's, arrays have the shapes that they had then, and lie on
    the devices that there are now.
    """
    e = experiment
    if axes == dict(e.mesh.shape):
        return e.abstract
    was = meshes.described(axes)
    return trained_runs.as_stored(
        e.config, e.model, jax.eval_shape(e.init), was, e.mesh
    )


def here(experiment: Experiment, arrays: tuple[PyTree, Any]) -> tuple[PyTree, Any]:
    """Return what was restored `as_stored` as today's workers hold it."""
    like = experiment.abstract
    same: bool = jax.tree.structure(arrays) == jax.tree.structure(like)  # type: ignore[operator]
    if same:
        return arrays
    shardings = jax.tree.map(lambda x: x.sharding, like)
    tx = experiment.tx
    weighted = getattr(tx.round(tx.phase(0)), "weighted", True)
    move = functools.partial(moved, new=like, weighted=weighted)
    return jax.jit(move, out_shardings=shardings)(arrays)
