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
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.extend import core

from acco_jax.layout import Layout, Leaf, path_names

PyTree = Any

# fmt: off
ELEMENTWISE = frozenset((
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2",
    "atanh", "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "clamp",
    "convert_element_type", "copy", "cos", "cosh", "digamma", "div", "eq", "erf",
    "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "imag",
    "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max",
    "min", "mul", "ne", "neg", "nextafter", "not", "optimization_barrier", "or", "pow",
    "real", "reduce_precision", "rem", "round", "rsqrt", "select_n",
    "sharding_constraint", "sign", "sin", "sinh", "sqrt", "square", "sub", "tan",
    "tanh", "xor",
))
# fmt: on
REDUCTIONS = {"reduce_sum": 0.0, "reduce_max": 0.0, "reduce_and": True, "reduce_or": 0}
CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr",
         "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr",
         "remat2": "jaxpr", "checkpoint": "jaxpr"}  # fmt: skip
# Operations whose padding result is never negative, whatever their operand's.
NONNEGATIVE = {"abs", "sqrt", "exp", "exp2", "square", "logistic"}


# What a padding element can be besides a number or None (not known): some number that
# scalars known at run time alone determine. It is taken to be finite and not zero, or
# every element of the update, not only the padding, is lost anyway.
TRACED = object()
# Operations on it, and on numbers that are not zero, whose result is again such.
_TRACED = {"mul", "div", "add", "sqrt", "rsqrt", "abs", "neg", "square", "copy",
           "convert_element_type"}  # fmt: skip


class _Refused(Exception):
    """Carries the reason in one line."""


@dataclasses.dataclass(frozen=True)
class _Value:
    """What is known of an array: whose shard it is, and of its padding.

    Attributes:
      leaf: whose elements it holds, in their places; None for anything else.
      padding: the padding elements' value (of a uniform array: every element's), TRACED
        or None if it is not known.
      nonnegative: whether no element can be below zero.
      uniform: whether all its elements are the same number.
    """

    leaf: Leaf | None = None
    padding: Any = None
    nonnegative: bool = False
    uniform: bool = False

    def belongs(self, leaf: Leaf) -> bool:
        """Whether it can stand where elements of `leaf` are expected."""
        return self.leaf == leaf or (self.leaf is None and self.uniform)


def why_not_packed(
    inner: optax.GradientTransformation,
    layout: Layout,
    extra: dict[str, Any] | None = None,
) -> str | None:
    """Says why `inner` would notice that it runs on `layout`'s packed shards.

    Args:
      inner: any optax transformation.
      layout: a packed layout of the parameters.
      extra: keyword arguments (arrays) that inner.update will get.

    Returns:
      None if it behaves as on the whole parameters, else one line that names the leaf
      and the operation.
    """
    whole = layout.tree(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.master))
    packed = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), layout.shards
    )
    try:
        _check(inner, layout, whole, packed, extra or {})
    except _Refused as reason:
        return str(reason)
    return None


def _check(
    inner: optax.GradientTransformation,
    layout: Layout,
    whole: PyTree,
    packed: PyTree,
    extra: dict[str, Any],
) -> None:
    update = optax.with_extra_args_support(inner).update

    def both(params: PyTree) -> Any:
        try:
            init, state = jax.make_jaxpr(inner.init, return_shape=True)(params)
            jaxpr = jax.make_jaxpr(update)(params, state, params, **extra)
        except Exception as error:
            line = str(error).strip().splitlines() or [type(error).__name__]
            raise _Refused(f"inner cannot be traced on its own ({line[0]})") from error
        return init, state, jaxpr

    init_w, state_w, update_w = both(whole)
    init_p, state_p, update_p = both(packed)
    if _differ(state_w, state_p):
        raise _Refused("inner keeps a state of another structure on packed shards")
    leaves = list(layout.leaves)
    owners = _owners(layout, state_w, state_p)
    names, homes = [*leaves, *owners, *leaves], [*leaves, *owners]
    # A scalar is packed as a vector: first () against (1,), then (1,) against (n,).
    ones = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape or (1,), s.dtype), whole)
    if any(not s.shape for s in jax.tree.leaves(whole)):
        init_1, state_1, update_1 = both(ones)
        if _differ(state_1, state_w):
            raise _Refused("inner keeps a state of another structure for a scalar")
        _same(init_w, init_1, leaves, owners, merge_ones=True)
        _same(update_w, update_1, names, homes, merge_ones=True)
        init_w, update_w = init_1, update_1
    _same(init_w, init_p, leaves, owners, merge_ones=False)
    _same(update_w, update_p, names, homes, merge_ones=False)

    # Padding of the state: what init leaves there, if an update keeps it.
    sizes = zip(jax.tree.leaves(whole), jax.tree.leaves(packed), strict=True)
    exact = {n: w.size == p.size for n, (w, p) in zip(leaves, sizes, strict=True)}
    zero = [_Value(leaf, 0.0) for leaf in leaves]
    _interpret(init_w, zero, dict.fromkeys(leaves, True))
    start = _interpret(init_p, zero, exact)
    arrays = jax.tree.leaves(state_p)
    given = [_unknown(v.aval) for v in update_p.jaxpr.invars[len(names) :]]
    # Scalars of the state (counts, injected hyperparameters) may change from update to
    # update, or never: an epsilon that stays 0 must not pass as some number or other.
    for fixed in (False, True):
        state = []
        for leaf, value, array in zip(owners, start, arrays, strict=True):
            _place(leaf, value, "init")
            if leaf is not None:
                state.append(_Value(leaf, value.padding, value.nonnegative))
            elif fixed and array.shape == ():
                state.append(_Value(None, value.padding, uniform=True))
            else:
                state.append(_unknown(array))
        _check_padding(update_p, zero, state, given, owners, exact)
    _interpret(update_w, zero + state + zero + given, dict.fromkeys(leaves, True))


