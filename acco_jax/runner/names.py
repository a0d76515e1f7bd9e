"""Names in a config: what they name, or one line for one that does not exist."""

import difflib
import importlib
from collections.abc import Iterable
from typing import Any


def suggestion(name: object, names: Iterable[str]) -> str:
    """Return " did you mean ...?" for the name most like another, or ""."""
    close = difflib.get_close_matches(str(name), list(names), 1)
    return f" did you mean {close[0]!r}?" if close else ""


def check_name(what: str, name: object, names: Iterable[str]) -> None:
    """Refuses a name that is not among `names`.

    Raises:
      ValueError: in one line, with the name most like it and all there are.
    """
    names = list(names)
    if name not in names:
        raise ValueError(
            f"{what} is {name!r}:{suggestion(name, names)} Known: {', '.join(names)}."
        )


def named(field: str, name: str | None) -> Any:
    """Return the function that 'package.module:function' names; None for None.

    Raises:
      ValueError: the module cannot be imported, or has no such function.
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
