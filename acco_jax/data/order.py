"""The order of rows: a permutation for each epoch, computed on demand.

A permutation of n rows is never held. `permuted` computes where it takes places, in
NumPy, for as many places at once as a batch has rows, whatever n is.
"""

import abc
import hashlib
from collections.abc import Sequence

import numpy as np

_ROUNDS = 8
_BLOCK = 1024  # positions whose rows are computed together, at most


def permuted(places: np.ndarray, size: int, *names: int) -> np.ndarray:
    """Return where a pseudorandom permutation of 0 .. size - 1 takes some places.

    A Feistel network permutes the numbers of an even number of bits, enough for `size`.
    A number outside the range is permuted again until it is inside.

    Args:
      places: integers (n,) in 0 .. size - 1.
      size: of what is permuted.
      *names: of the permutation, such as a seed and an epoch: they are hashed, so that
        permutations whose names differ are unrelated.

    Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002).
    """
    digest = hashlib.sha512(repr(names).encode()).digest()
    keys = np.frombuffer(digest, "<u8")[:_ROUNDS]
    half = np.uint64(max((size - 1).bit_length() + 1, 4) // 2)
    mask = (np.uint64(1) << half) - np.uint64(1)
    out = np.asarray(places, np.uint64)
    inside = np.zeros(out.shape, bool)
    while not inside.all():
        out = np.where(inside, out, _feistel(out, keys, half, mask))
        inside = out < size
    return out.astype(np.int64)


def _feistel(
    x: np.ndarray, keys: np.ndarray, half: np.uint64, mask: np.uint64
) -> np.ndarray:
    """Permute the numbers of twice `half` bits."""
    left, right = x >> half, x & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return left << half | right


def _mixed(x: np.ndarray) -> np.ndarray:
    """Mix the bits of 64-bit integers: splitmix64's last lines."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


class Order(abc.ABC):
    """Endless sequences of rows, one or several in parallel.

    Attributes:
      streams: the number of sequences. One is read by all workers in turn. With
        several, each worker reads its own.
    """

    streams: int

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int], np.ndarray] = {}

    def rows(self, stream: int, positions: np.ndarray) -> np.ndarray:
        """Return the rows at some positions of a stream, int64 (n,)."""
        size = self._block_size(stream)
        blocks, places = np.divmod(np.asarray(positions, np.int64), size)
        out = np.empty_like(places)
        for block in set(blocks.tolist()):
            here = blocks == block
            out[here] = self._block(stream, block)[places[here]]
        return out

    def _block_size(self, stream: int) -> int:
        return min(_BLOCK, self.epoch(stream))

    def _block(self, stream: int, block: int) -> np.ndarray:
        """Return a block of a stream's rows, computed at once, and hold the newest."""
        found = self._blocks.get((stream, block))  # threads may share them
        if found is None:
            for oldest in list(self._blocks)[: -2 * self.streams]:
                self._blocks.pop(oldest, None)
            size = self._block_size(stream)
            positions = np.arange(block * size, (block + 1) * size)
            epochs, places = np.divmod(positions, self.epoch(stream))
            rows = [
                self._places(stream, int(epoch), places[epochs == epoch])
                for epoch in np.unique(epochs)
            ]
            found = self._blocks[stream, block] = np.concatenate(rows)
        return found

    @abc.abstractmethod
    def epoch(self, stream: int) -> int:
        """Return the number of rows of a stream's epoch."""

    @abc.abstractmethod
    def _places(self, stream: int, epoch: int, places: np.ndarray) -> np.ndarray:
        """Return the rows at some places of an epoch."""


class Shuffled(Order):
    """One sequence for all workers: every epoch holds each row once."""

    streams = 1

    def __init__(self, size: int, seed: int):
        super().__init__()
        self._size, self._seed = size, seed

    def epoch(self, stream: int) -> int:
        return self._size

    def _places(self, stream: int, epoch: int, places: np.ndarray) -> np.ndarray:
        return permuted(places, self._size, self._seed, epoch)


class Skewed(Order):
    """A sequence for each worker; an epoch of all of them holds each row once.

    Rows are in as many groups as there are workers, one after the other. In each epoch
    the first part of every group's order, the share `skew`, goes to the worker with its
    number; the rest of all groups is pooled, shuffled and dealt to the workers in turn.
    Each worker then shuffles its rows.
    """

    def __init__(self, sizes: Sequence[int], seed: int, skew: float):
        super().__init__()
        self.streams, self._seed = len(sizes), seed
        self._sizes = np.asarray(sizes, np.int64)
        self._first = np.cumsum(self._sizes) - self._sizes
        self._own = np.rint(skew * self._sizes).astype(np.int64)
        self._rest = np.cumsum(self._sizes - self._own)  # of groups 0 .. i

    def epoch(self, stream: int) -> int:
        dealt = range(stream, int(self._rest[-1]), self.streams)
        return int(self._own[stream]) + len(dealt)

    def _places(self, stream: int, epoch: int, places: np.ndarray) -> np.ndarray:
        seed, own = self._seed, self._own[stream]
        places = permuted(places, self.epoch(stream), seed, epoch, 1, stream)
        group, at = np.full_like(places, stream), places.copy()
        if (pooled := places >= own).any():
            pool = (places[pooled] - own) * self.streams + stream
            pool = permuted(pool, int(self._rest[-1]), seed, epoch, 2)
            group[pooled] = g = np.searchsorted(self._rest, pool, "right")
            before = self._rest[g] - (self._sizes - self._own)[g]
            at[pooled] = pool - before + self._own[g]
        for g in np.unique(group):
            chosen, size = group == g, int(self._sizes[g])
            at[chosen] = permuted(at[chosen], size, seed, epoch, 3, int(g))
        return self._first[group] + at
