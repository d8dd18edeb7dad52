"""The wheel holds the complete package, and nothing else of the repository."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from configparser import ConfigParser
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "vllm_kvcompress"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INFO = f"vllm_kvcompress-{PROJECT['version']}.dist-info"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # Without isolation and index nothing is downloaded.
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder)]
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", *options, str(ROOT)]
    subprocess.run(command, check=True, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    package = {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    about = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    names = zipfile.ZipFile(wheel).namelist()
    assert sorted(names) == sorted(package | {f"{INFO}/{name}" for name in about})
    assert "vllm_kvcompress/py.typed" in names
    assert any(name.endswith("haystack.txt") for name in names)  # data of eval, not only modules


def test_wheel_holds_licence_and_entry_points(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = message_from_bytes(archive.read(f"{INFO}/METADATA"))
        licence = archive.read(f"{INFO}/licenses/LICENSE")
        entry_points = ConfigParser()
        entry_points.read_string(archive.read(f"{INFO}/entry_points.txt").decode())
    assert metadata["License-Expression"] == "Apache-2.0"
    assert licence == (ROOT / "LICENSE").read_bytes()
    assert b"Apache License" in licence
    declared = {"console_scripts": PROJECT["scripts"], **PROJECT["entry-points"]}
    assert {name: dict(entry_points[name]) for name in entry_points.sections()} == declared


def test_command_in_the_wheel_starts_without_torch_and_vllm(wheel: Path, tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(wheel)!r})
import vllm_kvcompress
assert vllm_kvcompress.__file__.startswith({str(wheel)!r})
from vllm_kvcompress.cli.main import main
try:
    main(["--version"])
finally:
    assert not {{"torch", "vllm"}} & set(sys.modules)
"""
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert PROJECT["version"] in shown.stdout
