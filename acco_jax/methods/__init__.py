"""The methods by name, each in one file."""

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args, get_type_hints

# name -> the module here that defines it, imported on first access
MODULES = {
    "acco": "acco",
    "cellm": "local.cellm",
    "co2": "local.co2",
    "ddp": "zero1",
    "diloco": "local.diloco",
    "dpu": "delayed",
    "fused_zero1": "fused_zero1",
    "gossip": "local.gossip",
    "slowmo": "local.slowmo",
    "sparseloco": "local.sparseloco",
    "streaming_diloco": "local.streaming",
    "wp": "delayed",
    "zero1": "zero1",
}


class _Methods(Mapping[str, Callable[..., Any]]):
    """A mapping from names to method factories, imported on first access."""

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return getattr(importlib.import_module(f"{__name__}.{MODULES[name]}"), name)

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)


METHODS = _Methods()


def options(name: str) -> dict[str, Any]:
    """Return the types of a method's keyword arguments, shared options last."""
    make = METHODS[name]
    hints = get_type_hints(make)
    shared = get_type_hints(get_args(hints["options"])[0])
    own = inspect.signature(make).parameters.values()
    return {p.name: hints.get(p.name, Any) for p in own if p.kind == p.KEYWORD_ONLY} | {
        field: shared[field] for field in sorted(shared)
    }
