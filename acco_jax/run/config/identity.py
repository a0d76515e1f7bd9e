"""Identity of a run: every field of its config except those named here."""

from typing import Any

# A run may continue in its workdir with other values of these.
HARMLESS = frozenset(
    {"log_every", "eval_every", "eval_batches", "checkpoint_every", "keep_checkpoints",
     "checkpoints", "compare_replicas_every", "metrics_hook", "wandb_project",
     "spike.policy", "spike.threshold", "spike.calls", "spike.tokens",
     "drop_nonfinite", "most_dropped_in_a_row",
     "samples", "sample_prompt", "sample_tokens", "mesh.fsdp", "mesh.tensor", "domains",
     "devices", "form", "workers", "profile", "data.data_dir", "data.path",
     "ignore_weights", "generation", "parameters", "total_steps"}
)  # fmt: skip
# Nor where these lie; their content, as that of data.path, is part of an identity.
PLACES = {"init_from": (), "data.tokenizer": ("bytes", "bpe")}  # except these names


def differing_field(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> str:
    """Return the first field in which two configs differ; '' if none matters."""
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if prefix + key in HARMLESS:
            continue
        if isinstance(a, dict) and isinstance(b, dict):
            if difference := differing_field(a, b, f"{prefix}{key}."):
                return difference
        elif _is_place(prefix + key, a) and _is_place(prefix + key, b):
            continue
        elif a != b:
            name = repr(prefix + key)[1:-1]  # of a file that may hold anything
            return f"{name}={a!r}, not {b!r}"
    return ""


def _is_place(name: str, value: Any) -> bool:
    return name in PLACES and isinstance(value, str) and value not in PLACES[name]
