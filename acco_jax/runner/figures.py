"""Figures in one style."""

from typing import Any

from matplotlib.figure import Figure


def subplots(width: float, height: float, *grid: int, **options: Any) -> Any:
    """Makes a figure, without pyplot's global state, and a flat array of its axes.

    Args:
      width: inches.
      height: inches.
      *grid: numbers of rows and columns.
      **options: as for `Figure.subplots`.
    """
    figure = Figure(figsize=(width, height), layout="constrained", dpi=120)
    axes = figure.subplots(*grid, squeeze=False, **options).ravel()
    for ax in axes:
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes
