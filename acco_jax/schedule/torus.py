"""Links that permutes take through a TPU's torus.

A value goes along one dimension after another, the shorter way around a ring. How a
TPU routes is not published: this is the usual way, and a prediction.
"""

import collections
import functools
from collections.abc import Iterator

from acco_jax.schedule.hlo import Pairs
from acco_jax.schedule.topologies import Topology

Link = tuple[tuple[int, ...], int, int]  # a place, a dimension, a direction: 1 or -1


def route(
    topology: Topology, source: tuple[int, ...], target: tuple[int, ...]
) -> Iterator[Link]:
    """Yield the links from one place of a slice to another.

    Of two ways of equal length every other place takes the other one.
    """
    at = list(source)
    for axis, (size, ring) in enumerate(
        zip(topology.shape, topology.rings, strict=True)
    ):
        ahead = target[axis] - source[axis]
        if ring:
            ahead %= size
            if 2 * ahead > size or (2 * ahead == size and sum(source) % 2):
                ahead -= size
        sign = 1 if ahead > 0 else -1
        for _ in range(abs(ahead)):
            yield tuple(at), axis, sign
            at[axis] = (at[axis] + sign) % size


@functools.cache
def _loads(topology: Topology, pairs: Pairs) -> tuple[collections.Counter[Link], int]:
    """Return how many values cross each link, and the links of the longest way."""
    places = topology.coordinates
    routes = [list(route(topology, places[a], places[b])) for a, b in pairs]
    links: collections.Counter[Link] = collections.Counter()
    for found in routes:
        links.update(found)
    return links, max(map(len, routes), default=0)


@functools.cache
def busiest(
    topology: Topology, permutes: tuple[tuple[Pairs, int], ...]
) -> tuple[int, int]:
    """Return the bytes over the busiest link, and the links of the longest way.

    Args:
      topology: of one slice.
      permutes: that are under way together: pairs of devices, numbered within the
        slice, and the bytes that each source sends.
    """
    total: collections.Counter[Link] = collections.Counter()
    hops = 0
    for pairs, size in permutes:
        links, longest = _loads(topology, pairs)
        hops = max(hops, longest)
        for link, values in links.items():
            total[link] += values * size
    return max(total.values(), default=0), hops
