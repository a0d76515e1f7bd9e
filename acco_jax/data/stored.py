"""Tokens in a file, of which each block is verified whenever it is read."""

import os
import weakref
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from acco_jax.command import exits

BLOCK = 4096  # bytes that have a checksum of their own
_MOST = 2**26  # tokens of a slice that are held in memory


def damaged(path: Path) -> exits.Damaged:
    """Return the error that names a damaged file of the token cache."""
    return exits.Damaged(
        f"{path} is damaged: remove the folder of tokens, which is then made again"
    )


def block_sums(path: Path) -> np.ndarray:
    """Return the CRC-32 of each block of a file, uint32 (blocks,)."""
    with open(path, "rb") as file:
        blocks = iter(lambda: file.read(BLOCK), b"")
        return np.fromiter(map(zlib.crc32, blocks), np.uint32)


class Tokens:
    """Tokens on disk, verified to be those that were written when they are read.

    A slice reads its blocks and verifies them, each time. `np.asarray` verifies
    everything and memory-maps the file.
    """

    def __init__(self, path: Path, dtype: str, sums: np.ndarray):
        """Open a file.

        Args:
          path: of the file.
          dtype: of a token.
          sums: `block_sums` of the file as it was written.

        Raises:
          ValueError: the file has another number of blocks.
        """
        self.dtype = np.dtype(dtype)
        self._path, self._sums = path, sums
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        size = os.fstat(self._file).st_size
        self._length = size // self.dtype.itemsize
        if size % self.dtype.itemsize or len(sums) != -(-size // BLOCK) or not size:
            raise damaged(path)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        """Return a token, or a slice of them.

        Raises:
          ValueError: a block that holds them is damaged.
        """
        if not isinstance(index, slice):
            number = range(self._length)[index]
            return self[number : number + 1][0]
        start, stop, step = index.indices(self._length)
        if step != 1 or stop - start > _MOST:
            return np.asarray(self)[index]
        each = BLOCK // self.dtype.itemsize
        first = start // each
        found = np.frombuffer(self._read(first, -(-stop // each)), self.dtype)
        return found[start - first * each : max(stop - first * each, 0)]

    def __array__(
        self, dtype: DTypeLike | None = None, copy: bool | None = None
    ) -> np.ndarray:
        for first in range(0, len(self._sums), 256):
            self._read(first, first + 256)
        mapped = np.memmap(self._path, self.dtype, mode="r")
        return np.array(mapped, dtype, copy=copy)

    def _read(self, first: int, end: int) -> bytes:
        """Return the blocks from `first` to before `end`; raise as `__getitem__`."""
        content = os.pread(self._file, max(end - first, 0) * BLOCK, first * BLOCK)
        whole = memoryview(content)
        for i, expected in enumerate(self._sums[first:end].tolist()):
            if zlib.crc32(whole[i * BLOCK : (i + 1) * BLOCK]) != expected:
                raise damaged(self._path)
        return content
