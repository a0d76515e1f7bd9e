"""Sets of times: arrays (n, 2) of begins and ends, sorted, disjoint, none empty."""

from collections.abc import Iterable

import numpy as np

Set = np.ndarray  # (n, 2), of integers (nanoseconds)


def union(spans: Iterable[tuple[float, float]] | np.ndarray) -> Set:
    """Return the times that lie in at least one span; empty spans have none."""
    spans = np.asarray(list(spans), np.int64).reshape(-1, 2)
    spans = spans[spans[:, 1] > spans[:, 0]]
    if not len(spans):
        return spans
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    ends = np.maximum.accumulate(spans[:, 1])
    first = np.concatenate(([True], spans[1:, 0] > ends[:-1]))
    last = np.concatenate((first[1:], [True]))
    return np.stack((spans[first, 0], ends[last]), axis=1)


def both(a: Set, b: Set) -> Set:
    """Return the times that lie in both."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i, 0], b[j, 0]), min(a[i, 1], b[j, 1])
        if begin < end:
            found.append((begin, end))
        if a[i, 1] < b[j, 1]:
            i += 1
        else:
            j += 1
    return np.asarray(found, np.int64).reshape(-1, 2)


def without(a: Set, b: Set) -> Set:
    """Return the times of a that do not lie in b."""
    if not len(a):
        return a
    begin, end = a[0, 0], a[-1, 1]
    edges = np.concatenate(([begin], b.ravel(), [end]))
    gaps = np.clip(edges, begin, end).reshape(-1, 2)
    return both(a, gaps[gaps[:, 1] > gaps[:, 0]])


def length(a: Set) -> int:
    """Return the total length of a set."""
    return int((a[:, 1] - a[:, 0]).sum())
