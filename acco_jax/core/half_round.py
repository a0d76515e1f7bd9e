"""A half-round: its communication, hop by hop, and the computation beside it.

    in-flight --send--> message --(encode, collective) per hop--> decode --> received
                                    overlapped: compute, a piece for each hop

`Round` is what a method does in one call of the train step, and two functions run it:
`run` takes a message over the hops, `run_call` is a whole call as one program. The
forms of a train step differ only in what runs beside the hops: nothing in a plain
`update`, pieces of the computation in a single program (one piece before the exchange
with one worker, and on CPU, which overlaps nothing there), another thread in two-thread
execution.
"""

import abc
from collections.abc import Callable
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from acco_jax.core.dtypes import promoted
from acco_jax.core.gradients import Accumulator, Sums
from acco_jax.core.groups import platform_of
from acco_jax.core.leaves import PyTree, Rng
from acco_jax.core.state import StateT

barrier = lax.optimization_barrier


class Hop(NamedTuple):
    """One collective of an exchange; both functions turn a message into a message."""

    # decodes what the hop before brought, lets its owner act on it, and encodes what
    # is sent next; no large collective
    encode: Callable[[PyTree], PyTree]
    collective: Callable[[PyTree], PyTree]  # only the collective


class Inputs(NamedTuple):
    """The inputs of a call of the train step, beside the parameters."""

    gradients: Accumulator
    batch: PyTree  # leaves (n * microbatches * b, ...), row after row of each worker
    counts: jax.Array | None  # (n,) int32: microbatches of each worker; None: all
    rng: Rng


