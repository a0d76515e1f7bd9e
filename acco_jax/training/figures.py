"""Figures in one style."""

from typing import Any

from matplotlib.figure import Figure


def subplots(width: float, height: float, *grid: int, **options: Any) -> Any:
    """Makes a figure without pyplot's global state, which saves itself with Agg.

    Args:
      width: inches.
      height: inches.
      *grid: rows and columns of axes.
      **options: as for `Figure.subplots`.

    Returns:
      The figure and its axes, an array.
    """
    figure = Figure(figsize=(width, height), layout="constrained", dpi=120)
    axes = figure.subplots(*grid, squeeze=False, **options).ravel()
    for ax in axes:
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes
