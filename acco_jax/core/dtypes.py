"""Dtypes of results, whatever jax_numpy_dtype_promotion is set to."""

from typing import Any

import jax
import jax.numpy as jnp


def promoted(a: Any, b: Any) -> Any:
    """Return the dtype that holds values of both dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(a, b)