def _differ(a: PyTree, b: PyTree) -> bool:
    return bool(jax.tree.structure(a) != jax.tree.structure(b))  # type: ignore[operator]


def _unknown(aval: Any) -> _Value:
    """An array that is nobody's shard: anything, but a scalar is one number."""
    return _Value(None, TRACED, uniform=True) if aval.shape == () else _Value()


def _check_padding(
    update: Any,
    zero: list[_Value],
    state: list[_Value],
    given: list[_Value],
    owners: Sequence[Leaf | None],
    exact: dict[Leaf, bool],
) -> None:
    """Follows the padding through updates until nothing about the state changes."""
    while True:
        outs = _interpret(update, zero + state + zero + given, exact)
        updates, stepped = outs[: len(zero)], outs[len(zero) :]
        for leaf, value in zip(owners, stepped, strict=True):
            _place(leaf, value, "update")
        after = [_join(a, b) for a, b in zip(state, stepped, strict=True)]
        if after == state:
            break
        state = after
    for leaf, value in zip(exact, updates, strict=True):
        if not value.belongs(leaf):
            raise _Refused(f"the update of {leaf} is not made of its elements")
        if not exact[leaf] and not _is(value.padding, 0):
            raise _Refused(f"inner may write into the padding of {leaf}")


def _place(leaf: Leaf | None, value: _Value, what: str) -> None:
    """Raises _Refused if a state array does not hold what its place says."""
    if leaf is not None and not value.belongs(leaf):
        raise _Refused(
            f"{what} puts something else than elements of {leaf} in its state"
        )
    if leaf is None and value.leaf is not None:
        raise _Refused(
            f"{what} keeps elements of {value.leaf} where they are not looked for"
        )


def _owners(layout: Layout, whole: PyTree, packed: PyTree) -> list[Leaf | None]:
    """For each leaf of the state, the parameter whose elements it holds."""
    found: list[Leaf | None] = []
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(whole), jax.tree.leaves(packed), strict=True
    )
    for (path, w), p in pairs:
        leaf = layout.owner(path, p.shape)
        if leaf is not None and leaf.shape == w.shape:
            found.append(leaf)
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
    shapes: list[tuple[int, ...]]  # of operands and results
    results: range  # the values' numbers
    leaf: Leaf | None  # whose elements it works on, directly or not


@dataclasses.dataclass(frozen=True)
class _Program:
    """A program with its calls inlined and its values numbered in order."""

    ops: list[_Op]
    outs: list[tuple[str, Any]]
    homes: Sequence[Leaf | None]  # of the outs

    def leaf(self, op: _Op) -> Leaf | None:
        """The leaf that an operation works on, or the first that its results meet."""
        reached = set(op.results)
        for later in self.ops[self.ops.index(op) :]:
            used = {x for kind, x in later.operands if kind == "value"}
            if later is op or used & reached:
                if later.leaf is not None:
                    return later.leaf
                reached.update(later.results)
        homes = zip(self.outs, self.homes, strict=False)
        return next((leaf for out, leaf in homes if leaf and out[1] in reached), None)


# What only says how large an array is; `_interpret` looks at what is done with it.
_SHAPES = {"name", "shape", "sharding", "out_sharding", "dimensions",
           "broadcast_dimensions", "new_sizes", "jaxpr", "call_jaxpr", "branches",
           "body_jaxpr", "cond_jaxpr"}  # fmt: skip
_RESHAPES = {"broadcast_in_dim", "reshape", "squeeze", *REDUCTIONS}
# What may be done to arrays as large as a leaf: `_interpret` looks at how. Anything
# else (iota, random bits, a cumulative sum) tells one size from another.
_SIZED = ELEMENTWISE | {"cond", "expand_dims"} | _RESHAPES


