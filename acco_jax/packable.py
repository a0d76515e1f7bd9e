"""Whether an optimizer can work on packed shards: elementwise rules and norms can.

The packed layout hands the optimizer each leaf's elements in another order and shape,
with a few zeros at the end. `why_not_packed` decides, by reading what the optimizer
does, whether it can tell the difference. It traces `inner` on the true shapes and on
the packed ones and asks that both programs are the same, equation by equation and
constant by constant (so a mean over 77 elements, which divides by 77, does not pass as
one over 80), and that nothing but elementwise operations and sums or maxima over whole
leaves touches them. The padding is followed through the program as one more element of
each leaf: it must stay zero in the updates, in the state and wherever a sum is taken.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.extend import core

from acco_jax.layout import Layout, path_names

PyTree = Any

ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    cbrt ceil clamp convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv
    erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p
    logistic lt max min mul ne neg nextafter not or pow real reduce_precision rem round
    rsqrt select_n sign sin sinh sqrt square stop_gradient sub tan tanh xor optimization_barrier
    sharding_constraint""".split()
)
REDUCTIONS = {"reduce_sum": 0.0, "reduce_max": 0.0, "reduce_and": True, "reduce_or": 0}
CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr",
         "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr",
         "remat2": "jaxpr", "checkpoint": "jaxpr"}  # fmt: skip
# Operations whose padding result is never negative, whatever their operand's.
NONNEGATIVE = {"abs", "sqrt", "exp", "exp2", "square", "logistic"}


class _Refused(Exception):
    """Carries the reason in one line."""


@dataclasses.dataclass(frozen=True)
class _Value:
    """What is known of an array: whose shard it is, and of its padding.

    Attributes:
      leaf: name of a leaf whose elements it holds, None for anything else.
      padding: the padding elements' value, None if it is not known.
      nonnegative: whether no element can be below zero.
      uniform: whether all its elements are the same number.
    """

    leaf: str | None = None
    padding: Any = None
    nonnegative: bool = False
    uniform: bool = False


def why_not_packed(inner: optax.GradientTransformation, layout: Layout) -> str | None:
    """Says why `inner` would notice that it runs on `layout`'s packed shards.

    Args:
      inner: any optax transformation.
      layout: a packed layout of the parameters.

    Returns:
      None if it behaves as on the whole parameters, else one line that names the leaf
      and the operation.
    """
    whole = layout.tree(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.master))
    packed = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), layout.shards
    )
    try:
        _check(inner, layout, whole, packed)
    except _Refused as reason:
        return str(reason)
    return None


def _check(
    inner: optax.GradientTransformation, layout: Layout, whole: PyTree, packed: PyTree
) -> None:
    update = optax.with_extra_args_support(inner).update

    def both(params: PyTree) -> Any:
        try:
            init, state = jax.make_jaxpr(inner.init, return_shape=True)(params)
            jaxpr = jax.make_jaxpr(update)(params, state, params)
        except Exception as error:
            line = str(error).strip().splitlines() or [type(error).__name__]
            raise _Refused(f"inner cannot be traced on its own ({line[0]})") from error
        return init, state, jaxpr

    init_w, state_w, update_w = both(whole)
    init_p, state_p, update_p = both(packed)
    if jax.tree.structure(state_w) != jax.tree.structure(state_p):
        raise _Refused("inner keeps a state of another structure on packed shards")
    names = [leaf.name for leaf in layout.leaves]
    owners = _owners(layout, state_w, state_p)
    init_names, update_names = names, names + owners + names
    # A scalar is packed as a vector: first () against (1,), then (1,) against (n,).
    ones = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape or (1,), s.dtype), whole
    )
    if any(not s.shape for s in jax.tree.leaves(whole)):
        init_1, state_1, update_1 = both(ones)
        if jax.tree.structure(state_1) != jax.tree.structure(state_w):
            raise _Refused("inner keeps a state of another structure for a scalar")
        _same(init_w, init_1, init_names, merge_ones=True)
        _same(update_w, update_1, update_names, merge_ones=True)
        init_w, update_w = init_1, update_1
    _same(init_w, init_p, init_names, merge_ones=False)
    _same(update_w, update_p, update_names, merge_ones=False)

    # Padding of the state: what init leaves there, if an update keeps it.
    sizes = zip(jax.tree.leaves(whole), jax.tree.leaves(packed), strict=True)
    exact = {n: w.size == p.size for n, (w, p) in zip(names, sizes, strict=True)}
    zero = [_Value(n, 0.0) for n in names]
    start = _interpret(init_p, zero, exact)
    state = [
        _Value(n, v.padding, v.nonnegative) if n else _Value(uniform=s.shape == ())
        for n, v, s in zip(owners, start, jax.tree.leaves(state_p), strict=True)
    ]
    for _ in range(8):
        outs = _interpret(update_p, zero + state + zero, exact)
        after = [_join(a, b) for a, b in zip(state, outs[len(names) :], strict=True)]
        if after == state:
            break
        state = after
    for name, value in zip(names, outs, strict=False):
        if not exact[name] and not _is(value.padding, 0):
            raise _Refused(f"inner may write into the padding of {name}")


