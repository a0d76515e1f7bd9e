"""Compiled programs as bytes, for a later process that runs them without tracing.

JAX's compilation cache spares that process the compiler alone: it would trace and lower
each program first, which takes longer than to load it.
"""

import contextlib
import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.tree_util import Partial

from acco_jax.core.layout import Layout

PyTree = Any
Programs = Mapping[str, Sequence[jax.stages.Compiled]]  # by name; one for each shape


class Kept:
    """A function whose compiled programs an earlier process has left."""

    def __init__(
        self, function: Callable[..., Any], programs: Sequence[jax.stages.Compiled]
    ) -> None:
        """Take what jax.jit returned, for arguments that fit none of the programs."""
        self._function, self._programs = function, programs

    def __call__(self, *args: Any) -> Any:
        for program in self._programs:
            try:
                return program(*args)
            except (TypeError, ValueError):  # of other shapes: nothing has run
                continue
        return self._function(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


@contextlib.contextmanager
def reads() -> Iterator[list[str]]:
    """Collect an event for each program that JAX's compilation cache gives meanwhile.

    XLA:CPU writes such a program without its code, and what loads that fails.
    """
    found: list[str] = []

    def notice(event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            found.append(event)

    jax.monitoring.register_event_listener(notice)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_listener(notice)


def functions(tree: PyTree) -> Iterator[Callable[..., Any]]:
    """Yield the functions of a tree's Partials, and of those in their arguments."""
    for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Partial)):
        if isinstance(x, Partial):
            yield x.func
            yield from functions((x.args, x.keywords))


def dumped(programs: Programs, shared: Sequence[object]) -> bytes:
    """Return programs as bytes.

    Args:
      programs: of this process.
      shared: objects in their arguments' trees that cannot be pickled; `loaded` is
        given the equal ones of its process, in the same order.

    Raises:
      Exception: if a tree holds something else that cannot be pickled, or a program
        cannot be serialized.
    """
    rows = {
        name: [serialize_executable.serialize(program) for program in found]
        for name, found in programs.items()
    }
    file = io.BytesIO()
    _Pickler(file, shared).dump(rows)
    return file.getvalue()


def loaded(
    data: bytes, shared: Sequence[object], devices: Sequence[jax.Device]
) -> dict[str, list[jax.stages.Compiled]]:
    """Return the programs that `dumped` wrote, for the same devices in this process.

    The bytes must be trusted: loading them may run any code.
    """
    rows = _Unpickler(io.BytesIO(data), shared, devices).load()
    load = serialize_executable.deserialize_and_load
    here = {"backend": devices[0].client, "execution_devices": devices}
    return {name: [load(*row, **here) for row in found] for name, found in rows.items()}


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, shared: Sequence[object]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_id(self, obj: object) -> tuple[str, int] | None:
        if isinstance(obj, jax.Device):
            return "device", obj.id
        for i, x in enumerate(self._shared):
            if x is obj or (type(x) is type(obj) is Layout and x == obj):
                return "shared", i
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, file: io.BytesIO, shared: Sequence[object], devices: Sequence[jax.Device]
    ) -> None:
        super().__init__(file)
        self._known = {("shared", i): x for i, x in enumerate(shared)}
        self._known |= {("device", x.id): x for x in devices}

    def persistent_load(self, name: tuple[str, int]) -> object:
        return self._known[name]
