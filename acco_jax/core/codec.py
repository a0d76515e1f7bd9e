"""The communication of a half-round: its bits, and the encoding at both ends.

    gradients --(encode, reduce)--> of each data axis in turn --(decode)--> sums
    shards --(encode_params)--> gather, one axis at a time --(decode_params)--> params

Plain communication sends the layout's buffers. Quantized, with Q of
`acco_jax.core.quantize` and every replica of the parameters holding the same r:

    gather  the owner of a shard, which also knows its part of r, sends
            d = Q(point - r), and every worker takes r + d. The next difference corrects
            this one's rounding error, so errors do not accumulate
    reduce  worker i sends Q(g_i + e_i) and keeps e_i' = g_i + e_i - Q(g_i + e_i) for
            its next gradient; the owner adds up what arrives, in float32. Without
            error feedback, worker i sends Q(g_i), with its scales apart: 0 stays 0

With several data axes only the last to be reduced, the slowest network, is quantized.
There the rounded values are the sums g_i of a host's (or slice's) workers.

Both round to nearest. The reduction is an all-to-all. GPUs overlap it with computation.
The compilers of TPUs (v5e, v5p, v6e, tpu7x) overlap it between slices, not within one.
GPUs and TPUs all gather asynchronously.

Sources: differences to what the receiver holds, as CHOCO-SGD (arXiv 1902.00340); error
feedback, Karimireddy et al. (arXiv 1901.09847).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from acco_jax.core.buffers import Arrays, Outgoing, Reduced, RoundingError
from acco_jax.core.layout import Layout
from acco_jax.core.leaves import Leaf, PyTree, wide
from acco_jax.core.microbatches import Count, whole_number, whole_numbers
from acco_jax.core.quantize import BITS, dequantize, dequantized_sum, quantize
from acco_jax.core.select import difference, masked


class Residual(NamedTuple):
    """The memory of quantized communication; a part of a method's state."""

    replica: PyTree  # r: shards of the parameters as all hold them; None: exact
    error: RoundingError | None  # e: each worker's, of what it sends; None: exact


@dataclasses.dataclass(frozen=True)
class Codec:
    """The way in which one half-round communicates.

    Every function takes the residue of the half-round before, None if communication is
    plain. Functions that encode return the new one.
    """

    gather_bits: int | None = None  # of differences; None: values, communication dtype
    reduce_bits: int | None = None  # of gradients; None: in the communication dtype
    feedback: bool = True  # add a gradient's rounding error to the next one

    def encode(
        self,
        layout: Layout,
        residual: Residual | None,
        buffers: Arrays,
        axis: str,
        weight: jax.Array,
    ) -> tuple[Residual | None, Arrays]:
        """Return (residue, what `reduce` takes), to reduce gradients over a data axis.

        The buffers are local gradients, reduced over the data axes before this one, and
        `weight` [] is the total weight.
        """
        if (bits := self._bits(layout, axis)) is None:
            return residual, buffers
        if not self.feedback:
            return residual, quantized(layout, buffers, bits, apart=True)
        assert residual is not None and residual.error is not None
        before = residual.error.buffers
        own = tuple(wide(g) + wide(e) for g, e in zip(buffers, before, strict=True))
        words = quantized(layout, own, bits)
        arrives = layout.on_buffers(_values(bits))(words)

        def rounding_error(
            own: jax.Array, sent: jax.Array, before: jax.Array
        ) -> jax.Array:
            left = jnp.where(jnp.isfinite(sent), own - sent, 0).astype(before.dtype)
            return jnp.where(weight != 0, left, before)  # without weight nothing counts

        error = RoundingError(tuple(map(rounding_error, own, arrives, before)))
        return residual._replace(error=error), words

    def reduce(self, layout: Layout, buffers: Arrays, axis: str) -> Arrays:
        """Run the collective over one data axis."""
        if self._bits(layout, axis) is None:
            return layout.reduce_scatter(buffers, axis)
        return layout.all_to_all(buffers, axis)

    def _bits(self, layout: Layout, axis: str) -> int | None:
        """Return the bits of gradients over a data axis: None except on the slowest."""
        return self.reduce_bits if axis == layout.reduce_order[-1] else None

    def decode(
        self, layout: Layout, reduced: Arrays, whole: Arrays, valid: jax.Array
    ) -> Reduced | PyTree:
        """Return the sums over workers, in the master weights' dtypes.

        They are packed, or shards where a backward pass has reduced them leaf by leaf.
        Unless `valid`, a bool [], they are 0, as plain gradients without weight are.
        """
        bits, senders = self.reduce_bits, layout.mesh.shape[layout.reduce_order[-1]]
        if bits is None:
            return layout.reduced(reduced, whole)
        add = functools.partial(
            dequantized_sum, bits=bits, senders=senders, apart=not self.feedback
        )
        reduced = layout.on_buffers(lambda xs: tuple(map(add, xs)))(reduced)
        return layout.reduced(masked(valid, reduced), whole)

    def encode_params(
        self, layout: Layout, residual: Residual | None, point: PyTree
    ) -> tuple[Residual | None, Outgoing]:
        """Return (residue, what `gather` takes) of the shards of a new point."""
        whole = layout.whole(point)
        if residual is None:
            return residual, Outgoing(layout.join(point), whole)
        if self.gather_bits is None:
            if residual.replica is not None:
                new = layout.map(lambda f, x: x if f.whole else f.on_wire(x), point)
                replica = layout.map(_moved, residual.replica, new)
                residual = residual._replace(replica=replica)
            return residual, Outgoing(layout.join(point), whole)
        away = layout.map(
            lambda f, x, r: difference(x, f.on_wire(r)), point, residual.replica
        )
        buffers = quantized(layout, layout.join(away, jnp.float32), self.gather_bits)
        step = layout.split(layout.on_buffers(_values(self.gather_bits))(buffers))
        replica = layout.map(_arrived, residual.replica, step, point)
        return residual._replace(replica=replica), Outgoing(buffers, whole)

    def decode_params(
        self,
        layout: Layout,
        residual: Residual | None,
        gathered: Outgoing,
        params: PyTree,
    ) -> PyTree:
        """Return the new parameters, from what was gathered and the old parameters."""
        if self.gather_bits is None:
            new = layout.unpack(gathered)
            if residual is None or residual.replica is None:
                return new
            return layout.map(_moved, params, new)
        values = layout.on_buffers(_values(self.gather_bits), gathered=True)
        step = layout.unpack(
            gathered._replace(buffers=values(gathered.buffers)), jnp.float32
        )
        return layout.map(_arrived, params, step, step)


