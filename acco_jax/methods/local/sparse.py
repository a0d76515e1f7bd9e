"""Local steps on each worker, and a gather of the largest of what they moved.

With x(t) the point where all workers start a round, theta_i where worker i's H local
steps lead it, w_i its weight and e_i what it has not sent yet,

    u_i = w_i (x(t) - theta_i) + decay e_i(t)
    s_i = of every chunk of entries of u_i the k of largest magnitude, as they are sent
    e_i(t+1) = u_i - s_i
    x(t+1) = a step of the outer optimizer from x(t) on sum_i s_i / sum_i w_i

A worker without weight sends nothing and keeps e_i. `Message` is what is sent.

The largest are taken per chunk, not of all: a place in a chunk of 256 is 8 bits and one
of 4096 is 12, where a place among all takes 32. It loses nothing in the bound that
error feedback rests on: either choice leaves at most (1 - k / chunk) of ||u_i||^2
unsent (Stich et al., Sparsified SGD with Memory, https://arxiv.org/abs/1809.07599).
Values and places are gathered as one buffer of 32-bit words, so that no backend widens
them; all workers add them up in the same order and stay equal bit for bit.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from acco_jax.core.half_round import Hop
from acco_jax.core.layout import Layout
from acco_jax.core.leaves import PyTree
from acco_jax.core.microbatches import whole_numbers
from acco_jax.core.select import choose, difference
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
from acco_jax.methods.optimizer import in_auto, in_worker, pinned

# layout, every worker's words, e_i(t+1), and w_i or their sum
Sparse = tuple[Layout, jax.Array, PyTree, jax.Array]


class SparseState(NamedTuple):
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


class SparseLocoState(SparseState):
    """State of `sparseloco`, with the fields of cellm's: its error decays."""


@functools.partial(jax.jit, static_argnums=0)
def _committed(layout: Layout, master: PyTree) -> PyTree:
    # copies, because a train step is given the state to keep
    rounded = jax.tree.map(jnp.copy, local_method.narrowed(layout, master))
    return pinned(rounded, layout.params_shardings)


# ------------------------------------------------------------------- what is sent


def _groups(layout: Layout) -> list[list[int]]:
    """Return groups of leaves that share rows: of equal dtypes, split over equal axes.

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


def _to_chunks(layout: Layout, leaves: list[jax.Array], chunk: int) -> list[jax.Array]:
    """Return [rows, chunk] of each group, filled up with zeros."""
    buffers = []
    for group in _groups(layout):
        flat = jnp.concatenate([leaves[i].reshape(-1) for i in group])
        buffers.append(jnp.pad(flat, (0, -flat.size % chunk)).reshape(-1, chunk))
    return buffers


def _to_leaves(layout: Layout, buffers: list[jax.Array]) -> list[jax.Array]:
    """Return the leaves of chunks: the inverse of `_to_chunks`."""
    by_number: dict[int, jax.Array] = {}
    for group, buffer in zip(_groups(layout), buffers, strict=True):
        flat, start = buffer.reshape(-1), 0
        for i, size in zip(group, _sizes(layout, group), strict=True):
            by_number[i] = flat[start : start + size].reshape(layout.leaves[i].local)
            start += size
    return [by_number[i] for i in range(len(by_number))]


def largest(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Return the k entries of largest magnitude of each row: places and values.

    Args:
      x: [rows, chunk].
      k: 1 to chunk; of equal ones the first count.

    Returns:
      int32 [rows, k] and x.dtype [rows, k].
    """
    _, places = lax.top_k(jnp.abs(x), k)
    return places, jnp.take_along_axis(x, places, 1)


def add_at(x: jax.Array, places: jax.Array, values: jax.Array) -> jax.Array:
    """Add values [rows, k] to x [rows, chunk], no two of a row at one place."""
    row = jnp.arange(x.shape[0])[:, None]
    return x.at[row, places.astype(jnp.int32)].add(
        values.astype(x.dtype), unique_indices=True
    )


