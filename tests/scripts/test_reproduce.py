"""scripts/reproduce.py and docs/results/tables.toml: every table is named, and figures compare."""

from __future__ import annotations

import json
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import pytest

import reproduce
from reproduce import RESULTS, Table, Tolerance

TABLES, EXCEPTIONS = reproduce.registry()
ON_PAGES = {
    (page.name, heading)
    for page in RESULTS.glob("*.md")
    for heading, rows in reproduce.page_tables(page)
    if rows
}


def test_every_table_of_the_results_has_a_command_or_a_reason() -> None:
    named = {(table.page, table.heading) for table in TABLES}
    named |= {(row["page"], heading) for row in EXCEPTIONS for heading in row["headings"]}
    assert len(ON_PAGES) > 80
    assert not ON_PAGES - named, "not in docs/results/tables.toml"


def test_what_is_named_exists() -> None:
    named = [(table.page, table.heading) for table in TABLES]
    excepted = [(row["page"], heading) for row in EXCEPTIONS for heading in row["headings"]]
    assert set(named + excepted) <= ON_PAGES
    assert not set(named) & set(excepted)
    assert all(row["reason"] for row in EXCEPTIONS)
    assert max(Counter(table.name for table in TABLES).values()) == 1


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_figures_are_stored_and_every_pattern_finds_some(table: Table) -> None:
    paths = list(reproduce.stored_figures(table))
    found = [path for path in paths if any(fnmatch(path, t.figures) for t in table.tolerances)]
    assert found
    made = dict.fromkeys(paths, 0.0) | reproduce.stored_figures(table)
    assert {verdict for verdict, _ in reproduce.compared(table, made)} == {"same"}


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_commands_name_scripts_of_the_repository(table: Table) -> None:
    words = table.command.split()
    scripts = [word for word in words if word.endswith(".py")]
    assert scripts or "vllm-kvcompress" in words
    assert all((reproduce.ROOT / script).exists() for script in scripts)
    assert any("{out}" in word for word in words)


def test_a_figure_that_is_missing_or_too_far_away_fails(tmp_path: Path, capsys) -> None:
    stored = tmp_path / "stored.json"
    stored.write_text(json.dumps({"a": {"mean": 1.0}, "b": {"mean": 2.0}, "c": 3}))
    near, exact = Tolerance("a/*", relative=0.1), Tolerance("b/*")
    table = Table("t", "p", "h", "true", "made.json", (near, exact), 1, "", stored=str(stored))
    made = tmp_path / "made.json"
    for a, b, fits in ((1.1, 2.0, True), (0.9, 2.0, True), (1.11, 2.0, False), (1.0, 2.1, False)):
        made.write_text(json.dumps({"a": {"mean": a}, "b": {"mean": b}}))
        assert reproduce.report(table, made) == fits
    made.write_text(json.dumps({"a": {"mean": 1.0}}))
    capsys.readouterr()
    assert not reproduce.report(table, made)
    assert "b/mean: stored 2, not measured" in capsys.readouterr().out


def test_nothing_to_compare_is_no_success(tmp_path: Path) -> None:
    stored = tmp_path / "stored.json"
    stored.write_text("{}")
    table = Table("t", "p", "h", "true", "", (Tolerance("*"),), 1, "", stored=str(stored))
    assert not reproduce.report(table, stored)


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("25.4%", 0.254),
        ("**0.55x**", 0.55),
        ("1,020", 1020),
        ("-0.5", -0.5),
        ("-", None),
        ("", None),
    ],
)
def test_numbers_of_cells(cell: str, value: float | None) -> None:
    found = reproduce.number(cell)
    assert found is None if value is None else found == pytest.approx(value)


def test_rows_of_eval_are_named_by_setup_and_mode() -> None:
    rows = [{"setup": "full", "mode": "text", "kept": 1.0, "ok": True, "spans": [2, 3]}]
    expected = {"rows/full/text/kept": 1.0}
    expected |= {"rows/full/text/spans/0": 2.0, "rows/full/text/spans/1": 3.0}
    assert dict(reproduce.flat({"rows": rows, "model": "m"})) == expected


def test_a_command_that_fails_is_told(tmp_path: Path) -> None:
    table = Table("t", "p", "h", "cd {models}; exit 3", "", (), 1, "")
    assert reproduce.run(table, tmp_path, tmp_path) == 3
