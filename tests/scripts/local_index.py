"""Package indexes in folders, with tiny wheels made on the spot, for tests of the set-up."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Sequence
from pathlib import Path


def normalized(name: str) -> str:
    """Returns a distribution's name in the spelling of indexes."""
    return re.sub(r"[-_.]+", "-", name).lower()


def write_wheel(
    folder: Path,
    name: str,
    version: str,
    requires: Sequence[str] = (),
    files: dict[str, str] | None = None,
) -> Path:
    """Writes a pure wheel.

    Args:
        folder: where to.
        name: of the distribution, spelled as in file names.
        version: of the distribution.
        requires: its dependencies.
        files: contents by path; by default one module that says its version.
    """
    info = f"{name}-{version}.dist-info"
    contents = {
        **({f"{name}.py": f"VERSION = {version!r}\n"} if files is None else files),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + "".join(f"Requires-Dist: {requirement}\n" for requirement in requires),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*contents, f"{info}/RECORD"])
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for member, text in {**contents, f"{info}/RECORD": record}.items():
            wheel.writestr(member, text)
    return path


def add_package(
    index: Path,
    name: str,
    version: str,
    requires: Sequence[str] = (),
    files: dict[str, str] | None = None,
) -> None:
    """Adds a wheel to an index that pip can be pointed at, as folders on this machine."""
    folder = index / normalized(name)
    folder.mkdir(parents=True, exist_ok=True)
    write_wheel(folder, name, version, requires, files)
    links = "".join(f'<a href="{wheel.name}">{wheel.name}</a>' for wheel in folder.glob("*.whl"))
    (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
