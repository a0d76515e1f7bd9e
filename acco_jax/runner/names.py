"""One line for a name that does not exist."""

import difflib
from collections.abc import Iterable


def suggestion(name: object, names: Iterable[str]) -> str:
    """Returns " did you mean ...?" for the name most like another, or ""."""
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
