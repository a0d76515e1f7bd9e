"""How XLA compiles the tests' programs: quickly, or as it compiles users'."""

import contextlib
import os

import jax

VARIABLE = "JAX_DISABLE_MOST_OPTIMIZATIONS"


@contextlib.contextmanager
def optimized():
    """What is compiled inside is optimized, in processes started there, too."""
    quick = os.environ.pop(VARIABLE, None)
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        yield
    finally:
        if quick:
            jax.config.update("jax_disable_most_optimizations", True)
            os.environ[VARIABLE] = quick
