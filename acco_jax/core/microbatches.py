"""The microbatches of each worker: their counts, and their division into pieces."""

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import ArrayLike

from acco_jax.core.workers import place

# microbatches of each worker; None: all that there are
Counts = ArrayLike | Sequence[int] | jax.ShapeDtypeStruct | None
Count = TypeVar("Count", int, jax.Array)  # of one worker


def differ(counts: Counts) -> bool:
    """Return whether workers' counts may differ; a jax.Array is not read."""
    if counts is None:
        return False
    if not isinstance(counts, jax.Array | jax.ShapeDtypeStruct):
        return len(set(np.asarray(counts).ravel().tolist())) > 1
    return True


def whole_numbers(given: Any) -> Any:
    """Return NumPy's integers, also in a sequence, as Python's; others as they are."""
    if isinstance(given, np.ndarray | np.integer):
        return given.tolist()
    if isinstance(given, list | tuple):
        return type(given)(map(whole_numbers, given))
    return given


def whole_number(name: str, given: object, least: int, remedy: str) -> int:
    """Return an integer, of NumPy or not.

    Raises:
      ValueError: it is none, or less than `least`.
    """
    value = whole_numbers(given)
    if type(value) is not int or value < least:
        raise ValueError(f"{name} is {given!r}: {remedy}")
    return value


def place_counts(
    counts: Counts, workers: int, most: int, sharding: NamedSharding
) -> jax.Array | None:
    """Put microbatch counts on their workers; see `Accumulator.place_counts`."""
    if counts is None:
        return None
    if np.shape(counts) != (workers,):
        raise ValueError(
            f"counts has shape {np.shape(counts)}: give one count per worker, "
            f"shape ({workers},)."
        )
    given = counts if isinstance(counts, jax.Array) else np.asarray(counts)
    if not jnp.issubdtype(given.dtype, jnp.integer):
        raise ValueError(f"counts are {given.dtype}: they must be integers.")
    if given.dtype == np.uint32:  # which would be clipped to numbers of microbatches
        raise ValueError(
            "counts are uint32, as the numbers of a jax.random.PRNGKey are: give a key "
            "as rng, and counts in int32."
        )
    if isinstance(given, jax.Array):
        return place(_clip(given, most), sharding)
    if given.min() < 0 or given.max() > most:
        raise ValueError(
            f"counts {given.tolist()} must lie between 0 and microbatches = {most}."
        )
    return place(given.astype(np.int32), sharding)


@functools.partial(jax.jit, static_argnums=1)
def _clip(counts: jax.Array, most: int) -> jax.Array:
    most = min(most, jnp.iinfo(counts.dtype).max)
    return jnp.clip(counts, 0, most).astype(jnp.int32)


def piece(count: Count, k: int, parts: int) -> tuple[Count, Count]:
    """Return (first, end) of the microbatches of the k-th of `parts` pieces.

    Half of `count`, rounded down, comes before the middle; a single piece has all. The
    remainder of a further division goes to the pieces next to the middle.
    """
    middle = parts // 2
    before = count * middle // parts

    def bound(k: int) -> Count:
        if k < middle:
            return before * k // middle
        return count - (count - before) * (parts - k) // (parts - middle)

    return bound(k), bound(k + 1)
