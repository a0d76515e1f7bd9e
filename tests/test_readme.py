"""README's Python runs as it stands, from top to bottom."""

import re
from pathlib import Path

import jax
import numpy as np

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()


def test_the_snippets_run():
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(blocks) == 3
    names = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert names["state"].half_rounds == 1
    assert names["metrics"]["weight"] == 2 * 2 * jax.device_count()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(names["theta"]))
    assert jax.tree.map(np.shape, names["theta"]) == {"v": (16, 1), "w": (8, 16)}
