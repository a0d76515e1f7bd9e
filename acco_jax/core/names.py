"""Names in a config: the objects of valid names, one-line errors for others."""

import difflib
import importlib
from collections.abc import Callable, Iterable
from typing import Any, overload


def suggestion(name: object, names: Iterable[str]) -> str:
    """Return " did you mean ...?" with the most similar name, or ""."""
    close = difflib.get_close_matches(str(name), list(names), 1)
    return f" did you mean {close[0]!r}?" if close else ""


def check_name(what: str, name: object, names: Iterable[str]) -> None:
    """Raise a ValueError if a name is not among `names`.

    Raises:
      ValueError: with the most similar name and all known ones.
    """
    names = list(names)
    if name not in names:
        raise ValueError(
            f"{what} is {name!r}:{suggestion(name, names)} Known: {', '.join(names)}."
        )


@overload
def named(field: str, name: str) -> Callable[..., Any]: ...
@overload
def named(field: str, name: None) -> None: ...
@overload
def named(field: str, name: str | None) -> Callable[..., Any] | None: ...
def named(field: str, name: str | None) -> Callable[..., Any] | None:
    """Return the function that 'package.module:function' names; None for None.

    Raises:
      ValueError: if the module cannot be imported, or has no such function.
    """
    if name is None:
        return None
    module, _, function = name.partition(":")
    if not module or not function:
        raise ValueError(f"{field} is {name!r}: give 'package.module:function'.")
    try:
        value = getattr(importlib.import_module(module), function)
    except Exception as error:  # a module is a program: it may raise anything
        raise ValueError(
            f"{field} is {name!r}, which cannot be imported: {error}. Its folder must "
            "be the config's, or on PYTHONPATH."
        ) from error
    if not callable(value):
        raise ValueError(
            f"{field} is {name!r}, a {type(value).__name__}: name a function."
        )
    return value
