"""Products of an optimizer's matrices: each worker has some of the matrices, whole.

An optimizer's step runs on shards, and the compiler places what comes between. Where it
multiplies matrices that the workers split, as Muon's Newton-Schulz iteration does, the
compiler would gather an operand of each product: in five iterations several times the
bytes of the parameters. Here matrices of one shape are stacked and dealt out, so that
each worker computes the products of some of them, whole. One that has no other like it
is gathered, and computed by every worker. So is every one where there are two workers:
a gather moves as many bytes, at once.

Nothing is moved for a product if the workers split a dimension of its batch, as of
stacked layers, or one of a single operand that the result keeps. Nor if the product
sums over the split dimension and its result is small, as the dot of two trees. Which
dimension of a value is split is followed as far as operations are known: a wrong guess
moves more bytes, and changes no result.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from acco_jax.core.layout import Layout
from acco_jax.core.leaves import Leaf, PyTree
from acco_jax.methods.dependence import CALLS, called, carry_of

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

Split = int | None  # the dimension that the workers split; None: every worker has all
UNKNOWN = -1  # one that is not known
SMALL = 16  # a result with so much fewer elements than an operand is cheaper to sum


def placed(
    update: jax.stages.Wrapped,
    layout: Layout,
    gradient: PyTree,
    state: PyTree,
    params: PyTree,
    extra: dict[str, Any],
) -> tuple[PyTree, PyTree]:
    """Return update(gradient, state, params, extra), its products on whole matrices.

    With model axes, whose devices split matrices, too, update runs as it is.

    Args:
      update: an optimizer's, jitted.
      layout: of the shards.
      gradient: shards as the optimizer sees them.
      state: the optimizer's, likewise.
      params: likewise.
      extra: further arguments, which every worker has.
    """
    args = gradient, state, params, extra
    traced = update.trace(*args)
    several = layout.workers > 1 and not layout.model_axes
    if not several or not _has_product(traced.jaxpr.jaxpr):
        return update(*args)  # traced already
    leaves = [_split(leaf) for leaf in layout.leaves]
    homes = jax.tree.leaves(layout.inner_shardings(state))
    inner = [
        _first(home.spec) if i is None else leaves[i]
        for i, home in zip(layout.mirrors, homes, strict=True)
    ]
    splits = [*leaves, *inner, *leaves, *[None] * len(jax.tree.leaves(extra))]
    if not _reads(traced.jaxpr.jaxpr, splits)[0]:
        return update(*args)
    run = _Evaluation(layout).run
    out = run(traced.jaxpr, splits, jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(traced.out_info), out)


def _has_product(jaxpr: "Jaxpr") -> bool:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            return True
        for value in eqn.params.values():
            programs = value if isinstance(value, tuple) else (value,)
            inner: list[Any] = [getattr(x, "jaxpr", x) for x in programs]
            if any(_has_product(x) for x in inner if hasattr(x, "eqns")):
                return True
    return False


def _split(leaf: Leaf) -> Split:
    """Return which dimension of a leaf the workers split, as the optimizer sees it."""
    if leaf.whole:
        return None
    return UNKNOWN if leaf.in_blocks else leaf.dims[0]


def _first(spec: P) -> Split:
    return next((d for d, axes in enumerate(spec) if axes is not None), None)


@dataclasses.dataclass(frozen=True)
class _Evaluation:
    """The evaluation of an optimizer's program, whose products are placed."""

    layout: Layout

    def run(
        self,
        closed: "ClosedJaxpr",
        splits: Sequence[Split],
        arrays: Sequence[jax.Array],
    ) -> list[jax.Array]:
        """Evaluate a program; products wait for others like them, to be one group."""
        jaxpr: Any = closed.jaxpr
        env: dict[Any, tuple[Any, Split]] = {}
        consts = ((x, None) for x in closed.consts)
        env.update(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, zip(arrays, splits, strict=True), strict=True))

        def read(eqn: Any) -> tuple[list[Any], list[Split]]:
            pairs = [(x.val, None) if _literal(x) else env[x] for x in eqn.invars]
            return [x for x, _ in pairs], [d for _, d in pairs]

        left = jaxpr.eqns
        while left:
            alike, later = collections.defaultdict(list), []
            for eqn in left:
                if not all(_literal(x) or x in env for x in eqn.invars):
                    later.append(eqn)
                    continue
                values, at = read(eqn)
                needs, after = _through(eqn, at)
                if not needs:
                    out = list(zip(_bind(eqn, values), after, strict=True))
                elif eqn.primitive.name == "dot_general":  # others follow it
                    out = self.alone(eqn, values, at)
                else:
                    alike[_kind(eqn, at)].append(eqn)
                    continue
                env.update(zip(eqn.outvars, out, strict=True))
            for eqns in alike.values():
                members, at = [read(eqn)[0] for eqn in eqns], read(eqns[0])[1]
                if _repeated(eqns):
                    outs = [self.alone(eqns[0], members[0], at)] * len(eqns)
                elif self.layout.workers == 2:
                    outs = [self.alone(*x, at) for x in zip(eqns, members, strict=True)]
                else:
                    outs = self.dealt(eqns, members, at)
                for eqn, found in zip(eqns, outs, strict=True):
                    env.update(zip(eqn.outvars, found, strict=True))
            left = later
        return [x.val if _literal(x) else env[x][0] for x in jaxpr.outvars]

    def alone(
        self, eqn: "JaxprEqn", values: list[Any], splits: Sequence[Split]
    ) -> list[tuple[Any, Split]]:
        """Compute an operation on every worker, whole; return what it makes."""
        if (inner := _inside(eqn)) is not None:
            out = self.run(inner, splits, values)
            return list(zip(out, _through(eqn, splits)[1], strict=True))
        whole = list(map(self.whole, values, splits))
        # or the compiler splits the products by what reads them
        return [(self.whole(x, UNKNOWN), None) for x in _bind(eqn, whole)]

    def dealt(
        self, eqns: Sequence[Any], members: list[list[Any]], splits: Sequence[Split]
    ) -> list[list[tuple[Any, Split]]]:
        """Compute operations that differ in their operands alone, some on each worker.

        They are stacked, and the stack is split over its members instead of over a
        dimension of each: twice an all-to-all.

        Args:
          eqns: the operations.
          members: the operands of each.
          splits: of the operands, alike for all.

        Returns:
          The results of each, and how they are split.
        """
        eqn = eqns[0]
        rest = -len(members) % self.layout.workers

        def stacked(values: Sequence[Any]) -> jax.Array:
            return self.split(jnp.stack([*values, *[values[-1]] * rest]), 0)

        columns = list(zip(*members, strict=True))
        shared = [
            all(_literal(x) or x is xs[0] for x in xs)
            for xs in zip(*[eqn.invars for eqn in eqns], strict=True)
        ]
        given = [
            column[0] if same else stacked(column)
            for column, same in zip(columns, shared, strict=True)
        ]
        axes = [None if same else 0 for same in shared]
        out = jax.vmap(lambda *x: _bind(eqn, list(x)), axes)(*given)
        pairs = zip(map(_shape, eqn.invars), splits, strict=True)
        homes = {shape: d for shape, d in pairs if d is not None}
        made = [self.back(self.split(x, 0), homes.get(x.shape[1:])) for x in out]
        return [[(x[i], d) for x, d in made] for i in range(len(members))]

    def back(self, stack: jax.Array, home: Split) -> tuple[jax.Array, Split]:
        """Return a stack split in a dimension of its members, and which: at best home.

        Where the workers divide none it is gathered.
        """
        sizes = dict(enumerate(stack.shape[1:]))
        fit = [d for d, size in sizes.items() if size % self.layout.workers == 0]
        if not fit:
            return self.whole(stack, UNKNOWN), None
        d = home if home in fit else fit[0]
        return self.split(stack, d + 1), d

    def whole(self, x: Any, split: Split) -> Any:
        return x if split is None else self._placed(x, P())

    def split(self, x: jax.Array, dimension: int) -> jax.Array:
        return self._placed(x, P(*[None] * dimension, self.layout.reduce_order))

    def _placed(self, x: Any, spec: P) -> jax.Array:
        mesh = self.layout.mesh
        mesh = mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def _bind(eqn: "JaxprEqn", values: list[Any]) -> list[Any]:
    bind_params = eqn.primitive.get_bind_params(eqn.params)
    with eqn.ctx.manager:
        out = eqn.primitive.bind(*values, **bind_params)
    return list(out) if eqn.primitive.multiple_results else [out]


