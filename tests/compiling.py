"""Turns XLA's optimizations on for tests whose bits or schedules depend on them."""

import contextlib
import os

import jax

VARIABLE = "JAX_DISABLE_MOST_OPTIMIZATIONS"


@contextlib.contextmanager
def optimized():
    """Optimizes what is compiled inside, in processes started there, too."""
    quick = os.environ.pop(VARIABLE, None)
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        yield
    finally:
        if quick:
            jax.config.update("jax_disable_most_optimizations", True)
            os.environ[VARIABLE] = quick
