"""Gradients that are reduced while the backward pass still runs, layer by layer.

    value, shards = reduced_gradients(loss, params, earlier, shards, ...)

The loss is traced, and its parameters pass through a custom_vjp, the identity forward:
inside the body of a `scan` that takes stacked parameters apart, with the slices of one
layer; elsewhere each large parameter by itself and the small ones together. What it is
differentiated for are the shards, of which it makes no use: their cotangents are the
reduced gradients, and the reductions stand in the program where gradients are complete.

A loop's body is scheduled by itself, so a collective started there with that layer's
gradients would have nothing beside it. With `pipelined` the gradients of a layer are
handed on as a cotangent of the carry, and reduced beside the backward pass of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

PyTree = Any
Arrays = list[jax.Array]

_JITS = {"jit", "pjit", "closed_call", "core_call"}
_REMATS = {"checkpoint", "remat", "remat2"}


class Reduction(NamedTuple):
    """How gradients cross the network; leaves are given by their numbers."""

    # (leaves, gradients, earlier, valid) -> buffers of the sums, without communication
    pack: Callable[..., Arrays]
    # (leaves, buffers, whether they are of slices) -> shards, the collective
    scatter: Callable[..., Arrays]
    slices: Sequence[bool]  # may the leaf be reduced slice by slice of its first axis?
    small: Sequence[bool]  # is it reduced together with others, if whole?
    pipelined: bool


class _Inputs(NamedTuple):
    """What every call of the identity needs, per leaf."""

    earlier: Sequence[jax.Array | None]
    shards: Sequence[jax.Array]
    valid: jax.Array | None

    def of(self, leaves: Sequence[int]) -> tuple[list[Any], list[Any]]:
        return [self.earlier[i] for i in leaves], [self.shards[i] for i in leaves]


def reduced_gradients(
    fn: Callable[[PyTree], tuple[jax.Array, PyTree]],
    params: PyTree,
    earlier: Sequence[jax.Array | None],
    shards: Sequence[jax.Array],
    valid: jax.Array | None,
    reduction: Reduction,
) -> tuple[tuple[jax.Array, PyTree], Arrays]:
    """Return fn(params) and its gradient plus `earlier`, reduced.

    Args:
      fn: params -> (loss [], the rest).
      params: a tree of arrays.
      earlier: for each leaf what is added to its gradient, in the type to add in; or
        None.
      shards: for each leaf an array like its reduced gradient, of any values.
      valid: [] whether the gradient counts; None: it does.
      reduction: see there.
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

    def value(shards: Sequence[jax.Array]) -> tuple[jax.Array, PyTree]:
        inputs, values = _Inputs(earlier, shards, valid), jax.tree.leaves(params)
        for group in groups:
            at_once = _identity(reduction, group, sliced=False)
            given = [values[i] for i in group]
            given = at_once(given, *inputs.of(group), valid)
            for i, x in zip(group, given, strict=True):
                values[i] = x
        outs = _Evaluation(inputs, reduction).run(closed, values, tags)
        return jax.tree.unflatten(jax.tree.structure(shape), outs)

    return jax.value_and_grad(value, has_aux=True)(list(shards))


def _identity(
    reduction: Reduction, leaves: Sequence[int], sliced: bool
) -> Callable[..., Arrays]:
    """(values, earlier, shards, valid) -> values; backward, the sums are reduced."""

    @jax.custom_vjp
    def identity(values, earlier, shards, valid):  # type: ignore[no-untyped-def]
        return values

    def forward(values, earlier, shards, valid):  # type: ignore[no-untyped-def]
        return values, (earlier, valid)

    def backward(kept, gradients):  # type: ignore[no-untyped-def]
        buffers = reduction.pack(leaves, gradients, *kept)
        return None, None, reduction.scatter(leaves, buffers, sliced), None

    identity.defvjp(forward, backward)
    return identity


def _handing_on(reduction: Reduction, leaves: Sequence[int]) -> Callable[..., Any]:
    """(values, earlier, shards, valid, buffers) -> (values, buffers).

    Backward, the cotangent of the buffers (the next layer's sums) is reduced, and this
    layer's sums become the cotangent of the buffers of the layer before.
    """

    @jax.custom_vjp
    def identity(values, earlier, shards, valid, buffers):  # type: ignore[no-untyped-def]
        return values, buffers

    def forward(values, earlier, shards, valid, buffers):  # type: ignore[no-untyped-def]
        return (values, buffers), (earlier, valid)

    def backward(kept, cotangents):  # type: ignore[no-untyped-def]
        gradients, buffers = cotangents
        mine = reduction.pack(leaves, gradients, *kept)
        return None, None, reduction.scatter(leaves, buffers, True), None, mine

    identity.defvjp(forward, backward)
    return identity


def _first(reduction: Reduction, leaves: Sequence[int]) -> Callable[..., Arrays]:
    """(shards, buffers) -> buffers; backward, the first layer's sums are reduced."""

    @jax.custom_vjp
    def identity(shards, buffers):  # type: ignore[no-untyped-def]
        return buffers

    def backward(kept, buffers):  # type: ignore[no-untyped-def]
        return reduction.scatter(leaves, buffers, True), None

    identity.defvjp(lambda shards, buffers: (buffers, None), backward)
    return identity


# ------------------------------------------------------------------- reading the loss


def _body(eqn: Any) -> core.ClosedJaxpr:
    body = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    return body if isinstance(body, core.ClosedJaxpr) else core.ClosedJaxpr(body, ())


