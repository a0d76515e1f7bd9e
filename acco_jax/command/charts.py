"""Figures in one style. Only what draws one imports matplotlib, which takes 0.5 s."""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from acco_jax.command.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def subplots(
    width: float, height: float, *grid: int, **options: Any
) -> tuple["Figure", np.ndarray]:
    """Make a figure, without pyplot's global state, and a flat array of its axes.

    Args:
      width: inches.
      height: inches.
      *grid: numbers of rows and columns.
      **options: as for `Figure.subplots`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=120)
    axes = figure.subplots(*grid, squeeze=False, **options).ravel()
    for ax in axes:
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure: "Figure", path: Path) -> None:
    """Write a figure whole, in the format of the path's suffix: PNG without one."""
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix.removeprefix(".") or None)
    write_whole(path, picture.getvalue())


def legend_below(figure: "Figure", most: int = 6) -> None:
    """Put the legend of a figure's first axes below it, in columns that fit.

    Args:
      figure: of `subplots`, drawn.
      most: columns.
    """
    handles, labels = figure.axes[0].get_legend_handles_labels()
    widest = 0.6 + 0.09 * max(map(len, labels))  # inches of the mark, and of a letter
    columns = max(1, min(most, len(labels), int(figure.get_figwidth() / widest)))
    figure.legend(
        handles, labels, loc="outside lower center", frameon=False, ncols=columns
    )
