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
    (page.name, *key): rows
    for page in RESULTS.glob("*.md")
    for key, rows in reproduce.page_tables(page).items()
}
EXCEPTED = {(row["page"], heading) for row in EXCEPTIONS for heading in row["headings"]}


def test_every_table_of_the_results_has_a_command_or_a_reason() -> None:
    named = {(table.page, table.heading, table.number) for table in TABLES}
    measured = {key for key, rows in ON_PAGES.items() if reproduce.has_figures(rows)}
    left = {key for key in measured - named if key[:2] not in EXCEPTED}
    assert len(measured) > 80
    assert not left, "not in docs/results/tables.toml"


def test_what_is_named_exists() -> None:
    named = {(table.page, table.heading, table.number) for table in TABLES}
    assert named <= set(ON_PAGES)
    assert {key[:2] for key in ON_PAGES} >= EXCEPTED
    assert not {key[:2] for key in named} & EXCEPTED
    assert all(row["reason"] for row in EXCEPTIONS)
    assert max(Counter(table.name for table in TABLES).values()) == 1


@pytest.mark.parametrize(
    "table", [each for each in TABLES if each.columns], ids=lambda table: table.name
)
def test_columns_and_rows_are_those_of_the_page(table: Table) -> None:
    rows = ON_PAGES[table.page, table.heading, table.number]
    assert {len(table.columns)} == {len(cells) for cells in rows}
    assert len(table.rows) in (0, len(rows))
    if len(table.made) > 1:
        names = tuple(str(Path(file).with_suffix("")) for file in table.made)
        assert all(path.startswith(names) for path in reproduce.stored_figures(table))


@pytest.mark.parametrize(
    "table", [each for each in TABLES if each.made], ids=lambda table: table.name
)
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
    assert any("{out}" in word for word in words) == bool(table.made)


def test_a_figure_that_is_missing_or_too_far_away_fails(tmp_path: Path, capsys) -> None:
    stored = tmp_path / "stored.json"
    stored.write_text(json.dumps({"a": {"mean": 1.0}, "b": {"mean": 2.0}, "c": 3}))
    near, exact = Tolerance("a/*", relative=0.1), Tolerance("b/*")
    table = Table("t", "p", "h", "true", ("made.json",), (near, exact), 1, "", stored=str(stored))
    made = tmp_path / "made.json"
    for a, b, fits in ((1.1, 2.0, True), (0.9, 2.0, True), (1.11, 2.0, False), (1.0, 2.1, False)):
        made.write_text(json.dumps({"a": {"mean": a}, "b": {"mean": b}}))
        assert reproduce.report(table, tmp_path) == fits
    made.write_text(json.dumps({"a": {"mean": 1.0}}))
    capsys.readouterr()
    assert not reproduce.report(table, tmp_path)
    assert "b/mean: stored 2, not measured" in capsys.readouterr().out


def test_nothing_to_compare_is_no_success(tmp_path: Path) -> None:
    stored = tmp_path / "stored.json"
    stored.write_text("{}")
    table = Table("t", "p", "h", "true", (stored.name,), (Tolerance("*"),), 1, "", str(stored))
    assert not reproduce.report(table, tmp_path)


@pytest.mark.parametrize(
    ("cell", "values"),
    [
        ("25.4%", [0.254]),
        ("**0.55x**", [0.55]),
        ("1,020", [1020]),
        ("-0.5", [-0.5]),
        ("67%, 2.2", [0.67, 2.2]),
        ("+0.003 (-0.010 to +0.020)", [0.003, -0.01, 0.02]),
        ("84 / *70*", [84, 70]),
        ("(loss 0.027)", []),
        ("-", []),
        ("", []),
    ],
)
def test_numbers_of_cells(cell: str, values: list[float]) -> None:
    assert reproduce.numbers(cell) == pytest.approx(values)


def test_a_page_is_compared_with_printed_tables_and_other_files(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(reproduce, "RESULTS", tmp_path)
    describes = "## H\n\n| a | b |\n|---|---|\n| x | see y 3 |\n\n"
    rows = "| `one` | **9 of 24** | 25%, 8 |\n| | 7 | |\n| other | 1 | |\n"
    (tmp_path / "page.md").write_text(f"{describes}|  | n | share |\n|---|---|---|\n{rows}")
    (tmp_path / "a.md").write_text("| s | n | m |\n|---|---|---|\n| `one` | 9 | 0.25 (8.5) |\n")
    (tmp_path / "b.json").write_text('{"rows": [{"setup": "one", "mode": "m", "score": 0.5}]}')
    table = Table(
        *("t", "page.md", "H", "true", ("a.md", "b.json")),
        *((Tolerance("*/m/2"), Tolerance("*")), 1, ""),
        number=2,
        columns=("", "{row}/n", "{row}/m | {row}/m/2"),
        rows=("a/rows/one", "", "b/rows/one"),
    )
    assert not reproduce.report(table, tmp_path)
    said = capsys.readouterr().out
    assert "a/rows/one/m/2: stored 8, measured 8.5" in said
    assert "b/rows/one/n: stored 1, not measured" in said
    assert "2 figures the same, 0 within tolerance, 2 off" in said
    score = Table(
        *("t", "page.md", "H", "true", ("b.json",), (Tolerance("*"),), 1, ""),
        number=2,
        columns=("", "m/score * 14", ""),
        rows=("", "one", ""),
    )
    assert reproduce.report(score, tmp_path)


def test_rows_of_eval_are_named_by_setup_and_mode() -> None:
    rows = [{"setup": "full", "mode": "text", "kept": 1.0, "ok": True, "spans": [2, 3]}]
    expected = {"rows/full/text/kept": 1.0}
    expected |= {"rows/full/text/spans/0": 2.0, "rows/full/text/spans/1": 3.0}
    assert dict(reproduce.flat({"rows": rows, "model": "m"})) == expected


def test_a_command_that_fails_is_told(tmp_path: Path) -> None:
    table = Table("t", "p", "h", "cd {models}; exit 3", (), (), 1, "")
    assert reproduce.run(table, tmp_path, tmp_path) == 3


def test_a_command_may_check_by_itself(tmp_path: Path, monkeypatch, capsys) -> None:
    for command, status in (("true", 0), ("false", 1)):
        table = Table("t", "p", "h", command, (), (), 1, "")
        monkeypatch.setattr(reproduce, "registry", lambda table=table: ([table], []))
        monkeypatch.setattr("sys.argv", ["reproduce.py", "t", "--out", str(tmp_path)])
        assert reproduce.main() == status
    assert "t: checked by the command" in capsys.readouterr().out
