"""Gossip: each worker averages with neighbours instead of all-reducing (1710.06952).

With x_i(t) worker i's parameters, W(t) doubly stochastic and u_i what H local steps
from x_i(t) add to them:

    x_i(t+1) = sum_j W_ij(t) x_j(t) + u_i(t)

The parameters that are exchanged are those from before the steps, so the exchange runs
beside them, as in AD-PSGD, but bulk-synchronously: all workers exchange at each call.
There is no common copy; the mean over the workers moves by the mean of the u_i alone.

W(t) by topology, with n workers:
    ring         (left + self + right) / 3            sends 2 copies of the parameters
    exponential  (self + the one 2^k before) / 2, k = t mod ceil(log2 n)    sends 1
    random       (self + partner) / 2 in a perfect matching; one of a round-robin set of
                 n - 1 (n if odd: one stays alone), drawn for each call     sends 1
    complete     the mean of all: an all-reduce         sends up to 2 (n - 1) / n

As all of them are doubly stochastic, SGP's push-sum weights (1811.10792) would stay 1.
Only the difference that mixing makes is computed from rounded values,

    x_i(t+1) = x_i(t) + u_i(t) + (sum_j W_ij r(x_j) - r(x_i)),

    r rounds to the communication dtype,

so that the mean over the workers is kept exactly in 16 bits too; but for the complete
graph, whose all-reduce adds up in the communication dtype.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Self, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh

from acco_jax.core.half_round import Hop
from acco_jax.core.layout import Layout
from acco_jax.core.leaves import PyTree, wide
from acco_jax.methods.local import local_method
from acco_jax.methods.local.local_method import (
    InnerSteps,
    LocalMethod,
    LocalProgress,
    LocalRound,
)
from acco_jax.methods.method import (
    CommonOptions,
    common_attributes,
    layout_of,
    placed_state,
)
from acco_jax.methods.optimizer import pinned

TOPOLOGIES = ("ring", "exponential", "random", "complete")


class GossipState(NamedTuple):
    """State of `gossip`; the parameters of the loop are rows, x_i(t)."""

    layout: Layout  # static: of the parameters; nothing is sharded
    calls_done: jax.Array  # int32 []: calls so far
    steps: jax.Array  # int32 []: inner steps so far
    inner: PyTree  # rows: each worker's own optimizer state
    master: PyTree  # rows: x_i(t) in float32 if any parameter is narrower, else None

    def shardings(self) -> Self:
        return local_method.shardings(self, rows=("inner", "master"))

    def committed(self, params: PyTree) -> PyTree:
        """The mean over the workers, replicated."""
        if self.master is None:
            local_method.check_rows(self.layout, params)
        return _committed(self, params)

    def theta(self, params: PyTree) -> PyTree:
        rows = params if self.master is None else self.master
        mean = jax.tree.map(
            lambda x: x.mean(0), local_method.widened(self.layout, rows)
        )
        return local_method.narrowed(self.layout, mean)


@jax.jit
def _committed(state: GossipState, params: PyTree) -> PyTree:
    return pinned(state.theta(params), state.layout.params_shardings)


def matchings(n: int) -> list[np.ndarray]:
    """Round-robin: each pair of n meets in exactly one of these; partner of each."""
    players = list(range(n + n % 2))  # the last one of an odd number is nobody
    pairings = []
    for _ in range(len(players) - 1):
        partner = np.arange(n)
        for a, b in zip(players, reversed(players), strict=True):
            if a < n and b < n:
                partner[a] = b
        pairings.append(partner)
        players.insert(1, players.pop())
    return pairings


# layout, call number, x_i in float32 or wider; then also what mixing has changed
Starting = tuple[Layout, jax.Array, PyTree]
Mixing = tuple[Layout, jax.Array, PyTree, PyTree]
# (x in the communication dtype, call number) -> a part of sum_j W_ij x_j,
# inside a shard_map
Term = Callable[[jax.Array, jax.Array], jax.Array]


def terms(
    topology: str, mesh: Mesh, axis: tuple[str, ...], phase: int, seed: int
) -> tuple[Term, ...]:
    """Return the terms of sum_j W_ij x_j, in float32 or wider; one collective each.

    Of one worker, W is 1.
    """
    # a permutation numbers the workers in the mesh's order, rows are in that of `axis`
    names = [a for a in mesh.axis_names if a in axis]
    places = np.arange(math.prod(mesh.shape[a] for a in names))
    places = places.reshape([mesh.shape[a] for a in names])
    places = places.transpose([names.index(a) for a in axis]).ravel()
    me = np.arange(n := len(places))

    def taken(peers: np.ndarray) -> Callable[[jax.Array], jax.Array]:  # peers[i]'s on i
        pairs = [(int(places[p]), int(places[i])) for i, p in enumerate(peers)]
        return lambda x: wide(lax.ppermute(x, axis, pairs))

    def with_partner(peers: np.ndarray) -> Callable[[jax.Array], jax.Array]:
        return lambda x: (wide(x) + taken(peers)(x)) / 2

    def behind(x: jax.Array, call: jax.Array) -> jax.Array:
        return (wide(x) + taken((me - 1) % n)(x)) / 3

    def ahead(x: jax.Array, call: jax.Array) -> jax.Array:
        return taken((me + 1) % n)(x) / 3

    def exponential(x: jax.Array, call: jax.Array) -> jax.Array:
        return with_partner((me - 2**phase) % n)(x)

    def random(x: jax.Array, call: jax.Array) -> jax.Array:
        pairs = matchings(n)
        key = jax.random.fold_in(jax.random.key(seed), call)
        which = jax.random.randint(key, (), 0, len(pairs))
        return lax.switch(which, [with_partner(p) for p in pairs], x)

    def complete(x: jax.Array, call: jax.Array) -> jax.Array:
        return wide(lax.psum(x, axis)) / n

    if n == 1:
        return (lambda x, call: wide(x),)
    return {
        "ring": (behind, ahead),
        "exponential": (exponential,),
        "random": (random,),
        "complete": (complete,),
    }[topology]


@dataclasses.dataclass(frozen=True)
class GossipRound(LocalRound[GossipState]):
    """H inner steps of every worker, and beside them one exchange with neighbours."""

    steps: InnerSteps
    terms: tuple[Term, ...]

    overlaps = True

    @property
    def hops(self) -> tuple[Hop, ...]:  # type: ignore[override]
        same = lambda x: x  # noqa: E731
        return tuple(
            Hop(same, functools.partial(self._exchange, term)) for term in self.terms
        )

    def open(
        self, params: PyTree, state: GossipState
    ) -> tuple[Starting, tuple[()], GossipState]:
        """Workers send the parameters with which they start."""
        theta = params if state.master is None else state.master
        return (state.layout, state.calls_done, theta), (), state

    def send(
        self, in_flight: Starting, owner: tuple[()], extra: dict[str, Any]
    ) -> Mixing:
        """Return the message: layout, call, r(x_i), and the change by mixing so far."""
        layout, call, theta = in_flight
        sent = layout.map(lambda leaf, x: x.astype(leaf.comm_dtype), theta)
        change = jax.tree.map(jnp.negative, local_method.widened(layout, sent))
        return layout, call, sent, change

    def _exchange(self, term: Term, message: Mixing) -> Mixing:
        """Add a term; one buffer of each communication dtype."""
        layout, call, sent, change = message
        by_dtype: dict[np.dtype, list[int]] = {}
        for i, leaf in enumerate(layout.leaves):
            by_dtype.setdefault(leaf.comm_dtype, []).append(i)

        def local(call: jax.Array, sent: PyTree, change: PyTree) -> PyTree:
            leaves, out = jax.tree.leaves(sent), jax.tree.leaves(change)
            for members in by_dtype.values():
                buffer = jnp.concatenate([leaves[i].reshape(-1) for i in members])
                ends = np.cumsum([leaves[i].size for i in members])[:-1]
                parts = jnp.split(term(buffer, call), ends)
                for i, part in zip(members, parts, strict=True):
                    out[i] += part.reshape(out[i].shape).astype(out[i].dtype)
            return layout.treedef.unflatten(out)

        specs = jax.tree.map(lambda s: s.spec, layout.grads_shardings)
        run = layout.everywhere(local, (jax.P(), specs, specs), specs)
        return layout, call, sent, run(call, sent, change)

    def conclude(
        self, rows: PyTree, rest: GossipState, progress: LocalProgress, received: Mixing
    ) -> tuple[PyTree, GossipState]:

        def mixed(x: jax.Array, change: jax.Array) -> jax.Array:
            return jnp.where(jnp.isinf(x), x, x + change)  # a mask's stay as they are

        theta = jax.tree.map(mixed, progress.theta, received[-1])
        master = None if rest.master is None else theta
        state = rest._replace(inner=progress.inner, master=master)
        return local_method.narrowed(rest.layout, theta), state


def gossip(
    inner: optax.GradientTransformation,
    *,
    mesh: Mesh,
    topology: str = "exponential",
    local_steps: int = 1,
    seed: int = 0,
    **options: Unpack[CommonOptions],
) -> LocalMethod:
    """Average with neighbours beside the local steps, without a common copy.

    Bytes sent per worker and call: see the table in the module's docstring, in the
    communication dtype. The steps overlap the collective of the exponential and of the
    complete graph. Half of them overlap each of a ring's two: with H = 1 only one.
    Random pairs are chosen at run time by a conditional, which a GPU executes before it
    goes on.

    Args:
      inner: each worker's optimizer, an optax transformation.
      mesh: the devices.
      topology: 'ring', 'exponential', 'random' or 'complete'.
      local_steps: H, inner steps from one exchange to the next.
      seed: of the random pairs; the same on every worker.
      **options: see `acco_jax.methods.method.CommonOptions`.

    Returns:
      A `LocalMethod`. A worker whose count is 0 takes no step, but exchanges.

    Raises:
      ValueError: in one line, before any device work, what does not fit.

    References:
      Lian et al., Asynchronous Decentralized Parallel Stochastic Gradient Descent
      (https://arxiv.org/abs/1710.06952); Assran et al., Stochastic Gradient Push for
      Distributed Deep Learning (https://arxiv.org/abs/1811.10792)
    """
    local_steps = local_method.checked_steps("local_steps", local_steps)
    if topology not in TOPOLOGIES:
        raise ValueError(
            f"topology is {topology!r}: choose one of {', '.join(TOPOLOGIES)}."
        )
    common = common_attributes(mesh, options, CommonOptions)
    n = math.prod(mesh.shape[a] for a in common["axis"])
    steps = InnerSteps(inner, local_steps)

    def init(params: PyTree) -> GossipState:
        layout = layout_of(params, common)

        def make(params: PyTree) -> GossipState:
            rows = local_method.init_rows(layout, inner, params)
            master = local_method.master_rows(layout, params)
            return GossipState(layout, jnp.int32(0), jnp.int32(0), rows, master)

        return placed_state(make, params, layout)

    def round_of(phase: int) -> GossipRound:
        return GossipRound(steps, terms(topology, mesh, common["axis"], phase, seed))

    return local_method.local_method(
        inner,
        common,
        steps_per_call=local_steps,
        state_type=GossipState,
        make_state=init,
        round=round_of,
        on=lambda mesh, axis, specs: gossip(
            inner,
            mesh=mesh,
            topology=topology,
            local_steps=local_steps,
            seed=seed,
            **options | {"axis_name": axis, "param_specs": specs},
        ),
        period=max(1, math.ceil(math.log2(n))) if topology == "exponential" else 1,
        delayed=True,
    )