def _carry(eqn: Any) -> tuple[int, int]:
    """Where a scan's carry begins and where it ends, among its operands."""
    if "num_consts" in eqn.params:
        consts, carry = eqn.params["num_consts"], eqn.params["num_carry"]
    else:  # jax 0.12
        parts = eqn.params["ft_in"].update(eqn.invars).unpack()
        consts, carry, _ = (len(list(part)) for part in parts)
    return consts, consts + carry


def _find_uses(jaxpr: Any, tags: dict[Any, int], uses: dict[int, list[bool]]) -> None:
    """Notes each use of the tagged leaves: True, by a scan that takes it apart.

    A conversion is not a use, what is done with its result is.
    """
    for eqn in jaxpr.eqns:
        name, found = eqn.primitive.name, _tagged(eqn.invars, tags)
        if name == "convert_element_type" and found:
            tags[eqn.outvars[0]] = found[0]
        elif name in _JITS | _REMATS and found:
            inner = _body(eqn).jaxpr
            inner_tags = {inner.invars[k]: i for k, i in found.items()}
            _find_uses(inner, inner_tags, uses)
        else:
            for k, leaf in found.items():
                uses[leaf].append(name == "scan" and k >= _carry(eqn)[1])
    for leaf in _tagged(jaxpr.outvars, tags).values():
        uses[leaf].append(False)


def _tagged(atoms: Sequence[Any], tags: dict[Any, int]) -> dict[int, int]:
    """Position -> leaf."""
    variables = ((k, v) for k, v in enumerate(atoms) if not isinstance(v, core.Literal))
    return {k: tags[v] for k, v in variables if v in tags}


class _Evaluation(NamedTuple):
    """Evaluates a jaxpr; its tagged leaves meet the identity in their scans."""

    inputs: _Inputs
    reduction: Reduction

    def run(self, closed: Any, args: Sequence[Any], tags: dict[Any, int]) -> list[Any]:
        jaxpr, tags = closed.jaxpr, dict(tags)
        env = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        env |= dict(zip(jaxpr.invars, args, strict=True))

        def read(v: Any) -> Any:
            return v.val if isinstance(v, core.Literal) else env[v]

        for eqn in jaxpr.eqns:
            name, found = eqn.primitive.name, _tagged(eqn.invars, tags)
            values = [read(v) for v in eqn.invars]
            if name in _JITS | _REMATS and found:
                outs = self.call(eqn, values, found)
            elif name == "scan" and found:
                outs = self.scan(eqn, values, found)
            else:
                bind_params = eqn.primitive.get_bind_params(eqn.params)
                with eqn.ctx.manager:
                    outs = eqn.primitive.bind(*values, **bind_params)
                if name == "convert_element_type" and found:
                    tags[eqn.outvars[0]] = found[0]
            outs = outs if eqn.primitive.multiple_results else [outs]
            env |= dict(zip(eqn.outvars, outs, strict=True))
        return [jnp.asarray(read(v), v.aval.dtype) for v in jaxpr.outvars]

    def call(self, eqn: Any, values: list[Any], found: dict[int, int]) -> list[Any]:
        body = _body(eqn)
        tags = {body.jaxpr.invars[k]: i for k, i in found.items()}

        def call(*values: Any) -> list[Any]:
            return self.run(body, values, tags)

        if eqn.primitive.name in _REMATS:
            kept = {k: eqn.params[k] for k in ("prevent_cse", "policy")}
            return jax.checkpoint(call, **kept)(*values)
        return call(*values)

    def scan(self, eqn: Any, values: list[Any], found: dict[int, int]) -> list[Any]:
        """The same scan with the slices of the found leaves wrapped in its body."""
        begin, end = _carry(eqn)
        body, reduction = core.jaxpr_as_fun(eqn.params["jaxpr"]), self.reduction
        leaves, valid = list(found.values()), self.inputs.valid
        earlier, shards = self.inputs.of(leaves)
        buffers: Any = ()
        if reduction.pipelined:
            at = -1 if eqn.params["reverse"] else 0
            first = [None if e is None else e[at] for e in earlier]
            given = [values[k][at] for k in found]
            buffers = reduction.pack(leaves, given, first, None)
            buffers = list(map(jnp.zeros_like, buffers))
            buffers = _first(reduction, leaves)([s[at] for s in shards], buffers)
            # iteration i of the backward pass reduces what iteration i + 1 has left
            shards = [_moved(s, eqn.params["reverse"]) for s in shards]

        def step(carry: Any, slices: Any) -> tuple[Any, list[Any]]:
            (carry, buffers), (xs, earlier, shards) = carry, slices
            given = [xs[k - end] for k in found]
            if reduction.pipelined:
                hand_on = _handing_on(reduction, leaves)
                given, buffers = hand_on(given, earlier, shards, valid, buffers)
            else:
                at_once = _identity(reduction, leaves, sliced=True)
                given = at_once(given, earlier, shards, valid)
            xs = list(xs)
            for k, x in zip(found, given, strict=True):
                xs[k - end] = x
            outs = body(*values[:begin], *carry, *xs)
            return (outs[: end - begin], buffers), outs[end - begin :]

        kept = {k: eqn.params[k] for k in ("reverse", "length", "unroll")}
        init, stacked = (values[begin:end], buffers), (values[end:], earlier, shards)
        (carry, _), ys = lax.scan(step, init, stacked, **kept)
        return [*carry, *ys]


def _moved(shards: jax.Array, reverse: bool) -> jax.Array:
    """Each layer's shard in the place of the one before it, in the scan's order."""
    blank = jnp.zeros_like(shards[:1])
    return jnp.concatenate([blank, shards[:-1]] if reverse else [shards[1:], blank])
