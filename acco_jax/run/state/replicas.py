"""Comparison of the workers' copies of replicated arrays, bit by bit.

A device that computes or stores a wrong bit raises no error. Arrays replicated over
the data axes show it: the parameters of sharded methods, small arrays of the state,
counters and a frozen model. Each device computes a checksum of its own copy of every
such array, and the checksums are compared on the host; where a worker is a group of
devices, each device's part with those parts in other groups. Arrays that differ between
workers are not compared: shards, and the rows of local methods, whose workers have
parameters of their own. A wrong bit is not seen either if it was overwritten before the
comparison, as gathered parameters are in every half-round.
"""

import functools
import math
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from acco_jax.core.groups import data_axes, members
from acco_jax.core.leaves import axes_in
from acco_jax.run.state import processes

PyTree = Any
NAMED = 8  # workers that an error names, at most
HOST_BYTES = 64  # of a host's name


class ReplicasDiffer(OSError):
    """Workers hold different bits of an array that must be equal for all of them."""


class Comparison:
    """Comparison of the workers' copies; with `late` the host reads it later."""

    def __init__(self, mesh: Mesh, *, enabled: bool = True, late: bool = True) -> None:
        """Prepare comparisons; with several processes it communicates.

        Args:
          mesh: of the workers.
          enabled: False for comparisons that do nothing.
          late: False where the step itself waits for the devices, so that each
            comparison may be judged at once.
        """
        self._mesh, self._late = mesh, late
        self._groups = members(mesh)
        self._enabled = enabled and len(self._groups) > 1
        self._pending: tuple[int, list[str], jax.Array] | None = None
        self._hosts = _hosts() if self._enabled else []

    def send(self, half_round: int, tree: PyTree) -> None:
        """Judge the last comparison and dispatch one of the arrays of a tree.

        Args:
          half_round: the last one that the arrays include.
          tree: of arrays; those split over workers are left out.

        Raises:
          ReplicasDiffer: as `judge`.
        """
        self.judge()
        arrays = replicated(tree, self._mesh) if self._enabled else {}
        if arrays:
            specs = tuple(map(_spec, arrays.values()))
            sums = _checksums(self._mesh, specs)(list(arrays.values()))
            self._pending = half_round, list(arrays), sums
        if not self._late:
            self.judge()

    def judge(self) -> None:
        """Wait for the pending checksums, if any, and compare them.

        Raises:
          ReplicasDiffer: with the workers that differ, their places and the array.
        """
        if self._pending is None:
            return
        (half_round, names, sums), self._pending = self._pending, None
        found = jax.device_get(sums).reshape(len(self._groups), -1)
        workers, majority = differing(found)
        if not workers:
            return
        columns = np.flatnonzero((found != found[0]).any(0))
        member, array = divmod(int(columns[0]), len(names))
        what = names[array]
        if others := len(set(columns % len(names))) - 1:
            what += f" and {others} other arrays"
        where = self._where(workers, member)
        if majority:
            verb = "holds" if len(workers) == 1 else "hold"
            what = f"{where} {verb} other bits of {what} than most workers"
        else:
            what = f"{where} hold different bits of {what}, and no majority is right"
        raise ReplicasDiffer(
            f"silent corruption by half-round {half_round}: {what}; every checkpoint "
            "was compared before it was written; replace the device"
        )

    def check(self, half_round: int, tree: PyTree) -> None:
        """Compare the arrays of a tree now, and wait for them.

        Raises:
          ReplicasDiffer: as `judge`.
        """
        if self._pending is None or self._pending[0] != half_round:
            self.send(half_round, tree)
        self.judge()

    def _where(self, workers: Sequence[int], member: int) -> str:
        """Return worker, process, host and device of each; of a group, one member."""
        devices, hosts = self._groups[:, member], self._hosts
        places = [
            f"worker {i} (process {d.process_index} on {hosts[d.process_index]}, {d})"
            for i, d in ((i, devices[i]) for i in workers[:NAMED])
        ]
        if more := len(workers) - len(places):
            places.append(f"{more} more")
        return " and ".join(places)


@functools.cache
def _checksums(
    mesh: Mesh, specs: tuple[P, ...]
) -> Callable[[list[jax.Array]], jax.Array]:
    """Return a function from arrays to checksums (devices, arrays), on every device.

    Each device reads its own copies; gathering the sums is the only communication.
    """

    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, P()))
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(list(specs),), check_vma=False,
        out_specs=P(mesh.axis_names),
    )  # fmt: skip
    def checksums(arrays: list[jax.Array]) -> jax.Array:
        return jnp.stack([checksum(x) for x in arrays])[None]

    return checksums


def checksum(x: jax.Array) -> jax.Array:
    """Return a uint32 checksum of an array's bits and their positions.

    Every word of 32 bits is mixed with its position by a bijection, and the results are
    added modulo 2**32. One differing word always changes the sum. Several, or two
    that are exchanged, change it all but once in 2**32. The array is read once.
    """
    words = _words(x)
    position = jnp.zeros((), jnp.uint32)
    for axis, size in enumerate(words.shape):
        here = lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        stride = math.prod(words.shape[axis + 1 :]) % 2**32
        position = position + here * np.uint32(stride) if size > 1 else position
    mixed = words + position * np.uint32(0x9E3779B9)
    # the finalizer of MurmurHash3, a bijection of 32 bits
    mixed = (mixed ^ (mixed >> 16)) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * np.uint32(0xC2B2AE35)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
    """Return the bits of an array as uint32; 64 bits are two along a last axis."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag])
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    width = min(jax.dtypes.itemsize_bits(x.dtype), 32)
    return lax.bitcast_convert_type(x, f"uint{width}").astype(jnp.uint32)


def replicated(tree: PyTree, mesh: Mesh) -> dict[str, jax.Array]:
    """Return, by path, the arrays that every worker of a mesh holds whole."""
    devices, workers = set(mesh.devices.flat), set(data_axes(mesh))
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): x
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
        if isinstance(x, jax.Array)
        and x.sharding.device_set == devices
        and (spec := _spec(x)) is not None
        and not workers & {a for entry in spec for a in axes_in(entry)}
    }


def _spec(x: jax.Array) -> P | None:
    """Return an array's spec, None if it is not known."""
    if x.sharding.is_fully_replicated:
        return P()
    return x.sharding.spec if isinstance(x.sharding, NamedSharding) else None


def differing(checksums: np.ndarray) -> tuple[list[int], bool]:
    """Return the workers that differ, and whether a majority agrees against them.

    Args:
      checksums: (n, arrays), a row per worker.
    """
    rows = [row.tobytes() for row in checksums]
    ((common, times),) = Counter(rows).most_common(1)
    if 2 * times <= len(rows):
        return list(range(len(rows))), False
    return [i for i, row in enumerate(rows) if row != common], True


@functools.cache
def _hosts() -> list[str]:
    """Return the name of every process's host."""
    name = socket.gethostname().encode()[:HOST_BYTES]
    padded = np.frombuffer(name.ljust(HOST_BYTES, b"\0"), np.uint8)
    names = processes.gathered(padded)
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in names]