def _to_words(arrays: list[jax.Array]) -> jax.Array:
    """Return the bytes of all arrays as uint32 [words]."""
    flat = [lax.bitcast_convert_type(x, jnp.uint8).reshape(-1) for x in arrays]
    joined = jnp.concatenate(flat)
    joined = jnp.pad(joined, (0, -joined.size % 4)).reshape(-1, 4)
    return lax.bitcast_convert_type(joined, jnp.uint32)


def _from_words(words: jax.Array, like: list[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """Return the arrays of words: the inverse of `_to_words`."""
    flat, start, arrays = lax.bitcast_convert_type(words, jnp.uint8).reshape(-1), 0, []
    for x in like:
        width = x.dtype.itemsize
        size = math.prod(x.shape) * width
        shape = x.shape if width == 1 else (*x.shape, width)
        part = flat[start : start + size].reshape(shape)
        arrays.append(lax.bitcast_convert_type(part, x.dtype))
        start += size
    return arrays


def packed(codes: jax.Array, bits: int) -> jax.Array:
    """Return the lowest `bits` bits of each integer, one after another: uint8."""
    stream = codes.reshape(-1, 1) >> lax.iota(codes.dtype, bits)[None] & 1
    stream = stream.astype(jnp.uint8).reshape(-1)
    stream = jnp.pad(stream, (0, -stream.size % 8)).reshape(-1, 8)
    return (stream << lax.iota(jnp.uint8, 8)[None]).sum(1, dtype=jnp.uint8)


def unpacked(sent: jax.Array, bits: int, shape: tuple[int, ...]) -> jax.Array:
    """Return the integers of `packed`, int32 of this shape."""
    stream = (sent[:, None] >> lax.iota(jnp.uint8, 8)[None] & 1).astype(jnp.int32)
    stream = stream.reshape(-1)[: math.prod(shape) * bits].reshape(-1, bits)
    stream = stream << lax.iota(jnp.int32, bits)[None]
    return stream.sum(1, dtype=jnp.int32).reshape(shape)


@dataclasses.dataclass(frozen=True)
class Message:
    """The format in which the k largest entries of every chunk are sent.

    Without `value_bits` an entry is its place, uint8 in chunks of 256, and its value in
    the communication dtype. With them it is one integer: a place, a sign and
    value_bits - 1 bits m. Its value is +-(low + (m + 1/2) step): the bits divide the
    range of magnitudes that a chunk sends, whose `low` and `step` are bfloat16. So
    (m + 1/2) step is exact in float32 and the sum is rounded once, for all alike. If
    the smallest magnitude is 0, `low` is -step / 2: 0 is sent as 0, with m = 0.
    """

    k: int
    chunk: int = 256
    value_bits: int | None = None

    @property
    def _place_bits(self) -> int:
        return (self.chunk - 1).bit_length()

    def shapes(self, rows: int, comm_dtype: Any) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes of what `encode` returns for a group of chunks."""
        of, size = jax.ShapeDtypeStruct, (rows, self.k)
        if self.value_bits is None:
            return [of(size, jnp.uint8), of(size, comm_dtype)]
        bits = rows * self.k * (self._place_bits + self.value_bits)
        return [of((-(-bits // 8),), jnp.uint8), of((rows, 2), jnp.bfloat16)]

    def encode(
        self, places: jax.Array, values: jax.Array, comm_dtype: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Turn [rows, k] places and values into what is sent."""
        if self.value_bits is None:
            return places.astype(jnp.uint8), values.astype(comm_dtype)
        bits = self.value_bits
        most, size = 2 ** (bits - 1) - 1, jnp.abs(values)
        low, high = size.min(1, keepdims=True), size.max(1, keepdims=True)
        zero = low == 0
        step = jnp.where(zero, high / most, (high - low) / (most + 1))
        step = step.astype(jnp.bfloat16)
        low = jnp.where(zero, -step / 2, low.astype(jnp.bfloat16))
        scales = jnp.concatenate([low, step], 1)
        low, step = jnp.split(scales.astype(values.dtype), 2, 1)
        m = jnp.where(step > 0, (size - low) / jnp.where(step > 0, step, 1), 0)
        m = jnp.clip(jnp.floor(m), 0, most).astype(jnp.int32)
        signed = (values < 0).astype(jnp.int32) << bits - 1 | m
        return packed(places << bits | signed, self._place_bits + bits), scales

    def decode(
        self, sent: jax.Array, scales: jax.Array, dtype: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Turn what is sent into places and values, [rows, k]."""
        if self.value_bits is None:
            return sent, scales.astype(dtype)
        bits, shape = self.value_bits, (scales.shape[0], self.k)
        code = unpacked(sent, self._place_bits + bits, shape)
        low, step = jnp.split(scales.astype(dtype), 2, 1)
        m = (code & 2 ** (bits - 1) - 1).astype(dtype)
        size = low + (m + 0.5) * step
        return code >> bits, jnp.where(code >> bits - 1 & 1 != 0, -size, size)


def _message(layout: Layout, message: Message) -> list[jax.ShapeDtypeStruct]:
    """Return the arrays that a worker sends: two of each group."""
    arrays = []
    for group in _groups(layout):
        rows = -(-sum(_sizes(layout, group)) // message.chunk)
        arrays += message.shapes(rows, layout.leaves[group[0]].comm_dtype)
    return arrays


# --------------------------------------------------------------------------- the round


@dataclasses.dataclass(frozen=True)
class SparseRound(LocalRound[SparseState]):
    """H inner steps of every worker, and one gather of what changed most."""

    steps: InnerSteps
    outer: optax.GradientTransformation
    message: Message
    decay: float  # of e_i
    weighted: bool

    overlaps = False

    @property
    def hops(self) -> tuple[Hop, ...]:  # type: ignore[override]
        return (Hop(lambda x: x, self._gather),)

    def open(
        self, params: PyTree, state: SparseState
    ) -> tuple[None, tuple[()], SparseState]:
        return None, (), state

    def theta(self, rows: PyTree, rest: SparseState) -> PyTree:
        return rest.layout.to_rows(rest.master)

    def send(
        self, in_flight: Sparse, owner: tuple[()], extra: dict[str, Any]
    ) -> Sparse:
        """Return the message: layout, every worker's words, e_i(t+1), and sum_i w_i."""
        layout, words, error, weight = in_flight
        return layout, words, error, weight.sum()

    def outgoing(
        self, params: PyTree, rest: SparseState, progress: LocalProgress
    ) -> Sparse:
        """Return (layout, every worker's words, e_i(t+1), w_i)."""
        layout = rest.layout
        weight = counted(progress.sums.weight, self.weighted)

        def local(
            weight: jax.Array, x: PyTree, theta: PyTree, error: PyTree
        ) -> tuple[jax.Array, PyTree]:
            counts = weight[0] != 0

            def moved(x: jax.Array, theta: jax.Array, e: jax.Array) -> jax.Array:
                before = jnp.where(counts, self.decay * e[0], e[0])
                return weight[0].astype(e.dtype) * difference(x, theta[0]) + before

            u = jax.tree.leaves(jax.tree.map(moved, x, theta, error))
            words: list[jax.Array] = []
            unsent = []
            buffers = _to_chunks(layout, u, self.message.chunk)
            for buffer, group in zip(buffers, _groups(layout), strict=True):
                places, values = largest(buffer, self.message.k)
                values = jnp.where(counts, values, 0)
                comm_dtype = layout.leaves[group[0]].comm_dtype
                message = self.message.encode(places, values, comm_dtype)
                words += message
                places, sent = self.message.decode(*message, buffer.dtype)
                unsent.append(add_at(buffer, places, -sent))
            left = [e[None] for e in _to_leaves(layout, unsent)]
            return _to_words(words), layout.treedef.unflatten(left)

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
        """Return the specs of parameters, of rows, and of each device's own arrays."""
        spec = lambda s: s.spec  # noqa: E731
        at = jax.tree.map(spec, layout.params_shardings)
        rows_at = jax.tree.map(spec, layout.grads_shardings)
        return at, rows_at, P((*layout.axis, *layout.model_axes))

    def _sum(self, layout: Layout, words: jax.Array) -> PyTree:
        """sum_i s_i, added up in the workers' order, in the master dtype."""
        like = _message(layout, self.message)
        chunk = self.message.chunk

        def local(words: jax.Array) -> PyTree:
            def add(
                total: list[jax.Array], words: jax.Array
            ) -> tuple[list[jax.Array], None]:
                parts = _from_words(words, like)
                sent = zip(total, parts[::2], parts[1::2], strict=True)
                decode = self.message.decode
                return [add_at(x, *decode(a, b, x.dtype)) for x, a, b in sent], None

            leaves = [layout.leaves[group[0]] for group in _groups(layout)]
            sizes = [sum(_sizes(layout, group)) for group in _groups(layout)]
            none = [
                jnp.zeros((-(-size // chunk), chunk), leaf.master)
                for size, leaf in zip(sizes, leaves, strict=True)
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
        self, rows: PyTree, rest: SparseState, progress: LocalProgress, received: Sparse
    ) -> tuple[PyTree, SparseState]:
        layout, words, error, total = received
        sums = self._sum(layout, words)
        at = jax.tree.map(lambda leaf: leaf.spec, layout.tree(lambda leaf: leaf))
        specs = at, jax.tree.map(lambda _: P(), rest.outer)
        advance = in_worker(self._advance, layout, specs)
        run = over_data(advance, layout.mesh, layout.axis, P(), P())
        master, outer = run(total, sums, rest.master, rest.outer)
        state = rest._replace(
            master=master, outer=outer, inner=progress.inner, error=error
        )
        return layout.to_rows(local_method.narrowed(layout, master)), state


def sparse_rounds(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    message: Message,
    mesh: Mesh,
    local_steps: int,
    options: RoundOptions,
    decay: float = 1.0,
    state: type[SparseState] = SparseState,
) -> LocalMethod:
    """Return the method of these parts; see the module's equations.

    Raises:
      ValueError: in one line, before any device work, what does not fit.
    """
    local_steps = local_method.checked_steps("local_steps", local_steps)
    local_method.check_optimizer(
        "outer", outer, "every worker takes the outer step itself"
    )
    common = common_attributes(mesh, options, RoundOptions)
    weighted = options.get("weighted", True)
    steps = InnerSteps(inner, local_steps)

    def begin(layout: Layout, master: PyTree) -> PyTree:
        like = jax.eval_shape(outer.init, master)
        homes = jax.tree.map(lambda _: layout.sharding(), like)
        return in_auto(outer.init, layout, homes)(master)

    def init(params: PyTree) -> SparseState:
        layout = layout_of(params, common)

        def make(params: PyTree) -> SparseState:
            # a copy: a train step is given the parameters and the state to keep
            master = jax.tree.map(jnp.copy, local_method.widened(layout, params))
            error = layout.to_rows(jax.tree.map(jnp.zeros_like, master))
            rows = local_method.init_rows(layout, inner, params)
            counts = jnp.int32(0), jnp.int32(0)
            began = begin(layout, master)
            return state(layout, *counts, master, began, rows, error)

        local_method.check_wire(layout, weighted and not message.value_bits)
        return placed_state(make, params, layout)

    check = local_method.check_form("outer", outer)
    return local_method.local_method(
        inner,
        common,
        steps_per_call=local_steps,
        state_type=state,
        check_parts=lambda state: check(state.layout, state),
        make_state=init,
        round=lambda phase: SparseRound(steps, outer, message, decay, weighted),
        on=lambda mesh, axis, specs: sparse_rounds(
            inner,
            outer,
            message,
            mesh,
            local_steps,
            options | {"axis_name": axis, "param_specs": specs},
            decay,
            state,
        ),
        delayed=False,
    )


def entries(keep: object, chunk: int) -> int:
    """Return how many entries of every chunk are sent."""
    number = whole_numbers(keep)
    if type(number) is int and 1 <= number <= chunk:
        return number
    if isinstance(number, float | np.floating) and 0 < number <= 1:
        return max(1, round(float(number) * chunk))
    raise ValueError(
        f"keep is {keep!r}: give the part of the entries to send, above 0.0 and at "
        f"most 1.0, or an integer from 1 to {chunk}, how many of every {chunk}."
    )