def _kind(eqn: "JaxprEqn", splits: Sequence[Split]) -> tuple[Any, ...]:
    """Return what operations have in common that can be one on a stack."""
    given = [f"{x.aval} {getattr(x, 'val', '')}" for x in eqn.invars]
    held = _constants(eqn.params.values())  # which a program's text does not show
    return eqn.primitive.name, str(eqn.params), *held, *given, *splits


def _constants(values: Iterable[Any]) -> Iterator[int]:
    """Yield which arrays the programs among an operation's parameters hold."""
    for value in values:
        if isinstance(value, tuple | list):
            yield from _constants(value)
        for eqn in getattr(getattr(value, "jaxpr", value), "eqns", ()):
            yield from _constants(eqn.params.values())
        yield from map(id, getattr(value, "consts", ()))


# ------------------------------------------------------------- which dimension is split


def _literal(x: Any) -> bool:
    return hasattr(x, "val")


def _repeated(eqns: Sequence["JaxprEqn"]) -> bool:
    """Return whether operations of one kind have the same operands."""
    first = eqns[0].invars
    pairs = (pair for eqn in eqns for pair in zip(eqn.invars, first, strict=True))
    return all(_literal(x) or x is y for x, y in pairs)


def _inside(eqn: "JaxprEqn") -> Any:
    """Return the program that an operation is a call of, or None."""
    inner = called(eqn.params) if eqn.primitive.name in CALLS else None
    return inner if hasattr(inner, "consts") else None