class Round(abc.ABC, Generic[StateT]):
    """One call of a method: a computation, and an exchange in several hops.

    With `overlaps`, the exchange sends what the call before left in the state, and the
    computation runs beside it. Without, it sends what this call has computed.
    """

    overlaps: bool  # whether the exchange runs beside the computation
    hops: tuple[Hop, ...]  # of the exchange, in their order
    late: bool = False  # whether `finish` computes, not only puts things in place
    drops: bool = True  # whether it has each worker's gradients before they are reduced

    @abc.abstractmethod
    def open(self, params: PyTree, state: StateT) -> tuple[PyTree, PyTree, PyTree]:
        """Take a state apart.

        Returns:
          (in_flight, owner, rest): what the call before left to be sent, or None if the
          round does not overlap; what the owners of shards advance; everything else.
        """

    @abc.abstractmethod
    def compute(
        self,
        k: int,
        parts: int,
        progress: PyTree,
        params: PyTree,
        rest: PyTree,
        inputs: Inputs,
    ) -> PyTree:
        """Compute the k-th of `parts` pieces: one for each hop, or one for all.

        `progress` is what the piece before returned; None for the first, piece 0. The
        number of pieces changes no bit of the last one's result.
        """

    def close(self, progress: PyTree, rest: PyTree, inputs: Inputs) -> PyTree:
        """Return the progress of all pieces as it is kept. No collective."""
        return progress

    def outgoing(self, params: PyTree, rest: PyTree, progress: PyTree) -> PyTree:
        """Return what a closed computation leaves in flight. No collective.

        Called only where the round does not overlap.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def send(self, in_flight: PyTree, owner: PyTree, extra: dict[str, Any]) -> PyTree:
        """Return the message before the first hop; sum what is small."""

    def decode(self, message: PyTree, params: PyTree) -> PyTree:
        """Return what the last hop brought, as `finish` needs it. No collective."""
        return message

    def out_shardings(self, owner: PyTree) -> PyTree:
        """Return the shardings of what `decode` returns; None: the compiler chooses."""
        return None

    @abc.abstractmethod
    def finish(
        self,
        params: PyTree,
        rest: PyTree,
        inputs: Inputs,
        progress: PyTree,
        received: PyTree,
    ) -> tuple[PyTree, StateT, Sums, jax.Array]:
        """End the call with closed progress and what was received; no large collective.

        Returns:
          The new parameters and state, the sums of this call without gradients, and the
          norm [] of the mean gradient.
        """


def run(
    hops: tuple[Hop, ...],
    message: PyTree,
    params: PyTree = None,
    compute: Callable[[int, PyTree, PyTree], PyTree] | None = None,
    progress: PyTree = None,
) -> tuple[PyTree, PyTree, PyTree]:
    """Take a message over the hops, a piece of computation beside each.

    Barriers pin the order: without them a compiler overlaps at most one collective. The
    last one is pinned too, or the computation would wait for it. Where nothing runs
    beside, none is needed, and each costs a compiler time.

    `compute` is (k, progress, params) -> progress, the k-th piece. Returns the message
    after the last hop, the progress, and params.
    """
    for k, hop in enumerate(hops):
        if compute is None:
            message = hop.collective(hop.encode(message))
            continue
        message, progress, params = barrier((hop.encode(message), progress, params))
        message, progress = hop.collective(message), compute(k, progress, params)
        message, progress, params = barrier((message, progress, params))
    return message, progress, params


def run_call(
    round: Round[StateT],
    params: PyTree,
    state: StateT,
    inputs: Inputs,
    extra: dict[str, Any],
) -> tuple[PyTree, StateT, dict[str, Any]]:
    """Run a call of the train step as one program; see `acco_jax.make_train_step`."""
    in_flight, owner, rest = round.open(params, state)

    if round.overlaps and asynchronous(inputs.gradients):

        def compute(k: int, progress: PyTree, params: PyTree) -> PyTree:
            parts = len(round.hops)
            return round.compute(k, parts, progress, params, rest, inputs)

        message = round.send(in_flight, owner, extra)
        message, params, rest = barrier((message, params, rest))
        message, progress, params = run(round.hops, message, params, compute)
        received = round.decode(message, params)
        progress = round.close(progress, rest, inputs)
    else:
        progress = computed(round, params, rest, inputs)
        if not round.overlaps:
            in_flight = round.outgoing(params, rest, progress)
        received = exchanged(round, in_flight, owner, params, extra)
    params, state, sums, norm = round.finish(params, rest, inputs, progress, received)
    return params, state, metrics(sums, inputs.counts, norm, state.steps)


def computed(round: Round, params: PyTree, rest: PyTree, inputs: Inputs) -> PyTree:
    """Run the whole computation of a call, with nothing beside it."""
    progress = round.compute(0, 1, None, params, rest, inputs)
    return barrier(round.close(progress, rest, inputs))


def asynchronous(gradients: Accumulator) -> bool:
    """Return whether a program of these workers computes while it communicates.

    XLA:CPU does one after the other, and one worker sends nothing. There a second piece
    of the computation would be a second copy of the model to compile, and nothing else.
    """
    return gradients.workers > 1 and platform_of(gradients.mesh) != "cpu"


def exchanged(
    round: Round,
    in_flight: PyTree,
    owner: PyTree,
    params: PyTree,
    extra: dict[str, Any],
) -> PyTree:
    """Run a whole exchange, with nothing beside it, and return what it brought."""
    message = round.send(in_flight, owner, extra)
    return round.decode(run(round.hops, message)[0], params)


def metrics(
    sums: Sums, counts: jax.Array | None, norm: jax.Array, steps: jax.Array
) -> dict[str, Any]:
    """Return means over the call's microbatches; see `acco_jax.make_train_step`."""
    loss, weight, dropped = _totals(sums)
    valid = weight != 0
    dtype = promoted(loss.dtype, weight.dtype)
    divisor = jnp.where(valid, weight, 1).astype(dtype)
    means = {
        "loss": jnp.where(valid, loss.astype(dtype) / divisor, jnp.nan),
        "weight": weight,
        "grad_norm": norm,
        "step": steps,
        "aux": jax.tree.map(lambda x: x.sum(0), sums.aux),
    }
    return means | dropped | ({} if counts is None else {"counts": counts})


def _totals(sums: Sums) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Return the loss and the weight of all workers, and how often each was dropped.

    All are in one sum over the workers, so that none needs a collective of its own.
    """
    if sums.dropped is None:
        weight = sums.weight.sum()
        return sums.loss.sum(), weight, {}
    dtype = promoted(sums.loss.dtype, sums.weight.dtype)
    columns = (sums.loss[:, None], sums.weight[:, None], sums.dropped)
    rows = jnp.concatenate([x.astype(dtype) for x in columns], axis=1)
    loss, weight, *dropped = jnp.split(rows.sum(0), (1, 2))
    return loss[0], weight[0], {"dropped": dropped[0].astype(sums.dropped.dtype)}
