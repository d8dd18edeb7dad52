"""Names the files that this package puts into a model's folder."""

from __future__ import annotations

from pathlib import Path

MEASURED_HEADS = "kv_heads.json"  # a profile of the kind `headkv`


def profile_beside(model: str | Path) -> str | None:
    """The profile of measured heads in a model's folder; None without one, or for a hub's name."""
    path = Path(model) / MEASURED_HEADS
    return str(path) if path.is_file() else None