def _program(
    jaxpr: Any, consts: Any, names: Any, merge_ones: bool, homes: Any = ()
) -> _Program:
    """Reads a jaxpr; with merge_ones, () and (1,) are the same shape.

    Broadcasts are left out: how many times a number is repeated is a shape, and that it
    is one number is for `_interpret` to see.
    """
    env: dict[Any, tuple[str, Any]] = {}
    owner: list[Leaf | None] = []
    ops: list[_Op] = []

    def fresh(v: Any, name: Leaf | None) -> None:
        env[v] = ("value", len(owner))
        owner.append(name)

    def read(v: Any) -> tuple[str, Any]:
        return ("constant", v.val) if _literal(v) else env[v]

    def walk(jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            op, operands = eqn.primitive.name, [read(v) for v in eqn.invars]
            names = [owner[x] if kind == "value" else None for kind, x in operands]
            leaf = next((n for n in names if n), None)
            if op in CALLS:
                ((nested, consts),) = _bodies(eqn.params[CALLS[op]])
                for v, c in zip(nested.constvars, consts, strict=True):
                    env[v] = ("constant", c)
                inputs = operands[len(operands) - len(nested.invars) :]
                env.update(zip(nested.invars, inputs, strict=True))
                walk(nested)
                outs = [read(v) for v in nested.outvars]
                env.update(zip(eqn.outvars, outs, strict=True))
                continue
            shapes = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
            ones = merge_ones and op in _RESHAPES and not set(shapes) - {(), (1,)}
            if op == "broadcast_in_dim" or ones:
                env[eqn.outvars[0]] = operands[0]
                continue
            nested_programs = [
                _program(j, c, names[len(names) - len(j.invars) :], merge_ones)
                for param in eqn.params.values()
                for j, c in _bodies(param)
            ]
            results = range(len(owner), len(owner) + len(eqn.outvars))
            ops.append(
                _Op(op, operands, eqn.params, nested_programs, shapes, results, leaf)
            )
            for v in eqn.outvars:
                fresh(v, leaf)

    for v, name in itertools.zip_longest(jaxpr.invars, names):
        fresh(v, name)
    env.update(
        (v, ("constant", c)) for v, c in zip(jaxpr.constvars, consts, strict=True)
    )
    walk(jaxpr)
    return _Program(ops, [read(v) for v in jaxpr.outvars], homes)


def _same(
    a: Any,
    b: Any,
    names: Sequence[Leaf | None],
    homes: Sequence[Leaf | None],
    merge_ones: bool,
) -> None:
    """Raises _Refused unless two closed jaxprs do the same, shapes aside."""
    programs = [_program(j.jaxpr, j.consts, names, merge_ones, homes) for j in (a, b)]
    _same_programs(programs[0], programs[1])


def _same_programs(a: _Program, b: _Program, outer: Leaf | None = None) -> None:
    for x, y in zip(a.ops, b.ops, strict=False):

        def at(x: _Op = x) -> str:
            return f"{x.name} of {a.leaf(x) or outer or 'a leaf'}"

        if x.name != y.name or len(x.operands) != len(y.operands):
            raise _Refused(f"{at()} becomes {y.name}: inner looks at shapes")
        _same_operands(x.operands, y.operands, at)
        sized = x.name in (_SIZED if x.leaf else _SIZED - REDUCTIONS.keys())
        if x.shapes != y.shapes and not sized:
            raise _Refused(f"{at()} depends on its shape")
        if len(x.nested) != len(y.nested):
            raise _Refused(f"{at()} does something else for another shape")
        for p, q in zip(x.nested, y.nested, strict=True):
            _same_programs(p, q, a.leaf(x) or outer)
        for key in x.params.keys() - _SHAPES:
            was, now = x.params[key], y.params.get(key)
            if not callable(was) and was != now and str(was) != str(now):
                raise _Refused(f"{at()} depends on the shape ({key})")
    if len(a.ops) != len(b.ops):
        longer = a if len(a.ops) > len(b.ops) else b
        extra = longer.ops[min(len(a.ops), len(b.ops))]
        leaf = longer.leaf(extra) or outer or "a leaf"
        raise _Refused(f"{extra.name} of {leaf} depends on its shape")
    _same_operands(a.outs, b.outs, lambda: f"the result for {outer or 'a leaf'}")


def _same_operands(xs: Sequence[Any], ys: Sequence[Any], at: Callable[[], str]) -> None:
    for (kind, x), (other, y) in zip(xs, ys, strict=True):
        if kind != other or (kind == "value" and x != y):
            raise _Refused(f"{at()} works on something else for another shape")
        if kind == "constant" and not _equal(x, y):
            shown = f" ({x} for {y})" if np.size(x) == np.size(y) == 1 else ""
            raise _Refused(f"{at()} has a constant that depends on its size{shown}")


def _bodies(param: Any) -> list[tuple[Any, Sequence[Any]]]:
    """The programs in an equation's parameter, each with its constants."""
    found: list[tuple[Any, Sequence[Any]]] = []
    for item in param if isinstance(param, tuple | list) else [param]:
        if isinstance(item, core.ClosedJaxpr):
            found.append((item.jaxpr, item.consts))
        elif isinstance(item, core.Jaxpr):
            found.append((item, ()))
    return found


def _literal(v: Any) -> bool:
    return isinstance(v, core.Literal)


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, jax.core.Tracer) or isinstance(b, jax.core.Tracer):
        return False
    if jax.dtypes.issubdtype(getattr(a, "dtype", None), jax.dtypes.prng_key):
        return True
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and a.dtype == b.dtype and _array_equal(a, b)


