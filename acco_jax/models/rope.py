"""Rotary position embedding: queries and keys turned by angles that grow with position.

Shapes: B batch, T length, N heads, H width of a head.

Sources: Su et al., RoFormer (arXiv 2104.09864); the scalings are those of Hugging Face
transformers, whose convention of pairs is kept: dimension i of a head turns with
dimension i + H / 2.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

Turns = tuple[jax.Array, jax.Array]  # cosines and sines, ([B,] T, 1, H / 2) float32


def _check_least(scaling: object, *names: str) -> None:
    """Raise a ValueError if a field is below 1."""
    for name in names:
        if not 1 <= getattr(scaling, name) < math.inf:
            raise ValueError(
                f"rope_scaling has {name}={getattr(scaling, name)}: give at least 1"
            )


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """`rope_type: linear`: all rotations slow down by `factor`.

    Source: Chen et al., position interpolation (arXiv 2306.15595).
    """

    factor: float
    magnitude = 1.0  # factor of cosines and sines

    def __post_init__(self) -> None:
        _check_least(self, "factor")

    def scaled(self, radians: np.ndarray) -> np.ndarray:
        """Return the scaled angles per position."""
        return radians / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """`rope_type: llama3`, of Llama 3.1: slow rotations slow down further.

    Rotations that come round less than `low_freq_factor` times in `original_length`
    positions slow down by `factor`. Rotations that come round more than
    `high_freq_factor` times do not change. Between both there is a linear transition.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192
    magnitude = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"rope_scaling has low_freq_factor={self.low_freq_factor} and "
                f"high_freq_factor={self.high_freq_factor}: give 0 < low < high"
            )
        _check_least(self, "factor", "original_length")

    def scaled(self, radians: np.ndarray) -> np.ndarray:
        """Return the scaled angles per position."""
        low, high = self.low_freq_factor, self.high_freq_factor
        rounds = self.original_length * radians / (2 * math.pi)
        kept = np.clip((rounds - low) / (high - low), 0.0, 1.0)
        return radians * (kept + (1.0 - kept) / self.factor)


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """`rope_type: yarn`: slow rotations slow down, and scores grow.

    Rotations that come round more than `beta_fast` times in `original_length` positions
    do not change. Rotations that come round less than `beta_slow` times slow down by
    `factor`. Between both, the transition is linear in the dimension of the head.

    Source: Peng et al., YaRN (arXiv 2309.00071).
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # None: 1 + ln(factor) / 10
    truncate: bool = True  # whether the transition has whole dimensions as its ends

    def __post_init__(self) -> None:
        if not 0 < self.beta_slow < self.beta_fast:
            raise ValueError(
                f"rope_scaling has beta_slow={self.beta_slow} and beta_fast="
                f"{self.beta_fast}: give 0 < slow < fast"
            )
        _check_least(self, "factor", "original_length")

    @property
    def magnitude(self) -> float:
        """Return the factor of cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor
        return yarn_magnitude(self.factor)

    def scaled(self, radians: np.ndarray) -> np.ndarray:
        """Return the scaled angles per position."""
        if len(radians) == 1:
            return radians  # its dimension lies before any transition
        step = math.log(radians[0] / radians[1])  # radians fall by this per dimension

        def dimension(rounds: float) -> float:
            return math.log(self.original_length / (rounds * 2 * math.pi)) / step

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * len(radians) - 1)
        high += 0.001 * (low == high)
        slow = np.clip((np.arange(len(radians)) - low) / (high - low), 0.0, 1.0)
        return radians * (1.0 - slow + slow / self.factor)


def yarn_magnitude(factor: float, slope: float = 1.0) -> float:
    """Return YaRN's factor of cosines and sines, 1 + slope ln(factor) / 10."""
    return 1.0 + 0.1 * slope * math.log(factor) if factor > 1 else 1.0


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


def turns(
    positions: jax.Array, width: int, theta: float, scaling: RopeScaling | None = None
) -> Turns:
    """Return the cosines and sines that `rotate` takes.

    Pair i of a head turns by theta^(-2i / H) radians per position, then scaled.

    Args:
      positions: ([B,] T).
      width: H.
      theta: of the slowest rotation.
      scaling: to sequences longer than those of the first training.
    """
    radians = theta ** (-np.arange(0, width, 2) / width)
    radians = (radians if scaling is None else scaling.scaled(radians)).astype("f4")
    angles = positions[..., None, None].astype(jnp.float32) * radians
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if scaling is None or scaling.magnitude == 1.0:
        return cos, sin
    return cos * scaling.magnitude, sin * scaling.magnitude


def rotate(x_BxTxNxH: jax.Array, turns: Turns) -> jax.Array:
    """Return the heads turned, computed in at least float32, in x's dtype."""
    cos, sin = turns
    wide = jnp.promote_types(x_BxTxNxH.dtype, jnp.float32)
    a, b = jnp.split(x_BxTxNxH.astype(wide), 2, axis=-1)
    y_BxTxNxH = jnp.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)
    return y_BxTxNxH.astype(x_BxTxNxH.dtype)
