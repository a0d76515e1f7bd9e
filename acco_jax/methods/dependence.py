"""Which inputs of a traced program each of its results depends on."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Inputs = int  # a set of input numbers: bit i stands for input i

# Equations that call a program with their last operands, and where it stands.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat2": "jaxpr",
    "remat": "jaxpr",
    "checkpoint": "jaxpr",
}


def dependence(closed: Any, inputs: Sequence[Inputs]) -> list[Inputs]:
    """Follow data from a program's inputs to its results.

    What an equation computes depends on all of its operands, unless it is known which:
    calls, branches and loops are followed inside.

    Args:
      closed: what jax.make_jaxpr returns, or the jaxpr of such.
      inputs: for each input of the program, the set that it stands for.

    Returns:
      For each result, the union of the sets that it depends on.
    """
    jaxpr = _jaxpr(closed)
    known: dict[Any, Inputs] = dict(zip(jaxpr.invars, inputs, strict=True))
    # Neither literals nor constants are in it: they depend on nothing.
    read = lambda v: 0 if hasattr(v, "val") else known.get(v, 0)  # noqa: E731
    for eqn in jaxpr.eqns:
        outs = _equation(eqn, [read(v) for v in eqn.invars])
        known.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _equation(eqn: Any, args: list[Inputs]) -> list[Inputs]:
    name, params = eqn.primitive.name, eqn.params
    called = params.get(_CALLS.get(name))
    if called is not None:
        return dependence(called, args[len(args) - len(_jaxpr(called).invars) :])
    if name in _CONTROL:
        return _CONTROL[name](params, args)
    return [_union(args)] * len(eqn.outvars)


def _cond(params: dict[str, Any], args: list[Inputs]) -> list[Inputs]:
    which, *operands = args
    outs = [dependence(branch, operands) for branch in params["branches"]]
    return [which | _union(column) for column in zip(*outs, strict=True)]


def _while(params: dict[str, Any], args: list[Inputs]) -> list[Inputs]:
    first, second = params["cond_nconsts"], params["body_nconsts"]
    asked, used, carry = args[:first], args[first:][:second], args[first + second :]

    def step(carry: list[Inputs]) -> list[Inputs]:
        (goes_on,) = dependence(params["cond_jaxpr"], asked + carry)
        return [goes_on | x for x in dependence(params["body_jaxpr"], used + carry)]

    return _grown(step, carry)


def _scan(params: dict[str, Any], args: list[Inputs]) -> list[Inputs]:
    if "num_consts" in params:
        first, count = params["num_consts"], params["num_carry"]
    else:  # jax 0.12
        parts = params["ft_in"].update(args).unpack()
        first, count, _ = (len(list(part)) for part in parts)
    consts, carry, xs = args[:first], args[first:][:count], args[first + count :]

    def step(carry: list[Inputs]) -> list[Inputs]:
        return dependence(params["jaxpr"], consts + carry + xs)[:count]

    carry = _grown(step, carry)  # with what it is where the loop runs no time
    return carry + dependence(params["jaxpr"], consts + carry + xs)[count:]


def _grown(
    step: Callable[[list[Inputs]], list[Inputs]], carry: list[Inputs]
) -> list[Inputs]:
    """The smallest sets that hold `carry` and that a further step adds nothing to."""
    while True:
        after = list(map(operator.or_, carry, step(carry)))
        if after == carry:
            return carry
        carry = after


def _union(sets: Iterable[Inputs]) -> Inputs:
    return functools.reduce(operator.or_, sets, 0)


def _jaxpr(program: Any) -> Any:
    return getattr(program, "jaxpr", program)


_CONTROL: dict[str, Callable[[dict[str, Any], list[Inputs]], list[Inputs]]] = {
    "cond": _cond,
    "while": _while,
    "scan": _scan,
    "optimization_barrier": lambda params, args: args,
}
