"""Files of JSON lines, to which a measurement that was stopped goes on adding."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """Reads the rows that earlier runs have written; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Writes rows behind those in a file, so that a run that ends at once loses only the next."""
    with path.open("a") as output:
        output.writelines(json.dumps(row) + "\n" for row in rows)
