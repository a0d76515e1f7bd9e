"""The vocabulary's table in a group of devices: its split, and lookups in it.

Shapes: B batch, T length, D width, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from acco_jax.core.gloo import reduce_scatter
from acco_jax.core.groups import ROWS, TENSOR
from acco_jax.models.placement import automatic_axes

Part = int | jax.Array  # of a table: its number, int32


@dataclasses.dataclass(frozen=True)
class Split:
    """The split of rows (B, T, ...) and of a table (V, D) in a group of devices."""

    axes: frozenset[str]  # of the group
    rows: str | None  # the axis that splits B; None: none does
    vocabulary: str | None  # the axis that splits V
    groups: int  # into how many parts B is split
    parts: int  # and V
    wide: bool  # whether the axis over rows splits D of the table's gradient

    @property
    def rows_spec(self) -> P:
        return P(self.rows)

    @property
    def table_spec(self) -> P:
        return P(self.vocabulary)

    @property
    def gradient_spec(self) -> P:
        return P(self.vocabulary, self.rows if self.wide else None)

    def run(
        self,
        fn: Callable[..., Any],
        in_specs: tuple[P, ...],
        out_specs: P | tuple[P, ...],
    ) -> Callable:
        """Run fn on each device's own part; compilers would split it otherwise.

        Its first argument is the number of the device's part of the table.
        """
        if not self.axes:
            return functools.partial(fn, 0)
        # of an array that is split: compilers for TPUs have no axis_index in a group
        run = jax.shard_map(
            lambda part, *args: fn(part[0], *args),
            in_specs=(self.table_spec, *in_specs),
            out_specs=out_specs,
            axis_names=set(self.axes),
            check_vma=False,
        )
        return functools.partial(run, jnp.arange(self.parts))

    def over_rows(self, x: jax.Array) -> jax.Array:
        """Sum over the devices that have other rows."""
        return x if self.rows is None else lax.psum(x, self.rows)

    def over_vocabulary(self, x: jax.Array) -> jax.Array:
        """Sum over the devices that have other parts of the table."""
        return x if self.vocabulary is None else lax.psum(x, self.vocabulary)

    def reduced(self, gradient: jax.Array) -> jax.Array:
        """Return the gradient of the table by all rows, as `gradient_spec` says."""
        if self.rows is None or not self.wide:
            return self.over_rows(gradient)
        return reduce_scatter(gradient, self.rows, 1)


def split_of(rows: int, table: tuple[int, ...]) -> Split:
    """Return how the group that this is traced for splits rows and a table."""
    sizes = {a: k for a, k in automatic_axes().items() if a in (ROWS, TENSOR)}
    groups, parts = sizes.get(ROWS, 1), sizes.get(TENSOR, 1)
    groups = groups if rows % groups == 0 else 1
    parts = parts if table[0] % parts == 0 else 1
    return Split(
        frozenset(sizes),
        ROWS if groups > 1 else None,
        TENSOR if parts > 1 else None,
        groups,
        parts,
        table[1] % groups == 0,
    )


def lookup(table_VxD: jax.Array, numbers_BxT: jax.Array) -> jax.Array:
    """Return rows (B, T, D) of a table, in at least float32.

    Its gradient sums over a row's occurrences, in at least float32.

    Args:
      table_VxD: floating.
      numbers_BxT: int32, from 0 to V - 1.
    """
    split = split_of(numbers_BxT.shape[0], table_VxD.shape)
    wide = jnp.promote_types(table_VxD.dtype, jnp.float32)
    if not split.axes:
        return jnp.take(table_VxD.astype(wide), numbers_BxT, axis=0)
    return _lookup(table_VxD, numbers_BxT, split)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _lookup(table: jax.Array, numbers: jax.Array, split: Split) -> jax.Array:
    def local(part: Part, table: jax.Array, numbers: jax.Array) -> jax.Array:
        own, here = _own(part, table, numbers)
        x = jnp.take(table, own, axis=0)
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        return split.over_vocabulary(jnp.where(here[..., None], x, 0))

    rows = split.rows_spec
    return split.run(local, (split.table_spec, rows), rows)(table, numbers)


def _own(
    part: Part, table: jax.Array, numbers: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return numbers in this device's part of the table, and which are in it."""
    own = numbers - part * table.shape[0]
    return jnp.clip(own, 0, table.shape[0] - 1), (own >= 0) & (own < table.shape[0])


def _lookup_forward(
    table: jax.Array, numbers: jax.Array, split: Split
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _lookup(table, numbers, split), (table, numbers)


def _lookup_backward(
    split: Split, saved: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, np.ndarray]:
    def local(
        part: Part, table: jax.Array, numbers: jax.Array, g: jax.Array
    ) -> jax.Array:
        own, here = _own(part, table, numbers)
        gradient = jnp.zeros(table.shape, g.dtype)
        gradient = gradient.at[own].add(jnp.where(here[..., None], g, 0))
        return split.reduced(gradient).astype(table.dtype)

    table, numbers = saved
    rows = split.rows_spec
    in_specs = (split.table_spec, rows, rows)
    gradient = split.run(local, in_specs, split.gradient_spec)(table, numbers, g)
    return gradient, np.zeros(numbers.shape, jax.dtypes.float0)


_lookup.defvjp(_lookup_forward, _lookup_backward)
