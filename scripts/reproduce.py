#!/usr/bin/env python3
"""Runs the command behind a table of docs/results, and compares what it says with what is stored.

    python scripts/reproduce.py --list
    python scripts/reproduce.py TABLE [--models DIR] [--out DIR] [--compare-only]

docs/results/tables.toml names the tables, their commands, figures and tolerances, and which tables
have no such command. Ends with 1 if a figure is missing or differs by more than its tolerance.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
RULE = re.compile(r"\|[ :|-]+\|")


@dataclass(frozen=True)
class Tolerance:
    """How far figures may be from the stored ones: the larger of both parts.

    Attributes:
        figures: a pattern of their paths (`fnmatch`).
        absolute: in the figure's own unit.
        relative: of the stored figure, 0.1 for a tenth.
    """

    figures: str
    absolute: float = 0.0
    relative: float = 0.0

    def holds(self, stored: float, made: float) -> bool:
        """Says whether a figure is near enough."""
        allowed = max(self.absolute, self.relative * abs(stored))
        return abs(made - stored) <= allowed + 1e-9


@dataclass(frozen=True)
class Table:
    """A table that one command reproduces.

    Attributes:
        name: what users type.
        page: the file in docs/results.
        heading: what the table stands under.
        command: for bash, in the repository's root; `{models}` and `{out}` are folders.
        made: the JSON file that it writes, in `{out}`.
        tolerances: of the figures that are compared; the first that fits a path counts.
        minutes: about how long it takes on two cores.
        needs: models, other environments, instruction sets.
        stored: a JSON file in docs/results; without it the page's own cells are compared.
        columns: for the page's cells, by column: a field in `made` below the row's name, or "".
    """

    name: str
    page: str
    heading: str
    command: str
    made: str
    tolerances: tuple[Tolerance, ...]
    minutes: float
    needs: str
    stored: str = ""
    columns: tuple[str, ...] = field(default=())


def registry() -> tuple[list[Table], list[dict[str, Any]]]:
    """Reads the tables that have a command, and the exceptions: page, headings, reason."""
    data = tomllib.loads((RESULTS / "tables.toml").read_text())
    tables = []
    for row in data["table"]:
        row["tolerances"] = tuple(Tolerance(**each) for each in row["tolerances"])
        tables.append(Table(**{**row, "columns": tuple(row.get("columns", ()))}))
    return tables, data["exception"]


def page_tables(page: Path) -> Iterator[tuple[str, list[list[str]]]]:
    """Yields the heading above each table of a page, and the cells of its rows."""
    heading, rows, inside = "", [], False
    for line in [*page.read_text().splitlines(), ""]:
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if RULE.fullmatch(line.strip()):
            inside = True
        elif inside and line.startswith("|"):
            cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
            rows.append([cell.strip() for cell in cells])
        elif inside:
            yield heading, rows
            rows, inside = [], False


def flat(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Yields the numbers of a JSON value by path; a row of `eval` is named by setup and mode."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from flat(each, f"{path}/{key}" if path else key)
    elif isinstance(value, list):
        for index, each in enumerate(value):
            named = isinstance(each, dict) and "setup" in each
            key = f"{each['setup']}/{each.get('mode', '')}" if named else str(index)
            yield from flat(each, f"{path}/{key}" if path else key)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, float(value)


def number(cell: str) -> float | None:
    """Returns the number that a cell begins with, a percentage as a share; None without one."""
    found = re.match(r"\W*?(-?[\d,]*\.?\d+)(%?)", cell)
    if found is None or not found[1]:
        return None
    return float(found[1].replace(",", "")) / (100 if found[2] else 1)


def stored_figures(table: Table) -> dict[str, float]:
    """Returns the figures to compare with, by path."""
    if table.stored:
        return dict(flat(json.loads((RESULTS / table.stored).read_text())))
    figures: dict[str, float] = {}
    for heading, rows in page_tables(RESULTS / table.page):
        for cells in rows if heading == table.heading else []:
            for name, cell in zip(table.columns, cells, strict=False):
                if name and (value := number(cell)) is not None:
                    figures.setdefault(f"rows/{cells[0].strip('`*')}/{name}", value)
    return figures


def compared(table: Table, made: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yields what each compared figure came to: its verdict (`same`, `near`, `OFF`) and a line."""
    for path, stored in stored_figures(table).items():
        tolerance = next((each for each in table.tolerances if fnmatch(path, each.figures)), None)
        if tolerance is None:
            continue
        if path not in made:
            yield "OFF", f"{path}: stored {stored:.6g}, not measured"
        elif tolerance.holds(stored, made[path]):
            verdict = "same" if stored == made[path] else "near"
            yield verdict, f"{path}: stored {stored:.6g}, measured {made[path]:.6g}"
        else:
            allowed = f"within {tolerance.absolute:g} or {tolerance.relative:.0%}"
            yield "OFF", f"{path}: stored {stored:.6g}, measured {made[path]:.6g}, {allowed}"


def run(table: Table, models: Path, out: Path) -> int:
    """Runs a table's command, with this Python first in the path; returns its exit status."""
    command = table.command.replace("{models}", str(models)).replace("{out}", str(out))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    print(command, flush=True)
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command], cwd=ROOT, env=environment
    ).returncode


def report(table: Table, made: Path) -> bool:
    """Prints figures that are off and how many are not; returns whether all are near enough."""
    verdicts = list(compared(table, dict(flat(json.loads(made.read_text())))))
    for verdict, line in verdicts:
        if verdict == "OFF":
            print(f"OFF  {line}")
    counts = {name: sum(each == name for each, _ in verdicts) for name in ("same", "near", "OFF")}
    print(
        f"{table.name}: {counts['same']} figures the same, {counts['near']} within tolerance, "
        f"{counts['OFF']} off"
    )
    return bool(verdicts) and not counts["OFF"]


def print_list(tables: list[Table], exceptions: list[dict[str, Any]]) -> None:
    """Prints the tables that have a command, and those that have none with the reason."""
    for table in tables:
        print(f"{table.name}: {table.page}, {table.heading}")
        print(f"    {table.minutes:g} minutes; {table.needs}")
        print(f"    {table.command}")
    print("\nWithout a command:")
    for row in exceptions:
        print(f"    {row['page']}, {'; '.join(row['headings'])}: {row['reason']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", nargs="?", help="a name out of --list")
    parser.add_argument("--list", action="store_true", help="the tables, and what they need")
    parser.add_argument(
        "--models", type=Path, default=Path("models"), help="holds smollm2 (models)"
    )
    parser.add_argument("--out", type=Path, help="for what the command writes (a new one in /tmp)")
    parser.add_argument("--compare-only", action="store_true", help="what --out already holds")
    options = parser.parse_args()
    tables, exceptions = registry()
    if options.list:
        print_list(tables, exceptions)
        return 0
    table = next((each for each in tables if each.name == options.table), None)
    if table is None:
        parser.error(f"no table {options.table!r}: {', '.join(each.name for each in tables)}")
    out = (options.out or Path(mkdtemp(prefix="reproduce-"))).resolve()
    out.mkdir(parents=True, exist_ok=True)
    if not options.compare_only and (status := run(table, options.models, out)) != 0:
        print(f"the command ended with {status}", file=sys.stderr)
        return 1
    return 0 if report(table, out / table.made) else 1


if __name__ == "__main__":
    raise SystemExit(main())