def _owners(layout: Layout, whole: PyTree, packed: PyTree) -> list[str | None]:
    """For each leaf of the state, the parameter whose elements it holds."""
    found = []
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(whole), jax.tree.leaves(packed), strict=True
    )
    for (path, w), p in pairs:
        leaf = layout.owner(path, p.shape)
        if leaf is not None and leaf.shape == w.shape:
            found.append(leaf.name)
        elif w.shape == p.shape:
            found.append(None)
        else:
            raise _Refused(
                f"inner's state {'/'.join(path_names(path))} has shape {w.shape}, "
                "which no parameter has"
            )
    return found


@dataclasses.dataclass(frozen=True)
class _Op:
    """One equation; operands are ("value", number) or ("constant", array)."""

    name: str
    operands: list[tuple[str, Any]]
    params: dict[str, Any]
    nested: list[_Program]
    leaf: str


@dataclasses.dataclass(frozen=True)
class _Program:
    """A program with its calls inlined and its values numbered in order."""

    ops: list[_Op]
    outs: list[tuple[str, Any]]


# What only says how large an array is; `_interpret` looks at what is done with it.
_SHAPES = {"name", "axes", "shape", "sharding", "out_sharding", "dimensions",
           "broadcast_dimensions", "new_sizes", "jaxpr", "call_jaxpr", "branches",
           "body_jaxpr", "cond_jaxpr"}  # fmt: skip
_RESHAPES = {"broadcast_in_dim", "reshape", "squeeze", *REDUCTIONS}


