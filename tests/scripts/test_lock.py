"""The locks of scripts/release/lock.sh: complete, one version per package, nothing for CUDA."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.scripts.local_index import normalized

ROOT = Path(__file__).parents[2]
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "nixl-cu13"}


def lines_of(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if not line.startswith("#")]


def pins_of(name: str) -> list[tuple[str, str]]:
    lines = lines_of(ROOT / "requirements" / f"{name}.lock")
    pins = [re.fullmatch(r"([a-z0-9-]+)==([\w.+]+)", line) for line in lines]
    assert all(pins), "plain pins alone"
    return [pin.groups() for pin in pins if pin]


@pytest.fixture(scope="module")
def locked() -> dict[str, str]:
    pins = [*pins_of("cpu"), *pins_of("dev")]
    assert len(dict(pins)) == len(pins), "no package is locked twice"
    return dict(pins)


def unmet(package: str, locked: dict[str, str]) -> list[str]:
    """Returns requirements of an installed package that the locks do not satisfy."""
    missing = []
    for requirement in map(Requirement, requires(package) or ()):
        name = normalized(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if name in LEFT_OUT:
            continue
        if not requirement.specifier.contains(locked.get(name, "0"), prereleases=True):
            missing.append(f"{package} needs {requirement}")
    return missing


def test_locks_hold_what_is_asked_for(locked: dict[str, str]) -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    asked = [line for name in ("cpu", "dev") for line in lines_of(ROOT / f"requirements/{name}.in")]
    for line in [*asked, *dependencies]:
        requirement = Requirement(line.split("#")[0])
        version = locked[normalized(requirement.name)]
        assert requirement.specifier.contains(version, prereleases=True), line


def test_locks_satisfy_every_installed_package(locked: dict[str, str]) -> None:
    """`--no-deps` installs exactly the locks, so a missing package would fail at run time."""
    assert [line for package in locked for line in unmet(package, locked)] == []


def test_nothing_is_locked_for_cuda_but_triton(locked: dict[str, str]) -> None:
    assert locked["torch"].endswith("+cpu")
    assert "triton" in locked
    assert [name for name in locked if name in LEFT_OUT or re.match("nvidia|cuda", name)] == []