def _array_equal(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.all((a == b) | ((a != a) & (b != b))))


# ----------------------------------------------------------------- padding, followed


def _interpret(
    closed: Any, args: Sequence[_Value], exact: dict[Leaf, bool]
) -> list[_Value]:
    """Runs a program on what is known of its arrays; raises if it does not qualify."""
    consts = [_constant(c) for c in closed.consts]
    return _run(closed.jaxpr, consts, args, exact)


def _run(
    jaxpr: Any,
    consts: Sequence[_Value],
    args: Sequence[_Value],
    exact: dict[Leaf, bool],
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


def _apply(eqn: Any, args: list[_Value], exact: dict[Leaf, bool]) -> list[_Value]:
    op, params = eqn.primitive.name, eqn.params
    leaf = next((a.leaf for a in args if a.leaf), None)
    if op in CALLS:
        ((nested, consts),) = _bodies(params[CALLS[op]])
        args = args[len(args) - len(nested.invars) :]
        return _run(nested, [_constant(c) for c in consts], args, exact)
    if op == "cond":
        outs = [
            _run(b.jaxpr, [_constant(c) for c in b.consts], args[1:], exact)
            for b in params["branches"]
        ]
        # whichever branch is taken
        return [_meet(column, op) for column in zip(*outs, strict=True)]
    if op == "optimization_barrier":
        return args
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
        return [_Value(None, TRACED, uniform=True)]
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
        raise _Refused(f"{op} of an array of {eqn.invars[0].aval.size} equal numbers")
    moved = op in _RESHAPES - set(REDUCTIONS) or op == "expand_dims"
    if moved:
        value = args[0].padding
    else:
        value = _evaluate(eqn, args) if op in ELEMENTWISE else None
    outs = []
    for v in eqn.outvars:
        uniform = (moved or op in ELEMENTWISE) and all(a.uniform for a in args)
        uniform = uniform or v.aval.shape == ()
        known = TRACED if value is None and uniform else value
        outs.append(_Value(None, known if uniform else None, uniform=uniform))
    return outs


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
    if a.leaf is None and a.padding is not None and a.padding is not TRACED:
        return bool(a.padding >= 0)
    return a.nonnegative


def _evaluate(eqn: Any, args: list[_Value]) -> Any:
    """The operation on one element of the padding; None if that is not known."""
    op, values = eqn.primitive.name, [a.padding for a in args]
    if any(v is None or v is TRACED for v in values):
        others = [v for v in values if not _is(v, 0)]
        traced = all(v is not None for v in values)
        if op == "mul" and len(others) < 2 and traced:
            return 0.0
        if op == "div" and _is(values[0], 0) and traced:
            return 0.0
        if op == "and" and any(_is(v, False) for v in values):
            return False
        if op == "select_n" and all(v is not None for v in values[1:]):
            first = values[1]
            return (
                first if all(v is first or _is(v, first) for v in values[2:]) else None
            )
        if op in _TRACED and traced and not (op == "div" and _is(values[1], 0)):
            return TRACED
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
    uniform = value is not None or np.shape(x) == ()
    return _Value(None, TRACED if uniform and value is None else value, uniform=uniform)


def _is(value: Any, target: Any) -> bool:
    return value is not None and value is not TRACED and bool(value == target)


def _join(a: _Value, b: _Value) -> _Value:
    """What holds of an array that is either one or the other."""
    uniform = a.uniform and b.uniform
    same = a.padding is b.padding or _is(b.padding, a.padding)
    padding = a.padding if same else TRACED if uniform else None
    return _Value(a.leaf, padding, a.nonnegative and b.nonnegative, uniform)


def _meet(values: Sequence[_Value], op: str) -> _Value:
    leaf = next((v.leaf for v in values if v.leaf is not None), None)
    if leaf is not None and not all(v.belongs(leaf) for v in values):
        raise _Refused(f"{op} of {leaf} may put something else in its place")
    return dataclasses.replace(functools.reduce(_join, values), leaf=leaf)