def quantized(
    layout: Layout,
    buffers: tuple[jax.Array, ...],
    bits: int,
    *,
    apart: bool = False,
) -> tuple[jax.Array, ...]:
    """Quantize packed buffers to `bits` bits.

    A row may hold a leaf that a model axis splits and one that is replicated along it
    and must stay so. The devices of such an axis therefore share their scales.
    """
    axes = tuple(a for a in layout.model_axes if layout.mesh.shape[a] > 1)
    own = functools.partial(quantize, bits=bits, axes=axes, apart=apart)
    return layout.on_buffers(lambda xs: tuple(map(own, xs)))(buffers)


def _values(bits: int | None) -> Callable[[tuple[jax.Array, ...]], Any]:
    assert bits is not None
    return lambda buffers: tuple(dequantize(q, bits) for q in buffers)


# Replicas and the shard's owner compute these alike, on a leaf's elements.


def _arrived(
    leaf: Leaf, old: jax.Array, step: jax.Array, point: jax.Array
) -> jax.Array:
    """Return `old` moved by an arrived step; for whole leaves, to the point itself."""
    if leaf.whole:
        return _moved(leaf, old, point)
    new = leaf.on_wire(old) + step.astype(leaf.master)
    return _moved(leaf, old, leaf.on_wire(new))


def _moved(leaf: Leaf, old: jax.Array, new: jax.Array) -> jax.Array:
    """Return the result of optax.apply_updates on `old` and the update `new - old`.

    Replicas that a loop updates itself are then bitwise those of the train step. From a
    number that is not finite no difference leads away, so that becomes the new one.
    """
    before, after = old.astype(leaf.master), new.astype(leaf.master)
    moved = before + (after - before)
    return jnp.where(jnp.isfinite(before), moved, after).astype(leaf.dtype)


