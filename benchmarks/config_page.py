"""The site's page of config fields: written from the schema.

    python benchmarks/config_page.py

Writes docs/site/config.md. Runs nothing.
"""

import math
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from acco_jax.run.config.schema import FIELDS, Field

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "site" / "config.md"

HEAD = """# Config fields

An experiment is a Python file whose `get_config()` returns a config. `default_config()`
of `acco_jax.run.config.fields` returns one with all fields, and an experiment changes
some. Every field is also a flag of `train`, `compare` and `plan`:
`--config.optimizer.name=lion`. Flags win over the file.

`experiments/quickstart.py` is the shortest example. [Training runs](howto/train.md)
shows how to use the fields, [commands](commands.md) lists the other flags.

A value of another type or out of bounds raises a ValueError before any device work. The
message has the field, the value and the remedy.

The fields of a run identify it. Those with *yes* in the column **later** may change
while a run continues. Where it is *moved*, a file or folder may lie elsewhere. Its
content must stay the same.
"""
BAR = r"\|"  # of a cell's text
TABLE = "| field | default | values | later | |\n|---|---|---|---|---|"


def page() -> str:
    """Return the page."""
    sections: dict[str, list[str]] = {}
    for name, field in FIELDS.items():
        sections.setdefault(name.rpartition(".")[0], []).append(row(name, field))
    lines = [HEAD]
    for section, rows in sections.items():
        lines += [f"## {f'`{section}`' if section else 'Experiment'}", "", TABLE]
        lines += [*rows, ""]
    return "\n".join(lines)


def row(name: str, field: Field) -> str:
    """Return a field's row of the table."""
    later = "" if field.identity else "yes"
    cells = [f"`{name}`", f"`{field.default!r}`", values(field)]
    cells += ["moved" if field.place is not None else later, field.doc]
    return f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |"


def values(field: Field) -> str:
    """Return which values a field may have."""
    kind = field.form or {"dict": "section"}.get(field.kind.__name__)
    said = [f"`{x}`" for x in field.choices] or [kind or field.kind.__name__]
    said += [words for words, _, limit in field.limits() if limit != math.inf]
    if field.zero:
        said.append(f"0: {field.zero}")
    return ", ".join(said) + (f" ({field.unit})" if field.unit else "")


if __name__ == "__main__":
    PAGE.write_text(page())
