"""Data-flow analysis: the inputs that each result of a traced program depends on."""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it imports pallas, which takes 0.1 s
    from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

    Program = ClosedJaxpr | Jaxpr

Inputs = int  # a set of input numbers: bit i stands for input i

# Equations that call a program with their last operands, under either name.
CALLS = {"jit", "pjit", "closed_call", "core_call"}
REMATS = {"checkpoint", "remat", "remat2"}
_CALLS = CALLS | REMATS | {"custom_jvp_call", "custom_vjp_call"}


def dependence(closed: "Program", inputs: Sequence[Inputs]) -> list[Inputs]:
    """Follow data from a program's inputs to its results.

    The results of an equation depend on all of its operands. Calls, branches and loops
    are followed inside instead.

    Args:
      closed: what jax.make_jaxpr returns, or the jaxpr of such.
      inputs: for each input of the program, the set that it stands for.

    Returns:
      For each result, the union of the sets that it depends on.
    """
    jaxpr = _jaxpr(closed)
    sets: dict[Any, Inputs] = dict(zip(jaxpr.invars, inputs, strict=True))
    # `sets` holds neither literals nor constants: they depend on nothing.
    read = lambda v: 0 if hasattr(v, "val") else sets.get(v, 0)  # noqa: E731
    for eqn in jaxpr.eqns:
        outs = _equation(eqn, [read(v) for v in eqn.invars])
        sets.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _equation(eqn: "JaxprEqn", args: list[Inputs]) -> list[Inputs]:
    name, params = eqn.primitive.name, eqn.params
    if name in _CALLS and (program := called(params)) is not None:
        return dependence(program, args[len(args) - len(_jaxpr(program).invars) :])
    if name in _CONTROL:
        return _CONTROL[name](params, args)
    return [_union(args)] * len(eqn.outvars)


def called(params: dict[str, Any]) -> "Program | None":
    """Return the program that an equation with these parameters calls, or None."""
    return params.get("jaxpr", params.get("call_jaxpr"))


def carry_of(params: dict[str, Any], args: Sequence[Any]) -> tuple[int, int]:
    """Return where a scan's carry begins and where it ends, among its operands."""
    if "num_consts" in params:
        consts, carry = params["num_consts"], params["num_carry"]
    else:  # jax 0.12
        consts, carry, _ = (
            len(list(part)) for part in params["ft_in"].update(args).unpack()
        )
    return consts, consts + carry


def _cond(params: dict[str, Any], args: list[Inputs]) -> list[Inputs]:
    which, *operands = args
    outs = [dependence(branch, operands) for branch in params["branches"]]
    return [which | _union(column) for column in zip(*outs, strict=True)]


def _while(params: dict[str, Any], args: list[Inputs]) -> list[Inputs]:
    begin = params["cond_nconsts"]
    end = begin + params["body_nconsts"]
    cond_consts, body_consts, carry = args[:begin], args[begin:end], args[end:]

    def step(carry: list[Inputs]) -> list[Inputs]:
        (goes_on,) = dependence(params["cond_jaxpr"], cond_consts + carry)
        outs = dependence(params["body_jaxpr"], body_consts + carry)
        return [goes_on | x for x in outs]

    return _fixed_point(step, carry)


def _scan(params: dict[str, Any], args: list[Inputs]) -> list[Inputs]:
    begin, end = carry_of(params, args)
    consts, carry, xs = args[:begin], args[begin:end], args[end:]

    def body(carry: list[Inputs]) -> list[Inputs]:
        return dependence(params["jaxpr"], consts + carry + xs)

    # includes the initial carry, for a loop of no iterations
    carry = _fixed_point(lambda carry: body(carry)[: end - begin], carry)
    return carry + body(carry)[end - begin :]


def _fixed_point(
    step: Callable[[list[Inputs]], list[Inputs]], carry: list[Inputs]
) -> list[Inputs]:
    """Return the smallest sets that hold `carry` and that `step` leaves equal."""
    while True:
        after = list(map(operator.or_, carry, step(carry)))
        if after == carry:
            return carry
        carry = after


def _union(sets: Iterable[Inputs]) -> Inputs:
    return functools.reduce(operator.or_, sets, 0)


def _jaxpr(program: Any) -> "Jaxpr":
    return getattr(program, "jaxpr", program)


_CONTROL: dict[str, Callable[[dict[str, Any], list[Inputs]], list[Inputs]]] = {
    "cond": _cond,
    "while": _while,
    "scan": _scan,
    "optimization_barrier": lambda params, args: args,
}
