"""Training loop and the modules that it needs."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Import `load_run` on first access: commands must not import JAX yet."""
    if name == "load_run":
        from acco_jax.run.trained.trained_runs import load_run

        return load_run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
