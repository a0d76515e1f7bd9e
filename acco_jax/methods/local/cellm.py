"""Federated averaging that sends the largest changes only (CELLM, arXiv 2407.20557).

With x(t) the point where all workers start a round, theta_i where worker i's H local
steps lead it, w_i its weight (its amount of data) and e_i what it has not sent yet,

    u_i = w_i (x(t) - theta_i) + e_i(t)
    s_i = of every 256 entries of u_i the k of largest magnitude, in the dtype sent
    e_i(t+1) = u_i - s_i
    x(t+1) = a step of the outer optimizer from x(t) on sum_i s_i / sum_i w_i

A worker without weight sends nothing and keeps e_i. With k = 256 it is dense averaging.
The parameters are whatever the loop trains: with `acco_jax.models.lora`, adapters.

The largest are taken per row of 256 entries, not of all: a place in a row is 8 bits,
where a place among all takes 32, and 8 bits are close to the least there is, 6.8 for
4 of 256. It loses nothing in the bound that error feedback rests on: either choice
leaves at most (1 - k / 256) of ||u_i||^2 unsent (Stich et al., arXiv 1809.07599).
Values and places are gathered as one buffer of 32-bit words, so that no backend widens
them; all workers add them up in the same order and stay equal bit for bit.

Of CELLM only the abstract is public: low-rank adapters, sparse updates, unequal data.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple, Self, Unpack

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from acco_jax.core.half_round import Hop
from acco_jax.core.layout import Layout
from acco_jax.core.leaves import PyTree
from acco_jax.core.select import choose
from acco_jax.core.workers import over_data
from acco_jax.methods.checks import checked_update
from acco_jax.methods.local import local_method
from acco_jax.methods.local.local_method import (
    InnerSteps,
    LocalMethod,
    LocalProgress,
    LocalRound,
)
from acco_jax.methods.local.rounds import RoundOptions, counted
from acco_jax.methods.method import common_attributes, layout_of, placed_state
from acco_jax.methods.optimizer import pinned

ROW = 256  # entries; a place in it fits 8 bits

# layout, every worker's words, e_i(t+1), and w_i or their sum
Sparse = tuple[Layout, jax.Array, PyTree, jax.Array]


class CellmState(NamedTuple):
    """State of `cellm`; the parameters of the loop are rows, all equal."""

    layout: Layout  # static: of the parameters; nothing is sharded
    calls_done: jax.Array  # int32 []: rounds so far
    steps: jax.Array  # int32 []: inner steps so far
    master: PyTree  # x(t), replicated, float32 or wider
    outer: PyTree  # the outer optimizer's state, replicated
    inner: PyTree  # rows: each worker's own optimizer state
    error: PyTree  # rows: e_i(t), float32 or wider

    def shardings(self) -> Self:
        out_shardings = local_method.shardings(self, rows=("inner", "error"))
        return out_shardings._replace(master=self.layout.params_shardings)

    def committed(self, params: PyTree) -> PyTree:
        del params  # x(t), rounded
        return _committed(self.layout, self.master)

    def theta(self, params: PyTree) -> PyTree:
        del params
        return local_method.narrowed(self.layout, self.master)


@functools.partial(jax.jit, static_argnums=0)
def _committed(layout: Layout, master: PyTree) -> PyTree:
    # copies, because a train step is given the state to keep
    rounded = jax.tree.map(jnp.copy, local_method.narrowed(layout, master))
    return pinned(rounded, layout.params_shardings)


# ------------------------------------------------------------------- what is sent


def _groups(layout: Layout) -> list[list[int]]:
    """Which leaves share rows: those of the same dtypes, split over the same axes.

    What is replicated over an axis of the model must not compete with what is not: all
    devices along that axis have to choose the same entries of it.
    """
    members: dict[Any, list[int]] = {}
    for i, leaf in enumerate(layout.leaves):
        key = (leaf.comm_dtype, leaf.master, frozenset(leaf.axes))
        members.setdefault(key, []).append(i)
    return list(members.values())


def _sizes(layout: Layout, group: list[int]) -> list[int]:
    return [layout.leaves[i].size for i in group]


def _to_rows_of_256(layout: Layout, leaves: list[jax.Array]) -> list[jax.Array]:
    """[rows, 256] of each group, filled up with zeros."""
    buffers = []
    for group in _groups(layout):
        flat = jnp.concatenate([leaves[i].reshape(-1) for i in group])
        buffers.append(jnp.pad(flat, (0, -flat.size % ROW)).reshape(-1, ROW))
    return buffers


def _to_leaves(layout: Layout, buffers: list[jax.Array]) -> list[jax.Array]:
    """The inverse of `_to_rows_of_256`."""
    by_number: dict[int, jax.Array] = {}
    for group, buffer in zip(_groups(layout), buffers, strict=True):
        flat, start = buffer.reshape(-1), 0
        for i, size in zip(group, _sizes(layout, group), strict=True):
            by_number[i] = flat[start : start + size].reshape(layout.leaves[i].local)
            start += size
    return [by_number[i] for i in range(len(by_number))]


def largest(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k entries of largest magnitude of each row: places and values.

    Args:
      x: [rows, 256].
      k: 1 to 256; of equal ones the first count.

    Returns:
      uint8 [rows, k] and x.dtype [rows, k].
    """
    _, places = lax.top_k(jnp.abs(x), k)
    values = jnp.take_along_axis(x, places, 1)
    return places.astype(jnp.uint8), values


