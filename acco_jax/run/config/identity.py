"""Identity of a run: the fields of its config of which the schema says so."""

from typing import Any

from acco_jax.run.config.schema import FIELDS, Field

# Beside fields, config.json has these; a run may continue with others.
HARMLESS = ("workers", "generation", "parameters", "total_steps")


def _lacking(field: Field | None, name: str) -> Any:
    """Return what JSON without a field, or without a section of fields, stands for."""
    if field is None:
        return {} if any(f.startswith(f"{name}.") for f in FIELDS) else None
    return list(field.default) if isinstance(field.default, tuple) else field.default


def differing_field(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> str:
    """Return the first field in which two configs differ; '' if none matters."""
    for key in sorted(old.keys() | new.keys()):
        field = FIELDS.get(prefix + key)
        a, b = (tree.get(key, _lacking(field, prefix + key)) for tree in (old, new))
        if prefix + key in HARMLESS or (field and not field.identity):
            continue
        if isinstance(a, dict) and isinstance(b, dict):
            if difference := differing_field(a, b, f"{prefix}{key}."):
                return difference
        elif field and field.is_place(a) and field.is_place(b):
            continue
        elif a != b:
            name = repr(prefix + key)[1:-1]  # of a file that may hold anything
            return f"{name}={a!r}, not {b!r}"
    return ""
