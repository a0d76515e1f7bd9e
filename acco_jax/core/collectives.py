"""The use of data axes by a loss function, which runs on one worker's rows."""

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from acco_jax.core.leaves import PyTree, Rng
from acco_jax.core.workers import from_row, to_row

if TYPE_CHECKING:  # jax.extend imports all of Pallas
    from jax.extend.core import Jaxpr, JaxprEqn

    from acco_jax.core.gradients import Accumulator

# what JAX says of an array of an outer program's mesh inside a worker's
_CLOSED = r"Closing over inputs to shard_map|Context mesh .* should match the mesh of"
# these name an axis and send nothing over it
_SILENT = ("axis_index", "pvary", "pcast", "reduced_vary_cast")


def _values(equation: "JaxprEqn") -> list[Any]:
    """Return an equation's parameters, and the items of tuples among them."""
    values = equation.params.values()
    return [x for v in values for x in (v if isinstance(v, tuple | list) else (v,))]


def _equations(jaxpr: "Jaxpr") -> "Iterator[JaxprEqn]":
    """Yield the equations of a jaxpr and of all jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for x in _values(equation):
            inner = getattr(x, "jaxpr", x)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


def collective(jaxpr: "Jaxpr", axis: tuple[str, ...]) -> str:
    """Return the name of the first collective over a data axis, '' if there is none."""
    for equation in _equations(jaxpr):
        given = [equation.params.get(name) for name in ("axes", "axis_name")]
        names = {str(x) for value in given for x in jax.tree.leaves(value)}
        if names & set(axis) and equation.primitive.name not in _SILENT:
            return equation.primitive.name
    return ""


def check_constraints(jaxpr: "Jaxpr", axis: tuple[str, ...]) -> None:
    """Raise a ValueError if a sharding constraint names a data axis."""
    for equation in _equations(jaxpr):
        for x in _values(equation):
            if isinstance(x, NamedSharding) and _names(str(x.spec), axis):
                raise _constrained(str(x.spec))


def _names(spec: str, axis: tuple[str, ...]) -> bool:
    return any(f"'{a}'" in spec for a in axis)


@contextlib.contextmanager
def naming_constraints(axis: tuple[str, ...]) -> Iterator[None]:
    """Turn JAX's errors for arrays placed on the mesh into one line."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        spec = re.search(r"\bP\(.*?\)(?= and | with | contains )", str(error))
        about = re.search(r"with_sharding_constraint|Auto or Manual", str(error))
        if about and spec and _names(spec[0], axis):
            raise _constrained(spec[0]) from error
        if re.search(_CLOSED, str(error)):
            raise ValueError(
                "loss_fn closes over an array that lies on a mesh, as those made after "
                "jax.set_mesh do: pass it by jax.tree_util.Partial(loss_fn, x) or make "
                "it a NumPy array."
            ) from error
        raise


def _constrained(spec: str) -> ValueError:
    return ValueError(
        f"loss_fn places an array over a data axis, {spec}, but it runs on one "
        "worker's rows, which that axis does not split: name other axes of the mesh, "
        "or leave the constraint out."
    )


class Alone:
    """A check, made once, that a loss function sends nothing over the data axes."""

    def __init__(self, gradients: "Accumulator", own_params: bool = False) -> None:
        """Prepare the check.

        Args:
          gradients: its loss function, and how many microbatches a batch holds.
          own_params: whether each worker has parameters of its own, in rows.
        """
        self._gradients, self._own, self._done = gradients, own_params, False

    def __call__(
        self, params: PyTree, batch: PyTree, rng: Rng, model_state: PyTree = None
    ) -> None:
        """Trace the loss function, the first time.

        Raises:
          ValueError: it communicates over a data axis.
        """
        gradients = self._gradients
        if self._done or gradients.workers == 1:
            return
        gradients = gradients.frozen(model_state)

        def local(gradients, params, batch, rng):  # type: ignore[no-untyped-def]
            params, capacity = (
                from_row(params) if self._own else params,
                gradients.capacity,
            )
            sums = gradients.zeros_here(params, batch, rng, capacity)
            return to_row(
                gradients.sum_here(sums, params, batch, rng, capacity, 0, 1).loss
            )

        specs = (P(), gradients.rows if self._own else P(), gradients.rows, P())
        run = gradients.over_data(local, specs, gradients.rows)
        jaxpr = jax.make_jaxpr(run)(gradients, params, batch, rng)
        if name := collective(jaxpr.jaxpr, gradients.axis):
            raise ValueError(
                f"loss_fn communicates over {', '.join(gradients.axis)} ({name}), but "
                "the workers' counts may differ, and one with fewer microbatches would "
                "not take part: leave it out of loss_fn (the step averages over the "
                "workers), or give no counts."
            )
        self._done = True