def add_at(x: jax.Array, places: jax.Array, values: jax.Array) -> jax.Array:
    """x [rows, 256] with values [rows, k] added, no two of a row at one place."""
    row = jnp.arange(x.shape[0])[:, None]
    return x.at[row, places.astype(jnp.int32)].add(
        values.astype(x.dtype), unique_indices=True
    )


def _to_words(arrays: list[jax.Array]) -> jax.Array:
    """The bytes of all arrays as uint32 [words]."""
    flat = [lax.bitcast_convert_type(x, jnp.uint8).reshape(-1) for x in arrays]
    joined = jnp.concatenate(flat)
    joined = jnp.pad(joined, (0, -joined.size % 4)).reshape(-1, 4)
    return lax.bitcast_convert_type(joined, jnp.uint32)


def _from_words(words: jax.Array, like: list[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """The inverse of `_to_words`."""
    flat, start, arrays = lax.bitcast_convert_type(words, jnp.uint8).reshape(-1), 0, []
    for x in like:
        width = x.dtype.itemsize
        size = math.prod(x.shape) * width
        shape = x.shape if width == 1 else (*x.shape, width)
        part = flat[start : start + size].reshape(shape)
        arrays.append(lax.bitcast_convert_type(part, x.dtype))
        start += size
    return arrays


def _message(layout: Layout, k: int) -> list[jax.ShapeDtypeStruct]:
    """What a worker sends: places and values of each group."""
    arrays = []
    for group in _groups(layout):
        rows = -(-sum(_sizes(layout, group)) // ROW)
        comm_dtype = layout.leaves[group[0]].comm_dtype
        arrays += [
            jax.ShapeDtypeStruct((rows, k), dtype) for dtype in (jnp.uint8, comm_dtype)
        ]
    return arrays


# --------------------------------------------------------------------------- the round


@dataclasses.dataclass(frozen=True)
class SparseRound(LocalRound[CellmState]):
    """H inner steps of every worker, and one gather of what changed most."""

    steps: InnerSteps
    outer: optax.GradientTransformation
    k: int
    weighted: bool

    overlaps = False

    @property
    def hops(self) -> tuple[Hop, ...]:  # type: ignore[override]
        return (Hop(lambda x: x, self._gather),)

    def open(
        self, params: PyTree, state: CellmState
    ) -> tuple[None, tuple[()], CellmState]:
        return None, (), state

    def theta(self, rows: PyTree, rest: CellmState) -> PyTree:
        return local_method.to_rows(rest.layout, rest.master)

    def send(
        self, in_flight: Sparse, owner: tuple[()], extra: dict[str, Any]
    ) -> Sparse:
        """Return the message: layout, every worker's words, e_i(t+1), and sum_i w_i."""
        layout, words, error, weight = in_flight
        return layout, words, error, weight.sum()

    def outgoing(
        self, params: PyTree, rest: CellmState, progress: LocalProgress
    ) -> Sparse:
        """(layout, every worker's words, e_i(t+1), w_i)."""
        layout = rest.layout
        weight = counted(progress.sums.weight, self.weighted)

        def local(
            weight: jax.Array, x: PyTree, theta: PyTree, error: PyTree
        ) -> tuple[jax.Array, PyTree]:
            u = jax.tree.map(
                lambda x, theta, e: weight[0].astype(e.dtype) * (x - theta[0]) + e[0],
                x,
                theta,
                error,
            )
            message, unsent = [], []
            dtypes = (p.dtype for p in _message(layout, self.k)[1::2])
            buffers = _to_rows_of_256(layout, jax.tree.leaves(u))
            for buffer, dtype in zip(buffers, dtypes, strict=True):
                places, values = largest(buffer, self.k)
                sent = jnp.where(weight[0] != 0, values, 0).astype(dtype)
                message += [places, sent]
                unsent.append(add_at(buffer, places, -sent.astype(buffer.dtype)))
            left = [e[None] for e in _to_leaves(layout, unsent)]
            return _to_words(message), layout.treedef.unflatten(left)

        at, rows_at, everyone = self._specs(layout)
        in_specs = (P(layout.axis), at, rows_at, rows_at)
        run = layout.everywhere(local, in_specs, (everyone, rows_at))
        words, error = run(weight, rest.master, progress.theta, rest.error)
        return layout, words, error, weight

    def _gather(self, message: Sparse) -> Sparse:
        layout, words, error, total = message

        def local(words: jax.Array) -> jax.Array:
            if layout.workers == 1:
                return words[None]
            return lax.all_gather(words, layout.axis)

        everyone, gathered = self._specs(layout)[2], P(None, layout.model_axes or None)
        run = layout.everywhere(local, (everyone,), gathered)
        return layout, run(words), error, total

    def _specs(self, layout: Layout) -> tuple[PyTree, PyTree, P]:
        """Of parameters, of rows, and of what each device has of its own."""
        spec = lambda s: s.spec  # noqa: E731
        at = jax.tree.map(spec, layout.params_shardings)
        rows_at = jax.tree.map(spec, layout.grads_shardings)
        return at, rows_at, P((*layout.axis, *layout.model_axes))

    def _sum(self, layout: Layout, words: jax.Array) -> PyTree:
        """sum_i s_i, added up in the workers' order, in the master dtype."""
        like = _message(layout, self.k)

        def local(words: jax.Array) -> PyTree:
            def add(
                total: list[jax.Array], words: jax.Array
            ) -> tuple[list[jax.Array], None]:
                parts = _from_words(words, like)
                parcels = zip(total, parts[::2], parts[1::2], strict=True)
                return [add_at(*message) for message in parcels], None

            none = [
                jnp.zeros((p.shape[0], ROW), layout.leaves[group[0]].master)
                for p, group in zip(like[::2], _groups(layout), strict=True)
            ]
            total, _ = lax.scan(add, none, words)
            return layout.treedef.unflatten(_to_leaves(layout, total))

        gathered = P(None, layout.model_axes or None)
        return layout.everywhere(local, (gathered,), self._specs(layout)[0])(words)

    def _advance(
        self, total: jax.Array, sums: PyTree, x: PyTree, outer: PyTree
    ) -> tuple[PyTree, PyTree]:
        """The outer step; none where nobody has weight."""
        valid = total != 0
        weight = jnp.where(valid, total, 1)
        mean = jax.tree.map(lambda s: s / weight.astype(s.dtype), sums)
        updates, new = checked_update(self.outer, mean, outer, x, {})
        moved = choose(valid, optax.apply_updates(x, updates), x)
        return moved, choose(valid, new, outer)

    def conclude(
        self, rows: PyTree, rest: CellmState, progress: LocalProgress, received: Sparse
    ) -> tuple[PyTree, CellmState]:
        layout, words, error, total = received
        sums = self._sum(layout, words)
        run = over_data(self._advance, layout.mesh, layout.axis, P(), P())
        master, outer = run(total, sums, rest.master, rest.outer)
        state = rest._replace(
            master=master, outer=outer, inner=progress.inner, error=error
        )
        return local_method.to_rows(
            layout, local_method.narrowed(layout, master)
        ), state


def cellm(
    inner: optax.GradientTransformation,
    *,
    mesh: Mesh,
    local_steps: int = 50,
    keep: float | int = 1 / 64,
    outer_learning_rate: float = 1.0,
    outer_momentum: float = 0.0,
    outer: optax.GradientTransformation | None = None,
    **options: Unpack[RoundOptions],
) -> LocalMethod:
    """Average the largest changes of H local steps; the rest waits for its turn.

    Bytes sent per worker and round: (n - 1) keep (1 + b) per parameter, b bytes of the
    communication dtype, as a gather of all workers' entries has it. Dense averaging
    sends 2 (n - 1) / n b: at the default keep 85 / n times as much in bfloat16 and
    102 / n in float32, so 10 times at 8 workers; for many more of them lower keep.
    Nothing is sharded: every worker holds x, the outer state and e_i.

    Args:
      inner: each worker's optimizer, an optax transformation.
      mesh: the devices.
      local_steps: H.
      keep: which part of the entries is sent, above 0 and at most 1; or an integer, how
        many of every 256.
      outer_learning_rate: of the outer step; 1 without momentum: federated averaging.
      outer_momentum: Nesterov's, of the outer step.
      outer: an optax transformation instead, on whole leaves in float32 or wider.
      **options: see `acco_jax.methods.local.rounds.RoundOptions`.

    Returns:
      A `LocalMethod`; one call of its train step is a round of H steps.

    Raises:
      ValueError: in one line, before any device work, what does not fit.

    References:
      CELLM (https://arxiv.org/abs/2407.20557), its abstract; McMahan et al.,
      Communication-Efficient Learning of Deep Networks from Decentralized Data
      (https://arxiv.org/abs/1602.05629); Stich et al., Sparsified SGD with Memory
      (https://arxiv.org/abs/1809.07599)
    """
    local_method.check_steps("local_steps", local_steps)
    k = _entries(keep)
    outer = outer or local_method.nesterov(outer_learning_rate, outer_momentum)
    local_method.check_optimizer(
        "outer", outer, "every worker takes the outer step itself"
    )
    common = common_attributes(mesh, options, RoundOptions)
    weighted = options.get("weighted", True)
    steps = InnerSteps(inner, local_steps)

    def init(params: PyTree) -> CellmState:
        layout = layout_of(params, common)

        def make(params: PyTree) -> CellmState:
            # a copy: a train step is given the parameters and the state to keep
            master = jax.tree.map(jnp.copy, local_method.widened(layout, params))
            error = local_method.to_rows(layout, jax.tree.map(jnp.zeros_like, master))
            rows = local_method.init_rows(layout, inner, params)
            counts = jnp.int32(0), jnp.int32(0)
            return CellmState(layout, *counts, master, outer.init(master), rows, error)

        local_method.check_wire(layout, weighted)
        return placed_state(make, params)

    return local_method.local_method(
        inner,
        common,
        steps_per_call=local_steps,
        state_type=CellmState,
        make_state=init,
        round=lambda phase: SparseRound(steps, outer, k, weighted),
        on=lambda mesh, axis: cellm(
            inner,
            mesh=mesh,
            local_steps=local_steps,
            keep=k,
            outer=outer,
            **options | {"axis_name": axis},
        ),
        delayed=False,
    )


def _entries(keep: object) -> int:
    """How many of every 256 are sent."""
    if isinstance(keep, int) and not isinstance(keep, bool) and 1 <= keep <= ROW:
        return keep
    if isinstance(keep, float) and 0 < keep <= 1:
        return max(1, round(keep * ROW))
    raise ValueError(
        f"keep is {keep!r}: give the part of the entries to send, above 0.0 and at "
        f"most 1.0, or an integer from 1 to {ROW}, how many of every {ROW}."
    )
