"""Imports point one way, and a folder's name says whether a line belongs there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "vllm_kvcompress"
# Each imports those before it alone.
ROOMS = (
    *("errors", "rounding", "options", "scheduling", "prompts", "config", "kernels", "policies"),
    *("cache", "attention", "compression", "metrics", "vllm_plugin", "tools", "cli"),
)
FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(file: Path) -> Iterator[str]:
    """Rooms that a file imports from, in functions and for types, too."""
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "absolute imports alone"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            package, *inner = name.split(".")
            if package == PACKAGE.name and inner and inner[0] in ROOMS:
                yield inner[0]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_one_way(file: Path) -> None:
    room = room_of(file)
    if room == "__init__":
        assert not list(imported_rooms(file))
        return
    allowed = ROOMS[: ROOMS.index(room) + 1]
    assert set(imported_rooms(file)) <= set(allowed)


def test_rooms_are_few() -> None:
    assert {room_of(file) for file in FILES} == {*ROOMS, "__init__"}
    assert len(list(PACKAGE.glob("*.py"))) <= 6
