"""Dtypes of results, whatever jax_numpy_dtype_promotion is set to."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


def promoted(a: DTypeLike, b: DTypeLike) -> np.dtype:
    """Return the dtype that holds values of both dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(a, b)
