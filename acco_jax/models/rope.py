"""Rotary position embedding: queries and keys turned by angles that grow with position.

Shapes: B batch, T length, N heads, H width of a head.

Sources: Su et al., RoFormer (arXiv 2104.09864); the scaling is that of Llama 3.1, as
`rope_type: llama3` of Hugging Face transformers computes it, whose convention of pairs
is kept: dimension i of a head turns with dimension i + H / 2.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

Turns = tuple[jax.Array, jax.Array]  # cosines and sines, ([B,] T, 1, H / 2) float32


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """A scaling of slow rotations to sequences longer than those of the first training.

    Rotations that come round less than `low_freq_factor` times in `original_length`
    positions slow down by `factor`. Rotations that come round more than
    `high_freq_factor` times do not change. Between both there is a linear transition.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    def __post_init__(self) -> None:
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"rope_scaling has low_freq_factor={self.low_freq_factor} and "
                f"high_freq_factor={self.high_freq_factor}: give 0 < low < high"
            )
        for name in ("factor", "original_length"):
            if not getattr(self, name) >= 1:
                raise ValueError(
                    f"rope_scaling has {name}={getattr(self, name)}: give at least 1"
                )


def frequencies(width: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """Return the angles in radians per position, (H / 2,) float32.

    theta^(-2i / H) for i from 0 to H / 2 - 1, then scaled.
    """
    radians = theta ** (-np.arange(0, width, 2) / width)
    if scaling is not None:
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        rounds = scaling.original_length * radians / (2 * math.pi)
        kept = np.clip((rounds - low) / (high - low), 0.0, 1.0)
        radians = radians * (kept + (1.0 - kept) / scaling.factor)
    return radians.astype(np.float32)


def turns(positions: jax.Array, radians: np.ndarray) -> Turns:
    """Return the cosines and sines that `rotate` takes, of positions ([B,] T)."""
    angles = positions[..., None, None].astype(jnp.float32) * radians
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BxTxNxH: jax.Array, turns: Turns) -> jax.Array:
    """Return the heads turned, computed in at least float32, in x's dtype."""
    cos, sin = turns
    wide = jnp.promote_types(x_BxTxNxH.dtype, jnp.float32)
    a, b = jnp.split(x_BxTxNxH.astype(wide), 2, axis=-1)
    y_BxTxNxH = jnp.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)
    return y_BxTxNxH.astype(x_BxTxNxH.dtype)
