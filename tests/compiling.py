"""What tests want to know of compilation, and to have of it."""

import contextlib
import logging
import os

import jax

VARIABLE = "JAX_DISABLE_MOST_OPTIMIZATIONS"


@contextlib.contextmanager
def compilations():
    """The names of what is compiled inside."""
    names = []

    class Handler(logging.Handler):
        def emit(self, record):
            if record.getMessage().startswith("Compiling "):
                names.append(record.getMessage().split()[1])

    logger, handler = logging.getLogger("jax._src.interpreters.pxla"), Handler()
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.DEBUG)
    try:
        yield names
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextlib.contextmanager
def optimized():
    """Optimizes what is compiled inside, in processes started there, too.

    For tests whose bits or schedules depend on it.
    """
    quick = os.environ.pop(VARIABLE, None)
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        yield
    finally:
        if quick:
            jax.config.update("jax_disable_most_optimizations", True)
            os.environ[VARIABLE] = quick
