"""Compiled programs as bytes, for a later process that runs them without tracing.

JAX's compilation cache spares that process the compiler alone: it would trace and lower
each program first, which takes longer than to load it.
"""

import functools
import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable
from jax.tree_util import Partial, PyTreeDef

from acco_jax.core.layout import Layout

PyTree = Any
# What a program's arguments must have: their tree and shapes. Equal trees of different
# origin have different hashes.
Form = tuple[Any, ...]
Programs = Mapping[str, Sequence[jax.stages.Compiled]]  # by name; one for each form


class Kept:
    """A function whose compiled programs an earlier process has left."""

    def __init__(
        self, function: Callable[..., Any], programs: Sequence[jax.stages.Compiled]
    ) -> None:
        """Take what jax.jit returned, for arguments that fit none of the programs."""
        self._function = function
        self._programs = [(form(program), program) for program in programs]

    def __call__(self, *args: Any) -> Any:
        given = _form(*jax.tree.flatten((args, {})))
        fits = (program for known, program in self._programs if known == given)
        return next(fits, self._function)(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


def form(program: jax.stages.Compiled) -> Form:
    """Return what a program's arguments must have."""
    return _form(jax.tree.leaves(program.args_info), program.in_tree)


def _form(leaves: Sequence[Any], treedef: PyTreeDef) -> Form:
    return treedef, *((np.shape(x), jnp.result_type(x)) for x in leaves)


def reads() -> int:
    """Return how many programs JAX's compilation cache has given since the first call.

    XLA:CPU writes such a program without its code, and what loads that fails.
    """
    return len(_read())


@functools.cache
def _read() -> list[str]:
    found: list[str] = []

    def notice(event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            found.append(event)

    jax.monitoring.register_event_listener(notice)
    return found


def layouts(state: PyTree) -> Iterator[Layout]:
    """Yield the layouts of a method's state, and of the states in it."""
    for x in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "layout")):
        if hasattr(x, "layout"):
            yield x.layout
            yield from layouts([part for part in x if part is not x.layout])


def functions(tree: PyTree) -> Iterator[Callable[..., Any]]:
    """Yield the functions of a tree's Partials, and of those in their arguments."""
    for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Partial)):
        if isinstance(x, Partial):
            yield x.func
            yield from functions((x.args, x.keywords))


def dumped(
    programs: Programs, shared: Sequence[object], devices: Sequence[jax.Device]
) -> bytes:
    """Return programs as bytes.

    Args:
      programs: of this process.
      shared: objects in their arguments' trees that cannot be pickled; `loaded` is
        given the equal ones of its process, in the same order.
      devices: of the programs.

    Raises:
      ValueError: if a tree holds something that is equal only to itself.
      Exception: if it holds something else that cannot be pickled, or a program cannot
        be serialized.
    """
    rows = {
        name: [serialize_executable.serialize(program) for program in found]
        for name, found in programs.items()
    }
    file = io.BytesIO()
    _Pickler(file, shared).dump(rows)
    again = _Unpickler(io.BytesIO(file.getvalue()), shared, devices).load()
    for name, found in rows.items():
        for before, after in zip(found, again[name], strict=True):
            if before[1] != after[1]:
                raise ValueError("a tree of arguments is equal only to itself")
    return file.getvalue()


def loaded(
    data: bytes, shared: Sequence[object], devices: Sequence[jax.Device]
) -> Programs:
    """Return the programs that `dumped` wrote, for the same devices in this process.

    The bytes must be trusted: loading them may run any code.
    """
    rows = _Unpickler(io.BytesIO(data), shared, devices).load()
    load = serialize_executable.deserialize_and_load
    here = {"backend": devices[0].client, "execution_devices": devices}
    return {name: [load(*row, **here) for row in each] for name, each in rows.items()}


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, shared: Sequence[object]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_id(self, obj: object) -> tuple[str, int] | None:
        if isinstance(obj, jax.Device):
            return "device", obj.id
        for i, x in enumerate(self._shared):
            same = type(x) is type(obj) and isinstance(x, Layout) and x == obj
            if x is obj or same:
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
