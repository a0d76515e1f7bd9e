"""Loss on held-out documents."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial

from acco_jax import data
from acco_jax.command import exits
from acco_jax.core.gradients import with_arrays
from acco_jax.core.workers import over_data
from acco_jax.run.build import models
from acco_jax.run.prepared import Experiment, held_out_batches, to_devices

PyTree = Any
BATCHES = 64  # whose targets a float32 counts exactly; then float64 takes over


class Evaluator:
    """Loss of the committed parameters on held-out documents."""

    def __init__(
        self, experiment: Experiment, stopped: Callable[[], bool] = lambda: False
    ) -> None:
        """Prepare evaluations that `stopped`, asked before each batch, ends."""
        self._experiment, self._stopped = experiment, stopped
        e = experiment
        loss_fn = models.evaluated(e.config, e.model, e.loss_fn)
        self._loss_fn, rows = with_arrays(loss_fn), P(e.tx.axis)

        def add(
            loss_fn: Partial, params: PyTree, batch: PyTree, sums: jax.Array
        ) -> jax.Array:
            # sums: (1, 2) nats and targets of this worker's rows so far
            return sums + jnp.stack(loss_fn(params, batch, None)[:2])

        specs = P(), P(), rows, rows
        self._add = jax.jit(
            over_data(add, e.mesh, e.tx.axis, specs, rows), donate_argnums=3
        )
        replicated = NamedSharding(e.mesh, P())
        self._total = jax.jit(lambda x: x.sum(0), out_shardings=replicated)

    def __call__(self, params: PyTree, limit: int | None) -> tuple[float, float]:
        """Return nats per token and bits per byte over `limit` batches, or all.

        Raises:
          Stopped: if the run has been told to stop.
        """
        e, total = self._experiment, np.zeros(2)
        zeros = np.zeros((len(e.own_workers), 2), np.float32)
        sums = to_devices(zeros, e.mesh)
        for number, batch in enumerate(held_out_batches(e, limit), 1):
            if self._stopped():
                raise exits.Stopped
            rows = to_devices(batch, e.mesh)
            sums = self._add(self._loss_fn, params, rows, sums)
            if number % BATCHES == 0:
                total += jax.device_get(self._total(sums))
                sums = to_devices(zeros, e.mesh)
        nats, targets = total + jax.device_get(self._total(sums))
        bits = data.bits_per_byte(nats, e.corpus, targets=targets)
        return float(nats / targets), float(bits)
