#!/usr/bin/env python3
"""Runs the command behind a table of docs/results, and compares what it says with what is stored.

    python scripts/reproduce.py --list
    python scripts/reproduce.py TABLE [--models DIR] [--out DIR] [--compare-only]

docs/results/tables.toml names the tables, their commands, figures and tolerances, and which tables
have no such command. Figures are those of JSON files and of tables that commands print in Markdown.
Ends with 1 if a figure is missing or differs by more than its tolerance, or the command fails.
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
NUMBER = re.compile(r"(?<![\w.])(-?(?:\d[\d,]*(?:\.\d+)?|\.\d+))(%?)")


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
        made: the files that it writes in `{out}`, JSON or tables in Markdown. Paths of figures
            begin with the file's name, without its ending, where there are several. None: the
            command checks by itself what the table says, and ends with an error if it fails.
        tolerances: of the figures that are compared; the first that fits a path counts.
        minutes: about how long it takes on two cores.
        needs: models, other environments, instruction sets.
        stored: a JSON file in docs/results; without it the page's own cells are compared.
        number: which one of several tables under the heading.
        columns: for the page's cells, by column: the path of its figure, where `{row}` is the row's
            name ("FIELD": rows/{row}/FIELD), or "". "A | B" are the first and the second number of
            a cell; "A * 100" is A in another unit.
        rows: what `{row}` stands for, by row, where that is not the page's name; "": left out.
    """

    name: str
    page: str
    heading: str
    command: str
    made: tuple[str, ...]
    tolerances: tuple[Tolerance, ...]
    minutes: float
    needs: str
    stored: str = ""
    number: int = 1
    columns: tuple[str, ...] = field(default=())
    rows: tuple[str, ...] = field(default=())


def registry() -> tuple[list[Table], list[dict[str, Any]]]:
    """Reads the tables that have a command, and the exceptions: page, headings, reason."""
    data = tomllib.loads((RESULTS / "tables.toml").read_text())
    tables = []
    for row in data["table"]:
        row["tolerances"] = tuple(Tolerance(**each) for each in row["tolerances"])
        made = row["made"]
        row["made"] = tuple(made) if isinstance(made, list) else (made,)
        tables.append(
            Table(**row | {name: tuple(row.get(name, ())) for name in ("columns", "rows")})
        )
    return tables, data["exception"]


def tables_of(text: str) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yields each table of a text: the heading above it, its head, and the cells of its rows."""
    heading, before, head, rows = "", "", [""], None
    for line in [*map(str.strip, text.splitlines()), ""]:
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if RULE.fullmatch(line):
            head, rows = cells_of(before), []
        elif rows is not None and line.startswith("|"):
            rows.append(cells_of(line))
        elif rows is not None:
            yield heading, head, rows
            rows = None
        before = line


def cells_of(line: str) -> list[str]:
    """Splits a line of a table."""
    cells = re.split(r"(?<!\\)\|", line.removeprefix("|").removesuffix("|"))
    return [cell.strip() for cell in cells]


def page_tables(page: Path) -> dict[tuple[str, int], list[list[str]]]:
    """Returns the rows of a page's tables by heading and number under it."""
    tables: dict[tuple[str, int], list[list[str]]] = {}
    for heading, _, rows in tables_of(page.read_text()):
        number = 1 + sum(heading == other for other, _ in tables)
        tables[heading, number] = rows
    return tables


def flat(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Yields the numbers of a JSON value by path; a row with a setup, and a mode, is named so."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from flat(each, f"{path}/{key}" if path else key)
    elif isinstance(value, list):
        for index, each in enumerate(value):
            names = (
                [each[key] for key in ("setup", "mode") if key in each]
                if isinstance(each, dict)
                else []
            )
            key = "/".join(names) or str(index)
            yield from flat(each, f"{path}/{key}" if path else key)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, float(value)


def numbers(cell: str) -> list[float]:
    """Returns the numbers of a cell that begins with one, percentages as shares."""
    found = list(NUMBER.finditer(cell))
    if not found or re.search(r"\w", cell[: found[0].start()]):
        return []
    return [float(each[1].replace(",", "")) / (100 if each[2] else 1) for each in found]


def has_figures(rows: list[list[str]]) -> bool:
    """Says whether a table measures, and does not only describe."""
    return any(numbers(cell) for cells in rows for cell in cells[1:])


def name_of(cell: str) -> str:
    """Returns a row's name without its marks."""
    return re.sub(r"[`*]", "", cell)


def stored_figures(table: Table) -> dict[str, float]:
    """Returns the figures to compare with, by path."""
    if table.stored:
        return dict(flat(json.loads((RESULTS / table.stored).read_text())))
    figures: dict[str, float] = {}
    page = page_tables(RESULTS / table.page)[table.heading, table.number]
    names = table.rows or [name_of(cells[0]) for cells in page]
    for name, cells in zip(names, page, strict=True):
        for column, cell in zip(table.columns, cells, strict=False):
            for figure, value in zip(column.split(" | "), numbers(cell), strict=False):
                if not (name and figure):
                    continue
                path, _, factor = figure.partition(" * ")
                path = path if "{row}" in path else f"rows/{{row}}/{path}"
                figures.setdefault(path.replace("{row}", name), value / float(factor or 1))
    return figures


def made_figures(table: Table, out: Path) -> dict[str, float]:
    """Returns the figures that a command has written, by path."""
    figures: dict[str, float] = {}
    for file in table.made:
        text, prefix = (out / file).read_text(), f"{Path(file).with_suffix('')}/"
        found = printed(text) if file.endswith(".md") else flat(json.loads(text))
        for path, value in found:
            figures.setdefault(path if len(table.made) == 1 else prefix + path, value)
    return figures


def printed(text: str) -> Iterator[tuple[str, float]]:
    """Yields a printed table's numbers by path: rows/ROW/COLUMN, a cell's second one with /2."""
    for _, head, rows in tables_of(text):
        for cells in rows:
            for column, cell in zip(head, cells, strict=False):
                for place, value in enumerate(numbers(cell), start=1):
                    path = f"rows/{name_of(cells[0])}/{name_of(column)}"
                    yield (path if place == 1 else f"{path}/{place}"), value


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


def report(table: Table, out: Path) -> bool:
    """Prints figures that are off and how many are not; returns whether all are near enough."""
    if not table.made:
        print(f"{table.name}: checked by the command")
        return True
    verdicts = list(compared(table, made_figures(table, out)))
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
    return 0 if report(table, out) else 1


if __name__ == "__main__":
    raise SystemExit(main())