@dataclasses.dataclass(frozen=True)
class Codecs:
    """The codecs of a method, one for each half-round."""

    phases: tuple[Codec, ...] = (Codec(),)  # of half-rounds 0, 1, ..., over and over
    # one half-round in this many, from the first on, sends values instead of
    # differences; 0: never
    resync_every: int = 0

    @property
    def all(self) -> tuple[Codec, ...]:
        """All codecs, as `turn` numbers them."""
        if not self.resync_every:
            return self.phases
        return (*self.phases, Codec(None, self.phases[0].reduce_bits))

    @property
    def period(self) -> int:
        """The number of half-rounds after which the codecs repeat in order."""
        return math.lcm(len(self.phases), self.resync_every or 1)

    @property
    def differ(self) -> bool:
        return len(set(self.all)) > 1

    @property
    def gather_quantized(self) -> bool:
        return any(w.gather_bits for w in self.phases)

    @property
    def feedback(self) -> bool:
        """Return whether a gradient's rounding error is added to the next one."""
        return self.phases[0].reduce_bits is not None and self.phases[0].feedback

    def turn(self, call: Count) -> Count:
        """Return the number of a half-round's codec, for an int or an array."""
        number = call % len(self.phases)
        if self.resync_every:
            # 1 or 0, without a bool, which strict promotion does not take for a number
            full = (self.resync_every - call % self.resync_every) // (self.resync_every)
            number = number * (1 - full) + len(self.phases) * full
        return number

    def at(self, call: int) -> Codec:
        return self.all[self.turn(call)]

    def start(self, layout: Layout, params: PyTree) -> Residual | None:
        """Return the `Residual` before the first half-round; None if none is needed."""
        if not (self.gather_quantized or self.feedback):
            return None
        error = RoundingError(_crossing(layout)) if self.feedback else None
        return self.follow(layout, Residual(None, error), params)

    def follow(
        self, layout: Layout, residual: Residual | None, params: PyTree
    ) -> Residual | None:
        """Return the residue with the replica that these parameters are."""
        if not self.gather_quantized:
            return residual
        assert residual is not None
        cast = lambda leaf, x: x.astype(leaf.dtype)  # noqa: E731
        return residual._replace(replica=layout.map(cast, layout.shard(params)))

    def check(self, residual: Residual | None) -> None:
        """Raise a ValueError unless a state's residue fits these codecs."""
        replica, error = residual or (None, None)
        has = replica is not None, error is not None
        if has != (self.gather_quantized, self.feedback):
            raise ValueError(
                f"the state was made {'with' if has[0] else 'without'} gather_bits and "
                f"{'with' if has[1] else 'without'} reduce_bits, the method was not: "
                "give the state of tx.init for the same tx."
            )


def _crossing(layout: Layout) -> tuple[jax.Array, ...]:
    """Return zeros like `Residual.error`: what crosses the slowest data axis."""
    before = layout.workers // layout.mesh.shape[layout.reduce_order[-1]]
    part = lambda xs: tuple(x[: x.shape[0] // before] for x in xs)  # noqa: E731
    return layout.on_buffers(part)(layout.zeros().buffers)


def codecs(
    gather_bits: int | tuple[int | None, int | None] | None,
    reduce_bits: int | None,
    resync_every: int,
    *,
    calls_per_step: int,
) -> Codecs:
    """Return the codecs for a method's arguments; see `acco_jax.acco`.

    Raises:
      ValueError: an argument is not one of its choices.
    """
    bits: tuple[int | None, ...]
    gather_bits, reduce_bits = map(whole_numbers, (gather_bits, reduce_bits))
    if isinstance(gather_bits, tuple | list):
        if len(gather_bits) != calls_per_step or calls_per_step != 2:
            raise ValueError(
                f"gather_bits is {gather_bits!r}: a pair (estimate, commit) is for "
                "acco, others take one number."
            )
        bits = (gather_bits[1], gather_bits[0])  # half-round 0 is a commit
    else:
        bits = (gather_bits,)
    if any(b is not None and (type(b) is not int or b not in BITS) for b in bits):
        raise ValueError(f"gather_bits is {gather_bits!r}: choose None, 8 or 4.")
    if reduce_bits is not None and (type(reduce_bits) is not int or reduce_bits != 8):
        raise ValueError(f"reduce_bits is {reduce_bits!r}: choose None or 8.")
    remedy = "give a number of half-rounds, 0 for never."
    resync_every = whole_number("resync_every", resync_every, 0, remedy)
    if resync_every and bits == (None,) * len(bits):
        raise ValueError(
            f"resync_every is {resync_every}, but without gather_bits every gather "
            "sends values: leave it out."
        )
    phases = tuple(Codec(b, reduce_bits) for b in bits)
    return Codecs(phases if len(set(phases)) > 1 else phases[:1], resync_every)
