"""The training loop and what belongs to it."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Import `load_run` when it is asked for: commands must not import JAX yet."""
    if name == "load_run":
        from acco_jax.runner.runs import load_run

        return load_run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