def _program(jaxpr: Any, consts: Any, names: Any, merge_ones: bool) -> _Program:
    """Reads a jaxpr; with merge_ones, () and (1,) are the same shape."""
    env: dict[Any, tuple[str, Any]] = {}
    owner: dict[int, str | None] = {}
    ops: list[_Op] = []

    def fresh(v: Any, name: str | None) -> None:
        owner[len(owner)] = name
        env[v] = ("value", len(owner) - 1)

    def read(v: Any) -> tuple[str, Any]:
        return ("constant", v.val) if _literal(v) else env[v]

    def walk(jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            op, operands = eqn.primitive.name, [read(v) for v in eqn.invars]
            known = (owner[x] for kind, x in operands if kind == "value")
            leaf = next((n for n in known if n), None)
            if op in CALLS:
                called = eqn.params[CALLS[op]]
                nested = _jaxprs(called)[0]
                for v, c in zip(nested.constvars, getattr(called, "consts", ()), strict=True):
                    env[v] = ("constant", c)
                inputs = operands[len(operands) - len(nested.invars) :]
                env.update(zip(nested.invars, inputs, strict=True))
                walk(nested)
                outs = [read(v) for v in nested.outvars]
                env.update(zip(eqn.outvars, outs, strict=True))
                continue
            sizes = [math.prod(v.aval.shape) for v in (*eqn.invars, *eqn.outvars)]
            if merge_ones and op in _RESHAPES and sizes == [1, 1]:
                env[eqn.outvars[0]] = operands[0]
                continue
            bodies = [j for p in eqn.params.values() for j in _jaxprs(p)]
            nested_programs = [
                _program(j, [], [None] * len(j.invars), merge_ones) for j in bodies
            ]
            ops.append(_Op(op, operands, eqn.params, nested_programs, leaf or "a leaf"))
            for v in eqn.outvars:
                fresh(v, leaf)

    for v, name in zip(jaxpr.invars, names, strict=True):
        fresh(v, name)
    for v in jaxpr.constvars:
        fresh(v, None)
    env.update((v, ("constant", c)) for v, c in zip(jaxpr.constvars, consts, strict=False))
    walk(jaxpr)
    return _Program(ops, [read(v) for v in jaxpr.outvars])


def _same(a: Any, b: Any, names: Sequence[str | None], merge_ones: bool) -> None:
    """Raises _Refused unless two closed jaxprs do the same, shapes aside."""
    programs = [_program(j.jaxpr, j.consts, names, merge_ones) for j in (a, b)]
    _same_programs(*programs)


def _same_programs(a: _Program, b: _Program) -> None:
    for x, y in zip(a.ops, b.ops, strict=False):
        if x.name != y.name or len(x.operands) != len(y.operands):
            raise _Refused(
                f"{x.name} of {x.leaf} becomes {y.name}: inner looks at shapes"
            )
        _same_operands(x.operands, y.operands, x.name, x.leaf)
        for key in x.params.keys() - _SHAPES:
            p, q = x.params[key], y.params.get(key)
            if not callable(p) and p != q and str(p) != str(q):
                raise _Refused(f"{x.name} of {x.leaf} depends on the shape ({key})")
        for p, q in zip(x.nested, y.nested, strict=True):
            _same_programs(p, q)
    if len(a.ops) != len(b.ops):
        extra = (a.ops if len(a.ops) > len(b.ops) else b.ops)[min(len(a.ops), len(b.ops))]
        raise _Refused(f"{extra.name} of {extra.leaf} depends on its shape")
    _same_operands(a.outs, b.outs, "the result", "a leaf")


def _same_operands(xs: Sequence[Any], ys: Sequence[Any], op: str, leaf: str) -> None:
    for (kind, x), (other, y) in zip(xs, ys, strict=True):
        if kind != other or (kind == "value" and x != y):
            raise _Refused(f"{op} of {leaf} works on something else for another shape")
        if kind == "constant" and not _equal(x, y):
            shown = f" ({x} for {y})" if np.size(x) == np.size(y) == 1 else ""
            raise _Refused(f"{op} of {leaf} has a constant that depends on its size{shown}")


def _jaxprs(param: Any) -> list[Any]:
    items = param if isinstance(param, tuple | list) else [param]
    found = []
    for item in items:
        if isinstance(item, core.ClosedJaxpr):
            found.append(item.jaxpr)
        elif isinstance(item, core.Jaxpr):
            found.append(item)
    return found


def _literal(v: Any) -> bool:
    return isinstance(v, core.Literal)


def _equal(a: Any, b: Any) -> bool:
    if jax.dtypes.issubdtype(getattr(a, "dtype", None), jax.dtypes.prng_key):
        return True
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and a.dtype == b.dtype and _array_equal(a, b)


def _array_equal(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.all((a == b) | ((a != a) & (b != b))))


# ----------------------------------------------------------------- padding, followed


def _interpret(
    closed: Any, args: Sequence[_Value], exact: dict[str, bool]
) -> list[_Value]:
    """Runs a program on what is known of its arrays; raises if it does not qualify."""
    consts = [_constant(c) for c in closed.consts]
    return _run(closed.jaxpr, consts, args, exact)


def _run(
    jaxpr: Any, consts: Sequence[_Value], args: Sequence[_Value], exact: dict[str, bool]
) -> list[_Value]:
    env: dict[Any, _Value] = {}

    def read(v: Any) -> _Value:
        return _constant(v.val) if _literal(v) else env[v]

    env.update(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        outs = _apply(eqn, [read(v) for v in eqn.invars], exact)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _apply(eqn: Any, args: list[_Value], exact: dict[str, bool]) -> list[_Value]:
    op, params = eqn.primitive.name, eqn.params
    leaf = next((a.leaf for a in args if a.leaf), None)
    if op in CALLS:
        nested = _jaxprs(params[CALLS[op]])[0]
        args = args[len(args) - len(nested.invars) :]
        consts = getattr(params[CALLS[op]], "consts", ())
        return _run(nested, [_constant(c) for c in consts], args, exact)
    if op == "cond":
        outs = [
            _run(b.jaxpr, [_constant(c) for c in b.consts], args[1:], exact)
            for b in params["branches"]
        ]
        return [
            _meet(column) for column in zip(*outs, strict=True)
        ]  # whichever branch is taken
    shape = eqn.outvars[0].aval.shape
    if leaf is None:
        return _apply_leafless(eqn, args)
    if op in REDUCTIONS:
        if shape != ():
            raise _Refused(f"{op} over some dimensions of {leaf}")
        a = args[0]
        neutral = _is(a.padding, REDUCTIONS[op])
        if not exact[leaf] and not neutral:
            raise _Refused(f"{op} of {leaf} would count its padding")
        if op == "reduce_max" and not exact[leaf] and not a.nonnegative:
            raise _Refused(f"{op} of {leaf} may be negative, its padding is zero")
        return [_Value(uniform=True)]
    if op in ELEMENTWISE and all(a.leaf == leaf or a.uniform for a in args):
        value, nonnegative = _evaluate(eqn, args), _nonnegative(eqn, args)
        return [_Value(leaf, value, nonnegative) for _ in eqn.outvars]
    if op in ("broadcast_in_dim", "reshape", "squeeze", "expand_dims") and (
        eqn.invars[0].aval.shape == shape
    ):
        return [args[0]]
    raise _Refused(f"{op} of {leaf} is not elementwise")


def _apply_leafless(eqn: Any, args: list[_Value]) -> list[_Value]:
    """An equation on scalars, keys and constants: anything may be done to those."""
    op = eqn.primitive.name
    if op in REDUCTIONS and args[0].uniform and eqn.invars[0].aval.shape != ():
        raise _Refused(f"{op} of a constant array depends on a leaf's size")
    elementwise = op in ELEMENTWISE or op == "broadcast_in_dim"
    uniform = elementwise and all(a.uniform for a in args)
    if op == "broadcast_in_dim":
        value = args[0].padding
    else:
        value = _evaluate(eqn, args) if op in ELEMENTWISE else None
    return [
        _Value(None, value, uniform=uniform or v.aval.shape == ()) for v in eqn.outvars
    ]


def _nonnegative(eqn: Any, args: list[_Value]) -> bool:
    op = eqn.primitive.name
    if op == "integer_pow":
        return eqn.params["y"] % 2 == 0 or args[0].nonnegative
    if op == "mul" and eqn.invars[0] is eqn.invars[1]:
        return True
    if op == "max":
        return any(_known_nonnegative(a) for a in args)
    if op in ("add", "add_any", "mul", "convert_element_type", "copy", "min"):
        return all(_known_nonnegative(a) for a in args)
    return op in NONNEGATIVE


def _known_nonnegative(a: _Value) -> bool:
    if a.leaf is None and a.padding is not None:
        return bool(a.padding >= 0)
    return a.nonnegative


def _evaluate(eqn: Any, args: list[_Value]) -> Any:
    """The operation on one element of the padding; None if that is not known."""
    op, values = eqn.primitive.name, [a.padding for a in args]
    if any(v is None for v in values):
        # A traced scalar (a learning rate, a bias correction) is finite and not zero,
        # or the whole update is lost anyway.
        if op == "mul" and any(_is(v, 0) for v in values):
            return 0.0
        if op == "div" and _is(values[0], 0):
            return 0.0
        if op == "and" and any(_is(v, False) for v in values):
            return False
        if op == "select_n" and all(v is not None for v in values[1:]):
            first = values[1]
            return first if all(_is(v, first) for v in values[2:]) else None
        return None
    try:
        avals = [v.aval for v in eqn.invars]
        scalars = [
            np.asarray(v, aval.dtype) for v, aval in zip(values, avals, strict=True)
        ]
        params = dict(eqn.params)
        if "sharding" in params:
            params["sharding"] = None
        with jax.ensure_compile_time_eval():
            out = eqn.primitive.bind(*scalars, **params)
    except Exception:
        return None
    return _scalar(out[0] if eqn.primitive.multiple_results else out)


def _scalar(x: Any) -> Any:
    """The one value that an array holds throughout, else None."""
    if jax.dtypes.issubdtype(getattr(x, "dtype", None), jax.dtypes.prng_key):
        return None
    if isinstance(x, jax.core.Tracer):
        return None
    x = np.asarray(x)
    if not x.size or (x.size > 1 and not _array_equal(x, np.full_like(x, x.flat[0]))):
        return None
    return x.flat[0].item() if x.dtype.kind in "biuf" else None


def _constant(x: Any) -> _Value:
    value = _scalar(x)
    return _Value(None, value, uniform=value is not None or np.shape(x) == ())


def _is(value: Any, target: Any) -> bool:
    return value is not None and value == target


def _join(a: _Value, b: _Value) -> _Value:
    """What holds of a state array before and after an update."""
    padding = a.padding if _is(b.padding, a.padding) else None
    return _Value(
        a.leaf, padding, a.nonnegative and b.nonnegative, a.uniform and b.uniform
    )


def _meet(values: Sequence[_Value]) -> _Value:
    first = values[0]
    for value in values[1:]:
        first = dataclasses.replace(_join(first, value), leaf=first.leaf or value.leaf)
    return first
