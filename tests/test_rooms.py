"""Imports point one way, rooms are few, functions are short and docstrings are sentences."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "vllm_kvcompress"
SCRIPTS = ROOT / "scripts"
# Each imports those before it alone.
ROOMS = (
    *("errors", "rounding", "options", "scheduling", "prompts", "config", "kernels", "policies"),
    *("cache", "attention", "compression", "metrics", "vllm_plugin", "tools", "cli"),
)
FILES = sorted(PACKAGE.rglob("*.py"))
CODE = [*FILES, *sorted(SCRIPTS.rglob("*.py"))]
MAX_LINES = 60  # of a function
MIN_CHARACTERS = 20  # of a docstring


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


def test_only_the_plugin_and_commands_import_vllm() -> None:
    for file in FILES:
        if room_of(file) in ("vllm_plugin", "cli"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [str(node.module)]
            assert "vllm" not in {name.partition(".")[0] for name in names}, file


def test_rooms_are_few() -> None:
    assert {room_of(file) for file in FILES} == {*ROOMS, "__init__"}
    assert len(list(PACKAGE.glob("*.py"))) <= 6


def modules_in(folder: Path, base: Path) -> dict[str, Path]:
    """The files of a folder by their module's name, which begins below `base`."""
    parts = {file: file.relative_to(base).with_suffix("").parts for file in folder.rglob("*.py")}
    return {".".join(names).removesuffix(".__init__"): file for file, names in parts.items()}


def imported_modules(file: Path, known: dict[str, Path]) -> Iterator[str]:
    """Those of the known modules that a file imports, in functions and for types, too."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names = (f"{node.module}.{alias.name}", str(node.module))
                yield from [name for name in names if name in known][:1]


@pytest.mark.parametrize("part", ["package", "scripts"])
def test_no_modules_import_each_other_in_a_circle(part: str) -> None:
    modules = modules_in(PACKAGE, ROOT)
    if part == "scripts":  # each folder of scripts is a place to import from
        folders = [SCRIPTS, *(folder for folder in SCRIPTS.iterdir() if folder.is_dir())]
        modules = {name: file for base in folders for name, file in modules_in(base, base).items()}
    graph = {name: set(imported_modules(file, modules)) for name, file in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_functions_are_short() -> None:
    """Triton files aside, since a kernel is one function."""
    too_long = {}
    for file in CODE:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if num_lines > MAX_LINES and not file.stem.endswith("_triton"):
                    too_long[f"{file.relative_to(ROOT)}: {node.name}"] = num_lines
    assert too_long == {}


def docstrings(file: Path) -> Iterator[tuple[str, str]]:
    """Docstrings of a module, its classes and functions, each with its place."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, documented) and (text := ast.get_docstring(node)) is not None:
            yield f"{file.relative_to(ROOT)}: {getattr(node, 'name', 'the module')}", text


def test_docstrings_are_sentences() -> None:
    """They begin with a verb or a noun; a private helper that needs none has none."""
    bad = {
        place: text.splitlines()[0]
        for file in (*CODE, *(ROOT / "tests").rglob("*.py"))
        for place, text in docstrings(file)
        if len(text) < MIN_CHARACTERS or text.startswith(("Of ", "As "))
    }
    assert bad == {}
