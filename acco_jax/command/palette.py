"""Colours of every picture: of a method, and of computation and collectives."""

from collections.abc import Iterable

METHODS = {  # each reads on light and on dark pages
    "zero1": "#3f7fd9",
    "acco": "#e0792b",
    "dpu": "#d1446c",
    "wp": "#8b68d4",
    "diloco": "#2a9d7c",
    "fused_zero1": "#3d9bb5",
    "streaming_diloco": "#7d9126",
    "co2": "#a87b23",
    "slowmo": "#c05ab4",
    "ddp": "#808080",
    "gossip": "#6b76c9",
    "cellm": "#b5544a",
    "sparseloco": "#4f8a5b",
}
COMPUTATION, OTHER_COMPUTATION = "#4c78a8", "#b8c9de"
COLLECTIVES = {
    "reduce-scatter": "#f58518",
    "all-gather": "#54a24b",
    "all-reduce": "#e45756",
    "send-recv": "#b279a2",
    "all-to-all": "#9d755d",
    "collective-permute": "#72b7b2",
}


def of_methods(names: Iterable[str]) -> dict[str, str]:
    """Map names, such as 'acco' and 'acco(gather_bits=8)', to colours.

    The first name of a method has the method's colour. Any other name has a colour of
    a method that is not among the names, while there is one.
    """
    names = list(dict.fromkeys(names))
    found: dict[str, str] = {}
    for name in sorted(names, key=lambda name: "(" in name):  # plain names first
        color = METHODS.get(name.rpartition("/")[2].partition("(")[0])
        if color is not None and color not in found.values():
            found[name] = color
    every = list(METHODS.values())
    spare = [color for color in every if color not in found.values()] or every
    others = [name for name in names if name not in found]
    found |= {name: spare[i % len(spare)] for i, name in enumerate(others)}
    return {name: found[name] for name in names}