def _shape(x: Any) -> tuple[int, ...]:
    return x.aval.shape


def _reads(jaxpr: "Jaxpr", splits: Sequence[Split]) -> tuple[bool, list[Split]]:
    """Return whether a product would gather, and how the results are split."""
    env: dict[Any, Split] = dict.fromkeys(jaxpr.constvars)
    env.update(zip(jaxpr.invars, splits, strict=True))
    any_needs = False
    for eqn in jaxpr.eqns:
        at = [None if _literal(x) else env[x] for x in eqn.invars]
        needs, after = _through(eqn, at)
        any_needs |= needs
        env.update(zip(eqn.outvars, after, strict=True))
    return any_needs, [None if _literal(x) else env[x] for x in jaxpr.outvars]


def _through(eqn: "JaxprEqn", splits: Sequence[Split]) -> tuple[bool, list[Split]]:
    """Return whether an operation would gather, and how its results are split."""
    if all(split is None for split in splits):
        return False, [None] * len(eqn.outvars)
    name = eqn.primitive.name
    if name == "dot_general":
        return _product(eqn, splits)
    found = [_reads(*body) for body in _bodies(eqn, splits)]
    if any(needs for needs, _ in found):
        whole: list[Split] = [None] * len(eqn.outvars)
        return True, whole if _inside(eqn) is None else found[0][1]
    shaped = [
        (_shape(x), d) for x, d in zip(eqn.invars, splits, strict=True) if d is not None
    ]
    return False, [_kept(eqn, shaped, _shape(x)) for x in eqn.outvars]


def _bodies(
    eqn: "JaxprEqn", splits: Sequence[Split]
) -> Iterator[tuple["Jaxpr", Sequence[Split]]]:
    """Yield the programs in an operation, and how what each is given is split."""
    params = eqn.params
    match eqn.primitive.name:
        case "scan":
            held = carry_of(params, splits)[1]
            rows = [d if d in (None, UNKNOWN) else d - 1 for d in splits[held:]]
            yield params["jaxpr"].jaxpr, [*splits[:held], *rows]
        case "while":
            rest = splits[params["cond_nconsts"] :]
            yield params["body_jaxpr"].jaxpr, rest
        case "cond":
            for branch in params["branches"]:
                yield branch.jaxpr, splits[1:]
        case _ if (inner := _inside(eqn)) is not None:
            yield inner.jaxpr, splits


def _product(eqn: "JaxprEqn", splits: Sequence[Split]) -> tuple[bool, list[Split]]:
    """As `_through`, of a product of two arrays."""
    summed, batch = eqn.params["dimension_numbers"]
    shapes = [_shape(x) for x in eqn.invars]
    sides = [
        (d, b, [i for i in range(len(shape)) if i not in (*s, *b)])
        for d, s, b, shape in zip(splits, summed, batch, shapes, strict=True)
    ]
    size = math.prod(_shape(eqn.outvars[0]))
    if size == 1 or SMALL * size <= max(map(math.prod, shapes)):
        return False, [None]
    kept: set[int] = set()
    for side, (d, b, free) in enumerate(sides):
        if d is None:
            continue
        if d in b:
            kept.add(b.index(d))
        elif d in free:
            kept.add(len(b) + (len(sides[0][2]) if side else 0) + free.index(d))
        else:  # it is summed over, or unknown
            return True, [None]
    return len(kept) > 1, [kept.pop() if len(kept) == 1 else None]


def _kept(
    eqn: "JaxprEqn",
    given: Sequence[tuple[Sequence[int], int]],
    shape: Sequence[int],
) -> Split:
    """Return which dimension of a result of this shape is split.

    Args:
      eqn: an operation that is no product.
      given: shape and split dimension of each operand that is split.
      shape: of the result.
    """
    name, params = eqn.primitive.name, eqn.params
    if not shape:
        return None
    for was, d in given:
        if d == UNKNOWN:
            continue
        if name == "transpose":
            return params["permutation"].index(d)
        if name == "broadcast_in_dim":
            return params["broadcast_dimensions"][d]
        if "axes" in params and name.startswith(("reduce", "arg")):
            axes = params["axes"]
            return None if d in axes else d - sum(a < d for a in axes)
        if name in ("reshape", "squeeze", "expand_dims"):
            before = math.prod(was[:d])
            for i, size in enumerate(shape):
                if math.prod(shape[:i]) == before and size % was[d] == 0:
                    return i
        elif len(was) == len(shape):
            return d
    return UNKNOWN
