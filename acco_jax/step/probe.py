"""Timing of one microbatch on each worker, in a program without communication."""

import dataclasses
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from acco_jax.core.gradients import Accumulator
from acco_jax.core.half_round import Inputs
from acco_jax.core.leaves import PyTree, Rng
from acco_jax.core.workers import from_row, to_row

WORKER = "worker"


class Probe:
    """Repeated timing of one microbatch on the workers of this process.

    The microbatch is the first of the first batch, kept: later differences are the
    device's.
    """

    def __init__(self, gradients: Accumulator, held: int, own_params: bool) -> None:
        """Find the workers.

        Args:
          gradients: of the train step, whose workers have one device each.
          held: microbatches that a worker's part of a batch holds.
          own_params: whether each worker has parameters of its own, in rows.
        """
        self._held, self._axis = held, gradients.axis
        mesh, n = gradients.mesh, gradients.workers
        rows = NamedSharding(mesh, gradients.rows).devices_indices_map((n,))
        every: list[Any] = sorted(rows, key=lambda device: rows[device][0].start or 0)
        me = jax.process_index()
        self._mine = [i for i, d in enumerate(every) if d.process_index == me]
        here = [every[i] for i in self._mine]
        # the loss may name the axes of its mesh
        sizes = [len(here) if a == self._axis[-1] else 1 for a in mesh.axis_names]
        self._mesh = Mesh(np.array(here).reshape(sizes), mesh.axis_names)
        self._rows, self._params = P(self._axis), P(self._axis) if own_params else P()
        self._all = Mesh(np.array(every), (WORKER,))
        whole = NamedSharding(self._all, P())
        self._replicated = jax.jit(lambda x: x, out_shardings=whole)
        self._gradients = dataclasses.replace(
            jax.tree.map(lambda x: self._here(x, P()), gradients),
            mesh=self._mesh, microbatches=1,
        )  # fmt: skip
        self._own_params = own_params
        self._program = jax.jit(self._timed)
        self._kept: tuple[PyTree, Any] | None = None  # a microbatch, and its key
        self._threads = ThreadPoolExecutor(len(here), "acco-probe")

    def _timed(self, gradients: Accumulator, params: PyTree, batch: PyTree, rng: Rng):  # type: ignore[no-untyped-def]
        """Return, for each worker here, numbers that depend on the whole gradient."""

        def local(gradients, params, batch, rng):  # type: ignore[no-untyped-def]
            params = from_row(params) if self._own_params else params
            sums = gradients.zeros_here(params, batch, rng, 1)
            sums = gradients.sum_here(sums, params, batch, rng, 1, 0, 1)
            squares = [jnp.sum(jnp.square(g)) for g in jax.tree.leaves(sums.grads)]
            return to_row(lax.optimization_barrier((sums.loss, squares)))

        specs = (P(), self._params, self._rows, P())
        run = gradients.over_data(local, specs, self._rows)
        return run(gradients, params, batch, rng)

    def _here(self, x: jax.Array, spec: P) -> jax.Array:
        """Return a global array's part on this process's devices; move nothing."""
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            impl, data = jax.random.key_impl(x), jax.random.key_data(x)
            return jax.random.wrap_key_data(self._here(data, spec), impl=impl)
        shards = {s.device: s.data for s in x.addressable_shards}
        return self._joined([shards[d] for d in self._mesh.devices.flat], spec)

    def _joined(self, parts: Sequence[jax.Array], spec: P) -> jax.Array:
        """Join a part per worker here to one array: replicated, or row after row."""
        shape = parts[0].shape
        if spec != P():
            shape = (sum(x.shape[0] for x in parts), *shape[1:])
        sharding = NamedSharding(self._mesh, spec)
        return jax.make_array_from_single_device_arrays(shape, sharding, list(parts))

    def _arguments(self, params: PyTree, inputs: Inputs) -> tuple[Any, ...]:
        def first(x: jax.Array) -> jax.Array:
            shards = {s.device: s.data for s in x.addressable_shards}
            parts = [shards[d] for d in self._mesh.devices.flat]
            rows = parts[0].shape[0] // self._held
            parts = [lax.slice_in_dim(part, 0, rows) for part in parts]
            return self._joined(parts, self._rows)

        kept = self._kept
        if kept is None:
            rng = inputs.rng
            if rng is not None:  # which may lie on one device
                whole = NamedSharding(self._all, P())
                rng = self._here(jax.device_put(rng, whole), P())
            kept = jax.tree.map(first, inputs.batch), rng
        params = jax.tree.map(lambda x: self._here(x, self._params), params)
        return self._gradients, params, *kept

    def lower(self, params: PyTree, inputs: Inputs) -> jax.stages.Lowered:
        """Return the program that is timed, as jax.jit's `lower`."""
        return self._program.lower(*self._arguments(params, inputs))

    def prepare(self, params: PyTree, inputs: Inputs) -> None:
        """Keep the microbatch and run it once, possibly compiling; then do nothing."""
        if self._kept is None:
            args = self._arguments(params, inputs)
            self._kept = args[2:]
            self._run(args)

    def seconds(
        self, params: PyTree, inputs: Inputs, duration: float = 0.0
    ) -> list[float]:
        """Time a microbatch on each worker of this process, the mean of several runs.

        It is repeated while the next run would end within `duration`. Call `prepare`
        first. The devices must be idle.
        """
        args = self._arguments(params, inputs)
        start, times = time.perf_counter(), [self._run(args)]
        while time.perf_counter() - start + max(times[-1]) <= duration:
            times.append(self._run(args))
        return [sum(found) / len(times) for found in zip(*times, strict=True)]

    def _run(self, args: tuple[Any, ...]) -> list[float]:
        start = time.perf_counter()
        loss, _ = self._program(*args)

        def ready(device: jax.Device) -> float:
            jax.block_until_ready(shards[device])
            return time.perf_counter() - start

        shards = {s.device: s.data for s in loss.addressable_shards}
        return list(self._threads.map(ready, self._mesh.devices.flat))

    def gathered(self, rows: Sequence[Sequence[float]]) -> np.ndarray:
        """Return the rows (n, k) of all workers; each process gives its own."""
        table = np.zeros((self._all.size, len(rows[0])), np.float32)
        table[self._mine] = rows
        if len(self._mine) == self._all.size:
            return table
        split = NamedSharding(self._all, P(WORKER))
        with jax.transfer_guard_host_to_device("allow"):  # here it is meant
            x = jax.make_array_from_callback(table.shape, split, lambda i: table[i])
        return np.asarray(jax.device_get(self._replicated(x)))
