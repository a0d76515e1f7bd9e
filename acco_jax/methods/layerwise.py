"""Gradients that are reduced layer by layer while the backward pass still runs.

    value, shards = reduced_gradients(loss, params, earlier, shards, ...)

The loss is traced, and its parameters pass through a custom_vjp, the identity forward:
inside the body of a `scan` that takes stacked parameters apart, with the slices of one
layer; elsewhere each large parameter by itself and the small ones together. The loss is
differentiated by the shards, which it does not use. Their cotangents are the reduced
gradients, so the reductions stand in the program where gradients are complete.

A loop's body is scheduled by itself, so a collective started there with that layer's
gradients would have nothing beside it. With `pipelined` the gradients of a layer are
handed on as a cotangent of the carry, and reduced beside the backward pass of the next.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from acco_jax.methods.dependence import CALLS, REMATS, called, carry_of

PyTree = Any
Arrays = list[jax.Array]


class Reduction(NamedTuple):
    """The reduction of gradients; leaves are given by their numbers."""

    # (leaves, gradients, earlier, valid) -> buffers of the sums, without communication
    pack: Callable[..., Arrays]
    # (leaves, buffers, whether they are of slices) -> shards, the collective
    scatter: Callable[..., Arrays]
    slices: Sequence[bool]  # may the leaf be reduced slice by slice of its first axis?
    small: Sequence[bool]  # is it reduced together with others, if whole?
    pipelined: bool


def reduced_gradients(
    fn: Callable[[PyTree], tuple[jax.Array, PyTree]],
    params: PyTree,
    earlier: Sequence[jax.Array | None],
    shards: Sequence[jax.Array],
    valid: jax.Array | None,
    reduction: Reduction,
) -> tuple[tuple[jax.Array, PyTree], Arrays]:
    """Compute fn(params) and its gradient plus `earlier`, reduced.

    Args:
      fn: params -> (loss [], the rest).
      params: a tree of arrays.
      earlier: for each leaf what is added to its gradient, in the type to add in; or
        None.
      shards: for each leaf an array like its reduced gradient, of any values.
      valid: [] whether the gradient counts; None: it does.
      reduction: how gradients cross the network.
    """
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(params)
    jaxpr = closed.jaxpr
    uses: dict[int, list[bool]] = {i: [] for i in range(len(jaxpr.invars))}
    _find_uses(jaxpr, dict(zip(jaxpr.invars, uses, strict=True)), uses)
    layered = {i for i in uses if uses[i] == [True] and reduction.slices[i]}
    whole = [i for i in uses if i not in layered]
    groups = [[i] for i in whole if not reduction.small[i]]
    groups += [group] if (group := [i for i in whole if reduction.small[i]]) else []
    tags = {v: i for i, v in enumerate(jaxpr.invars) if i in layered}
    flat = jax.tree.leaves(params)

    def value(shards: Sequence[jax.Array]) -> tuple[jax.Array, PyTree]:
        evaluation, values = _Evaluation(earlier, shards, valid, reduction), flat[:]
        for group in groups:
            identity = _identity(reduction, group, sliced=False)
            own: Any = [values[i] for i in group]
            own, _ = identity(own, *evaluation.of(group), valid, ())
            for i, x in zip(group, own, strict=True):
                values[i] = x
        outs = evaluation.run(closed, values, tags)
        return jax.tree.unflatten(jax.tree.structure(shape), outs)

    return jax.value_and_grad(value, has_aux=True)(list(shards))


def _identity(
    reduction: Reduction, leaves: Sequence[int], sliced: bool
) -> Callable[..., Any]:
    """Return (values, earlier, shards, valid, buffers) -> (values, buffers).

    Backward, this layer's sums are reduced. With buffers, their cotangent (the next
    layer's sums) is reduced instead, and this layer's sums become the cotangent of the
    buffers of the layer before.
    """

    @jax.custom_vjp
    def identity(values, earlier, shards, valid, buffers):  # type: ignore[no-untyped-def]
        return values, buffers

    def forward(values, earlier, shards, valid, buffers):  # type: ignore[no-untyped-def]
        return (values, buffers), (earlier, valid)

    def backward(residuals, cotangents):  # type: ignore[no-untyped-def]
        gradients, buffers = cotangents
        own: Any = reduction.pack(leaves, gradients, *residuals)
        buffers, own = (buffers, own) if len(buffers) else (own, ())
        return None, None, reduction.scatter(leaves, buffers, sliced), None, own

    identity.defvjp(forward, backward)
    return identity


def _first(reduction: Reduction, leaves: Sequence[int]) -> Callable[..., Arrays]:
    """Return (shards, buffers) -> buffers, whose backward pass reduces the sums."""

    @jax.custom_vjp
    def identity(shards, buffers):  # type: ignore[no-untyped-def]
        return buffers

    def backward(_, buffers):  # type: ignore[no-untyped-def]
        return reduction.scatter(leaves, buffers, True), None

    identity.defvjp(lambda shards, buffers: (buffers, None), backward)
    return identity


# ------------------------------------------------------------------- reading the loss


def _body(eqn: core.JaxprEqn) -> core.ClosedJaxpr:
    body = called(eqn.params)
    assert body is not None
    return body if isinstance(body, core.ClosedJaxpr) else core.ClosedJaxpr(body, ())


def _find_uses(
    jaxpr: core.Jaxpr, tags: dict[Any, int], uses: dict[int, list[bool]]
) -> None:
    """Note each use of the tagged leaves: True if a scan takes the leaf apart.

    A conversion is not a use. The uses of its result are.
    """
    for eqn in jaxpr.eqns:
        name, leaves = eqn.primitive.name, _tagged(eqn.invars, tags)
        if name == "convert_element_type" and leaves:
            tags[eqn.outvars[0]] = leaves[0]
        elif name in CALLS | REMATS and leaves:
            body = _body(eqn).jaxpr
            _find_uses(body, {body.invars[k]: i for k, i in leaves.items()}, uses)
        else:
            for k, i in leaves.items():
                scanned = name == "scan" and k >= carry_of(eqn.params, eqn.invars)[1]
                uses[i].append(scanned)
    for i in _tagged(jaxpr.outvars, tags).values():
        uses[i].append(False)


def _tagged(atoms: Sequence[Any], tags: dict[Any, int]) -> dict[int, int]:
    """Return the tagged leaf of each position."""
    variables = ((k, v) for k, v in enumerate(atoms) if not isinstance(v, core.Literal))
    return {k: tags[v] for k, v in variables if v in tags}


class _Evaluation(NamedTuple):
    """An evaluation of a jaxpr that wraps tagged leaves in their scans."""

    earlier: Sequence[jax.Array | None]
    shards: Sequence[jax.Array]
    valid: jax.Array | None
    reduction: Reduction

    def of(self, leaves: Sequence[int]) -> tuple[list[Any], list[Any]]:
        """Return what is added to the gradients of these leaves, and their shards."""
        return [self.earlier[i] for i in leaves], [self.shards[i] for i in leaves]

    def run(
        self, closed: core.ClosedJaxpr, args: Sequence[Any], tags: dict[Any, int]
    ) -> list[Any]:
        jaxpr, tags = closed.jaxpr, dict(tags)
        env = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        env |= dict(zip(jaxpr.invars, args, strict=True))

        def read(v: core.Literal | core.Var) -> jax.Array:
            return v.val if isinstance(v, core.Literal) else env[v]

        for eqn in jaxpr.eqns:
            name, leaves = eqn.primitive.name, _tagged(eqn.invars, tags)
            values = [read(v) for v in eqn.invars]
            if name in CALLS | REMATS and leaves:
                outs = self.call(eqn, values, leaves)
            elif name == "scan" and leaves:
                outs = self.scan(eqn, values, leaves)
            else:
                bind_params = eqn.primitive.get_bind_params(eqn.params)
                with eqn.ctx.manager:
                    outs = eqn.primitive.bind(*values, **bind_params)
                if name == "convert_element_type" and leaves:
                    tags[eqn.outvars[0]] = leaves[0]
            outs = outs if eqn.primitive.multiple_results else [outs]
            env |= dict(zip(eqn.outvars, outs, strict=True))
        return [jnp.asarray(read(v), v.aval.dtype) for v in jaxpr.outvars]

    def call(
        self, eqn: core.JaxprEqn, values: list[Any], leaves: dict[int, int]
    ) -> list[Any]:
        body = _body(eqn)
        tags = {body.jaxpr.invars[k]: i for k, i in leaves.items()}

        def call(*values: Any) -> list[Any]:
            return self.run(body, values, tags)

        if eqn.primitive.name in REMATS:
            options = {k: eqn.params[k] for k in ("prevent_cse", "policy")}
            return jax.checkpoint(call, **options)(*values)
        return call(*values)

    def scan(
        self, eqn: core.JaxprEqn, values: list[Any], positions: dict[int, int]
    ) -> list[Any]:
        """Run the scan with the slices of the tagged leaves wrapped in its body."""
        begin, end = carry_of(eqn.params, eqn.invars)
        body, reduction = core.jaxpr_as_fun(eqn.params["jaxpr"]), self.reduction
        leaves = list(positions.values())
        earlier, shards = self.of(leaves)
        identity = _identity(reduction, leaves, sliced=True)
        buffers: Any = ()
        if reduction.pipelined:
            at = -1 if eqn.params["reverse"] else 0
            first = [None if e is None else e[at] for e in earlier]
            slices = [values[k][at] for k in positions]
            buffers = reduction.pack(leaves, slices, first, None)
            buffers = list(map(jnp.zeros_like, buffers))
            buffers = _first(reduction, leaves)([s[at] for s in shards], buffers)
            # iteration i of the backward pass reduces what iteration i + 1 has left
            shards = [_shift(s, eqn.params["reverse"]) for s in shards]

        def step(carry: PyTree, slices: PyTree) -> tuple[Any, list[Any]]:
            (carry, buffers), (xs, earlier, shards) = carry, slices
            own = [xs[k - end] for k in positions]
            own, buffers = identity(own, earlier, shards, self.valid, buffers)
            xs = list(xs)
            for k, x in zip(positions, own, strict=True):
                xs[k - end] = x
            outs = body(*values[:begin], *carry, *xs)
            return (outs[: end - begin], buffers), outs[end - begin :]

        options = {k: eqn.params[k] for k in ("reverse", "length", "unroll")}
        init, stacked = (values[begin:end], buffers), (values[end:], earlier, shards)
        (carry, _), ys = lax.scan(step, init, stacked, **options)
        return [*carry, *ys]


def _shift(shards: jax.Array, reverse: bool) -> jax.Array:
    """Move each layer's shard to the place of the layer before, in the scan's order."""
    blank = jnp.zeros_like(shards[:1])
    return jnp.concatenate([blank, shards[:-1]] if reverse else [shards[1:], blank])
